//! The laws of the house (docs: ARCHITECTURE), each held by tests that name it. Black box: only the public interface.
//!
//! Every test runs under a watchdog: one that hangs fails by name. Random tests print their seeds.
#![cfg(target_os = "linux")]

use std::future::Future;
use std::net::TcpListener;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use allstream::plan::algorithms;
use allstream::{
    Algo, Buf, Comm, Error, Failed, HostBuf, HostStream, Kind, LinkChoice, Message, ReduceOp, Rendezvous,
    SharedComm, Work, bf16,
};
use futures::executor::block_on;

/// How long a test may take.
const LIMIT: Duration = Duration::from_secs(120);
/// How long what need not wait may take, on a busy machine.
const SOON: Duration = Duration::from_secs(10);

// ---- the house of the tests ----

/// Runs `test` on a thread of its own; fails when it does not end in time.
fn within<T: Send + 'static>(limit: Duration, test: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = channel();
    let runs = thread::spawn(move || {
        let _ = tell.send(test());
    });
    match told.recv_timeout(limit) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("not finished within {limit:?}: something hangs"),
        Err(RecvTimeoutError::Disconnected) => match runs.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => unreachable!("it sends before it ends"),
        },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Local,
    Shm,
    Tcp,
}

const LINKS: [Link; 3] = [Link::Local, Link::Shm, Link::Tcp];

