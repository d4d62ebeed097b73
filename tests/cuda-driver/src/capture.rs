//! Captures that are under way in the process, and what its threads may call meanwhile.
//!
//! The rules are those in the reference of `cuThreadExchangeStreamCaptureMode`. A thread in the mode *global*, in which every
//! thread starts, may make no potentially unsafe call while any thread has a *global* capture under way, or this thread one that is
//! not *relaxed*. In the mode *thread local* only the thread's own captures count, in the mode *relaxed* none. A forbidden call
//! fails, and makes the captures that forbid it invalid.
//!
//! The reference does not list the unsafe calls. We take the strict reading: calls that allocate, free, load, block, or ask how far
//! work has come.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use crate::abi::{Handle, In, Out, lock};
use crate::codes::{Code, Done};
use crate::entry::call;
use crate::stream::Stream;

/// `CUstreamCaptureMode`.
const GLOBAL: u32 = 0;
pub(crate) const RELAXED: u32 = 2;

const UNSAFE: &[&str] = &[
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemAllocHost_v2",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpy",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemcpyPeer",
    "cuMemPoolTrimTo",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
];

/// A capture that is under way.
struct Sequence {
    stream: Arc<Stream>,
    thread: ThreadId,
    mode: u32,
}

static UNDER_WAY: Mutex<Vec<Sequence>> = Mutex::new(Vec::new());
/// How many captures are under way: every call checks this, without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Whether this thread may make this call now.
pub(crate) fn allowed(name: &str) -> Done {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    // A call that waits for all streams of a context would wait for one that does not run.
    let conflicts = name == "cuCtxSynchronize";
    if !conflicts && (MODE.get() == RELAXED || !UNSAFE.contains(&name)) {
        return Ok(());
    }
    let (mode, here) = (MODE.get(), std::thread::current().id());
    let mut allowed = Ok(());
    for sequence in lock(&UNDER_WAY).iter() {
        let hinders = match sequence.thread == here {
            _ if conflicts => true,
            true => sequence.mode != RELAXED,
            false => mode == GLOBAL && sequence.mode == GLOBAL,
        };
        if hinders {
            sequence.stream.invalidate();
            allowed = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    allowed
}

/// A capture has begun, in this thread.
pub(crate) fn begins(stream: &Arc<Stream>, mode: u32) {
    let thread = std::thread::current().id();
    let mut under_way = lock(&UNDER_WAY);
    under_way.push(Sequence { stream: stream.clone(), thread, mode });
    COUNT.store(under_way.len(), Ordering::Release);
}

/// Whether it is this thread that may end the stream's capture.
pub(crate) fn may_end(stream: Handle) -> Done {
    let here = std::thread::current().id();
    let elsewhere = |it: &Sequence| it.stream.handle == stream && it.thread != here && it.mode != RELAXED;
    if lock(&UNDER_WAY).iter().any(elsewhere) { Err(Code::STREAM_CAPTURE_WRONG_THREAD) } else { Ok(()) }
}

/// The stream's capture is over, or the stream is gone.
pub(crate) fn is_over(stream: Handle) {
    let mut under_way = lock(&UNDER_WAY);
    under_way.retain(|sequence| sequence.stream.handle != stream);
    COUNT.store(under_way.len(), Ordering::Release);
}

/// Sets the thread's mode to the one in `*mode`, and writes the previous one there.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> Code {
    call("cuThreadExchangeStreamCaptureMode", || {
        let wanted = In::from_pointer(mode.cast_const()).get()?;
        if wanted > RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        Out::from_untyped(mode.cast()).set(MODE.replace(wanted))
    })
}
