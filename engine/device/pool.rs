//! The pool of a device's memory. It hands out pieces of its blocks, each for use in the order of a stream, and takes pieces back even while
//! streams still use them (`blocks.rs`). If no piece is free, it gets a block from the driver.

use std::time::{Duration, Instant};

use allstream_sys::cuda::{CuResult, CudaError};
use parking_lot::MutexGuard;

use super::blocks::{ALIGN, Block, Lost, Piece};
use super::context::{Context, Line};
use super::devices::Device;
use super::handle::Entered;
use super::stream::DeviceStream;
use crate::error::Error;

/// Bytes of a block, unless more is asked for or the driver has less. `cuMemAlloc` takes from 0.1 to 1 ms, and stops the device's other work
/// where it has to map memory, so it should be rare; larger blocks would be a burden to a process that needs little memory.
const BLOCK: u64 = 64 << 20;
/// Other blocks are multiples of this, the size of the driver's pages; or, if the driver does not have even that much, just as large as the piece.
const PAGE: u64 = 2 << 20;
/// How often a thread that waits for its turn with the driver, or for streams, looks whether others have freed what it needs.
const PAUSE: Duration = Duration::from_micros(50);
/// How many times a caller waits for pending pieces, which other threads may take first, before it is refused.
const ROUNDS: usize = 16;
/// A caller waits no longer than this while nothing becomes free and a stream of the device waits for an operation that not all ranks may have
/// called: the caller itself, or another thread that needs memory, may be the one that has to call it.
const PATIENCE: Duration = Duration::from_secs(5);

/// How much memory the pool of a device has. All but `blocks` are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolMemory {
    /// In buffers, rounded up to 512 bytes each.
    pub used: u64,
    /// In dropped buffers on which streams still worked when the pool last looked.
    pub pending: u64,
    /// In all blocks that the pool has from the driver, used or not.
    pub reserved: u64,
    /// In dropped buffers that the device may still touch: after an error, or because a graph may use them. Never used again. What a graph may
    /// use is not given back to the driver either: it stays until the device's primary context ends.
    pub lost: u64,
    /// The number of blocks.
    pub blocks: usize,
}

fn up(bytes: u64, to: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(to)
}

/// The right to get memory for the pool from the driver, or to give some back. One thread at a time has it: if that thread finds no
/// memory, it can be sure that no other thread is about to bring some.
type Turn<'a> = MutexGuard<'a, ()>;

/// For how long a caller has waited while it looked as if memory became free only after the caller itself, or another one, had gone on.
#[derive(Default)]
struct Patience {
    /// Since when a stream of the device waits and nothing has become free; `None`: at the last look that was not so.
    since: Option<Instant>,
    /// How many pieces had become free by the last look.
    released: u64,
}

impl Patience {
    fn is_over(&mut self, context: &Context) -> bool {
        let released = context.pool.lock().released;
        // If the lock is taken, its holder may be about to make a stream wait: then the answer of the last look still counts.
        let waits = context.ways.try_lock().map(|mut ways| !ways.is_quiet());
        if std::mem::replace(&mut self.released, released) != released || waits == Some(false) {
            self.since = None;
        } else if waits == Some(true) {
            self.since.get_or_insert_with(Instant::now);
        }
        self.since.is_some_and(|since| since.elapsed() >= PATIENCE)
    }
}

/// When the driver gives memory or takes some back, it may wait for all work on the device, and this work may wait for an
/// operation for which another thread needs a piece. So the pool's lock is not held meanwhile, and a thread that waits for its
/// turn takes what others free.
impl Context {
    /// A piece of so many bytes, rounded up, that the next work on `line` may use. May wait for the driver, or for streams.
    pub(super) fn piece(&self, entered: &Entered<'_>, line: &Line, bytes: u64) -> Result<Piece, CudaError> {
        let (bytes, large) = match (up(bytes, ALIGN), up(bytes, PAGE)) {
            (Some(bytes), Some(large)) => (bytes, large),
            _ => (u64::MAX, u64::MAX),
        };
        let (mut rounds, mut patience) = (0..ROUNDS, Patience::default());
        loop {
            let turn = match self.ready(line, bytes, &mut patience) {
                Ok(piece) => return Ok(piece),
                Err(turn) => turn.ok_or_else(|| self.stuck())?,
            };
            let before = self.pool.lock().released;
            let refused = match self.more(entered, &turn, bytes, large) {
                Err(error) if error.code == CuResult::OUT_OF_MEMORY => error,
                answer => return answer,
            };
            let freed = {
                let mut pool = self.pool.lock();
                // Another thread may have freed a piece that fits meanwhile.
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
            // All pending pieces together may be enough. The caller waits for streams only here, where it would be refused otherwise. Others may take
            // the turn meanwhile: these streams may wait for an operation for which another thread needs memory, or has to hear that there is none.
            drop(turn);
            while self.pool.lock().is_pending(self, freed)? {
                std::thread::sleep(PAUSE);
                if let Some(piece) = self.pool.lock().ready(self, line.id, bytes) {
                    return Ok(piece);
                }
                if patience.is_over(self) {
                    return Err(self.stuck());
                }
            }
        }
    }

    /// A piece that the pool has already; or, if it has none, the turn to ask the driver. Waits until there is one or the other; `None`: neither
    /// has come within the caller's patience.
    fn ready(&self, line: &Line, bytes: u64, patience: &mut Patience) -> Result<Piece, Option<Turn<'_>>> {
        loop {
            if let Some(piece) = self.pool.lock().ready(self, line.id, bytes) {
                return Ok(piece);
            }
            if let Some(turn) = self.growing.try_lock_for(PAUSE) {
                // The thread that had the turn before may have brought more than it needed.
                return self.pool.lock().ready(self, line.id, bytes).ok_or(Some(turn));
            }
            if patience.is_over(self) {
                return Err(None);
            }
        }
    }

