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

type Job = Box<dyn FnOnce() + Send>;

/// Things that are on their way back.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// Threads of ours, jobs of theirs, and events that are watched, that have still to ask something of the driver.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// As long as this is there, [`settle`] waits. What causes something else to be done has one until that has its own.
pub(crate) struct Busy(());

impl Busy {
    pub(crate) fn new() -> Busy {
        BUSY.fetch_add(1, Ordering::AcqRel);
        Busy(())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        BUSY.fetch_sub(1, Ordering::AcqRel);
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
pub(super) fn drop_later(thing: impl Any + Send) {
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

/// Waits until no thread of allstream's has anything left to ask of the CUDA driver: what was dropped is given back, and what
/// is watched is over. `false`: it was not so after this time.
///
/// To be called before a process ends, when its communicators are closed and its operations awaited. A driver may be gone as soon as the
/// process has begun to end (`exit`, or the end of `main`), while other threads still run. What they then ask for comes to nothing, which
/// does no harm here. But not every library that is in the process, nor every driver, is as patient.
///
/// Memory that is kept for the next operations stays with its device, and is no reason to wait.
pub fn settle(patience: Duration) -> bool {
    const LOOK: Duration = Duration::from_millis(1);
    let start = Instant::now();
    if let Some(Some(thread)) = THREAD.get() {
        let _ = thread.send(Order::Hurry);
    }
    while BUSY.load(Ordering::Acquire) > 0 {
        if start.elapsed() >= patience {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
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
            Ok(Order::Do(at, job)) => waiting.push((at, job)),
            Ok(Order::Hurry) => waiting.iter_mut().for_each(|(at, _)| *at = now),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
