//! An example of a link, for tests: through pipes of the process. It is this file, and a line in the table of kinds; the
//! conformance of calls runs over it as over any other.

use std::collections::{HashMap, VecDeque};
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::io::ioctl_fionbio;

use crate::error::Error;
use crate::link::{
    Frame, HEADER_BYTES, Header, Interest, Lends, LinkKind, LinkName, LinkRx, LinkTx, Locality, Posted, SLOT,
    Site,
};
use crate::types::{LinkClass, Rank};

/// Frames that may wait for the pipe.
const QUEUE: usize = 4;
/// What a receiver keeps of what has come: the largest frame whole, and some of the next.
const WINDOW: usize = HEADER_BYTES + SLOT + 4096;

/// Used only if it is chosen by its name: TCP, which joins any ranks, is before it in the table.
pub(crate) static PIPE: LinkKind = LinkKind {
    class: LinkClass::named("pipe"),
    joins: Locality::SameProcess,
    lends: Lends::Nothing,
    max_frame_len: SLOT,
    probe: || pipe().map(drop).map_err(|e| Error::system("make a pipe", e)),
    open_tx: |site| Ok(Box::new(PipeTx::open(site)?)),
    open_rx: |site| {
        let rx = PipeRx::open(site)?;
        site.reactor().watch(rx.pipe.as_fd(), Interest::Readable)?;
        Ok(Box::new(rx))
    },
};

static RECEIVED: AtomicU64 = AtomicU64::new(0);

/// Bytes of payload that have come through pipes.
pub fn piped() -> u64 {
    RECEIVED.load(Ordering::Relaxed)
}

type Ends = (Option<PipeReader>, Option<PipeWriter>);
/// Pipes of which only one end has been opened.
static HALF_OPEN: LazyLock<Mutex<HashMap<LinkName, Ends>>> = LazyLock::new(Mutex::default);

/// Takes one end of a link's pipe. The rank that comes first makes the pipe.
fn end<E: AsFd>(site: &dyn Site, take: fn(&mut Ends) -> Option<E>) -> Result<E, Error> {
    let failed = |e: std::io::Error| Error::system("open a pipe between two ranks", e);
    let mut half_open = HALF_OPEN.lock();
    let mut ends = match half_open.remove(&site.name()) {
        Some(ends) => ends,
        None => pipe().map(|(reader, writer)| (Some(reader), Some(writer))).map_err(failed)?,
    };
    let end = take(&mut ends).ok_or_else(|| failed(std::io::ErrorKind::AlreadyExists.into()))?;
    if ends.0.is_some() || ends.1.is_some() {
        half_open.insert(site.name(), ends);
    }
    ioctl_fionbio(&end, true).map_err(|e| failed(e.into()))?;
    Ok(end)
}

/// The sending end: copies each frame, and writes as much of it as the pipe takes.
struct PipeTx {
    pipe: PipeWriter,
    queue: VecDeque<Vec<u8>>,
    /// Bytes of the first frame that are written.
    written: usize,
    released: u64,
}

impl PipeTx {
    fn open(site: &dyn Site) -> Result<PipeTx, Error> {
        let pipe = end(site, |ends| ends.1.take())?;
        site.reactor().watch(pipe.as_fd(), Interest::Writable)?;
        Ok(PipeTx { pipe, queue: VecDeque::new(), written: 0, released: 0 })
    }

    fn flush(&mut self) {
        while let Some(frame) = self.queue.front() {
            match self.pipe.write(&frame[self.written..]) {
                Ok(n) => self.written += n,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                // The receiver has gone: it wants no more.
                Err(_) => self.written = frame.len(),
            }
            if self.written == frame.len() {
                self.queue.pop_front();
                (self.written, self.released) = (0, self.released + 1);
            }
        }
    }
}

impl LinkTx for PipeTx {
    fn room(&mut self) -> Result<bool, Error> {
        self.flush();
        Ok(self.queue.len() < QUEUE)
    }

    fn needs_slot(&self, _: *const u8, _: usize) -> bool {
        false
    }

    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let mut frame = header.encode().to_vec();
        if header.len > 0 {
            // SAFETY: valid for reads of so many bytes (the caller's promise).
            frame.extend_from_slice(unsafe { std::slice::from_raw_parts(payload, header.len as usize) });
        }
        self.queue.push_back(frame);
        self.flush();
        Ok(Posted::Copied)
    }

    fn leaves(&self) -> bool {
        self.queue.is_empty()
    }

    fn released(&mut self) -> Result<u64, Error> {
        self.flush();
        Ok(self.released)
    }

    fn revoke(&mut self) -> bool {
        true
    }

    fn is_flushed(&mut self) -> bool {
        self.flush();
        self.queue.is_empty()
    }
}

/// The receiving end.
pub(super) struct PipeRx {
    peer: Rank,
    pipe: PipeReader,
    /// What has come and was not released.
    window: Vec<u8>,
    head: Option<Header>,
    done: usize,
}

impl PipeRx {
    pub(super) fn open(site: &dyn Site) -> Result<PipeRx, Error> {
        let pipe = end(site, |ends| ends.0.take())?;
        let window = Vec::with_capacity(WINDOW);
        Ok(PipeRx { peer: site.peer(), pipe, window, head: None, done: 0 })
    }

    /// The pipe, to be looked at.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, Error> {
        let copy = self.pipe.try_clone().map_err(|e| Error::system("look at a pipe", e))?;
        Ok(copy.into())
    }

    /// Reads until so many bytes are here, or no more have come.
    fn fill(&mut self, wanted: usize) {
        while self.window.len() < wanted {
            let here = self.window.len();
            self.window.resize(WINDOW, 0);
            let read = self.pipe.read(&mut self.window[here..]).unwrap_or(0);
            self.window.truncate(here + read);
            if read == 0 {
                return;
            }
        }
    }
}

impl LinkRx for PipeRx {
    fn peek(&mut self, useful: usize) -> Result<Option<Frame>, Error> {
        if self.head.is_none() {
            self.fill(HEADER_BYTES);
            let Some(bytes) = self.window.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
            let wrong = |problem| Error::protocol(self.peer, problem);
            self.head = Some(Header::decode(bytes, SLOT).map_err(wrong)?);
            self.window.drain(..HEADER_BYTES);
        }
        let Some(header) = self.head else { return Ok(None) };
        let left = header.len as usize - self.done;
        self.fill(useful.min(left));
        let ready = self.window.len().min(left);
        let frame = Frame { header, data: self.window.as_ptr(), ready, done: self.done };
        Ok(Some(frame).filter(|_| ready >= useful.min(left)))
    }

    fn release(&mut self, bytes: usize) {
        self.window.drain(..bytes);
        self.done += bytes;
        RECEIVED.fetch_add(bytes as u64, Ordering::Relaxed);
        if self.head.is_some_and(|header| self.done >= header.len as usize) {
            (self.head, self.done) = (None, 0);
        }
    }

    fn is_byte_stream(&mut self) -> bool {
        true
    }

    unsafe fn receive_into(&mut self, dst: *mut u8, max: usize, unit: usize) -> Result<usize, Error> {
        let Some(header) = self.head else { return Ok(0) };
        let limit = max.min(header.len as usize - self.done);
        self.fill(limit.min(SLOT));
        let here = self.window.len().min(limit);
        let whole = here - here % unit;
        // SAFETY: `dst` has room for `max` bytes (the caller's promise); the window is ours.
        unsafe { std::ptr::copy_nonoverlapping(self.window.as_ptr(), dst, whole) };
        self.release(whole);
        Ok(whole)
    }
}
