//! Device memory, streams, events and copies, against a CUDA driver made of host memory and threads
//! (`tests/cuda-driver`), and against none.
//!
//! A driver is chosen once for a process. So each test runs in a child of its own, which is this same program.

#[path = "cuda/between.rs"]
mod between;
#[path = "cuda/collectives.rs"]
mod collectives;
#[path = "cuda/copies.rs"]
mod copies;
#[cfg(feature = "cudarc")]
#[path = "cuda/cudarc.rs"]
mod cudarc;
#[path = "cuda/devices.rs"]
mod devices;
#[path = "cuda/dlpack.rs"]
mod dlpack;
#[path = "cuda/faults.rs"]
mod faults;
#[path = "cuda/handed_on.rs"]
mod handed_on;
#[path = "cuda/ipc.rs"]
mod ipc;
#[path = "cuda/joined.rs"]
mod joined;
#[path = "cuda/laws.rs"]
mod laws;
#[path = "cuda/missing.rs"]
mod missing;
#[path = "cuda/order.rs"]
mod order;
#[path = "cuda/perf.rs"]
mod perf;
#[path = "cuda/queues.rs"]
mod queues;
#[path = "cuda/stripes.rs"]
mod stripes;
#[path = "cuda/support.rs"]
mod support;
