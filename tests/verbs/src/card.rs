//! The pretended card: all queue pairs of this process, under one lock, and the thread that receives packets, sends on and keeps time.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;
use std::{io, mem, ptr, thread};

use crate::codes::{CQ_ERR, QP_FATAL};
use crate::faults::lock;
use crate::queue_pair::QueuePair;
use crate::shared::Shared;

/// How many packets of a pair are received before the lock is released, so that other threads can take it.
const AT_A_TIME: usize = 16;
/// Stands for the timer in epoll events, which otherwise carry the number of a queue pair, of 24 bits.
const TIMER: u64 = u64::MAX;

pub(crate) struct Card {
    pub(crate) shared: Shared,
    /// The queue pairs, by number.
    pub(crate) pairs: HashMap<u32, QueuePair>,
    /// The numbers of queue pairs, by the address of the `IbvQp` that the program has.
    pub(crate) numbers: HashMap<usize, u32>,
    waits: OwnedFd,
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

static CARD: OnceLock<Result<Mutex<Card>, c_int>> = OnceLock::new();

/// The card of this process, which the first call makes.
pub(crate) fn card() -> Result<MutexGuard<'static, Card>, c_int> {
    match CARD.get_or_init(made) {
        Ok(card) => Ok(lock(card)),
        Err(code) => Err(*code),
    }
}

/// The card, if a call has made it.
pub(crate) fn card_if_made() -> Option<MutexGuard<'static, Card>> {
    CARD.get()?.as_ref().ok().map(lock)
}

fn made() -> Result<Mutex<Card>, c_int> {
    // SAFETY: the call takes no pointers; it makes a descriptor.
    let waits = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if waits < 0 {
        return Err(errno());
    }
    // SAFETY: the descriptor was just made, and nobody else owns it.
    let waits = unsafe { OwnedFd::from_raw_fd(waits) };
    let shared = Shared::new()?;
    watch(&waits, shared.timer.fd(), libc::EPOLLIN, TIMER)?;
    let fd = waits.as_raw_fd();
    start(fd)?;
    Ok(Mutex::new(Card { shared, pairs: HashMap::new(), numbers: HashMap::new(), waits }))
}

fn watch(waits: &OwnedFd, fd: RawFd, events: c_int, name: u64) -> Result<(), c_int> {
    let mut event = libc::epoll_event { events: events as u32, u64: name };
    // SAFETY: the descriptors are open, and the kernel copies the event during the call.
    match unsafe { libc::epoll_ctl(waits.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Starts the card's thread, which blocks all signals and never ends.
fn start(fd: RawFd) -> Result<(), c_int> {
    // SAFETY: the sets of signals are on the stack. The new thread inherits the mask with all signals; then this thread's mask is restored.
    unsafe {
        let (mut all, mut before) = (mem::zeroed(), mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let thread = thread::Builder::new().name("verbs for tests".into()).spawn(move || run(fd));
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        thread.map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))
    }
}

fn run(fd: RawFd) {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 32];
    loop {
        // SAFETY: the descriptor is the card's, and is never closed once this thread runs; there is room for this many events.
        let count = unsafe { libc::epoll_wait(fd, events.as_mut_ptr(), events.len() as c_int, -1) };
        for event in &events[..usize::try_from(count).unwrap_or(0)] {
            let name = event.u64;
            if name == TIMER {
                if let Ok(mut card) = card() {
                    card.tick();
                }
                continue;
            }
            while card().is_ok_and(|mut card| card.serve(name as u32)) {
                thread::yield_now();
            }
        }
    }
}

impl Card {
    /// Adds a queue pair, and watches its socket.
    pub(crate) fn add(&mut self, pair: QueuePair) -> Result<(), c_int> {
        let (number, key) = (pair.number(), pair.key);
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET;
        watch(&self.waits, pair.socket.fd(), events, number.into())?;
        self.pairs.insert(number, pair);
        self.numbers.insert(key, number);
        self.shared.report.queue_pairs = self.pairs.len() as u64;
        Ok(())
    }

    /// Removes a queue pair, with all requests that are posted to it: from here on nothing touches their memory.
    pub(crate) fn remove(&mut self, key: usize) -> Result<(), c_int> {
        let number = self.numbers.remove(&key).ok_or(libc::EINVAL)?;
        // This closes the pair's socket, and the kernel then removes it from the epoll.
        drop(self.pairs.remove(&number));
        self.shared.memory.forget_pair(number);
        self.shared.completions.forget_pair(number);
        self.shared.report.queue_pairs = self.pairs.len() as u64;
        Ok(())
    }

    /// Runs `run` with the queue pair of this number, if there is one, and then `settle`, as other pairs may be affected.
    pub(crate) fn with<T>(
        &mut self,
        number: u32,
        run: impl FnOnce(&mut QueuePair, &mut Shared) -> T,
    ) -> Option<T> {
        let done = run(self.pairs.get_mut(&number)?, &mut self.shared);
        self.settle();
        Some(done)
    }

    /// Serves a pair whose socket has packets, or room for some. Returns whether there may be more packets.
    fn serve(&mut self, number: u32) -> bool {
        let serve = |pair: &mut QueuePair, shared: &mut Shared| {
            pair.blocked = None;
            let has_more = pair.take(AT_A_TIME, shared);
            pair.respond(shared);
            pair.advance(shared);
            has_more
        };
        self.with(number, serve).unwrap_or(false)
    }

    /// Does everything whose time has come, and sets the timer for the rest.
    fn tick(&mut self) {
        self.shared.timer.fired();
        let now = Instant::now();
        for pair in self.pairs.values_mut() {
            let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
            if is_due(pair.sending.pause) {
                pair.sending.pause = None;
                pair.advance(&mut self.shared);
            }
            if is_due(pair.blocked) {
                pair.blocked = None;
                pair.respond(&mut self.shared);
                pair.advance(&mut self.shared);
            }
            if is_due(pair.sending.look) {
                pair.look(&mut self.shared);
            }
            pair.respond(&mut self.shared);
            let answer = pair.receiving.answers.front().and_then(|answer| answer.from);
            let answer = answer.filter(|from| *from > now);
            let times = [pair.sending.pause, pair.sending.look, pair.blocked, answer];
            times.into_iter().flatten().for_each(|at| self.shared.timer.wake_at(at));
        }
        let next = self.shared.completions.tick(now, &mut self.shared.report);
        next.into_iter().for_each(|at| self.shared.timer.wake_at(at));
        self.settle();
    }

    /// Puts the queue pairs of completion queues that have overflowed into the error state.
    pub(crate) fn settle(&mut self) {
        while let Some(queue) = self.shared.completions.failed.pop() {
            if let Some(context) = self.shared.completions.context(queue) {
                self.shared.event(context, CQ_ERR, queue);
            }
            for pair in self.pairs.values_mut() {
                if pair.send_cq == queue || pair.recv_cq == queue {
                    pair.fail(Some(QP_FATAL), &mut self.shared);
                }
            }
        }
    }
}
