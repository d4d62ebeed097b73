//! Handles and numbers of the library. Numbers are no enums: a newer library may know more of them than this crate.

use std::ffi::{c_int, c_void};
use std::fmt;

use crate::numbers::numbers;

numbers! {
    /// What a function of the library answers.
    NcclResult(c_int) {
        0 SUCCESS ncclSuccess;
        1 UNHANDLED_CUDA_ERROR ncclUnhandledCudaError;
        2 SYSTEM_ERROR ncclSystemError;
        3 INTERNAL_ERROR ncclInternalError;
        4 INVALID_ARGUMENT ncclInvalidArgument;
        5 INVALID_USAGE ncclInvalidUsage;
        6 REMOTE_ERROR ncclRemoteError;
        7 IN_PROGRESS ncclInProgress;
        8 TIMEOUT ncclTimeout;
    }
    /// An element type.
    NcclDataType(c_int) {
        0 INT8 ncclInt8;
        1 UINT8 ncclUint8;
        2 INT32 ncclInt32;
        3 UINT32 ncclUint32;
        4 INT64 ncclInt64;
        5 UINT64 ncclUint64;
        6 FLOAT16 ncclFloat16;
        7 FLOAT32 ncclFloat32;
        8 FLOAT64 ncclFloat64;
        9 BFLOAT16 ncclBfloat16;
    }
    /// A reduction.
    NcclRedOp(c_int) {
        0 SUM ncclSum;
        1 PROD ncclProd;
        2 MAX ncclMax;
        3 MIN ncclMin;
        4 AVG ncclAvg;
    }
}

/// One rank's handle of a communicator: copying it copies no resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct NcclComm(pub *mut c_void);

impl NcclComm {
    /// No communicator.
    pub const NULL: NcclComm = NcclComm(std::ptr::null_mut());
}

// SAFETY: the handle is an opaque pointer of the library, which this crate never dereferences. The functions that take it are `unsafe`: their
// callers ensure that only one thread at a time uses the communicator.
unsafe impl Send for NcclComm {}

/// The id by which the ranks of a communicator find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NcclUniqueId(pub [u8; 128]);

/// `ncclConfig_t` as version 2.14 had it. Newer versions accept it, and use their defaults for the fields that it lacks.
#[derive(Debug)]
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl NcclConfig {
    /// The version whose `ncclConfig_t` this is, as the library numbers it.
    pub const VERSION: c_int = 21400;
    /// The configuration of communicators that never block their caller.
    pub const NON_BLOCKING: NcclConfig = NcclConfig {
        size: size_of::<NcclConfig>(),
        magic: 0xcafe_beef,
        version: NcclConfig::VERSION.unsigned_abs(),
        blocking: 0,
    };
}

/// A call of the library that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// The code that it answered.
    pub code: NcclResult,
    /// What the code means, in the library's words.
    pub text: String,
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {:?}: {}", self.call, self.code, self.text)
    }
}

impl std::error::Error for NcclError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_names_and_unknown_ones_are_values() {
        assert_eq!(format!("{:?}", NcclResult::IN_PROGRESS), "ncclInProgress (7)");
        assert_eq!(format!("{:?}", NcclResult(77)), "NcclResult 77");
        assert_eq!(NcclDataType::BFLOAT16.name(), Some("ncclBfloat16"));
    }

    #[test]
    fn the_configuration_is_that_of_the_first_version_that_is_used() {
        assert_eq!((size_of::<NcclConfig>(), std::mem::offset_of!(NcclConfig, blocking)), (24, 16));
        let NcclConfig { size, version, blocking, .. } = NcclConfig::NON_BLOCKING;
        assert_eq!((size, version, blocking), (24, 21400, 0));
    }
}
