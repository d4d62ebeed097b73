//! Copying, zeroing, adding, scaling and rounding elements of host buffers whose types are known at run time: what gradient buckets do with
//! the buffers that they hold. Types, lengths and places are checked first, so the functions are safe.

use std::ops::Range;

use allstream_kernels as kernels;

use super::{Buf, Where};
use crate::types::{DType, Element, ReduceOp, bf16, f8e4m3, f8e5m2, f16};

/// Where the first element of a buffer is; `None` where it is on a device, or cannot be used.
fn start<B: Buf>(buf: &mut B) -> Option<*mut u8> {
    match buf.location().0 {
        Where::Host(start) => Some(start),
        Where::Device(_) | Where::Unfit(_) => None,
    }
}

/// Whether `len` elements from `at` on are all in a buffer of `total`.
fn fits(at: usize, len: usize, total: usize) -> bool {
    at.checked_add(len).is_some_and(|end| end <= total)
}

/// Copies `len` elements of `from`, from element `from.1` on, into `to`, from element `to.1` on. `None`, and nothing is copied, where
/// types differ, one of the buffers does not have so many elements, or one is not on the host.
pub(crate) fn copy<F: Buf, T: Buf>(from: (&mut F, usize), to: (&mut T, usize), len: usize) -> Option<()> {
    let ((from, from_at), (to, to_at)) = (from, to);
    let dtype = from.dtype();
    if dtype != to.dtype() || !fits(from_at, len, from.len()) || !fits(to_at, len, to.len()) {
        return None;
    }
    let (source, target) = (start(from)?, start(to)?);
    let unit = dtype.size();
    if len > 0 {
        // SAFETY: both buffers have `len` elements of this type from `from_at` and `to_at` on (checked above), valid and initialised as `Buf`
        // promises. Both are borrowed mutably: so they are two buffers, do not overlap, and nobody else reads or writes them.
        unsafe {
            std::ptr::copy_nonoverlapping(source.add(from_at * unit), target.add(to_at * unit), len * unit)
        };
    }
    Some(())
}

/// Makes all elements zero. `None`, and nothing is written, where the buffer is not on the host.
pub(crate) fn zero<B: Buf>(buf: &mut B) -> Option<()> {
    let (start, bytes) = (start(buf)?, buf.len() * buf.dtype().size());
    if bytes > 0 {
        // SAFETY: the buffer's own elements, valid for writes as `Buf` promises and borrowed mutably here; every element type is valid
        // when all of its bytes are zero.
        unsafe { start.write_bytes(0, bytes) };
    }
    Some(())
}

/// Adds the elements of `from` to those of `to`, as an all_reduce of two ranks adds them. `None`, and nothing is written, where the buffers
/// differ in type or length, or one is not on the host.
pub(crate) fn add<F: Buf, T: Buf>(from: &mut F, to: &mut T) -> Option<()> {
    let (dtype, len) = (from.dtype(), from.len());
    if dtype != to.dtype() || len != to.len() {
        return None;
    }
    let (source, target) = (start(from)?, start(to)?);
    if len > 0 {
        // SAFETY: both have `len` elements of this type, valid and aligned as `Buf` promises; they are borrowed mutably, so that nobody
        // else touches them and they do not overlap each other. The output is the first input itself, which `reduce` allows.
        unsafe {
            kernels::reduce(
                dtype,
                ReduceOp::Sum,
                &[target.cast_const(), source.cast_const()],
                &[target],
                len,
                None,
            );
        }
    }
    Some(())
}

/// Multiplies the elements of a range by a factor. `None`, and nothing is written, where they are no floats, are not all in the buffer, or
/// not on the host.
pub(crate) fn scale<B: Buf>(buf: &mut B, range: Range<usize>, factor: f64) -> Option<()> {
    let (dtype, len) = (buf.dtype(), range.len());
    let inside = fits(range.start, len, buf.len());
    let start = start(buf).filter(|_| inside && dtype.scales())?;
    if len > 0 {
        // SAFETY: the buffer's own elements, of which the range is a part (`inside`), valid as `Buf` promises and borrowed mutably here.
        unsafe { kernels::scale(dtype, start.add(range.start * dtype.size()), len, factor) };
    }
    Some(())
}

