//! [`Comm`]: a rank's handle on a group.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::links::block_bytes;
use super::world::{Defaults, Hub, Transport, World};
use super::{Batch, Call, Message, Work};
use crate::error::Error;
#[cfg(doc)]
use crate::error::Failed;
use crate::exec::{Endpoint, lane};
use crate::group::message::CommId;
use crate::group::{Locality, Mesh, Rendezvous, host, runtime};
use crate::link::SLOT;
use crate::link::region::Region;
use crate::mem::{Buf, Event, HostStream};
use crate::types::{Algo, Rank, ReduceOp};

/// How long dropping a communicator waits for what it still has to send.
const FLUSH: Duration = Duration::from_secs(1);

/// How long `close` waits for the other ranks to close too.
const CLOSING: Duration = Duration::from_secs(2);

/// This rank's membership in its world: the last handle that goes says goodbye.
struct Membership {
    world: Arc<World>,
    mesh: Option<Arc<Mesh>>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.world.leave();
        if let Some(mesh) = &self.mesh {
            mesh.leave_blocking(self.world.loss(), FLUSH);
        }
    }
}

/// What joining makes, on the control thread.
type Made = Arc<Mutex<Option<Result<(Arc<World>, Arc<Endpoint>), Error>>>>;

struct Handle {
    endpoint: Arc<Endpoint>,
    membership: Arc<Membership>,
    /// Groups made from this one so far: all members count alike, so names agree.
    children: Mutex<u64>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.endpoint.close();
        let end = Instant::now() + FLUSH;
        // Peers depend on what was submitted here: give it a bounded time to leave.
        while self.endpoint.cause().is_none() && !self.endpoint.is_quiet() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// A rank's handle on a group: the collectives.
///
/// Every rank makes the same calls in the same order. A call submits at once and returns a [`Work`]; options are given
/// first: `comm.op(ReduceOp::Max).timeout(five_seconds).all_reduce(v)`.
///
/// Failure of one operation (a timeout, a lost rank, a disagreement, [`abort`](Comm::abort)) is the end of the whole
/// communicator on all ranks: later calls return the same cause. Other communicators are not touched, unless they lost
/// the same rank.
///
/// Dropping it says goodbye to the group after waiting, at most a second, for what is still to be sent; prefer
/// [`close`](Comm::close), which reports.
pub struct Comm(Arc<Handle>);

/// What a rank holds for communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Operations of this communicator that are queued or running.
    pub in_flight: usize,
    /// Bytes of staging slots in use, by all communicators of this rank's world.
    pub staging_bytes: usize,
    /// The most that can be, whatever the number of communicators.
    pub staging_limit: usize,
}

/// A [`Comm`] to be held in several places: `Clone + Send + Sync`, calls through `&self`.
///
/// Calls from several threads are ordered by a lock that is held to submit only; all ranks must still make the same
/// calls in the same order.
#[derive(Clone)]
pub struct SharedComm(Arc<Handle>);

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm({}, rank {} of {})", self.0.endpoint.config.name, self.rank(), self.size())
    }
}

impl fmt::Debug for SharedComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedComm({}, rank {} of {})", self.0.endpoint.config.name, self.rank(), self.size())
    }
}

