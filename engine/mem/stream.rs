//! Streams of host work, and events, which mark points in these streams.
//!
//! A [`HostStream`] is to a CPU what a CUDA stream is to a GPU: its jobs run in order, one after another, while
//! the thread that submits them goes on.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::error::Error;
use crate::forked;

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

struct Point {
    state: AtomicU8,
    /// Why the event failed; empty if no cause was given, as when a job panicked.
    cause: OnceLock<Error>,
    waiters: Mutex<Vec<Waker>>,
    changed: Condvar,
}

/// A point in a stream. Completes when all work submitted to the stream before it was recorded is done.
///
/// An event can be cloned and awaited. To ask whether it is complete never blocks.
#[derive(Clone)]
pub struct Event(Arc<Point>);

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Event({})",
            ["pending", "done", "failed"][self.0.state.load(Ordering::Relaxed) as usize % 3]
        )
    }
}

impl Event {
    pub(crate) fn pending() -> Event {
        Event(Arc::new(Point {
            state: AtomicU8::new(PENDING),
            cause: OnceLock::new(),
            waiters: Mutex::new(Vec::new()),
            changed: Condvar::new(),
        }))
    }

    /// Whether the point has been reached (or its stream has failed).
    pub fn is_complete(&self) -> bool {
        self.0.state.load(Ordering::Acquire) != PENDING
    }

    /// Whether the event failed: a job before this point panicked or failed, or what the stream waited for failed.
    pub fn is_failed(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == FAILED
    }

    /// Blocks until the event is complete; an error if it [failed](Self::is_failed).
    pub fn wait(&self) -> Result<(), Error> {
        let mut waiters = self.0.waiters.lock();
        while !self.is_complete() {
            self.0.changed.wait(&mut waiters);
        }
        drop(waiters);
        self.outcome()
    }

    fn outcome(&self) -> Result<(), Error> {
        if !self.is_failed() {
            return Ok(());
        }
        let panicked =
            || Error::invalid("stream", "a job submitted to this stream before this point panicked");
        Err(self.cause().unwrap_or_else(panicked))
    }

    /// Why the event failed. `None`: it has not failed, or no cause was given, as after a panic.
    pub(crate) fn cause(&self) -> Option<Error> {
        self.0.cause.get().cloned()
    }

    /// Fails the event for this cause: its point will not be reached.
    pub(crate) fn fail(&self, cause: Error) {
        let _ = self.0.cause.set(cause);
        self.fire(false);
    }

    pub(crate) fn fire(&self, ok: bool) {
        let mut waiters = self.0.waiters.lock();
        self.0.state.store(if ok { DONE } else { FAILED }, Ordering::Release);
        let woken = std::mem::take(&mut *waiters);
        drop(waiters);
        self.0.changed.notify_all();
        woken.into_iter().for_each(Waker::wake);
    }

    /// Has `waker` woken once the event completes. `false`: it is complete already, and `waker` is not kept.
    pub(crate) fn subscribe(&self, waker: &Waker) -> bool {
        let is_known = {
            let waiters = self.0.waiters.lock();
            if self.is_complete() {
                return false;
            }
            waiters.iter().any(|w| w.will_wake(waker))
        };
        if is_known {
            return true;
        }
        // A waker is somebody else's code: so it is cloned outside the lock and, if the event is complete by then, dropped outside it.
        let waker = waker.clone();
        let mut waiters = self.0.waiters.lock();
        let waits = !self.is_complete();
        if waits {
            waiters.push(waker);
        }
        waits
    }
}

impl Future for Event {
    type Output = Result<(), Error>;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.subscribe(cx.waker()) { Poll::Pending } else { Poll::Ready(self.outcome()) }
    }
}

/// Whether a stream has failed, and why. The first failure counts.
#[derive(Default)]
pub(crate) struct Failure(OnceLock<Option<Error>>);

impl Failure {
    /// The stream has failed for this cause; `None`: a job has panicked.
    pub(crate) fn fail(&self, cause: Option<Error>) {
        let _ = self.0.set(cause);
    }

    fn is_there(&self) -> bool {
        self.0.get().is_some()
    }

    /// The error of a job that does not run because the stream has failed. `Ok`: the stream has not failed.
    pub(crate) fn check(&self, call: &str) -> Result<(), Error> {
        let panicked = || Error::invalid(call, "the job did not run: a job before it on its stream panicked");
        self.0.get().map_or(Ok(()), |cause| Err(cause.clone().unwrap_or_else(panicked)))
    }

    /// Completes an event that marks a point in the stream.
    fn complete(&self, event: &Event) {
        match self.0.get() {
            None => event.fire(true),
            Some(None) => event.fire(false),
            Some(Some(cause)) => event.fail(cause.clone()),
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Runs a job on the stream's thread. What a job drops is somebody else's code, and may panic: the jobs behind it run all the same.
fn run(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(job));
}

/// An in-order queue of host work on a thread of its own.
///
/// Dropping the stream blocks until all submitted jobs have run, unless it is dropped on its own thread.
pub struct HostStream {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    failure: Arc<Failure>,
}

impl fmt::Debug for HostStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostStream").field("failed", &self.is_failed()).finish()
    }
}

