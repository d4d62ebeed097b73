//! Launches.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::{Handle, In};
use crate::codes::{Code, Done};
use crate::entry::call;
use crate::knobs;
use crate::module::{FUNCTIONS, Function, MOST_THREADS};
use crate::ptx;
use crate::space;
use crate::stream::{Stream, Worker};

/// Copies the arguments, as the real library does at the call: each from its own place, or all from a buffer.
fn arguments(function: &Function, places: &In<*const u8>, extra: &In<*const c_void>) -> Done<Vec<u8>> {
    let entry = function.entry();
    let mut bytes = vec![0; entry.param_bytes];
    if !places.is_null() {
        for (index, (offset, size)) in entry.params.iter().enumerate() {
            let place = In::from_pointer(places.at(index)?);
            for at in 0..*size {
                bytes[offset + at] = place.at(at)?;
            }
        }
        return Ok(bytes);
    }
    if extra.is_null() {
        return if entry.params.is_empty() { Ok(bytes) } else { Err(Code::INVALID_VALUE) };
    }
    let (mut buffer, mut size) = (In::from_pointer(std::ptr::null::<u8>()), 0);
    for pair in 0.. {
        match extra.at(pair * 2)? as usize {
            0 => break,
            1 => buffer = In::from_pointer(extra.at(pair * 2 + 1)?.cast()),
            2 => size = In::from_pointer(extra.at(pair * 2 + 1)?.cast::<usize>()).get()?,
            _ => return Err(Code::INVALID_VALUE),
        }
    }
    if size < bytes.len() {
        return Err(Code::INVALID_VALUE);
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = buffer.at(at)?;
    }
    Ok(bytes)
}

/// Bytes that kernels have read and written.
static MOVED: AtomicU64 = AtomicU64::new(0);

/// How many bytes of memory the kernels of this process have read and written together. Only kernels that ended without an error count.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_moved() -> u64 {
    MOVED.load(Ordering::Relaxed)
}

struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
}

impl Shape {
    fn check(&self) -> Done {
        let threads: u64 = self.block.iter().map(|size| u64::from(*size)).product();
        let grid_fits = self.grid[0] <= i32::MAX as u32 && self.grid[1] <= 65535 && self.grid[2] <= 65535;
        let block_fits = threads <= MOST_THREADS.into() && self.block[2] <= 64 && self.shared <= 49152;
        if threads == 0 || self.grid.contains(&0) || !grid_fits || !block_fits {
            return Err(Code::INVALID_VALUE);
        }
        Ok(())
    }
}

fn launch(
    function: Handle,
    shape: Shape,
    stream: Handle,
    places: &In<*const u8>,
    extra: &In<*const c_void>,
) -> Done {
    let (function, stream) = (FUNCTIONS.get(function)?, Stream::named(stream)?);
    if stream.context.handle != function.module.context.handle {
        return Err(Code::INVALID_HANDLE);
    }
    shape.check()?;
    let params = arguments(&function, places, extra)?;
    stream.submit(move |worker| execute(&function, &shape, &params, worker)).map(|_| ())
}

fn execute(function: &Arc<Function>, shape: &Shape, params: &[u8], worker: &Worker<'_>) -> Done {
    let find = |address| {
        let memory = space::find(address, 1).filter(|memory| worker.context.reaches(memory))?;
        Some(ptx::View {
            base: memory.base,
            size: memory.size as u64,
            real: memory.real(memory.base),
            memory: Some(memory),
        })
    };
    let launch = ptx::Launch {
        entry: function.entry(),
        globals: &function.module.addresses(),
        params,
        grid: shape.grid,
        block: shape.block,
        budget: knobs::budget(),
        spoiled: knobs::spoils(&function.entry().name),
        find: &find,
        // What the kernel may be waiting for runs on another thread, which may need this core.
        wanted: &|| {
            std::thread::yield_now();
            worker.context.check().is_ok()
        },
    };
    let moved = ptx::run(&launch).inspect_err(|code| {
        eprintln!("cuda driver for tests: kernel {}: {code:?}", function.entry().name);
    })?;
    MOVED.fetch_add(moved, Ordering::Relaxed);
    Ok(())
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the real signature")]
pub(crate) unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: Handle,
    places: In<*const u8>,
    extra: In<*const c_void>,
) -> Code {
    call("cuLaunchKernel", || {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared };
        launch(function, shape, stream, &places, &extra)
    })
}

/// `CUlaunchConfig`. Attributes, if there are any, are ignored: they change nothing that could be seen here.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *const c_void,
    count: u32,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchKernelEx(
    config: In<Config>,
    function: Handle,
    places: In<*const u8>,
    extra: In<*const c_void>,
) -> Code {
    call("cuLaunchKernelEx", || {
        let Config { grid, block, shared, stream, attributes: _, count: _ } = config.get()?;
        launch(function, Shape { grid, block, shared }, stream, &places, &extra)
    })
}
