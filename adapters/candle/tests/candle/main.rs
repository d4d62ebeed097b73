//! The adapter on several ranks, which are threads where nothing else is said, beside the same computation in one process.

mod buffers;
mod clip;
mod data_parallel;
mod digits;
mod gpt;
mod killed;
mod llama;
mod ops;
mod segments;
mod sharded;
mod support;
mod tensor_parallel;
