//! The kernels that run on CUDA devices: as machine code for the usual devices, as PTX, which a driver compiles for any
//! other, and what is needed to launch them. Nothing here calls CUDA.
//!
//! They follow the [rules](allstream_kernels#rules) to the bit. The folder of this package holds the source, how the PTX is made, and
//! the interface of the kernels in one page.
//!
//! [`reduce`], [`scale`], [`copy`] and [`pack`] turn a job into a [`Launch`]: which [`Kernel`], and what it takes. The
//! caller loads the kernel's [`Module`] when it first needs it.

mod params;
#[cfg(test)]
mod tests;

pub use params::{Combine, Copy, MAX_INS, MAX_OUTS, Pack, Params, Scale, Segment, Span};

use allstream_kernels::{DType, Finish, ReduceOp};

/// Bytes at an address at which a driver may read words.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

macro_rules! code {
    ($folder:literal, $file:literal) => {{
        const CODE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../", $folder, "/", $file, ".cubin")));
        Some(&CODE.0)
    }};
}

macro_rules! modules {
    ($($(#[$doc:meta])* $name:ident $file:literal,)*) => {
        /// Kernels that are loaded together: a file of PTX, or of the machine code made from it. Kernels are split by
        /// type, so that a driver loads or compiles little of what is not used.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Module {
            $($(#[$doc])* $name,)*
        }

        impl Module {
            /// Every module, at the index of its discriminant.
            pub const ALL: &[Module] = &[$(Module::$name,)*];

            /// Its name, that of the file without `.ptx`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Module::$name => $file,)*
                }
            }

            /// Its machine code for devices of this compute capability, an ELF file as a driver loads it: for 8.x, 9.x and
            /// 10.x (what is made for x.0 runs on all x.y). `None`: a driver has to compile [`ptx`](Module::ptx).
            pub const fn machine_code(self, major: u32) -> Option<&'static [u8]> {
                match (self, major) {
                    $(
                        (Module::$name, 8) => code!("sm_80", $file),
                        (Module::$name, 9) => code!("sm_90", $file),
                        (Module::$name, 10) => code!("sm_100", $file),
                    )*
                    _ => None,
                }
            }

            /// Its PTX; no zero byte ends it.
            pub const fn ptx(self) -> &'static str {
                match self {
                    $(Module::$name => include_str!(concat!("../ptx/", $file, ".ptx")),)*
                }
            }
        }
    };
}

modules! {
    /// `f16`.
    F16 "f16",
    /// `bf16`.
    BF16 "bf16",
    /// `f32`.
    F32 "f32",
    /// `f64`.
    F64 "f64",
    /// `f8e4m3`.
    F8E4M3 "f8e4m3",
    /// `f8e5m2`.
    F8E5M2 "f8e5m2",
    /// `i8` and `u8`.
    I8 "i8",
    /// `i16` and `u16`.
    I16 "i16",
    /// `i32` and `u32`.
    I32 "i32",
    /// `i64` and `u64`.
    I64 "i64",
    /// `bool`, and the bitwise operators of all integers.
    Bits "bits",
    /// Copies, and packing without a cast.
    Bytes "bytes",
    /// Packing from one float to another.
    Cast "cast",
}

/// A kernel of a module. Small, and fit to be the key of what has been loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Where it is.
    pub module: Module,
    /// The bytes of what it counts as one element: for copies and bitwise operators often fewer than the type has.
    pub unit: u64,
    /// What its name is made of; the last may be empty.
    parts: [&'static str; 3],
}

impl Kernel {
    /// Its name in the module.
    pub fn name(&self) -> String {
        self.parts.join("_").trim_end_matches('_').to_owned()
    }
}

/// What a kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Folds two inputs: [`Combine<2>`](Combine). No kernel for types of 8 bits, nor for bitwise operators on 16-bit integers: there
    /// [`Kind::Fold`] is as good.
    FoldTwo(ReduceOp),
    /// Folds up to [`MAX_INS`] inputs: [`Combine<MAX_INS>`](Combine).
    Fold(ReduceOp),
    /// Multiplies: [`Scale`].
    Scale,
    /// Copies: [`struct@Copy`].
    Copy,
    /// Packs or unpacks, from the type that [`kernel`] is given to this one: [`Pack`]. With the same type on both sides
    /// elements are only multiplied; if they are not to be multiplied either, [`Kind::PackBytes`] is for every type.
    PackTo(DType),
    /// Packs or unpacks bytes: [`Pack`].
    PackBytes,
}

