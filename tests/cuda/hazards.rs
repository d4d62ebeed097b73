//! Each wait of operations on devices is needed: without it, and with streams that dawdle, something goes wrong.
//!
//! A process for each wait and seed: in it the wait is taken away (feature `testing`), and work is done until something
//! is noticed. `HAZARDS_SEEDS` says how many seeds are tried; `docs/hazards.md` has the table that comes of it.

use std::collections::VecDeque;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use allstream::cuda::{DeviceBuf, DeviceStream};
use allstream::testing::{Wait, slow_readers, take_away};
use allstream::{Algo, Failed};
use test_support::tell_cases;

use crate::conformance::{run_all, some};
use crate::held;
use crate::support::{
    bound, down, full, is_ours, library, nothing_left, ranks, report, set_delays, soon, up, values,
};
use crate::values::mix;

const TEST: &str = "hazards::each_wait_is_missed";
const CHILD: &str = "HAZARDS_CHILD";
/// Processes at a time: they sleep most of the time.
const TOGETHER: usize = 6;
/// What hangs is noticed after this long.
const LIMIT: Duration = Duration::from_secs(100);

fn seeds() -> u64 {
    let asked = std::env::var("HAZARDS_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    asked.unwrap_or(test_support::times(3, 4, 6))
}

/// Law 1: what a stream was asked to do before the call comes first.
fn order(seed: u64) {
    for i in 0..5 {
        set_delays(3000, mix(&[seed, i]));
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 2);
            drop(up(&stream, vec![0xAAAA_AAAAu32; 5000]));
            // One rank's stream is behind the other's.
            for _ in 0..if comm.rank() as u64 == i % 2 { 8 } else { 0 } {
                drop(DeviceBuf::<u32>::zeroed(&stream, 16).unwrap());
            }
            // Memory that held those values; the stream fills it with zeros only later than this thread calls `all_reduce`.
            let zeros = || DeviceBuf::<u32>::zeroed(&stream, 5000).unwrap();
            let works: Vec<_> = (0..4).map(|_| comm.all_reduce(zeros())).collect();
            for work in works {
                let sum = down(soon(work).unwrap());
                assert!(sum.iter().all(|x| *x == 0), "what came before was not waited for");
            }
        });
    }
}

/// Every collective by every algorithm, five ranks on two devices.
fn collectives(seed: u64) {
    set_delays(400, seed);
    let cases = some(5, seed);
    let mut problems: Vec<String> =
        ranks(5, |comm| run_all(comm, 2, &cases)).into_iter().filter_map(Result::err).collect();
    // A rank that finds something wrong leaves, and the others lose it.
    problems.sort_by_key(|problem| !problem.contains("device buffer"));
    assert!(problems.is_empty(), "{}", problems[0]);
}

/// Groups that are aborted at any time; what they give back is used at once, and its memory goes back to the driver.
fn aborts(seed: u64) {
    for i in 0..12 {
        let h = mix(&[seed, i]) as usize;
        // Streams that are slow, or hosts.
        let slow_hosts = h.is_multiple_of(2);
        set_delays(if slow_hosts { 0 } else { 2500 }, h as u64);
        slow_readers(Duration::from_micros(if slow_hosts { 4000 } else { 0 }));
        let all = [Algo::Ring, Algo::RecursiveDoubling, Algo::HalvingDoubling, Algo::Mst, Algo::Naive];
        let (algo, absent, aborter) = (all[h / 8 % 5], h / 64 % 5, h / 512 % 3);
        let pause = Duration::from_micros([0, 100, 400, 1000, 3000][h / 4096 % 5]);
        let [begin, end] = [(); 2].map(|()| std::sync::Barrier::new(3));
        // (A panic ends the process: nobody waits for a rank that is gone.)
        ranks(3, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 3));
            let buf = up(&stream, values(rank, 3000));
            // One rank's stream is behind, and all that reads from it.
            for _ in 0..if rank == h / 3 % 3 && !slow_hosts { 8 } else { 0 } {
                drop(DeviceBuf::<u32>::zeroed(&stream, 16).unwrap());
            }
            begin.wait();
            if rank == aborter && h % 7 < 3 {
                std::thread::sleep(pause);
            }
            let work = (rank != absent).then(|| comm.algo(algo).all_reduce(buf));
            if rank == aborter {
                std::thread::sleep(if h % 7 < 3 { Duration::ZERO } else { pause });
                comm.abort("a test");
            }
            let back = work.map(|work| match soon(work) {
                Ok(buf) => buf,
                Err(Failed { buf, error }) => buf.unwrap_or_else(|| panic!("no buffer: {error}")),
            });
            if let Some(buf) = back
                && !slow_hosts
                && h % 5 < 3
            {
                is_ours(buf);
            }
            drop(comm);
            // What is not used goes back, as soon as our stream is done with it.
            stream.synchronize().unwrap();
            stream.device().trim().unwrap();
            end.wait();
            stream.synchronize().unwrap();
            assert!(report().freed_in_use == 0, "memory was freed that a device still touched");
        });
        slow_readers(Duration::ZERO);
        nothing_left("all ranks have ended");
        assert!(report().freed_in_use == 0, "memory was freed that a device still touched");
    }
}

