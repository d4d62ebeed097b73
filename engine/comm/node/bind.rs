//! Binding a node's ranks to devices.

use super::{Node, together};
use crate::comm::{Comm, DevicePath};
use crate::device::Device;
use crate::error::Error;

impl Node {
    /// Binds each rank of this node to a device, in order: [`Comm::bind_device`] of all of them. Collective: all processes call it.
    ///
    /// # Errors
    /// As there; [`Error::Invalid`] where there is not one device for each rank.
    pub async fn bind_devices(&mut self, devices: &[Device]) -> Result<DevicePath, Error> {
        let comms = self.each_with("Node::bind_devices", devices)?;
        first(together(comms.map(|(comm, device)| comm.bind_device(device))).await)
    }

    /// The same with NCCL: [`Comm::bind_nccl`] of all of them. Its communicators never block who calls them, so one thread serves them
    /// all.
    ///
    /// # Errors
    /// As there; [`Error::Invalid`] where there is not one device for each rank.
    pub async fn bind_nccl(&mut self, devices: &[Device]) -> Result<DevicePath, Error> {
        let comms = self.each_with("Node::bind_nccl", devices)?;
        first(together(comms.map(|(comm, device)| comm.bind_nccl(device))).await)
    }

    fn each_with<'a>(
        &'a mut self,
        call: &str,
        devices: &'a [Device],
    ) -> Result<impl Iterator<Item = (&'a mut Comm, &'a Device)>, Error> {
        if devices.len() != self.devices() {
            let problem = format!(
                "{} devices for a node of {} ranks: one for each is needed",
                devices.len(),
                self.devices()
            );
            return Err(Error::invalid(call, problem));
        }
        Ok(self.comms.iter_mut().zip(devices))
    }
}

/// What all ranks have found is the same for all.
fn first(found: Vec<Result<DevicePath, Error>>) -> Result<DevicePath, Error> {
    let all: Vec<DevicePath> = found.into_iter().collect::<Result<_, _>>()?;
    all.into_iter().next().ok_or_else(|| Error::system("bind devices", "a node has none (a bug)"))
}
