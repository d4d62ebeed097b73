//! A bucket: gradients that are reduced by one operation, and the memory in which small ones are packed; and all buckets of a layout.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::layout::{Options, Param};
use super::pack::Pack;
use crate::comm::{Comm, Ordered, Work, ready};
use crate::device::{DeviceStream, Emptied, OnDevice, PackedAt, is_same, not_there};
use crate::error::{Error, Failed};
use crate::mem::{AnyBuf, Buf, Event};
use crate::types::{DType, Rank, ReduceOp, bf16, f16};

/// Gradients of fewer bytes are packed, as copying them in and out takes less time than one more buffer in an `all_reduce_list`. Compressed
/// gradients are always packed. On a CPU packing took less than half of the list's time at 4 KB, and up to 2.5 times as long at 128 KB
/// (docs/bench/buckets.md). On a device this has not been measured.
const PACKED_BELOW: usize = 64 << 10;
/// The most buckets of joined steps, the step that is being joined included, that may be in flight at a time.
const MOST_AHEAD: usize = 256;

/// The operation of a bucket that is in flight.
enum Flight<B: Buf> {
    Nothing,
    /// One packed buffer.
    Packed(Work<AnyBuf>),
    /// The gradient of one parameter.
    Single(Work<B>),
    /// Several buffers: gradients, and packed ones.
    Several(Work<(Vec<B>, Vec<AnyBuf>)>),
}

/// Gradients that were reduced where they lie, and packed ones.
type Lists<B> = (Vec<B>, Vec<AnyBuf>);

/// The result of a bucket's operation.
enum Landed<B: Buf> {
    Packed(Result<AnyBuf, Failed<AnyBuf>>),
    Single(Result<B, Failed<B>>),
    Several(Result<Lists<B>, Failed<Lists<B>>>),
}

/// Gradients, each with the number of its parameter.
pub(super) type Placed<B> = Vec<(usize, B)>;

/// A bucket that a stream waits for.
pub(super) type JoinedBucket<B> = Result<Ordered<Placed<B>, Placed<B>>, Failed<Placed<B>>>;

pub(super) struct Bucket<B: Buf> {
    /// Parameters whose gradients are reduced where they lie.
    singles: Vec<usize>,
    packs: Vec<Pack>,
    /// The packed buffers, in the order of `packs`, while no operation has them. On a device they are allocated at the launch, and
    /// dropped when the bucket has landed.
    packed: Vec<AnyBuf>,
    /// On a device: where each packed buffer is, also while an operation has it.
    places: Vec<PackedAt>,
    /// Whether its gradients are on a device.
    on_device: bool,
    /// Kept between steps, so that a list of gradients needs no new vector.
    list: Vec<B>,
    flight: Flight<B>,
    /// How many parameters are in the bucket, and how many bytes their gradients have.
    shape: (usize, usize),
    /// How many of its parameters have no gradient yet in this step.
    missing: usize,
    /// If the bucket is sharded: how many elements of its one buffer each rank owns. Rank 0's come first, then rank 1's, and so on.
    counts: Vec<usize>,
}

impl<B: Buf> Bucket<B> {
    fn new() -> Bucket<B> {
        let (singles, packs, packed) = (Vec::new(), Vec::new(), Vec::new());
        Bucket {
            singles,
            packs,
            packed,
            places: Vec::new(),
            on_device: false,
            list: Vec::new(),
            flight: Flight::Nothing,
            shape: (0, 0),
            missing: 0,
            counts: Vec::new(),
        }
    }

    fn add(&mut self, i: usize, param: &Param, wire: Option<DType>) {
        self.shape = (self.shape.0 + 1, self.shape.1.saturating_add(param.bytes()));
        self.on_device = param.is_on_device();
        let wire = wire.filter(|_| param.is_compressed());
        if param.bytes() >= PACKED_BELOW && wire.is_none() {
            return self.singles.push(i);
        }
        let at = self.packs.iter().position(|pack| pack.dtype == param.dtype()).unwrap_or_else(|| {
            self.packs.push(Pack::new(param, wire));
            self.packs.len() - 1
        });
        self.packs[at].add(i, param);
    }

