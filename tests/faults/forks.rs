//! A process that forks while it is a member. Threads do not survive that, and all else the child shares with its parent.

use std::io::Read;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::time::{Duration, Instant};

use allstream::{ArenaBuf, Comm, Error, Node, Rendezvous, Work};
use futures::executor::block_on;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::harness::{Link, Me, Plan, alone, say};

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
    let Held { mut world, mut group, mut local, mut node, lent, waiting } = held;
    let mut ends = vec![
        verdict("Comm::local", Comm::local(2)),
        verdict("Node::local", Node::local(2)),
        verdict("Comm::connect alone", block_on(Comm::connect(Rendezvous::alone()))),
        verdict("Comm::connect", block_on(Comm::connect(Rendezvous::from_env().unwrap()))),
        verdict("a call", world.all_reduce(vec![1f32; 1000]).wait().map_err(Error::from)),
        verdict("a message", group.send(vec![1u8; 10], 1 - rank).wait().map_err(Error::from)),
        verdict("a local call", local[0].barrier().wait().map_err(Error::from)),
        verdict("a call of a node", node.barrier().wait().map_err(Error::from)),
        verdict("a split", block_on(group.dup())),
        verdict("an agreement", world.agree(true).wait()),
        verdict("check", world.check()),
        verdict("alloc", world.alloc::<u8>(100)),
        verdict("what was in flight", waiting.wait().map_err(Error::from)),
        verdict("close", block_on(local.pop().unwrap().close())),
    ];
    let kept = world.all_reduce(vec![5u8; 3]).wait().unwrap_err().buf;
    ends.push(json!(["the buffer of a call", if kept == Some(vec![5; 3]) { "refused" } else { "lost" }]));
    world.abort("a child says so");
    world.set_pool_capacity(0);
    let begun = Instant::now();
    drop((lent, group, local, node, world));
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
    let waiting = group.recv(vec![0u8; 4], peer);
    let (first, second) = local.split_at_mut(1);
    let pair = (first[0].barrier(), second[0].barrier());
    pair.0.await.unwrap();
    pair.1.await.unwrap();
    let mut all = Some(Held { world, group, local, node, lent, waiting });
    let (said, mine) = fork(|| all.take().unwrap());
    say("child", json!({ "said": said }));
    // The parent goes on as if nothing had been.
    let Held { mut world, mut group, mut local, mut node, mut lent, waiting } = mine.unwrap();
    assert!(lent.iter().all(|x| *x == 7), "what the child let go of is in use here");
    group.send(vec![me.rank as u8; 4], peer).await.unwrap();
    assert_eq!(waiting.await.unwrap(), [peer as u8; 4]);
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
