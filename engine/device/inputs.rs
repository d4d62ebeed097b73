//! What a rank's calls and joins leave behind for the other ranks of the process: which streams its inputs are on, and which of its streams wait.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::context::Line;
use super::stream::DeviceStream;

/// So many streams are remembered of a rank.
const KEPT: usize = 4;

/// What a rank's calls and joins leave behind for the other ranks of the process.
pub(crate) struct Inputs {
    /// The streams of its buffers, the last used first.
    used: Mutex<Vec<Weak<Line>>>,
    /// The one that it was last called on.
    thread: Mutex<ThreadId>,
    /// Its streams that wait for operations which were not on its own stream then.
    pub(super) joined: Mutex<Vec<Joined>>,
    /// All of the operations before this one is on its own stream.
    pub(super) ended: AtomicU64,
    /// Its next operation is to begin when another rank's `ended` goes up.
    pub(super) is_put_off: AtomicBool,
}

pub(super) struct Joined {
    pub(super) line: Weak<Line>,
    pub(super) number: u64,
    /// It waits: whatever is put on a stream in its queue from now on comes behind that.
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

    /// Those that wait for this operation, or a later one.
    pub(super) fn joined_from(&self, number: u64) -> Vec<(DeviceStream, bool)> {
        let joined = self.joined.lock();
        let late = joined.iter().filter(|joined| joined.number >= number);
        late.filter_map(|joined| Some((DeviceStream(joined.line.upgrade()?), joined.is_put))).collect()
    }
}

impl Inputs {
    /// This stream waits for the operation, or is about to.
    pub(super) fn joins(&self, stream: &DeviceStream, number: u64, is_put: bool) {
        let ended = self.ended.load(Ordering::SeqCst);
        let mut joined = self.joined.lock();
        // What is on the rank's stream in whole is waited for as any other work. A stream may wait for several operations that are not.
        joined.retain(|joined| joined.line.strong_count() > 0 && joined.number >= ended);
        let is_it =
            |joined: &&mut Joined| joined.number == number && joined.line.as_ptr() == Arc::as_ptr(&stream.0);
        match joined.iter_mut().find(is_it) {
            Some(joined) => joined.is_put = is_put,
            None => joined.push(Joined { line: Arc::downgrade(&stream.0), number, is_put }),
        }
    }
}
