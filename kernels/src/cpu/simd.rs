//! The fast kernels: loops simple enough that LLVM vectorises them, compiled once for each
//! instruction set that is worth it and chosen at run time. AVX-512 is not worth it: blocks
//! that come from L2 ran no faster with it than with AVX2.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use half::{bf16, f16};

use super::job::Job;
use super::lane::{And, Fold, Lane, Max, Min, Or, Prod, Scaled, Sum, Truth, Xor};
use crate::{DType, ReduceOp, f8e4m3, f8e5m2};

/// The instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// The instructions that every CPU of the target has.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Level {
    /// The levels that this CPU can run, the best one last.
    pub(super) fn available() -> Vec<Level> {
        #[allow(unused_mut)]
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            levels.push(Level::Avx2);
        }
        levels
    }
}

/// The best level of this CPU.
pub(super) fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| *Level::available().last().unwrap_or(&Level::Portable))
}

/// Runs a job at a level.
///
/// # Safety
///
/// The CPU must have the level; `op` must support `dtype`; the pointers of `job` must be as
/// [`crate::reduce`] asks.
pub(super) unsafe fn run(level: Level, dtype: DType, op: ReduceOp, job: Job<'_>) {
    // SAFETY: the caller vouches for the level, hence for its `Isa`, and for the job.
    unsafe {
        match level {
            Level::Portable => dispatch::<Portable>(dtype, op, job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => dispatch::<Avx2>(dtype, op, job),
        }
    }
}

/// Finds the kernel for a type and an operator.
///
/// # Safety
///
/// As [`run`], with `I` for the level.
unsafe fn dispatch<I: Isa>(dtype: DType, op: ReduceOp, mut job: Job<'_>) {
    macro_rules! kernel {
        ($lane:ty, $fold:ty) => {
            // SAFETY: the caller vouches for the instruction set and the pointers; every use
            // below has a lane of `dtype`'s size, or lanes of a byte and `len` in bytes.
            unsafe { I::kernel::<$lane, $fold>(&job) }
        };
    }
    // A wrapping product has the same bits for signed and unsigned integers, so both share a
    // kernel. A sum would, too, but an average divides it, which depends on the sign.
    macro_rules! number {
        ($lane:ty, $unsigned:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Avg => kernel!($lane, Sum),
                ReduceOp::Prod => kernel!($unsigned, Prod),
                ReduceOp::Min => kernel!($lane, Min),
                ReduceOp::Max => kernel!($lane, Max),
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
                    job.len *= dtype.size();
                    match op {
                        ReduceOp::BitAnd => kernel!(u8, And),
                        ReduceOp::BitOr => kernel!(u8, Or),
                        _ => kernel!(u8, Xor),
                    }
                }
            }
        };
    }
    macro_rules! float {
        ($lane:ty) => {
            match op {
                ReduceOp::Prod => kernel!($lane, Prod),
                ReduceOp::Min => kernel!($lane, Min),
                ReduceOp::Max => kernel!($lane, Max),
                _ => kernel!($lane, Sum),
            }
        };
    }
    if is_small(dtype) {
        // SAFETY: the caller vouches for the instruction set and the job.
        job.start = unsafe { I::small(dtype, op, &job) };
        if job.start == job.len {
            return;
        }
    }
    match dtype {
        DType::Bool => match op {
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => kernel!(Truth, And),
            ReduceOp::BitXor => kernel!(Truth, Xor),
            _ => kernel!(Truth, Or),
        },
        DType::I8 => number!(i8, u8),
        DType::I16 => number!(i16, u16),
        DType::I32 => number!(i32, u32),
        DType::I64 => number!(i64, u64),
        DType::U8 => number!(u8, u8),
        DType::U16 => number!(u16, u16),
        DType::U32 => number!(u32, u32),
        DType::U64 => number!(u64, u64),
        DType::F16 => float!(f16),
        DType::BF16 => float!(bf16),
        DType::F32 => float!(f32),
        DType::F64 => float!(f64),
        DType::F8E4M3 => float!(f8e4m3),
        DType::F8E5M2 => float!(f8e5m2),
    }
}