/// The calls, on `Comm` through `&mut self` and on `SharedComm` through `&self`.
macro_rules! calls {
    ($type:ty, $me:ident, [$($by:tt)+]) => {
        impl $type {
            /// This rank's side of the group, and its world.
            pub(super) fn place(&$me) -> (&Arc<Endpoint>, &Arc<World>) {
                (&$me.0.endpoint, &$me.0.membership.world)
            }

            /// This rank in the group, `0..size()`.
            pub fn rank(&$me) -> Rank {
                $me.0.endpoint.config.rank
            }

            /// Ranks in the group.
            pub fn size(&$me) -> usize {
                $me.0.endpoint.size()
            }

            /// The group's name.
            pub fn name(&$me) -> &str {
                &$me.0.endpoint.config.name
            }

            /// What this rank holds for communication right now.
            pub fn stats(&$me) -> Stats {
                let (slots, limit) = $me.0.membership.world.around.region.slots();
                Stats {
                    in_flight: $me.0.endpoint.in_flight(),
                    staging_bytes: slots * SLOT,
                    staging_limit: limit * SLOT,
                }
            }

            /// The cause for which this communicator is dead, if it is.
            ///
            /// # Errors
            /// That cause.
            pub fn check(&$me) -> Result<(), Error> {
                $me.0.endpoint.cause().map_or(Ok(()), Err)
            }

            /// Ends this communicator on all ranks: operations in flight and later calls fail with
            /// [`Error::Aborted`]. Its siblings stay.
            pub fn abort(&$me, reason: impl Into<String>) {
                $me.0.endpoint.fail(Error::Aborted { by: $me.rank(), reason: reason.into() });
            }

            /// A call with the default options.
            pub fn call($($by)+ $me) -> Call<'_> {
                Call::new(&$me.0.endpoint, $me.0.membership.world.defaults.algo)
            }

            /// The reduction of the next call (default: sum).
            pub fn op($($by)+ $me, op: ReduceOp) -> Call<'_> {
                $me.call().op(op)
            }

            /// The deadline of the next call. See [`Call::timeout`].
            pub fn timeout($($by)+ $me, timeout: Duration) -> Call<'_> {
                $me.call().timeout(timeout)
            }

            /// The algorithm of the next call; the same on all ranks.
            pub fn algo($($by)+ $me, algo: Algo) -> Call<'_> {
                $me.call().algo(algo)
            }

            /// The next call starts only after what `stream` holds now.
            pub fn on($($by)+ $me, stream: &HostStream) -> Call<'_> {
                $me.call().on(stream)
            }

            /// The next call starts only after `event`.
            pub fn after($($by)+ $me, event: Event) -> Call<'_> {
                $me.call().after(event)
            }

            /// The tag of the next message (default: 0).
            pub fn tag($($by)+ $me, tag: u32) -> Call<'_> {
                $me.call().tag(tag)
            }

            /// Every rank ends with the reduction of all ranks' buffers, in place. All ranks get the same bits.
            ///
            /// # Errors
            /// [`Failed`] with the buffer, whose contents are then unspecified: [`Error::Mismatch`] if lengths, types,
            /// reductions or algorithms differ, [`Error::Timeout`], [`Error::PeerLost`], [`Error::Aborted`],
            /// [`Error::Invalid`] where the reduction is not defined on the type. So for every collective.
            pub fn all_reduce<B: Buf>($($by)+ $me, buf: B) -> Work<B> {
                $me.call().all_reduce(buf)
            }

            /// [`all_reduce`](Self::all_reduce) of `input` into `output`, of the same length. The input is unchanged.
            pub fn all_reduce_into<I: Buf, O: Buf<Elem = I::Elem>>($($by)+ $me, input: I, output: O) -> Work<(I, O)> {
                $me.call().all_reduce_into(input, output)
            }

            /// [`all_reduce`](Self::all_reduce) into a new vector. The input comes back only on failure.
            pub fn all_reduce_new<I: Buf>($($by)+ $me, input: I) -> Work<Vec<I::Elem>, I> {
                $me.call().all_reduce_new(input)
            }

            /// Every rank ends with the root's buffer. Lengths and types are the same on all ranks.
            pub fn broadcast<B: Buf>($($by)+ $me, buf: B, root: Rank) -> Work<B> {
                $me.call().broadcast(buf, root)
            }

            /// [`broadcast`](Self::broadcast) of the root's `input` into every rank's `output`. The others' inputs are
            /// not looked at.
            pub fn broadcast_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                root: Rank,
            ) -> Work<(I, O)> {
                $me.call().broadcast_into(input, output, root)
            }

            /// The root ends with the reduction of all ranks' buffers; the others' are unchanged.
            pub fn reduce<B: Buf>($($by)+ $me, buf: B, root: Rank) -> Work<B> {
                $me.call().reduce(buf, root)
            }

            /// [`reduce`](Self::reduce) into the root's `output`, of its input's length. The others' outputs are not
            /// looked at.
            pub fn reduce_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                root: Rank,
            ) -> Work<(I, O)> {
                $me.call().reduce_into(input, output, root)
            }

            /// All ranks' buffers, `size() * input.len()` elements in rank order, in a new vector on every rank.
            pub fn all_gather<I: Buf>($($by)+ $me, input: I) -> Work<Vec<I::Elem>, I> {
                $me.call().all_gather(input)
            }

            /// [`all_gather`](Self::all_gather) into `output`, of `size() * input.len()` elements.
            pub fn all_gather_into<I: Buf, O: Buf<Elem = I::Elem>>($($by)+ $me, input: I, output: O) -> Work<(I, O)> {
                $me.call().all_gather_into(input, output)
            }

            /// [`all_gather`](Self::all_gather) in place: this rank's block, at `rank() * len / size()`, is its input.
            pub fn all_gather_in_place<B: Buf>($($by)+ $me, buf: B) -> Work<B> {
                $me.call().all_gather_in_place(buf)
            }

            /// The reduction of all ranks' `input`, of which rank r gets block r: `input.len() / size()` elements, in a
            /// new vector. The length is a multiple of `size()`.
            pub fn reduce_scatter<I: Buf>($($by)+ $me, input: I) -> Work<Vec<I::Elem>, I> {
                $me.call().reduce_scatter(input)
            }

            /// [`reduce_scatter`](Self::reduce_scatter) into `output`, of `input.len() / size()` elements.
            pub fn reduce_scatter_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
            ) -> Work<(I, O)> {
                $me.call().reduce_scatter_into(input, output)
            }

            /// [`reduce_scatter`](Self::reduce_scatter) in place: the result is in this rank's block, at
            /// `rank() * len / size()`; the other blocks are unspecified.
            pub fn reduce_scatter_in_place<B: Buf>($($by)+ $me, buf: B) -> Work<B> {
                $me.call().reduce_scatter_in_place(buf)
            }

            /// Finishes on no rank before every rank has called.
            pub fn barrier($($by)+ $me) -> Work<()> {
                $me.call().barrier()
            }

            /// Sends `buf` to a rank, which receives with the same length, type and tag. Messages of one (sender,
            /// receiver, tag) are matched in order; different tags are independent.
            ///
            /// Up to 4 KB (while the receiver has not 32 such waiting) it finishes without its `recv`; a larger one
            /// finishes when it was received. So two ranks that both *await* a large `send` before they `recv` wait
            /// for each other until the deadline, whose error says so: submit both, or use [`batch`](Self::batch).
            pub fn send<B: Buf>($($by)+ $me, buf: B, to: Rank) -> Work<B> {
                $me.call().send(buf, to)
            }

            /// Receives into `buf` what a rank sends.
            pub fn recv<B: Buf>($($by)+ $me, buf: B, from: Rank) -> Work<B> {
                $me.call().recv(buf, from)
            }

            /// Several messages in flight together.
            pub fn batch<B: Buf>($($by)+ $me, messages: impl IntoIterator<Item = Message<B>>) -> Batch<B> {
                $me.call().batch(messages)
            }
        }
    };
}

