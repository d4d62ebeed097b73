//! Laws 4 and 9: a rank whose process is stopped, and a rank that never makes the call.

use std::time::Duration;

use allstream::{Error, Lost, MissingState};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::json;

use crate::harness::{self, Link, Me, Plan, SOON, among_others, say, say_error};

const SIZE: usize = 3;
const LEN: usize = 256 << 10;

/// All ranks make all_reduces in a loop. The victim stops itself before the third call (or before call `at`), or the test stops it at any time.
pub(crate) async fn stopped(me: Me) {
    let mut comm = me.connect().await;
    let (victim, itself) = (me.number("victim"), me.args["itself"] == true);
    let at = me.args["at"].as_u64().unwrap_or(2);
    let timeout = me.args["timeout"].as_f64().map(Duration::from_secs_f64);
    let mut buf = vec![1f32; LEN];
    for i in 0.. {
        if i == at && itself && me.rank == victim {
            say("stopping", json!({}));
            kill_process(getpid(), Signal::STOP).unwrap();
            // The call may return before the whole process stands still.
            std::thread::sleep(Duration::from_millis(200));
        }
        say("start", json!({ "i": i }));
        let call = comm.call();
        let call = if let Some(timeout) = timeout { call.timeout(timeout) } else { call };
        match call.all_reduce(buf).await {
            Ok(sum) => buf = sum,
            Err(failed) => {
                say_error("failed", &failed.error, failed.buf.is_some());
                break;
            }
        }
    }
    let again = comm.barrier().await.unwrap_err().error;
    say_error("again", &again, true);
    let _ = comm.close().await;
}

/// All ranks reduce buffers that peers write to in place, until the test stops the victim. After its call has failed, each other rank allocates
/// new such buffers, and checks them when the victim has been woken.
pub(crate) async fn stopped_with_loans(me: Me) {
    let mut comm = me.connect().await;
    let mut buf = comm.alloc::<f32>(4 * LEN).unwrap();
    for i in 0.. {
        say("start", json!({ "i": i }));
        match comm.all_reduce(buf).await {
            Ok(sum) => buf = sum,
            Err(failed) => {
                let kept: Vec<_> = (0..4)
                    .map(|_| {
                        let mut buf = comm.alloc::<f32>(4 * LEN).unwrap();
                        buf.fill(7.0);
                        buf
                    })
                    .collect();
                say_error("failed", &failed.error, failed.buf.is_some());
                drop(failed);
                // Long enough for the victim to be woken and to continue where it was stopped.
                tokio::time::sleep(Duration::from_secs(2)).await;
                let whole = kept.iter().all(|buf| buf.iter().all(|x| *x == 7.0));
                say("looked", json!({ "whole": whole }));
                break;
            }
        }
    }
    let _ = comm.close().await;
}

/// Runs a job and stops `victim`. Then wakes the victim and waits until all ranks have ended. Returns the other ranks' errors, each with the
/// time in seconds from the stop to the error.
fn stop(link: Link, victim: usize, args: serde_json::Value, heartbeat: &str) -> Vec<(Error, f64)> {
    let itself = args["itself"] == true;
    let plan = Plan::new("stopped", SIZE, link).args(args).env("ALLSTREAM_HEARTBEAT_TIMEOUT", heartbeat);
    let job = plan.start();
    let from = if itself {
        job.ranks[victim].hear("stopping")["t"].as_f64().unwrap()
    } else {
        while job.ranks[victim].hear("start")["i"] != 20 {}
        job.ranks[victim].signal(Signal::STOP);
        harness::now()
    };
    let mut said = Vec::new();
    for rank in job.ranks.iter().filter(|r| r.rank != victim) {
        let failed = rank.hear("failed");
        assert_eq!(failed["buffer"], true, "rank {} did not get its buffer back", rank.rank);
        let error = harness::error_of(&failed);
        assert_eq!(variant(&error), variant(&harness::error_of(&rank.hear("again"))));
        said.push((error, failed["t"].as_f64().unwrap() - from));
    }
    job.ranks[victim].signal(Signal::CONT);
    let own = job.ranks[victim].hear("failed");
    println!(
        "{link:?}, rank {victim} stopped: others after {:?} s; itself: {}",
        said.iter().map(|s| s.1).collect::<Vec<_>>(),
        own["text"]
    );
    job.finish();
    said
}

fn variant(error: &Error) -> std::mem::Discriminant<Error> {
    std::mem::discriminant(error)
}

