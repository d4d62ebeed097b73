//! Operations that the ranks' devices run.
//!
//! The plans, the machines and the order of messages are those of the host; what differs is that a step's work is *put on
//! the rank's stream* where a host would do it at once, and that a link lends device memory ([`crate::link::peer`]). An
//! operation is over on the host when all is on the stream, and over for good when the stream has come there.

use std::sync::Arc;

use parking_lot::Mutex;

use super::port::Opener;
use crate::error::Error;
use crate::link::peer::{PeerDevice, PeerRx, PeerTx, Place};
use crate::link::waits::{Wait, kept};
use crate::link::{LinkRx, LinkTx};
use crate::mem::device::{DeviceEvent, DeviceStream, Finish};
use crate::types::Rank;

/// Bytes of a slice: pipelining on a device is the device's, so chunks are not cut but to keep a frame's length in 32
/// bits.
pub(super) const SLICE: usize = 1 << 30;

/// A rank's device in a communicator, and those of all its peers.
pub(crate) struct Binding {
    pub(crate) ours: Arc<PeerDevice>,
    /// By rank; ours too.
    pub(crate) all: Vec<Arc<PeerDevice>>,
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
        self.after.iter().filter(|_| kept(Wait::After)).try_for_each(|event| self.stream().wait_event(event))
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
            Some(end) if kept(Wait::End) => end.then(doing, finish),
            Some(_) => finish(Ok(())),
            None => finish(Err(Error::system(doing, "its end was not marked (a bug)"))),
        }
    }

    /// It has failed: the buffers' streams wait for what is still on any rank's stream, as that may touch them. No rank
    /// puts more there.
    pub(super) fn give_up(&self) -> Result<(), Error> {
        for device in self.binding.all.iter().filter(|_| kept(Wait::GiveUp)) {
            let last = device.stream.record()?;
            // Ours too: memory of the machine's goes back in its order.
            let ours = [self.stream()].into_iter().filter(|_| kept(Wait::GiveUpOurs));
            self.streams.iter().chain(ours).try_for_each(|stream| stream.wait_event(&last))?;
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
        let elsewhere = || {
            Error::system(
                format!("open a link to the device of rank {peer}"),
                "it is in another process (a bug)",
            )
        };
        self.rings.device_place(peer, receiving)?.ok_or_else(elsewhere)
    }
}

impl Opener for DeviceLinks {
    fn open_tx(&self, peer: Rank, _channel: u8) -> Result<Box<dyn LinkTx>, Error> {
        let place = self.place(peer, false)?;
        Ok(Box::new(PeerTx::new(place, self.binding.ours.clone(), peer)?))
    }

    fn open_rx(&self, peer: Rank, _channel: u8) -> Result<Box<dyn LinkRx>, Error> {
        let (place, theirs) = (self.place(peer, true)?, self.binding.all[peer].clone());
        Ok(Box::new(PeerRx::new(place, self.binding.ours.clone(), theirs, self.rank)?))
    }
}
