//! The blocks of memory that the pool of a device has, and which parts of them are free. `pool.rs` gets blocks from the driver and gives them back.
//!
//! A block is one `cuMemAlloc`: memory of the driver's own pools has no legacy IPC handle, and ignores peer access
//! (`cuCtxEnablePeerAccess`). A piece that is freed while its streams still work is *pending*: each stream's work is
//! marked by an event. A piece that only one stream has used may be used again on that stream at once.

use std::collections::BTreeMap;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use allstream_sys::cuda::{CuEvent, CuIpcMemHandle, CuStream, Cuda, CudaError};

use super::handle::{Entered, Handle, is_not_yet, sleep_until};

/// Pieces start at multiples of this, so that wide loads and rows of kernels are aligned. (`cuMemAlloc` itself aligns to 256
/// bytes at least.)
pub(super) const ALIGN: u64 = 512;
/// A part of a block: its address `at` and length in `bytes`, and the address of the block. Not `Clone`: whoever has it owns the memory.
#[derive(Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) block: u64,
    pub(super) at: u64,
    pub(super) bytes: u64,
}

/// Why nobody can tell when a piece is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// A stream that used it could not be marked.
    Unmarked,
    /// A graph may use it each time that it is launched.
    InGraph,
}

/// A point in a stream: the stream's number, and an event that was recorded there.
pub(super) type Mark = (u64, CuEvent);

pub(super) struct Pending {
    piece: Piece,
    after: Vec<Mark>,
    /// Its place, from 1 on, among all pieces that were freed with marks.
    number: u64,
}

pub(super) struct Block {
    pub(super) bytes: u64,
    /// Address and length of each free range. No two of them touch.
    free: BTreeMap<u64, u64>,
    /// No other block of this process ever has this number. (The driver gives addresses and handles out again.)
    number: u64,
    /// The handle by which other processes open it, once one was asked for.
    handle: Option<CuIpcMemHandle>,
    /// As long as any of these lives, other processes may have it open.
    lent: Vec<Weak<()>>,
    /// A graph may use a part of it.
    is_in_graph: bool,
}

impl Block {
    pub(super) fn new(at: u64, bytes: u64) -> Block {
        let (number, free) = (new_number(), BTreeMap::from([(at, bytes)]));
        Block { bytes, free, number, handle: None, lent: Vec::new(), is_in_graph: false }
    }

    fn is_lent(&mut self) -> bool {
        self.lent.retain(|keep| keep.strong_count() > 0);
        !self.lent.is_empty()
    }
}

/// A number for memory that other processes open, which no other memory of this process has ever had.
pub(super) fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What another process is told of memory, so that it can open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    /// The number of the block, or of another library's allocation, and where in it the memory begins.
    pub(crate) number: u64,
    pub(crate) offset: u64,
    /// The IPC handle by which the driver opens the block.
    pub(crate) handle: [u8; 64],
    /// The address of the whole block in the process that has it, and its length.
    pub(crate) base: u64,
    pub(crate) bytes: u64,
}

/// The pool of a device. See the module.
#[derive(Default)]
pub(super) struct Pool {
    /// By address.
    pub(super) blocks: BTreeMap<u64, Block>,
    pub(super) pending: Vec<Pending>,
    /// How many pieces were freed with marks; and how many pieces have become free.
    pub(super) freed: u64,
    pub(super) released: u64,
    pub(super) used: u64,
    pub(super) lost: u64,
}

impl Pool {
    pub(super) fn reserved(&self) -> u64 {
        self.blocks.values().map(|block| block.bytes).sum()
    }

