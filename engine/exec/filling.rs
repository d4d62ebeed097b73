//! How staging slots are filled: by ordinary stores, or past the caches.
//!
//! A slot that a peer has read is in that peer's cache. Where both cores share a cache, a store takes the line over at once;
//! where they do not, it waits for it to be given up on the other side of the machine, line after line. Which of the two
//! it is changes, as the system moves ranks, and a hypervisor its processors. On 2 cores of a virtual machine, two slots of 128 KB
//! in turn, a slot took 4.6 to 80 us to fill by ordinary stores, and 5 past the caches, which the reader then pays for with
//! 8 us instead of 3.5 to 7. So it is measured, as slots are filled.

use std::time::Instant;

use allstream_kernels as kernels;

/// Smaller copies are made by ordinary stores: waiting for the memory would cost more than it saves.
const LEAST: usize = 16 << 10;
/// The way not in use is tried once in so many copies: past the caches, and by ordinary stores, which may be far slower.
const TRIED: [u32; 2] = [64, 256];
/// Of so many times the least counts: a thread may lose its core in a copy.
const RECENT: usize = 4;

/// What copies into slots took lately.
pub(crate) struct Filling {
    is_past: bool,
    /// Copies since the other way was tried.
    since: u32,
    /// Nanoseconds for 16 KB, by ordinary stores and past the caches, and how many there were.
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

    /// Copies to a slot.
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

    /// Notes a time, for 16 KB, and chooses.
    fn took(&mut self, past: bool, nanos: u64) {
        let way = usize::from(past);
        self.times[way][self.counts[way] % RECENT] = u32::try_from(nanos).unwrap_or(u32::MAX);
        self.counts[way] += 1;
        let [ordinary, streamed] = self.times.map(|times| times.into_iter().min().unwrap_or(u32::MAX));
        // The reader pays for what is not in a cache: only where it is more than twice as fast.
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
            // SAFETY: both have so many bytes.
            unsafe { filling.copy(src.as_ptr(), slot.as_mut_ptr(), LEAST) };
            assert_eq!(slot, src);
        }
        assert!(filling.counts.iter().all(|count| *count > 0), "both ways are tried: {:?}", filling.counts);
        let mut filling = Filling::default();
        filling.took(false, 10_000);
        assert!(!filling.is_past(LEAST), "nothing is known of the other");
        filling.took(true, 700);
        assert!(!filling.is_past(LEAST - 1) && filling.is_past(LEAST));
        // The peer is near again.
        filling.took(false, 600);
        assert!(!filling.is_past(LEAST));
        // A core that is lost in a copy says nothing; a peer that is far does, when it is so for a while.
        filling.took(false, 4_000_000);
        assert!(!filling.is_past(LEAST));
        (0..RECENT).for_each(|_| filling.took(false, 9_000));
        assert!(filling.is_past(LEAST));
    }
}
