//! All-reduce written by a user: naive, ring, bidirectional exchange (BDE) and minimum spanning tree (MST), with nothing
//! but `send` and `recv`, beside the built-in one.
//!
//! Teaches: a message is submitted by its call, so a rank can send and receive at the same time without a thread; a
//! buffer is either with the program or in flight, so nothing that is being sent can be overwritten; a buffer cut by
//! `split` can be sent in one part and received into in another. Each algorithm is one function, for any number of ranks
//! and any length.
//!
//! ```sh
//! cargo run --release --example by_hand                      # 8 processes, 2^23 f32, 10 trials, all algorithms
//! cargo run --release --example by_hand -- --ranks 3 --size 7 --trials 1 --algo ring --log
//! ```
//!
//! For each algorithm it prints what is moved at least (2 * size * (n-1)/n), the average time of a trial (the slowest
//! rank's), their quotient as bandwidth, and what each rank sent and received in the last trial; with `--log` every
//! message: who, what, how many elements, when. Every element of every trial is checked; the program fails if one is wrong.
//! It starts its own processes, or runs under `allstream run`.

#[path = "by_hand/launch.rs"]
mod launch;
#[path = "by_hand/peer.rs"]
mod peer;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use allstream::{Comm, Error, ReduceOp, View, split};
use futures::executor::block_on;

use launch::Options;
use peer::Peer;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What all algorithms look like: this rank's elements in, everyone's sum out, in the same memory.
type AllReduce = fn(&mut Peer, Vec<f32>) -> std::result::Result<Vec<f32>, Error>;

const ALGORITHMS: [(&str, AllReduce); 5] =
    [("allstream", built_in), ("naive", naive), ("ring", ring), ("bde", bde), ("mst", mst)];

fn add(into: &mut [f32], other: &[f32]) {
    for (x, y) in into.iter_mut().zip(other) {
        *x += y;
    }
}

/// The engine's own all-reduce, to compare with.
fn built_in(peer: &mut Peer, data: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
    Ok(peer.comm.all_reduce(data).wait()?)
}

/// Rank 0 receives from one rank after another and adds; then it sends the sum to one rank after another.
///
/// Rank 0 moves 2 (n-1) times the data, and all others wait for it.
fn naive(peer: &mut Peer, mut data: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
    if peer.rank() != 0 {
        let data = peer.send(data, 0)?;
        return peer.recv(data, 0);
    }
    for rank in 1..peer.size() {
        let other = peer.spare(data.len());
        peer.spare = peer.recv(other, rank)?;
        add(&mut data, &peer.spare);
    }
    for rank in 1..peer.size() {
        data = peer.send(data, rank)?;
    }
    Ok(data)
}

/// The data is cut into n chunks. In each of n-1 steps a rank sends a chunk to the right, and adds the one that comes from
/// the left to its own; then one chunk is complete on each rank. In n-1 more steps the complete chunks go round.
///
/// Each rank moves 2 (n-1)/n times the data, which is the least possible, in 2 (n-1) steps.
/// Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
fn ring(peer: &mut Peer, data: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
    let (rank, n, len) = (peer.rank(), peer.size(), data.len());
    let (left, right) = ((rank + n - 1) % n, (rank + 1) % n);
    // The lengths differ by one at most; with fewer elements than ranks, some chunks are empty.
    let lens: Vec<usize> = (0..n).map(|i| len * (i + 1) / n - len * i / n).collect();
    // Rank r sends chunk r first, then chunk r-1, which it has just received, and so on.
    let mut chunks: Vec<View<Vec<f32>>> = split(data, &lens)?;
    chunks.reverse();
    chunks.rotate_left(n - 1 - rank);
    for step in 0..2 * (n - 1) {
        let (mut sent, mut next) = (chunks.remove(0), chunks.remove(0));
        if step < n - 1 {
            let other = peer.spare(next.len());
            (sent, peer.spare) = peer.exchange((sent, right), (other, left))?;
            add(&mut next, &peer.spare);
        } else {
            (sent, next) = peer.exchange((sent, right), (next, left))?;
        }
        chunks.insert(0, next);
        chunks.push(sent);
    }
    Ok(View::join(chunks)?)
}

