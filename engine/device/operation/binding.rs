//! [`Binding`]: a rank's device in a communicator, the devices of its peers, and how a communicator that has failed ends its work on them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;
use std::time::Duration;

use parking_lot::Mutex;

use super::DeviceOp;
use crate::device::chores::{Busy, later};
use crate::device::copied::DeviceCopies;
use crate::device::links::ipc::{Far, FarRx, FarTx};
use crate::device::links::peer::{PeerDevice, PeerRx, PeerTx};
use crate::device::stream::DeviceStream;
use crate::device::whole::{BoundWhole, MessagePath};
use crate::error::Error;
use crate::link::exit::IsOver;
use crate::link::waits::{Wait, kept};
use crate::link::{LinkRx, LinkTx, Opener, Place};
use crate::mem::Verdict;
use crate::trace::log::LOG;
use crate::types::Rank;

/// Bytes of a slice, on which a step works at once: many, as the device itself overlaps copies and folds. A frame's length must fit in 32 bits.
const SLICE: usize = 1 << 30;
/// The most bytes that one frame can lend.
const FRAME: usize = u32::MAX as usize;

/// How long the streams of a communicator that has failed may take to come to their ends. After that the callers' streams wait for them no
/// longer, and the rank's own stream no longer waits for other processes.
const LET_GO: Duration = Duration::from_millis(150);
/// How often [`Binding::leave`] looks whether commands are still being carried out.
const LOOK: Duration = Duration::from_millis(1);

/// Between processes a part of this many bytes or more is folded by one kernel of each rank, straight from all ranks' memory. A rank's host then
/// waits for the words of all ranks before it puts the kernel on its stream, which costs some tens of microseconds. Folding saves up to one pass
/// over the memory; at about this size that pass would take as long. Estimated, not measured.
const FOLDED_BETWEEN_PROCESSES: usize = 16 << 20;

/// The least number of bytes of a part that ranks in several processes fold at once.
fn folded_between_processes_from() -> usize {
    #[cfg(any(test, feature = "testing"))]
    if let Some(bytes) = crate::testing::faults::folded_between_processes_from() {
        return bytes;
    }
    FOLDED_BETWEEN_PROCESSES
}

/// Bytes of a slice, and the most bytes that a frame lends.
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
    /// By rank, with ours. `None`: the rank is in another process, or the devices do not reach each other.
    pub(crate) all: Vec<Option<Arc<PeerDevice>>>,
    /// Whether all devices touch each other's memory. If not, operations that no library takes whole are staged on the hosts.
    pub(crate) reaches: bool,
    /// The ranks in other processes, if there are any.
    pub(crate) far: Option<Arc<Far>>,
    /// For each other device that ranks of `all` use: the stream of one such rank.
    pub(crate) others: Vec<DeviceStream>,
    /// Rank 0's device, if all ranks are in this process and share a device: launches that fold for all ranks go to its stream.
    pub(super) leader: Option<Arc<PeerDevice>>,
    /// The library that takes operations whole, if there is one.
    pub(crate) whole: Option<BoundWhole>,
    /// Counts other libraries' buffers of which operations used copies.
    pub(crate) copied: Mutex<DeviceCopies>,
    /// How far the communicator has ended its work on the devices, once it has failed.
    pub(super) leaving: Leaving,
    /// The operation that was begun last.
    pub(super) current: Mutex<Weak<DeviceOp>>,
    /// What gives messages to the library, made for the first message that the library takes.
    pub(crate) message_path: Mutex<Option<Arc<MessagePath>>>,
    _open: Busy,
}

