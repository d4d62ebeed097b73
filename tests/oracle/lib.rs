//! For tests: the inputs of operations, and the results that they must have.
//!
//! A crate of its own because it computes: it is compiled with optimisation, once for each element type (what is generic here
//! is called by the methods of [`values::Value`], which are not). The crate `test-support`, which makes every call with every
//! element type, is compiled without, in a fifth of the time, and computes nothing.

#![allow(missing_docs)] // For this repository's own tests; the programs that use it are its documentation.

pub mod combine;
pub mod inputs;
pub mod values;
