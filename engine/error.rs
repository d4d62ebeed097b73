//! Errors: what went wrong, on which rank and in which operation, what was expected and found, and what to do.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::types::{Rank, Signature};

pub(crate) mod limits;
mod members;
mod texts;

pub use self::members::Members;
pub(crate) use self::members::RecordFile;
pub(crate) use self::texts::unreceived;
use self::texts::{Disagreement, message_call, not_sent, timed_out};

/// So many bytes of the reason of an abort are told: it goes to all ranks in one message over the control connections.
const MOST_OF_A_REASON: usize = 64 << 10;

/// Why an operation, a connection or a call failed.
///
/// All members of a group fail with the first cause that the group learns of: a survivor of a crash names the rank that
/// died, not the neighbour that went away because of it.
///
/// A rank in an error is a rank of the communicator that the error is about. In a group the text also has that member's rank
/// in the world, `rank 0 (world rank 3)`, which [`world_rank`](Error::world_rank) gives as a number.
#[derive(Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call that cannot be carried out as it is. If the call was refused, nothing was submitted, and the buffer comes back. `close`
    /// also returns this where the ranks' calls do not match and no operation has noticed.
    #[error("{call}: {problem}")]
    Invalid {
        /// The call, for instance `all_reduce`.
        call: String,
        /// What was expected and found, and what to do.
        problem: String,
    },
    /// A collective was the oldest unfinished one of its communicator, or a message was in progress, for longer than the deadline of that call. The
    /// group is aborted.
    #[error("{} on {} timed out after {after:?}: {}{}", timed_out(.operation, .missing, .members), .members.rank(*.rank), Missing::list(.missing, .members, *.rank), .members.see_record())]
    Timeout {
        /// The operation.
        operation: Operation,
        /// The rank whose deadline passed.
        rank: Rank,
        /// The deadline.
        after: Duration,
        /// The ranks that the operation waited for, and what is known of them.
        missing: Vec<Missing>,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// An `agree` or `shrink` came to no verdict in time. The agreement stays open: ranks that wait longer may still end it.
    #[error(
        "{call} of communicator {comm} has no verdict on {} after {after:?}: {}; every rank that lives must call it equally often",
        .members.rank(*.rank),
        Missing::list(.missing, .members, *.rank)
    )]
    NoVerdict {
        /// The call: `agree` with its number in the communicator, or `shrink`.
        call: String,
        /// The communicator.
        comm: String,
        /// The rank that gave up.
        rank: Rank,
        /// The deadline.
        after: Duration,
        /// The ranks that have not voted, or, where all have, those that do not answer.
        missing: Vec<Missing>,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// A process of the group died or fell silent.
    #[error("{} was lost ({how}){}{}{}", .members.rank(*.rank), texts::needed(.operation, .waiting, *.rank, .members), texts::pending(.waiting, *.rank, .members), .members.see_record())]
    PeerLost {
        /// The rank that was lost first, and not a rank that went away because of that.
        rank: Rank,
        /// How it was noticed.
        how: Lost,
        /// The operation in flight on this rank, if there was one.
        operation: Option<Operation>,
        /// If `operation` is a message with the lost rank, and that rank has left: the rank that waited for the message.
        waiting: Option<Box<Waiting>>,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// A connection that carries data broke, and both of its ranks live. The group is aborted.
    #[error(
        "the {kind} connection that carries data between {} (at {at}) and {} (at {peer_at}) broke, and both ranks live: on rank {rank}, {problem}; look at what lies between the two hosts (a firewall, a NAT, a cable), then make the communicator again{}",
        .members.rank(*.rank),
        .members.rank(*.peer), .members.see_record())]
    Link {
        /// What kind of link it was, for instance `TCP`.
        kind: String,
        /// The rank that noticed.
        rank: Rank,
        /// The address of that rank's end of the connection.
        at: String,
        /// The rank at the other end.
        peer: Rank,
        /// The address of `peer`'s end.
        peer_at: String,
        /// What the system said.
        problem: String,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// Two ranks called different operations, or a message is not what its receiver has room for.
    #[error("{}{}", Disagreement { comm, number: *number, rank: *rank, ours, peer: *peer, theirs, pending, members }, .members.see_record())]
    Mismatch {
        /// The communicator.
        comm: String,
        /// Number of the operation in its communicator (or of the message, for send and recv).
        number: u64,
        /// The rank that noticed.
        rank: Rank,
        /// What `rank` had called.
        ours: Signature,
        /// The rank that disagrees.
        peer: Rank,
        /// What `peer` had called.
        theirs: Signature,
        /// For a message, where `rank` is the receiver and `peer` the sender: the other messages that have come from `peer` and were
        /// not received, by tag, eight at most. [`Signature::root`] is the tag.
        pending: Box<[Signature]>,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// A rank called `abort()`.
    #[error("the communicator was aborted by {}: {reason}{}", .members.rank(*.by), .members.see_record())]
    Aborted {
        /// The rank that aborted.
        by: Rank,
        /// The reason it gave.
        reason: String,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// This rank has as many unfinished calls on the communicator as it may have: 1,048,576 operations, or 64 agreements. The call took no
    /// number: if it is made again when some have finished, it takes the place in the order of calls that it would have had.
    #[error(
        "{call}: {limit} calls of this rank's on this communicator are unfinished, as many as are kept; await some of them, then make this one again"
    )]
    QueueFull {
        /// The call.
        call: String,
        /// The limit.
        limit: usize,
    },
    /// The communicator was closed.
    #[error("{call}: the communicator is closed")]
    Closed {
        /// The call.
        call: String,
    },
    /// The group did not come together.
    #[error("rendezvous at {address} failed on rank {rank}: {problem}")]
    Rendezvous {
        /// Where the ranks were to meet.
        address: String,
        /// The rank that gave up.
        rank: Rank,
        /// What happened, and what to do.
        problem: String,
    },
    /// A peer could not prove that it belongs to the job, or speaks another version.
    #[error("connection with {peer} refused: {problem}")]
    Refused {
        /// The peer, or its address.
        peer: String,
        /// Why, and what to do.
        problem: String,
    },
    /// Something that the call needs is not on this machine.
    #[error("{what} is not available: {problem}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// What was looked for, and what to install or set.
        problem: String,
    },
    /// A user's reduction function panicked. The group is aborted.
    #[error(
        "{call}: the reduction function {name:?} panicked on {}; its message is on that rank's stderr{}",
        .members.rank(*.rank), .members.see_record())]
    Function {
        /// The call.
        call: String,
        /// The function's name.
        name: String,
        /// The rank where it happened.
        rank: Rank,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// The system refused a call.
    #[error("{doing}: {problem}")]
    System {
        /// What was being done.
        doing: String,
        /// The system's words.
        problem: String,
    },
    /// A call of the CUDA driver failed, or reported that earlier work has failed.
    #[error("{doing} on CUDA device {device}: {call} answered {name} ({code}): {problem}{}", .members.see_record())]
    Cuda {
        /// What was being done. If a communicator failed because of it, the rank that did it comes first: `rank 1: run a collective`.
        doing: String,
        /// The device's number in this process.
        device: usize,
        /// The driver's function.
        call: String,
        /// What the driver answered, as a number.
        code: i32,
        /// The answer as a name.
        name: String,
        /// What the answer means, and what to do.
        problem: String,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// A library that carries out whole collectives (NCCL) has failed, or does not work here.
    #[error("{library} on {}: {problem}{}", .members.rank(*.rank), .members.see_record())]
    Library {
        /// The library and its version.
        library: String,
        /// The rank that noticed.
        rank: Rank,
        /// What was called, what the library answered, and what to do.
        problem: String,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
    /// Bytes from a peer that no correct peer sends.
    #[error("{} sent what no correct peer sends: {problem}{}", .members.rank(*.peer), .members.see_record())]
    Protocol {
        /// The peer.
        peer: Rank,
        /// What was wrong.
        problem: String,
        /// The communicator's members.
        #[serde(skip)]
        members: Members,
    },
}

/// Writes the text of `Display`, since what `fn main() -> Result<(), Error>` prints is for a person.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a lost rank was noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Lost {
    /// Its connection ended without a goodbye: the process died.
    Died,
    /// Nothing was heard from it for this long: stopped, wedged, or cut off.
    Silent(Duration),
    /// It said goodbye while this operation still needed it.
    Left,
}

/// An operation, as errors name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// The communicator.
    pub comm: String,
    /// Its number in the communicator.
    pub number: u64,
    /// What was called.
    pub signature: Signature,
}

