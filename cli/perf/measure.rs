//! The clock: back to back after a barrier, the slowest rank's time, the median over rounds.

use std::cell::Cell;
use std::ops::DerefMut;
use std::time::Instant;

use allstream::cuda::{DeviceBuf, DeviceStream};
use allstream::{Algo, ArenaBuf, Buf, Call, Comm, Error, Kind, ReduceOp};
use tokio::runtime::Runtime;

use super::case::{Case, Value, What};
use super::report::Time;

/// Memory that collectives are timed on.
pub(crate) trait Memory<T>: Buf<Elem = T> + Sized {
    fn make(comm: &Comm, effort: &Effort, len: usize) -> Result<Self, Error>;
    /// Puts in what `fill` writes over zeros, or over what is there.
    fn filled(self, fill: impl FnOnce(&mut [T])) -> Result<Self, Error>;
    fn looked_at<R>(self, look: impl FnOnce(&[T]) -> R) -> Result<(Self, R), Error>;
}

fn fill_here<T, M: DerefMut<Target = [T]>>(mut memory: M, fill: impl FnOnce(&mut [T])) -> Result<M, Error> {
    fill(&mut memory);
    Ok(memory)
}

fn look_here<T, M: DerefMut<Target = [T]>, R>(
    memory: M,
    look: impl FnOnce(&[T]) -> R,
) -> Result<(M, R), Error> {
    let seen = look(&memory);
    Ok((memory, seen))
}

impl<T: Value> Memory<T> for Vec<T> {
    fn make(_: &Comm, _: &Effort, len: usize) -> Result<Vec<T>, Error> {
        Ok(vec![T::of(0); len])
    }
    fn filled(self, fill: impl FnOnce(&mut [T])) -> Result<Vec<T>, Error> {
        fill_here(self, fill)
    }
    fn looked_at<R>(self, look: impl FnOnce(&[T]) -> R) -> Result<(Vec<T>, R), Error> {
        look_here(self, look)
    }
}

impl<T: Value> Memory<T> for ArenaBuf<T> {
    fn make(comm: &Comm, _: &Effort, len: usize) -> Result<ArenaBuf<T>, Error> {
        comm.alloc(len)
    }
    fn filled(self, fill: impl FnOnce(&mut [T])) -> Result<ArenaBuf<T>, Error> {
        fill_here(self, fill)
    }
    fn looked_at<R>(self, look: impl FnOnce(&[T]) -> R) -> Result<(ArenaBuf<T>, R), Error> {
        look_here(self, look)
    }
}

impl<T: Value> Memory<T> for DeviceBuf<T> {
    fn make(_: &Comm, effort: &Effort, len: usize) -> Result<DeviceBuf<T>, Error> {
        let Some(stream) = &effort.stream else {
            return Err(Error::Unavailable {
                what: "memory on a device".into(),
                problem: "this rank has no stream".into(),
            });
        };
        DeviceBuf::zeroed(stream, len)
    }
    /// Done when it returns: the clock starts later.
    fn filled(self, fill: impl FnOnce(&mut [T])) -> Result<DeviceBuf<T>, Error> {
        let mut host = vec![T::of(0); self.len()];
        fill(&mut host);
        Ok(self.copy_from_host(host).wait()?.1)
    }
    fn looked_at<R>(self, look: impl FnOnce(&[T]) -> R) -> Result<(DeviceBuf<T>, R), Error> {
        let host = vec![T::of(0); self.len()];
        let (buf, host) = self.to_host(host).wait()?;
        let seen = look(&host);
        Ok((buf, seen))
    }
}

/// How often, and how.
#[derive(Debug)]
pub(crate) struct Effort {
    pub(crate) algo: Algo,
    /// Timed operations of each size; chosen by size without it.
    pub(crate) iters: Option<usize>,
    /// Untimed operations before.
    pub(crate) warmup: Option<usize>,
    pub(crate) check: bool,
    /// Operations are awaited on this; without it a thread waits for each.
    pub(crate) runtime: Option<Runtime>,
    /// That is done now; and in turns with the other.
    pub(crate) by_await: Cell<bool>,
    pub(crate) in_turns: bool,
    /// Where buffers on a device belong.
    pub(crate) stream: Option<DeviceStream>,
    /// That stream waits for each operation, and the host for the last of a group.
    pub(crate) joins: bool,
}

/// Back to back between two looks at the clock, up to 64 KB: a look costs as much as the smallest operation.
const GROUP: usize = 20;
const GROUPED: usize = 64 << 10;
/// Where a stream waits for operations: how often, at most, before the host does.
const JOINED: usize = 1000;
/// Bytes moved for a size, about: small sizes are cheap to repeat, large ones are not.
const BUDGET: usize = 200_000_000;

impl Effort {
    /// Timed operations of a size.
    pub(crate) fn iterations(bytes: usize) -> usize {
        (BUDGET / (bytes + 20_000)).clamp(5, 2000)
    }

    /// What operations are awaited on, if they are now.
    fn awaits(&self) -> Option<&Runtime> {
        self.runtime.as_ref().filter(|_| self.by_await.get())
    }

