//! A rank's region: the memory that its peers on this host see.
//!
//! Layout: a page with the doorbell's flag, the shared staging slots, and a heap for rings and own slots. For peers
//! in other processes the region is a sealed memfd, handed over a unix socket: it has no name, vanishes with
//! the last process, and cannot be truncated under a reader. Pages cost nothing until they are touched.
//!
//! It is mapped in one piece. An arena in a mapping of its own, made when it is first used, took less address space, but then two
//! ranks' arenas lay at other distances, and all_reduces of 64 KB to 4 MB in place took four to eight times as long (2 ranks, AMD
//! EPYC, whose caches guess where a line is by a hash of its address: that is likely why).

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::SLOT;
use super::layout::RING_BYTES;
use crate::error::{Error, limits};
use crate::forked;

const HEADER: usize = 4096;
/// Shared staging slots: 32 x 128 KB = 4 MB per rank, whatever the number of communicators.
pub(crate) const SLOTS: usize = 32;
/// Slots are filled in turn, so many bytes of them. What a peer has just read is in its nearest cache, from where each store
/// would have to take it; what it read a megabyte ago is not (its second level has 1 MB on the machine this was measured on):
/// two slots of 128 KB in turn took 15.8 us each to fill, 32 of them 6.0 (`cargo bench --bench limits -- slots 2 131072`). But
/// the last cache is shared with the users' buffers: all_to_all of 256 KB, 1 MB out of place at 2 ranks, in us, by slots in turn: 1
/// 34, 63; 6 18, 58; 10 15, 58; 20 20, 60; 32 24, 72; of 64 KB, in slots of 32 KB: 1 8.0, 10 8.1, 20 5.6, 32 5.6. Ranks that share
/// cores share this too: at 4 ranks, by slots of each in turn, 1 150, 2 176, 4 152, 10 278 (all_to_all of 1 MB), 54, 49, 40, 53
/// (256 KB), 126, 135, 128, 182 (reduce of 1 MB), 16.8, 10.3, 8.6, 7.8 (64 KB).
pub(crate) const TURNED: usize = 10 * SLOT;
const HEAP_START: usize = HEADER + SLOTS * SLOT;
/// Room for rings and own slots: address space, not memory.
const HEAP: usize = 60 << 20;
const ARENA_START: usize = (HEAP_START + HEAP).next_multiple_of(PAGE);
/// Room for buffers that users ask for: address space, of which memory is taken where it is touched.
const ARENA: usize = 4 << 30;
pub(crate) const PAGE: usize = 4096;
pub(crate) const REGION_BYTES: usize = ARENA_START + ARENA;

/// A mapping of a region, ours or a peer's.
pub(crate) struct Region {
    base: NonNull<u8>,
    fd: Option<OwnedFd>,
    heap: Mutex<Heap>,
    arena: Mutex<Heap>,
    /// The one given back last is at the end.
    slots: Mutex<VecDeque<u16>>,
    /// Owners of each slot that is taken.
    owners: [AtomicU32; SLOTS],
    /// A thread found the rank's memory lock held by another communicator's pass.
    memory_lock_wanted: AtomicBool,
    /// Bytes that the machines of the rank's communicators keep for themselves. They are not in the region; they are counted
    /// with it, as the rank has one.
    scratch: AtomicUsize,
}

/// A staging slot with one owner or several: each has one of these. It is free again when the last one goes, whatever ends
/// it: a frame that comes back, an error, a panic.
pub(crate) struct Slot {
    region: Arc<Region>,
    number: u16,
}

impl Slot {
    /// Where it is.
    pub(crate) fn at(&self) -> *mut u8 {
        self.region.at(Region::slot_offset(self.number))
    }
}

impl Slot {
    /// The same, of a region that is not kept for it.
    pub(crate) fn downgrade(self) -> WeakSlot {
        // Its count of owners stands for the new value.
        self.region.owners[usize::from(self.number)].fetch_add(1, Ordering::Relaxed);
        WeakSlot { region: Arc::downgrade(&self.region), number: self.number }
    }

    /// It stays taken for as long as the region is there.
    pub(crate) fn leave(self) {
        self.region.owners[usize::from(self.number)].fetch_add(1, Ordering::Relaxed);
    }
}

/// An owner of a slot for as long as the region is there.
pub(crate) struct WeakSlot {
    region: Weak<Region>,
    number: u16,
}

