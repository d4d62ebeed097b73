//! How an operation is submitted: it gets into the table, and begins at once or is queued.

use std::sync::Arc;

use super::Endpoint;
use super::copy_backs::CopyBack;
use super::progress::Run;
use super::table::Table;
use crate::error::Error;
use crate::exec::Progress;
use crate::exec::carrier::{Carried, Carrier, Submission};
use crate::exec::inflight::Key;
use crate::exec::operation::Operation;
use crate::exec::p2p::Message;
use crate::forked;
use crate::link::locks::EngineGuard;
use crate::mem::{ErasedBufs, Event};
use crate::types::mix;

impl Endpoint {
    /// Takes ownership of the buffers, and starts the operation or queues it. A refusal gives the buffers back.
    pub(crate) fn submit_collective(
        self: &Arc<Self>,
        mut carried: Carried,
        after: Option<Event>,
        held: ErasedBufs,
    ) -> Result<Key, (Error, ErasedBufs)> {
        let Carried { operation, carrier } = &mut carried;
        let mut table = match self.admit(operation.call) {
            Ok(table) => table,
            Err(error) => return Err((error, held)),
        };
        let key = table.inflight.submit(held);
        let signature = operation.signature;
        let (number, other) = table.number_collective(signature);
        operation.number = number;
        if let Some(carrier) = carrier {
            self.submit_carried(&mut table, key, operation, carrier);
        }
        // A collective with none queued before it can begin at once. The lock of `Run` is only tried: in the order of locks it comes
        // before the table's, which this thread holds.
        let mut started = None;
        if after.is_none() && table.collectives.is_empty() {
            started = self.run.try_lock().filter(|run| run.may_begin());
        }
        self.recorder.submitted(number, signature, started.is_some());
        match &mut started {
            Some(run) => run.active.start(key, carried),
            None => {
                table.collectives.push_back((key, carried, after));
                self.submitted.note_queued(&table);
            }
        }
        drop(table);
        if let Some((peer, theirs)) = other {
            started = None;
            self.fail(self.config.mismatch(number, signature, peer, theirs));
        }
        self.drive_first(started);
        Ok(key)
    }

    /// Takes ownership of a message's buffer, and queues the message: a drive begins it. A refusal gives the buffer back.
    pub(crate) fn submit_message(
        self: &Arc<Self>,
        mut message: Message,
        after: Option<Event>,
        held: ErasedBufs,
    ) -> Result<Key, (Error, ErasedBufs)> {
        let mut table = match self.admit(message.direction.name()) {
            Ok(table) => table,
            Err(error) => return Err((error, held)),
        };
        let key = table.inflight.submit(held);
        let Message { direction, peer, tag, signature, timeout, .. } = message;
        let number = message.half.unwrap_or_else(|| table.number_message(peer, direction, tag));
        message.number = number;
        if let Some(carrier) = message.back.take() {
            self.copy_backs.submitted(CopyBack { key, number, signature, timeout, carrier });
        }
        message.record = self.recorder.message(direction.name(), (peer, tag), signature, self.config.now());
        table.messages.push_back((key, message, after));
        self.submitted.note_queued(&table);
        drop(table);
        self.drive_first(None);
        Ok(key)
    }

    /// Locks the table, so that a call can be put in.
    ///
    /// # Errors
    /// The communicator is dead or closed, its queue is full, or this process is a forked child.
    fn admit(&self, call: &str) -> Result<EngineGuard<'_, Table>, Error> {
        // Before any lock is taken: a thread of the parent may have held it at the fork, and does not exist here to release it.
        if forked::is_forked() {
            return Err(forked::refusal());
        }
        let table = self.submitted.lock();
        if let Some(cause) = self.health.cause() {
            return Err(cause.clone());
        }
        if table.closed {
            return Err(Error::Closed { call: call.to_owned() });
        }
        let limit = self.config.queue_limit;
        if table.inflight.running() >= limit {
            return Err(Error::QueueFull { call: call.to_owned(), limit });
        }
        Ok(table)
    }

    /// Drives once on this thread, so that what can complete at once needs no other thread. If work is left, the progress thread gets it.
    fn drive_first(self: &Arc<Self>, started: Option<EngineGuard<'_, Run>>) {
        let progress = match started {
            Some(run) => self.drive_with(run, true),
            None => self.drive_once(),
        };
        if progress != Progress::Idle {
            self.arm();
        }
    }

    /// For an operation that the host does not carry out alone: tells its carrier that the operation is submitted, and notes whether a stream
    /// can be made to wait for the operation, and whether its results are copied back.
    #[cold]
    fn submit_carried(&self, table: &mut Table, key: Key, operation: &Operation, carrier: &Arc<dyn Carrier>) {
        let Operation { number, signature, timeout, .. } = *operation;
        let (comm, waker) = (&*self.config.name, self.config.runtime.waker());
        let place = mix(self.config.comm, self.config.generation.into());
        carrier.submitted(&Submission { comm, place, number, signature, waker });
        if carrier.on_stream().is_some() {
            table.joinable.insert(key.number(), carrier.clone());
        }
        if carrier.copies_back() {
            let carrier = carrier.clone();
            self.copy_backs.submitted(CopyBack { key, number, signature, timeout, carrier });
        }
    }
}
