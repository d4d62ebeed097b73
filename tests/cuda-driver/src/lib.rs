//! A CUDA driver for tests: the functions of `libcuda.so`, with devices that are made of host memory and threads.
//!
//! See the README for what it can show and what it cannot.
//!
//! Functions carry the names and signatures of the real library, whose manual documents them; here stand only the
//! choices that are ours.

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
