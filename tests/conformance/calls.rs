//! Every collective by every algorithm, over every link, compared with a sequential reduction; and messages.
//!
//! By default the cases are chosen pairwise: for every two of the factors (collective and algorithm, form, world, length, element type,
//! reduction, root, data, how the end is awaited), each pair of values that can be combined occurs in some case. `ALLSTREAM_TEST_FULL=all`:
//! every form of every call in every world with every length, but with the largest only in a fifth of these. With the others, up to three
//! ranks also take every element type; three threads, over some links, every type with every reduction, or every root.
//! `ALLSTREAM_TEST_FULL=1`: a twentieth of most of that. A call that has no plan in a world is made there, too: it must be refused.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream::plan::{self, Shape, algorithms};
use allstream::{Algo, Comm, DType, Kind, ReduceOp};

use test_support::pairwise;

use crate::cases;
use crate::cases::{Await, Case, Combine, Form, Oracle, Seen, Talk, What, agree};
use crate::support;
use crate::support::host_label;
use crate::values::mix;

/// Time limit of one call.
const CALL: Duration = Duration::from_secs(30);
/// Time limit of all calls of one world.
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
    // Sixteen threads, and further numbers of processes, only with `ALLSTREAM_TEST_FULL=all`.
    let threads: &[usize] = if support::everything() { &[1, 2, 3, 4, 5, 8, 16] } else { &[1, 2, 3, 4, 5, 8] };
    for &n in threads {
        for link in ["local", "inproc", "shm", "tcp", "mixed"] {
            all.push(World { link, n, processes: false });
        }
        if [2, 3, 5].contains(&n) {
            all.push(World { link: "tcp6", n, processes: false });
        }
        // Example links that exist only in builds for tests.
        if cfg!(feature = "testing") && (2..=5).contains(&n) {
            all.extend(["pipe", "late"].map(|link| World { link, n, processes: false }));
        }
    }
    let processes: &[usize] = match (support::everything(), support::full()) {
        (true, _) => &[2, 3, 4, 5, 7, 8],
        (_, true) => &[2, 3, 5, 8],
        _ => &[2, 3, 8],
    };
    for &n in processes {
        all.extend(["shm", "tcp", "mixed"].map(|link| World { link, n, processes: true }));
        if n <= 3 {
            all.push(World { link: "rdma", n, processes: true });
        }
    }
    all
}

/// Every collective with each of its algorithms, and with the one that the engine chooses (`Algo::Auto`).
fn calls() -> Vec<(Kind, Algo)> {
    let of = |kind: Kind| algorithms(kind).iter().copied().chain([Algo::Auto]).map(move |algo| (kind, algo));
    Kind::ALL.into_iter().filter(|kind| !algorithms(*kind).is_empty()).flat_map(of).collect()
}

/// Whether this world has a plan for this call in this form.
fn suits((kind, algo): (Kind, Algo), form: Form, world: &World) -> bool {
    let hosts: Vec<u32> = (0..world.n)
        .map(|rank| u32::from(world.link == "mixed" && host_label(rank, world.n) == "b"))
        .collect();
    let (in_place, varied) = (form.in_place(kind), form.varies());
    let shape = |rank| Shape { n: world.n, rank, root: 0, in_place, varied, hosts: &hosts };
    algo == Algo::Auto || (0..world.n).all(|rank| plan::plan(kind, algo, &shape(rank)).is_ok())
}

const LENGTHS: usize = 7;
/// The index of the last length, which is longer than a round of slices.
const LARGE: usize = LENGTHS - 1;

fn length(kind: Kind, n: usize, which: usize) -> usize {
    // For collectives with a block for each rank, the length of one block. Between two ranks, rounds over TCP are longer.
    let large = match (kind.varies(), n) {
        (false, _) => 300_001,
        (true, 2) => 140_003,
        (true, _) => 70_001,
    };
    [0, 1, n - 1, n, n + 1, 1000, large][which]
}

fn root(n: usize, which: usize) -> usize {
    [0, n - 1, n / 2][which]
}

const ENDS: [Await; 3] = [Await::Wait, Await::Poll, Await::Later];

