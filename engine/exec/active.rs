//! The collective that a communicator is working on: its parts, each a plan in a machine, several at a time.

use std::cmp::Ordering;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::device::DeviceOp;
use super::inflight::Key;
use super::machine::{BUDGET, Cut, Machine, Phantom, Setting};
use super::operation::{Operation, Part, PartList, Then};
use super::port::{Lent, Port};
use crate::error::{self, Error};
use crate::link::region::Region;
use crate::mem::device::{ALL, Reach};
use crate::types::{Rank, Signature};

/// Parts of one operation that are in flight together. A list of small buffers so takes few round trips: one cell of
/// a ring each, and a ring has 16.
const WINDOW: usize = 16;

/// The machines. All memory is kept from one operation to the next.
#[allow(clippy::vec_box)] // they go from list to list, and are not small
pub(crate) struct Active {
    setting: Setting,
    current: Option<Current>,
    /// In the order of their parts.
    running: Vec<Box<Machine>>,
    idle: Vec<Box<Machine>>,
    /// The last pass took as much as a pass may.
    was_long: bool,
    /// Memory of the machines' own.
    account: Account,
    pub(crate) stalled_at: Option<Instant>,
}

/// What the machines of a communicator keep of memory of their own, from one operation to the next.
#[derive(Default)]
struct Account {
    /// Where all communicators of the rank are added up.
    region: Option<Arc<Region>>,
    kept: usize,
    /// What the operation has needed so far.
    needed: usize,
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
    /// The next part to start, and its number: parts of a second half count on.
    next: usize,
    number: u16,
    /// Stripes of its memory that have come from a device, and how far the operation may go by them.
    arrived: usize,
    reach: Reach,
    started: Instant,
}

impl Current {
    /// How many rounds of part `order` may be touched.
    fn rounds(&self, order: usize) -> usize {
        let (part, rounds) = self.reach;
        match order.cmp(&part) {
            Ordering::Less => usize::MAX,
            Ordering::Equal => rounds,
            Ordering::Greater => 0,
        }
    }
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
    pub(crate) fn new(comm: u64, streams_from: usize) -> Active {
        Active {
            setting: Setting { comm, phantom: None, cut: None, streams_from },
            current: None,
            running: Vec::new(),
            idle: Vec::new(),
            was_long: false,
            account: Account::default(),
            stalled_at: None,
        }
    }

    /// The same, of a rank with this region.
    pub(crate) fn of_rank(self, region: &Arc<Region>) -> Active {
        Active { account: Account { region: Some(region.clone()), ..Account::default() }, ..self }
    }

