//! The adapter on several ranks, which are threads where nothing else is said, beside the same computation in one process.

mod data_parallel;
mod digits;
mod gpt;
mod killed;
mod llama;
mod ops;
mod segments;
mod support;
mod tensor_parallel;
