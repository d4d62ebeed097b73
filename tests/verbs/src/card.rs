//! The card: all queue pairs of this process, under one lock, and the thread that moves what nobody's call moves.

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

/// Packets that are taken from a pair before others, and who waits for the lock, have their turn.
const AT_A_TIME: usize = 16;
/// What the thread's timer is called among the numbers of queue pairs, which have 24 bits.
const TIMER: u64 = u64::MAX;

pub(crate) struct Card {
    pub(crate) shared: Shared,
    /// By their numbers.
    pub(crate) pairs: HashMap<u32, QueuePair>,
    /// The numbers, by where programs have their parts.
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

/// The card, if there is one.
pub(crate) fn card_if_made() -> Option<MutexGuard<'static, Card>> {
    CARD.get()?.as_ref().ok().map(lock)
}

fn made() -> Result<Mutex<Card>, c_int> {
    // SAFETY: makes a descriptor.
    let waits = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if waits < 0 {
        return Err(errno());
    }
    // SAFETY: just made, and nobody else's.
    let waits = unsafe { OwnedFd::from_raw_fd(waits) };
    let shared = Shared::new()?;
    watch(&waits, shared.timer.fd(), libc::EPOLLIN, TIMER)?;
    let fd = waits.as_raw_fd();
    start(fd)?;
    Ok(Mutex::new(Card { shared, pairs: HashMap::new(), numbers: HashMap::new(), waits }))
}

fn watch(waits: &OwnedFd, fd: RawFd, events: c_int, name: u64) -> Result<(), c_int> {
    let mut event = libc::epoll_event { events: events as u32, u64: name };
    // SAFETY: open descriptors, and an event that is copied.
    match unsafe { libc::epoll_ctl(waits.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Starts the thread, which gets none of the process's signals and never ends.
fn start(fd: RawFd) -> Result<(), c_int> {
    // SAFETY: sets of signals on the stack; this thread's mask is as before when the other has taken its own from it.
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
        // SAFETY: the card's own descriptor, which is never closed; room for so many events.
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
    /// Takes up a queue pair.
    pub(crate) fn add(&mut self, pair: QueuePair) -> Result<(), c_int> {
        let (number, key) = (pair.number(), pair.key);
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET;
        watch(&self.waits, pair.socket.fd(), events, number.into())?;
        self.pairs.insert(number, pair);
        self.numbers.insert(key, number);
        self.shared.report.queue_pairs = self.pairs.len() as u64;
        Ok(())
    }

    /// Takes a queue pair away. What was posted to it is gone: from here on nothing touches its memory.
    pub(crate) fn remove(&mut self, key: usize) -> Result<(), c_int> {
        let number = self.numbers.remove(&key).ok_or(libc::EINVAL)?;
        // The kernel forgets a descriptor that is closed.
        drop(self.pairs.remove(&number));
        self.shared.memory.forget_pair(number);
        self.shared.completions.forget_pair(number);
        self.shared.report.queue_pairs = self.pairs.len() as u64;
        Ok(())
    }

    /// Runs this with a queue pair, if there is one, and sees to what has become of others by it.
    pub(crate) fn with<T>(
        &mut self,
        number: u32,
        run: impl FnOnce(&mut QueuePair, &mut Shared) -> T,
    ) -> Option<T> {
        let done = run(self.pairs.get_mut(&number)?, &mut self.shared);
        self.settle();
        Some(done)
    }

    /// A pair's socket has packets, or room: whether it may have more.
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

    /// What is due is done.
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

    /// A completion queue that has overflowed takes its queue pairs with it.
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
