//! NVIDIA's library of collectives, `libnccl`: [`Nccl`].

mod places;
mod table;
mod types;

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::OnceLock;

pub use places::look_in_packages;
pub use types::*;

use crate::library::{Attempt, Library, Unavailable};
use table::Table;

/// The environment variable that names the library's file. If it is set, no other file is tried.
pub const LIBRARY_VARIABLE: &str = "ALLSTREAM_NCCL_LIBRARY";
/// The first version, as people write it, that can make communicators which do not block their caller.
const NEEDED: &str = "2.14";

type Result<T = ()> = std::result::Result<T, NcclError>;

/// The library: the functions that are used, each as a method.
///
/// Methods are `unsafe` where the library trusts its arguments. Every answer but success is a [`NcclError`], except
/// [`NcclResult::IN_PROGRESS`] of calls whose work may go on after they return.
pub struct Nccl {
    table: Table,
    error_string: unsafe extern "C" fn(NcclResult) -> *const c_char,
    last_error: Option<unsafe extern "C" fn(NcclComm) -> *const c_char>,
    file: String,
    version: c_int,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({} of {})", self.version(), self.file)
    }
}

impl Nccl {
    /// The library of this process, in version 2.14 or newer. The first call finds the library and looks up its functions.
    ///
    /// Files tried: the one that `ALLSTREAM_NCCL_LIBRARY` names, and no other. Else `libnccl.so.2`; conda's package in `CONDA_PREFIX`; pip's
    /// package `nvidia-nccl-cu12` or `-cu13` in the environments that `VIRTUAL_ENV` and `CONDA_PREFIX` name. In a Python interpreter the
    /// interpreter's packages ([`look_in_packages`]) come first, unless a `libnccl.so.2` is loaded already. The first usable file is taken.
    ///
    /// # Errors
    /// No file can be used: each is missing, lacks a function, or is older than version 2.14. The answer is kept: later calls get the same.
    pub fn get() -> std::result::Result<&'static Nccl, &'static Unavailable> {
        static NCCL: OnceLock<std::result::Result<Nccl, Unavailable>> = OnceLock::new();
        NCCL.get_or_init(|| Nccl::open(&places::files())).as_ref()
    }

    /// The first of these files that can be used.
    fn open(files: &[String]) -> std::result::Result<Nccl, Unavailable> {
        let mut tried = Vec::new();
        for file in files {
            match Nccl::load(file) {
                Ok(nccl) => return Ok(nccl),
                Err(Unavailable::NotFound { tried: missing }) => tried.extend(missing),
                // If only one file is tried, its own error says everything.
                Err(unfit) if files.len() == 1 => return Err(unfit),
                Err(unfit) => tried.push(Attempt::new(file, &unfit.to_string())),
            }
        }
        Err(Unavailable::NotFound { tried })
    }

    fn load(file: &str) -> std::result::Result<Nccl, Unavailable> {
        let mut library = Library::open(&[file.to_owned()])?;
        type GetVersion = unsafe extern "C" fn(*mut c_int) -> NcclResult;
        // SAFETY: the library exports this name as a function of this type (nccl.h).
        let get_version = unsafe { library.function::<GetVersion>("ncclGetVersion") }?;
        let mut version = 0;
        // SAFETY: the function may be called at any time; `version` is room for its number.
        let answer = unsafe { get_version(&raw mut version) };
        // The version is checked before the functions are looked up, as an older version lacks some of them.
        if answer != NcclResult::SUCCESS || version < NcclConfig::VERSION {
            let found = written(version);
            return Err(Unavailable::Version { file: file.to_owned(), found, needed: NEEDED });
        }
        let table = Table::load(&library)?;
        // SAFETY: as above.
        let error_string = unsafe { library.function("ncclGetErrorString") }?;
        // SAFETY: as above.
        let last_error = unsafe { library.function("ncclGetLastError") }.ok();
        library.locate("ncclGetVersion");
        Ok(Nccl { table, error_string, last_error, file: library.file, version })
    }

    /// The file that the library was loaded from.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Its version, such as `2.27.3`.
    pub fn version(&self) -> String {
        written(self.version)
    }

    /// Its version as the library numbers it: 22703 is 2.27.3.
    pub fn version_code(&self) -> c_int {
        self.version
    }

