//! Every collective by every algorithm on bound devices: bit for bit what the same call gives on host buffers.
//!
//! (`tests/conformance/calls.rs` checks the results on host buffers.) By default the cases are pairwise: any two values of (collective and
//! algorithm, form, world, length, element type, reduction, root, data) that fit together occur in one case.
//! `ALLSTREAM_TEST_FULL=1` adds one in 24 of all combinations of call, form, world and length, and for three ranks on two
//! devices one in six of all combinations of call, form, element type and reduction (`=all`: all combinations).

use std::marker::PhantomData;
use std::time::{Duration, Instant};

#[cfg(feature = "testing")]
use allstream::ReduceOp;
use allstream::cuda::{Device, DevicePath, DeviceStream};
use allstream::plan::{self, Shape, algorithms};
use allstream::{Algo, Call, Comm, DType, Kind};
use futures::executor::block_on;
use test_support::{everything, tell_cases};

use crate::combine::{Combine, counts};
use crate::pairwise::pairwise;
use crate::support::{calls, child_within, down, full, nothing_left, ranks, report, up};
use crate::values::{Value, mix, typed};

/// Time limit of one call.
const CALL: Duration = Duration::from_secs(30);
const ALL: Duration = Duration::from_secs(240);
const FULL: Duration = Duration::from_secs(1200);

/// Ranks, and the devices that they share out among them.
const WORLDS: [(usize, usize); 10] =
    [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 3), (5, 2), (6, 3), (7, 1), (8, 3)];
/// Index of the world that tries every element type with every reduction, if all tests are run.
const THOROUGH: usize = 4;

/// The form of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    InPlace,
    Into,
    /// `InPlace` with a count for each rank. `IntoV` is `Into` with such counts.
    InPlaceV,
    IntoV,
    List,
}

impl Form {
    const ALL: [Form; 5] = [Form::InPlace, Form::Into, Form::InPlaceV, Form::IntoV, Form::List];

    fn is_of(self, kind: Kind) -> bool {
        match self {
            Form::InPlace | Form::Into => true,
            Form::InPlaceV => matches!(kind, Kind::AllGather | Kind::ReduceScatter),
            Form::IntoV => kind.varies(),
            Form::List => matches!(
                kind,
                Kind::AllReduce | Kind::Broadcast | Kind::Reduce | Kind::AllGather | Kind::ReduceScatter
            ),
        }
    }

    /// Whether the plan of a call in this form works in place.
    fn in_place(self, kind: Kind) -> bool {
        match self {
            Form::List => matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce),
            form => matches!(form, Form::InPlace | Form::InPlaceV),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    kind: Kind,
    algo: Algo,
    form: Form,
    len: usize,
    dtype: DType,
    op: Combine,
    root: usize,
    special: bool,
    seed: u64,
}

const LENGTHS: usize = 7;

fn length(n: usize, which: usize) -> usize {
    [0, 1, n.saturating_sub(1), n + 1, 77, 1000, 4099][which]
}

/// Every collective that moves data, with each of its algorithms and with `Algo::Auto`.
fn call_list() -> Vec<(Kind, Algo)> {
    let of = |kind: Kind| algorithms(kind).iter().copied().chain([Algo::Auto]).map(move |algo| (kind, algo));
    Kind::ALL.into_iter().filter(|kind| *kind != Kind::Barrier).flat_map(of).collect()
}

fn suits((kind, algo): (Kind, Algo), form: Form, n: usize) -> bool {
    let hosts = vec![0; n];
    let (in_place, varied) = (form.in_place(kind), matches!(form, Form::InPlaceV | Form::IntoV));
    let shape = |rank| Shape { n, rank, root: 0, in_place, varied, hosts: &hosts };
    algo == Algo::Auto || (0..n).all(|rank| plan::plan(kind, algo, &shape(rank)).is_ok())
}

/// The values that cases are made of. A row names them by index.
struct Factors {
    calls: Vec<(Kind, Algo)>,
    ops: Vec<Combine>,
    /// Indexed by call, form and world: whether such a plan exists.
    suits: Vec<Vec<Vec<bool>>>,
}

impl Factors {
    fn new() -> Factors {
        let calls = call_list();
        let in_worlds = |call, form| WORLDS.iter().map(|(n, _)| suits(call, form, *n)).collect();
        let of_call = |call: &_| Form::ALL.iter().map(|form| in_worlds(*call, *form)).collect();
        let suits = calls.iter().map(of_call).collect();
        Factors { calls, ops: Combine::all(), suits }
    }

