//! The engine through its public interface: its laws, groups, nodes, buffers, agreement, staging, and what docs/rust.md shows.
//!
//! Ranks are threads, or processes where that matters: this program starts itself again, once per rank.
#![cfg(target_os = "linux")]

mod agree;
mod buffers;
mod closed;
mod counted;
mod dlpack;
mod groups;
mod laws;
#[cfg(feature = "ndarray")]
mod ndarray;
mod node;
mod readme;
mod record;
mod shrink;
mod staging;
mod train;
#[cfg(feature = "testing")]
mod whole;
#[cfg(feature = "testing")]
mod worker;

use test_support as support;
