//! A thread of the process that gives things back to the driver.
//!
//! The driver may wait for all that is on the device before it takes memory back (`cuMemFree`, `cuMemFreeHost`,
//! `cuMemHostUnregister`, `cuIpcCloseMemHandle`). The thread that drops the last handle of something may be one that others wait for:
//! the one that sees device work end, or one that drives a communicator. So such calls are left to the thread of this module. It holds
//! no lock of the engine's during such a call, and others wait for it only with a time limit.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::forked;

type Job = Box<dyn FnOnce() + Send>;

/// How many jobs that were due at once are not done yet: mostly they give things back to the driver.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// How many things may still call the driver: threads of ours, jobs, and watches of events.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// How many communicators exist that are bound to a device, plus how many communicators of a library. One of our threads drops each of them some
/// time after it was closed, and makes many calls of the driver as it does so.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// How many threads wait in [`settle`], or at the process's end. As long as there is one, each job is done at once, whatever its time: otherwise,
/// where a communicator was closed a moment before, the wait would last until its pinned memory had been kept for a second.
static SETTLING: AtomicUsize = AtomicUsize::new(0);

/// [`settle`] waits as long as one exists that counts in [`BUSY`] or [`OPEN`]. A job that starts another job keeps its own `Busy` until the other job
/// has one.
pub(crate) struct Busy(&'static AtomicUsize);

impl Busy {
    /// For work that is about to end.
    pub(crate) fn new() -> Busy {
        Busy::counted(&BUSY)
    }

    /// For a communicator, which keeps the result as long as it exists.
    pub(crate) fn while_open() -> Busy {
        Busy::counted(&OPEN)
    }

    fn counted(count: &'static AtomicUsize) -> Busy {
        count.fetch_add(1, Ordering::AcqRel);
        Busy(count)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What the thread is told to do.
enum Order {
    /// Do this job, not before this time.
    Do(Instant, Job),
    /// Do all jobs that were ordered before, without waiting for their times.
    Hurry,
}

static THREAD: OnceLock<Option<Sender<Order>>> = OnceLock::new();

/// Drops `thing` on the chores thread; on this one if the system could not start that thread.
pub(crate) fn drop_later(thing: impl Any + Send) {
    later(Duration::ZERO, move || drop(thing));
}

/// Has the chores thread do `job` once `after` is over, or earlier if somebody [settles](settle). If there is no such thread, does it here and now.
pub(super) fn later(after: Duration, job: impl FnOnce() + Send + 'static) {
    let thread = THREAD.get_or_init(|| {
        let (sender, orders) = channel();
        let thread = std::thread::Builder::new().name("allstream-chores".into());
        thread.spawn(move || work(&orders)).ok().map(|_| sender)
    });
    let is_due = after.is_zero();
    PENDING.fetch_add(usize::from(is_due), Ordering::Relaxed);
    let busy = Busy::new();
    let job: Job = Box::new(move || {
        // The job may run code of a user's or of another library's (a drop, a logger). If that panics, the next job is done all the same.
        let _ = catch_unwind(AssertUnwindSafe(job));
        PENDING.fetch_sub(usize::from(is_due), Ordering::Relaxed);
        drop(busy);
    });
    let unsent = match thread {
        Some(thread) => thread.send(Order::Do(Instant::now() + after, job)).map_err(|unsent| unsent.0).err(),
        None => Some(Order::Do(Instant::now(), job)),
    };
    if let Some(Order::Do(_, job)) = unsent {
        job();
    }
}

/// Waits until no thread of allstream has calls of the CUDA driver left to make: communicators that were bound to devices are gone, what
/// was dropped is given back, and all events that are watched are over. Returns `false` if that is not so after `patience`.
///
/// Call it before the process ends, when all communicators are closed and all operations awaited. The driver is gone as soon as the process begins
/// to end (`exit`, or the end of `main`), while other threads still run, and a library that calls the driver then may crash, as NCCL does. The
/// process itself waits in the same way when it ends: up to 0.2 s, also for open communicators, then up to 2 s more for work that is about to end.
///
/// Memory that is kept for the next operations stays with its device, and is no reason to wait.
pub fn settle(patience: Duration) -> bool {
    // `OPEN` is read first: what ends counts in `BUSY` before it stops counting in `OPEN`.
    wait(patience, || OPEN.load(Ordering::Acquire) + BUSY.load(Ordering::Acquire) == 0)
}

fn wait(patience: Duration, is_over: impl Fn() -> bool) -> bool {
    const LOOK: Duration = Duration::from_millis(1);
    let start = Instant::now();
    let _settling = Busy::counted(&SETTLING);
    if let Some(Some(thread)) = THREAD.get() {
        let _ = thread.send(Order::Hurry);
    }
    while !is_over() {
        if start.elapsed() >= patience {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// From now on the process, when it ends, first waits for the calls of the driver that our threads make. The system calls exit functions in the
/// reverse order of their registration. So this is to be called after the first use of each library that registers its own (the driver, NCCL).
pub(crate) fn end_before_libraries() {
    unsafe extern "C" {
        safe fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
    }
    if atexit(at_exit) != 0 {
        tracing::warn!(
            "the system takes no more functions to be called when the process ends: call cuda::settle before that"
        );
    }
}

extern "C" fn at_exit() {
    /// Short, as a program that leaves communicators open does not expect to wait for them.
    const OF_OPEN: Duration = Duration::from_millis(200);
    const OF_ENDING: Duration = Duration::from_secs(2);
    if !forked::is_forked() && !settle(OF_OPEN) {
        wait(OF_ENDING, || BUSY.load(Ordering::Acquire) == 0);
    }
}

/// Waits until all jobs are done that were due at once and ordered before this call, but not for longer than `patience`. Returns
/// whether there were any and all of them are done now.
pub(super) fn give_back(patience: Duration) -> bool {
    if PENDING.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let (tell, told) = channel();
    later(Duration::ZERO, move || {
        let _ = tell.send(());
    });
    told.recv_timeout(patience).is_ok()
}

fn work(orders: &Receiver<Order>) {
    let mut waiting: Vec<(Instant, Job)> = Vec::new();
    loop {
        let now = Instant::now();
        while let Some(i) = waiting.iter().position(|(at, _)| *at <= now) {
            waiting.remove(i).1();
        }
        let next = waiting.iter().map(|(at, _)| at.saturating_duration_since(now)).min();
        let order = match next {
            Some(next) => orders.recv_timeout(next),
            None => orders.recv().map_err(RecvTimeoutError::from),
        };
        match order {
            // A thread that settles raises `SETTLING` before it sends `Hurry`: so if this job came after that order, `SETTLING` is seen raised here.
            Ok(Order::Do(at, job)) => {
                waiting.push((if SETTLING.load(Ordering::Acquire) > 0 { Instant::now() } else { at }, job))
            }
            Ok(Order::Hurry) => waiting.iter_mut().for_each(|(at, _)| *at = now),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
