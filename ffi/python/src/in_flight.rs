//! The memory that operations use now. Rust's types keep a program from touching memory in flight; Python cannot. A second operation on the same
//! memory, or a part of it, waits for the first if the memory is on the host and both operations are of one communicator. In all other cases the
//! second is refused with an error. Two operations that only read do not disturb each other.

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
    /// The operation only reads; several may read the same memory.
    Read,
    /// The operation writes, and no other may read or write the memory meanwhile.
    Write,
}

/// The call for which memory was taken.
#[derive(Default)]
pub(crate) struct Holder {
    /// The number of its communicator; 0: it may wait for no other call.
    comm: u64,
    /// The operation that the call has submitted, once it has.
    operation: OnceLock<Weak<dyn Operation>>,
    /// How many ranges of memory the call has. Changed only while the table is locked.
    ranges: AtomicUsize,
}

impl Holder {
    /// Waits until the call's operation has given all its memory back; called without the GIL. Returns early if the communicator has failed: then
    /// no operation uses the memory any more, but it may be given back late.
    fn wait(&self, comm: &SharedComm) {
        let mut table = TABLE.lock();
        while self.ranges.load(Ordering::Relaxed) > 0 {
            if RELEASED.wait_for(&mut table, LOOK).timed_out() && comm.check().is_err() {
                return;
            }
        }
    }
}

/// How often a thread that waits for memory checks whether its communicator has failed.
const LOOK: Duration = Duration::from_millis(200);
static RELEASED: Condvar = Condvar::new();

/// The memory that one call takes, and the calls for which it has to wait.
#[derive(Default)]
pub(crate) struct Claim {
    holder: Arc<Holder>,
    /// Earlier calls that have a part of the same memory.
    behind: Vec<Arc<Holder>>,
}

impl Claim {
    /// The claim of a call that may wait for earlier calls of its communicator, which has the number `comm`. (`Claim::default()` waits for none.)
    pub(crate) fn of(comm: u64) -> Claim {
        let holder = Holder { comm, ..Holder::default() };
        Claim { holder: Arc::new(holder), behind: Vec::new() }
    }

    /// Notes the operation that the call has submitted.
    pub(crate) fn submitted(&self, operation: &Arc<impl Operation + 'static>) {
        let operation = Arc::downgrade(operation);
        // Each call does this once, so the cell is empty.
        let _ = self.holder.operation.set(operation);
    }

    /// A function that waits for the earlier calls that have a part of this claim's memory; call it without the GIL. `None`: there are none.
    pub(crate) fn waits(&mut self, comm: &SharedComm) -> Option<impl FnOnce() + Send + 'static + use<>> {
        let behind = std::mem::take(&mut self.behind);
        for operation in behind.iter().filter_map(|holder| holder.operation.get()?.upgrade()) {
            // An operation gives its memory back only when a thread polls it: have the keeper do so. (If its `Work` was dropped, the engine gives
            // the memory back.)
            operation.watch();
        }
        let comm = comm.clone();
        (!behind.is_empty()).then_some(move || behind.iter().for_each(|holder| holder.wait(&comm)))
    }
}

/// A range of memory of a call that waits for earlier operations on a part of it.
struct Queued {
    start: usize,
    end: usize,
    how: Use,
    number: u64,
    holder: Arc<Holder>,
}

#[derive(Default)]
struct Table {
    /// The ranges that are written: by its start, each range's end and holder. No two of them overlap.
    written: BTreeMap<usize, (usize, Arc<Holder>)>,
    /// The ranges that are read: by its start, and a number that tells equal starts apart, each range's end and holder.
    read: BTreeMap<(usize, u64), (usize, Arc<Holder>)>,
    /// No range in `read` is longer than so many bytes. 0 again when `read` becomes empty.
    longest_read: usize,
    /// Ranges that had to wait for another range of this table when they were taken ([`Table::holders`]). Few programs have any.
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
    /// The calls that have a part of this memory, so that it cannot be used in this way now.
    fn holders(&self, start: usize, end: usize, how: Use) -> Vec<Arc<Holder>> {
        // Written ranges do not overlap: of those that begin before `end`, the ones that end after `start` are the last.
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

/// A range of addresses that a call has taken. Dropping this gives the range back.
pub(crate) struct Taken {
    start: usize,
    entry: Entry,
    holder: Arc<Holder>,
}

/// In which part of the table a range is.
enum Entry {
    Written,
    Read(u64),
    Queued(u64),
}

/// Why memory cannot be had.
pub(crate) enum Refused {
    /// Another operation has a part of it, and this call cannot wait for that operation.
    Elsewhere,
    /// Another call, which has not submitted its operation yet, has a part of it. Either another thread makes that call; or that call is asking its
    /// arrays for their memory, and the Python code that runs for this has made the present call. To wait for that call might take for ever.
    Underway,
    /// Another argument of the same call has a part of it.
    Twice,
}

/// Takes `bytes` bytes from `start` on for a call, which may then have to wait for others. `None`: there are no bytes to take. `may_wait`:
/// whether the call may wait for this memory, which is so if it is on the host.
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
    // A claim without a communicator (number 0) waits for no other call.
    let waits_for = |other: &Arc<Holder>| may_wait && holder.comm != 0 && other.comm == holder.comm;
    if !holders.iter().all(waits_for) {
        return Err(Refused::Elsewhere);
    }
    if holders.iter().any(|other| other.operation.get().is_none()) {
        return Err(Refused::Underway);
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
        // In a forked child the table may be locked by a thread that exists only in the parent.
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

/// How many ranges of memory operations have now. Used by tests.
#[pyfunction]
#[pyo3(name = "_in_flight")]
pub(crate) fn in_flight() -> usize {
    let table = TABLE.lock();
    table.written.len() + table.read.len() + table.queued.len()
}
