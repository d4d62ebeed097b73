//! What tests of the driver share: its functions, a lock, and a deadline.
#![allow(dead_code, reason = "each test takes what it needs")]
#![allow(missing_docs, reason = "the functions are those of the real library")]

use std::ffi::{c_char, c_void};
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

// Linked for the functions below, which are found by their names, as by any other caller.
use cuda as _;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

const OTHER: &str = "ALLSTREAM_TEST_CUDA_OTHER_PROCESS";

/// Runs `body` in a new process with these variables, which runs this test again. Gives that process's output; `None` in that process.
pub(crate) fn with(test: &str, knobs: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if std::env::var(OTHER).as_deref() == Ok(test) {
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(OTHER, test);
    for (name, value) in knobs {
        command.env(format!("ALLSTREAM_TEST_CUDA_{name}"), value);
    }
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    Some(finish_process(child))
}

/// The same; the other process must succeed.
pub(crate) fn passes_with(test: &str, knobs: &[(&str, &str)], body: impl FnOnce()) {
    if let Some(output) = with(test, knobs, body) {
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{}", text.concat());
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Report {
    pub(crate) contexts: u64,
    pub(crate) streams: u64,
    pub(crate) events: u64,
    pub(crate) allocations: u64,
    pub(crate) allocated_bytes: u64,
    pub(crate) host_allocations: u64,
    pub(crate) registered: u64,
    pub(crate) mapped_handles: u64,
    pub(crate) modules: u64,
    pub(crate) freed_in_use: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Token(pub(crate) [u8; 64]);

pub(crate) type Function = Option<unsafe extern "C" fn(*mut c_void)>;

#[rustfmt::skip]
unsafe extern "C" {
    pub(crate) fn allstream_test_cuda_report(report: *mut Report) -> u32;
    pub(crate) fn allstream_test_cuda_reset() -> u32;
    pub(crate) fn allstream_test_cuda_set_devices(count: u32) -> u32;
    pub(crate) fn allstream_test_cuda_set_memory(bytes: u64) -> u32;
    pub(crate) fn allstream_test_cuda_set_delays(longest_us: u64, seed: u64) -> u32;
    pub(crate) fn allstream_test_cuda_set_peers(a: u32, b: u32, can: bool) -> u32;
    pub(crate) fn allstream_test_cuda_set_budget(instructions: u64) -> u32;
    pub(crate) fn allstream_test_cuda_set_depth(pieces: u64) -> u32;
    pub(crate) fn allstream_test_cuda_ask_locks(holds: Option<extern "C" fn() -> bool>) -> u32;
    pub(crate) fn allstream_test_cuda_calls_under_locks() -> u64;
    pub(crate) fn allstream_test_cuda_calls_under_locks_of(name: *const c_char) -> u64;
    pub(crate) fn allstream_test_cuda_break(device: i32, code: u32) -> u32;
    pub(crate) fn allstream_test_cuda_fail(name: *const c_char, nth: u64, code: u32) -> u32;
    pub(crate) fn allstream_test_cuda_calls(name: *const c_char) -> u64;
    pub(crate) fn cuInit(flags: u32) -> u32;
    pub(crate) fn cuDeviceGetCount(count: *mut i32) -> u32;
    pub(crate) fn cuDeviceGet(device: *mut i32, ordinal: i32) -> u32;
    pub(crate) fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) -> u32;
    pub(crate) fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> u32;
    pub(crate) fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) -> u32;
    pub(crate) fn cuDeviceGetPCIBusId(text: *mut c_char, length: i32, device: i32) -> u32;
    pub(crate) fn cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) -> u32;
    pub(crate) fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) -> u32;
    pub(crate) fn cuDevicePrimaryCtxRelease_v2(device: i32) -> u32;
    pub(crate) fn cuDevicePrimaryCtxReset_v2(device: i32) -> u32;
    pub(crate) fn cuCtxSetCurrent(context: u64) -> u32;
    pub(crate) fn cuCtxGetCurrent(context: *mut u64) -> u32;
    pub(crate) fn cuCtxPushCurrent_v2(context: u64) -> u32;
    pub(crate) fn cuCtxPopCurrent_v2(context: *mut u64) -> u32;
    pub(crate) fn cuCtxSynchronize() -> u32;
    pub(crate) fn cuCtxEnablePeerAccess(peer: u64, flags: u32) -> u32;
    pub(crate) fn cuCtxDisablePeerAccess(peer: u64) -> u32;
    pub(crate) fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: i32) -> u32;
    pub(crate) fn cuMemPoolSetAccess(pool: u64, access: *const [i32; 3], count: usize) -> u32;
    pub(crate) fn cuStreamCreate(stream: *mut u64, flags: u32) -> u32;
    pub(crate) fn cuStreamDestroy_v2(stream: u64) -> u32;
    pub(crate) fn cuStreamSynchronize(stream: u64) -> u32;
    pub(crate) fn cuStreamQuery(stream: u64) -> u32;
    pub(crate) fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) -> u32;
    pub(crate) fn cuStreamIsCapturing(stream: u64, status: *mut i32) -> u32;
    pub(crate) fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> u32;
    pub(crate) fn cuStreamEndCapture(stream: u64, graph: *mut u64) -> u32;
    pub(crate) fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> u32;
    pub(crate) fn cuGraphDestroy(graph: u64) -> u32;
    pub(crate) fn cuEventCreate(event: *mut u64, flags: u32) -> u32;
    pub(crate) fn cuEventDestroy_v2(event: u64) -> u32;
    pub(crate) fn cuEventRecord(event: u64, stream: u64) -> u32;
    pub(crate) fn cuEventQuery(event: u64) -> u32;
    pub(crate) fn cuEventSynchronize(event: u64) -> u32;
    pub(crate) fn cuEventElapsedTime_v2(ms: *mut f32, start: u64, end: u64) -> u32;
    pub(crate) fn cuMemAlloc_v2(at: *mut u64, size: usize) -> u32;
    pub(crate) fn cuMemFree_v2(at: u64) -> u32;
    pub(crate) fn cuMemAllocAsync(at: *mut u64, size: usize, stream: u64) -> u32;
    pub(crate) fn cuMemFreeAsync(at: u64, stream: u64) -> u32;
    pub(crate) fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    pub(crate) fn cuPointerGetAttribute(value: *mut c_void, attribute: i32, at: u64) -> u32;
    pub(crate) fn cuMemHostAlloc(at: *mut *mut c_void, size: usize, flags: u32) -> u32;
    pub(crate) fn cuMemFreeHost(at: *mut c_void) -> u32;
    pub(crate) fn cuMemHostRegister_v2(at: *mut c_void, size: usize, flags: u32) -> u32;
    pub(crate) fn cuMemHostUnregister(at: *mut c_void) -> u32;
    pub(crate) fn cuMemHostGetDevicePointer_v2(device: *mut u64, at: *mut c_void, flags: u32) -> u32;
    pub(crate) fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, length: usize) -> u32;
    pub(crate) fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, length: usize) -> u32;
    pub(crate) fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, length: usize, stream: u64) -> u32;
    pub(crate) fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, length: usize, stream: u64) -> u32;
    pub(crate) fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, length: usize, stream: u64) -> u32;
    pub(crate) fn cuMemcpyAsync(to: u64, from: u64, length: usize, stream: u64) -> u32;
    pub(crate) fn cuMemcpyPeerAsync(to: u64, tc: u64, from: u64, fc: u64, length: usize, stream: u64) -> u32;
    pub(crate) fn cuMemsetD8Async(at: u64, value: u8, count: usize, stream: u64) -> u32;
    pub(crate) fn cuMemsetD32Async(at: u64, value: u32, count: usize, stream: u64) -> u32;
    pub(crate) fn cuStreamWriteValue32_v2(stream: u64, at: u64, value: u32, flags: u32) -> u32;
    pub(crate) fn cuStreamWaitValue32_v2(stream: u64, at: u64, value: u32, flags: u32) -> u32;
    pub(crate) fn cuStreamWriteValue64_v2(stream: u64, at: u64, value: u64, flags: u32) -> u32;
    pub(crate) fn cuStreamWaitValue64_v2(stream: u64, at: u64, value: u64, flags: u32) -> u32;
    pub(crate) fn cuLaunchHostFunc(stream: u64, function: Function, argument: *mut c_void) -> u32;
    pub(crate) fn cuModuleLoadData(module: *mut u64, image: *const c_void) -> u32;
    pub(crate) fn cuDriverGetVersion(version: *mut i32) -> u32;
    pub(crate) fn cuModuleLoadDataEx(m: *mut u64, image: *const c_void, n: u32, o: *const i32, v: *const *mut c_void) -> u32;
    pub(crate) fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> u32;
    pub(crate) fn cuModuleGetGlobal_v2(at: *mut u64, size: *mut usize, module: u64, name: *const c_char) -> u32;
    pub(crate) fn cuFuncGetAttribute(value: *mut i32, attribute: i32, function: u64) -> u32;
    pub(crate) fn cuModuleUnload(module: u64) -> u32;
    pub(crate) fn cuLaunchKernel(
        function: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: u64,
        places: *const *const c_void, extra: *const c_void,
    ) -> u32;
    pub(crate) fn cuIpcGetMemHandle(token: *mut Token, at: u64) -> u32;
    pub(crate) fn cuIpcOpenMemHandle_v2(at: *mut u64, token: Token, flags: u32) -> u32;
    pub(crate) fn cuIpcCloseMemHandle(at: u64) -> u32;
    pub(crate) fn cuIpcGetEventHandle(token: *mut Token, event: u64) -> u32;
    pub(crate) fn cuIpcOpenEventHandle(event: *mut u64, token: Token) -> u32;
    pub(crate) fn cuGetErrorName(code: u32, text: *mut *const c_char) -> u32;
}

