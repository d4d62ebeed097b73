//! Turns the buffers that the endpoint held for an operation back into what the user gets.

use crate::error::{Error, Failed, Outcome};
use crate::mem::{Buf, ErasedBufs, Parts};
use crate::types::Element;

pub(super) fn both<I: Send + 'static, O: Send + 'static>(
    result: Outcome,
    held: Option<ErasedBufs>,
) -> Result<(I, O), Failed<(I, O)>> {
    let parts = held.and_then(ErasedBufs::take::<Parts<I, O>>).map(|p| (p.input, p.output));
    settle(result, parts)
}

pub(super) fn one<B: Send + 'static>(result: Outcome, held: Option<ErasedBufs>) -> Result<B, Failed<B>> {
    let parts = held.and_then(ErasedBufs::take::<Parts<(), B>>).map(|p| p.output);
    settle(result, parts)
}

pub(super) fn made<I: Buf<Elem: Element>>(
    result: Outcome,
    held: Option<ErasedBufs>,
) -> Result<Vec<I::Elem>, Failed<I>> {
    let parts = held.and_then(ErasedBufs::take::<Parts<I, Vec<I::Elem>>>);
    match (result, parts) {
        (Ok(()), Some(parts)) => Ok(parts.output),
        (result, parts) => Err(Failed { buf: parts.map(|p| p.input), error: lost(result) }),
    }
}

/// For a buffer of one element: gives the user that element.
pub(super) fn one_value<T: Element>(result: Outcome, held: Option<ErasedBufs>) -> Result<T, Failed<T>> {
    let value = |buf: Vec<T>| buf.first().copied();
    match one::<Vec<T>>(result, held) {
        Ok(buf) => settle(Ok(()), value(buf)),
        Err(Failed { buf, error }) => Err(Failed { buf: buf.and_then(value), error }),
    }
}

/// For a call on one element that makes a vector: gives the user the vector, or on failure the element.
pub(super) fn made_of_value<T: Element>(
    result: Outcome,
    held: Option<ErasedBufs>,
) -> Result<Vec<T>, Failed<T>> {
    let value = |buf: Vec<T>| buf.first().copied();
    made::<Vec<T>>(result, held).map_err(|Failed { buf, error }| Failed { buf: buf.and_then(value), error })
}

/// For a call that was not submitted: gives back what the user gave.
pub(super) fn given_back<O, F: Send + 'static>(
    result: Outcome,
    held: Option<ErasedBufs>,
) -> Result<O, Failed<F>> {
    Err(Failed { buf: held.and_then(ErasedBufs::take::<F>), error: lost(result) })
}

pub(super) fn nothing(result: Outcome, _: Option<ErasedBufs>) -> Result<(), Failed<()>> {
    result.map_err(|error| Failed { buf: Some(()), error: *error })
}

pub(super) fn settle<T>(result: Outcome, parts: Option<T>) -> Result<T, Failed<T>> {
    match (result, parts) {
        (Ok(()), Some(parts)) => Ok(parts),
        (result, buf) => Err(Failed { buf, error: lost(result) }),
    }
}

pub(super) fn lost(result: Outcome) -> Error {
    let gone = || Error::system("finish an operation", "its buffers are gone (a bug)");
    result.err().map_or_else(gone, |error| *error)
}
