//! Clipping gradients by their global norm.

use std::ops::Range;

use crate::error::Error;
use crate::mem::{Buf, elements};

/// Scales all gradients by one factor if their norm (the root of the sum of the squares of all their elements) is more than `most`, so
/// that the norm becomes `most`. Returns the norm before that.
///
/// Nothing is sent: reduced gradients have the same bits on all ranks, and so have the norm and the scaled ones. Computed in `f64`.
///
/// **Not for sharded buckets.** There each rank has the mean of its own part only, and other numbers elsewhere. This function cannot tell them
/// apart: its norm would mean nothing, and differ from rank to rank. [`Buckets::clip_norm`](super::Buckets::clip_norm) can, and is right for
/// both kinds of buckets.
///
/// ```
/// let mut grads = [vec![3.0f32, 0.0], vec![4.0f32]];
/// assert_eq!(allstream::train::clip_norm(&mut grads, 1.0)?, 5.0);
/// assert_eq!(grads, [vec![0.6, 0.0], vec![0.8]]);
/// # Ok::<(), allstream::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`], and nothing is changed: a gradient has a NaN or an infinity (the error gives its number in `grads`), is of integers or
/// on a device, or the limit is not positive and finite. For reduced gradients and one limit it is the same on all ranks.
pub fn clip_norm<B: Buf>(grads: &mut [B], most: f64) -> Result<f64, Error> {
    check_limit(most)?;
    let squares = grads.iter_mut().enumerate().map(|(i, grad)| {
        let all = 0..grad.len();
        squares(i, grad, all)
    });
    let norm = norm(&squares.collect::<Result<Vec<f64>, Error>>()?)?;
    if norm > most {
        grads.iter_mut().for_each(|grad| {
            let all = 0..grad.len();
            scale(grad, all, most / norm);
        });
    }
    Ok(norm)
}

pub(super) fn invalid(problem: String) -> Error {
    Error::invalid("clip_norm", problem)
}

pub(super) fn check_limit(most: f64) -> Result<(), Error> {
    if most.is_finite() && most > 0.0 {
        return Ok(());
    }
    Err(invalid(format!("the most that the norm may be is {most}, expected a number above 0")))
}

/// The sum of the squares of some elements of gradient `i`.
pub(super) fn squares<B: Buf>(i: usize, grad: &mut B, range: Range<usize>) -> Result<f64, Error> {
    elements::squares(grad, range).ok_or_else(|| {
        let (len, dtype) = (grad.len(), grad.dtype());
        invalid(format!("gradient {i} is {len} x {dtype}, expected floats on the host"))
    })
}

/// The norm of all gradients, from the sums of the squares of each.
pub(super) fn norm(squares: &[f64]) -> Result<f64, Error> {
    match squares.iter().position(|squares| !squares.is_finite()) {
        None => Some(squares.iter().sum::<f64>().sqrt()).filter(|norm| norm.is_finite()).ok_or_else(|| {
            invalid("the squares of all gradients together are too large for f64; skip this step".into())
        }),
        Some(i) => Err(invalid(format!(
            "the squares of gradient {i} add up to {}: it has a NaN, an infinity, or elements whose squares are too large for f64; skip this step",
            squares[i]
        ))),
    }
}

/// Scales elements of a gradient for which [`squares`] has succeeded: they are floats on the host, so this cannot fail.
pub(super) fn scale<B: Buf>(grad: &mut B, range: Range<usize>, factor: f64) {
    let _ = elements::scale(grad, range, factor);
}
