//! How queue pairs reach each other: each has a datagram socket that is named by the pair's number. The name is in no file system (an abstract unix
//! socket), and the kernel removes it when the process ends, however it ends.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// The most bytes of data in one packet. It does not depend on the MTU of a port.
pub(crate) const PACKET: u32 = 32 << 10;
/// How many packets a pair has in flight without an acknowledgement. A socket holds about ten unread packets.
pub(crate) const WINDOW: u32 = 8;

const MAGIC: u32 = 0x7662_7301;
/// Numbers of packets and of queue pairs have 24 bits.
pub(crate) const NUMBERS: u32 = 0x00ff_ffff;
/// The most pieces of a request. A packet has one more, the header.
pub(crate) const MOST_PIECES: usize = 32;

/// The kinds of packets. A request, or a part of one.
pub(crate) const REQUEST: u8 = 1;
/// Asks whether the peer exists and accepts requests.
pub(crate) const PROBE: u8 = 2;
/// All packets up to `psn` have arrived.
pub(crate) const ACK: u8 = 3;
/// Packet `psn` has not arrived, but a later one has.
pub(crate) const NAK_SEQUENCE: u8 = 4;
/// There was no receive for packet `psn`; `status` is the code of the time to wait.
pub(crate) const NAK_RNR: u8 = 5;
/// Packet `psn` is refused; `status` is that of the requester's completion.
pub(crate) const NAK: u8 = 6;
/// Data that a READ has asked for.
pub(crate) const READ_RESPONSE: u8 = 7;
/// Packet `psn` was lost. Hardware would not report this: a requester uses it only to know that its time-out must lead to a retry.
pub(crate) const DROPPED: u8 = 8;

/// Bits of [`Header::flags`].
pub(crate) const FIRST: u8 = 1;
pub(crate) const LAST: u8 = 2;
pub(crate) const IS_SOLICITED: u8 = 4;

/// The header of every packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: u32,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) opcode: u8,
    /// The path MTU, as its code in verbs' C header (`enum ibv_mtu`).
    pub(crate) mtu: u8,
    pub(crate) route: Route,
    pub(crate) source: u32,
    pub(crate) dest: u32,
    pub(crate) psn: u32,
    /// How many bytes of data follow this header.
    pub(crate) bytes: u32,
    /// How many bytes the whole message has.
    pub(crate) total: u32,
    /// Where in the message these bytes begin.
    pub(crate) offset: u32,
    pub(crate) rkey: u32,
    pub(crate) imm: u32,
    pub(crate) status: u32,
    pub(crate) _unused: u32,
    pub(crate) at: u64,
}

/// The route of a packet: from which address to which, and on which network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Route {
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// The GID type of both addresses.
    pub(crate) kind: u32,
    /// The network that the port is on.
    pub(crate) rail: u32,
}

impl Route {
    /// The route as the peer sees it, in the other direction.
    pub(crate) fn back(self) -> Route {
        Route { from: self.to, to: self.from, ..self }
    }
}

/// How many packets `psn` comes after `other`; negative if it comes before. (Numbers wrap at 24 bits.)
pub(crate) fn behind(psn: u32, other: u32) -> i32 {
    (psn.wrapping_sub(other) << 8) as i32 >> 8
}

/// The packet number that follows `psn` by `by` packets.
pub(crate) fn further(psn: u32, by: u32) -> u32 {
    psn.wrapping_add(by) & NUMBERS
}

/// Memory of this process that the kernel reads or writes. If it is not mapped, the kernel reports an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) at: u64,
    pub(crate) bytes: u32,
}

/// The outcome of sending a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Done,
    /// There is no room now.
    Full,
    /// Nobody has a socket of that number, or the packet was lost on purpose.
    Gone,
    /// A piece is not mapped.
    Unmapped,
}

/// The outcome of receiving a packet's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Done,
    /// A piece is not mapped, or not writable. The packet is lost.
    Unmapped,
}

pub(crate) struct Socket {
    fd: OwnedFd,
    number: u32,
}

fn name(number: u32) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: the address consists of numbers, for which all zeros are valid.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let text = format!("\0allstream-verbs-for-tests-{number:06x}");
    address.sun_path.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from as libc::c_char);
    (address, (mem::offset_of!(libc::sockaddr_un, sun_path) + text.len()) as libc::socklen_t)
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Repeats a system call that a signal has interrupted.
fn again(mut call: impl FnMut() -> isize) -> Result<usize, c_int> {
    loop {
        match (call(), errno()) {
            (-1, libc::EINTR) => {}
            (-1, code) => return Err(code),
            (done, _) => return Ok(done.max(0) as usize),
        }
    }
}

