//! From what the table held back to what the user gets.

use super::Work;
use super::work::Restore;
use crate::error::{Error, Failed, Outcome};
use crate::mem::{Buf, Held, Parts};
use crate::types::Kind;

pub(super) fn both<I: Buf, O: Buf>(result: Outcome, held: Option<Held>) -> Result<(I, O), Failed<(I, O)>> {
    let parts = held.and_then(Held::take::<Parts<I, O>>).map(|p| (p.input, p.output));
    settle(result, parts)
}

pub(super) fn one<B: Buf>(result: Outcome, held: Option<Held>) -> Result<B, Failed<B>> {
    let parts = held.and_then(Held::take::<Parts<(), B>>).map(|p| p.output);
    settle(result, parts)
}

pub(super) fn made<I: Buf>(result: Outcome, held: Option<Held>) -> Result<Vec<I::Elem>, Failed<I>> {
    let parts = held.and_then(Held::take::<Parts<I, Vec<I::Elem>>>);
    match (result, parts) {
        (Ok(()), Some(parts)) => Ok(parts.output),
        (result, parts) => Err(Failed { buf: parts.map(|p| p.input), error: lost(result) }),
    }
}

pub(super) fn nothing(result: Outcome, _: Option<Held>) -> Result<(), Failed<()>> {
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

/// A call that cannot be carried out: nothing was submitted, and this comes back.
pub(super) fn refused<O, F>(
    kind: Kind,
    problem: impl Into<String>,
    buf: F,
    restore: Restore<O, F>,
) -> Work<O, F> {
    Work::refused(Failed { buf: Some(buf), error: Error::invalid(kind.name(), problem) }, restore)
}
