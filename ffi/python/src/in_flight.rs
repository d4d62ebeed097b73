//! Which memory operations have now. Rust's types keep a program from touching what is in flight; Python has nothing of the kind, so a
//! second operation on the same memory, also on a part, is refused by name.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::keeper;

/// What an operation does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It reads: several may.
    Read,
    /// It writes, and nobody else may read or write.
    Write,
}

#[derive(Default)]
struct Table {
    /// Memory that is written, by its start: the end. No two of them overlap.
    written: BTreeMap<usize, usize>,
    /// Memory that is read, by its start and a number: the end.
    read: BTreeMap<(usize, u64), usize>,
    /// The longest that was read since nothing was.
    longest_read: usize,
    next: u64,
}

static TABLE: Mutex<Table> =
    Mutex::new(Table { written: BTreeMap::new(), read: BTreeMap::new(), longest_read: 0, next: 0 });

impl Table {
    fn is_written(&self, start: usize, end: usize) -> bool {
        // The ranges do not overlap, so of those that begin before `end` the last one ends last.
        self.written.range(..end).next_back().is_some_and(|(_, ends)| *ends > start)
    }

    fn is_read(&self, start: usize, end: usize) -> bool {
        let first = (start.saturating_sub(self.longest_read), 0);
        self.read.range(first..(end, 0)).any(|(_, ends)| *ends > start)
    }
}

/// A range of addresses that an operation has; given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    start: usize,
    /// None: it is written.
    reader: Option<u64>,
}

/// Takes `bytes` bytes from `start` on for an operation; `None`: another one has some of them. Without bytes there is nothing to take.
pub(crate) fn take(start: usize, bytes: usize, how: Use) -> Result<Option<Taken>, ()> {
    if bytes == 0 {
        return Ok(None);
    }
    let end = start.saturating_add(bytes);
    let mut table = TABLE.lock();
    if table.is_written(start, end) || how == Use::Write && table.is_read(start, end) {
        return Err(());
    }
    let reader = match how {
        Use::Write => {
            table.written.insert(start, end);
            None
        }
        Use::Read => {
            let number = table.next;
            table.next += 1;
            table.longest_read = table.longest_read.max(bytes);
            table.read.insert((start, number), end);
            Some(number)
        }
    };
    Ok(Some(Taken { start, reader }))
}

impl Drop for Taken {
    fn drop(&mut self) {
        // In a forked child the table may be locked by a thread that is not there.
        if keeper::is_forked() {
            return;
        }
        let mut table = TABLE.lock();
        match self.reader {
            None => drop(table.written.remove(&self.start)),
            Some(number) => {
                table.read.remove(&(self.start, number));
                if table.read.is_empty() {
                    table.longest_read = 0;
                }
            }
        }
    }
}

/// How many ranges of memory operations have now: for tests.
#[pyfunction]
#[pyo3(name = "_in_flight")]
pub(crate) fn in_flight() -> usize {
    let table = TABLE.lock();
    table.written.len() + table.read.len()
}
