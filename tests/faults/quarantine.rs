//! Which buffers the loss of a rank keeps from their owner: only those lent to that rank, and only as long as its process exists.

use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};
use serde_json::json;

use crate::harness::{self, Link, Me, PATIENCE, Plan, alone, say};

const LEN: usize = 1 << 20;
/// How many operations are queued behind the one that has begun.
const QUEUED: usize = 10;

/// Rank 1 dies or stops while rank 0 has lent it an arena buffer. Rank 0 says which of its buffers came back.
pub(crate) async fn rank(me: Me) {
    let mut comm = me.connect().await;
    // On this second communicator an operation lends staging slots.
    let mut other = comm.dup().await.unwrap();
    let pids = comm.all_gather(vec![std::process::id()]).await.unwrap();
    if me.rank == 1 {
        // When this byte comes, rank 0 has submitted all its operations.
        comm.recv(vec![0u8], 0).await.unwrap();
        if me.args["dies"] == true {
            std::process::abort();
        }
        say("stopping", json!({}));
        kill_process(getpid(), Signal::STOP).unwrap();
        std::thread::sleep(PATIENCE);
    }
    let lent = comm.alloc::<f32>(LEN).unwrap();
    // The operation on this buffer stays in the queue, so the buffer is not lent.
    let kept_back = comm.alloc::<f32>(LEN).unwrap();
    let slots = other.all_reduce(vec![1f32; LEN]);
    let first = comm.all_reduce(lent);
    let queued: Vec<_> = (0..QUEUED).map(|_| comm.all_reduce(vec![1f32; LEN])).collect();
    let last = comm.all_reduce(kept_back);
    let word = comm.send(vec![1u8], 1);
    let start = Instant::now();
    // Only then are the communicators aborted: a process that still ran would release everything at once.
    while runs(pids[1]) {
        assert!(start.elapsed() < PATIENCE, "the other rank neither stops nor dies");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    other.abort("the other rank stands still");
    comm.abort("the other rank stands still");
    let first = first.await.unwrap_err();
    let mut back = 0;
    for work in queued {
        back += usize::from(work.await.unwrap_err().buf.is_some());
    }
    let last = last.await.unwrap_err().buf.is_some();
    let slots = slots.await.unwrap_err().buf.is_some();
    drop(word);
    let took = start.elapsed().as_secs_f64();
    let lent = first.buf.is_some();
    say("failed", json!({ "lent": lent, "queued": back, "last": last, "slots": slots, "took": took }));
    // Everything comes back in the end: when the other process has exited, or has said that it reads no more (has hung up).
    let end = Instant::now() + PATIENCE;
    let held = |comm: &allstream::Comm| {
        let stats = comm.stats();
        (stats.quarantined, stats.staging_bytes)
    };
    say("held", json!({ "buffers": held(&comm).0, "staging": held(&comm).1 }));
    while held(&comm) != (0, 0) && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    say("free", json!({ "buffers": held(&comm).0, "staging": held(&comm).1 }));
    drop((comm, other));
}

/// Whether a process is neither stopped nor dead.
fn runs(pid: u32) -> bool {
    !matches!(test_support::process_state(pid), None | Some('T' | 'Z' | 'X'))
}

fn plan(dies: bool) -> Plan {
    Plan::new("quarantine", 2, Link::Shm).args(json!({ "dies": dies }))
}

#[test]
fn a_dead_process_keeps_no_buffer_that_was_lent_to_it() {
    let _alone = alone();
    let job = plan(true).start();
    let failed = job.ranks[0].hear("failed");
    println!("{failed}");
    assert_eq!(failed["queued"], QUEUED, "operations that never started give their buffers back");
    assert_eq!((&failed["last"], &failed["slots"]), (&json!(true), &json!(true)));
    assert_eq!(failed["lent"], true, "the process is gone: nothing is written to the lent buffer any more");
    let free = job.ranks[0].hear("free");
    assert_eq!((&free["buffers"], &free["staging"]), (&json!(0), &json!(0)));
    let took = free["t"].as_f64().unwrap() - failed["t"].as_f64().unwrap();
    assert!(took < harness::SOON.as_secs_f64(), "staging came back after {took} s");
}

#[test]
fn a_stopped_process_keeps_what_it_was_lent_until_it_exits_and_nothing_else() {
    let _alone = alone();
    let job = plan(false).start();
    let failed = job.ranks[0].hear("failed");
    println!("{failed}");
    assert_eq!(failed["queued"], QUEUED, "operations that never started give their buffers back");
    assert_eq!((&failed["last"], &failed["slots"]), (&json!(true), &json!(true)));
    assert_eq!(failed["lent"], false, "it may go on, and write to what it was lent");
    let held = job.ranks[0].hear("held");
    assert_eq!(held["buffers"], 1);
    assert!(held["staging"].as_u64() > Some(0), "slots that it was lent are not used again: {held}");
    let killed = harness::now();
    job.ranks[1].signal(Signal::KILL);
    let free = job.ranks[0].hear("free");
    assert_eq!((&free["buffers"], &free["staging"]), (&json!(0), &json!(0)));
    let took = free["t"].as_f64().unwrap() - killed;
    println!("all came back {took} s after the process was killed");
    assert!(took < harness::SOON.as_secs_f64(), "after {took} s");
}

#[test]
fn a_stopped_process_that_goes_on_gives_back_what_it_was_lent() {
    let _alone = alone();
    let job = plan(false).start();
    let failed = job.ranks[0].hear("failed");
    assert_eq!(failed["lent"], false, "it may go on, and write to what it was lent");
    let continued = harness::now();
    job.ranks[1].signal(Signal::CONT);
    let free = job.ranks[0].hear("free");
    assert_eq!((&free["buffers"], &free["staging"]), (&json!(0), &json!(0)));
    let took = free["t"].as_f64().unwrap() - continued;
    println!("all came back {took} s after the process went on");
    assert!(took < harness::SOON.as_secs_f64(), "after {took} s");
}
