//! [`Callbacks`]: threads of a group that call what users have asked to be called when an operation is over.
//!
//! Such a function may wait, also for another operation, and for what is called at the end of that one. So none of them runs on a thread
//! that others depend on: not on the engine's, and not on the keeper's, which records how operations have ended.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::keeper;
use crate::operation::Operation;

/// How long a thread is kept that has nothing to do.
const KEPT: Duration = Duration::from_secs(10);
/// How long a callback may sleep before those behind it are called by another thread: it may wait for one of them.
const ASLEEP: Duration = Duration::from_secs(1);
/// How often a thread looks whether the callback that it waits behind sleeps.
const LOOK: Duration = Duration::from_millis(250);

thread_local! {
    /// How deep the callback is that this thread runs: 1 for one of an operation that the user's own thread has called. 0: it runs none.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// All levels that are there, so that the end of the interpreter can wait for what they run.
static LEVELS: Mutex<Vec<Weak<Level>>> = Mutex::new(Vec::new());

/// The callbacks of one group.
#[derive(Default)]
pub(crate) struct Callbacks {
    /// Numbers its collectives in the order of their calls.
    next: AtomicU64,
    levels: Mutex<Vec<Arc<Level>>>,
}

/// Where an operation's callbacks belong.
pub(crate) struct Place {
    group: Arc<Callbacks>,
    /// The number of a collective. Messages have none: their callbacks keep no order, since a message may end long after later ones.
    number: Option<u64>,
    depth: usize,
}

impl Callbacks {
    /// The place of an operation that is being called on this thread.
    pub(crate) fn place(self: &Arc<Self>, is_message: bool) -> Place {
        let number = (!is_message).then(|| self.next.fetch_add(1, Ordering::Relaxed));
        Place { group: self.clone(), number, depth: DEPTH.get() }
    }

    /// What is called by a callback has callbacks that run beside it, on the next level: it may wait for them.
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
    /// An operation has got its first callback, before it was over.
    pub(crate) fn expect(&self, operation: Arc<dyn Operation>) {
        if let Some(number) = self.number {
            self.group.level(self.depth).queue.lock().in_order.insert(number, operation);
        }
    }

    /// An operation that has callbacks is over.
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
    /// Collectives that have callbacks, by number; called in this order, each when it is over.
    in_order: BTreeMap<u64, Arc<dyn Operation>>,
    /// Messages that are over.
    messages: VecDeque<Arc<dyn Operation>>,
    /// The callback that runs, in whose turn the others wait.
    running: Option<Running>,
    /// How many have run.
    turns: u64,
    /// Threads that run nothing.
    idle: usize,
}

#[derive(Clone, PartialEq)]
struct Running {
    turn: u64,
    /// Where the system tells how long its thread has computed.
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
    /// Has a thread look at the queue, which has something new.
    fn attend(self: &Arc<Self>, queue: &mut Queue) {
        if queue.idle > 0 {
            self.changed.notify_one();
            return;
        }
        let level = self.clone();
        let thread = std::thread::Builder::new().name("allstream-calls".into());
        match thread.spawn(move || level.serve()) {
            Ok(_) => queue.idle += 1,
            // The next operation that ends tries again.
            Err(error) => {
                eprintln!("allstream: the system gives no thread for callbacks, which wait: {error}")
            }
        }
    }

    /// What its threads do: each that has nothing to do for a while ends.
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
                // Somebody is to see whether this one sleeps.
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

    /// Whether the callback that runs has not computed for so long that those behind it are no longer to wait. `seen`: what was found before.
    fn sleeps(&self, running: &Running, seen: &mut Option<(Running, String, Instant)>) -> bool {
        // How long its thread has run, in nanoseconds, comes first. Where the system does not tell, it counts as asleep.
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

/// Calls what is to be called of an operation.
fn call(operation: Arc<dyn Operation>) {
    let mut operation = Some(operation);
    if let Some(_inside) = keeper::inside() {
        Python::try_attach(|py| {
            if let Some(operation) = operation.take() {
                operation.call_back(py);
            }
        });
    }
    // There is no interpreter any more.
    std::mem::forget(operation);
}

/// Whether callbacks run, or are about to.
pub(crate) fn are_running() -> bool {
    let levels: Vec<_> = LEVELS.lock().iter().filter_map(Weak::upgrade).collect();
    levels.iter().any(|level| level.is_busy())
}
