//! What ranks tell each other while they meet: each says what it is ([`Registration`]), rank 0 what has become of that ([`News`]), and
//! in the end all know the same [`Table`].

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::host::Process;
use super::link_choice::LinkChoice;
use crate::plan::choices::Choices;
use crate::types::Rank;

/// How ranks watch over each other. Rank 0's is everyone's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// A connection on which nothing was sent for this long carries a heartbeat.
    pub(crate) interval: Duration,
    /// A rank of which nothing was heard for this long is lost.
    pub(crate) silent: Duration,
}

impl Default for Heartbeat {
    fn default() -> Heartbeat {
        Heartbeat { interval: Duration::from_millis(500), silent: Duration::from_secs(10) }
    }
}

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Registration {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    /// Where its own listener can be reached; the best first.
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) process: Process,
    /// The name of its unix socket in the abstract namespace.
    pub(crate) socket: Option<String>,
    pub(crate) link: LinkChoice,
    /// What it talks by RDMA through, where that is the link.
    pub(crate) rdma: Option<RdmaEnd>,
    /// Why it cannot take part: it came to say so.
    pub(crate) unfit: Option<String>,
}

/// The port of a network card by which a rank would talk by RDMA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RdmaEnd {
    /// The name of its host, for people.
    pub(crate) host: String,
    /// What it speaks: ports talk to others of the same.
    pub(crate) layer: String,
    /// The port and its address, for people.
    pub(crate) port: String,
}

/// What every rank knows of the world once all have come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) world: [u8; 16],
    pub(crate) members: Vec<Registration>,
    pub(crate) heartbeat: Heartbeat,
    /// Rank 0's choice of algorithms is everyone's.
    pub(crate) choices: Choices,
}

impl Table {
    /// Whether this, from rank 0, is one that a rank of a world of `size` can stand in.
    pub(crate) fn check(&self, size: usize) -> Result<(), String> {
        if self.members.len() != size {
            return Err(format!("a table of {} ranks for a world of {}", self.members.len(), size));
        }
        for (rank, member) in self.members.iter().enumerate() {
            if member.rank != rank || member.size != size {
                return Err(format!(
                    "a table whose entry {rank} says rank {} of {}",
                    member.rank, member.size
                ));
            }
            if member.addresses.is_empty() {
                return Err(format!("a table without an address for rank {rank}"));
            }
        }
        if self.heartbeat.silent.is_zero() || self.heartbeat.interval.is_zero() {
            return Err("a heartbeat of no time at all".into());
        }
        Ok(())
    }
}

/// From rank 0 to a rank that has registered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum News {
    /// These have not come yet.
    Waiting { missing: Vec<Rank> },
    /// All have come.
    Formed(Box<Table>),
    /// Rank 0 is not here: it listens at one of these addresses.
    Elsewhere { addresses: Vec<SocketAddr> },
    /// There will be no world.
    Failed { problem: String },
    /// Of a world that has formed: this rank is gone, and was not connected to all others.
    Left { rank: Rank, why: String },
    /// Of a world that has formed: rank 0 is connected to all. Who is not yet does not wait for it any more, and the end of this
    /// connection means nothing.
    Connected,
}
