//! Registered memory, memory windows on it, and the checks of who may access it.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};

use allstream_sys::verbs::IbvSge;

use crate::codes::{LOCAL_WRITE, MW_BIND, RELAXED_ORDERING, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE};
use crate::counts::Report;
use crate::wire::Piece;

/// The error of an access that the keys do not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused;

/// A stretch of memory, and the accesses that are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stretch {
    at: u64,
    bytes: u64,
    access: c_uint,
}

impl Stretch {
    fn holds(&self, at: u64, bytes: u64) -> bool {
        at >= self.at && bytes <= self.bytes && at - self.at <= self.bytes - bytes
    }

    fn allows(&self, at: u64, bytes: u64, access: c_uint) -> bool {
        self.holds(at, bytes) && self.access & access == access
    }
}

struct Region {
    domain: usize,
    stretch: Stretch,
    lkey: u32,
    rkey: u32,
    /// How many windows are bound to the region.
    windows: u32,
}

struct Window {
    domain: usize,
    bound: Option<Bound>,
}

struct Bound {
    rkey: u32,
    region: u32,
    stretch: Stretch,
    /// The number of the queue pair that bound the window. Only through this pair can a peer use the window.
    pair: u32,
}

/// What a request that binds a window asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    /// The key that the window was made with.
    pub(crate) window: u32,
    /// The key that the window is to have while it is bound.
    pub(crate) rkey: u32,
    /// The local key of the region.
    pub(crate) lkey: u32,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    pub(crate) access: c_uint,
}

/// All regions and windows of a process. A key is the number of an entry and eight bits more; numbers are reused only after 2^24 others.
pub(crate) struct Memory {
    regions: HashMap<u32, Region>,
    windows: HashMap<u32, Window>,
    last: u32,
}

impl Default for Memory {
    fn default() -> Self {
        Memory { regions: HashMap::new(), windows: HashMap::new(), last: 0x40 }
    }
}

