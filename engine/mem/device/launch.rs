//! Kernels of ours on a stream.

use std::collections::HashMap;
use std::ffi::CString;

use allstream_cuda_kernels::{Kernel, Launch, Module};
use allstream_sys::cuda::{CuFunction, CuModule, CuResult, Cuda, CudaError};

use super::context::{Context, Entered};
use super::stream::DeviceStream;
use crate::error::Error;

/// What has been loaded on a device. A driver compiles a module when it is loaded, which takes it milliseconds: each once,
/// when an operation that needs it is first called ([`DeviceStream::load`]).
#[derive(Default)]
pub(super) struct Modules {
    modules: HashMap<Module, CuModule>,
    functions: HashMap<Kernel, CuFunction>,
    last: Option<(Kernel, CuFunction)>,
}

impl Modules {
    fn known(&mut self, kernel: Kernel) -> Option<CuFunction> {
        if let Some((last, function)) = self.last
            && last == kernel
        {
            return Some(function);
        }
        let function = *self.functions.get(&kernel)?;
        self.last = Some((kernel, function));
        Some(function)
    }

    /// Unloads all. Nothing of them runs any more.
    pub(super) fn close(&mut self, cuda: &Cuda, report: &dyn Fn(CudaError)) {
        self.functions.clear();
        self.last = None;
        for (_, module) in self.modules.drain() {
            // SAFETY: loaded by `load`; its functions have just been forgotten.
            unsafe { cuda.module_unload(module) }.unwrap_or_else(report);
        }
    }
}

/// Loads a module into the context that the caller has entered, for a device whose compute capability begins with `major`: the
/// machine code, where there is some and the driver takes it, else the PTX, which the driver compiles.
fn load(cuda: &Cuda, module: Module, major: u32) -> Result<CuModule, CudaError> {
    if let Some(code) = module.machine_code(major) {
        // SAFETY: a whole ELF file, which says itself how long it is, at an aligned address; unloaded in `Modules::close`.
        match unsafe { cuda.module_load_data(code.as_ptr().cast()) } {
            Err(error) if [CuResult::NO_BINARY_FOR_GPU, CuResult::INVALID_IMAGE].contains(&error.code) => {
                tracing::debug!(module = module.name(), %error, "the driver does not take our machine code");
            }
            loaded => return loaded,
        }
    }
    let ptx = text(module.ptx())?;
    // SAFETY: a text that ends in a zero byte; unloaded in `Modules::close`.
    unsafe { cuda.module_load_data(ptx.as_ptr().cast()) }
}

/// For the driver, which wants a zero byte behind it.
fn text(text: impl Into<Vec<u8>>) -> Result<CString, CudaError> {
    CString::new(text).map_err(|_| CudaError {
        call: "cuModuleLoadData",
        code: CuResult::INVALID_VALUE,
        name: "CUDA_ERROR_INVALID_VALUE".into(),
        text: "a kernel's text has a zero byte in it (a bug)".into(),
    })
}

impl Context {
    /// A kernel of ours. Loading one may wait for all that is on the device ("loading kernels might require context
    /// synchronization", CUDA programming guide, lazy loading), so no lock is held meanwhile but that of who loads.
    fn function(&self, _: &Entered<'_>, kernel: Kernel) -> Result<CuFunction, CudaError> {
        if let Some(function) = self.modules.lock().known(kernel) {
            return Ok(function);
        }
        let _loading = self.loading.lock();
        if let Some(function) = self.modules.lock().known(kernel) {
            return Ok(function);
        }
        let loaded = self.modules.lock().modules.get(&kernel.module).copied();
        let module = match loaded {
            Some(module) => module,
            None => {
                let module = load(self.cuda, kernel.module, self.major)?;
                self.modules.lock().modules.insert(kernel.module, module);
                module
            }
        };
        let name = text(kernel.name())?;
        // SAFETY: the module is loaded, and stays so until `close`; the name ends in a zero byte.
        let function = unsafe { self.cuda.module_get_function(module, name.as_ptr()) }?;
        self.modules.lock().functions.insert(kernel, function);
        Ok(function)
    }
}

/// What `ALLSTREAM_MAX_CTAS` says, or two for each multiprocessor, of which a memory-bound kernel needs about that many to
/// have all of the memory's bandwidth. To be measured.
pub(super) fn max_ctas(multiprocessors: u32) -> Result<u32, Error> {
    match std::env::var("ALLSTREAM_MAX_CTAS").ok().filter(|text| !text.is_empty()) {
        None => Ok(2 * multiprocessors.max(1)),
        Some(text) => text.trim().parse().ok().filter(|ctas| *ctas > 0).ok_or_else(|| {
            let problem = format!("{text:?} is not a number of blocks of a kernel (1 or more)");
            Error::invalid("ALLSTREAM_MAX_CTAS", problem)
        }),
    }
}

impl DeviceStream {
    /// Blocks of a launch at most.
    pub(crate) fn ctas(&self) -> u32 {
        self.0.context.max_ctas
    }

    /// Loads what will be launched here. May wait for what is on the device: to be called by who holds nothing.
    pub(crate) fn load(&self, kernels: impl Iterator<Item = Kernel>) -> Result<(), Error> {
        let context = &self.0.context;
        let unknown: Vec<_> = {
            let mut modules = context.modules.lock();
            kernels.filter(|kernel| modules.known(*kernel).is_none()).collect()
        };
        if unknown.is_empty() {
            return Ok(());
        }
        context.within("load kernels", |entered| {
            unknown.iter().try_for_each(|kernel| context.function(entered, *kernel).map(|_| ()))
        })
    }

    /// Puts a kernel here.
    ///
    /// # Safety
    /// What the launch reads and writes is memory of this stream's device, or that it may touch; nothing else on a device
    /// or the host touches it out of this stream's order; and it stays until the stream has come past the kernel.
    pub(crate) unsafe fn launch(&self, doing: &str, launch: &Launch) -> Result<(), Error> {
        if launch.blocks == 0 {
            return Ok(());
        }
        let context = &self.0.context;
        context.within(doing, |entered| {
            let function = context.function(entered, launch.kernel)?;
            let mut arguments = [launch.arguments.address().cast_mut().cast()];
            // SAFETY: a function of this context with one parameter, of the type that `arguments` is (the kernel and its
            // arguments are made together); the driver copies it within the call. What is at its addresses is the
            // caller's promise.
            unsafe {
                context.cuda.launch_kernel(
                    function,
                    launch.blocks,
                    1,
                    1,
                    launch.threads,
                    1,
                    1,
                    0,
                    *self.0.raw(),
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
        })
    }
}
