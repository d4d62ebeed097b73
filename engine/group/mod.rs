//! How the ranks of a job find each other, prove that they belong together, and watch over each other.
//!
//! [`Rendezvous`] says where the ranks meet, and which of them this one is. [`Mesh::join`] brings the world together: every rank
//! registers with rank 0, gets the table of all, connects to all others, and keeps one control connection to each. These carry
//! messages, heartbeats, and how each rank ends, in peace or not. The tasks here run on one thread of the process, `allstream-ctl`;
//! only calls that block (host names, libibverbs) have threads of their own. No data of a collective passes through here.
#![deny(unsafe_code)]

mod accept;
mod address;
mod addresses;
mod connect;
mod control;
mod env;
mod farewell;
pub(crate) mod fds;
mod from_env;
mod gather;
pub(crate) mod handshake;
pub(crate) mod host;
mod launchers;
mod line;
mod link_choice;
mod lobby;
mod me;
mod mesh;
pub(crate) mod message;
mod note;
pub(crate) mod rdma;
mod registered;
pub(crate) mod registration;
mod rendezvous;
pub(crate) mod runtime;
mod signpost;
mod visit;
pub(crate) mod wire;

#[cfg(test)]
mod tests;

pub(crate) use addresses::Reach;
pub(crate) use control::Events;
pub use env::Rendezvous;
pub(crate) use host::nonce;
pub use link_choice::LinkChoice;
pub(crate) use mesh::Mesh;
