//! The thread that writes flight recorders. It is started when there is something to write, and ends when there is nothing
//! more. All requests of a rank that come before the thread begins the rank's file are met by that one file.
//!
//! Only whoever drops the last handle of a world waits for the thread, and for a bounded time, as a file system may hang.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::log::LOG;
use super::{FirstProcess, Recording};
use crate::error::Error;

/// The thread's name.
const THREAD: &str = "allstream-trace";
/// How long the thread waits for further requests: one loss makes many communicators fail, and all of them go into one file.
const SETTLE: Duration = Duration::from_millis(10);

/// A rank with something to write.
pub(crate) trait Recorded: Send + Sync {
    /// What is to be written. `cause`: the failure that is the reason (then the writing thread calls this); `None`: somebody asked for it.
    fn recording(&self, cause: Option<&Error>) -> Recording;
}

struct Request {
    from: Weak<dyn Recorded>,
    /// The cause of the first request that came since the rank's last file was begun.
    cause: Error,
}

struct State {
    requests: VecDeque<Request>,
    /// Whether there is a thread.
    runs: bool,
    thread: Option<ThreadId>,
    /// The rank whose file the thread is writing.
    at: Option<Weak<dyn Recorded>>,
    /// Whether somebody waits for a file: then the thread does not wait for further requests.
    hurried: bool,
}

impl State {
    /// Whether a file of this rank is still to be written.
    fn concerns(&self, rank: &Weak<dyn Recorded>) -> bool {
        self.requests.iter().map(|r| &r.from).chain(&self.at).any(|from| from.ptr_eq(rank))
    }
}

/// The files that are to be written, and the thread that writes them.
pub(crate) struct Writer {
    state: Mutex<State>,
    changed: Condvar,
    process: FirstProcess,
}

/// The process's writer.
pub(crate) static WRITER: Writer = Writer::new();

impl Writer {
    const fn new() -> Writer {
        let state = State { requests: VecDeque::new(), runs: false, thread: None, at: None, hurried: false };
        Writer { state: Mutex::new(state), changed: Condvar::new(), process: FirstProcess::new() }
    }

    /// Has a rank's recorders written soon. Does no I/O.
    pub(crate) fn request(&'static self, from: Weak<dyn Recorded>, cause: &Error) {
        if super::directory().is_none() || self.process.is_another() {
            return;
        }
        let mut state = self.state.lock();
        if state.requests.iter().any(|r| r.from.ptr_eq(&from)) {
            return;
        }
        state.requests.push_back(Request { from, cause: cause.clone() });
        if state.runs {
            return;
        }
        let thread = std::thread::Builder::new().name(THREAD.into()).spawn(move || self.run());
        match thread {
            Ok(thread) => (state.runs, state.thread) = (true, Some(thread.thread().id())),
            Err(error) => {
                state.requests.clear();
                drop(state);
                LOG.warn(move || tracing::warn!(%error, "the flight recorder is not written: its thread could not be started"));
            }
        }
    }

    /// Whether a file of this rank is still to be written; if so, hurries the thread. `false` on the writing thread itself.
    pub(crate) fn is_behind(&self, rank: &Weak<dyn Recorded>) -> bool {
        if self.process.is_another() {
            return false;
        }
        let mut state = self.state.lock();
        let behind = state.concerns(rank) && state.thread != Some(std::thread::current().id());
        if behind && !state.hurried {
            state.hurried = true;
            self.changed.notify_all();
        }
        behind
    }

    /// Blocks until this rank's files are written, but not for longer than `patience`.
    pub(crate) fn wait(&self, rank: &Weak<dyn Recorded>, patience: Duration) {
        let end = Instant::now() + patience;
        while self.is_behind(rank) {
            let mut state = self.state.lock();
            if state.concerns(rank) && self.changed.wait_until(&mut state, end).timed_out() {
                return;
            }
        }
    }

    fn run(&self) {
        let mut state = self.state.lock();
        while !state.requests.is_empty() {
            let end = Instant::now() + SETTLE;
            while !state.hurried && !self.changed.wait_until(&mut state, end).timed_out() {}
            while let Some(Request { from, cause }) = state.requests.pop_front() {
                state.at = Some(from.clone());
                drop(state);
                // May panic: if the world's last handle is dropped meanwhile, the world is dropped here, and its drop runs somebody else's code.
                let _ = catch_unwind(AssertUnwindSafe(|| {
                    let recording = from.upgrade().map(|from| from.recording(Some(&cause)));
                    // From here on this thread does not keep the world alive, as the file system may hang. If the file cannot be written,
                    // that is only logged: the failure for which it is written is being told already.
                    match recording.map(|recording| recording.write()) {
                        Some(Ok(Some(path))) => {
                            tracing::info!(path = %path.display(), "flight recorder written")
                        }
                        Some(Err(error)) => tracing::warn!("{error}"),
                        _ => {}
                    }
                }));
                state = self.state.lock();
                state.at = None;
                self.changed.notify_all();
            }
            state.hurried = false;
        }
        (state.runs, state.thread) = (false, None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use super::*;
    use crate::trace::RankPlace;

    /// A rank whose recording takes until it is told to go on.
    struct Slow {
        begun: mpsc::Sender<()>,
        go_on: Mutex<mpsc::Receiver<()>>,
        count: AtomicUsize,
    }

    impl Recorded for Slow {
        fn recording(&self, cause: Option<&Error>) -> Recording {
            self.count.fetch_add(1, Ordering::Relaxed);
            self.begun.send(()).unwrap();
            self.go_on.lock().recv_timeout(Duration::from_secs(10)).unwrap();
            let world = "test of the writer".into();
            let place = RankPlace { world, rank: 0, size: 1, hosts: vec![0], clock: None };
            Recording::new(place, cause, Vec::new(), None)
        }
    }

    #[test]
    fn what_is_asked_for_together_is_written_once_and_nobody_waits() {
        static OURS: Writer = Writer::new();
        let ((begun, has_begun), (go, go_on)) = (mpsc::channel(), mpsc::channel());
        let slow = Arc::new(Slow { begun, go_on: Mutex::new(go_on), count: AtomicUsize::new(0) });
        let weak: Weak<Slow> = Arc::downgrade(&slow);
        let weak: Weak<dyn Recorded> = weak;
        let cause = Error::Closed { call: "this test".into() };
        let start = Instant::now();
        (0..1000).for_each(|_| OURS.request(weak.clone(), &cause));
        has_begun.recv_timeout(Duration::from_secs(10)).unwrap();
        // The writer hangs from here on. What is asked for meanwhile goes into another file.
        (0..1000).for_each(|_| OURS.request(weak.clone(), &cause));
        OURS.wait(&weak, Duration::from_millis(50));
        assert!(start.elapsed() < Duration::from_secs(5), "somebody waited");
        assert!(OURS.is_behind(&weak));
        go.send(()).unwrap();
        go.send(()).unwrap();
        OURS.wait(&weak, Duration::from_secs(10));
        assert!(!OURS.is_behind(&weak));
        assert_eq!(slow.count.load(Ordering::Relaxed), 2, "recordings");
    }
}
