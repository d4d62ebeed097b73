//! Operations that the ranks' devices run.
//!
//! The plans, the machines and the order of messages are those of the host; what differs is that a step's work is *put on
//! the rank's stream* where a host would do it at once, and that a link lends device memory ([`crate::device::links::peer`]). An
//! operation is over when the stream has come to its end, which a word in memory says ([`Word::Over`]).
//!
//! What is put on a stream is put there by [`Commands`](crate::commands::Commands): no function here that a pass calls, or the end of a
//! communicator that has failed, calls the driver.

mod inputs;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;
use std::time::Duration;

use parking_lot::Mutex;

use super::chores::{Busy, later};
use super::links::ipc::{Far, FarRx, FarTx};
use super::links::peer::{PeerDevice, PeerRx, PeerTx};
use super::signal::Word;
use super::stream::{DeviceEvent, DeviceStream};
use super::whole::{BoundWhole, MessagePath, Whole};
use super::workspace::Workspace;
use crate::error::Error;
use crate::link::waits::{Wait, kept};
use crate::link::{LinkRx, LinkTx, Opener, Place};
use crate::mem::{Fate, Verdict, Witness};
use crate::trace::log::LOG;
use crate::types::Rank;
pub(crate) use inputs::{Blocked, Inputs};

/// Bytes of a slice: pipelining on a device is the device's, so chunks are not cut but to keep a frame's length in 32
/// bits.
const SLICE: usize = 1 << 30;
/// Bytes that one frame can lend.
const FRAME: usize = u32::MAX as usize;

/// How long the streams of a communicator that has failed may take to come to their ends. After that the caller's streams wait for them no
/// longer, and the rank's own streams no longer wait for other processes.
const LET_GO: Duration = Duration::from_millis(150);
/// How often [`Binding::leave`] looks whether commands are still being carried out.
const LOOK: Duration = Duration::from_millis(1);

/// Bytes of a slice, and of the longest frame.
pub(crate) fn limits() -> (usize, usize) {
    #[cfg(any(test, feature = "testing"))]
    if let Some(bytes) = crate::testing::faults::longest_frame() {
        return (bytes / 2, bytes);
    }
    (SLICE, FRAME)
}

/// A rank's device in a communicator, and those of all its peers.
pub(crate) struct Binding {
    pub(crate) ours: Arc<PeerDevice>,
    /// By rank, ours too; none where a rank is in another process, or out of reach.
    pub(crate) all: Vec<Option<Arc<PeerDevice>>>,
    /// All devices touch each other's memory. Else what no library takes whole is staged.
    pub(crate) reaches: bool,
    /// Those in other processes, if there are any.
    pub(crate) far: Option<Arc<Far>>,
    /// Streams of the other devices in this process: one of each.
    pub(crate) others: Vec<DeviceStream>,
    /// What takes operations whole, if anything does.
    pub(crate) whole: Option<BoundWhole>,
    /// How far its operations have left the devices, once it has failed.
    leaving: Leaving,
    /// What the operation that was begun last has for its parts.
    workspace: Mutex<Weak<Workspace>>,
    /// What messages go by that a library moves: made with the first.
    pub(crate) message_path: Mutex<Option<Arc<MessagePath>>>,
    _open: Busy,
}

/// How the operations of a communicator that has failed leave the devices.
#[derive(Default)]
struct Leaving {
    /// Those that were given up, and the verdicts on those that streams were made to wait for.
    operations: Mutex<Vec<Weak<DeviceOp>>>,
    verdicts: Mutex<Vec<Arc<Verdict>>>,
    /// The commands of [`Binding::leave`] are appended.
    has_begun: AtomicBool,
    /// With all ranks in this process, and no library: the buffers' streams wait for all that any rank has put on its stream.
    ordered: OnceLock<Result<(), Error>>,
    /// The streams of this process have come to the end of what was put on them.
    is_quiet: AtomicBool,
}

impl Binding {
    pub(crate) fn new(
        ours: Arc<PeerDevice>,
        (all, far): (Vec<Option<Arc<PeerDevice>>>, Option<Arc<Far>>),
        reaches: bool,
        whole: Option<BoundWhole>,
    ) -> Binding {
        let mut others: Vec<DeviceStream> = Vec::new();
        for device in all.iter().flatten() {
            let known = |stream: &DeviceStream| stream.device() == device.stream.device();
            if !known(&ours.stream) && !others.iter().any(known) {
                others.push(device.stream.clone());
            }
        }
        let (leaving, workspace, message_path) = (Leaving::default(), Mutex::default(), Mutex::default());
        let _open = Busy::while_open();
        Binding { ours, all, reaches, far, others, whole, leaving, workspace, message_path, _open }
    }

