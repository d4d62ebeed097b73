//! RDMA on this host, near the addresses at which other ranks reach it: what there is, and what a rank's links go through.

use std::sync::Arc;

use super::addresses;
use super::env::Rendezvous;
use super::registration::{RdmaEnd, Registration};
use crate::error::Error;
use crate::link::region::Region;
use crate::link::verbs::{self, Card, Rdma, read};
use crate::types::LinkClass;

/// Finds out which ports of which network cards could carry links to other hosts by RDMA, and why others could not: InfiniBand and RoCE v2, through
/// libibverbs, which is loaded when this is first called. Links go over the first of them where all ranks ask for it:
/// [`LinkChoice::RDMA`](crate::LinkChoice::RDMA), or `ALLSTREAM_LINK=rdma`.
///
/// Of a port's addresses (GIDs) on Ethernet one of RoCE v2 is taken, if there are several one of the interface at which the other ranks reach this
/// host, and of those one of IPv4 before one of IPv6. `ALLSTREAM_RDMA_DEVICE` (`mlx5_0`, `mlx5_0,mlx5_1:1`, `^mlx5_2`) and `ALLSTREAM_RDMA_GID` (an
/// index) choose otherwise; `ALLSTREAM_VERBS_LIBRARY` names the library's file.
///
/// ```
/// match allstream::rdma::find() {
///     Ok(rdma) => rdma.ports.iter().for_each(|port| println!("{port}")),
///     Err(error) => println!("{error}"), // what is missing, and what to do
/// }
/// ```
///
/// # Errors
/// [`Error::Unavailable`]: there is no library, no device, or no port that can be used; or this process may lock too little memory.
/// [`Error::Invalid`]: a variable says what cannot be understood.
pub fn find() -> Result<Rdma, Error> {
    verbs::find(&addresses::reached_at()?)
}

/// Opens the port that a rank's links go through, where RDMA is the link, and has the rank say so as it registers.
///
/// # Errors
/// What [`find`] says, with the host's name and what to do: the other ranks are told.
pub(crate) fn open(rendezvous: &mut Rendezvous, region: &Arc<Region>) -> Result<Option<Arc<Card>>, Error> {
    if rendezvous.link.class() != Some(LinkClass::RDMA) || rendezvous.size == 1 {
        return Ok(None);
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let opened = find().and_then(|found| {
        let card = Card::open(read::library()?, &found.ports[0], &verbs::said()?, region.clone())?;
        Ok((card, found))
    });
    let (card, found) = opened.map_err(|error| match error {
        Error::Unavailable { what, problem } => Error::Unavailable {
            what: format!("{what} on host {host}, which the link rdma needs on all of them,"),
            problem: format!("{problem}; or set ALLSTREAM_LINK=tcp on all ranks"),
        },
        error => error,
    })?;
    let port = &found.ports[0];
    tracing::info!(rank = rendezvous.rank, "links go over RDMA: {port}");
    rendezvous.rdma = Some(RdmaEnd { host, layer: port.layer.to_string(), port: port.to_string() });
    Ok(Some(Arc::new(card)))
}

/// Whether the ports of two ranks can talk to each other.
pub(super) fn check_pair(one: &Registration, other: &Registration) -> Result<(), String> {
    let end = |of: &Registration| {
        let none =
            || format!("the link is rdma, and rank {} named no port; does it run the same program?", of.rank);
        of.rdma.clone().ok_or_else(none)
    };
    let (ours, theirs) = (end(one)?, end(other)?);
    if ours.layer == theirs.layer {
        return Ok(());
    }
    let shown = |rank, end: &RdmaEnd| format!("rank {rank} on host {} has {}", end.host, end.port);
    Err(format!(
        "the link rdma needs ports of one kind on all hosts: {}, and {}; name devices of one kind in ALLSTREAM_RDMA_DEVICE, or set \
         ALLSTREAM_LINK=tcp on all ranks",
        shown(one.rank, &ours),
        shown(other.rank, &theirs)
    ))
}
