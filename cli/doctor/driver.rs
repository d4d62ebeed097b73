//! What probes need of the CUDA driver, by its own functions and nothing of the engine's.
//!
//! A probe is a process that ends with its answer. So contexts, words, and threads that may never come back out of the driver are left to
//! that end: taking them back could wait for the very thing that a probe has blocked.

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

/// A failure in words of the probe's own.
pub(crate) fn problem(text: impl Into<String>) -> Problem {
    Problem(text.into())
}

/// A code of the driver's, in few words: `CUDA_ERROR_INVALID_CONTEXT (201) by cuEventQuery`.
pub(crate) fn code(error: &CudaError) -> String {
    format!("{} ({}) by {}", error.name, error.code.0, error.call)
}

/// The driver, or what is missing.
pub(crate) fn cuda() -> Result<&'static Cuda, Problem> {
    Cuda::get().map_err(|missing: &Unavailable| problem(missing.to_string()))
}

/// The device with this number.
pub(crate) fn device(cuda: &Cuda, ordinal: usize) -> Result<CuDevice, Problem> {
    // SAFETY: asks for a number.
    let count = unsafe { cuda.device_get_count() }?;
    let index = i32::try_from(ordinal).ok().filter(|index| *index < count).ok_or_else(|| {
        problem(format!("there is no device {ordinal}, this process sees {count} (CUDA_VISIBLE_DEVICES)"))
    })?;
    // SAFETY: the index is of a device.
    Ok(unsafe { cuda.device_get(index) }?)
}

/// A device, and its primary context, which is retained until the process ends.
pub(crate) struct Gpu {
    pub(crate) cuda: &'static Cuda,
    pub(crate) context: CuContext,
    /// The first number of the compute capability.
    pub(crate) major: u32,
}

/// Bytes between words: each has a line of the processor's caches for itself.
const APART: usize = 64;

