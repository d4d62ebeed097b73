//! Result codes of the driver, as values.

use std::fmt;

/// What a function of the driver answers: a number and no enum, as a newer driver may have codes that this crate does not know.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct CuResult(pub i32);

macro_rules! codes {
    ($($code:literal $name:ident $short:ident;)*) => {
        impl CuResult {
            $(#[doc = concat!("`", stringify!($name), "`")] pub const $short: CuResult = CuResult($code);)*

            /// The name in `cuda.h`, if this crate knows the code.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    0 CUDA_SUCCESS SUCCESS;
    1 CUDA_ERROR_INVALID_VALUE INVALID_VALUE;
    2 CUDA_ERROR_OUT_OF_MEMORY OUT_OF_MEMORY;
    3 CUDA_ERROR_NOT_INITIALIZED NOT_INITIALIZED;
    4 CUDA_ERROR_DEINITIALIZED DEINITIALIZED;
    34 CUDA_ERROR_STUB_LIBRARY STUB_LIBRARY;
    36 CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER CALL_REQUIRES_NEWER_DRIVER;
    46 CUDA_ERROR_DEVICE_UNAVAILABLE DEVICE_UNAVAILABLE;
    100 CUDA_ERROR_NO_DEVICE NO_DEVICE;
    101 CUDA_ERROR_INVALID_DEVICE INVALID_DEVICE;
    200 CUDA_ERROR_INVALID_IMAGE INVALID_IMAGE;
    201 CUDA_ERROR_INVALID_CONTEXT INVALID_CONTEXT;
    205 CUDA_ERROR_MAP_FAILED MAP_FAILED;
    209 CUDA_ERROR_NO_BINARY_FOR_GPU NO_BINARY_FOR_GPU;
    214 CUDA_ERROR_ECC_UNCORRECTABLE ECC_UNCORRECTABLE;
    217 CUDA_ERROR_PEER_ACCESS_UNSUPPORTED PEER_ACCESS_UNSUPPORTED;
    218 CUDA_ERROR_INVALID_PTX INVALID_PTX;
    220 CUDA_ERROR_NVLINK_UNCORRECTABLE NVLINK_UNCORRECTABLE;
    221 CUDA_ERROR_JIT_COMPILER_NOT_FOUND JIT_COMPILER_NOT_FOUND;
    222 CUDA_ERROR_UNSUPPORTED_PTX_VERSION UNSUPPORTED_PTX_VERSION;
    226 CUDA_ERROR_CONTAINED CONTAINED;
    304 CUDA_ERROR_OPERATING_SYSTEM OPERATING_SYSTEM;
    400 CUDA_ERROR_INVALID_HANDLE INVALID_HANDLE;
    401 CUDA_ERROR_ILLEGAL_STATE ILLEGAL_STATE;
    500 CUDA_ERROR_NOT_FOUND NOT_FOUND;
    600 CUDA_ERROR_NOT_READY NOT_READY;
    700 CUDA_ERROR_ILLEGAL_ADDRESS ILLEGAL_ADDRESS;
    701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES LAUNCH_OUT_OF_RESOURCES;
    702 CUDA_ERROR_LAUNCH_TIMEOUT LAUNCH_TIMEOUT;
    704 CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED PEER_ACCESS_ALREADY_ENABLED;
    705 CUDA_ERROR_PEER_ACCESS_NOT_ENABLED PEER_ACCESS_NOT_ENABLED;
    709 CUDA_ERROR_CONTEXT_IS_DESTROYED CONTEXT_IS_DESTROYED;
    710 CUDA_ERROR_ASSERT ASSERT;
    712 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED HOST_MEMORY_ALREADY_REGISTERED;
    713 CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED HOST_MEMORY_NOT_REGISTERED;
    714 CUDA_ERROR_HARDWARE_STACK_ERROR HARDWARE_STACK_ERROR;
    715 CUDA_ERROR_ILLEGAL_INSTRUCTION ILLEGAL_INSTRUCTION;
    716 CUDA_ERROR_MISALIGNED_ADDRESS MISALIGNED_ADDRESS;
    717 CUDA_ERROR_INVALID_ADDRESS_SPACE INVALID_ADDRESS_SPACE;
    718 CUDA_ERROR_INVALID_PC INVALID_PC;
    719 CUDA_ERROR_LAUNCH_FAILED LAUNCH_FAILED;
    800 CUDA_ERROR_NOT_PERMITTED NOT_PERMITTED;
    801 CUDA_ERROR_NOT_SUPPORTED NOT_SUPPORTED;
    802 CUDA_ERROR_SYSTEM_NOT_READY SYSTEM_NOT_READY;
    803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH SYSTEM_DRIVER_MISMATCH;
    900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED STREAM_CAPTURE_UNSUPPORTED;
    901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED STREAM_CAPTURE_INVALIDATED;
    902 CUDA_ERROR_STREAM_CAPTURE_MERGE STREAM_CAPTURE_MERGE;
    903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED STREAM_CAPTURE_UNMATCHED;
    904 CUDA_ERROR_STREAM_CAPTURE_UNJOINED STREAM_CAPTURE_UNJOINED;
    905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION STREAM_CAPTURE_ISOLATION;
    906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT STREAM_CAPTURE_IMPLICIT;
    907 CUDA_ERROR_CAPTURED_EVENT CAPTURED_EVENT;
    908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD STREAM_CAPTURE_WRONG_THREAD;
    909 CUDA_ERROR_TIMEOUT TIMEOUT;
    999 CUDA_ERROR_UNKNOWN UNKNOWN;
}

impl CuResult {
    /// Whether the context is unusable after this code: until the process ends, every call in the context answers the same.
    pub fn is_sticky(self) -> bool {
        matches!(self.0, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911)
    }

    /// Whether the device is lost, at least to this process: later calls on the device fail, too.
    pub fn is_of_a_lost_device(self) -> bool {
        self.is_sticky() || matches!(self, CuResult::DEVICE_UNAVAILABLE | CuResult::UNKNOWN)
    }

    /// Whether a call was refused because a stream is being captured into a graph, by this thread or another. The code says nothing
    /// of the work that the call was about, and the call may be made again later.
    pub fn is_of_a_capture(self) -> bool {
        matches!(self.0, 900..=907)
    }
}

impl fmt::Debug for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUDA result {}", self.0),
        }
    }
}

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The function, as the driver exports it.
    pub call: &'static str,
    /// The code that it answered.
    pub code: CuResult,
    /// The code's name: the driver's, or else this crate's.
    pub name: String,
    /// What the code means, in the driver's words.
    pub text: String,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {} ({}): {}", self.call, self.name, self.code.0, self.text)
    }
}

impl std::error::Error for CudaError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_names_and_unknown_ones_are_values() {
        assert_eq!(CuResult(2), CuResult::OUT_OF_MEMORY);
        assert_eq!(format!("{:?}", CuResult(600)), "CUDA_ERROR_NOT_READY (600)");
        assert_eq!(CuResult(12345).name(), None);
        assert_eq!(format!("{:?}", CuResult(12345)), "CUDA result 12345");
        assert!(CuResult::ILLEGAL_ADDRESS.is_sticky() && !CuResult::OUT_OF_MEMORY.is_sticky());
        assert!(
            CuResult::CONTAINED.is_of_a_lost_device(),
            "cuda.h: the process must be terminated and relaunched"
        );
    }
}
