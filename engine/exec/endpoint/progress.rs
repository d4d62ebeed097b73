//! How operations move: who drives an endpoint, what executes on it ([`Run`]), and what a pass does.
//!
//! The thread that gets the lock of [`Run`] drives. No thread waits for that lock in order to drive: if it is taken, another
//! thread drives. A thread that submits makes a pass at once; one that waits or polls drives for a while; after that, and for
//! operations that nobody waits for, the progress thread drives. When a device is done, a word in memory shows it, or the driver wakes
//! the progress thread.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use super::ending::{Ending, Endings};
use super::{Endpoint, EndpointConfig, Finished, orphaned};
use crate::error::Error;
use crate::exec::Progress;
use crate::exec::active::{Active, Pass};
use crate::exec::carrier::{Carried, Lane};
use crate::exec::deadlines::DeadlineClock;
use crate::exec::inflight::Key;
use crate::exec::p2p::Messages;
use crate::exec::port::Port;
use crate::link::locks::EngineGuard;
use crate::link::waits::{Point, stop};
use crate::mem::Event;
use crate::trace::State;
use crate::types::Rank;

/// Where ranks outnumber cores, a poll makes so many passes at least, unless they take ten times its budget.
const FEW_PASSES: u32 = 32;
/// A thread that waits drives for so long without progress; then the progress thread takes over.
pub(super) const SPIN: Duration = Duration::from_micros(200);
/// If a thread that waits gave its core away, and has it back only after longer than this, another program computes there. The thread then
/// sleeps at once: its wake-up comes sooner than its next turn.
const TAKEN: Duration = Duration::from_millis(1);
/// Passes in vain between two looks at the clock.
pub(super) const LOOK: u32 = 16;
/// Passes in vain before the core is given away. Over shared memory a pass takes 0.1 us: 16 passes end in the middle of an
/// operation of 4 KB. Over TCP a pass makes a system call for each peer: on 2 cores, 4 ranks took 50 us for 4 B with 4 passes,
/// 56 to 89 us with 16, 165 us with 128; 2 ranks took as long with 4 as with 16.
const YIELD_OVER_MEMORY: u32 = 128;
const YIELD_OVER_TCP: u32 = 4;

impl Endpoint {
    /// Puts the endpoint on the progress thread's list and makes sure that it looks there.
    pub(super) fn arm(self: &Arc<Self>) {
        // Pairs with the fence in `delist`: either the progress thread sees what was submitted, or we see that the endpoint is off its list.
        fence(Ordering::SeqCst);
        if !self.enlisted.load(Ordering::Relaxed) && !self.enlisted.swap(true, Ordering::AcqRel) {
            self.config.runtime.enlist(self.clone());
        }
        self.config.runtime.nudge();
    }

    /// Leaves the endpoint to the progress thread, which looks at it now.
    pub(crate) fn leave_to_progress_thread(self: &Arc<Self>) {
        self.arm();
        self.config.runtime.kick();
    }

    /// Makes a function that another thread calls when this communicator has something to look at: it wakes the progress thread for it.
    pub(super) fn waker_of_progress(self: &Arc<Self>) -> impl FnOnce() + Send + use<> {
        let endpoint = Arc::downgrade(self);
        move || {
            if let Some(endpoint) = endpoint.upgrade() {
                endpoint.leave_to_progress_thread();
            }
        }
    }

    /// Looks at an operation, and drives for a bounded time if it is not finished. With `again` the caller will poll
    /// once more at once; otherwise the progress thread takes over.
    pub(crate) fn poll(
        self: &Arc<Self>,
        key: Key,
        waker: &Waker,
        budget: Duration,
        again: bool,
    ) -> Poll<Finished> {
        if let Some(refused) = orphaned() {
            return Poll::Ready(refused);
        }
        let start = self.config.now();
        let budget = if self.config.runtime.may_wait() { budget } else { Duration::ZERO };
        let mut passes = 0u32;
        self.callers.count_wait();
        loop {
            // The waker is stored before driving: whoever finishes the operation from here on wakes us.
            if let Some(finished) = self.look(key, Some(waker)) {
                return Poll::Ready(finished);
            }
            if self.drive_once() != Progress::Advanced
                && !self.config.relax(&mut passes)
                && !passes.is_multiple_of(LOOK)
                && !budget.is_zero()
            {
                continue;
            }
            // If each pass gives the core away, most of the budget is spent by other ranks: it would allow too few passes.
            let few = self.config.crowded && passes < FEW_PASSES;
            if self.config.now() - start >= if few { 10 * budget } else { budget } {
                break;
            }
        }
        if again {
            waker.wake_by_ref();
            return Poll::Pending;
        }
        self.leave_to_progress_thread();
        self.look(key, Some(waker)).map_or(Poll::Pending, Poll::Ready)
    }

