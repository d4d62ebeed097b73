//! Which memory operations have now. Rust's types keep a program from touching what is in flight; Python has nothing of the kind. A second
//! operation on the same memory, also on a part, waits for the first one where both are of the same communicator, and is refused by name else.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use allstream::SharedComm;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::keeper;
use crate::operation::Operation;

/// What an operation does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It reads: several may.
    Read,
    /// It writes, and nobody else may read or write.
    Write,
}

/// The call that memory was taken for.
#[derive(Default)]
pub(crate) struct Holder {
    /// Its communicator.
    comm: u64,
    /// What it has submitted, once it has.
    operation: OnceLock<Weak<dyn Operation>>,
    /// How many ranges it has. Changed with the table locked.
    ranges: AtomicUsize,
}

impl Holder {
    /// Waits, without the GIL, until the call's operation is over and has given its memory back. Where the communicator has failed nobody works on
    /// memory any more, but it may come back late.
    fn wait(&self, comm: &SharedComm) {
        let mut table = TABLE.lock();
        while self.ranges.load(Ordering::Relaxed) > 0 {
            if RELEASED.wait_for(&mut table, LOOK).timed_out() && comm.check().is_err() {
                return;
            }
        }
    }
}

/// How often whoever waits for memory looks whether its communicator has failed.
const LOOK: Duration = Duration::from_millis(200);
static RELEASED: Condvar = Condvar::new();

/// What one call takes, and what it has to wait for.
#[derive(Default)]
pub(crate) struct Claim {
    holder: Arc<Holder>,
    /// Earlier calls that have some of the same memory.
    behind: Vec<Arc<Holder>>,
}

impl Claim {
    /// Of a call of a communicator that may wait for its own earlier ones. Another's (`Claim::default()`) waits for none.
    pub(crate) fn of(comm: u64) -> Claim {
        let holder = Holder { comm, ..Holder::default() };
        Claim { holder: Arc::new(holder), behind: Vec::new() }
    }

    /// The call has submitted its operation.
    pub(crate) fn submitted(&self, operation: &Arc<impl Operation + 'static>) {
        let operation = Arc::downgrade(operation);
        // It is called once for each call.
        let _ = self.holder.operation.set(operation);
    }

    /// What waits, without the GIL, for earlier calls that have some of the memory, if there are any.
    pub(crate) fn waits(&mut self, comm: &SharedComm) -> Option<impl FnOnce() + Send + 'static + use<>> {
        let behind = std::mem::take(&mut self.behind);
        for operation in behind.iter().filter_map(|holder| holder.operation.get()?.upgrade()) {
            // An operation gives its memory back when somebody looks at it. One whose work was dropped does so by itself.
            operation.watch();
        }
        let comm = comm.clone();
        (!behind.is_empty()).then_some(move || behind.iter().for_each(|holder| holder.wait(&comm)))
    }
}

/// Memory that waits behind an earlier operation's.
struct Queued {
    start: usize,
    end: usize,
    how: Use,
    number: u64,
    holder: Arc<Holder>,
}

#[derive(Default)]
struct Table {
    /// Memory that is written, by its start: the end. No two of them overlap.
    written: BTreeMap<usize, (usize, Arc<Holder>)>,
    /// Memory that is read, by its start and a number: the end.
    read: BTreeMap<(usize, u64), (usize, Arc<Holder>)>,
    /// The longest that was read since nothing was.
    longest_read: usize,
    /// What overlaps with others of these three. Few programs have any.
    queued: Vec<Queued>,
    next: u64,
}

static TABLE: Mutex<Table> = Mutex::new(Table {
    written: BTreeMap::new(),
    read: BTreeMap::new(),
    longest_read: 0,
    queued: Vec::new(),
    next: 0,
});

impl Table {
    /// Calls that have some of this memory, so that it cannot be had now.
    fn holders(&self, start: usize, end: usize, how: Use) -> Vec<Arc<Holder>> {
        // The ranges do not overlap, so those that end after `start` are the last ones that begin before `end`.
        let written = self.written.range(..end).rev().take_while(|(_, (ends, _))| *ends > start);
        let mut all: Vec<_> = written.map(|(_, (_, holder))| holder.clone()).collect();
        if how == Use::Write {
            let first = (start.saturating_sub(self.longest_read), 0);
            let read = self.read.range(first..(end, 0)).filter(|(_, (ends, _))| *ends > start);
            all.extend(read.map(|(_, (_, holder))| holder.clone()));
        }
        let overlaps = |other: &&Queued| {
            other.start < end && other.end > start && (how == Use::Write || other.how == Use::Write)
        };
        all.extend(self.queued.iter().filter(overlaps).map(|other| other.holder.clone()));
        all
    }
}

/// A range of addresses that an operation has; given back when this is dropped.
pub(crate) struct Taken {
    start: usize,
    entry: Entry,
    holder: Arc<Holder>,
}

/// Where it is written down.
enum Entry {
    Written,
    Read(u64),
    Queued(u64),
}

/// Why memory cannot be had.
pub(crate) enum Refused {
    /// Another operation has some of it.
    Elsewhere,
    /// Another argument of the same call has.
    Twice,
}

/// Takes `bytes` bytes from `start` on for a call, which may have to wait for others. Without bytes there is nothing to take. `may_wait`: of
/// memory of the host's.
pub(crate) fn take(
    start: usize,
    bytes: usize,
    how: Use,
    may_wait: bool,
    claim: &mut Claim,
) -> Result<Option<Taken>, Refused> {
    if bytes == 0 {
        return Ok(None);
    }
    let end = start.saturating_add(bytes);
    let mut table = TABLE.lock();
    let holders = table.holders(start, end, how);
    let holder = claim.holder.clone();
    if holders.iter().any(|other| Arc::ptr_eq(other, &holder)) {
        return Err(Refused::Twice);
    }
    // A claim of no communicator's (0) waits for nobody.
    let waits_for = |other: &Arc<Holder>| may_wait && holder.comm != 0 && other.comm == holder.comm;
    if !holders.iter().all(waits_for) {
        return Err(Refused::Elsewhere);
    }
    let number = table.next;
    table.next += 1;
    holder.ranges.fetch_add(1, Ordering::Relaxed);
    let entry = match how {
        _ if !holders.is_empty() => {
            claim.behind.extend(holders);
            table.queued.push(Queued { start, end, how, number, holder: holder.clone() });
            Entry::Queued(number)
        }
        Use::Write => {
            table.written.insert(start, (end, holder.clone()));
            Entry::Written
        }
        Use::Read => {
            table.longest_read = table.longest_read.max(bytes);
            table.read.insert((start, number), (end, holder.clone()));
            Entry::Read(number)
        }
    };
    Ok(Some(Taken { start, entry, holder }))
}

impl Drop for Taken {
    fn drop(&mut self) {
        // In a forked child the table may be locked by a thread that is not there.
        if keeper::is_forked() {
            return;
        }
        let mut table = TABLE.lock();
        match self.entry {
            Entry::Written => drop(table.written.remove(&self.start)),
            Entry::Queued(number) => table.queued.retain(|queued| queued.number != number),
            Entry::Read(number) => {
                table.read.remove(&(self.start, number));
                if table.read.is_empty() {
                    table.longest_read = 0;
                }
            }
        }
        self.holder.ranges.fetch_sub(1, Ordering::Relaxed);
        RELEASED.notify_all();
    }
}

/// How many ranges of memory operations have now: for tests.
#[pyfunction]
#[pyo3(name = "_in_flight")]
pub(crate) fn in_flight() -> usize {
    let table = TABLE.lock();
    table.written.len() + table.read.len() + table.queued.len()
}
