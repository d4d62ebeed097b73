//! Conformance on one CUDA device: every collective on device buffers by 1, 2, 4 and 8 ranks that share it, as threads
//! of one process and as processes, against the oracle of `tests/conformance/calls.rs`. And messages. Ranks are bound to the
//! device, and must then reach each other's memory there; once they are not, so that the host stages everything.
//!
//! A case whose values are wrong does not end its world: at the end the test says how many were wrong, on which ranks, and shows the
//! first. An operation that fails does end it (`account.rs`).
//!
//! By default on the driver for tests (`tests/cuda-driver`), which interprets kernels: sizes are small.
//! `ALLSTREAM_TEST_DRIVER=real` takes the driver that the machine has, with sizes up to some megabytes;
//! `ALLSTREAM_TEST_DRIVER=rehearsal` takes it likewise, with the small sizes. `cargo xtask gpu-pack` packs this program.
//!
//! `short_threads` and `short_processes` try every seventh case, at the small sizes, on any driver. `nccl_one` and `nccl_two`, which must be
//! asked for, go by the NCCL that `ALLSTREAM_NCCL_LIBRARY` names.

mod account;
mod choice;
#[cfg(feature = "cudarc")]
mod cudarc;
mod driver;
mod proof;
mod ranks;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use allstream::Comm;

use cases::{Case, Oracle};
use test_support as support;
use test_support::{cases, values};

use account::{Account, Note, judge};
use choice::Bound;
use driver::Driver;

/// For all cases of one world.
const WORLD: Duration = Duration::from_secs(120);
const LARGE_WORLD: Duration = Duration::from_secs(400);
/// Of a short run, so many cases are left out for one that is tried.
const STEP: usize = 7;

fn limit() -> Duration {
    if Driver::chosen().large() { LARGE_WORLD } else { WORLD }
}

/// Where the ranks of a world are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Live {
    Threads,
    Processes,
}

#[derive(Clone, Copy)]
struct World {
    live: Live,
    n: usize,
    bound: Bound,
    /// Every seventh case, of the small ones.
    short: bool,
}

impl World {
    const fn of(live: Live, n: usize) -> World {
        World { live, n, bound: Bound::Peer, short: false }
    }

    fn cases(self) -> Vec<Case> {
        if self.short {
            return choice::cases(self.n, &Driver::Rehearsal, self.bound).into_iter().step_by(STEP).collect();
        }
        choice::cases(self.n, &Driver::chosen(), self.bound)
    }

    /// Plays the world: in other processes, for a driver is chosen once for a process. They are this same program, in which the test
    /// `name` comes here, too: nothing is judged there.
    fn play(self, name: &str, more: &[(&str, &str)]) -> Option<Result<(), String>> {
        if support::role() {
            match self.live {
                Live::Threads => self.be_threads(),
                Live::Processes => self.be_rank(),
            }
            return None;
        }
        let processes = if self.live == Live::Threads { 1 } else { self.n };
        let mut envs = Driver::chosen().variables(self.bound);
        envs.extend(more.iter().map(|(name, value)| (name.to_string(), value.to_string())));
        let ranks = support::spawn_ranks(name, processes, limit(), |_| envs.clone());
        let (mut accounts, mut troubles) = (vec![Account::default(); self.n], Vec::new());
        for process in ranks.wait(limit() + Duration::from_secs(5)) {
            let (told, rest): (Vec<&str>, Vec<&str>) =
                process.stdout.lines().partition(|line| line.starts_with("@ "));
            for (rank, note) in told.into_iter().filter_map(Note::read) {
                accounts[rank].notes.push(note);
            }
            if !process.success() {
                let how = process.status.map_or("was not done in time".into(), |status| status.to_string());
                let said = format!("{}\n{}", rest.join("\n"), process.stderr);
                troubles.push(format!("{name}, process {}: {how}\n{said}", process.rank));
            }
        }
        let judged = judge(&self.cases(), &accounts);
        let problems = judged.err().into_iter().chain(troubles).collect::<Vec<_>>();
        Some(if problems.is_empty() { Ok(()) } else { Err(problems.join("\n")) })
    }

