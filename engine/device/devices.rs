//! [`Device`]: a device of this process, opened once.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::context::Context;
use crate::error::Error;

/// A CUDA device of this process, by its primary context: the one that the CUDA runtime and other libraries share.
///
/// Handles are cheap to clone, and all handles of a device share one pool of memory. The context is released once the last
/// handle is gone and so are all streams, events and buffers of the device.
///
/// ```
/// use allstream::{Error, cuda::Device};
/// match Device::new(0) {
///     Ok(device) => println!("{} ({})", device.name(), device.ordinal()),
///     // No driver on this machine: the error says which file was looked for, and what to install.
///     Err(Error::Unavailable { problem, .. }) => assert!(problem.contains("libcuda"), "{problem}"),
///     Err(error) => println!("{error}"),
/// }
/// ```
#[derive(Clone)]
pub struct Device(pub(super) Arc<Context>);

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.0.ordinal, self.0.name)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl Device {
    /// The device with this number. `CUDA_VISIBLE_DEVICES` says which devices the process sees, and so their numbers.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: there is no driver, or it does not work. [`Error::Invalid`]: there is no such device, or
    /// `ALLSTREAM_MAX_CTAS` is not a positive number. [`Error::Cuda`]: the driver does not give the device's context.
    pub fn new(ordinal: usize) -> Result<Device, Error> {
        static OPEN: Mutex<Vec<(usize, Weak<Context>)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock();
        let known = open.iter().find(|(known, _)| *known == ordinal);
        if let Some(context) = known.and_then(|(_, context)| context.upgrade()) {
            return Ok(Device(context));
        }
        let context = Arc::new(Context::new(ordinal)?);
        open.retain(|(known, _)| *known != ordinal);
        open.push((ordinal, Arc::downgrade(&context)));
        Ok(Device(context))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// What its maker calls it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its identity, the same in every process.
    pub fn uuid(&self) -> [u8; 16] {
        self.0.uuid
    }

    /// How many bytes of the device's memory no process uses, and how many bytes the device has in all.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        self.0.call("ask how much memory is free", |cuda| cuda.mem_info())
    }
}
