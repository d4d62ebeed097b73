//! Reductions by a function that the user supplies.

use std::fmt;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::sync::Arc;

use crate::{DType, Element};

/// A reduction by a function that the user supplies, with the element type erased.
pub trait Combine: Send + Sync {
    /// The name of the function: all ranks must give the same name.
    fn name(&self) -> &str;

    /// The type of the elements that the function combines.
    fn dtype(&self) -> DType;

    /// Whether the order of the operands does not matter.
    fn commutes(&self) -> bool;

    /// Combines `ins`, in this order, into each of `outs`. Returns `false` if the function panicked: the outputs are then
    /// unspecified. Also returns `false` if the elements are `bool`, which no function can combine.
    ///
    /// # Safety
    ///
    /// As [`crate::reduce`], for elements of [`Combine::dtype`].
    unsafe fn combine(&self, ins: &[*const u8], outs: &[*mut u8], len: usize) -> bool;
}

/// A reduction by a function of your own, for host buffers of `T`.
///
/// `f(left, right)` combines two slices element by element and leaves the result in `left`. It must be associative, and
/// give the same result on all ranks. Any thread that drives the communicator may run it: it must not block, and must
/// not call the communicator. If it panics, the operation fails on all ranks. Not for `bool`: use `u8`.
pub struct Function<T: Element>(Arc<Inner<T>>);

type Fold<T> = dyn Fn(&mut [T], &[T]) + Send + Sync;

struct Inner<T: Element> {
    name: String,
    commutes: bool,
    /// `None` only while this is being dropped.
    f: Option<Box<Fold<T>>>,
}

impl<T: Element> Drop for Inner<T> {
    /// Drops the user's function and what it has captured. If that panics, the panic is reported on stderr and goes no further: the thread
    /// that drops the last share of the function may be one that drives operations, for which many others wait.
    fn drop(&mut self) {
        let f = self.f.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(f)));
    }
}

impl<T: Element> Function<T> {
    /// A function for which the order of its operands does not matter. Ranks compare `name` to see that all use the same function.
    pub fn commutative(
        name: impl Into<String>,
        f: impl Fn(&mut [T], &[T]) + Send + Sync + 'static,
    ) -> Function<T> {
        Function(Arc::new(Inner { name: name.into(), commutes: true, f: Some(Box::new(f)) }))
    }

    /// A function for which the order of its operands matters: `left` comes from lower ranks than `right`. Algorithms
    /// that do not keep the order of ranks are not chosen, and are refused if the user names them.
    pub fn ordered(
        name: impl Into<String>,
        f: impl Fn(&mut [T], &[T]) + Send + Sync + 'static,
    ) -> Function<T> {
        Function(Arc::new(Inner { name: name.into(), commutes: false, f: Some(Box::new(f)) }))
    }

    /// The name that ranks compare.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The same function, with its element type erased.
    pub fn erased(&self) -> Arc<dyn Combine> {
        self.0.clone()
    }
}

impl<T: Element> Clone for Function<T> {
    fn clone(&self) -> Self {
        Function(self.0.clone())
    }
}

impl<T: Element> fmt::Debug for Function<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function<{}>({:?})", T::DTYPE, self.0.name)
    }
}

impl<T: Element> Combine for Inner<T> {
    fn name(&self) -> &str {
        &self.name
    }
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    fn commutes(&self) -> bool {
        self.commutes
    }
    unsafe fn combine(&self, ins: &[*const u8], outs: &[*mut u8], len: usize) -> bool {
        // The operands may hold bytes other than 0 and 1, which are not valid as `bool`.
        if T::DTYPE == DType::Bool {
            return false;
        }
        let Some(f) = &self.f else { return false };
        // SAFETY: the caller vouches for the buffers; every bit pattern is a valid T, as T is an Element and not bool.
        unsafe { fold_with::<T>(f, ins, outs, len) }
    }
}

/// Bytes of a block on the stack.
const BLOCK: usize = 4096;

/// Room for a block on the stack: none of the caller's pointers aliases it, and it is aligned for every element type.
#[repr(align(64))]
struct Block([MaybeUninit<u8>; BLOCK]);

