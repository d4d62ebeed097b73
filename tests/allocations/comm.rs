//! Operations of communicators, on three ranks, inside one process, over shared memory and over TCP.

use std::future::Future;
use std::net::TcpListener;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use allstream::{Algo, Comm, Kind, LinkChoice, Rendezvous, Work, plan};
use futures::executor::block_on;

use crate::counting::{BYTES, COUNT, ON, TRACE, alone};

/// The numbers of allocations and of allocated bytes, as rank 0 read them at the end of a window. All ranks decide by them whether to go on.
static SEEN: (AtomicUsize, AtomicUsize) = (AtomicUsize::new(0), AtomicUsize::new(0));

pub(crate) const RANKS: usize = 3;
/// How many windows are measured at most.
const WINDOWS: usize = 5;
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// How a `Work` is awaited.
#[derive(Clone, Copy, Debug)]
enum How {
    Wait,
    Poll,
}

fn end<O, F>(work: Work<O, F>, how: How) -> O {
    let result = match how {
        How::Wait => work.wait(),
        How::Poll => {
            let mut work = pin!(work);
            let mut cx = Context::from_waker(Waker::noop());
            loop {
                match work.as_mut().poll(&mut cx) {
                    Poll::Ready(result) => break result,
                    Poll::Pending => thread::yield_now(),
                }
            }
        }
    };
    match result {
        Ok(value) => value,
        Err(failed) => panic!("{}", failed.error),
    }
}

/// The buffers of one rank. Each call takes a buffer, and its result gives the same buffer back.
struct Buffers {
    sizes: Vec<Vec<f32>>,
    halves: Vec<Vec<f32>>,
    send: Vec<Vec<u8>>,
    recv: Vec<Vec<u8>>,
}

const SIZES: [usize; 5] = [1, 40, 3_000, 50_000, 200_000];
const MESSAGES: [usize; 4] = [1, 150, 4_000, 300_000];

impl Buffers {
    fn new() -> Buffers {
        Buffers {
            sizes: SIZES.iter().map(|n| vec![1f32; *n]).collect(),
            halves: SIZES.iter().map(|n| vec![1f32; *n * RANKS]).collect(),
            send: MESSAGES.iter().map(|n| vec![1u8; *n]).collect(),
            recv: MESSAGES.iter().map(|n| vec![0u8; *n]).collect(),
        }
    }
}

