//! How queue pairs reach each other: each has a socket of datagrams, whose name is the pair's number. It is in no file system, and the kernel takes
//! it away when its process ends, however that ends.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// The most data that one packet has. It has nothing to do with the MTU of a port.
pub(crate) const PACKET: u32 = 32 << 10;
/// How many packets a pair sends before the first of them is acknowledged. A socket holds about ten that nobody has read.
pub(crate) const WINDOW: u32 = 8;

const MAGIC: u32 = 0x7662_7301;
/// Numbers of packets and of queue pairs have 24 bits.
pub(crate) const NUMBERS: u32 = 0x00ff_ffff;
/// A request's list of pieces is no longer, and one more is the header.
pub(crate) const MOST_PIECES: usize = 32;

/// What a packet is.
pub(crate) const REQUEST: u8 = 1;
/// Asks whether the pair is there and would take requests.
pub(crate) const PROBE: u8 = 2;
/// All up to `psn` has come.
pub(crate) const ACK: u8 = 3;
/// `psn` has not come, and later ones have.
pub(crate) const NAK_SEQUENCE: u8 = 4;
/// There was no receive for `psn`; `status` is the number of the time to wait.
pub(crate) const NAK_RNR: u8 = 5;
/// `psn` is refused; `status` says how its requester's completion ends.
pub(crate) const NAK: u8 = 6;
/// What a READ has asked for.
pub(crate) const READ_RESPONSE: u8 = 7;
/// `psn` was thrown away without a word. Hardware would not tell: a requester only uses this to know that it has to wait for its time-out.
pub(crate) const DROPPED: u8 = 8;

/// Bits of [`Header::flags`].
pub(crate) const FIRST: u8 = 1;
pub(crate) const LAST: u8 = 2;
pub(crate) const IS_SOLICITED: u8 = 4;

/// What every packet begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: u32,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) opcode: u8,
    /// As the header of verbs counts them.
    pub(crate) mtu: u8,
    pub(crate) route: Route,
    pub(crate) source: u32,
    pub(crate) dest: u32,
    pub(crate) psn: u32,
    /// Of data behind this header.
    pub(crate) bytes: u32,
    /// Of the whole message.
    pub(crate) total: u32,
    /// Where in the message these bytes belong.
    pub(crate) offset: u32,
    pub(crate) rkey: u32,
    pub(crate) imm: u32,
    pub(crate) status: u32,
    pub(crate) _unused: u32,
    pub(crate) at: u64,
}

/// From where to where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Route {
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// The type of both addresses.
    pub(crate) kind: u32,
    /// The network that the port is on.
    pub(crate) rail: u32,
}

impl Route {
    /// The same way as the other end sees it.
    pub(crate) fn back(self) -> Route {
        Route { from: self.to, to: self.from, ..self }
    }
}

/// How far one packet number is behind another: below zero where it is before.
pub(crate) fn behind(psn: u32, other: u32) -> i32 {
    (psn.wrapping_sub(other) << 8) as i32 >> 8
}

/// The packet number so many further.
pub(crate) fn further(psn: u32, by: u32) -> u32 {
    psn.wrapping_add(by) & NUMBERS
}

/// Memory of this process that the kernel reads or writes. Where nothing is mapped there, it says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) at: u64,
    pub(crate) bytes: u32,
}

/// What has become of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Done,
    /// There is no room now.
    Full,
    /// Nobody has a socket of that number.
    Gone,
    /// A piece is not mapped.
    Unmapped,
}

/// A packet that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Done,
    /// A piece is not mapped, or may not be written. The packet is gone.
    Unmapped,
}

pub(crate) struct Socket {
    fd: OwnedFd,
    number: u32,
}

fn name(number: u32) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: numbers and an array of numbers, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let text = format!("\0allstream-verbs-for-tests-{number:06x}");
    address.sun_path.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from as libc::c_char);
    (address, (mem::offset_of!(libc::sockaddr_un, sun_path) + text.len()) as libc::socklen_t)
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Calls again where a signal came in between.
fn again(mut call: impl FnMut() -> isize) -> Result<usize, c_int> {
    loop {
        match (call(), errno()) {
            (-1, libc::EINTR) => {}
            (-1, code) => return Err(code),
            (done, _) => return Ok(done.max(0) as usize),
        }
    }
}

/// A number that is likely to be free.
fn random() -> Result<u32, c_int> {
    let mut number = 0u32;
    // SAFETY: room for four bytes.
    again(|| unsafe { libc::getrandom((&raw mut number).cast::<c_void>(), 4, 0) })?;
    Ok(number & NUMBERS)
}

impl Socket {
    /// A socket with a number that nobody on this host has.
    pub(crate) fn bind() -> Result<Socket, c_int> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: makes a descriptor.
        let fd = again(|| unsafe { libc::socket(libc::AF_UNIX, kind, 0) } as isize)?;
        // SAFETY: just made, and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        let room: c_int = 4 << 20;
        let bytes = size_of::<c_int>() as libc::socklen_t;
        // SAFETY: a socket, and a number of that size. Where it is refused, there is less room.
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
            // The first two are special on hardware.
            let number = random()?.max(2);
            let (address, length) = name(number);
            // SAFETY: a socket, and an address of that length.
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

    /// Sends a packet to the pair of `header.dest`, with the data of these pieces.
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
        // SAFETY: the message names the header, an address, and pieces that the kernel looks at: it answers EFAULT where one is not mapped.
        match again(|| unsafe { libc::sendmsg(self.fd(), &raw const message, flags) }) {
            Ok(_) => Sent::Done,
            Err(libc::EFAULT) => Sent::Unmapped,
            Err(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Sent::Full,
            Err(_) => Sent::Gone,
        }
    }

    /// The header of the next packet, which stays where it is. What is no packet of ours is thrown away.
    pub(crate) fn peek(&self) -> Option<Header> {
        loop {
            let mut header = Header::default();
            let (to, flags) =
                ((&raw mut header).cast::<c_void>(), libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_DONTWAIT);
            // SAFETY: room for a header, which any bytes are.
            let found = again(|| unsafe { libc::recv(self.fd(), to, size_of::<Header>(), flags) });
            let bytes = found.ok()?;
            if header.magic == MAGIC && bytes == size_of::<Header>() + header.bytes as usize {
                return Some(header);
            }
            self.take(&[]);
        }
    }

    /// Takes the next packet, and puts its data to these pieces; what has no room there is lost.
    pub(crate) fn take(&self, pieces: &[Piece]) -> Taken {
        let mut header = Header::default();
        let mut parts = Parts::new(&mut header, pieces);
        let mut message = parts.message();
        // SAFETY: the message names room for a header, and pieces that the kernel looks at: it answers EFAULT where one is not mapped.
        match again(|| unsafe { libc::recvmsg(self.fd(), &raw mut message, libc::MSG_DONTWAIT) }) {
            Err(libc::EFAULT) => Taken::Unmapped,
            _ => Taken::Done,
        }
    }
}

/// A header and pieces, as the kernel wants them named.
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
        // SAFETY: numbers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = self.list.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }
}
