//! What is reduced: parameters and options, the same on all ranks.

use crate::comm::Comm;
use crate::error::Error;
use crate::types::{DType, Element, Rank, ReduceOp};

/// The most bytes of a bucket whose size was not given, as in PyTorch's DistributedDataParallel.
const MOST: usize = 25 << 20;
/// The fewest bytes of such a bucket, and the default bytes of the first bucket.
const FEWEST: usize = 1 << 20;
/// How many buckets all gradients fill, if that gives a size between `FEWEST` and `MOST`. No overlap can hide the last bucket, so it must be small.
const PARTS: usize = 8;

/// A parameter, as the layout of a model has it: the type and the number of the elements of its gradient, and whether that is on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    dtype: DType,
    len: usize,
    on_device: bool,
}

impl Param {
    /// A parameter whose gradient has `len` elements of this type, in memory of the host.
    pub fn new(dtype: DType, len: usize) -> Param {
        Param { dtype, len, on_device: false }
    }

    /// A parameter whose gradient has `len` elements of type `T`, in memory of the host.
    pub fn of<T: Element>(len: usize) -> Param {
        Param::new(T::DTYPE, len)
    }

    /// The same parameter with its gradient in memory of a device, a [`DeviceBuf`](crate::cuda::DeviceBuf). The reduction starts after the work
    /// that is on that buffer's stream. Such gradients are not compressed, and cannot be [accumulated](super::Buckets::accumulate).
    pub fn on_device(mut self) -> Param {
        self.on_device = true;
        self
    }

    /// Whether its gradient is in memory of a device.
    pub fn is_on_device(&self) -> bool {
        self.on_device
    }

    /// The element type of its gradient.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements of its gradient.
    #[expect(clippy::len_without_is_empty, reason = "a parameter is no collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether its gradient is compressed if the options say so.
    pub(super) fn is_compressed(&self) -> bool {
        self.dtype == DType::F32 && !self.on_device
    }

    pub(super) fn bytes(&self) -> usize {
        self.len.saturating_mul(self.dtype.size())
    }
}

impl std::fmt::Display for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}{}", self.len, self.dtype, if self.on_device { " on a device" } else { "" })
    }
}

/// How [`Buckets`](super::Buckets) reduce. All ranks must give the same options, which are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "options do nothing before they are given to Buckets::with"]
pub struct Options {
    /// `None`: it depends on the layout.
    pub(super) bucket_bytes: Option<usize>,
    pub(super) first_bucket_bytes: usize,
    pub(super) op: ReduceOp,
    pub(super) sharded: bool,
    pub(super) wire: Option<DType>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            bucket_bytes: None,
            first_bucket_bytes: FEWEST,
            op: ReduceOp::Avg,
            sharded: false,
            wire: None,
        }
    }
}

impl Options {
    /// A bucket is full when it has so many bytes: by default an eighth of all gradients, at least 1 MB and at most 25 MB. Larger buckets cost
    /// less in all. Smaller ones begin earlier, and leave less for the last bucket, which begins only when computing ends.
    pub fn bucket_bytes(mut self, bytes: usize) -> Options {
        self.bucket_bytes = Some(bytes);
        self
    }

    /// How many bytes fill a bucket of this layout.
    pub(super) fn bytes_of_buckets(&self, layout: &[Param]) -> usize {
        self.bucket_bytes.unwrap_or_else(|| {
            let all = layout.iter().fold(0, |all: usize, param| all.saturating_add(param.bytes()));
            (all / PARTS).clamp(FEWEST, MOST)
        })
    }

