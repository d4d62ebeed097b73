//! Opening a shared library, and looking up what is in it.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::ptr::NonNull;

use crate::cuda::CudaError;

/// A file that was tried, and why it could not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name or path, as it was given to the loader.
    pub file: String,
    /// What was wrong, mostly in the loader's words, without the file's name.
    pub problem: String,
}

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unavailable {
    /// No file could be opened; or, if several were tried, each was missing or unfit (its [`Attempt`] says why).
    NotFound {
        /// The files that were tried, in order.
        tried: Vec<Attempt>,
    },
    /// A file was opened, and lacks a function that this crate needs.
    Symbol {
        /// The file.
        file: String,
        /// The function.
        symbol: &'static str,
    },
    /// The library is there, but is too old.
    Version {
        /// The file.
        file: String,
        /// Its version.
        found: String,
        /// The oldest version that can be used.
        needed: &'static str,
    },
    /// The library is there, but its initialisation failed.
    Init {
        /// The file.
        file: String,
        /// What it said.
        error: CudaError,
    },
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::NotFound { tried } => {
                f.write_str("looked for ")?;
                for (at, attempt) in tried.iter().enumerate() {
                    let between = if at == 0 { "" } else { "; " };
                    write!(f, "{between}{} ({})", attempt.file, attempt.problem)?;
                }
                Ok(())
            }
            Unavailable::Symbol { file, symbol } => {
                write!(f, "{file} has no function {symbol}: it is too old, or another library")
            }
            Unavailable::Version { file, found, needed } => {
                write!(f, "{file} is version {found}, and {needed} or newer is needed")
            }
            Unavailable::Init { file, error } => write!(f, "{file} is there, but {error}"),
        }
    }
}

impl std::error::Error for Unavailable {}

/// An open library. It is never closed, so its functions may be called until the process ends.
pub(crate) struct Library {
    handle: NonNull<c_void>,
    /// The name that the loader was given; after [`locate`](Library::locate), the path at which the loader found the file.
    pub(crate) file: String,
}

// SAFETY: the handle is only given to `dlsym`, which may be called from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// What the loader last complained about, on this thread.
fn complaint() -> String {
    // SAFETY: `dlerror` has no preconditions; its text is valid until this thread's next call of the loader, and copied
    // here before that.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: not null, so a string that ends in a null byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The file that a variable of the environment names. An empty variable names none.
pub(crate) fn named_by(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|file| !file.is_empty())
}

/// Whether a library of this name is loaded in this process, by whomever.
pub(crate) fn is_loaded(name: &CStr) -> bool {
    // SAFETY: `name` ends in a null byte; with `RTLD_NOLOAD` the call loads no library.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    // SAFETY: the handle is from the call above, which has added a reference to a library that is loaded; this takes that one back.
    !handle.is_null() && unsafe { libc::dlclose(handle) } == 0
}

impl Attempt {
    /// Drops the file's name from the front of `problem`, so that messages do not name the file twice.
    pub(crate) fn new(file: &str, problem: &str) -> Attempt {
        let rest = problem.strip_prefix(file).map(|rest| rest.trim_start_matches([':', ' ']));
        Attempt { file: file.to_owned(), problem: rest.unwrap_or(problem).to_owned() }
    }
}

