//! What `fuzz/` feeds: every parser of bytes from outside, by the way they come in. Not a part of the interface.
//!
//! Each function takes arbitrary bytes. It panics only on a bug: a property that does not hold is asserted here, and memory accesses outside of what is lent are
//! found by the sanitizer that the targets are built with (or, in mapped regions, by the assertions here).
#![allow(missing_docs)]

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::Error;
use crate::exec::{
    self, Active, Direction, Inflight, Key, Messages, Opener, Operation, Part, PartList, Pass, Port,
    Reduction,
};
use crate::group::Rendezvous;
use crate::group::handshake::{self, Purpose, Token};
use crate::group::message::Message;
use crate::group::registration::News;
use crate::group::wire::{self, Frames};
use crate::link::layout::RING_BYTES;
use crate::link::local::{Doorbell, LocalRx, LocalTx};
use crate::link::region::{REGION_BYTES, Region};
use crate::link::tcp::{FRAME, TcpRx};
pub use crate::link::verbs::fuzzing::peer as rdma_peer;
use crate::link::{Frame, HEADER_BYTES, Header, INLINE, LinkRx, LinkTx, NoReactor, Posted, SLOT};
use crate::plan::{self, Algo, INPUT, Kind, OUTPUT, Program, Shape, Slot};
use crate::types::{DType, KIND_P2P, NO_OP, Rank, ReduceOp, Signature};

/// Bytes taken from the front; zeros once there are no more.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let head = self.take(N);
        bytes[..head.len()].copy_from_slice(head);
        bytes
    }
    fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }
    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

// ---- links ----

/// A frame's header, from a stream.
pub fn frame_header(data: &[u8]) {
    let bytes = &Bytes(data).array::<HEADER_BYTES>();
    if let Ok(header) = Header::decode(bytes, SLOT) {
        assert!(header.len as usize <= SLOT);
        assert_eq!(&header.encode(), bytes);
        let _ = format!("{} {:?}", header.signature, header);
    }
}

/// A stream of frames: what is read is what was sent, whatever its fragments are, and in whichever way it is read.
pub fn tcp_stream(data: &[u8]) {
    let mut input = Bytes(data);
    let script_len = usize::from(input.u8());
    let script = input.take(script_len);
    let stream = input.0;
    // A unix socket: the calls are the same, and no port is used up.
    let Ok((mut writer, reader)) = std::os::unix::net::UnixStream::pair() else { return };
    if reader.set_nonblocking(true).and(writer.set_nonblocking(true)).is_err() {
        return;
    }
    let mut socket = Some(TcpStream::from(OwnedFd::from(reader)));
    let mut rx = TcpRx::new(1, Box::new(move || socket.take()), Arc::new(NoReactor));
    let (mut sent, mut at, mut closed) = (0, 0, false);
    let mut expected = stream;
    let mut out = vec![0u8; FRAME];
    let mut step = 0usize;
    let mut quiet = 0;
    while quiet < 4 {
        let op = if script.is_empty() { 0xff } else { script[step % script.len()] };
        step += 1;
        if sent < stream.len() {
            let piece = (usize::from(op) * 37 + 1).min(stream.len() - sent);
            match writer.write(&stream[sent..sent + piece]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        } else if !closed {
            let _ = writer.shutdown(std::net::Shutdown::Write);
            closed = true;
        }
        let wanted = expected.first_chunk::<HEADER_BYTES>().map(|h| Header::decode(h, FRAME));
        let frame = match rx.peek(usize::from(op & 7) * 100) {
            Ok(Some(frame)) => frame,
            Ok(None) => {
                quiet += usize::from(closed);
                continue;
            }
            Err(_) => {
                assert!(matches!(wanted, Some(Err(_))), "an error where the stream has none");
                return;
            }
        };
        let Some(Ok(header)) = wanted else { panic!("a frame where the stream has none") };
        assert_eq!(frame.header, header);
        let (len, payload) = (header.len as usize, &expected[HEADER_BYTES..]);
        assert_eq!(frame.done, at);
        assert!(frame.ready <= len - at);
        let before = at;
        if step % 7 < 4 && header.op % 2 == 0 {
            // As the executor: a frame is of whole units, and read one way or the other from beginning to end.
            let unit = [8usize, 4, 2, 1].into_iter().find(|u| len % u == 0).unwrap_or(1);
            let most = (usize::from(op) + 1) * 64 * unit;
            let max = most.min(len - at);
            // SAFETY: `out` has room for the largest frame, and `max` is what is left of this one at most.
            let got = unsafe { rx.receive_into(out.as_mut_ptr().wrapping_add(at), max, unit) };
            let got = got.unwrap_or(0);
            assert!(got <= max && got % unit == 0);
            assert_eq!(out[at..at + got], payload[at..at + got]);
            at += got;
            if len == 0 {
                rx.release(0);
            }
        } else if header.op % 2 == 1 || len == 0 {
            // Only who asks for bytes is sure to get some.
            let Ok(Some(frame)) = rx.peek(1) else {
                quiet += usize::from(closed);
                continue;
            };
            // SAFETY: `ready` bytes are readable: the sanitizer disagrees otherwise.
            let ready = unsafe { std::slice::from_raw_parts(frame.data, frame.ready) };
            assert_eq!(ready, &payload[at..at + frame.ready]);
            let released = if op & 8 == 0 { frame.ready } else { frame.ready.min(usize::from(op)) };
            rx.release(released);
            at += released;
        }
        quiet = if at > before || len == 0 { 0 } else { quiet + usize::from(closed) };
        if at == len {
            (expected, at) = (&payload[len..], 0);
        }
    }
}

/// A region and its doorbell, made once for all inputs, as it takes long to map a region.
fn region() -> Option<&'static (Arc<Region>, Doorbell)> {
    static ONE: OnceLock<Option<(Arc<Region>, Doorbell)>> = OnceLock::new();
    let make = || {
        let region = Arc::new(Region::private().ok()?);
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let doorbell = Doorbell::new(region.clone(), Arc::new(rustix::event::eventfd(0, flags).ok()?));
        Some((region, doorbell))
    };
    ONE.get_or_init(make).as_ref()
}