    /// The error for a caller whose patience is over.
    fn stuck(&self) -> CudaError {
        let pending = self.pool.lock().waiting();
        CudaError {
            call: "cuMemAlloc_v2",
            code: CuResult::OUT_OF_MEMORY,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            text: format!(
                "out of memory: dropped buffers have {pending} bytes that streams still use, and none became free within {PATIENCE:?}, while a \
                 stream of this device waits for an operation of several ranks: let all ranks call it before they get more memory"
            ),
        }
    }

    /// A piece of a new block. If the driver has no memory, gives it back the unused blocks and asks again, as long as there are any.
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
                // SAFETY: in the context of this pool (`Entered`); freed in `trim`, or in `Pool::close`.
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

    /// Gives back to the driver the blocks of which nothing is used, here or in other processes. Returns how many bytes the driver took.
    pub(super) fn trim(&self, _: &Entered<'_>, _: &Turn<'_>) -> u64 {
        let mut freed = 0;
        let unused = self.pool.lock().unused(self);
        for (at, block) in unused {
            // SAFETY: an address that `more` got. `unused` returns only blocks that are wholly free and lent to no other process, so no work
            // on a device uses them; and it has taken them out of the pool, so no other thread gets a piece.
            match unsafe { self.cuda.mem_free(at) } {
                Ok(()) => freed += block.bytes,
                Err(_) => {
                    self.pool.lock().blocks.insert(at, block);
                }
            }
        }
        freed
    }

    /// Sees to it that a piece of this many bytes can be had on `line` without the driver. It is no error if there is not so much
    /// memory now: there may be when it is needed.
    pub(super) fn reserve(&self, entered: &Entered<'_>, line: &Line, bytes: u64) -> Result<(), CudaError> {
        let (Some(bytes), Some(large)) = (up(bytes, ALIGN), up(bytes, PAGE)) else { return Ok(()) };
        let piece = match self.ready(line, bytes, &mut Patience::default()) {
            Err(None) => return Ok(()),
            Err(Some(turn)) => self.more(entered, &turn, bytes, large),
            Ok(piece) => Ok(piece),
        };
        match piece {
            Ok(piece) => {
                // With a mark of this stream alone, the piece can be taken again at once for use in this stream's order.
                match self.mark(entered, *line.raw()) {
                    Ok(event) => self.pool.lock().free(piece, vec![(line.id, event)]),
                    Err(_) => self.pool.lock().lose(piece, Lost::Unmarked),
                }
                Ok(())
            }
            Err(error) if error.code == CuResult::OUT_OF_MEMORY => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The error where a new block does not hold the piece that it was made for, or no length was tried. Neither can happen.
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

    /// Gives blocks of the pool that nothing uses, and pinned memory that is kept for staging, back to the driver. Returns
    /// how many bytes of the device's memory it has given back.
    ///
    /// This may block: the driver may wait for the device before it takes memory back. When memory runs out, the pool gives blocks back by itself.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn trim(&self) -> Result<u64, Error> {
        self.0.unpin_idle();
        self.0.within("give memory back", |entered| Ok(self.0.trim(entered, &self.0.growing.lock())))
    }
}

impl DeviceStream {
    /// Sees to it that one piece of this many bytes can be had from the pool on this stream without asking the driver, unless another
    /// thread takes it first. May wait for what is on the device: the caller must hold nothing that others wait for.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<(), Error> {
        let context = &self.0.context;
        context
            .within("get memory for a collective", |entered| context.reserve(entered, &self.0, bytes as u64))
    }
}
