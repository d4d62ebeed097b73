//! Probes of kernels as machine code and as PTX, and of driver calls while another thread captures a stream.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use allstream_cuda_kernels::{self as kernels, Module};
use allstream_kernels::{DType, ReduceOp};
use allstream_sys::cuda::{
    CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED, CuGraph, CuModule, CuResult, CudaError,
};

use super::answer::{Answer, listed, show_us, step, us};
use super::driver::{Gpu, Problem, code, launch, problem};

/// No module is compiled from PTX any more after this time: a module that the driver has not compiled before takes tenths of a second.
const COMPILING: Duration = Duration::from_millis(1500);
const LEN: usize = 1000;

/// Loads every module as machine code, and then as PTX those that there is time for.
pub(crate) fn modules(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let start = Instant::now();
    let (mut refused, mut loaded) = (Vec::new(), 0);
    for module in Module::ALL {
        step(&format!("machine code of {}", module.name()));
        match gpu.load_machine_code(*module) {
            Ok(_) => loaded += 1,
            Err(error) => refused.push(format!("{}: {}", module.name(), code(&error))),
        }
    }
    let machine = us(start.elapsed());
    let (start, mut not_compiled, mut compiled) = (Instant::now(), Vec::new(), 0);
    for module in Module::ALL {
        if start.elapsed() > COMPILING {
            break;
        }
        step(&format!("PTX of {}", module.name()));
        match gpu.load_ptx(*module) {
            Ok(_) => compiled += 1,
            Err(Problem(text)) => not_compiled.push(format!("{}: {text}", module.name())),
        }
    }
    let ptx = us(start.elapsed());
    let all = Module::ALL.len();
    // If all modules are refused, the reason is the same for all: the first one's is told.
    let why = match refused.first() {
        Some(first) if refused.len() == all => format!(", as {first}"),
        _ if refused.is_empty() => String::new(),
        _ => format!("; not {}", listed(&refused)),
    };
    let mut remark = format!(
        "{loaded} of {all} modules as machine code in {}{why}; {compiled} as PTX in {}",
        show_us(machine),
        show_us(ptx)
    );
    if compiled + not_compiled.len() < all {
        remark += ", for more there was no time";
    }
    if !not_compiled.is_empty() {
        remark += &format!("; PTX that is refused: {}", listed(&not_compiled));
    }
    Ok(Answer::yes_or_no(loaded == all, remark)
        .with("machine_code_modules", loaded as f64)
        .with("machine_code_us", machine)
        .with("ptx_modules", compiled as f64)
        .with("ptx_us", ptx))
}

/// The sums of two lists, computed by the kernel of a loaded module; as the bits of each value.
fn sum(gpu: &'static Gpu, module: CuModule, a: &[f32], b: &[f32]) -> Result<Vec<u32>, Problem> {
    let bytes = LEN * size_of::<f32>();
    let (stream, host) = (gpu.stream()?, gpu.pinned(bytes)?);
    let [first, second, out] = [gpu.memory(bytes)?, gpu.memory(bytes)?, gpu.memory(bytes)?];
    for (values, to) in [(a, &first), (b, &second)] {
        // SAFETY: `values` has `LEN` elements, and `host` has room for them; no copy that uses `host` is in flight.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), host.0.cast(), LEN) };
        // SAFETY: both have `bytes` bytes, and are not freed before the process ends.
        unsafe { gpu.cuda.memcpy_htod_async(to.at, host.0, bytes, stream.raw()) }?;
        stream.synchronize()?;
    }
    let job =
        kernels::reduce(DType::F32, ReduceOp::Sum, &[first.at, second.at], &[out.at], LEN as u64, None, 4);
    let job = job.ok_or_else(|| problem("there is no kernel that sums f32 (a bug)"))?;
    let function = gpu.function(module, &job.kernel.name())?;
    // SAFETY: `function` is the kernel of `job`, which works on device memory of `LEN` values each, not freed before the process ends.
    unsafe { launch(&stream, function, &job) }?;
    // SAFETY: both have `bytes` bytes, and are not freed before the process ends.
    unsafe { gpu.cuda.memcpy_dtoh_async(host.0, out.at, bytes, stream.raw()) }?;
    stream.synchronize()?;
    // SAFETY: `host` has `LEN` values. The copy has written all of them, and nobody writes them any more.
    Ok(unsafe { std::slice::from_raw_parts(host.0.cast::<u32>(), LEN) }.to_vec())
}

