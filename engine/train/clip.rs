//! Clipping gradients by their global norm.

use crate::error::Error;
use crate::mem::{Buf, elements};

/// Scales all gradients by one factor where their norm (the root of the sum of the squares of all their elements) is more than `most`, so
/// that
/// it is `most` then. Gives the norm that they had.
///
/// Nothing is sent: gradients that were reduced have the same bits on all ranks, and so has what comes of them. Computed in `f64`.
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
/// `grads`; one of integers, or on
/// a device; a limit that is not positive and finite.
pub fn clip_norm<B: Buf>(grads: &mut [B], most: f64) -> Result<f64, Error> {
    let invalid = |problem: String| Err(Error::invalid("clip_norm", problem));
    if !(most.is_finite() && most > 0.0) {
        return invalid(format!("the most that the norm may be is {most}, expected a number above 0"));
    }
    let mut sum = 0.0;
    for (i, grad) in grads.iter_mut().enumerate() {
        match elements::squares(grad) {
            Some(squares) if squares.is_finite() => sum += squares,
            Some(squares) => {
                return invalid(format!(
                    "the squares of gradient {i} add up to {squares}: it has elements that are no finite numbers, or too large ones; \
                     skip this step"
                ));
            }
            None => {
                return invalid(format!(
                    "gradient {i} is {} x {}, expected floats on the host",
                    grad.len(),
                    grad.dtype()
                ));
            }
        }
    }
    let norm = f64::sqrt(sum);
    if norm > most {
        // All are floats on the host, as was seen above, so that each is scaled.
        for grad in grads {
            let _ = elements::scale(grad, most / norm);
        }
    }
    Ok(norm)
}
