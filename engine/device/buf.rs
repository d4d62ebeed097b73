//! [`DeviceBuf`]: device memory with an owner, an element type and a stream.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use allstream_sys::cuda::CuEvent;
use parking_lot::Mutex;

use super::blocks::{Lost, Mark, Piece};
use super::context::Context;
use super::devices::Device;
use super::driver::warn;
use super::slices::{Direction, Route};
use super::stream::{DeviceEvent, DeviceStream};
use super::transfer::{Settle, Transfer, refused_in_capture};
use super::waiter::{self, Outcome};
use crate::error::{Error, Failed};
use crate::mem::any::{Make, make};
use crate::mem::{AnyBuf, Buf, DeviceMemory, Fate, HostMemory, Location, Where, check_bools};
use crate::types::{DType, Element};

/// Memory on a CUDA device: `len` elements, initialised, that this buffer alone owns and that are used in the order of one stream.
///
/// - *Order.* All work on a buffer, also that of other libraries at [`as_ptr`](Self::as_ptr), is in the order of its
///   [`stream`](Self::stream); [`on`](Self::on) moves the buffer to another stream.
/// - *Dropping* it does not wait for the stream: the memory goes back to the device's pool once the stream has done what it holds
///   at the drop. (If the driver cannot mark that point of the stream, the drop waits after all.)
/// - *Failure.* A buffer can be handed on before its collective is over ([`Ordered::in_order`](crate::Ordered::in_order)). If
///   the collective then fails, copies from the buffer, and collectives on it, are refused with the cause, until a copy into the
///   buffer has written it anew.
/// - [`split`](Self::split) cuts it into buffers, each of which can be in flight by itself; [`join`](Self::join) puts them
///   together again.
///
/// ```
/// use allstream::cuda::{Device, DeviceBuf, DeviceStream};
/// # async fn copy() -> Result<(), allstream::Error> {
/// let device = Device::new(0)?;
/// let stream = DeviceStream::new(&device)?;
/// let (host, buf) = DeviceBuf::from_host(&stream, vec![1.0_f32; 1000]).await?; // the vector comes back as well
/// let (buf, host) = buf.to_host(host).await?;
/// # drop((buf, host)); Ok(()) }
/// # let _ = copy;
/// ```
///
/// Collectives and messages take it as they take a `Vec`. They start after what its stream holds when they are called. On a
/// communicator that is bound to devices, the devices or NCCL run what they can
/// ([`Comm::bind_device`](crate::Comm::bind_device)). All else is staged through pinned host memory, in parts: a part that has
/// been copied is sent on while the rest is still being copied (`docs/adr/0015-devices.md`).
///
/// ```
/// # async fn reduce(mut comm: allstream::Comm, grads: allstream::cuda::DeviceBuf<f32>) -> Result<(), allstream::Error> {
/// let grads = comm.all_reduce(grads).await?;
/// # drop(grads); Ok(()) }
/// # let _ = reduce;
/// ```
pub struct DeviceBuf<T: Element> {
    pub(super) memory: Arc<Memory>,
    /// Which of the memory's elements the buffer has.
    pub(super) range: Range<usize>,
    stream: DeviceStream,
    /// The operations that its contents depend on.
    fate: Arc<Fate>,
    /// Whether the drop of this buffer marks how far its stream has used the memory. `false`: the buffer has no memory, or needs no mark
    /// ([`replaced`](Self::replaced)).
    marks: bool,
    _elements: PhantomData<T>,
}

/// Memory of one buffer, or of several: each of these has a part, or is an [alias](DeviceBuf::alias).
pub(super) struct Memory {
    pub(super) context: Arc<Context>,
    pub(super) address: u64,
    /// In elements.
    pub(super) len: usize,
    /// Whether another library allocated it.
    foreign: bool,
    last: Mutex<Last>,
}

/// What the drop of the last buffer needs.
struct Last {
    source: Source,
    /// How far each stream has used the memory through buffers that are gone.
    marks: Vec<Mark>,
    /// Set where nobody can tell when the memory is free.
    lost: Option<Lost>,
}

/// Where memory is from.
pub(super) enum Source {
    /// There is none.
    Empty,
    Pool(Piece),
    /// Of another library, with what owns it.
    Foreign(Box<dyn Send>),
}