/// A rank that waited for a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// The rank.
    pub rank: Rank,
    /// Its call: `send` or `recv`.
    pub call: String,
    /// For `recv`: the messages that had come from the other rank instead and were not received, eight at most. [`Signature::root`] is the tag.
    pub pending: Vec<Signature>,
}

/// A rank that an operation waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// The rank.
    pub rank: Rank,
    /// What is known of it.
    pub state: MissingState,
}

/// What is known of a rank that is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MissingState {
    /// It answers, and has not called this operation. The number is that of its last operation; `None`: it has called none.
    NotCalled(Option<u64>),
    /// It answers, and waits in this operation as well.
    Waiting,
    /// It has called this operation, and its device is late: the input is not there, or the results are not copied back.
    NotReady,
    /// All ranks have called, and what carries the operation out on that rank has not ended it.
    NotEnded {
        /// What carries it out, in words: a library, a device, or the device's driver.
        by: String,
    },
    /// It has not called the operation: it waits to receive a message on this communicator.
    Receives {
        /// Its last operation (`None`: it has called none).
        last: Option<u64>,
        /// From whom it waits to receive.
        from: Rank,
        /// The message. [`Signature::root`] is the tag.
        message: Signature,
    },
    /// All ranks have called. But operations that a library (NCCL) carries out are launched on a device in the order in which its rank
    /// submitted them, and another rank may have submitted them in another order.
    LaunchOrder {
        /// The operation that was submitted before or after this one.
        other: String,
        /// Whether `other` was submitted before this operation.
        is_before: bool,
    },
    /// It does not answer on its control connection.
    NoAnswer,
    /// It has not made the call that matches a message (`send` or `recv`), or its data has not come.
    NotMatched {
        /// The call that would match.
        direction: String,
        /// The tag of the message.
        tag: u32,
        /// The messages that have come from that rank instead and were not received, by tag, eight at most. [`Signature::root`]
        /// is the tag.
        pending: Vec<Signature>,
        /// The messages that that rank meanwhile waits to receive from this one, which has not sent them: eight at most.
        awaited: Vec<Signature>,
    },
}