impl Gpu {
    /// Brings the driver up, and makes the context this thread's current one.
    pub(crate) fn open(ordinal: usize) -> Result<&'static Gpu, Problem> {
        let cuda = cuda()?;
        let device = device(cuda, ordinal)?;
        // SAFETY: the driver gave the device.
        let major =
            unsafe { cuda.device_get_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) }?;
        // SAFETY: as above; never released.
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

    /// As the engine makes the streams of buffers.
    pub(crate) fn stream(&'static self) -> Result<Stream, CudaError> {
        self.stream_of_priority(0)
    }

    /// As the engine makes the streams that collectives run on.
    pub(crate) fn urgent_stream(&'static self) -> Result<Stream, CudaError> {
        let (_least, greatest) = self.cuda.stream_priorities()?;
        self.stream_of_priority(greatest)
    }

    fn stream_of_priority(&'static self, priority: c_int) -> Result<Stream, CudaError> {
        // SAFETY: the context is this thread's; the stream is destroyed by `destroy` alone.
        let raw = unsafe { self.cuda.stream_create_with_priority(CU_STREAM_NON_BLOCKING, priority) }?;
        Ok(Stream { gpu: self, raw })
    }

    /// An event to be asked for, without a time.
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

    /// The same, allocated with these flags.
    pub(crate) fn words_with<const N: usize>(&self, flags: c_uint) -> Result<[Word; N], CudaError> {
        let bytes = (N * APART).next_multiple_of(4096);
        // SAFETY: in a context; never freed.
        let base = unsafe { self.cuda.mem_host_alloc(bytes, flags) }?;
        // SAFETY: so many bytes were just given, and nobody uses them yet.
        unsafe { std::ptr::write_bytes(base.cast::<u8>(), 0, bytes) };
        // SAFETY: the memory was just allocated by the driver.
        let device = unsafe { self.cuda.mem_host_get_device_pointer(base, 0) }?;
        // SAFETY: room for `N` words, aligned to a page, zeroed, and never freed.
        Ok(unsafe { words(base, device) })
    }

    /// Words in memory that is registered with these flags: fresh memory of this process's, or `file`, which other processes map, too.
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
            // SAFETY: as above.
            None => unsafe { rustix::mm::mmap_anonymous(null, bytes, rights, MapFlags::PRIVATE) },
        }?;
        // SAFETY: whole pages of this process's, which stay mapped.
        unsafe { self.cuda.mem_host_register(base, bytes, flags) }?;
        // SAFETY: the memory was just registered.
        let device = unsafe { self.cuda.mem_host_get_device_pointer(base, 0) }?;
        // SAFETY: room for `N` words, aligned to a page, never unmapped; whoever maps the file, too, uses it as such words.
        Ok(unsafe { words(base, device) })
    }

    /// The same in a file, as the engine registers memory that processes share.
    pub(crate) fn shared_words<const N: usize>(&self, file: BorrowedFd<'_>) -> Result<[Word; N], Problem> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        self.registered_words(flags, Some(file))
    }

    pub(crate) fn memory(&'static self, bytes: usize) -> Result<Memory, CudaError> {
        // SAFETY: in a context; freed by `free` alone.
        let at = unsafe { self.cuda.mem_alloc(bytes) }?;
        Ok(Memory { gpu: self, at, bytes })
    }

    /// Pinned memory of the host's, never freed.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned, CudaError> {
        // SAFETY: in a context.
        unsafe { self.cuda.mem_host_alloc(bytes, CU_MEMHOSTALLOC_PORTABLE) }.map(Pinned)
    }

    /// A module as machine code.
    pub(crate) fn load_machine_code(&self, module: Module) -> Result<CuModule, CudaError> {
        match module.machine_code(self.major) {
            // SAFETY: a whole ELF file at an aligned address, which says itself how long it is.
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
        // SAFETY: a text that ends in a zero byte.
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
/// At `base` is room for `N` words, `APART` bytes from each other, for ever; everybody uses it as atomic words only.
unsafe fn words<const N: usize>(base: *mut c_void, device: CuDevicePtr) -> [Word; N] {
    let word = |i: usize| {
        // SAFETY: within the room that the caller promises, aligned, for ever.
        let host = unsafe { AtomicU32::from_ptr(base.byte_add(i * APART).cast()) };
        Word { host, device: device + (i * APART) as u64 }
    };
    std::array::from_fn(word)
}

/// A word of the host's memory that streams wait for and write. It stays until the process ends.
#[derive(Clone, Copy)]
pub(crate) struct Word {
    host: &'static AtomicU32,
    pub(crate) device: CuDevicePtr,
}

impl Word {
    /// More than any value that a stream waits for.
    pub(crate) const OPEN: u32 = i32::MAX as u32;

    pub(crate) fn get(self) -> u32 {
        self.host.load(Ordering::Acquire)
    }

    /// The host stores it; the driver has no part in that.
    pub(crate) fn set(self, value: u32) {
        self.host.store(value, Ordering::Release);
    }

    /// Waits until it shows as much; an error if it soon does not.
    pub(crate) fn reach(self, value: u32, what: &str) -> Result<(), Problem> {
        const LIMIT: Duration = Duration::from_secs(1);
        if soon(LIMIT, || self.get() >= value) {
            return Ok(());
        }
        Err(problem(format!("{what}: the host has not seen it within {LIMIT:?}")))
    }
}

/// A word that streams are blocked by. Whatever happens to the probe, in the end the host releases them.
pub(crate) struct Gate(pub(crate) Word);

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.set(Word::OPEN);
    }
}

/// Asks until it is so: at first without giving the processor away, later asleep in between.
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

/// A stream. It stays unless `destroy` is called.
pub(crate) struct Stream {
    pub(crate) gpu: &'static Gpu,
    raw: CuStream,
}

impl Stream {
    /// The driver's handle, for calls that have no method here. The stream exists as long as `self`.
    pub(crate) fn raw(&self) -> CuStream {
        self.raw
    }