impl Memory {
    /// Notes that the stream with this number has used the memory up to `event`.
    fn mark(&self, id: u64, event: CuEvent) {
        let mut last = self.last.lock();
        match last.marks.iter_mut().find(|(known, _)| *known == id) {
            Some((_, earlier)) => self.context.recycle(std::mem::replace(earlier, event)),
            None => last.marks.push((id, event)),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let last = self.last.get_mut();
        let marks = std::mem::take(&mut last.marks);
        match (std::mem::replace(&mut last.source, Source::Empty), last.lost) {
            (Source::Empty, _) => {}
            (Source::Pool(piece), Some(why)) => self.context.pool.lock().lose(piece, why),
            (Source::Pool(piece), None) => return self.context.pool.lock().free(piece, marks),
            (Source::Foreign(owner), Some(_)) => std::mem::forget(owner),
            (Source::Foreign(owner), None) => {
                // The owner is dropped once every stream is done with the memory: each watch has a share of the owner.
                let owner = Arc::new(Mutex::new(owner));
                for (_, event) in marks {
                    let share = owner.clone();
                    let then = move |outcome: Outcome| {
                        if matches!(outcome, Outcome::Unknown(_)) {
                            std::mem::forget(share);
                        }
                    };
                    waiter::watch(DeviceEvent::of(&self.context, event), Box::new(then));
                }
                return;
            }
        }
        marks.into_iter().for_each(|(_, event)| self.context.recycle(event));
    }
}

impl<T: Element> Drop for DeviceBuf<T> {
    fn drop(&mut self) {
        if !self.marks {
            return;
        }
        let context = &self.memory.context;
        // If the stream is being captured into a graph, each launch of the graph may use the memory, and nothing tells which launch is the last.
        if self.stream.is_captured().unwrap_or(false) {
            self.memory.last.lock().lost = Some(Lost::InGraph);
            return self.fate.hold(self.memory.clone());
        }
        match context.enter().and_then(|entered| self.stream.mark(&entered)) {
            Ok(event) => self.memory.mark(self.stream.0.id, event),
            // The stream cannot be marked, so it is waited for. If that fails, too, the memory is never used again.
            Err(_) if self.stream.synchronize().is_ok() => {}
            Err(error) => {
                warn(context.ordinal, "device memory is lost", &error);
                self.memory.last.lock().lost.get_or_insert(Lost::Unmarked);
            }
        }
        self.fate.hold(self.memory.clone());
    }
}

impl<T: Element> fmt::Debug for DeviceBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, len) = (T::DTYPE.name(), self.len());
        write!(f, "DeviceBuf<{name}>({len} on device {})", self.memory.context.ordinal)
    }
}

impl<T: Element> DeviceBuf<T> {
    pub(super) fn of(source: Source, address: u64, len: usize, stream: &DeviceStream) -> DeviceBuf<T> {
        let (marks, foreign) = (!matches!(source, Source::Empty), matches!(source, Source::Foreign(_)));
        let last = Mutex::new(Last { source, marks: Vec::new(), lost: None });
        let context = stream.0.context.clone();
        let memory = Arc::new(Memory { context, address, len, foreign, last });
        let (stream, fate) = (stream.clone(), Arc::default());
        DeviceBuf { memory, range: 0..len, stream, fate, marks, _elements: PhantomData }
    }