#[test]
fn a_stopped_rank_is_found_by_heartbeat() {
    let _turn = among_others();
    for (link, victim, itself) in [(Link::Shm, 1, false), (Link::Tcp, 0, false), (Link::Shm, 2, true)] {
        for (error, took) in stop(link, victim, json!({ "victim": victim, "itself": itself }), "1") {
            let silent = Duration::from_secs(1);
            let named = matches!(error, Error::PeerLost { rank, how: Lost::Silent(d), .. } if rank == victim && d == silent);
            assert!(named, "{error}");
            assert!(took < 1.0 + SOON.as_secs_f64(), "after {took} s");
        }
    }
}

/// A rank that stops right after it has connected is noticed as soon as any other, as the others have heard that it has connected.
#[test]
fn a_rank_that_stops_as_soon_as_it_has_connected_is_found_by_heartbeat() {
    let _turn = among_others();
    for (link, victim) in [(Link::Shm, 1), (Link::Tcp, 0), (Link::Rdma, 2)] {
        let args = json!({ "victim": victim, "itself": true, "at": 0 });
        for (error, took) in stop(link, victim, args, "1") {
            let named = matches!(error, Error::PeerLost { rank, how: Lost::Silent(_), .. } if rank == victim);
            assert!(named && took < 1.0 + SOON.as_secs_f64(), "after {took} s: {error}");
        }
    }
}

