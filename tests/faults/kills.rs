//! Law 9: a rank is killed at a random moment of a large collective; every survivor gets an error that names it within two seconds.

use std::ops::DerefMut;
use std::time::{Duration, Instant};

use allstream::{Algo, Buf, Call, Comm, Error, Failed, Lost};
use rustix::process::Signal;
use serde_json::json;
use test_support::tell_cases;

use crate::harness::{self, Census, Link, Me, PATIENCE, Plan, Random, SOON, alone, say, say_error};

const SIZE: usize = 4;
const BYTES: usize = 128 << 20;
const LINKS: [Link; 4] = [Link::Shm, Link::Tcp, Link::Mixed, Link::Rdma];
const ALGOS: [Algo; 4] = [Algo::Direct, Algo::Ring, Algo::RecursiveDoubling, Algo::OneShot];
/// The iteration in which the victim dies. The iterations before show how long one takes.
const FATAL: u64 = 2;

pub(crate) async fn rank(me: Me) {
    let before = Census::before_connecting().await;
    let algo: Algo = me.args["algo"].as_str().unwrap().parse().unwrap();
    let mut comm = me.connect().await;
    let call = me.args["call"].as_str().unwrap().to_owned();
    if call == "alloc" {
        let buf = comm.alloc(BYTES / 4).unwrap();
        rounds(buf, async |i, buf| all_reduced(comm.algo(algo), i, buf).await).await;
    } else {
        let buf = vec![0f32; BYTES / 4];
        rounds(buf, async |i, buf| once(comm.algo(algo), (&call, me.rank), i, buf).await).await;
    }
    let begun = Instant::now();
    let closed = comm.close().await;
    let closed = closed.map_or_else(|e| e.to_string(), |()| "ok".into());
    say("closed", json!({ "ms": begun.elapsed().as_millis() as u64, "result": closed }));
    before.say_whether_restored().await;
    say("registered", json!({ "bytes": Comm::local(1).unwrap()[0].stats().registered_bytes }));
}

/// Calls on buffers of ones until a call fails. A call returns the buffer with the value that each element must have; or the error, and whether all
/// buffers came back.
async fn rounds<B: DerefMut<Target = [f32]>>(
    mut buf: B,
    mut call: impl AsyncFnMut(u64, B) -> Result<(B, usize), (Error, bool)>,
) {
    buf.fill(1.0);
    for i in 0.. {
        say("start", json!({ "i": i }));
        match call(i, buf).await {
            Ok((sum, expected)) => {
                say("done", json!({ "i": i }));
                buf = sum;
                assert!(buf.iter().step_by(997).all(|x| *x == expected as f32), "a wrong sum");
                buf.fill(1.0);
            }
            Err((error, whole)) => {
                say_error("failed", &error, whole);
                break;
            }
        }
    }
}

/// An all_reduce, as one call of [`rounds`].
async fn all_reduced<B: Buf<Elem = f32> + DerefMut<Target = [f32]>>(
    call: Call<'_>,
    i: u64,
    buf: B,
) -> Result<(B, usize), (Error, bool)> {
    let work = call.all_reduce(buf);
    say("called", json!({ "i": i }));
    let whole = |b: B| b.len() == BYTES / 4;
    Ok((work.await.map_err(|f| (f.error, f.buf.is_some_and(whole)))?, SIZE))
}