    /// The parameters in it.
    pub(super) fn members(&self) -> impl Iterator<Item = usize> {
        let packed = self.packs.iter().flat_map(|pack| pack.members.iter().map(|(i, _)| *i));
        self.singles.iter().copied().chain(packed)
    }

    /// How many parameters are in the bucket, and how many bytes their gradients have.
    pub(super) fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// Before a step: no gradient is there yet.
    pub(super) fn empty(&mut self) {
        self.missing = self.shape.0;
    }

    /// One more gradient is there.
    pub(super) fn fill(&mut self) {
        self.missing = self.missing.saturating_sub(1);
    }

    pub(super) fn is_full(&self) -> bool {
        self.missing == 0
    }

    /// Whether a sharded bucket, which must stay one buffer, can take this parameter, too.
    fn takes(&self, param: &Param) -> bool {
        let is_small = param.bytes() < PACKED_BELOW;
        self.singles.is_empty() && is_small && self.packs.iter().all(|pack| pack.dtype == param.dtype())
    }

    /// Divides the bucket's one buffer among so many ranks, as evenly as possible.
    fn divide(&mut self, ranks: usize, layout: &[Param]) {
        let packed = self.packs.iter().map(|pack| pack.len);
        let len: usize = packed.chain(self.singles.iter().map(|i| layout[*i].len())).sum();
        self.counts.extend((0..ranks).map(|rank| len / ranks + usize::from(rank < len % ranks)));
    }

    /// Which elements of a parameter this rank owns, in a bucket that is sharded.
    pub(super) fn owned(&self, i: usize, param: &Param, rank: Rank) -> Range<usize> {
        let begin: usize = self.counts[..rank].iter().sum();
        let end = begin + self.counts[rank];
        let packed = self.packs.iter().flat_map(|pack| &pack.members).find(|(member, _)| *member == i);
        let at = packed.map_or(0, |(_, at)| *at);
        let within = |element: usize| element.clamp(at, at + param.len()) - at;
        within(begin)..within(end)
    }

    /// Copies into the packed buffers those of `bufs` that are to be packed. `residuals`: what rounding has taken from each parameter's gradient.
    fn pack(&mut self, bufs: &mut [Option<B>], residuals: &mut [Vec<f32>]) -> Result<(), Error> {
        if !self.on_device {
            let mut packs = self.packs.iter().zip(&mut self.packed);
            return packs.try_for_each(|(pack, packed)| pack.fill(packed, bufs, residuals));
        }
        for pack in &self.packs {
            let OnDevice { buf, packed } = pack.filled_on_device(bufs)?;
            self.packed.push(buf);
            self.places.push(packed);
        }
        Ok(())
    }

    /// Copies the packed buffers back into `bufs`. A packed buffer on a device is then freed, in the order of its stream.
    fn unpack(&mut self, bufs: &mut [Option<B>]) -> Result<(), Error> {
        if !self.on_device {
            let mut packs = self.packs.iter().zip(&mut self.packed);
            return packs.try_for_each(|(pack, packed)| pack.empty(packed, bufs));
        }
        let places = std::mem::take(&mut self.places);
        for (pack, packed) in self.packs.iter().zip(places) {
            let stream = packed.stream().clone();
            let emptied = pack.emptied_on_device(&stream, packed, bufs)?;
            if let Err(error) = emptied.ordered_after(&stream) {
                if stream.synchronize().is_err() {
                    pack.leak(bufs);
                    std::mem::forget(emptied);
                }
                return Err(error);
            }
            emptied.share_fate();
        }
        self.packed.clear();
        Ok(())
    }

    /// Frees the packed buffers on a device: they are not kept between operations.
    fn clear(&mut self) {
        if self.on_device {
            self.packed.clear();
            self.places.clear();
        }
    }

