//! Operations that the ranks' devices run.
//!
//! The plans, the machines and the order of messages are those of the host; what differs is that a step's work is *put on
//! the rank's stream* where a host would do it at once, and that a link lends device memory ([`crate::link::peer`]). An
//! operation is over on the host when all is on the stream, and over for good when the stream has come there.

use std::sync::Arc;

use parking_lot::Mutex;

use super::port::Opener;
use crate::error::Error;
use crate::link::ipc::{Far, FarRx, FarTx};
use crate::link::peer::{PeerDevice, PeerRx, PeerTx, Place};
use crate::link::{LinkRx, LinkTx};
use crate::mem::device::{DeviceEvent, DeviceStream, Finish};
use crate::types::Rank;

/// Bytes of a slice: pipelining on a device is the device's, so chunks are not cut but to keep a frame's length in 32
/// bits.
pub(super) const SLICE: usize = 1 << 30;

/// A rank's device in a communicator, and those of all its peers.
pub(crate) struct Binding {
    pub(crate) ours: Arc<PeerDevice>,
    /// By rank, ours too; none where a rank is in another process.
    pub(crate) all: Vec<Option<Arc<PeerDevice>>>,
    /// Those in other processes, if there are any.
    pub(crate) far: Option<Arc<Far>>,
    /// Where the streams of this process were filled to when all was over.
    last: Mutex<Option<Vec<DeviceEvent>>>,
}

impl Binding {
    pub(crate) fn new(
        ours: Arc<PeerDevice>,
        all: Vec<Option<Arc<PeerDevice>>>,
        far: Option<Arc<Far>>,
    ) -> Binding {
        Binding { ours, all, far, last: Mutex::default() }
    }

    /// Whether the streams of this process have come to where they were filled when this was first asked: no rank puts
    /// more of this communicator on them.
    pub(super) fn is_quiet(&self) -> Result<bool, Error> {
        let mut last = self.last.lock();
        let last = match &mut *last {
            Some(last) => last,
            none => {
                let devices = self.all.iter().flatten();
                none.insert(devices.map(|device| device.stream.record()).collect::<Result<_, _>>()?)
            }
        };
        last.iter().try_fold(true, |quiet, event| Ok(event.is_complete()? && quiet))
    }

    /// Whether what has come to its end did so in order.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.far.as_ref().map_or(Ok(()), |far| far.check())
    }
}

/// An operation that devices run.
pub(crate) struct DeviceOp {
    pub(crate) binding: Arc<Binding>,
    /// What the buffers' streams, and others, held at the call.
    after: Vec<DeviceEvent>,
    /// Of the buffers.
    streams: Vec<DeviceStream>,
    /// Behind all of the operation.
    end: Mutex<Option<DeviceEvent>>,
}

impl DeviceOp {
    /// An operation on buffers in the order of these streams, to start after what is on them now.
    pub(crate) fn new(binding: Arc<Binding>, streams: Vec<DeviceStream>) -> Result<DeviceOp, Error> {
        let after = streams.iter().map(DeviceStream::record).collect::<Result<_, _>>()?;
        Ok(DeviceOp { binding, after, streams, end: Mutex::default() })
    }

    /// Where its work goes.
    pub(super) fn stream(&self) -> &DeviceStream {
        &self.binding.ours.stream
    }

    /// It is this operation's turn: what is put on the stream from now on is its own.
    pub(super) fn begin(&self) -> Result<(), Error> {
        self.after.iter().try_for_each(|event| self.stream().wait_event(event))
    }

    /// All of it is on the stream.
    pub(super) fn filled(&self) -> Result<(), Error> {
        self.binding.ours.take_failure()?;
        *self.end.lock() = Some(self.stream().record()?);
        Ok(())
    }

    /// Calls `finish` when the stream has come to its end.
    pub(crate) fn ended(&self, finish: Finish) {
        let doing = "run a collective";
        match self.end.lock().take() {
            Some(end) => {
                let binding = self.binding.clone();
                end.then(doing, Box::new(move |result| finish(result.and_then(|()| binding.check()))));
            }
            None => finish(Err(Error::system(doing, "its end was not marked (a bug)"))),
        }
    }

    /// It has failed: the buffers' streams wait for what is still on any rank's stream, as that may touch them. No rank
    /// puts more there. With ranks in other processes all of that is over, or the buffers are kept ([`Binding::is_quiet`]).
    pub(super) fn give_up(&self) -> Result<(), Error> {
        if self.binding.far.is_some() {
            return Ok(());
        }
        for device in self.binding.all.iter().flatten() {
            let last = device.stream.record()?;
            // Ours too: memory of the machine's goes back in its order.
            self.streams.iter().chain([self.stream()]).try_for_each(|stream| stream.wait_event(&last))?;
        }
        Ok(())
    }
}

/// Opens links between devices.
pub(super) struct DeviceLinks {
    pub(super) rings: Arc<dyn Opener>,
    pub(super) binding: Arc<Binding>,
    pub(super) rank: Rank,
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
        let theirs = binding.far.as_ref().and_then(|far| far.peers[peer].clone());
        Ok(Box::new(FarRx::new(place, binding.ours.clone(), theirs.ok_or_else(|| nowhere(peer))?)?))
    }
}
