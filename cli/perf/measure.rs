//! Times operations: in each round, after a barrier, all ranks run some back to back. In each round the slowest rank's time counts; the result is
//! the median over the rounds.

use std::cell::Cell;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Instant;

use allstream::cuda::DeviceStream;
use allstream::{Algo, AnyBuf, Call, Comm, Error, Kind, ReduceOp, Work};
use allstream_sys::cuda::CuResult;
use tokio::runtime::Runtime;

use super::case::{Case, What};
use super::clock::Clock;
use super::meeting::Seat;
use super::memory::Memory;
use super::time::Time;

/// How often operations run, and how.
#[derive(Debug)]
pub(crate) struct Effort {
    pub(crate) algo: Algo,
    /// Timed operations of each size. `None`: the size decides how many; on a device without `--join`, an untimed round does.
    pub(crate) iters: Option<usize>,
    /// Untimed operations before the timed ones.
    pub(crate) warmup: Option<usize>,
    pub(crate) check: bool,
    /// Operations are awaited on this runtime. `None`: the thread blocks in `.wait()` for each.
    pub(crate) runtime: Option<Runtime>,
    /// With a runtime: whether this round awaits.
    pub(crate) by_await: Cell<bool>,
    /// Every second round awaits, and the others block in `.wait()`.
    pub(crate) in_turns: bool,
    pub(crate) memory: Memory,
    /// `--join`: the device stream of the buffers waits for each operation, and the host only for the last of a group.
    pub(crate) joins: bool,
    /// If ranks are threads of one process, which may share a device: this rank's seat in the meeting where they wait for each other before a join.
    pub(crate) seat: Option<Rc<Seat>>,
    /// The device's clock, if the device runs the operations.
    pub(crate) clock: Option<Rc<Clock>>,
    /// Whether the device's clock times this round: then the device's stream waits for the operations.
    pub(crate) by_events: Cell<bool>,
}

/// Operations between two readings of the clock, for sizes up to 64 KB: a reading costs as much as the smallest operation.
const GROUP: usize = 20;
const GROUPED: usize = 64 << 10;
/// With `--join`: the most operations for which the stream waits before the host waits.
const JOINED: usize = 1000;
/// Bytes moved for a size, about: small sizes are cheap to repeat, large ones are not.
const BUDGET: usize = 200_000_000;
/// On a device: the seconds that all timed operations of a size and form should take, judging by an untimed round before; the least
/// and the most rounds; and the most operations.
///
/// A table of 4 KB, 64 KB, 16 MB and 256 MB by 8 threads on an H100 then takes about 3 s. This is an estimate, as no H100 has run it. It
/// assumes that a wait for the device costs 1 ms, and that the device copies 1.3 TB/s. It counts refreshes for both forms, though only the form
/// in place needs them.
/// - Small operations take 0.1 to 0.2 ms, so 500 of them 0.1 s, and 25 refreshes 25 ms: for 2 sizes of 2 forms, 0.5 s.
/// - 16 MB: 0.3 ms and 1 ms for a refresh, 25 rounds of both: for 2 forms, 0.1 s.
/// - 256 MB: 2 ms, and 3 ms to refresh 2 GB for all ranks, 25 rounds of both: for 2 forms, 0.3 s.
/// - Inputs of 256 MB: 9 doublings, and 24 pieces of memory that the driver is asked for: 0.1 s.
/// - Results of 256 MB: 2 GB over the bus at 20 GB/s, and as long again to compare them, for 2 forms: 0.4 s.
/// - 2 untimed rounds and 5 rounds by events, for each of 8 pairs of size and form: 0.1 s.
///
/// That is 1.5 s, and as much is left for the context, the kernels and the copies above the table.
const DEVICE_SECONDS: f64 = 0.1;
const DEVICE_ROUNDS: (usize, usize) = (5, 25);
const DEVICE_OPERATIONS: usize = 500;
/// Rounds that are timed by the device's clock.
const BY_EVENTS: usize = 5;