calls!(Comm, self, [&mut]);
calls!(SharedComm, self, [&]);

impl Comm {
    /// Joins the world that `rendezvous` names; returns when all ranks are there.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] naming the ranks that did not come by the deadline; [`Error::Refused`] when tokens or
    /// versions differ.
    pub async fn connect(rendezvous: Rendezvous) -> Result<Comm, Error> {
        let defaults = Defaults::from_env()?;
        let lane = lane()?;
        let region = Arc::new(Region::shared()?);
        let mut offers = Vec::new();
        for fd in region.fd().into_iter().chain([&**lane.bell()]) {
            offers
                .push(fd.try_clone().map_err(|e| Error::system("offer this rank's region to its peers", e))?);
        }
        let made: Made = Arc::default();
        let place = made.clone();
        let mesh = Mesh::join(rendezvous, offers, move |mesh| {
            let near = |peer: &Option<crate::group::PeerInfo>| {
                // Ourselves: never looked at.
                peer.as_ref().map_or(Locality::SameProcess, |p| p.locality)
            };
            let localities = mesh.peers().iter().map(near).collect();
            let transport = Transport::Mesh(Arc::downgrade(mesh));
            let who = (mesh.rank(), mesh.size(), mesh.world());
            let world = World::new(who, transport, region, lane, localities, defaults);
            *place.lock() = Some(world.world_endpoint().map(|endpoint| (world.clone(), endpoint)));
            world
        })
        .await?;
        let missing = || Err(Error::system("join the world", "no communicator was made (a bug)"));
        let made = made.lock().take().unwrap_or_else(missing);
        let (world, endpoint) = made?;
        Ok(Comm::of(endpoint, Arc::new(Membership { world, mesh: Some(mesh) })))
    }