    /// How many bytes fill the first bucket (default: 1 MB): communication begins when it is full.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Options {
        self.first_bucket_bytes = bytes;
        self
    }

    /// Each rank gets the mean of its own part of the gradients only, by `reduce_scatter` in place of `all_reduce`: for an optimizer whose state
    /// is divided among the ranks (ZeRO stage 1). [`Buckets::owned`](super::Buckets::owned) says which part that is, and
    /// [`Buckets::gather`](super::Buckets::gather) brings the updated weights together.
    pub fn sharded(mut self) -> Options {
        self.sharded = true;
        self
    }

    /// Whether [`sharded`](Self::sharded) was asked for.
    pub fn is_sharded(&self) -> bool {
        self.sharded
    }

    /// Gradients of `f32` are rounded to this type of 16 bits, [`DType::BF16`] or [`DType::F16`], before they are sent and reduced: half as many
    /// bytes. What rounding takes from a gradient is added to the gradient of the next step (error feedback); for this each rank keeps as much
    /// memory as the gradients have. The sums over ranks are rounded, too, and what that takes is lost. Numbers too large for the type become
    /// infinite; `BF16` has the range of `f32`.
    ///
    /// Other types are sent as they are. Not for [sharded](Self::sharded) buckets.
    pub fn compress(mut self, wire: DType) -> Options {
        self.wire = Some(wire);
        self
    }

    /// Gives the sum over ranks in place of the mean.
    pub fn sum(mut self) -> Options {
        self.op = ReduceOp::Sum;
        self
    }
}

/// Ranks compare lists of numbers. These are the names of the first ones; two for each parameter follow.
const NAMES: [&str; 6] = [
    "number of parameters",
    "bucket_bytes",
    "first_bucket_bytes",
    "reduction (its number as a ReduceOp)",
    "sharded (1: yes)",
    "type to compress to (its number as a DType; none: 255)",
];

fn words(layout: &[Param], options: &Options) -> Vec<u64> {
    let Options { bucket_bytes, first_bucket_bytes, op, sharded, wire } = *options;
    let wire = wire.map_or(255, |wire| wire as usize);
    let bucket_bytes = bucket_bytes.unwrap_or(DEFAULT as usize);
    let head = [layout.len(), bucket_bytes, first_bucket_bytes, op as usize, usize::from(sharded), wire];
    let place = |param: &Param| if param.on_device { ON_DEVICE } else { 0 };
    let params = layout.iter().flat_map(|param| [param.dtype as u64 | place(param), param.len as u64]);
    head.into_iter().map(|word| word as u64).chain(params).collect()
}

/// Added to the number of a parameter's type if its gradient is on a device.
const ON_DEVICE: u64 = 1 << 8;

/// Stands for a number that a rank's list does not have.
const NONE: u64 = u64::MAX;

/// Stands for an option that was not given.
const DEFAULT: u64 = u64::MAX - 1;

/// The place of the first number that differs from rank 0's, and this rank's two numbers from there on (of a parameter: type and length).
fn difference(ours: &[u64], theirs: &[u64]) -> [u64; 3] {
    let Some(at) = (0..ours.len().max(theirs.len())).find(|i| ours.get(*i) != theirs.get(*i)) else {
        return [NONE; 3];
    };
    let at = if at < NAMES.len() { at } else { at - (at - NAMES.len()) % 2 };
    let word = |i: usize| ours.get(i).copied().unwrap_or(NONE);
    [at as u64, word(at), word(at + 1)]
}

/// Tells a person what rank `peer` has that differs from what rank 0 has (`theirs`).
fn disagreement(peer: &str, rank_0: &str, [at, one, two]: [u64; 3], theirs: &[u64]) -> String {
    let at = at as usize;
    let (what, ours, theirs) = match NAMES.get(at) {
        Some(name) => {
            let number =
                |word| if word == DEFAULT { "the default".to_owned() } else { u64::to_string(&word) };
            (format!("the {name}"), number(one), number(theirs.get(at).copied().unwrap_or(NONE)))
        }
        None => {
            let param = |words: &[u64]| match words {
                [dtype, len, ..] if *dtype != NONE => {
                    let on_device = dtype & ON_DEVICE != 0;
                    let dtype = u8::try_from(dtype & !ON_DEVICE).ok().and_then(DType::from_u8);
                    let param = |dtype| Param { dtype, len: *len as usize, on_device };
                    dtype.map_or("?".to_owned(), |dtype| param(dtype).to_string())
                }
                _ => "nothing".to_owned(),
            };
            let number = (at - NAMES.len()) / 2;
            (format!("parameter {number}"), param(&[one, two]), param(theirs.get(at..).unwrap_or_default()))
        }
    };
    format!(
        "{what} is {ours} on {peer} and {theirs} on {rank_0}; every rank must give the same layout and options"
    )
}