/// The values of each factor; a case names them by index.
struct Factors {
    worlds: Vec<World>,
    calls: Vec<(Kind, Algo)>,
    ops: Vec<Combine>,
    /// Whether there is a plan, by call, form and world.
    suits: Vec<Vec<Vec<bool>>>,
}

/// A case as indices: its call, form, world, length, type, reduction, root, data, and how its end is awaited.
type Row = [usize; 9];

impl Factors {
    fn new(worlds: &[World]) -> Factors {
        let calls = calls();
        let in_world = |call, form| worlds.iter().map(|world| suits(call, form, world)).collect();
        let of_call = |call| Form::ALL.iter().map(|form| in_world(call, *form)).collect();
        let suits = calls.iter().map(|call| of_call(*call)).collect();
        Factors { worlds: worlds.to_vec(), calls, ops: Combine::all(), suits }
    }

    fn sizes(&self) -> [usize; 9] {
        let (calls, worlds) = (self.calls.len(), self.worlds.len());
        [calls, Form::ALL.len(), worlds, LENGTHS, DType::ALL.len(), self.ops.len(), 3, 2, ENDS.len()]
    }

    /// Whether the values chosen so far (`None`: not chosen yet) can occur together in a case.
    fn allowed(&self, row: &[Option<usize>]) -> bool {
        let op = row[5].map(|op| self.ops[op]);
        if let (Some(dtype), Some(op)) = (row[4], op)
            && !op.supports(DType::ALL[dtype])
        {
            return false;
        }
        let any = |at: Option<usize>, of: usize| at.map_or(0..of, |at| at..at + 1);
        let there = |call: usize| {
            let (kind, algo) = self.calls[call];
            op.is_none_or(|op| {
                op.fits(kind) && op.goes_by(row[4].map(|dtype| DType::ALL[dtype]), (kind, algo))
            }) && any(row[1], Form::ALL.len()).any(|form| {
                Form::ALL[form].is_of(kind)
                    && any(row[2], self.worlds.len()).any(|world| self.suits[call][form][world])
            })
        };
        any(row[0], self.calls.len()).any(there)
    }

    fn case(&self, row: Row, seed: u64) -> Case {
        let [call, form, world, len, dtype, op, at, special, end] = row;
        let (n, (kind, algo)) = (self.worlds[world].n, self.calls[call]);
        Case {
            what: What::Collective(kind, algo, Form::ALL[form]),
            len: length(kind, n, len),
            dtype: DType::ALL[dtype],
            op: self.ops[op],
            root: root(n, at),
            special: special == 1,
            end: ENDS[end],
            seed: mix(&[world as u64, call as u64, form as u64, seed]),
            timeout: CALL,
            refused: false,
        }
    }
}

/// The cases of each world.
fn plan_cases(worlds: &[World]) -> Vec<Vec<Case>> {
    let factors = Factors::new(worlds);
    let mut all: Vec<Vec<Case>> = worlds.iter().map(|_| Vec::new()).collect();
    let mut add = |row: Row| {
        let of = &mut all[row[2]];
        of.push(factors.case(row, of.len() as u64));
    };
    let cost = |factor, value| u32::from(factor == 3 && value == LARGE);
    for row in pairwise::pairwise(&factors.sizes(), |row| factors.allowed(row), cost) {
        add(row.try_into().expect("nine factors"));
    }
    rounds(&factors, &mut add);
    if support::full() {
        full(&factors, &mut add);
    }
    for (w, world) in worlds.iter().enumerate() {
        refusals(&factors, w, &mut all[w]);
        if world.n > 1 {
            messages(world, w, &mut all[w]);
        }
    }
    all
}

/// Adds the calls that must be refused in world `w`, as they have no plan there, or none that keeps the order of ranks.
fn refusals(factors: &Factors, w: usize, cases: &mut Vec<Case>) {
    for (c, call) in factors.calls.iter().enumerate() {
        for (f, form) in Form::ALL.iter().enumerate().filter(|(_, form)| form.is_of(call.0)) {
            let suits = factors.suits[c][f][w];
            let op = factors.ops.iter().position(|op| *op == Combine::Maps && suits).unwrap_or(0);
            if !suits || (!factors.ops[op].goes_by(None, *call) && *form == Form::InPlace) {
                // (For bytes, the call's algorithm moves only the lengths, so only their plan counts here; the bytes choose their own algorithm.)
                let row = [c, f, w, 5, DType::I32 as usize, op, w % 3, 0, (c + w) % 3];
                cases.push(Case { refused: true, ..factors.case(row, 1) });
            }
        }
    }
}

