//! Communicators: the handles of their ranks, the calls in progress, and how a communicator ends.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::kernel::{self, Call, Meeting, Round};
use crate::knobs::{self, COUNTS, What, trouble};
use crate::{Code, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, driver, misuse};

/// Names one rank's side of a communicator, by a number that is never given twice.
pub(crate) type Handle = u64;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the ranks of one communicator share.
pub(crate) struct Clique {
    pub(crate) size: usize,
    /// The ranks that have called init so far, each with its device.
    members: Mutex<BTreeMap<c_int, c_int>>,
    /// For each collective or message: the kernels that have arrived for it.
    pub(crate) rounds: Mutex<HashMap<Meeting, Round>>,
    pub(crate) changed: Condvar,
}

/// One rank's side of a communicator.
pub(crate) struct Comm {
    handle: Handle,
    pub(crate) clique: Arc<Clique>,
    pub(crate) rank: c_int,
    pub(crate) device: c_int,
    /// How many calls are in progress; an init counts as one.
    busy: AtomicU64,
    /// The first error, or `SUCCESS`.
    failed: AtomicI32,
    calls: AtomicU64,
    /// How many collectives were called (`None`), and how many messages were sent or received for each (sender, receiver).
    counts: Mutex<HashMap<Option<(c_int, c_int)>, u64>>,
    finalized: AtomicBool,
    pub(crate) aborted: AtomicBool,
    /// Kernels of this rank that have not ended.
    pub(crate) running: AtomicU64,
}

static COMMS: Mutex<BTreeMap<Handle, Arc<Comm>>> = Mutex::new(BTreeMap::new());

/// The cliques some of whose ranks have not called init yet, by id.
static CLIQUES: LazyLock<Mutex<HashMap<[u8; 128], Arc<Clique>>>> = LazyLock::new(Mutex::default);

