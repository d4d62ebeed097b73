//! Allocations of other libraries from which memory is lent to ranks in other processes.
//!
//! A block of the pool is not given back to the driver while other processes may have it open. But another library's allocation belongs
//! to its owner: as soon as no buffer lies in it any more, the owner may free it, and the driver may give the same address to the next
//! allocation. So each call of a collective asks which number the driver has given the allocation (`CU_POINTER_ATTRIBUTE_BUFFER_ID`;
//! `share.rs`), and peers know the allocation by a number of ours. Neither number is ever given to another allocation.

use std::collections::BTreeMap;

use super::blocks::{Exported, new_number};

struct Allocation {
    bytes: u64,
    /// The driver's number of it.
    id: u64,
    /// Our number of it, by which peers know it.
    number: u64,
    handle: [u8; 64],
}

/// By address. An allocation that was freed may still be here.
#[derive(Default)]
pub(super) struct Allocations(BTreeMap<u64, Allocation>);

impl Allocations {
    /// The allocation that holds all `bytes` bytes from the address `at` on, and where it begins.
    fn holding(&self, at: u64, bytes: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.0.range(..=at).next_back()?;
        let end = (at - base).checked_add(bytes)?;
        (end <= allocation.bytes).then_some((*base, allocation))
    }

    /// What other processes are told of memory that lies in one of the allocations.
    pub(super) fn name(&self, at: u64, bytes: u64) -> Option<Exported> {
        let (base, &Allocation { bytes, number, handle, .. }) = self.holding(at, bytes)?;
        Some(Exported { number, offset: at - base, handle, base, bytes })
    }

    /// Whether the `bytes` bytes at `at` lie in a known allocation to which the driver has given the number `id`. 0 is no such number.
    pub(super) fn has(&self, at: u64, bytes: u64, id: u64) -> bool {
        id != 0 && self.holding(at, bytes).is_some_and(|(_, allocation)| allocation.id == id)
    }

    /// Takes in an allocation: where it lies, its length, the driver's number of it and the handle. Known allocations that it overlaps have
    /// been freed, and are forgotten.
    pub(super) fn put(&mut self, (base, bytes): (u64, u64), id: u64, handle: [u8; 64]) {
        let end = base.saturating_add(bytes);
        self.0.retain(|at, known| at.saturating_add(known.bytes) <= base || *at >= end);
        self.0.insert(base, Allocation { bytes, id, number: new_number(), handle });
    }

    /// Where each allocation begins, and the driver's number of it.
    pub(super) fn all(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|(base, known)| (*base, known.id)).collect()
    }

    /// Forgets one that was freed.
    pub(super) fn forget(&mut self, base: u64, id: u64) {
        if self.0.get(&base).is_some_and(|known| known.id == id) {
            self.0.remove(&base);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_takes_the_place_of_what_was_freed_there() {
        let mut all = Allocations::default();
        all.put((0x1000, 0x1000), 1, [1; 64]);
        all.put((0x3000, 0x1000), 2, [2; 64]);
        assert!(all.has(0x1800, 0x800, 1) && !all.has(0x1800, 0x801, 1) && !all.has(0x1800, 1, 2));
        assert!(!all.has(0x2000, 1, 1) && !all.has(0xfff, 1, 1) && !all.has(0x1000, u64::MAX, 1));
        let (first, second) = (all.name(0x1000, 16).unwrap(), all.name(0x3010, 16).unwrap());
        assert_eq!(
            (second.offset, second.handle, second.base, second.bytes),
            (0x10, [2; 64], 0x3000, 0x1000)
        );
        // The same address again; then an allocation over the end of the first and the beginning of the second.
        all.put((0x1000, 0x1000), 3, [3; 64]);
        assert!(!all.has(0x1000, 16, 1));
        let again = all.name(0x1000, 16).unwrap();
        assert!(again.number > second.number && second.number > first.number, "numbers grow");
        all.put((0x1800, 0x2000), 4, [4; 64]);
        assert_eq!(all.all(), [(0x1800, 4)]);
        assert!(all.name(0x1000, 16).is_none());
        all.forget(0x1800, 3);
        assert_eq!(all.all(), [(0x1800, 4)]);
        all.forget(0x1800, 4);
        assert_eq!(all.all(), []);
    }
}
