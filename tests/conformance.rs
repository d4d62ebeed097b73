//! Every collective by every algorithm, over every link, against a sequential reduction; and messages.
//!
//! By default pairwise: every two of (call, world, length, element type, reduction, root, data, how it is awaited)
//! come together in a case. `ALLSTREAM_TEST_FULL=1`: every call in every world with every length and element type, and
//! in small worlds also with every reduction and root.

#[path = "support/cases.rs"]
mod cases;
#[path = "support/pairwise.rs"]
mod pairwise;
mod support;
#[path = "support/values.rs"]
mod values;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream::plan::algorithms;
use allstream::{Algo, Comm, DType, Kind, ReduceOp};

use cases::{Await, Case, Form, Oracle, Seen, Talk, What, agree};
use values::mix;

/// For one call.
const CALL: Duration = Duration::from_secs(30);
/// For all calls of one world.
const WORLD: Duration = Duration::from_secs(150);
const FULL_WORLD: Duration = Duration::from_secs(900);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct World {
    link: &'static str,
    n: usize,
    processes: bool,
}

impl std::fmt::Display for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = if self.processes { "processes" } else { "threads" };
        write!(f, "{} x {} {of}", self.link, self.n)
    }
}

fn world_list() -> Vec<World> {
    let mut all = Vec::new();
    for n in [1, 2, 3, 4, 5, 8, 16] {
        for link in ["local", "inproc", "shm", "tcp", "mixed"] {
            all.push(World { link, n, processes: false });
        }
        if [2, 3, 5].contains(&n) {
            all.push(World { link: "tcp6", n, processes: false });
        }
    }
    for n in [2, 3, 4, 5, 7, 8] {
        all.extend(["shm", "tcp", "mixed"].map(|link| World { link, n, processes: true }));
    }
    all
}

/// Every form of every collective by every algorithm.
fn calls() -> Vec<(Kind, Algo, Form)> {
    let mut all = Vec::new();
    for kind in Kind::ALL {
        let forms: &[Form] = match kind {
            Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter => {
                &[Form::InPlace, Form::Into, Form::New]
            }
            Kind::Broadcast | Kind::Reduce => &[Form::InPlace, Form::Into],
            Kind::Barrier => &[Form::InPlace],
        };
        for algo in algorithms(kind).iter().copied().chain([Algo::Auto]) {
            all.extend(forms.iter().map(|form| (kind, algo, *form)));
        }
    }
    all
}

const LENGTHS: usize = 7;
/// More than a round of slices; the last of the lengths.
const LARGE: usize = LENGTHS - 1;

fn length(kind: Kind, n: usize, which: usize) -> usize {
    let blocks = matches!(kind, Kind::AllGather | Kind::ReduceScatter);
    [0, 1, n - 1, n, n + 1, 1000, if blocks { 70_001 } else { 300_001 }][which]
}

fn root(n: usize, which: usize) -> usize {
    [0, n - 1, n / 2][which]
}

const ENDS: [Await; 3] = [Await::Wait, Await::Poll, Await::Later];

/// The cases of each world.
fn plan(worlds: &[World]) -> Vec<Vec<Case>> {
    let calls = calls();
    let mut all: Vec<Vec<Case>> = worlds.iter().map(|_| Vec::new()).collect();
    let mut add = |world: usize, row: [usize; 7]| {
        let [call, len, dtype, op, at, special, end] = row;
        let (n, (kind, algo, form)) = (worlds[world].n, calls[call]);
        let seed = mix(&[world as u64, call as u64, all[world].len() as u64]);
        all[world].push(Case {
            what: What::Collective(kind, algo, form),
            len: length(kind, n, len),
            dtype: DType::ALL[dtype],
            op: ReduceOp::ALL[op],
            root: root(n, at),
            special: special == 1,
            end: ENDS[end],
            seed,
            timeout: CALL,
        });
    };
    let supported = |dtype: usize, op: usize| ReduceOp::ALL[op].supports(DType::ALL[dtype]);
    let sizes = [calls.len(), worlds.len(), LENGTHS, DType::ALL.len(), ReduceOp::ALL.len(), 3, 2, ENDS.len()];
    let allowed = |row: &[Option<usize>]| match (row[3], row[4]) {
        (Some(dtype), Some(op)) => supported(dtype, op),
        _ => true,
    };
    let cost = |factor, value| u32::from(factor == 2 && value == LARGE);
    for row in pairwise::pairwise(&sizes, allowed, cost) {
        add(row[1], [row[0], row[2], row[3], row[4], row[5], row[6], row[7]]);
    }
    if support::full() {
        full(worlds, &calls, supported, &mut add);
    }
    for (w, world) in worlds.iter().enumerate().filter(|(_, w)| w.n > 1) {
        for (t, talk) in [Talk::Shift, Talk::Batch, Talk::Queue].into_iter().enumerate() {
            for (l, len) in [0, 1, 47, 1024, 1025, 100_001].into_iter().enumerate() {
                let turn = w * 5 + t * 3 + l;
                // The long ones in every third world.
                if l == 5 && turn % 3 != 0 && !support::full() || len * world.n > 1_000_000 {
                    continue;
                }
                all[w].push(Case {
                    what: What::Messages(talk),
                    len,
                    dtype: DType::ALL[turn % DType::ALL.len()],
                    op: ReduceOp::Sum,
                    root: 0,
                    special: false,
                    end: ENDS[turn % 2],
                    seed: mix(&[turn as u64, 99]),
                    timeout: CALL,
                });
            }
        }
    }
    all
}