fn world(n: usize, link: Link) -> Vec<Comm> {
    let choice = match link {
        Link::Local => return Comm::local(n).unwrap(),
        Link::Shm => LinkChoice::Shm,
        Link::Tcp => LinkChoice::Tcp,
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
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
fn threads<T, F>(comms: Vec<Comm>, each: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Comm) -> T + Clone + Send + 'static,
{
    within(LIMIT, move || {
        let start = |comm: Comm| {
            let each = each.clone();
            thread::Builder::new().name(format!("rank {}", comm.rank())).spawn(move || each(comm)).unwrap()
        };
        let threads: Vec<_> = comms.into_iter().map(start).collect();
        let join = |t: thread::JoinHandle<T>| t.join().unwrap_or_else(|panic| resume_unwind(panic));
        threads.into_iter().map(join).collect()
    })
}

fn close(comms: Vec<Comm>) {
    threads(comms, |comm| block_on(comm.close()).unwrap());
}

/// SplitMix64.
#[derive(Clone)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

fn seed() -> u64 {
    let given = std::env::var("LAWS_SEED").ok().map(|s| s.parse().expect("LAWS_SEED is a number"));
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = given.unwrap_or_else(now);
    eprintln!("LAWS_SEED={seed}");
    seed
}

/// A buffer that counts how often it was dropped, and spoils its memory then.
#[derive(Debug)]
struct Watched {
    memory: Vec<f32>,
    drops: Arc<AtomicUsize>,
}

const SPOILT: f32 = -1e30;

impl Watched {
    fn new(len: usize, value: f32) -> (Watched, Arc<AtomicUsize>) {
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

// SAFETY: a Vec's memory does not move with it and is owned by it alone; it stays until the drop of the whole.
unsafe impl Buf for Watched {
    type Elem = f32;
    fn ptr(&self) -> *const f32 {
        self.memory.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut f32 {
        self.memory.as_mut_ptr()
    }
    fn len(&self) -> usize {
        self.memory.len()
    }
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < end, "not within {SOON:?}: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// The sum of `rank + 1` over the ranks.
fn total(n: usize) -> f32 {
    (n * (n + 1) / 2) as f32
}

/// The group works: to be called on all ranks.
fn works(comm: &mut Comm) {
    let n = comm.size();
    let sum = comm.all_reduce(vec![comm_value(comm.rank()); 1000]).wait().unwrap();
    assert!(sum.iter().all(|x| *x == total(n)));
}

fn comm_value(rank: usize) -> f32 {
    (rank + 1) as f32
}

// ---- law 1: eager, and in order ----

#[test]
fn law_1_a_work_that_is_never_polled_completes() {
    for link in LINKS {
        let mut comms = within(LIMIT, move || world(3, link));
        let (mut one, mut two) = (comms.pop().unwrap(), comms.pop().unwrap());
        let mut zero = comms.pop().unwrap();
        within(LIMIT, move || {
            for (round, len) in [1usize, 40, 5_000, 300_000, 3].into_iter().enumerate() {
                // Let the lane fall asleep: the submission alone must wake it.
                thread::sleep(Duration::from_millis(if round % 2 == 0 { 40 } else { 0 }));
                let unpolled = zero.all_reduce(vec![1f32; len]);
                drop(one.all_reduce(vec![2f32; len]));
                let seen = two.all_reduce(vec![3f32; len]).wait().unwrap();
                assert_eq!(seen, vec![6f32; len], "{link:?}: peers see what was never polled");
                assert_eq!(unpolled.wait().unwrap(), seen);
            }
            // Nobody polls anything.
            let (buf, drops) = Watched::new(100_000, 1.0);
            drop(zero.all_reduce(buf));
            drop(one.all_reduce(vec![1f32; 100_000]));
            drop(two.all_reduce(vec![1f32; 100_000]));
            wait_until("the engine to let the buffer go", || drops.load(Ordering::SeqCst) == 1);
            close(vec![zero, one, two]);
        });
    }
}

#[test]
fn law_1_submission_order_is_matching_order() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let rank = comm.rank();
            let works: Vec<_> =
                (0..60usize).map(|i| comm.all_reduce(vec![(i * (rank + 1)) as u64; 1 + i * i])).collect();
            // Awaited in another order on every rank.
            let mut order: Vec<_> = works.into_iter().enumerate().collect();
            order.rotate_left(17 * rank);
            if rank % 2 == 1 {
                order.reverse();
            }
            for (i, work) in order {
                assert_eq!(work.wait().unwrap(), vec![(i * 6) as u64; 1 + i * i], "{link:?}, operation {i}");
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn law_1_an_operation_on_a_stream_starts_after_what_the_stream_holds() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let stream = HostStream::new("compute").unwrap();
            for round in 0..10u64 {
                let ready = Arc::new(AtomicBool::new(false));
                let mut input = vec![0f32; 2000];
                // The job writes the very memory that is reduced: through a pointer, as a kernel would.
                struct At(*mut f32);
                // SAFETY: the job alone uses it, before the operation reads the buffer: which is what is tested.
                unsafe impl Send for At {}
                let (at, done, value) = (At(input.as_mut_ptr()), ready.clone(), round as f32 + 1.0);
                stream.launch(move || {
                    let at = at;
                    thread::sleep(Duration::from_millis(5));
                    // SAFETY: the vector lives in the operation, which has not started: 2000 elements.
                    (0..2000).for_each(|i| unsafe { at.0.add(i).write(value) });
                    done.store(true, Ordering::SeqCst);
                });
                let work = comm.on(&stream).all_reduce(input);
                let sum = work.wait().unwrap();
                assert!(
                    ready.load(Ordering::SeqCst),
                    "{link:?}: it finished before the stream had come to it"
                );
                assert_eq!(sum, vec![2.0 * (round as f32 + 1.0); 2000]);
            }
            // Messages likewise.
            let peer = 1 - comm.rank();
            let ready = Arc::new(AtomicBool::new(false));
            let done = ready.clone();
            stream.launch(move || {
                thread::sleep(Duration::from_millis(20));
                done.store(true, Ordering::SeqCst);
            });
            let gated = comm.on(&stream).send(vec![7u8; 100], peer);
            let got = comm.recv(vec![0u8; 100], peer).wait().unwrap();
            gated.wait().unwrap();
            assert!(ready.load(Ordering::SeqCst));
            assert_eq!(got, vec![7u8; 100]);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn law_1_a_gated_operation_blocks_no_other_communicator() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let mut other = block_on(comm.dup()).unwrap();
            let stream = HostStream::new("slow").unwrap();
            let (open, gate) = channel::<()>();
            stream.launch(move || gate.recv_timeout(LIMIT).unwrap());
            let mut gated = comm.on(&stream).all_reduce(vec![1f32; 50_000]);
            let behind = comm.all_reduce(vec![2f32; 10]);
            for len in [1usize, 1000, 200_000] {
                assert_eq!(other.all_reduce(vec![1u32; len]).wait().unwrap(), vec![2u32; len]);
            }
            // Messages of the same communicator do not wait for its collectives either.
            let peer = 1 - comm.rank();
            let batch = comm.batch([
                Message::Send { buf: vec![3u8; 100_000], to: peer, tag: 0 },
                Message::Recv { buf: vec![0u8; 100_000], from: peer, tag: 0 },
            ]);
            assert_eq!(batch.wait().unwrap()[1], vec![3u8; 100_000]);
            assert!(poll_once(&mut gated).is_pending(), "{link:?}: its stream has not come to it");
            other.barrier().wait().unwrap();
            open.send(()).unwrap();
            assert_eq!(gated.wait().unwrap(), vec![2f32; 50_000]);
            assert_eq!(behind.wait().unwrap(), vec![4f32; 10]);
            block_on(other.close()).unwrap();
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn law_1_join_makes_the_stream_wait_and_not_the_host() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let stream = HostStream::new("update").unwrap();
            let rank = comm.rank();
            let (go, gate) = channel::<()>();
            let hold = HostStream::new("hold").unwrap();
            hold.launch(move || gate.recv_timeout(LIMIT).unwrap());
            let work = comm.on(&hold).all_reduce(vec![1f64; 30_000]);
            let start = Instant::now();
            let order = Arc::new(AtomicUsize::new(0));
            let (first, second) = (order.clone(), order.clone());
            let summed = work.join(&stream).unwrap();
            let halved = summed.launch(&stream, move |mut v: Vec<f64>| {
                assert_eq!(first.fetch_add(1, Ordering::SeqCst), 0);
                v.iter_mut().for_each(|x| *x /= 2.0);
                v
            });
            stream.launch(move || assert_eq!(second.fetch_add(1, Ordering::SeqCst), 1));
            let point = stream.record();
            assert!(start.elapsed() < SOON, "the host was not blocked");
            assert!(!point.is_complete() && !halved.event().is_complete());
            go.send(()).unwrap();
            assert_eq!(block_on(halved).unwrap(), vec![1f64; 30_000]);
            point.wait().unwrap();
            assert_eq!(order.load(Ordering::SeqCst), 2);
            assert!(!stream.is_failed());
            // A refused operation is known at once, buffer and all.
            let refused = comm.broadcast(vec![0u8; 3], 9).join(&stream).unwrap_err();
            assert_eq!(refused.buf, Some(vec![0u8; 3]));
            // A value that is not waited for by anyone, and one awaited without a job.
            drop(comm.all_reduce(vec![rank as i32; 10]).join(&stream).unwrap());
            let plain = comm.all_reduce(vec![rank as i32; 10]).join(&stream).unwrap();
            assert_eq!(plain.wait().unwrap(), vec![1; 10]);
            block_on(comm.close()).unwrap();
        });
    }
}

fn quiet_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let planted = info.payload().downcast_ref::<&str>().is_some_and(|s| s.contains("planted"));
        if !planted {
            default(info);
        }
    }));
}

#[test]
fn law_1_a_panicking_stream_fails_the_operation_on_all_ranks() {
    quiet_panics();
    for link in LINKS {
        for message in [false, true] {
            let comms = within(LIMIT, move || world(3, link));
            let errors = threads(comms, move |mut comm| {
                let rank = comm.rank();
                let stream = HostStream::new("compute").unwrap();
                let result = if rank == 1 {
                    stream.launch(|| panic!("planted"));
                    let call = comm.on(&stream);
                    if message {
                        call.send(vec![1f32; 5], 0).wait()
                    } else {
                        call.all_reduce(vec![1f32; 5]).wait()
                    }
                } else if message && rank == 0 {
                    comm.recv(vec![1f32; 5], 1).wait()
                } else {
                    comm.all_reduce(vec![1f32; 5]).wait()
                };
                let Failed { buf, error } = result.unwrap_err();
                assert_eq!(buf.map(|b| b.len()), Some(5), "{link:?}: the buffer comes back");
                let later = comm.all_reduce(vec![1f32; 5]).wait().unwrap_err();
                assert_eq!(later.error, comm.check().unwrap_err(), "later calls say the same");
                error
            });
            for error in errors {
                let text = error.to_string();
                assert!(text.contains("panicked") && text.contains("stream"), "{link:?}, {message}: {text}");
            }
        }
    }
}

