//! [`Flight`]: an operation of the engine in flight, of any type; [`Landed`]: how it ended.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use allstream::cuda::DeviceStream;
use allstream::{Batch, Error, Failed, Ordered, SendRecv};

use crate::memory::Memory;
use crate::wait::poll_until;

/// How an operation ended.
pub(crate) struct Landed {
    pub(crate) outcome: Result<Value, Error>,
    /// The buffers that the operation gave back.
    pub(crate) memory: Vec<Memory>,
}

/// The part of an operation's result that is known only at its end.
pub(crate) enum Value {
    /// Nothing: the result was known at the call (an array, a list of arrays, or None).
    Given,
    /// One rank's bytes.
    Bytes(Vec<u8>),
    /// All ranks' bytes.
    AllBytes(Vec<Vec<u8>>),
}

/// An operation of the engine in flight, of any type.
pub(crate) trait Flight: Send {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Landed>;
    /// Waits for `most` at most, and works on the operation meanwhile. `Err`: the flight itself, as the operation is not over.
    fn wait_for(self: Box<Self>, most: Duration) -> Result<Landed, Box<dyn Flight>>;
    /// Whether all work of the operation is on the devices' streams, as it soon is once all ranks have called it. Also `true` if no device runs it.
    fn is_enqueued(&self) -> bool;
    /// Makes a device's stream wait for the operation, and gives the arrays back in the order of that stream. `Err`: no device runs it.
    fn join(self: Box<Self>, stream: &DeviceStream) -> Result<Landed, Box<dyn Flight>>;
    /// The error, if the call was refused and nothing was submitted.
    fn refused(&self) -> Option<Error>;
}

/// The result type of an operation of the engine: `landed` moves its buffers to `memory`, and returns its [`Value`].
pub(crate) trait Outcome: Send + 'static {
    fn landed(self, memory: &mut Vec<Memory>) -> Value;
}

impl Outcome for () {
    fn landed(self, _: &mut Vec<Memory>) -> Value {
        Value::Given
    }
}

impl Outcome for Memory {
    fn landed(self, memory: &mut Vec<Memory>) -> Value {
        memory.push(self);
        Value::Given
    }
}

impl Outcome for (Memory, Memory) {
    fn landed(self, memory: &mut Vec<Memory>) -> Value {
        memory.extend([self.0, self.1]);
        Value::Given
    }
}

impl Outcome for Vec<Memory> {
    fn landed(self, memory: &mut Vec<Memory>) -> Value {
        memory.extend(self);
        Value::Given
    }
}

impl Outcome for (Vec<Memory>, Vec<Memory>) {
    fn landed(self, memory: &mut Vec<Memory>) -> Value {
        memory.extend(self.0);
        memory.extend(self.1);
        Value::Given
    }
}

impl Outcome for Vec<Option<Memory>> {
    fn landed(self, memory: &mut Vec<Memory>) -> Value {
        memory.extend(self.into_iter().flatten());
        Value::Given
    }
}

impl Outcome for (Option<Memory>, Option<Memory>) {
    fn landed(self, memory: &mut Vec<Memory>) -> Value {
        memory.extend(self.0.into_iter().chain(self.1));
        Value::Given
    }
}

impl Outcome for Vec<u8> {
    fn landed(self, _: &mut Vec<Memory>) -> Value {
        Value::Bytes(self)
    }
}

impl Outcome for Vec<Vec<u8>> {
    fn landed(self, _: &mut Vec<Memory>) -> Value {
        Value::AllBytes(self)
    }
}

fn landed<O: Outcome, F: Outcome>(result: Result<O, Failed<F>>) -> Landed {
    let mut memory = Vec::new();
    let outcome = match result {
        Ok(ended) => Ok(ended.landed(&mut memory)),
        Err(failed) => {
            failed.buf.into_iter().for_each(|buf| drop(buf.landed(&mut memory)));
            Err(failed.error)
        }
    };
    Landed { outcome, memory }
}

impl<O: Outcome, F: Outcome> Flight for allstream::Work<O, F> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Landed> {
        Pin::new(self).poll(cx).map(landed)
    }

    fn wait_for(self: Box<Self>, most: Duration) -> Result<Landed, Box<dyn Flight>> {
        match allstream::Work::wait_for(*self, most) {
            Ok(result) => Ok(landed(result)),
            Err(work) => Err(Box::new(work)),
        }
    }

    fn is_enqueued(&self) -> bool {
        allstream::Work::is_enqueued(self)
    }

    fn join(self: Box<Self>, stream: &DeviceStream) -> Result<Landed, Box<dyn Flight>> {
        if !self.runs_on_device() {
            return Err(self);
        }
        Ok(landed(allstream::Work::join(*self, stream).and_then(Ordered::in_order)))
    }

    fn refused(&self) -> Option<Error> {
        allstream::Work::refused(self).cloned()
    }
}

/// Implements [`Flight`] for types that combine several operations of the engine. No stream can wait for these (`join`).
macro_rules! several {
    ($($type:ty),*) => {$(
        impl Flight for $type {
            fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Landed> {
                Pin::new(self).poll(cx).map(landed)
            }

            fn wait_for(mut self: Box<Self>, most: Duration) -> Result<Landed, Box<dyn Flight>> {
                match poll_until(Instant::now() + most, |cx| Flight::poll(&mut *self, cx)) {
                    Some(landed) => Ok(landed),
                    None => Err(self),
                }
            }

            fn is_enqueued(&self) -> bool {
                true
            }

            fn join(self: Box<Self>, _: &DeviceStream) -> Result<Landed, Box<dyn Flight>> {
                Err(self)
            }

            fn refused(&self) -> Option<Error> {
                None
            }
        }
    )*};
}

several!(SendRecv<Memory, Memory>, Batch<Memory>);
