//! What tests can set in this library, and what it reports to them.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// How long a call, or an init, is in progress at least.
pub(crate) fn delay() -> Duration {
    static DELAY: LazyLock<u64> = LazyLock::new(|| number("ALLSTREAM_TEST_NCCL_DELAY_US", 100));
    Duration::from_micros(*DELAY)
}

/// How many kernels a device runs at the same time.
pub(crate) fn room() -> u64 {
    static ROOM: LazyLock<u64> = LazyLock::new(|| number("ALLSTREAM_TEST_NCCL_ROOM", 1));
    *ROOM
}

pub(crate) fn version() -> c_int {
    static VERSION: LazyLock<u64> = LazyLock::new(|| number("ALLSTREAM_TEST_NCCL_VERSION", 22703));
    *VERSION as c_int
}

/// Whether several ranks may use one device. The real library decides by the same version and variable.
pub(crate) fn shares_devices() -> bool {
    version() >= 23000 && number("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0
}

/// What a test can make go wrong. `call` is a parameter of `trouble`: the position, from 0, of a call (or of a whole group of calls) among
/// those that the rank has made on one communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The call stays in progress, and never gets onto its stream.
    StaysInProgress = 1,
    /// The call's kernel never meets those of the other ranks, and runs until an abort.
    Hangs = 2,
    /// The communicator has this error from the end of the call's kernel on.
    FailsLate = 3,
    /// The call itself returns this code.
    Refuses = 4,
    /// Init returns this code. `call` must be 0.
    RefusesInit = 5,
    /// An abort ends no kernel, and does not return. `call` has no meaning.
    IsDeaf = 6,
}

impl What {
    const ALL: [What; 6] =
        [What::StaysInProgress, What::Hangs, What::FailsLate, What::Refuses, What::RefusesInit, What::IsDeaf];
}

/// What goes wrong, on which rank, at which of its calls, with which code.
type Trouble = (What, c_int, u64, c_int);

static TROUBLE: Mutex<Vec<Trouble>> = Mutex::new(Vec::new());

/// The code with which `what` goes wrong at this call of the rank; `None`: it does not.
pub(crate) fn trouble(what: What, rank: c_int, call: u64) -> Option<c_int> {
    let all = TROUBLE.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |t: &&Trouble| (t.0, t.1) == (what, rank) && (t.2 == call || what == What::IsDeaf);
    all.iter().find(is_it).map(|trouble| trouble.3)
}

/// Adds one thing that goes wrong; `what` of 0 removes all. Returns 0, or 4 if there is no such `what`.
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

/// When each rank last made a call, on whatever communicator, in nanoseconds of the monotonic clock; 0: never.
pub(crate) static CALLED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

pub(crate) fn notes_call(rank: c_int) {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer leads to room for a time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    if let Some(called) = CALLED.get(rank as usize) {
        called.store(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64, Ordering::Relaxed);
    }
}

/// Returns when this rank last made a call, in nanoseconds of the monotonic clock; 0: never.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_nccl_called(rank: c_int) -> u64 {
    CALLED.get(rank as usize).map_or(0, |called| called.load(Ordering::Relaxed))
}

/// What was done so far, and what exists now.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Report {
    /// Handles of communicators that were neither destroyed nor aborted.
    comms: u64,
    /// Inits so far.
    inits: u64,
    /// Kernels that were given to the driver, also those that it refused.
    kernels: u64,
    /// Collectives or messages whose ranks called with different arguments.
    mismatches: u64,
    /// Calls that the real library forbids.
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

/// Writes the report to `out`.
///
/// # Safety
/// `out` leads to room for a report.
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
