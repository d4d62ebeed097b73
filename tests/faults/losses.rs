//! How a loss spreads: to all communicators at once, whatever else was lost before, and whatever the file system does.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use allstream::{Comm, Error, Function, Lost};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::harness::{self, Link, Me, Plan, alone, say, say_error};

/// Within how many seconds a rank must know of a loss in all its communicators.
const AT_ONCE: f64 = 0.5;
/// How many communicators lose a rank at the same time.
const MANY: usize = 200;

/// The last rank dies once every other rank has sent it a message, which says that nothing in flight needs it any more. On the other ranks this
/// returns as soon as their world is dead.
async fn lose_the_last(world: &mut Comm) {
    let last = world.size() - 1;
    if world.rank() == last {
        for rank in 0..last {
            world.recv(vec![0u8], rank).await.unwrap();
        }
        std::process::abort();
    }
    world.send(vec![1u8], last).await.unwrap();
    while world.check().is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Splits off a group of all ranks of the world except the last. `None` on the last rank.
async fn without_the_last(world: &mut Comm) -> Option<Comm> {
    let stays = world.rank() + 1 < world.size();
    world.split_some(stays.then_some(1), 0).await.unwrap()
}

/// Rank 3 dies, and then rank 2 leaves a group that rank 3 was never in.
pub(crate) async fn leaves(me: Me) {
    let mut world = me.connect().await;
    let group = without_the_last(&mut world).await;
    lose_the_last(&mut world).await;
    let mut group = group.unwrap();
    group.barrier().await.unwrap();
    if me.rank == 2 {
        // Its goodbye tells why it leaves: because of the loss of rank 3, which is no member of this group.
        drop((group, world));
        return;
    }
    let begun = Instant::now();
    let failed = group.timeout(Duration::from_secs(20)).all_reduce(vec![1f32; 8]).await.unwrap_err();
    let ms = begun.elapsed().as_millis() as u64;
    say("failed", json!({ "error": failed.error, "ms": ms }));
}

#[test]
fn a_rank_that_leaves_after_another_has_died_is_named_at_once() {
    let _alone = alone();
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("leaves", 4, link).start();
        for rank in &job.ranks[..2] {
            let said = rank.hear("failed");
            let error = harness::error_of(&said);
            println!("{link:?}, rank {}: {error} after {} ms", rank.rank, said["ms"]);
            let named = matches!(error, Error::PeerLost { rank: 2, how: Lost::Left, .. });
            assert!(named, "rank {} on {link:?}: {error}", rank.rank);
            assert!(said["ms"].as_u64().unwrap() < 1000, "after {} ms", said["ms"]);
        }
    }
}

/// A rank dies that is a member of very many communicators, each of which has many operations in its flight recorder.
pub(crate) async fn two_hundred(me: Me) {
    let mut world = me.connect().await;
    let mut all = Vec::new();
    for _ in 0..MANY {
        all.push(world.dup().await.unwrap());
    }
    let group = without_the_last(&mut world).await;
    for comm in &mut all {
        let works: Vec<_> = (0..me.number("operations")).map(|_| comm.barrier()).collect();
        for work in works {
            work.await.unwrap();
        }
    }
    world.barrier().await.unwrap();
    say("ready", json!({}));
    lose_the_last(&mut world).await;
    while all.iter().any(|comm| comm.check().is_ok()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    say("all know", json!({}));
    let group = group.unwrap();
    group.close().await.unwrap();
    drop((all, world));
    say("left", json!({}));
}

#[test]
fn all_of_two_hundred_communicators_know_of_a_loss_at_once() {
    let _alone = alone();
    // With so short a timeout, a rank that is kept from sending heartbeats would be lost as well.
    let plan = Plan::new("two_hundred", 3, Link::Shm).args(json!({ "operations": 100 }));
    let mut job = plan.env("ALLSTREAM_HEARTBEAT_TIMEOUT", "1").start();
    let died = job.ranks.iter().map(|rank| rank.hear("ready")["t"].as_f64().unwrap()).fold(0.0, f64::max);
    for rank in &mut job.ranks[..2] {
        let took = rank.hear("all know")["t"].as_f64().unwrap() - died;
        println!("rank {}: the last of {MANY} communicators knew after {took:.3} s", rank.rank);
        assert!(took < AT_ONCE, "rank {} knew after {took:.3} s", rank.rank);
        rank.hear("left");
        assert_eq!(rank.ended(Instant::now() + harness::PATIENCE), Some(0), "{}", rank.log());
        let record =
            record_of(&job.traces.0, rank.rank, "json").expect("a process that ends leaves its record");
        let text = std::fs::read(&record).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let comms = record["comms"].as_array().unwrap();
        let dead = comms.iter().filter(|comm| comm["poisoned"].is_string()).count();
        assert_eq!(dead, MANY + 1, "of {} communicators", comms.len());
    }
}

/// The file to which a rank's flight recorder is written, with `extension` in place of `json`.
fn record_of(directory: &std::path::Path, rank: usize, extension: &str) -> Option<PathBuf> {
    let files = std::fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path());
    let end = format!("-rank{rank}.json");
    let mut found = files.filter(|path| path.to_string_lossy().ends_with(&end));
    found.next().map(|path| path.with_extension(extension))
}