    /// Blocks until the operation is finished.
    pub(crate) fn wait(self: &Arc<Self>, key: Key) -> Finished {
        loop {
            if let Some(finished) = self.wait_until(key, None) {
                return finished;
            }
        }
    }

    /// Blocks until the operation is finished, or `end` has come (`None`): drives it from this thread for a while, then leaves it to the
    /// progress thread.
    pub(crate) fn wait_until(self: &Arc<Self>, key: Key, end: Option<Instant>) -> Option<Finished> {
        if let Some(refused) = orphaned() {
            return Some(refused);
        }
        self.callers.count_wait();
        if let Some(finished) = self.look(key, None) {
            return Some(finished);
        }
        self.callers.enter();
        let mut idle_since = None;
        let mut passes = 0u32;
        let found = loop {
            // After a pass that is blocked, this thread seldom looks at the outcome: only now and then has another thread finished the operation.
            let progress = self.drive_once();
            if progress == Progress::Advanced {
                idle_since = None;
                if end.is_some_and(|end| Instant::now() >= end) {
                    break None;
                }
            } else {
                let before = self.config.crowded.then(Instant::now);
                let yielded = self.config.relax(&mut passes);
                let looks = yielded || passes.is_multiple_of(LOOK);
                if looks {
                    let now = Instant::now();
                    // Other ranks of this host give a core back soon; another program that computes gives it back milliseconds later.
                    let taken = before.filter(|before| now.saturating_duration_since(*before) > TAKEN);
                    let since = *idle_since.get_or_insert(taken.unwrap_or(now));
                    let idle = now.saturating_duration_since(since);
                    if idle > SPIN || end.is_some_and(|end| now >= end) {
                        break None;
                    }
                }
                if progress == Progress::Blocked && !looks {
                    continue;
                }
            }
            if let Some(finished) = self.look(key, None) {
                break Some(finished);
            }
        };
        self.callers.leave();
        if found.is_some() {
            return found;
        }
        let waker = crate::exec::progress_thread::parker();
        loop {
            if let Poll::Ready(finished) = self.poll(key, &waker, Duration::ZERO, false) {
                return Some(finished);
            }
            match end.map(|end| end.saturating_duration_since(Instant::now())) {
                None => std::thread::park(),
                Some(Duration::ZERO) => return None,
                Some(rest) => std::thread::park_timeout(rest),
            }
        }
    }

    /// Drives if nobody else does.
    pub(crate) fn drive_once(self: &Arc<Self>) -> Progress {
        self.try_drive(true)
    }

    /// Drives if nobody else does. `spinning`: the caller is about to drive again, so the clock is not looked at each time.
    pub(super) fn try_drive(self: &Arc<Self>, spinning: bool) -> Progress {
        match self.run.try_lock() {
            Some(run) => self.drive_with(run, spinning),
            None => Progress::Blocked,
        }
    }

    pub(super) fn drive_with(self: &Arc<Self>, run: EngineGuard<'_, Run>, spinning: bool) -> Progress {
        let progress = self.drive(run, spinning);
        self.run_completions();
        // The driver may block this thread, perhaps for good, in a command. The progress thread looks at the deadlines meanwhile.
        if progress != Progress::Idle && !self.commands.only_drop() {
            self.arm();
        }
        // The progress thread, which does not spin, soon drives this endpoint again if something moved. Commands that only drop something wait
        // until then: they would wake another thread before this one has finished operations that are over on other endpoints.
        let comes_back = !spinning && progress == Progress::Advanced;
        if !(comes_back && self.commands.only_drop()) {
            self.commands.issue();
        }
        progress
    }

    fn drive(self: &Arc<Self>, mut run: EngineGuard<'_, Run>, spinning: bool) -> Progress {
        stop(Point::Drive, self.config.rank);
        if self.health.is_dead() {
            return run.tear_down(self);
        }
        if run.failed {
            return Progress::Blocked;
        }
        stop(Point::MemoryLock, self.config.rank);
        // The lock is only tried: this very thread may hold it, in a user's function that a pass of another communicator calls.
        let Some(memory_lock) = self.config.memory_lock.try_lock() else {
            self.config.region.want_memory_lock();
            return Progress::Blocked;
        };
        let moved = run.pass(self);
        run.active.started(|| self.config.now());
        drop(memory_lock);
        // Whoever wants the memory lock tries it now and then: between two long passes there must be time for that.
        if run.active.was_long() && !run.active.is_empty() && self.config.region.was_memory_lock_wanted() {
            std::thread::yield_now();
        }
        match moved {
            Ok(progress) => {
                // The clock is not for every pass: a spinning thread makes millions a second. It is looked at also if each pass moves something.
                run.passes = run.passes.wrapping_add(1);
                let is_last = !spinning && progress != Progress::Advanced;
                if is_last || run.passes.is_multiple_of(64) {
                    let now = self.config.now();
                    if run.clock.is_time_to_look(now) {
                        run.check_deadlines(self, now);
                    }
                }
                if is_last {
                    run.look_at_endings(self);
                }
                progress
            }
            Err(error) => {
                // No other thread may go on with half-done work before `fail` has made the failure known.
                run.failed = true;
                drop(run);
                self.fail(error);
                Progress::Advanced
            }
        }
    }

