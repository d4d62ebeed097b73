//! Links between ranks whose devices touch each other's memory: within one process ([`peer`]), and between two processes of one host ([`ipc`]).

pub(crate) mod ipc;
mod names;
pub(crate) mod offer;
pub(crate) mod peer;
pub(crate) mod starts;
mod words;
