//! NCCL for tests: the functions of `libnccl.so.2` that allstream uses, among threads of one process, on the CUDA driver for tests.
//!
//! See the README for what it can show and what it cannot. Functions carry the names and signatures of the real library, whose manual
//! documents them; the comments here explain only what differs from it.

mod comm;
mod driver;
mod kernel;
mod knobs;

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use comm::{Comm, Handle};
use kernel::{Call, Verb};
use knobs::COUNTS;

/// `ncclResult_t`.
pub(crate) type Code = c_int;
pub(crate) const SUCCESS: Code = 0;
pub(crate) const UNHANDLED_CUDA_ERROR: Code = 1;
pub(crate) const INVALID_ARGUMENT: Code = 4;
pub(crate) const INVALID_USAGE: Code = 5;
pub(crate) const IN_PROGRESS: Code = 7;

/// Counts and prints a use that the real library forbids; returns `code`.
pub(crate) fn misuse(what: &str, code: Code) -> Code {
    COUNTS.misuses.fetch_add(1, Ordering::Relaxed);
    eprintln!("NCCL for tests: {what}");
    code
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    if version.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller promises that `version` leads to room for a number.
    unsafe { version.write(knobs::version()) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error (for tests)",
        2 => c"unhandled system error (for tests)",
        3 => c"internal error (for tests)",
        INVALID_ARGUMENT => c"invalid argument (for tests)",
        INVALID_USAGE => c"invalid usage (for tests)",
        6 => c"remote process exited or there was a network error (for tests)",
        IN_PROGRESS => c"operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Code {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    bytes[127] = 1;
    // SAFETY: the caller promises that `id` leads to room for an id.
    unsafe { id.write(UniqueId(bytes)) };
    SUCCESS
}

/// The beginning of `ncclConfig_t`.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut Handle,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> Code {
    // SAFETY: the caller promises that `config` is null or leads to a configuration, which is at least as long as this beginning.
    let Some(config) = (unsafe { config.as_ref() }) else {
        return misuse("init without a configuration", INVALID_ARGUMENT);
    };
    let is_right =
        config.magic == 0xcafe_beef && config.size >= size_of::<Config>() && config.version >= 21400;
    if out.is_null() || !is_right || config.blocking != 0 || rank < 0 || rank >= size {
        return misuse("init with arguments that are none", INVALID_ARGUMENT);
    }
    match comm::init(size as usize, id.0, rank) {
        Ok(handle) => {
            // SAFETY: `out` is not null, and the caller promises that it leads to room for a handle.
            unsafe { out.write(handle) };
            IN_PROGRESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(handle: Handle, out: *mut Code) -> Code {
    let Some(comm) = Comm::get(handle) else {
        return misuse("a state is asked for that is gone", INVALID_ARGUMENT);
    };
    // SAFETY: the caller promises that `out` leads to room for a code.
    unsafe { out.write(comm.state()) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(handle: Handle) -> Code {
    match Comm::get(handle) {
        Some(comm) => comm.finalize(),
        None => misuse("a communicator that is gone is finalized", INVALID_ARGUMENT),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(handle: Handle) -> Code {
    match Comm::take(handle) {
        Some(comm) if comm.is_finalized() && comm.state() == SUCCESS => SUCCESS,
        Some(_) => misuse("a communicator is destroyed before it is finalized", INVALID_USAGE),
        None => misuse("a communicator that is gone is destroyed", INVALID_ARGUMENT),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(handle: Handle) -> Code {
    match Comm::take(handle) {
        Some(comm) => comm.abort(),
        None => misuse("a communicator that is gone is aborted", INVALID_ARGUMENT),
    }
}

/// The group that this thread has begun: how deeply groups are nested, its calls, and the first error.
#[derive(Default)]
struct Group {
    depth: u32,
    calls: Vec<(Handle, u64, Call)>,
    failed: Option<Code>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> Code {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> Code {
    let group = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(misuse("a group ends that was not begun", INVALID_USAGE));
        }
        group.depth -= 1;
        Ok(if group.depth == 0 { Some(std::mem::take(group)) } else { None })
    });
    let group = match group {
        Ok(Some(group)) => group,
        Ok(None) => return SUCCESS,
        Err(code) => return code,
    };
    if let Some(code) = group.failed {
        return code;
    }
    // Each communicator gets one kernel, in the order in which the group first called the communicators.
    let mut rest = group.calls;
    let mut answer = SUCCESS;
    while let Some((handle, stream, _)) = rest.first() {
        let (handle, stream) = (*handle, *stream);
        let (here, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|call| call.0 == handle);
        rest = others;
        if here.iter().any(|call| call.1 != stream) {
            return misuse("one communicator's calls of a group are on several streams", INVALID_USAGE);
        }
        let calls = here.into_iter().map(|(_, _, call)| call).collect();
        match Comm::get(handle).map(|comm| comm.submit(calls, stream)) {
            Some(IN_PROGRESS) => answer = IN_PROGRESS,
            Some(SUCCESS) => {}
            Some(code) => return code,
            None => return misuse("a communicator ended within a group", INVALID_ARGUMENT),
        }
    }
    answer
}

/// Adds a call to the group that this thread has begun, or makes it a group of its own.
fn add(handle: Handle, stream: u64, call: Call) -> Code {
    let checked = match Comm::get(handle) {
        None => misuse("a call on a communicator that is gone", INVALID_ARGUMENT),
        Some(comm) => comm.check(&call),
    };
    ncclGroupStart();
    GROUP.with_borrow_mut(|group| match checked {
        SUCCESS => group.calls.push((handle, stream, call)),
        code => {
            group.failed.get_or_insert(code);
        }
    });
    match (checked, ncclGroupEnd()) {
        (SUCCESS, answer) => answer,
        (code, _) => code,
    }
}

/// Defines the functions of collectives: for each, its arguments beside those that all have, and its verb.
macro_rules! collectives {
    ($($name:ident($($argument:ident),*) = $verb:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(
            input: *const c_void,
            output: *mut c_void,
            count: usize,
            dtype: c_int,
            $($argument: c_int,)*
            comm: Handle,
            stream: u64,
        ) -> Code {
            let (input, output) = (input.addr() as u64, output.addr() as u64);
            add(comm, stream, Call { verb: $verb, input, output, count, dtype })
        }
    )*};
}

collectives! {
    ncclAllReduce(op) = Verb::AllReduce { op };
    ncclBroadcast(root) = Verb::Broadcast { root };
    ncclReduce(op, root) = Verb::Reduce { op, root };
    ncclAllGather() = Verb::AllGather;
    ncclReduceScatter(op) = Verb::ReduceScatter { op };
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    from: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: u64,
) -> Code {
    add(comm, stream, Call { verb: Verb::Send { peer }, input: from.addr() as u64, output: 0, count, dtype })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: u64,
) -> Code {
    add(comm, stream, Call { verb: Verb::Recv { peer }, input: 0, output: to.addr() as u64, count, dtype })
}
