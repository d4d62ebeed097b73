//! What went wrong, on which rank, in which operation, expected and found, and what to do.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::types::{Rank, Signature};

/// Why an operation, a connection or a call failed.
///
/// The first cause that a group learns of is everyone's: a survivor of a crash names the rank that died,
/// not the neighbour that went away because of it.
#[derive(Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call that cannot be carried out as it is. Nothing was submitted; the buffer comes back.
    #[error("{call}: {problem}")]
    Invalid {
        /// The call, for instance `all_reduce`.
        call: String,
        /// Expected and found, and what to do.
        problem: String,
    },
    /// An operation was the oldest of its communicator for longer than its deadline. The group is aborted.
    #[error("{operation} on rank {rank} timed out after {after:?}: {}", Missing::list(.missing))]
    Timeout {
        /// The operation.
        operation: Operation,
        /// The rank whose deadline passed.
        rank: Rank,
        /// The deadline.
        after: Duration,
        /// The ranks it waited for, and what is known of them.
        missing: Vec<Missing>,
    },
    /// An `agree` or `shrink` came to no verdict in time. The agreement stays open: ranks that wait longer may still end it.
    #[error(
        "{call} of communicator {comm} has no verdict on rank {rank} after {after:?}: {}; every rank that lives must call it equally often",
        Missing::list(.missing)
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
    },
    /// A process of the group died or fell silent.
    #[error("rank {rank} was lost ({how}){}", at(.operation))]
    PeerLost {
        /// The rank that was lost: the root cause, not an echo.
        rank: Rank,
        /// How it was noticed.
        how: Lost,
        /// The operation in flight here.
        operation: Option<Operation>,
    },
    /// A connection that carries data broke, and both of its ranks live. The group is aborted.
    #[error(
        "the {kind} connection that carries data between rank {rank} (at {at}) and rank {peer} (at {peer_at}) broke, and both ranks live: on rank {rank}, {problem}; look at what lies between the two hosts (a firewall, a NAT, a cable), then make the communicator again"
    )]
    Link {
        /// What kind of link it was, for instance `TCP`.
        kind: String,
        /// The rank that noticed.
        rank: Rank,
        /// Its end of the connection.
        at: String,
        /// The rank at the other end.
        peer: Rank,
        /// That rank's end.
        peer_at: String,
        /// What the system said.
        problem: String,
    },
    /// Two ranks called different operations.
    #[error(
        "ranks disagree on operation #{number} of communicator {comm}: rank {rank} called {ours}, rank {peer} called {theirs}; every rank must make the same calls in the same order"
    )]
    Mismatch {
        /// The communicator.
        comm: String,
        /// Number of the operation in its communicator (or of the message, for send and recv).
        number: u64,
        /// The rank that noticed.
        rank: Rank,
        /// What it had called.
        ours: Signature,
        /// The rank that disagrees.
        peer: Rank,
        /// What that rank had called.
        theirs: Signature,
    },
    /// A rank called `abort()`.
    #[error("the communicator was aborted by rank {by}: {reason}")]
    Aborted {
        /// The rank that aborted.
        by: Rank,
        /// The reason it gave.
        reason: String,
    },
    /// More operations wait to be started than the communicator's limit.
    #[error(
        "{call}: {limit} operations of this communicator are queued or running already; await some of them first"
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
        /// Where.
        address: String,
        /// The rank that gave up.
        rank: Rank,
        /// What happened, and what to do.
        problem: String,
    },
    /// A peer could not prove that it belongs to the job, or speaks another version.
    #[error("connection with {peer} refused: {problem}")]
    Refused {
        /// Who.
        peer: String,
        /// Why, and what to do.
        problem: String,
    },
    /// Something this needs is not on this machine.
    #[error("{what} is not available: {problem}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// What was looked for, and what to install or set.
        problem: String,
    },
    /// A user's reduction function panicked. The group is aborted.
    #[error(
        "{call}: the reduction function {name:?} panicked on rank {rank}; its message is on that rank's stderr"
    )]
    Function {
        /// The call.
        call: String,
        /// The function's name.
        name: String,
        /// The rank where it happened.
        rank: Rank,
    },
    /// The system refused a call.
    #[error("{doing}: {problem}")]
    System {
        /// What was being done.
        doing: String,
        /// The system's words.
        problem: String,
    },
    /// The CUDA driver refused a call, or told with it how earlier work has ended.
    #[error("{doing} on CUDA device {device}: {call} answered {name} ({code}): {problem}")]
    Cuda {
        /// What was being done.
        doing: String,
        /// The device's number in this process.
        device: usize,
        /// The driver's function.
        call: String,
        /// What it answered, as a number.
        code: i32,
        /// As a name.
        name: String,
        /// What that means, and what to do.
        problem: String,
    },
    /// A library that takes collectives whole has failed, or does not work here.
    #[error("{library} on rank {rank}: {problem}")]
    Library {
        /// The library and its version.
        library: String,
        /// The rank that noticed.
        rank: Rank,
        /// What was called, what it answered, and what to do.
        problem: String,
    },
    /// Bytes from a peer that no correct peer sends.
    #[error("rank {peer} sent what no correct peer sends: {problem}")]
    Protocol {
        /// The peer.
        peer: Rank,
        /// What was wrong.
        problem: String,
    },
}

