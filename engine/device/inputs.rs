//! What a rank's calls and joins leave behind for the other ranks of the process: which streams its inputs are on, and which of its streams wait.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::context::Line;
use super::stream::DeviceStream;

/// How many streams of a rank are remembered.
const KEPT: usize = 4;

/// What a rank's calls and joins leave behind for the other ranks of the process.
pub(crate) struct Inputs {
    /// The streams of the rank's buffers, the last used first.
    used: Mutex<Vec<Weak<Line>>>,
    /// The thread on which the rank was last called.
    thread: Mutex<ThreadId>,
    /// Callers' streams that joined an operation of the rank before all work for it was on streams.
    pub(super) joined: Mutex<Vec<Joined>>,
    /// All of the rank's work for the operations before this number is on a stream.
    pub(super) ended: AtomicU64,
    /// The rank's next operation has been put off, and is tried again when another rank's `ended` grows.
    pub(super) is_put_off: AtomicBool,
}

pub(super) struct Joined {
    pub(super) line: Weak<Line>,
    pub(super) number: u64,
    /// Whether the wait is on the stream: what is put on any stream of its hardware queue from now on comes behind the wait.
    is_put: bool,
}

impl Inputs {
    pub(crate) fn new() -> Inputs {
        let thread = Mutex::new(std::thread::current().id());
        let (ended, is_put_off) = (AtomicU64::new(0), AtomicBool::new(false));
        Inputs { used: Mutex::default(), thread, joined: Mutex::default(), ended, is_put_off }
    }

    pub(super) fn called(&self, streams: &[DeviceStream]) {
        *self.thread.lock() = std::thread::current().id();
        let mut used = self.used.lock();
        for stream in streams {
            if used.first().is_none_or(|first| first.as_ptr() != Arc::as_ptr(&stream.0)) {
                used.retain(|line| line.as_ptr() != Arc::as_ptr(&stream.0));
                used.insert(0, Arc::downgrade(&stream.0));
                used.truncate(KEPT);
            }
        }
    }

    pub(super) fn used(&self) -> Vec<DeviceStream> {
        self.used.lock().iter().filter_map(Weak::upgrade).map(DeviceStream).collect()
    }

    pub(super) fn thread(&self) -> ThreadId {
        *self.thread.lock()
    }

    /// The streams that have joined this operation or a later one, each with whether its wait is on it already.
    pub(super) fn joined_from(&self, number: u64) -> Vec<(DeviceStream, bool)> {
        let joined = self.joined.lock();
        let late = joined.iter().filter(|joined| joined.number >= number);
        late.filter_map(|joined| Some((DeviceStream(joined.line.upgrade()?), joined.is_put))).collect()
    }
}

impl Inputs {
    /// Notes that this stream waits for the operation (`is_put`), or is about to wait.
    pub(super) fn joins(&self, stream: &DeviceStream, number: u64, is_put: bool) {
        let ended = self.ended.load(Ordering::SeqCst);
        let mut joined = self.joined.lock();
        // Once all of an operation's work is on a stream, a wait for it is like one for any other work, so its joins are forgotten. One stream
        // may have joined several operations.
        joined.retain(|joined| joined.line.strong_count() > 0 && joined.number >= ended);
        let is_it =
            |joined: &&mut Joined| joined.number == number && joined.line.as_ptr() == Arc::as_ptr(&stream.0);
        match joined.iter_mut().find(is_it) {
            Some(joined) => joined.is_put = is_put,
            None => joined.push(Joined { line: Arc::downgrade(&stream.0), number, is_put }),
        }
    }
}
