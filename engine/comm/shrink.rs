//! [`Comm::shrink`]: the survivors of a failure go on in a communicator of their own.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Comm;
use super::runtime::Ticks;
use super::world::{Meeting, Verdict};
use crate::error::{Error, Lost};
use crate::forked;
use crate::types::Rank;

/// How often it is looked whether what was in flight has failed.
const LOOK: Duration = Duration::from_micros(200);

impl Comm {
    /// Goes on without the ranks that are lost: a communicator of the survivors, in their old order and renumbered from 0, and
    /// who they are. As `MPIX_Comm_revoke` and `MPIX_Comm_shrink` of ULFM in one.
    ///
    /// Every survivor calls it, once, when a call has failed; those that have noticed nothing yet learn of it by their next call, which
    /// fails, since the first rank that shrinks ends this communicator. What was in flight here has failed, and its buffers are back,
    /// before this returns. The new communicator is of the same world: no address, no token and no launcher is needed, it makes no
    /// difference which ranks died (rank 0 or a whole host, too), and other groups of survivors stay as they are. Where nobody was lost,
    /// after a timeout or an [`abort`](Self::abort), all ranks go on.
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
    ///             // Some may have taken this step and others not: all go on from the state of the first, its step included.
    ///             let state = ([weights.clone()], [vec![step]]);
    ///             let ([new], [at]) = comm.broadcast_list(state, 0).await?;
    ///             (weights, step) = (new, at[0]);
    ///         }
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Ranks that die while it runs make no difference to the others' return: a rank counted among the survivors that dies later, however
    /// little, is lost in the new communicator, whose next call fails and names it, and which may be shrunk in its turn. All survivors
    /// return the same [`Verdict`], whose ranks are those of this communicator. Its setting of
    /// [`set_deterministic`](Self::set_deterministic) goes on; devices are bound anew. Other handles of this communicator
    /// ([`share`](Self::share)) stay dead. A struct that holds its communicator holds an `Option<Comm>`, from which it takes it.
    ///
    /// Under a launcher that ends all processes when one has failed, nobody is left to shrink: start them with
    /// `allstream run --on-failure keep`.
    ///
    /// # Errors
    /// [`Error::NoVerdict`] at the communicator's deadline, naming the ranks that live and have not called it: they are waited for, since
    /// they may. [`Error::PeerLost`] with this rank's own number where the others have declared it lost. [`Error::System`] when this
    /// rank has no memory for another communicator: the others hear of it.
    pub async fn shrink(self) -> Result<(Comm, Verdict), Error> {
        let timeout = self.0.endpoint.config.timeout;
        self.shrink_within(timeout).await
    }

    /// [`shrink`](Self::shrink) with a deadline of its own.
    ///
    /// # Errors
    /// As of `shrink`.
    pub async fn shrink_within(self, timeout: Duration) -> Result<(Comm, Verdict), Error> {
        forked::check()?;
        let (endpoint, world) = (self.0.endpoint.clone(), self.0.membership.world.clone());
        let by = self.rank();
        endpoint.fail(Error::aborted(by, "it goes on without those that are lost (shrink)"));
        // Dropped on any way out before the end, it tells the others not to wait.
        let meeting = Meeting::new(&world, &endpoint);
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

/// `world~2` after `world~1`, which came after `world`.
fn next_name(name: &str) -> String {
    let numbered = name.rsplit_once('~').and_then(|(stem, number)| Some((stem, number.parse::<u64>().ok()?)));
    let (stem, number) = numbered.unwrap_or((name, 0));
    format!("{stem}~{}", number + 1)
}
