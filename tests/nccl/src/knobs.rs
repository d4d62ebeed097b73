//! What can be told to this library, and what it tells.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// How long a call is in progress.
pub(crate) fn delay() -> Duration {
    static DELAY: LazyLock<u64> = LazyLock::new(|| number("ALLSTREAM_TEST_NCCL_DELAY_US", 100));
    Duration::from_micros(*DELAY)
}

/// Kernels that a device has room for.
pub(crate) fn room() -> u64 {
    static ROOM: LazyLock<u64> = LazyLock::new(|| number("ALLSTREAM_TEST_NCCL_ROOM", 1));
    *ROOM
}

pub(crate) fn version() -> c_int {
    static VERSION: LazyLock<u64> = LazyLock::new(|| number("ALLSTREAM_TEST_NCCL_VERSION", 22703));
    *VERSION as c_int
}

/// Whether several ranks may be on one device, as the real library decides it.
pub(crate) fn shares_devices() -> bool {
    version() >= 23000 && number("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The call stays in progress, and never gets onto its stream.
    StaysInProgress = 1,
    /// Its kernel never finds the others.
    Hangs = 2,
    /// It fails when it is done: the communicator has this error from then on.
    FailsLate = 3,
    /// The call itself answers this.
    Refuses = 4,
    /// Init answers this. `call` is without a meaning.
    RefusesInit = 5,
    /// An abort ends no kernel, and does not return.
    IsDeaf = 6,
}

impl What {
    const ALL: [What; 6] =
        [What::StaysInProgress, What::Hangs, What::FailsLate, What::Refuses, What::RefusesInit, What::IsDeaf];
}

/// What, on which rank, at which of its calls, with which code.
type Trouble = (What, c_int, u64, c_int);

static TROUBLE: Mutex<Vec<Trouble>> = Mutex::new(Vec::new());

/// The code with which this goes wrong there, if it does.
pub(crate) fn trouble(what: What, rank: c_int, call: u64) -> Option<c_int> {
    let all = TROUBLE.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |t: &&Trouble| (t.0, t.1) == (what, rank) && (t.2 == call || what == What::IsDeaf);
    all.iter().find(is_it).map(|trouble| trouble.3)
}

/// Adds to what goes wrong; 0: nothing does from now on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_nccl_trouble(
    what: c_int,
    rank: c_int,
    call: u64,
    code: c_int,
) -> c_int {
    let mut all = TROUBLE.lock().unwrap_or_else(PoisonError::into_inner);
    match What::ALL.into_iter().find(|one| *one as c_int == what) {
        Some(what) => all.push((what, rank, call, code)),
        None if what == 0 => all.clear(),
        None => return 4,
    }
    0
}

/// When each rank of the last communicators has made its last call, in nanoseconds of the monotonic clock.
pub(crate) static CALLED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

pub(crate) fn notes_call(rank: c_int) {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: room for a time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    if let Some(called) = CALLED.get(rank as usize) {
        called.store(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64, Ordering::Relaxed);
    }
}

/// Tells when this rank has made its last call.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_nccl_called(rank: c_int) -> u64 {
    CALLED.get(rank as usize).map_or(0, |called| called.load(Ordering::Relaxed))
}

/// What was done, and what lives.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Report {
    /// Ends of communicators that live.
    comms: u64,
    /// Inits so far.
    inits: u64,
    /// Kernels that were put on streams.
    kernels: u64,
    /// Calls in which ranks differed.
    mismatches: u64,
    /// What a real one forbids.
    misuses: u64,
}

pub(crate) struct Counts {
    pub(crate) comms: AtomicU64,
    pub(crate) inits: AtomicU64,
    pub(crate) kernels: AtomicU64,
    pub(crate) mismatches: AtomicU64,
    pub(crate) misuses: AtomicU64,
}

pub(crate) static COUNTS: Counts = Counts {
    comms: AtomicU64::new(0),
    inits: AtomicU64::new(0),
    kernels: AtomicU64::new(0),
    mismatches: AtomicU64::new(0),
    misuses: AtomicU64::new(0),
};

/// Tells.
///
/// # Safety
/// There is room for a report.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn allstream_test_nccl_report(out: *mut Report) -> c_int {
    let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
    let report = Report {
        comms: count(&COUNTS.comms),
        inits: count(&COUNTS.inits),
        kernels: count(&COUNTS.kernels),
        mismatches: count(&COUNTS.mismatches),
        misuses: count(&COUNTS.misuses),
    };
    // SAFETY: the caller's promise.
    unsafe { out.write(report) };
    0
}
