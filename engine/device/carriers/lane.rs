//! [`DeviceLane`]: runs parts of a communicator's operations on this rank's device, over the links between the ranks' devices.

use std::sync::Arc;

use super::backend::{Cuda, CudaLoans};
use crate::device::operation::Binding;
use crate::error::Error;
use crate::exec::carrier::Lane;
use crate::exec::{Parts, Port, Work};
use crate::types::Rank;

pub(super) struct DeviceLane {
    parts: Parts<Cuda, CudaLoans>,
    port: Port,
}

impl DeviceLane {
    /// `comm`: the communicator, as frames name it.
    pub(super) fn new(comm: u64, binding: &Arc<Binding>, port: Port) -> DeviceLane {
        let (cuda, loans) = (Cuda::new(binding.clone()), CudaLoans::new(binding));
        DeviceLane { parts: Parts::new(comm, cuda, loans), port }
    }
}

impl Lane for DeviceLane {
    fn pass(&mut self, work: &mut Work<'_>) -> Result<(bool, bool), Error> {
        self.parts.pass(work, None, &mut self.port)
    }

    fn reap(&mut self) -> Result<bool, Error> {
        self.port.reap(|lent| self.parts.freed(&lent))
    }

    fn waiting_for(&mut self, ranks: &mut Vec<Rank>) {
        self.parts.waiting_for(None, &mut self.port, ranks);
    }

    fn clear(&mut self) {
        self.parts.clear();
    }

    fn port(&mut self) -> &mut Port {
        &mut self.port
    }
}