    fn fits(&self, call: usize, dtype: usize, op: usize) -> bool {
        let (call, op, dtype) = (self.calls[call], self.ops[op], DType::ALL[dtype]);
        op.supports(dtype) && op.fits(call.0) && op.goes_by(Some(dtype), call)
    }

    /// Whether a case can have the values chosen so far (`None`: not chosen yet).
    fn allowed(&self, row: &[Option<usize>]) -> bool {
        let any = |at: Option<usize>, of: usize| at.map_or(0..of, |at| at..at + 1);
        any(row[0], self.calls.len()).any(|call| {
            let there = any(row[1], Form::ALL.len()).any(|form| {
                Form::ALL[form].is_of(self.calls[call].0)
                    && any(row[2], WORLDS.len()).any(|world| self.suits[call][form][world])
            });
            there
                && any(row[4], DType::ALL.len())
                    .any(|t| any(row[5], self.ops.len()).any(|op| self.fits(call, t, op)))
        })
    }

    fn case(&self, row: [usize; 8], seed: u64) -> Case {
        let [call, form, world, len, dtype, op, at, special] = row;
        let (n, (kind, algo)) = (WORLDS[world].0, self.calls[call]);
        Case {
            kind,
            algo,
            form: Form::ALL[form],
            len: length(n, len),
            dtype: DType::ALL[dtype],
            op: self.ops[op],
            root: [0, n - 1, n / 2][at],
            special: special == 1,
            seed: mix(&[world as u64, call as u64, form as u64, seed]),
        }
    }
}

/// The cases of each world.
fn plan_cases() -> Vec<Vec<Case>> {
    let factors = Factors::new();
    let (calls, forms, worlds, types) =
        (factors.calls.len(), Form::ALL.len(), WORLDS.len(), DType::ALL.len());
    let sizes = [calls, forms, worlds, LENGTHS, types, factors.ops.len(), 3, 2];
    let mut all: Vec<Vec<Case>> = WORLDS.iter().map(|_| Vec::new()).collect();
    let mut add = |row: [usize; 8]| {
        let of = &mut all[row[2]];
        of.push(factors.case(row, of.len() as u64));
    };
    let long = |factor, value| u32::from(factor == 3 && value == LENGTHS - 1);
    for row in pairwise(&sizes, |row| factors.allowed(row), long) {
        add(row.try_into().unwrap());
    }
    if !full() {
        return all;
    }
    for (w, c, f) in
        (0..worlds).flat_map(|w| (0..calls).flat_map(move |c| (0..forms).map(move |f| (w, c, f))))
    {
        let kind = factors.calls[c].0;
        if !Form::ALL[f].is_of(kind) || !factors.suits[c][f][w] {
            continue;
        }
        let ops = |t: usize| (0..factors.ops.len()).filter(|op| factors.fits(c, t, *op)).collect::<Vec<_>>();
        for len in (0..LENGTHS).filter(|len| {
            everything() || mix(&[w as u64, c as u64, f as u64, *len as u64, 1]).is_multiple_of(24)
        }) {
            let turn = mix(&[w as u64, c as u64, f as u64, len as u64]) as usize;
            let t = turn % types;
            add([c, f, w, len, t, ops(t)[turn / types % ops(t).len()], turn / 7 % 3, turn / 3 % 2]);
        }
        if w == THOROUGH {
            for t in 0..types {
                let of_type = if kind.reduces() { ops(t) } else { vec![ops(t)[0]] };
                let is_taken = |op: &usize| {
                    everything() || mix(&[c as u64, f as u64, t as u64, *op as u64]).is_multiple_of(6)
                };
                of_type
                    .into_iter()
                    .filter(is_taken)
                    .for_each(|op| add([c, f, w, 4, t, op, (t + op) % 3, (t + op) % 2]));
            }
        }
    }
    all
}

/// One case on one rank.
struct Run<'a, T> {
    case: &'a Case,
    stream: &'a DeviceStream,
    comm: &'a mut Comm,
    of: PhantomData<T>,
}

/// Makes the call on host buffers and on device buffers, and compares the bits of each buffer.
macro_rules! same {
    ($run:ident, ($($x:ident = $values:expr),+), |$c:ident| $work:expr) => {{
        $(let $x: Vec<T> = $values;)+
        let before = ($($x.clone(),)+);
        let host = {
            let $c = $run.options();
            $work.wait().map_err(|failed| failed.error.to_string())?
        };
        let ($($x,)+) = before;
        $(let $x = up($run.stream, $x);)+
        let there = {
            let $c = $run.options();
            $work.wait().map_err(|failed| failed.error.to_string())?
        };
        compare(there.down(), host.down())
    }};
}