/// Calls a function; gives its code.
#[macro_export]
macro_rules! code {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: tests give places of the right type, and memory as long as they say, that lives until the work on it
        // has been waited for.
        unsafe { $function($($argument),*) }
    }};
}

/// Calls a function, which must succeed.
#[macro_export]
macro_rules! ok {
    ($function:ident($($argument:expr),* $(,)?)) => {
        assert_eq!($crate::code!($function($($argument),*)), 0, stringify!($function))
    };
}

/// The driver for one test: other tests wait for their turn. When it is dropped, nothing in it may be left.
pub(crate) struct Driver {
    pub(crate) contexts: Vec<u64>,
    /// Dropped with the driver, which ends the watchdog.
    _watched: Sender<()>,
    _turn: MutexGuard<'static, ()>,
}

impl Driver {
    /// With so many devices, and the first one's context current.
    pub(crate) fn new(devices: usize) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        ok!(allstream_test_cuda_set_delays(0, 1));
        ok!(allstream_test_cuda_set_memory(1 << 30));
        ok!(allstream_test_cuda_fail(std::ptr::null(), 0, 0));
        ok!(allstream_test_cuda_set_devices(devices as u32));
        ok!(cuInit(0));
        let contexts = (0..devices as i32).map(retain).collect::<Vec<_>>();
        ok!(cuCtxSetCurrent(contexts[0]));
        Driver { contexts, _watched: watchdog(), _turn: turn }
    }

    pub(crate) fn report(&self) -> Report {
        let mut report = Report::default();
        ok!(allstream_test_cuda_report(&mut report));
        report
    }
}

