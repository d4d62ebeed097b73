//! A bucket: gradients that are reduced by one operation, and the memory in which small ones are packed.

use std::ops::Range;

use super::layout::{Options, Param};
use crate::comm::{Comm, Work};
use crate::error::{Error, Failed};
use crate::mem::{AnyBuf, Buf, elements};
use crate::types::{DType, Rank, ReduceOp, bf16, f16};

/// Gradients of fewer bytes are packed: to copy them twice takes less time than a part of an operation does. Of 4 KB it took less than
/// half of
/// that time, of 128 KB up to 2.5 times as long (docs/bench/buckets.md).
const PACKED_BELOW: usize = 64 << 10;

/// Parameters of one element type whose gradients are copied into one buffer.
struct Pack {
    /// Of the gradients.
    dtype: DType,
    /// Of the buffer into which they are packed: another one where they are compressed.
    wire: DType,
    /// The parameters, and the element at which each begins.
    members: Vec<(usize, usize)>,
    /// Elements of all of them.
    len: usize,
}

/// What is on its way.
enum Flight<B: Buf> {
    Nothing,
    /// One packed buffer.
    Packed(Work<AnyBuf>),
    /// The gradient of one parameter.
    Single(Work<B>),
    /// Several buffers: gradients, and packed ones.
    Several(Work<(Vec<B>, Vec<AnyBuf>)>),
}

pub(super) struct Bucket<B: Buf> {
    /// Parameters whose gradients are reduced where they lie.
    singles: Vec<usize>,
    packs: Vec<Pack>,
    /// Memory of the packs, in their order, while none of it is on its way.
    packed: Vec<AnyBuf>,
    /// Kept between steps, so that a list of gradients needs no new vector.
    list: Vec<B>,
    flight: Flight<B>,
    /// How many parameters are in it, and bytes of their gradients.
    shape: (usize, usize),
    /// Parameters of it that have no gradient yet in this step.
    missing: usize,
    /// Of one that is sharded: how many elements of its one buffer each rank owns, one rank's behind the other's.
    counts: Vec<usize>,
}

impl<B: Buf> Bucket<B> {
    fn new() -> Bucket<B> {
        let (singles, packs, packed) = (Vec::new(), Vec::new(), Vec::new());
        Bucket {
            singles,
            packs,
            packed,
            list: Vec::new(),
            flight: Flight::Nothing,
            shape: (0, 0),
            missing: 0,
            counts: Vec::new(),
        }
    }

    fn add(&mut self, i: usize, param: &Param, wire: Option<DType>) {
        self.shape = (self.shape.0 + 1, self.shape.1.saturating_add(param.bytes()));
        let wire = wire.filter(|_| param.is_compressed());
        if param.is_on_device() || param.bytes() >= PACKED_BELOW && wire.is_none() {
            return self.singles.push(i);
        }
        let at = self.packs.iter().position(|pack| pack.dtype == param.dtype()).unwrap_or_else(|| {
            self.packs.push(Pack {
                dtype: param.dtype(),
                wire: wire.unwrap_or(param.dtype()),
                members: Vec::new(),
                len: 0,
            });
            self.packs.len() - 1
        });
        let pack = &mut self.packs[at];
        pack.members.push((i, pack.len));
        pack.len += param.len();
    }

    /// The parameters in it.
    pub(super) fn members(&self) -> impl Iterator<Item = usize> {
        let packed = self.packs.iter().flat_map(|pack| pack.members.iter().map(|(i, _)| *i));
        self.singles.iter().copied().chain(packed)
    }

    /// How many parameters are in it, and bytes of their gradients.
    pub(super) fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// Before a step: nothing is there.
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

    /// Whether a bucket that is sharded, so of one buffer, takes this parameter, too.
    fn takes(&self, param: &Param) -> bool {
        let is_small = param.bytes() < PACKED_BELOW && !param.is_on_device();
        self.singles.is_empty() && is_small && self.packs.iter().all(|pack| pack.dtype == param.dtype())
    }

    /// Divides its one buffer among so many ranks, as evenly as can be.
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

    /// Copies what is packed of these buffers into the packed ones. `residuals`: what rounding has taken from each parameter.
    fn pack(&mut self, bufs: &mut [Option<B>], residuals: &mut [Vec<f32>]) -> Result<(), Error> {
        for (pack, packed) in self.packs.iter().zip(&mut self.packed) {
            for &(i, at) in &pack.members {
                let buf = bufs[i].as_mut().ok_or_else(|| not_there(i))?;
                let len = buf.len();
                let done = if pack.wire == pack.dtype {
                    elements::copy((buf, 0), (packed, at), len)
                } else {
                    residuals.get_mut(i).and_then(|residual| elements::compress(buf, residual, (packed, at)))
                };
                done.ok_or_else(|| not_there(i))?;
            }
        }
        Ok(())
    }

