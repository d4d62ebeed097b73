//! The most that this machine can do: `cargo xtask peers` compares our times with these.
//!
//! - `cargo bench --bench limits -- memory RANKS BYTES,..`: the least time of an all_reduce in memory. Up to one thread per
//!   core reads a part of every rank's buffer once, adds, writes the sum to all buffers, and waits for nobody in between.
//! - `cargo bench --bench limits -- tcp RANKS BYTES,..`: each rank sends what an all_reduce sends, 2(n-1)/n of its buffer,
//!   to the next rank of a ring over loopback TCP, while as much comes from the rank before. Each rank is a thread.
//!   Several sizes of the sockets' buffers are tried, and the best time counts.
//! - `cargo bench --bench limits -- frames RANKS BYTES,..`: what system calls cost over TCP. Each rank sends the next a
//!   buffer in frames, at most AHEAD bytes more than it has received, and reads in place or through a window of 192 KB
//!   (docs/adr/0021-whole-messages.md). A line for each way: `frames FRAME ahead AHEAD in_place|window BYTES MICROSECONDS`.
//! - `cargo bench --bench limits -- slots 2 BYTES,..`: two threads give each other a buffer through slots of 128 KB, by
//!   ordinary stores or by stores past the caches, or copy it straight from each other's memory. A line for each way:
//!   `slots SLOTS ordinary|streamed BYTES MICROSECONDS in IN out OUT`, where IN and OUT are the mean times of copying in and
//!   out, and `slots 0 straight ..`. docs/bench/profile.md says what the lines show.
//!
//! Each round fills the buffers, passes a barrier, and then times operations back to back. The first two rounds do not
//! count. The time is the slowest thread's in each round, and then the median over rounds. `memory` (f32) and `tcp` print a
//! line for each size: `time all_reduce in_place RANKS BYTES MICROSECONDS`.

#![allow(missing_docs)]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};

type Res<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Res<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let [what, ranks, sizes] = &args[..] else {
        // This is not an error: a plain `cargo bench` runs every program without arguments.
        eprintln!("limits memory|tcp|frames|slots RANKS BYTES,..");
        return Ok(());
    };
    let ranks: usize = ranks.parse()?;
    if ranks < 2 {
        return Err(format!("{ranks} ranks: expected at least 2").into());
    }
    for size in sizes.split(',') {
        // Whole elements, at least one.
        let bytes = (size.parse::<usize>()? / 4).max(1) * 4;
        let seconds = match what.as_str() {
            "memory" => median_of_slowest(&memory(ranks, bytes)?),
            "tcp" => {
                let each = WINDOWS.map(|window| Ok(median_of_slowest(&tcp(ranks, bytes, window)?)));
                each.into_iter().collect::<Res<Vec<f64>>>()?.into_iter().fold(f64::MAX, f64::min)
            }
            "frames" => {
                frames(ranks, bytes)?;
                continue;
            }
            "slots" => {
                slots(ranks, bytes)?;
                continue;
            }
            _ => return Err(format!("{what}: expected memory, tcp, frames or slots").into()),
        };
        println!("time all_reduce in_place {ranks} {bytes} {:.3}", seconds * 1e6);
    }
    Ok(())
}

/// The operations of a round, and the number of rounds, as `allstream perf` chooses them.
fn rounds(bytes: usize) -> (usize, usize) {
    let iterations = (200_000_000 / (bytes + 20_000)).clamp(5, 2000);
    let group = if bytes <= 65_536 { 20 } else { 1 };
    (group, iterations.div_ceil(group))
}

const WARMUP: usize = 2;

