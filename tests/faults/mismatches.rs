//! Law 5: if ranks call different things, every rank gets an error that names two calls that differ; there is never a hang or a wrong result.

use std::time::{Duration, Instant};

use allstream::{Algo, Comm, DType, Error, Kind, ReduceOp, Signature};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};

use crate::harness::{self, Link, Me, Plan, SOON, among_others, say};
use crate::others::{self, Other};

/// What one rank calls.
#[derive(Clone, Debug)]
enum Call {
    /// A collective. An all_reduce is called out of place.
    Collective {
        kind: Kind,
        dtype: DType,
        op: ReduceOp,
        len: usize,
        root: usize,
        algo: Algo,
    },
    Send {
        to: usize,
        dtype: DType,
        len: usize,
    },
    Recv {
        from: usize,
        dtype: DType,
        len: usize,
    },
    Other(Other),
    Nothing,
}

impl Call {
    /// Whether this is the call that `s` describes.
    fn is(&self, s: &Signature) -> bool {
        match *self {
            Call::Collective { kind, dtype, op, len, root, algo } => {
                s.kind == kind as u8
                    && s.dtype == dtype as u8
                    && s.count == len as u64
                    && (!kind.reduces() || s.op == op as u8)
                    && (!kind.rooted() || s.root == root as u32)
                    && (algo == Algo::Auto || s.algo == algo as u8)
            }
            Call::Send { dtype, len, .. } | Call::Recv { dtype, len, .. } => {
                s.kind == 100 && s.dtype == dtype as u8 && s.count == len as u64
            }
            Call::Other(ref other) => other.is(s),
            Call::Nothing => false,
        }
    }
}

struct Case {
    name: &'static str,
    calls: Vec<Call>,
    /// What follows if the call succeeds. `true`: a barrier, then `close()`; `false`: only `close()`.
    next: bool,
}

const SMALL: usize = 4;
const LARGE: usize = 256 << 10;

/// The cases for `size` ranks: the same list on every rank.
fn cases(size: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let usual = (Kind::AllReduce, DType::F32, ReduceOp::Sum, 0, Algo::Auto);
    let call = |(kind, dtype, op, root, algo), len| Call::Collective { kind, dtype, op, len, root, algo };
    for len in [SMALL, LARGE] {
        let (kind, dtype, op, root, algo) = usual;
        let odd = size - 1;
        let mut field = |name, common: Call, other: Call| {
            for (next, odd) in [(true, odd), (false, 0)] {
                let calls =
                    (0..size).map(|r| if r == odd { other.clone() } else { common.clone() }).collect();
                cases.push(Case { name, calls, next });
            }
        };
        field("kind", call(usual, len), call((Kind::Reduce, dtype, op, root, algo), len));
        field("dtype", call(usual, len), call((kind, DType::I32, op, root, algo), len));
        field("op", call(usual, len), call((kind, dtype, ReduceOp::Max, root, algo), len));
        field("count", call(usual, len), call(usual, len + 1));
        field(
            "algo",
            call((kind, dtype, op, root, Algo::Direct), len),
            call((kind, dtype, op, root, Algo::Ring), len),
        );
        for (name, kind) in [("broadcast's root", Kind::Broadcast), ("reduce's root", Kind::Reduce)] {
            field(name, call((kind, dtype, op, 0, algo), len), call((kind, dtype, op, 1, algo), len));
        }
        if size == 2 {
            // Each rank takes itself for the root, or each the other. So in some of these cases neither rank waits for data.
            for (name, kind) in
                [("broadcast: both roots", Kind::Broadcast), ("reduce: both roots", Kind::Reduce)]
            {
                for swap in [false, true] {
                    let calls =
                        (0..2).map(|r| call((kind, dtype, op, if swap { 1 - r } else { r }, algo), len));
                    let calls: Vec<_> = calls.collect();
                    cases.push(Case { name, calls: calls.clone(), next: true });
                    cases.push(Case { name, calls, next: false });
                }
            }
        }
        for (next, odd) in [(true, odd), (false, 0)] {
            for (name, calls) in others::disagreements(size, odd, len) {
                cases.push(Case { name, calls: calls.into_iter().map(Call::Other).collect(), next });
            }
        }
        for next in [true, false] {
            for (name, dtype, other) in
                [("message's dtype", DType::I32, len), ("message's count", DType::F32, len + 1)]
            {
                let mut calls = vec![Call::Nothing; size];
                calls[0] = Call::Send { to: 1, dtype: DType::F32, len };
                calls[1] = Call::Recv { from: 0, dtype, len: other };
                cases.push(Case { name, calls, next });
            }
        }
    }
    cases
}

