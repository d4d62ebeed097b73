//! What every call passes through.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::capture;
use crate::codes::{Code, Done};
use crate::knobs;

/// The id of the process that called `cuInit`, or 0. A forked child has another id, and so no driver.
static INITIALIZED_BY: AtomicU32 = AtomicU32::new(0);

/// The process has begun to end: the driver is no longer there for anybody.
static EXITED: AtomicBool = AtomicBool::new(false);

/// Called by the C library when the process ends by `exit`, or by returning from `main`.
extern "C" fn exited() {
    EXITED.store(true, Ordering::Release);
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of an exported function, unless it may not run or was told to fail.
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Done) -> Code {
    early(name, || {
        if INITIALIZED_BY.load(Ordering::Acquire) != std::process::id() {
            return Err(Code::NOT_INITIALIZED);
        }
        if knobs::strict().context && needs_context(name) && !crate::context::has_current() {
            return Err(Code::INVALID_CONTEXT);
        }
        if let Ok(context) = crate::context::current() {
            context.pass();
            if GETS_MEMORY.contains(&name) {
                context.pass_for_memory();
            }
        }
        capture::allowed(name)?;
        if MAY_WAIT.contains(&name) {
            crate::stream::settle();
        }
        body()
    })
}

/// Calls that find devices and contexts, or concern the thread or a context that they name: these need no current context, even if
/// the knob `CONTEXT` is set. Neither do calls whose names begin with `cuDevice`, nor the functions for tests.
const WITHOUT_CONTEXT: [&str; 8] = [
    "cuCtxCreate_v2",
    "cuCtxDestroy_v2",
    "cuCtxGetApiVersion",
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuThreadExchangeStreamCaptureMode",
];

fn needs_context(name: &str) -> bool {
    !name.starts_with("cuDevice") && !name.starts_with("allstream_test_") && !WITHOUT_CONTEXT.contains(&name)
}

/// Calls that wait for all work queued in the current context if the knob `WAITS` is set. So do calls that make streams or open memory
/// of other processes, which call `settle` themselves.
const MAY_WAIT: [&str; 11] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemAllocHost_v2",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuIpcCloseMemHandle",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
];

/// Calls that allocate or register memory: they wait while another call waits for room in a stream of the context.
const GETS_MEMORY: [&str; 4] =
    ["cuMemAlloc_v2", "cuMemAllocHost_v2", "cuMemHostAlloc", "cuMemHostRegister_v2"];

/// As [`call`], for the functions that work before `cuInit`.
pub(crate) fn early(name: &'static str, body: impl FnOnce() -> Done) -> Code {
    if EXITED.load(Ordering::Acquire) {
        knobs::note("after exit");
        if knobs::strict().abort_after_exit {
            eprintln!("cuda driver for tests: {name} is called after the process has begun to end");
            std::process::abort();
        }
        return Code::DEINITIALIZED;
    }
    if IN_HOST_FUNCTION.get() {
        return Code::NOT_PERMITTED;
    }
    crate::under_locks::ask(name);
    crate::hang::perhaps(name);
    if let Some(code) = knobs::counted(name) {
        return code;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Code::SUCCESS,
        Ok(Err(code)) => code,
        // A panic must not cross the C boundary. Its own message has gone to stderr.
        Err(_) => Code::UNKNOWN,
    }
}

/// Runs a host function of the caller's, which may not call the driver.
pub(crate) fn host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuInit(flags: u32) -> Code {
    early("cuInit", || {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let by = INITIALIZED_BY.load(Ordering::Acquire);
        if by != 0 && by != std::process::id() {
            return Err(Code::NOT_INITIALIZED);
        }
        static AT_EXIT: std::sync::Once = std::sync::Once::new();
        // SAFETY: `exited` has no arguments and does not unwind; this library is never closed.
        AT_EXIT
            .call_once(|| assert_eq!(unsafe { libc::atexit(exited) }, 0, "no room for a function at exit"));
        crate::device::make_all()?;
        INITIALIZED_BY.store(std::process::id(), Ordering::Release);
        Ok(())
    })
}

/// As if `cuInit` had never been called.
pub(crate) fn forget() {
    INITIALIZED_BY.store(0, Ordering::Release);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDriverGetVersion(version: crate::abi::Out<i32>) -> Code {
    early("cuDriverGetVersion", || version.set(knobs::VERSION))
}
