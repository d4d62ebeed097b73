//! What peers may still touch although the operation that lent it is over, kept until they cannot any more.
//!
//! A communicator that dies takes back what it has lent. A peer in another process cannot be made to stop reading or
//! writing: it says so when it hangs up, which one that is stopped does not. What it was lent is then given back to nobody, and
//! used for nothing else, until the peer has hung up after all, or its process has exited: one that is dead writes nothing.
//! The same holds for what a link may still write to by itself, until it says that it does not; and for memory of devices that peers' devices may write to.
//! The process's progress thread looks now and then, for as long as anything is kept.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::chores::drop_later;
use crate::link::exit::Lease;
use crate::link::region::{Region, WeakSlot};
use crate::mem::ErasedBufs;

/// How often the progress thread looks.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// What is kept.
pub(crate) enum What {
    /// The buffers of an operation, and what was to copy them to or from a device.
    Buffers(#[allow(dead_code)] ErasedBufs, #[allow(dead_code)] Option<Box<dyn Send>>),
    /// The same, of memory on a device. A thread that nobody waits for drops it, as that may call the driver.
    OnDevice(#[allow(dead_code)] ErasedBufs, #[allow(dead_code)] Option<Box<dyn Send>>),
    /// What else there is of operations on a device.
    Remains(#[allow(dead_code)] Box<dyn Send>),
    /// What ran it, with memory of its own.
    Run(#[allow(dead_code)] Box<dyn Send>),
    /// Staging slots.
    Slots(#[allow(dead_code)] Vec<WeakSlot>),
}

struct Kept {
    what: What,
    /// It is free when all are over.
    leases: Vec<Arc<Lease>>,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Keeps it until all leases are over. The progress thread is to be woken then ([`keep_and_look`](super::progress_thread::keep_and_look)).
pub(super) fn keep(what: What, leases: Vec<Arc<Lease>>) {
    let mut kept = KEPT.lock();
    kept.push(Kept { what, leases });
    COUNT.store(kept.len(), Ordering::Release);
}

pub(super) fn is_empty() -> bool {
    COUNT.load(Ordering::Acquire) == 0
}

/// Operations of a rank whose buffers are kept.
pub(crate) fn buffers(region: &Arc<Region>) -> usize {
    if is_empty() {
        return 0;
    }
    let is_ours = |kept: &&Kept| {
        matches!(kept.what, What::Buffers(..) | What::OnDevice(..))
            && kept.leases.iter().any(|l| l.is_of(region))
    };
    KEPT.lock().iter().filter(is_ours).count()
}

/// Gives up what nobody can touch any more.
pub(super) fn look() {
    let free: Vec<Kept> = {
        let mut kept = KEPT.lock();
        let free = kept.extract_if(.., |kept| kept.leases.iter().all(|lease| lease.is_over())).collect();
        COUNT.store(kept.len(), Ordering::Release);
        free
    };
    for kept in free {
        if matches!(kept.what, What::OnDevice(..) | What::Remains(_)) {
            drop_later(kept);
            continue;
        }
        // A buffer's drop may be somebody else's code: a panic in it (reported on stderr) ends here.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(kept)));
    }
}