/// How a call ended: its error, whether all buffers came back, and whether the input is unchanged.
pub(crate) struct Came(pub(crate) Option<Error>, pub(crate) bool, pub(crate) bool);

async fn make(comm: &mut Comm, call: Call) -> Came {
    match call {
        Call::Nothing => Came(None, true, true),
        Call::Other(other) => other.make(comm).await,
        Call::Collective { dtype: DType::I32, .. }
        | Call::Send { dtype: DType::I32, .. }
        | Call::Recv { dtype: DType::I32, .. } => make_of::<i32>(comm, call, 7).await,
        _ => make_of::<f32>(comm, call, 7.0).await,
    }
}

async fn make_of<T: allstream::Element + PartialEq>(comm: &mut Comm, call: Call, fill: T) -> Came {
    let one = |result: Result<Vec<T>, allstream::Failed<Vec<T>>>| match result {
        Ok(_) => Came(None, true, true),
        Err(failed) => Came(Some(failed.error), failed.buf.is_some(), true),
    };
    match call {
        Call::Collective { kind: Kind::AllReduce, op, len, algo, .. } => {
            let work = comm.op(op).algo(algo).all_reduce_into(vec![fill; len], vec![fill; len]);
            let (error, buffers) = match work.await {
                Ok(buffers) => (None, Some(buffers)),
                Err(failed) => (Some(failed.error), failed.buf),
            };
            let whole = buffers.as_ref().is_some_and(|(input, _)| input.iter().all(|x| *x == fill));
            Came(error, buffers.is_some(), whole)
        }
        Call::Collective { kind: Kind::Reduce, op, len, root, .. } => {
            one(comm.op(op).reduce(vec![fill; len], root).await)
        }
        Call::Collective { len, root, .. } => one(comm.broadcast(vec![fill; len], root).await),
        Call::Send { to, len, .. } => one(comm.send(vec![fill; len], to).await),
        Call::Recv { from, len, .. } => one(comm.recv(vec![fill; len], from).await),
        Call::Nothing | Call::Other(_) => Came(None, true, true),
    }
}

/// Runs every case, each on a communicator of its own. Returns how each ended on this rank.
async fn run(world: &mut Comm) -> Vec<Value> {
    let mut seen = Vec::new();
    for case in cases(world.size()) {
        let mut comm = world.dup().await.unwrap();
        world.barrier().await.unwrap();
        let begun = Instant::now();
        let mut place = "hung";
        let mut came = Came(None, true, true);
        let limit = Duration::from_secs(4);
        let _ = tokio::time::timeout(limit, async {
            came = make(&mut comm, case.calls[world.rank()].clone()).await;
            place = "call";
            if came.0.is_none() && case.next {
                place = "hung in the next call";
                came.0 = comm.barrier().await.err().map(|f| f.error);
                place = "next call";
            }
            if came.0.is_none() {
                place = "hung in close";
                came.0 = comm.close().await.err();
                place = "close";
            }
        })
        .await;
        let ms = begun.elapsed().as_millis() as u64;
        seen.push(
            json!({ "place": place, "error": came.0, "buffers": came.1, "unharmed": came.2, "ms": ms }),
        );
    }
    // The world's own communicator has made none of these calls, so it still works.
    assert_eq!(world.all_reduce(vec![1i64]).await.unwrap(), [world.size() as i64]);
    seen
}

pub(crate) async fn rank(me: Me) {
    let mut world = me.connect().await;
    let seen = run(&mut world).await;
    say("seen", json!({ "cases": seen }));
    world.close().await.unwrap();
}

