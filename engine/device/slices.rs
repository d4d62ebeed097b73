//! Copies between a device and host memory that is not pinned, in slices through pinned memory.
//!
//! The driver copies such memory too, but then blocks its caller until the stream comes to the copy. If a collective is on the stream,
//! the caller would be blocked until the other ranks have called it, and their tasks may be waiting for this very thread. So no copy is
//! put on the caller's stream. When that stream has done what it held at the call, the slices go, two at a time, over the device's stream of
//! copies, which holds nothing that waits. The thread that sees a slice end (`waiter.rs`) copies it to the user's memory if the host is
//! the target, and starts the next.

use std::sync::Arc;

use allstream_sys::cuda::{CuStream, Cuda, CudaError};
use parking_lot::Mutex;

use super::context::Context;
use super::staging::Block;
use super::stream::{DeviceEvent, DeviceStream};
use super::transfer::{Settle, Transfer, refused_in_capture};
use super::waiter::{self, Outcome, Then};
use crate::error::Error;

/// Bytes of a slice: so many that starting it and noticing its end (tens of microseconds) cost little beside its copy, and so few that little
/// memory is pinned.
const SLICE: usize = 4 << 20;
/// Slices of one copy that are under way at a time: the device copies one while the host copies the other.
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
    /// Whether `host` is pinned, so that the device can copy to and from it by itself.
    pub(super) is_pinned: bool,
}

impl Route {
    /// Puts the copy on a stream.
    ///
    /// # Safety
    /// The stream's context is entered. Until the copy is done, `bytes` bytes on both sides stay allocated, nobody else writes them, and
    /// nobody else reads the side that the copy writes.
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

    /// Copies between the two buffers that `held` owns, in the order of `stream`.
    pub(super) fn start<K: Send + 'static, O: Send + 'static, F: Send + 'static>(
        self,
        stream: &DeviceStream,
        held: K,
        settle: Settle<K, O, F>,
    ) -> Transfer<O, F> {
        if self.bytes > 0 && !self.is_pinned {
            return copy(stream, self, held, settle);
        }
        // SAFETY: `Transfer::start` enters the context. The buffers are equally long and initialised, and their memory stays where it is
        // when the buffers are moved. `held` owns both, and nobody else uses them, until the copy is done.
        let put = |cuda: &Cuda, _: &mut K| unsafe { self.put(cuda, *stream.0.raw()) };
        Transfer::start(stream, held, self.direction.doing(), put, settle)
    }
}

struct Progress {
    /// How many bytes are in slices that have been started.
    started: usize,
    /// How many slices are under way. The wait for the caller's stream counts as one.
    running: usize,
    failed: Option<Error>,
    /// Whether the device may still be copying, as nobody can tell whether it is done.
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

// SAFETY: `route.host` is the memory of a buffer that is Send and that `then` holds. Only the thread that has taken a slice (`started`)
// touches the bytes of that slice, so one thread at a time touches each byte, and none does once `then` was called.
unsafe impl Send for Copy {}
// SAFETY: as above.
unsafe impl Sync for Copy {}

/// A part of a copy, and the slot of the pinned block that it goes through.
struct Slice {
    slot: usize,
    from: usize,
    len: usize,
}

impl Slice {
    /// Where its bytes are in the user's memory, and in the block.
    fn on_host(&self, copy: &Copy) -> (*mut u8, *mut u8) {
        let staged = copy.block.at(self.slot * SLICE);
        (copy.route.host.wrapping_add(self.from), staged)
    }
}

/// Copies between the two buffers that `held` owns, once `stream` has done what is on it now.
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
    /// Called when the caller's stream has done what it held at the call, or is known never to do it.
    fn begin(self: &Arc<Copy>, outcome: Outcome) {
        if self.went_well(outcome) {
            (0..SLOTS).for_each(|slot| self.next(slot));
        }
        self.ended();
    }

    /// Whether a wait for an event ended well. If it did not, keeps the error.
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

    /// Called when a slice, or the wait for the caller's stream, has ended. When none is under way any more, the copy is over, and `then` is called.
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
                // The device may still use the pinned block, so it is never given back.
                std::mem::forget(self.block.clone());
                Outcome::Unknown(error)
            }
            Some(error) => Outcome::Over(error),
        };
        drop(progress);
        then(outcome);
    }

    /// Starts the next slice, if there is one, through this slot.
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
                // The slice's copy may be on the stream of copies or not. In either case it is over when that stream has done all that
                // is on it. This thread may wait for that, as nothing there waits for anything.
                let unknown = self.context.synchronize_copies().is_err();
                self.fail(error, unknown);
                self.ended();
            }
        }
    }

    /// Puts a slice on the stream of copies. If the slice goes to the device, this first copies it from the user's memory to its slot.
    fn put(&self, slice: &Slice) -> Result<DeviceEvent, Error> {
        let (host, staged) = slice.on_host(self);
        if self.route.direction == Direction::ToDevice {
            // SAFETY: both sides have `len` bytes, which only this slice uses (`Copy`): the slot's last slice has ended.
            unsafe { std::ptr::copy_nonoverlapping(host, staged, slice.len) };
        }
        let (device, host) = (self.route.device + slice.from as u64, staged);
        let part = Route { device, host, bytes: slice.len, is_pinned: true, ..self.route };
        let event = self.context.within(part.direction.doing(), |entered| {
            let stream = self.context.copies(entered)?;
            // SAFETY: both sides have `len` bytes. The buffer's stream has done what it held when the copy was called. The buffer and
            // the block are held until the slice has ended.
            unsafe { part.put(self.context.cuda, *stream) }?;
            self.context.mark(entered, *stream)
        })?;
        Ok(DeviceEvent::of(&self.context, event))
    }

    /// Called when the device has copied a slice. If the slice goes to the host, this copies it from its slot to the user's memory.
    fn leave(&self, slice: &Slice) {
        if self.route.direction == Direction::ToHost {
            let (host, staged) = slice.on_host(self);
            // SAFETY: as in `put`. The device has written the slot and is done with it.
            unsafe { std::ptr::copy_nonoverlapping(staged, host, slice.len) };
        }
    }
}
