//! Binding a communicator to devices: its operations on device buffers then run there.

use std::sync::Arc;

use super::Comm;
use crate::error::Error;
use crate::exec::device::Binding;
use crate::link::peer::PeerDevice;
use crate::mem::device::{Device, DeviceStream};
use crate::types::Rank;

/// How a communicator's operations on device buffers run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DevicePath {
    /// By kernels on the ranks' devices, which read each other's memory.
    Peer,
    /// By the host, through pinned memory.
    Staged {
        /// What is in the way of the other.
        why: String,
    },
}

/// What a rank tells the others: whether it may be bound, whether all others are in its process.
const ROW: usize = 2;

impl Comm {
    /// Binds this rank to a device, with a stream of the highest priority of its own: collectives on device buffers then run
    /// on the devices, by kernels that read the memory of the other ranks' devices (or the same one: several ranks may
    /// have one device). Collective: all ranks call it, each with its device.
    ///
    /// Where the devices cannot reach each other, all ranks are told why, and stay as they were: device buffers go
    /// through the host's memory. So they do in messages, and in collectives with a function of yours.
    ///
    /// From then on every device buffer of a collective is on this rank's device, all ranks of one call have either
    /// device buffers or host buffers (else it is an [`Error::Mismatch`]), and the call waits for nothing: its kernels
    /// are put on the stream when all ranks have called. A communicator stays bound to the end, and those made from it
    /// begin without.
    ///
    /// # Errors
    /// On all ranks, and the communicator stays as it was: [`Error::Invalid`] where a rank is bound already;
    /// [`Error::Cuda`] where the driver refuses. Else as a collective.
    pub async fn bind_device(&mut self, device: &Device) -> Result<DevicePath, Error> {
        let stream = DeviceStream::high_priority(device);
        self.bind(stream).await
    }

    /// [`bind_device`](Self::bind_device) with a stream of the caller's for this rank's part.
    ///
    /// # Errors
    /// As there.
    pub async fn bind_stream(&mut self, stream: &DeviceStream) -> Result<DevicePath, Error> {
        self.bind(Ok(stream.clone())).await
    }

    async fn bind(&mut self, stream: Result<DeviceStream, Error>) -> Result<DevicePath, Error> {
        const CALL: &str = "bind_device";
        let (endpoint, world) = (self.0.endpoint.clone(), self.0.membership.world.clone());
        let (config, n) = (&endpoint.config, self.size());
        let stream = match endpoint.binding() {
            Some(bound) => {
                let problem =
                    format!("this communicator is bound already, to {:?}", bound.ours.stream.device());
                Err(Error::invalid(CALL, problem))
            }
            None => stream,
        };
        let device = stream.map(|stream| Arc::new(PeerDevice::new(stream, n)));
        let mates = &world.around.mates;
        if let Ok(device) = &device {
            mates.enter_device(config.comm, config.members[config.rank], device);
        }
        let far = config.members.iter().position(|member| !world.around.is_housemate(*member));
        let rows = self.all_gather(vec![u8::from(device.is_ok()), u8::from(far.is_none())]).await?;
        let device = device?;
        let all = |column: usize| rows.chunks_exact(ROW).position(|row| row[column] == 0);
        if let Some(rank) = all(0) {
            return Err(failed_elsewhere(CALL, rank));
        }
        if let Some(rank) = all(1) {
            let other =
                far.map_or(String::new(), |far| format!(" (rank {far} is not in the process of this one)"));
            let why = format!("rank {rank} is not in one process with all others{other}");
            return Ok(DevicePath::Staged { why });
        }
        let found = config.members.iter().map(|member| mates.device(config.comm, *member)).collect();
        let reached = reach(&device, found);
        let told = match &reached {
            Ok(Ok(_)) => 1,
            Ok(Err(_)) => 2,
            Err(_) => 0,
        };
        let rows = self.all_gather(vec![told]).await?;
        let reached = reached?;
        if let Some(rank) = rows.iter().position(|row| *row == 0) {
            return Err(failed_elsewhere(CALL, rank));
        }
        let all = match (reached, rows.iter().position(|row| *row != 1)) {
            (Ok(all), None) => all,
            (Err(why), _) => return Ok(DevicePath::Staged { why }),
            (Ok(_), other) => {
                let rank = other.unwrap_or_default();
                let why = format!("the device of rank {rank} cannot reach that of another rank");
                return Ok(DevicePath::Staged { why });
            }
        };
        endpoint.bind(Arc::new(Binding { ours: device, all }));
        Ok(DevicePath::Peer)
    }
}

fn failed_elsewhere(call: &str, rank: Rank) -> Error {
    Error::invalid(call, format!("rank {rank} could not be bound to its device; its own error says why"))
}

type Reached = Result<Vec<Arc<PeerDevice>>, String>;

/// Lets our device touch the memory of all others.
fn reach(ours: &PeerDevice, all: Option<Vec<Arc<PeerDevice>>>) -> Result<Reached, Error> {
    let all = all.ok_or_else(|| Error::system("bind devices", "a rank has taken its device back (a bug)"))?;
    for (rank, theirs) in all.iter().enumerate() {
        if !ours.stream.reach(&theirs.stream)? {
            let (a, b) = (ours.stream.device().ordinal(), theirs.stream.device().ordinal());
            return Ok(Err(format!(
                "device {a} cannot reach the memory of device {b}, which is rank {rank}'s"
            )));
        }
    }
    Ok(Ok(all))
}
