//! NVIDIA's library of collectives, `libnccl`: [`Nccl`].

mod table;
mod types;

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::OnceLock;

pub use types::*;

use crate::library::{Library, Unavailable};
use table::Table;

/// The environment variable that names the library, before the usual name.
pub const LIBRARY_VARIABLE: &str = "ALLSTREAM_NCCL_LIBRARY";
/// The first version whose communicators need not block their caller, as a person writes it.
const NEEDED: &str = "2.14";

type Result<T = ()> = std::result::Result<T, NcclError>;

/// The library: the functions that are used, each as a method.
///
/// Methods that are `unsafe` are so because the library believes what it is given. An answer but success, or in some cases
/// [`NcclResult::IN_PROGRESS`], is a [`NcclError`].
pub struct Nccl {
    table: Table,
    error_string: unsafe extern "C" fn(NcclResult) -> *const c_char,
    file: String,
    version: c_int,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({} of {})", self.version(), self.file)
    }
}

impl Nccl {
    /// The library of this process: found and looked through by the first call.
    ///
    /// Files tried: the one that `ALLSTREAM_NCCL_LIBRARY` names, `libnccl.so.2`. Version 2.14 or newer.
    ///
    /// # Errors
    /// No such file, a file without a function that is used, or an older version. The answer is kept: later calls get the same.
    pub fn get() -> std::result::Result<&'static Nccl, &'static Unavailable> {
        static NCCL: OnceLock<std::result::Result<Nccl, Unavailable>> = OnceLock::new();
        NCCL.get_or_init(|| Nccl::open(&Nccl::files())).as_ref()
    }

    fn files() -> Vec<String> {
        let named = std::env::var(LIBRARY_VARIABLE).ok().filter(|file| !file.is_empty());
        named.into_iter().chain(["libnccl.so.2".into()]).collect()
    }

    fn open(files: &[String]) -> std::result::Result<Nccl, Unavailable> {
        let library = Library::open(files)?;
        let table = Table::load(&library)?;
        // SAFETY: the library exports this name as a function of this type (nccl.h).
        let error_string = unsafe { library.function("ncclGetErrorString") }?;
        let mut nccl = Nccl { table, error_string, file: library.file, version: 0 };
        // SAFETY: may be called at any time.
        nccl.version = unsafe { nccl.get_version() }.unwrap_or(0);
        if nccl.version < NcclConfig::VERSION {
            let (file, found) = (nccl.file.clone(), nccl.version());
            return Err(Unavailable::Version { file, found, needed: NEEDED });
        }
        Ok(nccl)
    }

    /// The file that it was loaded from, as it was given to the system's loader.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Its version, such as `2.27.3`.
    pub fn version(&self) -> String {
        // Up to 2.8 with two digits less.
        let (major, rest) = match self.version {
            old if old < 10_000 => (old / 1000, old % 1000),
            new => (new / 10_000, new % 10_000),
        };
        format!("{major}.{}.{}", rest / 100, rest % 100)
    }

    /// Its version as the library numbers it: 22703 is 2.27.3.
    pub fn version_code(&self) -> c_int {
        self.version
    }

    fn check(&self, call: &'static str, code: NcclResult) -> Result {
        if code == NcclResult::SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// The same where the library may go on with it behind the call.
    fn begun(&self, call: &'static str, code: NcclResult) -> Result {
        if code == NcclResult::IN_PROGRESS { Ok(()) } else { self.check(call, code) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: NcclResult) -> NcclError {
        // SAFETY: `ncclGetErrorString` takes any code, and gives a string of its own that lives as long as it is loaded, or null.
        let text = unsafe { (self.error_string)(code) };
        let text = match text.is_null() {
            true => "the library does not say more".into(),
            // SAFETY: not null, so a string that ends in a null byte.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        NcclError { call, code, text }
    }

    /// `ncclGetUniqueId`: what the ranks of a new communicator find each other by.
    ///
    /// # Errors
    /// The library's.
    pub fn unique_id(&self) -> Result<NcclUniqueId> {
        // SAFETY: may be called at any time.
        unsafe { self.get_unique_id() }
    }

    /// `ncclCommInitRankConfig`, without waiting: [`async_error`](Self::async_error) says when the communicator is there. For the device
    /// whose context is current.
    ///
    /// # Errors
    /// The library's.
    pub fn init(&self, size: c_int, id: &NcclUniqueId, rank: c_int) -> Result<NcclComm> {
        let mut config = NcclConfig::NON_BLOCKING;
        // SAFETY: a configuration that says how long it is; the library checks the numbers.
        unsafe { self.comm_init_rank_config(size, *id, rank, &raw mut config) }
    }

    /// `ncclCommGetAsyncError`: success, in progress, or what has failed since.
    ///
    /// # Safety
    /// The communicator exists.
    ///
    /// # Errors
    /// What has failed, or that it cannot be told.
    pub unsafe fn async_error(&self, comm: NcclComm) -> Result<NcclResult> {
        let mut state = NcclResult::SUCCESS;
        // SAFETY: the caller's promise; room for a code.
        unsafe { self.comm_get_async_error(comm, &raw mut state) }?;
        self.begun("ncclCommGetAsyncError", state).map(|()| state)
    }

    /// Calls what `calls` does between `ncclGroupStart` and `ncclGroupEnd`: nothing of it begins before the end. Of the errors of all
    /// calls, the first.
    ///
    /// # Errors
    /// The library's.
    pub fn group(&self, calls: impl FnOnce() -> Result) -> Result {
        // SAFETY: may be called at any time; the end follows on this thread.
        unsafe { self.group_start() }?;
        let called = calls();
        // SAFETY: in the group that was begun above.
        called.and(unsafe { self.group_end() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_library_is_refused_by_the_first_function_that_it_lacks() {
        let error = Nccl::open(&["libc.so.6".into()]).unwrap_err();
        assert_eq!(error, Unavailable::Symbol { file: "libc.so.6".into(), symbol: "ncclGetVersion" });
    }
}
