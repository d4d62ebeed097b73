//! Collectives and messages on device memory, through pinned memory of the host's.
//!
//! What goes in is copied to the host on the buffer's stream; the operation starts when that is done and works on the
//! copy; what comes out is copied back on the buffer's stream, and then the operation is finished. Nobody waits in
//! between: events and the waiter's thread lead from one to the next.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use allstream_sys::cuda::{CU_MEMHOSTALLOC_PORTABLE, Cuda, CudaError};
use parking_lot::Mutex;

use super::context::{Context, Entered};
use super::fate::Fate;
use super::stream::{DeviceEvent, DeviceStream};
use super::waiter::{self, Outcome};
use crate::error::Error;
use crate::mem::Event;

/// Where device memory is, and in whose order.
#[derive(Clone)]
pub(crate) struct DevicePlace {
    pub(crate) stream: DeviceStream,
    pub(crate) address: u64,
    /// Of a buffer that keeps it.
    pub(crate) fate: Option<Arc<Fate>>,
}

impl std::fmt::Debug for DevicePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x} of {:?}", self.address, self.stream)
    }
}

impl DevicePlace {
    /// Why what is there means nothing.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.fate.as_ref().map_or(Ok(()), |fate| fate.check())
    }
}

/// A buffer that is staged.
pub(crate) struct Item {
    pub(crate) place: DevicePlace,
    pub(crate) bytes: usize,
    /// The operation reads it.
    pub(crate) fill: bool,
    /// The operation writes it.
    pub(crate) back: bool,
}

/// What is called when a staged operation is over: once, on any thread.
pub(crate) type Finish = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Pinned memory that is kept for the next operations, unless one block is larger: getting it takes the driver 0.1 ms and
/// more.
const KEPT: usize = 64 << 20;
const LEAST: usize = 64 << 10;
const MIB: usize = 1 << 20;
const ALIGN: usize = 64;

/// Blocks that nobody uses: address and length.
#[derive(Default)]
pub(super) struct Pinned {
    blocks: Vec<(usize, usize)>,
}

impl Pinned {
    /// One of at least so many bytes, and not of far more.
    fn take(&mut self, wanted: usize) -> Option<(usize, usize)> {
        let fits = |(_, len): &(usize, usize)| *len >= wanted && *len / 4 <= wanted;
        let at = self.blocks.iter().position(fits)?;
        Some(self.blocks.swap_remove(at))
    }

    fn bytes(&self) -> usize {
        self.blocks.iter().map(|(_, len)| len).sum()
    }

    /// Gives all of them back to the driver; whether there were any.
    pub(super) fn close(&mut self, cuda: &Cuda, report: &dyn Fn(CudaError)) -> bool {
        let any = !self.blocks.is_empty();
        for (at, _) in self.blocks.drain(..) {
            // SAFETY: allocated by `Block::new`, whose owner gave it back.
            unsafe { cuda.mem_free_host(std::ptr::with_exposed_provenance_mut(at)) }.unwrap_or_else(report);
        }
        any
    }
}

