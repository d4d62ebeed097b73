//! The table of all kinds of links. From it the engine takes the kind that joins two ranks, and the kinds that are measured, reported and
//! offered for a choice.

use super::{LinkKind, Locality, local, tcp, verbs};
#[cfg(any(test, feature = "testing"))]
use crate::testing::{late, pipe};
use crate::types::LinkClass;

/// All kinds. [`between`] takes the first that can join two ranks, so kinds for nearer ranks come first, and those that it takes only by choice last.
pub(crate) static KINDS: &[&LinkKind] = &[
    &local::INPROC,
    &local::SHM,
    &tcp::TCP,
    // After TCP, which joins any ranks, so that `between` returns RDMA only if the ranks ask for it. If they ask for no kind, all links between
    // hosts are RDMA if every host has it and all trials between hosts have succeeded, else TCP (`group::rdma`).
    &verbs::RDMA,
    #[cfg(any(test, feature = "testing"))]
    &pipe::PIPE,
    #[cfg(any(test, feature = "testing"))]
    &late::LATE,
];

/// The kind of this class, if there is one.
pub(crate) fn of(class: LinkClass) -> Option<&'static LinkKind> {
    KINDS.iter().copied().find(|kind| kind.class == class)
}

/// The kind of links between two ranks: the chosen class, if one was chosen and can join them; otherwise the first kind that can.
pub(crate) fn between(chosen: Option<LinkClass>, ranks: Locality) -> &'static LinkKind {
    let joins = |kind: &&LinkKind| ranks <= kind.joins;
    let nearest = || KINDS.iter().copied().find(joins).unwrap_or(&tcp::TCP);
    chosen.and_then(of).filter(joins).unwrap_or_else(nearest)
}

/// The class that stands for all links of a group: that of the kind, among these, that is last in the table. `INPROC` if there are none.
pub(crate) fn farthest(kinds: &[&LinkKind]) -> LinkClass {
    let at = |kind: &LinkKind| KINDS.iter().position(|known| known.class == kind.class);
    kinds.iter().max_by_key(|kind| at(kind)).map_or(LinkClass::INPROC, |kind| kind.class)
}

/// The names of all kinds, for the text of an error.
pub(crate) fn names() -> String {
    KINDS.iter().map(|kind| kind.class.to_string()).collect::<Vec<_>>().join(", ")
}