    /// A group of `n` ranks in this process, in rank order: one for each thread or task.
    ///
    /// # Errors
    /// [`Error::Invalid`] for `n == 0`; [`Error::System`] when the system has no memory or threads to give.
    pub fn local(n: usize) -> Result<Vec<Comm>, Error> {
        if n == 0 {
            return Err(Error::invalid("local", "a group has at least one rank, found n = 0"));
        }
        let defaults = Defaults::from_env()?;
        let (lane, id) = (lane()?, host::random::<16>()?);
        let hub = Arc::new(Hub::default());
        let mut worlds = Vec::new();
        for rank in 0..n {
            let region = Arc::new(Region::private()?);
            let localities = vec![Locality::SameProcess; n];
            let transport = Transport::Hub(hub.clone());
            let world = World::new((rank, n, id), transport, region, lane.clone(), localities, defaults);
            hub.enter(&world);
            worlds.push(world);
        }
        let each = |world: Arc<World>| {
            let endpoint = world.world_endpoint()?;
            Ok(Comm::of(endpoint, Arc::new(Membership { world, mesh: None })))
        };
        worlds.into_iter().map(each).collect()
    }

    fn of(endpoint: Arc<Endpoint>, membership: Arc<Membership>) -> Comm {
        Comm(Arc::new(Handle { endpoint, membership, children: Mutex::new(0) }))
    }

    /// A handle to hold in several places. It and this one may be used side by side.
    pub fn share(&self) -> SharedComm {
        SharedComm(self.0.clone())
    }

    /// A second communicator of the same ranks, independent of this one. Collective: all ranks call it.
    ///
    /// # Errors
    /// As a collective.
    pub async fn dup(&mut self) -> Result<Comm, Error> {
        let rank = self.rank();
        self.split(0, rank as i64).await
    }

    /// Communicators of the ranks that give the same `color`, ordered by `key`, then by rank. Collective: all ranks of
    /// this group call it.
    ///
    /// # Errors
    /// As a collective.
    pub async fn split(&mut self, color: u64, key: i64) -> Result<Comm, Error> {
        let (rank, endpoint) = (self.rank(), self.0.endpoint.clone());
        let answers = self.all_gather(vec![color, key as u64]).await?;
        let mut mates: Vec<(i64, Rank)> = (0..self.size())
            .filter(|r| answers[2 * r] == color)
            .map(|r| (answers[2 * r + 1] as i64, r))
            .collect();
        mates.sort_unstable();
        let world = self.0.membership.world.clone();
        let block = match world.around.region.alloc(block_bytes(mates.len())) {
            Ok(block) => block as u64,
            Err(error) => {
                // The others would wait for this rank's answer.
                endpoint.fail(error.clone());
                return Err(error);
            }
        };
        let blocks = self.all_gather(vec![block]).await?;
        let child = {
            let mut children = self.0.children.lock();
            *children += 1;
            *children
        };
        let id = child_id(endpoint.config.comm, child, color);
        let members = mates.iter().map(|(_, r)| endpoint.config.members[*r]).collect();
        let blocks = mates.iter().map(|(_, r)| blocks[*r]).collect();
        let name = format!("{}/{child}.{color}", endpoint.config.name);
        let made = world.endpoint(CommId(id), name, members, blocks)?;
        tracing::debug!(rank, comm = id, size = mates.len(), "communicator made");
        Ok(Comm::of(made, self.0.membership.clone()))
    }

    /// Waits until everything submitted is finished and has left, and a bounded time (2 s) for the other ranks to close
    /// or leave too; checks that all made the same calls, also where none waited for another; says goodbye.
    ///
    /// # Errors
    /// The cause for which the communicator is dead; [`Error::Mismatch`] or [`Error::Invalid`] for an operation that
    /// ranks do not agree on.
    pub async fn close(self) -> Result<(), Error> {
        let endpoint = self.0.endpoint.clone();
        let calls = endpoint.close();
        let (waiting, world) = (endpoint.clone(), self.0.membership.world.clone());
        runtime::run(async move {
            let pause = || tokio::time::sleep(Duration::from_micros(200));
            while waiting.cause().is_none() && !waiting.is_quiet() {
                pause().await;
            }
            world.closing(&waiting, calls);
            let end = Instant::now() + CLOSING;
            while waiting.cause().is_none() && !waiting.all_closing() && Instant::now() < end {
                pause().await;
            }
            Ok(())
        })
        .await?;
        if let Some(error) = endpoint.leftover() {
            endpoint.fail(error);
        }
        let result = self.check();
        let membership = self.0.membership.clone();
        drop(self);
        if let (Some(mesh), 1) = (&membership.mesh, Arc::strong_count(&membership)) {
            mesh.close(membership.world.loss()).await;
        }
        result
    }
}

/// Names a child: the same on all its members, different from its siblings and cousins.
fn child_id(parent: u64, child: u64, color: u64) -> u64 {
    // SplitMix64's finalizer over the three numbers; 0 is the world's.
    let mut x = parent;
    for part in [child, color] {
        x = x.wrapping_add(part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
    }
    x.max(1)
}