/// The median over rounds of the slowest thread's time, in seconds; `times` has the times of each thread's rounds.
fn median_of_slowest(times: &[Vec<f64>]) -> f64 {
    let rounds = times.first().map_or(0, Vec::len);
    let slowest = |round: usize| times.iter().map(|mine| mine[round]).fold(0.0, f64::max);
    let mut all: Vec<f64> = (0..rounds).map(slowest).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// A barrier that spins: threads that are woken one after another would not overlap.
struct MemoryLock {
    threads: usize,
    arrived: AtomicUsize,
    /// A thread has failed, and comes here no more.
    is_given_up: AtomicBool,
}

/// The error of a thread that waited for another one, which has failed.
const GIVEN_UP: &str = "another thread has failed";

impl MemoryLock {
    fn new(threads: usize) -> MemoryLock {
        MemoryLock { threads, arrived: AtomicUsize::new(0), is_given_up: AtomicBool::new(false) }
    }

    /// Waits until all threads have come. An error: one of them has failed, and does not come.
    fn pass(&self) -> Res<()> {
        let turn = self.arrived.fetch_add(1, Ordering::AcqRel) / self.threads;
        let mut looks = 0;
        while self.arrived.load(Ordering::Acquire) < (turn + 1) * self.threads {
            looks += 1;
            if looks % 128 != 0 {
                std::hint::spin_loop();
            } else if self.is_given_up.load(Ordering::Relaxed) {
                return Err(GIVEN_UP.into());
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Tells the other threads that this one has failed, unless it is forgotten before it is dropped.
struct Unfinished<'a>(&'a MemoryLock);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.is_given_up.store(true, Ordering::Relaxed);
    }
}

/// What a thread does before the clock starts, and while the clock runs.
trait Worker {
    fn fill(&mut self) -> Res<()>;
    fn once(&mut self) -> Res<()>;
    /// Whether the work of a round was done: `times` operations on what was filled.
    fn is_right(&self, times: i32) -> bool;
}

/// Runs all workers at once; returns for each the seconds that an operation took in each round.
fn time<W: Worker + Send>(workers: Vec<W>, bytes: usize) -> Res<Vec<Vec<f64>>> {
    let (group, rounds) = rounds(bytes);
    let memory_lock = MemoryLock::new(workers.len());
    let run = |mut worker: W| -> Res<Vec<f64>> {
        let mut times = Vec::with_capacity(rounds);
        let unfinished = Unfinished(&memory_lock);
        for round in 0..WARMUP + rounds {
            worker.fill()?;
            memory_lock.pass()?;
            let start = Instant::now();
            for _ in 0..group {
                worker.once()?;
            }
            if round >= WARMUP {
                times.push(start.elapsed().as_secs_f64() / group as f64);
            }
            memory_lock.pass()?;
            if round + 1 == WARMUP + rounds && !worker.is_right(group as i32) {
                return Err(format!("wrong result at {bytes} bytes").into());
            }
        }
        std::mem::forget(unfinished);
        Ok(times)
    };
    let ended: Vec<Res<Vec<f64>>> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = workers.into_iter().map(|worker| scope.spawn(move || run(worker))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")?).collect()
    });
    let (failed, times): (Vec<_>, Vec<_>) = ended.into_iter().partition(Result::is_err);
    // The cause is told, and not that others had waited for it.
    let is_cause = |end: &Res<Vec<f64>>| end.as_ref().is_err_and(|error| error.to_string() != GIVEN_UP);
    let cause = failed.iter().position(is_cause).unwrap_or(0);
    failed.into_iter().nth(cause).into_iter().chain(times).collect()
}

/// A rank's buffer, cut into a part for each thread. Nobody waits for a lock: the memory lock keeps the phases apart.
type Parts<'a> = Vec<Mutex<&'a mut [f32]>>;

fn lock<T>(part: &Mutex<T>) -> MutexGuard<'_, T> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread of `memory`: it fills the buffers of some ranks, and adds up its part of all buffers.
struct Folder<'a, 'b> {
    ranks: &'a [Parts<'b>],
    index: usize,
    threads: usize,
    memory_lock: &'a MemoryLock,
}

/// Elements that are added up at a time: so many of every rank should fit the nearest cache.
const BLOCK: usize = 1024;

impl Worker for Folder<'_, '_> {
    fn fill(&mut self) -> Res<()> {
        // One thread fills the whole buffer of a rank, as the rank itself would.
        for parts in self.ranks.iter().skip(self.index).step_by(self.threads) {
            parts.iter().for_each(|part| lock(part).fill(1.0));
        }
        self.memory_lock.pass()
    }