/// Folds with `f(left, right)`, which leaves the combination of both in `left`, element by element. `f` gets copies of
/// the operands, so its slices are aligned and initialised, and nobody else touches them, wherever the operands lie.
/// Returns `false` if `f` panicked.
///
/// # Safety
///
/// As [`crate::reduce`], for elements of type `T`: at least one input and one output, each valid for `len` elements,
/// and every bit pattern in the inputs valid for `T`.
unsafe fn fold_with<T: Element>(
    f: &(dyn Fn(&mut [T], &[T]) + Send + Sync),
    ins: &[*const u8],
    outs: &[*mut u8],
    len: usize,
) -> bool {
    let (mut left, mut right) =
        (Block([MaybeUninit::uninit(); BLOCK]), Block([MaybeUninit::uninit(); BLOCK]));
    let (step, mut at) = (BLOCK / size_of::<T>(), 0);
    let [first, rest @ ..] = ins else { return true };
    while at < len {
        let n = step.min(len - at);
        let (skip, bytes) = (at * size_of::<T>(), n * size_of::<T>());
        // SAFETY: the caller vouches that `len >= at + n` elements of each input can be read; `left` has room for
        // `BLOCK >= bytes`, and no input overlaps it.
        unsafe { left.0.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(first.add(skip), bytes) };
        for &input in rest {
            // SAFETY: as above.
            unsafe { right.0.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(input.add(skip), bytes) };
            // SAFETY: both blocks are aligned to 64, and their first `n` elements were written above with values that
            // the caller vouches for. They are two local variables, so the slices do not overlap.
            let (a, b) = unsafe {
                (
                    slice::from_raw_parts_mut(left.0.as_mut_ptr().cast::<T>(), n),
                    slice::from_raw_parts(right.0.as_ptr().cast::<T>(), n),
                )
            };
            if catch_unwind(AssertUnwindSafe(|| f(a, b))).is_err() {
                return false;
            }
        }
        for &out in outs {
            // SAFETY: the caller vouches that `len >= at + n` elements of each output can be written; none overlaps `left`.
            unsafe { out.add(skip).copy_from_nonoverlapping(left.0.as_ptr().cast::<u8>(), bytes) };
        }
        at += n;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_folded_from_the_left_also_in_place_and_unaligned() {
        let f = |a: &mut [u32], b: &[u32]| {
            a.iter_mut().zip(b).for_each(|(a, b)| *a = a.wrapping_mul(10).wrapping_add(*b))
        };
        let len = 3000;
        let column: Vec<Vec<u8>> = (1..=3u32)
            .map(|x| {
                let mut bytes = vec![0];
                (0..len).for_each(|_| bytes.extend(x.to_ne_bytes()));
                bytes
            })
            .collect();
        let mut out = column[0].clone();
        let mut other = vec![0u8; 1 + len * 4];
        let at = out[1..].as_mut_ptr();
        let ins = [at.cast_const(), column[1][1..].as_ptr(), column[2][1..].as_ptr()];
        // SAFETY: each buffer has `len` elements from byte 1 on; the first output is equal to the first input.
        assert!(unsafe { fold_with(&f, &ins, &[at, other[1..].as_mut_ptr()], len) });
        let all = |bytes: &[u8]| {
            bytes[1..].chunks_exact(4).all(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]) == 123)
        };
        assert!(all(&out) && all(&other));
    }

    #[test]
    fn a_panic_in_the_drop_of_what_a_function_has_captured_ends_there() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                std::panic::panic_any("a drop of a test");
            }
        }
        let captured = Panics;
        let function = Function::commutative("a test", move |left: &mut [u8], _: &[u8]| {
            let _ = &captured;
            left.fill(0);
        });
        // The last share of the function, such as a thread that drives operations may hold.
        let last = function.erased();
        drop(function);
        assert!(catch_unwind(AssertUnwindSafe(|| drop(last))).is_ok());
    }

    #[test]
    fn a_panic_is_told() {
        let f = |_: &mut [u8], _: &[u8]| panic!("on purpose");
        let (a, mut b) = ([1u8; 4], [2u8; 4]);
        let at = b.as_mut_ptr();
        // SAFETY: both buffers have four elements; the output is equal to the second input.
        assert!(!unsafe { fold_with(&f, &[a.as_ptr(), at.cast_const()], &[at], 4) });
    }
}
