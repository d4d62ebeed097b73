//! For tests of CUDA: child processes, the knobs of the driver for tests, deadlines, and what tests with several ranks share.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Buf, Comm, Element};

pub use crate::full;

/// How the variables of the driver for tests begin. They are passed on to the processes that tests start.
pub(crate) const KNOBS: &str = "ALLSTREAM_TEST_CUDA_";
/// Variables that our own tests set to 1, unless they are set already: with them, the driver for tests refuses as much as the strictest real
/// drivers do.
pub(crate) const STRICT: [&str; 2] = ["ALLSTREAM_TEST_CUDA_DEVICEMAP", "ALLSTREAM_TEST_CUDA_CONTEXT"];

pub const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const CHILD: &str = "ALLSTREAM_TEST_CUDA_CHILD";
pub const LIBRARY: &str = "ALLSTREAM_CUDA_LIBRARY";
pub const NCCL: &str = "ALLSTREAM_NCCL_LIBRARY";

/// The path of the CUDA driver for tests, which cargo builds if it is missing or out of date.
pub fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("cuda-driver-for-tests", "libcuda.so"))
}

/// The path of the NCCL for tests, which cargo builds if it is missing or out of date.
pub fn nccl_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("nccl-for-tests", "libnccl.so"))
}

/// The path of a library for tests, which cargo builds if it is missing or out of date.
pub(crate) fn built(package: &str, file: &str) -> PathBuf {
    let (folder, profile) = crate::built_in();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let mut cargo = Command::new(env!("CARGO"));
    // With this variable set, cargo would rebuild the packages whose build scripts read it.
    cargo.env_remove("RUSTC_BOOTSTRAP");
    cargo.args(["build", "--quiet", "--package", package, "--profile", &profile]);
    cargo.arg("--manifest-path").arg(manifest).arg("--target-dir").arg(folder.parent().unwrap());
    assert!(cargo.status().unwrap().success(), "{package} does not build");
    folder.join(file)
}

/// Whether a test has started this process to run itself there, by [`child`] or one of its variants.
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs the test of this name in a process with these variables; in that process, runs `body`.
pub fn child(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    child_within(test, variables, 15 * DEADLINE, body);
}

/// Like [`child`], with a limit of its own for tests that take long.
pub fn child_within(test: &str, variables: &[(&str, &str)], limit: Duration, body: impl FnOnce()) {
    if std::env::var(CHILD).as_deref() == Ok(test) {
        return body();
    }
    in_a_child(test, variables, limit);
}

fn in_a_child(test: &str, variables: &[(&str, &str)], limit: Duration) {
    let mut child = again(test, variables).spawn().unwrap();
    let status = ended(test, &mut child, limit);
    assert!(status.success(), "{test} in its own process: {status}");
}

/// Like [`child`], for a process that may end in any way: returns its status and its output, which must be short, as it is read only
/// at the end. `None` in that process, when `body` is done.
pub fn child_says(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if std::env::var(CHILD).as_deref() == Ok(test) {
        body();
        return None;
    }
    let mut command = again(test, variables);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    ended(test, &mut child, 15 * DEADLINE);
    Some(child.wait_with_output().unwrap())
}

/// A command that runs the test of this name in this program again.
fn again(test: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, test);
    if !variables.iter().any(|(name, _)| *name == LIBRARY) {
        command.env(LIBRARY, library());
    }
    be_strict(&mut command);
    command.envs(variables.iter().copied()).stdin(Stdio::null());
    command
}

fn ended(test: &str, child: &mut Child, limit: Duration) -> ExitStatus {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{test} did not end in time");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sets the variables of `STRICT` for a process that may load the driver for tests.
pub(crate) fn be_strict(command: &mut Command) {
    for name in STRICT {
        command.env(name, std::env::var(name).unwrap_or_else(|_| "1".into()));
    }
}

/// Awaits a future; panics after `DEADLINE`.
pub fn soon<F: IntoFuture>(future: F) -> F::Output {
    let (future, mut output) = (future.into_future(), None);
    done_soon(Box::pin(async { output = Some(future.await) }));
    output.expect("the future has ended")
}

/// Takes a trait object, because tests await futures of hundreds of types, and tokio's code would be compiled for each of them.
fn done_soon(future: Pin<Box<dyn Future<Output = ()> + '_>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(DEADLINE, future).await }).expect("ends in time");
}

/// Asks until `is_so` holds; panics with `what` after `DEADLINE`.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How many objects of each kind exist in the driver for tests. Same layout as its `report.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    pub contexts: u64,
    pub streams: u64,
    pub events: u64,
    pub allocations: u64,
    pub allocated_bytes: u64,
    pub host_allocations: u64,
    pub registered: u64,
    pub mapped_handles: u64,
    pub modules: u64,
    pub freed_in_use: u64,
}

