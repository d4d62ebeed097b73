//! Links between ranks whose devices touch each other's memory: in one process ([`peer`]), and in two of one host ([`ipc`]).

pub(crate) mod ipc;
mod names;
pub(crate) mod peer;
pub(crate) mod starts;
mod words;
