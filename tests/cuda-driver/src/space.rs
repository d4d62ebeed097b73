//! Addresses: which memory lies where, whose it is, and where this process really keeps it.
//!
//! A device's memory is an arena: a sparse memfd, mapped at addresses that only this driver knows. The addresses that callers see
//! are those of a reservation of the same size without access, so that host code that follows a device pointer crashes at once.
//! No address is given twice, so that any use of memory after its end is noticed. Only the knob `REUSE` has addresses given again;
//! other pages lie behind them then, as another process may still map the old ones.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::abi::{Address, Handle, fresh, lock};
use crate::codes::{Code, Done};
use crate::context::Context;

/// The byte that new memory is filled with: a NaN in every float type, -1 or the largest value in every integer type.
pub(crate) const FRESH: u8 = 0xff;
/// At most so many bytes of new memory are filled, from its beginning; the rest is zeros. Filling the whole block of a pool would take
/// longer than a test that uses only a few of its pages.
const FILLED: usize = 2 << 20;
/// The byte that freed memory is filled with, for whoever still maps it: only its first `SHOWN` bytes, as the system gets back the rest.
pub(crate) const FREED: u8 = 0xdd;
const SHOWN: usize = 1 << 20;

/// How many bytes of addresses a device has for all allocations of its life.
const ARENA: usize = 1 << 40;
/// How the real library aligns allocations.
const ALIGN: usize = 256;

/// A mapping of this process.
pub(crate) struct Mapping {
    at: usize,
    size: usize,
}

impl Mapping {
    /// Private memory of this process; without `access`, only reserved addresses.
    pub(crate) fn anonymous(size: usize, access: bool) -> Done<Self> {
        let protection = if access { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        Self::new(size, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0)
    }

    pub(crate) fn of_file(file: &OwnedFd, offset: usize, size: usize) -> Done<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        Self::new(size, access, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd(), offset)
    }

    fn new(size: usize, protection: i32, flags: i32, file: i32, offset: usize) -> Done<Self> {
        // SAFETY: a new mapping, at an address of the kernel's choice, replaces nothing.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, file, offset as libc::off_t) };
        if at == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(Mapping { at: at as usize, size }) }
    }

    pub(crate) fn address(&self) -> usize {
        self.at
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and everyone who uses it keeps alive the value that is dropped here.
        unsafe { libc::munmap(self.at as *mut _, self.size) };
    }
}

