//! Memory of a device, as all that knows no device sees it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::Fate;
use crate::error::Error;

/// A stream of a device, in whose order memory is. The devices' own type of it is behind this, and is taken out again in `device/place.rs`.
pub(crate) trait DeviceOrder: Any + fmt::Debug + Send + Sync {
    /// The number of the device, and what its maker calls it.
    fn device(&self) -> (usize, &str);
}

/// Where memory of a device is, and in whose order.
#[derive(Clone)]
pub(crate) struct DeviceMemory {
    pub(crate) order: Arc<dyn DeviceOrder>,
    pub(crate) address: u64,
    /// Of a buffer that keeps it.
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
    /// Why what is there means nothing.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.fate.as_ref().map_or(Ok(()), |fate| fate.check())
    }
}
