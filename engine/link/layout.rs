//! How a ring of frames lies in memory.

use super::INLINE;
use super::ring::CELLS;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Bytes of a cell: a line for the descriptor, and behind it the payload that travels inside.
pub(super) const CELL: usize = LINE + INLINE;
/// Where the cells begin.
pub(super) const CELLS_AT: usize = 2 * LINE;
/// Bytes of one ring: the consumer's line, the revocation line, the cells.
pub(crate) const RING_BYTES: usize = CELLS_AT + CELLS as usize * CELL;
