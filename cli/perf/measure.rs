//! The clock: back to back after a barrier, the slowest rank's time, the median over rounds.

use std::cell::Cell;
use std::pin::{Pin, pin};
use std::time::Instant;

use allstream::cuda::DeviceStream;
use allstream::{Algo, AnyBuf, Call, Comm, Error, Kind, ReduceOp, Work};
use tokio::runtime::Runtime;

use super::case::{Case, What};
use super::memory::{Memory, Place};
use super::report::Time;

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
    pub(crate) memory: Memory,
    /// The stream of buffers on a device waits for each operation, and the host for the last of a group.
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
    /// As without any options.
    pub(crate) fn usual(memory: Memory) -> Effort {
        Effort {
            algo: Algo::Auto,
            iters: None,
            warmup: None,
            check: true,
            runtime: None,
            by_await: Cell::new(true),
            in_turns: false,
            memory,
            joins: false,
        }
    }

    /// Timed operations of a size.
    pub(crate) fn iterations(bytes: usize) -> usize {
        (BUDGET / (bytes + 20_000)).clamp(5, 2000)
    }

    /// What operations are awaited on, if they are now.
    fn awaits(&self) -> Option<&Runtime> {
        self.runtime.as_ref().filter(|_| self.by_await.get())
    }

    /// The stream that waits for operations, if one does.
    fn joining(&self) -> Option<&DeviceStream> {
        match &self.memory.place {
            Place::Device(stream) if self.joins => Some(stream),
            _ => None,
        }
    }

    /// Runs operations to their end. Where they are waited for, there is nothing to await.
    fn run<T>(&self, operations: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let mut result = Err(invalid("the operations were not run to their end"));
        self.block_on(pin!(async { result = operations.await }));
        result
    }

    /// An object, so that the runtime is compiled once, and not for every kind of operation.
    fn block_on(&self, operations: Pin<&mut dyn Future<Output = ()>>) {
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

/// Until a message is through, in the way that is timed.
macro_rules! wait {
    ($effort:expr, $work:expr) => {
        match $effort.awaits() {
            Some(_) => $work.await.map_err(Error::from),
            None => $work.wait().map_err(Error::from),
        }
    };
}

/// One collective after another, each brought to its end in the way that is timed.
fn collectives<S: Send + 'static>(
    effort: &Effort,
    count: usize,
    mut state: S,
    mut start: impl FnMut(S) -> Work<S>,
) -> Result<S, Error> {
    if let Some(stream) = effort.joining() {
        for _ in 0..count {
            state = start(state).join(stream)?.in_order()?;
        }
    } else if effort.awaits().is_some() {
        return effort.run(async {
            for _ in 0..count {
                state = start(state).await?;
            }
            Ok(state)
        });
    } else {
        for _ in 0..count {
            state = start(state).wait()?;
        }
    }
    Ok(state)
}

/// One size, out of place and in place (`None` where there is no such form).
pub(crate) fn measure(comm: &mut Comm, case: &Case, effort: &Effort) -> Result<(Time, Option<Time>), Error> {
    let (input, output) = case.lengths();
    let bufs = Some((effort.memory.make(comm, input)?, effort.memory.make(comm, output)?));
    let out = time(comm, case, effort, &mut OutOfPlace { case, effort, bufs })?;
    if !case.what.in_place() {
        return Ok((out, None));
    }
    Ok((out, Some(measure_in_place(comm, case, effort)?)))
}

/// One size in place.
pub(crate) fn measure_in_place(comm: &mut Comm, case: &Case, effort: &Effort) -> Result<Time, Error> {
    let buf = Some(effort.memory.make(comm, in_place_length(case))?);
    time(comm, case, effort, &mut InPlace { case, effort, buf })
}

/// What is timed, with the buffers that it needs.
trait Timed {
    /// Puts the inputs in, and takes results of earlier operations out.
    fn fill(&mut self) -> Result<(), Error>;
    /// Runs so many operations back to back.
    fn run(&mut self, comm: &mut Comm, count: usize) -> Result<(), Error>;
    /// How many elements of this rank's result are wrong.
    fn wrong(&mut self) -> Result<u64, Error>;
}

/// The buffers, which an operation that failed has not given back.
fn held<S>(state: &mut Option<S>) -> Result<S, Error> {
    state.take().ok_or_else(|| invalid("an operation of this size has failed before"))
}

fn invalid(problem: &str) -> Error {
    Error::Invalid { call: "perf".into(), problem: problem.into() }
}

/// From one buffer into another; and messages.
struct OutOfPlace<'a> {
    case: &'a Case,
    effort: &'a Effort,
    bufs: Option<(AnyBuf, AnyBuf)>,
}

