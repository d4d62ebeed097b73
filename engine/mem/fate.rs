//! Whether a device buffer's contents can be trusted: work may be put on a stream behind an operation before anyone knows how
//! the operation ends.
//!
//! A buffer that was handed on in the order of a stream ([`Ordered::in_order`](crate::Ordered::in_order)) depends on the
//! operations that are to write it. If one of them fails, the stream goes on all the same, and later work reads wrong
//! contents. So the buffer keeps the operations' verdicts, and whoever gives its contents to the host or to other ranks
//! checks the verdicts first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::error::Error;

/// Knows whether an operation has gone wrong although the stream may have passed the operation's end. Asked as long as there is no verdict.
pub(crate) trait Witness: Send + Sync {
    fn check(&self) -> Result<(), Error>;
}

/// How an operation ended, once it has.
pub(crate) struct Verdict {
    over: OnceLock<Result<(), Error>>,
    witness: Option<Weak<dyn Witness>>,
    /// Streams that waited for the operation were let go on, while devices may still have touched its buffers.
    is_overtaken: AtomicBool,
    held: Mutex<Held>,
}

/// Memory of the operation's buffers that was dropped.
#[derive(Default)]
struct Held {
    /// No device touches it any more because of the operation.
    is_past: bool,
    memory: Vec<Box<dyn Send>>,
}

impl Verdict {
    pub(crate) fn new(witness: Option<Weak<dyn Witness>>) -> Verdict {
        let (over, is_overtaken, held) = (OnceLock::new(), AtomicBool::new(false), Mutex::default());
        Verdict { over, witness, is_overtaken, held }
    }

    /// Says how the operation ended. Only the first call counts. A failure is told before any stream that waits for the operation goes on.
    pub(crate) fn settle(&self, result: Result<(), Error>) {
        let _ = self.over.set(result);
    }

    /// The operation has failed, and the streams that wait for it go on whether or not devices still touch its buffers.
    pub(crate) fn overtake(&self) {
        self.is_overtaken.store(true, Ordering::Release);
    }

    /// Whether the operation has ended well.
    pub(crate) fn is_good(&self) -> bool {
        matches!(self.over.get(), Some(Ok(())))
    }

    /// No device touches the buffers any more because of the operation: what was kept of their memory is free.
    pub(crate) fn let_go(&self) {
        let memory = {
            let mut held = self.held.lock();
            held.is_past = true;
            std::mem::take(&mut held.memory)
        };
        drop(memory);
    }

    /// Keeps memory of a dropped buffer until nothing touches the memory because of the operation. If the operation fails, streams that wait for
    /// it may be let go on before that.
    fn hold(&self, memory: impl Send + 'static) {
        let mut held = self.held.lock();
        if !held.is_past {
            held.memory.push(Box::new(memory));
        }
    }

    pub(crate) fn ask(&self) -> Result<(), Error> {
        match self.over.get() {
            Some(result) => result.clone(),
            None => self.witness.as_ref().and_then(Weak::upgrade).map_or(Ok(()), |witness| witness.check()),
        }
    }
}

impl Drop for Verdict {
    /// Leaks the memory that is still held, as nobody has been able to tell that it is free.
    fn drop(&mut self) {
        let held = self.held.get_mut();
        if !held.is_past {
            std::mem::forget(std::mem::take(&mut held.memory));
        }
    }
}

/// An operation on which a buffer depends.
#[derive(Clone)]
struct Dependence {
    verdict: Arc<Verdict>,
    /// `true`: the buffer's contents come from the operation. `false`: all of the buffer was written anew since; the operation may still touch
    /// the buffer's memory.
    is_of_contents: bool,
}

/// The operations that a buffer depends on.
#[derive(Default)]
pub(crate) struct Fate(Mutex<Vec<Dependence>>);

impl Fate {
    pub(crate) fn depend_on(&self, verdict: &Arc<Verdict>) {
        self.add(Dependence { verdict: verdict.clone(), is_of_contents: true });
    }

    fn add(&self, new: Dependence) {
        let mut all = self.0.lock();
        all.retain(|known| !known.verdict.is_good());
        // Each verdict once: otherwise the lists of buffers that are made of each other would double with every step.
        match all.iter_mut().find(|known| Arc::ptr_eq(&known.verdict, &new.verdict)) {
            Some(known) => known.is_of_contents |= new.is_of_contents,
            None => all.push(new),
        }
    }

    /// For a buffer that has a part of another's contents: it depends on all that the other depends on, too.
    pub(crate) fn depend_like(&self, other: &Fate) {
        let theirs = other.0.lock().clone();
        theirs.into_iter().for_each(|dependence| self.add(dependence));
    }

    /// The fate of the same buffer after all of it has been written anew.
    pub(crate) fn written_anew(&self) -> Fate {
        let mut all = self.0.lock().clone();
        all.retain(|known| !known.verdict.is_good() && !known.verdict.held.lock().is_past);
        all.iter_mut().for_each(|known| known.is_of_contents = false);
        Fate(Mutex::new(all))
    }

    /// To be called when the buffer is dropped: keeps its memory for as long as operations may touch it out of the order of the buffer's stream.
    pub(crate) fn hold(&self, memory: impl Send + Clone + 'static) {
        self.0.lock().iter().for_each(|known| known.verdict.hold(memory.clone()));
    }

    /// Whether the contents can be trusted. The answer is certain only once the buffer's stream has done the work that writes them.
    ///
    /// # Errors
    /// The cause for which an operation failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let all = self.0.lock();
        let counts =
            |known: &&Dependence| known.is_of_contents || known.verdict.is_overtaken.load(Ordering::Acquire);
        all.iter().filter(counts).try_for_each(|known| known.verdict.ask())
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

    #[test]
    fn memory_that_is_dropped_while_an_operation_may_touch_it_is_kept_until_it_does_not() {
        let (verdict, fate, memory) = (Arc::new(Verdict::new(None)), Fate::default(), Arc::new(()));
        fate.depend_on(&verdict);
        fate.hold(memory.clone());
        assert_eq!(Arc::strong_count(&memory), 2, "the operation may touch it");
        verdict.let_go();
        assert_eq!(Arc::strong_count(&memory), 1);
        fate.hold(memory.clone());
        assert_eq!(Arc::strong_count(&memory), 1, "nothing touches it any more");
        let never = Arc::new(Verdict::new(None));
        Fate::depend_on(&fate, &never);
        fate.hold(memory.clone());
        drop((fate, never));
        assert_eq!(Arc::strong_count(&memory), 2, "nobody was able to tell");
    }

    #[test]
    fn what_is_written_anew_is_good_unless_a_device_may_have_come_later() {
        let (verdict, fate) = (Arc::new(Verdict::new(None)), Fate::default());
        fate.depend_on(&verdict);
        let anew = fate.written_anew();
        verdict.settle(Err(Error::system("work", "it failed in a test")));
        assert!(fate.check().is_err() && anew.check().is_ok());
        for order in [[&fate, &anew], [&anew, &fate]] {
            let packed = Fate::default();
            order.into_iter().for_each(|part| packed.depend_like(part));
            assert!(packed.check().is_err(), "a part of it is what the operation left");
        }
        verdict.overtake();
        assert!(anew.check().is_err(), "a stream went on before the devices were done with the memory");
    }
}
