//! The adapter on several ranks, which are threads, beside the same computation in one process.

mod data_parallel;
mod digits;
mod gpt;
mod llama;
mod ops;
mod support;
mod tensor_parallel;
