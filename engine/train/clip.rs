//! Clipping gradients by their global norm.

use std::ops::Range;

use crate::error::Error;
use crate::mem::{Buf, elements};

/// Scales all gradients by one factor where their norm (the root of the sum of the squares of all their elements) is more than `most`, so
/// that it is `most` then. Gives the norm that they had.
///
/// Nothing is sent: gradients that were reduced have the same bits on all ranks, and so has what comes of them. Computed in `f64`.
///
/// **Not for sharded buckets.** Of those each rank has the mean of its own part only, and other numbers beside it, which this function cannot
/// know: its norm would mean nothing, and be another one on each rank. [`Buckets::clip_norm`](super::Buckets::clip_norm) knows, and is right
/// for both kinds.
///
/// ```
/// let mut grads = [vec![3.0f32, 0.0], vec![4.0f32]];
/// assert_eq!(allstream::train::clip_norm(&mut grads, 1.0)?, 5.0);
/// assert_eq!(grads, [vec![0.6, 0.0], vec![0.8]]);
/// # Ok::<(), allstream::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`], and nothing is changed, on all ranks alike: a gradient with a NaN or an infinity, which is named by its number in
/// `grads`; one of integers, or on a device; a limit that is not positive and finite.
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
        None => Ok(squares.iter().sum::<f64>().sqrt()),
        Some(i) => Err(invalid(format!(
            "the squares of gradient {i} add up to {}: it has elements that are no finite numbers, or too large ones; skip this step",
            squares[i]
        ))),
    }
}

/// Scales elements of a gradient whose [`squares`] are known: they are floats on the host, so that it cannot fail.
pub(super) fn scale<B: Buf>(grad: &mut B, range: Range<usize>, factor: f64) {
    let _ = elements::scale(grad, range, factor);
}