/// All ranks make broadcasts until the time that the test has set.
pub(crate) async fn reduces(me: Me) {
    let mut comm = me.connect().await;
    let timeout = Duration::from_secs_f64(me.args["timeout"].as_f64().unwrap());
    for i in 0.. {
        say("start", json!({ "i": i }));
        // Rank 0 decides when all ranks end.
        let goes_on = u8::from(harness::now() < me.args["until"].as_f64().unwrap());
        match comm.timeout(timeout).broadcast(vec![goes_on], 0).await {
            Ok(said) if said == [1] => {}
            Ok(_) => break,
            Err(failed) => {
                say_error("failed", &failed.error, true);
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    comm.close().await.unwrap();
    say("well", json!({}));
}

/// A job whose processes are all stopped, for longer than the heartbeat timeout and the time limit of its operations, goes on after they are
/// woken, one after another: no rank takes the pause of all for the silence of one.
#[test]
fn a_job_that_is_stopped_as_a_whole_goes_on() {
    let _turn = among_others();
    for link in [Link::Shm, Link::Tcp] {
        let until = harness::now() + 4.0;
        let plan = Plan::new("reduces", SIZE, link).args(json!({ "until": until, "timeout": 1.0 }));
        let job = plan.env("ALLSTREAM_HEARTBEAT_TIMEOUT", "1").start();
        job.ranks.iter().for_each(|rank| while rank.hear("start")["i"] != 20 {});
        job.ranks.iter().for_each(|rank| rank.signal(Signal::STOP));
        std::thread::sleep(Duration::from_millis(2200));
        for rank in job.ranks.iter().rev() {
            rank.signal(Signal::CONT);
            std::thread::sleep(Duration::from_millis(150));
        }
        job.ranks.iter().for_each(|rank| drop(rank.hear("well")));
        job.finish();
    }
}

#[test]
fn a_stopped_rank_is_found_by_the_deadline() {
    let _turn = among_others();
    for (link, victim) in [(Link::Shm, 1), (Link::Tcp, 0)] {
        let args = json!({ "victim": victim, "itself": true, "timeout": 1.0 });
        for (error, took) in stop(link, victim, args, "30") {
            let Error::Timeout { missing, after, .. } = &error else { panic!("{error}") };
            assert_eq!(*after, Duration::from_secs(1));
            assert!(took > 0.9 && took < 1.0 + SOON.as_secs_f64(), "after {took} s");
            let [one] = &missing[..] else { panic!("{error}") };
            assert_eq!((one.rank, &one.state), (victim, &MissingState::NoAnswer), "{error}");
        }
    }
}

/// A rank may be stopped while it writes to memory that others have lent it, and continue long after their operations have failed. Until then
/// the memory that it may write to is not used for anything else.
#[test]
fn a_stopped_rank_that_wakes_writes_to_nobodys_memory() {
    let _turn = among_others();
    for (round, victim) in [1, 0, 2].into_iter().enumerate() {
        let plan = Plan::new("stopped_with_loans", SIZE, Link::Shm).args(json!({}));
        let job = plan.env("ALLSTREAM_HEARTBEAT_TIMEOUT", "1").start();
        while job.ranks[victim].hear("start")["i"] != 20 {}
        std::thread::sleep(Duration::from_micros(700 * round as u64));
        job.ranks[victim].signal(Signal::STOP);
        let others = || job.ranks.iter().filter(|r| r.rank != victim);
        for rank in others() {
            let failed = rank.hear("failed");
            let error = harness::error_of(&failed);
            assert!(matches!(error, Error::PeerLost { rank, .. } if rank == victim), "{error}");
            assert_eq!(failed["buffer"], false, "rank {}: its buffer may be written to yet", rank.rank);
        }
        job.ranks[victim].signal(Signal::CONT);
        for rank in others() {
            assert_eq!(
                rank.hear("looked")["whole"],
                true,
                "somebody wrote to new buffers of rank {}",
                rank.rank
            );
        }
        job.finish();
    }
}

/// Rank 1 makes the third call so late that the others time out first; its call then fails with their error.
pub(crate) async fn never_calls(me: Me) {
    let mut comm = me.connect().await;
    comm.barrier().await.unwrap();
    let buf = comm.all_reduce(vec![1f32; LEN]).await.unwrap();
    if me.rank == 1 {
        tokio::time::sleep(Duration::from_millis(2500)).await;
    }
    let failed = comm.timeout(Duration::from_secs(1)).all_reduce(buf).await.unwrap_err();
    say_error("failed", &failed.error, failed.buf.is_some());
    let _ = comm.close().await;
    say("closed", json!({}));
}

#[test]
fn a_rank_that_never_calls_is_named_by_all_and_told_at_its_next_call() {
    let _turn = among_others();
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("never_calls", SIZE, link).start();
        let all: Vec<_> = job.ranks.iter().map(|r| r.hear("failed")).collect();
        for said in &all {
            let error = harness::error_of(said);
            let Error::Timeout { missing, operation, .. } = &error else { panic!("{error}") };
            assert_eq!((operation.number, said["buffer"].as_bool()), (2, Some(true)), "{error}");
            let [one] = &missing[..] else { panic!("{error}") };
            assert_eq!((one.rank, &one.state), (1, &MissingState::NotCalled(Some(1))), "{error}");
        }
        println!("{link:?}: {}", all[0]["text"]);
        job.finish();
    }
}

#[test]
fn threads_too_name_the_one_that_never_calls() {
    let _turn = among_others();
    let results = harness::on_threads(harness::world(Link::Local, SIZE), |mut comm| async move {
        comm.barrier().await.unwrap();
        if comm.rank() == 1 {
            tokio::time::sleep(Duration::from_millis(2500)).await;
        }
        comm.timeout(Duration::from_secs(1)).all_reduce(vec![1f32; LEN]).await.unwrap_err()
    });
    for failed in results {
        let Error::Timeout { missing, .. } = &failed.error else { panic!("{}", failed.error) };
        let [one] = &missing[..] else { panic!("{}", failed.error) };
        assert_eq!((one.rank, &one.state), (1, &MissingState::NotCalled(Some(0))), "{}", failed.error);
        assert!(failed.buf.is_some());
    }
}

/// Rank 0 calls late. Rank 1 waits for rank 0, and is stopped until long after its own deadline, but woken before rank 0 calls.
pub(crate) async fn wakes(me: Me) {
    let mut comm = me.connect().await;
    comm.barrier().await.unwrap();
    say("start", json!({}));
    if me.rank == 0 {
        tokio::time::sleep(Duration::from_millis(3500)).await;
    }
    let timeout = Duration::from_secs(if me.rank == 1 { 1 } else { 60 });
    let failed = comm.timeout(timeout).all_reduce(vec![1f32; LEN]).await.unwrap_err();
    say_error("failed", &failed.error, failed.buf.is_some());
    let _ = comm.close().await;
}

#[test]
fn a_rank_that_wakes_asks_before_it_blames() {
    let _turn = among_others();
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("wakes", SIZE, link).start();
        job.ranks.iter().for_each(|r| drop(r.hear("start")));
        std::thread::sleep(Duration::from_millis(300));
        job.ranks[1].signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(2000));
        job.ranks[1].signal(Signal::CONT);
        for rank in &job.ranks {
            let error = harness::error_of(&rank.hear("failed"));
            let Error::Timeout { missing, rank: 1, .. } = &error else { panic!("{error}") };
            let [one] = &missing[..] else { panic!("{error}") };
            assert_eq!((one.rank, &one.state), (0, &MissingState::NotCalled(Some(0))), "{error}");
        }
        job.finish();
    }
}
