//! Probes of how long the host spends in driver calls, and how fast the device copies.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use allstream_sys::cuda::{CU_STREAM_CAPTURE_MODE_RELAXED, CuStreamMemOp, CudaError};

use super::answer::{Answer, listed, median, show_us, step, us};
use super::driver::{Aside, Gpu, Problem, SmallKernel, Stream, problem};

/// Calls that are timed together. After each batch the host waits for the stream, so that its queue never fills.
const BATCH: usize = 10;
const BATCHES: usize = 60;
/// After this time no further batch of one kind of call begins, if two have been timed.
const LIMIT: Duration = Duration::from_millis(80);
/// Threads that launch at once.
const THREADS: usize = 8;

/// Microseconds that a call takes: the median over the batches.
fn time(stream: &Stream, mut call: impl FnMut() -> Result<(), CudaError>) -> Result<f64, Problem> {
    let (start, mut times) = (Instant::now(), Vec::new());
    for batch in 0..=BATCHES {
        let begin = Instant::now();
        for _ in 0..BATCH {
            call()?;
        }
        let passed = us(begin.elapsed()) / BATCH as f64;
        stream.synchronize()?;
        // The first batch does not count: in it the driver loads code and makes what it keeps.
        if batch > 0 {
            times.push(passed);
        }
        if batch > 1 && start.elapsed() > LIMIT {
            break;
        }
    }
    Ok(median(&mut times))
}

unsafe extern "C" fn nothing(_: *mut c_void) {}

pub(crate) fn costs(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let (cuda, stream, kernel) = (gpu.cuda, gpu.stream()?, gpu.small_kernel()?);
    let (event, done, later) = (gpu.event()?, gpu.event_of(0)?, gpu.event_of(0)?);
    let [met, written] = gpu.words()?;
    met.set(1);
    stream.record(&done)?;
    stream.launch(&kernel)?;
    stream.record(&later)?;
    stream.synchronize()?;
    type Call<'a> = Box<dyn FnMut() -> Result<(), CudaError> + 'a>;
    let s = &stream;
    let mut calls: Vec<(&str, Call<'_>)> = vec![
        ("launch", Box::new(|| s.launch(&kernel))),
        (
            "push and pop of the context",
            Box::new(|| {
                gpu.enter()?;
                // SAFETY: pops the context that `enter` has just pushed on this thread.
                unsafe { cuda.ctx_pop_current() }.map(drop)
            }),
        ),
        // SAFETY: only asks for this thread's current context.
        ("cuCtxGetCurrent", Box::new(|| unsafe { cuda.ctx_get_current() }.map(drop))),
        (
            "exchange of the capture mode",
            Box::new(|| {
                let mut mode: c_uint = CU_STREAM_CAPTURE_MODE_RELAXED;
                // SAFETY: the driver reads and writes the mode within the call.
                unsafe { cuda.thread_exchange_stream_capture_mode(&raw mut mode) }
            }),
        ),
        (
            "cuStreamIsCapturing",
            Box::new(|| {
                let mut status: c_int = 0;
                // SAFETY: the stream exists; the status is written within the call.
                unsafe { cuda.stream_is_capturing(s.raw(), &raw mut status) }
            }),
        ),
        ("cuEventRecord", Box::new(|| s.record(&event))),
        ("cuEventQuery", Box::new(|| done.is_done().map(drop))),
        ("cuStreamWaitEvent", Box::new(|| s.wait_event(&done))),
        ("cuStreamWaitValue32 that is met", Box::new(|| s.wait(met, 1))),
        ("cuStreamWriteValue32", Box::new(|| s.write(written, 1))),
        (
            "cuLaunchHostFunc",
            // SAFETY: the stream exists; the function does nothing.
            Box::new(|| unsafe { cuda.launch_host_func(s.raw(), nothing, std::ptr::null_mut()) }),
        ),
        ("cuEventElapsedTime", Box::new(|| later.since(&done).map(drop))),
        ("cuStreamQuery", Box::new(|| s.is_done().map(drop))),
    ];
    if cuda.has_stream_batch_mem_op() {
        let list = [
            CuStreamMemOp::wait(met.device, 1),
            CuStreamMemOp::wait(met.device, 1),
            CuStreamMemOp::write(written.device, 1),
        ];
        let put = move || s.put(&mut list.clone());
        calls.push(("cuStreamBatchMemOp of two waits that are met and a write", Box::new(put)));
    }
    let mut times = Vec::new();
    for (name, call) in calls {
        step(name);
        times.push((name, time(&stream, call)?));
    }
    step(&format!("{THREADS} threads launch at once"));
    let crowded = crowded(gpu)?;
    let launch = times.first().map_or(0.0, |(_, us)| *us);
    let rest: Vec<String> =
        times.iter().skip(1).map(|(name, us)| format!("{name} {}", show_us(*us))).collect();
    let remark =
        format!("a launch while {THREADS} threads launch at once: {}; {}", show_us(crowded), listed(&rest));
    let figures = times.iter().map(|(name, us)| (format!("{name}_us"), *us));
    Ok(Answer::new(show_us(launch), remark).with_all(figures).with("launch of 8 threads_us", crowded))
}