/// Pinned memory of the host's, for one operation.
pub(super) struct Block {
    start: NonNull<u8>,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: it owns its memory, and gives no reference to it: whoever copies to or from it holds it, and the executor orders
// them as it does with a user's buffer.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Block, Error> {
        let context = context.clone();
        // Few lengths, so that blocks are taken again; large ones without much waste.
        let len = match bytes {
            0..MIB => bytes.max(LEAST).next_power_of_two(),
            _ => bytes.checked_next_multiple_of(MIB).unwrap_or(bytes),
        };
        let kept = context.pinned.lock().take(len);
        if let Some((at, len)) = kept
            && let Some(start) = NonNull::new(std::ptr::with_exposed_provenance_mut(at))
        {
            return Ok(Block { start, len, context });
        }
        let pin = || {
            context.call(&format!("pin {len} bytes of host memory to stage an operation"), |cuda| {
                // SAFETY: in a context; freed by `drop` here, or by `Pinned::close`.
                unsafe { cuda.mem_host_alloc(len, CU_MEMHOSTALLOC_PORTABLE) }
            })
        };
        // What is kept for others may be what is missing.
        let at = pin().or_else(|error| if context.unpin_idle() { pin() } else { Err(error) })?;
        let Some(start) = NonNull::new(at.cast::<u8>()) else {
            return Err(Error::system("pin host memory", "the driver gave no address"));
        };
        // SAFETY: `len` bytes that are ours alone.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Ok(Block { start, len, context })
    }

    /// An address in it.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut pinned = self.context.pinned.lock();
        if pinned.blocks.is_empty() || pinned.bytes() + self.len <= KEPT {
            pinned.blocks.push((self.start.as_ptr().expose_provenance(), self.len));
            return;
        }
        drop(pinned);
        let _entered = self.context.enter();
        // SAFETY: allocated in `new`, and freed once. Whoever copies to or from it holds the block meanwhile.
        if let Err(error) = unsafe { self.context.cuda.mem_free_host(self.start.as_ptr().cast()) } {
            tracing::warn!(device = self.context.ordinal, "unpin host memory: {error}");
        }
    }
}

/// Copies that end together, on one stream or several.
struct Copies {
    left: usize,
    result: Result<(), Error>,
    then: Option<Finish>,
}

/// Calls `then` once all events are reached, or will not be. The block is held until then.
fn after_all(events: Vec<DeviceEvent>, block: &Arc<Block>, doing: &'static str, then: Finish) {
    if events.is_empty() {
        return then(Ok(()));
    }
    let copies = Arc::new(Mutex::new(Copies { left: events.len(), result: Ok(()), then: Some(then) }));
    for event in events {
        let (copies, block) = (copies.clone(), block.clone());
        let ended = move |outcome: Outcome| {
            let result = match outcome {
                Outcome::Reached => Ok(()),
                Outcome::Over(error) => Err(error.doing(doing)),
                Outcome::Unknown(error) => {
                    // The device may still copy: nobody uses the block again.
                    std::mem::forget(block);
                    Err(error.doing(doing))
                }
            };
            let mut copies = copies.lock();
            copies.left -= 1;
            if copies.result.is_ok() {
                copies.result = result;
            }
            if copies.left == 0
                && let Some(then) = copies.then.take()
            {
                let result = copies.result.clone();
                drop(copies);
                then(result);
            }
        };
        waiter::watch(event, Box::new(ended));
    }
}

/// Why what was copied means nothing.
fn check(fates: &[Arc<Fate>]) -> Result<(), Error> {
    fates.iter().try_for_each(|fate| fate.check())
}

/// An operation whose input is on its way to the host.
pub(crate) struct Staged {
    items: Vec<Item>,
    /// Where each item is in the block.
    offsets: Vec<usize>,
    block: Arc<Block>,
    /// Reached when all that the operation reads is there.
    pub(crate) ready: Event,
}

impl Staged {
    /// Starts the copies to the host. `items` is not empty.
    pub(crate) fn begin(items: Vec<Item>) -> Result<Staged, Error> {
        let (mut offsets, mut bytes) = (Vec::with_capacity(items.len()), 0usize);
        for item in &items {
            offsets.push(bytes);
            bytes = bytes.saturating_add(item.bytes.next_multiple_of(ALIGN));
        }
        let Some(first) = items.first() else {
            return Err(Error::system("stage an operation", "it has no device buffers (a bug)"));
        };
        let block = Arc::new(Block::new(&first.place.stream.0.context, bytes)?);
        let staged = Staged { items, offsets, block, ready: Event::pending() };
        let ready = staged.ready.clone();
        let events = staged.copy(
            |item| item.fill,
            "copy to the host",
            |cuda, item, host| {
                // SAFETY: `bytes` bytes on both sides (`Buf`'s promise, and the block's layout), in the order of the buffer's
                // stream. The block is held until the copy is done (`after_all`); so is the buffer, or it is freed in order.
                unsafe {
                    cuda.memcpy_dtoh_async(
                        host.cast(),
                        item.place.address,
                        item.bytes,
                        item.place.stream.0.raw,
                    )
                }
            },
        )?;
        let filled = staged.items.iter().filter(|item| item.fill);
        let fates: Vec<Arc<Fate>> = filled.filter_map(|item| item.place.fate.clone()).collect();
        let then = move |result: Result<(), Error>| match result.and_then(|()| check(&fates)) {
            Ok(()) => ready.fire(true),
            Err(error) => ready.fail(error),
        };
        after_all(events, &staged.block, "copy to the host", Box::new(then));
        Ok(staged)
    }

