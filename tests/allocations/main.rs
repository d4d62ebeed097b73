//! No operation allocates once everything is warm: a counting allocator over all threads of this process.
//!
//! A process of its own, whose tests run one after another: whatever is allocated while one of them counts, is counted.
#![cfg(target_os = "linux")]

mod comm;
mod counting;
mod node;
mod train;