/// Describes everything that went wrong on any rank. Also returns the longest time that a case took, in milliseconds.
fn judge(link: Link, all: &[Vec<Value>]) -> (Vec<String>, u64) {
    let (mut wrong, mut slowest) = (Vec::new(), 0);
    let size = all.len();
    for (i, case) in cases(size).iter().enumerate() {
        for (rank, seen) in all.iter().enumerate() {
            let seen = &seen[i];
            let then = if case.next { "a barrier" } else { "close" };
            let len = match &case.calls[0] {
                Call::Collective { len, .. } | Call::Send { len, .. } | Call::Recv { len, .. } => *len,
                Call::Other(other) => other.len(),
                Call::Nothing => 0,
            };
            let mut complain = |what: String| {
                let name = case.name;
                wrong.push(format!(
                    "{link:?}, {size} ranks, {name}, {len} elements, then {then}, rank {rank}: {what}"
                ));
            };
            let place = seen["place"].as_str().unwrap();
            let error: Option<Error> = serde_json::from_value(seen["error"].clone()).unwrap();
            match &error {
                Some(Error::Mismatch { rank: a, ours, peer: b, theirs, .. }) => {
                    let right = case.calls.get(*a).is_some_and(|c| c.is(ours))
                        && case.calls.get(*b).is_some_and(|c| c.is(theirs));
                    // The error may also name the barrier that follows.
                    let barrier = |s: &Signature| case.next && s.kind == Kind::Barrier as u8;
                    let ours_right = case.calls.get(*a).is_some_and(|c| c.is(ours)) || barrier(ours);
                    let theirs_right = case.calls.get(*b).is_some_and(|c| c.is(theirs)) || barrier(theirs);
                    if !(right || ours_right && theirs_right) || ours == theirs {
                        complain(format!("in {place}: names the wrong calls: {}", error.as_ref().unwrap()));
                    }
                }
                Some(other) => complain(format!("in {place}: {other}")),
                None => complain(format!("{place}, without an error")),
            }
            if seen["buffers"] != true {
                complain("a buffer did not come back".into());
            }
            if seen["unharmed"] != true {
                complain("the input changed".into());
            }
            let ms = seen["ms"].as_u64().unwrap();
            if ms > SOON.as_millis() as u64 {
                complain(format!("took {ms} ms"));
            }
            slowest = slowest.max(ms);
        }
    }
    (wrong, slowest)
}

fn report(link: Link, all: &[Vec<Value>]) -> Vec<String> {
    let (wrong, slowest) = judge(link, all);
    println!(
        "{link:?}, {} ranks: {} cases, slowest {slowest} ms, {} wrong",
        all.len(),
        all[0].len(),
        wrong.len()
    );
    wrong
}

fn on_link(link: Link) {
    let _turn = among_others();
    let mut wrong = Vec::new();
    for size in [2, 3] {
        let all: Vec<Vec<Value>> = if link == Link::Local {
            harness::on_threads(harness::world(link, size), |mut world| async move { run(&mut world).await })
        } else {
            let job = Plan::new("mismatches", size, link).start();
            let all = job.ranks.iter().map(|r| r.hear("seen")["cases"].as_array().unwrap().clone()).collect();
            job.finish();
            all
        };
        wrong.extend(report(link, &all));
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_rank_hears_of_a_mismatch_between_threads() {
    on_link(Link::Local);
}

#[test]
fn every_rank_hears_of_a_mismatch_over_shared_memory() {
    on_link(Link::Shm);
}

#[test]
fn every_rank_hears_of_a_mismatch_over_tcp() {
    on_link(Link::Tcp);
}

#[test]
fn every_rank_hears_of_a_mismatch_over_rdma() {
    on_link(Link::Rdma);
}

/// Rank 1 calls with another type than the others. As soon as a rank has the error, its process kills itself.
pub(crate) async fn dies_of_it(me: Me) {
    let mut comm = me.connect().await;
    // A rank that is still in this barrier when the others have left it may get the error here.
    let failed = match (comm.barrier().await, me.rank) {
        (Err(failed), _) => failed.error,
        (Ok(()), 1) => comm.all_reduce(vec![1f32; 1000]).await.unwrap_err().error,
        (Ok(()), _) => comm.all_reduce(vec![1f64; 1000]).await.unwrap_err().error,
    };
    harness::say_error("failed", &failed, true);
    let _ = kill_process(getpid(), Signal::KILL);
}

#[test]
fn a_rank_that_dies_of_a_disagreement_hides_it_from_nobody() {
    let _turn = among_others();
    for round in 0..6 {
        let link = [Link::Shm, Link::Tcp][round % 2];
        let job = Plan::new("dies_of_it", 4, link).start();
        for rank in &job.ranks {
            let error = harness::error_of(&rank.hear("failed"));
            assert!(matches!(error, Error::Mismatch { .. }), "rank {}, {link:?}: {error}", rank.rank);
        }
    }
}
