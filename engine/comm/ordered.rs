//! [`Ordered`]: a result that work on a stream can use, in the stream's order, before the host has it; and the streams that can have such a result.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Work;
use super::work::{Ended, Restore, Submitted};
use crate::device::operation::{Blocked, DeviceOp};
use crate::device::{DeviceEvent, DeviceStream, refused_in_capture};
use crate::error::{Error, Failed, Outcome};
use crate::exec::{Endpoint, Key, keep_and_look, quarantine};
use crate::forked;
use crate::mem::{ErasedBufs, Event, HostStream, Promise};

/// A stream that calls can be ordered with: a [`HostStream`] or a [`DeviceStream`].
pub trait Stream: Sealed {}

impl Stream for HostStream {}
impl Stream for DeviceStream {}

/// What a call starts after.
#[derive(Clone, Debug)]
pub enum Start {
    /// An event on the host.
    Host(Event),
    /// A point in a device's stream.
    Device(DeviceEvent),
    /// The point in the stream could not be recorded, for this reason.
    Failed(Error),
}

/// A stream of the host or of a device.
pub enum Either<'a> {
    /// One of the host's.
    Host(&'a HostStream),
    /// One of a device's.
    Device(&'a DeviceStream),
}

/// What calls need of a stream. Nobody else can implement it.
pub trait Sealed {
    /// The stream, by its kind.
    fn either(&self) -> Either<'_>;

    /// Records the point to which the stream is filled now.
    fn start(&self) -> Start {
        match self.either() {
            Either::Host(stream) => Start::Host(stream.record()),
            Either::Device(stream) => {
                let point = refused_in_capture(stream, "on").and_then(|()| stream.point());
                point.map_or_else(Start::Failed, Start::Device)
            }
        }
    }
}

impl Sealed for HostStream {
    fn either(&self) -> Either<'_> {
        Either::Host(self)
    }
}

impl Sealed for DeviceStream {
    fn either(&self) -> Either<'_> {
        Either::Device(self)
    }
}

impl<O, F> Work<O, F> {
    /// Makes `stream` wait for the operation; the caller does not wait. Work on that stream can use the result, or the host can
    /// await it.
    ///
    /// For a [`DeviceStream`](crate::cuda::DeviceStream) this is so with collectives that a device runs
    /// ([`Comm::bind_device`](super::Comm::bind_device)); for any other operation the caller waits in this call.
    ///
    /// Several ranks of one process that share a device share its hardware queues, and a stream that waits holds up all streams in its
    /// queue. So let all of these ranks call an operation before any of them joins it. If another rank has yet to call, and its stream
    /// shares the queue, this call blocks until that rank has called. All ranks get an [`Error::Invalid`] that names this rule if the other
    /// rank's call would have to come from the very thread that blocks here, or if it turns out only in that call that the stream of one of its
    /// buffers is held up by a stream that waits already. Ranks that have a device, or a process, of their own need not care, nor does anybody with
    /// `CUDA_DEVICE_MAX_CONNECTIONS=32` and fewer streams.
    ///
    /// # Errors
    /// Those that are known already: of an operation that was refused, or that this call has waited for.
    pub fn join(mut self, stream: &impl Stream) -> Result<Ordered<O, F>, Failed<F>>
    where
        O: Send + 'static,
        F: Send + 'static,
    {
        match (self.refusal(), stream.either()) {
            (Some(refused), _) => refused.map(|value| ready(Ok(value))),
            (None, Either::Host(stream)) => Ok(push(stream, move || self.wait())),
            (None, Either::Device(stream)) => join_on_device(self, stream),
        }
    }
}

/// A value that work on a stream can use, in order: the stream has waited for it, the host has not.
///
/// [`Ordered::launch`] runs a job on the value in a stream's order; awaiting the `Ordered` gives the value to the host.
#[must_use = "the buffer comes back through it"]
pub struct Ordered<O, F = O>(State<O, F>);

enum State<O, F> {
    /// The result that a job on a host stream will leave, or one that is there already.
    Host(Promise<Result<O, Failed<F>>>),
    /// An operation that a device runs, and its content, until somebody takes that.
    Device(OnDevice, Option<Content<O, F>>),
}

/// An operation that a device's streams wait for.
struct OnDevice {
    endpoint: Arc<Endpoint>,
    /// `None` once the outcome was taken, or another `OnDevice` has the operation.
    key: Option<Key>,
    device: Arc<DeviceOp>,
    /// The stream in whose order the value can be used: the one that was joined, or the one of the last job that was launched on the value.
    stream: DeviceStream,
    /// Complete when `stream` has done all that it held when the event was first asked for.
    ready: OnceLock<Event>,
}

