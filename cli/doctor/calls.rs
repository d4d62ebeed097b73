//! Finds out which calls of the driver block while a stream waits.

use std::ffi::c_void;
use std::thread;
use std::time::Duration;

use allstream_cuda_kernels::Module;
use allstream_sys::cuda::{
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CudaError,
};

use super::answer::{Answer, listed, step};
use super::behind::stream_beside;
use super::driver::{Aside, Gate, Gpu, Problem, Stream, problem};

/// A call that has all it needs.
type Call = Box<dyn FnOnce() -> Result<(), Problem> + Send>;
/// Gets a call ready, while nothing is blocked. The number is the turn, 0 or 1: each uses another module and kernel ([`MODULES`]).
type Prepare = fn(&'static Gpu, &'static Stream, usize) -> Result<Call, Problem>;

/// A call that returns within this time does not count as blocked.
const SOON: Duration = Duration::from_millis(100);
const MEMORY: usize = 4 << 20;
const HOST_MEMORY: usize = 1 << 20;

fn call<T, E: Into<Problem>>(call: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<Call, Problem> {
    Ok(Box::new(move || call().map(drop).map_err(Into::into)))
}

/// Host memory that a call works on.
struct Host(*mut c_void);
// SAFETY: only an address, of memory that belongs to the process; one thread at a time uses it.
unsafe impl Send for Host {}

impl Host {
    /// Pinned by the driver.
    fn pinned(gpu: &Gpu) -> Result<Host, CudaError> {
        // SAFETY: this thread has a current context.
        unsafe { gpu.cuda.mem_host_alloc(HOST_MEMORY, CU_MEMHOSTALLOC_PORTABLE) }.map(Host)
    }

    /// Pageable; never freed.
    fn pageable() -> Host {
        Host(Vec::leak(vec![0_u64; HOST_MEMORY / 8 + 512]).as_mut_ptr().cast())
    }

    fn at(self) -> *mut c_void {
        self.0
    }

    /// The same memory from the next page boundary on.
    fn pages(self) -> Host {
        Host(self.0.map_addr(|address| address.next_multiple_of(4096)))
    }

    fn register(&self, gpu: &Gpu) -> Result<(), CudaError> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: from this address on, `HOST_MEMORY` bytes are this process's, and are never freed.
        unsafe { gpu.cuda.mem_host_register(self.0, HOST_MEMORY, flags) }
    }
}

/// For each turn, a module and a kernel in it: one for the call that is made freely, another for the call while a stream waits, as only the
/// first load of a module does all the work.
const MODULES: [(Module, &str); 2] = [(Module::I8, "combinen_i8_max"), (Module::I16, "combinen_i16_max")];