/// The kernel for a type; `None` if there is none, above all because the operator does not
/// [support](ReduceOp::supports) the type.
pub fn kernel(dtype: DType, kind: Kind) -> Option<Kernel> {
    let size = dtype.size() as u64;
    let (module, parts, unit) = match kind {
        Kind::FoldTwo(op) | Kind::Fold(op) => {
            let (module, lane, fold) = fold(dtype, op)?;
            let unit = match lane {
                "bytes" | "bool" => 1,
                "words" => 4,
                _ => size,
            };
            let two = matches!(kind, Kind::FoldTwo(_));
            if two && unit == 1 {
                return None;
            }
            (module, [if two { "combine2" } else { "combinen" }, lane, fold], unit)
        }
        Kind::Scale => (float(dtype)?, ["scale", dtype.name(), ""], size),
        Kind::Copy if size.is_multiple_of(4) => (Module::Bytes, ["copy", "words", ""], 4),
        Kind::Copy => (Module::Bytes, ["copy", "bytes", ""], 1),
        Kind::PackTo(to) => {
            float(dtype).and(float(to))?;
            (Module::Cast, ["pack", dtype.name(), to.name()], size)
        }
        Kind::PackBytes => (Module::Bytes, ["pack", "bytes", ""], 1),
    };
    Some(Kernel { module, unit, parts })
}

/// The module of a float.
fn float(dtype: DType) -> Option<Module> {
    Some(match dtype {
        DType::F16 => Module::F16,
        DType::BF16 => Module::BF16,
        DType::F32 => Module::F32,
        DType::F64 => Module::F64,
        DType::F8E4M3 => Module::F8E4M3,
        DType::F8E5M2 => Module::F8E5M2,
        _ => return None,
    })
}

/// The module for a fold, and two parts of the kernel's name: its elements (`f32`, `words`), and how it folds them (`sum`).
fn fold(dtype: DType, op: ReduceOp) -> Option<(Module, &'static str, &'static str)> {
    if !op.supports(dtype) {
        return None;
    }
    if dtype == DType::Bool {
        let fold = match op {
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => "band",
            ReduceOp::BitXor => "bxor",
            _ => "bor",
        };
        return Some((Module::Bits, "bool", fold));
    }
    if matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor) {
        return Some((Module::Bits, if dtype.size() < 4 { "bytes" } else { "words" }, op.name()));
    }
    let fold = if op == ReduceOp::Avg { ReduceOp::Sum.name() } else { op.name() };
    if let Some(module) = float(dtype) {
        return Some((module, dtype.name(), fold));
    }
    let (module, unsigned) = match dtype.size() {
        1 => (Module::I8, "u8"),
        2 => (Module::I16, "u16"),
        4 => (Module::I32, "u32"),
        _ => (Module::I64, "u64"),
    };
    // A product's bits do not depend on the sign.
    Some((module, if op == ReduceOp::Prod { unsigned } else { dtype.name() }, fold))
}

/// A launch: a kernel, what it takes, and how many threads.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Its one parameter.
    pub arguments: Arguments,
    /// Blocks, in one dimension; none if there is nothing to do, and then nothing may be launched.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// The one parameter of a kernel.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // It lives for a launch; a box would be an allocation for each.
pub enum Arguments {
    /// Of `combine2_*`.
    Two(Combine<2>),
    /// Of `combinen_*`.
    Many(Combine<MAX_INS>),
    /// Of `scale_*`.
    Scale(Scale),
    /// Of `copy_*`.
    Copy(Copy),
    /// Of `pack_*`.
    Pack(Pack),
}

impl Arguments {
    /// Where the parameter is, for `kernelParams` of `cuLaunchKernel`, as long as this is neither moved nor dropped; the
    /// driver copies it within that call.
    pub fn address(&self) -> *const u8 {
        match self {
            Arguments::Two(params) => params.address(),
            Arguments::Many(params) => params.address(),
            Arguments::Scale(params) => params.address(),
            Arguments::Copy(params) => params.address(),
            Arguments::Pack(params) => params.address(),
        }
    }
}