    /// Memory from the pool, with whatever is in it. The caller fills it before anyone sees it.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub(crate) fn raw(stream: &DeviceStream, len: usize) -> Result<DeviceBuf<T>, Error> {
        let context = &stream.0.context;
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize)
        else {
            return Err(Error::invalid("DeviceBuf", format!("{len} elements are too many for a buffer")));
        };
        if bytes == 0 {
            return Ok(DeviceBuf::of(Source::Empty, 0, len, stream));
        }
        // A reason beside the one in the text: the pool may make the stream wait for other streams, which would take these into the capture.
        stream.refuse_capture(
            "DeviceBuf",
            "the stream is being captured into a graph, which uses the memory only when it is launched: get device memory before or after the \
             capture, or on another stream",
        )?;
        let piece = context.enter().and_then(|entered| context.piece(&entered, &stream.0, bytes as u64));
        let piece = piece.map_err(|error| context.tell(&format!("get {bytes} bytes of memory"), error))?;
        let address = piece.at;
        Ok(DeviceBuf::of(Source::Pool(piece), address, len, stream))
    }

    /// `len` elements of zero, on a stream.
    ///
    /// # Errors
    /// [`Error::Cuda`]: the device does not have that much memory, or the driver refuses to fill it. [`Error::Invalid`]: the stream is being captured
    /// into a graph, or `len` elements are more bytes than a buffer can have.
    pub fn zeroed(stream: &DeviceStream, len: usize) -> Result<DeviceBuf<T>, Error> {
        let buf = DeviceBuf::raw(stream, len)?;
        // SAFETY: `buf` alone owns these bytes, which it got from the pool for use in this stream's order and returns in the same order.
        unsafe { stream.zero(buf.address(), buf.bytes()) }?;
        Ok(buf)
    }

    /// A copy of a host buffer, on a stream. The host buffer comes back beside it.
    ///
    /// The call does not wait for the copy; only to allocate memory it may wait for the device. From a [`PinnedBuf`](super::PinnedBuf) the
    /// device copies by itself, at the full speed of the bus; other memory is copied once more on the way, through at most 8 MiB of pinned memory.
    ///
    /// # Errors
    /// [`Failed`], which has the host buffer if the device cannot touch it any more. [`Error::Invalid`]: the host buffer cannot be used
    /// as it is, or the stream is being captured into a graph. [`Error::Cuda`], also if the device has no memory for the copy.
    pub fn from_host<H: HostMemory<Elem = T>>(
        stream: &DeviceStream,
        host: H,
    ) -> Transfer<(H, DeviceBuf<T>), H> {
        let unfit = host.unfit().map_or(Ok(()), |why| Err(Error::invalid("from_host", why)));
        let fit = unfit.and_then(|()| refused_in_capture(stream, "from_host"));
        let buf = match fit.and_then(|()| DeviceBuf::raw(stream, host.len())) {
            Ok(buf) => buf,
            Err(error) => return Transfer::ended(Err(Failed { buf: Some(host), error })),
        };
        upload((host, buf), |result, held| match (result, held) {
            (Ok(()), Some(both)) => Ok(both),
            (result, held) => Err(Failed { buf: held.map(|(host, _)| host), error: lost(result) }),
        })
    }

    /// Copies a host buffer of the same length into this one, after what this buffer's stream holds now.
    ///
    /// # Errors
    /// [`Failed`], which has both buffers if the device cannot touch them any more. [`Error::Invalid`]: the lengths differ, the host
    /// buffer cannot be used as it is, or the stream is being captured into a graph. [`Error::Cuda`].
    pub fn copy_from_host<H: HostMemory<Elem = T>>(self, host: H) -> Transfer<(H, DeviceBuf<T>)> {
        if let Some(error) = self.differs("copy_from_host", &host) {
            return Transfer::ended(Err(Failed { buf: Some((host, self)), error }));
        }
        upload((host, self), |result, held| {
            settle(result, held).map(|(host, mut buf)| {
                buf.overwritten();
                (host, buf)
            })
        })
    }

    /// Copies this buffer into a host buffer of the same length, after what its stream holds now.
    ///
    /// # Errors
    /// Those of [`copy_from_host`](Self::copy_from_host). [`Error::Invalid`] also if a value that is to be a `bool` is neither 0 nor 1 (on
    /// the host it is `false` then). The cause for which a collective has failed, if this buffer's contents come from that collective.
    pub fn to_host<H: HostMemory<Elem = T>>(self, mut host: H) -> Transfer<(DeviceBuf<T>, H)> {
        if let Some(error) = self.differs("to_host", &host) {
            return Transfer::ended(Err(Failed { buf: Some((self, host)), error }));
        }
        if let Err(error) = self.check() {
            return Transfer::ended(Err(Failed { buf: Some((self, host)), error }));
        }
        let (stream, route) = (self.stream.clone(), self.route(Direction::ToHost, &mut host));
        route.start(&stream, (self, host), settle_on_host)
    }

    /// Why nothing can be copied between this buffer and `host`.
    fn differs<H: HostMemory<Elem = T>>(&self, call: &str, host: &H) -> Option<Error> {
        if let Some(why) = host.unfit() {
            return Some(Error::invalid(call, why));
        }
        let len = host.len();
        (len != self.len()).then(|| {
            let problem = format!("the host buffer has {len} elements, the device's {}", self.len());
            Error::invalid(call, problem)
        })
    }

    /// Describes a copy between this buffer and a host buffer of the same length.
    fn route<H: HostMemory<Elem = T>>(&self, direction: Direction, host: &mut H) -> Route {
        let (device, host, is_pinned) = (self.address(), host.ptr_mut().cast(), host.is_pinned());
        Route { direction, device, host, bytes: self.bytes(), is_pinned }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.len() * size_of::<T>()
    }

    fn address(&self) -> u64 {
        self.memory.address + (self.range.start * size_of::<T>()) as u64
    }

    /// The device's address (a `CUdeviceptr`) of the first element, for kernels and other libraries.
    ///
    /// Work on this memory must be put on [`stream`](Self::stream), leave values of the element type, and stay within the
    /// buffer: whoever launches it is responsible for that. The host must not read or write at this address.
    pub fn as_ptr(&self) -> u64 {
        self.address()
    }

    /// The device.
    pub fn device(&self) -> Device {
        Device(self.memory.context.clone())
    }

    /// The stream in whose order this buffer is.
    pub fn stream(&self) -> &DeviceStream {
        &self.stream
    }

    /// Moves the buffer to the order of another stream of the device, which waits for what is on the old one now.
    ///
    /// # Errors
    /// [`Failed`] with the buffer, still on its stream: [`Error::Invalid`], `stream` is of another device; [`Error::Cuda`].
    pub fn on(mut self, stream: &DeviceStream) -> Result<DeviceBuf<T>, Failed<DeviceBuf<T>>> {
        match self.follow(stream) {
            Ok(()) => {
                self.stream = stream.clone();
                Ok(self)
            }
            Err(error) => Err(Failed { buf: Some(self), error }),
        }
    }

    /// Makes `stream` wait for what this buffer's stream holds.
    pub(super) fn follow(&self, stream: &DeviceStream) -> Result<(), Error> {
        if !Arc::ptr_eq(&stream.0.context, &self.memory.context) {
            let (from, to) = (self.memory.context.ordinal, stream.0.context.ordinal);
            let problem = format!(
                "the buffer is on device {from}, the stream of device {to} (or the device was closed and opened again between the two)"
            );
            return Err(Error::invalid("on", problem));
        }
        if self.stream == *stream {
            return Ok(());
        }
        stream.wait_for_stream(&self.stream)
    }

    /// Another buffer of the same memory, in the order of the same stream. The caller sees to it that no element is in two buffers that are used.
    pub(super) fn sibling(&self, range: Range<usize>) -> DeviceBuf<T> {
        let fate = Fate::default();
        fate.depend_like(&self.fate);
        self.with_fate(range, Arc::new(fate))
    }

    fn with_fate(&self, range: Range<usize>, fate: Arc<Fate>) -> DeviceBuf<T> {
        let (memory, stream) = (self.memory.clone(), self.stream.clone());
        let marks = self.memory.address != 0;
        DeviceBuf { memory, range, stream, fate, marks, _elements: PhantomData }
    }

    /// A second buffer of the same elements, for an operation to own while the caller keeps this one. Their stream is made to wait for the operation.
    pub(crate) fn alias(&self) -> DeviceBuf<T> {
        self.with_fate(self.range.clone(), self.fate.clone())
    }

    /// From here on the contents also depend on all that the contents of `others` depend on.
    pub(super) fn depend_like(&self, others: &[DeviceBuf<T>]) {
        others.iter().for_each(|other| self.fate.depend_like(&other.fate));
    }

    /// An error if the contents are invalid: the cause for which the collective that was to write them has failed.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.fate.check()
    }

    /// Notes that all of the buffer was written anew: its contents no longer come from earlier operations ([`Fate::written_anew`]).
    pub(super) fn overwritten(&mut self) {
        self.fate = Arc::new(self.fate.written_anew());
    }

    pub(super) fn set_stream(&mut self, stream: &DeviceStream) {
        self.stream = stream.clone();
    }

    /// Drops it without a mark: siblings have taken its place, its stream is known to be done with it (`Workspace`), or no wait is wanted (in tests).
    pub(crate) fn replaced(mut self) {
        self.marks = false;
    }
}