fn messages(world: &World, w: usize, cases: &mut Vec<Case>) {
    for (t, talk) in [Talk::Shift, Talk::Batch, Talk::Queue, Talk::Both].into_iter().enumerate() {
        for (l, len) in [0, 1, 47, 1024, 1025, 100_001].into_iter().enumerate() {
            let turn = w * 5 + t * 3 + l;
            // By default only some of the long messages in each world.
            if l == 5 && !turn.is_multiple_of(10) && !support::full() || len * world.n > 1_000_000 {
                continue;
            }
            cases.push(Case {
                what: What::Messages(talk),
                len,
                dtype: DType::ALL[turn % DType::ALL.len()],
                op: Combine::Op(ReduceOp::Sum),
                root: 0,
                special: false,
                end: ENDS[turn % 2],
                seed: mix(&[turn as u64, 99]),
                timeout: CALL,
                refused: false,
            });
        }
    }
}

/// Cases that are several rounds long, for every plan in every form, between two ranks over TCP, where messages are sent whole.
fn rounds(factors: &Factors, add: &mut impl FnMut(Row)) {
    let dtype = DType::F64;
    let pairs =
        factors.worlds.iter().enumerate().filter(|(_, w)| w.n == 2 && w.link == "tcp" && !w.processes);
    for ((w, _), (c, call)) in pairs.flat_map(|pair| factors.calls.iter().enumerate().map(move |c| (pair, c)))
    {
        let fits = |op: &Combine| op.supports(dtype) && op.fits(call.0) && op.goes_by(Some(dtype), *call);
        let Some(op) = factors.ops.iter().position(fits).filter(|_| call.0 != Kind::Barrier) else {
            continue;
        };
        for (f, _) in
            Form::ALL.iter().enumerate().filter(|(f, form)| form.is_of(call.0) && factors.suits[c][*f][w])
        {
            add([c, f, w, LARGE, dtype as usize, op, (c + f) % 3, 0, f % ENDS.len()]);
        }
    }
}

/// All combinations, except of factors that do not influence each other; with `ALLSTREAM_TEST_FULL=1` a twentieth of them, spread evenly.
fn full(factors: &Factors, add: &mut impl FnMut(Row)) {
    let pick = |turn: usize, of: usize| (mix(&[turn as u64]) % of as u64) as usize;
    let mut turn = 0_usize;
    for (w, world) in factors.worlds.iter().enumerate() {
        // In these worlds: every element type with every reduction, and every root.
        let links: &[&str] = if support::everything() { &["local", "shm", "mixed"] } else { &["shm"] };
        let thorough = world.n == 3 && !world.processes && links.contains(&world.link);
        for (c, (kind, algo)) in factors.calls.iter().enumerate() {
            for (f, len) in (0..Form::ALL.len()).flat_map(|f| (0..LENGTHS).map(move |l| (f, l))) {
                if !Form::ALL[f].is_of(*kind) || !factors.suits[c][f][w] {
                    continue;
                }
                let fits = |dtype: usize, op: usize| {
                    let (op, dtype) = (factors.ops[op], DType::ALL[dtype]);
                    op.supports(dtype) && op.fits(*kind) && op.goes_by(Some(dtype), (*kind, *algo))
                };
                let ops = |dtype: usize| (0..factors.ops.len()).filter(move |op| fits(dtype, *op));
                let mut rest = |dtype: usize, op: usize, at: usize| {
                    turn += 1;
                    if !support::everything() && !turn.is_multiple_of(20) {
                        return;
                    }
                    add([c, f, w, len, dtype, op, at, pick(turn, 2), pick(turn + 7, ENDS.len())]);
                };
                let (dtype, types) =
                    (pick(w * 7919 + c * 31 + f * 5 + len, DType::ALL.len()), DType::ALL.len());
                if len == LARGE && (w + c + f) % 5 != 0 || *kind == Kind::Barrier && len > 0 {
                    continue;
                }
                if !thorough || len == LARGE || *kind == Kind::Barrier {
                    // One type, which differs from world to world; with `ALLSTREAM_TEST_FULL=all`, every type in worlds of up to
                    // three ranks. Each with one reduction that is defined on it.
                    let few = support::everything() && world.n <= 3 && len != LARGE && *kind != Kind::Barrier;
                    for t in if few { 0..types } else { dtype..dtype + 1 } {
                        let all: Vec<usize> = ops(t).collect();
                        rest(t, all[pick(w + c * 3 + f + len * 11 + t, all.len())], (w + len + t) % 3);
                    }
                } else if kind.reduces() {
                    (0..types).for_each(|t| ops(t).for_each(|op| rest(t, op, (t + op) % 3)));
                } else {
                    (0..types).for_each(|t| {
                        (0..3).filter(|at| *at == 0 || kind.rooted()).for_each(|at| rest(t, 0, at))
                    });
                }
            }
        }
    }
}

