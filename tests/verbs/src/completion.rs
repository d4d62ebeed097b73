//! Completion queues, and the channels that carry their events.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{c_int, c_uint};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream_sys::verbs::{IbvCq, IbvWc};

use crate::codes::SUCCESS;
use crate::counts::Report;
use crate::signal::Signal;

/// The part of a completion queue to which the program has a pointer.
#[repr(C)]
pub(crate) struct SharedCq {
    pub(crate) ibv: IbvCq,
    /// How many completions wait. Polling an empty queue reads only this, and takes no lock.
    waiting: AtomicUsize,
}

impl SharedCq {
    pub(crate) fn new(ibv: IbvCq) -> SharedCq {
        SharedCq { ibv, waiting: AtomicUsize::new(0) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }
}

/// A completion, and what becomes free when the program polls it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) wc: IbvWc,
    pub(crate) pair: u32,
    pub(crate) is_receive: bool,
    /// How many requests' places in the queue pair become free: this request's, and those of earlier ones without a completion.
    pub(crate) slots: u32,
    /// The sender has marked the message as solicited, so it also wakes a program that waits only for such.
    pub(crate) is_solicited: bool,
}

/// For which completion the next event of a queue is asked for. An event disarms the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Next,
}

struct Queue {
    shared: *const SharedCq,
    context: usize,
    channel: usize,
    capacity: usize,
    entries: VecDeque<Entry>,
    armed: Armed,
    /// How many events of the queue were fetched and not acknowledged.
    fetched: u32,
    has_failed: bool,
}

// SAFETY: of the program's part, to which `shared` points, this side only touches an atomic number; and that part lives as long as the queue is in
// the table.
unsafe impl Send for Queue {}

struct Channel {
    context: usize,
    signal: Signal,
    waiting: VecDeque<usize>,
}

struct Late {
    queue: usize,
    entry: Entry,
}

/// All completion queues and channels of a process.
#[derive(Default)]
pub(crate) struct Completions {
    queues: HashMap<usize, Queue>,
    channels: HashMap<usize, Channel>,
    late: BTreeMap<(Instant, u64), Late>,
    /// When the last delayed completion of a queue pair's sends (`false`) or receives (`true`) is due. Later completions must not overtake it.
    last_due: HashMap<(u32, bool), Instant>,
    sequence: u64,
    /// Queues that have overflowed, and whose queue pairs were not put into the error state yet.
    pub(crate) failed: Vec<usize>,
}

impl Completions {
    pub(crate) fn add_channel(&mut self, key: usize, context: usize, signal: Signal) {
        self.channels.insert(key, Channel { context, signal, waiting: VecDeque::new() });
    }

    pub(crate) fn channel_fd(&self, key: usize) -> Option<RawFd> {
        self.channels.get(&key).map(|channel| channel.signal.fd())
    }

    pub(crate) fn drop_channel(&mut self, key: usize) -> Result<(), c_int> {
        if self.queues.values().any(|queue| queue.channel == key) {
            return Err(libc::EBUSY);
        }
        self.channels.remove(&key).map(drop).ok_or(libc::EINVAL)
    }

    pub(crate) fn channels(&self) -> usize {
        self.channels.len()
    }

    pub(crate) fn queues(&self) -> usize {
        self.queues.len()
    }

    pub(crate) fn uses(&self, context: usize) -> bool {
        self.queues.values().any(|queue| queue.context == context)
            || self.channels.values().any(|channel| channel.context == context)
    }

    /// `channel`: 0 for none.
    pub(crate) fn add(&mut self, shared: *const SharedCq, context: usize, channel: usize, capacity: usize) {
        let (entries, armed) = (VecDeque::new(), Armed::No);
        let queue =
            Queue { shared, context, channel, capacity, entries, armed, fetched: 0, has_failed: false };
        self.queues.insert(shared as usize, queue);
    }

    pub(crate) fn context(&self, key: usize) -> Option<usize> {
        self.queues.get(&key).map(|queue| queue.context)
    }

    /// Whether a channel's events of the queue have all been acknowledged.
    pub(crate) fn is_acknowledged(&self, key: usize) -> bool {
        self.queues.get(&key).is_none_or(|queue| queue.fetched == 0)
    }

    pub(crate) fn drop_queue(&mut self, key: usize) {
        let Some(queue) = self.queues.remove(&key) else { return };
        self.late.retain(|_, late| late.queue != key);
        if let Some(channel) = self.channels.get_mut(&queue.channel) {
            let before = channel.waiting.len();
            channel.waiting.retain(|waiting| *waiting != key);
            (channel.waiting.len()..before).for_each(|_| channel.signal.lower());
        }
    }

