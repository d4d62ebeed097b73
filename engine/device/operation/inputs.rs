//! The streams on which the ranks of a process make their inputs, and the streams that wait for an operation before all ranks have called it.
//!
//! Where ranks share a device, their callers' streams share its hardware queues. Suppose that one rank *joins* a stream with an operation (makes
//! the stream wait for it), and another rank, which has not called the operation yet, makes its input on a stream in the same queue. Then the input
//! comes only after the wait, and the wait ends only after the input: neither goes on. So a rank that joins before all have called first asks which
//! streams share a queue (`queues/pairs.rs`); if one of its streams shares a queue with a stream of a rank that has not called, it waits on the host
//! for that call. Where that cannot be known beforehand, because a rank has not called anything yet or later uses another stream, that rank's call
//! finds that its input is held up. Then the communicator ends with an error that names the rule: at once, or after [`PATIENCE`] where it is not
//! certain that two streams share a queue. The communicator also ends if a join waits on the host for a call that, as far as is known, the waiting
//! thread itself would have to make, or a thread that waits for it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Binding, DeviceOp};
use crate::commands::Commands;
use crate::device::chores::later;
use crate::device::context::Joined;
use crate::device::links::peer::PeerDevice;
use crate::device::queues::Pair;
use crate::device::stream::DeviceStream;
use crate::error::Error;
use crate::types::Rank;

/// Before a rank makes its stream wait, other ranks that have no known stream, and seem to have made none yet, get this long to make one.
const SOON: Duration = Duration::from_millis(500);
/// How long a join waits for calls that, as far as is known, its own thread would have to make. Another thread may make them meanwhile.
const GRACE: Duration = Duration::from_millis(500);
/// An operation whose inputs' streams wait for other operations is put off until all work of those is on streams, but at most for this long.
const HOLD: Duration = Duration::from_millis(500);
/// How long an input may take to come if a stream that waits for the input's own operation may hold it up.
const PATIENCE: Duration = Duration::from_secs(1);

/// The error for a join that came before all ranks had called, and by which an operation cannot go on.
fn broken(what: &str) -> Error {
    let rule = "let all ranks of a process call an operation before any of them joins a stream with it, or set \
                CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment, so that streams need not share hardware queues";
    Error::invalid("join", format!("{what}; {rule}"))
}

fn behind(waiting: Rank, held: Rank) -> Error {
    broken(&format!(
        "rank {waiting}'s stream waits for an operation that rank {held} had not called, and holds up the stream of rank {held}'s \
         input, as both share a hardware queue of their device: neither would go on"
    ))
}

impl Binding {
    /// The streams of other ranks of this process that wait, or are about to wait, for operations that this rank has not called yet. With each stream:
    /// its rank, and whether the wait is on the stream already.
    fn early(&self) -> impl Iterator<Item = (Rank, DeviceStream, bool)> {
        let number = self.ours.next_call();
        let others = self.all.iter().enumerate();
        let others = others.filter_map(|(rank, device)| Some((rank, device.as_ref()?)));
        let others = others.filter(|(_, device)| !Arc::ptr_eq(device, &self.ours));
        others.flat_map(move |(rank, device)| {
            device.inputs.joined_from(number).into_iter().map(move |(stream, is_put)| (rank, stream, is_put))
        })
    }

    /// Notes that all of these ranks' work for an operation is on their streams (or, with one launch for all ranks, on rank 0's), and wakes the ranks
    /// whose next operation [`may_begin`](DeviceOp::may_begin) has put off.
    pub(super) fn has_put<'a>(&self, number: u64, ranks: impl IntoIterator<Item = &'a Arc<PeerDevice>>) {
        for device in ranks {
            device.has_put_over(number);
            device.inputs.ended.fetch_max(number + 1, Ordering::SeqCst);
        }
        for device in self.all.iter().flatten() {
            device.inputs.wake(&device.commands);
        }
    }

    /// Checks a call of this rank, whose buffers are on these streams, before the call puts anything there.
    ///
    /// # Errors
    /// One of the streams shares a hardware queue with a stream of another rank that already waits for this call.
    pub(crate) fn find_held_up(&self, streams: &[DeviceStream], us: Rank) -> Result<(), Error> {
        let is_behind =
            |waiting: &DeviceStream| streams.iter().any(|stream| waiting.pair(stream) == Pair::Together);
        match self.early().find(|(_, waiting, is_put)| *is_put && is_behind(waiting)) {
            Some((rank, ..)) => Err(behind(rank, us)),
            None => Ok(()),
        }
    }
}