impl Timed for OutOfPlace<'_> {
    fn fill(&mut self) -> Result<(), Error> {
        let (from, to) = held(&mut self.bufs)?;
        let memory = &self.effort.memory;
        self.bufs = Some((memory.fill(from, self.case, false)?, memory.clear(to)?));
        Ok(())
    }

    fn run(&mut self, comm: &mut Comm, count: usize) -> Result<(), Error> {
        let (case, effort, bufs) = (self.case, self.effort, held(&mut self.bufs)?);
        let bufs = match case.what {
            What::Collective(kind) => collectives(effort, count, bufs, |(from, to)| {
                out_of_place(comm, case, effort, kind, from, to)
            }),
            What::SendRecv => {
                let (next, before) = ((case.rank + 1) % case.n, (case.rank + case.n - 1) % case.n);
                effort.run(async {
                    let mut bufs = bufs;
                    for _ in 0..count {
                        bufs = wait!(effort, comm.send_recv(bufs.0, next, bufs.1, before))?;
                    }
                    Ok(bufs)
                })
            }
            What::PingPong => effort.run(async {
                let mut bufs = bufs;
                for _ in 0..count {
                    bufs = pingpong(comm, effort, bufs.0, bufs.1).await?;
                }
                Ok(bufs)
            }),
        };
        self.bufs = Some(bufs?);
        Ok(())
    }

    fn wrong(&mut self) -> Result<u64, Error> {
        let (from, to) = held(&mut self.bufs)?;
        let (to, wrong) = self.effort.memory.wrong(to, self.case, false)?;
        self.bufs = Some((from, to));
        Ok(wrong)
    }
}

/// In one buffer.
struct InPlace<'a> {
    case: &'a Case,
    effort: &'a Effort,
    buf: Option<AnyBuf>,
}

impl Timed for InPlace<'_> {
    fn fill(&mut self) -> Result<(), Error> {
        self.buf = Some(self.effort.memory.fill(held(&mut self.buf)?, self.case, true)?);
        Ok(())
    }

    fn run(&mut self, comm: &mut Comm, count: usize) -> Result<(), Error> {
        let (case, effort, buf) = (self.case, self.effort, held(&mut self.buf)?);
        let What::Collective(kind) = case.what else {
            return Err(invalid("messages have no form in place"));
        };
        self.buf = Some(collectives(effort, count, buf, |buf| in_place(comm, case, effort, kind, buf))?);
        Ok(())
    }

    fn wrong(&mut self) -> Result<u64, Error> {
        let (buf, wrong) = self.effort.memory.wrong(held(&mut self.buf)?, self.case, true)?;
        self.buf = Some(buf);
        Ok(wrong)
    }
}

fn time(comm: &mut Comm, case: &Case, effort: &Effort, timed: &mut dyn Timed) -> Result<Time, Error> {
    let bytes = case.elements() * effort.memory.dtype.size();
    let (group, rounds, warmup) = effort.rounds(bytes);
    // By await (or in the only way), and by wait where that takes its turn.
    let mut mine = [Vec::with_capacity(rounds), Vec::new()];
    let ways = if effort.in_turns { 2 } else { 1 };
    for turn in 0..ways * (warmup + rounds) {
        // Each is the first in its turn.
        let (round, way) = (turn / ways, (turn + turn / ways) % ways);
        effort.by_await.set(way == 0);
        // Sums of sums would leave the range of ordinary numbers.
        timed.fill()?;
        comm.barrier().wait()?;
        let start = Instant::now();
        timed.run(comm, group)?;
        if let Some(stream) = effort.joining() {
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
        timed.fill()?;
        timed.run(comm, 1)?;
        Some(comm.all_reduce(vec![timed.wrong()?]).wait()?[0])
    } else {
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

fn out_of_place(
    comm: &mut Comm,
    case: &Case,
    effort: &Effort,
    kind: Kind,
    from: AnyBuf,
    to: AnyBuf,
) -> Work<(AnyBuf, AnyBuf)> {
    let (call, root) = (call(comm, case, effort), case.root);
    match kind {
        Kind::Reduce => call.reduce_into(from, to, root),
        Kind::Broadcast => call.broadcast_into(from, to, root),
        Kind::AllGather => call.all_gather_into(from, to),
        Kind::ReduceScatter => call.reduce_scatter_into(from, to),
        Kind::AllToAll => call.all_to_all_into(from, to),
        Kind::Gather => call.gather_into(from, to, root),
        Kind::Scatter => call.scatter_into(from, to, root),
        Kind::Scan => call.scan_into(from, to),
        Kind::ExScan => call.exscan_into(from, to),
        _ => call.all_reduce_into(from, to),
    }
}

/// Rank 0's input there, and what came back; other ranks do nothing.
async fn pingpong(
    comm: &mut Comm,
    effort: &Effort,
    from: AnyBuf,
    to: AnyBuf,
) -> Result<(AnyBuf, AnyBuf), Error> {
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

fn in_place(comm: &mut Comm, case: &Case, effort: &Effort, kind: Kind, buf: AnyBuf) -> Work<AnyBuf> {
    let (call, root) = (call(comm, case, effort), case.root);
    match kind {
        Kind::Reduce => call.reduce(buf, root),
        Kind::Broadcast => call.broadcast(buf, root),
        Kind::AllGather => call.all_gather_in_place(buf),
        Kind::ReduceScatter => call.reduce_scatter_in_place(buf),
        Kind::AllToAll => call.all_to_all_in_place(buf),
        Kind::Gather => call.gather_in_place(buf, root),
        Kind::Scatter => call.scatter_in_place(buf, root),
        Kind::Scan => call.scan(buf),
        Kind::ExScan => call.exscan(buf),
        _ => call.all_reduce(buf),
    }
}