/// Threads of a block. Most kernels use 34 to 50 registers, so four to six of their blocks fit a multiprocessor; no
/// kernel uses more than 70, so three blocks of any fit. On an H200 a fold of 256 MB has 81 % of the memory's peak.
pub const THREADS: u32 = 256;
/// Elements that a block of `pack_*` takes at a time.
const TILE: u64 = 8192;

/// How many blocks to launch for this many pieces of work, one for each thread; at most `ctas`.
fn blocks(pieces: u64, ctas: u32) -> u32 {
    let blocks = pieces.div_ceil(u64::from(THREADS));
    u32::try_from(blocks).unwrap_or(u32::MAX).min(ctas.max(1))
}

/// The outputs as the kernels take them.
fn outputs(outs: &[u64]) -> Option<[u64; MAX_OUTS]> {
    let mut all = [0; MAX_OUTS];
    all.get_mut(..outs.len())?.copy_from_slice(outs);
    (!outs.is_empty()).then_some(all)
}

/// What [`allstream_kernels::reduce`] does, on device addresses: folds `ins` in the order given, and writes the result to every
/// one of `outs`, with at most `ctas` blocks.
///
/// `None` for what no launch can do: an operator that does not [support](ReduceOp::supports) the type; no inputs or more than [`MAX_INS`]; no
/// outputs or more than [`MAX_OUTS`]; an average over no ranks; one of `f16` over 2^24 ranks or more, or of operands halved more than 126 times;
/// one of another type whose operands are halved.
///
/// One input is copied, but for an average that is divided. The copy leaves out an output that is the input; if that is
/// the only one, there is nothing to launch.
pub fn reduce(
    dtype: DType,
    op: ReduceOp,
    ins: &[u64],
    outs: &[u64],
    len: u64,
    finish: Option<Finish>,
    ctas: u32,
) -> Option<Launch> {
    if !op.supports(dtype) || op == ReduceOp::Avg && finish.is_some_and(|finish| finish.ranks == 0) {
        return None;
    }
    let divisor = match op.divides(finish) {
        Some(finish) => divisor(dtype, finish)?,
        None => 1,
    };
    if let ([input], 1) = (ins, divisor) {
        return copy(dtype, *input, outs, len, ctas);
    }
    let all = outputs(outs)?;
    let n_ins = ins.len() as u32;
    if let &[a, b] = ins
        && let Some(kernel) = kernel(dtype, Kind::FoldTwo(op))
    {
        let span = span(&kernel, dtype, len, ins, outs);
        let arguments = Arguments::Two(Combine { span, n_ins, divisor, outs: all, ins: [a, b] });
        return Some(elementwise(kernel, arguments, span, ctas));
    }
    let mut many = [0; MAX_INS];
    many.get_mut(..ins.len()).filter(|ins| !ins.is_empty())?.copy_from_slice(ins);
    let kernel = kernel(dtype, Kind::Fold(op))?;
    let span = span(&kernel, dtype, len, ins, outs);
    let arguments = Arguments::Many(Combine { span, n_ins, divisor, outs: all, ins: many });
    Some(elementwise(kernel, arguments, span, ctas))
}

/// The field [`Combine::divisor`] of an average over more than one rank.
fn divisor(dtype: DType, Finish { ranks, halved }: Finish) -> Option<u32> {
    match dtype {
        DType::F16 if ranks < 1 << 24 && halved <= 126 => Some((127 - u32::from(halved)) << 24 | ranks),
        _ if halved == 0 && dtype != DType::F16 => Some(ranks),
        _ => None,
    }
}

/// What [`allstream_kernels::scale`] does, on device addresses: multiplies every element, and writes the product to every one of
/// `outs`, which may be the input. `None` for a type that has no [scale](DType::scales), no outputs or more than
/// [`MAX_OUTS`].
pub fn scale(dtype: DType, input: u64, outs: &[u64], len: u64, factor: f64, ctas: u32) -> Option<Launch> {
    let (kernel, all) = (kernel(dtype, Kind::Scale)?, outputs(outs)?);
    let span = span(&kernel, dtype, len, &[input], outs);
    Some(elementwise(kernel, Arguments::Scale(Scale { span, factor, outs: all, input }), span, ctas))
}

