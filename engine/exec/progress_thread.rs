//! The process's progress thread: one thread that drives every operation that nobody else drives.
//!
//! It passes over the endpoints with work, and sleeps in `epoll` when none can move. A peer's doorbell (a flag in the region, a unix socket), a
//! descriptor that a link has named, a submission or a deadline wakes it. If a link may have news that no descriptor tells of, the thread asks the
//! link in each pass and sleeps for microseconds only. Without work it waits for its eventfd alone, but not for long if it keeps memory to give back.

use std::cell::OnceCell;
use std::num::NonZeroU64;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use super::sources::{self, Sources};
use super::{Progress, quarantine};
use crate::commands::never_block_here;
use crate::error::Error;
use crate::forked;
use crate::link::exit::Lease;
use crate::link::region::Region;
use crate::link::{Interest, Poller, Reactor, Source};
use crate::trace::log::LOG;

/// The progress thread spins this long without progress before it sleeps, where there are cores to spare.
const SPIN: Duration = Duration::from_micros(30);
/// Without work of its own the thread first sleeps in naps of this length, from which a submission need not wake it.
const NAP: Duration = Duration::from_millis(1);
/// How long naps go on after the last operation.
const LINGER: Duration = Duration::from_millis(20);
/// Deadlines are looked at this often while operations wait.
const WATCH: Duration = Duration::from_millis(20);
/// Pollers, and libraries, are asked this often while operations wait.
pub(super) const ASK: Duration = Duration::from_micros(50);

/// The system may make a sleep of the progress thread longer by so many nanoseconds.
const SLACK_NS: u64 = 1000;

/// After a sleep, at most so many rings of peers are read from the doorbell's socket.
const RINGS: usize = 16;

const AWAKE: u32 = 0;
const NAPPING: u32 = 1;
const ASLEEP: u32 = 2;

/// What the progress thread drives: one rank's part in a communicator. None of its functions blocks.
pub(crate) trait Driven: Send + Sync {
    /// Drives the endpoint once, unless another thread drives it.
    fn drive_once(self: Arc<Self>) -> Progress;
    /// The same before the progress thread may sleep: this also checks the deadlines.
    fn drive_and_check(self: Arc<Self>) -> Progress;
    /// Whether another thread drives it, or did since this was last asked.
    fn is_driven(&self) -> bool;
    /// Gives back memory that the endpoint keeps, if it has nothing to do. Returns whether it is to be asked again later.
    fn rest(&self) -> bool;
    /// Whether the endpoint is on the progress thread's list. The thread that sets this puts the endpoint there.
    fn enlisted(&self) -> &AtomicBool;
    /// The rank's region, where peers see whether the progress thread sleeps.
    fn region(&self) -> &Arc<Region>;
    /// Whether there are more ranks than cores on this host: then nobody spins.
    fn is_oversubscribed(&self) -> bool;
    /// How soon to look again, if the endpoint waits for something that wakes nobody when it is done.
    fn is_asked(&self) -> Option<Duration> {
        None
    }
}

pub(crate) struct ProgressThread {
    endpoints: Mutex<Vec<Arc<dyn Driven>>>,
    /// Endpoints with nothing to do that keep much memory. Only the progress thread touches them.
    resting: Mutex<Vec<Weak<dyn Driven>>>,
    state: AtomicU32,
    /// An eventfd by which this process wakes the thread. No peer has this descriptor.
    wake: OwnedFd,
    /// The socket from which the thread reads what peers have written to `doorbell`.
    rung: OwnedFd,
    /// The other end of `rung`, which peers are given: they write to it to wake the thread. Why not an eventfd: whether calls on an eventfd may
    /// block depends on a flag that all processes which have the descriptor share, so any of them could make the others, and this thread, block. On
    /// a socket each call can say for itself that it must not block.
    doorbell: Arc<OwnedFd>,
    epoll: OwnedFd,
    sources: Sources,
    /// The pollers, which are asked in each pass over work that nobody else drives. `asks`: whether there are any.
    pollers: Mutex<Vec<Weak<dyn Poller>>>,
    asks: AtomicBool,
    waker: OnceLock<Waker>,
}

