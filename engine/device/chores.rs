//! A thread of the process that gives things back to the driver.
//!
//! The driver may wait for all that is on the device before it takes memory back (`cuMemFree`, `cuMemFreeHost`,
//! `cuMemHostUnregister`, `cuIpcCloseMemHandle`). Who drops the last handle of something may be a thread that others wait for:
//! the one that sees work end, or one that runs a communicator. This one nobody waits for, and it holds nothing.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::forked;

type Job = Box<dyn FnOnce() + Send>;

/// Things that are on their way back.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// Threads of ours, jobs of theirs, and events that are watched, that have still to ask something of the driver.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// Communicators that are bound to a device, or have a communicator of a library's, and are not gone yet: a thread of ours drops them some
/// time after they were closed, and asks the driver for much by that.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// Threads that wait in [`settle`]. As long as there is one, nothing is put off: a communicator that was closed a moment before gives its
/// memory back only now, and the wait would go on until that memory has been kept for its time.
static SETTLING: AtomicUsize = AtomicUsize::new(0);

/// As long as this is there, [`settle`] waits. What causes something else to be done has one until that has its own.
pub(crate) struct Busy(&'static AtomicUsize);

impl Busy {
    /// Of something that is about to end.
    pub(crate) fn new() -> Busy {
        Busy::counted(&BUSY)
    }

    /// Of a communicator, as long as it is there.
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

/// What that thread is told.
enum Order {
    /// To do this, not before a time.
    Do(Instant, Job),
    /// To put off nothing of what it was told before.
    Hurry,
}

static THREAD: OnceLock<Option<Sender<Order>>> = OnceLock::new();

/// Drops it on that thread; here, where the system has no thread to give.
pub(crate) fn drop_later(thing: impl Any + Send) {
    later(Duration::ZERO, move || drop(thing));
}

/// Does something on that thread, not before so much time is over; now and here, where the system has no thread to give.
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
        // What is dropped may be somebody else's, and so is a log: the next job is done all the same.
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

/// Waits until no thread of allstream's has anything left to ask of the CUDA driver: communicators that were bound to devices are gone, what
/// was dropped is given back, and what is watched is over. `false`: it was not so after this time.
///
/// To be called when all communicators are closed and all operations awaited, by who wants to be sure before the process ends: a driver is gone as soon as
/// the process has begun to end (`exit`, or the end of `main`), while other threads still run, and a library that then asks it may crash, as NCCL does. The
/// process itself waits in the same way when it ends: a fifth of a second where communicators are open, two seconds where they are about to end.
///
/// Memory that is kept for the next operations stays with its device, and is no reason to wait.
pub fn settle(patience: Duration) -> bool {
    wait(patience, || BUSY.load(Ordering::Acquire) + OPEN.load(Ordering::Acquire) == 0)
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

/// From now on the process, when it ends, first lets threads of ours end what they ask of the driver. What the system calls at the end it calls
/// in the reverse order: to be called when a library that tears something down at the end, as the driver and NCCL do, has been used.
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
    /// Who has left communicators open does not mean to wait for them.
    const OF_OPEN: Duration = Duration::from_millis(200);
    const OF_ENDING: Duration = Duration::from_secs(2);
    if !forked::is_forked() && !settle(OF_OPEN) {
        wait(OF_ENDING, || BUSY.load(Ordering::Acquire) == 0);
    }
}

/// Waits until all is given back that was to be given back before, but not for longer than this. Whether there was anything, and it
/// is given back now.
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
            // Who settles counts itself before it sends `Hurry`: what comes behind that order finds the count.
            Ok(Order::Do(at, job)) => {
                waiting.push((if SETTLING.load(Ordering::Acquire) > 0 { Instant::now() } else { at }, job))
            }
            Ok(Order::Hurry) => waiting.iter_mut().for_each(|(at, _)| *at = now),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