    /// What the parts of the operation that was begun last need beside its buffers.
    pub(crate) fn workspace(&self) -> Option<Arc<Workspace>> {
        self.workspace.lock().upgrade()
    }

    /// The communicator has failed: no rank of this process puts more of it on a stream, except what [`leave`](Self::leave) does.
    pub(crate) fn cut(&self) {
        if kept(Wait::Revoked) {
            self.all.iter().flatten().for_each(|device| device.commands.cut());
        }
    }

    /// Whether all ranks are in this process, and no library takes operations. Then all that is on streams comes to its end, so that streams
    /// can be made to wait for streams when the communicator has failed. Otherwise a stream may wait for ever for another process, or for a
    /// library, and the host watches the streams instead.
    fn is_ordered(&self) -> bool {
        self.far.is_none() && self.whole.is_none()
    }

    /// For a communicator that has failed: goes on with its end, and says whether devices may still touch its memory. `since`: for how long
    /// it has been ending.
    pub(crate) fn is_touched(self: &Arc<Self>, since: Duration) -> bool {
        if !self.leaving.has_begun.swap(true, Ordering::AcqRel) {
            let binding = self.clone();
            self.ours.commands.put_always(move || binding.leave());
        }
        let is_touched = match self.is_ordered() {
            true => !matches!(self.leaving.ordered.get(), Some(Ok(()))),
            false => !self.leaving.is_quiet.load(Ordering::Acquire),
        };
        if is_touched && since > LET_GO {
            self.overtake();
        }
        is_touched
    }

    /// A command: makes the buffers' streams wait for what any rank of this process has put on its stream, or watches those streams come
    /// to their ends; then lets streams go on that wait for operations of the communicator.
    fn leave(self: &Arc<Self>) {
        // A rank may be putting work on its stream right now: this command looks again until none is. It is itself one that is done always,
        // which `is_idle` does not count.
        let is_at_work = |device: &Arc<PeerDevice>| !device.commands.is_idle();
        if kept(Wait::MemoryLock) && self.all.iter().flatten().any(is_at_work) {
            let binding = self.clone();
            return later(LOOK, move || {
                let again = binding.clone();
                binding.ours.commands.put_always(move || again.leave());
                binding.ours.commands.hand_over();
            });
        }
        let operations = match self.is_ordered() {
            true => self.leaving.operations.lock().iter().filter_map(Weak::upgrade).collect(),
            false => Vec::new(),
        };
        let ordered =
            operations.iter().map(|operation| operation.order_after_all()).fold(Ok(()), Result::and);
        let released = ordered.and(self.ours.release_all());
        if self.is_ordered() {
            let _ = self.leaving.ordered.set(released.clone());
            self.ours.commands.wake();
        }
        for error in [released, self.watch_ends()].into_iter().filter_map(Result::err) {
            let what = "the buffers of collectives that failed on a device may not be given back";
            LOG.line(move || tracing::warn!("{what}: {error}"));
        }
    }

    /// Notes when all streams of this process have come to where they are filled to now.
    fn watch_ends(self: &Arc<Self>) -> Result<(), Error> {
        let devices = self.all.iter().flatten();
        let points = devices.map(|device| device.points()).collect::<Result<Vec<_>, _>>()?.concat();
        let left = Arc::new(AtomicUsize::new(points.len()));
        for point in points {
            let (left, binding) = (left.clone(), self.clone());
            let reached = move |result: Result<(), Error>| {
                // Where one has failed, nobody can tell when the streams are quiet.
                if result.is_ok() && left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    binding.leaving.is_quiet.store(true, Ordering::Release);
                    let verdicts = std::mem::take(&mut *binding.leaving.verdicts.lock());
                    verdicts.iter().for_each(|verdict| verdict.let_go());
                    binding.ours.commands.wake();
                }
            };
            point.then("end a communicator that has failed", Box::new(reached));
        }
        Ok(())
    }

    /// The streams do not come to their ends, or the driver does not answer: what waits for them goes on. Stores to memory, no call of the
    /// driver's.
    fn overtake(&self) {
        self.leaving.verdicts.lock().iter().for_each(|verdict| verdict.overtake());
        self.ours.release_all_now();
        if let Some(far) = &self.far {
            far.let_go();
        }
    }
}