/// Compares layout and options between all ranks, and checks that they can be used. All ranks get the same result.
pub(super) async fn agree(comm: &mut Comm, layout: &[Param], options: &Options) -> Result<(), Error> {
    let ours = words(layout, options);
    let bytes = ours.iter().flat_map(|word| word.to_le_bytes()).collect();
    let bytes: Vec<u8> = comm.broadcast_bytes(bytes, 0).await?;
    let (words_of_0, _) = bytes.as_chunks::<8>();
    let theirs: Vec<u64> = words_of_0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let rows = comm.all_gather(difference(&ours, &theirs).to_vec()).await?;
    let (rows, _) = rows.as_chunks::<3>();
    if let Some(peer) = rows.iter().position(|row| row[0] != NONE) {
        let name = |rank: Rank| comm.named_rank(rank);
        return Err(Error::invalid("Buckets", disagreement(&name(peer), &name(0), rows[peer], &theirs)));
    }
    let problem = |problem: String| Err(Error::invalid("Buckets", problem));
    if layout.is_empty() {
        return problem("the layout has no parameters, expected at least one".into());
    }
    if options.bucket_bytes == Some(0) || options.first_bucket_bytes == 0 {
        return problem("buckets of 0 bytes were asked for, expected at least 1".into());
    }
    if let Some(wire) = options.wire.filter(|wire| !matches!(wire, DType::BF16 | DType::F16)) {
        return problem(format!("gradients cannot be compressed to {wire}, expected bf16 or f16"));
    }
    if options.wire.is_some() && options.sharded {
        return problem("buckets cannot be both sharded and compressed: ask for one of the two".into());
    }
    match layout.iter().position(|param| !options.op.supports(param.dtype)) {
        Some(i) => {
            problem(format!("parameter {i} is {}, of which there is no mean: use Options::sum", layout[i]))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_told_by_what_it_is() {
        let options = Options::default();
        let text = |ours: &[Param], theirs: &[Param], options: &Options| {
            let (ours, theirs) = (words(ours, options), words(theirs, &Options::default()));
            let difference = difference(&ours, &theirs);
            (difference[0] != NONE).then(|| disagreement("rank 3", "rank 0", difference, &theirs))
        };
        let (a, b, c) = (Param::of::<f32>(8), Param::of::<f32>(9), Param::of::<f64>(8));
        assert_eq!(text(&[a, b], &[a, b], &options), None);
        let told = text(&[a, b], &[a, c], &options).unwrap();
        assert!(told.starts_with("parameter 1 is 9 x f32 on rank 3 and 8 x f64 on rank 0;"), "{told}");
        let told = text(&[a, a], &[a, b], &options).unwrap();
        assert!(told.starts_with("parameter 1 is 8 x f32 on rank 3 and 9 x f32 on rank 0;"), "{told}");
        let told = text(&[a], &[a, b], &options).unwrap();
        assert!(told.starts_with("the number of parameters is 1 on rank 3 and 2 on rank 0;"), "{told}");
        let told = text(&[a], &[a], &options.bucket_bytes(7)).unwrap();
        assert!(told.starts_with("the bucket_bytes is 7 on rank 3 and the default on rank 0;"), "{told}");
    }

    #[test]
    fn buckets_are_an_eighth_of_all_gradients_within_bounds() {
        let of = |options: Options, megabytes: usize| {
            options.bytes_of_buckets(&[Param::of::<u8>((megabytes - 1) << 20), Param::of::<u8>(1 << 20)])
        };
        let sizes = [1, 8, 24, 200, 10_000].map(|megabytes| of(Options::default(), megabytes) >> 20);
        assert_eq!(sizes, [1, 1, 3, 25, 25]);
        assert_eq!(of(Options::default().bucket_bytes(7), 200), 7);
    }
}