/// The threads whose joins wait on the host for calls of other ranks, each with the operation that it joins.
static WAITING: Mutex<Vec<(ThreadId, Arc<DeviceOp>)>> = Mutex::new(Vec::new());

/// While this exists, its thread waits in a join, and so makes no calls for other ranks.
pub(crate) struct Blocked(ThreadId);

impl Blocked {
    pub(crate) fn on(operation: &Arc<DeviceOp>) -> Blocked {
        let thread = std::thread::current().id();
        WAITING.lock().push((thread, operation.clone()));
        Blocked(thread)
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let mut waiting = WAITING.lock();
        let at = waiting.iter().rposition(|(thread, _)| *thread == self.0);
        let gone = at.map(|at| waiting.swap_remove(at));
        drop(waiting);
        drop(gone);
    }
}

/// Whether, as far as is known, the rank of `device` cannot call before this thread goes on: the rank's last call (or, before its first call, its
/// binding) was made on this thread, or on a thread that waits in a join for the call of a rank of which the same is true.
fn leads_here(device: &PeerDevice) -> bool {
    let (here, waiting) = (std::thread::current().id(), WAITING.lock().clone());
    let (mut seen, mut to_see) = (Vec::new(), vec![device.inputs.thread()]);
    while let Some(thread) = to_see.pop() {
        if thread == here {
            return true;
        }
        if !seen.contains(&thread) {
            seen.push(thread);
            let theirs = waiting.iter().filter(|(other, _)| *other == thread);
            to_see.extend(theirs.flat_map(|(_, operation)| {
                operation.uncalled().map(|(_, device)| device.inputs.thread()).collect::<Vec<_>>()
            }));
        }
    }
    false
}

impl Joined for DeviceOp {
    fn is_to_come(&self) -> bool {
        !self.is_enqueued() && !self.state.lock().failed
    }

    fn tell(&self, whom: &Arc<Commands>) {
        self.binding.ours.inputs.tell(whom);
    }
}

impl DeviceOp {
    /// Called when the operation is about to be submitted and the points of its inputs on its streams are recorded: notes these streams and this
    /// thread. If a stream of another rank waits for this operation or a later one, may hold up the inputs, and still waits after [`PATIENCE`] while
    /// the inputs have not come, calls `fail`. `us` is this rank, and `fail` ends the communicator.
    pub(crate) fn watch_inputs(self: &Arc<Self>, us: Rank, fail: impl FnOnce(Error) + Send + 'static) {
        self.binding.ours.inputs.called(&self.streams);
        let is_apart =
            |waiting: &DeviceStream| self.streams.iter().all(|stream| waiting.pair(stream) == Pair::Apart);
        let Some((rank, waiting, _)) = self.binding.early().find(|(_, waiting, _)| !is_apart(waiting)) else {
            return;
        };
        let (operation, called) = (Arc::downgrade(self), Instant::now());
        later(PATIENCE, move || {
            // `settle` has all deferred jobs run at once. Then it is too early to know that the operation cannot go on, and nothing is reported.
            let is_early = called.elapsed() < PATIENCE;
            let Some(operation) = operation.upgrade().filter(|_| !is_early) else { return };
            if waiting.is_waiting() && !operation.has_come_to_call() {
                fail(behind(rank, us));
            }
        });
    }