/// The buffers that a call gives back, as values on the host.
trait Down<T> {
    fn down(self) -> Vec<Vec<T>>;
}

impl<T: Value> Down<T> for Vec<T> {
    fn down(self) -> Vec<Vec<T>> {
        vec![self]
    }
}

impl<T: Value> Down<T> for allstream::cuda::DeviceBuf<T> {
    fn down(self) -> Vec<Vec<T>> {
        vec![down(self)]
    }
}

impl<T, A: Down<T>, B: Down<T>> Down<T> for (A, B) {
    fn down(self) -> Vec<Vec<T>> {
        let mut all = self.0.down();
        all.extend(self.1.down());
        all
    }
}

/// What devices gave must have the bits of what the host gave.
fn compare<T: Value>(there: Vec<Vec<T>>, host: Vec<Vec<T>>) -> Result<(), String> {
    let mut pairs = there.iter().zip(&host).enumerate();
    pairs.try_for_each(|(b, (there, host))| T::compare(&format!("device buffer {b}"), there, host, &[]))
}

impl<T: Value> Run<'_, T> {
    fn options(&mut self) -> Call<'_> {
        let (case, rank) = (self.case, self.comm.rank());
        let mut options = self.comm.call().algo(case.algo).timeout(CALL);
        // If the order in which floats are combined matters, `Algo::Auto` may give other bits on devices than on hosts, unless deterministic.
        let exact = case.op.is_exact() || !case.dtype.is_float();
        if case.algo == Algo::Auto && (!exact || case.seed.is_multiple_of(2)) {
            options = options.deterministic(true);
        }
        match case.op {
            op @ Combine::Op(_) => op.option::<T>(options, rank),
            op if case.kind.reduces() => op.option::<T>(options, rank),
            _ => options,
        }
    }

    /// What this rank has in buffer `j`.
    fn input(&self, j: u64, count: usize) -> Vec<T> {
        let (case, rank) = (self.case, self.comm.rank());
        let one = |i| {
            let (h, all) = (mix(&[case.seed, rank as u64, j, i]), mix(&[case.seed, j, i, 77]));
            if case.kind.reduces() {
                case.op.make(case.special, h, all)
            } else {
                T::make(None, case.special, h, all)
            }
        };
        (0..count as u64).map(one).collect()
    }

    fn run(&mut self) -> Result<(), String> {
        match self.case.form {
            Form::InPlace => self.in_place(),
            Form::Into => self.into(),
            Form::InPlaceV | Form::IntoV => self.varied(),
            Form::List => self.list(),
        }
    }

    fn in_place(&mut self) -> Result<(), String> {
        let (n, len, root) = (self.comm.size(), self.case.len, self.case.root);
        let is_root = self.comm.rank() == root;
        match self.case.kind {
            Kind::AllReduce => same!(self, (x = self.input(0, len)), |c| c.all_reduce(x)),
            Kind::Reduce => same!(self, (x = self.input(0, len)), |c| c.reduce(x, root)),
            Kind::Broadcast => same!(self, (x = self.input(0, len)), |c| c.broadcast(x, root)),
            Kind::AllGather => same!(self, (x = self.input(0, n * len)), |c| c.all_gather_in_place(x)),
            Kind::ReduceScatter => {
                same!(self, (x = self.input(0, n * len)), |c| c.reduce_scatter_in_place(x))
            }
            Kind::AllToAll => same!(self, (x = self.input(0, n * len)), |c| c.all_to_all_in_place(x)),
            Kind::Scan => same!(self, (x = self.input(0, len)), |c| c.scan(x)),
            Kind::ExScan => same!(self, (x = self.input(0, len)), |c| c.exscan(x)),
            kind => {
                let mine = if is_root { n * len } else { len };
                if kind == Kind::Gather {
                    same!(self, (x = self.input(0, mine)), |c| c.gather_in_place(x, root))
                } else {
                    same!(self, (x = self.input(0, mine)), |c| c.scatter_in_place(x, root))
                }
            }
        }
    }

    fn into(&mut self) -> Result<(), String> {
        let (n, len, root) = (self.comm.size(), self.case.len, self.case.root);
        // Where only the root's buffer is looked at, the others' are of any length.
        let at_root = |count, other| if self.comm.rank() == root { count } else { other };
        let (a, b) = match self.case.kind {
            Kind::AllReduce | Kind::Scan | Kind::ExScan => (len, len),
            Kind::Reduce => (len, at_root(len, len / 2)),
            Kind::Broadcast => (at_root(len, len / 3), len),
            Kind::AllGather => (len, n * len),
            Kind::ReduceScatter => (n * len, len),
            Kind::Gather => (len, at_root(n * len, 3)),
            Kind::Scatter => (at_root(n * len, 0), len),
            _ => (n * len, n * len),
        };
        let (a, b) = (self.input(0, a), self.input(1, b));
        match self.case.kind {
            Kind::AllReduce => same!(self, (x = a, y = b), |c| c.all_reduce_into(x, y)),
            Kind::Reduce => same!(self, (x = a, y = b), |c| c.reduce_into(x, y, root)),
            Kind::Broadcast => same!(self, (x = a, y = b), |c| c.broadcast_into(x, y, root)),
            Kind::AllGather => same!(self, (x = a, y = b), |c| c.all_gather_into(x, y)),
            Kind::ReduceScatter => same!(self, (x = a, y = b), |c| c.reduce_scatter_into(x, y)),
            Kind::Gather => same!(self, (x = a, y = b), |c| c.gather_into(x, y, root)),
            Kind::Scatter => same!(self, (x = a, y = b), |c| c.scatter_into(x, y, root)),
            Kind::Scan => same!(self, (x = a, y = b), |c| c.scan_into(x, y)),
            Kind::ExScan => same!(self, (x = a, y = b), |c| c.exscan_into(x, y)),
            _ => same!(self, (x = a, y = b), |c| c.all_to_all_into(x, y)),
        }
    }

    fn varied(&mut self) -> Result<(), String> {
        let (n, rank, len, root) = (self.comm.size(), self.comm.rank(), self.case.len, self.case.root);
        let of = |r: usize| counts(mix(&[self.case.seed, r as u64]), n, len);
        let counts = of(n);
        let (own, total) = (counts[rank], counts.iter().sum());
        let at_root = |count, other| if rank == root { count } else { other };
        let given = if rank == root { &counts[..] } else { &[usize::MAX][..] };
        match (self.case.kind, self.case.form) {
            (Kind::AllGather, Form::InPlaceV) => {
                same!(self, (x = self.input(0, total)), |c| c.all_gather_v_in_place(x, &counts))
            }
            (Kind::AllGather, _) => {
                let (a, b) = (self.input(0, own), self.input(1, total));
                same!(self, (x = a, y = b), |c| c.all_gather_v_into(x, y, &counts))
            }
            (Kind::ReduceScatter, Form::InPlaceV) => {
                same!(self, (x = self.input(0, total)), |c| c.reduce_scatter_v_in_place(x, &counts))
            }
            (Kind::ReduceScatter, _) => {
                let (a, b) = (self.input(0, total), self.input(1, own));
                same!(self, (x = a, y = b), |c| c.reduce_scatter_v_into(x, y, &counts))
            }
            (Kind::Gather, _) => {
                let (a, b) = (self.input(0, own), self.input(1, at_root(total, 5)));
                same!(self, (x = a, y = b), |c| c.gather_v_into(x, y, given, root))
            }
            (Kind::Scatter, _) => {
                let (a, b) = (self.input(0, at_root(total, 3)), self.input(1, own));
                same!(self, (x = a, y = b), |c| c.scatter_v_into(x, y, given, root))
            }
            _ => {
                let table: Vec<Vec<usize>> = (0..n).map(of).collect();
                let (sends, recvs) = (&table[rank], table.iter().map(|to| to[rank]).collect::<Vec<_>>());
                let (a, b) = (self.input(0, sends.iter().sum()), self.input(1, recvs.iter().sum()));
                same!(self, (x = a, y = b), |c| c.all_to_all_v_into(x, y, sends, &recvs))
            }
        }
    }

    /// Calls that take lists: some have more buffers than are in flight together, and some have none.
    fn list(&mut self) -> Result<(), String> {
        let (n, root, len) = (self.comm.size(), self.case.root, self.case.len);
        let h = mix(&[self.case.seed, 17]) as usize;
        let lens: Vec<usize> =
            (0..[0, 1, 3, 24][h % 4]).map(|j| [len / 7, 0, 1, 13, len][(j + h / 8) % 5]).collect();
        let buffers = |first: u64, times: usize| -> Vec<Vec<T>> {
            lens.iter().zip(first..).map(|(len, j)| self.input(j, len * times)).collect()
        };
        let lift = |all: &[Vec<T>]| all.iter().map(|x| up(self.stream, x.clone())).collect::<Vec<_>>();
        let (kind, failed) = (self.case.kind, |error: allstream::Error| error.to_string());
        macro_rules! both {
            (($($x:ident),+), |$c:ident| $work:expr) => {{
                let there = { $(let $x = lift(&$x);)+ let $c = self.options(); $work.wait() };
                let there = there.map_err(|f| failed(f.error))?;
                let $c = self.options();
                (there, $work.wait().map_err(|f| failed(f.error))?)
            }};
        }
        let (there, host) = match kind {
            Kind::AllGather | Kind::ReduceScatter => {
                let times = if kind == Kind::AllGather { (1, n) } else { (n, 1) };
                let (x, y) = (buffers(0, times.0), buffers(100, times.1));
                let (there, host) = if kind == Kind::AllGather {
                    both!((x, y), |c| c.all_gather_list(x, y))
                } else {
                    both!((x, y), |c| c.reduce_scatter_list(x, y))
                };
                (
                    there.0.into_iter().chain(there.1).collect::<Vec<_>>(),
                    host.0.into_iter().chain(host.1).collect(),
                )
            }
            _ => {
                let x = buffers(0, 1);
                both!((x), |c| match kind {
                    Kind::AllReduce => c.all_reduce_list(x),
                    Kind::Broadcast => c.broadcast_list(x, root),
                    _ => c.reduce_list(x, root),
                })
            }
        };
        compare(there.into_iter().map(down).collect(), host)
    }
}

