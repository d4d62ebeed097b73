//! One case of conformance: a call on every rank, and what every rank must then have.

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

/// Makes a call with the options of the case, and awaits it as the case says.
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

/// Which of the forms of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    InPlace,
    Into,
    New,
    /// The same with a count for each rank.
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

    /// Whether a collective has it.
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

    /// Whether its plan works in place.
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
    /// Round the ring, two tags that cross, submitted first and awaited then.
    Shift,
    /// Between all, in one batch.
    Batch,
    /// To one and from another at once.
    Both,
    /// The same tag several times over, all sends awaited before the first receive where they are small.
    Queue,
}

/// How the end is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Await {
    /// `.wait()`.
    Wait,
    /// As a future.
    Poll,
    /// After a barrier that was called later, if it is a collective.
    Later,
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub what: What,
    /// Elements; of one block, where there are several.
    pub len: usize,
    pub dtype: DType,
    pub op: Combine,
    pub root: usize,
    pub special: bool,
    pub end: Await,
    pub seed: u64,
    pub timeout: Duration,
    /// There is no such plan, or it keeps not what the reduction asks for: the call must be refused.
    pub refused: bool,
}

/// What a rank saw, to be compared with what the others saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Seen {
    /// Of what all must have alike.
    Hash(u64),
    /// When this rank entered and left a barrier.
    Stay(u64, u64),
    Nothing,
}

/// Why a case did not come out as it must.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Everything ended as it should, and left other values than it must. The next case can be tried.
    Values(String),
    /// An operation failed, or a copy, or there was no memory. What comes after it means nothing.
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

/// What ranks have seen of one case must go together.
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

/// How many ranks have had it, and the expected result.
type Slot = (usize, Option<Arc<dyn Any + Send + Sync>>);

/// The expected result of cases, computed by the rank that needs it first, and dropped after the last.
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
    /// Waits until all other `users` have called the barrier, and then for as long as one that does not wait for this rank needs
    /// to leave: at most [`LATE`], and no longer than until one has left.
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

/// How long a rank that comes late to a barrier stays away when all others are there.
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

    /// Whether each result is one fold over all ranks, in their order, so that floats are known to the bit.
    fn in_rank_order(&self) -> bool {
        matches!(self.what, What::Collective(_, Algo::OneShot | Algo::Direct | Algo::Naive, _))
            || self.op.is_exact()
    }

    fn inputs(&self) -> Inputs {
        let Case { seed, special, .. } = *self;
        Inputs { seed, special, op: self.reduction(), in_rank_order: self.in_rank_order() }
    }

    /// What a rank puts in: `count` elements.
    fn input<T: Value>(&self, rank: usize, count: usize) -> Vec<T> {
        T::inputs(self.inputs(), rank, count)
    }

    /// The same for buffer `j` of several.
    fn nth(&self, j: usize) -> Case {
        Case { seed: mix(&[self.seed, j as u64, 5]), ..*self }
    }

    /// The reductions of `count` elements of all of `n` ranks.
    fn reduced<T: Value>(&self, n: usize, count: usize) -> Expected<T> {
        self.folded(n, count, std::slice::from_ref(&(0..n)))
    }

    /// The reductions of `count` elements of some ranks, one after another.
    fn folded<T: Value>(&self, n: usize, count: usize, of: &[std::ops::Range<usize>]) -> Expected<T> {
        T::reductions(self.inputs(), n, count, of)
    }
}

/// Compares what there is with what there must be: see `test_oracle::inputs::compare`.
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
/// What was wrong: the result, or that there was none.
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

/// The same, with the buffers on a device. Lists and bytes are none of its cases.
///
/// # Errors
/// What was wrong: the result, or that there was none.
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

    /// What is in a buffer before something is written there.
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
            // (Where nothing is combined it is not looked at.)
            op @ Combine::Op(_) => op.option::<T>(options, rank),
            op if looked_at => op.option::<T>(options, rank),
            _ => options,
        }
    }
}

/// Runs a future to its end. An object, so that what runs it is compiled once, and not for each call with each type.
pub(crate) fn ended<T>(future: impl Future<Output = T>) -> T {
    let mut result = None;
    {
        let all: Pin<&mut dyn Future<Output = ()>> = pin!(async { result = Some(future.await) });
        block_on(all);
    }
    result.expect("it has ended")
}

/// Awaits a work as the case says.
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
