//! Probes with a stream that waits: which other streams share its hardware queue, and how many launches can be put on it before a call blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use allstream_sys::cuda::CudaError;

use super::answer::{Answer, listed, show_us, step, us};
use super::driver::{Aside, Gate, Gpu, Problem, Stream, Word, code, problem, soon};

/// How many streams of the usual priority are made, and how many of the highest.
const STREAMS: usize = 40;
const URGENT: usize = 12;
/// If no further stream comes to its work within this time, the streams that have not come to theirs count as held up.
const QUIET: Duration = Duration::from_millis(8);
/// As [`QUIET`], for the tries by which queues are counted. On a busy host a stream may be late though nothing holds it up: so this time is
/// longer, and each of these tries is made twice.
const SURE: Duration = Duration::from_millis(20);
/// After this time no further stream is blocked, if at least [`LEAST`] have been blocked by then.
const LOOK: Duration = Duration::from_millis(1300);
/// At least so many streams are blocked in turn, however long that takes.
const LEAST: usize = 8;

/// Streams, the word that the blocked one waits for (`gate`), the words that the others write (`bells`), and the number of tries (`round`).
struct Many {
    streams: Vec<Stream>,
    gate: Gate,
    bells: Vec<Word>,
    round: u32,
}

impl Many {
    /// Which streams are held up in both of two tries while the stream `blocked` waits.
    fn surely_held_up_by(&mut self, blocked: usize) -> Result<Vec<bool>, Problem> {
        let (first, second) = (self.held_up_by(blocked, SURE)?, self.held_up_by(blocked, SURE)?);
        Ok(first.into_iter().zip(second).map(|(first, second)| first && second).collect())
    }

    /// Which streams are held up while the stream `blocked` waits.
    fn held_up_by(&mut self, blocked: usize, quiet: Duration) -> Result<Vec<bool>, Problem> {
        self.round += 1;
        let round = self.round;
        step(&format!("blocking stream {blocked}"));
        self.streams[blocked].wait(self.gate.0, round)?;
        let others = |i: &usize| *i != blocked;
        for i in (0..self.streams.len()).filter(others) {
            self.streams[i].write(self.bells[i], round)?;
        }
        let has_come = |i: usize| self.bells[i].get() >= round;
        let (mut come, mut last) = (0, Instant::now());
        while come < self.streams.len() - 1 && last.elapsed() < quiet {
            let now = (0..self.streams.len()).filter(others).filter(|i| has_come(*i)).count();
            if now > come {
                (come, last) = (now, Instant::now());
            }
            thread::yield_now();
        }
        let held = (0..self.streams.len()).map(|i| i != blocked && !has_come(i)).collect();
        self.gate.0.set(round);
        let all = || (0..self.streams.len()).filter(others).all(has_come);
        if !soon(Duration::from_secs(1), all) {
            return Err(problem(
                "streams that were held up did not go on within 1 s after the host's release",
            ));
        }
        Ok(held)
    }
}

pub(crate) fn queues(gpu: &'static Gpu) -> Result<Answer, Problem> {
    const ALL: usize = STREAMS + URGENT;
    step("making streams");
    let usual = (0..STREAMS).map(|_| gpu.stream());
    let streams: Vec<Stream> =
        usual.chain((0..URGENT).map(|_| gpu.urgent_stream())).collect::<Result<_, _>>()?;
    let ([gate], bells) = (gpu.words()?.map(Gate), gpu.words::<ALL>()?.to_vec());
    let mut many = Many { streams, gate, bells, round: 0 };
    let is_urgent = |i: usize| i >= STREAMS;
    let start = Instant::now();
    let mut rows: Vec<(usize, Vec<bool>)> = Vec::new();
    // First blocks one stream of each queue, as far as time allows: if no blocked stream of a stream's own priority has held that stream up,
    // no stream of its queue was blocked yet.
    for urgent in [false, true] {
        for i in (0..ALL).filter(|i| is_urgent(*i) == urgent) {
            let known = rows.iter().any(|(by, held)| is_urgent(*by) == urgent && held[i]);
            if !known && (rows.len() < LEAST || start.elapsed() < LOOK) {
                rows.push((i, many.surely_held_up_by(i)?));
            }
        }
    }
    let queues = |urgent: bool| rows.iter().filter(|(by, _)| is_urgent(*by) == urgent).count();
    let (of_usual, of_urgent) = (queues(false), queues(true));
    for i in 0..ALL {
        let enough = rows.len() >= LEAST && start.elapsed() > LOOK;
        if !enough && !rows.iter().any(|(by, _)| *by == i) {
            rows.push((i, many.held_up_by(i, QUIET)?));
        }
    }
    let crosses = rows.iter().any(|(by, held)| (0..ALL).any(|i| held[i] && is_urgent(i) != is_urgent(*by)));
    let with =
        |by: usize, held: &[bool]| (0..ALL).filter(|i| held[*i] && is_urgent(*i) == is_urgent(by)).count();
    let usual_rows: Vec<usize> =
        rows.iter().filter(|(by, _)| !is_urgent(*by)).map(|(by, held)| with(*by, held)).collect();
    let mean = usual_rows.iter().sum::<usize>() as f64 / usual_rows.len().max(1) as f64;
    let connections = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS");
    let remark = format!(
        "{STREAMS} streams; one that waits holds up {mean:.1} of the others; {URGENT} of the highest priority have {of_urgent}, and {} one \
         with the usual ones; CUDA_DEVICE_MAX_CONNECTIONS is {}; {} streams were blocked in turn",
        if crosses { "share" } else { "never share" },
        connections.unwrap_or_else(|_| "not set".into()),
        rows.len()
    );
    Ok(Answer::new(format!("{of_usual} queues"), remark)
        .with("queues", of_usual as f64)
        .with("queues_of_highest_priority", of_urgent as f64)
        .with("held_up", mean)
        .with("highest_priority_shares", f64::from(crosses)))
}