impl Drop for WeakSlot {
    fn drop(&mut self) {
        // An owner as any other, which goes at once.
        drop(self.region.upgrade().map(|region| Slot { region, number: self.number }));
    }
}

impl Clone for Slot {
    fn clone(&self) -> Slot {
        // Who holds one keeps it taken: the count cannot come to nothing meanwhile.
        self.region.owners[usize::from(self.number)].fetch_add(1, Ordering::Relaxed);
        Slot { region: self.region.clone(), number: self.number }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // In a forked child the list of free slots may be locked for ever, and the slots are the parent's.
        if forked::is_forked() {
            return;
        }
        // What all owners did to the slot is before what its next one does: the list of free slots has a lock.
        if self.region.owners[usize::from(self.number)].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.region.give_slot(self.number);
        }
    }
}

// SAFETY: the mapping is plain memory that lives until drop; every access goes through raw pointers whose users
// state their own protocol, and the allocator's state is behind locks.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// All memory behind `end`, and all in `free`, is zero.
struct Heap {
    start: usize,
    limit: usize,
    end: usize,
    /// Given back: length by offset, never two side by side, none before `end`.
    free: BTreeMap<usize, usize>,
    used: usize,
    peak: usize,
}

impl Heap {
    fn new(start: usize, len: usize) -> Heap {
        Heap { start, limit: start + len, end: start, free: BTreeMap::new(), used: 0, peak: 0 }
    }

    fn take(&mut self, bytes: usize) -> Option<usize> {
        // The smallest gap that has room: groups of one size use each other's places.
        let gap = self.free.iter().filter(|(_, len)| **len >= bytes).min_by_key(|(_, len)| **len);
        let offset = match gap.map(|(at, len)| (*at, *len)) {
            Some((at, len)) => {
                self.free.remove(&at);
                if len > bytes {
                    self.free.insert(at + bytes, len - bytes);
                }
                at
            }
            None if bytes <= self.limit - self.end => {
                self.end += bytes;
                self.end - bytes
            }
            None => return None,
        };
        self.used += bytes;
        self.peak = self.peak.max(self.end - self.start);
        Some(offset)
    }

    fn give(&mut self, mut offset: usize, mut bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        if let Some(after) = self.free.remove(&(offset + bytes)) {
            bytes += after;
        }
        let before = self.free.range(..offset).next_back().map(|(at, len)| (*at, *len));
        if let Some((at, len)) = before.filter(|(at, len)| at + len == offset) {
            (offset, bytes) = (at, bytes + len);
            self.free.remove(&at);
        }
        if offset + bytes == self.end {
            self.end = offset;
        } else {
            self.free.insert(offset, bytes);
        }
    }
}

/// Blocks are whole lines, two at a time: what neighbours write does not slow the other down.
fn whole(bytes: usize) -> usize {
    bytes.next_multiple_of(128)
}

impl Region {
    /// A region that other processes can map.
    pub(crate) fn shared() -> Result<Region, Error> {
        let what = "create this rank's shared-memory region (memfd, 4 GB of address space)";
        let doing = |e: rustix::io::Errno| Error::os(what, e);
        limits::check_file_size(REGION_BYTES as u64).map_err(|problem| Error::system(what, problem))?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("allstream", flags).map_err(doing)?;
        ftruncate(&fd, REGION_BYTES as u64).map_err(doing)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(doing)?;
        let base = map_shared(&fd).map_err(doing)?;
        Ok(Region::new(base, Some(fd)))
    }

