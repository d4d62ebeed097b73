//! Operations that the ranks' devices run.
//!
//! The plans, the machines and the order of messages are those of the host; what differs is that a step's work is *put on
//! the rank's stream* where a host would do it at once, and that a link lends device memory ([`crate::device::links::peer`]). An
//! operation is over on the host when all is on the stream, and over for good when the stream has come there.

use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

use parking_lot::Mutex;

use super::chores::Busy;
use super::links::ipc::{Far, FarRx, FarTx};
use super::links::peer::{PeerDevice, PeerRx, PeerTx};
use super::stream::{DeviceEvent, DeviceStream};
use super::whole::{BoundWhole, MessagePath, Whole};
use crate::error::Error;
use crate::link::waits::{Wait, kept};
use crate::link::{LinkRx, LinkTx, Opener, Place};
use crate::mem::{Fate, Verdict, Witness};
use crate::trace::log::LOG;
use crate::types::Rank;

/// Bytes of a slice: pipelining on a device is the device's, so chunks are not cut but to keep a frame's length in 32
/// bits.
const SLICE: usize = 1 << 30;
/// Bytes that one frame can lend.
const FRAME: usize = u32::MAX as usize;

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
    /// Where the streams of this process were filled to when all was over.
    last: Mutex<Option<Vec<DeviceEvent>>>,
    /// What messages go by that a library moves: made with the first.
    pub(crate) message_path: Mutex<Option<Arc<MessagePath>>>,
    _open: Busy,
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
        let (last, message_path) = (Mutex::default(), Mutex::default());
        Binding { ours, all, reaches, far, others, whole, last, message_path, _open: Busy::while_open() }
    }

    /// Whether the streams of this process have come to where they were filled when this was first asked: no rank puts
    /// more of this communicator on them.
    pub(crate) fn is_quiet(&self) -> Result<bool, Error> {
        let mut last = self.last.lock();
        let last = match &mut *last {
            Some(last) => last,
            none => {
                let devices = self.all.iter().flatten();
                let points = devices.map(|device| device.points()).collect::<Result<Vec<_>, _>>()?;
                none.insert(points.concat())
            }
        };
        last.iter().try_fold(true, |quiet, event| Ok(event.is_complete()? && quiet))
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
    /// The rank's stream is to wait for one that waits for another collective, and way was made for it.
    is_in_a_chain: bool,
    /// The library that takes it whole, if one does.
    taken_by: Option<Arc<dyn Whole>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Its streams are waited for.
    has_begun: bool,
    /// Behind all of the operation, once all of it is on the stream.
    end: Option<DeviceEvent>,
    /// A stream waits for the word that says that it is over.
    is_awaited: bool,
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

impl DeviceOp {
    /// An operation on buffers in the order of these streams, to start after what is on them now.
    pub(crate) fn new(
        binding: Arc<Binding>,
        streams: Vec<DeviceStream>,
        outputs: Vec<Arc<Fate>>,
        taken_by: Option<Arc<dyn Whole>>,
    ) -> Result<DeviceOp, Error> {
        let after = streams.iter().map(DeviceStream::point).collect::<Result<_, _>>()?;
        // Where no way can be made, another communicator's collective may have to wait for this one's deadline.
        let ours = &binding.ours;
        let is_in_a_chain =
            streams.iter().any(DeviceStream::is_waiting) && ours.make_way([&ours.stream].into_iter());
        let (number, state) = (OnceLock::new(), Mutex::default());
        Ok(DeviceOp { binding, number, after, streams, outputs, is_in_a_chain, taken_by, state })
    }

    /// It is submitted, as this operation of the communicator.
    pub(crate) fn submitted(&self, number: u64) {
        let _ = self.number.set(number);
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

    /// It is this operation's turn: what is put on the stream from now on is its own. Each of its parts says so, and the first
    /// counts.
    pub(crate) fn begin(&self) -> Result<(), Error> {
        if std::mem::replace(&mut self.state.lock().has_begun, true) {
            return Ok(());
        }
        self.binding.ours.begins(self.number(), self.after.clone());
        let mut after = self.after.iter().filter(|_| kept(Wait::After));
        let ordered = after.try_for_each(|event| self.stream().wait_event(event));
        if self.is_in_a_chain {
            self.stream().waits_now();
        }
        ordered
    }

    /// All of it is on the stream. Returns the end there.
    pub(crate) fn enqueued(&self) -> Result<DeviceEvent, Error> {
        self.binding.ours.take_failure()?;
        let end = self.stream().point()?;
        let mut state = self.state.lock();
        state.end = Some(end.clone());
        if state.is_awaited {
            self.binding.ours.signal(self.number())?;
        }
        Ok(end)
    }

    /// Whether all of it is on the stream.
    pub(crate) fn is_enqueued(&self) -> bool {
        self.state.lock().end.is_some()
    }

    /// Whether the stream has come to its end.
    pub(crate) fn is_over(&self) -> Result<bool, Error> {
        let state = self.state.lock();
        let over = !kept(Wait::End) || state.end.as_ref().map_or(Ok(true), DeviceEvent::is_complete)?;
        if let Some(library) = &self.taken_by {
            // What has failed there may never come to its end.
            library.check()?;
        }
        if over {
            self.binding.ours.ended(self.number());
            if state.is_awaited {
                // The stream was to say so, behind the end. Where streams share the device's queues, one of those that wait for
                // its word may stand before it.
                self.binding.ours.show(self.number());
            }
            self.check()?;
            if let Some(verdict) = &state.verdict {
                verdict.settle(Ok(()));
            }
        }
        Ok(over)
    }

    /// Whether what has come to its end did so in order.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.binding.far.as_ref().map_or(Ok(()), |far| far.check())
    }

    /// Whether its own inputs are there.
    pub(crate) fn has_inputs(&self) -> bool {
        self.after.iter().all(|event| event.is_complete().unwrap_or(true))
    }

    /// The ranks whose inputs are not there, though they have called.
    pub(crate) fn late(&self) -> Vec<Rank> {
        let is_late = |device: &Arc<PeerDevice>| device.is_late(self.number());
        let all = self.binding.all.iter().enumerate();
        all.filter_map(|(rank, device)| device.as_ref().is_some_and(is_late).then_some(rank)).collect()
    }

    /// Calls `then` when the stream has come to its end, or will not.
    pub(crate) fn watch(&self, then: impl FnOnce() + Send + 'static) {
        let end = self.state.lock().end.clone();
        if let Some(end) = end {
            end.then("run a collective", Box::new(|_| then()));
        }
    }

    /// Whether the rank's own stream is one of those that `join` makes wait.
    pub(crate) fn is_on(&self, stream: &DeviceStream) -> bool {
        self.streams.iter().chain([stream]).any(|stream| stream == self.stream())
    }

    /// Sees to it that a stream, and those of the buffers, may wait for what is not on the rank's stream yet, and do not keep it
    /// from getting there. `false`: they might. Else to be followed by `waits_now`.
    pub(crate) fn make_way(&self, stream: &DeviceStream) -> bool {
        self.binding.ours.make_way(self.streams.iter().chain([stream]))
    }

    /// They have been made to wait, or will not be.
    pub(crate) fn waits_now(&self, stream: &DeviceStream) {
        self.streams.iter().chain([stream]).for_each(DeviceStream::waits_now);
    }

    /// Makes a stream, and those of the buffers, wait for the operation's end. `false`: it was given up, and
    /// nothing waits.
    pub(crate) fn join(&self, stream: &DeviceStream) -> Result<bool, Error> {
        let mut state = self.state.lock();
        if state.failed {
            return Ok(false);
        }
        let witness = |far: &Arc<Far>| Arc::downgrade(far) as Weak<dyn Witness>;
        let library = |whole: &Arc<dyn Whole>| Arc::downgrade(whole) as Weak<dyn Witness>;
        let far = || self.binding.far.as_ref().map(witness);
        let verdict = || Arc::new(Verdict::new(self.taken_by.as_ref().map(library).or_else(far)));
        state.verdict.get_or_insert_with(verdict);
        let mut all = self.streams.iter().chain([stream]);
        if let Some(end) = &state.end {
            return all.try_for_each(|stream| stream.wait_event(end)).map(|()| true);
        }
        // It is not on our stream yet, so there is nothing to wait for but what the stream will say when it is.
        state.is_awaited = true;
        all.try_for_each(|stream| self.binding.ours.await_signal(stream, self.number())).map(|()| true)
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

    /// It has failed: the buffers' streams wait for what is still on any rank's stream, as that may touch them. No rank
    /// puts more there. With ranks in other processes, and where a library takes operations whole, all of that is over, or the
    /// buffers are kept ([`Binding::is_quiet`]): what is on those streams may not come to its end.
    fn give_up(&self, cause: &Error) -> Result<(), Error> {
        let is_over = self.binding.far.is_some() || self.binding.whole.is_some();
        let ordered = if is_over { Ok(()) } else { self.order_after_all() };
        // All at once: a thread may be about to make streams wait, or to hand the buffers on. And before any stream goes on.
        let mut state = self.state.lock();
        state.failed = true;
        if let Some(verdict) = &state.verdict {
            verdict.settle(Err(cause.clone()));
        }
        if std::mem::take(&mut state.is_awaited) {
            // Streams that were to wait for what will not come go on, behind all that has; also where all of it has, and does
            // not come to its end because those very streams hold it up.
            return ordered.and(self.binding.ours.release(self.number()));
        }
        ordered
    }

    /// Gives it up. Whether a device may still touch its buffers all the same.
    pub(crate) fn cannot_give_up(&self, cause: &Error) -> bool {
        // Where a rank went on without waiting for others, those may touch it yet.
        let given_up = self.give_up(cause).and_then(|()| self.check());
        let is_err = given_up.is_err();
        if let Err(error) = given_up {
            let what = "the buffers of a collective that failed on a device are not given back";
            LOG.line(move || tracing::warn!("{what}: {error}"));
        }
        is_err
    }

    /// It has failed, and its buffers are not to be given back by whoever has them.
    pub(crate) fn lose(&self) {
        self.state.lock().lost = true;
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.state.lock().lost
    }

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
