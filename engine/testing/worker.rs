//! A carrier for tests, in one file: the host runs an operation on copies of its buffers. One thread makes the copies a while after the call,
//! and another thread copies the results back. It shows all that a carrier needs to attach to the executor ([`Carrier`]).

use std::any::Any;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use crate::comm::SharedComm;
use crate::error::Error;
use crate::exec::carrier::{Bound, Carried, Carrier, Ended, Lanes, Passed, Started, Submission};
use crate::exec::{Endpoint, Work};
use crate::mem::{ALL, ErasedBufs, Event, Reach};
use crate::plan::{INPUT, OUTPUT};
use crate::types::Kind;

/// How long a thread waits before it copies: the buffers after the call, and the results after the last pass.
const SLOWNESS: Duration = Duration::from_micros(200);

/// A buffer of the user's, and the copy on which the host works in its place.
struct Copy {
    user: *mut u8,
    copy: *mut [u8],
    is_output: bool,
}

// SAFETY: `copy` belongs to this value. `user` is in a buffer (all `Buf: Send`) that the in-flight table owns, or that nobody is given back,
// while a thread of the worker's touches it: `is_settling` says so to whoever would give it back.
unsafe impl Send for Copy {}

impl Drop for Copy {
    fn drop(&mut self) {
        // SAFETY: it came from a box. The operation's buffers keep this value (`ErasedBufs::with`) for as long as anybody may touch the copy.
        drop(unsafe { Box::from_raw(self.copy) })
    }
}

/// The carrier of one operation.
struct Worker {
    copies: Mutex<Vec<Copy>>,
    /// Fires when the copies hold what the buffers held at the call.
    filled: Event,
    /// How many threads touch the user's buffers, or are about to.
    at_work: AtomicUsize,
    this: Weak<Worker>,
}

impl Worker {
    /// On a thread, a while from now: fills the copies, or copies results `back`; then calls `then`. `at_work` has counted that thread.
    fn copy(self: Arc<Self>, back: bool, then: impl FnOnce(&Worker) + Send + 'static) {
        thread::spawn(move || {
            thread::sleep(SLOWNESS);
            for Copy { user, copy, .. } in self.copies.lock().iter().filter(|copy| copy.is_output || !back) {
                let (from, to) = if back { (copy.cast::<u8>(), *user) } else { (*user, copy.cast::<u8>()) };
                // SAFETY: the buffer is as long as its part said, and so is the copy, which is apart from it. The buffer is the operation's
                // (see `Copy`). The parts touch the copy only between its filling and the copy back.
                unsafe { std::ptr::copy_nonoverlapping(from, to, copy.len()) }
            }
            self.at_work.fetch_sub(1, Ordering::AcqRel);
            then(&self);
        });
    }
}

impl Carrier for Worker {
    /// From here on the table owns the buffers: not before may a thread touch them.
    fn submitted(&self, _: &Submission<'_>) {
        self.at_work.fetch_add(1, Ordering::AcqRel);
        self.this.upgrade().into_iter().for_each(|this| this.copy(false, |worker| worker.filled.fire(true)));
    }

    fn reach(&self) -> Reach {
        (0, 0)
    }

    fn arrived(&self, known: usize, waker: &Waker) -> Result<(usize, Reach), Error> {
        Ok(if self.filled.subscribe(waker) { (known, self.reach()) } else { (1, ALL) })
    }

    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error> {
        let (any, is_complete) = lanes.pass_on_host(work)?;
        Ok(if is_complete && work.reach == ALL { Passed::Complete } else { Passed::Going(any) })
    }

    fn is_settling(&self) -> bool {
        self.at_work.load(Ordering::Acquire) > 0
    }

    fn copies_back(&self) -> bool {
        true
    }

    fn copy_back(self: Arc<Self>, started: Started, ended: Ended) {
        self.at_work.fetch_add(1, Ordering::AcqRel);
        started();
        self.copy(true, |_| ended(Ok(())));
    }
}

/// What a communicator is bound to so that its operations have such carriers, with the number of those operations so far.
struct Workers(Arc<AtomicU64>);
impl Bound for Workers {}

impl SharedComm {
    /// From here on this rank's collectives on the host's memory are carried out by workers, except barriers, collectives of two halves and
    /// those that are to follow a stream. Returns a counter of the collectives that workers carry out.
    #[doc(hidden)]
    pub fn bind_workers(&self) -> Arc<AtomicU64> {
        let count = Arc::new(AtomicU64::new(0));
        self.handle().endpoint.bind(Arc::new(Workers(count.clone())), None);
        count
    }
}

/// Gives an operation a worker as its carrier, if the communicator is bound to workers and they carry out such operations. Makes the parts work
/// on copies. Returns the buffers `held`, together with the worker if there is one, so that it lives as long as they do.
pub(crate) fn carry(endpoint: &Endpoint, carried: &mut Carried, held: ErasedBufs) -> ErasedBufs {
    let bound = endpoint.bound().and_then(|bound| (bound as &dyn Any).downcast_ref::<Workers>());
    let Carried { operation, carrier } = carried;
    let is_whole = operation.signature.collective() != Some(Kind::Barrier) && operation.then.is_none();
    let Some(Workers(count)) = bound.filter(|_| carrier.is_none() && is_whole) else { return held };
    count.fetch_add(1, Ordering::Relaxed);
    let mut copies = Vec::new();
    for part in operation.parts.all() {
        let (plan, scales) =
            (&part.program.plan, part.factor(operation.scale, &operation.reduction).is_some());
        let writes = plan.touches(OUTPUT) || part.leaves_result(&operation.signature, scales);
        let reads = plan.touches(INPUT) && !part.is_in_place();
        let mut of = |user: *mut u8, slot, is_output| {
            let copy = Box::into_raw(vec![0; part.total(slot) * part.dtype.size()].into_boxed_slice());
            copies.push(Copy { user, copy, is_output });
            copy.cast::<u8>()
        };
        let output = if writes { of(part.output, OUTPUT, true) } else { part.output };
        let input = if reads { of(part.input.cast_mut(), INPUT, false) } else { part.input.cast_mut() };
        (part.input, part.output) = (if part.is_in_place() { output } else { input }, output);
    }
    let (copies, filled, at_work) = (Mutex::new(copies), Event::pending(), AtomicUsize::new(0));
    let worker = Arc::new_cyclic(|this| Worker { copies, filled, at_work, this: this.clone() });
    *carrier = Some(worker.clone());
    held.with(worker)
}