/// The process's progress thread, started at the first call.
pub(crate) fn progress_thread() -> Result<Arc<ProgressThread>, Error> {
    // Refuses a forked child: the static below holds the parent's value there, whose thread does not exist in the child.
    forked::begin()?;
    static PROGRESS_THREAD: Mutex<Option<Arc<ProgressThread>>> = Mutex::new(None);
    let mut slot = PROGRESS_THREAD.lock();
    if let Some(progress_thread) = &*slot {
        return Ok(progress_thread.clone());
    }
    let progress_thread = Arc::new(ProgressThread::new()?);
    let _ = progress_thread.waker.set(Waker::from(Arc::new(Kick(progress_thread.clone()))));
    let run = progress_thread.clone();
    std::thread::Builder::new()
        .name("allstream-progress".into())
        .spawn(move || run.run())
        .map_err(|e| Error::system("start the engine's progress thread (a thread)", e))?;
    *slot = Some(progress_thread.clone());
    Ok(progress_thread)
}

/// Keeps memory that peers may still touch in quarantine until all leases are over, and wakes the progress thread, which looks whether they are.
pub(crate) fn keep_and_look(what: quarantine::What, leases: Vec<Arc<Lease>>) {
    quarantine::keep(what, leases);
    match progress_thread() {
        Ok(progress_thread) => progress_thread.kick(),
        Err(error) => LOG.warn(move || tracing::warn!("memory lent to a lost rank is never freed: {error}")),
    }
}

struct Kick(Arc<ProgressThread>);

impl Wake for Kick {
    fn wake(self: Arc<Self>) {
        self.0.kick();
    }
}

impl Reactor for ProgressThread {
    fn watch(&self, fd: BorrowedFd<'_>, interest: Interest) -> Result<(), Error> {
        let flags = match interest {
            Interest::Readable => epoll::EventFlags::IN,
            Interest::Writable => epoll::EventFlags::OUT,
        };
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(sources::LINK), flags | epoll::EventFlags::ET)
            .map_err(|e| Error::system("watch a link's descriptor", e))
    }

    fn listen(&self, fd: BorrowedFd<'_>, source: Weak<dyn Source>) -> Result<(), Error> {
        self.sources.add(&self.epoll, fd, source)
    }

    fn ask(&self, poller: Weak<dyn Poller>) {
        self.pollers.lock().push(poller);
        self.asks.store(true, Ordering::Release);
        self.kick();
    }

    fn kick(&self) {
        ProgressThread::kick(self);
    }
}

impl ProgressThread {
    fn new() -> Result<ProgressThread, Error> {
        let doing = |e: rustix::io::Errno| {
            Error::os("start the engine's progress thread (epoll, eventfd, a pair of unix sockets)", e)
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(doing)?;
        let (rung, doorbell) =
            socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).map_err(doing)?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(doing)?;
        for fd in [&wake, &rung] {
            epoll::add(&poll, fd, epoll::EventData::new_u64(sources::WAKE), epoll::EventFlags::IN)
                .map_err(doing)?;
        }
        Ok(ProgressThread {
            endpoints: Mutex::new(Vec::new()),
            resting: Mutex::new(Vec::new()),
            state: AtomicU32::new(AWAKE),
            wake,
            rung,
            doorbell: Arc::new(doorbell),
            epoll: poll,
            sources: Sources::default(),
            pollers: Mutex::default(),
            asks: AtomicBool::new(false),
            waker: OnceLock::new(),
        })
    }

    /// The descriptor by which peers wake this process.
    pub(crate) fn doorbell(&self) -> &Arc<OwnedFd> {
        &self.doorbell
    }

    /// Wakes the progress thread.
    pub(crate) fn waker(&self) -> &Waker {
        self.waker.get().unwrap_or(Waker::noop())
    }

    pub(crate) fn enlist(&self, endpoint: Arc<dyn Driven>) {
        self.endpoints.lock().push(endpoint);
    }

