//! For tests: the inputs of operations, and the results that they must have.
//!
//! This is a crate of its own because it computes, and so is compiled with optimisation, once for each element type: its generic
//! functions are called by methods of [`values::Value`], which are not generic. The crate `test-support` makes every call with every
//! element type and computes nothing. It is compiled without optimisation, which takes a fifth of the time.

#![allow(missing_docs)] // For this repository's own tests; the programs that use it are its documentation.

pub mod combine;
pub mod inputs;
pub mod values;
