//! [`Promise`]: a value that another thread delivers, once. The receiver blocks or polls until it is there.

use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;

use super::Event;

/// A value that is yet to come, and an event that is complete when it has come. Clones share one value: the first that asks takes it.
pub(crate) struct Promise<T> {
    value: Arc<Mutex<Option<T>>>,
    came: Event,
}

impl<T> Clone for Promise<T> {
    fn clone(&self) -> Promise<T> {
        Promise { value: self.value.clone(), came: self.came.clone() }
    }
}

impl<T> Promise<T> {
    pub(crate) fn pending() -> Promise<T> {
        Promise { value: Arc::new(Mutex::new(None)), came: Event::pending() }
    }

    /// A promise whose value is there already.
    pub(crate) fn kept(value: T) -> Promise<T> {
        let promise = Promise::pending();
        promise.clone().keep(value);
        promise
    }

    /// Delivers the value. If nobody has a clone of the promise any more, the value is dropped here, before the event is complete.
    pub(crate) fn keep(self, value: T) {
        *self.value.lock() = Some(value);
        drop(self.value);
        self.came.fire(true);
    }

    /// Complete when the value is there.
    pub(crate) fn event(&self) -> &Event {
        &self.came
    }

    /// Blocks until the value is there, and takes it; `None`: it was taken already.
    pub(crate) fn wait(&self) -> Option<T> {
        let _ = self.came.wait();
        self.value.lock().take()
    }

    /// Takes the value, if it is there; `None`: it was taken already.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<Option<T>> {
        if self.came.subscribe(cx.waker()) {
            return Poll::Pending;
        }
        Poll::Ready(self.value.lock().take())
    }
}