/// A few cases of each call, which `hazards.rs` runs with a wait taken away.
#[cfg(feature = "testing")]
pub(crate) fn some(n: usize, seed: u64) -> Vec<Case> {
    let world = WORLDS.iter().position(|(ranks, _)| *ranks == n).unwrap();
    let (factors, mut all) = (Factors::new(), Vec::new());
    for (c, (kind, algo)) in factors.calls.iter().enumerate().filter(|(_, (_, algo))| *algo != Algo::Auto) {
        for f in [Form::InPlace, Form::Into] {
            if !suits((*kind, *algo), f, n) {
                continue;
            }
            let h = mix(&[seed, c as u64, f as u64]) as usize;
            // (One reduction in four has a factor. That needs floats, and the elements are floats here.)
            let op = if h.is_multiple_of(4) && kind.reduces() {
                Combine::Scaled
            } else {
                Combine::Op(ReduceOp::Sum)
            };
            let op = factors.ops.iter().position(|other| *other == op).unwrap();
            let form = Form::ALL.iter().position(|other| *other == f).unwrap();
            let row = [c, form, world, 5, DType::F32 as usize, op, h / 4 % 3, 0];
            all.push(factors.case(row, h as u64));
        }
    }
    // The order depends on the seed.
    all.sort_by_key(|case| mix(&[seed, case.seed]));
    all
}

