//! Probes of one stream: queries without a context, words in pinned memory, and how soon the host notices what a stream has done.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use allstream_sys::cuda::{
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE,
    CudaError,
};

use super::answer::{Answer, median, show_us, step, us};
use super::driver::{Gate, Gpu, Problem, SmallKernel, Stream, Word, code, problem, soon};

/// How long a probe waits after it has put work on a stream, so that the stream reaches this work.
const SETTLE: Duration = Duration::from_micros(200);

/// Whether events and streams can be queried on a thread that has no context.
pub(crate) fn without_a_context(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let (stream, event) = (gpu.stream()?, gpu.event()?);
    stream.record(&event)?;
    stream.synchronize()?;
    step("asking on a thread without a context");
    let asked = thread::Builder::new().spawn(move || {
        // SAFETY: only asks which context this thread has.
        let current = unsafe { gpu.cuda.ctx_get_current() };
        (current, event.is_done(), stream.is_done())
    })?;
    let (current, event, stream) = asked.join().map_err(|_| problem("the thread that asked panicked"))?;
    if !current?.0.is_null() {
        return Err(problem("a new thread has a context already"));
    }
    let said = |answer: &Result<bool, CudaError>| match answer {
        Ok(_) => "works".to_owned(),
        Err(error) => code(error),
    };
    let works = event.is_ok() && stream.is_ok();
    Ok(Answer::yes_or_no(works, format!("cuEventQuery: {}; cuStreamQuery: {}", said(&event), said(&stream))))
}

/// Whether streams can use words in memory that was pinned or registered with the flag PORTABLE alone.
pub(crate) fn without_device_map(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let stream = gpu.stream()?;
    let works = |words: Result<[Word; 2], Problem>| -> Result<(), Problem> {
        let [gate, bell] = words?;
        let gate = Gate(gate);
        step("a stream waits for a word there, and writes one");
        stream.wait(gate.0, 1)?;
        stream.write(bell, 1)?;
        thread::sleep(SETTLE);
        if bell.get() != 0 {
            return Err(problem("a stream did not wait for its word"));
        }
        gate.0.set(1);
        bell.reach(1, "a word that a stream writes")
    };
    step("memory of cuMemHostAlloc with PORTABLE alone");
    let allocated = works(gpu.words_with(CU_MEMHOSTALLOC_PORTABLE).map_err(Problem::from));
    step("memory of cuMemHostRegister with PORTABLE alone");
    let registered = works(gpu.registered_words(CU_MEMHOSTREGISTER_PORTABLE, None));
    let said = |answer: &Result<(), Problem>| match answer {
        Ok(()) => "works".to_owned(),
        Err(Problem(text)) => text.clone(),
    };
    let remark = format!("allocated: {}; registered: {}", said(&allocated), said(&registered));
    Ok(Answer::yes_or_no(allocated.is_ok() && registered.is_ok(), remark))
}

/// The time from the host's store that releases a stream until the host sees the word that the stream writes next.
pub(crate) fn release(gpu: &'static Gpu) -> Result<Answer, Problem> {
    const ROUNDS: u32 = 200;
    let [gate, bell] = gpu.words()?;
    let (stream, gate) = (gpu.stream()?, Gate(gate));
    let end = Instant::now() + Duration::from_millis(1500);
    let mut times = Vec::new();
    for round in 1..=ROUNDS {
        stream.wait(gate.0, round)?;
        stream.write(bell, round)?;
        thread::sleep(SETTLE);
        step(&format!("release {round}"));
        let start = Instant::now();
        gate.0.set(round);
        bell.reach(round, "a stream that the host has released")?;
        times.push(us(start.elapsed()));
        if Instant::now() > end {
            break;
        }
    }
    let longest = times.iter().copied().fold(0.0, f64::max);
    let (count, median) = (times.len(), median(&mut times));
    Ok(Answer::new(show_us(median), format!("median of {count}; the longest {}", show_us(longest)))
        .with("release_us", median)
        .with("release_longest_us", longest))
}

/// The function that a stream calls on the host: it sends the time of the call.
unsafe extern "C" fn tell_when(sender: *mut c_void) {
    // SAFETY: `call_back` has made this pointer from a box, for this one call.
    let sender = unsafe { Box::from_raw(sender.cast::<Sender<Instant>>()) };
    let _ = sender.send(Instant::now());
}

