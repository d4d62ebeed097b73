//! How staging slots are filled: by ordinary stores, or past the caches.
//!
//! A slot that a peer has read is in the cache of that peer's core. If both cores share a cache, a store gets the line at once. If not, each
//! store waits until the other core has given up the line. Whether they share one changes: the system moves ranks between cores, and a
//! hypervisor moves its virtual processors. On a virtual machine with 2 cores, where two slots of 128 KB were filled in turn, it took 4.6 to
//! 80 us to fill one by ordinary stores, and 5 us past the caches; after the latter its reader needed 8 us instead of 3.5 to 7. So both ways
//! are timed while slots are filled.

use std::time::Instant;

use allstream_kernels as kernels;

/// Smaller copies are made by ordinary stores: to wait for the memory would cost more than going past the caches saves.
const LEAST: usize = 16 << 10;
/// The way that is not in use is tried once in so many copies: the first number is for stores past the caches, the second for ordinary
/// stores, which may be far slower.
const TRIED: [u32; 2] = [64, 256];
/// Of so many recent times the shortest counts: in a longer one the thread may have lost its core.
const RECENT: usize = 4;

/// How slots are filled now, and how long recent copies into slots took.
pub(crate) struct Filling {
    is_past: bool,
    /// Copies since the other way was tried.
    since: u32,
    /// Recent times in nanoseconds for 16 KB, by ordinary stores and past the caches. `counts`: how many copies were timed so far.
    times: [[u32; RECENT]; 2],
    counts: [usize; 2],
}

impl Default for Filling {
    fn default() -> Filling {
        // The other way is tried soon.
        let since = TRIED[0] - RECENT as u32;
        Filling { is_past: false, since, times: [[u32::MAX; RECENT]; 2], counts: [0; 2] }
    }
}

impl Filling {
    /// Whether so many bytes are to be written past the caches.
    pub(crate) fn is_past(&self, bytes: usize) -> bool {
        self.is_past && bytes >= LEAST
    }

    /// Copies `bytes` bytes from `src` to a slot, and notes how long that took.
    ///
    /// # Safety
    /// As [`kernels::copy`], for one output.
    pub(crate) unsafe fn copy(&mut self, src: *const u8, slot: *mut u8, bytes: usize) {
        if bytes < LEAST {
            // SAFETY: as the caller vouches.
            return unsafe { kernels::copy(src, &[slot], bytes) };
        }
        self.since += 1;
        let other = self.since >= TRIED[usize::from(self.is_past)];
        let past = self.is_past != other;
        if other {
            self.since = 0;
        }
        let start = Instant::now();
        // SAFETY: as the caller vouches.
        unsafe {
            match past {
                true => kernels::copy_streaming(src, slot, bytes),
                false => kernels::copy(src, &[slot], bytes),
            }
        }
        self.took(past, start.elapsed().as_nanos() as u64 * LEAST as u64 / bytes as u64);
    }

    /// Notes how long 16 KB took by one way, and chooses the way for the next copies.
    fn took(&mut self, past: bool, nanos: u64) {
        let way = usize::from(past);
        self.times[way][self.counts[way] % RECENT] = u32::try_from(nanos).unwrap_or(u32::MAX);
        self.counts[way] += 1;
        let [ordinary, streamed] = self.times.map(|times| times.into_iter().min().unwrap_or(u32::MAX));
        // Past the caches only if that is more than twice as fast, as the reader then has to fetch the slot from memory.
        self.is_past = ordinary > streamed.saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_way_is_found_and_left_again() {
        let mut filling = Filling::default();
        let (src, mut slot) = (vec![7u8; LEAST], vec![0u8; LEAST]);
        for _ in 0..200 {
            slot.fill(0);
            // SAFETY: both buffers have `LEAST` bytes, and they are two.
            unsafe { filling.copy(src.as_ptr(), slot.as_mut_ptr(), LEAST) };
            assert_eq!(slot, src);
        }
        assert!(filling.counts.iter().all(|count| *count > 0), "both ways are tried: {:?}", filling.counts);
        let mut filling = Filling::default();
        filling.took(false, 10_000);
        assert!(!filling.is_past(LEAST), "nothing is known of the other");
        filling.took(true, 700);
        assert!(!filling.is_past(LEAST - 1) && filling.is_past(LEAST));
        // The peer shares a cache with this core again.
        filling.took(false, 600);
        assert!(!filling.is_past(LEAST));
        // One slow copy, in which the thread may have lost its core, changes nothing. A peer that shares no cache for a while does.
        filling.took(false, 4_000_000);
        assert!(!filling.is_past(LEAST));
        (0..RECENT).for_each(|_| filling.took(false, 9_000));
        assert!(filling.is_past(LEAST));
    }
}
