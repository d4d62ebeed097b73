//! The device of an endpoint.

use std::sync::Arc;
use std::time::Duration;

use super::{Endpoint, Port, Run};
use crate::exec::device::{Binding, DeviceLinks};
use crate::exec::port::DEVICES;

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
        let links = DeviceLinks { rings: self.config.opener.clone(), binding: binding.clone(), rank };
        let mut run = self.run.lock();
        if self.binding.set(binding).is_ok() {
            let region = self.config.region.clone();
            run.devices = Some(Port::new((rank, size), DEVICES, region, Arc::new(links)));
        }
    }

    /// Of a dead communicator with ranks in other processes, `since` its end: whether any device may still touch its
    /// memory.
    pub(super) fn is_on_devices(&self, run: &mut Run, since: Duration) -> bool {
        let Some((binding, far)) = self.binding().and_then(|b| Some((b, b.far.as_ref()?))) else {
            return false;
        };
        let elsewhere = run.devices.as_mut().is_some_and(Port::is_read_elsewhere);
        let quiet = binding.is_quiet().unwrap_or(false);
        if !quiet
            && since > LET_GO
            && let Err(error) = far.let_go(&binding.ours.stream)
        {
            tracing::warn!("a stream may wait for a process that is gone: {error}");
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