#[allow(clippy::large_enum_variant)] // a box would cost an allocation for each operation
enum Content<O, F> {
    /// The operation's buffers, for use in the order of streams that wait for it, and what makes the result of them.
    Held(ErasedBufs, Restore<O, F>),
    /// The operation's buffers, and a function that makes something else of the result (`Ordered::then`).
    Joined(ErasedBufs, Make<O, F>),
    /// What a job on a device's stream has made of the value (`Ordered::launch`).
    Value(O),
}

/// Puts a failed operation's buffers into quarantine. `Run::tear_down` could not do so, as an [`Ordered`] had them. They stay there until the leases
/// that [`DeviceOp::lose`] has noted are over: until then somebody may touch them. If it has noted none, they stay for ever.
fn keep_apart(held: ErasedBufs, device: &DeviceOp) {
    match device.lost() {
        Some(Some(leases)) => keep_and_look(quarantine::What::OnDevice(held, None), leases),
        _ => std::mem::forget(held),
    }
}

/// Makes a result from an operation's outcome and its buffers.
type Make<O, F> = Box<dyn FnOnce(Outcome, Option<ErasedBufs>) -> Result<O, Failed<F>> + Send>;

impl Drop for OnDevice {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            // If nobody has taken the content, its buffers are dropped next: from here on the outputs' memory is kept until the operation has ended.
            let _ = self.device.hand_on();
            self.endpoint.submitted.detach(key);
        }
    }
}

/// Before a thread makes a stream wait for a collective, it drives the collective for this long. Once all of it is on the ranks' streams, no stream
/// that waits for it can hold it up in a hardware queue, so no queue has to be kept free.
const HELP: Duration = Duration::from_micros(20);

/// Makes `stream`, and those of the buffers, wait for an operation. Returns its buffers, for use in the order of these streams.
/// `None`: no device runs the operation, or it has ended.
fn join(
    endpoint: &Arc<Endpoint>,
    key: Key,
    stream: &DeviceStream,
) -> Result<Option<(ErasedBufs, Arc<DeviceOp>)>, Error> {
    let joins = endpoint.submitted.carrier(key).and_then(|carrier| carrier.on_stream().map(|op| op.joins()));
    let Some(device) = joins.and_then(|joins| joins.downcast::<DeviceOp>().ok()) else { return Ok(None) };
    let start = Instant::now();
    // The rank's own stream cannot wait for work that is still to be put behind the wait: if it is one of those that are to wait, the
    // caller waits until all work is on the streams.
    let is_ours = device.is_on(stream);
    // Whether the streams can wait without holding the operation up is asked less and less often, because each answer costs the streams some time.
    let (mut has_way, mut ask_at) = (false, HELP);
    let mut blocked = None;
    while !device.is_enqueued() {
        if !is_ours && start.elapsed() >= ask_at {
            has_way = device.spares_inputs(stream, start.elapsed()) && device.make_way(stream);
            if has_way {
                break;
            }
            ask_at = 2 * start.elapsed();
        }
        endpoint.drive_once();
        if start.elapsed() > HELP {
            if endpoint.submitted.carrier(key).is_none() {
                return Ok(None);
            }
            blocked.get_or_insert_with(|| Blocked::on(&device));
            if let Some(broken) = device.waits_for_itself(endpoint.config.rank, start.elapsed()) {
                endpoint.fail(broken);
                endpoint.tell();
            }
            std::thread::sleep(HELP);
        }
    }
    drop(blocked);
    let joined = device.join(stream);
    if has_way {
        device.waits_now(stream);
    }
    if !joined? {
        return Ok(None);
    }
    Ok(endpoint.submitted.borrow(key).map(|held| (held, device)))
}

impl OnDevice {
    /// Makes `stream` wait for an operation that a device runs, and takes the operation from `submitted`; `None`: no device runs it.
    fn join(
        submitted: &mut Submitted,
        stream: &DeviceStream,
    ) -> Result<Option<(OnDevice, ErasedBufs)>, Error> {
        let Some((endpoint, key)) = submitted.at() else { return Ok(None) };
        // A wait that is captured into a graph takes place only when the graph is launched.
        refused_in_capture(stream, "join")?;
        let Some((held, device)) = join(endpoint, key, stream)? else { return Ok(None) };
        let endpoint = endpoint.clone();
        submitted.let_go();
        let (key, stream, ready) = (Some(key), stream.clone(), OnceLock::new());
        Ok(Some((OnDevice { endpoint, key, device, stream, ready }, held)))
    }