/// A random number of 24 bits, which is likely to be free.
fn random() -> Result<u32, c_int> {
    let mut number = 0u32;
    // SAFETY: `number` has room for four bytes.
    again(|| unsafe { libc::getrandom((&raw mut number).cast::<c_void>(), 4, 0) })?;
    Ok(number & NUMBERS)
}

impl Socket {
    /// A socket with a number that nobody on this host has.
    pub(crate) fn bind() -> Result<Socket, c_int> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: the call takes no pointers; it makes a descriptor.
        let fd = again(|| unsafe { libc::socket(libc::AF_UNIX, kind, 0) } as isize)?;
        // SAFETY: the descriptor was just made, and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        let room: c_int = 4 << 20;
        let bytes = size_of::<c_int>() as libc::socklen_t;
        // SAFETY: the descriptor is a socket's, and the number has this size. (If the kernel refuses, there is less room.)
        unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_SNDBUF,
                (&raw const room).cast(),
                bytes,
            )
        };
        loop {
            // Queue pairs 0 and 1 are special on hardware.
            let number = random()?.max(2);
            let (address, length) = name(number);
            // SAFETY: the descriptor is a socket's, and the address has this length.
            let bound =
                again(|| unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) } as isize);
            match bound {
                Ok(_) => return Ok(Socket { fd, number }),
                Err(libc::EADDRINUSE) => {}
                Err(code) => return Err(code),
            }
        }
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Sends a packet with the data of these pieces to the pair with the number `header.dest`.
    pub(crate) fn send(&self, mut header: Header, pieces: &[Piece]) -> Sent {
        header.magic = MAGIC;
        header.source = self.number;
        header.bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let (mut address, length) = name(header.dest);
        let mut parts = Parts::new(&mut header, pieces);
        let mut message = parts.message();
        message.msg_name = (&raw mut address).cast();
        message.msg_namelen = length;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the message names the header, the address, and pieces that the kernel checks: it returns EFAULT if one is not mapped.
        match again(|| unsafe { libc::sendmsg(self.fd(), &raw const message, flags) }) {
            Ok(_) => Sent::Done,
            Err(libc::EFAULT) => Sent::Unmapped,
            Err(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Sent::Full,
            Err(_) => Sent::Gone,
        }
    }

    /// The header of the next packet, which stays in the socket. Datagrams that are not packets of this library are dropped.
    pub(crate) fn peek(&self) -> Option<Header> {
        loop {
            let mut header = Header::default();
            let (to, flags) =
                ((&raw mut header).cast::<c_void>(), libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_DONTWAIT);
            // SAFETY: there is room for a header, and any bytes are a valid header.
            let found = again(|| unsafe { libc::recv(self.fd(), to, size_of::<Header>(), flags) });
            let bytes = found.ok()?;
            if header.magic == MAGIC && bytes == size_of::<Header>() + header.bytes as usize {
                return Some(header);
            }
            self.take(&[]);
        }
    }

    /// Receives the next packet, and stores its data in these pieces; data that does not fit is lost.
    pub(crate) fn take(&self, pieces: &[Piece]) -> Taken {
        let mut header = Header::default();
        let mut parts = Parts::new(&mut header, pieces);
        let mut message = parts.message();
        // SAFETY: the message names room for a header, and pieces that the kernel checks: it returns EFAULT if one is not mapped.
        match again(|| unsafe { libc::recvmsg(self.fd(), &raw mut message, libc::MSG_DONTWAIT) }) {
            Err(libc::EFAULT) => Taken::Unmapped,
            _ => Taken::Done,
        }
    }
}

/// The header and the pieces of a packet, as the list that the kernel expects.
struct Parts {
    list: [libc::iovec; MOST_PIECES + 1],
    count: usize,
}

impl Parts {
    fn new(header: &mut Header, pieces: &[Piece]) -> Parts {
        let first = libc::iovec { iov_base: ptr::from_mut(header).cast(), iov_len: size_of::<Header>() };
        let mut list = [first; MOST_PIECES + 1];
        for (to, piece) in list[1..].iter_mut().zip(pieces) {
            *to = libc::iovec { iov_base: piece.at as usize as *mut c_void, iov_len: piece.bytes as usize };
        }
        Parts { list, count: 1 + pieces.len().min(MOST_PIECES) }
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: the message consists of numbers and raw pointers, for which all zeros are valid.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = self.list.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }
}