impl Effort {
    /// The effort of a `perf` without options.
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
            seat: None,
            clock: None,
            by_events: Cell::new(false),
        }
    }

    /// Timed operations of a size.
    pub(crate) fn iterations(bytes: usize) -> usize {
        (BUDGET / (bytes + 20_000)).clamp(5, 2000)
    }

    /// The runtime that awaits operations, if this round awaits.
    fn awaits(&self) -> Option<&Runtime> {
        self.runtime.as_ref().filter(|_| self.by_await.get())
    }

    /// The stream that waits for operations, if one does.
    fn joining(&self) -> Option<&DeviceStream> {
        self.memory.stream().filter(|_| self.joins || self.by_events.get())
    }

    /// Runs operations to their end. In a round that blocks in `.wait()`, the future is ready when it is first polled.
    fn run<T>(&self, operations: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let mut result = Err(invalid("the operations were not run to their end"));
        self.block_on(pin!(async { result = operations.await }));
        result
    }

    /// Takes a trait object, so that the runtime's code is compiled once, and not for every kind of operation.
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
            // Groups of up to 1000 would leave one or two rounds.
            return (group, 5, self.warmup.map_or(1, |warmup| warmup.div_ceil(group)));
        }
        (group, iters.div_ceil(group), self.warmup.map_or(2, |warmup| warmup.div_ceil(group)))
    }

    /// Whether an untimed round decides how many operations to time: on a device, their size does not tell how long they take.
    fn tries_first(&self) -> bool {
        self.memory.stream().is_some() && self.iters.is_none() && !self.joins
    }

    /// Operations a round, and rounds, if one operation took `seconds` in the untimed round, which had `group` of them.
    fn rounds_by(seconds: f64, group: usize) -> (usize, usize) {
        let (least, most) = DEVICE_ROUNDS;
        let operations = ((DEVICE_SECONDS / seconds) as usize).clamp(least, DEVICE_OPERATIONS);
        let group = group.min(operations / least);
        (group, (operations / group).min(most))
    }
}

/// Ends a message as this round does: awaits it, or blocks in `.wait()`.
macro_rules! wait {
    ($effort:expr, $work:expr) => {
        match $effort.awaits() {
            Some(_) => $work.await.map_err(Error::from),
            None => $work.wait().map_err(Error::from),
        }
    };
}

/// Runs one collective after another, and ends each as this round does: joins it, awaits it, or blocks in `.wait()`.
fn collectives<S: Send + 'static>(
    effort: &Effort,
    count: usize,
    mut state: S,
    mut start: impl FnMut(S) -> Work<S>,
) -> Result<S, Error> {
    if let Some(stream) = effort.joining() {
        for _ in 0..count {
            let work = start(state);
            if let Some(seat) = &effort.seat {
                seat.meet();
            }
            state = work.join(stream)?.in_order()?;
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
    let out = {
        let made = OutOfPlace::new(comm, case, effort);
        let mut timed = together(comm, made)?;
        time(comm, case, effort, &mut timed)?
    };
    // The buffers of the first form are dropped by now, as there may be no room for those of both forms.
    if !case.what.in_place() {
        return Ok((out, None));
    }
    Ok((out, Some(measure_in_place(comm, case, effort)?)))
}

/// One size in place.
pub(crate) fn measure_in_place(comm: &mut Comm, case: &Case, effort: &Effort) -> Result<Time, Error> {
    let made = InPlace::new(comm, case, effort);
    let mut timed = together(comm, made)?;
    time(comm, case, effort, &mut timed)
}

/// Returns this rank's own result, if no rank has failed. If one has, all ranks fail, and say why, so that none waits for a rank
/// that has gone.
pub(crate) fn together<T>(comm: &mut Comm, mine: Result<T, Error>) -> Result<T, Error> {
    /// Bytes of the error text that the failed rank sends to the others; the rest is cut off.
    const TEXT: usize = 2000;
    let (rank, size) = (comm.rank(), comm.size());
    let failed = if mine.is_err() { rank } else { size };
    let first = comm.op(ReduceOp::Min).all_reduce(vec![failed as u64]).wait()?[0] as usize;
    if first == size {
        return mine;
    }
    let mut text = mine.as_ref().err().map(Error::to_string).unwrap_or_default().into_bytes();
    text.resize(TEXT, 0);
    let text = comm.broadcast(text, first).wait()?;
    let text = String::from_utf8_lossy(&text);
    mine.and_then(|_| Err(invalid(&format!("rank {first} has failed: {}", text.trim_end_matches('\0')))))
}

/// If the device had no memory for a buffer, makes the error say for which, and what the user can do.
fn room<T>(
    comm: &Comm,
    case: &Case,
    effort: &Effort,
    elements: usize,
    made: Result<T, Error>,
) -> Result<T, Error> {
    let out_of_memory = CuResult::OUT_OF_MEMORY.0;
    made.map_err(|error| match (&error, effort.memory.stream()) {
        (Error::Cuda { code, .. }, Some(stream)) if *code == out_of_memory => {
            let device = stream.device();
            let unit = effort.memory.dtype.size();
            let free = device.memory().map_or("an unknown number of".into(), |(free, _)| free.to_string());
            invalid(&format!(
                "device {} has no memory for {} of {} bytes: this rank's buffers take {} bytes there, those of the {} ranks that \
                 have this device as much each, and {free} bytes are free besides what this process has; take fewer ranks (-N) \
                 or smaller sizes (-e, --sizes), or end what else is on the device ({error})",
                device.ordinal(),
                case.what,
                case.elements() * unit,
                elements * unit,
                comm.size(),
            ))
        }
        _ => error,
    })
}

/// An operation that is timed, with the buffers that it needs.
trait Timed {
    /// Fills the inputs, and before a check clears the results of earlier operations.
    fn fill(&mut self, comm: &Comm, check: bool) -> Result<(), Error>;
    /// Runs so many operations back to back.
    fn run(&mut self, comm: &mut Comm, count: usize) -> Result<(), Error>;
    /// How many elements of this rank's result are wrong.
    fn wrong(&mut self) -> Result<u64, Error>;
}

/// Takes the buffers. They are missing, which is an error, if an earlier operation failed and did not give them back.
fn held<S>(state: &mut Option<S>) -> Result<S, Error> {
    state.take().ok_or_else(|| invalid("an operation of this size has failed before"))
}

fn invalid(problem: &str) -> Error {
    Error::Invalid { call: "perf".into(), problem: problem.into() }
}

/// A collective from one buffer into another, or messages.
struct OutOfPlace<'a> {
    case: &'a Case,
    effort: &'a Effort,
    bufs: Option<(AnyBuf, AnyBuf)>,
}

impl<'a> OutOfPlace<'a> {
    fn new(comm: &Comm, case: &'a Case, effort: &'a Effort) -> Result<OutOfPlace<'a>, Error> {
        let (memory, (input, output)) = (&effort.memory, case.lengths());
        let make = || {
            let (from, to) = (memory.make(comm, input)?, memory.make(comm, output)?);
            Ok((if memory.stream().is_some() { memory.fill(from, case, false)? } else { from }, to))
        };
        let bufs = Some(room(comm, case, effort, input + output, make())?);
        Ok(OutOfPlace { case, effort, bufs })
    }
}