    /// Makes `stream` wait for what the value's stream (`self.stream`) holds. `false`: it does not wait, so the host must.
    fn is_awaited_by(&self, stream: &DeviceStream) -> bool {
        if self.stream == *stream {
            return true;
        }
        // Captures are refused first, as `spares_inputs` and `make_way` may put a wait of their own on the stream, which a capture would record.
        let free =
            [stream, &self.stream].into_iter().try_for_each(|stream| refused_in_capture(stream, "launch"));
        let waits = free.and_then(|()| self.put_wait_on(stream));
        waits.unwrap_or_else(|error| {
            tracing::warn!("a stream cannot wait for an operation, so the host does: {error}");
            false
        })
    }

    /// Makes another stream wait for the value's stream. If that wait could hold up, in a hardware queue, what the operation still puts on
    /// streams, leaves it out and returns `false`.
    fn put_wait_on(&self, stream: &DeviceStream) -> Result<bool, Error> {
        // The value's stream may itself wait for work of the operation that is on no stream yet; then `stream` waits for that work, too.
        let is_early = !self.device.is_enqueued();
        let spares = is_early && self.device.spares_inputs(stream, Duration::ZERO);
        let has_way = spares && self.device.make_way(stream);
        if is_early && !has_way && !self.device.is_enqueued() {
            return Ok(false);
        }
        let order = self.stream.point().and_then(|point| stream.wait_event(&point));
        if has_way {
            self.device.waits_now(stream);
            self.device.note_join(stream, order.is_ok());
        }
        order.map(|()| true)
    }

    /// Moves the operation to a value for another stream.
    fn moved_to(&mut self, stream: &DeviceStream) -> OnDevice {
        let (endpoint, device, stream) = (self.endpoint.clone(), self.device.clone(), stream.clone());
        OnDevice { endpoint, key: self.key.take(), device, stream, ready: OnceLock::new() }
    }

    /// Blocks until the operation has ended.
    fn wait(&mut self) -> Option<Ended> {
        let ended = self.endpoint.wait(self.key?);
        self.key = None;
        Some(ended)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Ended>> {
        let Some(key) = self.key else { return Poll::Ready(None) };
        match self.endpoint.poll(key, cx.waker(), Duration::ZERO, false) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(ended) => {
                self.key = None;
                Poll::Ready(Some(ended))
            }
        }
    }

    fn event(&self) -> &Event {
        self.ready.get_or_init(|| match self.stream.point() {
            Ok(point) => point.on_host(),
            Err(error) => {
                let event = Event::pending();
                event.fail(error);
                event
            }
        })
    }
}

impl<O, F> Content<O, F> {
    /// The value before the operation has ended, for use in the order of a stream that waits for the operation.
    fn hand_on(content: Option<Self>, device: &DeviceOp) -> Result<O, Failed<F>> {
        match content {
            Some(Content::Held(held, restore)) => restore(device.hand_on().map_err(Box::new), Some(held)),
            Some(Content::Joined(held, make)) => make(device.hand_on().map_err(Box::new), Some(held)),
            Some(Content::Value(value)) => Ok(value),
            None => Err(taken()),
        }
    }

    /// The value, once the operation has ended with this outcome.
    fn end(content: Option<Self>, ended: Option<Ended>, device: &DeviceOp) -> Result<O, Failed<F>> {
        let Some((result, held)) = ended else { return Err(taken()) };
        match (content, result) {
            (Some(Content::Held(held, _)), Err(error)) if device.lost().is_some() => {
                keep_apart(held, device);
                Err(Failed { buf: None, error: *error })
            }
            (Some(Content::Joined(held, make)), Err(error)) if device.lost().is_some() => {
                keep_apart(held, device);
                make(Err(error), None)
            }
            (Some(Content::Held(held, restore)), result) => restore(result, Some(held)),
            (Some(Content::Joined(held, make)), result) => make(result, Some(held)),
            (Some(Content::Value(value)), Ok(())) => {
                drop(held);
                Ok(value)
            }
            (_, Err(error)) => Err(Failed { buf: None, error: *error }),
            (None, Ok(())) => Err(taken()),
        }
    }
}

impl<O, F> Unpin for Ordered<O, F> {}

