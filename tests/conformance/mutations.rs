//! The conformance test notices every plan that is broken on purpose, on every link.
//!
//! For each call at n = 3 and 4 and each mutation of one rank's plan: the mutation is planted, a new world makes the
//! call, and at least one rank must fail: by a wrong result, an error, a timeout or a panic. A planted mutation holds for the whole
//! process, so each process here runs one mutant after another; several processes share the work.
//!
//! By default a sample is run: on each link, a few mutants of each kind of mutation of each algorithm of each collective, always the
//! same ones. `ALLSTREAM_TEST_FULL=1`: a larger sample; `ALLSTREAM_TEST_FULL=all`: every mutant on every link.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use allstream::plan::mutate::{Mutation, mutations};
use allstream::plan::{Operand, Plan, Shape, algorithms, lending, plan};
use allstream::testing::{Broken, Planted, plant};
use allstream::{Algo, Comm, DType, Kind, ReduceOp};

use crate::cases;
use crate::cases::{Await, Case, Combine, Form, Oracle, Seen, What, agree};
use crate::support;
use crate::values::mix;

/// `mixed`: two hosts, for the algorithm that distinguishes hosts (`Algo::TwoLevel`).
const LINKS: [&str; 4] = ["local", "shm", "tcp", "mixed"];
/// By default, how many mutants are run on each link, for each collective, algorithm and kind of mutation.
const SAMPLE: usize = 2;
/// The same with `ALLSTREAM_TEST_FULL=1`. (`ALLSTREAM_TEST_FULL=all` runs all mutants.)
const LARGE_SAMPLE: usize = 8;
/// Time limit of a call, after which a mutant that hangs is caught.
const CALL: Duration = Duration::from_millis(400);
/// Time limit of a world with its call: longer than any takes.
const MUTANT: Duration = Duration::from_secs(20);
/// How many processes share the mutants. They sleep most of the time, as hanging mutants wait for their time limit.
const WORKERS: usize = 8;
/// Time limit of all mutants together.
const LIMIT: Duration = Duration::from_secs(400);
const FULL_LIMIT: Duration = Duration::from_secs(3600);

fn limit() -> Duration {
    if support::full() { FULL_LIMIT } else { LIMIT }
}

/// A call in a world of `n` ranks, and whose plan (`rank`, `which`) is to be broken.
#[derive(Clone, Copy, Debug)]
struct Site {
    kind: Kind,
    algo: Algo,
    n: usize,
    root: usize,
    in_place: bool,
    rank: usize,
    which: Broken,
}

#[derive(Clone, Copy, Debug)]
struct Mutant {
    site: Site,
    step: usize,
    mutation: Mutation,
}

impl std::fmt::Display for Mutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mutant { site: Site { kind, algo, n, root, in_place, rank, which }, step, mutation } = self;
        write!(
            f,
            "{kind} by {algo} ({which:?}), n {n}, root {root}, in place {in_place}: {mutation:?} of rank {rank}'s step \
             {step}"
        )
    }
}

fn sites() -> Vec<Site> {
    let mut all = Vec::new();
    for kind in Kind::ALL {
        for &algo in algorithms(kind) {
            for n in [3, 4] {
                let places: &[bool] = if kind == Kind::Barrier { &[true] } else { &[false, true] };
                for &in_place in places {
                    // With rank 1 as the root, a rank and its distance from the root differ.
                    let root = if kind.rooted() { 1 } else { 0 };
                    let site = |rank, which| Site { kind, algo, n, root, in_place, rank, which };
                    all.extend((0..n).map(|rank| site(rank, Broken::Steps)));
                    if lending(kind, algo, &Shape { n, ..Shape::default() }).is_some() {
                        all.extend((0..n).map(|rank| site(rank, Broken::Loans)));
                    }
                }
            }
        }
    }
    all
}

impl Site {
    /// Whether this site is tried over `link`. The two-level algorithm needs two hosts (`mixed`), and only it is tried there. Plans of loans
    /// need memory that can be lent, so they are not tried over TCP.
    fn is_for(&self, link: &str) -> bool {
        let lends = self.which == Broken::Steps || link != "tcp";
        (self.algo == Algo::TwoLevel) == (link == "mixed") && lends
    }

    fn plan(&self) -> Plan {
        let Site { kind, algo, n, root, in_place, rank, which } = *self;
        let two = |r| u32::from(algo == Algo::TwoLevel && support::host_label(r, n) == "b");
        let hosts: Vec<u32> = (0..n).map(two).collect();
        let shape = Shape { n, rank, root, in_place, hosts: &hosts, ..Shape::default() };
        match which {
            Broken::Steps => plan(kind, algo, &shape).expect("a plan"),
            Broken::Loans => lending(kind, algo, &shape).expect("a plan of loans"),
        }
    }
}

