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

/// Drops it on that thread; here, where the system has no thread to give.
pub(super) fn drop_later(thing: impl Any + Send) {
    later(Duration::ZERO, move || drop(thing));
}

/// Does something on that thread, not before so much time is over; now and here, where the system has no thread to give.
pub(super) fn later(after: Duration, job: impl FnOnce() + Send + 'static) {
    static THREAD: OnceLock<Option<Sender<(Instant, Job)>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (sender, jobs) = channel();
        let thread = std::thread::Builder::new().name("allstream-chores".into());
        thread.spawn(move || work(&jobs)).ok().map(|_| sender)
    });
    let is_due = after.is_zero();
    PENDING.fetch_add(usize::from(is_due), Ordering::Relaxed);
    let job: Job = Box::new(move || {
        // What is dropped may be somebody else's, and so is a log: the next job is done all the same.
        let _ = catch_unwind(AssertUnwindSafe(job));
        PENDING.fetch_sub(usize::from(is_due), Ordering::Relaxed);
    });
    let unsent = match thread {
        Some(thread) => thread.send((Instant::now() + after, job)).map_err(|unsent| unsent.0.1).err(),
        None => Some(job),
    };
    if let Some(job) = unsent {
        job();
    }
}

/// Waits until all is given back that was to be given back before, but not for longer than this. Whether there was anything, and it
/// is given back now.
pub(super) fn settle(patience: Duration) -> bool {
    if PENDING.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let (tell, told) = channel();
    later(Duration::ZERO, move || {
        let _ = tell.send(());
    });
    told.recv_timeout(patience).is_ok()
}

fn work(jobs: &Receiver<(Instant, Job)>) {
    let mut waiting: Vec<(Instant, Job)> = Vec::new();
    loop {
        let now = Instant::now();
        while let Some(i) = waiting.iter().position(|(at, _)| *at <= now) {
            waiting.remove(i).1();
        }
        let next = waiting.iter().map(|(at, _)| at.saturating_duration_since(now)).min();
        let job = match next {
            Some(next) => jobs.recv_timeout(next),
            None => jobs.recv().map_err(RecvTimeoutError::from),
        };
        match job {
            Ok(job) => waiting.push(job),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