impl Missing {
    /// The text for all of `missing`. `us`: the rank that waited.
    fn list(missing: &[Missing], members: &Members, us: Rank) -> String {
        if missing.is_empty() {
            return "waiting for its own input (a stream that `on` named has not reached this point)".into();
        }
        missing.iter().map(|one| one.text(members, Some(us))).collect::<Vec<_>>().join("; ")
    }

    fn text(&self, members: &Members, us: Option<Rank>) -> String {
        let what = match &self.state {
            MissingState::NotMatched { direction, tag, pending, awaited } => format!(
                "has not made the matching {direction} of tag {tag}, or waits in another call; {}{}{}",
                unreceived("it", pending),
                not_sent(awaited, us.map_or("this rank".to_owned(), |us| members.rank(us).to_string())),
                texts::both_send(direction, pending)
            ),
            MissingState::NotCalled(Some(last)) => {
                format!("has not called it (its last operation was #{last})")
            }
            MissingState::NotCalled(None) => "has not called it".into(),
            MissingState::Receives { last, from, message } => {
                let last = last.map(|last| format!(" (its last operation was #{last})")).unwrap_or_default();
                format!(
                    "has not called it{last}: it waits in {}",
                    message_call("recv", message, members.rank(*from))
                )
            }
            MissingState::Waiting => "has called it and waits too".into(),
            MissingState::NotReady => "has called it, and its device has not come to it".into(),
            MissingState::NotEnded { by } => format!("has given it to {by}, which has not finished it"),
            MissingState::LaunchOrder { other, is_before } => {
                let order = if *is_before { "before" } else { "after" };
                format!(
                    "has called {other} {order} it, on the same device; all ranks must call the two in the same order"
                )
            }
            MissingState::NoAnswer => "does not answer".into(),
        };
        format!("{} {what}", members.rank(self.rank))
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(&Members::default(), None))
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lost::Died => f.write_str("its connection ended without a goodbye"),
            Lost::Silent(d) => write!(f, "nothing was heard from it for {d:?}"),
            Lost::Left => f.write_str("it left the group while it was needed"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (#{} of communicator {})", self.signature, self.number, self.comm)
    }
}

/// The members of the communicator that an error is about, for an error that names ranks.
macro_rules! members_of {
    ($error:expr) => {
        match $error {
            Error::Timeout { members, .. }
            | Error::NoVerdict { members, .. }
            | Error::PeerLost { members, .. }
            | Error::Link { members, .. }
            | Error::Mismatch { members, .. }
            | Error::Aborted { members, .. }
            | Error::Function { members, .. }
            | Error::Cuda { members, .. }
            | Error::Library { members, .. }
            | Error::Protocol { members, .. } => Some(members),
            _ => None,
        }
    };
}

impl Error {
    pub(crate) fn invalid(call: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Invalid { call: call.into(), problem: problem.into() }
    }

    pub(crate) fn system(doing: impl Into<String>, problem: impl fmt::Display) -> Error {
        Error::System { doing: doing.into(), problem: problem.to_string() }
    }

    /// The system refused a call. If a limit was met, the text names the limit.
    pub(crate) fn os(doing: impl Into<String>, error: impl Into<std::io::Error>) -> Error {
        Error::system(doing, limits::explained(&error.into()))
    }

    /// A rank is gone.
    pub(crate) fn lost(rank: Rank, how: Lost) -> Error {
        Error::PeerLost { rank, how, operation: None, waiting: None, members: Members::default() }
    }

