//! InfiniBand verbs, `libibverbs`: [`Verbs`]. It speaks to network cards that read and write the memory of other hosts (RDMA): InfiniBand, RoCE.

mod devices;
#[cfg(test)]
mod layout;
mod requests;
mod table;
mod types;

use std::ffi::{c_char, c_int};
use std::fmt;
use std::io;
use std::sync::OnceLock;

pub use devices::{Context, Devices};
pub use types::*;

use crate::library::{Library, Unavailable, named_by};
use table::Table;

/// The environment variable that names the library's file. If it is set, no other file is tried.
pub const LIBRARY_VARIABLE: &str = "ALLSTREAM_VERBS_LIBRARY";

/// The library: the functions that are used, each as a method.
///
/// Methods that have the name of a function (without `ibv_`) are `unsafe`, because the library trusts its arguments; a failure is a
/// [`VerbsError`]. [`devices`](Verbs::devices) is safe. Any thread may call the methods, as any thread may call the library.
pub struct Verbs {
    table: Table,
    file: String,
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verbs({})", self.file)
    }
}

/// A function of the library that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsError {
    /// The function, as the library exports it.
    pub call: &'static str,
    /// The system's number of the error (`errno`); 0 where the library gave none.
    pub code: c_int,
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            0 => write!(f, "{} failed, and gave no reason", self.call),
            code => write!(f, "{}: {}", self.call, io::Error::from_raw_os_error(code)),
        }
    }
}

impl std::error::Error for VerbsError {}

/// The reason that the last failed function has left on this thread (`errno`).
fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

impl Verbs {
    /// The library of this process. The first call opens the library and looks up its functions.
    ///
    /// Files tried: the one that `ALLSTREAM_VERBS_LIBRARY` names, and no other; else `libibverbs.so.1`. rdma-core 32 or newer has all
    /// functions that are required.
    ///
    /// # Errors
    /// No such file, or a file that lacks a required function in the required version. The answer is kept: later calls get the same.
    pub fn get() -> Result<&'static Verbs, &'static Unavailable> {
        static VERBS: OnceLock<Result<Verbs, Unavailable>> = OnceLock::new();
        VERBS.get_or_init(|| Verbs::open(&Verbs::files())).as_ref()
    }

    fn files() -> Vec<String> {
        vec![named_by(LIBRARY_VARIABLE).unwrap_or_else(|| "libibverbs.so.1".into())]
    }

    fn open(files: &[String]) -> Result<Verbs, Unavailable> {
        let mut library = Library::open(files)?;
        let table = Table::load(&library)?;
        library.locate("ibv_get_device_list");
        Ok(Verbs { table, file: library.file })
    }

    /// The file that the library was loaded from.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Checks the answer of a function that answers 0, or the error's number, or -1 with the number in `errno`.
    fn done(&self, call: &'static str, answer: c_int) -> Result<(), VerbsError> {
        match answer {
            0 => Ok(()),
            -1 => Err(VerbsError { call, code: errno() }),
            code => Err(VerbsError { call, code: code.saturating_abs() }),
        }
    }

    /// Checks the answer of a function that answers what it has made, or null with the error's number in `errno`.
    fn made<T>(&self, call: &'static str, answer: *mut T) -> Result<*mut T, VerbsError> {
        if answer.is_null() { Err(VerbsError { call, code: errno() }) } else { Ok(answer) }
    }

    /// Checks the answer of a function that answers a text of the library's, or null.
    fn told(&self, call: &'static str, answer: *const c_char) -> Result<*const c_char, VerbsError> {
        if answer.is_null() { Err(VerbsError { call, code: 0 }) } else { Ok(answer) }
    }

    /// Checks the answer of a function that answers a count, or the negative of the error's number.
    fn counted(&self, call: &'static str, answer: isize) -> Result<isize, VerbsError> {
        match answer {
            0.. => Ok(answer),
            _ => Err(VerbsError { call, code: c_int::try_from(answer.unsigned_abs()).unwrap_or(0) }),
        }
    }

    /// For functions that answer nothing, and do not fail.
    fn went(&self, _call: &'static str, answer: ()) -> Result<(), VerbsError> {
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(file: &str) -> Result<Verbs, String> {
        Verbs::open(&[file.to_owned()]).map_err(|missing| missing.to_string())
    }

    #[test]
    fn a_library_that_is_missing_or_another_one_is_told_by_name() {
        let missing = opened("/nowhere/libibverbs.so.1").unwrap_err();
        assert!(missing.starts_with("looked for /nowhere/libibverbs.so.1 (cannot open"), "{missing}");
        let other = opened("libc.so.6").unwrap_err();
        let wanted =
            "libc.so.6 has no function ibv_get_device_list@IBVERBS_1.1: it is too old, or another library";
        assert_eq!(other, wanted);
    }

    #[test]
    fn errors_are_told_in_the_system_s_words() {
        let error = VerbsError { call: "ibv_open_device", code: libc::EACCES };
        assert_eq!(error.to_string(), "ibv_open_device: Permission denied (os error 13)");
        let error = VerbsError { call: "ibv_open_device", code: 0 };
        assert_eq!(error.to_string(), "ibv_open_device failed, and gave no reason");
    }

    /// The system's library, if there is one, has every function in the required version.
    #[test]
    fn the_system_s_library_has_what_is_needed() {
        if let Err(missing) = Library::open(&["libibverbs.so.1".into()]) {
            eprintln!("skipped: {missing}");
            return;
        }
        let verbs = opened("libibverbs.so.1").unwrap();
        assert!(verbs.file().contains("libibverbs.so.1"), "{verbs:?}");
        // SAFETY: the function takes any number.
        let text = unsafe { verbs.wc_status_str(5) }.unwrap();
        // SAFETY: a text of the library's, which ends in a null byte.
        let text = unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy();
        assert!(text.contains("Flush"), "{text}");
    }
}
