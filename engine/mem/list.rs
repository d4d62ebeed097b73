//! Several buffers in one operation.

use super::{Buf, RawBuf};

mod sealed {
    pub trait Sealed {}
}

/// Several buffers that one operation takes together: a `Vec` or an array of buffers of one type, or a tuple of up to six
/// such lists, which may be of different types: `(weights, biases)` with `Vec<Vec<bf16>>` and `[Vec<f32>; 2]`.
///
/// Lengths may differ, and be 0; all ranks give the same lengths and types in the same order.
///
/// To give single buffers of different types, make each a list of one: `([a], [b])`. Tuples nest, so that what belongs
/// together comes back together, and more than six lists fit:
///
/// ```
/// # fn main() -> Result<(), allstream::Error> {
/// # let mut comm = allstream::Comm::local(1)?.remove(0);
/// let (weights, biases, steps) = (vec![vec![1.0f32; 9]; 3], vec![vec![0.0f32; 3]; 3], vec![7u64]);
/// let ((weights, biases), [steps]) = comm.broadcast_list(((weights, biases), [steps]), 0).wait()?;
/// # assert_eq!((weights.len(), biases.len(), steps[0]), (3, 3, 7)); Ok(()) }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a list of buffers",
    label = "not a list of buffers",
    note = "lists are Vecs or arrays of buffers of one type, [a, b], or tuples of lists: ([a], [b]) for buffers of different types, and \
            tuples of tuples of those"
)]
pub trait BufList: sealed::Sealed + Send + 'static {
    /// Visits each buffer, in order: at every call the same buffers, at the same places.
    #[doc(hidden)]
    fn each(&mut self, visit: &mut dyn FnMut(RawBuf));
}

impl<B: Buf> sealed::Sealed for Vec<B> {}
impl<B: Buf> BufList for Vec<B> {
    fn each(&mut self, visit: &mut dyn FnMut(RawBuf)) {
        self.iter_mut().for_each(|buf| visit(RawBuf::of(buf)));
    }
}

impl<B: Buf, const N: usize> sealed::Sealed for [B; N] {}
impl<B: Buf, const N: usize> BufList for [B; N] {
    fn each(&mut self, visit: &mut dyn FnMut(RawBuf)) {
        self.iter_mut().for_each(|buf| visit(RawBuf::of(buf)));
    }
}

macro_rules! tuples {
    ($(($($name:ident $at:tt),+))*) => {$(
        impl<$($name: BufList),+> sealed::Sealed for ($($name,)+) {}
        impl<$($name: BufList),+> BufList for ($($name,)+) {
            fn each(&mut self, visit: &mut dyn FnMut(RawBuf)) {
                $(self.$at.each(visit);)+
            }
        }
    )*};
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
}

/// The buffers of a list, in order.
pub(crate) fn raw_bufs<L: BufList>(list: &mut L) -> Vec<RawBuf> {
    let mut all = Vec::new();
    list.each(&mut |buf| all.push(buf));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Where;
    use crate::types::DType;

    #[test]
    fn lists_are_visited_in_order() {
        let mut list = (vec![vec![1f32; 3], vec![]], [vec![0u8; 2].into_boxed_slice()]);
        let seen: Vec<_> = raw_bufs(&mut list).iter().map(|m| (m.dtype, m.len)).collect();
        assert_eq!(seen, [(DType::F32, 3), (DType::F32, 0), (DType::U8, 2)]);
        let first = raw_bufs(&mut list)[0].place.clone();
        assert!(matches!(first.0, Where::Host(at) if at == list.0[0].as_mut_ptr().cast()));
    }
}
