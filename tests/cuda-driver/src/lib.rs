//! A CUDA driver for tests: the functions of `libcuda.so`, with devices that are made of host memory and threads.
//!
//! See the README for what it can show and what it cannot.
//!
//! The functions have the names and signatures of the real library, whose manual documents them. Comments here explain
//! only choices of our own.

mod abi;
mod capture;
mod codes;
mod context;
mod copy;
mod device;
mod door;
mod entry;
mod event;
mod hang;
mod host_memory;
mod ipc;
mod knobs;
mod launch;
mod memory;
mod module;
mod ptx;
mod report;
mod space;
mod stream;
mod stream_ops;
mod table;
mod under_locks;
