//! Pinned host memory that a device's context keeps for the next operations.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use allstream_sys::cuda::{Cuda, CudaError};

use crate::mem::PINNED;

/// At most so many bytes are kept for good, as the driver takes 0.1 ms and more to pin memory. A block that is larger is kept only if no other
/// is, and only for [`REST`] after its last use, so that the next operation of a loop finds it.
const KEPT: usize = 64 << 20;
pub(super) const REST: Duration = Duration::from_secs(1);
const LEAST: usize = 64 << 10;
const MIB: usize = 1 << 20;

/// The length of a block for this many bytes. There are few lengths, so that blocks can be used again: powers of two from `LEAST` on, and
/// above 1 MiB three more between each two of these, so that such a block is at most a quarter longer than was asked for.
pub(super) fn length(bytes: usize) -> usize {
    match bytes {
        0..=MIB => bytes.max(LEAST).next_power_of_two(),
        _ => bytes.checked_next_multiple_of(1 << ((bytes - 1).ilog2() - 2)).unwrap_or(bytes),
    }
}

/// Blocks that nobody uses.
#[derive(Default)]
pub(super) struct PinnedCache {
    /// Their addresses, by length. A length stays in the map when its last block is taken, as that block will come back.
    blocks: BTreeMap<usize, Vec<usize>>,
    bytes: usize,
    /// When a block was last put here.
    used: Option<Instant>,
}

impl PinnedCache {
    /// Takes out a block of at least this many bytes, and at most four times as many: its address and length.
    pub(super) fn take(&mut self, wanted: usize) -> Option<(usize, usize)> {
        let fitting = self.blocks.range_mut(wanted..=wanted.saturating_mul(4));
        let (at, len) = fitting.into_iter().find_map(|(len, blocks)| Some((blocks.pop()?, *len)))?;
        self.bytes -= len;
        Some((at, len))
    }

    /// Keeps a block, if that is not too much. Returns whether it is kept.
    pub(super) fn put(&mut self, at: usize, len: usize) -> bool {
        let fits = self.bytes == 0 || self.bytes + len <= KEPT;
        if fits {
            self.blocks.entry(len).or_default().push(at);
            self.bytes += len;
            self.used = Some(Instant::now());
        }
        fits
    }

    /// Whether more is kept than may be kept for good.
    pub(super) fn is_much(&self) -> bool {
        self.bytes > KEPT
    }

    /// Takes all blocks out, to be given back to the driver: their addresses and lengths.
    pub(super) fn take_all(&mut self) -> Vec<(usize, usize)> {
        self.bytes = 0;
        let blocks = std::mem::take(&mut self.blocks).into_iter();
        blocks.flat_map(|(len, all)| all.into_iter().map(move |at| (at, len))).collect()
    }

    /// The same, if more is kept than may be kept for good, and no block was put here for [`REST`]. Otherwise takes none.
    pub(super) fn take_rested(&mut self) -> Vec<(usize, usize)> {
        let rested = self.used.is_none_or(|at| at.elapsed() >= REST);
        if self.is_much() && rested { self.take_all() } else { Vec::new() }
    }
}

/// Gives a block back to the driver, which may wait for the device: the caller must hold nothing that others wait for.
pub(super) fn unpin(cuda: &Cuda, (at, len): (usize, usize), report: &dyn Fn(CudaError)) {
    PINNED.fetch_sub(len, Ordering::Relaxed);
    // SAFETY: allocated by `Block::new`. That `Block` was dropped, and the cache does not have the address (any more), so nobody else uses it.
    unsafe { cuda.mem_free_host(std::ptr::with_exposed_provenance_mut(at)) }.unwrap_or_else(report);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_blocks_have_few_lengths_and_waste_little() {
        let mut lengths: Vec<usize> = (1..=64 << 10).map(|kib| length(kib << 10)).collect();
        for (kib, len) in (1_usize..).zip(&lengths) {
            let bytes = kib << 10;
            let most = if bytes <= MIB { (2 * bytes).max(LEAST) } else { bytes + bytes / 4 };
            assert!((bytes..=most).contains(len), "{len} for {bytes}");
        }
        lengths.dedup();
        assert_eq!(lengths.len(), 5 + 4 * 6);
        assert_eq!((length(0), length(MIB), length(MIB + 1)), (LEAST, MIB, MIB + MIB / 4));
        assert_eq!(length(usize::MAX), usize::MAX);
    }

    #[test]
    fn pinned_blocks_are_kept_by_their_lengths() {
        let mut pinned = PinnedCache::default();
        assert!(pinned.put(1, 2 * KEPT) && !pinned.put(2, LEAST));
        assert_eq!((pinned.take(LEAST), pinned.take(KEPT)), (None, Some((1, 2 * KEPT))));
        assert!(pinned.put(1, MIB) && pinned.put(2, LEAST) && pinned.put(3, MIB));
        let taken = [LEAST, LEAST, MIB / 2, MIB].map(|wanted| pinned.take(wanted));
        assert_eq!(taken, [Some((2, LEAST)), None, Some((3, MIB)), Some((1, MIB))]);
        assert_eq!(pinned.bytes, 0);
    }

    #[test]
    fn one_large_block_is_kept_for_a_while_and_small_ones_for_good() {
        let mut pinned = PinnedCache::default();
        assert!(pinned.put(1, 2 * KEPT) && pinned.is_much());
        assert!(pinned.take_rested().is_empty(), "it has just been used");
        pinned.used = Instant::now().checked_sub(REST);
        assert_eq!(pinned.take_rested(), [(1, 2 * KEPT)]);
        assert!(pinned.put(2, MIB) && !pinned.is_much());
        pinned.used = None;
        assert!(pinned.take_rested().is_empty(), "so much is kept for good");
        assert_eq!(pinned.take_all(), [(2, MIB)]);
    }
}