type Part = (&'static str, fn(&mut Comm, &mut Buffers, usize, How));

const PARTS: [Part; 6] = [
    ("all_reduce", |comm, b, round, how| {
        let buf = std::mem::take(&mut b.sizes[round % 5]);
        let [algos @ .., Algo::TwoLevel] = plan::algorithms(Kind::AllReduce) else {
            unreachable!("the last is for several hosts; here is one");
        };
        let algo = match round / 5 % (algos.len() + 1) {
            0 => Algo::Auto,
            i => algos[i - 1],
        };
        b.sizes[round % 5] = end(comm.algo(algo).all_reduce(buf), how);
    }),
    ("all_gather_into, reduce_scatter_into, broadcast", |comm, b, round, how| {
        let (one, all) = (std::mem::take(&mut b.sizes[round % 5]), std::mem::take(&mut b.halves[round % 5]));
        let (one, all) = end(comm.all_gather_into(one, all), how);
        let (all, one) = end(comm.reduce_scatter_into(all, one), how);
        b.halves[round % 5] = all;
        b.sizes[round % 5] = end(comm.broadcast(one, round % RANKS), how);
    }),
    ("gather, scatter, all_to_all, scan and exscan in place", |comm, b, round, how| {
        let i = round % 5;
        let (one, all) = (std::mem::take(&mut b.sizes[i]), std::mem::take(&mut b.halves[i]));
        let root = round % RANKS;
        // The root's buffer has a block for each rank; the buffer of every other rank is its own block.
        let (one, all) = if comm.rank() == root {
            let all = end(comm.gather_in_place(all, root), how);
            (one, end(comm.scatter_in_place(all, root), how))
        } else {
            let one = end(comm.gather_in_place(one, root), how);
            (end(comm.scatter_in_place(one, root), how), all)
        };
        b.halves[i] = end(comm.all_to_all_in_place(all), how);
        let one = end(comm.scan(one), how);
        b.sizes[i] = end(comm.exscan(one), how);
    }),
    ("barrier", |comm, _, _, how| end(comm.barrier(), how)),
    ("send, recv", |comm, b, round, how| {
        let (rank, n) = (comm.rank(), comm.size());
        let (out, back) = (std::mem::take(&mut b.send[round % 4]), std::mem::take(&mut b.recv[round % 4]));
        let sent = comm.tag(round as u32 % 3).send(out, (rank + 1) % n);
        let got = comm.tag(round as u32 % 3).recv(back, (rank + n - 1) % n);
        (b.recv[round % 4], b.send[round % 4]) = (end(got, how), end(sent, how));
    }),
    ("works in flight together, and dropped ones", |comm, b, round, how| {
        let a = comm.all_reduce(std::mem::take(&mut b.sizes[0]));
        drop(comm.barrier());
        let c = comm.all_reduce(std::mem::take(&mut b.sizes[2 + round % 3]));
        b.sizes[0] = end(a, how);
        b.sizes[2 + round % 3] = end(c, how);
    }),
];

/// Runs `window` on all ranks up to `WINDOWS` times; returns the allocations and bytes of the run that allocated least.
///
/// Some memory grows late, when a message first overtakes another or a rank first runs ahead; it grows only once. So one
/// window without any allocation proves the steady state. All ranks run the same number of windows.
pub(crate) fn quietest(rank: usize, start: &Barrier, window: &mut dyn FnMut()) -> (usize, usize) {
    let mut least = (usize::MAX, 0);
    for _ in 0..WINDOWS {
        start.wait();
        if rank == 0 {
            COUNT.store(0, Ordering::SeqCst);
            BYTES.store(0, Ordering::SeqCst);
            ON.store(true, Ordering::SeqCst);
        }
        start.wait();
        window();
        start.wait();
        if rank == 0 {
            ON.store(false, Ordering::SeqCst);
            SEEN.0.store(COUNT.load(Ordering::SeqCst), Ordering::SeqCst);
            SEEN.1.store(BYTES.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        start.wait();
        least = least.min((SEEN.0.load(Ordering::SeqCst), SEEN.1.load(Ordering::SeqCst)));
        if least.0 == 0 {
            break;
        }
    }
    least
}

pub(crate) fn world(link: Option<LinkChoice>) -> Vec<Comm> {
    let Some(choice) = link else { return Comm::local(RANKS).unwrap() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let place = |rank| {
        // The control thread sends heartbeats at times of its own. With this interval it sends none while we count.
        let place = Rendezvous::tcp(&at, rank, RANKS).unwrap().insecure().link(choice).heartbeat(LIMIT * 4);
        if rank == 0 { place.listener(listener.try_clone().unwrap()) } else { place }
    };
    let joins: Vec<_> =
        (0..RANKS).map(place).map(|p| thread::spawn(|| block_on(Comm::connect(p)).unwrap())).collect();
    joins.into_iter().map(|j| j.join().unwrap()).collect()
}

/// Runs all parts on all ranks; returns the allocations and bytes of each part in its steady state.
fn steady_state(
    link: Option<LinkChoice>,
    warm: usize,
    rounds: usize,
) -> Vec<(&'static str, How, usize, usize)> {
    let memory_lock = Arc::new(Barrier::new(RANKS));
    let rank = |mut comm: Comm| {
        let (rank, memory_lock) = (comm.rank(), memory_lock.clone());
        thread::spawn(move || {
            let mut buffers = Buffers::new();
            let mut found = Vec::with_capacity(16);
            // All parts run once before any is measured: memory that several parts share has then grown, and does not grow in a measurement.
            for (_, part) in PARTS {
                for how in [How::Wait, How::Poll] {
                    (0..warm).for_each(|round| part(&mut comm, &mut buffers, round, how));
                }
            }
            for (name, part) in PARTS {
                for how in [How::Wait, How::Poll] {
                    (0..warm).for_each(|round| part(&mut comm, &mut buffers, round, how));
                    let mut window =
                        || (0..rounds).for_each(|round| part(&mut comm, &mut buffers, round, how));
                    let least = quietest(rank, &memory_lock, &mut window);
                    found.push((name, how, least.0, least.1));
                }
            }
            block_on(comm.close()).unwrap();
            found
        })
    };
    let ranks: Vec<_> = world(link).into_iter().map(rank).collect();
    let found: Vec<_> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
    found.into_iter().next().unwrap()
}

#[test]
fn no_operation_allocates_in_steady_state() {
    let _alone = alone();
    TRACE.store(std::env::var_os("ALLOCATIONS_TRACE").is_some(), Ordering::SeqCst);
    let rounds = if test_support::everything() { 1000 } else { 300 };
    let test = thread::spawn(move || {
        let mut guilty = Vec::new();
        for link in [None, Some(LinkChoice::SHM), Some(LinkChoice::TCP)] {
            for (name, how, count, bytes) in steady_state(link, 100, rounds) {
                eprintln!(
                    "{link:?}: {name} by {how:?}: {count} allocations, {bytes} bytes in {rounds} rounds"
                );
                if count > 0 {
                    guilty.push((link, name, count));
                }
            }
        }
        assert!(guilty.is_empty(), "these allocate in steady state: {guilty:#?}");
    });
    in_time(test);
}

/// Waits for the thread `test`, and fails after `LIMIT`, so that a test that hangs ends too.
pub(crate) fn in_time(test: thread::JoinHandle<()>) {
    let start = Instant::now();
    while !test.is_finished() {
        assert!(start.elapsed() < LIMIT, "not finished within {LIMIT:?}: something hangs");
        thread::sleep(Duration::from_millis(20));
    }
    if let Err(panic) = test.join() {
        std::panic::resume_unwind(panic);
    }
}
