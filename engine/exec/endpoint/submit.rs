//! How an operation comes in.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Endpoint, HISTORY, Run, Table};
use crate::error::Error;
use crate::exec::Progress;
use crate::exec::device::DeviceOp;
use crate::exec::inflight::Key;
use crate::exec::operation::{PartList, Reduction, Request, Then};
use crate::exec::p2p::{Direction, Transfer};
use crate::forked;
use crate::mem::device::Staged;
use crate::mem::{Event, Held};
use crate::types::{DType, KIND_P2P, NO_OP, Rank, Signature};

/// A collective that was looked at and found good.
pub(crate) struct Collective {
    pub(crate) call: &'static str,
    pub(crate) signature: Signature,
    pub(crate) parts: PartList,
    pub(crate) reduction: Reduction,
    pub(crate) scale: Option<f64>,
    pub(crate) then: Option<Then>,
    /// The device that runs it.
    pub(crate) device: Option<Arc<DeviceOp>>,
}

/// What to do.
pub(crate) enum Submission {
    Collective(Collective),
    Message {
        direction: Direction,
        peer: Rank,
        tag: u32,
        memory: *mut u8,
        count: usize,
        dtype: DType,
        /// Of a message of this rank to itself: the number that its two halves share.
        half: Option<u64>,
    },
}

/// How a submission is to be run.
#[derive(Default)]
pub(crate) struct When {
    pub(crate) timeout: Option<Duration>,
    pub(crate) after: Option<Event>,
    /// What brings the operation's memory, and takes it back when all has moved, before the operation is finished.
    pub(crate) staged: Option<Arc<Staged>>,
}

impl Endpoint {
    /// Takes ownership of the buffers and starts the operation, or queues it; on a refusal the buffers come back.
    pub(crate) fn submit(
        self: &Arc<Self>,
        submission: Submission,
        when: When,
        held: Held,
    ) -> Result<Key, (Error, Held)> {
        // Before any lock: another thread, which is not there, may have held it at the fork.
        if forked::is_forked() {
            return Err((forked::refusal(), held));
        }
        let timeout = when.timeout.unwrap_or(self.config.timeout);
        let mut table = self.table.lock();
        let call = match &submission {
            Submission::Collective(collective) => collective.call,
            Submission::Message { direction, .. } => direction.name(),
        };
        if let Some(error) = self.refusal(&table, call) {
            return Err((error, held));
        }
        let key = table.inflight.submit(held);
        let (mut disagreement, mut started) = (None, None);
        match submission {
            Submission::Collective(collective) => {
                let Collective { signature, parts, reduction, scale, then, device, .. } = collective;
                let number = table.next;
                table.next += 1;
                if let Some(device) = &device {
                    device.submitted(number);
                    table.devices.insert(key.number(), device.clone());
                }
                let staged = table.keep(key, (number, signature, timeout), when.staged);
                let request =
                    Request { number, signature, timeout, reduction, scale, parts, then, device, staged };
                if table.history.len() == HISTORY {
                    table.history.pop_front();
                }
                table.history.push_back(signature);
                let now = Instant::now();
                // Where nothing is before it, it need not queue. Nobody is waited for: the order of locks is the other.
                let first = when.after.is_none() && table.collectives.is_empty();
                if first {
                    started = self.run.try_lock().filter(|run| run.active.is_empty());
                }
                self.recorder.submitted(number, signature, (now, started.is_some()));
                match &mut started {
                    Some(run) => run.active.start(key, request, now),
                    None => {
                        table.collectives.push_back((key, request, when.after));
                        self.is_queued.store(true, Ordering::Relaxed);
                    }
                }
                if let Some((peer, theirs)) = table.asked.answer(number, signature) {
                    disagreement = Some(self.mismatch(number, signature, peer, theirs));
                }
            }
            Submission::Message { direction, peer, tag, memory, count, dtype, half } => {
                let number = half.unwrap_or_else(|| {
                    let next = table.numbers.entry((peer, direction, tag)).or_insert(0);
                    std::mem::replace(next, *next + 1)
                });
                let signature = Signature {
                    kind: KIND_P2P,
                    dtype: dtype as u8,
                    op: NO_OP,
                    algo: 0,
                    root: tag,
                    count: count as u64,
                    generation: self.config.generation,
                    detail: 0,
                };
                let bytes = count * dtype.size();
                let staged = table.keep(key, (number, signature, timeout), when.staged);
                let transfer = Transfer {
                    key,
                    direction,
                    peer,
                    tag,
                    number,
                    memory,
                    bytes,
                    unit: dtype.size(),
                    signature,
                    timeout,
                    staged,
                };
                table.messages.push_back((key, transfer, when.after));
                self.is_queued.store(true, Ordering::Relaxed);
            }
        }
        drop(table);
        if let Some(error) = disagreement {
            started = None;
            self.fail(error);
        }
        // On this thread first: what can complete without a switch does.
        let progress = match started {
            Some(run) => self.drive_with(run, true),
            None => self.drive_once(),
        };
        if progress != Progress::Idle {
            self.arm();
        }
        Ok(key)
    }

    fn refusal(&self, table: &Table, call: &str) -> Option<Error> {
        if let Some(cause) = self.cause() {
            return Some(cause);
        }
        if table.closed {
            return Some(Error::Closed { call: call.to_owned() });
        }
        let limit = self.config.queue_limit;
        (table.inflight.running() >= limit).then(|| Error::QueueFull { call: call.to_owned(), limit })
    }

    /// Takes in what is queued and may begin. Whether anything moved.
    pub(super) fn take_in(&self, run: &mut Run) -> Result<bool, Error> {
        let waker = self.config.lane.waker();
        let (mut any, mut i, mut table) = (false, 0, self.table.lock());
        // Messages whose input is ready are handed to their machine; the rest keep their place.
        while i < table.messages.len() {
            let after = table.messages[i].2.as_ref();
            if after.is_none_or(|event| !event.subscribe(waker)) {
                // Should its stream have failed, it stays where it is, to be failed with all the others.
                let (_, transfer, after) = &table.messages[i];
                ready(after, transfer.direction.name())?;
                let Some((_, transfer, _)) = table.messages.remove(i) else { break };
                drop(table);
                run.messages.add(transfer);
                any = true;
                table = self.table.lock();
            } else {
                i += 1;
            }
        }
        if run.active.is_empty()
            && let Some((_, request, after)) = table.collectives.front()
            && !after.as_ref().is_some_and(|event| event.subscribe(waker))
        {
            if after.is_some() {
                ready(after, &request.signature.to_string())?;
            }
            if let Some((key, request, _)) = table.collectives.pop_front() {
                let now = Instant::now();
                self.recorder.started(request.number, now);
                run.active.start(key, request, now);
            }
        }
        self.is_queued.store(!table.messages.is_empty() || !table.collectives.is_empty(), Ordering::Relaxed);
        Ok(any)
    }
}

fn ready(after: &Option<Event>, call: &str) -> Result<(), Error> {
    let Some(failed) = after.as_ref().filter(|event| event.is_failed()) else { return Ok(()) };
    let panicked =
        || Error::invalid(call, "the stream that it was to follow has failed: a job on it panicked");
    Err(failed.cause().unwrap_or_else(panicked))
}
