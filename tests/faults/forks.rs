//! A process that forks while it is a member. The child has none of its parent's other threads, but all else: memory, sockets and files.

use std::io::Read;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::time::{Duration, Instant};

use allstream::{ArenaBuf, Comm, Error, HostStream, Message, Node, Ordered, Rendezvous, Work};
use futures::executor::block_on;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use crate::harness::{self, Link, Me, PATIENCE, Plan, SOON, alone, among_others, say, say_error};

/// How long a child may take for everything.
const LIMIT: Duration = Duration::from_secs(5);

/// What a rank holds when it forks.
struct Held {
    world: Comm,
    group: Comm,
    local: Vec<Comm>,
    node: Node,
    lent: ArenaBuf<u32>,
    waiting: Work<Vec<u8>>,
    stream: HostStream,
    joined: Ordered<Vec<u8>>,
}

fn verdict<T>(what: &str, result: Result<T, Error>) -> Value {
    match result {
        Ok(_) => json!([what, "it worked"]),
        Err(Error::Unavailable { problem, .. }) if problem.contains("forked") => json!([what, "refused"]),
        Err(other) => json!([what, other.to_string()]),
    }
}

/// Everything a child may try, and how each ends; then lets go of what it inherited.
fn in_child(held: Held) -> Value {
    let rank = held.world.rank();
    let Held { mut world, mut group, mut local, mut node, lent, waiting, stream, joined } = held;
    let mut ends = vec![
        verdict("Comm::local", Comm::local(2)),
        verdict("Node::local", Node::local(2)),
        verdict("Comm::connect alone", block_on(Comm::connect(Rendezvous::alone()))),
        verdict("Comm::connect", block_on(Comm::connect(Rendezvous::from_env().unwrap()))),
        verdict("a call", world.all_reduce(vec![1f32; 1000]).wait().map_err(Error::from)),
        verdict("a message", group.send(vec![1u8; 10], 1 - rank).wait().map_err(Error::from)),
        verdict(
            "a send and a receive",
            group.send_recv(vec![1u8], 1 - rank, vec![1u8], 1 - rank).wait().map_err(Error::from),
        ),
        verdict(
            "a batch",
            group.batch([Message::Send { buf: vec![1u8], to: 1 - rank, tag: 0 }]).wait().map_err(Error::from),
        ),
        verdict("a local call", local[0].barrier().wait().map_err(Error::from)),
        verdict("a call of a node", node.barrier().wait().map_err(Error::from)),
        verdict("a split", block_on(group.dup())),
        verdict("an agreement", world.agree(true).wait()),
        verdict("check", world.check()),
        verdict("alloc", world.alloc::<u8>(100)),
        verdict("what was in flight", waiting.wait().map_err(Error::from)),
        verdict("what a stream waits for", joined.wait().map_err(Error::from)),
        verdict("a stream", stream.synchronize()),
        verdict(
            "a join",
            group.barrier().join(&stream).map_err(Error::from).and_then(|o| o.wait().map_err(Error::from)),
        ),
        verdict("close", block_on(local.pop().unwrap().close())),
    ];
    let kept = world.all_reduce(vec![5u8; 3]).wait().unwrap_err().buf;
    ends.push(json!(["the buffer of a call", if kept == Some(vec![5; 3]) { "refused" } else { "lost" }]));
    world.abort("a child says so");
    world.set_pool_capacity(0);
    let begun = Instant::now();
    drop((lent, group, local, node, world, stream));
    json!({ "ends": ends, "drop_us": begun.elapsed().as_micros() as u64 })
}

/// Forks; what the child says, or `None` if it did not end in time.
fn fork(held: impl FnOnce() -> Held) -> (Option<Value>, Option<Held>) {
    let (read, write) = rustix::pipe::pipe().unwrap();
    // SAFETY: the child runs Rust code that allocates, which glibc allows after a fork; it starts no thread and ends by
    // `_exit`, so that nothing of its parent's is run twice.
    match unsafe { libc::fork() } {
        0 => {
            let text =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| in_child(held()).to_string()));
            let text = text.unwrap_or_else(|_| "\"it panicked\"".into());
            let _ = rustix::io::write(&write, text.as_bytes());
            // SAFETY: ends this process, at once.
            unsafe { libc::_exit(0) }
        }
        child => {
            assert!(child > 0, "no fork");
            drop(write);
            let said = hear(read);
            if said.is_none() {
                // SAFETY: our own child, which is not waited for yet.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            let mut status = 0;
            // SAFETY: our own child, and a place for how it ended.
            unsafe { libc::waitpid(child, &mut status, 0) };
            (said, Some(held()))
        }
    }
}

fn hear(pipe: OwnedFd) -> Option<Value> {
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&limit)).unwrap();
    if ready == 0 {
        return None;
    }
    // SAFETY: the descriptor was an `OwnedFd` a moment ago: it has no other owner.
    let mut file = unsafe { std::fs::File::from_raw_fd(pipe.into_raw_fd()) };
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).ok()
}

