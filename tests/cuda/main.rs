//! Tests of device memory, streams, events, copies and collectives. They run against a CUDA driver made of host memory and
//! threads (`tests/cuda-driver`), and some without a driver (`missing.rs`). `conformance.rs` compares the results of all collectives,
//! bit for bit, with those on host buffers; `hazards.rs` takes away one wait at a time, and checks that this is noticed.
//!
//! A process loads its driver once. So each test runs in a child process of its own, which runs this same program.

mod between;
#[cfg(feature = "testing")]
mod blocked;
mod capture;
mod code;
mod collectives;
mod conformance;
mod copies;
mod costs;
#[cfg(feature = "cudarc")]
mod cudarc;
mod dealt;
mod devices;
mod dlpack;
mod ends;
mod exhausted;
mod extremes;
mod faults;
mod foreign;
mod handed_on;
#[cfg(feature = "testing")]
mod hazards;
#[cfg(feature = "testing")]
mod held;
mod ipc;
#[cfg(feature = "testing")]
mod ipc_folds;
mod ipc_foreign;
mod joined;
mod laws;
#[cfg(feature = "testing")]
mod long;
mod lost;
mod missing;
mod nccl;
#[cfg(feature = "testing")]
mod one_launch;
mod order;
mod ourselves;
mod packed;
mod queues;
mod rules;
mod stripes;
mod train;

use test_support::cases::combine;
use test_support::{pairwise, values};

/// The helpers that tests share. With the feature `testing`, children also count the driver calls that are made under the engine's locks.
mod support {
    use std::process::Output;
    use std::time::Duration;

    pub(crate) use test_support::cuda::*;

    pub(crate) fn child(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
        test_support::cuda::child(test, variables, || counted(body));
    }

    pub(crate) fn child_within(test: &str, variables: &[(&str, &str)], limit: Duration, body: impl FnOnce()) {
        test_support::cuda::child_within(test, variables, limit, || counted(body));
    }

    pub(crate) fn child_says(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
        test_support::cuda::child_says(test, variables, || counted(body))
    }

    fn counted(body: impl FnOnce()) {
        #[cfg(feature = "testing")]
        if has_driver() {
            ask_locks(allstream::testing::holds_engine_lock);
        }
        body();
    }
}