/// Whether one kernel gives the same bits from machine code, from PTX, and on the host.
pub(crate) fn one_kernel(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let a: Vec<f32> = (0..LEN).map(|i| (i as f32).sin() * 1e3).collect();
    let b: Vec<f32> = (0..LEN).map(|i| (i as f32).cos() / 3.0).collect();
    let wanted: Vec<u32> = a.iter().zip(&b).map(|(a, b)| (a + b).to_bits()).collect();
    step("a sum by PTX");
    let ptx = gpu.load_ptx(Module::F32).and_then(|module| sum(gpu, module, &a, &b));
    step("a sum by machine code");
    let machine = gpu.load_machine_code(Module::F32).map_err(Problem::from);
    let machine = machine.and_then(|module| sum(gpu, module, &a, &b));
    let said = |found: &Result<Vec<u32>, Problem>| match found {
        Ok(found) => match found.iter().zip(&wanted).filter(|(found, wanted)| found != wanted).count() {
            0 => "the host's bits".to_owned(),
            wrong => format!("{wrong} of {LEN} values differ from the host's"),
        },
        Err(Problem(text)) => text.clone(),
    };
    let is_right = |found: &Result<Vec<u32>, Problem>| found.as_ref().is_ok_and(|found| *found == wanted);
    let remark = format!("a sum of f32, by machine code: {}; by PTX: {}", said(&machine), said(&ptx));
    Ok(Answer::yes_or_no(is_right(&machine) && is_right(&ptx), remark))
}

/// A driver call that is made during a capture, and its name.
type Call<'a> = (&'static str, Box<dyn Fn() -> Result<(), CudaError> + 'a>);

/// Makes a call while another thread captures a stream. Returns the call's result, and whether the capture was still valid at its end.
fn beside_a_capture(
    gpu: &'static Gpu,
    call: &dyn Fn() -> Result<(), CudaError>,
) -> Result<(Result<(), CudaError>, bool), Problem> {
    let stream = gpu.stream()?;
    let (begin, has_begun) = channel();
    let (end, may_end) = channel::<()>();
    let capturing = thread::Builder::new().spawn(move || -> Result<bool, CudaError> {
        gpu.enter()?;
        // SAFETY: the stream exists, and this thread also ends the capture.
        unsafe { gpu.cuda.stream_begin_capture(stream.raw(), CU_STREAM_CAPTURE_MODE_GLOBAL) }?;
        let _ = begin.send(());
        let _ = may_end.recv();
        let mut graph = CuGraph::NULL;
        // SAFETY: this thread has begun the capture; the driver writes `graph` within the call.
        match unsafe { gpu.cuda.stream_end_capture(stream.raw(), &raw mut graph) } {
            // SAFETY: the driver has just made the graph, and nobody uses it.
            Ok(()) => unsafe { gpu.cuda.graph_destroy(graph) }.map(|()| true),
            Err(error) if error.code == CuResult::STREAM_CAPTURE_INVALIDATED => Ok(false),
            Err(error) => Err(error),
        }
    })?;
    // If the capture cannot begin, the sender is dropped, and `recv` fails.
    let answer = has_begun.recv().map(|()| call());
    let _ = end.send(());
    let valid = capturing.join().map_err(|_| problem("the thread that captures panicked"))??;
    Ok((answer?, valid))
}

pub(crate) fn capture(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let (stream, event, kernel) = (gpu.stream()?, gpu.event()?, gpu.small_kernel()?);
    let [word] = gpu.words()?;
    stream.launch(&kernel)?;
    stream.record(&event)?;
    stream.synchronize()?;
    let calls: [Call<'_>; 4] = [
        ("cuEventQuery", Box::new(|| event.is_done().map(drop))),
        ("cuStreamWriteValue32", Box::new(|| stream.write(word, 1))),
        ("cuMemAlloc", Box::new(|| gpu.memory(1 << 20).map(drop))),
        ("cuLaunchKernel", Box::new(|| stream.launch(&kernel))),
    ];
    let mut told = Vec::new();
    let mut works = true;
    for relaxed in [false, true] {
        if relaxed {
            let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: the driver reads and writes the mode within the call.
            unsafe { gpu.cuda.thread_exchange_stream_capture_mode(&raw mut mode) }?;
        }
        let kind = if relaxed { "relaxed" } else { "plainly" };
        let mut refused = Vec::new();
        for (name, call) in &calls {
            step(&format!("{name}, {kind}, beside a capture"));
            let (answer, valid) = beside_a_capture(gpu, call)?;
            if relaxed {
                works &= answer.is_ok() && valid;
            }
            match (answer, valid) {
                (Ok(()), true) => {}
                (Ok(()), false) => refused.push(format!("{name} breaks the capture")),
                (Err(error), true) => refused.push(format!("{name} is refused ({})", error.code.0)),
                (Err(error), false) => {
                    refused.push(format!("{name} is refused ({}) and breaks the capture", error.code.0));
                }
            }
        }
        told.push(match refused.is_empty() {
            true => format!("{kind}: all works"),
            false => format!("{kind}: {}", listed(&refused)),
        });
    }
    told.reverse();
    Ok(Answer::yes_or_no(works, told.join("; ")))
}
