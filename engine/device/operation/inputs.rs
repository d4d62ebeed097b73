//! The streams on which the ranks of a process have their inputs, and those that wait for an operation before all ranks have called it.
//!
//! Where ranks share a device, their callers' streams share its hardware queues. A stream that one rank has joined with an operation may hold
//! up the stream on which another rank's input is made, and that rank's call would come behind it: then neither goes on. So a
//! rank that joins before all have called first asks for this (`queues/pairs.rs`), and waits on the host for their calls if it is
//! so. Where that cannot be known beforehand, as a rank has not called yet or uses another stream, its call finds it, and the communicator ends at once
//! with an error that names the rule. It does so, too, where a join waits on the host for a call that only the waiting thread itself would make.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::ThreadId;
use std::time::Duration;

use parking_lot::Mutex;

use super::{Binding, DeviceOp};
use crate::device::chores::later;
use crate::device::links::peer::PeerDevice;
use crate::device::queues::Pair;
use crate::device::stream::DeviceStream;
use crate::error::Error;
use crate::types::Rank;

/// Ranks that have not called yet, and seem to have no stream, get so long to make one before another's stream waits.
const SOON: Duration = Duration::from_millis(500);
/// A join waits so long for calls that its own thread would have to make, as far as can be known. Another thread may take the rank over.
const GRACE: Duration = Duration::from_millis(500);
/// An input that may be behind a stream which waits for its operation gets so long to come.
const PATIENCE: Duration = Duration::from_secs(1);

/// The error for a join before all ranks have called.
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
    /// The ranks of this process whose streams wait for what this rank has not called yet, with those streams, and whether they wait already.
    fn early(&self) -> impl Iterator<Item = (Rank, DeviceStream, bool)> {
        let number = self.ours.next_call();
        let others = self.all.iter().enumerate();
        let others = others.filter_map(|(rank, device)| Some((rank, device.as_ref()?)));
        let others = others.filter(|(_, device)| !Arc::ptr_eq(device, &self.ours));
        others.flat_map(move |(rank, device)| {
            device.inputs.joined_from(number).into_iter().map(move |(stream, is_put)| (rank, stream, is_put))
        })
    }

    /// All of an operation is on the streams of these ranks, or of one of them for all.
    pub(super) fn has_put<'a>(&self, number: u64, ranks: impl IntoIterator<Item = &'a Arc<PeerDevice>>) {
        for device in ranks {
            device.has_put_over(number);
            device.inputs.ended.fetch_max(number + 1, Ordering::SeqCst);
        }
        for device in self.all.iter().flatten() {
            if device.inputs.is_put_off.swap(false, Ordering::SeqCst) {
                device.commands.wake();
            }
        }
    }

    /// A call of this rank's, on buffers of these streams, before anything of it is put there.
    ///
    /// # Errors
    /// One of them is held up by a stream that waits for this call.
    pub(crate) fn find_held_up(&self, streams: &[DeviceStream], us: Rank) -> Result<(), Error> {
        let is_behind =
            |waiting: &DeviceStream| streams.iter().any(|stream| waiting.pair(stream) == Pair::Together);
        match self.early().find(|(_, waiting, is_put)| *is_put && is_behind(waiting)) {
            Some((rank, ..)) => Err(behind(rank, us)),
            None => Ok(()),
        }
    }
}

/// Threads whose joins wait for calls of other ranks, and for which operation.
static WAITING: Mutex<Vec<(ThreadId, Arc<DeviceOp>)>> = Mutex::new(Vec::new());

/// As long as it is there, this thread makes no calls for other ranks.
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

/// Whether this rank was last called on this thread, or on one whose join waits for ranks of which that is so.
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

