//! Links over TCP: one simplex connection per communicator, peer and channel, opened by its sender when first used.
//!
//! The connection's window is the credit: a communicator whose receiver is behind fills its own connection and no
//! other. A connection that breaks is kept as a [`Break`], which the endpoint asks for: only the two ranks together can tell
//! whether one of them has ended. Payloads go from the caller's memory to the socket. What the receiver only copies is read from the socket
//! into the caller's memory; operands of a reduction are read into a window that stays in cache.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;

use super::dialled::{Dial, Dialled};
use super::{
    Break, Frame, HEADER_BYTES, Header, INLINE, Interest, Lends, LinkKind, LinkRx, LinkTx, Locality, Posted,
    Reactor, SLOT,
};
use crate::error::Error;
use crate::types::{LinkClass, Rank};

/// At most this many frames wait for the socket, and none is added once those that wait have [`FRAME`] bytes together. They are queued so that
/// the next result of a reduction is at hand as soon as the socket has room.
const QUEUE: usize = 4;
/// Bytes of the receive window: what is worked on at once, and the beginning of what comes next; well inside the L2 cache.
const WINDOW: usize = SLOT + 64 * 1024;
/// Bytes of the largest frame, which passes through the window in pieces. In such a frame a whole message may go at once, so that a system
/// call takes as much as the socket has room for (docs/bench/profile.md).
pub(crate) const FRAME: usize = 512 << 10;

/// Between any ranks.
pub(crate) static TCP: LinkKind = LinkKind {
    class: LinkClass::TCP,
    joins: Locality::Remote,
    lends: Lends::Nothing,
    max_frame_len: FRAME,
    probe: || {
        let listening = TcpListener::bind("127.0.0.1:0");
        listening.map(drop).map_err(|e| Error::system("listen on 127.0.0.1", e))
    },
    open_tx: |site| Ok(Box::new(TcpTx::new(site.dial(), site.reactor()))),
    open_rx: |site| Ok(Box::new(TcpRx::new(site.peer(), site.accept(), site.reactor()))),
};

enum State {
    Dialled(Dialled),
    Open(TcpStream),
    /// The connection broke, or is not wanted any more.
    Dead,
}

/// The addresses of a connection's ends, ours first. They are kept because the system forgets them once the connection is broken.
#[derive(Clone, Copy, Default)]
struct Ends(Option<(SocketAddr, SocketAddr)>);

impl Ends {
    fn of(socket: &TcpStream) -> Ends {
        Ends(socket.local_addr().ok().zip(socket.peer_addr().ok()))
    }

    fn broke(self, problem: String) -> Break {
        let unknown = || ("an unknown address".to_string(), "an unknown address".to_string());
        let (at, peer_at) = self.0.map_or_else(unknown, |(at, peer)| (at.to_string(), peer.to_string()));
        Break { kind: "TCP".into(), at, peer_at, problem }
    }
}

struct Pending {
    header: [u8; HEADER_BYTES],
    payload: *const u8,
    copy: [u8; INLINE],
    copied: bool,
    len: usize,
    done: usize,
}

// SAFETY: `payload` is lent by `post`'s contract until the frame is released; it is not tied to a thread.
unsafe impl Send for Pending {}

/// The sending end.
pub(crate) struct TcpTx {
    state: State,
    reactor: Arc<dyn Reactor>,
    queue: VecDeque<Pending>,
    /// Bytes of payload of the frames in `queue`.
    queued: usize,
    released: u64,
    ends: Ends,
    broke: Option<Break>,
}

impl TcpTx {
    pub(crate) fn new(dial: Dial, reactor: Arc<dyn Reactor>) -> TcpTx {
        TcpTx {
            state: State::Dialled(Dialled::new(dial)),
            reactor,
            queue: VecDeque::with_capacity(QUEUE),
            queued: 0,
            released: 0,
            ends: Ends::default(),
            broke: None,
        }
    }

    fn break_off(&mut self, error: &io::Error) {
        tracing::debug!(%error, "a data connection broke while sending");
        self.broke = Some(self.ends.broke(error.to_string()));
        self.state = State::Dead;
    }

