//! The collective that a communicator is working on: its parts, in the memory that they are about.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::cuda::{Cuda, CudaLoans};
use super::host::{Host, HostLoans};
use super::inflight::Key;
use super::operation::{Executor, Operation, Part, PartList, Then};
use super::parts::{NextPart, Parts};
use super::port::{Lent, Port};
use crate::device::operation::DeviceOp;
use crate::device::whole::Standing;
use crate::error::{self, Error, MissingState};
use crate::link::region::Region;
use crate::mem::{ALL, Reach};
use crate::types::{Rank, Signature};

/// The collective in work, and what runs it: one of two backends, by where its memory is.
pub(crate) struct Active {
    current: Option<Current>,
    host: Parts<Host, HostLoans>,
    cuda: Parts<Cuda, CudaLoans>,
    /// Memory of the runs' own.
    account: Account,
    pub(crate) stalled_at: Option<Instant>,
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
    next: NextPart,
    /// Stripes of its memory that have come from a device, and how far the operation may go by them.
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
}

impl Active {
    /// `bypass_from`: bytes of results from which on they are written past the caches ([`Host`]).
    pub(crate) fn new(comm: u64, bypass_from: usize) -> Active {
        let host = Parts::new(comm, Host::new(bypass_from), HostLoans::new(bypass_from));
        let cuda = Parts::new(comm, Cuda::default(), CudaLoans);
        Active { current: None, host, cuda, account: Account::default(), stalled_at: None }
    }

    /// The same, of a rank with this region.
    pub(crate) fn of_rank(self, region: &Arc<Region>) -> Active {
        Active { account: Account { region: Some(region.clone()), ..Account::default() }, ..self }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    /// The device that the operation is on, if it is on one.
    pub(crate) fn device(&self) -> Option<&Arc<DeviceOp>> {
        self.current.as_ref()?.op.device()
    }

    /// Whether its parts are in devices' memory, and use the links between devices.
    pub(crate) fn runs_on_devices(&self) -> bool {
        self.current.as_ref().is_some_and(|current| matches!(current.op.executor, Executor::Device(_)))
    }

    /// Whether a library takes the operation whole.
    pub(crate) fn is_whole(&self) -> bool {
        self.current.as_ref().is_some_and(|current| matches!(current.op.executor, Executor::Whole(_)))
    }

    /// Whether a library was given the operation.
    pub(crate) fn is_in_progress(&self) -> bool {
        let executor = self.current.as_ref().map(|current| &current.op.executor);
        matches!(executor, Some(Executor::Whole(whole)) if whole.is_submitted())
    }

    /// What keeps an operation that a library takes whole from its end, where no peer's call is missing.
    pub(crate) fn held_up(&self) -> Option<MissingState> {
        match &self.current.as_ref()?.op.executor {
            Executor::Whole(whole) => whole.held_up(),
            _ => None,
        }
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

    pub(crate) fn start(&mut self, key: Key, op: Operation, started: Instant) {
        self.stalled_at = None;
        let reach = if op.staged.is_some() { (0, 0) } else { ALL };
        self.current = Some(Current { key, op, next: NextPart::default(), arrived: 0, reach, started });
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
        let Some(staged) = current.op.staged.as_ref().filter(|_| current.reach != ALL) else {
            return Ok(false);
        };
        let arrived = staged.arrived(current.arrived, waker)?;
        if arrived == current.arrived {
            return Ok(false);
        }
        (current.arrived, current.reach) = (arrived, staged.reach(arrived));
        // What a device runs is not staged.
        self.host.arrived(current.reach);
        Ok(true)
    }

    /// Whether some of the operation's memory is yet to come.
    pub(crate) fn lacks_memory(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.reach != ALL)
    }

    /// Whether copies of its memory may be on their way that nobody waits for.
    pub(crate) fn is_settling(&self) -> bool {
        let staged = self.current.as_ref().and_then(|current| current.op.staged.as_ref());
        staged.is_some_and(|staged| staged.is_settling())
    }

    /// Forgets the operation: done, or failed.
    pub(crate) fn take(&mut self) -> Option<(Key, u64)> {
        let needed = self.host.clear();
        self.cuda.clear();
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
        self.cuda.freed(lent);
    }

    /// Whether the last pass ended because it had taken long, and not because nothing was left to do.
    pub(crate) fn was_long(&self) -> bool {
        self.host.was_long() && !self.runs_on_devices()
    }

    /// One pass over all parts in flight.
    pub(crate) fn pass(&mut self, port: &mut Port) -> Result<Pass, Error> {
        let Some(current) = &mut self.current else { return Ok(Pass::Going(false)) };
        let work = (&current.op, &mut current.next, current.reach);
        let (any, complete) = match &current.op.executor {
            Executor::Host => self.host.pass(work, None, port)?,
            Executor::Device(_) => self.cuda.pass(work, None, port)?,
            Executor::Whole(whole) if !whole.is_first() => return Ok(Pass::Going(false)),
            Executor::Whole(_) => self.host.pass(work, None, port)?,
        };
        if let Some(staged) = current.op.staged.as_ref().filter(|_| any) {
            staged.done(self.host.stored(current.next).min(current.reach));
        }
        if !complete || current.reach != ALL {
            return Ok(Pass::Going(any));
        }
        match &mut current.op.executor {
            Executor::Host => {}
            Executor::Device(device) => drop(device.enqueued()?),
            Executor::Whole(whole) => {
                if whole.begins_to_agree() {
                    current.next = current.next.of_second_half();
                    return Ok(Pass::Going(true));
                }
                match whole.go_on()? {
                    (moved, Standing::InProgress) => return Ok(Pass::Going(any | moved)),
                    (_, Standing::OnStream | Standing::Over) => {}
                }
            }
        }
        Ok(match current.op.then.take() {
            Some(then) => Pass::Then(current.key, then),
            None => Pass::Done(current.key),
        })
    }

    /// The ranks whose frames, or whose room, the operation waits for.
    pub(crate) fn waiting_for(&self, port: &mut Port) -> Vec<Rank> {
        let mut ranks = Vec::new();
        self.host.waiting_for(port, &mut ranks);
        self.cuda.waiting_for(port, &mut ranks);
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The operation in words.
    pub(crate) fn operation(&self, comm: &str) -> Option<error::Operation> {
        let Operation { number, signature, .. } = self.current.as_ref()?.op;
        Some(error::Operation { comm: comm.to_owned(), number, signature })
    }
}
