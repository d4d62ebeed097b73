//! The collective that a communicator is working on, and the runs of its parts in the host's memory.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::carrier::{Carried, Carrier, Lane, Lanes, Passed};
use super::host::{Host, HostLoans};
use super::inflight::Key;
use super::operation::{Operation, Part, PartList, Then};
use super::port::{Lent, Port};
use super::run::{NextPart, Parts, Work};
use crate::error::{self, Error};
use crate::link::region::Region;
use crate::mem::{ALL, Reach};
use crate::types::{Rank, Signature};

/// The collective in work, and what runs it in the host's memory.
pub(crate) struct Active {
    current: Option<Current>,
    host: Parts<Host, HostLoans>,
    /// The working memory of the runs.
    account: Account,
    pub(crate) stalled_at: Option<Instant>,
    /// Whether the driver is already being asked now and then if this rank's device has failed.
    pub(crate) is_watched: bool,
}

/// How much working memory the runs of a communicator keep from one operation to the next.
#[derive(Default)]
struct Account {
    /// The rank's region, where the memory of all communicators of the rank is added up. `None`: it is not added.
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

/// So many bytes of working memory are kept for good, so that no operation of a few MB allocates anything. More (for a scaled copy of a
/// large buffer, say) is kept for [`REST`] after the last operation that needed it, so that the next operation of a loop finds it.
pub(crate) const KEPT: usize = 16 << 20;
const REST: Duration = Duration::from_secs(1);

struct Current {
    key: Key,
    op: Operation,
    carrier: Option<Arc<dyn Carrier>>,
    next: NextPart,
    /// How many pieces of the operation's memory have come, and how far the operation may go with these.
    arrived: usize,
    reach: Reach,
    /// Since when its time limit counts: since the end of its first pass. `None`: there was none yet. Small operations are over with that pass, and
    /// reading the clock takes longer than much else that they do.
    started: Option<Instant>,
}

/// What a pass came to.
pub(crate) enum Pass {
    /// The operation is not complete yet. The value says whether anything moved.
    Going(bool),
    /// All parts are done. The function makes the parts of the second half.
    Then(Key, Then),
    /// The operation is complete.
    Done(Key),
    /// All of the operation is on a device's stream.
    OnStream(Key),
}

impl Active {
    /// `bypass_from`: results of so many bytes and more are written past the caches ([`Host`]). `lends`: whether all ranks share memory, so that
    /// they can lend it to each other.
    pub(crate) fn new(comm: u64, bypass_from: usize, lends: bool) -> Active {
        let host = Parts::new(comm, Host::new(bypass_from), HostLoans::new(bypass_from, lends));
        Active { current: None, host, account: Account::default(), stalled_at: None, is_watched: false }
    }

    /// The same, with its working memory added to that of the rank with this region.
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

    /// Makes valid what has come of the values of an operation that has failed: bytes that are no bools become `false`. Called once nobody else
    /// touches the operation's buffers, before they go back to the user.
    pub(crate) fn make_values_valid(&mut self) {
        let on_host = self.current.iter_mut().filter(|current| current.carrier.is_none());
        on_host.flat_map(|current| current.op.parts.all()).for_each(|part| _ = part.check_values());
    }

    /// Number, signature and time limit of the operation.
    pub(crate) fn current(&self) -> Option<(u64, Signature, Duration)> {
        let c = self.current.as_ref()?;
        Some((c.op.number, c.op.signature, c.op.timeout))
    }

    /// Since when the operation's time limit counts, if there is an operation. The first call, at the end of the operation's first pass, sets this
    /// to what `now` returns.
    pub(crate) fn started(&mut self, now: impl FnOnce() -> Instant) -> Option<Instant> {
        Some(*self.current.as_mut()?.started.get_or_insert_with(now))
    }

    /// The operation's time limit counts from here on.
    pub(crate) fn count_from(&mut self, now: Instant) {
        self.current.iter_mut().for_each(|current| current.started = Some(now));
    }

    pub(crate) fn start(&mut self, key: Key, carried: Carried) {
        (self.stalled_at, self.is_watched) = (None, false);
        let Carried { operation: op, carrier } = carried;
        let reach = carrier.as_ref().map_or(ALL, |carrier| carrier.reach());
        let (next, arrived, started) = (NextPart::default(), 0, None);
        self.current = Some(Current { key, op, carrier, next, arrived, reach, started });
    }

    /// Goes on with the operation's second half, which has these parts.
    pub(crate) fn go_on(&mut self, parts: Vec<Part>) {
        if let Some(current) = &mut self.current {
            (current.op.parts, current.next) = (PartList::Many(parts), current.next.of_second_half());
        }
    }

    /// Looks how much of the operation's memory has come; what `waker` returns is woken when more has. Returns whether more has come since the last look.
    ///
    /// # Errors
    /// Some of the memory will not come.
    pub(crate) fn arrived<'w>(&mut self, waker: impl FnOnce() -> &'w Waker) -> Result<bool, Error> {
        let Some(current) = &mut self.current else { return Ok(false) };
        let Some(carrier) = current.carrier.as_ref().filter(|_| current.reach != ALL) else {
            return Ok(false);
        };
        let (arrived, reach) = carrier.arrived(current.arrived, waker())?;
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

    /// Forgets the operation, which is done or has failed. Returns its key and number.
    pub(crate) fn take(&mut self) -> Option<(Key, u64)> {
        let needed = self.host.clear();
        self.account.note(self.host.kept());
        if needed > KEPT {
            self.account.much = Some(Instant::now());
        } else if self.is_rested() {
            self.give_memory_back();
        }
        let ended = self.current.as_ref().map(|current| (current.key, current.op.number));
        // Dropped where it lies: to take it out would copy it.
        self.current = None;
        ended
    }

    /// Whether more than [`KEPT`] bytes are kept, which should not last long.
    pub(crate) fn keeps_much(&self) -> bool {
        self.account.kept > KEPT
    }

    /// Whether more than [`KEPT`] bytes are kept, and no operation has needed so many for [`REST`].
    pub(crate) fn is_rested(&self) -> bool {
        self.keeps_much() && self.account.much.is_none_or(|at| at.elapsed() > REST)
    }

    /// Gives back what is kept beyond [`KEPT`]. While an operation runs it does nothing: [`take`](Self::take) looks again at the end.
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

    /// Makes one pass over all parts in flight. `device`: the lane in which parts may run beside the host's memory.
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

    /// Adds to `ranks` those whose frames parts in the host's memory wait for, and those to which they wait to send.
    pub(crate) fn waiting_for(&self, port: &mut Port, ranks: &mut Vec<Rank>) {
        self.host.waiting_for(self.current.as_ref().map(|current| &current.op), port, ranks);
    }

    /// The operation, as errors name it.
    pub(crate) fn operation(&self, comm: &str) -> Option<error::Operation> {
        let Operation { number, signature, .. } = self.current.as_ref()?.op;
        Some(error::Operation { comm: comm.to_owned(), number, signature })
    }
}
