//! Handles and constants of the driver.

use std::ffi::{c_int, c_void};

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        ///
        /// A handle: copying it copies no resource. The driver's functions are `unsafe` because a caller may use a
        /// handle whose resource is gone.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub *mut c_void);

        impl $name {
            /// The handle of no resource.
            pub const NULL: $name = $name(std::ptr::null_mut());
        }

        // SAFETY: the driver may be called from any thread, and the handle is only a name to it: the pointer is never
        // followed here.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// A context: the state of a process on a device.
    CuContext
    /// A stream.
    CuStream
    /// An event.
    CuEvent
    /// A loaded module.
    CuModule
    /// A kernel in a module.
    CuFunction
    /// A graph, which the capture of a stream gives.
    CuGraph
    /// A pool that `cuMemAllocAsync` takes memory from.
    CuMemoryPool
}

/// A device's number, as the driver counts devices.
pub type CuDevice = c_int;
/// An address in device memory.
pub type CuDevicePtr = u64;
/// A function that a stream calls on the host.
pub type CuHostFn = unsafe extern "C" fn(*mut c_void);

/// The identity of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct CuUuid(pub [u8; 16]);

/// A handle by which another process opens device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct CuIpcMemHandle(pub [u8; 64]);

/// A handle by which another process opens an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct CuIpcEventHandle(pub [u8; 64]);

/// Where memory is, or which device is to reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CuMemLocation {
    /// The kind of place: [`CU_MEM_LOCATION_TYPE_DEVICE`].
    pub kind: c_int,
    /// Which place of that kind: the number of the device.
    pub id: c_int,
}

/// How a device may access memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CuMemAccessDesc {
    /// The device.
    pub location: CuMemLocation,
    /// The access that it has: [`CU_MEM_ACCESS_FLAGS_PROT_READWRITE`].
    pub flags: c_int,
}

/// One entry of a list of waits and writes for a stream (`CUstreamBatchMemOpParams`): the stream waits for a word, or writes one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CuStreamMemOp {
    kind: u32,
    address: CuDevicePtr,
    value: u64,
    flags: u32,
    alias: CuDevicePtr,
    pad: u64,
}

impl CuStreamMemOp {
    /// The stream waits until the 32-bit word shows this value or more, modulo 2^32: until `word - value` is not negative as an `i32`.
    pub const fn wait(address: CuDevicePtr, value: u32) -> CuStreamMemOp {
        let (value, flags) = (value as u64, CU_STREAM_WAIT_VALUE_GEQ);
        CuStreamMemOp { kind: CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, flags, alias: 0, pad: 0 }
    }

    /// The stream writes this value to the 32-bit word, after everything that it wrote before.
    pub const fn write(address: CuDevicePtr, value: u32) -> CuStreamMemOp {
        let (value, flags) = (value as u64, CU_STREAM_WRITE_VALUE_DEFAULT);
        CuStreamMemOp { kind: CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, flags, alias: 0, pad: 0 }
    }

    /// The word's address.
    pub fn address(&self) -> CuDevicePtr {
        self.address
    }

    /// The value that the stream waits for, or writes.
    pub fn value(&self) -> u32 {
        self.value as u32
    }

    /// Turns a wait into a wait with a flush: writes of other devices that reached this device before the wait was met are then visible to
    /// later work on the stream. Does nothing to a write.
    pub fn flush(&mut self) {
        if self.is_wait() {
            self.flags |= CU_STREAM_WAIT_VALUE_FLUSH;
        }
    }

    /// The flags, as the driver takes them.
    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Whether the stream waits for the word; otherwise it writes the word.
    pub fn is_wait(&self) -> bool {
        self.kind == CU_STREAM_MEM_OP_WAIT_VALUE_32
    }
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
            $(#[$doc])*
            pub const $name: $type = $value;
        )*
    };
}

/// The default stream of the calling thread: each thread has its own.
pub const CU_STREAM_PER_THREAD: CuStream = CuStream(std::ptr::without_provenance_mut(2));

constants! {
    CU_STREAM_NON_BLOCKING: u32 = 1;
    CU_EVENT_BLOCKING_SYNC: u32 = 1;
    CU_EVENT_DISABLE_TIMING: u32 = 2;
    CU_EVENT_INTERPROCESS: u32 = 4;
    CU_MEMHOSTALLOC_PORTABLE: u32 = 1;
    CU_MEMHOSTALLOC_DEVICEMAP: u32 = 2;
    CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;
    CU_MEMHOSTREGISTER_DEVICEMAP: u32 = 2;
    CU_STREAM_WAIT_VALUE_GEQ: u32 = 0;
    CU_STREAM_WAIT_VALUE_EQ: u32 = 1;
    CU_STREAM_WAIT_VALUE_FLUSH: u32 = 1 << 30;
    CU_STREAM_WRITE_VALUE_DEFAULT: u32 = 0;
    CU_STREAM_MEM_OP_WAIT_VALUE_32: u32 = 1;
    CU_STREAM_MEM_OP_WRITE_VALUE_32: u32 = 2;
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
    CU_STREAM_CAPTURE_STATUS_NONE: c_int = 0;
    CU_STREAM_CAPTURE_MODE_GLOBAL: u32 = 0;
    CU_STREAM_CAPTURE_MODE_RELAXED: u32 = 2;
    CU_POINTER_ATTRIBUTE_CONTEXT: c_int = 1;
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_int = 2;
    CU_POINTER_ATTRIBUTE_BUFFER_ID: c_int = 7;
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
    CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: c_int = 16;
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: c_int = 17;
    CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;
    CU_MEMORYTYPE_HOST: u32 = 1;
    CU_MEMORYTYPE_DEVICE: u32 = 2;
    CU_COMPUTEMODE_DEFAULT: c_int = 0;
    CU_COMPUTEMODE_PROHIBITED: c_int = 2;
    CU_COMPUTEMODE_EXCLUSIVE_PROCESS: c_int = 3;
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
    CU_DEVICE_ATTRIBUTE_INTEGRATED: c_int = 18;
    CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: c_int = 19;
    CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: c_int = 20;
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: c_int = 40;
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: c_int = 41;
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES: c_int = 98;
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: c_int = 91;
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: c_int = 99;
    /// Whether streams can wait for and write 64-bit words. Since CUDA 11.7 they always can with 32-bit words.
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: c_int = 122;
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: c_int = 123;
    CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: c_int = 125;
}