    /// Makes sure that the progress thread looks at its list soon: wakes it from its sleep, but not from a nap, which soon ends by itself.
    pub(crate) fn nudge(&self) {
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) == ASLEEP {
            self.kick();
        }
    }

    /// Makes the progress thread look at its list now.
    pub(crate) fn kick(&self) {
        fence(Ordering::SeqCst);
        if self.state.swap(AWAKE, Ordering::AcqRel) != AWAKE {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    fn run(self: Arc<Self>) {
        never_block_here();
        // The thread sleeps for as little as 50 us, to which the system by default adds up to another 50 us.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(SLACK_NS));
        let mut list: Vec<Arc<dyn Driven>> = Vec::new();
        let mut events = Vec::with_capacity(64);
        let (mut flags, mut taken) = (Vec::new(), Vec::new());
        let (mut last_moved, mut last_busy) = (Instant::now(), Instant::now());
        let mut looked = Instant::now();
        loop {
            if self.is_keeping() && looked.elapsed() >= quarantine::LOOK {
                quarantine::look();
                self.let_rest(&mut taken);
                looked = Instant::now();
            }
            let seen = self.pass(&mut list);
            if seen.moved {
                last_moved = Instant::now();
                last_busy = last_moved;
                continue;
            }
            if seen.driven {
                last_busy = Instant::now();
            }
            let idle = last_moved.elapsed();
            // Where ranks outnumber cores the thread sleeps at once: a peer's doorbell wakes it sooner than it would get back a core that
            // it has yielded, which another thread that computes keeps for the rest of its time slice.
            if seen.undriven && idle < SPIN && !list.iter().any(|e| e.is_oversubscribed()) {
                std::hint::spin_loop();
                continue;
            }
            let (state, sleep) = match () {
                () if seen.undriven => (ASLEEP, Some(seen.asked.unwrap_or(WATCH))),
                () if last_busy.elapsed() < LINGER => (NAPPING, Some(NAP)),
                () => (ASLEEP, None),
            };
            self.sleep(state, sleep, &mut list, &mut events, &mut flags);
        }
    }

    /// One pass over the list.
    fn pass(&self, list: &mut Vec<Arc<dyn Driven>>) -> Seen {
        list.clear();
        list.extend(self.endpoints.lock().iter().cloned());
        let mut seen = Seen::default();
        for endpoint in list.iter() {
            if endpoint.is_driven() {
                seen.driven = true;
                continue;
            }
            match endpoint.clone().drive_and_check() {
                Progress::Advanced => seen.moved = true,
                Progress::Blocked => {
                    seen.undriven = true;
                    seen.asks(endpoint.is_asked());
                }
                Progress::Idle => self.delist(endpoint),
            }
        }
        if seen.undriven && self.asks.load(Ordering::Relaxed) {
            seen.asks(Some(ASK));
            seen.moved |= self.ask_pollers();
        }
        seen
    }

    /// Asks all pollers. Returns whether any has news, which the next pass takes.
    fn ask_pollers(&self) -> bool {
        let mut news = false;
        let mut pollers = self.pollers.lock();
        pollers.retain(|poller| {
            poller.upgrade().is_some_and(|poller| {
                news |= poller.poll();
                true
            })
        });
        self.asks.store(!pollers.is_empty(), Ordering::Relaxed);
        news
    }

    fn delist(&self, endpoint: &Arc<dyn Driven>) {
        self.endpoints.lock().retain(|e| !Arc::ptr_eq(e, endpoint));
        endpoint.enlisted().store(false, Ordering::Release);
        if endpoint.rest() {
            let mut resting = self.resting.lock();
            let new = Arc::downgrade(endpoint);
            if !resting.iter().any(|other| other.ptr_eq(&new)) {
                resting.push(new);
            }
        }
        // A submission between the last pass and the store found the endpoint enlisted, and left it to this thread: so it is driven again.
        fence(Ordering::SeqCst);
        if endpoint.clone().drive_once() != Progress::Idle
            && !endpoint.enlisted().swap(true, Ordering::AcqRel)
        {
            self.enlist(endpoint.clone());
        }
    }

    /// Whether anything is kept that is to be given back later.
    fn is_keeping(&self) -> bool {
        !quarantine::is_empty() || !self.resting.lock().is_empty()
    }

    /// Has the endpoints that keep much memory give it back, if they may by now. The list is swapped into `taken`, which is empty, so that its
    /// lock is not held meanwhile, and so that nothing is allocated.
    fn let_rest(&self, taken: &mut Vec<Weak<dyn Driven>>) {
        std::mem::swap(taken, &mut *self.resting.lock());
        taken.retain(|endpoint| endpoint.upgrade().is_some_and(|endpoint| endpoint.rest()));
        self.resting.lock().append(taken);
    }

    fn sleep(
        &self,
        state: u32,
        timeout: Option<Duration>,
        list: &mut Vec<Arc<dyn Driven>>,
        events: &mut Vec<epoll::Event>,
        flags: &mut Vec<Arc<Region>>,
    ) {
        self.state.store(state, Ordering::Release);
        flags.clear();
        if state == ASLEEP && timeout.is_some() {
            flags.extend(list.iter().map(|e| e.region().clone()));
        }
        flags.iter().for_each(|r| r.doorbell_flag().store(1, Ordering::Release));
        // Pairs with the fences in `Doorbell::ring`, `nudge` and `kick`: either they see the flag or the state, or the pass below
        // sees what was published before them.
        fence(Ordering::SeqCst);
        let mut woken = self.state.load(Ordering::Relaxed) == AWAKE;
        if !woken {
            let seen = self.pass(list);
            // If an endpoint was enlisted since the last pass, the flag of its region is not set, and no peer would wake us (tests/loom: doorbell).
            let unflagged = |e: &Arc<dyn Driven>| !flags.iter().any(|r| Arc::ptr_eq(r, e.region()));
            let waiting = seen.undriven || (seen.driven && state == ASLEEP);
            woken = seen.moved || (waiting && list.iter().any(unflagged));
        }
        if !woken {
            // The thread may sleep for long, and a communicator may end meanwhile: this list must not keep its endpoint alive.
            list.clear();
            // `is_keeping` is asked after the pass, which may have left memory to be given back later.
            let spec = timeout.or_else(|| self.is_keeping().then_some(quarantine::LOOK)).map(timespec);
            if state == NAPPING || timeout.is_none() {
                // Other threads drive the links, or nobody does: traffic on their sockets must not wake this thread. What arrives
                // meanwhile is still pending in the epoll when this thread waits for that next.
                let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], spec.as_ref());
            } else {
                // `epoll::wait` counts milliseconds, so a shorter sleep waits for the epoll's own descriptor.
                let is_short = timeout.is_some_and(|timeout| timeout < NAP);
                if is_short {
                    let _ = poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], spec.as_ref());
                }
                let spec = if is_short { Some(timespec(Duration::ZERO)) } else { spec };
                events.clear();
                let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), spec.as_ref());
                self.sources.read(events);
            }
        }
        self.state.store(AWAKE, Ordering::Release);
        flags.iter().for_each(|r| r.doorbell_flag().store(0, Ordering::Relaxed));
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        // Peers ring only where they have seen a flag set. At most `RINGS` are read, so that a peer that never stops does not keep the thread here.
        let rings = if flags.is_empty() { 0 } else { RINGS };
        for _ in 0..rings {
            if recv(&self.rung, &mut count, RecvFlags::DONTWAIT).is_err() {
                break;
            }
        }
    }
}

