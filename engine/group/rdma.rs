//! RDMA on this host: what there is, which port a rank's links use, and whether links between hosts go over RDMA.
//!
//! The choice between RDMA and TCP is made once, for all links between hosts. Each rank says which port it has when it registers ([`look`]). Then
//! every rank draws the same conclusion from the table of all ranks ([`why_not`]): if some rank has no port, or one of another kind, all use TCP.
//! Otherwise every rank opens its port. On each host, one rank for each port tries it: while it connects to such a rank of another host, the two
//! write a message to each other through their ports ([`trial`]). Each rank tells rank 0 how its trials went, and rank 0 tells all ranks the result:
//! RDMA if no trial has failed, else TCP. From then on a link that fails is an error.

pub(super) mod trial;

use std::cmp::Reverse;
use std::fmt;
use std::sync::{Arc, OnceLock};

use super::addresses;
use super::link_choice::LinkChoice;
use super::registration::{EndPort, RdmaEnd, Registration, Table, Tried};
use crate::error::Error;
use crate::link::region::Region;
use crate::link::verbs::{self, Card, Rdma, RdmaPort, read};
use crate::types::Rank;

/// A rank tells the others the reason for which it has no port; a longer one is cut to so many letters.
const MOST_TOLD: usize = 400;

/// Finds out which ports of which network cards could carry links to other hosts by RDMA, and why others could not: InfiniBand and RoCE v2, through
/// libibverbs, which is loaded when this is first called. Ranks of different hosts talk through the first of these ports if all hosts have a port of
/// the same kind, and messages get through; large buffers also go through the second, where both ranks have one and messages get through there, too.
/// If [`LinkChoice::RDMA`](crate::LinkChoice::RDMA) or `ALLSTREAM_LINK=rdma` asks for it, all ranks talk so, also those of one host.
///
/// On Ethernet, one of a port's addresses (GIDs) for RoCE v2 is taken: the one at which the other ranks reach this host, else another one of the same
/// interface, else any other; and IPv4 before IPv6. `ALLSTREAM_RDMA_DEVICE` (`mlx5_0`, `mlx5_0,mlx5_1:1`, `^mlx5_2`) and `ALLSTREAM_RDMA_GID` (an
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
    verbs::find(addresses::reached_at)
}

/// What a rank has for links over RDMA, from before it meets the others until the world has formed.
#[derive(Clone)]
pub(crate) struct Prospect {
    /// What the rank says of its ports when it registers.
    pub(super) end: RdmaEnd,
    /// The ports that carry the rank's links: none, one or two.
    ports: Vec<RdmaPort>,
    region: Arc<Region>,
    card: Arc<OnceLock<Arc<Card>>>,
}

impl fmt::Debug for Prospect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.end, f)
    }
}

impl Prospect {
    /// Opens the ports, if they are not open yet.
    ///
    /// # Errors
    /// There is no port, or the device refuses to open the first one.
    pub(super) fn open(&self) -> Result<Arc<Card>, Error> {
        if let Some(card) = self.card.get() {
            return Ok(card.clone());
        }
        let mut ports = self.ports.iter();
        let first = ports.next().ok_or_else(|| Error::system("open a port for RDMA", "there is none"))?;
        let ports = (first, ports.next());
        let card = Card::open(read::library()?, ports, &verbs::said()?, self.region.clone())?;
        let card = self.card.get_or_init(|| Arc::new(card));
        card.pin();
        Ok(card.clone())
    }

    /// The prospect of a rank that says `end`, and whose port cannot be opened.
    #[cfg(test)]
    pub(super) fn pretended(end: RdmaEnd) -> Result<Prospect, Error> {
        Ok(Prospect { end, ports: Vec::new(), region: Arc::new(Region::private()?), card: Arc::default() })
    }

    /// The opened port (and the second one, if there is one); `None` if it was not opened.
    pub(crate) fn card(&self) -> Option<Arc<Card>> {
        self.card.get().cloned()
    }
}

/// Whether a rank's links may go over RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Never,
    /// Links to other hosts may.
    Between,
    /// All links are to go over RDMA.
    Chosen,
}

/// Finds out what a rank has for links over RDMA; `None` if none of its links may go over RDMA. If RDMA was chosen, also opens the ports.
///
/// # Errors
/// If RDMA was chosen: the errors of [`find`], with the host's name and what to do, as the other ranks are told them. [`Error::Invalid`]: a variable
/// says what cannot be understood.
pub(crate) fn look(need: Need, region: &Arc<Region>) -> Result<Option<Prospect>, Error> {
    if need == Need::Never {
        return Ok(None);
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let (ports, why): (Vec<RdmaPort>, _) = match find() {
        Ok(found) => (found.ports.into_iter().take(found.used).collect(), String::new()),
        Err(error) if need == Need::Chosen => return Err(needed_here(&host, error)),
        Err(Error::Unavailable { problem, .. }) => (Vec::new(), problem),
        Err(error) => return Err(error),
    };
    let shown = |port: &RdmaPort| EndPort {
        name: format!("{} port {}", port.device, port.port),
        layer: port.layer.to_string(),
        mtu: port.mtu,
        shown: port.to_string(),
    };
    let said = ports.first().map(shown).ok_or_else(|| why.chars().take(MOST_TOLD).collect());
    let is_expected = said.is_ok() || verbs::is_expected();
    let end = RdmaEnd { host, port: said, is_expected };
    let prospect = Prospect { end, ports, region: region.clone(), card: Arc::default() };
    if need == Need::Chosen {
        prospect.open().map_err(|error| needed_here(&prospect.end.host, error))?;
    }
    Ok(Some(prospect))
}

/// The error of a rank without RDMA in a world that asks for it.
fn needed_here(host: &str, error: Error) -> Error {
    match error {
        Error::Unavailable { what, problem } => Error::Unavailable {
            what: format!("{what} on host {host}, which the link rdma needs on all of them,"),
            problem: format!("{problem}; or set ALLSTREAM_LINK=tcp on all ranks"),
        },
        error => error,
    }
}

/// Why ranks cannot talk by RDMA, as far as they have said.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WhyNot {
    pub(super) why: String,
    /// Whether the user is to be told: a host has a card, or its user has named one.
    pub(super) is_news: bool,
}