impl Timed for OutOfPlace<'_> {
    fn fill(&mut self, comm: &Comm, check: bool) -> Result<(), Error> {
        let (mut from, mut to) = held(&mut self.bufs)?;
        let memory = &self.effort.memory;
        // On a device the input is there since the buffer was made, and no operation writes it.
        let is_there = memory.stream().is_some();
        if !is_there {
            from = memory.fill(from, self.case, false)?;
        }
        if check || !is_there {
            to = memory.clear(comm, to)?;
        }
        self.bufs = Some((from, to));
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

/// A collective in one buffer.
struct InPlace<'a> {
    case: &'a Case,
    effort: &'a Effort,
    buf: Option<AnyBuf>,
    /// On a device: a copy of the input, from which the buffer is refreshed before each round.
    input: Option<AnyBuf>,
}

impl<'a> InPlace<'a> {
    fn new(comm: &Comm, case: &'a Case, effort: &'a Effort) -> Result<InPlace<'a>, Error> {
        let (memory, len) = (&effort.memory, in_place_length(case));
        let make = || match (memory.make(comm, len)?, memory.stream()) {
            (buf, None) => Ok((buf, None)),
            (buf, Some(_)) => memory.copy(memory.fill(buf, case, true)?).map(|(buf, copy)| (buf, Some(copy))),
        };
        let (buf, input) = room(comm, case, effort, 2 * len, make())?;
        Ok(InPlace { case, effort, buf: Some(buf), input })
    }
}