    /// For operations that move no memory, in slices of so many bytes.
    pub(crate) fn phantom(phantom: Arc<dyn Phantom>, slice: usize) -> Active {
        let (phantom, cut) = (Some(phantom), Some(Cut::by(slice)));
        let setting = Setting { comm: 0, phantom, cut, streams_from: usize::MAX };
        Active { setting, ..Active::new(0, usize::MAX) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    /// The device that runs the operation, if one does.
    pub(crate) fn device(&self) -> Option<&Arc<DeviceOp>> {
        self.current.as_ref()?.op.device.as_ref()
    }

    /// Number, signature, deadline and start of the operation.
    pub(crate) fn current(&self) -> Option<(u64, Signature, Duration, Instant)> {
        let c = self.current.as_ref()?;
        Some((c.op.number, c.op.signature, c.op.timeout, c.started))
    }

    pub(crate) fn start(&mut self, key: Key, op: Operation, started: Instant) {
        self.stalled_at = None;
        let reach = if op.staged.is_some() { (0, 0) } else { ALL };
        self.current = Some(Current { key, op, next: 0, number: 0, arrived: 0, reach, started });
    }

    /// The second half of an operation.
    pub(crate) fn go_on(&mut self, parts: Vec<Part>) {
        if let Some(current) = &mut self.current {
            (current.op.parts, current.next) = (PartList::Many(parts), 0);
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
        for machine in &mut self.running {
            machine.fill(current.rounds(machine.order));
        }
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
        for mut machine in self.running.drain(..) {
            self.account.needed += machine.memory().1;
            machine.clear();
            self.idle.push(machine);
        }
        self.settle();
        self.current.take().map(|c| (c.key, c.op.number))
    }

    /// An operation is over, and all machines are idle: counts what they keep.
    fn settle(&mut self) {
        self.account.note(self.idle.iter().map(|machine| machine.memory().0).sum());
        if std::mem::take(&mut self.account.needed) > KEPT {
            self.account.much = Some(Instant::now());
        } else if self.is_rested() {
            self.give_memory_back();
        }
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
        if !self.is_empty() && !self.running.is_empty() {
            return;
        }
        let mut kept = 0;
        for machine in &mut self.idle {
            let more = machine.memory().0;
            match kept + more > KEPT {
                true => machine.give_memory_back(),
                false => kept += more,
            }
        }
        self.account.note(kept);
    }

    /// Notes memory that a receiver has given back.
    pub(crate) fn freed(&mut self, lent: Lent) {
        if let Some(machine) = self.running.iter_mut().find(|machine| machine.posted(&lent)) {
            machine.freed(lent);
        }
    }

    /// Whether the last pass ended because it had taken long, and not because nothing was left to do.
    pub(crate) fn was_long(&self) -> bool {
        self.was_long
    }

    /// One pass over all parts in flight. `news`: the only peer whose links have changed since the last pass, where
    /// that is known.
    pub(crate) fn pass(&mut self, port: &mut Port, news: Option<Rank>) -> Result<Pass, Error> {
        let Some(current) = &mut self.current else { return Ok(Pass::Going(false)) };
        while self.running.len() < WINDOW
            && let Some(part) = current.op.parts.get(current.next)
        {
            let mut machine = self.idle.pop().unwrap_or_else(|| Box::new(Machine::new()));
            machine.start(&self.setting, &current.op, part.clone(), current.number);
            machine.order = current.next;
            machine.fill(current.rounds(current.next));
            self.running.push(machine);
            current.next += 1;
            current.number = current.number.wrapping_add(1);
        }
        let (mut any, mut i, mut touched) = (false, 0, 0);
        while i < self.running.len() && touched < BUDGET {
            let (earlier, rest) = self.running.split_at_mut(i);
            let Some(machine) = rest.first_mut() else { break };
            let (moved, complete) = machine.pass((&self.setting, &current.op), earlier, news, port)?;
            any |= moved;
            touched += if self.setting.takes_time(&current.op) { machine.touched() } else { 0 };
            if complete {
                any = true;
                self.running[i].check_values(&self.setting, &current.op)?;
                let mut machine = self.running.remove(i);
                self.account.needed += machine.memory().1;
                machine.clear();
                self.idle.push(machine);
            } else {
                i += 1;
            }
        }
        self.was_long = touched >= BUDGET;
        if let Some(staged) = current.op.staged.as_ref().filter(|_| any) {
            let done = self.running.first().map_or((current.next, 0), |first| (first.order, first.stored()));
            staged.done(done.min(current.reach));
        }
        if !self.running.is_empty() || current.op.parts.get(current.next).is_some() || current.reach != ALL {
            return Ok(Pass::Going(any));
        }
        if let Some(device) = &current.op.device {
            device.filled()?;
        }
        Ok(match current.op.then.take() {
            Some(then) => Pass::Then(current.key, then),
            None => Pass::Done(current.key),
        })
    }

    /// The ranks whose frames, or whose room, the operation waits for.
    pub(crate) fn waiting_for(&self, port: &mut Port) -> Vec<Rank> {
        let mut ranks = Vec::new();
        self.running.iter().for_each(|machine| machine.waiting_for(port, &mut ranks));
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
