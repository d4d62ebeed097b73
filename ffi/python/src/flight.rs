//! [`Flight`]: an operation of the engine's, whatever its type, and what it came to.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use allstream::cuda::DeviceStream;
use allstream::{Batch, Error, Failed, Ordered, SendRecv};

use crate::memory::Memory;
use crate::wait::poll_until;

/// What an operation came to.
pub(crate) struct Landed {
    pub(crate) outcome: Result<Value, Error>,
    /// The buffers that it gave back.
    pub(crate) memory: Vec<Memory>,
}

/// What is known when it is over, and not when it is called.
pub(crate) enum Value {
    /// Nothing: its result is the array that it was given.
    Given,
    /// One rank's bytes.
    Bytes(Vec<u8>),
    /// All ranks' bytes.
    AllBytes(Vec<Vec<u8>>),
}

/// An operation of the engine's, whatever its type.
pub(crate) trait Flight: Send {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Landed>;
    /// Waits for so long at most, working on it; the flight comes back where it is not over.
    fn wait_for(self: Box<Self>, most: Duration) -> Result<Landed, Box<dyn Flight>>;
    /// Whether all of it is on its device's stream, as it is when all ranks have called it; also, where no device runs it.
    fn is_enqueued(&self) -> bool;
    /// Makes a device's stream wait for it, and gives the arrays back in the order of that stream; the flight comes back where no device runs it.
    fn join(self: Box<Self>, stream: &DeviceStream) -> Result<Landed, Box<dyn Flight>>;
    /// Why nothing was submitted.
    fn refused(&self) -> Option<Error>;
}

/// What a finished operation gives: buffers to be given back, and what they mean.
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

/// Several operations of the engine's that are one here.
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