    /// A region for peers of this process alone.
    pub(crate) fn private() -> Result<Region, Error> {
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses touches no existing memory.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                REGION_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|e| Error::os("map a rank's staging region (4 GB of address space)", e))?;
        NonNull::new(base.cast())
            .map(|base| Region::new(base, None))
            .ok_or_else(|| Error::system("map a rank's staging region", "the system returned address 0"))
    }

    /// Maps the region that a peer handed over, after checking that it cannot shrink under us.
    pub(crate) fn of_peer(fd: OwnedFd) -> Result<Region, Error> {
        let doing = "map a peer's shared-memory region";
        let size = fstat(&fd).map_err(|e| Error::system(doing, e))?.st_size;
        if size != REGION_BYTES as i64 {
            return Err(Error::system(doing, format!("it has {size} bytes, expected {REGION_BYTES}")));
        }
        let seals = fcntl_get_seals(&fd).map_err(|e| Error::system(doing, e))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::system(doing, "it is not sealed against shrinking"));
        }
        let base = map_shared(&fd).map_err(|e| Error::os(doing, e))?;
        Ok(Region::new(base, Some(fd)))
    }

    fn new(base: NonNull<u8>, fd: Option<OwnedFd>) -> Region {
        Region {
            base,
            fd,
            heap: Mutex::new(Heap::new(HEAP_START, HEAP)),
            arena: Mutex::new(Heap::new(ARENA_START, ARENA)),
            slots: Mutex::new((0..SLOTS as u16).collect()),
            owners: [const { AtomicU32::new(0) }; SLOTS],
            memory_lock_wanted: AtomicBool::new(false),
            scratch: AtomicUsize::new(0),
        }
    }

    /// The descriptor to hand to peers.
    pub(crate) fn fd(&self) -> Option<&OwnedFd> {
        self.fd.as_ref()
    }

    /// Address of an offset. The caller keeps the offset (and what it accesses there) inside the region; its end is
    /// the address of nothing, which a frame of no bytes may have.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= REGION_BYTES);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Whether `len` bytes at `offset` lie in the region.
    pub(crate) fn contains(&self, offset: u64, len: usize) -> bool {
        offset.checked_add(len as u64).is_some_and(|end| end <= REGION_BYTES as u64)
    }

    /// Offset of an address inside this mapping.
    pub(crate) fn offset_of(&self, at: *const u8) -> Option<u64> {
        (at as usize).checked_sub(self.base.as_ptr() as usize).filter(|o| *o < REGION_BYTES).map(|o| o as u64)
    }

    /// Set while this rank's progress thread sleeps and wants to be woken by its doorbell.
    pub(crate) fn doorbell_flag(&self) -> &AtomicU32 {
        // SAFETY: the first page of the mapping, aligned, zeroed at creation; accessed only as an atomic; lives
        // as long as `self`.
        unsafe { self.base.cast::<AtomicU32>().as_ref() }
    }

    /// Takes a shared staging slot for so many bytes, one that has been free for a while: `turned` bytes go in turn ([`TURNED`]).
    pub(crate) fn take_slot(self: &Arc<Self>, bytes: usize, turned: usize) -> Option<Slot> {
        let taken = {
            let mut slots = self.slots.lock();
            let at = slots.len().saturating_sub((turned / bytes.clamp(1, SLOT)).max(1));
            slots.remove(at)
        };
        taken.map(|number| self.owned(number))
    }

    /// Takes the one that was given back last: for who writes what has come back in it.
    pub(crate) fn take_warm_slot(self: &Arc<Self>) -> Option<Slot> {
        let taken = self.slots.lock().pop_back();
        taken.map(|number| self.owned(number))
    }

    /// A slot that was just taken gets its first owner.
    fn owned(self: &Arc<Self>, number: u16) -> Slot {
        self.owners[usize::from(number)].store(1, Ordering::Relaxed);
        Slot { region: self.clone(), number }
    }

    fn give_slot(&self, number: u16) {
        self.slots.lock().push_back(number);
    }

    pub(crate) fn slot_offset(slot: u16) -> usize {
        HEADER + slot as usize * SLOT
    }

    /// The memory of all staging slots.
    pub(crate) fn all_slots(&self) -> (NonNull<u8>, usize) {
        // SAFETY: inside the mapping, whose base is not null.
        (unsafe { self.base.add(HEADER) }, SLOTS * SLOT)
    }

    /// Staging slots in use, and how many there are.
    pub(crate) fn slots(&self) -> (usize, usize) {
        (SLOTS - self.slots.lock().len(), SLOTS)
    }

    /// Notes that a thread found the rank's memory lock held.
    pub(crate) fn want_memory_lock(&self) {
        if !self.memory_lock_wanted.load(Ordering::Relaxed) {
            self.memory_lock_wanted.store(true, Ordering::Relaxed);
        }
    }

    /// Whether any has since this was last asked.
    pub(crate) fn was_memory_lock_wanted(&self) -> bool {
        self.memory_lock_wanted.load(Ordering::Relaxed)
            && self.memory_lock_wanted.swap(false, Ordering::Relaxed)
    }

    /// A communicator's machines kept so many bytes for themselves, and keep so many now.
    pub(crate) fn count_scratch(&self, before: usize, now: usize) {
        self.scratch.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }

    /// What all of them keep.
    pub(crate) fn scratch(&self) -> usize {
        self.scratch.load(Ordering::Relaxed)
    }

    /// Zeroed memory from the region's heap.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<usize, Error> {
        let bytes = whole(bytes);
        let mut heap = self.heap.lock();
        heap.take(bytes).ok_or_else(|| {
            Error::system(
                "allocate the rings of a communicator",
                format!(
                    "{bytes} bytes wanted, {} of {HEAP} in use in this rank's region; it has room for about {} \
                     groups of 8 at a time: drop those that are not needed",
                    heap.used,
                    HEAP / (2 * 8 * RING_BYTES)
                ),
            )
        })
    }

    /// Gives back what `alloc(bytes)` gave. As with slots, the protocol is its users': only once no rank, of this process
    /// or another, writes to it any more (`comm/world/pool.rs`). `written`: somebody may have, meanwhile.
    pub(crate) fn free(&self, offset: usize, bytes: usize, written: bool) {
        if forked::is_forked() {
            return; // it is in use in the parent
        }
        let bytes = whole(bytes);
        debug_assert!(offset >= HEAP_START && offset + bytes <= ARENA_START);
        if written {
            // SAFETY: inside the mapping, where `alloc` put it, and by the protocol nobody else's now; it is reached by
            // raw pointers and atomics only, so what a peer that breaks the protocol can change is the bytes.
            unsafe { self.at(offset).write_bytes(0, bytes) };
        }
        self.heap.lock().give(offset, bytes);
    }

    /// Zeroed pages for a user's buffer.
    pub(crate) fn take_pages(&self, bytes: usize) -> Option<usize> {
        self.arena.lock().take(bytes.checked_next_multiple_of(PAGE)?)
    }

    /// Gives back what `take_pages(bytes)` gave: to the system, so that it reads as zero again. Only once nobody, in
    /// this process or another, reads it any more.
    pub(crate) fn give_pages(&self, offset: usize, bytes: usize) {
        if forked::is_forked() {
            return; // it is in use in the parent
        }
        let bytes = bytes.next_multiple_of(PAGE);
        let advice = if self.fd.is_some() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        // SAFETY: whole pages inside the mapping that `take_pages` gave and that are nobody's now: losing what they hold
        // is the point.
        let removed = unsafe { madvise(self.at(offset).cast(), bytes, advice) };
        if removed.is_err() {
            // SAFETY: as above.
            unsafe { self.at(offset).write_bytes(0, bytes) };
        }
        self.arena.lock().give(offset, bytes);
    }

    /// An atomic word of a page that ranks have taken for words.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        let offset = offset.min(REGION_BYTES - 4) & !3;
        // SAFETY: in the mapping, which `self` keeps, and aligned; by the protocol of `device/links/words.rs` everybody uses the
        // page as atomic words only.
        unsafe { &*self.at(offset).cast::<AtomicU32>() }
    }

    /// Whether these bytes are in the part for users' buffers.
    pub(crate) fn is_page(&self, at: *const u8, len: usize) -> bool {
        self.offset_of(at).is_some_and(|o| o >= ARENA_START as u64 && o + len as u64 <= REGION_BYTES as u64)
    }

    /// The address of these bytes, if they are among the slots, or in the part for users' buffers.
    pub(super) fn lendable(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let in_slots = offset >= HEADER as u64 && offset.checked_add(len as u64)? <= HEAP_START as u64;
        let inside = in_slots || offset >= ARENA_START as u64 && self.contains(offset, len);
        inside.then(|| self.at(offset as usize))
    }

    /// Bytes of the heap in use, the most that it has ever reached to, and its size.
    pub(crate) fn heap(&self) -> (usize, usize, usize) {
        let heap = self.heap.lock();
        (heap.used, heap.peak, HEAP)
    }
}

