//! What ranks tell each other while they meet: each says what it is ([`Registration`]), rank 0 answers how the meeting goes on ([`News`]), and
//! in the end all know the same [`Table`].

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::host::Process;
use super::link_choice::LinkChoice;
use crate::plan::choices::Choices;
use crate::types::Rank;

/// How ranks watch over each other. What rank 0 says counts for all ranks.
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
    /// What it has for RDMA, if its links may use RDMA.
    pub(crate) rdma: Option<RdmaEnd>,
    /// Why it cannot take part, if it registers only to say so.
    pub(crate) unfit: Option<String>,
}

impl Registration {
    /// The name of the port through which it would talk by RDMA.
    fn port_name(&self) -> Option<&str> {
        Some(&self.rdma.as_ref()?.port.as_ref().ok()?.name)
    }
}

/// What a rank's host has for RDMA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RdmaEnd {
    /// The name of its host, for people.
    pub(crate) host: String,
    /// The port that the rank's links would go through, or why there is none.
    pub(crate) port: Result<EndPort, String>,
    /// Whether the host has a card, or its user has named one: if RDMA is not used then, the user wants to know why.
    pub(crate) is_expected: bool,
}

/// The port of a network card by which a rank would talk by RDMA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EndPort {
    /// The device and the port on it.
    pub(crate) name: String,
    /// What it speaks, such as InfiniBand: a port talks only to ports that speak the same.
    pub(crate) layer: String,
    /// Bytes of data in a packet.
    pub(crate) mtu: u32,
    /// The port and its address, for people.
    pub(crate) shown: String,
}

/// What every rank knows of the world once all have come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) world: [u8; 16],
    pub(crate) members: Vec<Registration>,
    pub(crate) heartbeat: Heartbeat,
    /// Rank 0's choice of algorithms, which counts for all ranks.
    pub(crate) choices: Choices,
}

impl Table {
    pub(crate) fn is_of_one_host(&self) -> bool {
        self.members.iter().all(|of| of.process.host == self.members[0].process.host)
    }

    /// Whether a rank is the first of its host that would talk through its port. (Ranks of one host may have different ports.)
    fn leads(&self, rank: Rank) -> bool {
        let own = &self.members[rank];
        let is_same =
            |of: &Registration| of.process.host == own.process.host && of.port_name() == own.port_name();
        self.members.iter().position(is_same) == Some(rank)
    }

    /// How many hosts there are.
    pub(crate) fn hosts(&self) -> usize {
        self.members
            .iter()
            .map(|of| of.process.host.as_str())
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    }

    /// Whether these two ranks are to try whether messages get through between their ports.
    pub(crate) fn try_each_other(&self, one: Rank, other: Rank) -> bool {
        self.members[one].process.host != self.members[other].process.host
            && self.leads(one)
            && self.leads(other)
    }

    /// Checks a table that came from rank 0, for a rank of a world of `size`.
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
    /// These ranks have not come yet.
    Waiting { missing: Vec<Rank> },
    /// All have come.
    Formed(Box<Table>),
    /// Rank 0 is not here: it listens at one of these addresses.
    Elsewhere { addresses: Vec<SocketAddr> },
    /// There will be no world.
    Failed { problem: String },
    /// After [`Formed`](News::Formed): this rank is gone, before it was connected to all others.
    Left { rank: Rank, why: String },
    /// After [`Formed`](News::Formed): rank 0 is connected to all others. From here on the end of the connection to rank 0 means nothing: ranks that
    /// are still connecting go on without rank 0. If the ranks try RDMA, this comes only when all are connected, and says whether RDMA is used.
    Connected { rdma: Option<Tried> },
}

/// From a rank that has registered to rank 0, once: it is connected to all others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Connected {
    /// How its trials of RDMA went, if the ranks try it.
    pub(crate) rdma: Option<Tried>,
}

/// Whether links can go over RDMA, as far as was tried; or why not.
pub(crate) type Tried = Result<(), String>;