    /// Packs the gradients that are to be packed, and submits the bucket's operation.
    pub(super) fn launch(
        &mut self,
        comm: &mut Comm,
        (op, scale): (ReduceOp, Option<f64>),
        (grads, residuals): (&mut [Option<B>], &mut [Vec<f32>]),
    ) -> Result<(), Error> {
        self.pack(grads, residuals).inspect_err(|_| self.clear())?;
        let call = match scale {
            Some(factor) => comm.scale(factor),
            None => comm.op(op),
        };
        self.flight = match (&self.singles[..], &self.packs[..]) {
            ([], [_]) => {
                let buf = self.packed.pop().ok_or_else(|| not_there(0))?;
                Flight::Packed(match &self.counts[..] {
                    [] => call.all_reduce(buf),
                    counts => call.reduce_scatter_v_in_place(buf, counts),
                })
            }
            ([i], []) => {
                let buf = grads[*i].take().ok_or_else(|| not_there(*i))?;
                Flight::Single(match &self.counts[..] {
                    [] => call.all_reduce(buf),
                    counts => call.reduce_scatter_v_in_place(buf, counts),
                })
            }
            _ => {
                self.list.extend(self.singles.iter().filter_map(|i| grads[*i].take()));
                let bufs = (std::mem::take(&mut self.list), std::mem::take(&mut self.packed));
                Flight::Several(call.all_reduce_list(bufs))
            }
        };
        Ok(())
    }

    /// For a sharded bucket: submits the operation that gathers from each rank the elements of these weights that the rank owns.
    pub(super) fn gather(&mut self, comm: &mut Comm, weights: &mut [Option<B>]) -> Result<(), Error> {
        self.pack(weights, &mut []).inspect_err(|_| self.clear())?;
        self.flight = match self.singles[..] {
            [i] => {
                let buf = weights[i].take().ok_or_else(|| not_there(i))?;
                Flight::Single(comm.all_gather_v_in_place(buf, &self.counts))
            }
            _ => {
                let buf = self.packed.pop().ok_or_else(|| not_there(0))?;
                Flight::Packed(comm.all_gather_v_in_place(buf, &self.counts))
            }
        };
        Ok(())
    }

    /// Leaves the operation in flight to the progress thread: the caller computes now, and does not poll it before it finishes the step.
    pub(super) fn leave_to_progress_thread(&self) {
        match &self.flight {
            Flight::Nothing => {}
            Flight::Packed(work) => work.leave_to_progress_thread(),
            Flight::Single(work) => work.leave_to_progress_thread(),
            Flight::Several(work) => work.leave_to_progress_thread(),
        }
    }

    /// Waits for the operation in flight, and puts the gradients back in their places: on failure those that came back, as they are.
    ///
    /// Cancel safe: the next call waits for the same operation again.
    pub(super) async fn land(&mut self, grads: &mut [Option<B>]) -> Result<(), Error> {
        let landed = match &mut self.flight {
            Flight::Nothing => return Ok(()),
            Flight::Packed(work) => Landed::Packed(work.await),
            Flight::Single(work) => Landed::Single(work.await),
            Flight::Several(work) => Landed::Several(work.await),
        };
        self.flight = Flight::Nothing;
        self.settle(landed, grads)
    }

    /// As [`land`](Self::land), but blocks the thread.
    pub(super) fn land_here(&mut self, grads: &mut [Option<B>]) -> Result<(), Error> {
        let landed = match std::mem::replace(&mut self.flight, Flight::Nothing) {
            Flight::Nothing => return Ok(()),
            Flight::Packed(work) => Landed::Packed(work.wait()),
            Flight::Single(work) => Landed::Single(work.wait()),
            Flight::Several(work) => Landed::Several(work.wait()),
        };
        self.settle(landed, grads)
    }

    fn settle(&mut self, landed: Landed<B>, grads: &mut [Option<B>]) -> Result<(), Error> {
        let result = self.place(landed, grads).and_then(|()| self.unpack(grads));
        result.inspect_err(|_| self.clear())
    }

    /// Puts what has come back in its place.
    fn place(&mut self, landed: Landed<B>, grads: &mut [Option<B>]) -> Result<(), Error> {
        match landed {
            Landed::Packed(result) => {
                let (buf, result) = parts(result);
                self.packed.extend(buf);
                result
            }
            Landed::Single(result) => {
                let (buf, result) = parts(result);
                grads[self.singles[0]] = buf;
                result
            }
            Landed::Several(result) => {
                let (bufs, result) = parts(result);
                if let Some((mut list, packed)) = bufs {
                    self.singles.iter().zip(list.drain(..)).for_each(|(i, grad)| grads[*i] = Some(grad));
                    (self.list, self.packed) = (list, packed);
                }
                result
            }
        }
    }