/// Ends the process if the sender still lives after three times the deadline: a call that hangs cannot be ended otherwise.
fn watchdog() -> Sender<()> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        if receiver.recv_timeout(DEADLINE * 3) == Err(RecvTimeoutError::Timeout) {
            eprintln!("a test of the driver does not end");
            std::process::abort();
        }
    });
    sender
}

/// Waits for a process, but not for ever, and reads what it writes meanwhile: one that has filled its pipes would not end.
pub(crate) fn finish_process(mut child: Child) -> Output {
    fn read(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
            let _ = tell.send(bytes);
        });
        told
    }
    let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
    let start = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if start.elapsed() > DEADLINE => break None,
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    if status.is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // A process that this one has started may hold the pipes open.
    let [stdout, stderr] = [stdout, stderr].map(|told| told.recv_timeout(DEADLINE).unwrap_or_default());
    let Some(status) = status else {
        let said = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        panic!("the other process does not end; it has said: {}", said.concat());
    };
    Output { status, stdout, stderr }
}

pub(crate) fn retain(device: i32) -> u64 {
    let mut context = 0;
    ok!(cuDevicePrimaryCtxRetain(&mut context, device));
    context
}

impl Drop for Driver {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for device in 0..self.contexts.len() {
                code!(cuDevicePrimaryCtxReset_v2(device as i32));
            }
            code!(allstream_test_cuda_reset());
            return;
        }
        let contexts = self.contexts.len() as u64;
        let report = Report { freed_in_use: 0, ..self.report() };
        assert_eq!(report, Report { contexts, ..Report::default() }, "something is left");
        for device in 0..self.contexts.len() {
            ok!(cuDevicePrimaryCtxRelease_v2(device as i32));
        }
        ok!(allstream_test_cuda_reset());
    }
}

pub(crate) fn alloc(size: usize) -> u64 {
    let mut at = 0;
    ok!(cuMemAlloc_v2(&mut at, size));
    at
}

pub(crate) fn stream() -> u64 {
    let mut stream = 0;
    ok!(cuStreamCreate(&mut stream, 1));
    stream
}

pub(crate) fn event() -> u64 {
    let mut event = 0;
    ok!(cuEventCreate(&mut event, 2));
    event
}

pub(crate) fn upload<T: Copy>(values: &[T]) -> u64 {
    let at = alloc(size_of_val(values));
    ok!(cuMemcpyHtoD_v2(at, values.as_ptr().cast(), size_of_val(values)));
    at
}

pub(crate) fn download<T: Copy + Default>(at: u64, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    ok!(cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), at, size_of_val(&values[..])));
    values
}

/// Waits for a stream, but not for ever.
pub(crate) fn finish(stream: u64) -> u32 {
    let start = Instant::now();
    loop {
        match code!(cuStreamQuery(stream)) {
            600 => assert!(start.elapsed() < DEADLINE, "the stream does not end"),
            code => return code,
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}