    /// Whether nothing is left to do and everything sent has left.
    pub(crate) fn is_quiet(self: &Arc<Self>) -> bool {
        self.drive_once() == Progress::Idle && self.submitted.running() == 0
    }
}

impl EndpointConfig {
    /// Between two passes that moved nothing: gives the core away now and then, at once where ranks outnumber cores.
    pub(super) fn relax(&self, passes: &mut u32) -> bool {
        *passes = passes.wrapping_add(1);
        let every = if self.env.one_host { YIELD_OVER_MEMORY } else { YIELD_OVER_TCP };
        let yields = self.crowded || (*passes).is_multiple_of(every);
        if yields {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        yields
    }
}

/// How far a dead communicator has been taken down, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Teardown {
    /// The communicator lives, or peers in this process may still touch what they were lent.
    NotBegun,
    /// Peers were told that nothing of theirs is read any more, and lent memory was taken back from this process's ranks.
    Revoked(Instant),
    /// All operations that had begun or were queued have been failed.
    Failed(Instant),
}

/// What executes: the collective in work, the messages, and the links under both.
pub(super) struct Run {
    pub(super) active: Active,
    pub(super) port: Port,
    /// Once the communicator is bound to devices: what runs parts in their memory, over links of its own.
    pub(super) device: Option<Box<dyn Lane>>,
    /// Collectives that are on a stream, and have not ended there.
    pub(super) endings: Endings,
    pub(super) messages: Messages,
    pub(super) clock: DeadlineClock,
    /// How many passes were made, modulo 2^32.
    passes: u32,
    /// A pass has failed, and may have left work half done: so no more passes are made. Once the communicator is marked dead, it is torn down.
    pub(super) failed: bool,
    pub(super) teardown: Teardown,
}

impl Run {
    pub(super) fn new(config: &EndpointConfig, port: Port, messages: Messages) -> Run {
        Run {
            active: Run::active(config).of_rank(&config.region),
            port,
            device: None,
            endings: Endings::default(),
            messages,
            clock: DeadlineClock::new(config.runtime.now()),
            passes: 0,
            failed: false,
            teardown: Teardown::NotBegun,
        }
    }

    /// What works on collectives, before the first one.
    pub(super) fn active(config: &EndpointConfig) -> Active {
        Active::new(config.comm, config.streams_from, config.env.one_host)
    }

    /// Whether the next collective may begin.
    pub(super) fn may_begin(&self) -> bool {
        self.active.is_empty() && !self.endings.is_full()
    }

    /// The links of collectives: those of the host, and those of the lane.
    pub(super) fn ports(&mut self) -> impl Iterator<Item = &mut Port> {
        std::iter::once(&mut self.port).chain(self.device.as_mut().map(|device| device.port()))
    }