    /// In this process: all ranks, as threads.
    fn be_threads(self) {
        // (libtest has begun a line.)
        println!();
        let tell = |rank: usize, note: Note| note.print(rank);
        self.run_threads(tell);
        ranks::settle();
    }

    fn run_threads(self, tell: impl Fn(usize, Note) + Send + Sync + 'static) {
        let cases = Arc::new(self.cases());
        let (oracle, tell) = (Oracle::new(cases.len(), self.n), Arc::new(tell));
        let (comms, told) = (Comm::local(self.n).unwrap(), tell.clone());
        let ended = support::on_threads(comms, limit(), move |rank, comm| {
            ranks::run(comm, self.bound, &cases, &oracle, &|note| told(rank, note));
        });
        for (rank, ended) in ended.into_iter().enumerate() {
            if let Err(error) = ended {
                tell(rank, Note::Ended(error));
            }
        }
    }

    /// In this process: one rank of several.
    fn be_rank(self) {
        let comm = support::join();
        let (rank, cases) = (comm.rank(), self.cases());
        println!();
        ranks::run(comm, self.bound, &cases, &Oracle::new(cases.len(), 1), &|note| note.print(rank));
        ranks::settle();
    }
}

fn passes(name: &str, world: World) {
    world.play(name, &[]).unwrap_or(Ok(())).unwrap_or_else(|problems| panic!("{problems}"));
}

fn threads(name: &str, n: usize) {
    passes(name, World::of(Live::Threads, n));
}

fn staged(name: &str, n: usize) {
    passes(name, World { bound: Bound::No, ..World::of(Live::Threads, n) });
}

fn processes(name: &str, n: usize) {
    passes(name, World::of(Live::Processes, n));
}

fn short_of_threads(name: &str, n: usize) {
    passes(name, World { short: true, ..World::of(Live::Threads, n) });
}

fn short_of_processes(name: &str, n: usize) {
    passes(name, World { short: true, ..World::of(Live::Processes, n) });
}

fn nccl(name: &str, n: usize) {
    passes(name, World { bound: Bound::Nccl, ..World::of(Live::Processes, n) });
}

macro_rules! worlds {
    ($($(#[$attribute:meta])* $name:ident: $how:ident $n:literal;)*) => {$(
        #[test]
        $(#[$attribute])*
        fn $name() {
            $how(stringify!($name), $n);
        }
    )*};
}

worlds! {
    one_thread: threads 1;
    two_threads: threads 2;
    four_threads: threads 4;
    eight_threads: threads 8;
    three_threads_staged: staged 3;
    one_process: processes 1;
    two_processes: processes 2;
    four_processes: processes 4;
    eight_processes: processes 8;
    short_threads: short_of_threads 2;
    short_processes: short_of_processes 2;
    #[ignore = "for a machine with NCCL: the file is named by ALLSTREAM_NCCL_LIBRARY"]
    nccl_one: nccl 1;
    #[ignore = "for a machine with NCCL 2.30 or newer, which takes two ranks on one device"]
    nccl_two: nccl 2;
}

/// A short run, for tools that make everything slow: two ranks, threads of this very process.
#[test]
#[ignore = "for tools that watch one process: run with the driver in ALLSTREAM_CUDA_LIBRARY, or where there is one"]
fn short() {
    let world = World { short: true, ..World::of(Live::Threads, 2) };
    let accounts = Arc::new(Mutex::new(vec![Account::default(); 2]));
    let kept = accounts.clone();
    world.run_threads(move |rank, note| kept.lock().unwrap()[rank].notes.push(note));
    ranks::settle();
    let accounts = accounts.lock().unwrap();
    judge(&world.cases(), &accounts).unwrap_or_else(|problems| panic!("{problems}"));
}