impl<O, F> fmt::Debug for Ordered<O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            State::Host(promise) => write!(f, "Ordered({:?})", promise.event()),
            State::Device(on, _) => write!(f, "Ordered(on {:?})", on.stream),
        }
    }
}

/// An error in a forked child if the value is not there yet: the thread that makes it runs in the parent only.
fn comes_here<O, F>(promise: &Promise<Result<O, Failed<F>>>) -> Result<(), Failed<F>> {
    let comes = promise.event().is_complete() || !forked::is_forked();
    if comes { Ok(()) } else { Err(Failed { buf: None, error: forked::refusal() }) }
}

fn taken<F>() -> Failed<F> {
    Failed { buf: None, error: Error::invalid("await", "the value was taken already") }
}

/// An [`Ordered`] of a result that is there already.
pub(crate) fn ready<O, F>(result: Result<O, Failed<F>>) -> Ordered<O, F> {
    Ordered(State::Host(Promise::kept(result)))
}

fn run<O, F, R>(value: Result<O, Failed<F>>, job: impl FnOnce(O) -> R) -> Result<R, Failed<F>> {
    let panicked = |_| Failed { buf: None, error: Error::invalid("launch", "the job panicked") };
    value.and_then(|value| catch_unwind(AssertUnwindSafe(|| job(value))).map_err(panicked))
}

/// Puts a job on a stream; its result comes back. If it fails, so does the stream: later jobs must not use data that never came.
pub(crate) fn push<O: Send + 'static, F: Send + 'static>(
    stream: &HostStream,
    job: impl FnOnce() -> Result<O, Failed<F>> + Send + 'static,
) -> Ordered<O, F> {
    if let Err(error) = forked::check() {
        return ready(Err(Failed { buf: None, error }));
    }
    let (promise, failure) = (Promise::pending(), stream.failure());
    let ours = promise.clone();
    stream.push(Box::new(move || {
        let panicked =
            |_| Failed { buf: None, error: Error::invalid("join", "what a job dropped has panicked") };
        let result = catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|payload| Err(panicked(payload)));
        if let Err(failed) = &result {
            failure.fail(Some(failed.error.clone()));
        }
        ours.keep(result);
    }));
    Ordered(State::Host(promise))
}

/// Makes a device's stream wait for an operation.
fn join_on_device<O: Send + 'static, F: Send + 'static>(
    work: Work<O, F>,
    stream: &DeviceStream,
) -> Result<Ordered<O, F>, Failed<F>> {
    let (mut submitted, restore) = work.into_parts();
    match OnDevice::join(&mut submitted, stream) {
        Ok(Some((on, held))) => {
            return Ok(Ordered(State::Device(on, Some(Content::Held(held, restore)))));
        }
        Ok(None) => {}
        Err(error) => {
            tracing::warn!("a stream cannot wait for an operation, so the host does: {error}");
        }
    }
    // The host runs the operation, or it is over, or the driver does not let the stream wait: so the caller waits.
    Work::new(submitted, restore).wait().map(|value| ready(Ok(value)))
}

/// Runs a job at once, on this thread; it puts its work on a device's stream.
fn launch_on_device<O: Send + 'static, F: Send + 'static, R: Send + 'static>(
    mut value: Ordered<O, F>,
    stream: &DeviceStream,
    job: impl FnOnce(O) -> R,
) -> Ordered<R, F> {
    let State::Device(on, content) = &mut value.0 else { return ready(run(value.wait(), job)) };
    if !on.is_awaited_by(stream) {
        let before = on.stream.clone();
        let value = value.wait().and_then(|value| match before.synchronize() {
            Ok(()) => Ok(value),
            // Work that is on the stream may still touch the value.
            Err(error) => {
                std::mem::forget(value);
                Err(Failed { buf: None, error })
            }
        });
        return ready(run(value, job));
    }
    match run(Content::hand_on(content.take(), &on.device), job) {
        Err(failed) => ready(Err(failed)),
        Ok(value) => Ordered(State::Device(on.moved_to(stream), Some(Content::Value(value)))),
    }
}