    fn open(&mut self) -> Result<(), Error> {
        if let State::Dialled(dialled) = &mut self.state
            && let Some(socket) = dialled.poll(&self.reactor)?
        {
            self.reactor.watch(socket.as_fd(), Interest::Writable)?;
            self.ends = Ends::of(&socket);
            self.state = State::Open(socket);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.open()?;
        let State::Open(socket) = &mut self.state else { return Ok(()) };
        while let Some(frame) = self.queue.front_mut() {
            match write_some(socket, frame) {
                Ok(true) => {
                    self.queued -= frame.len;
                    self.queue.pop_front();
                    self.released += 1;
                }
                Ok(false) => break,
                Err(e) => {
                    self.break_off(&e);
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Writes until the frame is out (`true`) or the socket is full.
fn write_some(socket: &mut TcpStream, frame: &mut Pending) -> io::Result<bool> {
    let total = HEADER_BYTES + frame.len;
    while frame.done < total {
        let base = if frame.copied { frame.copy.as_ptr() } else { frame.payload };
        let sent = frame.done.saturating_sub(HEADER_BYTES);
        let payload = if frame.len == sent {
            &[] // an empty payload may be null
        } else {
            // SAFETY: valid for `len` bytes until released, by `post`'s contract (or our own copy), and `sent < len`;
            // only the kernel reads through the slice.
            unsafe { std::slice::from_raw_parts(base.add(sent), frame.len - sent) }
        };
        let written = if frame.done < HEADER_BYTES {
            socket.write_vectored(&[IoSlice::new(&frame.header[frame.done..]), IoSlice::new(payload)])
        } else {
            socket.write(payload)
        };
        match written {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => frame.done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

impl LinkTx for TcpTx {
    fn room(&mut self) -> Result<bool, Error> {
        self.flush()?;
        Ok(self.queue.len() < QUEUE && self.queued < FRAME)
    }

    fn max_frame_len(&self) -> usize {
        FRAME
    }

    fn needs_slot(&self, _: *const u8, _: usize) -> bool {
        false
    }

    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let len = header.len as usize;
        let mut frame =
            Pending { header: header.encode(), payload, copy: [0; INLINE], copied: false, len, done: 0 };
        if self.queue.is_empty()
            && let State::Open(socket) = &mut self.state
        {
            match write_some(socket, &mut frame) {
                Ok(true) => {
                    self.released += 1;
                    return Ok(Posted::Copied);
                }
                Ok(false) => {}
                Err(e) => self.break_off(&e),
            }
        }
        if len <= INLINE {
            if len > 0 {
                // SAFETY: `payload` is valid for `len` bytes (the caller's promise), which the copy has room for.
                unsafe { std::ptr::copy_nonoverlapping(payload, frame.copy.as_mut_ptr(), len) };
            }
            frame.copied = true;
        }
        let posted = if frame.copied { Posted::Copied } else { Posted::Held };
        self.queued += len;
        self.queue.push_back(frame);
        Ok(posted)
    }

    fn leaves(&self) -> bool {
        self.queue.is_empty()
    }

    fn released(&mut self) -> Result<u64, Error> {
        self.flush()?;
        Ok(self.released)
    }

    fn revoke(&mut self) -> bool {
        // Only we read the memory. A half-sent frame ends with the connection.
        self.released += self.queue.len() as u64;
        self.queue.clear();
        self.queued = 0;
        self.state = State::Dead;
        true
    }

    fn take_break(&mut self) -> Option<Break> {
        self.broke.take()
    }

    fn is_flushed(&mut self) -> bool {
        let _ = self.flush();
        self.broke.is_none() && (self.queue.is_empty() || matches!(self.state, State::Dead))
    }
}

/// Gives the connection that the peer has dialled, once it has come.
pub(crate) type Accept = Box<dyn FnMut() -> Option<TcpStream> + Send>;

/// The receiving end. The socket comes when the peer has dialled.
pub(crate) struct TcpRx {
    peer: Rank,
    /// `Some` until the connection has come.
    accept: Option<Accept>,
    reactor: Arc<dyn Reactor>,
    socket: Option<TcpStream>,
    window: Vec<u8>,
    start: usize,
    end: usize,
    head: Option<Header>,
    done: usize,
    /// Bytes of an incomplete unit that lie in the caller's memory already.
    partial: usize,
    ends: Ends,
    broke: Option<Break>,
}

impl TcpRx {
    pub(crate) fn new(peer: Rank, accept: Accept, reactor: Arc<dyn Reactor>) -> TcpRx {
        TcpRx {
            peer,
            accept: Some(accept),
            reactor,
            socket: None,
            window: Vec::new(),
            start: 0,
            end: 0,
            head: None,
            done: 0,
            partial: 0,
            ends: Ends::default(),
            broke: None,
        }
    }

    /// Takes the connection that the peer opened, if it has come.
    fn attach(&mut self) -> Result<(), Error> {
        if let Some(socket) = self.accept.as_mut().and_then(|accept| accept()) {
            self.reactor.watch(socket.as_fd(), Interest::Readable)?;
            self.window = vec![0; WINDOW];
            self.ends = Ends::of(&socket);
            self.socket = Some(socket);
            self.accept = None;
        }
        Ok(())
    }

    fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Reads what the socket has into `first`, unless that is empty, and then into the window. Returns how many bytes went to `first`.
    fn read(&mut self, first: &mut [u8]) -> usize {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.window.len() - self.end < WINDOW / 4 {
            self.window.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let Some(socket) = &mut self.socket else { return 0 };
        loop {
            let wanted = first.len();
            let rest = &mut self.window[self.end..];
            if wanted == 0 && rest.is_empty() {
                return 0;
            }
            let read = if wanted == 0 {
                socket.read(rest)
            } else {
                socket.read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(rest)])
            };
            match read {
                Ok(0) => {
                    let within =
                        if self.head.is_some() || self.buffered() > 0 { " within a frame" } else { "" };
                    self.break_off(format!("the other end closed it{within}"));
                }
                Ok(n) => {
                    self.end += n.saturating_sub(wanted);
                    return n.min(wanted);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => self.break_off(e.to_string()),
            }
            return 0;
        }
    }

    fn break_off(&mut self, problem: String) {
        tracing::debug!(peer = self.peer, problem, "a data connection broke while receiving");
        self.socket = None;
        self.broke = Some(self.ends.broke(problem));
    }

    fn finish_if_done(&mut self) {
        if self.head.is_some_and(|h| self.done >= h.len as usize) {
            self.head = None;
            self.done = 0;
        }
    }
}

impl LinkRx for TcpRx {
    fn peek(&mut self, useful: usize) -> Result<Option<Frame>, Error> {
        if self.accept.is_some() {
            self.attach()?;
        }
        if self.head.is_none() {
            if self.buffered() < HEADER_BYTES {
                self.read(&mut []);
            }
            let Some(bytes) = self.window[self.start..self.end].first_chunk::<HEADER_BYTES>() else {
                return Ok(None);
            };
            let header =
                Header::decode(bytes, FRAME).map_err(|problem| Error::protocol(self.peer, problem))?;
            self.start += HEADER_BYTES;
            self.head = Some(header);
            self.done = 0;
        }
        let Some(header) = self.head else { return Ok(None) };
        let left = header.len as usize - self.done;
        if self.buffered() < useful.min(left) {
            self.read(&mut []);
        }
        let ready = self.buffered().min(left);
        if ready < useful.min(left) {
            return Ok(None);
        }
        Ok(Some(Frame { header, data: self.window[self.start..].as_ptr(), ready, done: self.done }))
    }

    fn release(&mut self, bytes: usize) {
        self.start += bytes.min(self.buffered());
        self.done += bytes;
        self.finish_if_done();
    }

    fn take_break(&mut self) -> Option<Break> {
        self.broke.take()
    }

    fn is_byte_stream(&mut self) -> bool {
        true
    }

    unsafe fn receive_into(&mut self, dst: *mut u8, max: usize, unit: usize) -> Result<usize, Error> {
        let Some(header) = self.head else { return Ok(0) };
        let limit = max.min(header.len as usize - self.done);
        let mut have = self.partial;
        // If the caller asks for fewer bytes than already lie there of an incomplete unit, none are added.
        let buffered = self.buffered().min(limit.saturating_sub(have));
        if buffered > 0 {
            // SAFETY: `dst` has room for `max >= have + buffered` bytes (the caller's promise); the window is ours.
            unsafe {
                std::ptr::copy_nonoverlapping(self.window[self.start..].as_ptr(), dst.add(have), buffered);
            }
            self.start += buffered;
            have += buffered;
        }
        if have < limit {
            // SAFETY: the rest of `dst`, initialised memory of the caller's that nothing else accesses now (the caller's promise).
            let rest = unsafe { std::slice::from_raw_parts_mut(dst.add(have), limit - have) };
            have += self.read(rest);
        }
        let whole = have - have % unit;
        self.partial = have - whole;
        self.done += whole;
        self.finish_if_done();
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::NoReactor;
    use crate::types::Signature;

    fn pair() -> (TcpTx, TcpRx, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let dial: Dial = Box::new(move |done| {
            let socket = TcpStream::connect(at).unwrap();
            socket.set_nonblocking(true).unwrap();
            done(Ok(socket));
        });
        let mut tx = TcpTx::new(dial, Arc::new(NoReactor));
        assert!(tx.room().unwrap());
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        (tx, receiver(socket), listener)
    }

    fn receiver(socket: TcpStream) -> TcpRx {
        let mut socket = Some(socket);
        TcpRx::new(1, Box::new(move || socket.take()), Arc::new(NoReactor))
    }

    fn header(op: u64, len: usize) -> Header {
        let signature =
            Signature { kind: 1, dtype: 2, op: 3, algo: 4, root: 5, count: 6, generation: 7, detail: 8 };
        Header { comm: 9, op, offset: 0, len: len as u32, message: 3, signature }
    }

    #[test]
    fn frames_of_every_size_arrive_by_both_ways_of_reading() {
        let (mut tx, mut rx, _l) = pair();
        let sizes = [0usize, 1, 7, 192, 193, 4096, 100_001, SLOT, FRAME];
        let data: Vec<u8> = (0..FRAME).map(|i| (i * 7 + i / 251) as u8).collect();
        for direct in [false, true] {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
            let (mut posted, mut read) = (0, 0);
            let mut out = vec![0u8; FRAME + 8];
            let mut got = 0;
            while read < sizes.len() {
                assert!(std::time::Instant::now() < deadline, "stuck at frame {read}, {got} bytes");
                if posted < sizes.len() && tx.room().unwrap() {
                    // SAFETY: `data` outlives the link's use of it.
                    unsafe { tx.post(header(posted as u64, sizes[posted]), data.as_ptr()).unwrap() };
                    posted += 1;
                }
                tx.released().unwrap();
                let size = sizes[read];
                let Some(frame) = rx.peek(if direct { 0 } else { 1 }).unwrap() else { continue };
                assert_eq!(frame.header, header(read as u64, size));
                assert_eq!(frame.done, got);
                if size == 0 {
                    rx.release(0);
                } else if direct {
                    // SAFETY: `out` has room.
                    got += unsafe { rx.receive_into(out.as_mut_ptr().add(got), size - got, 1).unwrap() };
                } else {
                    // SAFETY: `ready` bytes are readable, `out` has room.
                    unsafe {
                        std::ptr::copy_nonoverlapping(frame.data, out.as_mut_ptr().add(got), frame.ready);
                    }
                    got += frame.ready;
                    rx.release(frame.ready);
                }
                if got == size {
                    assert_eq!(out[..size], data[..size]);
                    (read, got) = (read + 1, 0);
                }
            }
        }
    }

    #[test]
    fn what_waits_for_a_socket_is_bounded_by_bytes() {
        let (mut tx, _rx, _l) = pair();
        let data = vec![0u8; FRAME];
        // Nobody reads: the socket takes some, then one frame waits.
        for n in 0.. {
            assert!(n < 1000, "a socket that takes all");
            if !tx.room().unwrap() {
                break;
            }
            // SAFETY: `data` outlives the link's use of it.
            unsafe { tx.post(header(n, FRAME), data.as_ptr()).unwrap() };
        }
        assert_eq!((tx.queue.len(), tx.queued), (1, FRAME));
        assert!(tx.revoke());
        assert_eq!((tx.queue.len(), tx.queued), (0, 0));
    }

    #[test]
    fn garbage_is_a_protocol_error() {
        let (_tx, _rx, listener) = pair();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut rx = receiver(socket);
        other.write_all(&[0xff; 200]).unwrap();
        assert!(matches!(rx.peek(0), Err(Error::Protocol { peer: 1, .. })));
    }
}