/// A new file in memory, all zeros.
pub(crate) fn memfd(size: usize) -> Done<OwnedFd> {
    // SAFETY: the name is a text that ends with a zero.
    let file = unsafe { libc::memfd_create(c"cuda-for-tests".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    // SAFETY: the descriptor was just made, and nobody else owns it.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    // SAFETY: only a number goes in.
    if unsafe { libc::ftruncate(file.as_raw_fd(), size as libc::off_t) } != 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    Ok(file)
}

/// A device's memory.
pub(crate) struct Arena {
    pub(crate) file: OwnedFd,
    /// The reserved addresses that callers see.
    seen: Mapping,
    /// Where the file is mapped.
    real: Mapping,
    next: Mutex<usize>,
    /// Ranges of addresses that can be given again: offset and size of each.
    freed: Mutex<Vec<(usize, usize)>>,
}

impl Arena {
    pub(crate) fn new() -> Done<Self> {
        let file = memfd(ARENA)?;
        let real = Mapping::of_file(&file, 0, ARENA)?;
        // Best effort: a core dump does not need the arena.
        // SAFETY: the range is that of our own mapping.
        unsafe { libc::madvise(real.at as *mut _, ARENA, libc::MADV_DONTDUMP) };
        let (next, freed) = (Mutex::new(0), Mutex::default());
        Ok(Arena { real, seen: Mapping::anonymous(ARENA, false)?, file, next, freed })
    }

    /// Reserves `size` bytes of the file; gives their offset.
    fn place(&self, size: usize) -> Done<usize> {
        let mut next = lock(&self.next);
        let at = *next;
        // Whole pages, and a page between two ranges: so one range's pages can go back to the system alone.
        *next =
            size.checked_next_multiple_of(PAGE).and_then(|size| at.checked_add(size + PAGE)).unwrap_or(ARENA);
        if *next >= ARENA {
            *next = at;
            return Err(Code::OUT_OF_MEMORY);
        }
        Ok(at)
    }

    /// The offset at which callers see the memory at `at` in the file: the same, or that of a freed range that is given again.
    fn seen(&self, at: usize, size: usize) -> usize {
        let (mut freed, size) = (lock(&self.freed), size.next_multiple_of(PAGE));
        let Some(index) = freed.iter().rposition(|(_, room)| *room >= size) else { return at };
        let (place, room) = freed.swap_remove(index);
        if room > size {
            freed.push((place + size, room - size));
        }
        place
    }

    /// Gives the pages back to the system.
    fn punch(&self, at: usize, size: usize) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let size = size.next_multiple_of(PAGE) as libc::off_t;
        // SAFETY: only numbers go in; the range was one allocation's.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, at as libc::off_t, size) };
    }
}

pub(crate) const PAGE: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuIpcOpenMemHandle`.
    Imported,
    /// A module's variable.
    Global,
    /// `cuMemHostAlloc`.
    Host,
    /// `cuMemHostRegister`.
    Registered,
}

/// Memory that the driver knows.
pub(crate) struct Memory {
    pub(crate) kind: Kind,
    pub(crate) base: Address,
    pub(crate) size: usize,
    /// The address at which this process can access it.
    real: usize,
    pub(crate) device: i32,
    pub(crate) context: Handle,
    /// A number that no other memory ever has.
    pub(crate) id: u64,
    /// The flags it was made with, which callers can query.
    pub(crate) flags: u32,
    arena: Option<(Arc<Arena>, usize)>,
    _mapping: Option<Mapping>,
    /// Nothing may use it any more.
    freed: AtomicBool,
    /// A free is queued.
    pub(crate) ending: AtomicBool,
    /// A handle for other processes was made for it.
    pub(crate) exported: AtomicBool,
    /// How many pieces of queued or running work use it.
    users: AtomicUsize,
}

impl Memory {
    fn new(kind: Kind, base: Address, size: usize, real: usize, context: &Context) -> Self {
        Memory {
            kind,
            base,
            size,
            real,
            device: context.device.ordinal,
            context: context.handle,
            id: fresh(),
            flags: 0,
            arena: None,
            _mapping: None,
            freed: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            exported: AtomicBool::new(false),
            users: AtomicUsize::new(0),
        }
    }

    /// New memory on a context's device.
    pub(crate) fn on_device(kind: Kind, size: usize, context: &Context) -> Done<Arc<Self>> {
        let device = &context.device;
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let before = device.used.fetch_add(size, Ordering::Relaxed);
        if before.saturating_add(size) > crate::knobs::memory() {
            device.used.fetch_sub(size, Ordering::Relaxed);
            return Err(Code::OUT_OF_MEMORY);
        }
        let Ok(at) = device.arena.place(size) else {
            device.used.fetch_sub(size, Ordering::Relaxed);
            return Err(Code::OUT_OF_MEMORY);
        };
        let arena = device.arena.clone();
        let base = (arena.seen.at + arena.seen(at, size)) as Address;
        let mut memory = Memory::new(kind, base, size, arena.real.at + at, context);
        memory.arena = Some((arena, at));
        memory.fill(FRESH, size.min(FILLED));
        Ok(memory.known())
    }

    /// Memory of another process: a part of the file of one of its devices.
    pub(crate) fn imported(
        file: &OwnedFd,
        offset: usize,
        size: usize,
        device: i32,
        context: &Context,
    ) -> Done<Arc<Self>> {
        let real = Mapping::of_file(file, offset, size.next_multiple_of(PAGE))?;
        let at = context.device.arena.place(size)?;
        let base = (context.device.arena.seen.at + at) as Address;
        let mut memory = Memory::new(Kind::Imported, base, size, real.at, context);
        memory.device = device;
        memory._mapping = Some(real);
        Ok(memory.known())
    }

    pub(crate) fn on_host(size: usize, flags: u32, context: &Context) -> Done<Arc<Self>> {
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // With a page that nobody can touch on each side.
        let mapping = Mapping::anonymous(size.next_multiple_of(PAGE) + 2 * PAGE, true)?;
        let at = mapping.at + PAGE;
        for guard in [mapping.at, mapping.at + mapping.size - PAGE] {
            // SAFETY: a page of our own new mapping.
            unsafe { libc::mprotect(guard as *mut _, PAGE, libc::PROT_NONE) };
        }
        let mut memory = Memory::new(Kind::Host, at as Address, size, at, context);
        memory._mapping = Some(mapping);
        memory.flags = flags;
        memory.fill(FRESH, size.min(FILLED));
        Ok(memory.known())
    }

    pub(crate) fn registered(at: usize, size: usize, flags: u32, context: &Context) -> Arc<Self> {
        let mut memory = Memory::new(Kind::Registered, at as Address, size, at, context);
        memory.flags = flags;
        memory.known()
    }

    fn known(self) -> Arc<Self> {
        let memory = Arc::new(self);
        SPACE.write().unwrap_or_else(PoisonError::into_inner).insert(memory.base, memory.clone());
        memory
    }

    /// Ends the memory at once, whoever still uses it.
    pub(crate) fn end(&self) -> Done {
        let known = SPACE.write().unwrap_or_else(PoisonError::into_inner).remove(&self.base);
        if known.is_none() || self.freed.swap(true, Ordering::AcqRel) {
            return Err(Code::INVALID_VALUE);
        }
        if self.users.load(Ordering::Acquire) > 0 {
            crate::report::FREED_IN_USE.fetch_add(1, Ordering::Relaxed);
        }
        if self.kind != Kind::Registered {
            self.fill_if_touched();
        }
        if let Some((arena, at)) = &self.arena {
            // The system gets the pages back, but for the first ones of exported memory: a process that still maps it sees there that it was freed.
            let kept = if self.exported.load(Ordering::Acquire) { self.size.min(SHOWN) } else { 0 };
            if kept < self.size {
                arena.punch(at + kept, self.size - kept);
            }
            crate::device::used(self.device).fetch_sub(self.size, Ordering::Relaxed);
            if crate::knobs::strict().reuse {
                lock(&arena.freed)
                    .push((self.base as usize - arena.seen.at, self.size.next_multiple_of(PAGE)));
            }
        }
        Ok(())
    }

    fn fill_if_touched(&self) {
        // Imported memory is another process's, and must not change. Device memory that was not exported is punched: nobody would see the bytes.
        let seen = self.exported.load(Ordering::Acquire) || self.kind == Kind::Host;
        if seen && self.kind != Kind::Imported {
            self.fill(FREED, self.size.min(SHOWN));
        }
    }

    fn fill(&self, value: u8, length: usize) {
        debug_assert!(length <= self.size);
        // SAFETY: the range is in this memory's own mapping, which lives as long as `self`.
        unsafe { std::ptr::write_bytes(self.real as *mut u8, value, length) }
    }

    pub(crate) fn is_freed(&self) -> bool {
        self.freed.load(Ordering::Relaxed)
    }

    pub(crate) fn on_the_host(&self) -> bool {
        matches!(self.kind, Kind::Host | Kind::Registered)
    }

    /// For host memory: whether devices have an address for it.
    pub(crate) fn is_mapped(&self) -> bool {
        /// `CU_MEMHOSTALLOC_DEVICEMAP`, and `CU_MEMHOSTREGISTER_DEVICEMAP`.
        const DEVICEMAP: u32 = 2;
        self.flags & DEVICEMAP != 0 || !crate::knobs::strict().device_map
    }

    pub(crate) fn holds(&self, at: Address, length: usize) -> bool {
        at >= self.base
            && at - self.base <= self.size as u64
            && length as u64 <= self.size as u64 - (at - self.base)
    }

    /// The address at which this process can access the byte at `at`.
    pub(crate) fn real(&self, at: Address) -> usize {
        self.real + (at - self.base) as usize
    }

    /// The descriptor of its device's file.
    pub(crate) fn file(&self) -> Option<u64> {
        self.arena.as_ref().map(|(arena, _)| arena.file.as_raw_fd() as u64)
    }

    /// Its offset in its device's file, if it is in one.
    pub(crate) fn offset(&self) -> Option<usize> {
        self.arena.as_ref().map(|(_, at)| *at)
    }
}

static SPACE: RwLock<BTreeMap<Address, Arc<Memory>>> = RwLock::new(BTreeMap::new());

/// The memory that holds `length` bytes from `at` on, if one does.
pub(crate) fn find(at: Address, length: usize) -> Option<Arc<Memory>> {
    let space = SPACE.read().unwrap_or_else(PoisonError::into_inner);
    let (_, memory) = space.range(..=at).next_back()?;
    (memory.holds(at, length) && (at - memory.base < memory.size as u64)).then(|| memory.clone())
}

/// The memory that begins at an address.
pub(crate) fn beginning(at: Address) -> Option<Arc<Memory>> {
    find(at, 1).filter(|memory| memory.base == at)
}

/// Whether any memory has a byte of that range.
pub(crate) fn overlaps(at: Address, length: usize) -> bool {
    let space = SPACE.read().unwrap_or_else(PoisonError::into_inner);
    let before = space.range(..at.saturating_add(length as u64)).next_back();
    before.is_some_and(|(_, memory)| memory.base + memory.size as u64 > at)
}

pub(crate) fn all() -> Vec<Arc<Memory>> {
    SPACE.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
}

/// Bytes that a piece of work will use. While the span lives, its memory counts as in use and stays mapped.
pub(crate) struct Span {
    pub(crate) memory: Arc<Memory>,
    at: Address,
}

impl Span {
    /// For work of a context, which must be able to reach the memory.
    pub(crate) fn new(context: &Context, at: Address, length: usize) -> Done<Self> {
        let memory = find(at, length).filter(|memory| !memory.ending.load(Ordering::Acquire));
        let memory = memory.ok_or(Code::INVALID_VALUE)?;
        if !context.reaches(&memory) {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Self::of(memory, at))
    }

    pub(crate) fn of(memory: Arc<Memory>, at: Address) -> Self {
        memory.users.fetch_add(1, Ordering::AcqRel);
        Span { memory, at }
    }

    /// Where this process can access the bytes, unless the memory was freed.
    pub(crate) fn pointer(&self) -> Done<*mut u8> {
        if self.memory.is_freed() {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        Ok(self.memory.real(self.at) as *mut u8)
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        self.memory.users.fetch_sub(1, Ordering::AcqRel);
    }
}

const _: () = assert!(PAGE.is_multiple_of(ALIGN));
