//! What probes need of the CUDA driver. It is called directly, without any code of the engine's.
//!
//! A probe is a process that ends with its answer. It never frees contexts and words, and never joins threads that may not return from the
//! driver: freeing or joining could wait for the very stream that the probe has blocked.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use allstream_cuda_kernels::{self as kernels, Kind, Launch, Module};
use allstream_kernels::DType;
use allstream_sys::Unavailable;
use allstream_sys::cuda::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_EVENT_DISABLE_TIMING, CU_MEMHOSTALLOC_DEVICEMAP,
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE,
    CU_STREAM_NON_BLOCKING, CU_STREAM_WAIT_VALUE_GEQ, CuContext, CuDevice, CuDevicePtr, CuEvent, CuFunction,
    CuModule, CuResult, CuStream, CuStreamMemOp, Cuda, CudaError,
};
use rustix::mm::{MapFlags, ProtFlags};

/// Why a probe has no answer.
#[derive(Debug)]
pub(crate) struct Problem(pub(crate) String);

impl<E: std::error::Error> From<E> for Problem {
    fn from(error: E) -> Problem {
        Problem(error.to_string())
    }
}

/// A failure, described by the probe itself.
pub(crate) fn problem(text: impl Into<String>) -> Problem {
    Problem(text.into())
}

/// An error of the driver, in short: `CUDA_ERROR_INVALID_CONTEXT (201) by cuEventQuery`.
pub(crate) fn code(error: &CudaError) -> String {
    format!("{} ({}) by {}", error.name, error.code.0, error.call)
}

/// The driver; if it cannot be loaded, the error says what is missing.
pub(crate) fn cuda() -> Result<&'static Cuda, Problem> {
    Cuda::get().map_err(|missing: &Unavailable| problem(missing.to_string()))
}

/// The device with this number.
pub(crate) fn device(cuda: &Cuda, ordinal: usize) -> Result<CuDevice, Problem> {
    // SAFETY: only asks for the number of devices.
    let count = unsafe { cuda.device_get_count() }?;
    let index = i32::try_from(ordinal).ok().filter(|index| *index < count).ok_or_else(|| {
        problem(format!("there is no device {ordinal}, this process sees {count} (CUDA_VISIBLE_DEVICES)"))
    })?;
    // SAFETY: `index` is less than the number of devices.
    Ok(unsafe { cuda.device_get(index) }?)
}

/// A device, and its primary context, which is retained until the process ends.
pub(crate) struct Gpu {
    pub(crate) cuda: &'static Cuda,
    pub(crate) context: CuContext,
    /// The first number of the compute capability.
    pub(crate) major: u32,
}

/// Bytes from one word to the next: each word has a cache line to itself.
const APART: usize = 64;