    /// Runs operations to their end. Where they are waited for, there is nothing to await.
    fn run<T>(&self, operations: impl Future<Output = T>) -> T {
        match self.awaits() {
            Some(runtime) => runtime.block_on(operations),
            None => futures::executor::block_on(operations),
        }
    }

    /// Operations a round, rounds, and rounds that are not counted.
    pub(crate) fn rounds(&self, bytes: usize) -> (usize, usize, usize) {
        let iters = self.iters.unwrap_or_else(|| Effort::iterations(bytes)).max(1);
        let group = match bytes <= GROUPED {
            _ if self.joins => JOINED.min(iters),
            true => GROUP.min(iters),
            false => 1,
        };
        if self.joins && self.iters.is_none() {
            // Of which there are few otherwise.
            return (group, 5, self.warmup.map_or(1, |warmup| warmup.div_ceil(group)));
        }
        (group, iters.div_ceil(group), self.warmup.map_or(2, |warmup| warmup.div_ceil(group)))
    }
}

/// Until an operation is finished, in the way that is timed.
macro_rules! wait {
    ($effort:expr, $work:expr) => {
        match $effort.awaits() {
            Some(_) => $work.await.map_err(Error::from),
            None => $work.wait().map_err(Error::from),
        }
    };
}

/// The same of a collective; or puts what comes next behind it.
macro_rules! finish {
    ($effort:expr, $work:expr) => {
        match &$effort.stream {
            Some(stream) if $effort.joins => {
                $work.join(stream).and_then(|ordered| ordered.in_order()).map_err(Error::from)
            }
            _ => wait!($effort, $work),
        }
    };
}

/// One size, out of place and in place (`None` where there is no such form).
pub(crate) fn measure<T: Value, M: Memory<T>>(
    comm: &mut Comm,
    case: &Case,
    effort: &Effort,
) -> Result<(Time, Option<Time>), Error> {
    let (input, output) = case.lengths();
    let state = (M::make(comm, effort, input)?, M::make(comm, effort, output)?);
    let out = time(
        comm,
        case,
        effort,
        size_of::<T>(),
        state,
        Runs {
            once: async |comm: &mut Comm, (from, to)| out_of_place(comm, case, effort, from, to).await,
            fill: &|(from, to): (M, M)| {
                let from = from.filled(|from| case.fill(from, false))?;
                Ok((from, to.filled(|to| to.fill(T::of(0)))?))
            },
            wrong: &|(_, to): (M, M)| Ok(to.looked_at(|to| case.wrong::<T>(to, false))?.1),
        },
    )?;
    if !case.what.in_place() {
        return Ok((out, None));
    }
    Ok((out, Some(measure_in_place::<T, M>(comm, case, effort)?)))
}

/// One size in place.
pub(crate) fn measure_in_place<T: Value, M: Memory<T>>(
    comm: &mut Comm,
    case: &Case,
    effort: &Effort,
) -> Result<Time, Error> {
    let buf = M::make(comm, effort, in_place_length(case))?;
    time(
        comm,
        case,
        effort,
        size_of::<T>(),
        buf,
        Runs {
            once: async |comm: &mut Comm, buf| in_place(comm, case, effort, buf).await,
            fill: &|buf: M| buf.filled(|buf| case.fill(buf, true)),
            wrong: &|buf: M| Ok(buf.looked_at(|buf| case.wrong::<T>(buf, true))?.1),
        },
    )
}

/// What is timed, on what it needs.
struct Runs<'a, S, F> {
    once: F,
    fill: &'a dyn Fn(S) -> Result<S, Error>,
    wrong: &'a dyn Fn(S) -> Result<u64, Error>,
}

fn time<S>(
    comm: &mut Comm,
    case: &Case,
    effort: &Effort,
    unit: usize,
    mut state: S,
    mut runs: Runs<'_, S, impl AsyncFnMut(&mut Comm, S) -> Result<S, Error>>,
) -> Result<Time, Error> {
    let bytes = case.elements() * unit;
    let (group, rounds, warmup) = effort.rounds(bytes);
    // By await (or in the only way), and by wait where that takes its turn.
    let mut mine = [Vec::with_capacity(rounds), Vec::new()];
    let ways = if effort.in_turns { 2 } else { 1 };
    for turn in 0..ways * (warmup + rounds) {
        // Each is the first in its turn.
        let (round, way) = (turn / ways, (turn + turn / ways) % ways);
        effort.by_await.set(way == 0);
        // Sums of sums would leave the range of ordinary numbers.
        state = (runs.fill)(state)?;
        comm.barrier().wait()?;
        let start = Instant::now();
        state = effort.run(times(group, &mut runs.once, comm, state))?;
        if let Some(stream) = effort.stream.as_ref().filter(|_| effort.joins) {
            stream.synchronize()?;
        }
        let seconds = start.elapsed().as_secs_f64() / group as f64;
        // Where ranks share cores, who is through would take the core to fill its buffer from who is not.
        comm.barrier().wait()?;
        if round >= warmup {
            mine[way].push(seconds);
        }
    }
    effort.by_await.set(true);
    let [mine, waited] = mine;
    let mut slowest = comm.op(ReduceOp::Max).all_reduce(mine).wait()?;
    let mut waited = comm.op(ReduceOp::Max).all_reduce(waited).wait()?;
    let wrong = if effort.check {
        state = (runs.fill)(state)?;
        state = effort.run(times(1, &mut runs.once, comm, state))?;
        Some(comm.all_reduce(vec![(runs.wrong)(state)?]).wait()?[0])
    } else {
        drop(state);
        None
    };
    // There and back is twice the way.
    if case.what == What::PingPong {
        slowest.iter_mut().chain(&mut waited).for_each(|seconds| *seconds /= 2.0);
    }
    slowest.sort_by(f64::total_cmp);
    waited.sort_by(f64::total_cmp);
    let wait_us = waited.get(waited.len() / 2).map(|seconds| seconds * 1e6);
    Ok(Time { wait_us, ..Time::new(&slowest, bytes, case, wrong) })
}

