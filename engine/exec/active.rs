//! The collective that a communicator is working on: its parts, in the memory that they are about.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::carrier::{Carried, Carrier, Lane, Lanes, Passed};
use super::host::{Host, HostLoans};
use super::inflight::Key;
use super::operation::{Operation, Part, PartList, Then};
use super::parts::{NextPart, Parts, Work};
use super::port::{Lent, Port};
use crate::error::{self, Error};
use crate::link::region::Region;
use crate::mem::{ALL, Reach};
use crate::types::{Rank, Signature};

/// The collective in work, and what runs it in the host's memory.
pub(crate) struct Active {
    current: Option<Current>,
    host: Parts<Host, HostLoans>,
    /// Memory of the runs' own.
    account: Account,
    pub(crate) stalled_at: Option<Instant>,
    /// The driver is asked now and then whether its rank's device has failed.
    pub(crate) is_watched: bool,
}

/// What the runs of a communicator keep of memory of their own, from one operation to the next.
#[derive(Default)]
struct Account {
    /// Where all communicators of the rank are added up.
    region: Option<Arc<Region>>,
    kept: usize,
    /// When an operation last needed more than [`KEPT`].
    much: Option<Instant>,
}

impl Account {
    fn note(&mut self, kept: usize) {
        if let Some(region) = self.region.as_ref().filter(|_| kept != self.kept) {
            region.count_scratch(self.kept, kept);
        }
        self.kept = kept;
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.note(0);
    }
}

/// So much is kept for good: no operation of a few MB allocates anything. More, as for a scaled copy of a large buffer, is kept
/// for [`REST`] after the last operation that needed it: the next of a loop finds it.
pub(crate) const KEPT: usize = 16 << 20;
const REST: Duration = Duration::from_secs(1);

struct Current {
    key: Key,
    op: Operation,
    carrier: Option<Arc<dyn Carrier>>,
    next: NextPart,
    /// Pieces of its memory that have come, and how far the operation may go by them.
    arrived: usize,
    reach: Reach,
    started: Instant,
}

/// What a pass came to.
pub(crate) enum Pass {
    /// Whether anything moved.
    Going(bool),
    /// All parts are done, and something follows.
    Then(Key, Then),
    /// The operation is complete.
    Done(Key),
    /// All of it is on a device's stream.
    OnStream(Key),
}

impl Active {
    /// `bypass_from`: bytes of results from which on they are written past the caches ([`Host`]).
    pub(crate) fn new(comm: u64, bypass_from: usize) -> Active {
        let host = Parts::new(comm, Host::new(bypass_from), HostLoans::new(bypass_from));
        Active { current: None, host, account: Account::default(), stalled_at: None, is_watched: false }
    }

    /// The same, of a rank with this region.
    pub(crate) fn of_rank(self, region: &Arc<Region>) -> Active {
        Active { account: Account { region: Some(region.clone()), ..Account::default() }, ..self }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    /// What carries the operation out, if the host does not do so alone.
    pub(crate) fn carrier(&self) -> Option<&Arc<dyn Carrier>> {
        self.current.as_ref()?.carrier.as_ref()
    }

    /// Key and number of the operation.
    pub(crate) fn id(&self) -> Option<(Key, u64)> {
        self.current.as_ref().map(|current| (current.key, current.op.number))
    }

    /// Number, signature, deadline and start of the operation.
    pub(crate) fn current(&self) -> Option<(u64, Signature, Duration, Instant)> {
        let c = self.current.as_ref()?;
        Some((c.op.number, c.op.signature, c.op.timeout, c.started))
    }

    /// The operation's time limit counts from here on.
    pub(crate) fn count_from(&mut self, now: Instant) {
        self.current.iter_mut().for_each(|current| current.started = now);
    }

    pub(crate) fn start(&mut self, key: Key, carried: Carried, started: Instant) {
        (self.stalled_at, self.is_watched) = (None, false);
        let Carried { operation: op, carrier } = carried;
        let reach = carrier.as_ref().map_or(ALL, |carrier| carrier.reach());
        self.current =
            Some(Current { key, op, carrier, next: NextPart::default(), arrived: 0, reach, started });
    }

    /// The second half of an operation.
    pub(crate) fn go_on(&mut self, parts: Vec<Part>) {
        if let Some(current) = &mut self.current {
            (current.op.parts, current.next) = (PartList::Many(parts), current.next.of_second_half());
        }
    }

    /// Looks at what has come of the operation's memory; `waker` is woken when more has. Whether any has.
    ///
    /// # Errors
    /// It does not come.
    pub(crate) fn arrived(&mut self, waker: &Waker) -> Result<bool, Error> {
        let Some(current) = &mut self.current else { return Ok(false) };
        let Some(carrier) = current.carrier.as_ref().filter(|_| current.reach != ALL) else {
            return Ok(false);
        };
        let (arrived, reach) = carrier.arrived(current.arrived, waker)?;
        if arrived == current.arrived {
            return Ok(false);
        }
        (current.arrived, current.reach) = (arrived, reach);
        self.host.arrived(reach);
        Ok(true)
    }

    /// Whether some of the operation's memory is yet to come.
    pub(crate) fn lacks_memory(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.reach != ALL)
    }

