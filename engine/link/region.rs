//! A rank's region: the memory that its peers on this host see.
//!
//! Layout: a page with the doorbell's flag, the shared staging slots, a heap for rings, and the arena for users' buffers. For peers
//! in other processes the region is a sealed memfd, handed over a unix socket: it has no name, vanishes with
//! the last process, and cannot be truncated under a reader. Pages cost nothing until they are touched.
//!
//! The region is mapped in one piece. A trial had the arena in a mapping of its own, made at its first use, and took less address space. But
//! the arenas of two ranks then lay at a different distance from each other, and all_reduces in place of 64 KB to 4 MB took four to eight times
//! as long (2 ranks, AMD EPYC). The likely reason is that this CPU's caches predict where a line is from a hash of its address.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::SLOT;
use crate::error::{Error, limits};
use crate::forked;

const HEADER: usize = 4096;
/// Shared staging slots: 32 x 128 KB = 4 MB per rank, whatever the number of communicators.
pub(crate) const SLOTS: usize = 32;
/// Slots are filled in turn: this many bytes are put in slots before the first of these slots is filled again (fewer where ranks outnumber
/// cores: `comm/world.rs`). A slot that a peer has just read is in the peer's nearest caches, from where each store to the slot must take
/// the line; a slot that the peer read a megabyte of data ago is not (the L2 of the measured machine has 1 MB). With two slots of 128 KB in
/// turn, filling one took 15.8 us; with 32 slots, 6.0 us (`cargo bench --bench limits -- slots 2 131072`). But slots and users' buffers share
/// the last-level cache. Times in us:
/// - 2 ranks, all_to_all out of place, with 1, 6, 10, 20 or 32 slots in turn: 256 KB 34, 18, 15, 20, 24; 1 MB 63, 58, 58, 60, 72. 64 KB in
///   slots of 32 KB, with 1, 10, 20 or 32 slots in turn: 8.0, 8.1, 5.6, 5.6.
/// - 4 ranks, which share cores and so caches, with 1, 2, 4 or 10 slots of each rank in turn: all_to_all of 1 MB 150, 176, 152, 278, of 256 KB
///   54, 49, 40, 53; reduce of 1 MB 126, 135, 128, 182, of 64 KB 16.8, 10.3, 8.6, 7.8.
pub(crate) const TURNED: usize = 10 * SLOT;
const HEAP_START: usize = HEADER + SLOTS * SLOT;
/// Room for rings: address space, of which memory is taken where it is touched.
const HEAP: usize = 60 << 20;
const ARENA_START: usize = (HEAP_START + HEAP).next_multiple_of(PAGE);
/// Room for buffers that users ask for; address space as well.
const ARENA: usize = 4 << 30;
pub(crate) const PAGE: usize = 4096;
pub(crate) const REGION_BYTES: usize = ARENA_START + ARENA;

/// Pins users' buffers for one port of a network card. A rank that uses two ports has one of these for each.
pub(crate) trait Pins: Send + Sync {
    /// Called when the buffer at this address is given back. Returns whether the card no longer uses the buffer.
    fn unpin(&self, at: *const u8) -> bool;
}

/// A mapping of a region, ours or a peer's.
pub(crate) struct Region {
    base: NonNull<u8>,
    fd: Option<OwnedFd>,
    heap: Mutex<Heap>,
    arena: Mutex<Heap>,
    /// What is taken of the arena ([`take_pages`](Region::take_pages)): bytes by offset.
    blocks: Mutex<BTreeMap<usize, usize>>,
    /// What pins users' buffers, if anything does.
    pins: Mutex<Vec<Weak<dyn Pins>>>,
    /// The free slots. The slot that was given back last is at the end.
    slots: Mutex<VecDeque<u16>>,
    /// How many owners each taken slot has.
    owners: [AtomicU32; SLOTS],
    /// Set when a thread has found the rank's memory lock held by another communicator's pass.
    memory_lock_wanted: AtomicBool,
    /// Bytes of scratch memory that the rank's communicators keep for their collectives. They do not lie in the region, but are counted
    /// here, as a rank has one region.
    scratch: AtomicUsize,
}

/// One owner's share of a staging slot, which may have several owners. The slot is free again when the last share is dropped, whatever
/// the reason: a frame that comes back, an error, a panic.
pub(crate) struct Slot {
    region: Arc<Region>,
    number: u16,
}

