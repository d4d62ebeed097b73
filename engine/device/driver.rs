//! The CUDA driver: finds it, asks it what concerns no single device, and turns its errors into ours.

use allstream_sys::Unavailable;
use allstream_sys::cuda::{CuDevice, CuResult, Cuda, CudaError, LIBRARY_VARIABLE};

use crate::error::{Error, Members};

/// The CUDA driver of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Driver {
    /// The library, as the system found it.
    pub file: String,
    /// The newest CUDA that it supports: (12, 4) for 12.4.
    pub version: (u32, u32),
}

/// The driver, which is loaded when it is first needed.
///
/// ```
/// match allstream::cuda::driver() {
///     Ok(driver) => println!("CUDA {}.{} by {}", driver.version.0, driver.version.1, driver.file),
///     Err(error) => println!("{error}"), // which file was looked for, and what to install
/// }
/// ```
///
/// # Errors
/// [`Error::Unavailable`]: there is no driver, or it does not work. [`Error::Cuda`]: the driver fails to answer.
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
/// [`Error::Unavailable`]: there is no driver, or it does not work. [`Error::Cuda`]: the driver fails to answer.
pub fn device_count() -> Result<usize, Error> {
    // SAFETY: asks for a number.
    let count = unsafe { cuda()?.device_get_count() };
    let count = count.map_err(|error| told(0, "count the devices", error))?;
    Ok(usize::try_from(count).unwrap_or_default())
}

/// The driver, or what is missing and what to do about it.
pub(super) fn cuda() -> Result<&'static Cuda, Error> {
    Cuda::get().map_err(|missing| {
        let advice = match missing {
            Unavailable::Init { .. } => {
                "check that nvidia-smi lists a GPU, and that CUDA_VISIBLE_DEVICES does not hide it".to_owned()
            }
            _ => format!(
                "install the NVIDIA driver, which brings libcuda.so.1, or set {LIBRARY_VARIABLE} to its path"
            ),
        };
        Error::Unavailable { what: "the CUDA driver".into(), problem: format!("{missing}; {advice}") }
    })
}

/// Turns an error of the driver into one of ours, with advice for people. `device`: its number. `doing`: what was tried.
pub(super) fn told(device: usize, doing: &str, error: CudaError) -> Error {
    let advice = match error.code {
        CuResult::OUT_OF_MEMORY if error.call == "cuMemHostAlloc" => {
            "; the system pins no more host memory: use smaller buffers, or raise its limit of locked memory"
        }
        CuResult::OUT_OF_MEMORY => {
            "; drop device buffers, or give memory back with Device::trim, here or in other processes"
        }
        CuResult::INVALID_DEVICE | CuResult::NO_DEVICE => {
            "; check nvidia-smi, and that CUDA_VISIBLE_DEVICES does not hide the device"
        }
        CuResult::SYSTEM_DRIVER_MISMATCH => "; reboot, or reload the kernel module of the driver installed",
        CuResult::DEVICE_UNAVAILABLE => {
            "; another process has the device for itself, or the device is gone: check nvidia-smi (its compute mode, and who uses it) \
             and the kernel's log (dmesg, Xid), and start this process again"
        }
        CuResult::ECC_UNCORRECTABLE | CuResult::NVLINK_UNCORRECTABLE => {
            "; the hardware has failed, and nothing more runs on this device in this process: check nvidia-smi -q and the kernel's log \
             (dmesg, Xid), reset the device, and start this process again"
        }
        code if code.is_sticky() => {
            "; a kernel has failed, and nothing more runs on this device in this process: run it under \
             compute-sanitizer to find which"
        }
        CuResult::UNKNOWN => {
            "; the driver or the device has failed: check nvidia-smi and the kernel's log (dmesg, Xid), and start this process again"
        }
        code if code.is_of_a_capture() => {
            "; a stream is being captured into a CUDA graph: make this call before or after the capture, or on a stream that has nothing \
             to do with it (the default stream has to do with all that were not made non-blocking)"
        }
        _ => "",
    };
    Error::Cuda {
        doing: doing.to_owned(),
        device,
        call: error.call.to_owned(),
        code: error.code.0,
        name: error.name,
        problem: error.text + advice,
        members: Members::default(),
    }
}

/// Whether the error is fresh from the driver (no communicator has passed it on yet), and says that a device runs nothing more in this process.
pub(crate) fn is_loss(error: &Error) -> bool {
    matches!(error, Error::Cuda { code, .. } if CuResult(*code).is_of_a_lost_device())
        && !error.is_of_a_communicator()
}

/// Logs what the driver has refused, for want of a caller to be told. Logs nothing if the driver is gone because the process
/// ends: what was to be given back then goes with the process.
pub(super) fn warn(device: usize, doing: &str, error: &CudaError) {
    if error.code != CuResult::DEINITIALIZED {
        tracing::warn!(device, "{doing}: {error}");
    }
}

/// Whether the error says that the driver is gone, because the process ends.
pub(super) fn is_of_the_end(error: &Error) -> bool {
    matches!(error, Error::Cuda { code, .. } if *code == CuResult::DEINITIALIZED.0)
}

/// The identity of a device that the driver gave.
pub(super) fn uuid(cuda: &Cuda, device: CuDevice) -> Result<[u8; 16], CudaError> {
    // A part of a divided device (MIG) has an identity of its own, which only the newer function gives.
    let uuid = if cuda.has_device_get_uuid_v2() {
        // SAFETY: the driver gave the device.
        unsafe { cuda.device_get_uuid_v2(device) }
    } else {
        // SAFETY: as above.
        unsafe { cuda.device_get_uuid(device) }
    };
    uuid.map(|uuid| uuid.0)
}