impl DeviceOp {
    /// It is about to be submitted, and its streams have been marked: notes them, and the thread. Whatever of it may be behind a stream
    /// that waits for it is looked after: if it does not come, the communicator ends.
    /// `us` is this rank, and `fail` ends the communicator.
    pub(crate) fn watch_inputs(self: &Arc<Self>, us: Rank, fail: impl FnOnce(Error) + Send + 'static) {
        self.binding.ours.inputs.called(&self.streams);
        let is_apart =
            |waiting: &DeviceStream| self.streams.iter().all(|stream| waiting.pair(stream) == Pair::Apart);
        let Some((rank, waiting, _)) = self.binding.early().find(|(_, waiting, _)| !is_apart(waiting)) else {
            return;
        };
        let operation = Arc::downgrade(self);
        later(PATIENCE, move || {
            let Some(operation) = operation.upgrade() else { return };
            if waiting.is_waiting() && !operation.has_come_to_call() {
                fail(behind(rank, us));
            }
        });
    }

    /// Whether the rank's stream may be made to wait for this operation's inputs now. They may be behind another rank's stream, which waits for
    /// the end of an earlier operation. As long as that end is not on a stream, it might get there behind this rank's wait, if the ranks' streams
    /// share a queue. Who drives the rank is woken when it is there.
    pub(crate) fn may_begin(&self) -> bool {
        if self.has_begun.load(Ordering::Acquire) || !self.is_behind_joins() {
            return true;
        }
        self.binding.ours.inputs.is_put_off.store(true, Ordering::SeqCst);
        !self.is_behind_joins()
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

    /// The ranks of this process that have not called it.
    fn uncalled(&self) -> impl Iterator<Item = (Rank, &Arc<PeerDevice>)> {
        let all = self.binding.all.iter().enumerate();
        let here = all.filter_map(|(rank, device)| Some((rank, device.as_ref()?)));
        here.filter(|(_, device)| device.next_call() <= self.number())
    }

    /// Whether `stream`, and those of the buffers, may wait for it before all ranks of the process have called: they are not seen to hold up
    /// what those have their inputs on. `waited`: for how long the caller has waited for this. Asks the device where it is not known.
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
            // What waits for a call of that rank's already may as well wait for this one.
            let ours = self.binding.ours.inputs.joined_from(device.next_call());
            let waits_already = |stream: &DeviceStream| {
                ours.iter().any(|(waiting, is_put)| *is_put && waiting == stream) && stream.is_waiting()
            };
            let waits = waits.iter().filter(|stream| stream.shares_device(&device.stream));
            let waits: Vec<_> = waits.copied().filter(|stream| !waits_already(stream)).collect();
            waits.is_empty() || self.is_spared(device, &waits, (new, waited))
        })
    }

    /// The same of one rank. `new`: so many ranks have not called at all.
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
            // Any stream that there is may be the one that it is going to use.
            true => waits[0].callers_beside().into_iter().filter(|stream| !waits.contains(&stream)).collect(),
        };
        // Its thread waits for this call, as far as can be known, so it does not call meanwhile; and its call finds what is wrong.
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

    /// Whether ranks that have not called it may need copies first, which must go on then.
    pub(crate) fn needs_copies(&self) -> bool {
        let here = std::thread::current().id();
        self.uncalled()
            .any(|(_, device)| device.stream.shares_device(self.stream()) && device.inputs.thread() != here)
    }

    /// This stream waits for it, or is about to, and it is not on the rank's stream.
    pub(crate) fn note_join(&self, stream: &DeviceStream, is_put: bool) {
        self.binding.ours.inputs.joins(stream, self.number(), is_put);
    }

    /// A join that has waited so long waits for a call that only a thread would make which waits itself: this one, or one that waits for
    /// this one in turn. The error for it.
    pub(crate) fn waits_for_itself(&self, us: Rank, waited: Duration) -> Option<Error> {
        if waited < GRACE {
            return None;
        }
        let rank = self.uncalled().find(|(_, device)| leads_here(device));
        rank.map(|(rank, _)| {
            broken(&format!(
                "rank {us} waits on the host for rank {rank}'s call, as a stream that waited could hold up what that call needs, and the \
                 thread that rank {rank} was last called on is the one that waits, or waits for it"
            ))
        })
    }
}