impl<O: Send + 'static, F: Send + 'static> Ordered<O, F> {
    /// Passes the result, also a failure, through `make` when somebody takes it, in the order of the device's stream or on the host. If no
    /// device runs the operation, or a job was launched on the value, waits for it and calls `make` at once.
    pub(crate) fn then<P, G>(
        mut self,
        make: impl FnOnce(Result<O, Failed<F>>) -> Result<P, Failed<G>> + Send + 'static,
    ) -> Ordered<P, G> {
        let State::Device(on, content) = &mut self.0 else { return ready(make(self.wait())) };
        let (held, before): (ErasedBufs, Make<O, F>) = match content.take() {
            Some(Content::Held(held, restore)) => (held, Box::new(restore)),
            Some(Content::Joined(held, before)) => (held, before),
            other => {
                *content = other;
                return ready(make(self.wait()));
            }
        };
        let content = Content::Joined(held, Box::new(move |outcome, held| make(before(outcome, held))));
        let stream = on.stream.clone();
        Ordered(State::Device(on.moved_to(&stream), Some(content)))
    }

    /// Runs `job` on the value, on the stream, after what the stream holds. If the operation has failed by then, its error is passed on
    /// and the job does not run. Nor does it run on a [`HostStream`] that has failed: the result is then the cause of the stream's failure, and
    /// the value is dropped.
    ///
    /// On a [`DeviceStream`] the job runs at once, on this thread, and puts its work on the stream: work on the stream may
    /// use the value's memory, the host may not yet. An operation that no device runs (on host memory, or staged) is waited
    /// for first. Awaiting the result tells how the operation ended; the work that the job put on the stream may still be
    /// running then.
    pub fn launch<R: Send + 'static>(
        self,
        stream: &impl Stream,
        job: impl FnOnce(O) -> R + Send + 'static,
    ) -> Ordered<R, F> {
        match stream.either() {
            Either::Device(stream) => launch_on_device(self, stream, job),
            Either::Host(stream) => {
                if let State::Host(promise) = &self.0 {
                    stream.wait_event(promise.event());
                }
                let failure = stream.failure();
                push(stream, move || {
                    let value = self.wait()?;
                    failure.check("launch").map_err(|error| Failed { buf: None, error })?;
                    run(Ok(value), job)
                })
            }
        }
    }

    /// Gives the value at once. Only work that is put on a stream later (the next collective, say) may use it: on the device
    /// stream that waits for it, or on a buffer's own stream. If the operation fails later, the communicator's next call or
    /// check returns the error, and a buffer's contents mean nothing: copies and collectives refuse the buffer with that
    /// error.
    ///
    /// If no device runs the operation, this call waits for it.
    ///
    /// # Errors
    /// Those of the operation that are known already.
    pub fn in_order(mut self) -> Result<O, Failed<F>> {
        let State::Device(on, content) = &mut self.0 else { return self.wait() };
        Content::hand_on(content.take(), &on.device)
    }

    /// Makes other streams wait for what the joined stream holds now. `false`: no device runs the
    /// operation, or at least one of them does not wait, and the caller is to wait for the operation on the host.
    pub(crate) fn is_awaited_by_all<'a>(&self, mut others: impl Iterator<Item = &'a DeviceStream>) -> bool {
        match &self.0 {
            State::Host(_) => false,
            State::Device(on, _) => others.all(|other| on.is_awaited_by(other)),
        }
    }

    /// For an operation on aliases of the caller's buffers: from here on the contents of the caller's buffers depend on how the operation ends.
    /// If no device runs the operation, waits for it.
    pub(super) fn leave(self) -> Result<(), Error> {
        match &self.0 {
            State::Host(_) => self.wait().map(drop).map_err(|failed| failed.error),
            State::Device(on, _) => on.device.hand_on(),
        }
    }

    /// An event that is complete when the value is there.
    pub fn event(&self) -> &Event {
        match &self.0 {
            State::Host(promise) => promise.event(),
            State::Device(on, _) => on.event(),
        }
    }

    /// Blocks until the value is there.
    ///
    /// # Errors
    /// Those of the operation.
    pub fn wait(mut self) -> Result<O, Failed<F>> {
        match &mut self.0 {
            State::Host(promise) => {
                comes_here(promise)?;
                promise.wait().unwrap_or_else(|| Err(taken()))
            }
            State::Device(on, content) => {
                let ended = on.wait();
                Content::end(content.take(), ended, &on.device)
            }
        }
    }
}

impl<O, F> Future for Ordered<O, F> {
    type Output = Result<O, Failed<F>>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Host(promise) => {
                comes_here(promise)?;
                promise.poll(cx).map(|result| result.unwrap_or_else(|| Err(taken())))
            }
            State::Device(on, content) => {
                let Poll::Ready(ended) = on.poll(cx) else { return Poll::Pending };
                Poll::Ready(Content::end(content.take(), ended, &on.device))
            }
        }
    }
}
