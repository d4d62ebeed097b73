//! The modules of kernels that are loaded on a device.

use std::collections::HashMap;
use std::ffi::CString;

use allstream_cuda_kernels::{Kernel, Module};
use allstream_sys::cuda::{CuFunction, CuModule, CuResult, Cuda, CudaError};
use parking_lot::Mutex;

/// The kernels of a device.
#[derive(Default)]
pub(super) struct Kernels {
    pub(super) loaded: Mutex<Modules>,
    /// Held by the thread that loads a module or looks up a kernel in it.
    pub(super) loading: Mutex<()>,
}

/// What has been loaded on a device. Loading a module takes milliseconds, most of all if the driver has to compile it. So each is
/// loaded once: when an operation that needs it is first called (`DeviceStream::load`).
#[derive(Default)]
pub(super) struct Modules {
    pub(super) modules: HashMap<Module, CuModule>,
    pub(super) functions: HashMap<Kernel, CuFunction>,
    last: Option<(Kernel, CuFunction)>,
}

impl Modules {
    pub(super) fn known(&mut self, kernel: Kernel) -> Option<CuFunction> {
        if let Some((last, function)) = self.last
            && last == kernel
        {
            return Some(function);
        }
        let function = *self.functions.get(&kernel)?;
        self.last = Some((kernel, function));
        Some(function)
    }

    /// Unloads all modules. None of their kernels runs any more.
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
pub(super) fn load(cuda: &Cuda, module: Module, major: u32) -> Result<CuModule, CudaError> {
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

/// The text with a zero byte behind it, as the driver wants it.
pub(super) fn text(text: impl Into<Vec<u8>>) -> Result<CString, CudaError> {
    CString::new(text).map_err(|_| CudaError {
        call: "cuModuleLoadData",
        code: CuResult::INVALID_VALUE,
        name: "CUDA_ERROR_INVALID_VALUE".into(),
        text: "a kernel's text has a zero byte in it (a bug)".into(),
    })
}