    /// Where an item's bytes are on the host.
    pub(crate) fn at(&self, item: usize) -> *mut u8 {
        self.block.at(self.offsets[item])
    }

    /// The memory, to be held as long as the operation may touch it.
    pub(crate) fn memory(&self) -> Arc<dyn std::any::Any + Send + Sync> {
        self.block.clone()
    }

    /// Starts the copies to the device, and calls `finish` when they are done.
    pub(crate) fn back(self, finish: Finish) {
        let events = self.copy(
            |item| item.back,
            "copy to the device",
            |cuda, item, host| {
                // SAFETY: as in `begin`; nobody touches the block any more but this copy.
                unsafe {
                    cuda.memcpy_htod_async(
                        item.place.address,
                        host.cast(),
                        item.bytes,
                        item.place.stream.0.raw,
                    )
                }
            },
        );
        // Nobody may be waiting any more.
        let finish: Finish = Box::new(|result| {
            if let Err(error) = &result {
                tracing::warn!("an operation on device memory: {error}");
            }
            finish(result);
        });
        match events {
            Ok(events) => after_all(events, &self.block, "copy to the device", finish),
            Err(error) => finish(Err(error)),
        }
    }

    /// Puts copies on the streams of those items, and one event behind them on each stream.
    fn copy(
        &self,
        which: fn(&Item) -> bool,
        doing: &'static str,
        copy: impl Fn(&Cuda, &Item, *mut u8) -> Result<(), CudaError>,
    ) -> Result<Vec<DeviceEvent>, Error> {
        let items = || self.items.iter().enumerate().filter(|(_, item)| which(item) && item.bytes > 0);
        for (_, item) in items() {
            if item.place.stream.is_capturing()? {
                let problem = "the buffer's stream is being captured into a graph: an operation between ranks cannot be";
                return Err(Error::invalid(doing, problem));
            }
        }
        let (mut streams, mut events) = (Vec::<&DeviceStream>::new(), Vec::new());
        let put = |context: &Arc<Context>, put: &dyn Fn(&Entered<'_>) -> Result<(), CudaError>| {
            let done = context.enter().and_then(|entered| put(&entered));
            done.map_err(|error| {
                self.settle();
                context.tell(doing, error)
            })
        };
        for (i, item) in items() {
            let stream = &item.place.stream;
            put(&stream.0.context, &|_| copy(stream.0.context.cuda, item, self.at(i)))?;
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
        for stream in streams {
            let context = &stream.0.context;
            let event = Cell::new(None);
            put(context, &|entered| stream.mark(entered).map(|marked| event.set(Some(marked))))?;
            events.extend(event.take().map(|event| DeviceEvent::of(context, event)));
        }
        Ok(events)
    }

    /// A call failed after which copies may be on streams. They are over when the streams are: that is waited for
    /// elsewhere, and until then, or for good if nobody can tell, the block is held.
    fn settle(&self) {
        let block = self.block.clone();
        let streams: Vec<DeviceStream> = self.items.iter().map(|item| item.place.stream.clone()).collect();
        let held = ManuallyDrop::new(block);
        let wait = move || {
            if streams.iter().all(|stream| stream.synchronize().is_ok()) {
                drop(ManuallyDrop::into_inner(held));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-settle".into()).spawn(wait) {
            tracing::warn!("pinned memory is lost: {error}");
        }
    }
}