/// Whether the type is a float of 8 or 16 bits.
fn is_small(dtype: DType) -> bool {
    dtype.is_float() && dtype.size() <= 2
}

/// Multiplies every element in place, at a level.
///
/// # Safety
///
/// The CPU must have the level; `dtype` must be a float; the memory must be as
/// [`crate::scale`] asks.
pub(super) unsafe fn scale(level: Level, dtype: DType, memory: *mut u8, len: usize, factor: f64) {
    // SAFETY: the caller vouches for the level, hence for its `Isa`, and for the rest.
    unsafe {
        match level {
            Level::Portable => scale_by::<Portable>(dtype, memory, len, factor),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => scale_by::<Avx2>(dtype, memory, len, factor),
        }
    }
}

/// Finds the kernel that scales a type.
///
/// # Safety
///
/// As [`scale`], with `I` for the level.
unsafe fn scale_by<I: Isa>(dtype: DType, memory: *mut u8, len: usize, factor: f64) {
    // SAFETY: the caller vouches for the instruction set and the memory; every lane below
    // is that of `dtype`.
    unsafe {
        let start = if is_small(dtype) { I::scale_small(dtype, memory, len, factor) } else { 0 };
        match dtype {
            DType::F16 => I::scale::<f16>(memory, start, len, factor),
            DType::BF16 => I::scale::<bf16>(memory, start, len, factor),
            DType::F32 => I::scale::<f32>(memory, start, len, factor),
            DType::F64 => I::scale::<f64>(memory, start, len, factor),
            DType::F8E4M3 => I::scale::<f8e4m3>(memory, start, len, factor),
            DType::F8E5M2 => I::scale::<f8e5m2>(memory, start, len, factor),
            _ => {}
        }
    }
}

/// An instruction set to compile kernels for.
trait Isa {
    /// Runs one kernel.
    ///
    /// # Safety
    ///
    /// The CPU must have the instruction set; the job's pointers must be as
    /// [`crate::reduce`] asks, over `len` elements of `L`.
    unsafe fn kernel<L: Lane, F: Fold<L::Acc>>(job: &Job<'_>);

    /// Does the first part of a job on small floats, as far as there is a faster way than
    /// [`Isa::kernel`], and returns the element at which the rest starts.
    ///
    /// # Safety
    ///
    /// As [`Isa::kernel`], over elements of `dtype`.
    unsafe fn small(_dtype: DType, _op: ReduceOp, job: &Job<'_>) -> usize {
        job.start
    }

    /// Scales the elements from `start` on.
    ///
    /// # Safety
    ///
    /// The CPU must have the instruction set; the memory must be as [`crate::scale`] asks,
    /// over `len` elements of `L`.
    unsafe fn scale<L: Scaled>(memory: *mut u8, start: usize, len: usize, factor: f64);

    /// Scales the first part of a buffer of small floats, as far as there is a faster way than
    /// [`Isa::scale`], and returns the element at which the rest starts.
    ///
    /// # Safety
    ///
    /// As [`Isa::scale`], over elements of `dtype`.
    unsafe fn scale_small(_dtype: DType, _memory: *mut u8, _len: usize, _factor: f64) -> usize {
        0
    }
}

struct Portable;

impl Isa for Portable {
    unsafe fn kernel<L: Lane, F: Fold<L::Acc>>(job: &Job<'_>) {
        // SAFETY: the caller vouches for the job.
        unsafe { fold_all::<L, F>(job) }
    }