impl Timed for InPlace<'_> {
    fn fill(&mut self, _: &Comm, _: bool) -> Result<(), Error> {
        let (memory, buf) = (&self.effort.memory, held(&mut self.buf)?);
        self.buf = Some(match self.input.take() {
            None => memory.fill(buf, self.case, true)?,
            Some(input) => {
                let (buf, input) = memory.refresh(buf, input)?;
                self.input = Some(input);
                buf
            }
        });
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
    let (mut group, mut rounds, mut warmup) = effort.rounds(bytes);
    if effort.tries_first() {
        warmup = warmup.max(1);
    }
    // The rounds' times: of those that await (of all rounds, if they take no turns), and of those that block in `.wait()`.
    let mut mine = [Vec::with_capacity(rounds), Vec::new()];
    let ways = if effort.in_turns { 2 } else { 1 };
    let mut turn = 0;
    while turn < ways * (warmup + rounds) {
        // The two ways alternate, also in which of them comes first.
        let (round, way) = (turn / ways, (turn + turn / ways) % ways);
        effort.by_await.set(way == 0);
        // New inputs for each round: sums of the last round's sums would leave the range of ordinary numbers.
        timed.fill(comm, false)?;
        comm.barrier().wait()?;
        let start = Instant::now();
        timed.run(comm, group)?;
        if let Some(stream) = effort.joining() {
            stream.synchronize()?;
        }
        let seconds = start.elapsed().as_secs_f64() / group as f64;
        // Where ranks share cores, a rank that has finished the round would fill its buffer on a core that another rank still needs.
        comm.barrier().wait()?;
        if round >= warmup {
            mine[way].push(seconds);
        }
        turn += 1;
        if effort.tries_first() && turn == ways * warmup {
            let slowest = comm.op(ReduceOp::Max).all_reduce(vec![seconds]).wait()?[0];
            (group, rounds) = Effort::rounds_by(slowest, group);
        }
    }
    effort.by_await.set(true);
    let [mine, waited] = mine;
    let mut slowest = comm.op(ReduceOp::Max).all_reduce(mine).wait()?;
    let mut waited = comm.op(ReduceOp::Max).all_reduce(waited).wait()?;
    let device_us = by_events(comm, case, effort, timed, if effort.joins { group } else { 1 }, rounds)?;
    let wrong = if effort.check {
        timed.fill(comm, true)?;
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
    Ok(Time { wait_us, device_us, ..Time::new(&slowest, bytes, case, wrong) })
}

/// Microseconds that an operation takes on the slowest rank's device, the median over rounds: from when the rank's stream has come to
/// the call of the operation until the operation has ended there. `None`: no device runs it, or its driver does not tell.
///
/// This takes separate rounds, so that the others time a program that records no events.
fn by_events(
    comm: &mut Comm,
    case: &Case,
    effort: &Effort,
    timed: &mut dyn Timed,
    count: usize,
    rounds: usize,
) -> Result<Option<f64>, Error> {
    let What::Collective(_) = case.what else { return Ok(None) };
    let Some(clock) = &effort.clock else { return Ok(None) };
    let mut mine = Vec::with_capacity(BY_EVENTS);
    for _ in 0..rounds.min(BY_EVENTS) {
        timed.fill(comm, false)?;
        comm.barrier().wait()?;
        // Without --join the rank is bound to this stream, so a join returns only when all ranks have called and the operation is
        // on the stream. If it returned earlier, the stream would wait for work that is on no stream yet, and could hold up other ranks' streams.
        effort.by_events.set(true);
        clock.start()?;
        let run = timed.run(comm, count);
        effort.by_events.set(false);
        run?;
        clock.stop()?;
        // If the driver of any rank cannot tell the time, no rank reports one: infinity is the slowest.
        mine.push(clock.seconds()?.map_or(f64::INFINITY, |seconds| seconds / count as f64));
        comm.barrier().wait()?;
    }
    let mut slowest = comm.op(ReduceOp::Max).all_reduce(mine).wait()?;
    slowest.sort_by(f64::total_cmp);
    Ok(slowest.get(slowest.len() / 2).filter(|seconds| seconds.is_finite()).map(|seconds| seconds * 1e6))
}

fn in_place_length(case: &Case) -> usize {
    let (input, output) = case.lengths();
    match case.what {
        // Every rank's buffer has one block, the root's included.
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

/// Rank 0 sends its input to rank 1, which sends it back; other ranks do nothing.
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

#[cfg(test)]
mod tests {
    use super::super::on_threads;
    use super::*;

    #[test]
    fn a_rank_that_fails_by_itself_is_told_to_all() {
        let told = on_threads(Comm::local(3).unwrap(), |comm| {
            let came = together(comm, Ok(comm.rank()))?;
            let mine = if comm.rank() == 1 { Err(invalid("no memory")) } else { Ok(()) };
            let error = together(comm, mine).unwrap_err();
            Ok((came, error.to_string()))
        });
        let told: Vec<(usize, String)> = told.unwrap();
        let others = "perf: rank 1 has failed: perf: no memory".to_owned();
        assert_eq!(told, [(0, others.clone()), (1, "perf: no memory".into()), (2, others)]);
    }

    #[test]
    fn a_rank_that_failed_is_named_before_those_that_lost_it() {
        let failed = on_threads(Comm::local(2).unwrap(), |comm| {
            if comm.rank() == 1 {
                return Err("the cause".into());
            }
            Ok(comm.barrier().wait().map_err(Error::from)?)
        });
        assert_eq!(failed.unwrap_err().to_string(), "the cause");
    }

    #[test]
    fn on_a_device_rounds_follow_the_time_of_an_operation() {
        // 150 us: as many as are allowed. 10 ms: as many as there is time for. 100 ms, alone and 20 a round: no fewer than 5.
        assert_eq!(Effort::rounds_by(150e-6, 20), (20, 25));
        assert_eq!(Effort::rounds_by(150e-6, 1), (1, 25));
        assert_eq!(Effort::rounds_by(0.01, 1), (1, 10));
        assert_eq!(Effort::rounds_by(0.1, 1), (1, 5));
        assert_eq!(Effort::rounds_by(0.1, 20), (1, 5));
        assert_eq!(Effort::rounds_by(0.0, 20), (20, 25), "a clock that has not moved");
    }
}
