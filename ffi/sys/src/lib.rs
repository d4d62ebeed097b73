//! The foreign libraries of allstream, loaded at run time and never linked.
//!
//! A program that uses this crate builds and starts where none of them is installed. A missing library is no panic but an
//! error value ([`Unavailable`]) that says which files were looked for.
//!
//! ```
//! match allstream_sys::cuda::Cuda::get() {
//!     Ok(cuda) => println!("CUDA driver: {}", cuda.file()),
//!     Err(missing) => println!("no CUDA driver: {missing}"),
//! }
//! ```
#![deny(missing_docs)]

pub mod cuda;
mod functions;
mod library;
pub mod nccl;
mod numbers;
pub mod verbs;

pub use library::{Attempt, Unavailable};
