//! The GPU pack: the programs that tell what a real GPU does with allstream, run one after another on a machine that is
//! lent for a few minutes.
//!
//! A machine may be taken back at any moment, and a program may hang in a driver that nobody has tried. So every step has a
//! time limit of its own ([`child`]), and after every step all results are written anew into one archive ([`results`]): who
//! is stopped in the middle keeps what was done until then. [`plan`] is the list of steps, what tells most first.

#![allow(missing_docs)] // For this repository's own use; docs/gpu-pack.md is its documentation.

pub mod archive;
pub mod child;
pub mod machine;
pub mod plan;
pub mod results;
pub mod run;
pub mod stacks;
