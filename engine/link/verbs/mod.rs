//! RDMA on this host: which ports of which network cards could carry links to other hosts, which addresses of them, and why others could not.
//!
//! [`facts`] are what the host is like, as plain data; [`read`] asks libibverbs and the kernel for them. [`wishes`] are what the user has said by
//! variables. [`choose`] is a function of the two. Nothing here moves data yet: there is no link over verbs.

pub(crate) mod choose;
pub(crate) mod facts;
pub(crate) mod read;
#[cfg(test)]
mod tests;
pub(crate) mod wishes;

pub use choose::{PassedOver, Rdma, RdmaLayer, RdmaPort};