pub(crate) fn run_all(mut comm: Comm, devices: usize, cases: &[Case]) -> Result<(), String> {
    let rank = comm.rank();
    let device = Device::new(rank % devices).map_err(|error| error.to_string())?;
    let path = block_on(comm.bind_device(&device)).map_err(|error| error.to_string())?;
    assert_eq!(path, DevicePath::Peer);
    let stream = DeviceStream::new(&device).map_err(|error| error.to_string())?;
    for (i, case) in cases.iter().enumerate() {
        let result = typed!(case.dtype, T => {
            Run::<T> { case, stream: &stream, comm: &mut comm, of: PhantomData }.run()
        });
        result.map_err(|e| format!("rank {rank}: case {i}, {case:?}: {e}"))?;
    }
    block_on(comm.close()).map_err(|error| error.to_string())
}

#[test]
fn devices_give_the_bits_that_hosts_give() {
    let variables = [("ALLSTREAM_TEST_CUDA_DELAY_US", "30"), ("ALLSTREAM_TEST_CUDA_DEVICES", "3")];
    let limit = if full() { FULL } else { ALL };
    child_within("conformance::devices_give_the_bits_that_hosts_give", &variables, limit, || {
        let (begun, all) = (Instant::now(), plan_cases());
        for ((n, devices), cases) in WORLDS.into_iter().zip(&all) {
            let start = Instant::now();
            let results = ranks(n, |comm| run_all(comm, devices, cases));
            let failed: Vec<String> = results.into_iter().filter_map(Result::err).collect();
            assert!(failed.is_empty(), "{n} ranks on {devices} devices:\n{}", failed.join("\n"));
            nothing_left("all ranks have ended");
            assert_eq!(report().freed_in_use, 0);
            println!("{n} ranks on {devices} devices: {} cases, {:.1?}", cases.len(), start.elapsed());
        }
        let cases: usize = all.iter().map(Vec::len).sum();
        let launches = calls("cuLaunchKernel");
        println!("{cases} cases, {launches} kernels, {:.0?}", begun.elapsed());
        assert!(launches > cases as u64, "kernels do the work");
    });
    let cases = plan_cases().iter().map(Vec::len).sum();
    tell_cases("the conformance of devices", cases);
}
