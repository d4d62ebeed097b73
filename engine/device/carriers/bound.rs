//! What a communicator is bound to: its ranks' devices, a library that takes operations whole, or both.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use allstream_cuda_kernels::{Kind, kernel};

use super::lane::DeviceLane;
use crate::device::DeviceStream;
use crate::device::operation::{Binding, DeviceLinks};
use crate::device::whole::{BoundWhole, MessagePath};
use crate::error::Error;
use crate::exec::carrier::{Bound, Lane};
use crate::exec::{DEVICES, Endpoint, Operation, Port, Reduction};
use crate::plan::Step;

/// How long the streams of a communicator that has failed may take to come to their ends. After that they are made to wait for no other
/// process any more.
const LET_GO: Duration = Duration::from_millis(150);

/// What a communicator is bound to, as the executor has it.
pub(crate) struct BoundTo {
    /// The ranks' devices.
    pub(crate) binding: Option<Arc<Binding>>,
    /// What takes its operations whole, if anything does.
    pub(crate) whole: Option<BoundWhole>,
}

/// What this communicator is bound to, if it is bound.
pub(crate) fn bound_to(endpoint: &Endpoint) -> Option<&BoundTo> {
    let bound: &dyn Any = endpoint.bound()?;
    bound.downcast_ref()
}

/// Binds a communicator: from here on devices run the operations on their buffers, and the library, if there is one, takes those operations
/// whole that it can. All ranks call this between the same two operations.
pub(crate) fn bind(endpoint: &Endpoint, to: BoundTo) {
    let config = &endpoint.config;
    let lane = to.binding.as_ref().map(|binding| {
        let (rings, waker) = (config.opener.clone(), config.runtime.waker().clone());
        let links = DeviceLinks { rings, binding: binding.clone(), rank: config.rank, waker };
        let place = (config.rank, endpoint.size());
        let port = Port::new(place, DEVICES, config.region.clone(), Arc::new(links));
        Box::new(DeviceLane::new(config.comm, binding, port)) as Box<dyn Lane>
    });
    endpoint.bind(Arc::new(to), lane);
}

impl BoundTo {
    /// What moves messages on this rank's device. It is made for the first message, whose buffer is used on the stream `user`, and kept.
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
        let path = path.insert(Arc::new(MessagePath { whole, order, stream, comm, waker }));
        Ok(path.clone())
    }

    /// Whether the streams of this process have come to the end of what this communicator put on them.
    fn is_quiet(&self) -> bool {
        self.binding.as_ref().is_none_or(|binding| binding.is_quiet().unwrap_or(false))
    }
}

impl Bound for BoundTo {
    fn has_library(&self) -> bool {
        self.whole.is_some()
    }

    fn abort(&self) {
        if let Some(bound) = &self.whole {
            bound.whole.abort();
        }
    }

    fn is_library_at_work(&self) -> bool {
        let Some(bound) = &self.whole else { return false };
        !(bound.whole.is_quiet() && self.is_quiet())
    }

    fn is_touched(&self, lane: Option<&mut (dyn Lane + 'static)>, since: Duration) -> bool {
        let Some(far) = self.binding.as_ref().and_then(|binding| binding.far.as_ref()) else { return false };
        let is_read = lane.is_some_and(|lane| lane.port().is_read_elsewhere());
        let is_quiet = self.is_quiet();
        if !is_quiet && since > LET_GO {
            far.let_go();
        }
        is_read || !is_quiet
    }

    fn leave(&self) {
        if let Some(far) = self.binding.as_ref().and_then(|binding| binding.far.as_ref()) {
            far.distrust();
            far.leave_open();
        }
    }
}

impl Binding {
    /// Gets what an operation will need of the driver: kernels, and the memory that its parts need beside the buffers. The thread that
    /// calls the operation does so, before it submits it and while it holds no lock. Later would be too late: the driver may wait for
    /// all that is on the device before it gives these, and by then a stream of the caller's may wait for the operation
    /// (`DeviceOp::join`), so that neither would go on.
    pub(crate) fn get_ready(&self, operation: &mut Operation) -> Result<(), Error> {
        let &Reduction::Op(op) = &operation.reduction else { return Ok(()) };
        let stream = &self.ours.stream;
        let mut most = 0;
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
            let fused = self.far.is_none() && part.program.lending.is_some();
            most = most.max(part.kept_on_device(scaled, fused));
        }
        if most > 0 { stream.reserve(most) } else { Ok(()) }
    }
}
