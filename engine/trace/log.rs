//! The thread that logs for threads that must not wait. A log may hang: a full disk, a terminal that nobody reads.
//!
//! The thread starts when there is a line that a subscriber takes, and ends when there are no more lines. A process that exits at once may
//! lose its last lines; whoever drops the last handle of a world waits for them, for a bounded time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tracing::Level;
use tracing::level_filters::LevelFilter;

use super::FirstProcess;

/// The thread's name.
const THREAD: &str = "allstream-log";
/// The most lines that wait. While the log hangs, further lines are lost.
const LINES: usize = 256;

/// Logs one line when it is called.
type Line = Box<dyn FnOnce() + Send>;

struct State {
    lines: VecDeque<Line>,
    /// Whether there is a thread. It may be logging a line that is no longer in `lines`.
    runs: bool,
    /// Whether a `flush` has waited in vain, and no line has been logged since. Until a line is logged, no `flush` waits again.
    is_stuck: bool,
}

/// The lines that are to be logged, and the thread that logs them.
pub(crate) struct Log {
    state: Mutex<State>,
    changed: Condvar,
    process: FirstProcess,
}

/// The process's log.
pub(crate) static LOG: Log = Log::new();

impl Log {
    const fn new() -> Log {
        let state = State { lines: VecDeque::new(), runs: false, is_stuck: false };
        Log { state: Mutex::new(state), changed: Condvar::new(), process: FirstProcess::new() }
    }

    /// Has a warning logged soon, by the subscriber of the calling thread. Never blocks: a caller may hold locks that others wait for.
    pub(crate) fn warn(&'static self, line: impl FnOnce() + Send + 'static) {
        self.at(Level::WARN, line);
    }

    /// As [`warn`](Self::warn), for a line of interest only to those who look for a fault.
    pub(crate) fn debug(&'static self, line: impl FnOnce() + Send + 'static) {
        self.at(Level::DEBUG, line);
    }

    /// Drops the line if no subscriber of the process takes its level, so that no thread is started for it.
    fn at(&'static self, level: Level, line: impl FnOnce() + Send + 'static) {
        if level <= LevelFilter::current() {
            self.line(line);
        }
    }

    fn line(&'static self, line: impl FnOnce() + Send + 'static) {
        if self.process.is_another() {
            return;
        }
        let dispatch = tracing::dispatcher::get_default(Clone::clone);
        let line: Line = Box::new(move || tracing::dispatcher::with_default(&dispatch, line));
        let mut state = self.state.lock();
        if state.lines.len() == LINES {
            return;
        }
        state.lines.push_back(line);
        if !state.runs {
            let thread = std::thread::Builder::new().name(THREAD.into()).spawn(move || self.run());
            state.runs = thread.is_ok();
        }
    }

    fn run(&self) {
        let mut state = self.state.lock();
        while let Some(line) = state.lines.pop_front() {
            drop(state);
            // A subscriber is somebody else's code, and may panic.
            let _ = catch_unwind(AssertUnwindSafe(line));
            state = self.state.lock();
            state.is_stuck = false;
            self.changed.notify_all();
        }
        state.runs = false;
    }

    /// Blocks until all lines are logged, but not for longer than `patience`, and not at all if the log is known to hang.
    pub(crate) fn flush(&self, patience: Duration) {
        if self.process.is_another() {
            return;
        }
        let end = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.runs && !state.is_stuck {
            if self.changed.wait_until(&mut state, end).timed_out() {
                state.is_stuck = state.runs;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn nobody_waits_for_a_line_that_hangs_more_than_once() {
        static ONE: Log = Log::new();
        let (goes_on, waits) = channel::<()>();
        let (begin, begun) = channel::<()>();
        let (tell, told) = channel();
        ONE.line(move || {
            begin.send(()).unwrap();
            waits.recv().unwrap();
        });
        // The first line has left the queue by then, and takes no place there.
        begun.recv_timeout(Duration::from_secs(60)).unwrap();
        for i in 0..2 * LINES {
            let tell = tell.clone();
            ONE.line(move || tell.send(i).unwrap());
        }
        ONE.flush(Duration::from_millis(20));
        let begun = Instant::now();
        ONE.flush(Duration::from_secs(60));
        assert!(begun.elapsed() < Duration::from_secs(30), "it is known to hang");
        goes_on.send(()).unwrap();
        drop(tell);
        let lines: Vec<usize> = told.iter().collect();
        assert!(lines.iter().copied().eq(0..LINES), "as many as are kept, in their order: {lines:?}");
        ONE.line(|| panic!("a subscriber's"));
        ONE.flush(Duration::from_secs(60));
        let (tell, told) = channel();
        ONE.line(move || tell.send(()).unwrap());
        told.recv_timeout(Duration::from_secs(60)).expect("a panic is the end of its line alone");
    }
}