/// A ring in a peer's region, where the peer writes what it likes whenever it likes.
pub fn hostile_ring(data: &[u8]) {
    let Some((region, doorbell)) = region() else { return };
    let mut input = Bytes(data);
    // Any offset is refused or a whole ring.
    let anywhere = input.u64();
    if LocalRx::new(region.clone(), anywhere, doorbell.clone(), 1, false).is_ok() {
        assert!(anywhere <= (REGION_BYTES - RING_BYTES) as u64);
    }
    const AT: usize = 1 << 20;
    let at = region.at(AT);
    // SAFETY: inside the region, which only this thread uses.
    unsafe { std::ptr::write_bytes(at, 0, RING_BYTES) };
    let Ok(mut rx) = LocalRx::new(region.clone(), AT as u64, doorbell.clone(), 1, false) else { return };
    let Ok(mut tx) = LocalTx::new(region.clone(), AT, doorbell.clone(), None) else { return };
    let (mut posted, mut known, mut sum) = (0u64, 0u64, 0u64);
    let base = region.at(0) as usize;
    while !input.is_empty() {
        match input.u8() % 4 {
            0 => {
                let (from, len) = (usize::from(input.u16()) % RING_BYTES, usize::from(input.u8()));
                let bytes = input.take(len.min(RING_BYTES - from));
                // SAFETY: inside the ring.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.wrapping_add(from), bytes.len()) };
            }
            1 => {
                if let Ok(Some(frame)) = rx.peek(0) {
                    let (start, ready) = (frame.data as usize, frame.ready);
                    let end = start.checked_add(ready);
                    assert!(start >= base && end.is_some_and(|end| end <= base + REGION_BYTES), "outside");
                    assert!(frame.done + ready == frame.header.len as usize);
                    for i in [0, ready / 2, ready.saturating_sub(1)] {
                        if i < ready {
                            // SAFETY: in the region, as was just checked.
                            sum += u64::from(unsafe { frame.data.wrapping_add(i).read_volatile() });
                        }
                    }
                    let part = usize::from(input.u16());
                    rx.release(part.min(ready));
                }
            }
            2 => {
                if posted < 1000 && tx.room().is_ok_and(|room| room) {
                    // Payloads that fit into the cell's descriptor (0 and 8 bytes), and payloads beside it.
                    let len = [8, 0, 9, INLINE as u32][posted as usize % 4];
                    let header = Header { op: posted, len, ..header(&mut input) };
                    let payload = [posted as u8; INLINE];
                    // SAFETY: no more bytes than there are, which are copied.
                    assert_eq!(unsafe { tx.post(header, payload.as_ptr()) }, Ok(Posted::Copied));
                    posted += 1;
                }
            }
            _ => {
                // However the peer counts, what is lent is given back once at most, in order.
                let released = tx.released().unwrap_or(0);
                assert!(released >= known && released <= posted, "{released} released of {posted}");
                known = released;
            }
        }
    }
    std::hint::black_box(sum);
}

