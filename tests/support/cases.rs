//! One case of conformance: a call on every rank, and what every rank must then have.

#![allow(dead_code)] // Not every test uses everything.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use allstream::{Algo, Call, Comm, DType, Element, Failed, HostBuf, Kind, Message, ReduceOp, Work};
use futures::executor::block_on;

use super::values::{MOST, Value, mix, typed};

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Collective(Kind, Algo, Form),
    Messages(Talk),
}

/// Which of the forms of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    InPlace,
    Into,
    New,
}

/// How messages are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Talk {
    /// Round the ring, two tags that cross, submitted first and awaited then.
    Shift,
    /// Between all, in one batch.
    Batch,
    /// The same tag several times over, all sends awaited before the first receive where they are small.
    Queue,
}

/// How the end is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Await {
    /// `.wait()`.
    Wait,
    /// As a future.
    Poll,
    /// After a barrier that was called later, if it is a collective.
    Later,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) what: What,
    /// Elements; of one block, where there are several.
    pub(crate) len: usize,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) root: usize,
    pub(crate) special: bool,
    pub(crate) end: Await,
    pub(crate) seed: u64,
    pub(crate) timeout: Duration,
}

/// What a rank saw, to be compared with what the others saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Seen {
    /// Of what all must have alike.
    Hash(u64),
    /// When this rank entered and left a barrier.
    Stay(u64, u64),
    Nothing,
}