/// Puts a host function on a stream. The receiver gets the time at which the function is called.
fn call_back(stream: &Stream) -> Result<Receiver<Instant>, CudaError> {
    let (sender, receiver) = channel::<Instant>();
    let sender = Box::into_raw(Box::new(sender)).cast();
    // SAFETY: the stream exists, and calls the function once, which then takes the sender over.
    unsafe { stream.gpu.cuda.launch_host_func(stream.raw(), tell_when, sender) }?;
    Ok(receiver)
}

/// A stream that waits for `gate`, runs a kernel, and then writes `bell`. It serves to measure how much later the host learns of the kernel's
/// end by other means, such as an event, than by `bell`.
struct Ending {
    stream: Stream,
    gate: Gate,
    bell: Word,
    round: u32,
}

impl Ending {
    fn put(&mut self, kernel: &SmallKernel) -> Result<(), CudaError> {
        self.round += 1;
        self.stream.wait(self.gate.0, self.round)?;
        self.stream.launch(kernel)?;
        self.stream.write(self.bell, self.round)
    }

    /// Releases the stream after 1 ms, on another thread, which gives the time when it saw `bell`.
    fn release(&self) -> Result<thread::JoinHandle<Option<Instant>>, Problem> {
        let (gate, bell, round) = (self.gate.0, self.bell, self.round);
        Ok(thread::Builder::new().spawn(move || {
            thread::sleep(Duration::from_millis(1));
            gate.set(round);
            soon(Duration::from_secs(1), || bell.get() >= round).then(Instant::now)
        })?)
    }
}

fn seen(thread: thread::JoinHandle<Option<Instant>>) -> Result<Instant, Problem> {
    let seen = thread.join().map_err(|_| problem("the thread that watches a word panicked"))?;
    seen.ok_or_else(|| problem("a word behind a kernel was not written within 1 s"))
}

pub(crate) fn noticing(gpu: &'static Gpu) -> Result<Answer, Problem> {
    const ROUNDS: usize = 50;
    let [gate, bell] = gpu.words()?;
    let kernel = gpu.small_kernel()?;
    let mut ending = Ending { stream: gpu.stream()?, gate: Gate(gate), bell, round: 0 };
    let event = gpu.event()?;
    let blocking = gpu.event_of(CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC)?;
    let part = Duration::from_millis(500);

    step("asking for an event");
    let (mut queries, start) = (Vec::new(), Instant::now());
    while queries.len() < ROUNDS && start.elapsed() < part {
        ending.put(&kernel)?;
        ending.stream.record(&event)?;
        let end = ending.release()?;
        let mut failed = None;
        soon(Duration::from_secs(1), || {
            event.is_done().unwrap_or_else(|error| failed.replace(error).is_none())
        });
        let told = Instant::now();
        failed.map_or(Ok(()), Err)?;
        queries.push(us(told.saturating_duration_since(seen(end)?)));
    }
    step("waiting for an event, asleep");
    let (mut wakes, start) = (Vec::new(), Instant::now());
    while wakes.len() < ROUNDS && start.elapsed() < part {
        ending.put(&kernel)?;
        ending.stream.record(&blocking)?;
        let end = ending.release()?;
        blocking.synchronize()?;
        let told = Instant::now();
        wakes.push(us(told.saturating_duration_since(seen(end)?)));
    }
    step("a function of the host's");
    let (mut calls, start) = (Vec::new(), Instant::now());
    // The driver makes a thread for such functions when the first is called, so the time of the first call is kept apart.
    let mut first = None;
    while calls.len() < ROUNDS && start.elapsed() < part {
        ending.put(&kernel)?;
        let at = call_back(&ending.stream)?;
        let end = seen(ending.release()?)?;
        let late = us(at.recv_timeout(Duration::from_secs(1))?.saturating_duration_since(end));
        match first {
            None => first = Some(late),
            Some(_) => calls.push(late),
        }
    }
    let [query, wake, call] = [&mut queries, &mut wakes, &mut calls].map(|times| median(times));
    let remark = format!(
        "cuEventQuery, after a word behind the same kernel was seen; a function of the host's {} (the first {}); \
         cuEventSynchronize, asleep, {}",
        show_us(call),
        show_us(first.unwrap_or_default()),
        show_us(wake)
    );
    Ok(Answer::new(show_us(query), remark)
        .with("query_us", query)
        .with("host_function_us", call)
        .with("synchronize_us", wake))
}
