//! Memory that peers may still touch although the operation that lent it is over. It is kept here until no peer can touch it any more.
//!
//! A communicator that dies takes back what it has lent. It cannot make a peer in another process stop reading or writing. A peer
//! that has ended its access hangs up, but a process that is suspended (SIGSTOP, say) does not. Memory that was lent to such a
//! peer is then given back to nobody and used for nothing else, until the peer has hung up after all, has released all frames, or has
//! exited: a dead process writes nothing. Memory that a link may still write to by itself is kept likewise, until the link says that it
//! writes no more; so is memory of a device, until the communicator's [`Bound`](super::carrier::Bound) says that no device touches it.
//! As long as anything is kept, the process's progress thread checks every [`LOOK`] what has become free.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::chores::drop_later;
use crate::link::exit::Lease;
use crate::link::region::{Region, WeakSlot};
use crate::mem::ErasedBufs;

/// How often the progress thread calls [`look`].
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// What is kept.
pub(crate) enum What {
    /// The buffers of an operation, and the carrier that was to copy its results back to a device, if there is one.
    Buffers(#[allow(dead_code)] ErasedBufs, #[allow(dead_code)] Option<Box<dyn Send>>),
    /// The same where devices may touch the memory. Dropping it may call the driver, so a thread that nobody waits for does it.
    OnDevice(#[allow(dead_code)] ErasedBufs, #[allow(dead_code)] Option<Box<dyn Send>>),
    /// Other memory of failed operations that devices may touch. It is dropped as `OnDevice` is.
    Remains(#[allow(dead_code)] Box<dyn Send>),
    /// What ran a collective (`Active`): links may still write to memory of its own, such as accumulators.
    Run(#[allow(dead_code)] Box<dyn Send>),
    /// Staging slots.
    Slots(#[allow(dead_code)] Vec<WeakSlot>),
}

struct Kept {
    what: What,
    /// `what` is free when all of these are over.
    leases: Vec<Arc<Lease>>,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
/// The length of [`KEPT`], which is read without its lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Keeps `what` until all leases are over. Called by [`keep_and_look`](super::progress_thread::keep_and_look) alone, which then wakes the
/// progress thread.
pub(super) fn keep(what: What, leases: Vec<Arc<Lease>>) {
    let mut kept = KEPT.lock();
    kept.push(Kept { what, leases });
    COUNT.store(kept.len(), Ordering::Release);
}

pub(super) fn is_empty() -> bool {
    COUNT.load(Ordering::Acquire) == 0
}

/// How many operations of the rank with this region have buffers that are kept.
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

/// Drops all that nobody can touch any more.
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
        // Dropping a buffer may run a user's code. A panic there is reported on stderr and ends here.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(kept)));
    }
}