/// An operation that devices run.
pub(crate) struct DeviceOp {
    pub(crate) binding: Arc<Binding>,
    /// Its number among the communicator's collectives.
    number: OnceLock<u64>,
    /// What the buffers' streams, and others, held at the call.
    after: Vec<DeviceEvent>,
    /// Of the buffers.
    streams: Vec<DeviceStream>,
    /// Of the buffers that it writes.
    outputs: Vec<Arc<Fate>>,
    /// A buffer's stream waits for another collective, and the rank's stream will wait for that stream: hardware queues were chosen so that
    /// this holds up nobody (`make_way`).
    is_in_a_chain: bool,
    /// The library that takes it whole, if one does.
    taken_by: Option<Arc<dyn Whole>>,
    /// What its parts need beside the buffers. The error for which there is none.
    workspace: Result<Arc<Workspace>, Error>,
    /// The command that begins it is appended.
    has_begun: AtomicBool,
    /// What the driver says has gone wrong with it on the stream.
    failure: OnceLock<Error>,
    state: Mutex<State>,
}

/// Nobody calls the driver with this locked.
#[derive(Default)]
struct State {
    /// Behind all of the operation, once all of it is on the stream.
    end: Option<DeviceEvent>,
    /// It was given up.
    failed: bool,
    /// Its buffers may be touched for longer than anybody waits.
    lost: bool,
    /// For buffers that are handed on before it is over: from `join` on.
    verdict: Option<Arc<Verdict>>,
}

impl Witness for Far {
    fn check(&self) -> Result<(), Error> {
        Far::check(self)
    }
}

impl Drop for DeviceOp {
    /// Memory of its buffers that was dropped early is free, if the operation has ended well.
    fn drop(&mut self) {
        if let Some(verdict) = self.state.get_mut().verdict.take().filter(|verdict| verdict.is_good()) {
            verdict.let_go();
        }
    }
}

impl DeviceOp {
    /// An operation on buffers in the order of these streams, to start after what is on them now.
    pub(crate) fn new(
        binding: Arc<Binding>,
        streams: Vec<DeviceStream>,
        outputs: Vec<Arc<Fate>>,
        taken_by: Option<Arc<dyn Whole>>,
        workspace: Result<Arc<Workspace>, Error>,
    ) -> Result<DeviceOp, Error> {
        let after = streams.iter().map(DeviceStream::point).collect::<Result<_, _>>()?;
        // Where no way can be made, another communicator's collective may have to wait for this one's deadline.
        let ours = &binding.ours;
        let is_in_a_chain =
            streams.iter().any(DeviceStream::is_waiting) && ours.make_way([&ours.stream].into_iter(), false);
        Ok(DeviceOp {
            binding,
            number: OnceLock::new(),
            after,
            streams,
            outputs,
            is_in_a_chain,
            taken_by,
            workspace,
            has_begun: AtomicBool::new(false),
            failure: OnceLock::new(),
            state: Mutex::default(),
        })
    }

    /// It is submitted, as this operation of the communicator.
    pub(crate) fn submitted(&self, number: u64) {
        let _ = self.number.set(number);
        self.binding.ours.called(number);
    }

    fn number(&self) -> u64 {
        self.number.get().copied().unwrap_or_default()
    }

    /// The library that takes it whole, if one does.
    pub(crate) fn taken_by(&self) -> Option<&Arc<dyn Whole>> {
        self.taken_by.as_ref()
    }

    /// Where its work goes.
    pub(crate) fn stream(&self) -> &DeviceStream {
        &self.binding.ours.stream
    }