    /// Forgets the operation: done, or failed.
    pub(crate) fn take(&mut self) -> Option<(Key, u64)> {
        let needed = self.host.clear();
        self.account.note(self.host.kept());
        if needed > KEPT {
            self.account.much = Some(Instant::now());
        } else if self.is_rested() {
            self.give_memory_back();
        }
        self.current.take().map(|c| (c.key, c.op.number))
    }

    /// Whether more memory is kept than should be for long.
    pub(crate) fn keeps_much(&self) -> bool {
        self.account.kept > KEPT
    }

    /// Whether it is, and no operation has needed it for a while.
    pub(crate) fn is_rested(&self) -> bool {
        self.keeps_much() && self.account.much.is_none_or(|at| at.elapsed() > REST)
    }

    /// Gives back what is kept beyond [`KEPT`]; with an operation under way, its end does so.
    pub(crate) fn give_memory_back(&mut self) {
        if !self.host.is_running() {
            let kept = self.host.give_memory_back(KEPT);
            self.account.note(kept);
        }
    }

    /// Notes memory that a receiver has given back.
    pub(crate) fn freed(&mut self, lent: &Lent) {
        self.host.freed(lent);
    }

    /// Whether the last pass ended because it had taken long, and not because nothing was left to do.
    pub(crate) fn was_long(&self) -> bool {
        self.host.was_long()
    }

    /// One pass over all parts in flight. `device`: where parts may run besides.
    pub(crate) fn pass(
        &mut self,
        port: &mut Port,
        device: Option<&mut (dyn Lane + 'static)>,
    ) -> Result<Pass, Error> {
        let Some(Current { key, op, carrier, next, reach, .. }) = &mut self.current else {
            return Ok(Pass::Going(false));
        };
        let mut work = Work { op, next, reach: *reach };
        let passed = match carrier {
            None => match self.host.pass(&mut work, None, port)? {
                (_, true) => Passed::Complete,
                (any, false) => Passed::Going(any),
            },
            Some(carrier) => {
                let mut lanes = Lanes { host: &mut self.host, port, device };
                carrier.pass(&mut work, &mut lanes)?
            }
        };
        let key = *key;
        Ok(match passed {
            Passed::Going(any) => Pass::Going(any),
            Passed::Again => {
                *next = next.of_second_half();
                Pass::Going(true)
            }
            Passed::Complete | Passed::OnStream => match (op.then.take(), passed) {
                (Some(then), _) => Pass::Then(key, then),
                (None, Passed::OnStream) => Pass::OnStream(key),
                (None, _) => Pass::Done(key),
            },
        })
    }

    /// Adds the ranks whose frames, or whose room, parts in the host's memory wait for.
    pub(crate) fn waiting_for(&self, port: &mut Port, ranks: &mut Vec<Rank>) {
        self.host.waiting_for(port, ranks);
    }

    /// The operation in words.
    pub(crate) fn operation(&self, comm: &str) -> Option<error::Operation> {
        let Operation { number, signature, .. } = self.current.as_ref()?.op;
        Some(error::Operation { comm: comm.to_owned(), number, signature })
    }
}
