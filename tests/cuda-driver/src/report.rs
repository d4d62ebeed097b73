//! Counts of the living objects, and the reset to the state before `cuInit`.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::{Out, lock};
use crate::codes::{Code, Done};
use crate::context::{CONTEXTS, POOL_ACCESS};
use crate::event::EVENTS;
use crate::module::MODULES;
use crate::space::{self, Kind};
use crate::stream::{OWN_STREAMS, STREAMS};

/// How many pieces of memory were freed while queued work was still to use them.
pub(crate) static FREED_IN_USE: AtomicU64 = AtomicU64::new(0);

/// How many objects of each kind live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Report {
    contexts: u64,
    streams: u64,
    events: u64,
    /// Allocations of device memory.
    allocations: u64,
    allocated_bytes: u64,
    host_allocations: u64,
    registered: u64,
    /// Memory of other processes that is mapped here.
    mapped_handles: u64,
    modules: u64,
    /// Counted since the last reset; this is not a number of living objects.
    freed_in_use: u64,
}

fn report() -> Report {
    let memory = space::all();
    let count = |kinds: &[Kind]| memory.iter().filter(|memory| kinds.contains(&memory.kind)).count() as u64;
    let device = [Kind::Device, Kind::Pool];
    Report {
        contexts: CONTEXTS.len() as u64,
        streams: STREAMS.len() as u64,
        events: EVENTS.len() as u64,
        allocations: count(&device),
        allocated_bytes: memory.iter().filter(|it| device.contains(&it.kind)).map(|it| it.size as u64).sum(),
        host_allocations: count(&[Kind::Host]),
        registered: count(&[Kind::Registered]),
        mapped_handles: count(&[Kind::Imported]),
        modules: MODULES.len() as u64,
        freed_in_use: FREED_IN_USE.load(Ordering::Relaxed),
    }
}

/// Reports how many objects live.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn allstream_test_cuda_report(out: Out<Report>) -> Code {
    out.set(report()).err().unwrap_or(Code::SUCCESS)
}

fn reset() -> Done {
    if (Report { freed_in_use: 0, ..report() }) != Report::default() {
        return Err(Code::ILLEGAL_STATE);
    }
    for stream in OWN_STREAMS.all() {
        stream.close();
        let _ = OWN_STREAMS.remove(stream.handle);
    }
    lock(&POOL_ACCESS).clear();
    FREED_IN_USE.store(0, Ordering::Relaxed);
    crate::device::forget_all();
    crate::entry::forget();
    Ok(())
}

/// Goes back to the state before `cuInit`, but keeps the knobs; refused while any object lives.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_reset() -> Code {
    reset().err().unwrap_or(Code::SUCCESS)
}