    fn check(&self, call: &'static str, code: NcclResult) -> Result {
        if code == NcclResult::SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// As `check`, for a call whose work the library may go on with after the call has returned.
    fn begun(&self, call: &'static str, code: NcclResult) -> Result {
        if code == NcclResult::IN_PROGRESS { Ok(()) } else { self.check(call, code) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: NcclResult) -> NcclError {
        // SAFETY: `ncclGetErrorString` takes any code. It returns null, or a string that stays as long as the library is loaded.
        let text = unsafe { (self.error_string)(code) };
        let text = match text.is_null() {
            true => "the library does not say more".into(),
            // SAFETY: not null, so a string that ends in a null byte.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        let text = match self.last_error() {
            Some(last) => format!("{text}; the last error that NCCL has noted: {last}"),
            None => text,
        };
        NcclError { call, code, text }
    }

    /// The message of the last error that the library noted in this process. It says more than a code.
    fn last_error(&self) -> Option<String> {
        /// Bytes of the library's text, with the null byte at its end.
        const MOST: usize = 1024;
        // SAFETY: by NCCL's documentation the communicator is unused and may be null; the answer is null or a string that the library keeps.
        let text = unsafe { self.last_error?(NcclComm::NULL) }.cast::<u8>();
        if text.is_null() {
            return None;
        }
        // Another thread of the library may write a new text there meanwhile. So the text is read byte by byte, at most `MOST` bytes.
        // SAFETY: `at` is within the library's `MOST` bytes, and nothing behind the first null byte is read.
        let bytes = (0..MOST).map(|at| unsafe { text.add(at).read_volatile() });
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// `ncclGetUniqueId`: the id by which the ranks of a new communicator find each other.
    ///
    /// # Errors
    /// The library's.
    pub fn unique_id(&self) -> Result<NcclUniqueId> {
        // SAFETY: may be called at any time.
        unsafe { self.get_unique_id() }
    }

    /// `ncclCommInitRankConfig`, without waiting: [`async_error`](Self::async_error) says when the communicator is ready. It is for the
    /// device whose context is current.
    ///
    /// # Errors
    /// The library's.
    pub fn init(&self, size: c_int, id: &NcclUniqueId, rank: c_int) -> Result<NcclComm> {
        let mut config = NcclConfig::NON_BLOCKING;
        // SAFETY: `config` states its own size; the library checks the numbers.
        unsafe { self.comm_init_rank_config(size, *id, rank, &raw mut config) }
    }

    /// `ncclCommGetAsyncError`: success, in progress, or what has failed since.
    ///
    /// # Safety
    /// The communicator exists.
    ///
    /// # Errors
    /// What has failed, or why the library could not be asked.
    pub unsafe fn async_error(&self, comm: NcclComm) -> Result<NcclResult> {
        let mut state = NcclResult::SUCCESS;
        // SAFETY: the communicator exists (the caller's promise); `state` is room for a code.
        unsafe { self.comm_get_async_error(comm, &raw mut state) }?;
        self.begun("ncclCommGetAsyncError", state).map(|()| state)
    }

    /// Runs `calls` between `ncclGroupStart` and `ncclGroupEnd`: none of the operations that `calls` asks for begins before the end. If
    /// several calls fail, the first error is returned.
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

/// A version, as a person writes it.
fn written(code: c_int) -> String {
    // Up to version 2.8 the major version counts thousands: 2804 is 2.8.4.
    let (major, rest) = match code {
        old if old < 10_000 => (old / 1000, old % 1000),
        new => (new / 10_000, new % 10_000),
    };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_library_is_refused_by_the_first_function_that_it_lacks() {
        let error = Nccl::open(&["libc.so.6".into()]).unwrap_err();
        assert_eq!(error, Unavailable::Symbol { file: "libc.so.6".into(), symbol: "ncclGetVersion" });
    }

    #[test]
    fn every_place_is_named_with_what_was_wrong_there() {
        let error = Nccl::open(&["/no/place/libnccl.so.2".into(), "libc.so.6".into()]).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("looked for /no/place/libnccl.so.2 (cannot open"), "{text}");
        assert!(text.contains("; libc.so.6 (has no function ncclGetVersion"), "{text}");
    }

    #[test]
    fn versions_are_written_as_people_write_them() {
        assert_eq!([2804, 21400, 23007].map(written), ["2.8.4", "2.14.0", "2.30.7"]);
    }
}