impl Gpu {
    /// Brings the driver up, and makes the context this thread's current one.
    pub(crate) fn open(ordinal: usize) -> Result<&'static Gpu, Problem> {
        let cuda = cuda()?;
        let device = device(cuda, ordinal)?;
        // SAFETY: `device` comes from the driver.
        let major =
            unsafe { cuda.device_get_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) }?;
        // SAFETY: `device` comes from the driver; the context is never released.
        let context = unsafe { cuda.device_primary_ctx_retain(device) }?;
        let gpu = Gpu { cuda, context, major: major.unsigned_abs() };
        gpu.enter()?;
        Ok(Box::leak(Box::new(gpu)))
    }

    /// Makes the context this thread's current one, for the rest of the thread's life.
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is never released.
        unsafe { self.cuda.ctx_push_current(self.context) }
    }

    /// Makes a stream as the engine makes those of buffers: of priority 0.
    pub(crate) fn stream(&'static self) -> Result<Stream, CudaError> {
        self.stream_of_priority(0)
    }

    /// Makes a stream as the engine makes those that collectives run on: of the highest priority.
    pub(crate) fn urgent_stream(&'static self) -> Result<Stream, CudaError> {
        let (_least, greatest) = self.cuda.stream_priorities()?;
        self.stream_of_priority(greatest)
    }

    fn stream_of_priority(&'static self, priority: c_int) -> Result<Stream, CudaError> {
        // SAFETY: the context is this thread's; the stream is destroyed by `destroy` alone.
        let raw = unsafe { self.cuda.stream_create_with_priority(CU_STREAM_NON_BLOCKING, priority) }?;
        Ok(Stream { gpu: self, raw })
    }

    /// An event that can be queried and waited for, and records no time.
    pub(crate) fn event(&'static self) -> Result<Event, CudaError> {
        self.event_of(CU_EVENT_DISABLE_TIMING)
    }

    pub(crate) fn event_of(&'static self, flags: c_uint) -> Result<Event, CudaError> {
        // SAFETY: the context is this thread's; the event is destroyed by `destroy` alone.
        let raw = unsafe { self.cuda.event_create(flags) }?;
        Ok(Event { gpu: self, raw })
    }

    /// `N` words in pinned memory, all 0.
    pub(crate) fn words<const N: usize>(&self) -> Result<[Word; N], CudaError> {
        self.words_with(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)
    }

    /// `N` words, all 0, in pinned memory that is allocated with these flags.
    pub(crate) fn words_with<const N: usize>(&self, flags: c_uint) -> Result<[Word; N], CudaError> {
        let bytes = (N * APART).next_multiple_of(4096);
        // SAFETY: this thread has a current context; the memory is never freed.
        let base = unsafe { self.cuda.mem_host_alloc(bytes, flags) }?;
        // SAFETY: `bytes` bytes were just allocated, and nobody uses them yet.
        unsafe { std::ptr::write_bytes(base.cast::<u8>(), 0, bytes) };
        // SAFETY: the memory was just allocated by the driver.
        let device = unsafe { self.cuda.mem_host_get_device_pointer(base, 0) }?;
        // SAFETY: the memory has room for `N` words, is aligned to a page and zeroed, and is never freed.
        Ok(unsafe { words(base, device) })
    }

    /// Words in memory that is registered with these flags: new memory of this process, or `file`, which other processes may map, too.
    pub(crate) fn registered_words<const N: usize>(
        &self,
        flags: c_uint,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<[Word; N], Problem> {
        let bytes = (N * APART).next_multiple_of(4096);
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        let base = match file {
            // SAFETY: a new mapping, at a place that the kernel chooses; never unmapped.
            Some(file) => unsafe { rustix::mm::mmap(null, bytes, rights, MapFlags::SHARED, file, 0) },
            // SAFETY: also a new mapping, at a place that the kernel chooses; never unmapped.
            None => unsafe { rustix::mm::mmap_anonymous(null, bytes, rights, MapFlags::PRIVATE) },
        }?;
        // SAFETY: these are whole pages that this process has just mapped and never unmaps.
        unsafe { self.cuda.mem_host_register(base, bytes, flags) }?;
        // SAFETY: the memory was just registered.
        let device = unsafe { self.cuda.mem_host_get_device_pointer(base, 0) }?;
        // SAFETY: the memory has room for `N` words, is aligned to a page, and is never unmapped; other processes that map the file use it as
        // such words, too.
        Ok(unsafe { words(base, device) })
    }

    /// Words in a file, registered with the flags that the engine uses for memory that processes share.
    pub(crate) fn shared_words<const N: usize>(&self, file: BorrowedFd<'_>) -> Result<[Word; N], Problem> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        self.registered_words(flags, Some(file))
    }

    pub(crate) fn memory(&'static self, bytes: usize) -> Result<Memory, CudaError> {
        // SAFETY: this thread has a current context; only `Memory::free` frees the memory.
        let at = unsafe { self.cuda.mem_alloc(bytes) }?;
        Ok(Memory { gpu: self, at, bytes })
    }

    /// Pinned host memory, never freed.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned, CudaError> {
        // SAFETY: this thread has a current context.
        unsafe { self.cuda.mem_host_alloc(bytes, CU_MEMHOSTALLOC_PORTABLE) }.map(Pinned)
    }

    /// A module as machine code.
    pub(crate) fn load_machine_code(&self, module: Module) -> Result<CuModule, CudaError> {
        match module.machine_code(self.major) {
            // SAFETY: `code` is a whole ELF file at an aligned address; the file itself says how long it is.
            Some(code) => unsafe { self.cuda.module_load_data(code.as_ptr().cast()) },
            None => Err(CudaError {
                call: "cuModuleLoadData",
                code: CuResult::NO_BINARY_FOR_GPU,
                name: "CUDA_ERROR_NO_BINARY_FOR_GPU".into(),
                text: format!("there is no machine code for compute capability {}.x here", self.major),
            }),
        }
    }

    /// A module as PTX, which the driver compiles.
    pub(crate) fn load_ptx(&self, module: Module) -> Result<CuModule, Problem> {
        let text = CString::new(module.ptx())?;
        // SAFETY: the text ends in a zero byte.
        Ok(unsafe { self.cuda.module_load_data(text.as_ptr().cast()) }?)
    }

    /// A module as the engine loads it.
    pub(crate) fn load(&self, module: Module) -> Result<CuModule, Problem> {
        self.load_machine_code(module).or_else(|_| self.load_ptx(module))
    }

    pub(crate) fn function(&self, module: CuModule, name: &str) -> Result<CuFunction, Problem> {
        let name = CString::new(name)?;
        // SAFETY: modules are never unloaded; the name ends in a zero byte.
        Ok(unsafe { self.cuda.module_get_function(module, name.as_ptr()) }?)
    }

    /// A kernel that copies four bytes, in one block.
    pub(crate) fn small_kernel(&'static self) -> Result<SmallKernel, Problem> {
        let memory = self.memory(256)?;
        let none = || problem("there is no kernel that copies words (a bug)");
        let kernel = kernels::kernel(DType::U32, Kind::Copy).ok_or_else(none)?;
        let launch = kernels::copy(DType::U32, memory.at, &[memory.at + 128], 1, 1).ok_or_else(none)?;
        let function = self.function(self.load(kernel.module)?, &kernel.name())?;
        Ok(SmallKernel { launch: Launch { threads: 32, ..launch }, function, _memory: memory })
    }
}

