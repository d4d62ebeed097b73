//! The functions by their names: what `cuGetProcAddress` gives.

use std::ffi::{c_char, c_void};

use crate::abi::{In, Out};
use crate::codes::{Code, Done};
use crate::entry::early;
use crate::knobs;

macro_rules! table {
    ($($module:ident: $($name:ident)*;)*) => {
        /// The names of all functions of the real library that this one has.
        pub(crate) const NAMES: &[&str] = &[$($(stringify!($name),)*)*];

        fn address(name: &str) -> Option<*const c_void> {
            match name {
                $($(stringify!($name) => Some(crate::$module::$name as *const c_void),)*)*
                _ => None,
            }
        }
    };
}

table! {
    capture: cuThreadExchangeStreamCaptureMode;
    codes: cuGetErrorName cuGetErrorString;
    context: cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxDisablePeerAccess cuCtxEnablePeerAccess cuCtxGetApiVersion
        cuCtxGetCurrent cuCtxGetDevice cuCtxGetFlags cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2
        cuCtxPushCurrent_v2 cuCtxSetCurrent cuCtxSynchronize cuDeviceGetDefaultMemPool cuDeviceGetMemPool
        cuMemPoolGetAccess cuMemPoolSetAccess cuMemPoolSetAttribute cuMemPoolTrimTo;
    copy: cuMemcpy cuMemcpyAsync cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2
        cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeer cuMemcpyPeerAsync;
    device: cuDeviceCanAccessPeer cuDeviceGet cuDeviceGetAttribute cuDeviceGetByPCIBusId cuDeviceGetCount
        cuDeviceGetName cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDeviceGetUuid cuDeviceGetUuid_v2
        cuDevicePrimaryCtxGetState cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
        cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2
        cuDeviceTotalMem_v2;
    entry: cuDriverGetVersion cuInit;
    event: cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventElapsedTime_v2 cuEventQuery
        cuEventRecord cuEventRecordWithFlags cuEventSynchronize cuStreamWaitEvent;
    host_memory: cuMemAllocHost_v2 cuMemFreeHost cuMemHostAlloc cuMemHostGetDevicePointer_v2
        cuMemHostGetFlags cuMemHostRegister_v2 cuMemHostUnregister;
    ipc: cuIpcCloseMemHandle cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle
        cuIpcOpenMemHandle_v2;
    launch: cuLaunchKernel cuLaunchKernelEx;
    memory: cuMemAllocAsync cuMemAllocFromPoolAsync cuMemAlloc_v2 cuMemFreeAsync cuMemFree_v2
        cuMemGetAddressRange_v2 cuMemGetInfo_v2 cuMemsetD16Async cuMemsetD16_v2 cuMemsetD32Async
        cuMemsetD32_v2 cuMemsetD8Async cuMemsetD8_v2 cuPointerGetAttribute cuPointerGetAttributes
        cuPointerSetAttribute;
    module: cuFuncGetAttribute cuFuncGetModule cuFuncSetAttribute cuFuncSetCacheConfig cuModuleGetFunction
        cuModuleGetGlobal_v2 cuModuleLoadData cuModuleLoadDataEx cuModuleUnload
        cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
        cuOccupancyMaxPotentialBlockSize;
    stream: cuGraphDestroy cuStreamBeginCapture_v2 cuStreamCreate cuStreamCreateWithPriority
        cuStreamDestroy_v2 cuStreamEndCapture cuStreamGetCtx cuStreamGetFlags cuStreamGetId
        cuStreamGetPriority cuStreamIsCapturing cuStreamQuery cuStreamSynchronize;
    stream_ops: cuLaunchHostFunc cuStreamAddCallback cuStreamBatchMemOp_v2 cuStreamWaitValue32 cuStreamWaitValue32_v2
        cuStreamWaitValue64 cuStreamWaitValue64_v2 cuStreamWriteValue32 cuStreamWriteValue32_v2
        cuStreamWriteValue64 cuStreamWriteValue64_v2;
    table: cuGetProcAddress cuGetProcAddress_v2;
}

/// The newest version of a function that is here.
fn newest(name: &str) -> Option<*const c_void> {
    ["_v3", "_v2", ""].iter().find_map(|suffix| address(&format!("{name}{suffix}")))
}

/// A `version` newer than ours finds nothing. Any other finds the newest version of the function that is here.
fn find(name: &In<c_char>, out: &Out<*const c_void>, version: i32) -> Done {
    let name = name.text()?.to_str().map_err(|_| Code::NOT_FOUND)?;
    let found = if version <= knobs::VERSION { newest(name) } else { None };
    out.set(found.unwrap_or(std::ptr::null()))?;
    if found.is_some() { Ok(()) } else { Err(Code::NOT_FOUND) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    name: In<c_char>,
    out: Out<*const c_void>,
    version: i32,
    _flags: u64,
) -> Code {
    early("cuGetProcAddress", || find(&name, &out, version))
}

/// `status` becomes 0 if the function was found, and 1 if not.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    name: In<c_char>,
    out: Out<*const c_void>,
    version: i32,
    _flags: u64,
    status: Out<u32>,
) -> Code {
    early("cuGetProcAddress_v2", || {
        let result = find(&name, &out, version);
        status.set_if_wanted(result.is_err().into());
        // As the real library: with a place for the status, a name that is not found is no error.
        if matches!(result, Err(Code::NOT_FOUND)) { Ok(()) } else { result }
    })
}

/// The `index`th of the functions' names, as a C string; null behind the last. For tests that look up all of them.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_name(index: usize) -> *const c_char {
    static TEXTS: std::sync::OnceLock<Vec<std::ffi::CString>> = std::sync::OnceLock::new();
    let texts =
        TEXTS.get_or_init(|| NAMES.iter().filter_map(|name| std::ffi::CString::new(*name).ok()).collect());
    texts.get(index).map_or(std::ptr::null(), |text| text.as_ptr())
}