/// Bidirectional exchange, also called recursive doubling: in each step two ranks swap all they have and both add, so
/// that each then has the sum of twice as many. Ranks beyond the largest power of two hand their data to one within it
/// first, and get the sum at the end.
///
/// log2 n steps (2 more where n is no power of two), each of which moves all the data.
/// Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
fn bde(peer: &mut Peer, mut data: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
    let (rank, n) = (peer.rank(), peer.size());
    let within = 1 << n.ilog2();
    if rank >= within {
        let data = peer.send(data, rank - within)?;
        return peer.recv(data, rank - within);
    }
    let guest = Some(rank + within).filter(|guest| *guest < n);
    if let Some(guest) = guest {
        let other = peer.spare(data.len());
        peer.spare = peer.recv(other, guest)?;
        add(&mut data, &peer.spare);
    }
    let mut distance = within / 2;
    while distance > 0 {
        let (partner, other) = (rank ^ distance, peer.spare(data.len()));
        (data, peer.spare) = peer.exchange((data, partner), (other, partner))?;
        add(&mut data, &peer.spare);
        distance /= 2;
    }
    match guest {
        Some(guest) => peer.send(data, guest),
        None => Ok(data),
    }
}

/// Reduce to rank 0 over a minimum spanning tree, then broadcast over the same one.
///
/// 2 log2 n steps (rounded up), each of which moves all the data between some of the ranks while the others wait.
/// Chan, Heimlich, Purkayastha and van de Geijn, Collective communication: theory, practice, and experience, 2007.
fn mst(peer: &mut Peer, data: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
    let all = Half { root: 0, left: 0, right: peer.size() - 1 };
    let sum = mst_reduce(peer, all, data)?;
    mst_broadcast(peer, all, sum)
}

/// Ranks `left..=right`. Their `root` gets the sum in a reduce, and has the data in a broadcast.
#[derive(Clone, Copy)]
struct Half {
    root: usize,
    left: usize,
    right: usize,
}

impl Half {
    /// Cuts in two. Returns the root of the half without `self.root`, which is its far end, and the half that `rank` is in.
    fn cut(self, rank: usize) -> (usize, Half) {
        let Half { root, left, right } = self;
        let mid = (left + right) / 2;
        let other = if root <= mid { right } else { left };
        let root_of = |low: bool| if (root <= mid) == low { root } else { other };
        let half = if rank <= mid {
            Half { root: root_of(true), left, right: mid }
        } else {
            Half { root: root_of(false), left: mid + 1, right }
        };
        (other, half)
    }
}

/// Both halves reduce to their roots; then one root sends to the other.
fn mst_reduce(peer: &mut Peer, all: Half, data: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
    if all.left == all.right {
        return Ok(data);
    }
    let (source, half) = all.cut(peer.rank());
    let mut data = mst_reduce(peer, half, data)?;
    if peer.rank() == source {
        data = peer.send(data, all.root)?;
    } else if peer.rank() == all.root {
        let other = peer.spare(data.len());
        peer.spare = peer.recv(other, source)?;
        add(&mut data, &peer.spare);
    }
    Ok(data)
}

/// The root sends to the root of the other half; then both halves broadcast.
fn mst_broadcast(peer: &mut Peer, all: Half, mut data: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
    if all.left == all.right {
        return Ok(data);
    }
    let (dest, half) = all.cut(peer.rank());
    if peer.rank() == all.root {
        data = peer.send(data, dest)?;
    } else if peer.rank() == dest {
        data = peer.recv(data, all.root)?;
    }
    mst_broadcast(peer, half, data)
}

/// Element `i` of a rank's data: a small whole number, so that sums are exact in `f32`. Chunks hold different numbers.
fn element(rank: usize, i: usize) -> f32 {
    (rank + 1 + i % 1021) as f32
}

/// Describes the first element that is not the sum over all ranks. `None` if all are right.
fn wrong(data: &[f32], n: usize) -> Option<String> {
    let expected = |i: usize| (n * (n + 1) / 2 + n * (i % 1021)) as f32;
    let at = (0..data.len()).find(|i| data[*i] != expected(*i))?;
    Some(format!("element {at} is {}, expected {}", data[at], expected(at)))
}

