//! Staging is shared, bounded, and comes back: one communicator's backlog does not stop another, and a dead one gives
//! its slots back.

use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use allstream::{Algo, Comm, Error, LinkChoice, Rendezvous};
use futures::executor::block_on;

const LIMIT: Duration = Duration::from_secs(30);

/// Runs `rank` on two ranks that share memory as two processes would.
fn two(rank: fn(Comm) -> Result<(), Error>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = format!("tcp://{}", listener.local_addr().expect("its address"));
    let mut listener = Some(listener);
    let (done, finished) = channel();
    for r in 0..2 {
        let mut rendezvous = Rendezvous::tcp(&at, r, 2).expect("an address").token("t").link(LinkChoice::SHM);
        if r == 0 {
            rendezvous = rendezvous.listener(listener.take().expect("one listener"));
        }
        let done = done.clone();
        std::thread::spawn(move || {
            let result = block_on(Comm::connect(rendezvous.timeout(LIMIT))).and_then(rank);
            let _ = done.send((r, result));
        });
    }
    for _ in 0..2 {
        let (r, result) = finished.recv_timeout(LIMIT).expect("both ranks end in time");
        assert_eq!(result, Ok(()), "rank {r}");
    }
}

/// Runs `run` on `world` beside a backlog: two other communicators, whose operations on rank 0 take every slot, and which rank 1
/// does not call before `run` has ended.
fn behind(run: fn(&mut Comm) -> Result<(), Error>, mut world: Comm) -> Result<(), Error> {
    let (mut a, mut b) = (block_on(world.dup())?, block_on(world.dup())?);
    let mut works = Vec::new();
    if world.rank() == 0 {
        for comm in [&mut a, &mut b] {
            works.push(comm.algo(Algo::Direct).all_gather(vec![1f32; 8 << 20]));
        }
        let end = Instant::now() + LIMIT;
        while world.stats().staging_bytes < world.stats().staging_limit {
            assert!(Instant::now() < end, "the backlog takes all slots: {:?}", world.stats());
            std::thread::yield_now();
        }
    }
    run(&mut world)?;
    if world.rank() == 1 {
        for comm in [&mut a, &mut b] {
            works.push(comm.algo(Algo::Direct).all_gather(vec![1f32; 8 << 20]));
        }
    }
    for work in works {
        assert_eq!(work.wait()?.len(), 16 << 20);
    }
    [a, b, world].into_iter().try_for_each(|comm| block_on(comm.close()))
}

#[test]
fn small_messages_pass_a_backlog_of_other_communicators() {
    two(|world| {
        behind(
            |world| {
                let peer = 1 - world.rank();
                let sent = world.send(vec![7u8; 1000], peer);
                assert_eq!(world.recv(vec![0u8; 1000], peer).wait()?, [7; 1000]);
                sent.wait().map(drop).map_err(Error::from)
            },
            world,
        )
    });
}

#[test]
fn a_reduce_passes_a_backlog_of_other_communicators() {
    two(|world| {
        behind(
            |world| {
                let (rank, call) = (world.rank(), world.timeout(Duration::from_secs(20)));
                let sum = call.algo(Algo::Direct).reduce(vec![2i32; 20_000], 0).wait()?;
                assert!(sum.iter().all(|x| *x == if rank == 0 { 4 } else { 2 }));
                Ok(())
            },
            world,
        )
    });
}

#[test]
fn large_messages_and_all_reduce_pass_a_backlog_of_other_communicators() {
    two(|world| {
        behind(
            |world| {
                let peer = 1 - world.rank();
                let sent = world.send(vec![7u8; 20_000], peer);
                assert_eq!(world.recv(vec![0u8; 20_000], peer).wait()?, [7; 20_000]);
                sent.wait()?;
                for algo in [Algo::Direct, Algo::OneShot, Algo::Ring, Algo::RecursiveDoubling] {
                    let sum = world.algo(algo).all_reduce(vec![1i32; 20_000]).wait()?;
                    assert!(sum.iter().all(|x| *x == 2), "{algo}");
                }
                Ok(())
            },
            world,
        )
    });
}

#[test]
fn a_dead_communicator_gives_its_slots_back() {
    two(|mut world| {
        for turn in 0..4 {
            let mut child = block_on(world.dup())?;
            let work = (world.rank() == 0).then(|| {
                let call = child.algo(Algo::Direct).timeout(Duration::from_millis(200));
                let buf = vec![1f32; 4 << 20];
                // The all_gather sends through slots, the all_reduce lends them.
                if turn % 2 == 0 { call.all_gather(buf) } else { call.all_reduce(buf) }
            });
            if let Some(work) = work {
                let failed = work.wait().expect_err("rank 1 never calls");
                assert!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
                assert_eq!(failed.buf.map(|b| b.len()), Some(4 << 20));
            }
            world.barrier().wait()?;
        }
        let end = Instant::now() + Duration::from_secs(10);
        while world.stats().staging_bytes > 0 {
            assert!(Instant::now() < end, "{:?}", world.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
        world.barrier().wait()?;
        block_on(world.close())
    });
}
