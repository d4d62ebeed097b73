//! Device memory, as seen by modules that know nothing of CUDA.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::Fate;
use crate::error::Error;

/// The stream in whose order device memory is used. The trait hides the stream's type, which `device/place.rs` gets back by a downcast.
pub(crate) trait DeviceOrder: Any + fmt::Debug + Send + Sync {
    /// The number of the device, and its product name.
    fn device(&self) -> (usize, &str);
}

/// Where device memory is, and in which stream's order it is used.
#[derive(Clone)]
pub(crate) struct DeviceMemory {
    pub(crate) order: Arc<dyn DeviceOrder>,
    pub(crate) address: u64,
    /// The operations on which the contents depend. `None`: the buffer keeps no list of them.
    pub(crate) fate: Option<Arc<Fate>>,
    /// Whether another library allocated it.
    pub(crate) foreign: bool,
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} of {:?}", self.address, self.order)
    }
}

impl DeviceMemory {
    /// An error if the contents cannot be trusted: the cause for which an operation that was to write them has failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.fate.as_ref().map_or(Ok(()), |fate| fate.check())
    }
}
