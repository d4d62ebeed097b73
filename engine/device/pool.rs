//! The pool of a device's memory: pieces of its blocks, got from the driver where none is free, handed out and taken back in the order of
//! streams.

use std::time::Duration;

use allstream_sys::cuda::{CuResult, CudaError};
use parking_lot::MutexGuard;

use super::blocks::{ALIGN, Block, Piece};
use super::context::{Context, Line};
use super::devices::Device;
use super::handle::Entered;
use super::stream::DeviceStream;
use crate::error::Error;

/// A block, unless what is asked for is larger. `cuMemAlloc` takes from 0.1 to 1 ms and stops the device's other work
/// where it has to map memory, so it should be rare; more than this would be a burden to a process that needs little.
const BLOCK: u64 = 64 << 20;
/// Larger blocks are multiples of this, the size of the driver's pages.
const PAGE: u64 = 2 << 20;
/// Who waits for his turn with the driver, or for streams, looks this often whether others have left what he needs.
const PAUSE: Duration = Duration::from_micros(50);
/// So often the caller waits for what is pending where others may take it before him.
const ROUNDS: usize = 16;

/// Memory of a device that its pool has, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolMemory {
    /// In buffers, rounded up to 512 bytes each.
    pub used: u64,
    /// Of buffers that were dropped, while streams still worked on them when that was last looked at.
    pub pending: u64,
    /// In all blocks that the pool has from the driver, used or not.
    pub reserved: u64,
    /// Of buffers of which nobody can tell whether the device still touches them, after an error. Never used again.
    pub lost: u64,
    /// The number of blocks.
    pub blocks: usize,
}

fn up(bytes: u64, to: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(to)
}

/// The right to ask the driver for memory of the pool, or to give it some back: whoever finds none left can then be sure that
/// nobody is about to bring some.
type Turn<'a> = MutexGuard<'a, ()>;

/// The driver may wait for all that is on the device where it gives memory or takes some back, and what is on it may wait
/// for an operation for which another thread needs a piece. So the pool's lock is not held meanwhile, and who waits for his
/// turn takes what others leave.
impl Context {
    /// A piece of the pool for use on `line`, from its next work on.
    pub(super) fn piece(&self, entered: &Entered<'_>, line: &Line, bytes: u64) -> Result<Piece, CudaError> {
        let (bytes, large) = match (up(bytes, ALIGN), up(bytes, PAGE)) {
            (Some(bytes), Some(large)) => (bytes, large),
            _ => (u64::MAX, u64::MAX),
        };
        let turn = match self.ready(line, bytes) {
            Ok(piece) => return Ok(piece),
            Err(turn) => turn,
        };
        let mut rounds = 0..ROUNDS;
        loop {
            let before = self.pool.lock().released;
            let refused = match self.more(entered, &turn, bytes, large) {
                Err(error) if error.code == CuResult::OUT_OF_MEMORY => error,
                answer => return answer,
            };
            let freed = {
                let mut pool = self.pool.lock();
                // Of what has been freed since.
                if let Some(piece) = pool.ready(self, line.id, bytes) {
                    return Ok(piece);
                }
                if let Some(piece) = pool.left(self, *line.raw(), bytes)? {
                    return Ok(piece);
                }
                let may_change = !pool.pending.is_empty() || pool.released != before;
                if !may_change || rounds.next().is_none() {
                    return Err(refused);
                }
                pool.freed
            };
            // Together they may be enough. Here alone the caller waits, where it would be refused otherwise.
            while self.pool.lock().is_pending(self, freed)? {
                std::thread::sleep(PAUSE);
                if let Some(piece) = self.pool.lock().ready(self, line.id, bytes) {
                    return Ok(piece);
                }
            }
        }
    }

