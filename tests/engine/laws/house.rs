//! What the tests of the laws stand on: worlds, threads, watchdogs.

use std::future::Future;
use std::net::TcpListener;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, HostMemory, LinkChoice, Rendezvous};
use futures::executor::block_on;

/// How long a test may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// How long something that need not wait may take on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// Runs `test` on a thread of its own; fails when it does not end in time.
pub(crate) fn within<T: Send + 'static>(limit: Duration, test: impl FnOnce() -> T + Send + 'static) -> T {
    let value = Arc::new(Mutex::new(None));
    let told = value.clone();
    done_within(limit, Box::new(move || *told.lock().unwrap() = Some(test())));
    value.lock().unwrap().take().expect("the test has ended")
}

/// Not generic, so that the code that starts a thread is compiled only once.
fn done_within(limit: Duration, test: Box<dyn FnOnce() + Send>) {
    let (tell, told) = channel();
    let runs = thread::spawn(move || {
        test();
        let _ = tell.send(());
    });
    match told.recv_timeout(limit) {
        Ok(()) => {}
        Err(RecvTimeoutError::Timeout) => panic!("not finished within {limit:?}: something hangs"),
        Err(RecvTimeoutError::Disconnected) => match runs.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => unreachable!("it sends before it ends"),
        },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Local,
    Shm,
    Tcp,
}

pub(crate) const LINKS: [Link; 3] = [Link::Local, Link::Shm, Link::Tcp];

pub(crate) fn world(n: usize, link: Link) -> Vec<Comm> {
    let choice = match link {
        Link::Local => return Comm::local(n).unwrap(),
        Link::Shm => LinkChoice::SHM,
        Link::Tcp => LinkChoice::TCP,
    };
    let listener = TcpListener::bind(format!("127.{}.7.1:0", std::process::id() % 200 + 1)).unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let place = |rank| {
        let place = Rendezvous::tcp(&at, rank, n).unwrap().token("laws").timeout(SOON).link(choice);
        if rank == 0 { place.listener(listener.try_clone().unwrap()) } else { place }
    };
    let joins: Vec<_> =
        (0..n).map(place).map(|p| thread::spawn(|| block_on(Comm::connect(p)).unwrap())).collect();
    joins.into_iter().map(|j| j.join().unwrap()).collect()
}

/// Runs `each` on a thread per rank, and gives what they return, in rank order.
pub(crate) fn threads<T, F>(comms: Vec<Comm>, each: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Comm) -> T + Clone + Send + 'static,
{
    within(LIMIT, move || {
        let results: Vec<_> = comms.iter().map(|_| Arc::new(Mutex::new(None))).collect();
        let start = |(comm, result): (Comm, &Arc<Mutex<Option<T>>>)| {
            let (each, result, name) = (each.clone(), result.clone(), format!("rank {}", comm.rank()));
            named(name, Box::new(move || *result.lock().unwrap() = Some(each(comm))))
        };
        let threads: Vec<_> = comms.into_iter().zip(&results).map(start).collect();
        threads.into_iter().for_each(|t| t.join().unwrap_or_else(|panic| resume_unwind(panic)));
        results.iter().map(|result| result.lock().unwrap().take().expect("the thread has ended")).collect()
    })
}

/// Starts a thread; not generic, as [`done_within`].
fn named(name: String, run: Box<dyn FnOnce() + Send>) -> thread::JoinHandle<()> {
    thread::Builder::new().name(name).spawn(run).unwrap()
}

pub(crate) fn close(comms: Vec<Comm>) {
    threads(comms, |comm| block_on(comm.close()).unwrap());
}

/// SplitMix64.
#[derive(Clone)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

pub(crate) fn seed() -> u64 {
    let given = std::env::var("LAWS_SEED").ok().map(|s| s.parse().expect("LAWS_SEED is a number"));
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = given.unwrap_or_else(now);
    eprintln!("LAWS_SEED={seed}");
    seed
}

/// A buffer that counts how often it was dropped, and spoils its memory then.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) memory: Vec<f32>,
    pub(crate) drops: Arc<AtomicUsize>,
}

pub(crate) const SPOILT: f32 = -1e30;

impl Watched {
    pub(crate) fn new(len: usize, value: f32) -> (Watched, Arc<AtomicUsize>) {
        let drops = Arc::new(AtomicUsize::new(0));
        (Watched { memory: vec![value; len], drops: drops.clone() }, drops)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        for x in &mut self.memory {
            // SAFETY: a unique reference to one of our own elements. Volatile: the memory is about to be freed.
            unsafe { std::ptr::write_volatile(x, SPOILT) };
        }
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: the Vec alone owns its memory, which stays in place when the Vec moves, until the `Watched` is dropped.
unsafe impl HostMemory for Watched {
    type Elem = f32;
    fn ptr(&self) -> *const f32 {
        self.memory.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut f32 {
        self.memory.as_mut_ptr()
    }
    fn count(&self) -> usize {
        self.memory.len()
    }
}

pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < end, "not within {SOON:?}: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// Checks that nobody else writes to memory that has come back.
pub(crate) fn stays(memory: &mut [f32]) {
    memory.fill(SPOILT);
    thread::sleep(Duration::from_millis(2));
    assert!(memory.iter().all(|x| *x == SPOILT), "somebody wrote to a buffer that had come back");
}

/// The sum of `rank + 1` over the ranks.
pub(crate) fn total(n: usize) -> f32 {
    (n * (n + 1) / 2) as f32
}

/// Checks that the group works; all ranks must call it.
pub(crate) fn works(comm: &mut Comm) {
    let n = comm.size();
    let sum = comm.all_reduce(vec![comm_value(comm.rank()); 1000]).wait().unwrap();
    assert!(sum.iter().all(|x| *x == total(n)));
}

pub(crate) fn comm_value(rank: usize) -> f32 {
    (rank + 1) as f32
}

/// Silences the panics that tests plant.
pub(crate) fn quiet_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let planted = info.payload().downcast_ref::<&str>().is_some_and(|s| s.contains("planted"));
        if !planted {
            default(info);
        }
    }));
}
