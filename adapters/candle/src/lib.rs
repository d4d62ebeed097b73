#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]
#![warn(missing_docs, unreachable_pub)]

mod buffers;
mod collective;
mod data_parallel;
mod error;
#[cfg_attr(not(feature = "cuda"), path = "no_gpu.rs")]
mod gpu;
mod ops;
mod params;
mod shards;
mod storage;
mod tensor_parallel;

pub use data_parallel::{DataParallel, Options, Segments};
pub use error::cause;
pub use ops::{
    AllGather, AllReduce, AllReduceBackward, Broadcast, ReduceScatter, all_gather, reduce_scatter,
};
pub use tensor_parallel::{ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, shard};