#[test]
fn law_1_a_failed_operation_fails_the_stream_that_joined_it() {
    let comms = Comm::local(2).unwrap();
    threads(comms, |mut comm| {
        let stream = HostStream::new("update").unwrap();
        let work = comm.all_reduce(vec![1f32; 10 + comm.rank()]);
        let ran = Arc::new(AtomicBool::new(false));
        let mark = ran.clone();
        let joined = work.join(&stream).unwrap().launch(&stream, move |v: Vec<f32>| {
            mark.store(true, Ordering::SeqCst);
            v
        });
        let failed = joined.wait().unwrap_err();
        assert!(matches!(failed.error, Error::Mismatch { .. }), "{failed:?}");
        assert!(failed.buf.is_some());
        assert!(!ran.load(Ordering::SeqCst), "no job ran on data that never came");
        assert!(stream.synchronize().is_err() && stream.is_failed());
    });
}

// ---- law 2: dropping detaches ----

#[test]
fn law_2_works_dropped_at_random_polls_disturb_nobody() {
    let seed = seed();
    let dropped = Arc::new(AtomicUsize::new(0));
    for (at, link) in LINKS.into_iter().enumerate() {
        let comms = within(LIMIT, move || world(3, link));
        let seed = seed.wrapping_add(at as u64);
        let dropped = dropped.clone();
        let counters = threads(comms, move |mut comm| {
            let (n, rank) = (comm.size(), comm.rank());
            // What is called is the same on all ranks; what becomes of the works is not.
            let (mut calls, mut fate) = (Rng(seed), Rng(seed ^ (rank as u64 + 1) << 40));
            let (mut once, mut forgotten) = (Vec::new(), Vec::new());
            let mut here = 0;
            let enough = 200 / LINKS.len() / n + 1;
            while calls.0 != 0 && once.len() < 400 {
                let len = [1, 30, 1000, 70_000, 400_000][calls.below(5)];
                let kind = calls.below(4);
                let value = comm_value(rank);
                let (buf, drops) = Watched::new(len, value);
                let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
                let mut works = vec![match kind {
                    0 | 1 => comm.all_reduce(buf),
                    2 => comm.broadcast(buf, calls.below(n)),
                    _ => comm.send(buf, to),
                }];
                once.push(drops);
                if kind == 3 {
                    let (buf, drops) = Watched::new(len, 0.0);
                    works.push(comm.recv(buf, from));
                    once.push(drops);
                }
                let first = once.len() - works.len();
                for (i, mut work) in works.into_iter().enumerate() {
                    let mut ready = None;
                    for _ in 0..fate.below(6) {
                        if let Poll::Ready(result) = poll_once(&mut work) {
                            ready = Some(result);
                            break;
                        }
                        if fate.below(2) == 0 {
                            thread::yield_now();
                        }
                    }
                    let result = match (ready, fate.below(8)) {
                        (Some(result), _) => result,
                        (None, 0) => {
                            std::mem::forget(work);
                            forgotten.push(first + i);
                            continue;
                        }
                        (None, 1 | 2) => work.wait(),
                        (None, _) => {
                            drop(work);
                            here += 1;
                            continue;
                        }
                    };
                    let buf = result.unwrap();
                    let expected = match (kind, i) {
                        (0 | 1, _) => total(n),
                        (3, 0) => value,
                        (3, _) => comm_value(from),
                        _ => buf.memory[0],
                    };
                    assert!(
                        buf.memory.iter().all(|x| *x == expected),
                        "{link:?}: operations after a drop are right"
                    );
                }
                // The end is agreed on: rank 0 has dropped enough.
                if once.len() % 10 < 2 {
                    let all = comm.op(ReduceOp::Min).all_reduce(vec![here as u64]).wait().unwrap();
                    if all[0] as usize >= enough {
                        break;
                    }
                }
            }
            works(&mut comm);
            comm.barrier().wait().unwrap();
            dropped.fetch_add(here, Ordering::SeqCst);
            block_on(comm.close()).unwrap();
            (once, forgotten)
        });
        for (once, forgotten) in counters {
            for (i, drops) in once.iter().enumerate() {
                if forgotten.contains(&i) {
                    assert!(drops.load(Ordering::SeqCst) <= 1);
                } else {
                    wait_until("every buffer to be freed", || drops.load(Ordering::SeqCst) > 0);
                    assert_eq!(
                        drops.load(Ordering::SeqCst),
                        1,
                        "{link:?}: buffer {i} was freed exactly once"
                    );
                }
            }
        }
    }
    let dropped = dropped.load(Ordering::SeqCst);
    eprintln!("{dropped} works were dropped in flight or unpolled");
    assert!(dropped >= 200);
}

#[test]
fn law_2_an_error_of_a_dropped_work_is_found_by_the_next_call() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let (buf, drops) = Watched::new(100 + comm.rank(), 1.0);
            drop(comm.all_reduce(buf));
            wait_until("the disagreement to be found", || comm.check().is_err());
            let failed = comm.all_reduce(vec![1f32; 4]).wait().unwrap_err();
            assert!(matches!(failed.error, Error::Mismatch { .. }), "{link:?}: {}", failed.error);
            assert_eq!(failed.buf, Some(vec![1f32; 4]));
            wait_until("the buffer to be freed", || drops.load(Ordering::SeqCst) == 1);
            assert!(matches!(block_on(comm.close()), Err(Error::Mismatch { .. })));
        });
    }
}