/// Makes a few streams, and returns one that goes on while `waiting` waits for the gate to show `round`. `None`: `waiting` holds all of them up.
pub(crate) fn stream_beside(waiting: &Stream, gate: &Gate, round: u32) -> Result<Option<Stream>, Problem> {
    const TRIES: usize = 6;
    let gpu = waiting.gpu;
    let bells = gpu.words::<TRIES>()?;
    let streams = bells.iter().map(|_| gpu.stream()).collect::<Result<Vec<_>, _>>()?;
    waiting.wait(gate.0, round)?;
    for (stream, bell) in streams.iter().zip(&bells) {
        stream.write(*bell, 1)?;
    }
    soon(QUIET, || bells.iter().any(|bell| bell.get() == 1));
    let found = bells.iter().position(|bell| bell.get() == 1);
    gate.0.set(round);
    for bell in &bells {
        bell.reach(1, "a word that a stream writes beside one that waited")?;
    }
    Ok(found.and_then(|found| streams.into_iter().nth(found)))
}

/// The most calls that put work on a waiting stream (`MOST`), and the longest time for which launches are put on it (`FILLING`).
const MOST: u32 = 20_000;
const FILLING: Duration = Duration::from_millis(1000);
/// An enqueueing call that does not return for so long counts as blocked.
const BLOCKED: Duration = Duration::from_millis(250);

/// How many calls put work on a waiting stream, and whether the thread that made them has ended (`done`).
struct Filled {
    count: u32,
    /// Whether the stream took no more: a call did not return.
    is_full: bool,
    done: Arc<AtomicBool>,
}

