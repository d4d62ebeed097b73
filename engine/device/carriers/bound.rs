//! What a communicator is bound to: its ranks' devices, a library that takes operations whole, or both.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use allstream_cuda_kernels::{Kind, kernel};

use super::lane::DeviceLane;
use crate::device::operation::{Binding, DeviceLinks};
use crate::device::whole::{BoundWhole, MessagePath};
use crate::device::workspace::Workspace;
use crate::device::{DeviceCopies, DevicePlace, DeviceStream};
use crate::error::Error;
use crate::exec::carrier::{Bound, Lane};
use crate::exec::{DEVICES, Endpoint, Operation, Port, Reduction, WINDOW};
use crate::link::exit::IsOver;
use crate::plan::Step;
use crate::trace::log::LOG;

/// The advice at the end of [`DeviceCopies::why`], for callers who want no copies.
const INSTEAD: &str = "memory that allstream allocates (DeviceBuf::zeroed, from_host) needs no copy";

/// What a communicator is bound to. The endpoint keeps this as its [`Bound`].
pub(crate) struct BoundTo {
    /// This rank's device and those of its peers. `None`: the communicator is bound to a library alone, which only tests do.
    pub(crate) binding: Option<Arc<Binding>>,
    /// The library that takes its operations whole, if there is one.
    pub(crate) whole: Option<BoundWhole>,
}

/// What this communicator is bound to, if it is bound.
pub(crate) fn bound_to(endpoint: &Endpoint) -> Option<&BoundTo> {
    let bound: &dyn Any = endpoint.bound()?;
    bound.downcast_ref()
}

/// Binds a communicator. From here on the library, if there is one, takes whole those operations that it supports; the ranks' devices run
/// the others on device buffers, if they reach each other's memory. All ranks call this between the same two of their operations.
pub(crate) fn bind(endpoint: &Endpoint, to: BoundTo) {
    let config = &endpoint.config;
    let lane = to.binding.as_ref().map(|binding| {
        let (rings, waker) = (config.opener.clone(), config.runtime.waker().clone());
        let links = DeviceLinks { rings, binding: binding.clone(), rank: config.rank, waker };
        let place = (config.rank, config.size());
        let port = Port::new(place, DEVICES, config.region.clone(), Arc::new(links));
        Box::new(DeviceLane::new(config.comm, binding, port)) as Box<dyn Lane>
    });
    endpoint.bind(Arc::new(to), lane);
}

impl BoundTo {
    /// What hands messages to the library. It is made for the first message, whose buffer's stream is `user`, and kept for all later ones.
    pub(crate) fn message_path(
        &self,
        endpoint: &Endpoint,
        user: &DeviceStream,
    ) -> Result<Arc<MessagePath>, Error> {
        let lacks = || Error::system("move a message on a device", "there is no device (a bug)");
        let (binding, bound) = self.binding.as_ref().zip(self.whole.as_ref()).ok_or_else(lacks)?;
        let order = bound.order.as_ref().ok_or_else(lacks)?;
        let mut path = binding.message_path.lock();
        if let Some(path) = &*path {
            return Ok(path.clone());
        }
        let stream = binding.ours.stream_for_messages(user)?;
        let (comm, waker) = (endpoint.config.name.clone(), endpoint.config.runtime.waker().clone());
        let (whole, order) = (bound.whole.clone(), order.clone());
        let commands = binding.ours.commands.clone();
        let path = path.insert(Arc::new(MessagePath { whole, order, commands, stream, comm, waker }));
        Ok(path.clone())
    }

    /// Asks [`Binding::is_touched`], which also goes on with ending the work on the devices. `false` if there are no devices.
    fn is_on_devices(&self, since: Duration) -> bool {
        self.binding.as_ref().is_some_and(|binding| binding.is_touched(since))
    }
}

impl Bound for BoundTo {
    fn has_library(&self) -> bool {
        self.whole.is_some()
    }

    fn abort(&self) {
        if let Some(binding) = &self.binding {
            binding.cut();
        }
        if let Some(bound) = &self.whole {
            bound.whole.abort();
        }
    }