/// A call by its name, as one of [`rounds`].
async fn once(
    call: Call<'_>,
    (name, rank): (&str, usize),
    i: u64,
    mut buf: Vec<f32>,
) -> Result<(Vec<f32>, usize), (Error, bool)> {
    let whole = |f: Failed<Vec<f32>>| (f.error, f.buf.is_some_and(|b| b.len() == BYTES / 4));
    let called = || say("called", json!({ "i": i }));
    match name {
        "all_reduce" => all_reduced(call, i, buf).await,
        "all_to_all" => {
            let work = call.all_to_all_in_place(buf);
            called();
            Ok((work.await.map_err(whole)?, 1))
        }
        "exscan" => {
            // The sum of the ranks before this one; rank 0's buffer stays as it is.
            let work = call.exscan(buf);
            called();
            Ok((work.await.map_err(whole)?, rank.max(1)))
        }
        "list" => {
            let rest = buf.split_off(BYTES / 8);
            let small: Vec<Vec<f32>> = (0..40).map(|i| vec![1.0; i * 10]).collect();
            let work = call.all_reduce_list((vec![buf, rest], small));
            called();
            match work.await {
                Ok((mut large, _)) => {
                    let rest = large.pop().unwrap();
                    let mut buf = large.pop().unwrap();
                    buf.extend(rest);
                    Ok((buf, SIZE))
                }
                Err(f) => Err((f.error, f.buf.is_some_and(|(a, b)| a.len() == 2 && b.len() == 40))),
            }
        }
        "bytes" => {
            let work = call.all_gather_bytes(vec![1; BYTES / 4]);
            called();
            match work.await {
                Ok(all) => {
                    assert!(all.iter().all(|b| b.len() == BYTES / 4 && b.iter().all(|x| *x == 1)));
                    Ok((buf, 1))
                }
                Err(f) => Err((f.error, f.buf.is_some_and(|b| b.len() == BYTES / 4))),
            }
        }
        other => panic!("no call is named {other}"),
    }
}

/// The victim dies before the first operation.
pub(crate) async fn early(me: Me) {
    let mut comm = me.connect().await;
    let (victim, wait) = (me.number("victim"), me.number("wait_ms") as u64);
    if me.rank == victim {
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
    }
    tokio::time::sleep(Duration::from_millis(wait)).await;
    say("start", json!({}));
    let failed = comm.all_reduce(vec![1f32; 1 << 20]).await.unwrap_err();
    say_error("failed", &failed.error, failed.buf.is_some());
    let _ = comm.close().await;
}

#[test]
fn a_rank_that_dies_before_the_first_operation_is_named() {
    let _alone = alone();
    let all =
        [(Link::Tcp, 2, 0), (Link::Shm, 0, 0), (Link::Tcp, 1, 100), (Link::Mixed, 3, 0), (Link::Tcp, 0, 1)];
    for (link, victim, wait) in all.into_iter().take(if test_support::full() { 5 } else { 3 }) {
        let job = Plan::new("early", SIZE, link).args(json!({ "victim": victim, "wait_ms": wait })).start();
        for rank in job.ranks.iter().filter(|r| r.rank != victim) {
            let from = rank.hear("start")["t"].as_f64().unwrap();
            let said = rank.hear("failed");
            let error = harness::error_of(&said);
            let named = matches!(&error, Error::PeerLost { rank, how: Lost::Died, .. } if *rank == victim);
            assert!(named, "rank {} on {link:?}: {error}", rank.rank);
            assert!(said["t"].as_f64().unwrap() - from < SOON.as_secs_f64());
            assert_eq!(said["buffer"], true);
        }
        for mut rank in job.ranks.into_iter().filter(|r| r.rank != victim) {
            assert_eq!(rank.ended(Instant::now() + PATIENCE), Some(0), "{}", rank.log());
        }
    }
}

struct Kill {
    link: Link,
    call: &'static str,
    algo: Algo,
    victim: usize,
    fraction: f64,
}

struct Outcome {
    /// From the kill to the last survivor's error, in seconds.
    slowest: f64,
    /// The longest `close()`, in milliseconds.
    close: u64,
    /// Whether the victim died within the iteration aimed at.
    hit: bool,
    /// How many survivors had no operation in flight when they heard of the death, and were told at their next call.
    between: usize,
}