/// The text of `Display`: what `fn main() -> Result<(), Error>` prints is for a person.
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

/// An operation, for messages to people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// The communicator.
    pub comm: String,
    /// Its number in the communicator.
    pub number: u64,
    /// What was called.
    pub signature: Signature,
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
    /// It answers, and has not called this operation; its last was this number (none yet if `None`).
    NotCalled(Option<u64>),
    /// It answers, and waits in this operation as well.
    Waiting,
    /// It has called this operation, and what its device is to do before is not done: its input is not there.
    NotReady,
    /// All ranks have called, and the library that takes the operation whole has not ended it there.
    NotEnded {
        /// The library.
        by: String,
    },
    /// All ranks have called, and its device launches what libraries take whole in the order in which it was submitted there:
    /// on another rank that may have been another order.
    LaunchOrder {
        /// The operation that was submitted before or after this one.
        other: String,
        /// Before.
        is_before: bool,
    },
    /// It does not answer on its control connection.
    NoAnswer,
    /// It has not made the matching call (`send` or `recv`), or its data has not come.
    NotMatched {
        /// The call that would match.
        direction: String,
    },
}

impl Missing {
    fn list(missing: &[Missing]) -> String {
        if missing.is_empty() {
            return "waiting for its own input (a stream that `on` named has not reached this point)".into();
        }
        missing.iter().map(Missing::to_string).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            MissingState::NotMatched { direction } => {
                write!(
                    f,
                    "rank {} has not made the matching {direction}, or waits in another call",
                    self.rank
                )
            }
            MissingState::NotCalled(Some(last)) => {
                write!(f, "rank {} has not called it (its last operation was #{last})", self.rank)
            }
            MissingState::NotCalled(None) => write!(f, "rank {} has not called it", self.rank),
            MissingState::Waiting => write!(f, "rank {} has called it and waits too", self.rank),
            MissingState::NotReady => {
                write!(f, "rank {} has called it, and its device has not come to it", self.rank)
            }
            MissingState::NotEnded { by } => {
                write!(f, "rank {} has given it to {by}, which has not ended it", self.rank)
            }
            MissingState::LaunchOrder { other, is_before } => {
                let order = if *is_before { "before" } else { "after" };
                write!(
                    f,
                    "rank {} has called {other} {order} it, for the same device; all ranks must call both in one order",
                    self.rank
                )
            }
            MissingState::NoAnswer => write!(f, "rank {} does not answer", self.rank),
        }
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

fn at(operation: &Option<Operation>) -> String {
    operation.as_ref().map(|o| format!(" during {o}")).unwrap_or_default()
}

impl Error {
    pub(crate) fn invalid(call: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Invalid { call: call.into(), problem: problem.into() }
    }

    pub(crate) fn system(doing: impl Into<String>, problem: impl fmt::Display) -> Error {
        Error::System { doing: doing.into(), problem: problem.to_string() }
    }

    /// Says what was being done in the caller's words, where a device failed at it.
    pub(crate) fn doing(mut self, what: &str) -> Error {
        if let Error::Cuda { doing, .. } = &mut self {
            what.clone_into(doing);
        }
        self
    }

    /// Names the operation in flight here where the cause itself does not.
    pub(crate) fn during(mut self, here: Operation) -> Error {
        if let Error::PeerLost { operation: operation @ None, .. } = &mut self {
            *operation = Some(here);
        }
        self
    }
}

/// How an operation ended, where it is handed on from hand to hand: small.
pub(crate) type Outcome = Result<(), Box<Error>>;

/// A failed operation: the error, and the buffer if nothing can touch it any more.
///
/// `?` turns it into [`Error`] where a function returns that.
pub struct Failed<B> {
    /// The buffer, its contents unspecified where a peer's data had begun to arrive. `None`: kept in
    /// quarantine because something may still access it.
    pub buf: Option<B>,
    /// What went wrong.
    pub error: Error,
}

impl<B> fmt::Debug for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).field("buf", &self.buf.is_some()).finish()
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