    fn is_library_at_work(&self, since: Duration) -> bool {
        let Some(bound) = &self.whole else { return false };
        self.is_on_devices(since) | !bound.whole.is_quiet()
    }

    fn is_touched(&self, lane: Option<&mut (dyn Lane + 'static)>, since: Duration) -> bool {
        // Asked first: once the streams of this process are known to be quiet, this rank lends nothing more, so the answers below stay valid.
        let is_on_devices = self.is_on_devices(since);
        let Some(far) = self.binding.as_ref().and_then(|binding| binding.far.as_ref()) else {
            return is_on_devices;
        };
        let is_elsewhere = lane.is_some_and(|lane| lane.port().is_read_elsewhere());
        // `is_elsewhere` comes from words that `let_go` itself writes. Once this rank has let go, only `PAST_END`, or a peer's exit, tells that the
        // peer is done.
        is_on_devices || is_elsewhere || far.has_let_go() && far.may_be_touched()
    }

    fn touched_until(&self) -> Option<IsOver> {
        self.binding.as_ref()?.touched_until()
    }

    fn remains(&self) -> Option<Box<dyn Send>> {
        self.binding.as_ref()?.remains()
    }

    fn leave(&self) {
        if let Some(far) = self.binding.as_ref().and_then(|binding| binding.far.as_ref()) {
            far.distrust();
            far.leave_open();
        }
    }
}

impl Binding {
    /// Lets the devices of other ranks touch this memory of this rank, or returns why they cannot. `None`: they can.
    pub(crate) fn cannot_lend(&self, place: &DevicePlace, bytes: usize) -> Result<Option<String>, Error> {
        if let Some(far) = &self.far
            && let Err(why) = far.share(&place.stream, place.address, bytes)?
        {
            return Ok(Some(format!(
                "ranks in other processes cannot read it where it lies: {why}; {INSTEAD}"
            )));
        }
        let refused = if place.foreign { place.lend_to(&self.others).err() } else { None };
        Ok(refused.map(|why| format!("{why}; {INSTEAD}")))
    }

    /// Counts of the buffers that were copied so far. `None`: no buffer was copied.
    pub(crate) fn device_copies(&self) -> Option<DeviceCopies> {
        let copies = self.copied.lock();
        (copies.buffers > 0).then(|| copies.clone())
    }

    /// Counts a buffer that is copied for this reason. Logs a reason that differs from the last.
    pub(crate) fn copies(&self, bytes: usize, why: String) {
        let mut copies = self.copied.lock();
        if copies.why != why {
            let text = why.clone();
            LOG.debug(move || {
                tracing::debug!(
                    "collectives work on copies of another library's memory, here of {bytes} bytes: {text}"
                );
            });
        }
        copies.buffers += 1;
        copies.bytes += bytes as u64;
        copies.why = why;
    }

    /// Gets what an operation will need of the driver: kernels, and the memory that its parts need beside the buffers. The thread that
    /// calls the operation does this before it submits the operation, and while it holds no lock. Later would be too late: the driver may
    /// wait for all that is on the device before it gives these, and by then a stream of the caller's may wait for the operation
    /// (`DeviceOp::join`), so that neither would go on.
    pub(crate) fn get_ready(&self, operation: &mut Operation) -> Result<Workspace, Error> {
        let stream = &self.ours.stream;
        let all = (0..).map_while(|i| operation.parts.get(i));
        let parts: Vec<usize> = all.map(|part| self.needs(operation, part)).collect();
        let workspace = Workspace::new(stream, parts.into_iter(), WINDOW)?;
        let &Reduction::Op(op) = &operation.reduction else { return Ok(workspace) };
        for part in operation.parts.all() {
            let scaled = part.factor(operation.scale, &operation.reduction).is_some();
            let combines = part.program.plan.steps.iter().any(Step::combines);
            let kinds = [
                Some(Kind::Copy),
                combines.then_some(Kind::FoldTwo(op)),
                combines.then_some(Kind::Fold(op)),
                scaled.then_some(Kind::Scale),
            ];
            stream.load(kinds.into_iter().flatten().filter_map(|kind| kernel(part.dtype, kind)))?;
        }
        Ok(workspace)
    }
}