    /// Makes `stream` wait for the bucket in place of the caller. `None`: no operation is in flight, or the host has to copy packed
    /// gradients back. Packed gradients on a device stay in `grads`, and `stream` copies them back.
    pub(super) fn join(&mut self, stream: &DeviceStream, grads: &mut [Option<B>]) -> Option<JoinedBucket<B>> {
        if !self.packs.is_empty() && !self.on_device {
            return None;
        }
        match std::mem::replace(&mut self.flight, Flight::Nothing) {
            Flight::Nothing => None,
            Flight::Packed(work) => Some(self.joined(work, (stream, grads), |buf| (Vec::new(), vec![buf]))),
            Flight::Single(work) => Some(self.joined(work, (stream, grads), |buf| (vec![buf], Vec::new()))),
            Flight::Several(work) => Some(self.joined(work, (stream, grads), |lists| lists)),
        }
    }

    /// Makes a stream wait for the bucket's operation. `lists` divides the operation's buffers into gradients and packed ones.
    fn joined<T: Send + 'static>(
        &mut self,
        work: Work<T>,
        (stream, grads): (&DeviceStream, &mut [Option<B>]),
        lists: fn(T) -> Lists<B>,
    ) -> JoinedBucket<B> {
        let singles = self.singles.clone();
        let place = move |bufs: T| -> Placed<B> { singles.into_iter().zip(lists(bufs).0).collect() };
        let places = std::mem::take(&mut self.places);
        let mut ordered = match work.join(stream) {
            Ok(ordered) => ordered,
            Err(Failed { buf, error }) => return Err(Failed { buf: buf.map(place), error }),
        };
        // If a later pack fails, the earlier ones must still be kept until it is known that their kernels are over.
        let mut emptied: Vec<Emptied> = Vec::with_capacity(places.len());
        let mut packs = self.packs.iter().zip(places);
        let mut copied = packs.try_for_each(|(pack, packed)| {
            emptied.push(pack.emptied_on_device(stream, packed, grads)?);
            Ok(())
        });
        let others = || emptied.iter().flat_map(Emptied::streams).filter(|other| !is_same(other, stream));
        // If a waiting stream could keep another rank's part of this operation from its device, the host waits instead. The host also waits
        // if no device runs the operation: the caller may then use the result on the host at once, so the copies must be over.
        let is_waited_for_here =
            copied.is_err() || !self.packs.is_empty() && !ordered.is_awaited_by_all(others());
        if is_waited_for_here {
            ordered = ready(ordered.wait());
        }
        if is_waited_for_here && copied.is_ok() {
            let mut all = emptied.iter();
            copied = all.try_for_each(|one| one.ordered_after(stream)).and_then(|()| stream.synchronize());
        }
        if let Err(error) = copied {
            let (buf, _) = parts(ordered.wait());
            // Some gradients may still be copied back. If nobody can tell when the copies are over, all that they touch is leaked.
            let buf = match stream.synchronize() {
                Ok(()) => buf,
                Err(_) => {
                    self.packs.iter().for_each(|pack| pack.leak(grads));
                    std::mem::forget((buf, emptied));
                    None
                }
            };
            return Err(Failed { buf: buf.map(place), error });
        }
        Ok(ordered.then(move |result| match result {
            Ok(bufs) => {
                emptied.iter().for_each(Emptied::share_fate);
                Ok(place(bufs))
            }
            Err(Failed { buf, error }) => Err(Failed { buf: buf.map(place), error }),
        }))
    }

    /// Allocates the packed buffers; on a device none, as there each launch allocates them.
    fn memory(&self, memory: impl Fn(DType, usize) -> Result<AnyBuf, Error>) -> Result<Vec<AnyBuf>, Error> {
        let packs = self.packs.iter().filter(|_| !self.on_device);
        packs.map(|pack| memory(pack.wire, pack.len)).collect()
    }

    /// A new bucket of the same parameters, with packed buffers of its own and without gradients.
    pub(super) fn twin(
        &self,
        memory: impl Fn(DType, usize) -> Result<AnyBuf, Error>,
    ) -> Result<Bucket<B>, Error> {
        Ok(Bucket {
            singles: self.singles.clone(),
            packs: self.packs.clone(),
            packed: self.memory(memory)?,
            places: Vec::new(),
            on_device: self.on_device,
            list: Vec::with_capacity(self.singles.len()),
            flight: Flight::Nothing,
            shape: self.shape,
            missing: self.shape.0,
            counts: self.counts.clone(),
        })
    }
}

