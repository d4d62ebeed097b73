//! Copies between a device and host memory that is not pinned, in slices through pinned memory.
//!
//! The driver takes such memory too, but then blocks its caller until the stream comes to the copy. With a collective on
//! the stream that is until other ranks have called, and their tasks may be waiting for this very thread. So nothing is
//! put on the caller's stream: once that has come to its point, slices go over a stream of the device's that holds nothing
//! else, two at a time, and the thread that sees one end copies it on and starts the next.

use std::sync::Arc;

use allstream_sys::cuda::{CuStream, Cuda, CudaError};
use parking_lot::Mutex;

use super::context::Context;
use super::staging::Block;
use super::stream::{DeviceEvent, DeviceStream};
use super::transfer::{Settle, Transfer, refused_in_capture};
use super::waiter::{self, Outcome, Then};
use crate::error::Error;

/// Bytes of a slice: long beside what its start and end cost (tens of microseconds), short beside what may be pinned.
const SLICE: usize = 4 << 20;
/// One is on its way while the host copies another.
const SLOTS: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    ToHost,
    ToDevice,
}

impl Direction {
    pub(super) fn doing(self) -> &'static str {
        match self {
            Direction::ToHost => "copy to the host",
            Direction::ToDevice => "copy to the device",
        }
    }
}

/// A copy between a device and the host: which bytes, and which way.
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub(super) direction: Direction,
    pub(super) device: u64,
    pub(super) host: *mut u8,
    pub(super) bytes: usize,
    /// Whether the device copies to and from this memory of the host's by itself.
    pub(super) is_pinned: bool,
}

impl Route {
    /// Puts the copy on a stream.
    ///
    /// # Safety
    /// The stream's context is entered. Until the copy is done, `bytes` bytes on both sides stay, and nobody else writes them, nor
    /// reads those that are written.
    pub(super) unsafe fn put(self, cuda: &Cuda, stream: CuStream) -> Result<(), CudaError> {
        let Route { direction, device, host, bytes, .. } = self;
        match direction {
            _ if bytes == 0 => Ok(()),
            // SAFETY: the caller's promise.
            Direction::ToHost => unsafe { cuda.memcpy_dtoh_async(host.cast(), device, bytes, stream) },
            // SAFETY: as above.
            Direction::ToDevice => unsafe {
                cuda.memcpy_htod_async(device, host.cast_const().cast(), bytes, stream)
            },
        }
    }

    /// Copies between what `held` owns, in the order of `stream`.
    pub(super) fn start<K: Send + 'static, O: Send + 'static, F: Send + 'static>(
        self,
        stream: &DeviceStream,
        held: K,
        settle: Settle<K, O, F>,
    ) -> Transfer<O, F> {
        if self.bytes > 0 && !self.is_pinned {
            return copy(stream, self, held, settle);
        }
        // SAFETY: `Transfer::start` enters the context. The lengths are equal, and a buffer's memory is initialised and does not move
        // with it; `held` has both buffers, alone, until the copy is done.
        let put = |cuda: &Cuda, _: &mut K| unsafe { self.put(cuda, *stream.0.raw()) };
        Transfer::start(stream, held, self.direction.doing(), put, settle)
    }
}

struct Progress {
    /// Bytes that have been started.
    started: usize,
    /// Slices on their way; and, at first, the wait for the stream's point.
    running: usize,
    failed: Option<Error>,
    /// Nobody can tell whether the device still copies.
    unknown: bool,
    then: Option<Then>,
}

/// A copy that is under way.
struct Copy {
    route: Route,
    context: Arc<Context>,
    block: Arc<Block>,
    progress: Mutex<Progress>,
}

// SAFETY: `route.host` is the memory of what `then` holds, a buffer that is Send; it is touched by whoever has taken a slice
// of it (`started`), so each byte by one thread at a time, and not once `then` was called.
unsafe impl Send for Copy {}
// SAFETY: as above.
unsafe impl Sync for Copy {}

/// A part of a copy, and the part of the block that it goes through.
struct Slice {
    slot: usize,
    from: usize,
    len: usize,
}

impl Slice {
    /// Its bytes in the user's memory, and in the block.
    fn on_host(&self, copy: &Copy) -> (*mut u8, *mut u8) {
        let staged = copy.block.at(self.slot * SLICE);
        (copy.route.host.wrapping_add(self.from), staged)
    }
}