/// How far a communicator that has failed has ended its work on the devices.
#[derive(Default)]
pub(super) struct Leaving {
    /// The operations that were given up, and the verdicts on those of them that streams were made to wait for.
    pub(super) operations: Mutex<Vec<Weak<DeviceOp>>>,
    pub(super) verdicts: Mutex<Vec<Arc<Verdict>>>,
    /// Whether the first command that calls [`Binding::leave`] has been appended.
    pub(super) has_begun: AtomicBool,
    /// If the communicator [is ordered](Binding::is_ordered): set once the buffers' streams have been made to wait for all that any rank has
    /// put on its stream, or once that has failed, to the error.
    pub(super) ordered: OnceLock<Result<(), Error>>,
    /// Whether the streams of the ranks in this process have come to the end of what was put on them.
    pub(super) is_quiet: Arc<AtomicBool>,
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
        let is_one_device = far.is_none() && others.is_empty() && all.iter().all(Option::is_some);
        let leader = all.first().cloned().flatten().filter(|_| is_one_device);
        ours.is_among(&all, leader.as_deref());
        let (leaving, current, message_path) = (Leaving::default(), Mutex::default(), Mutex::default());
        let _open = Busy::while_open();
        let copied = Mutex::default();
        Binding {
            ours,
            all,
            reaches,
            far,
            others,
            leader,
            whole,
            copied,
            leaving,
            current,
            message_path,
            _open,
        }
    }

    /// The operation that was begun last: the one whose parts are run now.
    pub(crate) fn current(&self) -> Option<Arc<DeviceOp>> {
        self.current.lock().upgrade()
    }

    /// The communicator has failed: from here on no command of a rank of `all` is begun, except those that are always carried out.
    pub(crate) fn cut(&self) {
        if kept(Wait::Revoked) {
            self.all.iter().flatten().for_each(|device| device.commands.cut());
        }
    }

    /// Whether all ranks are in this process, and no library takes operations. Then all that is on the ranks' streams comes to its end, so that
    /// other streams can be made to wait for it when the communicator has failed. Otherwise a rank's stream may wait for ever for another process,
    /// or for a library, and the host watches the ranks' streams instead.
    fn is_ordered(&self) -> bool {
        self.far.is_none() && self.whole.is_none()
    }

    /// For a communicator that has failed: goes on with ending it, and says whether devices may still touch its memory out of the order of its
    /// buffers' streams. `since`: for how long the communicator has been ending.
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

    /// A command: if [ordered](Self::is_ordered), makes the buffers' streams wait for what any rank of this process has put on its stream. Then lets
    /// the streams go on that wait for this rank's operations, and has the ends of the ranks' streams watched.
    fn leave(self: &Arc<Self>) {
        // A rank may be putting work on its stream right now: this command looks again until none is. It was itself put with `put_always`,
        // so `is_idle` does not count it.
        let is_at_work = |device: &Arc<PeerDevice>| !device.commands.is_idle();
        if kept(Wait::MemoryLock) && self.all.iter().flatten().any(is_at_work) {
            let binding = self.clone();
            return later(LOOK, move || {
                let again = binding.clone();
                binding.ours.commands.put_always(move || again.leave());
                binding.ours.commands.hand_over();
            });
        }
        if self.far.as_ref().is_some_and(|far| far.may_be_written()) {
            // The callers' streams will go on although a peer may still write to memory that it was lent: the peer may overwrite what such a stream
            // writes to a buffer that was handed on. So these buffers' verdicts note that the streams went on too early.
            self.leaving.verdicts.lock().iter().for_each(|verdict| verdict.overtake());
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
            LOG.warn(move || tracing::warn!("{what}: {error}"));
        }
    }

    /// Sees to it that `is_quiet` is set once the streams of the ranks in this process have come to the end of what they hold now.
    fn watch_ends(self: &Arc<Self>) -> Result<(), Error> {
        let devices = self.all.iter().flatten();
        let points = devices.map(|device| device.points()).collect::<Result<Vec<_>, _>>()?.concat();
        let left = Arc::new(AtomicUsize::new(points.len()));
        for point in points {
            let (left, binding) = (left.clone(), self.clone());
            let reached = move |result: Result<(), Error>| {
                // If a stream has failed, nobody can tell when the streams are quiet.
                if result.is_ok() && left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    binding.leaving.is_quiet.store(true, Ordering::Release);
                    if binding.far_alone().is_none() {
                        drop(LetGo(std::mem::take(&mut *binding.leaving.verdicts.lock())));
                    }
                    binding.ours.commands.wake();
                }
            };
            point.then("end a communicator that has failed", Box::new(reached));
        }
        Ok(())
    }

    /// For a communicator that has failed: the operations that were given up, which own memory that peers may touch, and the memory of their
    /// buffers that were handed on and then dropped. To be dropped once nobody touches that memory ([`touched_until`](Self::touched_until)).
    /// `None`: all ranks are in this process, or a library takes operations.
    pub(crate) fn remains(&self) -> Option<Box<dyn Send>> {
        self.far_alone()?;
        let operations = self.leaving.operations.lock().iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        Some(Box::new((LetGo(std::mem::take(&mut *self.leaving.verdicts.lock())), operations)))
    }

    /// For a communicator that has failed: a function that says whether nobody touches its memory any more. That is so when the streams of the
    /// ranks in this process have come to their ends, and each rank in another process that was given memory has said by a word that its stream is
    /// past all of it, or that process has exited. `None` as for [`remains`](Self::remains): then nobody can tell.
    pub(crate) fn touched_until(&self) -> Option<IsOver> {
        let (far, is_quiet) = (self.far_alone()?.clone(), self.leaving.is_quiet.clone());
        Some(Box::new(move || {
            let is_quiet = is_quiet.load(Ordering::Acquire);
            if !is_quiet && far.has_let_go() {
                // A peer's stream may since have written smaller numbers over those that let this rank's stream go on.
                far.let_go();
            }
            is_quiet && !far.may_be_touched()
        }))
    }

    /// The ranks in other processes, if no library takes operations: then nothing but the ranks' streams touches memory on the devices.
    fn far_alone(&self) -> Option<&Arc<Far>> {
        self.far.as_ref().filter(|_| self.whole.is_none())
    }

    /// Whether a part of so many bytes is folded by one kernel, as far as that depends on where the ranks are. The answer is the same on all ranks.
    pub(crate) fn folds_at_once(&self, bytes: usize) -> bool {
        self.far.is_none() || self.far_alone().is_some() && bytes >= folded_between_processes_from()
    }

    /// Called when the ranks' streams do not come to their ends, or the driver does not answer: lets the streams that wait for them go on. This
    /// only writes memory, and does not call the driver.
    fn overtake(&self) {
        self.leaving.verdicts.lock().iter().for_each(|verdict| verdict.overtake());
        self.ours.release_all_now();
        if let Some(far) = &self.far {
            far.let_go();
        }
    }
}

/// Verdicts that hold memory of dropped buffers. To be dropped once no device touches that memory any more: the drop frees it.
struct LetGo(Vec<Arc<Verdict>>);

impl Drop for LetGo {
    fn drop(&mut self) {
        self.0.iter().for_each(|verdict| verdict.let_go());
    }
}

/// Opens links between the ranks' devices.
pub(crate) struct DeviceLinks {
    pub(crate) rings: Arc<dyn Opener>,
    pub(crate) binding: Arc<Binding>,
    pub(crate) rank: Rank,
    /// Wakes whoever drives this rank.
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
        let far = binding.far.clone().ok_or_else(|| nowhere(peer))?;
        let theirs = far.peers[peer].clone().ok_or_else(|| nowhere(peer))?;
        Ok(Box::new(FarRx::new(place, binding.ours.clone(), (far, theirs), waker)?))
    }
}
