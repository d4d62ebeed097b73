//! [`Me`]: this rank while it meets the others. Rank 0 takes the other ranks in (`rendezvous.rs`); they come to rank 0 (`visit.rs`).

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::time::Instant;

use super::address::Address;
use super::addresses::Reach;
use super::env::Rendezvous;
use super::handshake::Token;
use super::host::Process;
use super::registered::Registered;
use super::registration::{Registration, Table};
use crate::error::Error;

/// What a rank has once all ranks have met: the table of all ranks, its own listener, and the connections over which ranks registered.
pub(super) struct Formed {
    pub(super) table: Table,
    pub(super) listener: TcpListener,
    pub(super) registered: Registered,
}

/// This rank, before it has opened its own listener, at whose addresses the others reach it.
pub(super) struct Me<'a> {
    pub(super) rendezvous: &'a Rendezvous,
    pub(super) address: &'a Address,
    pub(super) token: &'a Token,
    pub(super) process: Process,
    pub(super) socket: Option<String>,
    pub(super) deadline: Instant,
    /// The interfaces and the ports that its own listener may use.
    pub(super) reach: &'a Reach,
    /// Why this rank cannot take part: then it registers only to say so. `None`: it can.
    pub(super) unfit: Option<String>,
}

impl Me<'_> {
    pub(super) fn registration(&self, addresses: Vec<SocketAddr>) -> Registration {
        let Rendezvous { rank, size, link, .. } = *self.rendezvous;
        let (process, socket) = (self.process.clone(), self.socket.clone());
        let rdma = self.rendezvous.rdma.as_ref().map(|prospect| prospect.end.clone());
        let unfit = self.unfit.clone();
        Registration { rank, size, addresses, process, socket, link, rdma, unfit }
    }

    pub(super) fn error(&self, problem: impl Into<String>) -> Error {
        self.rendezvous.error(problem)
    }
}
