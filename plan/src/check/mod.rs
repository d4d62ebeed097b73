//! A symbolic checker: do the plans of all ranks together do what the collective promises?
//!
//! Values are expressions: which contributions were combined, and in which order. The plans are run as
//! [`crate::compile`] describes, with 1, 2 and 3 slices a chunk, over links that **store nothing**: a slice of a
//! message is handed over when its receiver waits for it and its sender has it ready. If no step of any plan needs a
//! hand ([`super::compile::StepNode::hand`]), the plans are run once more with all slices of a message handed over as one, since an
//! executor may then do that, too ([`super::compile::goes_whole`]). Plans that end under
//! these rules end on every link, whatever it buffers, and with every timing: each link has one sender and one
//! receiver that use it in orders fixed by their plans, so all schedules have the same outcome (Kahn, "The
//! semantics of a simple language for parallel programming", 1974).
//!
//! In plans of loans ([`super::lending()`]) it also checks that a lender does not touch what it has lent. Other ranks
//! can touch only what they were lent: so while one rank may write a piece of memory, no other rank touches it. Whether all ranks
//! choose alike between plans of loans and step-by-step plans is another question: see [`agree`].
//!
//! At the end every piece of every rank's memory is checked: each result has exactly once every contribution that it should
//! have, and no other; all ranks that hold the same result hold the same expression (the same bits); each reduction was finished
//! ([`super::Step::finish`]) exactly once (in a scan: never); and what must not be written is unchanged.
//!
//! Lengths are compared for several counts. Where each rank has a count of its own ([`super::Layout::Table`]), they are compared
//! for one set of counts, which vary from rank to rank, and some of which are 0.

mod agreement;
mod expr;
mod fault;
mod goal;
mod memory;
mod net;
mod run;
#[cfg(test)]
mod tests;

pub use agreement::{ALL_SCHEDULES, ALL_SUBSETS, Disagreement, agree};
pub use fault::{Fault, On, Wait};

use self::expr::Values;
use self::goal::Goal;
use self::net::Net;
use self::run::{Mode, Run};
use super::{Kind, Plan, Rank};

/// Properties of plans in which no fault was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Properties {
    /// Steps of all ranks.
    pub steps: usize,
    /// Messages between all ranks, loans among them.
    pub messages: usize,
    /// The longest chain of messages, each of which needs the one before. A loan counts as one message, and a result that is
    /// written into it as another.
    pub hops: usize,
    /// Elements sent (not lent) by the rank that sends most, divided by the operation's count. If each rank has a count of its
    /// own, the number is not divided, and holds for the counts that the checker takes.
    pub sent: f64,
    /// Whether some step must gather its operands in a hand before its `dst` is free: an executor that starts each
    /// step only when it may also store the result would deadlock.
    pub needs_hand: bool,
    /// Whether every result is combined in rank order, lower ranks first.
    pub in_order: bool,
    /// Whether every result is combined in rank order by one single step.
    pub one_step: bool,
}

/// Check the plans of all ranks, `plans[rank]`, with 1, 2 and 3 slices a chunk.
///
/// In a reduce_scatter in place, what other ranks' blocks hold at the end is not checked: an algorithm may overwrite them.
///
/// # Errors
/// The first [`Fault`] found.
pub fn check(kind: Kind, root: Rank, in_place: bool, plans: &[Plan]) -> Result<Properties, Fault> {
    check_slices(kind, root, in_place, plans, 3)
}

/// [`check`], with up to `slices` slices a chunk.
///
/// # Errors
/// The first [`Fault`] found.
pub fn check_slices(
    kind: Kind,
    root: Rank,
    in_place: bool,
    plans: &[Plan],
    slices: usize,
) -> Result<Properties, Fault> {
    let goal = Goal::new(kind, root, in_place, plans)?;
    let net = Net::new(plans, &goal)?;
    let unit = if goal.varied { 1 } else { 720_720 * plans.len() };
    let mut properties = Properties {
        steps: net.steps(),
        messages: net.sends.iter().map(Vec::len).sum(),
        hops: 0,
        sent: net.most_sent(unit) as f64 / unit as f64,
        needs_hand: false,
        in_order: true,
        one_step: true,
    };
    let run = |mode: Mode| {
        let values = Values::new(goal.n, goal.pieces(plans, mode.slices));
        Run::new(&net, mode, goal.before(plans, mode.slices, values))
    };
    let ends = |mode: Mode| {
        let mut done = run(mode);
        if let Some(held) = done.held.take() {
            return Err(held);
        }
        let waits = done.waits();
        if waits.is_empty() {
            return Ok(done);
        }
        let hidden_by_buffering = run(Mode { eager: true, ..mode }).waits().is_empty();
        Err(Fault::Deadlock { slices: mode.slices, waits, hidden_by_buffering })
    };
    let has_hand = net.programs.iter().flat_map(|p| &p.nodes).any(|node| node.hand);
    for slices in 1..=slices {
        let mode = Mode { slices, eager: false, strict: false, whole: false };
        let done = ends(mode)?;
        // Plans that end although each message waits until all its slices are there also end if messages go in parts of any
        // length. (If a step receives several messages, this run takes each as it comes; the executor takes them when all are there.)
        if !has_hand {
            ends(Mode { whole: true, ..mode })?;
        }
        let order = goal.reached(plans, slices, &done.memory)?;
        properties.hops = done.hops as usize;
        properties.in_order &= order.in_order;
        properties.one_step &= order.one_step;
    }
    if has_hand {
        properties.needs_hand =
            !run(Mode { slices: 1, eager: false, strict: true, whole: false }).waits().is_empty();
    }
    Ok(properties)
}