/// The calls that are tried: some that allstream makes to the driver, without those that put work on its own streams.
const CALLS: [(&str, Prepare); 15] = [
    ("cuMemAlloc", |gpu, _, _| call(move || gpu.memory(MEMORY))),
    ("cuMemFree", |gpu, _, _| {
        let memory = gpu.memory(MEMORY)?;
        call(move || memory.free())
    }),
    ("cuMemHostAlloc", |gpu, _, _| call(move || Host::pinned(gpu))),
    ("cuMemFreeHost", |gpu, _, _| {
        let memory = Host::pinned(gpu)?;
        // SAFETY: just allocated, and used by nobody.
        call(move || unsafe { gpu.cuda.mem_free_host(memory.at()) })
    }),
    ("cuMemHostRegister", |gpu, _, _| {
        let memory = Host::pageable().pages();
        call(move || memory.register(gpu))
    }),
    ("cuMemHostUnregister", |gpu, _, _| {
        let memory = Host::pageable().pages();
        memory.register(gpu)?;
        // SAFETY: just registered, and used by nobody.
        call(move || unsafe { gpu.cuda.mem_host_unregister(memory.at()) })
    }),
    ("cuModuleLoadData", |gpu, _, turn| {
        let (module, _) = MODULES[turn];
        let is_machine_code = gpu.load_machine_code(module).is_ok();
        let load = move || {
            if is_machine_code { Ok(gpu.load_machine_code(module)?) } else { gpu.load_ptx(module) }
        };
        call(load)
    }),
    ("cuModuleGetFunction", |gpu, _, turn| {
        let (module, name) = MODULES[turn];
        let module = gpu.load(module)?;
        call(move || gpu.function(module, name))
    }),
    ("cuStreamCreate", |gpu, _, _| call(move || gpu.stream())),
    ("cuStreamDestroy", |gpu, _, _| {
        let stream = gpu.stream()?;
        call(move || stream.destroy())
    }),
    ("cuEventCreate", |gpu, _, _| call(move || gpu.event())),
    ("cuEventDestroy", |gpu, _, _| {
        let event = gpu.event()?;
        call(move || event.destroy())
    }),
    ("a copy from pageable memory on another stream", |gpu, other, _| {
        let (from, to) = (Host::pageable(), gpu.memory(HOST_MEMORY)?);
        // SAFETY: both have at least `HOST_MEMORY` bytes, and stay until the process ends.
        call(move || unsafe { gpu.cuda.memcpy_htod_async(to.at, from.at(), HOST_MEMORY, other.raw()) })
    }),
    ("cuIpcGetMemHandle", |gpu, _, _| {
        let memory = gpu.memory(MEMORY)?;
        // SAFETY: memory of this context's.
        call(move || unsafe { gpu.cuda.ipc_get_mem_handle(memory.at) })
    }),
    ("cuCtxGetStreamPriorityRange", |gpu, _, _| call(move || gpu.cuda.stream_priorities())),
];

pub(crate) fn behind_a_wait(gpu: &'static Gpu) -> Result<Answer, Problem> {
    let [gate] = gpu.words()?.map(Gate);
    let blocked = gpu.stream()?;
    step("looking for a stream that goes on meanwhile");
    let beside = stream_beside(&blocked, &gate, 1)?;
    let is_beside = beside.is_some();
    let other: &'static Stream = Box::leak(Box::new(beside.map_or_else(|| gpu.stream(), Ok)?));
    let (mut waits, mut failed) = (Vec::new(), Vec::new());
    for (round, (name, prepare)) in (2..).zip(CALLS) {
        // The call is made a first time while nothing waits: then the driver does its one-time work, and it is seen how long the call takes.
        step(&format!("{name}, freely"));
        let free = Aside::new(gpu, prepare(gpu, other, 0)?)?;
        free.go()?;
        let Some((answer, freely)) = free.within(Duration::from_secs(2)) else {
            return Err(problem(format!("{name} did not return within 2 s, though nothing waited")));
        };
        if let Err(error) = answer {
            failed.push(error.0);
            continue;
        }
        let again = Aside::new(gpu, prepare(gpu, other, 1)?)?;
        blocked.wait(gate.0, round)?;
        thread::sleep(Duration::from_millis(1));
        step(&format!("{name}, while a stream waits"));
        again.go()?;
        let answer = again.within(SOON.max(freely * 4));
        if answer.is_none() {
            waits.push(name);
        }
        gate.0.set(round);
        match answer.or_else(|| again.within(Duration::from_secs(1))) {
            Some((Ok(()), _)) => {}
            Some((Err(error), _)) => failed.push(error.0),
            None => {
                return Err(problem(format!("{name} did not return within 1 s after the host's release")));
            }
        }
        blocked.synchronize()?;
    }
    let count = waits.len();
    let mut remark = match count {
        0 => format!("none of {} calls", CALLS.len()),
        _ => format!("{count} of {} calls, until the stream is released: {}", CALLS.len(), listed(&waits)),
    };
    if !is_beside {
        remark +=
            "; no other stream was found that goes on while one waits, so a copy there waits for that, too";
    }
    if !failed.is_empty() {
        remark += &format!("; failed: {}", listed(&failed));
    }
    Ok(Answer::yes_or_no(count > 0, remark).with("calls_that_wait", count as f64))
}
