//! Where device memory is: what buffers say of it ([`DeviceMemory`]), but with the stream as a [`DeviceStream`].

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::context::Line;
use super::stream::DeviceStream;
use crate::error::Error;
use crate::mem::{DeviceMemory, DeviceOrder, Fate, Location, RawBuf, Where};

/// Where device memory is, and in which stream's order it is used.
#[derive(Clone)]
pub(crate) struct DevicePlace {
    pub(crate) stream: DeviceStream,
    pub(crate) address: u64,
    /// The operations that the contents depend on; `None` if the buffer does not keep this.
    pub(crate) fate: Option<Arc<Fate>>,
    /// Whether another library allocated it.
    pub(crate) foreign: bool,
}

impl fmt::Debug for DevicePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} of {:?}", self.address, self.stream)
    }
}

impl DevicePlace {
    /// An error if the contents are invalid, as an operation that was to write them has failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.fate.as_ref().map_or(Ok(()), |fate| fate.check())
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceStream({} of device {})", self.id, self.context.ordinal)
    }
}

impl DeviceOrder for Line {
    fn device(&self) -> (usize, &str) {
        (self.context.ordinal, &self.context.name)
    }
}

impl DeviceStream {
    /// The stream, as memory in its order names it.
    pub(super) fn order(&self) -> Arc<dyn DeviceOrder> {
        self.0.clone()
    }
}

impl DeviceMemory {
    /// The stream in whose order the memory is.
    pub(crate) fn stream(&self) -> DeviceStream {
        let order: Arc<dyn Any + Send + Sync> = self.order.clone();
        match order.downcast::<Line>() {
            Ok(line) => DeviceStream(line),
            Err(_) => unreachable!("nothing but `Line` is a `DeviceOrder`"),
        }
    }
}

impl From<&DeviceMemory> for DevicePlace {
    fn from(memory: &DeviceMemory) -> DevicePlace {
        let DeviceMemory { address, ref fate, foreign, .. } = *memory;
        DevicePlace { stream: memory.stream(), address, fate: fate.clone(), foreign }
    }
}

impl RawBuf {
    /// Where it is on a device; `None` where it is on the host.
    pub(crate) fn on_device(&self) -> Option<DevicePlace> {
        self.device_memory().map(DevicePlace::from)
    }
}

impl Location {
    /// On the device of `stream`, from this address (a `CUdeviceptr`) on, in the order of `stream`.
    pub fn device(stream: &DeviceStream, address: u64) -> Location {
        Location(Where::Device(DeviceMemory { order: stream.order(), address, fate: None, foreign: true }))
    }
}