fn kill(k: &Kill) -> Outcome {
    let names = harness::names_left();
    let args = json!({ "algo": k.algo.to_string(), "call": k.call });
    let mut job = Plan::new("kills", SIZE, k.link).args(args).start();
    let pids = job.pids();
    let victim = &job.ranks[k.victim];
    let time = |event: &str, i: u64| loop {
        let said = victim.hear(event);
        if said["i"] == i {
            break said["t"].as_f64().unwrap();
        }
    };
    let begun = time("start", FATAL - 1);
    let lasts = time("done", FATAL - 1) - begun;
    harness::sleep_until(time("start", FATAL) + k.fraction * lasts);
    let killed = harness::now();
    victim.signal(Signal::KILL);
    let mut outcome = Outcome { slowest: 0.0, close: 0, hit: true, between: 0 };
    for survivor in job.ranks.iter().filter(|r| r.rank != k.victim) {
        // A survivor may have got all that it needs from the victim before the kill. Then its operation succeeds, and its next
        // call is refused. The error must name an operation only if one was in flight.
        let mut called = f64::INFINITY;
        let said = survivor.hear_also("failed", |earlier| {
            if earlier["event"] == "called" {
                called = earlier["t"].as_f64().unwrap();
            }
        });
        let in_flight = called < killed;
        let error = harness::error_of(&said);
        let named = matches!(&error, Error::PeerLost { rank, how: Lost::Died, operation, .. }
            if *rank == k.victim && (operation.is_some() || !in_flight));
        assert!(
            named,
            "rank {} says: {error}; expected that rank {} died{}",
            survivor.rank,
            k.victim,
            if in_flight { ", and during which operation" } else { "" }
        );
        outcome.between += usize::from(matches!(error, Error::PeerLost { operation: None, .. }));
        assert_eq!(said["buffer"], true, "rank {} did not get its buffer back", survivor.rank);
        let took = said["t"].as_f64().unwrap() - killed;
        assert!(took < SOON.as_secs_f64(), "rank {} knew after {took:.2} s only", survivor.rank);
        outcome.slowest = outcome.slowest.max(took);
        let closed = survivor.hear("closed");
        outcome.close = outcome.close.max(closed["ms"].as_u64().unwrap());
        let census = survivor.hear("census");
        assert_eq!(
            census["same"], true,
            "rank {}: was {}, is {}",
            survivor.rank, census["was"], census["is"]
        );
        let threads = census["is"].as_str().unwrap().matches("\"allstream-").count();
        assert_eq!(threads, 2, "{census}");
        assert_eq!(survivor.hear("registered")["bytes"], 0, "memory stays registered with a card");
    }
    let end = Instant::now() + PATIENCE;
    for rank in &mut job.ranks {
        let expected = if rank.rank == k.victim { -9 } else { 0 };
        assert_eq!(rank.ended(end), Some(expected), "rank {}: {}", rank.rank, rank.log());
    }
    let late = |said: &serde_json::Value| said["event"] == "done" && said["i"] == FATAL;
    outcome.hit = !job.ranks[k.victim].rest().iter().any(late);
    drop(job);
    assert!(pids.into_iter().all(harness::is_gone), "a process is left");
    harness::assert_no_new_names(&names);
    outcome
}