    /// Whether the rank's stream may be made to wait for this operation's inputs now. If a stream shares a hardware queue with that wait, what is put on it
    /// later is stuck behind the wait: work of earlier operations, or the input of another rank. So two sorts of work must be on streams first. One is
    /// all work of the operations, of any communicator, for which the inputs' streams waited at the call. The other matters only where another rank's
    /// stream waits for the end of an earlier operation and may hold up the inputs: it is that rank's work for the earlier operation. After `false`,
    /// whoever drives this rank is woken when more of this work is on a stream.
    pub(crate) fn may_begin(&self) -> bool {
        if self.has_begun.load(Ordering::Acquire) {
            return true;
        }
        if !self.inputs_may_be_awaited() {
            return false;
        }
        if !self.is_behind_joins() {
            return true;
        }
        self.binding.ours.inputs.puts_off();
        !self.is_behind_joins()
    }

    /// Whether the operations for which the inputs' streams waited at the call have put all their work on streams, or this operation has been put off
    /// for [`HOLD`]: the rank whose work is missing may itself wait for what this rank does next. After `false`, whoever drives this rank is woken when
    /// more of that work is on a stream, and also asks now and then ([`is_held_back`](Self::is_held_back)).
    pub(crate) fn inputs_may_be_awaited(&self) -> bool {
        if self.behind.is_empty() {
            return true;
        }
        let ours = &self.binding.ours;
        let is_behind = self.behind().is_some_and(|operation| {
            operation.tell(&ours.commands);
            self.behind().is_some() && self.held_since.get_or_init(Instant::now).elapsed() < HOLD
        });
        ours.inputs.holds_back(self.number(), is_behind);
        !is_behind
    }

    /// Whether the rank's stream is not to wait for this operation's inputs yet.
    pub(crate) fn is_held_back(&self) -> bool {
        self.binding.ours.inputs.is_held_back(self.number())
    }

    /// Whether the rank's stream is not to wait for this operation's inputs yet, and nothing else is missing: all ranks are in this process, and have
    /// called.
    pub(super) fn waits_for_its_inputs_alone(&self) -> bool {
        self.is_held_back() && self.binding.far.is_none() && self.uncalled().next().is_none()
    }

    /// The other ranks of this process whose streams are not to wait for their inputs of this operation yet.
    pub(super) fn held_back(&self) -> impl Iterator<Item = Rank> {
        let others =
            self.binding.all.iter().flatten().filter(|device| !Arc::ptr_eq(device, &self.binding.ours));
        others.filter(|device| device.inputs.is_held_back(self.number())).map(|device| device.rank())
    }

    /// An operation for which the inputs' streams waited at the call, if some of its work is still on no stream.
    fn behind(&self) -> Option<Arc<dyn Joined>> {
        self.behind.iter().filter_map(Weak::upgrade).find(|operation| operation.is_to_come())
    }

    fn is_behind_joins(&self) -> bool {
        let others = self.binding.all.iter().flatten();
        others.filter(|device| !Arc::ptr_eq(device, &self.binding.ours)).any(|device| {
            let ended = device.inputs.ended.load(Ordering::SeqCst);
            let joined = device.inputs.joined.lock();
            let early = joined.iter().filter(|joined| (ended..self.number()).contains(&joined.number));
            let mut early = early.filter_map(|joined| joined.line.upgrade()).map(DeviceStream);
            early.any(|waiting| self.streams.iter().any(|stream| waiting.pair(stream) != Pair::Apart))
        })
    }

    /// The ranks of this process that have not called the operation.
    fn uncalled(&self) -> impl Iterator<Item = (Rank, &Arc<PeerDevice>)> {
        let all = self.binding.all.iter().enumerate();
        let here = all.filter_map(|(rank, device)| Some((rank, device.as_ref()?)));
        here.filter(|(_, device)| device.next_call() <= self.number())
    }