/// The mutants that are run over `link`: a sample, or with `ALLSTREAM_TEST_FULL=all` all of them.
fn mutants(link: &str) -> Vec<Mutant> {
    let of_site = |site: Site| {
        let (kind, right) = (site.kind, site.plan());
        let runs = |(step, mutation): &(usize, Mutation)| match mutation {
            Mutation::DropOperand(k) => {
                let operands = &right.steps[*step].operands;
                // A step without operands cannot be run: the kernels refuse it by a panic. And nobody looks at the value of a
                // barrier's token: a rank that leaves out its own operand still waits for the others and sends to them.
                // (The plan checker notices both.)
                operands.len() > 1 && (kind != Kind::Barrier || matches!(operands[*k], Operand::Recv(_)))
            }
            // Only an average looks at `finish`, and a barrier's token is never averaged.
            Mutation::FlipFinish => kind != Kind::Barrier,
            _ => true,
        };
        let all: Vec<_> = mutations(kind, &right).into_iter().filter(runs).collect();
        all.into_iter().map(move |(step, mutation)| Mutant { site, step, mutation })
    };
    let all: Vec<Mutant> = sites().into_iter().filter(|site| site.is_for(link)).flat_map(of_site).collect();
    if support::everything() {
        return all;
    }
    let sample = if support::full() { LARGE_SAMPLE } else { SAMPLE };
    // Each link gets a different sample.
    let salt = link.bytes().map(u64::from).sum();
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|i| mix(&[*i as u64, salt]));
    let mut taken = BTreeMap::<String, usize>::new();
    order.retain(|i| {
        let Mutant { site, mutation, .. } = &all[*i];
        let way = format!("{mutation:?}");
        let way = way.split('(').next().unwrap_or_default();
        let count = taken.entry(format!("{} {} {:?} {way}", site.kind, site.algo, site.which)).or_insert(0);
        *count += 1;
        *count <= sample
    });
    order.into_iter().map(|i| all[i]).collect()
}

/// How a mutant was noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Caught {
    Wrong,
    Error,
    Timeout,
    Panic,
}

/// The call of a site. The lengths divide into equal chunks, so that a mutant that uses a wrong chunk stays inside its buffers.
fn case(site: &Site, attempt: u64) -> Case {
    let form = if site.in_place { Form::InPlace } else { Form::Into };
    Case {
        what: What::Collective(site.kind, site.algo, form),
        len: if attempt.is_multiple_of(2) { 24 } else { 120_000 },
        dtype: DType::F32,
        // Only an average shows an inverted `finish`. (A scan cannot average.)
        op: [ReduceOp::Avg, ReduceOp::Sum]
            .map(Combine::Op)
            .into_iter()
            .find(|op| op.fits(site.kind))
            .expect("a sum"),
        root: site.root,
        // In a barrier: makes one rank come so late that another's early leaving shows.
        special: site.kind == Kind::Barrier,
        end: Await::Wait,
        // In a barrier the late rank is `seed % n`: successive attempts make each rank late in turn.
        seed: mix(&[attempt]) / site.n as u64 * site.n as u64 + attempt % site.n as u64,
        timeout: CALL,
        refused: false,
    }
}

/// Makes the call in a new world. Returns how a rank noticed the mutant, or `None` if none did.
fn call(site: &Site, link: &str, attempt: u64) -> Option<(Caught, String)> {
    let comms = support::worlds(site.n, link);
    let (case, oracle) = (case(site, attempt), Arc::new(Oracle::new(1, site.n)));
    let one = move |rank: usize, mut comm: Comm| {
        let result = cases::run(&mut comm, &case, &oracle, 0);
        if result.is_err() {
            // The mutant is noticed: the other ranks need not wait any longer.
            comm.abort(format!("rank {rank} noticed"));
        }
        result
    };
    let results = support::on_threads(comms, MUTANT, one);
    let mut seen: Vec<Seen> = Vec::new();
    let mut caught = Vec::new();
    for result in results {
        match result {
            Ok(Ok(what)) => seen.push(what),
            Ok(Err(problem)) if problem.contains("expected") && problem.contains("wrong") => {
                caught.push((Caught::Wrong, problem));
            }
            Ok(Err(problem)) if problem.contains("timed out") => caught.push((Caught::Timeout, problem)),
            Ok(Err(problem)) if problem.contains("noticed") => {}
            Ok(Err(problem)) => caught.push((Caught::Error, problem)),
            Err(problem) => caught.push((Caught::Panic, problem)),
        }
    }
    if seen.len() == site.n {
        caught.extend(agree(&seen).err().map(|problem| (Caught::Wrong, problem)));
    }
    caught.sort();
    caught.into_iter().next()
}

