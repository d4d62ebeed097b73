//! One case of the conformance tests: a call on every rank, and what every rank must have afterwards.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use allstream::{Algo, Call, Comm, DType, Element, Kind, Work};
use futures::executor::block_on;
use test_oracle::inputs::{Expected, Inputs};

use super::values::{Value, mix, typed};

/// Makes a call with the options of the case, and awaits it in the way that the case names.
macro_rules! call {
    ($run:ident, $call:ident, $made:expr) => {{
        let work = {
            let $call = $run.options();
            $made
        };
        super::end($run.comm, $run.case, work)
    }};
}

mod fixed;
mod lists;
mod place;
mod talk;
mod varied;

pub use place::{Host, OnDevice, Place};
pub use test_oracle::combine::{self, Combine, counts};

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Collective(Kind, Algo, Form),
    Messages(Talk),
}

/// The form of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    InPlace,
    Into,
    New,
    /// The three forms above, with a count for each rank.
    InPlaceV,
    IntoV,
    NewV,
    /// Many buffers, of several types.
    List,
    /// Bytes whose receivers do not know how many there are.
    Bytes,
}

impl Form {
    pub const ALL: [Form; 8] = [
        Form::InPlace,
        Form::Into,
        Form::New,
        Form::InPlaceV,
        Form::IntoV,
        Form::NewV,
        Form::List,
        Form::Bytes,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Form::InPlace => "in place",
            Form::Into => "into",
            Form::New => "new",
            Form::InPlaceV => "in place with counts",
            Form::IntoV => "into with counts",
            Form::NewV => "new with counts",
            Form::List => "list",
            Form::Bytes => "bytes",
        }
    }

    /// Whether this collective has a call of this form.
    pub fn is_of(self, kind: Kind) -> bool {
        match (kind, self) {
            (Kind::Barrier, form) => form == Form::InPlace,
            (_, Form::InPlace | Form::Into) => true,
            (_, Form::New) => !matches!(kind, Kind::Broadcast | Kind::Reduce | Kind::Scan | Kind::ExScan),
            (_, Form::InPlaceV) => matches!(kind, Kind::AllGather | Kind::ReduceScatter),
            (_, Form::IntoV | Form::NewV) => kind.varies(),
            (_, Form::List) => matches!(
                kind,
                Kind::AllReduce | Kind::Broadcast | Kind::Reduce | Kind::AllGather | Kind::ReduceScatter
            ),
            (_, Form::Bytes) => matches!(kind, Kind::Broadcast | Kind::AllGather),
        }
    }

    pub fn varies(self) -> bool {
        matches!(self, Form::InPlaceV | Form::IntoV | Form::NewV)
    }

    /// Whether a call of this form has a plan that works in place.
    pub fn in_place(self, kind: Kind) -> bool {
        match self {
            Form::List => matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce),
            form => matches!(form, Form::InPlace | Form::InPlaceV | Form::Bytes),
        }
    }
}

/// How messages are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Talk {
    /// For each distance: two messages to the rank that far ahead, received in the other order by their tags. All are submitted before any is awaited.
    Shift,
    /// Between all ranks, in one batch.
    Batch,
    /// To one rank and from another at the same time.
    Both,
    /// Several messages with the same tag. If they are small, all sends are awaited before the first receive.
    Queue,
}

/// How the end of a call is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Await {
    /// `.wait()`.
    Wait,
    /// As a future.
    Poll,
    /// Collectives: by `.wait()`, after the end of a barrier that was called later. Messages: like `Poll`.
    Later,
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub what: What,
    /// Elements of a buffer; if it has several blocks, of one block.
    pub len: usize,
    pub dtype: DType,
    pub op: Combine,
    pub root: usize,
    pub special: bool,
    pub end: Await,
    pub seed: u64,
    pub timeout: Duration,
    /// The call must be refused, because there is no such plan, or the plan does not keep the order that the reduction needs.
    pub refused: bool,
}

/// What a rank saw, to be compared with what the others saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Seen {
    /// Hash of what must be equal on all ranks.
    Hash(u64),
    /// When this rank entered and left a barrier.
    Stay(u64, u64),
    Nothing,
}

/// Why a case failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Every operation succeeded, but some values are wrong. The next case can still be run.
    Values(String),
    /// An operation or a copy failed, or there was no memory. Results of later cases mean nothing.
    Failed(String),
}

impl From<String> for Wrong {
    fn from(why: String) -> Self {
        Wrong::Failed(why)
    }
}

impl From<Wrong> for String {
    fn from(wrong: Wrong) -> Self {
        match wrong {
            Wrong::Values(why) | Wrong::Failed(why) => why,
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Wrong::Values(why) | Wrong::Failed(why)) = self;
        f.write_str(why)
    }
}