/// # Safety
/// The memory at `base` has room for `N` words that are `APART` bytes apart. It is aligned and never freed, and everybody uses it only as
/// atomic words.
unsafe fn words<const N: usize>(base: *mut c_void, device: CuDevicePtr) -> [Word; N] {
    let word = |i: usize| {
        // SAFETY: the word lies within the memory that the caller promises: aligned, never freed, used as atomic words only.
        let host = unsafe { AtomicU32::from_ptr(base.byte_add(i * APART).cast()) };
        Word { host, device: device + (i * APART) as u64 }
    };
    std::array::from_fn(word)
}

/// A word of host memory that streams wait for and write. It is not freed before the process ends.
#[derive(Clone, Copy)]
pub(crate) struct Word {
    host: &'static AtomicU32,
    pub(crate) device: CuDevicePtr,
}

impl Word {
    /// More than any value that a stream waits for: stored in a word, it releases every stream that waits for the word.
    pub(crate) const OPEN: u32 = i32::MAX as u32;

    pub(crate) fn get(self) -> u32 {
        self.host.load(Ordering::Acquire)
    }

    /// Stores a value from the host, without a call of the driver.
    pub(crate) fn set(self, value: u32) {
        self.host.store(value, Ordering::Release);
    }

    /// Waits until the word has this value or more; an error if it has not after one second.
    pub(crate) fn reach(self, value: u32, what: &str) -> Result<(), Problem> {
        const LIMIT: Duration = Duration::from_secs(1);
        if soon(LIMIT, || self.get() >= value) {
            return Ok(());
        }
        Err(problem(format!("{what}: the host has not seen it within {LIMIT:?}")))
    }
}