/// The outcome of all trials of one algorithm, the same on all ranks.
struct Outcome {
    /// How long a trial took on the slowest rank, on average.
    time: Duration,
    /// Ranks that found a wrong element in some trial.
    bad_ranks: u64,
}

fn measure(peer: &mut Peer, options: &Options, name: &str, algorithm: AllReduce) -> Result<Outcome> {
    let (rank, n) = (peer.rank(), peer.size());
    let mut data = vec![0.0_f32; options.size];
    let mut nanos = Vec::new();
    let mut problem = None;
    // One trial more, which does not count: it touches all memory and makes all connections.
    for trial in 0..=options.trials {
        data.iter_mut().enumerate().for_each(|(i, x)| *x = element(rank, i));
        peer.log.clear();
        peer.comm.barrier().wait()?;
        let start = Instant::now();
        peer.start = start;
        data = algorithm(peer, data)?;
        nanos.push(start.elapsed().as_nanos() as u64);
        if data.len() != options.size {
            problem.get_or_insert(format!("{} elements, expected {}", data.len(), options.size));
        }
        if let Some(found) = wrong(&data, n) {
            problem.get_or_insert(format!("trial {trial}: {found}"));
        }
    }
    if let Some(problem) = &problem {
        eprintln!("rank {rank}: {name} is wrong: {problem}");
    }
    let slowest = peer.comm.op(ReduceOp::Max).all_reduce(nanos).wait()?;
    let bad_ranks = peer.comm.all_reduce(vec![u64::from(problem.is_some())]).wait()?[0];
    let total: u64 = slowest.iter().skip(1).sum();
    Ok(Outcome { time: Duration::from_nanos(total / options.trials as u64), bad_ranks })
}

/// Prints the line of an algorithm: bytes, time, bandwidth, and whether the sums were right.
fn report(options: &Options, n: usize, name: &str, outcome: &Outcome) {
    const MB: f64 = (1 << 20) as f64;
    let moved = 2.0 * (options.size * size_of::<f32>()) as f64 * (n - 1) as f64 / n as f64;
    let time = outcome.time.as_secs_f64();
    let bandwidth = if moved == 0.0 { 0.0 } else { moved / time };
    let check = match outcome.bad_ranks {
        0 => "ok".into(),
        bad => format!("WRONG on {bad} ranks"),
    };
    println!(
        "{name:<10} Size: {:.5} MB   Avg time per trial: {time:.6}s   Bandwidth: {:.2} MB/s   Check: {check}",
        moved / MB,
        bandwidth / MB,
    );
}

/// What each rank does. Returns whether all sums were right.
fn run(comm: Comm, options: &Options) -> Result<bool> {
    let mut peer = Peer::new(comm);
    let (speaks, n) = (peer.rank() == 0, peer.size());
    if speaks {
        println!(
            "all-reduce of {} f32 ({:.2} MB) on {n} ranks, {} trials after one that does not count; MB are 2^20 bytes",
            options.size,
            (options.size * size_of::<f32>()) as f64 / (1 << 20) as f64,
            options.trials,
        );
        println!("Size is 2 * size * (n-1)/n, Bandwidth is Size / time; the time is the slowest rank's\n");
    }
    let mut right = true;
    for (name, algorithm) in ALGORITHMS {
        if !options.wants(name) {
            continue;
        }
        let outcome = measure(&mut peer, options, name, algorithm)?;
        right &= outcome.bad_ranks == 0;
        if speaks {
            report(options, n, name, &outcome);
        }
        if name != "allstream" {
            peer.tell_log(options.log)?;
        }
    }
    block_on(peer.comm.close())?;
    Ok(right)
}

fn main() -> ExitCode {
    let result = Options::parse(std::env::args().skip(1)).and_then(|options| match options {
        Some(options) => launch::launch(&options, |comm| run(comm, &options)),
        None => {
            println!("{}", launch::USAGE);
            Ok(true)
        }
    });
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("by_hand: {error}");
            ExitCode::from(2)
        }
    }
}