    /// It is this operation's turn: what is put on the stream from now on is its own. The first of these calls counts.
    ///
    /// # Errors
    /// There is no memory for what it needs beside its buffers.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<(), Error> {
        if self.has_begun.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let workspace = self.workspace.as_ref().map_err(Error::clone)?;
        *self.binding.workspace.lock() = Arc::downgrade(workspace);
        if !kept(Wait::Memory) {
            workspace.release();
        }
        let operation = self.clone();
        self.binding.ours.commands.put(move || {
            let mut after = operation.after.iter().filter(|_| kept(Wait::After));
            let ordered = after.try_for_each(|event| operation.stream().wait_event(event));
            if operation.is_in_a_chain {
                operation.stream().waits_now();
            }
            ordered?;
            operation.binding.ours.begins(operation.number())
        });
        Ok(())
    }

    /// All of it has been handed to the commands: marks its end behind that.
    pub(crate) fn ends(self: &Arc<Self>) {
        let operation = self.clone();
        self.binding.ours.commands.put(move || operation.put_end().map(drop));
    }

    /// A command: all of it is on the stream. Returns the end there.
    pub(crate) fn put_end(&self) -> Result<DeviceEvent, Error> {
        let end = self.stream().point()?;
        self.binding.ours.ends(self.number())?;
        self.binding.has_put(self.number());
        self.state.lock().end = Some(end.clone());
        Ok(end)
    }

    /// Whether all of it is on the stream.
    pub(crate) fn is_enqueued(&self) -> bool {
        self.state.lock().end.is_some()
    }

    /// Whether the stream has come to its end. No call of the driver's.
    pub(crate) fn is_over(&self) -> Result<bool, Error> {
        let over = !kept(Wait::End) || self.binding.ours.has_come_to(Word::Over, self.number());
        if let Some(library) = &self.taken_by {
            // What has failed there may never come to its end.
            library.check()?;
        }
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        if over {
            self.check()?;
            let verdict = self.state.lock().verdict.clone();
            if let Some(verdict) = verdict {
                verdict.settle(Ok(()));
            }
            if let Ok(workspace) = &self.workspace {
                workspace.mark_past();
            }
        }
        Ok(over)
    }

    /// Whether what has come to its end did so in order.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.binding.far.as_ref().map_or(Ok(()), |far| far.check())
    }

    /// Whether its own inputs are there. No call of the driver's.
    pub(crate) fn has_inputs(&self) -> bool {
        self.binding.ours.has_come_to(Word::Begun, self.number())
    }

    /// Whether the driver has taken its first work. No call of the driver's.
    pub(crate) fn is_taken(&self) -> bool {
        self.binding.ours.has_put(self.number())
    }

    /// The ranks whose inputs are not there, though they have called.
    pub(crate) fn late(&self) -> Vec<Rank> {
        let is_late = |device: &Arc<PeerDevice>| device.is_late(self.number());
        let all = self.binding.all.iter().enumerate();
        all.filter_map(|(rank, device)| device.as_ref().is_some_and(is_late).then_some(rank)).collect()
    }

    /// Calls `then` when the stream has come to its end, or will not.
    pub(crate) fn watch(self: &Arc<Self>, then: impl FnOnce() + Send + 'static) {
        let operation = self.clone();
        self.binding.ours.commands.put(move || {
            // Set by the command before this one, which marks the end.
            let end = operation.state.lock().end.clone();
            let told = move |result: Result<(), Error>| {
                match result {
                    Ok(()) => operation.binding.ours.tell(Word::Over, operation.number()),
                    Err(error) => drop(operation.failure.set(error)),
                }
                then();
            };
            if let Some(end) = end {
                end.then("run a collective", Box::new(told));
            }
            Ok(())
        });
    }

    /// Whether the rank's own stream is one of those that `join` makes wait.
    pub(crate) fn is_on(&self, stream: &DeviceStream) -> bool {
        self.streams.iter().chain([stream]).any(|stream| stream == self.stream())
    }

    /// Sees to it that a stream, and those of the buffers, may wait for what is not on the rank's stream yet, and do not keep it
    /// from getting there. `false`: they might. Else to be followed by `waits_now`.
    pub(crate) fn make_way(&self, stream: &DeviceStream) -> bool {
        self.binding.ours.make_way(self.streams.iter().chain([stream]), self.needs_copies())
    }

    /// They have been made to wait, or will not be.
    pub(crate) fn waits_now(&self, stream: &DeviceStream) {
        self.streams.iter().chain([stream]).for_each(DeviceStream::waits_now);
    }

    /// Makes a stream, and those of the buffers, wait for the operation's end. `false`: it was given up, and
    /// nothing waits.
    pub(crate) fn join(&self, stream: &DeviceStream) -> Result<bool, Error> {
        let end = {
            let mut state = self.state.lock();
            if state.failed {
                return Ok(false);
            }
            let witness = |far: &Arc<Far>| Arc::downgrade(far) as Weak<dyn Witness>;
            let library = |whole: &Arc<dyn Whole>| Arc::downgrade(whole) as Weak<dyn Witness>;
            let far = || self.binding.far.as_ref().map(witness);
            let verdict = || Arc::new(Verdict::new(self.taken_by.as_ref().map(library).or_else(far)));
            state.verdict.get_or_insert_with(verdict);
            state.end.clone()
        };
        let mut all = self.streams.iter().chain([stream]);
        // Where it is not on our stream yet, there is nothing to wait for but the word that the stream will write when it is; or the host,
        // where it is given up meanwhile: then the wait is over as it begins.
        let wait = |stream: &DeviceStream| match &end {
            Some(end) => stream.wait_event(end),
            None => {
                self.note_join(stream, false);
                let awaited = self.binding.ours.await_end(stream, self.number());
                self.note_join(stream, awaited.is_ok());
                awaited
            }
        };
        all.try_for_each(wait).map(|()| true)
    }

    /// After `join`: its buffers are handed on, and depend on how it ends.
    ///
    /// # Errors
    /// The cause for which it has failed.
    pub(crate) fn hand_on(&self) -> Result<(), Error> {
        let Some(verdict) = self.state.lock().verdict.clone() else { return Ok(()) };
        self.outputs.iter().for_each(|output| output.depend_on(&verdict));
        verdict.ask()
    }

    /// It has failed, for this cause. Told before any stream goes on that waits for it.
    pub(crate) fn give_up(self: &Arc<Self>, cause: &Error) {
        let verdict = {
            let mut state = self.state.lock();
            if std::mem::replace(&mut state.failed, true) {
                return;
            }
            state.verdict.clone()
        };
        let leaving = &self.binding.leaving;
        if let Some(verdict) = verdict {
            verdict.settle(Err(cause.clone()));
            leaving.verdicts.lock().push(verdict);
        }
        leaving.operations.lock().push(Arc::downgrade(self));
        if leaving.has_begun.load(Ordering::Acquire) {
            // It was called meanwhile, and nothing of it is on a stream.
            let ours = self.binding.ours.clone();
            self.binding.ours.commands.put_always(move || drop(ours.release_all()));
        }
    }

    /// Gives it up. Whether a device may still touch its buffers all the same.
    pub(crate) fn cannot_give_up(self: &Arc<Self>, cause: &Error) -> bool {
        self.give_up(cause);
        // Where a rank went on without waiting for others, those may touch it yet.
        let checked = self.check();
        let is_err = checked.is_err();
        if let Err(error) = checked {
            let what = "the buffers of a collective that failed on a device are not given back";
            LOG.line(move || tracing::warn!("{what}: {error}"));
        }
        is_err || self.binding.leaving.ordered.get().is_some_and(Result::is_err)
    }

    /// It has failed, and its buffers are not to be given back by whoever has them.
    pub(crate) fn lose(&self) {
        self.state.lock().lost = true;
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.state.lock().lost
    }

    /// Makes the buffers' streams wait for what is still on the stream of any rank of this process, as that may touch them. No rank puts more
    /// there.
    fn order_after_all(&self) -> Result<(), Error> {
        for device in self.binding.all.iter().flatten().filter(|_| kept(Wait::GiveUp)) {
            let last = device.stream.point()?;
            // Ours too: memory of the machine's goes back in its order.
            let ours = [self.stream()].into_iter().filter(|_| kept(Wait::GiveUpOurs));
            self.streams.iter().chain(ours).try_for_each(|stream| stream.wait_event(&last))?;
        }
        Ok(())
    }
}

