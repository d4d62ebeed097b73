//! Errors: wraps the engine's errors in candle's, with what was being done, and finds them again.

use candle_core::Error;

/// Wraps an error of the engine in one of candle's, which says what was being done. [`cause`] finds the engine's error again.
pub(crate) fn failed(doing: impl Into<String>, error: allstream::Error) -> Error {
    Error::WrappedContext { wrapped: Box::new(error), context: doing.into() }
}

/// The engine's error inside an error of candle's; `None` if there is none. By it a lost rank ([`allstream::Error::PeerLost`]) can be
/// told from a tensor of a wrong shape.
///
/// ```
/// use allstream::{Comm, ReduceOp};
/// use allstream_candle::{AllReduce, cause};
/// use candle_core::{Device, Tensor};
///
/// let comm = Comm::local(1)?.remove(0).share();
/// let x = Tensor::new(&[1u8], &Device::Cpu)?;
/// let error = x.apply_op1(AllReduce::new(&comm)).err();
/// assert!(error.is_none());
///
/// comm.abort("enough");
/// let error = x.apply_op1(AllReduce::new(&comm)).unwrap_err();
/// assert!(matches!(cause(&error), Some(allstream::Error::Aborted { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn cause(error: &Error) -> Option<&allstream::Error> {
    match error {
        Error::WrappedContext { wrapped, .. } => match wrapped.downcast_ref::<allstream::Error>() {
            Some(error) => Some(error),
            None => wrapped.downcast_ref::<Error>().and_then(cause),
        },
        Error::Context { inner, .. } | Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } => {
            cause(inner)
        }
        _ => None,
    }
}
