//! Every collective by every algorithm against a sequential reduction; plans that are broken on purpose, which that must
//! notice; and random programs.

mod calls;
#[cfg(feature = "testing")]
mod mutations;
mod programs;

use test_support::{self as support, cases, values};
