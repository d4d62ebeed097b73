//! The calls, documented: on [`Comm`] through `&mut self` and on [`SharedComm`] through `&self`.

use std::sync::Arc;
use std::time::Duration;

use super::handle::Stats;
use super::world::World;
use super::{Batch, Call, Comm, Message, SendRecv, SharedComm, Stream, Work};
use crate::error::Error;
#[cfg(doc)]
use crate::error::Failed;
use crate::exec::Endpoint;
use crate::forked;
use crate::link::SLOT;
use crate::link::arena::ArenaBuf;
use crate::mem::device::DeviceBuf;
use crate::mem::{Buf, BufList, Event};
use crate::types::{Algo, Element, Function, Rank, ReduceOp};

/// The calls, on `Comm` through `&mut self` and on `SharedComm` through `&self`.
macro_rules! calls {
    ($type:ty, $me:ident, [$($by:tt)+]) => {
        impl $type {
            /// This rank's side of the group, and its world.
            pub(super) fn place(&$me) -> (&Arc<Endpoint>, &Arc<World>) {
                (&$me.handle().endpoint, &$me.handle().membership.world)
            }

            /// This rank in the group, `0..size()`.
            pub fn rank(&$me) -> Rank {
                $me.handle().endpoint.config.rank
            }

            /// Hosts that the group's ranks are on.
            pub fn hosts(&$me) -> usize {
                $me.handle().endpoint.config.env.hosts
            }

            /// Ranks in the group.
            pub fn size(&$me) -> usize {
                $me.handle().endpoint.size()
            }

            /// The group's name.
            pub fn name(&$me) -> &str {
                &$me.handle().endpoint.config.name
            }

            /// What this rank holds for communication right now.
            pub fn stats(&$me) -> Stats {
                let region = &$me.handle().membership.world.around.region;
                let (slots, limit) = region.slots();
                Stats {
                    in_flight: $me.handle().endpoint.in_flight(),
                    staging_bytes: slots * SLOT,
                    staging_limit: limit * SLOT,
                    scratch_bytes: region.scratch(),
                    pinned_bytes: $crate::mem::device::pinned_bytes(),
                    quarantined: $crate::exec::quarantine::buffers(region),
                    pool: $me.handle().membership.world.pool_stats(),
                }
            }

            /// How many idle communicators this rank's world keeps to be taken up again: 64, or what `ALLSTREAM_POOL`
            /// says. Those beyond end now, the least recently used first. Ranks need not agree on it.
            pub fn set_pool_capacity(&$me, idle: usize) {
                $me.handle().membership.world.set_pool_capacity(idle);
            }

            /// The cause for which this communicator is dead, if it is.
            ///
            /// # Errors
            /// That cause.
            pub fn check(&$me) -> Result<(), Error> {
                forked::check()?;
                $me.handle().endpoint.died_of().map_or(Ok(()), Err)
            }

            /// Ends this communicator on all ranks: operations in flight and later calls fail with
            /// [`Error::Aborted`]. Its siblings stay.
            pub fn abort(&$me, reason: impl Into<String>) {
                $me.handle().endpoint.fail(Error::Aborted { by: $me.rank(), reason: reason.into() });
            }

            /// A zeroed buffer of `len` elements in memory that the other ranks of this host read where it lies: a
            /// collective on it copies nothing into staging slots. An ordinary buffer otherwise.
            ///
            /// # Errors
            /// [`Error::System`] when this rank has no room left: it is for 4 GB of such buffers at a time.
            /// [`Error::Invalid`] for `bool`: memory that other ranks write may hold any bits, and a `bool` may not. Use `u8`.
            pub fn alloc<T: Element>(&$me, len: usize) -> Result<ArenaBuf<T>, Error> {
                ArenaBuf::zeroed(&$me.handle().membership.world.around.region, len)
            }

            /// A call with the default options.
            pub fn call($($by)+ $me) -> Call<'_> {
                Call::new(&$me.handle().endpoint, $me.handle().membership.world.defaults.algo)
            }

            /// The reduction of the next call (default: sum).
            pub fn op($($by)+ $me, op: ReduceOp) -> Call<'_> {
                $me.call().op(op)
            }

            /// The reduction of the next call is a function of yours. See [`Call::function`].
            ///
            /// ```
            /// # use allstream::{Comm, Function};
            /// # fn main() -> Result<(), allstream::Error> {
            /// let larger = Function::ordered("by magnitude", |left: &mut [f32], right: &[f32]| {
            ///     for (l, r) in left.iter_mut().zip(right) {
            ///         if r.abs() > l.abs() {
            ///             *l = *r;
            ///         }
            ///     }
            /// });
            /// # let mut comm = Comm::local(1)?.remove(0);
            /// let most = comm.function(&larger).all_reduce(vec![1.0f32, -3.0]).wait()?;
            /// # assert_eq!(most, [1.0, -3.0]); Ok(()) }
            /// ```
            pub fn function<T: Element>($($by)+ $me, function: &Function<T>) -> Call<'_> {
                $me.call().function(function)
            }

            /// The next call sums inputs multiplied by this. See [`Call::scale`].
            pub fn scale($($by)+ $me, factor: f64) -> Call<'_> {
                $me.call().scale(factor)
            }

            /// Whether calls of this communicator are deterministic (the same on all ranks). See [`Call::deterministic`].
            pub fn set_deterministic($($by)+ $me, on: bool) {
                $me.handle().endpoint.set_deterministic(on);
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
            pub fn on($($by)+ $me, stream: &impl Stream) -> Call<'_> {
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

            /// [`all_reduce`](Self::all_reduce) of one device buffer into another, in the order of their streams: for operators
            /// that have only references to what they read. Both streams (and that of `on`) wait for it, the caller does
            /// not; a communicator that is not [bound](super::Comm::bind_device) waits here.
            ///
            /// Should it fail later, the communicator's next call and [`Comm::check`](super::Comm::check) say so, and so does
            /// who copies or sends `output`.
            ///
            /// ```
            /// # use allstream::{Comm, Error, cuda::DeviceBuf};
            /// fn forward(comm: &mut Comm, x: &DeviceBuf<f32>) -> Result<DeviceBuf<f32>, Error> {
            ///     let mut sum = DeviceBuf::zeroed(x.stream(), x.len())?;
            ///     comm.all_reduce_ordered(x, &mut sum)?;
            ///     Ok(sum) // kernels on its stream may use it
            /// }
            /// ```
            ///
            /// # Errors
            /// What is known at once: [`Error::Invalid`], the communicator is dead, or, not bound, all of an all_reduce.
            pub fn all_reduce_ordered<T: Element>(
                $($by)+ $me,
                input: &DeviceBuf<T>,
                output: &mut DeviceBuf<T>,
            ) -> Result<(), Error> {
                $me.call().all_reduce_ordered(input, output)
            }

            /// [`all_reduce`](Self::all_reduce) into a new vector. The input comes back only on failure.
            pub fn all_reduce_new<I: Buf<Elem: Element>>($($by)+ $me, input: I) -> Work<Vec<I::Elem>, I> {
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
            pub fn all_gather<I: Buf<Elem: Element>>($($by)+ $me, input: I) -> Work<Vec<I::Elem>, I> {
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
            pub fn reduce_scatter<I: Buf<Elem: Element>>($($by)+ $me, input: I) -> Work<Vec<I::Elem>, I> {
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

            /// The root ends with all ranks' buffers, `size() * input.len()` elements in rank order, in a new vector; the
            /// others with an empty one.
            pub fn gather<I: Buf<Elem: Element>>($($by)+ $me, input: I, root: Rank) -> Work<Vec<I::Elem>, I> {
                $me.call().gather(input, root)
            }

            /// [`gather`](Self::gather) into the root's `output`, of `size() * input.len()` elements. The others' outputs
            /// are not looked at.
            pub fn gather_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                root: Rank,
            ) -> Work<(I, O)> {
                $me.call().gather_into(input, output, root)
            }

            /// [`gather`](Self::gather) in place: the root's buffer has `size()` blocks, and its input in block `root`; the
            /// others' buffers are their inputs.
            pub fn gather_in_place<B: Buf>($($by)+ $me, buf: B, root: Rank) -> Work<B> {
                $me.call().gather_in_place(buf, root)
            }

            /// Rank r ends with block r, `count` elements, of the root's input of `size() * count`, in a new vector. The
            /// others' inputs are not looked at: an empty vector will do.
            pub fn scatter<I: Buf<Elem: Element>>($($by)+ $me, input: I, count: usize, root: Rank) -> Work<Vec<I::Elem>, I> {
                $me.call().scatter(input, count, root)
            }

            /// [`scatter`](Self::scatter) into `output`, whose length is the count.
            pub fn scatter_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                root: Rank,
            ) -> Work<(I, O)> {
                $me.call().scatter_into(input, output, root)
            }

            /// [`scatter`](Self::scatter) in place: the root's buffer has `size()` blocks, and keeps all of them; the others
            /// end with theirs in a buffer of one block.
            pub fn scatter_in_place<B: Buf>($($by)+ $me, buf: B, root: Rank) -> Work<B> {
                $me.call().scatter_in_place(buf, root)
            }

            /// Block r of this rank's input goes to rank r, and what comes from rank r is block r of the result: `input.len()`
            /// elements, a multiple of `size()`, in a new vector.
            pub fn all_to_all<I: Buf<Elem: Element>>($($by)+ $me, input: I) -> Work<Vec<I::Elem>, I> {
                $me.call().all_to_all(input)
            }

            /// [`all_to_all`](Self::all_to_all) into `output`, of the input's length.
            pub fn all_to_all_into<I: Buf, O: Buf<Elem = I::Elem>>($($by)+ $me, input: I, output: O) -> Work<(I, O)> {
                $me.call().all_to_all_into(input, output)
            }

            /// [`all_to_all`](Self::all_to_all) in place.
            pub fn all_to_all_in_place<B: Buf>($($by)+ $me, buf: B) -> Work<B> {
                $me.call().all_to_all_in_place(buf)
            }

            /// Rank r ends with the reduction of the buffers of ranks `0..=r`, in place. Operands in rank order. No average.
            pub fn scan<B: Buf>($($by)+ $me, buf: B) -> Work<B> {
                $me.call().scan(buf)
            }

            /// [`scan`](Self::scan) of `input` into `output`, of the same length.
            pub fn scan_into<I: Buf, O: Buf<Elem = I::Elem>>($($by)+ $me, input: I, output: O) -> Work<(I, O)> {
                $me.call().scan_into(input, output)
            }

            /// Rank r ends with the reduction of the buffers of ranks `0..r`, in place: an exclusive scan. Rank 0's buffer is
            /// unchanged.
            pub fn exscan<B: Buf>($($by)+ $me, buf: B) -> Work<B> {
                $me.call().exscan(buf)
            }

            /// [`exscan`](Self::exscan) of `input` into `output`, of the same length. Rank 0's output is unchanged.
            pub fn exscan_into<I: Buf, O: Buf<Elem = I::Elem>>($($by)+ $me, input: I, output: O) -> Work<(I, O)> {
                $me.call().exscan_into(input, output)
            }

            /// [`all_gather`](Self::all_gather) with a count for each rank, the same on all ranks: rank r's block has
            /// `counts[r]` elements, and blocks follow each other without gaps. This rank's input has `counts[rank()]`.
            pub fn all_gather_v<I: Buf<Elem: Element>>($($by)+ $me, input: I, counts: &[usize]) -> Work<Vec<I::Elem>, I> {
                $me.call().all_gather_v(input, counts)
            }

            /// [`all_gather_v`](Self::all_gather_v) into `output`, of as many elements as the counts add up to.
            pub fn all_gather_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                counts: &[usize],
            ) -> Work<(I, O)> {
                $me.call().all_gather_v_into(input, output, counts)
            }

            /// [`all_gather_v`](Self::all_gather_v) in place: this rank's block, which begins where the counts of the ranks
            /// before it end, is its input.
            pub fn all_gather_v_in_place<B: Buf>($($by)+ $me, buf: B, counts: &[usize]) -> Work<B> {
                $me.call().all_gather_v_in_place(buf, counts)
            }

            /// [`reduce_scatter`](Self::reduce_scatter) with a count for each rank, the same on all ranks: block r, of
            /// `counts[r]` elements, goes to rank r. The input has as many elements as the counts add up to.
            pub fn reduce_scatter_v<I: Buf<Elem: Element>>($($by)+ $me, input: I, counts: &[usize]) -> Work<Vec<I::Elem>, I> {
                $me.call().reduce_scatter_v(input, counts)
            }

            /// [`reduce_scatter_v`](Self::reduce_scatter_v) into `output`, of `counts[rank()]` elements.
            pub fn reduce_scatter_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                counts: &[usize],
            ) -> Work<(I, O)> {
                $me.call().reduce_scatter_v_into(input, output, counts)
            }

            /// [`reduce_scatter_v`](Self::reduce_scatter_v) in place: the result is in this rank's block, which begins where
            /// the counts of the ranks before it end; the other blocks are unspecified.
            pub fn reduce_scatter_v_in_place<B: Buf>($($by)+ $me, buf: B, counts: &[usize]) -> Work<B> {
                $me.call().reduce_scatter_v_in_place(buf, counts)
            }

            /// [`gather`](Self::gather) with a count for each rank. Each gives an input of its own length; the root gives all
            /// `counts` (the others' are not looked at). Where a rank's length is not what the root expects, both hear of it
            /// ([`Error::Mismatch`]).
            pub fn gather_v<I: Buf<Elem: Element>>($($by)+ $me, input: I, counts: &[usize], root: Rank) -> Work<Vec<I::Elem>, I> {
                $me.call().gather_v(input, counts, root)
            }

            /// [`gather_v`](Self::gather_v) into the root's `output`.
            pub fn gather_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                counts: &[usize],
                root: Rank,
            ) -> Work<(I, O)> {
                $me.call().gather_v_into(input, output, counts, root)
            }

            /// [`scatter`](Self::scatter) with a count for each rank: this rank gets `count` elements; the root gives an input
            /// of as many as its `counts` add up to (the others' are not looked at).
            pub fn scatter_v<I: Buf<Elem: Element>>(
                $($by)+ $me,
                input: I,
                counts: &[usize],
                count: usize,
                root: Rank,
            ) -> Work<Vec<I::Elem>, I> {
                $me.call().scatter_v(input, counts, count, root)
            }

            /// [`scatter_v`](Self::scatter_v) into `output`, whose length is this rank's count.
            pub fn scatter_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                counts: &[usize],
                root: Rank,
            ) -> Work<(I, O)> {
                $me.call().scatter_v_into(input, output, counts, root)
            }

            /// [`all_to_all`](Self::all_to_all) with counts: `sends[r]` elements go to rank r, `recvs[r]` come from it, packed
            /// in rank order on both sides. Where two ranks do not expect the same, both hear of it ([`Error::Mismatch`]).
            pub fn all_to_all_v<I: Buf<Elem: Element>>(
                $($by)+ $me,
                input: I,
                sends: &[usize],
                recvs: &[usize],
            ) -> Work<Vec<I::Elem>, I> {
                $me.call().all_to_all_v(input, sends, recvs)
            }

            /// [`all_to_all_v`](Self::all_to_all_v) into `output`, of as many elements as `recvs` add up to.
            pub fn all_to_all_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
                $($by)+ $me,
                input: I,
                output: O,
                sends: &[usize],
                recvs: &[usize],
            ) -> Work<(I, O)> {
                $me.call().all_to_all_v_into(input, output, sends, recvs)
            }

            /// [`all_reduce`](Self::all_reduce) of many buffers, of several types if need be, in one operation: one number,
            /// one future. Their messages follow each other without waiting.
            ///
            /// ```
            /// # use allstream::{Comm, bf16};
            /// # fn main() -> Result<(), allstream::Error> {
            /// # let mut comm = Comm::local(1)?.remove(0);
            /// let (weights, biases) = (vec![vec![bf16::ONE; 512], vec![bf16::ZERO; 64]], [vec![0.5f32; 64]]);
            /// let (weights, biases) = comm.all_reduce_list((weights, biases)).wait()?;
            /// # assert_eq!((weights[0].len(), biases[0].len()), (512, 64)); Ok(()) }
            /// ```
            pub fn all_reduce_list<L: BufList>($($by)+ $me, bufs: L) -> Work<L> {
                $me.call().all_reduce_list(bufs)
            }

            /// [`broadcast`](Self::broadcast) of many buffers in one operation.
            pub fn broadcast_list<L: BufList>($($by)+ $me, bufs: L, root: Rank) -> Work<L> {
                $me.call().broadcast_list(bufs, root)
            }

            /// [`reduce`](Self::reduce) of many buffers in one operation.
            pub fn reduce_list<L: BufList>($($by)+ $me, bufs: L, root: Rank) -> Work<L> {
                $me.call().reduce_list(bufs, root)
            }

            /// [`all_gather_into`](Self::all_gather_into) of many pairs of buffers in one operation.
            pub fn all_gather_list<I: BufList, O: BufList>($($by)+ $me, inputs: I, outputs: O) -> Work<(I, O)> {
                $me.call().all_gather_list(inputs, outputs)
            }

            /// [`reduce_scatter_into`](Self::reduce_scatter_into) of many pairs of buffers in one operation.
            pub fn reduce_scatter_list<I: BufList, O: BufList>($($by)+ $me, inputs: I, outputs: O) -> Work<(I, O)> {
                $me.call().reduce_scatter_list(inputs, outputs)
            }

            /// Every rank ends with the root's bytes; the others need not know how many (what they give is dropped, an empty
            /// vector will do). One operation, lengths first.
            pub fn broadcast_bytes($($by)+ $me, bytes: Vec<u8>, root: Rank) -> Work<Vec<u8>> {
                $me.call().broadcast_bytes(bytes, root)
            }

            /// Every rank's bytes, of whatever lengths, by rank.
            pub fn all_gather_bytes($($by)+ $me, bytes: Vec<u8>) -> Work<Vec<Vec<u8>>, Vec<u8>> {
                $me.call().all_gather_bytes(bytes)
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
            /// for each other until the deadline, whose error says so: submit both, or use [`batch`](Self::batch). To this rank
            /// itself a send alone is refused, and so is a receive: [`send_recv`](Self::send_recv) and
            /// [`batch`](Self::batch) have both halves.
            pub fn send<B: Buf>($($by)+ $me, buf: B, to: Rank) -> Work<B> {
                $me.call().send(buf, to)
            }

            /// Receives into `buf` what a rank sends.
            pub fn recv<B: Buf>($($by)+ $me, buf: B, from: Rank) -> Work<B> {
                $me.call().recv(buf, from)
            }

            /// Sends to one rank and receives from another (or the same) at once, with one tag: what all ranks may call together
            /// without waiting for each other. From this rank to itself (`to` and `from` are both this rank, as in a ring of one)
            /// it is a copy, for which both have one length and type.
            pub fn send_recv<S: Buf, R: Buf>($($by)+ $me, send: S, to: Rank, recv: R, from: Rank) -> SendRecv<S, R> {
                $me.call().send_recv(send, to, recv, from)
            }

            /// Several messages in flight together. Those of this rank to itself are copied: each send needs its receive of
            /// the same tag, length and type in the same batch.
            pub fn batch<B: Buf>($($by)+ $me, messages: impl IntoIterator<Item = Message<B>>) -> Batch<B> {
                $me.call().batch(messages)
            }
        }
    };
}

calls!(Comm, self, [&mut]);
calls!(SharedComm, self, [&]);