/// A root whose own part ends well, and which aborts at once: what it has still to read from another rank's memory stays
/// there, though that rank's operation fails and new buffers are allocated at once.
fn late_readers(seed: u64) {
    const N: usize = 4;
    for i in 0..8 {
        set_delays(1500, mix(&[seed, i]));
        let called = std::sync::Barrier::new(N);
        ranks(N, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
            let buf = up(&stream, values(rank, 3000));
            let call = |comm: &mut allstream::Comm, buf| comm.algo(Algo::Binomial).reduce(buf, 0);
            if rank > 0 {
                let work = call(&mut comm, buf);
                // What is to be reduced on the way has come to where the root wants it.
                std::thread::sleep(Duration::from_millis(3));
                called.wait();
                let ended = soon(work);
                let other = DeviceStream::new(&stream.device()).unwrap();
                let taken: Vec<_> = (0..6).map(|_| DeviceBuf::<f32>::zeroed(&other, 3000).unwrap()).collect();
                other.synchronize().unwrap();
                drop((ended, taken));
                return;
            }
            for _ in 0..8 {
                drop(DeviceBuf::<u32>::zeroed(&stream, 16).unwrap());
            }
            called.wait();
            let work = call(&mut comm, buf);
            comm.abort("a test");
            if let Ok(buf) = soon(work) {
                let right = |i: usize| (0..N).map(|rank| values(rank, 3000)[i]).sum::<f32>();
                let right: Vec<f32> = (0..3000).map(right).collect();
                assert!(down(buf) == right, "the root's result is wrong");
            }
        });
        nothing_left("all ranks have ended");
    }
}

/// What a child does. The first that goes wrong ends it: others may wait for what never comes.
fn be_child(name: &str, seed: u64) {
    std::panic::set_hook(Box::new(|info| {
        let what = info.to_string().replace('\n', " ");
        let _ = writeln!(std::io::stdout(), "\n@ {what}");
        std::process::exit(1);
    }));
    take_away(Wait::ALL.into_iter().find(|wait| format!("{wait:?}") == name));
    held::all();
    order(seed);
    collectives(seed);
    aborts(seed);
    late_readers(seed);
}

/// What came of a child: what went wrong, if something did.
fn wait_for(mut child: Child) -> Option<String> {
    let end = Instant::now() + LIMIT;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > end => break None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    if status.is_none() {
        let _ = child.kill();
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = text.lines().find_map(|line| line.strip_prefix("@ ")).map(str::to_owned);
    match status {
        Some(status) if status.success() => None,
        Some(status) => Some(said.unwrap_or_else(|| format!("it ended with {status}"))),
        None => Some(said.unwrap_or_else(|| "it hung".into())),
    }
}

#[test]
fn each_wait_is_missed() {
    if let Ok(task) = std::env::var(CHILD) {
        let (name, seed) = task.split_once(' ').unwrap();
        return be_child(name, seed.parse().unwrap());
    }
    let (begun, seeds, driver) = (Instant::now(), seeds(), library());
    // HAZARDS_ONLY=Ready: that one alone.
    let only = std::env::var("HAZARDS_ONLY").unwrap_or_default();
    let names = ["(none)".to_owned()].into_iter().chain(Wait::ALL.map(|wait| format!("{wait:?}")));
    let names: Vec<String> = names.filter(|name| only.is_empty() || *name == only).collect();
    let found = Mutex::new(Vec::<(&String, u64, Option<String>)>::new());
    let is_noticed = |name: &String| {
        let found = found.lock().unwrap();
        found.iter().any(|(other, _, problem)| *other == name && problem.is_some())
    };
    // In the core suite each is tried once, and again only where a hazard was not noticed.
    let rounds = if full() { vec![1..=seeds] } else { (1..=seeds).map(|seed| seed..=seed).collect() };
    for round in rounds {
        let is_over = |name: &String| is_noticed(name) || *round.start() > 1 && name == "(none)";
        let left = names.iter().filter(|name| !is_over(name));
        let tasks: VecDeque<_> = left.flat_map(|name| round.clone().map(move |seed| (name, seed))).collect();
        let tasks = Mutex::new(tasks);
        std::thread::scope(|scope| {
            for _ in 0..TOGETHER {
                scope.spawn(|| {
                    loop {
                        let Some((name, seed)) = tasks.lock().unwrap().pop_front() else { break };
                        let mut command = Command::new(std::env::current_exe().unwrap());
                        command.args([TEST, "--exact", "--nocapture", "--test-threads=1"]);
                        command.env(CHILD, format!("{name} {seed}"));
                        command.env("ALLSTREAM_CUDA_LIBRARY", driver).env("ALLSTREAM_TEST_CUDA_DEVICES", "3");
                        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
                        let problem = wait_for(command.spawn().unwrap());
                        found.lock().unwrap().push((name, seed, problem));
                    }
                });
            }
        });
    }
    let mut found = found.into_inner().unwrap();
    found.sort();
    say("| taken away | seeds | wrong | for instance |\n|---|---|---|---|");
    let mut unnoticed = Vec::new();
    for name in &names {
        let of: Vec<_> = found.iter().filter(|(other, ..)| *other == name).collect();
        let wrong: Vec<&String> = of.iter().filter_map(|(.., problem)| problem.as_ref()).collect();
        let first = wrong.first().map_or("", |problem| problem);
        say(&format!("| `{name}` | {} | {} | {first} |", of.len(), wrong.len()));
        if (name == "(none)") != wrong.is_empty() {
            unnoticed.push(name);
        }
    }
    tell_cases("hazards, each with its seeds", found.len());
    say(&format!("hazards: {:.0?}", begun.elapsed()));
    assert!(unnoticed.is_empty(), "not as it must be: {unnoticed:?}");
}

/// On stderr, also where the harness keeps what tests print.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
