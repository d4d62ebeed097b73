//! The longer texts of errors: for messages that do not come, and for calls that disagree.

use std::fmt;

use super::{Members, Missing, MissingState, Operation, Waiting};
use crate::types::{Rank, Signature};

/// The messages that have come from a rank and were not received, in words.
pub(crate) fn unreceived(from: impl fmt::Display, pending: &[Signature]) -> String {
    if pending.is_empty() {
        return format!("nothing else is pending from {from}");
    }
    format!("pending from {from}: {}", by_tag(pending))
}

/// As [`unreceived`], for a rank that has left: the end of the error's text; empty if there are no such messages.
pub(super) fn pending(waiting: &Option<Box<Waiting>>, rank: Rank, members: &Members) -> String {
    let pending = waiting.as_ref().map(|waiting| &waiting.pending).filter(|pending| !pending.is_empty());
    pending.map(|pending| format!("; {}", unreceived(members.rank(rank), pending))).unwrap_or_default()
}

/// What a lost rank was needed for.
pub(super) fn needed(
    operation: &Option<Operation>,
    waiting: &Option<Box<Waiting>>,
    rank: Rank,
    members: &Members,
) -> String {
    match (operation, waiting) {
        (None, _) => String::new(),
        (Some(operation), None) => format!(" during {operation}"),
        (Some(Operation { comm, number, signature }), Some(waiting)) => {
            let Waiting { rank: us, call, .. } = &**waiting;
            let (us, called) = (members.rank(*us), message_call(call, signature, members.rank(rank)));
            format!(": {us} waited in {called} (#{number} of communicator {comm})")
        }
    }
}

/// The messages that a rank waits to receive from `us`, in words; empty if there are none.
pub(super) fn not_sent(awaited: &[Signature], us: String) -> String {
    if awaited.is_empty() {
        return String::new();
    }
    format!("; it waits to receive from {us}: {}", by_tag(awaited))
}

/// What to do if two ranks send to each other first, so that neither comes to its receive; empty if that is not the case.
pub(super) fn both_send(missing: &str, pending: &[Signature]) -> &'static str {
    if missing == "recv" && !pending.is_empty() {
        "; if two ranks each send to the other first, use send_recv, which does both at once"
    } else {
        ""
    }
}

/// A message as it was called: `recv(f32 x 8, from rank 1, tag 9)`.
pub(super) fn message_call(call: &str, signature: &Signature, peer: impl fmt::Display) -> String {
    let way = if call == "send" { "to" } else { "from" };
    format!("{call}({}, {way} {peer}, tag {})", signature.elements(), signature.root)
}

fn by_tag(messages: &[Signature]) -> String {
    let one = |message: &Signature| format!("tag {}, {}", message.root, message.elements());
    messages.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// The operation that timed out. A message is named by the call of the rank that waited, which is the counterpart of the missing call.
pub(super) fn timed_out(operation: &Operation, missing: &[Missing], members: &Members) -> String {
    match missing {
        [Missing { rank, state: MissingState::NotMatched { direction, .. } }] => {
            let call = if direction == "send" { "recv" } else { "send" };
            let Operation { comm, number, signature } = operation;
            let called = message_call(call, signature, members.rank(*rank));
            format!("{called} (#{number} of communicator {comm})")
        }
        _ => operation.to_string(),
    }
}

/// The text of an `Error::Mismatch`.
pub(super) struct Disagreement<'a> {
    pub(super) comm: &'a str,
    pub(super) number: u64,
    pub(super) rank: Rank,
    pub(super) ours: &'a Signature,
    pub(super) peer: Rank,
    pub(super) theirs: &'a Signature,
    pub(super) pending: &'a [Signature],
    pub(super) members: &'a Members,
}

impl fmt::Display for Disagreement<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Disagreement { comm, number, ours, theirs, .. } = self;
        let (rank, peer) = (self.members.rank(self.rank), self.members.rank(self.peer));
        if !ours.is_message() {
            return write!(
                f,
                "ranks disagree on operation #{number} of communicator {comm}: {rank} called {ours}, {peer} called {theirs}; \
                 every rank must make the same calls in the same order"
            );
        }
        let tag = ours.root;
        write!(
            f,
            "ranks disagree on message #{number} of tag {tag} from {peer} to {rank}, on communicator {comm}: {rank} called \
             recv({}, from {peer}, tag {tag}), {peer} sent {}; {}; the messages of one tag are received in the order in which \
             they were sent, each with its length, type and key",
            ours.content(),
            theirs.content(),
            unreceived(&peer, self.pending),
        )
    }
}
