//! A carrier for tests, in one file: operations on the host's memory run on copies of it, which a thread of their own makes, and the
//! results come back on another one, later. What attaches to the executor here is all that a carrier needs ([`Carrier`]).

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use crate::comm::SharedComm;
use crate::error::Error;
use crate::exec::carrier::{Bound, Carried, Carrier, Ended, Lanes, Passed, Started};
use crate::exec::{Endpoint, Work};
use crate::mem::{ALL, ErasedBufs, Reach};
use crate::plan::{INPUT, OUTPUT, Operand, Step};
use crate::types::Kind;

/// How long after its call the memory of an operation is there, and how long its results take back.
const SLOWNESS: Duration = Duration::from_micros(200);

/// A buffer of the user's, and the copy of it on which the host works.
struct Copy {
    user: *mut u8,
    copy: Box<[u8]>,
    is_output: bool,
}

// SAFETY: the buffer is in the in-flight table (all `Buf: Send`) until the operation is finished, which `copy_back` alone does, when it is done.
unsafe impl Send for Copy {}

/// One operation.
struct Worker {
    copies: Mutex<Vec<Copy>>,
    /// Whether the copies hold what the buffers held at the call; until then whoever is to be told.
    filled: Mutex<Result<(), Option<Waker>>>,
}

impl Worker {
    fn fill(&self) {
        thread::sleep(SLOWNESS);
        for Copy { user, copy, .. } in self.copies.lock().iter_mut() {
            // SAFETY: the buffer is as long as the parts said, the operation owns it, and its parts work on the copy alone.
            unsafe { std::ptr::copy_nonoverlapping(*user, copy.as_mut_ptr(), copy.len()) }
        }
        let told = std::mem::replace(&mut *self.filled.lock(), Ok(()));
        told.err().flatten().into_iter().for_each(Waker::wake);
    }

    fn put_back(&self) {
        thread::sleep(SLOWNESS);
        for Copy { user, copy, .. } in self.copies.lock().iter().filter(|copy| copy.is_output) {
            // SAFETY: as in `fill`; all parts are done.
            unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), *user, copy.len()) }
        }
    }
}

impl Carrier for Worker {
    fn reach(&self) -> Reach {
        (0, 0)
    }

    fn arrived(&self, known: usize, waker: &Waker) -> Result<(usize, Reach), Error> {
        match &mut *self.filled.lock() {
            Ok(()) => Ok((1, ALL)),
            Err(told) => {
                *told = Some(waker.clone());
                Ok((known, self.reach()))
            }
        }
    }

    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error> {
        let (any, is_complete) = lanes.pass_on_host(work)?;
        Ok(if is_complete && work.reach == ALL { Passed::Complete } else { Passed::Going(any) })
    }

    fn is_settling(&self) -> bool {
        self.filled.lock().is_err()
    }

    fn copies_back(&self) -> bool {
        true
    }

    fn copy_back(self: Arc<Self>, started: Started, ended: Ended) {
        started();
        thread::spawn(move || {
            self.put_back();
            ended(Ok(()));
        });
    }
}

/// What a communicator is bound to whose operations go so: how many have.
struct Workers(Arc<AtomicU64>);

impl Bound for Workers {}

impl SharedComm {
    /// From here on this rank's collectives on the host's memory are carried out so, but for barriers and those of two halves. Counts them.
    #[doc(hidden)]
    pub fn bind_workers(&self) -> Arc<AtomicU64> {
        let count = Arc::new(AtomicU64::new(0));
        self.handle().endpoint.bind(Arc::new(Workers(count.clone())), None);
        count
    }
}

/// Has an operation that may begin at once carried out so, where its communicator is bound to that. Gives the buffers, and what they need.
pub(crate) fn carry(endpoint: &Endpoint, carried: &mut Carried, held: ErasedBufs) -> ErasedBufs {
    let bound = endpoint.bound().and_then(|bound| (bound as &dyn Any).downcast_ref::<Workers>());
    let Carried { operation, carrier } = carried;
    let is_whole = operation.signature.collective() != Some(Kind::Barrier) && operation.then.is_none();
    let Some(Workers(count)) = bound.filter(|_| carrier.is_none() && is_whole) else { return held };
    count.fetch_add(1, Ordering::Relaxed);
    let mut copies = Vec::new();
    for part in operation.parts.all() {
        // A rank whose buffer the plan does not touch (the others' input of a scatter, say) may have none.
        let steps = &part.program.plan.steps;
        let is_used = |slot| {
            let reads = |step: &Step| {
                step.operands.iter().any(|from| matches!(from, Operand::Own(at) if at.slot == slot))
            };
            steps.iter().any(|step| reads(step) || step.dst.is_some_and(|at| at.slot == slot))
        };
        let (reads, scales) = (is_used(INPUT), part.factor(operation.scale, &operation.reduction).is_some());
        let writes = is_used(OUTPUT) || part.leaves_result(&operation.signature, scales);
        let mut of = |user: *mut u8, slot, is_output| {
            let mut copy = vec![0; part.total(slot) * part.dtype.size()].into_boxed_slice();
            let at = copy.as_mut_ptr();
            copies.push(Copy { user, copy, is_output });
            at
        };
        let (is_in_place, input) = (part.is_in_place(), part.input.cast_mut());
        let output = if writes { of(part.output, OUTPUT, true) } else { part.output };
        let input = if reads && !is_in_place { of(input, INPUT, false) } else { input };
        (part.output, part.input) = (output, if is_in_place { output } else { input });
    }
    let worker = Arc::new(Worker { copies: Mutex::new(copies), filled: Mutex::new(Err(None)) });
    let filling = worker.clone();
    thread::spawn(move || filling.fill());
    *carrier = Some(worker.clone());
    held.with(worker)
}