/// The buckets that a layout is divided into.
pub(super) struct BucketSet<B: Buf> {
    /// In the order in which they are launched.
    pub(super) buckets: Vec<Bucket<B>>,
    /// The bucket of each parameter.
    pub(super) places: Vec<usize>,
    /// More sets of buckets of the same parameters, free for a next step while a host stream still has the sets of joined steps.
    pub(super) spare: Arc<Mutex<Vec<Vec<Bucket<B>>>>>,
    /// For each joined step that may not be over: how many buckets it has, and the event of its end.
    pub(super) ahead: VecDeque<(usize, Event)>,
}

impl<B: Buf> BucketSet<B> {
    pub(super) fn new(params: usize) -> BucketSet<B> {
        let (buckets, places) = (Vec::new(), vec![0; params]);
        BucketSet { buckets, places, spare: Arc::default(), ahead: VecDeque::new() }
    }

    /// Forms all buckets anew, with the parameters in this order.
    pub(super) fn form(
        &mut self,
        (layout, options): (&[Param], &Options),
        order: impl Iterator<Item = usize>,
        comm: &Comm,
    ) -> Result<(), Error> {
        let memory = |dtype, len| packed(comm, dtype, len);
        self.buckets = form(layout, order, (options, comm.size()), memory)?;
        for (k, bucket) in self.buckets.iter().enumerate() {
            bucket.members().for_each(|i| self.places[i] = k);
        }
        self.spare = Arc::default();
        Ok(())
    }

    /// Makes a spare set of buckets for the next step, unless there is one: a stream keeps those of this step.
    pub(super) fn make_spare(&mut self, comm: &Comm) -> Result<(), Error> {
        if self.spare.lock().is_empty() {
            let memory = |dtype, len| packed(comm, dtype, len);
            let twins = self.buckets.iter().map(|bucket| bucket.twin(memory)).collect::<Result<_, _>>()?;
            self.spare.lock().push(twins);
        }
        Ok(())
    }

    /// Waits for joined steps, the oldest first, while the unfinished ones and this step have more than [`MOST_AHEAD`] buckets.
    pub(super) fn wait_for_joined(&mut self) {
        self.ahead.retain(|(_, over)| !over.is_complete());
        while self.ahead.iter().map(|(buckets, _)| buckets).sum::<usize>() + self.buckets.len() > MOST_AHEAD
            && let Some((_, over)) = self.ahead.pop_front()
        {
            // Whoever awaits that step gets its error.
            let _ = over.wait();
        }
    }
}

/// Distributes the parameters, in this order, over buckets, and allocates memory for those that are packed.
fn form<B: Buf>(
    layout: &[Param],
    order: impl Iterator<Item = usize>,
    (options, ranks): (&Options, usize),
    memory: impl Fn(DType, usize) -> Result<AnyBuf, Error>,
) -> Result<Vec<Bucket<B>>, Error> {
    let mut buckets: Vec<Bucket<B>> = Vec::new();
    let (mut limit, later) = (0, options.bytes_of_buckets(layout));
    for i in order {
        let is_alike = |last: &Bucket<B>| {
            last.members().next().is_none_or(|first| layout[first].is_on_device() == layout[i].is_on_device())
        };
        let last_takes = |last: &Bucket<B>| {
            last.shape.1 < limit && is_alike(last) && (!options.sharded || last.takes(&layout[i]))
        };
        if !buckets.last().is_some_and(last_takes) {
            limit = if buckets.is_empty() { options.first_bucket_bytes } else { later };
            buckets.push(Bucket::new());
        }
        if let Some(bucket) = buckets.last_mut() {
            bucket.add(i, &layout[i], options.wire);
        }
    }
    for bucket in &mut buckets {
        bucket.packed = bucket.memory(&memory)?;
        if options.sharded {
            bucket.divide(ranks, layout);
        }
        bucket.list.reserve_exact(bucket.singles.len());
        bucket.empty();
    }
    Ok(buckets)
}