/// Opens links between devices.
pub(crate) struct DeviceLinks {
    pub(crate) rings: Arc<dyn Opener>,
    pub(crate) binding: Arc<Binding>,
    pub(crate) rank: Rank,
    /// Of who drives.
    pub(crate) waker: Waker,
}

impl DeviceLinks {
    fn place(&self, peer: Rank, receiving: bool) -> Result<Place, Error> {
        self.rings.device_place(peer, receiving)?.ok_or_else(|| nowhere(peer))
    }
}

fn nowhere(peer: Rank) -> Error {
    Error::system(format!("open a link to the device of rank {peer}"), "it is out of reach (a bug)")
}

impl Opener for DeviceLinks {
    fn open_tx(&self, peer: Rank, _channel: u8) -> Result<Box<dyn LinkTx>, Error> {
        let (place, binding) = (self.place(peer, false)?, &*self.binding);
        if binding.all[peer].is_some() {
            return Ok(Box::new(PeerTx::new(place, binding.ours.clone(), peer)?));
        }
        let far = binding.far.clone().ok_or_else(|| nowhere(peer))?;
        let theirs = far.peers[peer].clone().ok_or_else(|| nowhere(peer))?;
        Ok(Box::new(FarTx::new(place, binding.ours.clone(), far, theirs)?))
    }

    fn open_rx(&self, peer: Rank, _channel: u8) -> Result<Box<dyn LinkRx>, Error> {
        let (place, binding) = (self.place(peer, true)?, &*self.binding);
        if let Some(theirs) = &binding.all[peer] {
            return Ok(Box::new(PeerRx::new(place, binding.ours.clone(), theirs.clone(), self.rank)?));
        }
        let waker = self.waker.clone();
        let theirs = binding.far.as_ref().and_then(|far| far.peers[peer].clone());
        Ok(Box::new(FarRx::new(place, binding.ours.clone(), theirs.ok_or_else(|| nowhere(peer))?, waker)?))
    }
}
