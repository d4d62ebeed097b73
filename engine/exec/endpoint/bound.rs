//! The device of an endpoint.

use std::sync::Arc;

use super::{Endpoint, Port};
use crate::exec::device::{Binding, DeviceLinks};
use crate::exec::port::DEVICES;

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
}
