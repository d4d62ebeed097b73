//! Verbs for tests: the functions of `libibverbs.so.1` that allstream uses, with devices that a test describes. They move data between the
//! threads and processes of one host.
//!
//! See the README for what it can show and what it cannot.
//!
//! `calls/` has the functions that a program calls; `card.rs` the thread that works in the background; `queue_pair.rs` the states of a
//! queue pair, `requester.rs` and `responder.rs` its two halves; `wire.rs` sends packets from one pair to another; `memory.rs`,
//! `completion.rs` and `events.rs` are used by all of these; a test describes the host (`told.rs`), turns knobs (`faults.rs`) and reads
//! counters (`counts.rs`).

use std::io::Write as _;

mod calls;
mod card;
mod codes;
mod completion;
mod counts;
mod events;
mod faults;
mod memory;
mod queue_pair;
mod requester;
mod responder;
mod shared;
mod signal;
mod told;
mod wire;

/// Prints a mistake of the process that uses the library to stderr, where tests look for it.
pub(crate) fn complain(what: &str) {
    // One write, so that lines of several processes do not mix.
    let _ = std::io::stderr().write_all(format!("verbs for tests: {what}\n").as_bytes());
}
