//! Verbs for tests: the functions of `libibverbs.so.1` that allstream uses, with devices that a test describes. They move data between the
//! threads and processes of one host.
//!
//! See the README for what it can show and what it cannot.
//!
//! `calls/` has what a program calls; `card.rs` the thread that works while nobody does; `queue_pair.rs` the states of a queue pair,
//! `requester.rs` and `responder.rs` its halves; `wire.rs` how packets get from one to another; `memory.rs`, `completion.rs` and
//! `events.rs` what they use; `told.rs`, `faults.rs` and `counts.rs` what a test says, turns and reads.

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

/// Says what is wrong with the process that uses the library, where its tests see it.
pub(crate) fn complain(what: &str) {
    eprintln!("verbs for tests: {what}");
}