fn page() -> u64 {
    // SAFETY: the call takes no pointers; it returns a number.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The start of the first page that these bytes touch, and the length of all pages that they touch.
fn pages(at: u64, bytes: u64) -> (u64, u64) {
    let page = page();
    let (first, end) = (at & !(page - 1), (at + bytes).next_multiple_of(page));
    (first, end - first)
}

/// Whether all pages of this memory are mapped.
fn is_mapped(at: u64, bytes: u64) -> bool {
    let (first, bytes) = pages(at, bytes);
    let mut states = vec![0u8; (bytes / page()) as usize];
    // SAFETY: `mincore` accesses none of the pages, whatever is mapped there, and `states` has room for a byte for each page.
    unsafe { libc::mincore(first as usize as *mut c_void, bytes as usize, states.as_mut_ptr()) == 0 }
}

impl Memory {
    fn number(&mut self) -> u32 {
        self.last = (self.last + 1) & 0x00ff_ffff;
        self.last
    }

    pub(crate) fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Registers memory. Returns its local and its remote key, which differ so that a test notices if one is used for the other. The remote key is 0
    /// if peers have no access.
    pub(crate) fn register(
        &mut self,
        domain: usize,
        (at, bytes): (u64, u64),
        access: c_int,
        report: &mut Report,
        most: u64,
    ) -> Result<(u32, u32), c_int> {
        let access = access as c_uint;
        let remote = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
        let known = LOCAL_WRITE | remote | MW_BIND | RELAXED_ORDERING;
        let writes_unasked = access & (REMOTE_WRITE | REMOTE_ATOMIC) != 0 && access & LOCAL_WRITE == 0;
        if access & !known != 0 || writes_unasked || bytes == 0 || at.checked_add(bytes + page()).is_none() {
            return Err(libc::EINVAL);
        }
        if !is_mapped(at, bytes) {
            return Err(libc::EFAULT);
        }
        let pinned = report.pinned_bytes + pages(at, bytes).1;
        if most != 0 && pinned > most {
            return Err(libc::ENOMEM);
        }
        let number = self.number();
        let lkey = number << 8 | 0x11;
        let rkey = if access & remote == 0 { 0 } else { number << 8 | 0x77 };
        let stretch = Stretch { at, bytes, access };
        self.regions.insert(number, Region { domain, stretch, lkey, rkey, windows: 0 });
        (report.regions, report.pinned_bytes) = (self.regions.len() as u64, pinned);
        report.most_pinned_bytes = report.most_pinned_bytes.max(pinned);
        Ok((lkey, rkey))
    }

    /// Ends a registration. From here on its keys are refused.
    pub(crate) fn deregister(&mut self, lkey: u32, report: &mut Report) -> Result<(), c_int> {
        let number = lkey >> 8;
        match self.regions.get(&number) {
            Some(region) if region.lkey == lkey && region.windows == 0 => {}
            _ => return Err(libc::EINVAL),
        }
        let Some(Region { stretch, .. }) = self.regions.remove(&number) else { return Err(libc::EINVAL) };
        if !is_mapped(stretch.at, stretch.bytes) {
            report.unmapped += 1;
        }
        report.regions = self.regions.len() as u64;
        report.pinned_bytes -= pages(stretch.at, stretch.bytes).1;
        Ok(())
    }

    /// Makes a window, which gives no access until it is bound. Returns its first key.
    pub(crate) fn make_window(&mut self, domain: usize, report: &mut Report) -> u32 {
        let number = self.number();
        self.windows.insert(number, Window { domain, bound: None });
        report.windows = self.windows.len() as u64;
        number << 8
    }

    /// Removes a window. If it is bound, the binding ends.
    pub(crate) fn drop_window(&mut self, key: u32, report: &mut Report) -> Result<(), c_int> {
        let window = self.windows.remove(&(key >> 8)).ok_or(libc::EINVAL)?;
        self.release(window.bound);
        report.windows = self.windows.len() as u64;
        Ok(())
    }

    fn release(&mut self, bound: Option<Bound>) {
        if let Some(region) = bound.and_then(|bound| self.regions.get_mut(&bound.region)) {
            region.windows -= 1;
        }
    }

    /// Binds a window, for accesses through one queue pair.
    pub(crate) fn bind(&mut self, domain: usize, pair: u32, wanted: Binding) -> Result<(), Refused> {
        let Binding { window, rkey, lkey, at, bytes, access } = wanted;
        let number = lkey >> 8;
        let region = self.regions.get_mut(&number).filter(|region| region.lkey == lkey).ok_or(Refused)?;
        let window =
            self.windows.get_mut(&(window >> 8)).filter(|_| window >> 8 == rkey >> 8).ok_or(Refused)?;
        let needed = if access & REMOTE_WRITE == 0 { MW_BIND } else { MW_BIND | LOCAL_WRITE };
        let same = region.domain == domain && window.domain == domain;
        if !same || window.bound.is_some() || !region.stretch.allows(at, bytes, needed) {
            return Err(Refused);
        }
        region.windows += 1;
        window.bound = Some(Bound { rkey, region: number, stretch: Stretch { at, bytes, access }, pair });
        Ok(())
    }

    /// Ends the binding of the window that has this key.
    pub(crate) fn invalidate(&mut self, rkey: u32, pair: u32) -> Result<(), Refused> {
        let window = self.windows.get_mut(&(rkey >> 8)).ok_or(Refused)?;
        let bound = window.bound.take_if(|bound| bound.rkey == rkey && bound.pair == pair);
        match bound {
            None => Err(Refused),
            some => {
                self.release(some);
                Ok(())
            }
        }
    }

    /// Ends the bindings of all windows that this queue pair has bound.
    pub(crate) fn forget_pair(&mut self, pair: u32) {
        let mut released = Vec::new();
        for window in self.windows.values_mut() {
            released.push(window.bound.take_if(|bound| bound.pair == pair));
        }
        released.into_iter().for_each(|bound| self.release(bound));
    }

    pub(crate) fn uses(&self, domain: usize) -> bool {
        self.regions.values().any(|region| region.domain == domain)
            || self.windows.values().any(|window| window.domain == domain)
    }

    /// Checks whether a request of this process may access (`access`) its own memory with this local key.
    pub(crate) fn own(
        &self,
        domain: usize,
        piece: &IbvSge,
        access: c_uint,
        report: &mut Report,
    ) -> Result<Piece, Refused> {
        let region = self.regions.get(&(piece.lkey >> 8));
        let region = region.filter(|region| region.lkey == piece.lkey && region.domain == domain);
        let is_allowed = |region: &Region| region.stretch.allows(piece.addr, piece.length.into(), access);
        if !region.is_some_and(is_allowed) {
            report.refused_accesses += 1;
            return Err(Refused);
        }
        Ok(Piece { at: piece.addr, bytes: piece.length })
    }

    /// Checks whether a peer may access this process's memory with this remote key, through a queue pair.
    pub(crate) fn remote(
        &self,
        (domain, pair): (usize, u32),
        (rkey, at, bytes): (u32, u64, u32),
        access: c_uint,
        report: &mut Report,
    ) -> Result<Piece, Refused> {
        let number = rkey >> 8;
        let region = self.regions.get(&number).filter(|region| region.rkey == rkey && rkey != 0);
        let window = self.windows.get(&number);
        let bound = window.and_then(|window| window.bound.as_ref()).filter(|bound| bound.rkey == rkey);
        let is_allowed = match (region, window.zip(bound)) {
            (Some(region), _) => region.domain == domain && region.stretch.allows(at, bytes.into(), access),
            (None, Some((window, bound))) => {
                window.domain == domain
                    && bound.pair == pair
                    && bound.stretch.allows(at, bytes.into(), access)
            }
            (None, None) => false,
        };
        if !is_allowed {
            report.refused_accesses += 1;
            return Err(Refused);
        }
        Ok(Piece { at, bytes })
    }
}

/// The pieces, or parts of pieces, that hold `bytes` bytes of a message from `offset` on.
pub(crate) fn part(pieces: &[IbvSge], offset: u32, bytes: u32) -> Vec<IbvSge> {
    let (mut skip, mut left, mut parts) = (offset, bytes, Vec::new());
    for piece in pieces {
        let skipped = skip.min(piece.length);
        let length = left.min(piece.length - skipped);
        if length > 0 {
            parts.push(IbvSge { addr: piece.addr + u64::from(skipped), length, lkey: piece.lkey });
        }
        (skip, left) = (skip - skipped, left - length);
    }
    parts
}

/// The sum of the pieces' lengths; `None` if it does not fit 32 bits.
pub(crate) fn total(pieces: &[IbvSge]) -> Option<u32> {
    pieces.iter().try_fold(0u32, |sum, piece| sum.checked_add(piece.length))
}