    /// A piece that is there without the driver; where there is none, the right to ask it.
    fn ready(&self, line: &Line, bytes: u64) -> Result<Piece, Turn<'_>> {
        loop {
            if let Some(piece) = self.pool.lock().ready(self, line.id, bytes) {
                return Ok(piece);
            }
            if let Some(turn) = self.growing.try_lock_for(PAUSE) {
                // Who had it before may have brought more than he needed.
                return self.pool.lock().ready(self, line.id, bytes).ok_or(turn);
            }
        }
    }

    /// A piece of a new block, or of what can be freed to make room for one.
    fn more(
        &self,
        entered: &Entered<'_>,
        turn: &Turn<'_>,
        bytes: u64,
        large: u64,
    ) -> Result<Piece, CudaError> {
        loop {
            let mut refused = None;
            for size in [large.max(BLOCK), large, bytes] {
                // SAFETY: in the context of this pool; freed in `trim`, or in `Pool::close`.
                match unsafe { self.cuda.mem_alloc(usize::try_from(size).unwrap_or(usize::MAX)) } {
                    Ok(at) => {
                        let mut pool = self.pool.lock();
                        pool.blocks.insert(at, Block::new(at, size));
                        return pool.take(bytes).ok_or_else(|| unreachable_fit(self));
                    }
                    Err(error) if error.code == CuResult::OUT_OF_MEMORY => refused = Some(error),
                    Err(error) => return Err(error),
                }
            }
            let given_back = self.trim(entered, turn);
            if let Some(piece) = self.pool.lock().take(bytes) {
                return Ok(piece);
            }
            if given_back == 0 {
                return Err(refused.unwrap_or_else(|| unreachable_fit(self)));
            }
        }
    }

    /// Gives blocks of the pool back of which nothing is used, here or in other processes. How many bytes.
    pub(super) fn trim(&self, _: &Entered<'_>, _: &Turn<'_>) -> u64 {
        let mut freed = 0;
        let unused = self.pool.lock().unused(self);
        for (at, block) in unused {
            // SAFETY: an address that `more` got; all of the block is free, so nothing of the device's uses it, and nobody
            // else knows it any more.
            match unsafe { self.cuda.mem_free(at) } {
                Ok(()) => freed += block.bytes,
                Err(_) => {
                    self.pool.lock().blocks.insert(at, block);
                }
            }
        }
        freed
    }

    /// Sees to it that so many bytes can be had on `line` without the driver. Where there is no such memory it is no error
    /// yet: it may be there when it is needed.
    pub(super) fn reserve(&self, entered: &Entered<'_>, line: &Line, bytes: u64) -> Result<(), CudaError> {
        let (Some(bytes), Some(large)) = (up(bytes, ALIGN), up(bytes, PAGE)) else { return Ok(()) };
        let piece = self.ready(line, bytes).or_else(|turn| self.more(entered, &turn, bytes, large));
        match piece {
            Ok(piece) => {
                // In the order of this stream it can be taken again at once.
                match self.mark(entered, *line.raw()) {
                    Ok(event) => self.pool.lock().free(piece, vec![(line.id, event)]),
                    Err(_) => self.pool.lock().lose(piece),
                }
                Ok(())
            }
            Err(error) if error.code == CuResult::OUT_OF_MEMORY => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// A block was made and does not hold what it was made for, or nothing was tried: neither can be.
fn unreachable_fit(context: &Context) -> CudaError {
    CudaError {
        call: "cuMemAlloc_v2",
        code: CuResult::OUT_OF_MEMORY,
        name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        text: format!("the pool of device {} has no such piece (a bug)", context.ordinal),
    }
}

impl Device {
    /// What the pool of this device has.
    pub fn pool(&self) -> PoolMemory {
        let pool = self.0.pool.lock();
        PoolMemory {
            used: pool.used,
            pending: pool.waiting(),
            reserved: pool.reserved(),
            lost: pool.lost,
            blocks: pool.blocks(),
        }
    }

    /// Gives blocks of the pool that nothing uses back to the driver, and pinned memory that is kept for staging. How many
    /// bytes of the device's.
    ///
    /// The driver waits for the device while it takes memory back. It also happens when memory runs out.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn trim(&self) -> Result<u64, Error> {
        self.0.unpin_idle();
        self.0.within("give memory back", |entered| Ok(self.0.trim(entered, &self.0.growing.lock())))
    }
}

impl DeviceStream {
    /// Sees to it that so many bytes of the pool can be had here without asking the driver, unless somebody else takes them
    /// first. May wait for what is on the device: to be called by who holds nothing.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<(), Error> {
        let context = &self.0.context;
        context
            .within("get memory for a collective", |entered| context.reserve(entered, &self.0, bytes as u64))
    }
}
