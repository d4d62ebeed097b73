//! What a rank's calls and joins leave behind for the other ranks of the process: which streams its inputs are on, and which of its streams wait.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::context::Line;
use super::stream::DeviceStream;
use crate::commands::Commands;

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
    /// One more than the number of the rank's operation whose inputs the rank's stream is not to wait for yet ([`holds_back`](Self::holds_back)).
    held_back: AtomicU64,
    /// Somebody is to be woken when more work of the communicator is on a stream: the rank has put its next operation off, or `to_tell` has entries.
    is_awaited: AtomicBool,
    /// Whom else to wake then: ranks of other communicators, whose next operations wait for one that this rank has joined.
    to_tell: Mutex<Vec<Weak<Commands>>>,
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
        let (ended, is_awaited) = (AtomicU64::new(0), AtomicBool::new(false));
        let (used, joined, held_back, to_tell) = Default::default();
        Inputs { used, thread, joined, ended, held_back, is_awaited, to_tell }
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

    /// Notes whether this operation's inputs come after an operation of which some work is on no stream yet. While that is so, the rank's stream must not
    /// wait for the inputs.
    pub(super) fn holds_back(&self, number: u64, is_so: bool) {
        self.held_back.store(if is_so { number + 1 } else { 0 }, Ordering::Release);
    }

    pub(super) fn is_held_back(&self, number: u64) -> bool {
        self.held_back.load(Ordering::Acquire) == number + 1
    }

    /// Has the rank woken when more work of its communicator is on a stream. After this call the caller looks once more whether it has to wait.
    pub(super) fn puts_off(&self) {
        self.is_awaited.swap(true, Ordering::SeqCst);
    }

    /// The same for a rank of another communicator, with these commands.
    pub(super) fn tell(&self, whom: &Arc<Commands>) {
        {
            let mut to_tell = self.to_tell.lock();
            to_tell.retain(|other| other.strong_count() > 0);
            if !to_tell.iter().any(|other| other.as_ptr() == Arc::as_ptr(whom)) {
                to_tell.push(Arc::downgrade(whom));
            }
        }
        self.puts_off();
    }

    /// Called when more work of the communicator is on a stream, or when no more will come: wakes the rank, with these commands, and whoever else has
    /// asked for that.
    pub(super) fn wake(&self, ours: &Commands) {
        if self.is_awaited.swap(false, Ordering::SeqCst) {
            ours.wake();
            let to_tell = std::mem::take(&mut *self.to_tell.lock());
            to_tell.iter().filter_map(Weak::upgrade).for_each(|commands| commands.wake());
        }
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
