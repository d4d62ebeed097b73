//! Collectives that devices run, all of them: the bits that hosts give, and what happens without each of their waits.
//! The laws and single cases are in `tests/cuda/`, with `tests/cuda.rs`, as is what drives the CUDA driver for tests.

#[allow(dead_code)] // Not every test uses everything.
#[path = "support/cases/combine.rs"]
mod combine;
#[path = "cuda/conformance.rs"]
mod conformance;
#[cfg(feature = "testing")]
#[path = "cuda/hazards.rs"]
mod hazards;
#[cfg(feature = "testing")]
#[path = "cuda/held.rs"]
mod held;
#[path = "support/pairwise.rs"]
mod pairwise;
#[path = "cuda/support.rs"]
mod support;
#[allow(dead_code)]
#[path = "support/values.rs"]
mod values;
