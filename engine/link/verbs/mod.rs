//! Links over RDMA: InfiniBand and RoCE v2, by libibverbs.
//!
//! Which port: [`facts`] are what the host is like, as plain data; [`read`] asks libibverbs and the kernel for them. [`wishes`] are what the user has said by
//! variables. [`choose`] is a function of the two.
//!
//! The link ([ADR 0040](../../../docs/adr/0040-rdma-link.md)): a simplex link has a reliable queue pair ([`queue_pair`]) at each end. The sender dials a
//! connection of TCP, as every connection of a job proves itself; over that the two tell each other of their queue pairs ([`hello`]), and close it. A frame
//! is written, by one request, from a cell and a staging slot of the sender's ([`tx`]) into a place of the receiver's area ([`layout`]) that both count
//! ([`credits`]), with a number that tells the receiver ([`rx`]) that it is there. [`card`] is the open port, [`domain`] the open device and memory that is
//! registered with it; [`events`] are what the device tells of its own failures. [`Probe`] tries the way between two hosts before links are opened.

mod broken;
mod card;
pub(crate) mod choose;
mod credits;
mod domain;
mod events;
pub(crate) mod facts;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod hello;
mod layout;
mod pieces;
mod probe;
mod queue_pair;
pub(crate) mod read;
mod rx;
#[cfg(test)]
mod tests;
mod tx;
pub(crate) mod wishes;

use std::net::IpAddr;
use std::sync::atomic::Ordering;

pub(crate) use card::Card;
pub use choose::{PassedOver, Rdma, RdmaLayer, RdmaPort};
pub(crate) use domain::registered_bytes;
pub(crate) use probe::Probe;

use self::credits::CELLS;
use self::hello::Hello;
use self::layout::PIECES;
use self::queue_pair::QueuePair;
use self::rx::VerbsRx;
use self::tx::VerbsTx;
use super::{Lends, LinkKind, Locality, SLOT};
use crate::error::Error;
use crate::types::{LinkClass, Rank};

/// Between ranks whose hosts have ports of one kind.
pub(crate) static RDMA: LinkKind = LinkKind {
    class: LinkClass::RDMA,
    joins: Locality::Remote,
    lends: Lends::Nothing,
    max_frame_len: SLOT,
    probe: || find(|| Ok(Vec::new())).map(drop),
    open_tx: |site| Ok(Box::new(VerbsTx::open(site)?)),
    open_rx: |site| Ok(Box::new(VerbsRx::open(site)?)),
};

/// What this host has, and what is chosen of it. `near` finds the addresses at which other ranks reach this host, as far as that is known; it may have
/// to ask for a name's address, and so is called only where there is a device.
///
/// # Errors
/// [`Error::Unavailable`]: nothing can be used, and why. [`Error::Invalid`]: a variable says what cannot be understood.
pub(crate) fn find(near: impl FnOnce() -> Result<Vec<IpAddr>, Error>) -> Result<Rdma, Error> {
    let wishes = said()?;
    let verbs = read::library()?;
    let facts = read::facts(verbs)?;
    let near = if facts.devices.is_empty() { Vec::new() } else { near()? };
    let chosen = choose::choose(verbs.file(), &facts, &wishes, &near);
    chosen.map_err(|problem| Error::Unavailable { what: "RDMA".into(), problem })
}

/// Whether this host has a card that could do RDMA, were all else right, or its user has named one.
pub(crate) fn is_expected() -> bool {
    let has_devices = || read::facts(read::library().ok()?).ok().map(|facts| !facts.devices.is_empty());
    said().is_ok_and(|wishes| wishes.names_a_port())
        || !read::in_kernel().is_empty()
        || has_devices().unwrap_or(false)
}

/// What the environment says.
pub(crate) fn said() -> Result<wishes::Wishes, Error> {
    let wishes = wishes::Wishes::from_lookup(|name| std::env::var(name).ok());
    wishes.map_err(|problem| Error::invalid("read the environment", problem))
}

/// Receive requests of each end: as many as frames and pieces, or notes, may be under way.
const RECEIVES: u64 = CELLS + PIECES;

/// Posts all receive requests.
fn fill(pair: &mut QueuePair, card: &Card) -> Result<(), Error> {
    for _ in 0..RECEIVES {
        let doing = || format!("open a link over RDMA on {}", card.place());
        pair.post_receive().map_err(|error| Error::system(doing(), error))?;
    }
    Ok(())
}

/// The number of the first packet: drawn, so that packets of an earlier connection are not taken for this one's.
fn first_packet() -> Result<u32, Error> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(|e| Error::system("asking the system for random bytes", e))?;
    Ok(u32::from_le_bytes(bytes) >> 8)
}

/// Whether the two ends can talk: rank 0 has compared what all ranks said of themselves, so that only a rank that says something else now cannot.
fn check_other(card: &Card, other: &Hello, peer: Rank) -> Result<(), Error> {
    if card.port().layer != other.layer {
        return Err(Error::protocol(
            peer,
            format!("its port speaks {}, and {} speaks {}", other.layer, card.place(), card.port().layer),
        ));
    }
    Ok(())
}

/// What could not be opened; all ranks are told of it, so it says which one had the trouble.
fn on_rank(rank: Rank, error: Error) -> Error {
    match error {
        Error::System { doing, problem } => {
            Error::system(format!("on rank {rank} of the world, {doing}"), problem)
        }
        error => error,
    }
}

/// This end of a link, for people.
fn end_of(card: &Card, pair: &QueuePair) -> String {
    format!("{}, queue pair {}", card.place(), pair.number())
}

/// The other end.
fn place_of(other: &Hello) -> String {
    format!("{}, queue pair {}", other.address(), other.pair)
}

/// Whether the progress thread, which is about to sleep, wants to be woken by what comes: it has put up the flag of the rank's region before it looks once
/// more.
fn is_wanted(card: &Card) -> bool {
    card.region().doorbell_flag().load(Ordering::Acquire) != 0
}