fn header(input: &mut Bytes<'_>) -> Header {
    let [kind, dtype, op, algo] = input.array();
    Header {
        comm: u32::from(input.u8().is_multiple_of(4)),
        op: u64::from(input.u8() % 4),
        offset: 0,
        len: 0,
        message: 0,
        signature: Signature { kind, dtype, op, algo, ..Signature::default() },
    }
}

// ---- the executor, with a peer that sends what it likes ----

/// Frames that a hostile peer has sent. Each payload is memory of its own, so that a read beyond it is seen.
struct Script {
    frames: Vec<(Header, Box<[u8]>)>,
    at: usize,
    done: usize,
    streams: bool,
    /// Whether only half of what is left of a frame is there, unless the reader asks for more.
    slow: bool,
}

impl LinkRx for Script {
    fn peek(&mut self, useful: usize) -> Result<Option<Frame>, Error> {
        let Some((header, payload)) = self.frames.get(self.at) else { return Ok(None) };
        let (data, left) = (payload[self.done..].as_ptr(), payload.len() - self.done);
        let ready = if self.slow { (left / 2).max(useful.min(left)) } else { left };
        Ok(Some(Frame { header: *header, data, ready, done: self.done }))
    }
    fn release(&mut self, bytes: usize) {
        self.done += bytes;
        let Some((_, payload)) = self.frames.get(self.at) else { return };
        assert!(self.done <= payload.len(), "released more than there was");
        if self.done == payload.len() {
            (self.at, self.done) = (self.at + 1, 0);
        }
    }
    fn is_byte_stream(&mut self) -> bool {
        self.streams
    }
    unsafe fn receive_into(&mut self, dst: *mut u8, max: usize, unit: usize) -> Result<usize, Error> {
        let Some((_, payload)) = self.frames.get(self.at) else { return Ok(0) };
        let rest = &payload[self.done..];
        let whole = max.min(rest.len()) / unit * unit;
        // SAFETY: `dst` is valid for `max` bytes, by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), dst, whole) };
        self.release(whole);
        Ok(whole)
    }
}

/// The sending end to the hostile peer. It takes every frame, and reads all of it, so that a lent range that is not readable is seen. Of every
/// two frames it copies one, and holds the other until it is asked again.
#[derive(Default)]
struct Sink {
    posted: u64,
    released: u64,
}

impl LinkTx for Sink {
    fn room(&mut self) -> Result<bool, Error> {
        Ok(true)
    }
    fn needs_slot(&self, _: *const u8, _: usize) -> bool {
        false
    }
    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        for i in 0..header.len as usize {
            // SAFETY: `len` bytes, by the caller's promise.
            std::hint::black_box(unsafe { payload.wrapping_add(i).read_volatile() });
        }
        self.posted += 1;
        let is_held = self.posted.is_multiple_of(2) && header.len as usize > INLINE;
        Ok(if is_held { Posted::Held } else { Posted::Copied })
    }
    fn released(&mut self) -> Result<u64, Error> {
        Ok(std::mem::replace(&mut self.released, self.posted))
    }
    fn revoke(&mut self) -> bool {
        true
    }
}

struct Hostile(Mutex<Option<Script>>);

impl Opener for Hostile {
    fn open_tx(&self, _: Rank, _: u8) -> Result<Box<dyn LinkTx>, Error> {
        Ok(Box::new(Sink::default()))
    }
    fn open_rx(&self, _: Rank, _: u8) -> Result<Box<dyn LinkRx>, Error> {
        let script = self.0.lock().take().ok_or_else(|| Error::system("open", "twice"))?;
        Ok(Box::new(script))
    }
}