/// Copies between what `held` owns, once `stream` has come to what is on it now.
fn copy<K: Send + 'static, O: Send + 'static, F: Send + 'static>(
    stream: &DeviceStream,
    route: Route,
    held: K,
    settle: Settle<K, O, F>,
) -> Transfer<O, F> {
    let doing = route.direction.doing();
    let context = &stream.0.context;
    let bytes = route.bytes.min(SLOTS * SLICE);
    let begun = refused_in_capture(stream, doing).and_then(|()| {
        let block = Block::new(context, bytes)?;
        Ok((block, stream.point()?))
    });
    let (block, event) = match begun {
        Ok(begun) => begun,
        Err(error) => return Transfer::ended(settle(Err(error), Some(held))),
    };
    let (transfer, then) = Transfer::pending(held, doing, settle);
    let progress = Progress { started: 0, running: 1, failed: None, unknown: false, then: Some(then) };
    let (context, block) = (context.clone(), Arc::new(block));
    let copy = Arc::new(Copy { route, context, block, progress: Mutex::new(progress) });
    if event.is_complete().is_ok_and(|complete| complete) {
        copy.begin(Outcome::Reached);
    } else {
        waiter::watch(event, Box::new(move |outcome| copy.begin(outcome)));
    }
    transfer
}

impl Copy {
    /// The stream has come to the copy's point, or will not.
    fn begin(self: &Arc<Copy>, outcome: Outcome) {
        if self.went_well(outcome) {
            (0..SLOTS).for_each(|slot| self.next(slot));
        }
        self.ended();
    }

    /// Keeps what went wrong, if anything did.
    fn went_well(&self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Reached => return true,
            Outcome::Over(error) => self.fail(error, false),
            Outcome::Unknown(error) => self.fail(error, true),
        }
        false
    }

    fn fail(&self, error: Error, unknown: bool) {
        let mut progress = self.progress.lock();
        progress.failed.get_or_insert(error);
        progress.unknown |= unknown;
    }

    /// One that ran has ended; with the last of them all is over.
    fn ended(&self) {
        let mut progress = self.progress.lock();
        progress.running -= 1;
        if progress.running > 0 {
            return;
        }
        let Some(then) = progress.then.take() else { return };
        let outcome = match progress.failed.take() {
            None => Outcome::Reached,
            Some(error) if progress.unknown => {
                // Nor does anybody use the pinned memory again.
                std::mem::forget(self.block.clone());
                Outcome::Unknown(error)
            }
            Some(error) => Outcome::Over(error),
        };
        drop(progress);
        then(outcome);
    }

    /// Starts the next slice, through this slot.
    fn next(self: &Arc<Copy>, slot: usize) {
        let slice = {
            let mut progress = self.progress.lock();
            let from = progress.started;
            let len = (self.route.bytes - from).min(SLICE);
            if len == 0 || progress.failed.is_some() {
                return;
            }
            progress.started += len;
            progress.running += 1;
            Slice { slot, from, len }
        };
        match self.put(&slice) {
            Ok(event) => {
                let copy = self.clone();
                let then = move |outcome| {
                    if copy.went_well(outcome) {
                        copy.leave(&slice);
                        copy.next(slice.slot);
                    }
                    copy.ended();
                };
                waiter::watch(event, Box::new(then));
            }
            Err(error) => {
                // Whether anything was put there or not, it is over when the stream is, which has only copies.
                let unknown = self.context.synchronize_copies().is_err();
                self.fail(error, unknown);
                self.ended();
            }
        }
    }

    /// Puts a slice on the stream.
    fn put(&self, slice: &Slice) -> Result<DeviceEvent, Error> {
        let (host, staged) = slice.on_host(self);
        if self.route.direction == Direction::ToDevice {
            // SAFETY: `len` bytes on both sides, the slice's own (`Copy`); the slot is free: what it was for has ended.
            unsafe { std::ptr::copy_nonoverlapping(host, staged, slice.len) };
        }
        let (device, host) = (self.route.device + slice.from as u64, staged);
        let part = Route { device, host, bytes: slice.len, is_pinned: true, ..self.route };
        let event = self.context.within(part.direction.doing(), |entered| {
            let stream = self.context.copies(entered)?;
            // SAFETY: `len` bytes on both sides. The buffer's stream had come to the copy's point, and the buffer and the block are
            // held until the slice has ended.
            unsafe { part.put(self.context.cuda, *stream) }?;
            self.context.mark(entered, *stream)
        })?;
        Ok(DeviceEvent::of(&self.context, event))
    }

    /// Takes a slice that has come out of its slot.
    fn leave(&self, slice: &Slice) {
        if self.route.direction == Direction::ToHost {
            let (host, staged) = slice.on_host(self);
            // SAFETY: as in `put`; the device has written the slot.
            unsafe { std::ptr::copy_nonoverlapping(staged, host, slice.len) };
        }
    }
}