#[derive(Default)]
struct Seen {
    moved: bool,
    /// Work that only the progress thread looks after.
    undriven: bool,
    /// Work that a waiting thread drives itself.
    driven: bool,
    /// How soon to look again, if an endpoint waits for something that wakes nobody when it is done.
    asked: Option<Duration>,
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

impl Seen {
    fn asks(&mut self, soon: Option<Duration>) {
        self.asked = self.asked.into_iter().chain(soon).min();
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A waker that unparks this thread: made once per thread.
pub(crate) fn parker() -> Waker {
    thread_local! {
        static PARKER: OnceCell<Waker> = const { OnceCell::new() };
    }
    let make = || Waker::from(Arc::new(Unpark(std::thread::current())));
    PARKER.try_with(|waker| waker.get_or_init(make).clone()).unwrap_or_else(|_| make())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::link::local::Doorbell;

    /// Rings a doorbell many times on a thread of its own. Returns whether that came to an end.
    fn rings(fd: Arc<OwnedFd>) -> bool {
        let region = Arc::new(Region::private().unwrap());
        let doorbell = Doorbell::new(region.clone(), fd);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for _ in 0..1000 {
                region.doorbell_flag().store(1, Ordering::Relaxed);
                doorbell.ring();
            }
            let _ = tell.send(());
        });
        told.recv_timeout(Duration::from_secs(10)).is_ok()
    }