/// A log in which every event blocks its thread while `HANGS` is true, as with a full disk or a terminal that nobody reads.
struct HangingLog;

static HANGS: AtomicBool = AtomicBool::new(false);

impl Subscriber for HangingLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        while HANGS.load(Ordering::SeqCst) {
            std::thread::park();
        }
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// A rank dies while the file system to which flight recorders are written hangs: the next file to be written is a pipe that nobody reads.
/// Or, with `log`, while the log hangs.
pub(crate) async fn hanging_files(me: Me) {
    let directory = PathBuf::from(std::env::var("ALLSTREAM_TRACE_DIR").unwrap());
    let mut world = me.connect().await;
    let (mut first, mut second) = (world.dup().await.unwrap(), world.dup().await.unwrap());
    let group = without_the_last(&mut world).await;
    if me.rank == 0 {
        first.abort("so that a recorder is written, and its name is known");
    }
    first.barrier().await.unwrap_err();
    let end = Instant::now() + Duration::from_secs(10);
    let pipe = loop {
        if let Some(pipe) = record_of(&directory, me.rank, "part") {
            break pipe;
        }
        assert!(Instant::now() < end, "no recorder was written");
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    if me.args["log"] == true {
        tracing::subscriber::set_global_default(HangingLog).unwrap();
        HANGS.store(true, Ordering::SeqCst);
    } else {
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }
    world.barrier().await.unwrap();
    say("ready", json!({}));
    lose_the_last(&mut world).await;
    say("told", json!({}));
    let failed = second.barrier().await.unwrap_err();
    say_error("failed", &failed.error, true);
    // The remaining ranks do not miss each other's heartbeats, and go on.
    let mut group = group.unwrap();
    tokio::time::sleep(Duration::from_millis(700)).await;
    group.barrier().await.unwrap();
    // A failure that the thread that drives the operation finds: its deadline.
    if me.rank == 0 {
        let begun = Instant::now();
        let late = group.timeout(Duration::from_millis(200)).barrier().await.unwrap_err();
        say("late", json!({ "error": late.error, "ms": begun.elapsed().as_millis() as u64 }));
    } else {
        while group.check().is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let begun = Instant::now();
    let _ = group.close().await;
    drop((first, second));
    let _ = world.close().await;
    say("left", json!({ "ms": begun.elapsed().as_millis() as u64 }));
}

#[test]
fn a_file_system_that_hangs_keeps_nobody_from_knowing() {
    nobody_is_kept_from_knowing(json!({}));
}

#[test]
fn a_log_that_hangs_keeps_nobody_from_knowing() {
    nobody_is_kept_from_knowing(json!({ "log": true }));
}

fn nobody_is_kept_from_knowing(args: serde_json::Value) {
    let _alone = alone();
    let plan = Plan::new("hanging_files", 3, Link::Shm).env("ALLSTREAM_HEARTBEAT_TIMEOUT", "0.5");
    let job = plan.args(args).start();
    let died = job.ranks.iter().map(|rank| rank.hear("ready")["t"].as_f64().unwrap()).fold(0.0, f64::max);
    for rank in &job.ranks[..2] {
        let took = rank.hear("told")["t"].as_f64().unwrap() - died;
        assert!(took < AT_ONCE, "rank {} knew after {took:.3} s", rank.rank);
        let error = harness::error_of(&rank.hear("failed"));
        let named = matches!(error, Error::PeerLost { rank: 2, how: Lost::Died, .. });
        assert!(named, "rank {}: {error}", rank.rank);
    }
    let late = job.ranks[0].hear("late");
    assert!(matches!(harness::error_of(&late), Error::Timeout { .. }), "{late}");
    assert!(late["ms"].as_u64().unwrap() < 700, "{late}");
    for rank in &job.ranks[..2] {
        let left = rank.hear("left");
        println!("rank {} left within {} ms", rank.rank, left["ms"]);
        assert!(left["ms"].as_u64().unwrap() < 4000, "{left}");
    }
}

/// While a thread waits in `close`, users' reduction functions run on that thread or on the progress thread, never on the control thread
/// (`allstream-ctl`), which sends the heartbeats.
#[test]
fn closing_runs_nothing_of_the_users_where_heartbeats_are() {
    use std::sync::{Arc, Mutex};
    let threads = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
    let seen = threads.clone();
    harness::on_threads(harness::world(Link::Local, 3), move |mut comm| {
        let seen = seen.clone();
        async move {
            let note = move || {
                let name = std::thread::current().name().unwrap_or("unnamed").to_owned();
                seen.lock().unwrap().insert(name);
                std::thread::sleep(Duration::from_millis(5));
            };
            let slow = Function::commutative("slow", move |a: &mut [f32], b: &[f32]| {
                note();
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            });
            let works: Vec<_> = (0..6).map(|_| comm.function(&slow).all_reduce(vec![1f32; 3000])).collect();
            comm.close().await.unwrap();
            for work in works {
                assert_eq!(work.await.unwrap(), vec![3.0; 3000]);
            }
        }
    });
    let threads = threads.lock().unwrap();
    println!("the function ran on {threads:?}");
    assert!(!threads.contains("allstream-ctl"), "the function ran on {threads:?}");
}
