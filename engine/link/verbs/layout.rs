//! How the receiver's area is laid out: cells for small frames, then slots for large ones.

use super::credits::{CELLS, Place};
use crate::link::{HEADER_BYTES, INLINE, SLOT};

/// Bytes of a cell: a header, and behind it the payload of a small frame.
pub(super) const CELL: usize = HEADER_BYTES + INLINE;
/// Bytes of all cells: a page.
pub(super) const CELLS_BYTES: usize = CELL * CELLS as usize;
/// The payload of a large frame begins at a page boundary; the frame's header lies right before.
const PAGE: usize = 4096;
const STRIDE: usize = PAGE + SLOT;
/// Bytes of the largest frame with its header.
pub(super) const LARGEST: usize = HEADER_BYTES + SLOT;

/// How many pieces of large frames a narrow link's window holds.
pub(super) const PIECES: u64 = 2;
/// Bytes of a piece; fewer where a port takes only smaller messages.
pub(super) const PIECE_BYTES: u32 = 4096;

/// Where the place of a piece begins in the area, behind the cells.
pub(super) fn place_of_piece(piece: u64) -> usize {
    CELLS_BYTES + (piece % PIECES) as usize * PIECE_BYTES as usize
}

/// Bytes of an area with so many slots. With 0 it is a narrow link's, which has places for pieces instead of slots.
pub(super) const fn area_bytes(slots: u32) -> usize {
    match slots {
        0 => CELLS_BYTES + PIECES as usize * PIECE_BYTES as usize,
        slots => CELLS_BYTES + slots as usize * STRIDE,
    }
}

/// Bytes behind the slots, if the link has two ports. The sender writes there by the second port, to try whether messages get through (`lane.rs`).
/// Nobody reads these bytes.
pub(super) const TRIAL_BYTES: usize = PAGE;

/// Where the bytes of that trial begin, in an area with so many slots.
pub(super) fn place_of_trial(slots: u32) -> usize {
    area_bytes(slots)
}

/// Where a frame's header lies in the area. Its payload lies right behind.
pub(super) fn offset(place: Place) -> usize {
    match place.slot {
        Some(slot) => CELLS_BYTES + slot as usize * STRIDE + PAGE - HEADER_BYTES,
        None => place.cell as usize * CELL,
    }
}

/// How many messages of at most `max` bytes it takes to send `bytes` bytes, and how many bytes the last one has.
pub(super) fn cut(bytes: usize, max: u32) -> (usize, u32) {
    let max = max.max(1) as usize;
    let pieces = bytes.div_ceil(max).max(1);
    (pieces, (bytes - (pieces - 1) * max) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_lie_apart_from_each_other_and_inside_the_area() {
        let small = (0..CELLS).map(|cell| (offset(Place { cell, slot: None }), CELL));
        let large = (0..4).map(|slot| (offset(Place { cell: 0, slot: Some(slot) }), LARGEST));
        let mut end = 0;
        for (at, bytes) in small.chain(large) {
            assert!(at >= end, "{at} is before {end}");
            end = at + bytes;
        }
        assert_eq!((end, area_bytes(4) % PAGE, CELLS_BYTES), (area_bytes(4), 0, PAGE));
        assert_eq!((offset(Place { cell: 0, slot: Some(3) }) + HEADER_BYTES) % PAGE, 0);
    }

    #[test]
    fn pieces_lie_apart_behind_the_cells_and_inside_the_area() {
        assert_eq!([0, 1, 2].map(place_of_piece), [CELLS_BYTES, CELLS_BYTES + 4096, CELLS_BYTES]);
        assert_eq!(area_bytes(0), place_of_piece(1) + PIECE_BYTES as usize);
    }

    #[test]
    fn messages_are_no_larger_than_a_port_takes() {
        assert_eq!(cut(100, 1 << 20), (1, 100));
        assert_eq!(cut(LARGEST, 4096), (33, 64));
        assert_eq!(cut(8192, 4096), (2, 4096));
        assert_eq!(cut(64, 1), (64, 1));
    }
}
