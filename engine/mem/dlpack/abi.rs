//! The structures of DLPack 1.1, as `dlpack.h` has them. Layouts do not change within a major version.

use std::ffi::c_void;

use crate::types::DType;

/// The version of these structures. A new minor version adds codes; a new major version changes the layout.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// `kDLCPU`: the host's memory.
pub const DL_CPU: i32 = 1;
/// `kDLCUDA`: a CUDA device's memory.
pub const DL_CUDA: i32 = 2;
/// `kDLCUDAHost`: pinned host memory.
pub const DL_CUDA_HOST: i32 = 3;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`: the consumer must not write to the tensor.
pub const FLAG_READ_ONLY: u64 = 1;

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes with the layout of the structures.
    pub major: u32,
    /// Changes when codes are added.
    pub minor: u32,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// `DLDeviceType`: [`DL_CPU`], [`DL_CUDA`] and others.
    pub device_type: i32,
    /// Which device of this type. For CUDA: its number among the devices that are visible (`CUDA_VISIBLE_DEVICES`).
    pub device_id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// `DLDataTypeCode`.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// How many values one element has: more than 1 for vector types, 1 for plain types.
    pub lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// Start of the memory; on a device, an address of that device.
    pub data: *mut c_void,
    /// The device that the memory is on.
    pub device: DLDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// The element type.
    pub dtype: DLDataType,
    /// `ndim` lengths.
    pub shape: *mut i64,
    /// `ndim` distances, in elements; null if the tensor is row by row without gaps.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// `DLManagedTensor`, the older form: a capsule named `dltensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's own data.
    pub manager_ctx: *mut c_void,
    /// Called once, by whoever holds the tensor, when the holder no longer needs it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// `DLManagedTensorVersioned`: a capsule named `dltensor_versioned`.
///
/// The fields before `dl_tensor` are the same in every major version.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The version that the producer has used.
    pub version: DLPackVersion,
    /// The producer's own data.
    pub manager_ctx: *mut c_void,
    /// Called once, by whoever holds the tensor, when the holder no longer needs it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// [`FLAG_READ_ONLY`] and others.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

impl DLDataType {
    /// The data type of an element type.
    pub const fn of(dtype: DType) -> DLDataType {
        let code = match dtype {
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 => 1,
            DType::F16 | DType::F32 | DType::F64 => 2,
            DType::BF16 => 4,
            DType::Bool => 6,
            // `kDLFloat8_e4m3fn`: without infinities. `kDLFloat8_e4m3`, 8, has them.
            DType::F8E4M3 => 10,
            DType::F8E5M2 => 12,
        };
        DLDataType { code, bits: 8 * dtype.size() as u8, lanes: 1 }
    }

    /// The element type, if it is one of ours.
    pub fn dtype(self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| DLDataType::of(*dtype) == self)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// The layouts that a C compiler gives the header's structures on 64-bit systems, where enums have 32 bits.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn layouts_are_those_of_the_header() {
        assert_eq!((size_of::<DLPackVersion>(), size_of::<DLDevice>(), size_of::<DLDataType>()), (8, 8, 4));
        assert_eq!((offset_of!(DLDevice, device_id), offset_of!(DLDataType, bits)), (4, 1));
        assert_eq!((offset_of!(DLDataType, lanes), align_of::<DLDataType>()), (2, 2));
        assert_eq!((size_of::<DLTensor>(), align_of::<DLTensor>()), (48, 8));
        let tensor = [
            offset_of!(DLTensor, data),
            offset_of!(DLTensor, device),
            offset_of!(DLTensor, ndim),
            offset_of!(DLTensor, dtype),
            offset_of!(DLTensor, shape),
            offset_of!(DLTensor, strides),
            offset_of!(DLTensor, byte_offset),
        ];
        assert_eq!(tensor, [0, 8, 16, 20, 24, 32, 40]);
        let legacy = [
            offset_of!(DLManagedTensor, dl_tensor),
            offset_of!(DLManagedTensor, manager_ctx),
            offset_of!(DLManagedTensor, deleter),
            size_of::<DLManagedTensor>(),
        ];
        assert_eq!(legacy, [0, 48, 56, 64]);
        let versioned = [
            offset_of!(DLManagedTensorVersioned, version),
            offset_of!(DLManagedTensorVersioned, manager_ctx),
            offset_of!(DLManagedTensorVersioned, deleter),
            offset_of!(DLManagedTensorVersioned, flags),
            offset_of!(DLManagedTensorVersioned, dl_tensor),
            size_of::<DLManagedTensorVersioned>(),
        ];
        assert_eq!(versioned, [0, 8, 16, 24, 32, 80]);
    }

    #[test]
    fn every_type_has_a_code_of_its_own_and_comes_back() {
        for dtype in DType::ALL {
            assert_eq!(DLDataType::of(dtype).dtype(), Some(dtype));
        }
        let told = |code, bits, lanes| DLDataType { code, bits, lanes }.dtype();
        assert_eq!(told(2, 16, 1), Some(DType::F16));
        assert_eq!(told(4, 16, 1), Some(DType::BF16));
        assert_eq!(told(6, 8, 1), Some(DType::Bool));
        assert_eq!((told(10, 8, 1), told(12, 8, 1)), (Some(DType::F8E4M3), Some(DType::F8E5M2)));
        // A vector, a bool of one bit, a complex number, the e4m3 float with infinities, and a float of 8 bits of no named format.
        assert_eq!([told(2, 32, 4), told(6, 1, 1), told(5, 64, 1), told(8, 8, 1), told(2, 8, 1)], [None; 5]);
    }
}