    fn is_right(&self, times: i32) -> bool {
        let sum = (self.ranks.len() as f32).powi(times);
        let near = |x: &f32| *x == sum || (x / sum - 1.0).abs() < 1e-4;
        self.ranks.iter().all(|parts| lock(&parts[self.index]).iter().all(near))
    }

    fn once(&mut self) -> Res<()> {
        let mut mine: Vec<_> = self.ranks.iter().map(|parts| lock(&parts[self.index])).collect();
        let length = mine.first().map_or(0, |part| part.len());
        let mut sum = [0f32; BLOCK];
        for start in (0..length).step_by(BLOCK) {
            let block = start..length.min(start + BLOCK);
            let sum = &mut sum[..block.len()];
            if let [one, other] = &mut mine[..] {
                // Two ranks need no place for the sum.
                let pairs = one[block.clone()].iter_mut().zip(&mut other[block]);
                pairs.for_each(|(a, b)| {
                    let both = *a + *b;
                    (*a, *b) = (both, both);
                });
                continue;
            }
            sum.copy_from_slice(&mine[0][block.clone()]);
            for part in &mine[1..] {
                sum.iter_mut().zip(&part[block.clone()]).for_each(|(sum, x)| *sum += *x);
            }
            mine.iter_mut().for_each(|part| part[block.clone()].copy_from_slice(sum));
        }
        Ok(())
    }
}

fn memory(ranks: usize, bytes: usize) -> Res<Vec<Vec<f64>>> {
    let cores = std::thread::available_parallelism()?.get();
    let count = bytes / 4;
    let mut buffers = vec![vec![0f32; count]; ranks];
    // Whole cache lines for each thread.
    let part = count.div_ceil(cores).next_multiple_of(16);
    let threads = count.div_ceil(part);
    let parts: Vec<Parts<'_>> =
        buffers.iter_mut().map(|buffer| buffer.chunks_mut(part).map(Mutex::new).collect()).collect();
    let memory_lock = MemoryLock::new(threads);
    let folder = |index| Folder { ranks: &parts, index, threads, memory_lock: &memory_lock };
    time((0..threads).map(folder).collect(), bytes)
}

/// What a rank sends and receives, and its connections to the next one and from the one before.
struct Ends {
    to: TcpStream,
    from: TcpStream,
    sent: Vec<u8>,
    received: Vec<u8>,
}

impl Ends {
    fn fill(&mut self) {
        self.sent.fill(1);
        self.received.fill(0);
    }

    fn is_right(&self) -> bool {
        self.received.iter().all(|byte| *byte == 1)
    }
}

/// A rank of the exchange.
struct Exchange {
    ends: Ends,
    /// Bytes that go each way. If these are more than the buffer has, the buffer is used again from its start.
    amount: usize,
}

/// A call moves at most so much.
const CALL: usize = 1 << 20;
/// Bytes of the sockets' buffers; `None`: the system's choice. What waits between two ends should stay in the cache, and
/// which size that takes depends on the machine.
const WINDOWS: [Option<usize>; 4] = [None, Some(64 << 10), Some(256 << 10), Some(1 << 20)];

impl Worker for Exchange {
    fn fill(&mut self) -> Res<()> {
        self.ends.fill();
        Ok(())
    }

    fn is_right(&self, _: i32) -> bool {
        self.ends.is_right()
    }

    fn once(&mut self) -> Res<()> {
        let length = self.ends.sent.len();
        // What a call moves next: not past the end of the buffer, nor more than is left to move.
        let span = |done: usize| {
            let at = done % length;
            at..length.min(at + CALL).min(at + self.amount - done)
        };
        let (mut out, mut back) = (0, 0);
        while out < self.amount || back < self.amount {
            let mut moved = 0;
            if out < self.amount {
                let written = passed((&self.ends.to).write(&self.ends.sent[span(out)]))?;
                (out, moved) = (out + written, moved + written);
            }
            if back < self.amount {
                let range = span(back);
                let read = passed((&self.ends.from).read(&mut self.ends.received[range]))?;
                (back, moved) = (back + read, moved + read);
            }
            if moved == 0 {
                let flags = |wanted: bool, flag| if wanted { flag } else { PollFlags::empty() };
                let mut both = [
                    PollFd::new(&self.ends.to, flags(out < self.amount, PollFlags::OUT)),
                    PollFd::new(&self.ends.from, flags(back < self.amount, PollFlags::IN)),
                ];
                poll(&mut both, None)?;
            }
        }
        Ok(())
    }
}