/// Whether the mutant is noticed. For a barrier each rank is made late three times, as the timing may hide a rank that left too early.
fn try_mutant(mutant: &Mutant, link: &str) -> Option<(Caught, String)> {
    let attempts = if mutant.site.kind == Kind::Barrier { 3 * mutant.site.n as u64 } else { 2 };
    let Mutant { site: Site { kind, rank, which: plan, .. }, step, mutation } = *mutant;
    plant(Some(Planted { kind, rank, plan, step, mutation }));
    let caught = (0..attempts).find_map(|attempt| call(&mutant.site, link, attempt));
    plant(None);
    caught
}

/// What one of the processes does: it runs its share of the mutants of each link, and prints a line for each.
fn be_worker(me: usize) {
    for link in LINKS {
        let all = mutants(link);
        let mine = all.iter().enumerate().filter(|(i, _)| i % WORKERS == me);
        for (i, mutant) in mine {
            let begun = Instant::now();
            let line = match try_mutant(mutant, link) {
                Some((how, problem)) => {
                    format!("@ {link} {how:?} {i} {} ms: {mutant}: {problem}", begun.elapsed().as_millis())
                }
                None => format!("@ {link} Survived {i} {mutant}"),
            };
            writeln!(std::io::stdout(), "\n{}", line.replace('\n', " ")).expect("a line written");
        }
    }
}

/// Plans that are not broken pass the same calls within the same time limit.
#[test]
fn nothing_planted_nothing_noticed() {
    if support::role() {
        return;
    }
    let attempts = if support::everything() { 2 } else { 1 };
    for link in LINKS {
        for site in sites().iter().filter(|site| site.rank == 0 && site.is_for(link)) {
            for attempt in 0..attempts {
                // (A call that fails is made again, as the limit of 400 ms is short on a busy machine.)
                let noticed = call(site, link, attempt).and_then(|_| call(site, link, attempt));
                assert_eq!(noticed, None, "{link}: {site:?}");
            }
        }
    }
}

#[test]
fn every_mutant_is_noticed() {
    if support::role() {
        let me = std::env::var("RANK").expect("a rank").parse().expect("a number");
        return be_worker(me);
    }
    let begun = Instant::now();
    let workers =
        support::spawn_ranks("mutations::every_mutant_is_noticed", WORKERS, limit(), |_| Vec::new());
    let mut table = BTreeMap::<&str, BTreeMap<String, usize>>::new();
    let mut survivors = Vec::new();
    for worker in workers.wait(limit() + Duration::from_secs(5)) {
        assert!(
            worker.success(),
            "worker {}: {:?}\n{}{}",
            worker.rank,
            worker.status,
            worker.stdout,
            worker.stderr
        );
        for line in worker.stdout.lines().filter_map(|line| line.strip_prefix("@ ")) {
            let mut words = line.split(' ');
            let (link, how) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let link = LINKS.into_iter().find(|l| *l == link).expect("a link");
            *table.entry(link).or_default().entry(how.into()).or_insert(0) += 1;
            if how == "Survived" {
                survivors.push(line.to_owned());
            }
            if std::env::var_os("MUTATIONS_LINES").is_some() {
                say(line);
            }
        }
    }
    let all: usize = table.values().flat_map(|row| row.values()).sum();
    let which =
        if support::everything() { "all there are" } else { "a sample; ALLSTREAM_TEST_FULL=all runs all" };
    support::tell_cases("mutants of plans", all);
    say(&format!("mutations: {all} mutants ({which}), {:.0?}", begun.elapsed()));
    say("link    run  caught  wrong result  error  timeout  panic");
    for (link, row) in &table {
        let of = |how: &str| row.get(how).copied().unwrap_or(0);
        let run: usize = row.values().sum();
        say(&format!(
            "{link:5} {run:5} {:7} {:13} {:6} {:8} {:6}",
            run - of("Survived"),
            of("Wrong"),
            of("Error"),
            of("Timeout"),
            of("Panic")
        ));
    }
    assert!(survivors.is_empty(), "{} survive:\n{}", survivors.len(), survivors.join("\n"));
    assert_eq!(table.len(), LINKS.len(), "every link: {table:?}");
}

/// Prints to stderr directly, so that it appears even if the test harness captures what tests print.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