/// Runs all cases on one rank, and stops at the first that fails. `at` always holds the number of the current case.
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

/// Checks that no rank failed, and that in each case the ranks saw the same.
fn conclude(world: World, cases: &[Case], seen: Vec<Result<Vec<Seen>, String>>) -> Result<(), String> {
    let failed: Vec<&String> = seen.iter().filter_map(|s| s.as_ref().err()).collect();
    if !failed.is_empty() {
        return Err(format!("{world}:\n{}", failed.into_iter().cloned().collect::<Vec<_>>().join("\n")));
    }
    let seen: Vec<Vec<Seen>> = seen.into_iter().flatten().collect();
    for (i, case) in cases.iter().enumerate() {
        let of_case: Vec<Seen> = seen.iter().map(|s| s[i]).collect();
        agree(&of_case).map_err(|e| format!("{world}: case {i}, {case:?}: {e}"))?;
    }
    Ok(())
}

fn limit() -> Duration {
    if support::full() { FULL_WORLD } else { WORLD }
}

fn threads(world: World, cases: &[Case]) -> Result<(), String> {
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
    conclude(world, cases, seen.collect())
}

fn processes(world: World, index: usize, cases: &[Case]) -> Result<(), String> {
    let envs = |rank| {
        let mut envs = support::link_env(world.link, rank, world.n);
        envs.push(("CONFORMANCE_WORLD".into(), index.to_string()));
        envs
    };
    let ranks = support::spawn_ranks("calls::conformance", world.n, limit(), envs);
    let ended = ranks.wait(limit() + Duration::from_secs(5));
    let seen = ended.into_iter().map(|rank| {
        if !rank.success() {
            return Err(format!("rank {}: {:?}\n{}{}", rank.rank, rank.status, rank.stdout, rank.stderr));
        }
        let seen: Vec<Seen> = rank.stdout.lines().filter_map(|line| read(line.strip_prefix("@ ")?)).collect();
        let wanted = cases.len();
        if seen.len() == wanted { Ok(seen) } else { Err(format!("{} results of {wanted}", seen.len())) }
    });
    conclude(world, cases, seen.collect())
}