/// A word that streams wait for. When this value is dropped, also by an error or a panic of the probe, the host releases them.
pub(crate) struct Gate(pub(crate) Word);

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.set(Word::OPEN);
    }
}

/// Asks until `is_so` returns `true` or the time is over. Between two questions this thread spins at first, then yields, then sleeps.
pub(crate) fn soon(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    const SPIN: Duration = Duration::from_micros(200);
    const YIELD: Duration = Duration::from_millis(5);
    let start = Instant::now();
    loop {
        if is_so() {
            return true;
        }
        match start.elapsed() {
            passed if passed > limit => return false,
            passed if passed > YIELD => thread::sleep(Duration::from_micros(50)),
            passed if passed > SPIN => thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }
}

/// A stream. Only `destroy` destroys it: dropping this value does not.
pub(crate) struct Stream {
    pub(crate) gpu: &'static Gpu,
    raw: CuStream,
}

impl Stream {
    /// The driver's handle, for calls that have no method here. The stream exists as long as `self`.
    pub(crate) fn raw(&self) -> CuStream {
        self.raw
    }

    /// Work that is put on the stream after this waits until the word has this value or more.
    pub(crate) fn wait(&self, word: Word, value: u32) -> Result<(), CudaError> {
        // SAFETY: the stream exists, and the word stays until the process ends.
        unsafe { self.gpu.cuda.stream_wait_value32(self.raw, word.device, value, CU_STREAM_WAIT_VALUE_GEQ) }
    }

    pub(crate) fn write(&self, word: Word, value: u32) -> Result<(), CudaError> {
        // SAFETY: as in `wait`.
        unsafe { self.gpu.cuda.stream_write_value32(self.raw, word.device, value, 0) }
    }

    /// Puts these waits and writes of words on the stream, with one call. The driver must have `cuStreamBatchMemOp`.
    pub(crate) fn put(&self, list: &mut [CuStreamMemOp]) -> Result<(), CudaError> {
        // SAFETY: the stream exists, and the words stay until the process ends; the driver reads the list's
        // elements within the call.
        unsafe { self.gpu.cuda.stream_batch_mem_op(self.raw, list.len() as u32, list.as_mut_ptr(), 0) }
    }

    pub(crate) fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist, in one context.
        unsafe { self.gpu.cuda.event_record(event.raw, self.raw) }
    }

    pub(crate) fn wait_event(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist.
        unsafe { self.gpu.cuda.stream_wait_event(self.raw, event.raw, 0) }
    }

    /// Whether all work on the stream is done.
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream exists.
        done(unsafe { self.gpu.cuda.stream_query(self.raw) })
    }

    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream exists.
        unsafe { self.gpu.cuda.stream_synchronize(self.raw) }
    }

    pub(crate) fn fill(&self, memory: &Memory, byte: u8, bytes: usize) -> Result<(), CudaError> {
        let bytes = bytes.min(memory.bytes);
        // SAFETY: `bytes` is no more than the memory has, which is not freed while work on it is queued (`Memory::free`).
        unsafe { self.gpu.cuda.memset_d8_async(memory.at, byte, bytes, self.raw) }
    }

    pub(crate) fn launch(&self, kernel: &SmallKernel) -> Result<(), CudaError> {
        // SAFETY: the kernel works on the memory that `kernel` owns, which is not freed before the process ends.
        unsafe { launch(self, kernel.function, &kernel.launch) }
    }

    /// Destroys the stream. Work that is on it still runs to its end.
    pub(crate) fn destroy(self) -> Result<(), CudaError> {
        // SAFETY: made by `stream_of_priority`, and nobody has it any more.
        unsafe { self.gpu.cuda.stream_destroy(self.raw) }
    }
}

