//! [`Transfer`]: device work that holds buffers until it is done.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context as Task, Poll};

use allstream_sys::cuda::{Cuda, CudaError};

use super::stream::{DeviceEvent, DeviceStream};
use super::waiter::{self, Outcome, Then};
use crate::error::{Error, Failed};
use crate::mem::Promise;

/// A copy on a stream of a device, which has been submitted: a future that gives its buffers back.
///
/// - It runs whether or not it is polled. Dropping it lets it run on, and the buffers are kept until it is done.
/// - It needs no particular runtime, and no thread spins for it; [`Transfer::wait`] blocks instead.
/// - `O` comes back on success, `F` on failure, unless the device may still touch it: then [`Failed::buf`] is `None`,
///   and the memory is never used again.
#[must_use = "the buffers come back through it: await it, `.wait()` for it, or drop it to let the copy run on"]
pub struct Transfer<O, F = O>(State<O, F>);

pub(super) type Settle<K, O, F> = fn(Result<(), Error>, Option<K>) -> Result<O, Failed<F>>;

enum State<O, F> {
    Running(Promise<Result<O, Failed<F>>>),
    Ended(Option<Result<O, Failed<F>>>),
}

impl<O, F> fmt::Debug for Transfer<O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            State::Running(promise) => write!(f, "Transfer({:?})", promise.event()),
            State::Ended(_) => f.write_str("Transfer(ended)"),
        }
    }
}

impl<O, F> Unpin for Transfer<O, F> {}

fn taken<O, F>() -> Result<O, Failed<F>> {
    Err(Failed { buf: None, error: Error::invalid("await", "the result of this copy was taken already") })
}

/// Refuses `doing` on a stream that is being captured: the host cannot wait for what goes into a graph.
pub(super) fn refused_in_capture(stream: &DeviceStream, doing: &str) -> Result<(), Error> {
    stream.refuse_capture(
        doing,
        "the stream is being captured into a graph, and the host cannot wait for a copy on it: copy before or after the capture, or on another \
         stream",
    )
}

impl<O, F> Transfer<O, F> {
    /// A transfer that has ended already: it was refused, or had nothing to do.
    pub(super) fn ended(result: Result<O, Failed<F>>) -> Transfer<O, F> {
        Transfer(State::Ended(Some(result)))
    }

    /// Blocks until the copy is done; the thread sleeps meanwhile.
    ///
    /// # Errors
    /// The same as when it is awaited.
    pub fn wait(self) -> Result<O, Failed<F>> {
        let result = match self.0 {
            State::Running(promise) => promise.wait(),
            State::Ended(result) => result,
        };
        result.unwrap_or_else(taken)
    }
}

impl<O: Send + 'static, F: Send + 'static> Transfer<O, F> {
    /// Holds `held` until `event` is reached, or cannot be reached any more.
    pub(super) fn after<K: Send + 'static>(
        event: DeviceEvent,
        held: K,
        doing: &'static str,
        settle: Settle<K, O, F>,
    ) -> Transfer<O, F> {
        let (transfer, then) = Transfer::pending(held, doing, settle);
        waiter::watch(event, then);
        transfer
    }

    /// Holds `held` until the function that is returned beside the transfer is called.
    pub(super) fn pending<K: Send + 'static>(
        held: K,
        doing: &'static str,
        settle: Settle<K, O, F>,
    ) -> (Transfer<O, F>, Then) {
        let promise = Promise::pending();
        let ours = promise.clone();
        let then = move |outcome: Outcome| {
            let result = match outcome {
                Outcome::Reached => settle(Ok(()), Some(held)),
                Outcome::Over(error) => settle(Err(error.doing(doing)), Some(held)),
                Outcome::Unknown(error) => {
                    std::mem::forget(held);
                    settle(Err(error.doing(doing)), None)
                }
            };
            ours.keep(result);
        };
        (Transfer(State::Running(promise)), Box::new(then))
    }

    /// Has `put` put work on `stream` that touches what `held` owns, and holds `held` until that work is done.
    pub(super) fn start<K: Send + 'static>(
        stream: &DeviceStream,
        mut held: K,
        doing: &'static str,
        put: impl FnOnce(&Cuda, &mut K) -> Result<(), CudaError>,
        settle: Settle<K, O, F>,
    ) -> Transfer<O, F> {
        if let Err(error) = refused_in_capture(stream, doing) {
            return Transfer::ended(settle(Err(error), Some(held)));
        }
        let context = &stream.0.context;
        let entered = match context.enter() {
            Ok(entered) => entered,
            Err(error) => {
                return Transfer::ended(settle(Err(context.tell(doing, error)), Some(held)));
            }
        };
        match put(context.cuda, &mut held).and_then(|()| stream.mark(&entered)) {
            Ok(event) => {
                drop(entered);
                Transfer::after(DeviceEvent::of(context, event), held, doing, settle)
            }
            Err(error) => {
                // `put` may have put something on the stream, which is over once the stream has been synchronized.
                let over = stream.synchronize().is_ok();
                let held = if over {
                    Some(held)
                } else {
                    std::mem::forget(held);
                    None
                };
                Transfer::ended(settle(Err(context.tell(doing, error)), held))
            }
        }
    }
}

impl<O, F> Future for Transfer<O, F> {
    type Output = Result<O, Failed<F>>;

    /// Cancel safe: a `Transfer` may be dropped between polls, or polled by another task.
    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Running(promise) => promise.poll(task).map(|result| result.unwrap_or_else(taken)),
            State::Ended(result) => Poll::Ready(result.take().unwrap_or_else(taken)),
        }
    }
}

/// The future that `.await` on a [`DeviceEvent`] makes: it waits until the event is reached.
#[derive(Debug)]
pub struct Reached(Transfer<()>);

impl IntoFuture for DeviceEvent {
    type Output = Result<(), Error>;
    type IntoFuture = Reached;
    fn into_future(self) -> Reached {
        Reached(Transfer::after(self, (), "wait for an event", |result, _: Option<()>| {
            result.map_err(|error| Failed { buf: Some(()), error })
        }))
    }
}

impl Future for Reached {
    type Output = Result<(), Error>;
    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(task).map_err(|failed| failed.error)
    }
}