/// Why not all of these ranks can talk to each other by RDMA; `None`: as far as they have said, they can.
pub(super) fn why_not<'a>(members: impl Iterator<Item = &'a Registration>) -> Option<WhyNot> {
    let ends: Vec<(Rank, Option<&RdmaEnd>)> = members.map(|of| (of.rank, of.rdma.as_ref())).collect();
    let first =
        ends.iter().find_map(|(rank, end)| Some((*rank, end.as_ref()?, end.as_ref()?.port.as_ref().ok()?)));
    let is_news = ends.iter().any(|(_, end)| end.is_some_and(|end| end.is_expected));
    let has =
        first.map(|(rank, end, port)| format!("rank {rank} on host {} has {}, and ", end.host, port.shown));
    let has = has.unwrap_or_default();
    let why = ends.iter().find_map(|(rank, end)| match (end, first) {
        (None, _) => Some(format!("{has}rank {rank} did not look for a port: its LOCAL_WORLD_SIZE says that all ranks are on its host")),
        (Some(RdmaEnd { host, port: Err(why), .. }), _) => {
            Some(format!("{has}rank {rank} on host {host} has no port to use: {why}"))
        }
        (Some(RdmaEnd { host, port: Ok(port), .. }), Some((.., other))) if port.layer != other.layer => Some(format!(
            "ports of one kind are needed on all hosts: {has}rank {rank} on host {host} has {}; name devices of one kind in \
             ALLSTREAM_RDMA_DEVICE",
            port.shown
        )),
        _ => None,
    })?;
    Some(WhyNot { why, is_news })
}

/// Opens a rank's ports as [`Prospect::open`] does, on a thread of its own.
///
/// # Errors
/// The same errors, as text.
pub(super) async fn open_aside(prospect: Prospect) -> Result<Arc<Card>, String> {
    trial::aside(move || prospect.open().map_err(|error| error.to_string())).await
}

/// Shortens what ranks have said of their ports, so that the table of a large world is not too long to be sent. All that [`why_not`] needs is kept:
/// the first port of each kind, and the first reason for which a rank has no port.
pub(super) fn condense(members: &mut [Registration]) {
    let mut kinds: Vec<String> = Vec::new();
    let mut is_missing = false;
    for end in members.iter_mut().filter_map(|of| of.rdma.as_mut()) {
        match &mut end.port {
            Ok(port) if kinds.contains(&port.layer) => port.shown.clear(),
            Ok(port) => kinds.push(port.layer.clone()),
            Err(why) if is_missing => why.clear(),
            Err(_) => is_missing = true,
        }
    }
}

/// Whether ranks of different hosts are to try RDMA. If they cannot, the log says why: as a warning if a host has a card, or its user has named one.
pub(super) fn is_to_try(table: &Table, own: Rank) -> bool {
    if table.members[own].link != LinkChoice::AUTO || table.is_of_one_host() {
        return false;
    }
    match why_not(table.members.iter()) {
        None => return true,
        Some(WhyNot { why, is_news: true }) => falls_back(own, &why),
        Some(WhyNot { why, .. }) => tracing::debug!(rank = own, "hosts talk by TCP: {why}"),
    }
    false
}

fn falls_back(own: Rank, why: &str) {
    let text = format!(
        "hosts talk by TCP and not by RDMA: {why}; set ALLSTREAM_LINK=tcp on all ranks to skip the trial and this warning"
    );
    warn_once(own, &text);
}

/// Logs what all ranks find alike: as a warning on rank 0 only, for all of them.
fn warn_once(own: Rank, text: &str) {
    if own == 0 {
        tracing::warn!(rank = own, "{text}");
    } else {
        tracing::info!(rank = own, "{text}");
    }
}

/// Logs the result of the trials.
pub(super) fn tell(own: Rank, table: &Table, tried: &Tried) {
    match tried {
        Ok(()) => {
            if let Some(RdmaEnd { port: Ok(port), .. }) = &table.members[own].rdma {
                tracing::info!(rank = own, "links to other hosts go over RDMA, by {}", port.name);
            }
            if let Some(text) = mtus(table.members.iter()) {
                warn_once(own, &text);
            }
        }
        Err(why) => falls_back(own, why),
    }
}

/// What users are told if the ports' packets carry different numbers of bytes: that the smaller number is used.
pub(super) fn mtus<'a>(members: impl Iterator<Item = &'a Registration>) -> Option<String> {
    let all: Vec<(Rank, &str, u32)> = members
        .filter_map(|of| {
            let end = of.rdma.as_ref()?;
            Some((of.rank, end.host.as_str(), end.port.as_ref().ok()?.mtu))
        })
        .collect();
    let (least, most) = (all.iter().min_by_key(|of| of.2)?, all.iter().min_by_key(|of| Reverse(of.2))?);
    (least.2 < most.2).then(|| {
        format!(
            "packets of RDMA carry {} bytes at rank {} on host {}, and {} at rank {} on host {}: links between them use the smaller; give all interfaces \
             and switches the larger MTU",
            least.2, least.0, least.1, most.2, most.0, most.1
        )
    })
}