#[test]
fn law_2_an_abort_reaches_those_who_let_go_and_those_who_wait() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| match comm.rank() {
            0 => {
                drop(comm.all_reduce(vec![1f32; 10]));
                wait_until("the abort to be heard", || comm.check().is_err());
                assert!(matches!(comm.check(), Err(Error::Aborted { by: 2, .. })));
            }
            1 => {
                let failed = comm.all_reduce(vec![1f32; 10]).wait().unwrap_err();
                assert!(matches!(failed.error, Error::Aborted { by: 2, .. }), "{link:?}: {}", failed.error);
                assert!(failed.buf.is_some());
            }
            _ => {
                thread::sleep(Duration::from_millis(20));
                comm.abort("the loss is not a number");
                let failed = comm.all_reduce(vec![1f32; 10]).wait().unwrap_err();
                assert!(failed.error.to_string().contains("not a number"));
            }
        });
    }
}

/// An abort of a child reaches a member that has said all it has to say for making it, and has not looked since.
#[test]
fn law_2_an_abort_reaches_members_whose_split_is_not_done() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let rank = comm.rank();
            comm.barrier().wait().unwrap();
            let mut child = if rank == 0 {
                let child = block_on(comm.dup()).unwrap();
                child.abort("planted");
                child
            } else {
                // Polled now and then, in turns: rank 2 comes last to the end, and rank 1 looks later.
                thread::sleep(Duration::from_millis(if rank == 1 { 60 } else { 0 }));
                let mut dup = Box::pin(comm.dup());
                loop {
                    if let Poll::Ready(child) = poll_once(&mut dup) {
                        break child.unwrap();
                    }
                    thread::sleep(Duration::from_millis(120));
                }
            };
            let failed = child.timeout(SOON / 2).all_reduce(vec![1f32; 10]).wait().unwrap_err();
            assert!(matches!(failed.error, Error::Aborted { by: 0, .. }), "{link:?}: {}", failed.error);
            drop(child);
            works(&mut comm);
            block_on(comm.close()).unwrap();
        });
    }
}

// ---- law 3: memory in flight ----

#[test]
fn law_3_after_a_failure_the_buffer_comes_back_whole() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            if comm.rank() == 1 {
                wait_until("the timeout to be heard", || comm.check().is_err());
                return;
            }
            let (buf, drops) = Watched::new(1 << 20, 1.0);
            let failed = comm.timeout(Duration::from_millis(300)).all_reduce(buf).wait().unwrap_err();
            assert!(matches!(failed.error, Error::Timeout { .. }), "{link:?}: {}", failed.error);
            let buf = failed.buf.expect("nothing can touch it any more");
            assert_eq!(drops.load(Ordering::SeqCst), 0);
            assert!(buf.memory.iter().all(|x| *x != SPOILT));
            drop(buf);
            assert_eq!(drops.load(Ordering::SeqCst), 1);
        });
    }
}

/// Aborted at a random moment while large data moves: whoever gets its buffer back spoils it at once, and whoever
/// succeeds has the right sum all the same.
#[test]
fn law_3_a_buffer_that_came_back_is_read_by_nobody() {
    let seed = seed();
    for (at, link) in LINKS.into_iter().enumerate() {
        for round in 0..12u64 {
            let comms = within(LIMIT, move || world(3, link));
            let seed = seed.wrapping_add(round * 3 + at as u64);
            threads(comms, move |mut comm| {
                let (n, rank) = (comm.size(), comm.rank());
                let mut rng = Rng(seed ^ (rank as u64) << 32);
                let algo = algorithms(Kind::AllReduce)[round as usize % 4];
                let works: Vec<_> = (0..4)
                    .map(|_| {
                        let (buf, drops) = Watched::new(400_000, comm_value(rank));
                        (comm.algo(algo).all_reduce(buf), drops)
                    })
                    .collect();
                if rank == 0 {
                    let pause = Duration::from_micros(rng.below(3000) as u64);
                    let end = Instant::now() + pause;
                    while Instant::now() < end {
                        std::hint::spin_loop();
                    }
                    comm.abort("planted");
                }
                for (work, drops) in works {
                    match work.wait() {
                        Ok(buf) => {
                            assert!(buf.memory.iter().all(|x| *x == total(n)), "{link:?} {algo}: a wrong sum")
                        }
                        Err(Failed { buf, error }) => {
                            assert!(matches!(error, Error::Aborted { by: 0, .. }), "{link:?}: {error}");
                            assert_eq!(drops.load(Ordering::SeqCst), 0, "in flight, it was not freed");
                            drop(buf.expect("it comes back"));
                            assert_eq!(drops.load(Ordering::SeqCst), 1);
                        }
                    }
                }
            });
        }
    }
}

// ---- law 10: bounded ----