/// What ranks have seen of one case must go together.
pub(crate) fn agree(all: &[Seen]) -> Result<(), String> {
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
pub(crate) struct Oracle {
    users: usize,
    slots: Vec<Mutex<Slot>>,
}

type Shared = Arc<dyn Any + Send + Sync>;

/// What a reduction (of all blocks) must be.
struct Expected<T> {
    values: Vec<T>,
    /// Where the order is free: the nearly exact result and how far one may be off. Empty: to the bit.
    near: Vec<(f64, f64)>,
}

impl Oracle {
    /// For `cases` that `users` ranks of this process run.
    pub(crate) fn new(cases: usize, users: usize) -> Oracle {
        Oracle { users, slots: (0..cases).map(|_| Mutex::default()).collect() }
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
    fn reduction(&self) -> Option<ReduceOp> {
        match self.what {
            What::Collective(kind, ..) if kind.reduces() => Some(self.op),
            _ => None,
        }
    }

    /// Whether the plan reduces in rank order, so that floats are known to the bit.
    fn in_rank_order(&self) -> bool {
        matches!(self.what, What::Collective(_, Algo::OneShot | Algo::Direct, _))
            || matches!(self.op, ReduceOp::Min | ReduceOp::Max)
    }

    /// What a rank puts in: `count` elements.
    fn input<T: Value>(&self, rank: usize, count: usize) -> Vec<T> {
        let (op, seed) = (self.reduction(), mix(&[self.seed, rank as u64]));
        let own = |i| T::make(op, self.special, mix(&[seed, i]), mix(&[self.seed, i, 77]));
        (0..count as u64).map(own).collect()
    }

    /// The reduction of `count` elements of `n` ranks.
    fn reduced<T: Value>(&self, n: usize, count: usize) -> Expected<T> {
        let op = self.reduction().expect("a reduction");
        let inputs: Vec<Vec<T>> = (0..n).map(|rank| self.input(rank, count)).collect();
        let mut column = [T::default(); MOST];
        let rounds = T::ROUNDS.filter(|_| !self.in_rank_order() && n > 2);
        let mut expected = Expected { values: Vec::with_capacity(count), near: Vec::new() };
        for i in 0..count {
            for (rank, input) in inputs.iter().enumerate() {
                column[rank] = input[i];
            }
            expected.values.push(T::fold(op, &column[..n]));
            if let Some((eps, tiny)) = rounds {
                let wide = || column[..n].iter().map(|x| x.wide());
                // Each of n operations is off by half of eps, and the exact one here by less than the rest.
                let (exact, size) = match op {
                    ReduceOp::Prod => (wide().product::<f64>(), wide().product::<f64>().abs()),
                    ReduceOp::Avg => {
                        (wide().sum::<f64>() / n as f64, wide().map(f64::abs).sum::<f64>() / n as f64)
                    }
                    _ => (wide().sum(), wide().map(f64::abs).sum()),
                };
                expected.near.push((exact, n as f64 * (0.75 * eps * size + tiny)));
            }
        }
        expected
    }
}

/// Compares bits; where the order is free, finite results are compared as numbers.
fn compare<T: Value>(name: &str, got: &[T], expected: &[T], near: &[(f64, f64)]) -> Result<(), String> {
    if got.len() != expected.len() {
        return Err(format!("{name} has {} elements, expected {}", got.len(), expected.len()));
    }
    let wrong = |i: &usize| {
        if got[*i].bits() == expected[*i].bits() {
            return false;
        }
        match near.get(*i) {
            // Zeros (of nothing but zeros) have a sign, and what is not finite has one form.
            Some((exact, off)) if expected[*i].wide().is_finite() && *off > 0.0 => {
                let far = (got[*i].wide() - exact).abs();
                far.is_nan() || far > *off
            }
            _ => true,
        }
    };
    let mut all = (0..got.len()).filter(wrong);
    match all.next() {
        None => Ok(()),
        Some(i) => Err(format!(
            "{name}[{i}] is {:?} ({:#x}), expected {:?} ({:#x}), and {} more of {} are wrong",
            got[i],
            got[i].bits(),
            expected[i],
            expected[i].bits(),
            all.count(),
            got.len()
        )),
    }
}

fn hash<T: Value>(values: &[T]) -> Seen {
    let each = |h: u64, v: &T| (h ^ v.bits()).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    Seen::Hash(values.iter().fold(0xcbf2_9ce4_8422_2325, each))
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
pub(crate) fn run(comm: &mut Comm, case: &Case, oracle: &Oracle, i: usize) -> Result<Seen, String> {
    typed!(case.dtype, T => match case.what {
        What::Collective(kind, algo, form) => collective::<T>(comm, case, (kind, algo, form), oracle, i),
        What::Messages(talk) => messages::<T>(comm, case, talk),
    })
}

/// Submits a call and awaits it as the case says.
fn finish<O, F>(
    comm: &mut Comm,
    case: &Case,
    call: impl FnOnce(Call<'_>) -> Work<O, F>,
) -> Result<O, String> {
    let algo = match case.what {
        What::Collective(_, algo, _) => algo,
        What::Messages(_) => Algo::Auto,
    };
    let work = call(comm.call().op(case.op).algo(algo).timeout(case.timeout));
    let fail = |e: Failed<F>| e.error.to_string();
    match case.end {
        Await::Wait => work.wait().map_err(fail),
        Await::Poll => block_on(work).map_err(fail),
        Await::Later => {
            let later = comm.timeout(case.timeout).barrier().wait();
            let done = work.wait().map_err(fail)?;
            later.map_err(|e| e.error.to_string())?;
            Ok(done)
        }
    }
}

fn collective<T: Value>(
    comm: &mut Comm,
    case: &Case,
    (kind, algo, form): (Kind, Algo, Form),
    oracle: &Oracle,
    i: usize,
) -> Result<Seen, String> {
    let (n, rank, len, root) = (comm.size(), comm.rank(), case.len, case.root);
    let is_root = rank == root;
    let blocks = |count: usize| rank * count..(rank + 1) * count;
    // What is in a buffer before something is written there.
    let blank = |count: usize| Case { seed: !case.seed, ..*case }.input::<T>(rank, count);
    match kind {
        Kind::AllReduce | Kind::Reduce => {
            let input = case.input::<T>(rank, len);
            let (kept, output) = match (kind, form) {
                (Kind::AllReduce, Form::InPlace) => {
                    (None, finish(comm, case, |c| c.all_reduce(input.clone()))?)
                }
                (Kind::AllReduce, Form::Into) => {
                    let out = HostBuf::from(&blank(len)[..]);
                    let (kept, out) = finish(comm, case, |c| c.all_reduce_into(boxed(&input), out))?;
                    (Some(kept), out.to_vec())
                }
                (Kind::AllReduce, Form::New) => {
                    (None, finish(comm, case, |c| c.all_reduce_new(HostBuf::from(&input[..])))?)
                }
                (_, Form::InPlace) => (None, finish(comm, case, |c| c.reduce(boxed(&input), root))?.to_vec()),
                _ => {
                    // Only the root's output is looked at.
                    let out = blank(if is_root { len } else { len / 2 });
                    let (kept, out) = finish(comm, case, |c| c.reduce_into(boxed(&input), out, root))?;
                    (Some(kept), out)
                }
            };
            if let Some(kept) = kept {
                compare("the input", &kept, &input, &[])?;
            }
            let expected = oracle.get(i, || case.reduced::<T>(n, len));
            if kind == Kind::AllReduce || is_root {
                compare("the result", &output, &expected.values, &expected.near)?;
            } else {
                let before = if form == Form::InPlace { input } else { blank(len / 2) };
                compare("a buffer that is not the root's", &output, &before, &[])?;
            }
            Ok(if kind == Kind::AllReduce { hash(&output) } else { Seen::Nothing })
        }
        Kind::Broadcast => {
            let right = case.input::<T>(root, len);
            let output = if form == Form::InPlace {
                let buf = if is_root { right.clone() } else { blank(len) };
                finish(comm, case, |c| c.broadcast(buf, root))?
            } else {
                let input = if is_root { right.clone() } else { blank(len / 3) };
                let out = HostBuf::from(&blank(len)[..]);
                let (kept, out) = finish(comm, case, |c| c.broadcast_into(input.clone(), out, root))?;
                compare("the input", &kept, &input, &[])?;
                out.to_vec()
            };
            compare("the result", &output, &right, &[])?;
            Ok(hash(&output))
        }
        Kind::AllGather => {
            let input = case.input::<T>(rank, len);
            let output = match form {
                Form::New => finish(comm, case, |c| c.all_gather(boxed(&input)))?,
                Form::Into => {
                    let out = HostBuf::from(&blank(n * len)[..]);
                    let (kept, out) = finish(comm, case, |c| c.all_gather_into(input.clone(), out))?;
                    compare("the input", &kept, &input, &[])?;
                    out.to_vec()
                }
                Form::InPlace => {
                    let mut buf = blank(n * len);
                    buf[blocks(len)].copy_from_slice(&input);
                    finish(comm, case, |c| c.all_gather_in_place(buf))?
                }
            };
            let whole = || (0..n).flat_map(|r| case.input::<T>(r, len)).collect();
            let expected = oracle.get(i, || Expected { values: whole(), near: Vec::new() });
            compare("the result", &output, &expected.values, &[])?;
            Ok(hash(&output))
        }
        Kind::ReduceScatter => {
            let input = case.input::<T>(rank, n * len);
            let mut output = match form {
                Form::New => finish(comm, case, |c| c.reduce_scatter(HostBuf::from(&input[..])))?,
                Form::Into => {
                    let (kept, out) =
                        finish(comm, case, |c| c.reduce_scatter_into(input.clone(), boxed(&blank(len))))?;
                    compare("the input", &kept, &input, &[])?;
                    out.to_vec()
                }
                Form::InPlace => finish(comm, case, |c| c.reduce_scatter_in_place(input.clone()))?,
            };
            if form == Form::InPlace {
                let mine = output[blocks(len)].to_vec();
                if algo == Algo::Direct {
                    output[blocks(len)].copy_from_slice(&input[blocks(len)]);
                    compare("the other blocks", &output, &input, &[])?;
                }
                output = mine;
            }
            let expected = oracle.get(i, || case.reduced::<T>(n, n * len));
            let near = expected.near.get(blocks(len)).unwrap_or_default();
            compare("the result", &output, &expected.values[blocks(len)], near)?;
            Ok(Seen::Nothing)
        }
        Kind::Barrier => {
            if n > 1 && case.seed as usize % n == rank {
                std::thread::sleep(Duration::from_millis(2 + 20 * u64::from(case.special)));
            }
            let enter = now();
            finish(comm, case, |c| c.barrier())?;
            Ok(Seen::Stay(enter, now()))
        }
    }
}

/// Longer messages go to fewer.
const LONG: usize = 10_000;

fn messages<T: Value>(comm: &mut Comm, case: &Case, talk: Talk) -> Result<Seen, String> {
    let (n, rank, len) = (comm.size(), comm.rank(), case.len);
    let say = |from: usize, to: usize, tag: u32, nth: usize| {
        let seed = mix(&[case.seed, to as u64, u64::from(tag), nth as u64]);
        Case { seed, ..*case }.input::<T>(from, len)
    };
    let blank = || vec![T::default(); len];
    let heard = |from: usize, tag: u32, nth: usize, got: &[T]| {
        let name = format!("message {nth} of tag {tag} from rank {from}");
        compare(&name, got, &say(from, rank, tag, nth), &[])
    };
    let end = |work: Work<Vec<T>>| match case.end {
        Await::Wait => work.wait().map_err(|e| e.error.to_string()),
        _ => block_on(work).map_err(|e| e.error.to_string()),
    };
    let shifts: Vec<usize> = if len > LONG { vec![1, n - 1] } else { (1..n).collect() };
    let tags = [case.seed as u32 % 3, 5 + (case.seed >> 32) as u32 % 0x7fff_ffff];
    match talk {
        Talk::Shift => {
            for shift in shifts {
                let (to, from) = ((rank + shift) % n, (rank + n - shift) % n);
                let mut send = |tag| comm.tag(tag).timeout(case.timeout).send(say(rank, to, tag, 0), to);
                let sends = tags.map(&mut send);
                let mut recv = |tag| comm.tag(tag).timeout(case.timeout).recv(blank(), from);
                let [b, a] = [tags[1], tags[0]].map(&mut recv);
                heard(from, tags[0], 0, &end(a)?)?;
                heard(from, tags[1], 0, &end(b)?)?;
                for (tag, work) in tags.into_iter().zip(sends) {
                    compare("what was sent", &end(work)?, &say(rank, to, tag, 0), &[])?;
                }
            }
        }
        Talk::Batch => {
            let mut all = Vec::new();
            for shift in shifts {
                let (to, from) = ((rank + shift) % n, (rank + n - shift) % n);
                all.extend(tags.map(|tag| Message::Send { buf: say(rank, to, tag, 0), to, tag }));
                all.extend(tags.map(|tag| Message::Recv { buf: blank(), from, tag }));
            }
            let expected: Vec<(usize, u32, bool)> = all
                .iter()
                .map(|m| match m {
                    Message::Send { to, tag, .. } => (*to, *tag, true),
                    Message::Recv { from, tag, .. } => (*from, *tag, false),
                })
                .collect();
            let batch = comm.timeout(case.timeout).batch(all);
            let done = match case.end {
                Await::Wait => batch.wait(),
                _ => block_on(batch),
            };
            let done = done.map_err(|e| e.error.to_string())?;
            for ((peer, tag, sent), buf) in expected.into_iter().zip(done) {
                if sent {
                    compare("what was sent", &buf, &say(rank, peer, tag, 0), &[])?;
                } else {
                    heard(peer, tag, 0, &buf)?;
                }
            }
        }
        Talk::Queue => {
            let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
            let small = len * case.dtype.size() <= 4096;
            let mut sends = Vec::new();
            for nth in 0..5 {
                let work = comm.tag(tags[1]).timeout(case.timeout).send(say(rank, to, tags[1], nth), to);
                if small {
                    end(work)?;
                } else {
                    sends.push(work);
                }
            }
            for nth in 0..5 {
                let work = comm.tag(tags[1]).timeout(case.timeout).recv(blank(), from);
                heard(from, tags[1], nth, &end(work)?)?;
            }
            for work in sends {
                end(work)?;
            }
        }
    }
    Ok(Seen::Nothing)
}
