//! A descriptor that is readable while something waits to be fetched, like those of completion channels and of asynchronous events.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Two connected sockets: the program polls `near`, the library writes to `far`. There is one byte for each event that waits.
pub(crate) struct Signal {
    near: OwnedFd,
    far: OwnedFd,
}

impl Signal {
    pub(crate) fn new() -> Result<Signal, c_int> {
        let mut pair = [-1; 2];
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        // SAFETY: the array has room for two descriptors.
        if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        // SAFETY: the descriptors were just made, and nobody else owns them.
        let [near, far] = pair.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Signal { near, far })
    }

    /// The descriptor that the program gets.
    pub(crate) fn fd(&self) -> RawFd {
        self.near.as_raw_fd()
    }

    /// Adds a byte, as one more event waits.
    pub(crate) fn raise(&self) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the pointer leads to one byte. (If the socket is full, the byte is lost, but it has room for hundreds of events.)
        unsafe { libc::send(self.far.as_raw_fd(), [1u8].as_ptr().cast(), 1, flags) };
    }

    /// Removes a byte, as an event was withdrawn.
    pub(crate) fn lower(&self) {
        let mut byte = 0u8;
        // SAFETY: the pointer leads to room for one byte.
        unsafe { libc::recv(self.fd(), (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
    }
}

/// Takes a byte from the program's descriptor, and waits for one unless the program has set `O_NONBLOCK`.
pub(crate) fn wait(fd: RawFd) -> Result<(), c_int> {
    let mut byte = 0u8;
    // SAFETY: the pointer leads to room for one byte.
    match unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, 0) } {
        1 => Ok(()),
        0 => Err(libc::EBADF),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
    }
}