#[test]
fn law_10_submissions_beyond_the_limit_are_refused_and_none_blocks() {
    const LIMIT_OF_QUEUE: usize = 1024;
    let mut comms = Comm::local(2).unwrap();
    within(LIMIT, move || {
        let mut one = comms.pop().unwrap();
        let mut zero = comms.pop().unwrap();
        for round in 0..2 {
            let start = Instant::now();
            let mut works: Vec<_> =
                (0..LIMIT_OF_QUEUE - 1).map(|i| zero.all_reduce(vec![i as u32])).collect();
            // Messages count with collectives.
            let message = zero.recv(vec![0u32], 1);
            assert!(start.elapsed() < SOON, "submissions do not block");
            for _ in 0..2 {
                let failed = zero.all_reduce(vec![7u32]).wait().unwrap_err();
                assert_eq!(failed.buf, Some(vec![7u32]));
                let text = failed.error.to_string();
                assert!(matches!(failed.error, Error::QueueFull { limit: LIMIT_OF_QUEUE, .. }), "{text}");
                assert!(text.contains("all_reduce") && text.contains("1024"), "{text}");
            }
            assert!(matches!(zero.send(vec![0u8], 1).wait().unwrap_err().error, Error::QueueFull { .. }));
            assert!(zero.check().is_ok(), "a full queue is no failure of the group");
            // One finishes: exactly one more finds room.
            assert_eq!(one.all_reduce(vec![0u32]).wait().unwrap(), [0]);
            assert_eq!(works.remove(0).wait().unwrap(), [0]);
            works.push(zero.all_reduce(vec![LIMIT_OF_QUEUE as u32 - 1]));
            assert!(matches!(zero.all_reduce(vec![7u32]).wait().unwrap_err().error, Error::QueueFull { .. }));
            // Dropped works keep their place until they are done.
            let last = works.pop().unwrap();
            drop(last);
            assert!(matches!(zero.all_reduce(vec![7u32]).wait().unwrap_err().error, Error::QueueFull { .. }));
            for i in 1..LIMIT_OF_QUEUE as u32 {
                assert_eq!(one.all_reduce(vec![i]).wait().unwrap(), [2 * i], "round {round}");
            }
            one.send(vec![5u32], 0).wait().unwrap();
            assert_eq!(message.wait().unwrap(), [5]);
            for (i, work) in works.into_iter().enumerate() {
                assert_eq!(work.wait().unwrap(), [2 * (i as u32 + 1)]);
            }
        }
        close(vec![zero, one]);
    });
}

/// Bytes that the shared regions of this process hold: pages of all its memfds, each counted once.
fn staged(before: &[u64]) -> Vec<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let mut files: Vec<(u64, u64)> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let is_region =
            std::fs::read_link(entry.path()).is_ok_and(|p| p.to_string_lossy().contains("memfd:allstream"));
        if let (true, Ok(meta)) = (is_region, std::fs::metadata(entry.path())) {
            if !before.contains(&meta.ino()) && !files.iter().any(|(ino, _)| *ino == meta.ino()) {
                files.push((meta.ino(), meta.blocks() * 512));
            }
        }
    }
    files
}

#[test]
fn law_10_staging_has_a_cap_whatever_the_number_of_communicators() {
    const RANKS: usize = 8;
    const COMMS: usize = 6;
    /// Slots (32 x 128 KB) per rank.
    const CAP: u64 = 32 * (128 << 10);
    // Rings: two channels of 8 peers of 4 KB and a bit per communicator; and the first page.
    const BESIDE: u64 = 4096 + (1 + COMMS as u64) * (2 * RANKS as u64 * 4352 + 4096);
    let before: Vec<_> = staged(&[]).into_iter().map(|(ino, _)| ino).collect();
    let comms = within(LIMIT, || world(RANKS, Link::Shm));
    let regions = staged(&before);
    let ours: Vec<_> = regions.iter().map(|(ino, _)| *ino).collect();
    threads(comms, move |mut comm| {
        let rank = comm.rank();
        let mut all: Vec<_> = (0..COMMS).map(|_| block_on(comm.dup()).unwrap()).collect();
        let mut works = Vec::new();
        for (i, child) in all.iter_mut().enumerate() {
            works.push(child.all_reduce(vec![comm_value(rank); 300_000 + i]));
            drop(child.broadcast(vec![1f32; 300_000], i));
        }
        let (to, from) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
        let moved = all[0].batch([
            Message::Send { buf: vec![comm_value(rank); 500_000], to, tag: 1 },
            Message::Recv { buf: vec![0f32; 500_000], from, tag: 1 },
        ]);
        for (i, work) in works.into_iter().enumerate() {
            let sum = work.wait().unwrap();
            assert!(sum.len() == 300_000 + i && sum.iter().all(|x| *x == total(RANKS)));
        }
        assert!(moved.wait().unwrap()[1].iter().all(|x| *x == comm_value(from)));
        comm.barrier().wait().unwrap();
        for (i, (_, bytes)) in staged(&[]).into_iter().filter(|(ino, _)| ours.contains(ino)).enumerate() {
            assert!(
                bytes <= CAP + BESIDE,
                "region {i} holds {bytes} bytes, the cap is {CAP} (and {BESIDE} for rings)"
            );
            assert!(bytes > 0, "nothing was staged: this test looks at the wrong thing");
        }
        comm.barrier().wait().unwrap();
        for child in all {
            block_on(child.close()).unwrap();
        }
        block_on(comm.close()).unwrap();
    });
}

// ---- futures: any runtime, or none ----

const fn send_unpin<T: Send + Unpin + 'static>() {}
const fn send<T: Send + 'static>() {}
const fn error<T: std::error::Error + Send + Sync + 'static>() {}
const fn shareable<T: Clone + Send + Sync + 'static>() {}

const _: () = {
    send_unpin::<Work<Vec<f32>>>();
    send_unpin::<Work<(HostBuf<bf16>, Box<[bf16]>)>>();
    send_unpin::<Work<Vec<f32>, Watched>>();
    send_unpin::<allstream::Batch<Vec<u8>>>();
    send::<Comm>();
    send::<allstream::Ordered<Vec<f32>>>();
    error::<Failed<Vec<f32>>>();
    error::<Failed<HostBuf<f32>>>();
    error::<Error>();
    shareable::<SharedComm>();
};

async fn sums(mut comm: Comm, rounds: usize) -> Result<(), Error> {
    let (n, value) = (comm.size(), comm_value(comm.rank()));
    for round in 0..rounds {
        let len = [1, 100, 20_000, 200_000][round % 4];
        let sum = comm.all_reduce(vec![value; len]).await?;
        assert!(sum.iter().all(|x| *x == total(n)), "round {round}");
    }
    let at = comm.rank();
    let (sent, got) =
        (comm.send(vec![at as u64; 9000], (at + 1) % n), comm.recv(vec![0u64; 9000], (at + n - 1) % n));
    let (sent, got) = futures::future::join(sent, got).await;
    assert_eq!((sent?.len(), got?), (9000, vec![((at + n - 1) % n) as u64; 9000]));
    comm.close().await
}