/// A host buffer, and the device buffer that gets its values.
type Upload<H, T> = (H, DeviceBuf<T>);

/// Copies the host buffer to the device buffer of the same length, after what the latter's stream holds now.
fn upload<T: Element, H: HostMemory<Elem = T>, F: Send + 'static>(
    (mut host, buf): Upload<H, T>,
    settle: Settle<Upload<H, T>, Upload<H, T>, F>,
) -> Transfer<Upload<H, T>, F> {
    let (stream, route) = (buf.stream.clone(), buf.route(Direction::ToDevice, &mut host));
    route.start(&stream, (host, buf), settle)
}

pub(super) fn settle<K>(result: Result<(), Error>, held: Option<K>) -> Result<K, Failed<K>> {
    match (result, held) {
        (Ok(()), Some(held)) => Ok(held),
        (result, buf) => Err(Failed { buf, error: lost(result) }),
    }
}

/// A device buffer, and the buffer that gets its values.
type Download<T, H> = (DeviceBuf<T>, H);

/// The outcome of a copy from a device buffer. The stream has passed the operations that the contents depend on, so it is known whether one failed.
pub(super) fn settle_from<T: Element, H>(
    result: Result<(), Error>,
    held: Option<Download<T, H>>,
) -> Result<Download<T, H>, Failed<Download<T, H>>> {
    let held = settle(result, held)?;
    match held.0.check() {
        Ok(()) => Ok(held),
        Err(error) => Err(Failed { buf: Some(held), error }),
    }
}