/// Bytes that a call moved; 0 if the call would have had to wait.
fn passed(result: std::io::Result<usize>) -> Res<usize> {
    match result {
        Ok(0) => Err("the other end has hung up".into()),
        Ok(bytes) => Ok(bytes),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// A rank that sends in frames.
struct Framed {
    ends: Ends,
    /// What is read passes through this window, unless the window is empty.
    window: Vec<u8>,
    frame: usize,
    /// The most bytes that may be sent beyond the whole frames that have come.
    ahead: usize,
}

impl Worker for Framed {
    fn fill(&mut self) -> Res<()> {
        self.ends.fill();
        Ok(())
    }

    fn is_right(&self, _: i32) -> bool {
        self.ends.is_right()
    }

    fn once(&mut self) -> Res<()> {
        let (mut out, mut back, total) = (0, 0, self.ends.sent.len());
        while out < total || back < total {
            let before = out + back;
            let limit = total.min(back / self.frame * self.frame + self.ahead);
            while out < limit {
                let end = limit.min((out / self.frame + 1) * self.frame);
                match passed((&self.ends.to).write(&self.ends.sent[out..end]))? {
                    0 => break,
                    written => out += written,
                }
            }
            if back < total && self.window.is_empty() {
                back += passed((&self.ends.from).read(&mut self.ends.received[back..]))?;
            } else if back < total {
                let most = self.window.len().min(total - back);
                let read = passed((&self.ends.from).read(&mut self.window[..most]))?;
                self.ends.received[back..back + read].copy_from_slice(&self.window[..read]);
                back += read;
            }
            if out + back == before {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }
}

fn frames(ranks: usize, bytes: usize) -> Res<()> {
    const KB: usize = 1 << 10;
    let ways =
        [(bytes, bytes), (512 * KB, bytes), (128 * KB, bytes), (128 * KB, 512 * KB), (128 * KB, 256 * KB)];
    for (frame, ahead) in ways {
        for window in [0, 192 * KB] {
            let framed = |ends| Framed { ends, window: vec![0; window], frame, ahead };
            let workers = ring(ranks, bytes)?.into_iter().map(framed);
            let took = median_of_slowest(&time(workers.collect(), bytes)?) * 1e6;
            let place = if window == 0 { "in_place" } else { "window" };
            println!("frames {frame} ahead {ahead} {place} {bytes} {took:.1}");
        }
    }
    Ok(())
}

/// Connects the ranks to a ring; returns each rank's ends.
fn ring(ranks: usize, bytes: usize) -> Res<Vec<Ends>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let at = listener.local_addr()?;
    let (mut ends, mut others) = (Vec::new(), Vec::new());
    for _ in 0..ranks {
        let to = TcpStream::connect(at)?;
        to.set_nodelay(true)?;
        to.set_nonblocking(true)?;
        let from = listener.accept()?.0;
        from.set_nonblocking(true)?;
        ends.push(to);
        others.push(from);
    }
    // Rank r's connection ends at rank r + 1.
    others.rotate_right(1);
    let pairs = ends.into_iter().zip(others);
    Ok(pairs.map(|(to, from)| Ends { to, from, sent: vec![0; bytes], received: vec![0; bytes] }).collect())
}

fn tcp(ranks: usize, bytes: usize, window: Option<usize>) -> Res<Vec<Vec<f64>>> {
    let mut workers = Vec::new();
    for ends in ring(ranks, bytes)? {
        if let Some(window) = window {
            set_socket_send_buffer_size(&ends.to, window)?;
            set_socket_recv_buffer_size(&ends.from, window)?;
        }
        let amount = (2 * (ranks - 1) * bytes).div_ceil(ranks);
        workers.push(Exchange { ends, amount });
    }
    time(workers, bytes)
}

/// The most bytes that a slot holds, as in the engine.
const PIECE: usize = 128 << 10;

/// A count on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Count(AtomicUsize);

/// What one thread hands the other. Nobody waits for a lock: the counts say whose a slot is.
struct Handed {
    input: Mutex<Vec<u8>>,
    slots: Vec<Mutex<Vec<u8>>>,
    filled: Count,
    emptied: Count,
}

/// One of the two threads.
struct Hander<'a> {
    mine: &'a Handed,
    theirs: &'a Handed,
    output: Vec<u8>,
    streamed: bool,
    /// Nanoseconds of copying in, and out.
    spent: &'a [AtomicU64; 2],
}

impl Hander<'_> {
    fn spend(&self, which: usize, since: Instant) {
        self.spent[which].fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Worker for Hander<'_> {
    fn fill(&mut self) -> Res<()> {
        lock(&self.mine.input).fill(1);
        self.output.fill(0);
        Ok(())
    }

    fn is_right(&self, _: i32) -> bool {
        self.output.iter().all(|byte| *byte == 1)
    }

    fn once(&mut self) -> Res<()> {
        let (mine, theirs) = (self.mine, self.theirs);
        let depth = mine.slots.len();
        if depth == 0 {
            self.output.copy_from_slice(&lock(&theirs.input));
            return Ok(());
        }
        let input = lock(&mine.input);
        let pieces = input.len().div_ceil(PIECE);
        let (first, last) = (mine.filled.0.load(Ordering::Relaxed), theirs.emptied.0.load(Ordering::Relaxed));
        let (mut out, mut back) = (0, 0);
        while out < pieces || back < pieces {
            if out < pieces && first + out - mine.emptied.0.load(Ordering::Acquire) < depth {
                let start = Instant::now();
                let piece = &input[out * PIECE..input.len().min((out + 1) * PIECE)];
                let mut slot = lock(&mine.slots[(first + out) % depth]);
                if self.streamed {
                    // SAFETY: a slot has room for a piece, and the two do not overlap.
                    unsafe {
                        allstream_kernels::copy_streaming(piece.as_ptr(), slot.as_mut_ptr(), piece.len())
                    };
                } else {
                    slot[..piece.len()].copy_from_slice(piece);
                }
                drop(slot);
                self.spend(0, start);
                out += 1;
                mine.filled.0.store(first + out, Ordering::Release);
            }
            if back < pieces && theirs.filled.0.load(Ordering::Acquire) > last + back {
                let start = Instant::now();
                let range = back * PIECE..self.output.len().min((back + 1) * PIECE);
                let slot = lock(&theirs.slots[(last + back) % depth]);
                self.output[range.clone()].copy_from_slice(&slot[..range.len()]);
                drop(slot);
                self.spend(1, start);
                back += 1;
                theirs.emptied.0.store(last + back, Ordering::Release);
            }
        }
        Ok(())
    }
}

fn slots(ranks: usize, bytes: usize) -> Res<()> {
    if ranks != 2 {
        return Err(format!("{ranks} ranks: slots needs exactly 2").into());
    }
    let ways = [(2, false), (2, true), (4, false), (4, true), (32, false), (32, true), (0, false)];
    for (depth, streamed) in ways {
        let handed = || Handed {
            input: Mutex::new(vec![0; bytes]),
            slots: (0..depth).map(|_| Mutex::new(vec![0; PIECE])).collect(),
            filled: Count::default(),
            emptied: Count::default(),
        };
        let (one, other) = (handed(), handed());
        let spent = Default::default();
        let hander = |mine, theirs| Hander { mine, theirs, output: vec![0; bytes], streamed, spent: &spent };
        let times = time(vec![hander(&one, &other), hander(&other, &one)], bytes)?;
        let (group, rounds) = rounds(bytes);
        let each = |which: usize| {
            let count = 2 * group * (rounds + WARMUP);
            spent[which].load(Ordering::Relaxed) as f64 / 1e3 / count as f64
        };
        let way = match (depth, streamed) {
            (0, _) => "straight",
            (_, true) => "streamed",
            (_, false) => "ordinary",
        };
        let took = median_of_slowest(&times) * 1e6;
        println!("slots {depth} {way} {bytes} {took:.1} in {:.1} out {:.1}", each(0), each(1));
    }
    Ok(())
}
