//! [`Device`], and what there is on this machine.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::context::{Context, cuda, told};
use crate::error::Error;

/// The CUDA driver of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Driver {
    /// The library, as the system found it.
    pub file: String,
    /// The newest CUDA that it supports: (12, 4) for 12.4.
    pub version: (u32, u32),
}

/// The driver, loaded when this is first asked for.
///
/// ```
/// match allstream::cuda::driver() {
///     Ok(driver) => println!("CUDA {}.{} by {}", driver.version.0, driver.version.1, driver.file),
///     Err(error) => println!("{error}"), // which file was looked for, and what to install
/// }
/// ```
///
/// # Errors
/// [`Error::Unavailable`]: there is no driver, or it does not work.
pub fn driver() -> Result<Driver, Error> {
    let cuda = cuda()?;
    // SAFETY: asks for a number.
    let version = unsafe { cuda.driver_get_version() };
    let version = version.map_err(|error| told(0, "ask for the version of the driver", error))?;
    let version = u32::try_from(version).unwrap_or_default();
    Ok(Driver { file: cuda.file().to_owned(), version: (version / 1000, version % 1000 / 10) })
}

/// How many devices this process sees.
///
/// # Errors
/// [`Error::Unavailable`]: there is no driver, or it does not work.
pub fn device_count() -> Result<usize, Error> {
    // SAFETY: asks for a number.
    let count = unsafe { cuda()?.device_get_count() };
    let count = count.map_err(|error| told(0, "count the devices", error))?;
    Ok(usize::try_from(count).unwrap_or_default())
}

/// Memory of a device that its pool has, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolMemory {
    /// In buffers, rounded up to 512 bytes each.
    pub used: u64,
    /// Of buffers that were dropped, while streams still worked on them when that was last looked at.
    pub pending: u64,
    /// In all blocks that the pool has from the driver, used or not.
    pub reserved: u64,
    /// Of buffers of which nobody can tell whether the device still touches them, after an error. Never used again.
    pub lost: u64,
    /// The number of blocks.
    pub blocks: usize,
}

/// A CUDA device of this process, by its primary context: the one that the CUDA runtime and other libraries share.
///
/// Handles are cheap to clone, and all of one device are of the same pool of memory. The context is released with the
/// last of them and of everything on the device: streams, events, buffers.
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
    /// The device with this number, as `CUDA_VISIBLE_DEVICES` has them.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: there is no driver, or it does not work. [`Error::Invalid`]: there is no such device.
    /// [`Error::Cuda`]: the driver does not give its context.
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

    /// Bytes that are free on the device, and all that it has, for all processes together.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        self.0.call("ask how much memory is free", |cuda| cuda.mem_info())
    }

    /// What the pool of this device has.
    pub fn pool(&self) -> PoolMemory {
        let pool = self.0.pool.lock();
        PoolMemory {
            used: pool.used,
            pending: pool.waiting(),
            reserved: pool.reserved(),
            lost: pool.lost,
            blocks: pool.blocks(),
        }
    }

    /// Gives blocks of the pool that nothing uses back to the driver, and pinned memory that is kept for staging. How many
    /// bytes of the device's.
    ///
    /// The driver waits for the device while it takes memory back. It also happens when memory runs out.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn trim(&self) -> Result<u64, Error> {
        self.0.unpin_idle();
        self.0.within("give memory back", |entered| Ok(self.0.trim(entered, &self.0.growing.lock())))
    }
}