fn port(channel: u8, script: Script) -> Option<Port> {
    Some(Port::new((0, 2), channel, region()?.0.clone(), Arc::new(Hostile(Mutex::new(Some(script))))))
}

/// Frames with small numbers in every field, so that many are what the receiver waits for.
fn script(input: &mut Bytes<'_>, signatures: &[Signature], unit: usize) -> Script {
    let manner = input.u8();
    let (streams, slow) = (manner & 1 == 0, manner & 2 != 0);
    let mut frames = Vec::new();
    while !input.is_empty() && frames.len() < 64 {
        let [what, message, number, place] = input.array();
        let mut signature = signatures[usize::from(what) % signatures.len()];
        if what >= 0xf0 {
            signature.count ^= 1 << (what & 7);
        }
        let len = match place % 8 {
            0 => usize::from(input.u16()),
            n => usize::from(n) * unit,
        };
        let offset = match place / 8 {
            31 => input.u64(),
            30 => u64::MAX - u64::from(input.u8()),
            n => u64::from(n) * unit as u64 / 4,
        };
        let payload = vec![number; len].into_boxed_slice();
        let header = Header {
            comm: u32::from(what == 0xee),
            op: u64::from(number % 4),
            offset,
            len: len as u32,
            // Some have the message number of a loan.
            message: if message == 0xff { 0xffff } else { u32::from(message % 8) },
            signature,
        };
        frames.push((header, payload));
    }
    Script { frames, at: 0, done: 0, streams, slow }
}

const FOREVER: Duration = Duration::from_secs(1000);

/// Messages: a hostile peer's frames against receives and sends of ours.
pub fn hostile_messages(data: &[u8]) {
    let mut input = Bytes(data);
    let mut table = Inflight::<(), ()>::with_capacity(8);
    let mut buffers: HashMap<u64, Box<[u8]>> = HashMap::new();
    let mut transfers = Vec::new();
    let mut numbers = [0u64; 8];
    let mut signatures = Vec::new();
    for _ in 0..input.u8() % 6 + 1 {
        let [what, size] = input.array();
        let (direction, tag) = ([Direction::Recv, Direction::Send][usize::from(what & 1)], what >> 1 & 3);
        let count = [0, 1, 5, 64, 1024, 1025, 5000, 40_000][usize::from(size % 8)];
        let number = &mut numbers[usize::from(what & 7)];
        let signature = Signature {
            kind: KIND_P2P,
            dtype: DType::F32 as u8,
            op: NO_OP,
            algo: 0,
            root: tag.into(),
            count: count as u64,
            ..Signature::default()
        };
        let key = table.submit(());
        let mut memory = vec![0u8; count * 4].into_boxed_slice();
        let at = memory.as_mut_ptr();
        buffers.insert(key.number(), memory);
        signatures.push(signature);
        transfers.push((
            key,
            exec::Message {
                direction,
                peer: 1,
                tag: tag.into(),
                number: *number,
                half: None,
                record: 0,
                memory: at,
                bytes: count * 4,
                unit: 4,
                signature,
                timeout: FOREVER,
                staged: None,
                back: None,
                whole: None,
            },
        ));
        *number += 1;
    }
    let late = usize::from(input.u8()) % (transfers.len() + 1);
    let Some(port) = port(1, script(&mut input, &signatures, 4)) else { return };
    let mut messages = Messages::new(0, 0, 0, 2, port);
    let mut done: Vec<Key> = Vec::new();
    for (i, transfer) in transfers.into_iter().enumerate() {
        messages.add(transfer.0, transfer.1, std::time::Instant::now());
        if i < late && messages.pass(|key, _| done.push(key)).is_err() {
            return;
        }
    }
    for _ in 0..200 {
        match messages.pass(|key, _| done.push(key)) {
            Ok(true) => {}
            Ok(false) | Err(_) => break,
        }
    }
    for key in done {
        assert!(buffers.remove(&key.number()).is_some(), "finished twice");
    }
}

