//! Kernels of ours on a stream.

use allstream_cuda_kernels::{Kernel, Launch};
use allstream_sys::cuda::{CuFunction, CudaError};

use super::context::Context;
use super::handle::Entered;
use super::modules::{load, text};
use super::stream::DeviceStream;
use crate::error::Error;

impl Context {
    /// A kernel of ours, which is loaded if it is not yet. Loading may wait for all work on the device ("loading kernels might require
    /// context synchronization", CUDA programming guide, lazy loading), so meanwhile no lock is held but `loading`.
    fn function(&self, _: &Entered<'_>, kernel: Kernel) -> Result<CuFunction, CudaError> {
        if let Some(function) = self.kernels.loaded.lock().known(kernel) {
            return Ok(function);
        }
        let _loading = self.kernels.loading.lock();
        if let Some(function) = self.kernels.loaded.lock().known(kernel) {
            return Ok(function);
        }
        let loaded = self.kernels.loaded.lock().modules.get(&kernel.module).copied();
        let module = match loaded {
            Some(module) => module,
            None => {
                let module = load(self.cuda, kernel.module, self.major)?;
                self.kernels.loaded.lock().modules.insert(kernel.module, module);
                module
            }
        };
        let name = text(kernel.name())?;
        // SAFETY: the module is loaded, and stays so until `close`; the name ends in a zero byte.
        let function = unsafe { self.cuda.module_get_function(module, name.as_ptr()) }?;
        self.kernels.loaded.lock().functions.insert(kernel, function);
        Ok(function)
    }
}

impl DeviceStream {
    /// The most blocks that a launch may have.
    pub(crate) fn ctas(&self) -> u32 {
        self.0.context.max_ctas
    }

    /// Loads kernels that will be launched here. May wait for all work on the device, so the caller holds no lock.
    pub(crate) fn load(&self, kernels: impl Iterator<Item = Kernel>) -> Result<(), Error> {
        let context = &self.0.context;
        let unknown: Vec<_> = {
            let mut modules = context.kernels.loaded.lock();
            kernels.filter(|kernel| modules.known(*kernel).is_none()).collect()
        };
        if unknown.is_empty() {
            return Ok(());
        }
        context.within("load kernels", |entered| {
            unknown.iter().try_for_each(|kernel| context.function(entered, *kernel).map(|_| ()))
        })
    }

    /// Puts a kernel on this stream.
    ///
    /// # Safety
    /// The launch reads and writes only memory of this stream's device, or memory that this device may touch. Nothing else, on a
    /// device or the host, touches that memory out of this stream's order. The memory stays until the stream has passed the kernel.
    pub(crate) unsafe fn launch(&self, doing: &str, launch: &Launch) -> Result<(), Error> {
        if launch.blocks == 0 {
            return Ok(());
        }
        let context = &self.0.context;
        let is_loaded = context.kernels.loaded.lock().known(launch.kernel).is_some();
        let put = |entered: &Entered<'_>| {
            let function = context.function(entered, launch.kernel)?;
            let mut arguments = [launch.arguments.address().cast_mut().cast()];
            // SAFETY: `function` belongs to this context and has one parameter, of the type of `launch.arguments` (the kernel and
            // its arguments are made together), which the driver copies during the call. What is at the addresses in it is the
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
        };
        match is_loaded {
            true => context.within_plainly(doing, put),
            false => context.within(doing, put),
        }
    }
}