/// Checks that what all ranks saw of one case agrees.
pub fn agree(all: &[Seen]) -> Result<(), String> {
    let mut stays = Vec::new();
    for (rank, seen) in all.iter().enumerate() {
        match seen {
            Seen::Stay(enter, leave) => stays.push((*enter, *leave)),
            other if *other != all[0] => {
                return Err(format!("rank {rank} has not the bits of rank 0: {all:?}"));
            }
            _ => {}
        }
    }
    let last_in = stays.iter().map(|s| s.0).max();
    let first_out = stays.iter().map(|s| s.1).min();
    match (last_in, first_out) {
        (Some(last_in), Some(first_out)) if first_out < last_in => Err(format!(
            "a rank left the barrier {} us before the last one came",
            (last_in - first_out) / 1000
        )),
        _ => Ok(()),
    }
}

/// How many ranks have taken the expected result, and the result itself.
type Slot = (usize, Option<Arc<dyn Any + Send + Sync>>);

/// The expected results of cases. Each is computed by the first rank that needs it, and dropped once the last rank has taken it.
pub struct Oracle {
    users: usize,
    slots: Vec<Mutex<Slot>>,
    stays: Vec<Stay>,
}

/// How many of this process's ranks have called a barrier, and how many have left it.
#[derive(Default)]
struct Stay {
    called: AtomicUsize,
    left: AtomicUsize,
}

