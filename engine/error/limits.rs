//! Limits of a process. When one is met, the system gives an error number; the texts here add the limit's name and value, and how to raise it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

/// Whether this process, or its machine, has run out of something, so that a try at another address would fail, too.
pub(crate) fn is_limit(error: &io::Error) -> bool {
    matches!(errno(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS))
}

/// Whether about a quarter of the descriptors that this process may have open are still free, judged by the number of a descriptor that was just
/// opened: the system gives each new descriptor the lowest free number, so all lower numbers are in use.
pub(crate) fn leaves_descriptors(opened: BorrowedFd<'_>) -> bool {
    let number = u64::try_from(opened.as_raw_fd()).unwrap_or(0);
    getrlimit(Resource::Nofile).current.is_none_or(|most| number < most / 4 * 3)
}

/// The system's words, with the limit that was met, if one was.
pub(crate) fn explained(error: &io::Error) -> String {
    let set = |resource| getrlimit(resource).current;
    match errno(error) {
        Some(Errno::MFILE) => {
            let most = set(Resource::Nofile).map_or_else(|| "no more".into(), |most| most.to_string());
            format!(
                "{error}: process {} may have {most} descriptors open (RLIMIT_NOFILE); raise it with `ulimit -n` before the \
                 program starts",
                std::process::id()
            )
        }
        Some(Errno::NFILE) => {
            format!("{error}: the whole machine may open no more (/proc/sys/fs/file-max)")
        }
        Some(Errno::NOMEM) if let Some(most) = set(Resource::As) => format!(
            "{error}: process {} may have {most} bytes of address space (RLIMIT_AS); a rank maps 4 GB for itself and for each \
             other rank of its host, which is no memory: take the limit away with `ulimit -v unlimited` before the program \
             starts",
            std::process::id()
        ),
        _ => error.to_string(),
    }
}

/// Whether this process may make a file of so many bytes. Callers ask before they make one: if it is too long, the system ends the process
/// by a signal (SIGXFSZ).
///
/// # Errors
/// The limit by its name, and what raises it.
pub(crate) fn check_file_size(bytes: u64) -> Result<(), String> {
    match getrlimit(Resource::Fsize).current {
        Some(most) if most < bytes => Err(format!(
            "it takes a file of {bytes} bytes, and process {} may make files of {most} bytes (RLIMIT_FSIZE, which counts memory \
             that processes share as a file); take the limit away with `ulimit -f unlimited` before the program starts",
            std::process::id()
        )),
        _ => Ok(()),
    }
}