    /// Sets a descriptor so that calls on it block, for all who have it. An eventfd is also filled.
    pub(crate) fn spoil(fd: &OwnedFd) {
        rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::NONBLOCK).unwrap();
        let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
        rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::empty()).unwrap();
    }

    /// Work that only the progress thread drives. A pass that finds a signal takes it. The work is done once `over` is set.
    struct Work {
        signals: Box<dyn Fn() -> bool + Send + Sync>,
        taken: std::sync::mpsc::Sender<()>,
        over: AtomicBool,
        enlisted: AtomicBool,
        region: Arc<Region>,
    }

    impl Driven for Work {
        fn drive_once(self: Arc<Self>) -> Progress {
            if self.over.load(Ordering::SeqCst) {
                return Progress::Idle;
            }
            if !(self.signals)() {
                return Progress::Blocked;
            }
            let _ = self.taken.send(());
            Progress::Advanced
        }
        fn drive_and_check(self: Arc<Self>) -> Progress {
            self.drive_once()
        }
        fn is_driven(&self) -> bool {
            false
        }
        fn rest(&self) -> bool {
            false
        }
        fn enlisted(&self) -> &AtomicBool {
            &self.enlisted
        }
        fn region(&self) -> &Arc<Region> {
            &self.region
        }
        fn is_oversubscribed(&self) -> bool {
            true
        }
    }

    /// The median of the times that the progress thread takes to notice a signal. If nothing wakes it, it looks again only after [`WATCH`].
    fn notices(signal: impl Fn(), signals: impl Fn() -> bool + Send + Sync + 'static) -> Duration {
        let (taken, told) = std::sync::mpsc::channel();
        let work = Arc::new(Work {
            signals: Box::new(signals),
            taken,
            over: AtomicBool::new(false),
            enlisted: AtomicBool::new(true),
            region: Arc::new(Region::private().unwrap()),
        });
        let progress_thread = progress_thread().unwrap();
        progress_thread.enlist(work.clone());
        progress_thread.kick();
        let once = |_| {
            // Gives the progress thread time for a pass in vain, after which it sleeps.
            let slept = Instant::now() + 10 * SPIN;
            while Instant::now() < slept {
                std::thread::yield_now();
            }
            let since = Instant::now();
            signal();
            told.recv_timeout(Duration::from_secs(10)).unwrap();
            since.elapsed()
        };
        let mut times: Vec<Duration> = (0..25).map(once).collect();
        work.over.store(true, Ordering::SeqCst);
        progress_thread.kick();
        times.sort();
        times[times.len() / 2]
    }

    #[test]
    fn any_descriptor_wakes_the_thread_and_what_has_none_is_asked() {
        let progress_thread = progress_thread().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        progress_thread.watch(reader.as_fd(), Interest::Readable).unwrap();
        let has_come = move || rustix::io::read(&reader, &mut [0; 1]) == Ok(1);
        let watched = notices(|| assert_eq!(rustix::io::write(&writer, &[1]), Ok(1)), has_come);

        /// Completions of a device that tells nobody.
        #[derive(Default)]
        struct Device {
            completed: AtomicU32,
            seen: Arc<AtomicU32>,
        }
        impl Poller for Device {
            fn poll(&self) -> bool {
                let completed = self.completed.swap(0, Ordering::SeqCst);
                self.seen.fetch_add(completed, Ordering::SeqCst);
                completed > 0
            }
        }
        let device = Arc::new(Device::default());
        progress_thread.ask(Arc::<Device>::downgrade(&device));
        let seen = device.seen.clone();
        let complete = || assert_eq!(device.completed.fetch_add(1, Ordering::SeqCst), 0);
        let asked = notices(complete, move || seen.swap(0, Ordering::SeqCst) > 0);
        assert!(watched < WATCH / 4 * 3 && asked < WATCH / 4 * 3, "{watched:?}, {asked:?}");

        // A poller that was dropped is not asked any more, and the list forgets it.
        let (gone, end) = (Arc::downgrade(&device), Instant::now() + Duration::from_secs(10));
        drop(device);
        while gone.strong_count() > 0 {
            assert!(Instant::now() < end, "the progress thread keeps it");
            std::thread::yield_now();
        }
        progress_thread.ask_pollers();
        assert!(!progress_thread.asks.load(Ordering::SeqCst));
    }

    #[test]
    fn a_bell_that_its_owner_made_to_block_blocks_nobody() {
        let theirs = progress_thread().unwrap().doorbell().clone();
        spoil(&theirs);
        assert!(rings(theirs), "ringing a peer's progress thread");
        // A peer may hand over any descriptor as its doorbell.
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        spoil(&full);
        assert!(rings(Arc::new(full)), "ringing what is no doorbell");
    }

    /// The thread sleeps for as long as nobody needs it. Meanwhile it must not keep the endpoints alive that its last pass looked at.
    #[test]
    fn nothing_is_kept_by_a_thread_that_sleeps() {
        let thread = Arc::new(ProgressThread::new().unwrap());
        let work = Arc::new(Work {
            signals: Box::new(|| false),
            taken: std::sync::mpsc::channel().0,
            over: AtomicBool::new(true),
            enlisted: AtomicBool::new(true),
            region: Arc::new(Region::private().unwrap()),
        });
        thread.enlist(work.clone());
        let sleeps = thread.clone();
        let sleeper = std::thread::spawn(move || {
            sleeps.sleep(ASLEEP, None, &mut Vec::new(), &mut Vec::new(), &mut Vec::new());
        });
        let end = Instant::now() + Duration::from_secs(10);
        while Arc::strong_count(&work) > 1 && Instant::now() < end {
            std::thread::yield_now();
        }
        let kept = Arc::strong_count(&work) - 1;
        let is_asleep = !sleeper.is_finished();
        thread.kick();
        sleeper.join().unwrap();
        assert_eq!((kept, is_asleep), (0, true));
    }
}
