//! A ring of frames in somebody's region: what its cells hold, and access to them.
//!
//! The protocol is in [`super::ring`], which knows nothing of this memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::layout::{CELL, CELLS_AT, LINE, RING_BYTES};
use super::region::Region;
use super::ring::{CELLS, CLOSED, RingMemory};
use super::{Header, INLINE};
use crate::error::Error;
use crate::types::Signature;

/// A cell's first line. `repr(C)`: the layout is the contract between processes (of one build: versions are
/// compared at the handshake).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Descriptor {
    op: u64,
    offset: u64,
    /// Where the payload is: an address (same process), an offset in the sender's region, or `NOWHERE` if it lies beside the descriptor. A
    /// payload of at most `TINY` bytes (`local.rs`) is in this field itself: one cache line less goes from core to core.
    pub(crate) location: u64,
    count: u64,
    pub(crate) len: u32,
    message: u32,
    root: u32,
    generation: u32,
    kinds: [u8; 4],
    detail: u32,
    comm: u32,
    lap: u32,
}

const _: () = assert!(size_of::<Descriptor>() == LINE && CELL == 256);

impl Descriptor {
    pub(crate) fn new(header: &Header, location: u64) -> Descriptor {
        let s = &header.signature;
        Descriptor {
            comm: header.comm,
            op: header.op,
            offset: header.offset,
            location,
            count: s.count,
            len: header.len,
            message: header.message,
            root: s.root,
            generation: s.generation,
            kinds: [s.kind, s.dtype, s.op, s.algo],
            detail: s.detail,
            lap: 0,
        }
    }

    pub(crate) fn header(&self) -> Header {
        let [kind, dtype, op, algo] = self.kinds;
        let (root, count, generation, detail) = (self.root, self.count, self.generation, self.detail);
        let signature = Signature { kind, dtype, op, algo, root, count, generation, detail };
        let Descriptor { comm, op, offset, len, message, .. } = *self;
        Header { comm, op, offset, len, message, signature }
    }
}

/// A ring at an address in somebody's region.
#[derive(Clone)]
pub(crate) struct RawRing {
    pub(crate) region: Arc<Region>,
    base: *mut u8,
}

// SAFETY: `base` points into `region`, which the ring keeps mapped; accesses follow the ring protocol (one producer,
// one consumer), whose orderings make hand-overs between threads and processes sound.
unsafe impl Send for RawRing {}

impl RawRing {
    pub(crate) fn new(region: Arc<Region>, offset: u64) -> Result<RawRing, Error> {
        if !region.contains(offset, RING_BYTES) || !offset.is_multiple_of(128) {
            return Err(Error::system(
                "open a ring of a peer",
                format!("no ring can begin at offset {offset} of its region"),
            ));
        }
        let base = region.at(offset as usize);
        Ok(RawRing { region, base })
    }

    /// The offset in its region at which the ring begins.
    pub(crate) fn offset(&self) -> Option<u64> {
        self.region.offset_of(self.base)
    }

    pub(crate) fn cell(&self, cell: usize) -> *mut Descriptor {
        self.base.wrapping_add(CELLS_AT + cell * CELL).cast()
    }

    fn inline(&self, cell: usize) -> *mut u8 {
        self.base.wrapping_add(CELLS_AT + cell * CELL + LINE)
    }

    /// Writes at most [`INLINE`] bytes beside the descriptor of frame `frame`. To be called before the frame is published.
    pub(crate) fn write_beside(&self, frame: u64, bytes: &[u8]) {
        debug_assert!(bytes.len() <= INLINE);
        let at = self.inline((frame % CELLS) as usize);
        // SAFETY: the cell is in the mapping, has `INLINE` bytes of room beside the descriptor, and by the protocol is the
        // producer's until it is published, so nobody has a reference to it: `bytes` lies elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len().min(INLINE)) };
    }

    /// The bytes that the producer wrote beside the descriptor of a published frame.
    pub(crate) fn read_beside<const N: usize>(&self, frame: u64) -> [u8; N] {
        const { assert!(N <= INLINE) };
        // SAFETY: as in `read`: the cell is in the mapping, and this copies plain bytes, which the caller checks afterwards.
        unsafe { self.inline((frame % CELLS) as usize).cast::<[u8; N]>().read_volatile() }
    }

    fn lap(&self, cell: usize) -> &AtomicU32 {
        // SAFETY: in the mapping (checked in `new`), aligned to 4, only ever accessed as an atomic, alive with `self`.
        unsafe { &*self.cell(cell).cast::<u8>().add(LINE - 4).cast::<AtomicU32>() }
    }

    fn released_count(&self) -> &AtomicU64 {
        // SAFETY: as in `lap`; the ring starts on a 128-byte boundary.
        unsafe { &*self.base.cast::<AtomicU64>() }
    }

    /// Whether the consumer has released all `posted` frames, or has said that it reads no more.
    pub(crate) fn has_released(&self, posted: u64) -> bool {
        [posted, CLOSED].contains(&self.released_count().load(Ordering::Acquire))
    }

    pub(crate) fn revoked(&self) -> &AtomicU32 {
        // SAFETY: as in `lap`.
        unsafe { &*self.base.add(LINE).cast::<AtomicU32>() }
    }
}

/// The revocation word of a ring: by it the ring's sender takes back what it lent.
pub(crate) struct RingFlag(RawRing);

// SAFETY: of the ring, a `RingFlag` accesses only the revocation word, which is atomic.
unsafe impl Sync for RingFlag {}

impl RingFlag {
    pub(crate) fn new(region: Arc<Region>, offset: u64) -> Result<RingFlag, Error> {
        RawRing::new(region, offset).map(RingFlag)
    }

    pub(crate) fn raise(&self, to: u32) {
        self.0.revoked().fetch_max(to, Ordering::SeqCst);
    }

    pub(crate) fn is(&self) -> u32 {
        self.0.revoked().load(Ordering::SeqCst)
    }
}

impl RingMemory for RawRing {
    /// A descriptor and an address. For `write`: of the payload to copy beside the descriptor (null: none). From `read`: of the bytes beside the
    /// descriptor.
    type Frame = (Descriptor, *const u8);

    fn lap_acquire(&self, cell: usize) -> u32 {
        self.lap(cell).load(Ordering::Acquire)
    }
    fn publish(&self, cell: usize, lap: u32) {
        self.lap(cell).store(lap, Ordering::Release);
    }
    fn released_acquire(&self) -> u64 {
        self.released_count().load(Ordering::Acquire)
    }
    fn release(&self, count: u64) {
        self.released_count().store(count, Ordering::Release);
    }
    fn write(&self, cell: usize, (descriptor, payload): Self::Frame) {
        let bytes = (&raw const descriptor).cast::<u8>();
        // SAFETY: the cell is in the mapping and, by the protocol, the producer's until published. The last word
        // (the lap) is left alone: the consumer polls it. `payload` is null or valid for `len <= INLINE` bytes
        // (`LocalTx::post` and `lend` see to it), and cannot overlap the cell.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes, self.cell(cell).cast::<u8>(), LINE - 4);
            if !payload.is_null() {
                std::ptr::copy_nonoverlapping(payload, self.inline(cell), descriptor.len as usize);
            }
        }
    }
    fn read(&self, cell: usize) -> Self::Frame {
        // SAFETY: the cell is in the mapping and was published to us; a producer that breaks the protocol can change
        // the bytes under us, which is why this is a copy of plain integers, checked afterwards. The lap word may be
        // written concurrently only by such a producer.
        (unsafe { self.cell(cell).read_volatile() }, self.inline(cell))
    }
}
