//! The device of an endpoint.

use std::sync::Arc;
use std::time::{Duration, Instant};

use allstream_cuda_kernels::{Kind, kernel};

use super::run::Run;
use super::{Endpoint, Port};
use crate::device::DeviceStream;
use crate::device::operation::{Binding, DeviceLinks, DeviceOp};
use crate::error::Error;
use crate::exec::inflight::Key;
use crate::exec::operation::{Operation, Reduction};
use crate::exec::port::DEVICES;
use crate::mem::ErasedBufs;
use crate::plan::Step;

/// A thread that makes a stream wait for a collective first helps to get it onto its own stream, for this long: waiting
/// for an event is cheaper than for a word in memory.
const HELP: Duration = Duration::from_micros(20);

/// How long the stream of a dead communicator may take to come to its end, before it waits for no other process any more.
const LET_GO: Duration = Duration::from_millis(150);

impl Endpoint {
    /// The device that this rank's operations on device buffers run on, and its peers'; none: they are staged.
    pub(crate) fn binding(&self) -> Option<&Arc<Binding>> {
        self.binding.get()
    }

    /// From here on devices run operations on their buffers. All ranks do this between the same two operations.
    pub(crate) fn bind(&self, binding: Arc<Binding>) {
        let (rank, size) = (self.config.rank, self.size());
        let (rings, waker) = (self.config.opener.clone(), self.config.runtime.waker().clone());
        let links = DeviceLinks { rings, binding: binding.clone(), rank, waker };
        let mut run = self.run.lock();
        if self.binding.set(binding).is_ok() {
            let region = self.config.region.clone();
            run.devices = Some(Port::new((rank, size), DEVICES, region, Arc::new(links)));
        }
    }

    /// Whether a device runs an operation that has not ended.
    pub(crate) fn runs_on_device(&self, key: Key) -> bool {
        self.submitted.lock().devices.contains_key(&key.number())
    }

    /// Whether all of such an operation is on the device's stream, or it has ended.
    pub(crate) fn is_enqueued(&self, key: Key) -> bool {
        self.submitted.lock().devices.get(&key.number()).is_none_or(|device| device.is_enqueued())
    }

    /// Makes a stream, and those of the buffers, wait for an operation; its buffers may then be used in their order.
    /// `None`: no device runs it, or it has ended.
    pub(crate) fn join(
        self: &Arc<Self>,
        key: Key,
        stream: &DeviceStream,
    ) -> Result<Option<(ErasedBufs, Arc<DeviceOp>)>, Error> {
        let device = self.submitted.lock().devices.get(&key.number()).cloned();
        let Some(device) = device else { return Ok(None) };
        let start = Instant::now();
        // A stream cannot wait for what comes behind on itself, or on a stream that it holds up: there the caller waits
        // until all is there.
        let is_ours = device.is_on(stream);
        // The device is asked for a way now and then: each question takes some time of the streams that are to wait.
        let (mut has_way, mut ask_at) = (false, HELP);
        while !device.is_enqueued() {
            if !is_ours && start.elapsed() >= ask_at {
                has_way = device.make_way(stream);
                if has_way {
                    break;
                }
                ask_at = 2 * start.elapsed();
            }
            self.drive_once();
            if start.elapsed() > HELP {
                if !self.submitted.lock().devices.contains_key(&key.number()) {
                    return Ok(None);
                }
                std::thread::sleep(HELP);
            }
        }
        let joined = device.join(stream);
        if has_way {
            device.waits_now(stream);
        }
        if !joined? {
            return Ok(None);
        }
        Ok(self.submitted.lock().inflight.borrow(key).map(|held| (held, device)))
    }

    /// Of a dead communicator with ranks in other processes, `since` its end: whether any device may still touch its
    /// memory.
    pub(super) fn is_on_devices(&self, run: &mut Run, since: Duration) -> bool {
        let Some((binding, far)) = self.binding().and_then(|b| Some((b, b.far.as_ref()?))) else {
            return false;
        };
        let elsewhere = run.devices.as_mut().is_some_and(Port::is_read_elsewhere);
        let quiet = binding.is_quiet().unwrap_or(false);
        if !quiet && since > LET_GO {
            far.let_go();
        }
        elsewhere || !quiet
    }

    /// Devices may touch it for longer than anybody waits.
    pub(super) fn leave_on_devices(&self) {
        if let Some(far) = self.binding().and_then(|binding| binding.far.as_ref()) {
            far.distrust();
            far.leave_open();
        }
    }
}

impl Binding {
    /// Gets what an operation will need of the driver, at the call: kernels, and memory for what its steps keep in hand. The
    /// driver may wait for all that is on the device before it gives that, and a stream of the caller's may by then wait for
    /// the operation ([`DeviceOp::join`]). So it is had before anything waits for this operation, by a thread that holds nothing.
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
