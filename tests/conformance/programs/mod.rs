//! Random programs: 200 operations over groups that come and go, submitted in one order and awaited in another.
//!
//! A program is made from a seed (`programs/make.rs`): collectives of every kind, algorithm and form, messages, splits. Some ranks
//! drop a `Work`, or submit calls that have to follow a job on a stream. The results of operations become inputs of later ones.
//! Each rank compares every element of every result with that of a sequential evaluation for all ranks
//! (`programs/oracle.rs`). `ALLSTREAM_TEST_SEED=n` runs the program of one seed; `ALLSTREAM_TEST_FULL=1` runs 150
//! programs, `all` 1,040.

mod make;
mod oracle;
mod rank;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support;
use crate::values::mix;
use make::{Act, Program};
use oracle::Oracle;

const OPERATIONS: usize = 200;
/// How many programs run between threads, and between processes: by default, with `ALLSTREAM_TEST_FULL=1`, and with `all`.
const CORE: [u64; 2] = [80, 15];
const FULL: [u64; 2] = [125, 25];
const ALL: [u64; 2] = [920, 120];
/// Programs that one world of processes runs, one after another.
const TOGETHER: u64 = 3;
/// Time limit of a program between threads, or of all programs that one world of processes runs.
const LIMIT: Duration = Duration::from_secs(120);
/// How many jobs run at a time.
const AT_A_TIME: usize = 2;
/// Programs with seeds from here on run between processes.
const OF_PROCESSES: u64 = 1_000_000;

/// The world that a seed's program runs in.
fn world(seed: u64) -> (&'static str, usize) {
    let links: &[&str] = if seed >= OF_PROCESSES {
        &["shm", "tcp", "mixed", "rdma"]
    } else {
        &["local", "inproc", "shm", "tcp", "mixed"]
    };
    // All programs that one world of processes runs must get the same world.
    let of = if seed >= OF_PROCESSES { seed / TOGETHER } else { seed };
    (links[of as usize % links.len()], 2 + (mix(&[of]) % 5) as usize)
}

fn program(seed: u64) -> Program {
    let (link, n) = world(seed);
    Program::new(seed, link, n, OPERATIONS)
}

fn between_threads(seed: u64) -> Result<(), String> {
    let program = Arc::new(program(seed));
    let oracle = Arc::new(Oracle::new(&program));
    let comms = support::try_worlds(program.n, program.link)?;
    let results = support::on_threads(comms, LIMIT, move |_, world| rank::run(world, &program, &oracle));
    first(results.into_iter().map(|r| r.unwrap_or_else(Err)).collect())
}

/// The error that explains the others: the first that is not merely the consequence of another rank's failure.
fn first(results: Vec<Result<(), String>>) -> Result<(), String> {
    let errors: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    let echo = |e: &&String| e.contains("was lost") || e.contains("was not done");
    match errors.iter().find(|e| !echo(e)).or(errors.first()) {
        Some(cause) => Err(format!("{cause}\n({} ranks failed)", errors.len())),
        None => Ok(()),
    }
}

fn between_processes(seeds: &[u64]) -> Result<(), String> {
    let (link, n) = world(seeds[0]);
    let envs = |rank| {
        let mut envs = support::link_env(link, rank, n);
        let text: Vec<String> = seeds.iter().map(u64::to_string).collect();
        envs.push(("PROGRAMS".into(), text.join(",")));
        envs
    };
    let ended = support::spawn_ranks("programs::random_programs", n, LIMIT, envs)
        .wait(LIMIT + Duration::from_secs(5));
    let each = |rank: support::Ended| match rank.success() {
        true => Ok(()),
        false => Err(format!("rank {}: {:?}\n{}{}", rank.rank, rank.status, rank.stdout, rank.stderr)),
    };
    first(ended.into_iter().map(each).collect())
}

fn be_rank() {
    let seeds = std::env::var("PROGRAMS").expect("seeds");
    let mut world = support::join();
    for seed in seeds.split(',').map(|s| s.parse().expect("a seed")) {
        let program = program(seed);
        let oracle = Oracle::new(&program);
        let comm = futures::executor::block_on(world.dup()).expect("a second communicator");
        rank::run(comm, &program, &oracle).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
    support::close(world).expect("the end");
}

/// How many operations of each sort a program has.
fn count(program: &Program, into: &mut BTreeMap<String, usize>) {
    for step in &program.steps {
        let name = match &step.act {
            Act::Split { .. } => "split".into(),
            Act::End { .. } => "group's end".into(),
            Act::Collective(c) => c.kind.to_string(),
            Act::List { .. } => "list".into(),
            Act::Bytes { .. } => "bytes".into(),
            Act::Message { .. } => "message".into(),
            Act::Shift { .. } => "send_recv".into(),
        };
        *into.entry(name).or_insert(0) += 1;
    }
}

#[test]
fn random_programs() {
    if support::role() {
        return be_rank();
    }
    let begun = Instant::now();
    let given = std::env::var("ALLSTREAM_TEST_SEED").ok().map(|s| s.parse::<u64>().expect("a number"));
    // A job is one program between threads, or several programs that one world of processes runs one after another.
    let jobs: Vec<Vec<u64>> = match given {
        Some(seed) => vec![vec![seed]],
        None => {
            let [seeds, processes] = support::times(CORE, FULL, ALL);
            let processes: Vec<u64> = (OF_PROCESSES..OF_PROCESSES + processes).collect();
            let mut apart: Vec<Vec<u64>> =
                processes.chunk_by(|a, b| a / TOGETHER == b / TOGETHER).map(<[u64]>::to_vec).collect();
            apart.extend((1..=seeds).map(|seed| vec![seed]));
            apart
        }
    };
    let (next, failed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let result =
                        if job[0] >= OF_PROCESSES { between_processes(job) } else { between_threads(job[0]) };
                    if let Err(e) = result {
                        let (link, n) = world(job[0]);
                        let each = |seed| {
                            format!("ALLSTREAM_TEST_SEED={seed} cargo test --test conformance programs")
                        };
                        let again: Vec<String> = job.iter().map(each).collect();
                        let again = again.join("\n");
                        let text = format!("seeds {job:?} ({link} x {n}): {e}\nto repeat each:\n{again}");
                        let mut failed = failed.lock().unwrap_or_else(|e| e.into_inner());
                        failed.push(text);
                        if failed.len() > 4 {
                            return;
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(|e| e.into_inner());
    assert!(failed.is_empty(), "{} fail:\n{}", failed.len(), failed.join("\n\n"));
    let mut counts = BTreeMap::new();
    jobs.iter().flatten().for_each(|seed| count(&program(*seed), &mut counts));
    let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    let programs = jobs.iter().flatten().count();
    support::tell_cases("random programs", programs);
    let took = begun.elapsed();
    let _ = writeln!(
        std::io::stderr(),
        "programs: {programs} of {OPERATIONS} operations in {took:.0?} ({})",
        counts.join(", ")
    );
}