/// Puts work on a stream that waits, until a call does not return, [`MOST`] calls were made, or `limit` is over.
fn fill(
    gpu: &'static Gpu,
    put: impl Fn() -> Result<(), CudaError> + Send + 'static,
    limit: Duration,
) -> Result<Filled, Problem> {
    let (count, stop, done) =
        (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (counted, stopped, is_done) = (count.clone(), stop.clone(), done.clone());
    let filling = Aside::new(gpu, move || {
        let mut result = Ok(());
        while result.is_ok() && counted.load(Ordering::Relaxed) < MOST && !stopped.load(Ordering::Relaxed) {
            result = put();
            counted.fetch_add(1, Ordering::Release);
        }
        is_done.store(true, Ordering::Release);
        result
    })?;
    filling.go()?;
    let start = Instant::now();
    let (mut last, mut since) = (0, start);
    let is_full = loop {
        if let Some((result, _)) = filling.within(Duration::from_millis(1)) {
            result?;
            break false;
        }
        let now = count.load(Ordering::Acquire);
        if now != last {
            (last, since) = (now, Instant::now());
        } else if since.elapsed() > BLOCKED {
            break true;
        }
        if start.elapsed() > limit {
            stop.store(true, Ordering::Relaxed);
            // The call that is under way may be the one that does not return.
            break filling.within(BLOCKED).is_none();
        }
    };
    // If the call that is under way returns later, no other call follows.
    stop.store(true, Ordering::Relaxed);
    Ok(Filled { count: count.load(Ordering::Acquire), is_full, done })
}

impl Filled {
    fn told(&self) -> String {
        let count = self.count;
        if self.is_full { count.to_string() } else { format!("more than {count}") }
    }
}

pub(crate) fn depth(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let [gate, bell] = gpu.words()?;
    let (gate, kernel) = (Gate(gate), gpu.small_kernel()?);
    let stream: &'static Stream = Box::leak(Box::new(gpu.stream()?));
    step("looking for a stream that goes on meanwhile");
    let beside = stream_beside(stream, &gate, 1)?;
    let is_beside = beside.is_some();
    let other: &'static Stream = Box::leak(Box::new(beside.map_or_else(|| gpu.stream(), Ok)?));
    let event = gpu.event()?;
    other.record(&event)?;
    other.synchronize()?;
    let kernel: &'static _ = Box::leak(Box::new(kernel));

    // Each call is made on a thread of its own, which has entered the context before the stream is full.
    let asides = [
        ("cuEventQuery", Aside::new(gpu, move || event.is_done().map(drop))?),
        ("cuStreamQuery of another stream", Aside::new(gpu, move || other.is_done().map(drop))?),
        ("cuCtxPushCurrent and cuCtxPopCurrent", Aside::new(gpu, move || enter_and_leave(gpu))?),
        ("cuStreamWriteValue32 on another stream", Aside::new(gpu, move || other.write(bell, 1))?),
        ("cuLaunchKernel on another stream", Aside::new(gpu, move || other.launch(kernel))?),
        ("cuMemAlloc", Aside::new(gpu, move || gpu.memory(1 << 20).map(drop))?),
    ];
    step("launching on a stream that waits");
    stream.wait(gate.0, 2)?;
    let launches = fill(gpu, move || stream.launch(kernel), FILLING)?;
    let (mut returned, mut waited) = (Vec::new(), Vec::new());
    if launches.is_full {
        for (name, aside) in &asides {
            step(&format!("{name}, while a launch does not return"));
            aside.go()?;
            match aside.within(Duration::from_millis(100)) {
                Some((Ok(()), _)) => returned.push((*name).to_owned()),
                Some((Err(error), _)) => returned.push(format!("{name} ({})", code(&error))),
                None => waited.push(*name),
            }
        }
    }
    step("the host releases the stream");
    let start = Instant::now();
    gate.0.set(2);
    let over = soon(Duration::from_millis(1500), || launches.done.load(Ordering::Acquire))
        && soon(Duration::from_millis(1500), || stream.is_done().unwrap_or(false));
    let released = start.elapsed();
    let mut remark = String::new();
    if launches.is_full {
        remark = format!("then these calls return: {}; these wait: {}; ", listed(&returned), listed(&waited));
        if !is_beside {
            remark += "no other stream was found that goes on while one waits; ";
        }
    }
    remark += &match over {
        true => format!("all was over {} after the host's release", show_us(us(released))),
        false => format!("NOT all was over {} after the host's release", show_us(us(released))),
    };
    let mut figures = vec![
        ("launches".to_owned(), f64::from(launches.count)),
        ("is_full".to_owned(), f64::from(launches.is_full)),
        ("calls_that_wait".to_owned(), waited.len() as f64),
        ("release_us".to_owned(), us(released)),
    ];
    // The same with another kind of work, if the stream was full and all launches are over: otherwise there may be no time for it.
    if launches.is_full && over {
        step("filling memory on a stream that waits");
        let memory = gpu.memory(256)?;
        stream.wait(gate.0, 3)?;
        let fills = fill(gpu, move || stream.fill(&memory, 0, 4), Duration::from_millis(200))?;
        gate.0.set(3);
        remark += &format!("; of cuMemsetD8Async it takes {}", fills.told());
        figures.push(("fills".to_owned(), f64::from(fills.count)));
        soon(Duration::from_millis(500), || fills.done.load(Ordering::Acquire));
    }
    Ok(Answer::new(format!("{} launches", launches.told()), remark).with_all(figures))
}

/// Enters the context and leaves it. The engine does so around its calls on threads that do not keep the context entered.
fn enter_and_leave(gpu: &Gpu) -> Result<(), CudaError> {
    gpu.enter()?;
    // SAFETY: pops what was just pushed on this thread.
    unsafe { gpu.cuda.ctx_pop_current() }.map(drop)
}
