//! The results of calls: their numbers, names and words.

use std::ffi::{CStr, c_char};

use crate::abi::Out;

/// A `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Code(pub(crate) u32);

/// What a body of a call comes to.
pub(crate) type Done<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($short:ident $number:literal $words:literal;)*) => {
        #[allow(dead_code, reason = "the table is whole, whether or not we ever give a code")]
        impl Code {
            $(pub(crate) const $short: Code = Code($number);)*

            fn texts(self) -> Option<(&'static CStr, &'static CStr)> {
                const fn text(text: &'static str) -> &'static CStr {
                    match CStr::from_bytes_with_nul(text.as_bytes()) {
                        Ok(text) => text,
                        Err(_) => panic!("a text with a zero inside"),
                    }
                }
                match self.0 {
                    0 => Some((c"CUDA_SUCCESS", c"no error")),
                    $($number => Some(const {
                        (
                            text(concat!("CUDA_ERROR_", stringify!($short), "\0")),
                            text(concat!($words, "\0")),
                        )
                    }),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    INVALID_VALUE 1 "invalid argument";
    OUT_OF_MEMORY 2 "out of memory";
    NOT_INITIALIZED 3 "initialization error";
    DEINITIALIZED 4 "driver shutting down";
    STUB_LIBRARY 34 "CUDA driver is a stub library";
    NO_DEVICE 100 "no CUDA-capable device is detected";
    INVALID_DEVICE 101 "invalid device ordinal";
    INVALID_IMAGE 200 "device kernel image is invalid";
    INVALID_CONTEXT 201 "invalid device context";
    MAP_FAILED 205 "mapping of buffer object failed";
    ALREADY_MAPPED 208 "resource already mapped";
    NO_BINARY_FOR_GPU 209 "no kernel image is available for execution on the device";
    NOT_MAPPED 211 "resource not mapped";
    ECC_UNCORRECTABLE 214 "uncorrectable ECC error encountered";
    UNSUPPORTED_LIMIT 215 "limit is not supported on this architecture";
    PEER_ACCESS_UNSUPPORTED 217 "peer access is not supported between these two devices";
    INVALID_PTX 218 "a PTX JIT compilation failed";
    NVLINK_UNCORRECTABLE 220 "uncorrectable NVLink error detected during the execution";
    UNSUPPORTED_PTX_VERSION 222 "the provided PTX was compiled with an unsupported toolchain.";
    INVALID_SOURCE 300 "device kernel image is invalid";
    FILE_NOT_FOUND 301 "file not found";
    OPERATING_SYSTEM 304 "OS call failed or operation not supported on this OS";
    INVALID_HANDLE 400 "invalid resource handle";
    ILLEGAL_STATE 401 "the operation cannot be performed in the present state";
    NOT_FOUND 500 "named symbol not found";
    NOT_READY 600 "device not ready";
    ILLEGAL_ADDRESS 700 "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES 701 "too many resources requested for launch";
    LAUNCH_TIMEOUT 702 "the launch timed out and was terminated";
    PEER_ACCESS_ALREADY_ENABLED 704 "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED 705 "peer access has not been enabled";
    PRIMARY_CONTEXT_ACTIVE 708 "cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED 709 "context is destroyed";
    ASSERT 710 "device-side assert triggered";
    HOST_MEMORY_ALREADY_REGISTERED 712 "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED 713 "pointer does not correspond to a registered memory region";
    ILLEGAL_INSTRUCTION 715 "an illegal instruction was encountered";
    MISALIGNED_ADDRESS 716 "misaligned address";
    INVALID_ADDRESS_SPACE 717 "operation not supported on global/shared address space";
    LAUNCH_FAILED 719 "unspecified launch failure";
    NOT_PERMITTED 800 "operation not permitted";
    NOT_SUPPORTED 801 "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED 900 "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED 901 "operation failed due to a previous error during capture";
    STREAM_CAPTURE_UNMATCHED 903 "invalid state for the end of a capture";
    STREAM_CAPTURE_IMPLICIT 906 "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT 907 "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD 908 "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN 999 "unknown error";
}

impl Code {
    pub(crate) const SUCCESS: Code = Code(0);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(code: Code, text: Out<*const c_char>) -> Code {
    give(text, code.texts().map(|texts| texts.0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorString(code: Code, text: Out<*const c_char>) -> Code {
    give(text, code.texts().map(|texts| texts.1))
}

/// As the real library: a null pointer, and a refusal, for a number that has no name.
fn give(place: Out<*const c_char>, text: Option<&'static CStr>) -> Code {
    match place.set(text.map_or(std::ptr::null(), CStr::as_ptr)) {
        Ok(()) if text.is_some() => Code::SUCCESS,
        _ => Code::INVALID_VALUE,
    }
}
