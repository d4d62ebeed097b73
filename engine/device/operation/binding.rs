//! [`Binding`]: a rank's device in a communicator, the devices of its peers, and how the operations of a communicator that has failed leave them.

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

/// Bytes of a slice: many, as the device itself overlaps copies and folds; but the length of a frame must fit in 32 bits.
const SLICE: usize = 1 << 30;
/// Bytes that one frame can lend.
const FRAME: usize = u32::MAX as usize;

/// How long the streams of a communicator that has failed may take to come to their ends. After that the caller's streams wait for them no
/// longer, and the rank's own streams no longer wait for other processes.
const LET_GO: Duration = Duration::from_millis(150);
/// How often [`Binding::leave`] looks whether commands are still being carried out.
const LOOK: Duration = Duration::from_millis(1);

/// Between processes a part of this many bytes or more is folded at once, straight from all ranks' memory. A rank's host then waits for the
/// words of all ranks before it puts the kernel on its stream, which costs some tens of microseconds. It saves up to one pass over the memory;
/// at about this size that pass would take as long. Estimated, not measured.
const FOLDED_BETWEEN_PROCESSES: usize = 16 << 20;

/// The least number of bytes of a part that ranks in several processes fold at once.
fn folded_between_processes_from() -> usize {
    #[cfg(any(test, feature = "testing"))]
    if let Some(bytes) = crate::testing::faults::folded_between_processes_from() {
        return bytes;
    }
    FOLDED_BETWEEN_PROCESSES
}

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
    /// By rank, with ours; `None` for a rank in another process or out of reach.
    pub(crate) all: Vec<Option<Arc<PeerDevice>>>,
    /// Whether all devices touch each other's memory. If not, operations that no library takes whole are staged.
    pub(crate) reaches: bool,
    /// The ranks in other processes, if there are any.
    pub(crate) far: Option<Arc<Far>>,
    /// A stream of each other device in this process.
    pub(crate) others: Vec<DeviceStream>,
    /// Rank 0's device, if all ranks are in this process and share a device: launches that fold for all ranks go to its stream.
    pub(super) leader: Option<Arc<PeerDevice>>,
    /// What takes operations whole, if anything does.
    pub(crate) whole: Option<BoundWhole>,
    /// Counts other libraries' buffers of which operations used copies.
    pub(crate) copied: Mutex<DeviceCopies>,
    /// How far its operations have left the devices, once it has failed.
    pub(super) leaving: Leaving,
    /// The operation that was begun last.
    pub(super) current: Mutex<Weak<DeviceOp>>,
    /// What moves the messages that a library takes, made with the first of them.
    pub(crate) message_path: Mutex<Option<Arc<MessagePath>>>,
    _open: Busy,
}

/// How the operations of a communicator that has failed leave the devices.
#[derive(Default)]
pub(super) struct Leaving {
    /// The operations that were given up, and the verdicts on those of them that streams were made to wait for.
    pub(super) operations: Mutex<Vec<Weak<DeviceOp>>>,
    pub(super) verdicts: Mutex<Vec<Arc<Verdict>>>,
    /// Whether the first command that calls [`Binding::leave`] has been appended.
    pub(super) has_begun: AtomicBool,
    /// If all ranks are in this process, and no library takes operations: set once the buffers' streams have been made to wait for all
    /// that any rank has put on its stream, or to the error of that.
    pub(super) ordered: OnceLock<Result<(), Error>>,
    /// Whether the ranks' streams in this process have come to the end of what was put on them.
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

    /// The operation that was begun last, whose parts are run.
    pub(crate) fn current(&self) -> Option<Arc<DeviceOp>> {
        self.current.lock().upgrade()
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

    /// A command: if [ordered](Self::is_ordered), makes the buffers' streams wait for what any rank of this process has put on its stream; lets
    /// streams go on that wait for operations of the communicator; and has the ends of the ranks' streams watched.
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
            // The callers' streams will go on although a peer may still write to memory that it was lent: so it may overwrite what such a stream
            // writes to a buffer that was handed on. The verdicts on these buffers tell of that.
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

    /// Sees to it that `is_quiet` is set once the ranks' streams in this process have come to the points up to which they are filled now.
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

    /// Of a communicator that has failed, whose ranks are in several processes: the operations that were given up, with memory of their own
    /// that peers may touch, and memory of their buffers that was handed on and dropped. To be dropped once nobody touches it
    /// ([`touched_until`](Self::touched_until)).
    pub(crate) fn remains(&self) -> Option<Box<dyn Send>> {
        self.far_alone()?;
        let operations = self.leaving.operations.lock().iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        Some(Box::new((LetGo(std::mem::take(&mut *self.leaving.verdicts.lock())), operations)))
    }

    /// Of a communicator that has failed, whose ranks are in several processes: says whether nobody touches its memory any more. That is so when
    /// the streams of this process have come to their ends, and each rank in another process has said by a word that its stream is past all that
    /// it was given, or that process has exited. `None`: nobody can tell.
    pub(crate) fn touched_until(&self) -> Option<IsOver> {
        let (far, is_quiet) = (self.far_alone()?.clone(), self.leaving.is_quiet.clone());
        Some(Box::new(move || {
            let is_quiet = is_quiet.load(Ordering::Acquire);
            if !is_quiet && far.has_let_go() {
                // A peer's stream may have written smaller numbers since, over those that let this rank's stream go on.
                far.let_go();
            }
            is_quiet && !far.may_be_touched()
        }))
    }

    /// The ranks in other processes, where nothing but the ranks' streams touches memory: no library does.
    fn far_alone(&self) -> Option<&Arc<Far>> {
        self.far.as_ref().filter(|_| self.whole.is_none())
    }

    /// Whether so many bytes are folded at once, as far as that depends on where the ranks are. The answer is the same on all ranks.
    pub(crate) fn folds_at_once(&self, bytes: usize) -> bool {
        self.far.is_none() || self.far_alone().is_some() && bytes >= folded_between_processes_from()
    }

    /// Called when the streams do not come to their ends, or the driver does not answer: lets what waits for them go on. Makes stores to
    /// memory, and no call of the driver's.
    fn overtake(&self) {
        self.leaving.verdicts.lock().iter().for_each(|verdict| verdict.overtake());
        self.ours.release_all_now();
        if let Some(far) = &self.far {
            far.let_go();
        }
    }
}

/// Verdicts that hold memory of dropped buffers. To be dropped once no device touches that memory any more: this frees it.
struct LetGo(Vec<Arc<Verdict>>);

impl Drop for LetGo {
    fn drop(&mut self) {
        self.0.iter().for_each(|verdict| verdict.let_go());
    }
}

/// Opens links between devices.
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