    unsafe fn scale<L: Scaled>(memory: *mut u8, start: usize, len: usize, factor: f64) {
        // SAFETY: the caller vouches for the memory.
        unsafe { scale_all::<L>(memory, start, len, factor) }
    }
}

#[cfg(target_arch = "x86_64")]
struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Isa for Avx2 {
    unsafe fn kernel<L: Lane, F: Fold<L::Acc>>(job: &Job<'_>) {
        #[target_feature(enable = "avx2,f16c")]
        unsafe fn kernel<L: Lane, F: Fold<L::Acc>>(job: &Job<'_>) {
            // SAFETY: the caller vouches for the job.
            unsafe { fold_all::<L, F>(job) }
        }
        // SAFETY: the caller vouches for the CPU and for the job.
        unsafe { kernel::<L, F>(job) }
    }

    unsafe fn small(dtype: DType, op: ReduceOp, job: &Job<'_>) -> usize {
        // SAFETY: the caller vouches for the CPU and for the job.
        unsafe { super::small::run(dtype, op, job) }
    }

    unsafe fn scale<L: Scaled>(memory: *mut u8, start: usize, len: usize, factor: f64) {
        #[target_feature(enable = "avx2,f16c")]
        unsafe fn scale<L: Scaled>(memory: *mut u8, start: usize, len: usize, factor: f64) {
            // SAFETY: the caller vouches for the memory.
            unsafe { scale_all::<L>(memory, start, len, factor) }
        }
        // SAFETY: the caller vouches for the CPU and for the memory.
        unsafe { scale::<L>(memory, start, len, factor) }
    }

    unsafe fn scale_small(dtype: DType, memory: *mut u8, len: usize, factor: f64) -> usize {
        // SAFETY: the caller vouches for the CPU and for the memory.
        unsafe { super::small::scale(dtype, memory, len, factor) }
    }
}

/// The kernel for any instruction set: it is inlined into a function that enables the set.
///
/// # Safety
///
/// The job's pointers must be as [`crate::reduce`] asks, over `len` elements of `L`.
#[inline(always)]
unsafe fn fold_all<L: Lane, F: Fold<L::Acc>>(job: &Job<'_>) {
    // SAFETY: the caller vouches for the job.
    unsafe {
        match (job.ins, job.outs, job.divisor) {
            (&[a, b], &[out], None) => pair::<L, F>(a, b, out, job.start, job.len),
            (&[a, b], &[x, y], None) if a != b && ptr::eq(a, x) && ptr::eq(b, y) => {
                both::<L, F>(x, y, job.start, job.len);
            }
            _ => blocks::<L, F>(job),
        }
    }
}

/// Reads an element.
///
/// # Safety
///
/// `p` must be valid for reads of element `i`; it needs no alignment.
#[inline(always)]
unsafe fn load<L: Lane>(p: *const u8, i: usize) -> L::Acc {
    // SAFETY: the caller vouches for the element; every bit pattern is a valid lane.
    unsafe { p.cast::<L>().add(i).read_unaligned() }.widen()
}

/// Writes an element.
///
/// # Safety
///
/// `p` must be valid for writes of element `i`; it needs no alignment.
#[inline(always)]
unsafe fn store<L: Lane>(p: *mut u8, i: usize, value: L::Acc) {
    // SAFETY: the caller vouches for the element.
    unsafe { p.cast::<L>().add(i).write_unaligned(L::narrow(value)) };
}

/// The kernel that scales, for any instruction set: it is inlined as [`fold_all`] is.
///
/// # Safety
///
/// The memory must be as [`crate::scale`] asks, over `len` elements of `L`.
#[inline(always)]
unsafe fn scale_all<L: Scaled>(memory: *mut u8, start: usize, len: usize, factor: f64) {
    for i in start..len {
        // SAFETY: `i < len`.
        unsafe { store::<L>(memory, i, L::times(load::<L>(memory, i), factor)) };
    }
}

/// Two inputs and one output, straight from memory to memory.
///
/// LLVM guards a vectorised loop with a test that its pointers' ranges do not overlap, and runs
/// a scalar loop if they do. In place, output and input are the same range. So that case has a
/// loop of its own, with one pointer less, which passes the test.
///
/// # Safety
///
/// As [`fold_all`].
#[inline(always)]
unsafe fn pair<L: Lane, F: Fold<L::Acc>>(a: *const u8, b: *const u8, out: *mut u8, start: usize, len: usize) {
    // Folding two is commutative, so the inputs can be swapped: from here on, if the output is
    // one of them, it is `a`.
    let (a, b) = if ptr::eq(out, b) { (b, a) } else { (a, b) };
    if ptr::eq(out, a) {
        for i in start..len {
            // SAFETY: `i < len`.
            unsafe { store::<L>(out, i, F::fold(load::<L>(out, i), load::<L>(b, i))) };
        }
    } else {
        for i in start..len {
            // SAFETY: `i < len`.
            unsafe { store::<L>(out, i, F::fold(load::<L>(a, i), load::<L>(b, i))) };
        }
    }
}

/// Two inputs that are also the two outputs: one loop, where [`blocks`] would need three.
///
/// # Safety
///
/// As [`fold_all`]; `a` and `b` do not overlap.
#[inline(always)]
unsafe fn both<L: Lane, F: Fold<L::Acc>>(a: *mut u8, b: *mut u8, start: usize, len: usize) {
    for i in start..len {
        // SAFETY: `i < len`.
        unsafe {
            let folded = F::fold(load::<L>(a, i), load::<L>(b, i));
            store::<L>(a, i, folded);
            store::<L>(b, i, folded);
        }
    }
}

/// Room on the stack for a block of folded values: no pointer of the caller's can alias it,
/// and it stays in L1.
#[repr(align(64))]
struct Scratch([MaybeUninit<u8>; 4096]);

/// Any number of inputs and outputs, block by block. All inputs of a block are read before
/// an output of it is written, so outputs may be inputs.
///
/// # Safety
///
/// As [`fold_all`].
#[inline(always)]
unsafe fn blocks<L: Lane, F: Fold<L::Acc>>(job: &Job<'_>) {
    let mut scratch = Scratch([MaybeUninit::uninit(); 4096]);
    let acc = scratch.0.as_mut_ptr().cast::<L::Acc>();
    let step = size_of::<Scratch>() / size_of::<L::Acc>();
    let (first_out, other_outs) = (job.outs[0], &job.outs[1..]);
    let mut at = job.start;
    while at < job.len {
        let n = step.min(job.len - at);
        // SAFETY: `at + n <= len` for the caller's buffers, `n <= step` for the scratch,
        // which is aligned for any lane. The first loop over a block writes `acc[..n]` before
        // later ones read it. Of the outputs, those that are not equal do not overlap.
        unsafe {
            let mut rest = match *job.ins {
                [a, b, c, d, ref rest @ ..] => {
                    for i in 0..n {
                        let ab = F::fold(load::<L>(a, at + i), load::<L>(b, at + i));
                        let abc = F::fold(ab, load::<L>(c, at + i));
                        acc.add(i).write(F::fold(abc, load::<L>(d, at + i)));
                    }
                    rest
                }
                [a, b, ref rest @ ..] => {
                    for i in 0..n {
                        let ab = F::fold(load::<L>(a, at + i), load::<L>(b, at + i));
                        acc.add(i).write(ab);
                    }
                    rest
                }
                [a, ref rest @ ..] => {
                    for i in 0..n {
                        acc.add(i).write(load::<L>(a, at + i));
                    }
                    rest
                }
                [] => return,
            };
            while let [a, b, ref after @ ..] = *rest {
                for i in 0..n {
                    let folded = F::fold(acc.add(i).read(), load::<L>(a, at + i));
                    acc.add(i).write(F::fold(folded, load::<L>(b, at + i)));
                }
                rest = after;
            }
            if let [a] = *rest {
                for i in 0..n {
                    let folded = F::fold(acc.add(i).read(), load::<L>(a, at + i));
                    acc.add(i).write(folded);
                }
            }
            match job.divisor {
                Some(by) => {
                    for i in 0..n {
                        store::<L>(first_out, at + i, L::divide(acc.add(i).read(), by));
                    }
                }
                None => {
                    for i in 0..n {
                        store::<L>(first_out, at + i, acc.add(i).read());
                    }
                }
            }
            for &out in other_outs {
                if !ptr::eq(out, first_out) {
                    let (skip, bytes) = (at * size_of::<L>(), n * size_of::<L>());
                    ptr::copy_nonoverlapping(first_out.add(skip), out.add(skip), bytes);
                }
            }
        }
        at += n;
    }
}