/// A collective: a hostile peer's frames against our side of it.
pub fn hostile_collective(data: &[u8]) {
    let mut input = Bytes(data);
    let [what, size, how] = input.array();
    let kind = Kind::ALL[usize::from(what) % Kind::ALL.len()];
    let algos = plan::algorithms(kind);
    let algo: Algo = algos[usize::from(how) % algos.len()];
    let in_place = how & 0x80 != 0 || kind == Kind::Barrier;
    let count =
        if kind == Kind::Barrier { 1 } else { [0, 1, 2, 7, 48, 500, 9000, 70_000][usize::from(size % 8)] };
    let shape = Shape { n: 2, rank: 0, root: usize::from(how >> 6 & 1), in_place, ..Shape::default() };
    let Ok(plan) = plan::plan(kind, algo, &shape) else { return };
    let (dtype, op) = match kind {
        Kind::Barrier => (DType::U8, ReduceOp::BitOr),
        _ => (DType::F32, ReduceOp::Sum),
    };
    let signature = Signature {
        kind: kind as u8,
        dtype: dtype as u8,
        op: op as u8,
        algo: algo as u8,
        root: shape.root as u32,
        count: count as u64,
        ..Signature::default()
    };
    let whole = size & 0x80 != 0 && plan::goes_whole(kind, algo, &shape);
    let (unit, total) = (dtype.size(), |slot: Slot| plan.slots[usize::from(slot)].total(count));
    let (ins, outs) = (if in_place { 0 } else { total(INPUT) }, total(OUTPUT));
    let input_memory = vec![0u8; ins * unit].into_boxed_slice();
    let mut output = vec![0u8; outs * unit].into_boxed_slice();
    let at = output.as_mut_ptr();
    let part = Part {
        program: Arc::new(Program { whole, ..Program::compile(&plan) }),
        input: if in_place { at.cast_const() } else { input_memory.as_ptr() },
        output: at,
        count,
        dtype,
        tables: None,
        pairwise: false,
        stated: None,
    };
    let operation = Operation::new("fuzz", signature, FOREVER, Reduction::Op(op), PartList::One(part));
    let Some(mut port) = port(0, script(&mut input, &[signature], unit)) else { return };
    let mut table = Inflight::<(), ()>::with_capacity(1);
    let mut active = Active::new(0, usize::MAX, true);
    active.start(table.submit(()), operation.into());
    for _ in 0..500 {
        if port.reap(|lent| active.freed(&lent)).is_err() {
            break;
        }
        match active.pass(&mut port, None) {
            Ok(Pass::Going(true)) => {}
            Ok(Pass::Going(false)) => {
                // It waits, and must be able to say for whom.
                active.waiting_for(&mut port, &mut Vec::new());
                break;
            }
            Ok(Pass::Then(..) | Pass::Done(_) | Pass::OnStream(_)) | Err(_) => break,
        }
    }
    drop((output, input_memory));
}

// ---- the group ----

/// A peer that sends these bytes, in pieces, and is then gone.
struct Peer<'a> {
    bytes: &'a [u8],
    piece: usize,
}

impl AsyncRead for Peer<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let len = self.piece.min(self.bytes.len()).min(buf.remaining());
        let (now, rest) = self.bytes.split_at(len);
        buf.put_slice(now);
        self.bytes = rest;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Peer<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn run<F: Future>(future: F) -> Option<F::Output> {
    thread_local! {
        static RUNTIME: Option<tokio::runtime::Runtime> =
            tokio::runtime::Builder::new_current_thread().enable_time().build().ok();
    }
    RUNTIME.with(|r| r.as_ref().map(|r| r.block_on(future)))
}

fn peer<'a>(input: &mut Bytes<'a>) -> Peer<'a> {
    let piece = usize::from(input.u8()) + 1;
    Peer { bytes: std::mem::take(&mut input.0), piece }
}

fn spoken(error: &Error) {
    let _ = (error.to_string(), format!("{error:?}"));
}

fn message(message: &Message) {
    match message {
        Message::Abort { cause, .. } | Message::Goodbye { cause: Some(cause) } => spoken(cause),
        _ => {}
    }
    let _ = (format!("{message:?}"), message.comm());
    let Ok(frame) = wire::encode(message) else { return };
    let again =
        wire::split(&frame).ok().flatten().and_then(|(payload, _)| wire::decode::<Message>(payload).ok());
    assert_eq!(again.as_ref(), Some(message), "what was understood survives being said again");
}