    /// Adds a completion, at once or after a delay. Returns the time when a delayed one is due.
    pub(crate) fn push(
        &mut self,
        key: usize,
        entry: Entry,
        delay: Option<Duration>,
        report: &mut Report,
    ) -> Option<Instant> {
        let side = (entry.pair, entry.is_receive);
        let before = self.last_due.get(&side).copied();
        let due = match (delay, before) {
            (None, None) => {
                self.deliver(key, entry, report);
                return None;
            }
            (Some(delay), Some(before)) => (Instant::now() + delay).max(before),
            (Some(delay), None) => Instant::now() + delay,
            (None, Some(before)) => before,
        };
        self.last_due.insert(side, due);
        self.sequence += 1;
        self.late.insert((due, self.sequence), Late { queue: key, entry });
        Some(due)
    }

    /// Delivers the delayed completions that are due. Returns when the next one is due.
    pub(crate) fn tick(&mut self, now: Instant, report: &mut Report) -> Option<Instant> {
        while let Some(first) = self.late.first_entry() {
            let due = first.key().0;
            if due > now {
                return Some(due);
            }
            let Late { queue, entry } = first.remove();
            let side = (entry.pair, entry.is_receive);
            if self.last_due.get(&side) == Some(&due)
                && !self.late.values().any(|late| (late.entry.pair, late.entry.is_receive) == side)
            {
                self.last_due.remove(&side);
            }
            self.deliver(queue, entry, report);
        }
        None
    }

    fn deliver(&mut self, key: usize, entry: Entry, report: &mut Report) {
        let Some(queue) = self.queues.get_mut(&key) else { return };
        if queue.entries.len() >= queue.capacity {
            report.overflows += 1;
            if !queue.has_failed {
                queue.has_failed = true;
                self.failed.push(key);
            }
            return;
        }
        queue.entries.push_back(entry);
        // SAFETY: the program's part lives as long as the queue is in the table.
        unsafe { &*queue.shared }.waiting.store(queue.entries.len(), Ordering::Release);
        let tells = match queue.armed {
            Armed::No => false,
            Armed::Solicited => entry.is_solicited || entry.wc.status != SUCCESS,
            Armed::Next => true,
        };
        if let Some(channel) = self.channels.get_mut(&queue.channel).filter(|_| tells) {
            queue.armed = Armed::No;
            channel.waiting.push_back(key);
            channel.signal.raise();
            report.wakeups += 1;
        }
    }

    /// Asks for an event at the next completion, or at the next one that is solicited or failed. Completions that wait already do not count.
    pub(crate) fn arm(&mut self, key: usize, only_solicited: bool) -> Result<(), c_int> {
        let queue = self.queues.get_mut(&key).ok_or(libc::EINVAL)?;
        if queue.armed != Armed::Next {
            queue.armed = if only_solicited { Armed::Solicited } else { Armed::Next };
        }
        Ok(())
    }

    pub(crate) fn poll(&mut self, key: usize, most: usize) -> Result<Vec<Entry>, c_int> {
        let queue = self.queues.get_mut(&key).ok_or(libc::EINVAL)?;
        let count = queue.entries.len().min(most);
        let entries = queue.entries.drain(..count).collect();
        // SAFETY: as above.
        unsafe { &*queue.shared }.waiting.store(queue.entries.len(), Ordering::Release);
        Ok(entries)
    }

    /// Fetches the channel's oldest event, if one waits: the queue that it is about.
    pub(crate) fn fetch(&mut self, channel: usize) -> Option<usize> {
        let key = self.channels.get_mut(&channel)?.waiting.pop_front()?;
        self.queues.get_mut(&key)?.fetched += 1;
        Some(key)
    }

    /// Acknowledges `count` events. Returns whether as many had been fetched.
    pub(crate) fn acknowledge(&mut self, key: usize, count: c_uint) -> bool {
        let Some(queue) = self.queues.get_mut(&key) else { return false };
        let are_known = queue.fetched >= count;
        queue.fetched = queue.fetched.saturating_sub(count);
        are_known
    }

    /// Drops all completions of a queue pair, delivered or delayed.
    pub(crate) fn forget_pair(&mut self, pair: u32) {
        self.late.retain(|_, late| late.entry.pair != pair);
        self.last_due.retain(|(known, _), _| *known != pair);
        for queue in self.queues.values_mut() {
            queue.entries.retain(|entry| entry.pair != pair);
            // SAFETY: as above.
            unsafe { &*queue.shared }.waiting.store(queue.entries.len(), Ordering::Release);
        }
    }
}
