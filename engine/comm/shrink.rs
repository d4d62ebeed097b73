//! [`Comm::shrink`]: the survivors of a failure go on in a communicator of their own.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Comm;
use super::runtime::{LOOK, Ticks};
use super::world::{Meeting, Verdict};
use crate::error::{Error, Lost};
use crate::forked;
use crate::types::Rank;

impl Comm {
    /// Goes on without the ranks that are lost. Gives a communicator of the survivors, in their old order and renumbered from 0, and a
    /// [`Verdict`] that says who survived and who is lost. As `MPIX_Comm_revoke` and `MPIX_Comm_shrink` of ULFM in one.
    ///
    /// Every survivor calls it once, when a call has failed. The first rank that shrinks ends this communicator on all ranks, so a rank
    /// that has noticed nothing yet finds its next call failing, and shrinks then. Before this returns, all operations in flight here have
    /// ended and given their buffers back, unless the deadline comes first. The new communicator is of the same world: it needs no address,
    /// no token and no launcher. It makes no difference which ranks died (rank 0 or a whole host, too), and other groups of survivors stay
    /// as they are. If nobody was lost, as after a timeout or an [`abort`](Self::abort), all ranks go on.
    ///
    /// ```no_run
    /// # use allstream::{Comm, Error};
    /// # async fn train(mut comm: Comm, mut weights: Vec<f32>) -> Result<(), Error> {
    /// # fn gradients(_: &[f32], _: usize, _: usize) -> Vec<f32> { vec![] }
    /// let mut step = 0;
    /// while step < 1000 {
    ///     let grads = gradients(&weights, comm.rank(), comm.size());
    ///     match comm.all_reduce(grads).await {
    ///         Ok(sum) => {
    ///             weights.iter_mut().zip(sum).for_each(|(w, g)| *w -= 0.1 * g);
    ///             step += 1;
    ///         }
    ///         Err(failed) => {
    ///             eprintln!("step {step}: {failed}");
    ///             let (smaller, verdict) = comm.shrink().await?;
    ///             eprintln!("{} ranks go on without {:?}", smaller.size(), verdict.lost);
    ///             comm = smaller;
    ///             // Some ranks may have taken this step and others not: all go on from the weights and the step of rank 0.
    ///             let state = ([weights.clone()], [vec![step]]);
    ///             let ([new], [at]) = comm.broadcast_list(state, 0).await?;
    ///             (weights, step) = (new, at[0]);
    ///         }
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// The call returns on the survivors even if ranks die while it runs. A rank that dies after the verdict has counted it as a survivor is
    /// lost in the new communicator: the next call there fails and names it, and that communicator can be shrunk in its turn. All survivors
    /// get the same verdict, in ranks of this communicator. The new communicator takes over what
    /// [`set_deterministic`](Self::set_deterministic) has set here; devices have to be bound to it anew. Other handles of this communicator
    /// ([`share`](Self::share)) stay dead. As this takes `self`, a struct can hold an `Option<Comm>` and take the communicator out of that.
    ///
    /// A launcher that ends all processes when one has failed leaves nobody to shrink: start the processes with
    /// `allstream run --on-failure keep`.
    ///
    /// # Errors
    /// [`Error::NoVerdict`] at the communicator's deadline: it names the ranks that live and have not called `shrink`, for which the others
    /// wait until then. Buffers of operations in flight come back all the same, by their `Work`s. If the others have the new communicator by then,
    /// their next call there fails and names this rank. [`Error::PeerLost`] with this rank's own number where the others have declared it
    /// lost. [`Error::System`] when this rank has no memory for another communicator: the others hear that it does not come.
    pub async fn shrink(self) -> Result<(Comm, Verdict), Error> {
        let timeout = self.0.endpoint.config.timeout;
        self.shrink_within(timeout).await
    }

    /// [`shrink`](Self::shrink) with this timeout in place of the communicator's.
    ///
    /// # Errors
    /// As of `shrink`.
    pub async fn shrink_within(self, timeout: Duration) -> Result<(Comm, Verdict), Error> {
        forked::check()?;
        let (endpoint, world) = (self.0.endpoint.clone(), self.0.membership.world.clone());
        let by = self.rank();
        endpoint.fail(Error::aborted(by, "it called shrink, to go on without the lost ranks"));
        // If this call ends early, the drop of `meeting` tells the others, so that they do not wait for this rank.
        let mut meeting = Meeting::new(&world, &endpoint);
        let id = meeting.id;
        let end = world.runtime.now() + timeout;
        let verdict = world.agree(&endpoint, Some(id), true, timeout);
        let verdict = std::future::poll_fn(|cx| verdict.poll(cx)).await;
        let verdict = verdict.ok_or_else(|| Error::system("shrink", "the verdict was taken (a bug)"))??;

        let members: Vec<Rank> = verdict.survivors.iter().map(|r| endpoint.config.members[*r]).collect();
        let mut proposal = world.propose(id, members.clone()).await?;
        let said = meeting.come(proposal.row(), &verdict.survivors, &endpoint, (end, timeout)).await?;
        let rows: Vec<_> = said.iter().map(|row| row.unwrap_or_default()).collect();
        let (made, rings) = proposal.accept(next_name(&endpoint.config.name), &rows)?;
        meeting.has_made();
        made.deterministic.store(endpoint.deterministic.load(Ordering::Relaxed), Ordering::Relaxed);
        if let Some(rank) = said.iter().position(Option::is_none) {
            made.fail(Error::lost(rank, Lost::Left));
        }
        let comm = Comm::of(made, self.0.membership.clone(), Some(rings));
        if endpoint.submitted.running() > 0 {
            let mut ticks = Ticks::new(&world.runtime, LOOK)?;
            while endpoint.submitted.running() > 0 && world.runtime.now() < end {
                ticks.next().await?;
            }
        }
        Ok((comm, verdict))
    }
}

/// The name of the communicator that follows: `world~1` follows `world`, and `world~2` follows `world~1`.
fn next_name(name: &str) -> String {
    let numbered = name.rsplit_once('~').and_then(|(stem, number)| Some((stem, number.parse::<u64>().ok()?)));
    let (stem, number) = numbered.unwrap_or((name, 0));
    format!("{stem}~{}", number + 1)
}
