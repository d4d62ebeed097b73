//! [`Callbacks`]: a group's threads that call the users' callbacks (`Work.add_done_callback`) when operations are over.
//!
//! A callback may wait, also for another operation and for that operation's callbacks. So callbacks run on no thread that others depend on:
//! neither on the engine's threads, nor on the keeper's, which records how operations have ended.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::keeper;
use crate::operation::Operation;

/// A thread ends after it has had nothing to do for so long.
const KEPT: Duration = Duration::from_secs(10);
/// After a callback has slept for so long, another thread calls the callbacks behind it, as the sleeping one may wait for one of these.
const ASLEEP: Duration = Duration::from_secs(1);
/// How often a waiting thread checks whether the running callback sleeps.
const LOOK: Duration = Duration::from_millis(250);

thread_local! {
    /// The depth of the callback that this thread runs: 1 for a callback of an operation that a user's own thread has called, 2 for one of an
    /// operation that a callback of depth 1 has called, and so on. 0: this thread runs no callbacks.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// All levels of all groups: at the end of the interpreter [`are_running`] asks each whether it runs callbacks.
static LEVELS: Mutex<Vec<Weak<Level>>> = Mutex::new(Vec::new());

/// The callbacks of one group.
#[derive(Default)]
pub(crate) struct Callbacks {
    /// The number of the group's next collective: they are numbered in the order of their calls.
    next: AtomicU64,
    levels: Mutex<Vec<Arc<Level>>>,
}

/// Where in a group an operation's callbacks run, and in which order.
pub(crate) struct Place {
    group: Arc<Callbacks>,
    /// The number of a collective. Messages have none: their callbacks run in no fixed order, since a message may end long after later messages.
    number: Option<u64>,
    depth: usize,
}

impl Callbacks {
    /// The place of an operation that is being called on this thread.
    pub(crate) fn place(self: &Arc<Self>, is_message: bool) -> Place {
        let number = (!is_message).then(|| self.next.fetch_add(1, Ordering::Relaxed));
        Place { group: self.clone(), number, depth: DEPTH.get() }
    }

    /// The level of this depth. An operation that a callback calls has its own callbacks on the next level, where they run at the same time as
    /// that callback, which may wait for them.
    fn level(&self, depth: usize) -> Arc<Level> {
        let mut levels = self.levels.lock();
        while levels.len() <= depth {
            let level =
                Arc::new(Level { depth: levels.len(), queue: Mutex::default(), changed: Condvar::new() });
            let mut all = LEVELS.lock();
            all.retain(|level| level.strong_count() > 0);
            all.push(Arc::downgrade(&level));
            levels.push(level);
        }
        levels[depth].clone()
    }
}

impl Place {
    /// Notes that an operation, not yet over, has got its first callback.
    pub(crate) fn expect(&self, operation: Arc<dyn Operation>) {
        if let Some(number) = self.number {
            self.group.level(self.depth).queue.lock().in_order.insert(number, operation);
        }
    }

    /// Notes that an operation that has callbacks is over.
    pub(crate) fn over(&self, operation: Arc<dyn Operation>) {
        let level = self.group.level(self.depth);
        let mut queue = level.queue.lock();
        if self.number.is_none() {
            queue.messages.push_back(operation);
        }
        level.attend(&mut queue);
    }
}

#[derive(Default)]
struct Queue {
    /// Collectives whose callbacks are still to be called, by number: called in this order, each after its collective is over.
    in_order: BTreeMap<u64, Arc<dyn Operation>>,
    /// Messages that are over, and whose callbacks are still to be called.
    messages: VecDeque<Arc<dyn Operation>>,
    /// The turn that runs now: the operations behind it wait until it ends or sleeps for too long.
    running: Option<Running>,
    /// How many turns have begun: in each, a thread calls the callbacks of one operation.
    turns: u64,
    /// How many of the level's threads run no callback.
    idle: usize,
}

#[derive(Clone, PartialEq)]
struct Running {
    turn: u64,
    /// The file in which Linux says how long the turn's thread has computed (`/proc/.../schedstat`).
    thread: Arc<str>,
}

impl Queue {
    fn is_ready(&self) -> bool {
        !self.messages.is_empty() || self.in_order.first_key_value().is_some_and(|(_, first)| first.is_over())
    }

    fn take(&mut self) -> Option<Arc<dyn Operation>> {
        if let Some(message) = self.messages.pop_front() {
            return Some(message);
        }
        let first = self.in_order.first_entry()?;
        first.get().is_over().then(|| first.remove())
    }
}

struct Level {
    depth: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Level {
    /// Wakes an idle thread, or starts one, to look at the queue, in which something is new.
    fn attend(self: &Arc<Self>, queue: &mut Queue) {
        if queue.idle > 0 {
            self.changed.notify_one();
            return;
        }
        let level = self.clone();
        let thread = std::thread::Builder::new().name("allstream-calls".into());
        match thread.spawn(move || level.serve()) {
            Ok(_) => queue.idle += 1,
            // The next operation of this level that ends tries again.
            Err(error) => {
                eprintln!("allstream: the system gives no thread for callbacks, which wait: {error}")
            }
        }
    }

    /// The main function of the level's threads. Returns when there was nothing to do for [`KEPT`].
    fn serve(self: Arc<Self>) {
        DEPTH.set(self.depth + 1);
        let own: Arc<str> = match std::fs::read_link("/proc/thread-self") {
            Ok(path) => format!("/proc/{}/schedstat", path.display()).into(),
            Err(_) => "".into(),
        };
        let mut queue = self.queue.lock();
        let mut seen: Option<(Running, String, Instant)> = None;
        loop {
            if !queue.is_ready() {
                if self.changed.wait_for(&mut queue, KEPT).timed_out() && !queue.is_ready() {
                    queue.idle -= 1;
                    return;
                }
                continue;
            }
            if let Some(running) = queue.running.clone()
                && !self.sleeps(&running, &mut seen)
            {
                self.changed.wait_for(&mut queue, LOOK);
                continue;
            }
            let Some(operation) = queue.take() else { continue };
            let mine = Running { turn: queue.turns, thread: own.clone() };
            queue.turns += 1;
            queue.running = Some(mine.clone());
            queue.idle -= 1;
            if queue.is_ready() {
                // Another thread must check whether this turn sleeps, and then take the next one.
                self.attend(&mut queue);
            }
            drop(queue);
            call(operation);
            queue = self.queue.lock();
            queue.idle += 1;
            if queue.running.as_ref() == Some(&mine) {
                queue.running = None;
            }
        }
    }

    /// Whether the running callback has used no processor time for [`ASLEEP`], so that those behind it wait no longer. `seen`: the turn that this
    /// thread saw running, its processor time, and when this thread first saw that time.
    fn sleeps(&self, running: &Running, seen: &mut Option<(Running, String, Instant)>) -> bool {
        // The first number is the thread's processor time in nanoseconds. If the file cannot be read, the callback counts as asleep.
        let told = std::fs::read_to_string(&*running.thread).unwrap_or_default();
        let computed = told.split(' ').next().unwrap_or_default().to_owned();
        match seen {
            Some((of, before, since)) if of == running && *before == computed => since.elapsed() >= ASLEEP,
            _ => {
                *seen = Some((running.clone(), computed, Instant::now()));
                false
            }
        }
    }

    fn is_busy(&self) -> bool {
        let queue = self.queue.lock();
        queue.running.is_some() || queue.is_ready()
    }
}

/// Calls the callbacks of an operation.
fn call(operation: Arc<dyn Operation>) {
    let mut operation = Some(operation);
    if let Some(_inside) = keeper::inside() {
        Python::try_attach(|py| {
            if let Some(operation) = operation.take() {
                operation.call_back(py);
            }
        });
    }
    // Still here only if the interpreter has ended: then its Python objects cannot be dropped.
    std::mem::forget(operation);
}

/// Whether any callbacks run, or are ready to run.
pub(crate) fn are_running() -> bool {
    let levels: Vec<_> = LEVELS.lock().iter().filter_map(Weak::upgrade).collect();
    levels.iter().any(|level| level.is_busy())
}