impl Library {
    /// Opens the first of these files that can be opened.
    ///
    /// Opening a library runs its initialisers, so the file has to be trusted: one that is called `libcuda.so.1` on the
    /// loader's path, or that the environment names, is taken for the CUDA driver or a stand-in.
    pub(crate) fn open(files: &[String]) -> Result<Library, Unavailable> {
        let mut tried = Vec::new();
        for file in files {
            let Ok(name) = CString::new(file.as_str()) else {
                tried.push(Attempt::new(file, "has a null byte in its name"));
                continue;
            };
            // SAFETY: `name` is a string that ends in a null byte and outlives the call.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            match NonNull::new(handle) {
                Some(handle) => return Ok(Library { handle, file: file.clone() }),
                None => tried.push(Attempt::new(file, &complaint())),
            }
        }
        Err(Unavailable::NotFound { tried })
    }

    /// Sets `file` to the path of the file in which the loader found this function of the library. It is shown to people: a name such
    /// as `libnccl.so.2` does not say which of several files was loaded.
    pub(crate) fn locate(&mut self, symbol: &str) {
        let Some(address) = self.symbol(symbol) else { return };
        let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: any address may be asked for; `found` is room for the answer.
        let is_known = unsafe { libc::dladdr(address.as_ptr(), found.as_mut_ptr()) } != 0;
        // SAFETY: `found` was zeroed, and has only addresses, for which zero is a value.
        let name = unsafe { found.assume_init() }.dli_fname;
        if is_known && !name.is_null() {
            // SAFETY: not null, so the loader's own string, which ends in a null byte and stays as long as the library is loaded.
            self.file = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        }
    }

    fn symbol(&self, symbol: &str) -> Option<NonNull<c_void>> {
        let name = CString::new(symbol).ok()?;
        // SAFETY: the handle is of a library that is never closed; `name` ends in a null byte.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }

    /// A symbol in the version that is asked for. Only glibc's loader can look up a version.
    #[cfg(target_env = "gnu")]
    fn symbol_of_version(&self, symbol: &str, version: &str) -> Option<NonNull<c_void>> {
        let (name, version) = (CString::new(symbol).ok()?, CString::new(version).ok()?);
        // SAFETY: the handle is of a library that is never closed; both texts end in a null byte.
        NonNull::new(unsafe { libc::dlvsym(self.handle.as_ptr(), name.as_ptr(), version.as_ptr()) })
    }

    /// The symbol in the library's default version, whatever version is asked for: other loaders than glibc's cannot look up another one.
    #[cfg(not(target_env = "gnu"))]
    fn symbol_of_version(&self, symbol: &str, _version: &str) -> Option<NonNull<c_void>> {
        self.symbol(symbol)
    }

    /// A function, as a function pointer of type `F`.
    ///
    /// # Safety
    /// `F` is an `unsafe extern "C" fn` of the type that the library exports this name with.
    ///
    /// # Errors
    /// The library has no such function.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, Unavailable> {
        // SAFETY: the caller's promise.
        unsafe { self.at(self.symbol(symbol), symbol) }
    }

    /// As [`function`](Library::function), for one version of a symbol. Errors show the function under the name `name`.
    ///
    /// # Safety
    /// As for [`function`](Library::function), for that version.
    ///
    /// # Errors
    /// The library has no such function in that version.
    pub(crate) unsafe fn function_of_version<F: Copy>(
        &self,
        symbol: &'static str,
        version: &'static str,
        name: &'static str,
    ) -> Result<F, Unavailable> {
        // SAFETY: the caller's promise.
        unsafe { self.at(self.symbol_of_version(symbol, version), name) }
    }

    /// The function at an address that the loader has found, as a function pointer of type `F`.
    ///
    /// # Safety
    /// The function there, if one was found, is of the type `F`, an `unsafe extern "C" fn`.
    unsafe fn at<F: Copy>(
        &self,
        found: Option<NonNull<c_void>>,
        symbol: &'static str,
    ) -> Result<F, Unavailable> {
        const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
        match found {
            // SAFETY: the caller's promise; `F` is as large as the address, which is not null.
            Some(address) => Ok(unsafe { std::mem::transmute_copy(&address) }),
            None => Err(Unavailable::Symbol { file: self.file.clone(), symbol }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_named_in_order() {
        let files = ["libno-such-thing.so.1".to_string(), "/no/such/place/lib\0x.so".to_string()];
        let Err(missing @ Unavailable::NotFound { .. }) = Library::open(&files) else { panic!("opened") };
        let text = missing.to_string();
        assert!(text.starts_with("looked for libno-such-thing.so.1 (cannot open"), "{text}");
        assert!(text.contains("null byte"), "{text}");
    }

    #[test]
    fn a_library_has_what_it_has() {
        let mut library = Library::open(&["libno-such-thing.so".into(), "libc.so.6".into()]).unwrap();
        assert_eq!(library.file, "libc.so.6");
        library.locate("getpid");
        assert!(library.file.starts_with('/') && library.file.contains("libc"), "{}", library.file);
        assert!(is_loaded(c"libc.so.6") && !is_loaded(c"libno-such-thing.so"));
        assert!(library.symbol("getpid").is_some());
        assert!(library.symbol("cuInit").is_none());
        if cfg!(target_env = "gnu") {
            assert!(library.symbol_of_version("getpid", "GLIBC_9.9").is_none());
        }
    }
}