    pub(super) fn waiting(&self) -> u64 {
        self.pending.iter().map(|pending| pending.piece.bytes).sum()
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Takes a piece off the smallest free range that is large enough; if there are several, off the one with the lowest address.
    fn fit(&mut self, bytes: u64) -> Option<Piece> {
        let all = self.blocks.iter().flat_map(|(base, block)| block.free.iter().map(move |f| (*base, f)));
        let fitting = all.filter(|(_, (_, len))| **len >= bytes).min_by_key(|(_, (at, len))| (**len, **at));
        let (base, at, len) = fitting.map(|(base, (at, len))| (base, *at, *len))?;
        let block = self.blocks.get_mut(&base)?;
        block.free.remove(&at);
        if len > bytes {
            block.free.insert(at + bytes, len - bytes);
        }
        Some(Piece { block: base, at, bytes })
    }

    fn release(&mut self, piece: Piece) {
        self.released += 1;
        let Some(block) = self.blocks.get_mut(&piece.block) else { return };
        let (mut at, mut bytes) = (piece.at, piece.bytes);
        if let Some((before, len)) = block.free.range(..at).next_back().map(|(a, l)| (*a, *l))
            && before + len == at
        {
            block.free.remove(&before);
            (at, bytes) = (before, len + bytes);
        }
        if let Some(len) = block.free.remove(&(piece.at + piece.bytes)) {
            bytes += len;
        }
        block.free.insert(at, bytes);
    }

    /// Takes back a piece that was given out. It is free once all marks in `after` are reached.
    pub(super) fn free(&mut self, piece: Piece, after: Vec<Mark>) {
        self.used -= piece.bytes;
        if after.is_empty() {
            self.release(piece);
        } else {
            self.freed += 1;
            self.pending.push(Pending { piece, after, number: self.freed });
        }
    }

    /// Whether streams still use some of the first `freed` pieces that were freed with marks.
    pub(super) fn is_pending(&self, handle: &Handle, freed: u64) -> Result<bool, CudaError> {
        let old = self.pending.iter().filter(|pending| pending.number <= freed);
        for (_, event) in old.flat_map(|pending| &pending.after) {
            // SAFETY: an event of this context, which `pending` keeps.
            match unsafe { handle.cuda.event_query(*event) } {
                Ok(()) => {}
                Err(error) if is_not_yet(error.code) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Takes back a piece that is never to be used again, as nobody can tell whether the device still touches it.
    pub(super) fn lose(&mut self, piece: Piece, why: Lost) {
        self.used -= piece.bytes;
        self.lost += piece.bytes;
        if let Some(block) = self.blocks.get_mut(&piece.block) {
            block.is_in_graph |= why == Lost::InGraph;
        }
    }

    /// Frees the pieces that streams are done with. An event counts as not reached if the driver gives an error.
    fn reap(&mut self, handle: &Handle) {
        for mut pending in std::mem::take(&mut self.pending) {
            pending.after.retain(|(_, event)| {
                // SAFETY: an event of this context, which `pending` keeps.
                let reached = unsafe { handle.cuda.event_query(*event) }.is_ok();
                if reached {
                    handle.recycle(*event);
                }
                !reached
            });
            if pending.after.is_empty() {
                self.release(pending.piece);
            } else {
                self.pending.push(pending);
            }
        }
    }

    /// The index of the first pending piece that is large enough and whose marks `suits` accepts, and copies of these marks. The
    /// piece keeps its events: the part of it that is not cut off stays pending.
    fn early(&mut self, bytes: u64, suits: impl Fn(&[Mark]) -> bool) -> Option<(usize, Vec<Mark>)> {
        let index = self.pending.iter().position(|p| p.piece.bytes >= bytes && suits(&p.after))?;
        Some((index, self.pending[index].after.clone()))
    }

    fn cut(&mut self, handle: &Handle, index: usize, bytes: u64) -> Piece {
        let pending = &mut self.pending[index];
        let piece = Piece { block: pending.piece.block, at: pending.piece.at, bytes };
        pending.piece.at += bytes;
        pending.piece.bytes -= bytes;
        if pending.piece.bytes == 0 {
            let spent = self.pending.swap_remove(index);
            spent.after.into_iter().for_each(|(_, event)| handle.recycle(event));
        }
        piece
    }

    /// Takes a piece that is free.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Piece> {
        let piece = self.fit(bytes)?;
        self.used += piece.bytes;
        Some(piece)
    }

    /// A piece that the stream with this number may use from its next work on, without a wait.
    pub(super) fn ready(&mut self, handle: &Handle, stream: u64, bytes: u64) -> Option<Piece> {
        self.reap(handle);
        if let Some(piece) = self.take(bytes) {
            return Some(piece);
        }
        // If this is the only stream that has used a pending piece, its next work comes after that use anyway.
        let (index, _) = self.early(bytes, |after| after.iter().all(|(id, _)| *id == stream))?;
        self.used += bytes;
        Some(self.cut(handle, index, bytes))
    }

    /// A piece that streams still use. `stream` is made to wait for them; the caller does not wait.
    pub(super) fn left(
        &mut self,
        handle: &Handle,
        stream: CuStream,
        bytes: u64,
    ) -> Result<Option<Piece>, CudaError> {
        let Some((index, after)) = self.early(bytes, |_| true) else { return Ok(None) };
        for (_, event) in after {
            // SAFETY: a stream, which the caller keeps, and a recorded event, which the pending piece keeps; both are of this context.
            unsafe { handle.cuda.stream_wait_event(stream, event, 0) }?;
        }
        self.used += bytes;
        Ok(Some(self.cut(handle, index, bytes)))
    }

    /// Says how other processes open this memory. Its block is not given back as long as `keep` lives. `None`: the memory is not of this pool.
    pub(super) fn export(
        &mut self,
        cuda: &Cuda,
        _: &Entered<'_>,
        keep: &Weak<()>,
        (at, bytes): (u64, u64),
    ) -> Result<Option<Exported>, CudaError> {
        let Some((base, block)) = self.blocks.range_mut(..=at).next_back() else { return Ok(None) };
        let offset = at - base;
        if offset.checked_add(bytes).is_none_or(|end| end > block.bytes) {
            return Ok(None);
        }
        let handle = match block.handle {
            Some(handle) => handle,
            // SAFETY: in the context (`Entered`); the address of a block that `more` got and that has not been given back.
            None => *block.handle.insert(unsafe { cuda.ipc_get_mem_handle(*base) }?),
        };
        if !block.lent.iter().any(|known| known.ptr_eq(keep)) {
            block.is_lent(); // forgets those that are gone
            block.lent.push(keep.clone());
        }
        let (base, bytes) = (*base, block.bytes);
        Ok(Some(Exported { number: block.number, offset, handle: handle.0, base, bytes }))
    }

    /// Takes out the blocks of which nobody uses a part, in this process or another.
    pub(super) fn unused(&mut self, handle: &Handle) -> Vec<(u64, Block)> {
        self.reap(handle);
        let all = self.blocks.iter_mut();
        let is_unused =
            |at: &u64, block: &mut Block| block.free.get(at) == Some(&block.bytes) && !block.is_lent();
        let unused: Vec<u64> = all.filter_map(|(at, block)| is_unused(at, block).then_some(*at)).collect();
        unused.iter().filter_map(|at| self.blocks.remove_entry(at)).collect()
    }

    /// Called when nobody has a piece any more. Gives the blocks back to the driver, once streams are done with the pieces that are pending. Blocks
    /// that a graph may use end only with the device's context: another library may keep that context, and launch the graph there.
    pub(super) fn close(&mut self, cuda: &Cuda, entered: &Entered<'_>, report: &dyn Fn(CudaError)) {
        for (_, event) in self.pending.drain(..).flat_map(|pending| pending.after) {
            // SAFETY: an event of the entered context, which `pending` has owned.
            unsafe { sleep_until(cuda, entered, event).and_then(|()| cuda.event_destroy(event)) }
                .unwrap_or_else(report);
        }
        let blocks = std::mem::take(&mut self.blocks).into_iter().filter(|(_, block)| !block.is_in_graph);
        for (at, _) in blocks {
            // SAFETY: an address that `more` got, nobody has a piece there, and no graph was given one. Streams are done with the pending pieces, as
            // was waited for above. For lost pieces, and where such a wait has failed, `cuMemFree` itself waits for the work on the device.
            unsafe { cuda.mem_free(at) }.unwrap_or_else(report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(blocks: &[(u64, u64)]) -> Pool {
        let blocks = blocks.iter().map(|(at, bytes)| (*at, *bytes));
        let blocks = blocks.map(|(at, bytes)| (at, Block::new(at, bytes)));
        Pool { blocks: blocks.collect(), ..Pool::default() }
    }

    #[test]
    fn the_smallest_range_that_fits_is_taken_and_neighbours_grow_together_again() {
        let mut pool = pool(&[(1 << 20, 8192), (1 << 30, 2048)]);
        let small = pool.fit(1024).unwrap();
        assert_eq!(small, Piece { block: 1 << 30, at: 1 << 30, bytes: 1024 });
        let [a, b, c] = [2048, 1024, 4096].map(|bytes| pool.fit(bytes).unwrap());
        assert_eq!((a.at, b.at, c.at), (1 << 20, (1 << 30) + 1024, (1 << 20) + 2048));
        assert_eq!(pool.fit(4096), None);
        pool.release(a);
        pool.release(c);
        assert_eq!(pool.blocks[&(1 << 20)].free, BTreeMap::from([(1 << 20, 8192)]));
        pool.release(b);
        pool.release(small);
        assert_eq!(pool.blocks[&(1 << 30)].free, BTreeMap::from([(1 << 30, 2048)]));
    }

    /// Pieces in any order of taking and releasing: never two at one place, and all is one range again in the end.
    #[test]
    fn pieces_never_overlap() {
        let mut pool = pool(&[(4096, 1 << 16), (1 << 20, 1 << 15)]);
        let (mut state, mut taken) = (7_u64, Vec::<Piece>::new());
        for _ in 0..5000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = state >> 33;
            if number % 3 == 0 && !taken.is_empty() {
                let index = number as usize / 3 % taken.len();
                pool.release(taken.swap_remove(index));
            } else if let Some(piece) = pool.fit((number % 8 + 1) * ALIGN) {
                let apart =
                    |other: &Piece| piece.at + piece.bytes <= other.at || other.at + other.bytes <= piece.at;
                assert!(taken.iter().all(apart), "{piece:?} in {taken:?}");
                taken.push(piece);
            }
        }
        taken.into_iter().for_each(|piece| pool.release(piece));
        assert!(pool.blocks.iter().all(|(at, block)| block.free == BTreeMap::from([(*at, block.bytes)])));
    }
}