    /// The same back.
    fn unpack(&mut self, bufs: &mut [Option<B>]) -> Result<(), Error> {
        for (pack, packed) in self.packs.iter().zip(&mut self.packed) {
            for &(i, at) in &pack.members {
                let buf = bufs[i].as_mut().ok_or_else(|| not_there(i))?;
                let len = buf.len();
                let done = if pack.wire == pack.dtype {
                    elements::copy((packed, at), (buf, 0), len)
                } else {
                    elements::expand((packed, at), buf)
                };
                done.ok_or_else(|| not_there(i))?;
            }
        }
        Ok(())
    }

    /// Packs what is to be packed, and submits all.
    pub(super) fn launch(
        &mut self,
        comm: &mut Comm,
        (op, scale): (ReduceOp, Option<f64>),
        (grads, residuals): (&mut [Option<B>], &mut [Vec<f32>]),
    ) -> Result<(), Error> {
        self.pack(grads, residuals)?;
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

    /// Of a bucket that is sharded: submits the gathering of what each rank owns of these weights.
    pub(super) fn gather(&mut self, comm: &mut Comm, weights: &mut [Option<B>]) -> Result<(), Error> {
        self.pack(weights, &mut [])?;
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

    /// The caller computes now: nobody polls what is on its way before the step is finished.
    pub(super) fn leave_to_progress_thread(&self) {
        match &self.flight {
            Flight::Nothing => {}
            Flight::Packed(work) => work.leave_to_progress_thread(),
            Flight::Single(work) => work.leave_to_progress_thread(),
            Flight::Several(work) => work.leave_to_progress_thread(),
        }
    }

    /// Waits for it, and puts gradients back in their places: on failure those that came back, as they are.
    ///
    /// Cancel safe: what is on its way is awaited again by the next call.
    pub(super) async fn land(&mut self, grads: &mut [Option<B>]) -> Result<(), Error> {
        let result = match &mut self.flight {
            Flight::Nothing => return Ok(()),
            Flight::Packed(work) => {
                let (buf, result) = parts(work.await);
                self.packed.extend(buf);
                result
            }
            Flight::Single(work) => {
                let (buf, result) = parts(work.await);
                grads[self.singles[0]] = buf;
                result
            }
            Flight::Several(work) => {
                let (bufs, result) = parts(work.await);
                if let Some((mut list, packed)) = bufs {
                    self.singles.iter().zip(list.drain(..)).for_each(|(i, grad)| grads[*i] = Some(grad));
                    (self.list, self.packed) = (list, packed);
                }
                result
            }
        };
        self.flight = Flight::Nothing;
        result?;
        self.unpack(grads)
    }
}

/// Distributes the parameters, in this order, over buckets, and allocates memory for those that are packed.
pub(super) fn form<B: Buf>(
    layout: &[Param],
    order: impl Iterator<Item = usize>,
    (options, ranks): (&Options, usize),
    memory: impl Fn(DType, usize) -> Result<AnyBuf, Error>,
) -> Result<Vec<Bucket<B>>, Error> {
    let mut buckets: Vec<Bucket<B>> = Vec::new();
    let mut limit = 0;
    for i in order {
        let is_alike = |last: &Bucket<B>| {
            last.members().next().is_none_or(|first| layout[first].is_on_device() == layout[i].is_on_device())
        };
        let last_takes = |last: &Bucket<B>| {
            last.shape.1 < limit && is_alike(last) && (!options.sharded || last.takes(&layout[i]))
        };
        if !buckets.last().is_some_and(last_takes) {
            limit = if buckets.is_empty() { options.first_bucket_bytes } else { options.bucket_bytes };
            buckets.push(Bucket::new());
        }
        if let Some(bucket) = buckets.last_mut() {
            bucket.add(i, &layout[i], options.wire);
        }
    }
    for bucket in &mut buckets {
        let packed = bucket.packs.iter().map(|pack| memory(pack.wire, pack.len));
        bucket.packed = packed.collect::<Result<_, _>>()?;
        if options.sharded {
            bucket.divide(ranks, layout);
        }
        bucket.list.reserve_exact(bucket.singles.len());
        bucket.empty();
    }
    Ok(buckets)
}

/// Memory for packed gradients: such as the other ranks of this host read where it lies, if there is room and for the types that most
/// gradients have.
pub(super) fn packed(comm: &Comm, dtype: DType, len: usize) -> Result<AnyBuf, Error> {
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

fn not_there(i: usize) -> Error {
    Error::system("reduce a bucket", format!("the gradient of parameter {i} is not there (a bug)"))
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