    /// Whether `stream` and the buffers' streams may wait for the operation before all ranks of the process have called it: as far as can be found out,
    /// they do not hold up the streams on which the other ranks make their inputs. Where that stays uncertain, the answer is also `true` if waiting
    /// for a rank's call would be in vain. Asks the device about streams of which it is not known whether they share a queue. `waited`:
    /// for how long the caller has waited for `true`.
    pub(crate) fn spares_inputs(&self, stream: &DeviceStream, waited: Duration) -> bool {
        let mut waits: Vec<&DeviceStream> = Vec::new();
        for stream in self.streams.iter().chain([stream]) {
            if !waits.contains(&stream) {
                waits.push(stream);
            }
        }
        let others: Vec<_> = self.uncalled().map(|(_, device)| device).collect();
        let new = others.iter().filter(|device| device.inputs.used().is_empty()).count();
        others.iter().all(|device| {
            // A stream that already waits for a call of that rank does no further harm if it waits for this operation, too.
            let ours = self.binding.ours.inputs.joined_from(device.next_call());
            let waits_already = |stream: &DeviceStream| {
                ours.iter().any(|(waiting, is_put)| *is_put && waiting == stream) && stream.is_waiting()
            };
            let waits = waits.iter().filter(|stream| stream.shares_device(&device.stream));
            let waits: Vec<_> = waits.copied().filter(|stream| !waits_already(stream)).collect();
            waits.is_empty() || self.is_spared(device, &waits, (new, waited))
        })
    }

    /// Whether the streams `waits` spare the inputs of one rank that has not called. `new`: how many such ranks have no known stream that still exists.
    fn is_spared(
        &self,
        device: &PeerDevice,
        waits: &[&DeviceStream],
        (new, waited): (usize, Duration),
    ) -> bool {
        let used = device.inputs.used();
        let is_new = used.is_empty();
        let candidates: Vec<DeviceStream> = match is_new {
            false => used.into_iter().filter(|stream| stream.shares_device(waits[0])).collect(),
            // Any caller's stream of the device may be the one that the rank will use.
            true => waits[0].callers_beside().into_iter().filter(|stream| !waits.contains(&stream)).collect(),
        };
        // Whether waiting for the rank's call would be in vain, as far as is known. If the caller then does not wait and so holds up the rank's input,
        // the rank's call finds that out.
        let is_blocked = || leads_here(device);
        if is_new && candidates.len() < new && waited < SOON && !is_blocked() {
            return false;
        }
        waits.iter().all(|waiting| {
            let unknown = candidates.iter().filter(|stream| waiting.pair(stream) == Pair::Unknown);
            let unknown: Vec<DeviceStream> = unknown.cloned().collect();
            if !unknown.is_empty() {
                self.binding.ours.learn(waiting, &unknown);
            }
            let pairs: Vec<Pair> = candidates.iter().map(|stream| waiting.pair(stream)).collect();
            match (pairs.contains(&Pair::Together), pairs.contains(&Pair::Unknown)) {
                (false, false) => true,
                (true, _) if !is_new => false,
                _ => is_blocked(),
            }
        })
    }

    /// Whether some rank may need copies between host and device before it calls: one that shares this device, has not called the operation, and
    /// made its last call on another thread.
    pub(crate) fn needs_copies(&self) -> bool {
        let here = std::thread::current().id();
        self.uncalled()
            .any(|(_, device)| device.stream.shares_device(self.stream()) && device.inputs.thread() != here)
    }

    /// Notes that this stream waits for the operation (`is_put`), or is about to wait, while not all of the operation's work is on streams.
    pub(crate) fn note_join(self: &Arc<Self>, stream: &DeviceStream, is_put: bool) {
        let us = Arc::downgrade(self) as Weak<dyn Joined>;
        stream.0.standing.lock().joins(&[us]);
        self.binding.ours.inputs.joins(stream, self.number(), is_put);
    }

    /// The error for a join that has waited this long, if it cannot end: as far as is known, a call that it waits for would be made by this thread, or by
    /// a thread that waits for this one.
    pub(crate) fn waits_for_itself(&self, us: Rank, waited: Duration) -> Option<Error> {
        if waited < GRACE {
            return None;
        }
        let rank = self.uncalled().find(|(_, device)| leads_here(device));
        rank.map(|(rank, _)| {
            broken(&format!(
                "rank {us} waits on the host for rank {rank}'s call, as a stream that waited could hold up what that call needs, but the \
                 thread on which rank {rank} was last called is this waiting thread, or waits for it"
            ))
        })
    }
}