/// The sum of the squares of the elements of a range, in `f64`, added in an order that depends only on the range's length. `None` where they
/// are no floats, are not all in the buffer, or not on the host.
pub(crate) fn squares<B: Buf>(buf: &mut B, range: Range<usize>) -> Option<f64> {
    fn of<T: Element>(start: *mut u8, range: Range<usize>, value: impl Fn(T) -> f64) -> f64 {
        if range.is_empty() {
            return 0.0;
        }
        let (at, len) = (range.start, range.len());
        // SAFETY: the caller below gives the start of a buffer whose type is `T`, which it borrows meanwhile, and a range inside that
        // buffer.
        let values = unsafe { std::slice::from_raw_parts(start.cast::<T>().cast_const().add(at), len) };
        // Several sums, so that one addition need not wait for the one before.
        let (pieces, rest) = values.as_chunks::<8>();
        let mut sums = [0.0; 8];
        for piece in pieces {
            sums.iter_mut().zip(piece).for_each(|(sum, x)| *sum += value(*x) * value(*x));
        }
        sums.iter().sum::<f64>() + rest.iter().map(|x| value(*x) * value(*x)).sum::<f64>()
    }
    let inside = fits(range.start, range.len(), buf.len());
    let at = start(buf).filter(|_| inside)?;
    Some(match buf.dtype() {
        DType::F64 => of::<f64>(at, range, |x| x),
        DType::F32 => of::<f32>(at, range, f64::from),
        DType::F16 => of::<f16>(at, range, f64::from),
        DType::BF16 => of::<bf16>(at, range, f64::from),
        DType::F8E4M3 => of::<f8e4m3>(at, range, |x| f64::from(x.to_f32())),
        DType::F8E5M2 => of::<f8e5m2>(at, range, |x| f64::from(x.to_f32())),
        _ => return None,
    })
}

/// Adds to the elements of `from` what rounding took from them last time (`residual`), and rounds the sums to elements of 16 bits of `to`, from
/// element `to.1` on. `residual` then has what rounding took this time ([`kernels::compress`]). `None`, and nothing is written, where `from` is
/// not of `f32` or has another length than `residual`, where `to` is neither `f16` nor `bf16` or is too short, or one is not on the host.
pub(crate) fn compress<F: Buf, T: Buf>(
    from: &mut F,
    residual: &mut [f32],
    to: (&mut T, usize),
) -> Option<()> {
    let (to, at) = to;
    let (len, wire) = (residual.len(), to.dtype());
    let is_half = matches!(wire, DType::F16 | DType::BF16);
    if from.dtype() != DType::F32 || from.len() != len || !is_half || !fits(at, len, to.len()) {
        return None;
    }
    let (source, target) = (start(from)?, start(to)?);
    if len > 0 {
        // SAFETY: `from` has `len` elements of `f32`, as was compared above, valid as `Buf` promises, and is borrowed mutably meanwhile.
        let from = unsafe { std::slice::from_raw_parts(source.cast::<f32>().cast_const(), len) };
        // SAFETY: `to` has `len` elements of 16 bits from `at` on, as was compared; it is borrowed mutably, so it is another buffer than `from`.
        // Any 16 bits are a valid float.
        let to = unsafe { std::slice::from_raw_parts_mut(target.cast::<u16>().add(at), len) };
        kernels::compress(wire, from, residual, to);
    }
    Some(())
}

