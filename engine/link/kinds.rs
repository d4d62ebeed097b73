//! The kinds of links, in one table: what joins two ranks, what is measured and reported, and what is offered for a choice
//! is read from it.

use super::{LinkKind, Locality, local, tcp, verbs};
#[cfg(any(test, feature = "testing"))]
use crate::testing::{late, pipe};
use crate::types::LinkClass;

/// All of them, the nearest first.
pub(crate) static KINDS: &[&LinkKind] = &[
    &local::INPROC,
    &local::SHM,
    &tcp::TCP,
    // Behind TCP, which joins any ranks: RDMA is used where all ranks ask for it, or where the hosts have shown that they can
    // (`group::rdma`).
    &verbs::RDMA,
    #[cfg(any(test, feature = "testing"))]
    &pipe::PIPE,
    #[cfg(any(test, feature = "testing"))]
    &late::LATE,
];

/// The kind with a name, if there is one.
pub(crate) fn of(class: LinkClass) -> Option<&'static LinkKind> {
    KINDS.iter().copied().find(|kind| kind.class == class)
}

/// What joins two ranks: links of the class that was chosen, if one was and they can, or else the nearest.
pub(crate) fn between(chosen: Option<LinkClass>, ranks: Locality) -> &'static LinkKind {
    let joins = |kind: &&LinkKind| ranks <= kind.joins;
    let nearest = || KINDS.iter().copied().find(joins).unwrap_or(&tcp::TCP);
    chosen.and_then(of).filter(joins).unwrap_or_else(nearest)
}

/// Of the kinds between ranks of a group, that between the farthest.
pub(crate) fn farthest(kinds: &[&LinkKind]) -> LinkClass {
    let at = |kind: &LinkKind| KINDS.iter().position(|known| known.class == kind.class);
    kinds.iter().max_by_key(|kind| at(kind)).map_or(LinkClass::INPROC, |kind| kind.class)
}

/// Their names, as words of an error.
pub(crate) fn names() -> String {
    KINDS.iter().map(|kind| kind.class.to_string()).collect::<Vec<_>>().join(", ")
}