/// Memory for packed gradients. For the types that most gradients have, and while there is room, it is memory that the other ranks of
/// this host read in place.
fn packed(comm: &Comm, dtype: DType, len: usize) -> Result<AnyBuf, Error> {
    let shared = match dtype {
        DType::F32 => comm.alloc::<f32>(len).map(AnyBuf::new),
        DType::F64 => comm.alloc::<f64>(len).map(AnyBuf::new),
        DType::F16 => comm.alloc::<f16>(len).map(AnyBuf::new),
        DType::BF16 => comm.alloc::<bf16>(len).map(AnyBuf::new),
        _ => return AnyBuf::zeroed(dtype, len),
    };
    shared.or_else(|_| AnyBuf::zeroed(dtype, len))
}

fn parts<T>(result: Result<T, Failed<T>>) -> (Option<T>, Result<(), Error>) {
    match result {
        Ok(buf) => (Some(buf), Ok(())),
        Err(Failed { buf, error }) => (buf, Err(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_full_at_their_limits_and_pack_what_is_small_by_type() {
        let small = Param::of::<f32>(1000);
        let layout = [small, Param::of::<f64>(10), small, Param::of::<f32>(20_000), small, small];
        let options = Options::default().first_bucket_bytes(4001).bucket_bytes(80_000);
        let buckets = form::<Vec<f32>>(&layout, (0..6).rev(), (&options, 2), AnyBuf::zeroed).unwrap();
        let members: Vec<Vec<usize>> = buckets.iter().map(|bucket| bucket.members().collect()).collect();
        assert_eq!(members, [vec![5, 4], vec![3], vec![2, 0, 1]]);
        let packs = |k: usize| -> Vec<_> {
            let packs = buckets[k].packs.iter().zip(&buckets[k].packed);
            packs.map(|(pack, buf)| (pack.members.clone(), buf.dtype(), buf.len())).collect()
        };
        assert_eq!(packs(0), [(vec![(5, 0), (4, 1000)], DType::F32, 2000)]);
        assert_eq!((packs(1).len(), &buckets[1].singles[..]), (0, &[3][..]));
        let expected = [(vec![(2, 0), (0, 1000)], DType::F32, 2000), (vec![(1, 0)], DType::F64, 10)];
        assert_eq!(packs(2), expected);
    }

    #[test]
    fn of_a_sharded_layout_ranks_own_all_elements_once_and_as_many() {
        let layout = [
            Param::of::<f32>(1000),
            Param::of::<f32>(7),
            Param::of::<f32>(20_001),
            Param::of::<f64>(10),
            Param::of::<f32>(0),
        ];
        let options = Options::default().sharded();
        let buckets = form::<AnyBuf>(&layout, 0..5, (&options, 3), AnyBuf::zeroed).unwrap();
        let members: Vec<Vec<usize>> = buckets.iter().map(|bucket| bucket.members().collect()).collect();
        assert_eq!(members, [vec![0, 1], vec![2], vec![3], vec![4]], "one buffer each");
        for (bucket, members) in buckets.iter().zip(&members) {
            let mut sizes = vec![0; 3];
            for &i in members {
                let ranges: Vec<_> = (0..3).map(|rank| bucket.owned(i, &layout[i], rank)).collect();
                assert_eq!((ranges[0].start, ranges[2].end), (0, layout[i].len()));
                assert!(ranges.windows(2).all(|two| two[0].end == two[1].start), "{ranges:?}");
                ranges.iter().zip(&mut sizes).for_each(|(range, size)| *size += range.len());
            }
            assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
        }
    }
}
