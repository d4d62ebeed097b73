//! [`Me`]: this rank, as it goes to meet the others. Rank 0 takes them in (`rendezvous.rs`); every other rank comes to it (`visit.rs`).

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::time::Instant;

use super::address::Address;
use super::addresses::Reach;
use super::env::Rendezvous;
use super::handshake::Token;
use super::host::Process;
use super::registration::{Registration, Table};
use crate::error::Error;

/// A rank's part of a world that has formed: the table, and its own listener.
pub(crate) struct Formed {
    pub(crate) table: Table,
    pub(crate) listener: TcpListener,
}

/// This rank, before it knows its addresses.
pub(crate) struct Me<'a> {
    pub(crate) rendezvous: &'a Rendezvous,
    pub(crate) address: &'a Address,
    pub(crate) token: &'a Token,
    pub(crate) process: Process,
    pub(crate) socket: Option<String>,
    pub(crate) deadline: Instant,
    /// Where its own listener may be.
    pub(crate) reach: &'a Reach,
    /// Why it cannot take part: it comes to say so.
    pub(crate) unfit: Option<String>,
}

impl Me<'_> {
    pub(super) fn registration(&self, addresses: Vec<SocketAddr>) -> Registration {
        let Rendezvous { rank, size, link, .. } = *self.rendezvous;
        let (process, socket) = (self.process.clone(), self.socket.clone());
        Registration { rank, size, addresses, process, socket, link, unfit: self.unfit.clone() }
    }

    pub(super) fn error(&self, problem: impl Into<String>) -> Error {
        self.rendezvous.error(problem)
    }
}