/// Everything, but for the factors that could not matter together.
fn full(
    worlds: &[World],
    calls: &[(Kind, Algo, Form)],
    supported: impl Fn(usize, usize) -> bool,
    add: &mut impl FnMut(usize, [usize; 7]),
) {
    let pick = |turn: u64, of: usize| (mix(&[turn]) % of as u64) as usize;
    let mut turn = 0;
    for (w, world) in worlds.iter().enumerate() {
        let thorough = matches!(world.n, 3 | 4) && !world.processes && world.link != "inproc";
        for (c, (kind, ..)) in calls.iter().enumerate() {
            for (len, dtype) in (0..LENGTHS).flat_map(|l| (0..DType::ALL.len()).map(move |d| (l, d))) {
                turn += 1;
                let mut rest =
                    |op, at| add(w, [c, len, dtype, op, at, pick(turn, 2), pick(turn + 7, ENDS.len())]);
                if len == LARGE {
                    // Each call with one type, another one in each world.
                    if dtype == (w + c) % DType::ALL.len() {
                        rest(usize::from(c % 2 == 0) * 3, w % 3);
                    }
                    continue;
                }
                let ops: Vec<usize> = (0..ReduceOp::ALL.len()).filter(|op| supported(dtype, *op)).collect();
                if *kind == Kind::Barrier {
                    if dtype == 0 {
                        rest(0, 0);
                    }
                } else if thorough && kind.reduces() {
                    ops.iter().for_each(|op| rest(*op, (turn % 3) as usize));
                } else if thorough && kind.rooted() {
                    (0..3).for_each(|at| rest(ops[0], at));
                } else {
                    rest(ops[pick(turn, ops.len())], (turn % 3) as usize);
                }
            }
        }
    }
}

/// Runs all cases on one rank; stops at the first that fails.
fn run_all(comm: &mut Comm, cases: &[Case], oracle: &Oracle, at: &AtomicUsize) -> Result<Vec<Seen>, String> {
    let rank = comm.rank();
    let mut seen = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        at.store(i, Ordering::Relaxed);
        seen.push(
            cases::run(comm, case, oracle, i).map_err(|e| format!("rank {rank}: case {i}, {case:?}: {e}"))?,
        );
    }
    Ok(seen)
}

/// What the ranks saw must agree, case by case.
fn conclude(world: World, cases: &[Case], seen: Vec<Result<Vec<Seen>, String>>) {
    let failed: Vec<&String> = seen.iter().filter_map(|s| s.as_ref().err()).collect();
    assert!(failed.is_empty(), "{world}:\n{}", failed.into_iter().cloned().collect::<Vec<_>>().join("\n"));
    let seen: Vec<Vec<Seen>> = seen.into_iter().flatten().collect();
    for (i, case) in cases.iter().enumerate() {
        let of_case: Vec<Seen> = seen.iter().map(|s| s[i]).collect();
        agree(&of_case).unwrap_or_else(|e| panic!("{world}: case {i}, {case:?}: {e}"));
    }
}

fn limit() -> Duration {
    if support::full() { FULL_WORLD } else { WORLD }
}

fn threads(world: World, cases: &[Case]) {
    let comms = support::worlds(world.n, world.link);
    let at: Arc<Vec<AtomicUsize>> = Arc::new((0..world.n).map(|_| AtomicUsize::new(0)).collect());
    let (shared, oracle) = (Arc::new(cases.to_vec()), Arc::new(Oracle::new(cases.len(), world.n)));
    let seen = {
        let at = at.clone();
        support::on_threads(comms, limit(), move |rank, mut comm| {
            let seen = run_all(&mut comm, &shared, &oracle, &at[rank])?;
            support::close(comm)?;
            Ok(seen)
        })
    };
    let where_each = || at.iter().map(|a| a.load(Ordering::Relaxed)).collect::<Vec<_>>();
    let seen = seen.into_iter().map(|s: Result<Result<_, String>, String>| {
        s.unwrap_or_else(|e| Err(format!("{e}; the ranks were at cases {:?}", where_each())))
    });
    conclude(world, cases, seen.collect());
}

