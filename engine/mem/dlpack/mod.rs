//! DLPack: memory exchanged with other libraries as tensors. `docs/adr/0015-devices.md` has the reasons.

mod abi;
mod export;
mod tensor;

pub use abi::{
    DL_CPU, DL_CUDA, DL_CUDA_HOST, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned,
    DLPackVersion, DLTensor, FLAG_READ_ONLY, VERSION,
};
pub use export::{Export, export};
pub(crate) use tensor::{CALL, DeviceName};
pub use tensor::{HostTensor, Tensor};