/// What a rank's process does.
fn be_rank(worlds: &[World]) {
    let index: usize = std::env::var("CONFORMANCE_WORLD").unwrap().parse().unwrap();
    let cases = plan_cases(worlds).swap_remove(index);
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

/// A single test, so that the number of cases printed at its end counts all of them. [`support::spawn_ranks`] runs this test as a rank, too.
#[test]
fn conformance() {
    let worlds = world_list();
    // Ranks that touch each other's memory fold large buffers in one step (loans), and write large results past the caches. In this test small
    // ones are treated like that as well, in every other operation.
    #[cfg(feature = "testing")]
    {
        allstream::testing::fold_small(true);
        allstream::testing::stream_small(true);
    }
    if support::role() {
        return be_rank(&worlds);
    }
    let begun = Instant::now();
    let all = plan_cases(&worlds);
    let ipv6 = support::has_ipv6();
    // CONFORMANCE_ONLY=tcp: only the worlds whose names contain `tcp`. CONFORMANCE_TIMES=1: prints how long each world took.
    let only = std::env::var("CONFORMANCE_ONLY").unwrap_or_default();
    let names: Vec<String> = worlds.iter().map(ToString::to_string).collect();
    assert!(names.iter().any(|name| name.contains(&only)), "CONFORMANCE_ONLY={only} names none of {names:?}");
    let times = std::env::var_os("CONFORMANCE_TIMES").is_some();
    let (mut tally, mut failed) = (Tally::default(), Vec::new());
    for (index, world) in worlds.iter().enumerate() {
        if !world.to_string().contains(&only) || world.link == "tcp6" && !ipv6 {
            continue;
        }
        let (cases, start) = (&all[index], Instant::now());
        let result = if world.processes { processes(*world, index, cases) } else { threads(*world, cases) };
        failed.extend(result.err());
        if times {
            say(&format!("{world}: {} cases, {:.1?}", cases.len(), start.elapsed()));
        }
        cases.iter().for_each(|case| tally.add(world, case));
    }
    #[cfg(feature = "testing")]
    {
        let is_piped = |world: &World| world.link == "pipe" && world.to_string().contains(&only);
        let all_came = allstream::testing::piped() > 1 << 20 || !worlds.iter().any(is_piped);
        assert!(all_came, "{} bytes came through pipes", allstream::testing::piped());
    }
    assert!(failed.is_empty(), "{} worlds failed:\n{}", failed.len(), failed.join("\n"));
    tally.say();
    assert!(tally.total > 0, "CONFORMANCE_ONLY={only}: this machine has no IPv6");
    support::tell_cases("the conformance of calls", tally.total);
    say(&format!("conformance: {} cases passed in {:.0?}", tally.total, begun.elapsed()));
}

/// How many cases there were for each value of each factor.
#[derive(Default)]
struct Tally {
    total: usize,
    calls: BTreeMap<String, BTreeMap<String, usize>>,
    /// For each factor, the number of cases with each of its values; both in the order of first use.
    by: Vec<(&'static str, Vec<(String, usize)>)>,
}

impl Tally {
    fn add(&mut self, world: &World, case: &Case) {
        self.total += 1;
        let of = if world.processes { "processes" } else { "threads" };
        self.count("link", &format!("{}/{of}", world.link));
        self.count("n", &world.n.to_string());
        let (call, how) = match case.what {
            What::Messages(talk) => ("messages".to_owned(), format!("{talk:?}").to_lowercase()),
            What::Collective(kind, _, _) if case.refused => (kind.to_string(), "(refused)".to_owned()),
            What::Collective(kind, algo, form) => {
                self.count("form", form.name());
                self.count("type", case.dtype.name());
                if kind.reduces() && kind != Kind::Barrier {
                    self.count("reduction", case.op.name());
                }
                (kind.to_string(), algo.to_string())
            }
        };
        *self.calls.entry(call).or_default().entry(how).or_insert(0) += 1;
    }

    fn count(&mut self, what: &'static str, value: &str) {
        if !self.by.iter().any(|(w, _)| *w == what) {
            self.by.push((what, Vec::new()));
        }
        for (_, values) in self.by.iter_mut().filter(|(w, _)| *w == what) {
            match values.iter_mut().find(|(v, _)| v == value) {
                Some((_, count)) => *count += 1,
                None => values.push((value.to_owned(), 1)),
            }
        }
    }

    fn say(&self) {
        for (call, of) in &self.calls {
            let sum: usize = of.values().sum();
            let of: Vec<String> = of.iter().map(|(algo, count)| format!("{algo} {count}")).collect();
            say(&format!("{call:>14} {sum:6}: {}", of.join(", ")));
        }
        for (what, values) in &self.by {
            let all: Vec<String> = values.iter().map(|(value, count)| format!("{value} {count}")).collect();
            say(&format!("{what:>14}       : {}", all.join(", ")));
        }
    }
}

/// Ranks of one host lend each other their buffers, one frame at a time, while data from another host arrives in smaller pieces. An in-place
/// step that reduces both has to wait until its own chunk has been sent everywhere. It must still release the lent frames whole.
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
            op: Combine::Op(ReduceOp::Sum),
            root: 0,
            special: false,
            end: Await::Wait,
            seed: call / 20,
            timeout: CALL,
            refused: false,
        };
        let cases: Vec<Case> = (0..40).map(one).collect();
        threads(World { link: "mixed", n, processes: false }, &cases).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Prints to stderr directly, so that it appears even if the test harness captures what tests print.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