impl Slot {
    /// The slot's address.
    pub(crate) fn at(&self) -> *mut u8 {
        self.region.at(Region::slot_offset(self.number))
    }
}

impl Slot {
    /// The same share, which does not keep the region alive any more.
    pub(crate) fn downgrade(self) -> WeakSlot {
        // Counts the new share as an owner; the old one is dropped here.
        self.region.owners[usize::from(self.number)].fetch_add(1, Ordering::Relaxed);
        WeakSlot { region: Arc::downgrade(&self.region), number: self.number }
    }

    /// Leaves the slot taken for as long as the region exists: the count keeps an owner that is never dropped.
    pub(crate) fn leave(self) {
        self.region.owners[usize::from(self.number)].fetch_add(1, Ordering::Relaxed);
    }
}

/// A share of a slot that does not keep the region alive.
pub(crate) struct WeakSlot {
    region: Weak<Region>,
    number: u16,
}

impl Drop for WeakSlot {
    fn drop(&mut self) {
        // Becomes an ordinary share, which is dropped at once.
        drop(self.region.upgrade().map(|region| Slot { region, number: self.number }));
    }
}

impl Clone for Slot {
    fn clone(&self) -> Slot {
        // `self` keeps the slot taken: the count of owners cannot become zero meanwhile.
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
        // `AcqRel`, and the lock of the list of free slots: what all owners did to the slot happens before what its next owner does.
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

/// Hands out ranges of a part of the region. All its memory from `end` on, and all in `free`, is zero.
struct Heap {
    start: usize,
    limit: usize,
    end: usize,
    /// Ranges that were given back: length by offset. No two of them adjoin, and none ends at `end`.
    free: BTreeMap<usize, usize>,
    used: usize,
    peak: usize,
}

impl Heap {
    fn new(start: usize, len: usize) -> Heap {
        Heap { start, limit: start + len, end: start, free: BTreeMap::new(), used: 0, peak: 0 }
    }

    fn take(&mut self, bytes: usize) -> Option<usize> {
        // The smallest gap with enough room, so that a communicator's rings take the place of an earlier communicator's of the same size.
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

/// Rounds up to pairs of cache lines, so that writes to one block do not slow down who uses the next block.
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
            blocks: Mutex::default(),
            pins: Mutex::default(),
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

    /// Address of an offset. The caller keeps the offset (and what it accesses there) inside the region. The offset may also be the
    /// region's end, where a frame of no bytes may lie.
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

    /// Takes a shared staging slot to put `bytes` bytes in. Slots are taken in turn: about `turned` bytes are put in slots before one comes
    /// again ([`TURNED`]).
    pub(crate) fn take_slot(self: &Arc<Self>, bytes: usize, turned: usize) -> Option<Slot> {
        let taken = {
            let mut slots = self.slots.lock();
            let at = slots.len().saturating_sub((turned / bytes.clamp(1, SLOT)).max(1));
            slots.remove(at)
        };
        taken.map(|number| self.owned(number))
    }

    /// Takes the slot that was given back last, for a caller that fills the same slot again and again.
    pub(crate) fn take_warm_slot(self: &Arc<Self>) -> Option<Slot> {
        let taken = self.slots.lock().pop_back();
        taken.map(|number| self.owned(number))
    }

    /// Gives a slot that was just taken its first owner.
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

    /// Whether a thread has found the rank's memory lock held since the last call.
    pub(crate) fn was_memory_lock_wanted(&self) -> bool {
        self.memory_lock_wanted.load(Ordering::Relaxed)
            && self.memory_lock_wanted.swap(false, Ordering::Relaxed)
    }

    /// A communicator has kept `before` bytes of scratch memory until now, and keeps `now` bytes from here on.
    pub(crate) fn count_scratch(&self, before: usize, now: usize) {
        self.scratch.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Bytes of scratch memory that all communicators of the rank keep.
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
                    "{bytes} bytes wanted, {} of {HEAP} in use in this rank's region; it has room for {} \
                     communicators of this size at a time: drop those that are not needed",
                    heap.used,
                    HEAP / bytes
                ),
            )
        })
    }

    /// Gives back what `alloc(bytes)` gave. To be called only once no rank, of this process or another, writes there any more, which the
    /// callers' protocol ensures (`comm/world/pool.rs`). `written`: somebody may have written there, so the memory is zeroed.
    pub(crate) fn free(&self, offset: usize, bytes: usize, written: bool) {
        if forked::is_forked() {
            return; // it is in use in the parent
        }
        let bytes = whole(bytes);
        debug_assert!(offset >= HEAP_START && offset + bytes <= ARENA_START);
        if written {
            // SAFETY: inside the mapping, where `alloc` put it, and by the protocol nobody else uses it now. It is reached by
            // raw pointers and atomics only, so a peer that breaks the protocol can change the bytes and nothing else.
            unsafe { self.at(offset).write_bytes(0, bytes) };
        }
        self.heap.lock().give(offset, bytes);
    }

    /// Zeroed pages of the arena, for a user's buffer or for words that ranks share (`device/links/words.rs`).
    pub(crate) fn take_pages(&self, bytes: usize) -> Option<usize> {
        let bytes = bytes.checked_next_multiple_of(PAGE)?;
        let offset = self.arena.lock().take(bytes)?;
        self.blocks.lock().insert(offset, bytes);
        Some(offset)
    }

    /// The user's buffer in which this address lies: where the buffer begins, and its bytes.
    pub(super) fn block_of(&self, at: *const u8) -> Option<(NonNull<u8>, usize)> {
        let offset = self.offset_of(at)? as usize;
        let blocks = self.blocks.lock();
        let (start, bytes) = blocks.range(..=offset).next_back()?;
        (offset - start < *bytes).then_some((NonNull::new(self.at(*start))?, *bytes))
    }

    /// From here on, `pins` is told of each user's buffer that is given back.
    pub(super) fn pin_by(&self, pins: Weak<dyn Pins>) {
        let mut all = self.pins.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(pins);
    }

    /// Gives back what `take_pages(bytes)` gave, to the system too, so that it reads as zero again. To be called only once nobody, in
    /// this process or another, uses it any more.
    pub(crate) fn give_pages(&self, offset: usize, bytes: usize) {
        if forked::is_forked() {
            return; // it is in use in the parent
        }
        let bytes = bytes.next_multiple_of(PAGE);
        self.blocks.lock().remove(&offset);
        // The lock is not held while buffers are unpinned, since that takes a system call.
        let pins: Vec<_> = self.pins.lock().iter().filter_map(Weak::upgrade).collect();
        let is_free = pins.iter().fold(true, |all, pins| pins.unpin(self.at(offset)) & all);
        if !is_free {
            return; // a network card may use the pages for ever: nobody gets them again
        }
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

    /// The atomic word at `offset`, which lies in a page that ranks use for words.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        let offset = offset.min(REGION_BYTES - 4) & !3;
        // SAFETY: in the mapping, which `self` keeps, and aligned; by the protocol of `device/links/words.rs` everybody uses the
        // page as atomic words only.
        unsafe { &*self.at(offset).cast::<AtomicU32>() }
    }

    /// Whether these bytes are in the arena.
    pub(crate) fn is_page(&self, at: *const u8, len: usize) -> bool {
        self.offset_of(at).is_some_and(|o| o >= ARENA_START as u64 && o + len as u64 <= REGION_BYTES as u64)
    }

    /// The address of these bytes, if they are among the slots or in the arena.
    pub(super) fn lendable(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let in_slots = offset >= HEADER as u64 && offset.checked_add(len as u64)? <= HEAP_START as u64;
        let inside = in_slots || offset >= ARENA_START as u64 && self.contains(offset, len);
        inside.then(|| self.at(offset as usize))
    }

    /// Bytes of the heap in use, the most bytes that it has ever extended over, and its size.
    pub(crate) fn heap(&self) -> (usize, usize, usize) {
        let heap = self.heap.lock();
        (heap.used, heap.peak, HEAP)
    }
}

fn map_shared(fd: impl AsFd) -> rustix::io::Result<NonNull<u8>> {
    // SAFETY: a fresh mapping at an address the kernel chooses touches no existing memory of ours. The file is a
    // memfd of REGION_BYTES, sealed against shrinking, so no access to the mapping is beyond the file's end.
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
        // Slots are taken in turn, as many as hold `TURNED` bytes; or the warmest one is taken again and again.
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
        assert!(region.alloc(HEAP).unwrap_err().to_string().contains("communicators of this size at a time"));
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