#[test]
fn futures_complete_on_every_runtime_and_on_none_mixed_in_one_group() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(5, link));
        threads(comms, move |comm| match comm.rank() {
            0 => {
                let many = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .unwrap();
                many.block_on(async { tokio::spawn(sums(comm, 24)).await.unwrap() }).unwrap();
            }
            1 => {
                let one = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                one.block_on(sums(comm, 24)).unwrap();
            }
            2 => block_on(sums(comm, 24)).unwrap(),
            3 => {
                use futures::task::LocalSpawnExt;
                let mut pool = futures::executor::LocalPool::new();
                let task = pool.spawner().spawn_local_with_handle(sums(comm, 24)).unwrap();
                pool.run_until(task).unwrap();
            }
            _ => {
                let (mut comm, n) = (comm, 5);
                for round in 0..24 {
                    let len = [1, 100, 20_000, 200_000][round % 4];
                    let sum = comm.all_reduce(vec![5f32; len]).wait().unwrap();
                    assert!(sum.iter().all(|x| *x == total(n)));
                }
                let (sent, got) = (comm.send(vec![4u64; 9000], 0), comm.recv(vec![0u64; 9000], 3));
                assert_eq!(got.wait().unwrap(), vec![3u64; 9000]);
                sent.wait().unwrap();
                block_on(comm.close()).unwrap();
            }
        });
    }
}

#[test]
fn futures_of_eight_ranks_complete_on_one_thread() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(8, link));
        within(LIMIT, move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, async move {
                let tasks: Vec<_> =
                    comms.into_iter().map(|comm| tokio::task::spawn_local(sums(comm, 12))).collect();
                for task in tasks {
                    task.await.unwrap().unwrap();
                }
            });
        });
        let comms = within(LIMIT, move || world(8, link));
        within(LIMIT, move || {
            use futures::task::LocalSpawnExt;
            let mut pool = futures::executor::LocalPool::new();
            for comm in comms {
                let task = async { sums(comm, 4).await.unwrap() };
                pool.spawner().spawn_local(task).unwrap();
            }
            pool.run();
        });
    }
}

#[test]
fn futures_lost_to_a_select_leave_the_group_whole() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let value = comm_value(comm.rank());
                for round in 0..40u64 {
                    let work = comm.all_reduce(vec![value; 60_000]);
                    tokio::select! {
                        biased;
                        sum = work => assert!(sum.unwrap().iter().all(|x| *x == 3.0)),
                        () = tokio::time::sleep(Duration::from_micros(round * 13 % 300)) => {}
                    }
                    let mut kept = comm.all_reduce(vec![value; 10]);
                    let lost = tokio::time::timeout(Duration::from_micros(1), &mut kept).await;
                    let sum = match lost {
                        Ok(sum) => sum.unwrap(),
                        Err(_) => kept.await.unwrap(),
                    };
                    assert_eq!(sum, vec![3.0; 10], "{link:?}: the same work, awaited again");
                }
                comm.close().await.unwrap();
            });
        });
    }
}

#[test]
fn futures_may_move_between_tasks_and_threads() {
    let comms = Comm::local(3).unwrap();
    threads(comms, |mut comm| {
        for len in [10usize, 300_000] {
            let mut work = comm.all_reduce(vec![1u32; len]);
            // Polled here once, with a waker that nobody hears; awaited elsewhere.
            let sum = match poll_once(&mut work) {
                Poll::Ready(sum) => sum,
                Poll::Pending => thread::spawn(move || block_on(work)).join().unwrap(),
            };
            assert_eq!(sum.unwrap(), vec![3u32; len]);
        }
        block_on(comm.close()).unwrap();
    });
}

#[test]
fn shared_comms_are_used_from_several_threads() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |comm| {
            let shared = comm.share();
            let users: Vec<_> = (0..4)
                .map(|_| {
                    let shared = shared.clone();
                    thread::spawn(move || {
                        for round in 0..50usize {
                            // All threads of all ranks call the same, so that their order does not matter.
                            let sum = shared.all_reduce(vec![(shared.rank() + 1) as u64; 500]);
                            let sum = if round % 2 == 0 { sum.wait() } else { block_on(sum) };
                            assert_eq!(sum.unwrap(), vec![6u64; 500]);
                        }
                    })
                })
                .collect();
            users.into_iter().for_each(|u| u.join().unwrap());
            assert_eq!((shared.size(), shared.name().is_empty()), (3, false));
            drop(shared);
            block_on(comm.close()).unwrap();
        });
    }
}

// ---- messages ----