/// Widens elements of 16 bits of `from`, from element `from.1` on, to all elements of `to`. `None`, and nothing is written, where `to` is not of
/// `f32`, where `from` is neither `f16` nor `bf16` or is too short, or one is not on the host.
pub(crate) fn expand<F: Buf, T: Buf>(from: (&mut F, usize), to: &mut T) -> Option<()> {
    let (from, at) = from;
    let (len, wire) = (to.len(), from.dtype());
    let is_half = matches!(wire, DType::F16 | DType::BF16);
    if to.dtype() != DType::F32 || !is_half || !fits(at, len, from.len()) {
        return None;
    }
    let (source, target) = (start(from)?, start(to)?);
    if len > 0 {
        // SAFETY: `to` has `len` elements of `f32`, as was compared above, valid as `Buf` promises, and is borrowed mutably meanwhile.
        let to = unsafe { std::slice::from_raw_parts_mut(target.cast::<f32>(), len) };
        // SAFETY: `from` has `len` elements of 16 bits from `at` on, as was compared; it is borrowed mutably, so it is another buffer than `to`.
        let from = unsafe { std::slice::from_raw_parts(source.cast::<u16>().add(at).cast_const(), len) };
        kernels::expand(wire, from, to);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::AnyBuf;

    #[test]
    fn elements_of_one_type_are_copied_added_and_zeroed_and_nothing_beyond_them() {
        let (mut from, mut to) = (vec![1_f32, 2.0, 3.0], AnyBuf::zeroed(DType::F32, 5).unwrap());
        assert_eq!(copy((&mut from, 1), (&mut to, 3), 2), Some(()));
        assert_eq!(to.as_slice::<f32>(), Some(&[0.0, 0.0, 0.0, 2.0, 3.0][..]));
        assert_eq!(copy((&mut to, 2), (&mut from, 0), 2), Some(()));
        assert_eq!(from, [0.0, 2.0, 3.0]);
        let mut more = AnyBuf::new(vec![10_f32; 3]);
        assert_eq!((add(&mut from, &mut more), add(&mut more, &mut from)), (Some(()), Some(())));
        assert_eq!((from, more.as_slice::<f32>()), (vec![10.0, 14.0, 16.0], Some(&[10.0, 12.0, 13.0][..])));
        assert_eq!(zero(&mut to), Some(()));
        assert_eq!(to.as_slice::<f32>(), Some(&[0.0; 5][..]));
    }

    #[test]
    fn what_does_not_fit_is_refused_and_left_as_it_was() {
        let (mut floats, mut halves, mut two) = (vec![1_f32; 3], vec![bf16::ONE; 3], vec![2_f32; 2]);
        assert_eq!(copy((&mut floats, 0), (&mut halves, 0), 1), None, "another type");
        assert_eq!(copy((&mut floats, 2), (&mut two, 0), 2), None, "beyond what is read from");
        assert_eq!(copy((&mut floats, 0), (&mut two, 1), 2), None, "beyond what is written to");
        assert_eq!(copy((&mut floats, usize::MAX), (&mut two, 0), 2), None);
        assert_eq!((add(&mut floats, &mut two), add(&mut halves, &mut floats)), (None, None));
        assert_eq!((floats, halves, two), (vec![1.0; 3], vec![bf16::ONE; 3], vec![2.0; 2]));
    }

    #[test]
    fn what_rounding_takes_is_kept_and_comes_back_as_it_was_sent() {
        let (mut from, mut residual) = (vec![1.0 + 2f32.powi(-9), -3.0, f32::NAN], vec![0.0; 3]);
        let mut wire = AnyBuf::zeroed(DType::BF16, 4).unwrap();
        assert_eq!(compress(&mut from, &mut residual, (&mut wire, 1)), Some(()));
        assert_eq!(residual, [2f32.powi(-9), 0.0, 0.0]);
        let mut back = vec![0_f32; 3];
        assert_eq!(expand((&mut wire, 1), &mut back), Some(()));
        assert!(back[..2] == [1.0, -3.0] && back[2].is_nan(), "{back:?}");
        let mut doubles = vec![1_f64; 3];
        assert_eq!(compress(&mut doubles, &mut residual, (&mut wire, 1)), None, "another type");
        assert_eq!(compress(&mut from, &mut residual, (&mut wire, 2)), None, "beyond what is written to");
        assert_eq!(compress(&mut from, &mut residual[..2], (&mut wire, 0)), None, "another length");
        assert_eq!(expand((&mut wire, 2), &mut back), None, "beyond what is read from");
        assert_eq!(expand((&mut from, 0), &mut back), None, "another type");
    }
}