fn processes(world: World, index: usize, cases: &[Case]) {
    let envs = |rank| {
        let mut envs = support::link_env(world.link, rank, world.n);
        envs.push(("CONFORMANCE_WORLD".into(), index.to_string()));
        envs
    };
    let ranks = support::spawn_ranks("conformance", world.n, limit(), envs);
    let ended = ranks.wait(limit() + Duration::from_secs(5));
    let seen = ended.into_iter().map(|rank| {
        if !rank.success() {
            return Err(format!("rank {}: {:?}\n{}{}", rank.rank, rank.status, rank.stdout, rank.stderr));
        }
        let seen: Vec<Seen> = rank.stdout.lines().filter_map(|line| read(line.strip_prefix("@ ")?)).collect();
        let wanted = cases.len();
        if seen.len() == wanted { Ok(seen) } else { Err(format!("{} results of {wanted}", seen.len())) }
    });
    conclude(world, cases, seen.collect());
}

/// What a rank's process does.
fn be_rank(worlds: &[World]) {
    let index: usize = std::env::var("CONFORMANCE_WORLD").unwrap().parse().unwrap();
    let cases = plan(worlds).swap_remove(index);
    let mut comm = support::join();
    let seen = run_all(&mut comm, &cases, &Oracle::new(cases.len(), 1), &AtomicUsize::new(0));
    let seen = seen.unwrap_or_else(|e| panic!("{e}"));
    support::close(comm).unwrap();
    let mut text = String::from("\n");
    for seen in seen {
        text += &match seen {
            Seen::Hash(h) => format!("@ hash {h}\n"),
            Seen::Stay(enter, leave) => format!("@ stay {enter} {leave}\n"),
            Seen::Nothing => "@ nothing\n".into(),
        };
    }
    std::io::stdout().write_all(text.as_bytes()).unwrap();
}

fn read(line: &str) -> Option<Seen> {
    let mut words = line.split(' ');
    let word = words.next()?;
    let mut number = || words.next()?.parse().ok();
    Some(match word {
        "hash" => Seen::Hash(number()?),
        "stay" => Seen::Stay(number()?, number()?),
        _ => Seen::Nothing,
    })
}

/// The one test, so that the number at its end is of all; [`support::spawn_ranks`] runs it as a rank, too.
#[test]
fn conformance() {
    let worlds = world_list();
    if support::role() {
        return be_rank(&worlds);
    }
    let begun = Instant::now();
    let all = plan(&worlds);
    let ipv6 = support::has_ipv6();
    // CONFORMANCE_ONLY=tcp: only these links. CONFORMANCE_TIMES=1: how long each world took.
    let only = std::env::var("CONFORMANCE_ONLY").unwrap_or_default();
    let times = std::env::var_os("CONFORMANCE_TIMES").is_some();
    let (mut total, mut links) = (0, BTreeMap::<String, (usize, usize)>::new());
    for (index, world) in worlds.iter().enumerate() {
        if !world.to_string().contains(&only) || world.link == "tcp6" && !ipv6 {
            continue;
        }
        let (cases, start) = (&all[index], Instant::now());
        if world.processes {
            processes(*world, index, cases);
        } else {
            threads(*world, cases);
        }
        if times {
            say(&format!("{world}: {} cases, {:.1?}", cases.len(), start.elapsed()));
        }
        total += cases.len();
        let of = if world.processes { "processes" } else { "threads" };
        let link = links.entry(format!("{}/{of}", world.link)).or_default();
        *link = (link.0 + cases.len(), link.1.max(world.n));
    }
    let links: Vec<String> =
        links.iter().map(|(link, (count, n))| format!("{link} to n={n}: {count}")).collect();
    let links = links.join(", ");
    say(&format!("conformance: {total} cases ({links}) passed in {:.0?}", begun.elapsed()));
}

/// Ranks of one host lend each other their buffers, frame by frame, while what comes from another host comes in parts:
/// a reduction of both that waits for its place (in place, and all send from there) must give back whole frames.
#[test]
fn parts_from_afar_do_not_keep_what_neighbours_lent() {
    if support::role() {
        return;
    }
    for n in [3, 4, 5] {
        let one = |call: u64| Case {
            what: What::Collective(
                Kind::AllReduce,
                [Algo::OneShot, Algo::RecursiveDoubling][call as usize / 5 % 2],
                Form::InPlace,
            ),
            len: 300_001,
            dtype: DType::U8,
            op: ReduceOp::Sum,
            root: 0,
            special: false,
            end: Await::Wait,
            seed: call / 20,
            timeout: CALL,
        };
        let cases: Vec<Case> = (0..40).map(one).collect();
        threads(World { link: "mixed", n, processes: false }, &cases);
    }
}

/// On stderr, also where the harness keeps what tests print.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