/// The address of a function of the driver for tests, in the library that allstream itself loads in this process, before or after.
pub fn function(name: &str) -> *mut c_void {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    function_of(LIBRARY, &HANDLE, name)
}

/// When a rank made its last call of the NCCL for tests, in nanoseconds of the monotonic clock; 0: never.
pub fn nccl_called(rank: usize) -> u64 {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    let function = function_of(NCCL, &HANDLE, "allstream_test_nccl_called");
    // SAFETY: the function's type, in the library's `knobs.rs`.
    let called: extern "C" fn(c_int) -> u64 = unsafe { std::mem::transmute(function) };
    called(rank as c_int)
}

/// The address of a function of the library that the variable `library` names. `handle` keeps the library's handle from the first call on.
pub fn function_of(library: &str, handle: &OnceLock<usize>, name: &str) -> *mut c_void {
    let handle = *handle.get_or_init(|| {
        let path = CString::new(std::env::var(library).unwrap()).unwrap();
        // SAFETY: the path ends in a null byte, and the library for tests that it names has no initialisers.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) as usize }
    });
    let name = CString::new(name).unwrap();
    // SAFETY: the handle is of a library that is never closed.
    let address = unsafe { libc::dlsym(handle as *mut c_void, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?}");
    address
}

/// Runs `run` while a device's primary context is current, as calls of the driver that do not go through allstream need one.
pub fn in_context<T>(device: usize, run: impl FnOnce() -> T) -> T {
    let mut context: *mut c_void = std::ptr::null_mut();
    // SAFETY: the functions have these types in cuda.h. The context is popped on the thread that pushed it, before it is released.
    unsafe {
        let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> u32 =
            std::mem::transmute(function("cuDevicePrimaryCtxRetain"));
        let push: unsafe extern "C" fn(*mut c_void) -> u32 =
            std::mem::transmute(function("cuCtxPushCurrent_v2"));
        let pop: unsafe extern "C" fn(*mut *mut c_void) -> u32 =
            std::mem::transmute(function("cuCtxPopCurrent_v2"));
        let release: unsafe extern "C" fn(c_int) -> u32 =
            std::mem::transmute(function("cuDevicePrimaryCtxRelease_v2"));
        assert_eq!(retain(&raw mut context, device as c_int), 0);
        assert_eq!(push(context), 0);
        let result = run();
        assert_eq!(pop(&raw mut context), 0);
        assert_eq!(release(device as c_int), 0);
        result
    }
}

pub fn report() -> Report {
    let address = function("allstream_test_cuda_report");
    let mut report = Report::default();
    // SAFETY: the function and the report have these types in `report.rs` of the driver for tests.
    unsafe {
        let ask: unsafe extern "C" fn(*mut Report) -> u32 = std::mem::transmute(address);
        assert_eq!(ask(&raw mut report), 0);
    }
    report
}

pub fn set_delays(longest_us: u64, seed: u64) {
    let address = function("allstream_test_cuda_set_delays");
    // SAFETY: the function's type, in the driver's `knobs.rs`.
    let set: extern "C" fn(u64, u64) -> u32 = unsafe { std::mem::transmute(address) };
    assert_eq!(set(longest_us, seed), 0);
}

/// How many hardware queues contexts have that are made from now on; 0: as many as the environment variable says.
pub fn set_queues(count: u32) {
    let address = function("allstream_test_cuda_set_queues");
    // SAFETY: the function's type, in the driver's `knobs.rs`.
    let set: extern "C" fn(u32) -> u32 = unsafe { std::mem::transmute(address) };
    assert_eq!(set(count), 0);
}

/// How contexts that are made from now on deal their hardware queues to streams: 0 one after the other, 1 at random, 2 at random and apart
/// by priority. The seed is that of [`set_delays`].
pub fn set_deal(deal: u32) {
    let address = function("allstream_test_cuda_set_deal");
    // SAFETY: the function's type, in the driver's `knobs.rs`.
    let set: extern "C" fn(u32) -> u32 = unsafe { std::mem::transmute(address) };
    assert_eq!(set(deal), 0);
}

/// Lets this many copies to the host (`false`) or to a device go on; the streams of later ones wait. `u64::MAX`: all go on.
pub fn pass(to_device: bool, copies: u64) {
    let address = function("allstream_test_cuda_pass");
    // SAFETY: the function's type, in the driver's `knobs.rs`.
    let set: extern "C" fn(u32, u64) -> u32 = unsafe { std::mem::transmute(address) };
    assert_eq!(set(u32::from(to_device), copies), 0);
}

/// Makes the `nth` call of a function from now (1 is the next) fail with this code; without a name, no call fails any more.
pub fn fail(name: Option<&str>, nth: u64, code: u32) {
    let address = function("allstream_test_cuda_fail");
    let name = name.map(|name| CString::new(name).unwrap());
    let at = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
    // SAFETY: the function's type, in the driver's `knobs.rs`; the name lives until it returns.
    unsafe {
        let set: unsafe extern "C" fn(*const c_char, u64, u32) -> u32 = std::mem::transmute(address);
        assert_eq!(set(at, nth, code), 0);
    }
}

pub fn calls(name: &str) -> u64 {
    let address = function("allstream_test_cuda_calls");
    let name = CString::new(name).unwrap();
    // SAFETY: the function's type, in the driver's `knobs.rs`; the name lives until it returns.
    unsafe {
        let ask: unsafe extern "C" fn(*const c_char) -> u64 = std::mem::transmute(address);
        ask(name.as_ptr())
    }
}

/// How many bytes the kernels of this process have read and written so far, in sum.
pub fn moved() -> u64 {
    let address = function("allstream_test_cuda_moved");
    // SAFETY: the function's type, in the driver's `launch.rs`.
    let ask: extern "C" fn() -> u64 = unsafe { std::mem::transmute(address) };
    ask()
}

/// How often each function of the driver has been called, with the calls of all its versions together.
pub fn all_calls() -> Vec<(String, u64)> {
    let name = function("allstream_test_cuda_name");
    // SAFETY: the function has this type in the driver's `table.rs`. It returns texts that stay valid, and null behind the last.
    unsafe {
        let name: extern "C" fn(usize) -> *const c_char = std::mem::transmute(name);
        let names = (0..).map(|at| name(at)).take_while(|name| !name.is_null());
        let names: BTreeSet<_> =
            names.map(|name| CStr::from_ptr(name).to_string_lossy().into_owned()).collect();
        let plain =
            |name: &String| name.rsplit_once("_v").map_or(name.clone(), |(plain, _)| plain.to_owned());
        let counts = |name: &&String| {
            name.starts_with("cu") && (plain(name) == **name || !names.contains(&plain(name)))
        };
        names.iter().filter(counts).map(|name| (name.clone(), calls(name))).collect()
    }
}

/// Sets how many unfinished pieces of work a stream holds from now on; 0: any number. A thread that adds one more waits, and holds the
/// context's lock meanwhile.
pub fn set_depth(pieces: u64) {
    let address = function("allstream_test_cuda_set_depth");
    // SAFETY: the function's type, in the driver's `knobs.rs`.
    let set: extern "C" fn(u64) -> u32 = unsafe { std::mem::transmute(address) };
    assert_eq!(set(pieces), 0);
}

/// Whether the environment makes this process load the driver for tests, and not another library or none.
pub fn has_driver() -> bool {
    std::env::var(LIBRARY).is_ok_and(|path| path.ends_with("/libcuda.so") && Path::new(&path).exists())
}

/// From now on the driver asks this function at each call whether the calling thread holds a lock under which it may not call a driver.
pub fn ask_locks(holds: extern "C" fn() -> bool) {
    let address = function("allstream_test_cuda_ask_locks");
    // SAFETY: the function's type, in the driver's `under_locks.rs`.
    let ask: extern "C" fn(Option<extern "C" fn() -> bool>) -> u32 = unsafe { std::mem::transmute(address) };
    assert_eq!(ask(Some(holds)), 0);
}

/// How many calls of the driver came from threads that held a lock of [`ask_locks`]; and a text that names the functions with their counts.
pub fn calls_under_locks() -> (u64, String) {
    let (all, of, name) = (
        function("allstream_test_cuda_calls_under_locks"),
        function("allstream_test_cuda_calls_under_locks_of"),
        function("allstream_test_cuda_name"),
    );
    // SAFETY: the functions have these types in the driver's `under_locks.rs` and `table.rs`. The latter's returns texts that stay valid,
    // and null behind the last.
    unsafe {
        let all: extern "C" fn() -> u64 = std::mem::transmute(all);
        let of: unsafe extern "C" fn(*const c_char) -> u64 = std::mem::transmute(of);
        let name: extern "C" fn(usize) -> *const c_char = std::mem::transmute(name);
        let names = (0..).map(|at| name(at)).take_while(|name| !name.is_null());
        let counts = names.map(|name| (CStr::from_ptr(name).to_string_lossy(), of(name)));
        let named: Vec<_> =
            counts.filter(|(_, count)| *count > 0).map(|(name, n)| format!("{name} {n}")).collect();
        (all(), named.join(", "))
    }
}

/// Asserts that collectives on devices copy nothing to or from the host. All ranks must call this.
pub fn nothing_goes_through_the_host(comm: &mut Comm, stream: &DeviceStream) {
    let copies = || calls("cuMemcpyDtoHAsync_v2") + calls("cuMemcpyHtoDAsync_v2");
    soon(comm.barrier()).unwrap();
    let before = copies();
    soon(comm.barrier()).unwrap();
    let buf = soon(comm.all_reduce(DeviceBuf::<f32>::zeroed(stream, 5000).unwrap())).unwrap();
    soon(comm.broadcast(buf, 1)).unwrap();
    soon(comm.barrier()).unwrap();
    assert_eq!(copies(), before);
    soon(comm.barrier()).unwrap();
}

/// Asserts that everything made in the driver is gone. Waits for that, as the thread that waits for events may drop the last handle.
pub fn nothing_left(what: &str) {
    let end = Instant::now() + DEADLINE;
    while report() != Report::default() {
        assert!(Instant::now() < end, "{what}: {:?}", report());
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn device() -> (Device, DeviceStream) {
    let device = Device::new(0).unwrap();
    let stream = DeviceStream::new(&device).unwrap();
    (device, stream)
}

pub fn numbers(len: usize) -> Vec<u32> {
    (0..len as u32).collect()
}

/// Runs each rank of a group in a thread of its own.
pub fn ranks<R: Send>(n: usize, run: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    let results: Vec<Mutex<Option<R>>> = (0..n).map(|_| Mutex::new(None)).collect();
    each_rank(n, &|rank, comm| *results[rank].lock().unwrap() = Some(run(comm)));
    results.into_iter().map(|result| result.into_inner().unwrap().expect("the thread has ended")).collect()
}

/// Takes a trait object, so that the code that starts threads is compiled once.
fn each_rank(n: usize, run: &(dyn Fn(usize, Comm) + Sync)) {
    let comms = Comm::local(n).unwrap();
    std::thread::scope(|scope| {
        let start = |(rank, comm)| scope.spawn(move || run(rank, comm));
        let threads: Vec<_> = comms.into_iter().enumerate().map(start).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

pub fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 3) % 11) as f32 - 4.0).collect()
}

pub fn up<T: Element>(stream: &DeviceStream, values: Vec<T>) -> DeviceBuf<T> {
    soon(DeviceBuf::from_host(stream, values)).unwrap().1
}

pub fn down<T: Element>(buf: DeviceBuf<T>) -> Vec<T> {
    let len = Buf::len(&buf);
    soon(buf.to_host(vec![T::default(); len])).unwrap().1
}

/// Binds `comm` to one of the first `devices` devices, chosen by its rank; returns a new stream of that device.
pub fn bound(comm: &mut Comm, devices: usize) -> DeviceStream {
    let device = Device::new(comm.rank() % devices).unwrap();
    assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
    DeviceStream::new(&device).unwrap()
}

/// Asserts that nobody else writes to a buffer that a failed operation gave back: values written to it stay, though data may still be in flight.
pub fn is_ours(buf: DeviceBuf<f32>) {
    let pattern: Vec<f32> = (0..buf.len()).map(|i| i as f32 + 0.25).collect();
    let (_, buf) = soon(buf.copy_from_host(pattern.clone())).unwrap();
    // Six copies back give a late write time to arrive.
    let mut buf = buf;
    for _ in 0..6 {
        let (back, host) = soon(buf.to_host(vec![0f32; pattern.len()])).unwrap();
        assert!(host == pattern, "somebody wrote to a buffer that was given back");
        buf = back;
    }
}