    /// A rank called `abort()`.
    pub(crate) fn aborted(by: Rank, reason: impl Into<String>) -> Error {
        let mut reason = reason.into();
        if reason.len() > MOST_OF_A_REASON {
            let end = (0..=MOST_OF_A_REASON).rev().find(|at| reason.is_char_boundary(*at));
            reason.truncate(end.unwrap_or_default());
            reason += " [...]";
        }
        Error::Aborted { by, reason, members: Members::default() }
    }

    /// A rank has sent bytes that no correct peer sends.
    pub(crate) fn protocol(peer: Rank, problem: impl Into<String>) -> Error {
        Error::Protocol { peer, problem: problem.into(), members: Members::default() }
    }

    /// A rank disagrees with a peer. `pending`: for a message, the other messages that have come from the peer.
    pub(crate) fn mismatch(
        comm: String,
        number: u64,
        (rank, ours): (Rank, Signature),
        (peer, theirs): (Rank, Signature),
        pending: Vec<Signature>,
    ) -> Error {
        let (pending, members) = (pending.into_boxed_slice(), Members::default());
        Error::Mismatch { comm, number, rank, ours, peer, theirs, pending, members }
    }

    /// An operation has taken longer than it may on a rank.
    pub(crate) fn timeout(operation: Operation, rank: Rank, after: Duration, missing: Vec<Missing>) -> Error {
        Error::Timeout { operation, rank, after, missing, members: Members::default() }
    }

    /// A library that carries out whole collectives has failed on a rank.
    pub(crate) fn library(library: impl Into<String>, rank: Rank, problem: impl Into<String>) -> Error {
        Error::Library { library: library.into(), rank, problem: problem.into(), members: Members::default() }
    }

    /// Makes this the error of the communicator with these members, unless it already is that of a communicator.
    pub(crate) fn among(mut self, of: &Members) -> Error {
        if let Some(members) = members_of!(&mut self) {
            members.become_known(of);
        }
        self
    }

    /// Whether this is the error of a communicator, or of an operation of one ([`among`](Self::among)).
    pub(crate) fn is_of_a_communicator(&self) -> bool {
        members_of!(self).is_some_and(Members::are_known)
    }

    /// The same as [`among`](Self::among), for an error that this rank has met itself: the text of a device's error then names the rank.
    pub(crate) fn of_rank(mut self, rank: Rank, of: &Members) -> Error {
        if let Error::Cuda { doing, members, .. } = &mut self
            && !members.are_known()
        {
            *doing = format!("{}: {doing}", of.rank(rank));
        }
        self.among(of)
    }

    /// The file of this rank's flight recorder. When an error ends a communicator, a background thread soon writes there what was under way
    /// on this rank. `None` if the error is of no communicator, no files are written, or writing has failed. `allstream trace` reads the
    /// files of all ranks.
    pub fn record(&self) -> Option<&Path> {
        members_of!(self).and_then(Members::record)
    }

    /// The rank in the world of a rank that this error names. In a group the two differ, as ranks there count the group's
    /// members. They are equal if the error is about the world's own communicator, or about none.
    pub fn world_rank(&self, rank: Rank) -> Rank {
        members_of!(self).map_or(rank, |members| members.world_rank(rank))
    }

    /// In a device's error, puts `what` in place of the words that say what was being done.
    pub(crate) fn doing(mut self, what: &str) -> Error {
        if let Error::Cuda { doing, .. } = &mut self {
            what.clone_into(doing);
        }
        self
    }

    /// For an error which says that a rank was lost: adds which rank waited, and in which call, for a message to or from the lost rank, and
    /// which messages have come from the lost rank instead.
    pub(crate) fn for_message(mut self, (rank, call): (Rank, &str), pending: Vec<Signature>) -> Error {
        if let Error::PeerLost { waiting, .. } = &mut self {
            *waiting = Some(Box::new(Waiting { rank, call: call.to_owned(), pending }));
        }
        self
    }

    pub(crate) fn during(mut self, here: Operation) -> Error {
        if let Error::PeerLost { operation: operation @ None, .. } = &mut self {
            *operation = Some(here);
        }
        self
    }
}

/// How an operation ended. The error is boxed, so that the value is small where it is moved often.
pub(crate) type Outcome = Result<(), Box<Error>>;

/// A failed operation: the error, and the buffer if nothing can touch it any more.
///
/// `?` turns it into [`Error`] where a function returns that.
pub struct Failed<B> {
    /// The buffer. Its contents are unspecified if a peer's data had begun to arrive. `None`: something may
    /// still access the buffer, so it is kept in quarantine.
    pub buf: Option<B>,
    /// What went wrong.
    pub error: Error,
}

/// Writes the text of `Display`, as [`Error`] does.
impl<B> fmt::Debug for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<B> fmt::Display for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for Failed<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<B> From<Failed<B>> for Error {
    fn from(failed: Failed<B>) -> Error {
        failed.error
    }
}