impl Stay {
    /// Waits until all other `users` have called the barrier, then [`LATE`] more, so that a barrier that wrongly does not wait for this
    /// rank has time to let one leave. Ends early once a rank has left, and in any case after two seconds.
    fn come_late(&self, users: usize) {
        let mut begun = Instant::now();
        let (mut all_called, limit) = (false, begun + Duration::from_secs(2));
        while self.left.load(Ordering::Acquire) == 0 && Instant::now() < limit {
            if !std::mem::replace(&mut all_called, self.called.load(Ordering::Acquire) + 1 >= users) {
                begun = Instant::now();
            } else if begun.elapsed() > LATE {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// How long a rank that comes late to a barrier still stays away once all others have called it.
const LATE: Duration = Duration::from_millis(25);

impl Oracle {
    /// For `cases` that `users` ranks of this process run.
    pub fn new(cases: usize, users: usize) -> Oracle {
        let stays = (0..cases).map(|_| Stay::default()).collect();
        Oracle { users, slots: (0..cases).map(|_| Mutex::default()).collect(), stays }
    }

    fn get<T: Value>(&self, i: usize, make: impl FnOnce() -> Expected<T>) -> Arc<Expected<T>> {
        let mut slot = self.slots[i].lock().unwrap_or_else(|e| e.into_inner());
        let all = slot.1.get_or_insert_with(|| Arc::new(make())).clone();
        slot.0 += 1;
        if slot.0 == self.users {
            slot.1 = None;
        }
        all.downcast().expect("one type a case")
    }
}

impl Case {
    fn reduction(&self) -> Option<Combine> {
        match self.what {
            What::Collective(kind, ..) if kind.reduces() && kind != Kind::Barrier => Some(self.op),
            _ => None,
        }
    }

    /// Whether results are known to the bit: each is one fold over all ranks in rank order, or the order does not matter.
    fn in_rank_order(&self) -> bool {
        matches!(self.what, What::Collective(_, Algo::OneShot | Algo::Direct | Algo::Naive, _))
            || self.op.is_exact()
    }

    fn inputs(&self) -> Inputs {
        let Case { seed, special, .. } = *self;
        Inputs { seed, special, op: self.reduction(), in_rank_order: self.in_rank_order() }
    }

    /// The input of a rank: `count` elements.
    fn input<T: Value>(&self, rank: usize, count: usize) -> Vec<T> {
        T::inputs(self.inputs(), rank, count)
    }

    /// The case for buffer `j` of several: it differs in its seed.
    fn nth(&self, j: usize) -> Case {
        Case { seed: mix(&[self.seed, j as u64, 5]), ..*self }
    }

    /// The reductions of `count` elements over all `n` ranks.
    fn reduced<T: Value>(&self, n: usize, count: usize) -> Expected<T> {
        self.folded(n, count, std::slice::from_ref(&(0..n)))
    }

    /// The reductions of `count` elements over each of these ranges of ranks, one after another.
    fn folded<T: Value>(&self, n: usize, count: usize, of: &[std::ops::Range<usize>]) -> Expected<T> {
        T::reductions(self.inputs(), n, count, of)
    }
}

/// Compares a result with the expected one: see `test_oracle::inputs::compare`.
fn compare<T: Value>(name: &str, got: &[T], expected: &[T], near: &[(f64, f64)]) -> Result<(), Wrong> {
    T::compare(name, got, expected, near).map_err(Wrong::Values)
}

fn hash<T: Value>(values: &[T]) -> Seen {
    Seen::Hash(T::hash(values))
}

fn boxed<T: Element>(values: &[T]) -> Box<[T]> {
    values.into()
}

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Runs case `i` on this rank.
///
/// # Errors
/// Which value is wrong, or why there is no result.
pub fn run(comm: &mut Comm, case: &Case, oracle: &Oracle, i: usize) -> Result<Seen, String> {
    let result: Result<Seen, Wrong> = typed!(case.dtype, T => match case.what {
        What::Collective(kind, algo, form) => {
            let mut run = Run::<T> { kind, algo, form, case, oracle, i, comm, place: &Host, of: PhantomData };
            match form {
                Form::InPlace | Form::Into | Form::New => run.fixed(),
                Form::InPlaceV | Form::IntoV | Form::NewV => run.varied(),
                Form::List => run.list(),
                Form::Bytes => run.bytes(),
            }
        }
        What::Messages(talk) => talk::messages::<T, Host>(comm, case, talk, &Host),
    });
    match (case.refused, case.what, result.map_err(String::from)) {
        (true, What::Collective(kind, algo, _), Err(e))
            if e.starts_with(&format!("{kind}: ")) && e.contains(algo.name()) =>
        {
            Ok(Seen::Nothing)
        }
        (true, _, other) => Err(format!("expected to be refused: {other:?}")),
        (false, _, result) => result,
    }
}

/// Runs case `i` on this rank with its buffers on a device. It has no cases of lists and bytes.
///
/// # Errors
/// Which value is wrong, or why there is no result.
pub fn run_on_device(
    comm: &mut Comm,
    case: &Case,
    oracle: &Oracle,
    i: usize,
    place: &OnDevice,
) -> Result<Seen, Wrong> {
    typed!(case.dtype, T => match case.what {
        What::Collective(kind, algo, form) if !matches!(form, Form::List | Form::Bytes) => {
            let mut run = Run::<T, OnDevice> { kind, algo, form, case, oracle, i, comm, place, of: PhantomData };
            if form.varies() { run.varied() } else { run.fixed() }
        }
        What::Messages(talk) => talk::messages::<T, OnDevice>(comm, case, talk, place),
        what => Err(Wrong::Failed(format!("{what:?} is no case for device buffers"))),
    })
}

/// One case on one rank.
struct Run<'a, T, P = Host> {
    kind: Kind,
    algo: Algo,
    form: Form,
    case: &'a Case,
    oracle: &'a Oracle,
    i: usize,
    comm: &'a mut Comm,
    place: &'a P,
    of: PhantomData<T>,
}

impl<T: Value, P: Place> Run<'_, T, P> {
    fn put(&self, values: &[T]) -> Result<P::In<T>, String> {
        self.place.put(values)
    }

    fn got(&self, buf: P::In<T>) -> Result<Vec<T>, String> {
        self.place.got(buf)
    }

    fn put_out(&self, values: &[T]) -> Result<P::Out<T>, String> {
        self.place.put_out(values)
    }

    fn got_out(&self, buf: P::Out<T>) -> Result<Vec<T>, String> {
        self.place.got_out(buf)
    }

    fn put_new(&self, values: &[T]) -> Result<P::New<T>, String> {
        self.place.put_new(values)
    }

    fn n(&self) -> usize {
        self.comm.size()
    }

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn is_root(&self) -> bool {
        self.rank() == self.case.root
    }

    /// What an output holds before the call writes to it.
    fn blank(&self, count: usize) -> Vec<T> {
        Case { seed: !self.case.seed, ..*self.case }.input(self.rank(), count)
    }

    fn expected(&self, make: impl FnOnce() -> Expected<T>) -> Arc<Expected<T>> {
        self.oracle.get(self.i, make)
    }

    /// The options of the case's call.
    fn options(&mut self) -> Call<'_> {
        let rank = self.comm.rank();
        let options = self.comm.call().algo(self.algo).timeout(self.case.timeout);
        let looked_at = self.kind.reduces() && self.kind != Kind::Barrier;
        match self.case.op {
            // (A collective that combines nothing ignores it.)
            op @ Combine::Op(_) => op.option::<T>(options, rank),
            op if looked_at => op.option::<T>(options, rank),
            _ => options,
        }
    }
}

/// Runs a future to its end. It is passed on as a trait object, so that the executor is compiled once, and not for each type of future.
pub(crate) fn ended<T>(future: impl Future<Output = T>) -> T {
    let mut result = None;
    {
        let all: Pin<&mut dyn Future<Output = ()>> = pin!(async { result = Some(future.await) });
        block_on(all);
    }
    result.expect("it has ended")
}

/// Awaits a `Work` in the way that the case names.
fn end<O, F>(comm: &mut Comm, case: &Case, work: Work<O, F>) -> Result<O, String> {
    let result = match case.end {
        Await::Wait => work.wait(),
        Await::Poll => ended(work),
        Await::Later => {
            let later = comm.timeout(case.timeout).barrier().wait();
            let done = work.wait();
            if done.is_ok() {
                later.map_err(|e| e.error.to_string())?;
            }
            done
        }
    };
    result.map_err(|e| e.error.to_string())
}
