//! Whether what a buffer holds counts: work may be put behind an operation before anyone knows how it ends.
//!
//! A buffer that was handed on in the order of a stream ([`Ordered::in_order`](crate::Ordered::in_order)) depends on the
//! operations that are to write it. Where one of them fails the stream goes on, and what comes after reads what nobody
//! meant; so the buffer keeps the verdicts, and whoever gives its contents to the host or to other ranks asks them first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::error::Error;

/// Who knows that an operation whose stream has come to its end came there in order.
pub(crate) trait Witness: Send + Sync {
    fn check(&self) -> Result<(), Error>;
}

/// How an operation ended, once it has.
pub(crate) struct Verdict {
    over: OnceLock<Result<(), Error>>,
    witness: Option<Weak<dyn Witness>>,
    /// Streams that waited for the operation were let go on, while devices may still touch its buffers.
    is_overtaken: AtomicBool,
}

impl Verdict {
    pub(crate) fn new(witness: Option<Weak<dyn Witness>>) -> Verdict {
        Verdict { over: OnceLock::new(), witness, is_overtaken: AtomicBool::new(false) }
    }

    /// The first word counts. A failure is told before any stream that waits for the operation goes on.
    pub(crate) fn settle(&self, result: Result<(), Error>) {
        let _ = self.over.set(result);
    }

    /// The operation has failed, and the streams that wait for it go on whether or not devices still touch its buffers. From here on, and
    /// until this is taken back, memory of theirs that is dropped is not used again.
    pub(crate) fn overtake(&self, is_overtaken: bool) {
        self.is_overtaken.store(is_overtaken, Ordering::Release);
    }

    pub(crate) fn ask(&self) -> Result<(), Error> {
        match self.over.get() {
            Some(result) => result.clone(),
            None => self.witness.as_ref().and_then(Weak::upgrade).map_or(Ok(()), |witness| witness.check()),
        }
    }
}

/// The operations that a buffer's contents depend on.
#[derive(Default)]
pub(crate) struct Fate(Mutex<Vec<Arc<Verdict>>>);

impl Fate {
    pub(crate) fn depend_on(&self, verdict: &Arc<Verdict>) {
        let mut verdicts = self.0.lock();
        // Each once: buffers that are made of each other would double their lists with every step.
        verdicts.retain(|known| !matches!(known.over.get(), Some(Ok(()))) && !Arc::ptr_eq(known, verdict));
        verdicts.push(verdict.clone());
    }

    /// Of a buffer that has a part of another's contents.
    pub(crate) fn depend_like(&self, other: &Fate) {
        let theirs = other.0.lock().clone();
        for verdict in theirs {
            self.depend_on(&verdict);
        }
    }

    /// Whether a device may touch the memory out of the order of its stream ([`Verdict::overtake`]).
    pub(crate) fn is_overtaken(&self) -> bool {
        self.0.lock().iter().any(|verdict| verdict.is_overtaken.load(Ordering::Acquire))
    }

    /// Why the contents mean nothing. Asked by who has seen them come, in the order of their stream.
    ///
    /// # Errors
    /// The cause for which an operation failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.0.lock().iter().try_for_each(|verdict| verdict.ask())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_depends_on_what_it_was_made_of() {
        let (good, bad) = (Arc::new(Verdict::new(None)), Arc::new(Verdict::new(None)));
        let (one, other, both) = (Fate::default(), Fate::default(), Fate::default());
        one.depend_on(&good);
        other.depend_on(&bad);
        both.depend_like(&one);
        both.depend_like(&other);
        good.settle(Ok(()));
        assert!(both.check().is_ok(), "not known yet");
        bad.settle(Err(Error::invalid("all_reduce", "a test")));
        bad.settle(Ok(()));
        assert!(one.check().is_ok());
        assert_eq!(both.check().unwrap_err().to_string(), other.check().unwrap_err().to_string());
        // What went well is forgotten.
        both.depend_on(&good);
        assert_eq!(both.0.lock().len(), 2);
        one.depend_on(&bad);
        one.depend_on(&bad);
        assert_eq!(one.0.lock().len(), 1, "each verdict once");
    }

    #[test]
    fn a_witness_is_asked_until_the_verdict_is_there() {
        struct Doubt;
        impl Witness for Doubt {
            fn check(&self) -> Result<(), Error> {
                Err(Error::invalid("all_reduce", "a rank gave up"))
            }
        }
        let witness: Arc<dyn Witness> = Arc::new(Doubt);
        let (fate, verdict) = (Fate::default(), Arc::new(Verdict::new(Some(Arc::downgrade(&witness)))));
        fate.depend_on(&verdict);
        assert!(fate.check().is_err());
        drop(witness);
        assert!(fate.check().is_ok());
        verdict.settle(Err(Error::invalid("all_reduce", "a test")));
        assert!(fate.check().is_err());
    }
}