/// Puts a kernel on a stream.
///
/// # Safety
/// `function` is the kernel of `launch`. The memory that it reads and writes belongs to this context, and is not freed before the kernel ends.
pub(crate) unsafe fn launch(stream: &Stream, function: CuFunction, launch: &Launch) -> Result<(), CudaError> {
    let mut arguments = [launch.arguments.address().cast_mut().cast::<c_void>()];
    // SAFETY: the function takes one parameter, of the type of `launch.arguments`, which the driver copies within the call; the caller
    // promises the rest.
    unsafe {
        stream.gpu.cuda.launch_kernel(
            function,
            launch.blocks,
            1,
            1,
            launch.threads,
            1,
            1,
            0,
            stream.raw,
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }
}

/// An event. Only `destroy` destroys it: dropping this value does not.
pub(crate) struct Event {
    gpu: &'static Gpu,
    raw: CuEvent,
}

impl Event {
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event exists.
        done(unsafe { self.gpu.cuda.event_query(self.raw) })
    }

    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event exists.
        unsafe { self.gpu.cuda.event_synchronize(self.raw) }
    }

    /// Milliseconds from another event to this one.
    pub(crate) fn since(&self, start: &Event) -> Result<f32, CudaError> {
        // SAFETY: both exist.
        unsafe { self.gpu.cuda.event_elapsed_time(start.raw, self.raw) }
    }

    pub(crate) fn destroy(self) -> Result<(), CudaError> {
        // SAFETY: made by `event_of`, and nobody has it any more.
        unsafe { self.gpu.cuda.event_destroy(self.raw) }
    }
}

/// Turns the driver's answer to a query into whether the work is done.
fn done(answer: Result<(), CudaError>) -> Result<bool, CudaError> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if error.code == CuResult::NOT_READY => Ok(false),
        Err(error) => Err(error),
    }
}

/// Device memory. Only `free` frees it: dropping this value does not.
pub(crate) struct Memory {
    gpu: &'static Gpu,
    pub(crate) at: CuDevicePtr,
    pub(crate) bytes: usize,
}

impl Memory {
    /// Frees the memory. No queued work may still use it.
    pub(crate) fn free(self) -> Result<(), CudaError> {
        // SAFETY: made by `Gpu::memory`, and nobody has it any more. If work on it were still queued, the driver would wait for the work, or
        // the work would fail on the device: host memory is in no danger.
        unsafe { self.gpu.cuda.mem_free(self.at) }
    }
}

/// Pinned host memory.
pub(crate) struct Pinned(pub(crate) *mut c_void);

/// A kernel of ours that copies four bytes, and its memory.
pub(crate) struct SmallKernel {
    launch: Launch,
    function: CuFunction,
    _memory: Memory,
}

/// A call on its own thread, in which the context is current. The call may never return.
pub(crate) struct Aside<T> {
    go: Sender<()>,
    began: Receiver<()>,
    ended: Receiver<(T, Duration)>,
}

impl<T: Send + 'static> Aside<T> {
    /// Starts the thread, and makes the context current there. The call begins with `go`.
    pub(crate) fn new(
        gpu: &'static Gpu,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Aside<T>, Problem> {
        let (ready, is_ready) = channel();
        let (go, may_go) = channel();
        let (begin, began) = channel();
        let (end, ended) = channel();
        thread::Builder::new().spawn(move || {
            let _ = ready.send(gpu.enter());
            if may_go.recv().is_ok() {
                let _ = begin.send(());
                let start = Instant::now();
                let answer = call();
                let _ = end.send((answer, start.elapsed()));
            }
        })?;
        is_ready.recv()??;
        Ok(Aside { go, began, ended })
    }

    /// Begins the call: returns when the thread is about to make it.
    pub(crate) fn go(&self) -> Result<(), Problem> {
        self.go.send(())?;
        self.began.recv()?;
        Ok(())
    }

    /// What the call returned, and how long it took; `None` if the call does not end within this time from now.
    pub(crate) fn within(&self, limit: Duration) -> Option<(T, Duration)> {
        self.ended.recv_timeout(limit).ok()
    }
}