/// Back to back.
async fn times<S>(
    count: usize,
    once: &mut impl AsyncFnMut(&mut Comm, S) -> Result<S, Error>,
    comm: &mut Comm,
    mut state: S,
) -> Result<S, Error> {
    for _ in 0..count {
        state = once(comm, state).await?;
    }
    Ok(state)
}

fn in_place_length(case: &Case) -> usize {
    let (input, output) = case.lengths();
    match case.what {
        // Whoever is not the root has its own block only.
        What::Collective(Kind::Reduce) => case.count,
        _ => input.max(output),
    }
}

fn call<'a>(comm: &'a mut Comm, case: &Case, effort: &Effort) -> Call<'a> {
    let call = comm.call().algo(effort.algo);
    if case.what.reduces() { call.op(case.op) } else { call }
}

async fn out_of_place<B: Buf>(
    comm: &mut Comm,
    case: &Case,
    effort: &Effort,
    from: B,
    to: B,
) -> Result<(B, B), Error> {
    let (root, rank, n) = (case.root, case.rank, case.n);
    let kind = match case.what {
        What::Collective(kind) => kind,
        What::SendRecv => {
            return wait!(effort, comm.send_recv(from, (rank + 1) % n, to, (rank + n - 1) % n));
        }
        What::PingPong => return pingpong(comm, effort, from, to).await,
    };
    let call = call(comm, case, effort);
    match kind {
        Kind::Reduce => finish!(effort, call.reduce_into(from, to, root)),
        Kind::Broadcast => finish!(effort, call.broadcast_into(from, to, root)),
        Kind::AllGather => finish!(effort, call.all_gather_into(from, to)),
        Kind::ReduceScatter => finish!(effort, call.reduce_scatter_into(from, to)),
        Kind::AllToAll => finish!(effort, call.all_to_all_into(from, to)),
        Kind::Gather => finish!(effort, call.gather_into(from, to, root)),
        Kind::Scatter => finish!(effort, call.scatter_into(from, to, root)),
        Kind::Scan => finish!(effort, call.scan_into(from, to)),
        Kind::ExScan => finish!(effort, call.exscan_into(from, to)),
        _ => finish!(effort, call.all_reduce_into(from, to)),
    }
}

/// Rank 0's input there, and what came back; other ranks do nothing.
async fn pingpong<B: Buf>(comm: &mut Comm, effort: &Effort, from: B, to: B) -> Result<(B, B), Error> {
    match comm.rank() {
        0 => {
            let from = wait!(effort, comm.send(from, 1))?;
            Ok((from, wait!(effort, comm.recv(to, 1))?))
        }
        1 => {
            let to = wait!(effort, comm.recv(to, 0))?;
            Ok((from, wait!(effort, comm.send(to, 0))?))
        }
        _ => Ok((from, to)),
    }
}

async fn in_place<B: Buf>(comm: &mut Comm, case: &Case, effort: &Effort, buf: B) -> Result<B, Error> {
    let root = case.root;
    let What::Collective(kind) = case.what else { return Ok(buf) };
    let call = call(comm, case, effort);
    match kind {
        Kind::Reduce => finish!(effort, call.reduce(buf, root)),
        Kind::Broadcast => finish!(effort, call.broadcast(buf, root)),
        Kind::AllGather => finish!(effort, call.all_gather_in_place(buf)),
        Kind::ReduceScatter => finish!(effort, call.reduce_scatter_in_place(buf)),
        Kind::AllToAll => finish!(effort, call.all_to_all_in_place(buf)),
        Kind::Gather => finish!(effort, call.gather_in_place(buf, root)),
        Kind::Scatter => finish!(effort, call.scatter_in_place(buf, root)),
        Kind::Scan => finish!(effort, call.scan(buf)),
        Kind::ExScan => finish!(effort, call.exscan(buf)),
        _ => finish!(effort, call.all_reduce(buf)),
    }
}
