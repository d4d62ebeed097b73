//! A descriptor that is readable for as long as something waits to be fetched, as those of completion channels and of asynchronous events are.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Two sockets: the program polls and reads one, the library writes to the other. A byte stands for each thing that waits.
pub(crate) struct Signal {
    near: OwnedFd,
    far: OwnedFd,
}

impl Signal {
    pub(crate) fn new() -> Result<Signal, c_int> {
        let mut pair = [-1; 2];
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        // SAFETY: room for two descriptors.
        if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        // SAFETY: just made, and nobody else's.
        let [near, far] = pair.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Signal { near, far })
    }

    /// The end that the program has.
    pub(crate) fn fd(&self) -> RawFd {
        self.near.as_raw_fd()
    }

    /// One thing more waits.
    pub(crate) fn raise(&self) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: one byte. There is room for thousands, of which each stands for an event that a program asked for.
        unsafe { libc::send(self.far.as_raw_fd(), [1u8].as_ptr().cast(), 1, flags) };
    }

    /// One thing less waits: it was withdrawn.
    pub(crate) fn lower(&self) {
        let mut byte = 0u8;
        // SAFETY: room for one byte.
        unsafe { libc::recv(self.fd(), (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
    }
}

/// Waits on the program's end until something is to be fetched, unless the program has said that it does not wait (`O_NONBLOCK`).
pub(crate) fn wait(fd: RawFd) -> Result<(), c_int> {
    let mut byte = 0u8;
    // SAFETY: room for one byte.
    match unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, 0) } {
        1 => Ok(()),
        0 => Err(libc::EBADF),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
    }
}
