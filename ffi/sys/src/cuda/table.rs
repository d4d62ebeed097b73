//! The functions of the CUDA driver that allstream uses, by their symbols, in the version (such as `_v2`) that the driver's header chooses.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::types::*;
use super::{CuResult, Cuda, CudaError};
use crate::functions::functions;

functions! {
    Cuda answers CuResult, fails with CudaError, is called:
        "As the driver's documentation asks: handles are of objects that still exist, and pointers are valid for what the driver reads and \
         writes, until the work is done if that is later than the call.";
    required, check {
        init(flags: c_uint) = "cuInit";
        driver_get_version() -> c_int = "cuDriverGetVersion";
        get_error_name(code: CuResult, text: *mut *const c_char) = "cuGetErrorName";
        get_error_string(code: CuResult, text: *mut *const c_char) = "cuGetErrorString";

        device_get_count() -> c_int = "cuDeviceGetCount";
        device_get(ordinal: c_int) -> CuDevice = "cuDeviceGet";
        device_get_name(name: *mut c_char, len: c_int, device: CuDevice) = "cuDeviceGetName";
        device_get_uuid(device: CuDevice) -> CuUuid = "cuDeviceGetUuid";
        device_get_attribute(attribute: c_int, device: CuDevice) -> c_int = "cuDeviceGetAttribute";
        device_primary_ctx_retain(device: CuDevice) -> CuContext = "cuDevicePrimaryCtxRetain";
        device_primary_ctx_release(device: CuDevice) = "cuDevicePrimaryCtxRelease_v2";
        ctx_push_current(context: CuContext) = "cuCtxPushCurrent_v2";
        ctx_pop_current() -> CuContext = "cuCtxPopCurrent_v2";
        ctx_get_current() -> CuContext = "cuCtxGetCurrent";
        ctx_set_current(context: CuContext) = "cuCtxSetCurrent";
        ctx_synchronize() = "cuCtxSynchronize";
        /// See [`Cuda::stream_priorities`].
        ctx_get_stream_priority_range(least: *mut c_int, greatest: *mut c_int) = "cuCtxGetStreamPriorityRange";

        /// See [`Cuda::mem_info`].
        mem_get_info(free: *mut usize, total: *mut usize) = "cuMemGetInfo_v2";
        mem_alloc(bytes: usize) -> CuDevicePtr = "cuMemAlloc_v2";
        mem_free(at: CuDevicePtr) = "cuMemFree_v2";
        mem_host_alloc(bytes: usize, flags: c_uint) -> *mut c_void = "cuMemHostAlloc";
        mem_free_host(at: *mut c_void) = "cuMemFreeHost";
        memcpy_htod_async(to: CuDevicePtr, from: *const c_void, bytes: usize, stream: CuStream) = "cuMemcpyHtoDAsync_v2";
        memcpy_dtoh_async(to: *mut c_void, from: CuDevicePtr, bytes: usize, stream: CuStream) = "cuMemcpyDtoHAsync_v2";
        memcpy_dtod_async(to: CuDevicePtr, from: CuDevicePtr, bytes: usize, stream: CuStream) = "cuMemcpyDtoDAsync_v2";
        memset_d8_async(at: CuDevicePtr, byte: u8, count: usize, stream: CuStream) = "cuMemsetD8Async";
        pointer_get_attribute(data: *mut c_void, attribute: c_int, at: CuDevicePtr) = "cuPointerGetAttribute";

        stream_create_with_priority(flags: c_uint, priority: c_int) -> CuStream = "cuStreamCreateWithPriority";
        stream_destroy(stream: CuStream) = "cuStreamDestroy_v2";
        stream_synchronize(stream: CuStream) = "cuStreamSynchronize";
        stream_query(stream: CuStream) = "cuStreamQuery";
        stream_wait_event(stream: CuStream, event: CuEvent, flags: c_uint) = "cuStreamWaitEvent";
        stream_is_capturing(stream: CuStream, status: *mut c_int) = "cuStreamIsCapturing";
        launch_host_func(stream: CuStream, function: CuHostFn, data: *mut c_void) = "cuLaunchHostFunc";

        event_create(flags: c_uint) -> CuEvent = "cuEventCreate";
        event_destroy(event: CuEvent) = "cuEventDestroy_v2";
        event_record(event: CuEvent, stream: CuStream) = "cuEventRecord";
        event_query(event: CuEvent) = "cuEventQuery";
        event_synchronize(event: CuEvent) = "cuEventSynchronize";

        module_load_data(image: *const c_void) -> CuModule = "cuModuleLoadData";
        module_unload(module: CuModule) = "cuModuleUnload";
        module_get_function(module: CuModule, name: *const c_char) -> CuFunction = "cuModuleGetFunction";
        launch_kernel(
            function: CuFunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: CuStream, arguments: *mut *mut c_void, extra: *mut *mut c_void
        ) = "cuLaunchKernel";
    }
    optional, check {
        /// Differs from `cuDeviceGetUuid` if the device is divided (MIG): then this is the UUID of the instance.
        device_get_uuid_v2 / has_device_get_uuid_v2(device: CuDevice) -> CuUuid = "cuDeviceGetUuid_v2";
        device_total_mem / has_device_total_mem(device: CuDevice) -> usize = "cuDeviceTotalMem_v2";
        device_get_pci_bus_id / has_device_get_pci_bus_id(id: *mut c_char, len: c_int, device: CuDevice) = "cuDeviceGetPCIBusId";
        device_can_access_peer / has_device_can_access_peer(device: CuDevice, peer: CuDevice) -> c_int = "cuDeviceCanAccessPeer";
        ctx_enable_peer_access / has_ctx_enable_peer_access(peer: CuContext, flags: c_uint) = "cuCtxEnablePeerAccess";
        ctx_disable_peer_access / has_ctx_disable_peer_access(peer: CuContext) = "cuCtxDisablePeerAccess";
        memcpy_peer_async / has_memcpy_peer_async(to: CuDevicePtr, to_context: CuContext, from: CuDevicePtr, from_context: CuContext, bytes: usize, stream: CuStream) = "cuMemcpyPeerAsync";
        mem_get_address_range / has_mem_get_address_range(base: *mut CuDevicePtr, bytes: *mut usize, at: CuDevicePtr) = "cuMemGetAddressRange_v2";
        mem_host_register / has_mem_host_register(at: *mut c_void, bytes: usize, flags: c_uint) = "cuMemHostRegister_v2";
        mem_host_unregister / has_mem_host_unregister(at: *mut c_void) = "cuMemHostUnregister";
        mem_host_get_device_pointer / has_mem_host_get_device_pointer(at: *mut c_void, flags: c_uint) -> CuDevicePtr = "cuMemHostGetDevicePointer_v2";
        mem_pool_get_access / has_mem_pool_get_access(pool: CuMemoryPool, location: *const CuMemLocation) -> c_int = "cuMemPoolGetAccess";
        mem_pool_set_access / has_mem_pool_set_access(pool: CuMemoryPool, access: *const CuMemAccessDesc, count: usize) = "cuMemPoolSetAccess";
        memset_d32_async / has_memset_d32_async(at: CuDevicePtr, word: c_uint, count: usize, stream: CuStream) = "cuMemsetD32Async";
        ipc_get_mem_handle / has_ipc_get_mem_handle(at: CuDevicePtr) -> CuIpcMemHandle = "cuIpcGetMemHandle";
        ipc_open_mem_handle / has_ipc_open_mem_handle(handle: CuIpcMemHandle, flags: c_uint) -> CuDevicePtr = "cuIpcOpenMemHandle_v2";
        ipc_close_mem_handle / has_ipc_close_mem_handle(at: CuDevicePtr) = "cuIpcCloseMemHandle";
        ipc_get_event_handle / has_ipc_get_event_handle(event: CuEvent) -> CuIpcEventHandle = "cuIpcGetEventHandle";
        ipc_open_event_handle / has_ipc_open_event_handle(handle: CuIpcEventHandle) -> CuEvent = "cuIpcOpenEventHandle";
        thread_exchange_stream_capture_mode / has_thread_exchange_stream_capture_mode(mode: *mut c_uint) = "cuThreadExchangeStreamCaptureMode";
        stream_begin_capture / has_stream_begin_capture(stream: CuStream, mode: c_uint) = "cuStreamBeginCapture_v2";
        stream_end_capture / has_stream_end_capture(stream: CuStream, graph: *mut CuGraph) = "cuStreamEndCapture";
        graph_destroy / has_graph_destroy(graph: CuGraph) = "cuGraphDestroy";
        stream_get_ctx / has_stream_get_ctx(stream: CuStream, context: *mut CuContext) = "cuStreamGetCtx";
        stream_get_priority / has_stream_get_priority(stream: CuStream, priority: *mut c_int) = "cuStreamGetPriority";
        stream_write_value32 / has_stream_write_value32(stream: CuStream, at: CuDevicePtr, value: u32, flags: c_uint) = "cuStreamWriteValue32_v2";
        stream_wait_value32 / has_stream_wait_value32(stream: CuStream, at: CuDevicePtr, value: u32, flags: c_uint) = "cuStreamWaitValue32_v2";
        stream_batch_mem_op / has_stream_batch_mem_op(stream: CuStream, count: c_uint, operations: *mut CuStreamMemOp, flags: c_uint) = "cuStreamBatchMemOp_v2";
        event_elapsed_time / has_event_elapsed_time(start: CuEvent, end: CuEvent) -> f32 = "cuEventElapsedTime";
        func_get_attribute / has_func_get_attribute(attribute: c_int, function: CuFunction) -> c_int = "cuFuncGetAttribute";
        func_set_attribute / has_func_set_attribute(function: CuFunction, attribute: c_int, value: c_int) = "cuFuncSetAttribute";
        occupancy / has_occupancy(function: CuFunction, block: c_int, shared_bytes: usize) -> c_int = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
    }
}