fn map_shared(fd: impl AsFd) -> rustix::io::Result<NonNull<u8>> {
    // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory of ours. The file is a
    // memfd of REGION_BYTES, sealed (or about to be) against shrinking, so no access can fault.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            REGION_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::NORESERVE,
            fd,
            0,
        )
    }?;
    NonNull::new(base.cast()).ok_or(rustix::io::Errno::FAULT)
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in a constructor with this length; users hold an `Arc<Region>` for as long as they
        // access it, so nobody does now.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), REGION_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_sees_what_is_written_and_the_region_cannot_shrink() {
        let ours = Region::shared().unwrap();
        let fd = ours.fd().unwrap().try_clone().unwrap();
        assert!(ftruncate(&fd, 4096).is_err());
        let theirs = Region::of_peer(fd).unwrap();
        let at = ours.alloc(64).unwrap();
        // SAFETY: inside both mappings, one byte, one thread.
        let seen = unsafe {
            ours.at(at).write(42);
            theirs.at(at).read()
        };
        assert_eq!(seen, 42);
    }

    #[test]
    fn an_unsealed_or_short_file_is_refused() {
        let fd = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        assert!(Region::of_peer(fd.try_clone().unwrap()).is_err());
        ftruncate(&fd, REGION_BYTES as u64).unwrap();
        let error = Region::of_peer(fd).err().unwrap().to_string();
        assert!(error.contains("not sealed"), "{error}");
    }

    #[test]
    fn slots_and_heap_are_bounded_and_reused() {
        let region = Arc::new(Region::private().unwrap());
        let slots: Vec<_> = std::iter::from_fn(|| region.take_slot(SLOT, TURNED)).collect();
        assert_eq!(slots.len(), SLOTS);
        let others: Vec<_> = slots[1..].to_vec();
        drop(slots);
        assert_eq!(region.slots(), (SLOTS - 1, SLOTS), "the others have an owner yet");
        let mut others = others.into_iter().map(Slot::downgrade).collect::<Vec<_>>();
        assert_eq!(region.slots(), (SLOTS - 1, SLOTS));
        others.pop();
        assert_eq!(region.slots(), (SLOTS - 2, SLOTS));
        drop(others);
        assert_eq!(region.slots(), (0, SLOTS));
        // In turn, so many bytes of them; or the warmest, again and again.
        for (bytes, turned) in [(SLOT, TURNED / SLOT), (SLOT / 2, 2 * TURNED / SLOT), (1, SLOTS)] {
            let taken: Vec<_> = (0..2 * turned)
                .filter_map(|_| region.take_slot(bytes, TURNED).map(|slot| slot.number))
                .collect();
            let (one, other) = taken.split_at(turned);
            assert_eq!(one, other, "{bytes} bytes");
            assert_eq!(one.iter().collect::<std::collections::BTreeSet<_>>().len(), turned);
        }
        let warm = || region.take_warm_slot().map(|slot| slot.number);
        assert_eq!(warm(), warm());
        let (a, b) = (region.alloc(1000).unwrap(), region.alloc(1000).unwrap());
        assert!(b >= a + 1000 && b % 128 == 0);
        assert!(region.alloc(HEAP).unwrap_err().to_string().contains("has room for about"));
    }

    #[test]
    fn what_is_given_back_is_given_out_again_zeroed() {
        let region = Region::private().unwrap();
        let sizes = [128usize, 640, 4096, 67_584, 200];
        let mut blocks = VecDeque::new();
        for round in 0..5_000usize {
            let bytes = sizes[(round * 7 + round / 3) % sizes.len()];
            let at = region.alloc(bytes).unwrap();
            // SAFETY: our own block, of one thread.
            let fresh = unsafe { std::slice::from_raw_parts(region.at(at), bytes) };
            assert!(fresh.iter().all(|b| *b == 0), "round {round}");
            let overlaps = |(a, len): &(usize, usize)| at < a + len && *a < at + bytes;
            assert!(!blocks.iter().any(overlaps), "round {round}");
            // SAFETY: as above.
            unsafe { region.at(at).write_bytes(0xff, bytes) };
            blocks.push_back((at, bytes));
            if blocks.len() > 20 {
                let (at, bytes) = blocks.remove(round % 20).unwrap();
                region.free(at, bytes, true);
            }
        }
        let (_, peak, _) = region.heap();
        assert!(peak < 1 << 20, "{peak} bytes for at most 21 blocks of 66 KB");
        for (at, bytes) in blocks {
            region.free(at, bytes, true);
        }
        assert_eq!(region.heap().0, 0);
        assert_eq!(region.heap.lock().end, HEAP_START, "one piece again");
    }
}