/// Microseconds of a launch while [`THREADS`] threads launch at once, each on its own stream: the median over the threads.
fn crowded(gpu: &'static Gpu) -> Result<f64, Problem> {
    let barrier = Arc::new(Barrier::new(THREADS));
    let threads = (0..THREADS).map(|_| {
        let (stream, kernel, barrier) = (gpu.stream()?, gpu.small_kernel()?, barrier.clone());
        let launch = move || {
            barrier.wait();
            launches(&stream, &kernel)
        };
        Aside::new(gpu, launch)
    });
    let threads = threads.collect::<Result<Vec<_>, _>>()?;
    threads.iter().try_for_each(Aside::go)?;
    let times = threads.iter().map(|thread| {
        let ended = thread.within(Duration::from_secs(2));
        ended.ok_or_else(|| problem("a thread that launches did not end within 2 s"))?.0
    });
    Ok(median(&mut times.collect::<Result<Vec<f64>, Problem>>()?))
}

fn launches(stream: &Stream, kernel: &SmallKernel) -> Result<f64, Problem> {
    time(stream, || stream.launch(kernel))
}

/// The most bytes of a copy within the device.
const ON_DEVICE: usize = 256 << 20;
/// The most bytes of a copy between the device and the host.
const TO_HOST: usize = 64 << 20;
/// Timed copies of each kind; one that is not timed goes before.
const ROUNDS: usize = 5;

/// GB/s of a copy, as events before and after it tell: the median over the rounds.
fn rate(
    gpu: &'static Gpu,
    stream: &Stream,
    bytes: usize,
    copy: impl Fn() -> Result<(), CudaError>,
) -> Result<f64, Problem> {
    let (start, end) = (gpu.event_of(0)?, gpu.event_of(0)?);
    let mut rates = Vec::new();
    for round in 0..=ROUNDS {
        stream.record(&start)?;
        copy()?;
        stream.record(&end)?;
        stream.synchronize()?;
        if round > 0 {
            rates.push(bytes as f64 / f64::from(end.since(&start)?) / 1e6);
        }
    }
    Ok(median(&mut rates))
}

pub(crate) fn copies(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let (free, total) = gpu.cuda.mem_info()?;
    let bytes = (free / 64).clamp(1 << 20, ON_DEVICE) >> 20 << 20;
    let (stream, cuda) = (gpu.stream()?, gpu.cuda);
    step("copies on the device");
    let (a, b) = (gpu.memory(bytes)?, gpu.memory(bytes)?);
    stream.fill(&a, 1, bytes)?;
    // SAFETY: both have `bytes` bytes and are not freed before the process ends; nobody else uses them.
    let device =
        rate(gpu, &stream, bytes, || unsafe { cuda.memcpy_dtod_async(b.at, a.at, bytes, stream.raw()) })?;
    step("pinning memory");
    let less = bytes.min(TO_HOST);
    let host = gpu.pinned(less)?;
    step("copies to the device");
    // SAFETY: both have at least `less` bytes, and are not freed before the process ends; nobody else uses them.
    let to =
        rate(gpu, &stream, less, || unsafe { cuda.memcpy_htod_async(a.at, host.0, less, stream.raw()) })?;
    step("copies to the host");
    // SAFETY: as in the copy before.
    let from =
        rate(gpu, &stream, less, || unsafe { cuda.memcpy_dtoh_async(host.0, b.at, less, stream.raw()) })?;
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let remark = format!(
        "of bytes copied, {} MiB each; from pinned memory {to:.1} GB/s, to it {from:.1} GB/s, {} MiB each; {:.1} of {:.1} GiB were free",
        bytes >> 20,
        less >> 20,
        gib(free),
        gib(total)
    );
    Ok(Answer::new(format!("{device:.0} GB/s"), remark)
        .with("on_device_gbs", device)
        .with("to_device_gbs", to)
        .with("to_host_gbs", from)
        .with("free_bytes", free as f64)
        .with("total_bytes", total as f64))
}
