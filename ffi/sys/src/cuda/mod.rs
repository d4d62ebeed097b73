//! The CUDA driver, `libcuda`: [`Cuda`].

mod result;
mod table;
mod types;

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

pub use result::{CuResult, CudaError};
pub use types::*;

use crate::library::{Library, Unavailable, named_by};
use table::Table;

/// The environment variable that names the library's file. If it is set, no other file is tried.
pub const LIBRARY_VARIABLE: &str = "ALLSTREAM_CUDA_LIBRARY";

/// The driver: each of its functions is a method.
///
/// A method has the function's name without `cu`; its documentation gives the full name, with the version. Methods are
/// `unsafe` where the driver trusts its arguments. A method returns the function's output, or writes several outputs through
/// pointers; every answer but success is a [`CudaError`]. Threads may share the driver.
pub struct Cuda {
    table: Table,
    file: String,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cuda({})", self.file)
    }
}

impl Cuda {
    /// The driver of this process. The first call opens the library, looks up its functions and initialises it.
    ///
    /// Files tried: the one that `ALLSTREAM_CUDA_LIBRARY` names, and no other; else `libcuda.so.1`, `libcuda.so`. A driver of
    /// CUDA 11 or newer has all functions that are required.
    ///
    /// # Errors
    /// No such file, a file without a required function, or a driver whose `cuInit` fails (the stub of a toolkit; a
    /// driver without a device). The answer is kept: later calls get the same.
    pub fn get() -> Result<&'static Cuda, &'static Unavailable> {
        static CUDA: OnceLock<Result<Cuda, Unavailable>> = OnceLock::new();
        CUDA.get_or_init(|| Cuda::open(&Cuda::files())).as_ref()
    }

    fn files() -> Vec<String> {
        named_by(LIBRARY_VARIABLE)
            .map_or_else(|| vec!["libcuda.so.1".into(), "libcuda.so".into()], |named| vec![named])
    }

    fn open(files: &[String]) -> Result<Cuda, Unavailable> {
        let mut library = Library::open(files)?;
        let table = Table::load(&library)?;
        library.locate("cuInit");
        let cuda = Cuda { table, file: library.file };
        // SAFETY: `cuInit` may be called at any time; its flags must be 0.
        let init = unsafe { cuda.init(0) };
        init.map_err(|error| Unavailable::Init { file: cuda.file.clone(), error })?;
        Ok(cuda)
    }

    /// The file that the driver was loaded from.
    pub fn file(&self) -> &str {
        &self.file
    }

    fn check(&self, call: &'static str, code: CuResult) -> Result<(), CudaError> {
        if code == CuResult::SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// The error for an answer, in the driver's words.
    #[cold]
    fn error(&self, call: &'static str, code: CuResult) -> CudaError {
        let name = self.words(self.table.get_error_name, code);
        let name = name.or_else(|| code.name().map(String::from)).unwrap_or_else(|| "an unknown code".into());
        let text = self.words(self.table.get_error_string, code);
        CudaError { call, code, name, text: text.unwrap_or_else(|| "the driver does not say more".into()) }
    }

    fn words(
        &self,
        ask: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
        code: CuResult,
    ) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: one of `cuGetErrorName` and `cuGetErrorString`, which take any code, and write a pointer.
        let answer = unsafe { ask(code, &raw mut text) };
        if answer != CuResult::SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: on success `text` is a string of the driver's that ends in a null byte and lives as long as the driver is loaded; the
        // driver is never unloaded.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// The error for a function that this driver does not have.
    #[cold]
    fn lacks(&self, call: &'static str) -> CudaError {
        CudaError {
            call,
            code: CuResult::CALL_REQUIRES_NEWER_DRIVER,
            name: "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER".into(),
            text: format!("{} has no such function; a newer driver has", self.file),
        }
    }

    /// `cuDeviceGetName`: what the device is called.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_name(&self, device: CuDevice) -> Result<String, CudaError> {
        let mut name = [0_u8; 256];
        let len = name.len() as c_int - 1;
        // SAFETY: room for `len` bytes; the driver checks the device.
        unsafe { self.device_get_name(name.as_mut_ptr().cast(), len, device) }?;
        Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// `cuMemGetInfo_v2`: how many bytes are free on the device of the current context, and how many the device has in all.
    ///
    /// # Errors
    /// The driver's, among them that no context is current.
    pub fn mem_info(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: each pointer is to room for the number that the driver writes there.
        unsafe { self.mem_get_info(&raw mut free, &raw mut total) }?;
        Ok((free, total))
    }

    /// `cuCtxGetStreamPriorityRange`: the numbers of the least and the greatest priority, in the current context.
    ///
    /// # Errors
    /// The driver's, among them that no context is current.
    pub fn stream_priorities(&self) -> Result<(c_int, c_int), CudaError> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: each pointer is to room for the number that the driver writes there.
        unsafe { self.ctx_get_stream_priority_range(&raw mut least, &raw mut greatest) }?;
        Ok((least, greatest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_library_is_refused_by_the_first_function_that_it_lacks() {
        let error = Cuda::open(&["libc.so.6".into()]).unwrap_err();
        assert_eq!(error, Unavailable::Symbol { file: "libc.so.6".into(), symbol: "cuInit" });
        assert!(error.to_string().starts_with("libc.so.6 has no function cuInit"), "{error}");
    }

    #[test]
    fn asking_for_the_driver_never_panics_and_names_files() {
        match Cuda::get() {
            Ok(cuda) => assert!(!cuda.file().is_empty()),
            Err(missing) => assert!(missing.to_string().contains("libcuda"), "{missing}"),
        }
        assert!(std::ptr::eq(
            Cuda::get().map_or_else(|e| (&raw const *e).cast::<u8>(), |c| (&raw const *c).cast()),
            Cuda::get().map_or_else(|e| (&raw const *e).cast::<u8>(), |c| (&raw const *c).cast()),
        ));
    }
}