    /// The ranks that the collective waits for.
    pub(super) fn waiting_for(&mut self) -> Vec<Rank> {
        let mut ranks = Vec::new();
        self.active.waiting_for(&mut self.port, &mut ranks);
        if let Some(device) = &mut self.device {
            device.waiting_for(&mut ranks);
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// All of the active collective is on its stream.
    pub(super) fn enqueued(&mut self, key: Key) {
        let Some((number, signature, timeout)) = self.active.current() else { return };
        let Some(carrier) = self.active.carrier().cloned() else { return };
        self.take_active();
        self.endings.push(Ending::new(key, number, signature, timeout, carrier));
    }

    /// Forgets the collective in work, which is done or has failed. Returns its key and number.
    pub(super) fn take_active(&mut self) -> Option<(Key, u64)> {
        if let Some(device) = &mut self.device {
            device.clear();
        }
        self.active.take()
    }

    /// Takes back what collectives have lent to peers and peers have released.
    pub(super) fn reap(&mut self) {
        // If a link has failed, the next pass returns that error.
        let _ = self.port.reap(|lent| self.active.freed(&lent));
        if let Some(device) = &mut self.device {
            let _ = device.reap();
        }
    }

    /// Takes back slots that were lent. Returns whether none is lent any more.
    pub(super) fn reclaim(&mut self) -> bool {
        self.ports().fold(true, |back, port| port.reclaim() & back) & self.messages.reclaim()
    }

    /// Begins the queued messages whose input is ready, and the next collective if it may begin. Returns whether any message began.
    pub(super) fn take_in(&mut self, of: &Endpoint) -> Result<bool, Error> {
        let waker = of.config.runtime.waker();
        let (mut any, mut i, mut table) = (false, 0, of.submitted.lock());
        // A message whose input is ready is handed to `Messages`; the others keep their places in the queue.
        while i < table.messages.len() {
            let after = table.messages[i].2.as_ref();
            if after.is_none_or(|event| !event.subscribe(waker)) {
                // If the stream that the message follows has failed, the message stays queued: it fails with all other operations.
                let (_, message, after) = &table.messages[i];
                ready(after, message.direction.name())?;
                let Some((key, message, _)) = table.messages.remove(i) else { break };
                drop(table);
                self.messages.add(key, message, of.config.now());
                any = true;
                table = of.submitted.lock();
            } else {
                i += 1;
            }
        }
        if self.may_begin()
            && let Some((_, Carried { operation, .. }, after)) = table.collectives.front()
            && !after.as_ref().is_some_and(|event| event.subscribe(waker))
        {
            if after.is_some() {
                ready(after, &operation.signature.to_string())?;
            }
            if let Some((key, carried, _)) = table.collectives.pop_front() {
                of.recorder.started(carried.operation.number);
                self.active.start(key, carried);
            }
        }
        of.submitted.note_queued(&table);
        Ok(any)
    }

    /// One pass: over what has ended on devices, what is queued, the collective in work, and the messages.
    fn pass(&mut self, of: &Arc<Endpoint>) -> Result<Progress, Error> {
        of.commands.check()?;
        let mut any = !self.endings.is_empty() && self.end_some(of)?;
        if of.submitted.any_queued() {
            any |= self.take_in(of)?;
        }
        let Run { active, port, device, messages, .. } = self;
        any |= active.arrived(|| of.config.runtime.waker())?;
        any |= port.reap(|lent| active.freed(&lent))?;
        if !active.is_empty() {
            let mut device = device.as_deref_mut();
            if let Some(device) = &mut device {
                any |= device.reap()?;
            }
            match active.pass(port, device)? {
                Pass::Going(moved) => any |= moved,
                Pass::Then(key, then) => {
                    let held = of.submitted.borrow(key);
                    if let Some(mut held) = held {
                        let parts = then(&mut held);
                        of.submitted.lock().inflight.give_back(key, held);
                        active.go_on(parts?);
                    }
                    any = true;
                }
                Pass::OnStream(key) => {
                    self.enqueued(key);
                    return Ok(Progress::Advanced);
                }
                Pass::Done(key) => {
                    if let Some((_, number)) = active.take() {
                        of.recorder.finished(number, State::Done);
                    }
                    of.data_done(key);
                    any = true;
                }
            }
        }
        if messages.is_used() {
            messages.arrived(of.config.runtime.waker())?;
            any |= messages.pass(|key, message| {
                of.recorder.message_finished(message.record);
                of.data_done(key);
            })?;
            messages.go_on(|| of.config.now());
        }
        if let Some(bound) = of.bound() {
            let carrier = active.carrier();
            let is_asked = carrier.is_some_and(|carrier| carrier.is_to_be_asked())
                || bound.has_library() && messages.is_in_progress();
            of.is_asked.store(is_asked, Ordering::Relaxed);
        }
        if any {
            return Ok(Progress::Advanced);
        }
        let waiting = !active.is_empty() || !messages.is_idle() || of.submitted.running() > 0;
        if waiting || !port.is_flushed() || !messages.is_flushed() {
            return Ok(Progress::Blocked);
        }
        Ok(Progress::Idle)
    }

    /// Finishes the collectives that are over on their streams. Whether any was.
    fn end_some(&mut self, of: &Endpoint) -> Result<bool, Error> {
        let mut any = false;
        while let Some(ending) = self.endings.next()? {
            of.recorder.finished(ending.number, State::Done);
            of.finish(ending.key, Ok(()));
            of.commands.put_drop(ending.carrier);
            any = true;
        }
        Ok(any)
    }

    /// The progress thread may sleep next: sets how soon it looks again whether a device is done, and has the driver asked if that takes long.
    fn look_at_endings(&mut self, of: &Arc<Endpoint>) {
        let soon = match self.endings.is_empty() {
            true => None,
            false => {
                let now = of.config.now();
                let soon = self.endings.look_again(now);
                self.endings.watch(now, || of.waker_of_progress());
                soon
            }
        };
        of.look_again.set(soon);
    }
}

fn ready(after: &Option<Event>, call: &str) -> Result<(), Error> {
    let Some(failed) = after.as_ref().filter(|event| event.is_failed()) else { return Ok(()) };
    let panicked = || {
        Error::invalid(
            call,
            "the stream that this call was to follow has failed: a job on that stream panicked",
        )
    };
    Err(failed.cause().unwrap_or_else(panicked))
}