pub(crate) async fn rank(me: Me) {
    let mut world = me.connect().await;
    let mut group = world.dup().await.unwrap();
    let mut local = Comm::local(2).unwrap();
    let node = Node::local(2).unwrap();
    let peer = 1 - me.rank;
    let mut lent = world.alloc::<u32>(5000).unwrap();
    lent.fill(7);
    group.barrier().await.unwrap();
    let (waiting, stream) = (group.recv(vec![0u8; 4], peer), HostStream::new("forked").unwrap());
    let joined = group.recv(vec![0u8; 5], peer).join(&stream).unwrap();
    let (first, second) = local.split_at_mut(1);
    let pair = (first[0].barrier(), second[0].barrier());
    pair.0.await.unwrap();
    pair.1.await.unwrap();
    let mut all = Some(Held { world, group, local, node, lent, waiting, stream, joined });
    let (said, mine) = fork(|| all.take().unwrap());
    say("child", json!({ "said": said }));
    // The parent goes on as if nothing had been.
    let Held { mut world, mut group, mut local, mut node, mut lent, waiting, stream, joined } = mine.unwrap();
    assert!(lent.iter().all(|x| *x == 7), "what the child let go of is in use here");
    group.send(vec![me.rank as u8; 4], peer).await.unwrap();
    assert_eq!(waiting.await.unwrap(), [peer as u8; 4]);
    group.send(vec![me.rank as u8; 5], peer).await.unwrap();
    assert_eq!(joined.await.unwrap(), [peer as u8; 5]);
    stream.synchronize().unwrap();
    lent = world.all_reduce(lent).await.unwrap();
    assert!(lent.iter().all(|x| *x == 14));
    let mut more = group.dup().await.unwrap();
    more.barrier().await.unwrap();
    let (first, second) = local.split_at_mut(1);
    let sums = (first[0].all_reduce(vec![1u8; 9]), second[0].all_reduce(vec![2u8; 9]));
    assert_eq!((sums.0.await.unwrap(), sums.1.await.unwrap()), (vec![3; 9], vec![3; 9]));
    node.barrier().await.unwrap();
    drop((lent, more, node, local));
    group.close().await.unwrap();
    world.close().await.unwrap();
    say("well", json!({}));
}

#[test]
fn a_forked_child_is_refused_by_name_and_touches_nothing_of_its_parent_s() {
    let _alone = alone();
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("forks", 2, link).start();
        for rank in &job.ranks {
            let said = rank.hear("child")["said"].clone();
            println!("{link:?}: the child of rank {}: {said}", rank.rank);
            for end in said["ends"].as_array().expect("a child that ends in time") {
                assert_eq!(end[1], "refused", "{link:?}, {}", end[0]);
            }
            let micros = said["drop_us"].as_u64().unwrap();
            assert!(micros < 100_000, "what it inherited took {micros} us to drop");
        }
        job.ranks.iter().for_each(|r| drop(r.hear("well")));
        job.finish();
    }
}

/// The victim forks a child that outlives it and holds all of its descriptors, as a data loader may. All reduce until somebody is lost.
pub(crate) async fn leaves_a_child(me: Me) {
    let mut comm = me.connect().await;
    let mut buf = vec![1f32; 50_000];
    for i in 0.. {
        if i == 3 && me.rank == me.number("victim") {
            say("forked", json!({ "child": fork_a_sleeper() }));
        }
        match comm.all_reduce(buf).await {
            Ok(sum) => buf = sum,
            Err(failed) => {
                say_error("failed", &failed.error, failed.buf.is_some());
                break;
            }
        }
    }
    let _ = comm.close().await;
}

fn fork_a_sleeper() -> i32 {
    // SAFETY: the child makes only system calls: it sets an alarm, then pauses over and over. It ends by a signal: the test's, or that alarm.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(PATIENCE.as_secs() as u32);
            loop {
                libc::pause();
            }
        }
        assert!(child > 0, "no fork");
        child
    }
}

/// A process whose parent has ended. It ends with this.
struct Orphan(Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

/// Its sockets stay open, and nothing comes over them any more.
#[test]
fn a_dead_rank_whose_child_holds_its_sockets_is_found_by_heartbeat() {
    let _turn = among_others();
    for (link, victim) in [(Link::Shm, 1), (Link::Tcp, 0)] {
        let plan = Plan::new("leaves_a_child", 3, link).args(json!({ "victim": victim }));
        let job = plan.env("ALLSTREAM_HEARTBEAT_TIMEOUT", "1").start();
        let child = job.ranks[victim].hear("forked")["child"].as_i64().unwrap();
        let child = Orphan(Pid::from_raw(child.try_into().unwrap()).unwrap());
        job.ranks[victim].signal(Signal::KILL);
        let died = harness::now();
        for rank in job.ranks.iter().filter(|rank| rank.rank != victim) {
            let failed = rank.hear("failed");
            let (error, took) = (harness::error_of(&failed), failed["t"].as_f64().unwrap() - died);
            println!("{link:?}, rank {} after {took:.2} s: {error}", rank.rank);
            assert!(matches!(error, Error::PeerLost { rank, .. } if rank == victim), "{error}");
            // A rank that stood still itself, on a busy machine, gives the others the heartbeat's time anew.
            assert!(took < 1.0 + 4.0 * SOON.as_secs_f64(), "after {took} s");
        }
        test_kill_process(child.0).expect("the child was there all the time");
        drop(child);
        for mut rank in job.ranks.into_iter().filter(|rank| rank.rank != victim) {
            assert_eq!(rank.ended(Instant::now() + PATIENCE), Some(0), "{}", rank.log());
        }
    }
}