/// The same for a copy to the host. Bools are checked before anyone uses them, also after a failure, when a part may have been copied.
fn settle_on_host<T: Element, H: HostMemory<Elem = T>>(
    result: Result<(), Error>,
    held: Option<Download<T, H>>,
) -> Result<Download<T, H>, Failed<Download<T, H>>> {
    let mut settled = settle_from(result, held);
    let host = match &mut settled {
        Ok((_, host)) => Some(host),
        Err(failed) => failed.buf.as_mut().map(|(_, host)| host),
    };
    if T::DTYPE == DType::Bool
        && let Some(host) = host
        // SAFETY: `host` owns its memory alone and has `count` bools there, of one byte each. No copy to it is under way: if one might be,
        // the buffers would not have come back (`held` would be `None`).
        && let Some(problem) = unsafe { check_bools(host.ptr_mut().cast(), host.count()) }
    {
        let problem = format!("{problem}: a kernel on the device, or another rank, has written it");
        settled = settled.and_then(|both| {
            Err(Failed { buf: Some(both), error: Error::invalid(Direction::ToHost.doing(), problem) })
        });
    }
    settled
}

pub(super) fn lost(result: Result<(), Error>) -> Error {
    result.err().unwrap_or_else(|| Error::system("finish a copy", "its buffers are gone (a bug)"))
}

// SAFETY: the memory is the buffer's alone (`memory`, `range`; an `alias` is used in stream order) and stays in place when the buffer moves. It is
// used, and goes back to the pool, in the order of the stream that `location` names. Foreign owners promise the same (`from_foreign`).
unsafe impl<T: Element> Buf for DeviceBuf<T> {
    type Elem = T;
    fn len(&self) -> usize {
        self.range.len()
    }
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    fn location(&mut self) -> Location {
        let (order, address, fate) = (self.stream.order(), self.address(), Some(self.fate.clone()));
        Location(Where::Device(DeviceMemory { order, address, fate, foreign: self.memory.foreign }))
    }
}

impl AnyBuf {
    /// `len` elements of zero on a device, in a [`DeviceBuf`] on this stream.
    pub(crate) fn zeroed_on(stream: &DeviceStream, dtype: DType, len: usize) -> Result<AnyBuf, Error> {
        struct OnDevice<'a>(&'a DeviceStream, usize);
        impl Make for OnDevice<'_> {
            fn make<T: Element>(self) -> Result<AnyBuf, Error> {
                DeviceBuf::<T>::zeroed(self.0, self.1).map(AnyBuf::new)
            }
        }
        make(dtype, OnDevice(stream, len))
    }
}