/// A control connection: frames, and the messages in them.
pub fn control_stream(data: &[u8]) {
    if let Ok(one) = wire::decode::<Message>(data) {
        message(&one);
    }
    let mut peer = peer(&mut Bytes(data));
    run(async {
        let mut frames = Frames::default();
        while let Ok(Some(one)) = frames.next::<Message, _>(&mut peer).await {
            message(&one);
        }
    });
}

fn soon() -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_secs(5)
}

/// Both sides of the handshake, with a peer that says these bytes.
pub fn handshakes(data: &[u8]) {
    let _ = handshake::parse_preamble(data);
    if let Ok(len) = handshake::parse_length(Bytes(data).array()) {
        assert!(len <= handshake::MAX_HELLO);
    }
    if let Ok(purpose) = handshake::parse_purpose(data) {
        let _ = format!("{purpose:?}");
        let again = serde_json::to_vec(&purpose).ok().and_then(|b| handshake::parse_purpose(&b).ok());
        assert_eq!(again, Some(purpose));
    }
    let mut input = Bytes(data);
    let (token, dials) = (Token::new(b"secret"), input.u8() % 2 == 0);
    let mut peer = peer(&mut input);
    run(async {
        if dials {
            let purpose = Purpose::Control { world: [7; 16], from: 1, to: 0 };
            let welcome = handshake::dial(&mut peer, &token, &purpose, soon()).await;
            assert!(welcome.is_err(), "nobody can have proved the secret");
        } else {
            let admitted =
                handshake::accept(&mut peer, &token, soon(), &handshake::Progress::default(), |_| Ok(()))
                    .await;
            assert!(admitted.is_err(), "nobody can have proved the secret");
        }
    });
}

/// What rank 0 says to those who have registered.
pub fn rendezvous(data: &[u8]) {
    let mut input = Bytes(data);
    let size = usize::from(input.u8() % 5) + 1;
    let Ok(own) = Rendezvous::tcp("127.0.0.1:1", size - 1, size) else { return };
    let look = |news: &News| {
        let _ = format!("{news:?}");
        if let News::Formed(table) = news
            && table.check(own.size()).is_ok()
        {
            assert_eq!(table.members.len(), size);
            assert!(table.members.iter().enumerate().all(|(i, m)| m.rank == i && !m.addresses.is_empty()));
        }
    };
    if let Ok(news) = wire::decode::<News>(input.0) {
        look(&news);
    }
    let mut peer = peer(&mut input);
    run(async {
        let mut frames = Frames::default();
        while let Ok(Some(news)) = frames.next::<News, _>(&mut peer).await {
            look(&news);
        }
    });
}

/// The environment (`NAME=value` lines), and addresses.
pub fn environment(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let variables: HashMap<&str, &str> = text.lines().filter_map(|l| l.split_once('=')).collect();
    // Files are not read here.
    let safe = |name: &str| name != "ALLSTREAM_TOKEN_FILE";
    let found =
        Rendezvous::from_lookup(&|name| variables.get(name).filter(|_| safe(name)).map(|v| (*v).to_owned()));
    match found {
        Ok(place) => {
            assert!(place.rank() < place.size());
            let _ = format!("{place:?}");
        }
        Err(error) => spoken(&error),
    }
    for line in text.lines() {
        match Rendezvous::tcp(line, 0, 2) {
            Ok(place) => {
                let shown = place.place();
                let again = Rendezvous::tcp(&shown, 0, 2).map(|p| p.place());
                assert_eq!(again, Ok(shown), "an address can be read as it is shown");
            }
            Err(error) => spoken(&error),
        }
        let _ = line.parse::<Algo>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loan that does not come whole is refused: it would be waited for, and released, for ever.
    #[test]
    fn a_peer_that_sends_half_a_loan_stops_nobody() {
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // An all_reduce of 7 elements by a ring, in place. The script is slow, and has one frame that is numbered as a loan, of 24, 4 or 0
            // bytes.
            for place in [6, 1, 8 * 31] {
                hostile_collective(&[0, 3, 0x80, 3, 0, 0xff, 0, place]);
            }
            done.send(()).unwrap();
        });
        finished.recv_timeout(Duration::from_secs(30)).expect("a pass ends");
    }
}
