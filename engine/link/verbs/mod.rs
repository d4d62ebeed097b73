//! Links over RDMA: InfiniBand and RoCE v2, by libibverbs.
//!
//! The choice of a port: [`facts`] describe the host as plain data, and [`read`] asks libibverbs and the kernel for them. [`wishes`] are what the user has
//! asked for by environment variables. [`choose`] is a function of the two.
//!
//! The link ([ADR 0040](../../../docs/adr/0040-rdma-link.md)) goes one way, and has a reliable queue pair ([`queue_pair`]) at each end; where both
//! ranks have two ports, one for each port ([`lane`]). The sender dials a TCP connection, on which both ends prove that they belong to the job; they
//! describe their queue pairs to each other ([`hello`]), and close the connection. The sender ([`tx`], [`sending`]) writes a frame, mostly by one
//! request, from a cell and a staging slot of its own to the frame's place in the receiver's area ([`layout`]). Both ends know the place, as both
//! count frames ([`credits`]); the receiver ([`rx`], [`receiving`]) gets the frame's number once the frame is there. On a narrow link, whose
//! receiver has little registered memory, large frames go in pieces ([`pieces`]). A payload in a buffer from
//! [`Comm::alloc`](crate::Comm::alloc), which is registered ([`blocks`]), may be offered ([`offers`]): the sender opens it to the receiver by a
//! memory window ([`windows`], [`offering`]), and the receiver READs it to where it belongs ([`reading`]). [`card`] is the open port, [`domain`] the
//! open device and memory that is registered with it; [`events`] report the device's own failures. [`Probe`] tests, before links are opened,
//! whether two hosts' ports reach each other.

mod blocks;
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
mod lane;
mod layout;
mod offering;
mod offers;
mod pieces;
mod probe;
mod queue_pair;
pub(crate) mod read;
mod reading;
mod receiving;
mod rx;
mod sending;
#[cfg(test)]
mod tests;
mod tx;
mod windows;
pub(crate) mod wishes;

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use allstream_sys::verbs::Access;
pub(crate) use card::Card;
pub use choose::{PassedOver, Rdma, RdmaLayer, RdmaPort};
pub(crate) use domain::registered_bytes;
pub(crate) use probe::Probe;

use self::credits::{CELLS, MOST_SLOTS};
use self::hello::Hello;
use self::layout::PIECES;
use self::queue_pair::{QueuePair, Room};
use self::rx::VerbsRx;
use self::tx::VerbsTx;
use super::{Lends, LinkKind, Locality, SLOT};
use crate::error::Error;
use crate::types::{LinkClass, Rank};

/// The link between ranks of different hosts, whose ports are all of one kind (InfiniBand or RoCE v2).
pub(crate) static RDMA: LinkKind = LinkKind {
    class: LinkClass::RDMA,
    joins: Locality::Remote,
    lends: Lends::Nothing,
    max_frame_len: SLOT,
    probe: || find(|| Ok(Vec::new())).map(drop),
    open_tx: |site| Ok(Box::new(VerbsTx::open(site)?)),
    open_rx: |site| Ok(Box::new(VerbsRx::open(site)?)),
};

/// Chooses ports from what this host has. `near` returns the addresses at which other ranks reach this host, as far as they are known; it may have to
/// resolve a host name, and so is called only if there is a device.
///
/// # Errors
/// [`Error::Unavailable`]: no port can be used, and why. [`Error::Invalid`]: an environment variable has a value that cannot be understood.
pub(crate) fn find(near: impl FnOnce() -> Result<Vec<IpAddr>, Error>) -> Result<Rdma, Error> {
    let wishes = said()?;
    let verbs = read::library()?;
    let facts = read::facts(verbs)?;
    let near = if facts.devices.is_empty() { Vec::new() } else { near()? };
    let chosen = choose::choose(verbs.file(), &facts, &wishes, &near);
    chosen.map_err(|problem| Error::Unavailable { what: "RDMA".into(), problem })
}

/// Whether RDMA is to be expected here: the host has an RDMA device, usable or not, or the user has named a device or an address to use.
pub(crate) fn is_expected() -> bool {
    let has_devices = || read::facts(read::library().ok()?).ok().map(|facts| !facts.devices.is_empty());
    said().is_ok_and(|wishes| wishes.names_a_port())
        || !read::in_kernel().is_empty()
        || has_devices().unwrap_or(false)
}

/// What the user has asked for, by the environment variables.
pub(crate) fn said() -> Result<wishes::Wishes, Error> {
    let wishes = wishes::Wishes::from_lookup(|name| std::env::var(name).ok());
    wishes.map_err(|problem| Error::invalid("read the environment", problem))
}

/// Receive requests that each end posts. No more frames and pieces can be under way to a receiver, and no more notes to a sender.
const RECEIVES: u64 = CELLS + PIECES;

/// How many notes to the sender may be posted that the device has not sent yet.
const NOTES: u32 = 2 * RECEIVES as u32;
/// How many requests a receiver's queue has to take: notes and READs.
const RECEIVER_REQUESTS: u32 = NOTES + MOST_SLOTS;

/// The requests for which a receiver's queue pair has room.
fn room_to_receive() -> Room {
    Room { send: RECEIVER_REQUESTS, receive: RECEIVES as u32, other_may: Access::REMOTE_WRITE }
}

/// Posts all receive requests.
fn fill(pair: &mut QueuePair, card: &Card) -> Result<(), Error> {
    let doing = || format!("open a link over RDMA on {}", card.place());
    pair.post_receives(RECEIVES as usize).map_err(|error| Error::system(doing(), error))
}

/// The number of the first packet, 24 random bits: so packets of an earlier connection are not taken for this one's.
fn first_packet() -> Result<u32, Error> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(|e| Error::system("asking the system for random bytes", e))?;
    Ok(u32::from_le_bytes(bytes) >> 8)
}

/// Checks that both ends' ports are of one kind. Rank 0 has compared all ranks' ports before, so this fails only if a rank now says something else.
fn check_other(card: &Card, other: &Hello, peer: Rank) -> Result<(), Error> {
    if card.port().layer != other.layer {
        return Err(Error::protocol(
            peer,
            format!("its port speaks {}, and {} speaks {}", other.layer, card.place(), card.port().layer),
        ));
    }
    Ok(())
}

/// Adds to an error of opening a link the rank on which it happened, as all ranks are told of it.
fn on_rank(rank: Rank, error: Error) -> Error {
    match error {
        Error::System { doing, problem } => {
            Error::system(format!("on rank {rank} of the world, {doing}"), problem)
        }
        error => error,
    }
}

/// This end of a link, for messages to people.
fn end_of(card: &Card, pair: &QueuePair) -> String {
    format!("{}, queue pair {}", card.place(), pair.number())
}

/// The other end of a link, for messages to people.
fn place_of(other: &Hello) -> String {
    format!("{}, queue pair {}", other.address(), other.pair)
}

/// Whether the progress thread is about to sleep and wants to be woken when something comes: it sets the flag of the rank's region before it looks at the
/// links for the last time.
fn is_wanted(card: &Card) -> bool {
    card.region().doorbell_flag().load(Ordering::Acquire) != 0
}