pub(crate) fn init(size: usize, id: [u8; 128], rank: c_int) -> Result<Handle, Code> {
    static NEXT: AtomicU64 = AtomicU64::new(0x7000);
    COUNTS.inits.fetch_add(1, Ordering::Relaxed);
    if let Some(code) = trouble(What::RefusesInit, rank, 0) {
        return Err(code);
    }
    let device = driver::current_device().ok_or_else(|| misuse("init without a context", INVALID_USAGE))?;
    let clique = {
        let mut cliques = lock(&CLIQUES);
        let make =
            || Clique { size, members: Mutex::default(), rounds: Mutex::default(), changed: Condvar::new() };
        let clique = cliques.entry(id).or_insert_with(|| Arc::new(make())).clone();
        let mut members = lock(&clique.members);
        if clique.size != size || members.contains_key(&rank) {
            return Err(misuse("ranks differ on their world", INVALID_ARGUMENT));
        }
        if !knobs::shares_devices() && members.values().any(|other| *other == device) {
            return Err(misuse("two ranks are on one device", INVALID_USAGE));
        }
        members.insert(rank, device);
        if members.len() == size {
            cliques.remove(&id);
        }
        drop(members);
        clique
    };
    let handle = NEXT.fetch_add(16, Ordering::Relaxed);
    let comm = Arc::new(Comm {
        handle,
        clique,
        rank,
        device,
        busy: AtomicU64::new(1),
        failed: AtomicI32::new(SUCCESS),
        calls: AtomicU64::new(0),
        counts: Mutex::default(),
        finalized: AtomicBool::new(false),
        aborted: AtomicBool::new(false),
        running: AtomicU64::new(0),
    });
    lock(&COMMS).insert(handle, comm.clone());
    COUNTS.comms.fetch_add(1, Ordering::Relaxed);
    std::thread::spawn(move || {
        std::thread::sleep(knobs::delay());
        while !comm.aborted.load(Ordering::Acquire) {
            if lock(&comm.clique.members).len() == comm.clique.size {
                comm.busy.fetch_sub(1, Ordering::AcqRel);
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    });
    Ok(handle)
}

impl Comm {
    pub(crate) fn get(handle: Handle) -> Option<Arc<Comm>> {
        lock(&COMMS).get(&handle).cloned()
    }

    /// Takes the handle out of the table: from now on every call with it is misuse.
    pub(crate) fn take(handle: Handle) -> Option<Arc<Comm>> {
        let comm = lock(&COMMS).remove(&handle)?;
        COUNTS.comms.fetch_sub(1, Ordering::Relaxed);
        Some(comm)
    }

    /// The answer of `ncclCommGetAsyncError`.
    pub(crate) fn state(&self) -> Code {
        match self.failed.load(Ordering::Acquire) {
            SUCCESS if self.busy.load(Ordering::Acquire) > 0 => IN_PROGRESS,
            SUCCESS if self.is_finalized() && self.running.load(Ordering::Acquire) > 0 => IN_PROGRESS,
            state => state,
        }
    }

    pub(crate) fn fails(&self, code: Code) {
        let _ = self.failed.compare_exchange(SUCCESS, code, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Checks whether this call may be made now: `SUCCESS`, or the code that refuses it.
    pub(crate) fn check(&self, call: &Call) -> Code {
        if self.is_finalized() {
            return misuse("a call on a communicator that is finalized", INVALID_USAGE);
        }
        match self.state() {
            SUCCESS => {}
            IN_PROGRESS => return misuse("a call while something is in progress", INVALID_USAGE),
            code => return code,
        }
        if !call.is_sound(self.rank, self.clique.size) {
            return misuse("a call with arguments that are none", INVALID_ARGUMENT);
        }
        SUCCESS
    }

    /// Makes one kernel of the calls of a group. Another thread puts it on the stream after the delay.
    pub(crate) fn submit(self: &Arc<Self>, calls: Vec<Call>, stream: u64) -> Code {
        let number = self.calls.fetch_add(1, Ordering::AcqRel);
        knobs::notes_call(self.rank);
        let mut counts = lock(&self.counts);
        let counted = |call: Call| {
            let place = call.place(self.rank);
            // A rank calls both ends of a message to itself, so two calls count as one message.
            let sent_first = matches!(place, Some((from, to)) if from == to);
            let count = counts.entry(place).or_default();
            *count += 1;
            (call, (place, if sent_first { (*count - 1) / 2 } else { *count - 1 }))
        };
        let calls: Vec<(Call, Meeting)> = calls.into_iter().map(counted).collect();
        drop(counts);
        if let Some(code) = trouble(What::Refuses, self.rank, number) {
            return code;
        }
        self.busy.fetch_add(1, Ordering::AcqRel);
        let comm = self.clone();
        std::thread::spawn(move || {
            std::thread::sleep(knobs::delay());
            if trouble(What::StaysInProgress, comm.rank, number).is_some() {
                return;
            }
            // Counted before `aborted` is read: so either this thread sees the abort, or the abort sees the kernel and waits for it.
            comm.running.fetch_add(1, Ordering::SeqCst);
            if comm.aborted.load(Ordering::SeqCst) || !kernel::launch(&comm, number, calls, stream) {
                comm.fails(crate::UNHANDLED_CUDA_ERROR);
                comm.running.fetch_sub(1, Ordering::SeqCst);
            }
            comm.busy.fetch_sub(1, Ordering::AcqRel);
        });
        IN_PROGRESS
    }

    pub(crate) fn finalize(&self) -> Code {
        if self.state() != SUCCESS || self.finalized.swap(true, Ordering::AcqRel) {
            return misuse("a communicator is finalized while it is at work, or twice", INVALID_USAGE);
        }
        if self.running.load(Ordering::Acquire) > 0 { IN_PROGRESS } else { SUCCESS }
    }

    pub(crate) fn is_finalized(&self) -> bool {
        self.finalized.load(Ordering::Acquire)
    }

    /// Makes this rank's kernels end, and waits until they have.
    pub(crate) fn abort(&self) -> Code {
        let is_deaf = trouble(What::IsDeaf, self.rank, 0).is_some();
        if !is_deaf {
            self.aborted.store(true, Ordering::SeqCst);
            // Notifies under the lock, so that a kernel has either seen `aborted` or waits already and is woken.
            let _rounds = lock(&self.clique.rounds);
            self.clique.changed.notify_all();
        }
        kernel::wake_devices();
        while is_deaf || self.running.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        let _ = self.handle;
        SUCCESS
    }
}