/// What [`allstream_kernels::copy`] does, on device addresses. Outputs that are the input are left out; if none remain, there is
/// nothing to launch. `None` for no outputs or more than [`MAX_OUTS`].
pub fn copy(dtype: DType, input: u64, outs: &[u64], len: u64, ctas: u32) -> Option<Launch> {
    let (kernel, mut all) = (kernel(dtype, Kind::Copy)?, outputs(outs)?);
    let mut others = 0;
    for &out in outs.iter().filter(|&&out| out != input) {
        all[others] = out;
        others += 1;
    }
    let len = if others == 0 { 0 } else { len };
    let span = span(&kernel, dtype, len, &[input], &all[..others]);
    Some(elementwise(kernel, Arguments::Copy(Copy { span, outs: all, input }), span, ctas))
}

/// The span of `len` elements of a type, in a kernel's units.
fn span(kernel: &Kernel, dtype: DType, len: u64, ins: &[u64], outs: &[u64]) -> Span {
    let len = len * (dtype.size() as u64 / kernel.unit);
    Span::new(len, kernel.unit, outs.len() as u32, ins.iter().chain(outs).copied())
}

fn elementwise(kernel: Kernel, arguments: Arguments, span: Span, ctas: u32) -> Launch {
    let ends = span.len - span.vectors * (16 / kernel.unit);
    Launch { blocks: blocks(span.vectors.max(ends), ctas), kernel, arguments, threads: THREADS }
}

/// Which way [`pack`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the tensors to the contiguous buffer.
    Pack,
    /// From the contiguous buffer to the tensors.
    Unpack,
}

/// A job for [`pack`]: the tensors, and the buffer that they are packed in.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// The type of the tensors' elements.
    pub tensors: DType,
    /// The type of the contiguous buffer's elements.
    pub buffer: DType,
    /// The device address of a table of `count` [`Segment`]s, in order of `first`; none overlap. With the same type on
    /// both sides and a factor of 1 they count bytes, see [`Packed::unit`]; otherwise elements.
    pub segments: u64,
    /// How many there are.
    pub count: u32,
    /// The device address of the contiguous buffer.
    pub contiguous: u64,
    /// Its elements: no segment reaches beyond.
    pub len: u64,
    /// What elements are multiplied by on the way.
    pub factor: f64,
}

impl Packed {
    /// Whether the elements go as they are.
    fn is_plain(&self) -> bool {
        self.tensors == self.buffer && self.factor == 1.0
    }

    /// By what `first` and `len` of the segments are to be multiplied: the size of an element where bytes are counted,
    /// else 1.
    pub fn unit(&self) -> u64 {
        if self.is_plain() { self.tensors.size() as u64 } else { 1 }
    }
}

/// Many tensors to one contiguous buffer, or back, with at most `ctas` blocks.
///
/// Where types differ, or there is a factor other than 1, elements are cast as the [rules](allstream_kernels#rules) say and
/// [`scalar::convert`](allstream_kernels::scalar::convert) does; otherwise bytes are copied. `None` if types differ or are to be
/// scaled and are not floats.
pub fn pack(job: &Packed, direction: Direction, ctas: u32) -> Option<Launch> {
    let (from, to) = match direction {
        Direction::Pack => (job.tensors, job.buffer),
        Direction::Unpack => (job.buffer, job.tensors),
    };
    let kind = if job.is_plain() { Kind::PackBytes } else { Kind::PackTo(to) };
    let (kernel, len) = (kernel(from, kind)?, job.len * job.unit());
    let arguments = Arguments::Pack(Pack {
        segments: job.segments,
        contiguous: job.contiguous,
        len,
        factor: job.factor,
        count: job.count,
        unpack: u32::from(direction == Direction::Unpack),
    });
    let tiles = if job.count == 0 { 0 } else { len.div_ceil(TILE) };
    Some(Launch { kernel, arguments, blocks: blocks(tiles * u64::from(THREADS), ctas), threads: THREADS })
}