impl HostStream {
    /// A stream whose thread has this name. Fails if the system cannot start a thread, or in a forked child of a process that used allstream.
    pub fn new(name: &str) -> Result<HostStream, Error> {
        forked::begin()?;
        let (jobs, queue) = channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || queue.into_iter().for_each(run))
            .map_err(|e| Error::system(format!("start the thread of stream {name:?}"), e))?;
        Ok(HostStream { jobs: Some(jobs), thread: Some(thread), failure: Arc::default() })
    }

    /// Whether a job has panicked or failed, or an event that the stream waited for has failed. Later jobs then do not run, and later events fail.
    pub fn is_failed(&self) -> bool {
        self.failure.is_there()
    }

    /// Appends a job; returns at once.
    pub fn launch(&self, job: impl FnOnce() + Send + 'static) {
        let failure = self.failure.clone();
        self.push(Box::new(move || {
            if !failure.is_there() && catch_unwind(AssertUnwindSafe(job)).is_err() {
                failure.fail(None);
            }
        }));
    }

    /// An event that completes when all work submitted so far is done. In a forked child, which does not have the stream's thread, it fails at once.
    pub fn record(&self) -> Event {
        let event = Event::pending();
        if forked::is_forked() {
            event.fail(forked::refusal());
            return event;
        }
        let (at, failure) = (event.clone(), self.failure.clone());
        self.push(Box::new(move || failure.complete(&at)));
        event
    }

    /// Work submitted after this call starts only once `event` is complete (the stream waits, the caller does not).
    pub fn wait_event(&self, event: &Event) {
        let (event, failure) = (event.clone(), self.failure.clone());
        self.push(Box::new(move || {
            if event.wait().is_err() {
                let panicked = || {
                    Error::invalid("stream", "a job panicked on another stream, for which this stream waited")
                };
                failure.fail(Some(event.cause().unwrap_or_else(panicked)));
            }
        }));
    }

    /// Blocks until all that was submitted is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.record().wait()
    }

    /// Appends a job that runs even if the stream has failed, for instance to hand buffers back. The job itself must check for the failure.
    pub(crate) fn push(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // The receiver lives as long as the thread, which lives as long as `self`.
            let _ = jobs.send(job);
        }
    }

    pub(crate) fn failure(&self) -> Arc<Failure> {
        self.failure.clone()
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        if forked::is_forked() {
            // The thread runs in the parent only: joining it here would never end.
            std::mem::forget((self.jobs.take(), self.thread.take()));
            return;
        }
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn jobs_run_in_order_and_events_mark_points() {
        let stream = HostStream::new("test").unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        for i in 0..100 {
            let count = count.clone();
            stream.launch(move || assert_eq!(count.fetch_add(1, Ordering::SeqCst), i));
        }
        stream.record().wait().unwrap();
        assert_eq!(count.load(Ordering::SeqCst), 100);
    }

    #[test]
    fn a_panic_fails_later_events_and_hangs_nobody() {
        let stream = HostStream::new("test").unwrap();
        let before = stream.record();
        stream.launch(|| panic!("planted"));
        before.wait().unwrap();
        assert!(stream.record().wait().is_err());
        assert!(stream.is_failed());
    }

    #[test]
    fn a_stream_that_waited_for_what_failed_tells_the_cause_and_no_panic() {
        let (a, b) = (HostStream::new("a").unwrap(), HostStream::new("b").unwrap());
        let gate = Event::pending();
        a.wait_event(&gate);
        b.wait_event(&a.record());
        gate.fail(Error::system("copy", "planted"));
        for stream in [&a, &b] {
            let told = stream.synchronize().unwrap_err().to_string();
            assert!(told.contains("planted") && !told.contains("panicked"), "{told}");
        }
        let (a, b) = (HostStream::new("a").unwrap(), HostStream::new("b").unwrap());
        a.launch(|| panic!("planted"));
        b.wait_event(&a.record());
        assert!(a.synchronize().unwrap_err().to_string().contains("submitted to this stream"));
        assert!(b.synchronize().unwrap_err().to_string().contains("another stream"));
    }

    #[test]
    fn one_stream_waits_for_another() {
        let (a, b) = (HostStream::new("a").unwrap(), HostStream::new("b").unwrap());
        let gate = Event::pending();
        a.wait_event(&gate);
        let done_a = a.record();
        b.wait_event(&done_a);
        let done_b = b.record();
        assert!(!done_b.is_complete());
        gate.fire(true);
        done_b.wait().unwrap();
    }
}