/// Makes these kills, one after another, and asserts at the end that all went as they must.
fn kill_all(all: impl IntoIterator<Item = Kill>) {
    let (mut failed, mut slowest, mut close, mut hits, mut count) = (Vec::new(), 0f64, 0, 0, 0);
    for k in all {
        let Kill { link, call, algo, victim, fraction } = &k;
        let what =
            format!("kill {count}: {link:?} {call} by {algo} victim {victim} at {:.0} %", fraction * 100.0);
        count += 1;
        match std::panic::catch_unwind(|| kill(&k)) {
            Ok(o) => {
                let place = if o.hit { "" } else { " (just after the operation aimed at)" };
                let between =
                    if o.between == 0 { String::new() } else { format!("; {} between two calls", o.between) };
                println!(
                    "{what}: slowest survivor {:.1} ms, close {} ms{place}{between}",
                    o.slowest * 1e3,
                    o.close
                );
                slowest = slowest.max(o.slowest);
                close = close.max(o.close);
                hits += usize::from(o.hit);
            }
            Err(_) => {
                println!("{what}: FAILED");
                failed.push(what);
            }
        }
    }
    println!(
        "{count} kills, {hits} inside the operation aimed at, {} failed; slowest survivor {:.1} ms, slowest close {close} ms",
        failed.len(),
        slowest * 1e3
    );
    tell_cases("killed ranks", count);
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn survivors_name_the_killed_rank_within_two_seconds_and_leave_nothing() {
    let _alone = alone();
    let mut random = Random::seeded();
    let count = test_support::times(8, 16, 64);
    // Up to 64 kills, all different: each victim with each algorithm on each link.
    kill_all((0..count).map(|i| Kill {
        link: LINKS[(i + i / 4) % 4],
        call: "all_reduce",
        algo: ALGOS[i % 4],
        victim: (i + 2 * (i / 4) + i / 16) % SIZE,
        fraction: 0.1 + 0.8 * random.fraction(),
    }));
}

/// As `survivors_name_the_killed_rank_within_two_seconds_and_leave_nothing`, over RDMA alone: first with buffers from `alloc`, which cards read and write
/// where they lie, with more kills also in an all_to_all, and in an all_reduce of ordinary buffers.
#[test]
fn survivors_over_rdma_name_the_killed_rank_and_nothing_stays_registered() {
    let _alone = alone();
    let mut random = Random::seeded();
    kill_all((0..test_support::times(1, 4, 100)).map(|i| Kill {
        link: Link::Rdma,
        call: ["alloc", "all_to_all", "all_reduce"][i / 4 % 3],
        algo: if i / 4 % 3 == 1 { Algo::Pairwise } else { ALGOS[i % 4] },
        victim: (i + i / 4) % SIZE,
        fraction: 0.1 + 0.8 * random.fraction(),
    }));
}

/// The same in other collectives, and with other algorithms.
#[test]
fn survivors_of_any_collective_name_the_killed_rank() {
    let _alone = alone();
    let mut random = Random::seeded();
    let calls = [
        ("all_to_all", Algo::Pairwise),
        ("exscan", Algo::Chain),
        ("list", Algo::Auto),
        ("bytes", Algo::Auto),
        ("all_reduce", Algo::HalvingDoubling),
        ("all_reduce", Algo::DoubleBinaryTree),
        ("all_to_all", Algo::Direct),
        ("exscan", Algo::RecursiveDoubling),
    ];
    let count = test_support::times(4, 8, 24);
    kill_all((0..count).map(|i| Kill {
        link: LINKS[(i + i / 8) % 4],
        call: calls[i % 8].0,
        algo: calls[i % 8].1,
        victim: (i + i / 4) % SIZE,
        fraction: 0.1 + 0.8 * random.fraction(),
    }));
}

#[test]
fn a_rank_that_leaves_while_others_wait_for_it_is_named() {
    let _alone = alone();
    for link in [Link::Local, Link::Shm, Link::Tcp] {
        let results = harness::on_threads(harness::world(link, SIZE), move |mut comm| async move {
            comm.barrier().await.unwrap();
            if comm.rank() == 2 {
                drop(comm);
                return None;
            }
            let begun = Instant::now();
            let failed = comm.all_reduce(vec![1f32; 2 << 20]).await.unwrap_err();
            let took = begun.elapsed();
            let next = comm.barrier().await.unwrap_err().error;
            let _ = comm.close().await;
            Some((failed, took, next))
        });
        for (rank, result) in results.into_iter().enumerate() {
            let Some((failed, took, next)) = result else { continue };
            let left = |e: &Error| matches!(e, Error::PeerLost { rank: 2, how: Lost::Left, .. });
            assert!(
                left(&failed.error) && left(&next),
                "rank {rank} on {link:?}: {}, then {next}",
                failed.error
            );
            assert!(failed.buf.is_some(), "rank {rank} on {link:?} did not get its buffer back");
            assert!(took < SOON, "rank {rank} on {link:?} knew after {took:?}");
            println!("{link:?}: rank {rank} knew after {:.0} ms", took.as_secs_f64() * 1e3);
        }
    }
}

#[test]
fn a_work_let_go_before_its_communicator_still_serves_the_others() {
    let _alone = alone();
    let results = harness::on_threads(harness::world(Link::Local, SIZE), |mut comm| async move {
        comm.barrier().await.unwrap();
        let work = comm.timeout(Duration::from_secs(20)).all_reduce(vec![1f32; 4 << 20]);
        if comm.rank() == 2 {
            drop(work);
            drop(comm);
            return true;
        }
        work.await.unwrap().iter().all(|x| *x == SIZE as f32)
    });
    assert_eq!(results, [true; SIZE]);
}