#[test]
fn messages_of_different_tags_match_out_of_order() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            for len in [1usize, 50, 4096, 4097, 200_000] {
                if comm.rank() == 0 {
                    let works: Vec<_> =
                        (0..6u32).map(|tag| comm.tag(tag).send(vec![tag as u8; len], 1)).collect();
                    // Two of one tag are matched in order.
                    let again = comm.tag(0).send(vec![100u8; len], 1);
                    works.into_iter().chain([again]).for_each(|w| drop(w.wait().unwrap()));
                } else {
                    for tag in [5u32, 0, 3, 4, 1, 2] {
                        let got = comm.tag(tag).recv(vec![0u8; len], 0).wait().unwrap();
                        assert_eq!(got, vec![tag as u8; len], "{link:?}");
                    }
                    assert_eq!(comm.tag(0).recv(vec![0u8; len], 0).wait().unwrap(), vec![100u8; len]);
                }
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_beyond_the_credit_arrive_in_order() {
    const MANY: usize = 300;
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            if comm.rank() == 0 {
                let works: Vec<_> = (0..MANY).map(|i| comm.send(vec![i as u32; 1 + i % 40], 1)).collect();
                comm.barrier().wait().unwrap();
                for (i, work) in works.into_iter().enumerate() {
                    assert_eq!(
                        work.wait().unwrap(),
                        vec![i as u32; 1 + i % 40],
                        "what was sent comes back as it was"
                    );
                }
            } else {
                // Nothing is posted until the other has called all of its sends.
                comm.barrier().wait().unwrap();
                for i in 0..MANY {
                    let got = comm.recv(vec![0u32; 1 + i % 40], 0).wait().unwrap();
                    assert_eq!(got, vec![i as u32; 1 + i % 40], "{link:?}, message {i}");
                }
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_large_and_small_pass_in_both_directions() {
    let seed = seed();
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let (n, rank) = (comm.size(), comm.rank());
            for round in 0..6u64 {
                let mut batch = Vec::new();
                let mut expected = Vec::new();
                for peer in (0..n).filter(|p| *p != rank) {
                    for i in 0..12u8 {
                        // The length of a message from a to b, by what both know.
                        let len = |a: usize, b: usize| {
                            let mut rng =
                                Rng(seed ^ round << 32 ^ (a * 64 + b * 8) as u64 ^ u64::from(i) << 20);
                            [0, 1, 100, 4096, 5000, 130_000, 500_000][rng.below(7)] + rng.below(3)
                        };
                        let tag = u32::from(i % 3);
                        let buf = vec![i ^ rank as u8; len(rank, peer)];
                        expected.push(buf.clone());
                        batch.push(Message::Send { buf, to: peer, tag });
                        let buf = vec![0xee; len(peer, rank)];
                        expected.push(vec![i ^ peer as u8; buf.len()]);
                        batch.push(Message::Recv { buf, from: peer, tag });
                    }
                }
                let done =
                    if round % 2 == 0 { comm.batch(batch).wait() } else { block_on(comm.batch(batch)) };
                assert!(done.unwrap() == expected, "{link:?}, round {round}");
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_that_cannot_be_are_refused_and_empty_ones_arrive() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            let to_self = comm.send(vec![1u8; 3], rank).wait().unwrap_err();
            assert_eq!(to_self.buf, Some(vec![1u8; 3]));
            let text = to_self.error.to_string();
            assert!(text.contains("send") && text.contains("this rank"), "{text}");
            let nobody = comm.recv(vec![1u8; 3], 9).wait().unwrap_err();
            assert_eq!(nobody.buf, Some(vec![1u8; 3]));
            let text = nobody.error.to_string();
            assert!(
                text.contains("rank 9") && text.contains("group of 2") && text.contains("0..=1"),
                "{text}"
            );
            // Refusals take no number: what follows still matches.
            let sent = comm.send(Vec::<u64>::new(), peer);
            assert_eq!(comm.recv(Vec::<u64>::new(), peer).wait().unwrap(), Vec::<u64>::new());
            sent.wait().unwrap();
            // A batch with a bad one in it gives the others back.
            let bad = comm
                .batch([
                    Message::Send { buf: vec![4u8], to: peer, tag: 0 },
                    Message::Recv { buf: vec![0u8], from: peer, tag: 0 },
                    Message::Send { buf: vec![9u8], to: rank, tag: 0 },
                ])
                .wait()
                .unwrap_err();
            assert_eq!(bad.buf.unwrap(), [Some(vec![4]), Some(vec![4]), Some(vec![9])]);
            works(&mut comm);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_that_disagree_are_an_error_on_both_sides() {
    for link in LINKS {
        for len in [100usize, 100_000] {
            let comms = within(LIMIT, move || world(2, link));
            threads(comms, move |mut comm| {
                let result = match comm.rank() {
                    0 => comm.send(vec![1u8; len], 1).wait().and_then(|b| comm.recv(b, 1).wait()),
                    _ => comm.recv(vec![1u8; len + 1], 0).wait(),
                };
                let failed = result.unwrap_err();
                let text = failed.error.to_string();
                assert!(matches!(failed.error, Error::Mismatch { .. }), "{link:?}: {text}");
                assert!(
                    text.contains(&format!("u8 x {len}")) && text.contains(&format!("u8 x {}", len + 1)),
                    "{text}"
                );
                assert!(failed.buf.is_some());
            });
        }
    }
}

// ---- groups ----

#[test]
fn groups_split_by_color_and_order_by_key() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(5, link));
        threads(comms, move |mut comm| {
            let rank = comm.rank();
            // Even and odd, in reverse order.
            let mut half = block_on(comm.split((rank % 2) as u64, -(rank as i64))).unwrap();
            let members: Vec<usize> = (0..5).rev().filter(|r| r % 2 == rank % 2).collect();
            assert_eq!(half.size(), members.len());
            assert_eq!(members[half.rank()], rank);
            assert_eq!(
                half.all_gather(vec![rank as u64]).wait().unwrap(),
                members.iter().map(|m| *m as u64).collect::<Vec<_>>(),
                "{link:?}: by key"
            );
            // Child of a child: everyone alone, and the whole half again.
            let mut alone = block_on(half.split(half.rank() as u64, 0)).unwrap();
            assert_eq!((alone.size(), alone.rank()), (1, 0));
            assert_eq!(alone.all_reduce(vec![7u8]).wait().unwrap(), [7]);
            let mut again = block_on(half.dup()).unwrap();
            // All at once, over parent, child and grandchild; awaited in the reverse order.
            for len in [3usize, 60_000] {
                let a = comm.all_reduce(vec![1u32; len]);
                let b = half.all_reduce(vec![rank as u32; len]);
                let c = again.broadcast(vec![rank as u32; len], 1);
                let d = alone.all_reduce(vec![rank as u32; len]);
                assert_eq!(d.wait().unwrap(), vec![rank as u32; len]);
                assert_eq!(c.wait().unwrap(), vec![members[1] as u32; len]);
                assert_eq!(b.wait().unwrap(), vec![members.iter().sum::<usize>() as u32; len]);
                assert_eq!(a.wait().unwrap(), vec![5u32; len]);
            }
            // A child's abort leaves its parent and its siblings alone.
            comm.barrier().wait().unwrap();
            if rank == 1 {
                half.abort("planted");
            }
            wait_until("the abort to be heard", || half.check().is_err() || rank % 2 == 0);
            again.barrier().wait().unwrap();
            works(&mut comm);
            for c in [alone, again] {
                block_on(c.close()).unwrap();
            }
            assert_eq!(block_on(half.close()).is_err(), rank % 2 == 1);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn groups_outlive_the_handle_they_were_made_from() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let mut child = block_on(comm.dup()).unwrap();
            block_on(comm.close()).unwrap();
            works(&mut child);
            block_on(child.close()).unwrap();
        });
    }
}

// ---- calls that cannot be carried out ----

fn refused<O, F>(work: Work<O, F>, words: &[&str]) -> F {
    let Err(Failed { buf, error }) = work.wait() else { panic!("it was not refused; expected {words:?}") };
    let text = error.to_string();
    assert!(matches!(error, Error::Invalid { .. }), "{text}");
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    buf.expect("the buffer comes back")
}

#[test]
fn invalid_calls_are_refused_with_the_buffer_and_nothing_is_submitted() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            // On one rank only: the others do not notice.
            if comm.rank() == 1 {
                let five = || vec![1f32; 5];
                let words = ["reduce_scatter", "5 elements", "multiple of the group's size, 3"];
                assert_eq!(refused(comm.reduce_scatter(five()), &words), five());
                assert_eq!(refused(comm.reduce_scatter_in_place(five()), &words), five());
                refused(comm.reduce_scatter_into(five(), vec![0f32; 1]), &words);
                refused(comm.all_gather_in_place(five()), &["all_gather", "5 elements", "3"]);
                let (i, o) = refused(
                    comm.all_gather_into(five(), vec![0f32; 14]),
                    &["all_gather", "output has 14", "expected 15"],
                );
                assert_eq!((i.len(), o.len()), (5, 14));
                refused(comm.all_reduce_into(five(), vec![0f32; 6]), &["all_reduce", "has 6", "expected 5"]);
                let words = ["reduce_scatter", "has 3", "expected 2"];
                refused(comm.reduce_scatter_into(vec![1f32; 6], vec![0f32; 3]), &words);
                refused(comm.reduce_into(five(), vec![0f32; 4], 1), &["reduce", "has 4", "expected 5"]);
                refused(comm.broadcast_into(five(), vec![0f32; 4], 1), &["broadcast", "5", "4"]);
                let words = ["all_reduce", "f32"];
                assert_eq!(refused(comm.op(ReduceOp::BitOr).all_reduce(five()), &words), five());
                refused(comm.op(ReduceOp::BitXor).reduce_scatter(vec![1f64; 3]), &["reduce_scatter", "f64"]);
                refused(comm.broadcast(five(), 3), &["broadcast", "root 3", "group of 3", "0..=2"]);
                refused(comm.reduce(five(), usize::MAX), &["reduce", "root", "0..=2"]);
                let words = ["all_gather", "recursive_doubling", "direct", "ring"];
                assert_eq!(refused(comm.algo(Algo::RecursiveDoubling).all_gather(five()), &words), five());
                refused(
                    comm.algo(Algo::Ring).broadcast(five(), 0),
                    &["broadcast", "ring", "direct", "oneshot"],
                );
                refused(comm.algo(Algo::Dissemination).all_reduce(five()), &["all_reduce", "dissemination"]);
                let (buf, drops) = Watched::new(4, 1.0);
                drop(comm.broadcast(buf, 8));
                assert_eq!(
                    drops.load(Ordering::SeqCst),
                    1,
                    "a refused work that is dropped frees its buffer"
                );
            }
            works(&mut comm);
            comm.barrier().wait().unwrap();
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn calls_after_close_of_a_shared_handle_are_refused() {
    let comms = Comm::local(2).unwrap();
    threads(comms, |comm| {
        let shared = comm.share();
        block_on(comm.close()).unwrap();
        let failed = shared.all_reduce(vec![1u8]).wait().unwrap_err();
        assert!(matches!(failed.error, Error::Closed { .. }), "{}", failed.error);
        assert_eq!(failed.buf, Some(vec![1u8]));
    });
}

#[test]
fn a_finished_work_polled_again_is_an_error_not_a_hang() {
    let mut comms = Comm::local(1).unwrap();
    let mut comm = comms.remove(0);
    let mut work = comm.all_reduce(vec![1u8]);
    assert!(matches!(poll_once(&mut work), Poll::Ready(Ok(_))));
    assert!(matches!(poll_once(&mut work), Poll::Ready(Err(Failed { buf: None, .. }))));
}

// ---- law 6: all ranks get the same bits ----

#[test]
fn law_6_all_ranks_get_the_same_bits_by_every_algorithm() {
    let seed = seed();
    for link in LINKS {
        for n in [2usize, 3, 4, 5, 8] {
            let comms = within(LIMIT, move || world(n, link));
            threads(comms, move |mut comm| {
                let mut rng = Rng(seed ^ (comm.rank() as u64) << 32);
                // Magnitudes that make every order of additions round differently.
                let mut value = move || {
                    let mantissa = rng.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5;
                    mantissa * 2f32.powi(rng.below(30) as i32 - 15)
                };
                for len in [1usize, 37, 5000, 100_003] {
                    let input: Vec<f32> = (0..len).map(|_| value()).collect();
                    let half: Vec<bf16> = input.iter().map(|x| bf16::from_f32(*x)).collect();
                    for algo in algorithms(Kind::AllReduce) {
                        let sum = comm.algo(*algo).all_reduce(input.clone()).wait().unwrap();
                        let bits: Vec<u32> = sum.iter().map(|x| x.to_bits()).collect();
                        let root = comm.broadcast(bits.clone(), 0).wait().unwrap();
                        assert!(bits == root, "{link:?}, {n} ranks, f32 x {len} by {algo}");
                        let sum = comm.algo(*algo).all_reduce(half.clone()).wait().unwrap();
                        let bits: Vec<u16> = sum.iter().map(|x| x.to_bits()).collect();
                        let root = comm.broadcast(bits.clone(), 0).wait().unwrap();
                        assert!(bits == root, "{link:?}, {n} ranks, bf16 x {len} by {algo}");
                    }
                }
                block_on(comm.close()).unwrap();
            });
        }
    }
}
