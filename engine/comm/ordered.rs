//! [`Ordered`]: a result that a stream has, in order, before the host does.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use parking_lot::Mutex;

use super::Work;
use crate::error::{Error, Failed};
use crate::mem::{Event, HostStream};

type Slot<O, F> = Arc<Mutex<Option<Result<O, Failed<F>>>>>;

/// A value that work on a stream can use, in order: the stream has waited for it, the host has not.
///
/// [`Ordered::launch`] runs a job on it there; awaiting it gives it to the host.
#[must_use = "the buffer comes back through it"]
pub struct Ordered<O, F = O> {
    slot: Slot<O, F>,
    ready: Event,
}

impl<O, F> fmt::Debug for Ordered<O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ordered({:?})", self.ready)
    }
}

impl<O: Send + 'static, F: Send + 'static> Ordered<O, F> {
    pub(crate) fn after(work: Work<O, F>, stream: &HostStream) -> Ordered<O, F> {
        let slot: Slot<O, F> = Arc::new(Mutex::new(None));
        let (ready, place) = (Event::pending(), slot.clone());
        let (fire, failed) = (ready.clone(), stream.failure_flag());
        stream.push(Box::new(move || {
            let result = work.wait();
            if result.is_err() {
                // What follows on this stream must not use data that never came.
                failed.store(1, Ordering::Release);
            }
            *place.lock() = Some(result);
            fire.fire(true);
        }));
        Ordered { slot, ready }
    }

    /// Runs `job` on the value, on the stream, after what the stream holds; an operation that failed is passed on.
    pub fn launch<R: Send + 'static>(
        self,
        stream: &HostStream,
        job: impl FnOnce(O) -> R + Send + 'static,
    ) -> Ordered<R, F> {
        let slot: Slot<R, F> = Arc::new(Mutex::new(None));
        let (ready, place) = (Event::pending(), slot.clone());
        let fire = ready.clone();
        stream.wait_event(&self.ready);
        let failed = stream.failure_flag();
        stream.push(Box::new(move || {
            let value = self.slot.lock().take();
            let result = match value {
                Some(Ok(value)) => std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(value)))
                    .map_err(|_| Failed { buf: None, error: Error::invalid("launch", "the job panicked") }),
                Some(Err(error)) => Err(error),
                None => Err(Failed { buf: None, error: Error::invalid("launch", "the value was taken") }),
            };
            if result.is_err() {
                failed.store(1, Ordering::Release);
            }
            *place.lock() = Some(result);
            fire.fire(true);
        }));
        Ordered { slot, ready }
    }

    /// The point at which the value is there.
    pub fn event(&self) -> &Event {
        &self.ready
    }

    /// Blocks until the value is there.
    ///
    /// # Errors
    /// Those of the operation.
    pub fn wait(self) -> Result<O, Failed<F>> {
        let _ = self.ready.wait();
        take(&self.slot)
    }
}

fn take<O, F>(slot: &Slot<O, F>) -> Result<O, Failed<F>> {
    let taken = || Failed { buf: None, error: Error::invalid("await", "the value was taken already") };
    slot.lock().take().unwrap_or_else(|| Err(taken()))
}

impl<O, F> Future for Ordered<O, F> {
    type Output = Result<O, Failed<F>>;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.ready.subscribe(cx.waker()) { Poll::Pending } else { Poll::Ready(take(&self.slot)) }
    }
}