    /// What comes after waits until the word shows this value or more.
    pub(crate) fn wait(&self, word: Word, value: u32) -> Result<(), CudaError> {
        // SAFETY: the stream exists, and the word stays until the process ends.
        unsafe { self.gpu.cuda.stream_wait_value32(self.raw, word.device, value, CU_STREAM_WAIT_VALUE_GEQ) }
    }

    pub(crate) fn write(&self, word: Word, value: u32) -> Result<(), CudaError> {
        // SAFETY: as in `wait`.
        unsafe { self.gpu.cuda.stream_write_value32(self.raw, word.device, value, 0) }
    }

    /// These waits and writes of words, with one call. The driver must have it.
    pub(crate) fn put(&self, list: &mut [CuStreamMemOp]) -> Result<(), CudaError> {
        // SAFETY: the stream exists, and the words stay until the process ends; the driver reads so many elements within the call.
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

    /// Whether all that is on it is done.
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
        // SAFETY: within memory that is not freed while work on it is queued (`Memory::free`).
        unsafe { self.gpu.cuda.memset_d8_async(memory.at, byte, bytes, self.raw) }
    }

    pub(crate) fn launch(&self, kernel: &SmallKernel) -> Result<(), CudaError> {
        // SAFETY: the kernel's own memory, which stays until the process ends.
        unsafe { launch(self, kernel.function, &kernel.launch) }
    }

    /// What is on it is still done.
    pub(crate) fn destroy(self) -> Result<(), CudaError> {
        // SAFETY: made by `stream_of_priority`, and nobody has it any more.
        unsafe { self.gpu.cuda.stream_destroy(self.raw) }
    }
}

/// Puts a kernel on a stream.
///
/// # Safety
/// The function is the kernel of this launch, and what it reads and writes is memory of this context that stays until it is over.
pub(crate) unsafe fn launch(stream: &Stream, function: CuFunction, launch: &Launch) -> Result<(), CudaError> {
    let mut arguments = [launch.arguments.address().cast_mut().cast::<c_void>()];
    // SAFETY: the function takes one parameter of the type that is there, which the driver copies within the call; the rest is the
    // caller's promise.
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

/// An event. It stays unless `destroy` is called.
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

/// An answer to whether something is done.
fn done(answer: Result<(), CudaError>) -> Result<bool, CudaError> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if error.code == CuResult::NOT_READY => Ok(false),
        Err(error) => Err(error),
    }
}

/// Memory of the device. It stays unless `free` is called.
pub(crate) struct Memory {
    gpu: &'static Gpu,
    pub(crate) at: CuDevicePtr,
    pub(crate) bytes: usize,
}

impl Memory {
    /// Nothing that is queued may still use it.
    pub(crate) fn free(self) -> Result<(), CudaError> {
        // SAFETY: made by `Gpu::memory`, and nobody has it any more. Were work on it still queued, the driver would wait for that, or the
        // work would fail on the device: the host's memory has no part in it.
        unsafe { self.gpu.cuda.mem_free(self.at) }
    }
}

/// Pinned memory of the host's.
pub(crate) struct Pinned(pub(crate) *mut c_void);

/// A kernel of ours that copies four bytes, and its memory.
pub(crate) struct SmallKernel {
    launch: Launch,
    function: CuFunction,
    _memory: Memory,
}

/// A call on a thread of its own, which has the context: it may never come back.
pub(crate) struct Aside<T> {
    go: Sender<()>,
    began: Receiver<()>,
    ended: Receiver<(T, Duration)>,
}

impl<T: Send + 'static> Aside<T> {
    /// The thread, in the context: the call begins with `go`.
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

    /// Begins the call.
    pub(crate) fn go(&self) -> Result<(), Problem> {
        self.go.send(())?;
        self.began.recv()?;
        Ok(())
    }

    /// What the call gave, and how long it took, if it ends within this time from now.
    pub(crate) fn within(&self, limit: Duration) -> Option<(T, Duration)> {
        self.ended.recv_timeout(limit).ok()
    }
}
