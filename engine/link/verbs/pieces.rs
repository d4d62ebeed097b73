//! Large frames on a narrow link, whose receiver has too little registered memory for a whole one. They come piece by piece through a window of two
//! pieces. The receiver copies each piece to memory that is not registered, and puts the frame together there. So a rank with thousands of links pins
//! little memory for each.
//!
//! Piece *n* takes place *n* modulo [`PIECES`] of the window. Both ends count pieces, as they count frames (`credits.rs`): the sender posts a piece only
//! when the receiver has said that it copied the piece that was in the same place before.

use super::layout::{LARGEST, PIECE_BYTES, PIECES, place_of_piece};

/// A frame is put together at an address that is a multiple of this. Then its payload, which kernels read, is aligned so, too.
const ALIGNED: usize = 64;

/// The sender's count.
#[derive(Debug, Default)]
pub(super) struct PiecesSent {
    posted: u64,
    /// Pieces that the receiver has said it copied.
    copied: u64,
}

impl PiecesSent {
    pub(super) fn has_room(&self) -> bool {
        self.posted - self.copied < PIECES
    }

    /// Counts a piece as posted, and returns its number. To be called only if there is room.
    pub(super) fn post(&mut self) -> u64 {
        self.posted += 1;
        self.posted - 1
    }

    /// The receiver says that it has copied so many pieces in all, counted in the bits of `mask`.
    pub(super) fn told(&mut self, count: u32, mask: u32) -> Result<(), String> {
        let more = u64::from(count.wrapping_sub(self.copied as u32) & mask);
        let under_way = self.posted - self.copied;
        if more == 0 || more > under_way {
            return Err(format!(
                "it says that it copied {more} more pieces of frames, while {under_way} are under way to it"
            ));
        }
        self.copied += more;
        Ok(())
    }
}

/// The receiver's count, and the frame that it puts together. There is only one such frame at a time, as the sender may have one large frame under way
/// (`credits.rs`).
#[derive(Default)]
pub(super) struct Assembly {
    /// Pieces that have come, and were copied.
    come: u64,
    told: u64,
    /// Room for the largest frame, allocated when the first piece comes. Frames begin at index `begin`.
    frame: Vec<u8>,
    begin: usize,
    /// Bytes of the frame that have come.
    filled: usize,
    /// The frame's last piece has come, and the frame was not released yet.
    is_whole: bool,
}

impl Assembly {
    /// A piece of `bytes` bytes has come; all pieces of a frame but the last have `most` bytes. Copies it from the window of the area that begins at `area`.
    ///
    /// # Safety
    /// `area` is the start of a narrow link's area: [`area_bytes(0)`](super::layout::area_bytes) bytes are mapped there.
    pub(super) unsafe fn take(
        &mut self,
        area: *const u8,
        (bytes, most): (u32, u32),
        is_last: bool,
    ) -> Result<(), String> {
        self.check(bytes, most, is_last)?;
        let bytes = bytes as usize;
        if self.frame.is_empty() {
            self.frame = vec![0; LARGEST + ALIGNED];
            self.begin = self.frame.as_ptr().align_offset(ALIGNED).min(ALIGNED);
        }
        let at = self.begin + self.filled;
        let into = &mut self.frame[at..at + bytes];
        let from = area.wrapping_add(place_of_piece(self.come));
        // SAFETY: the piece's place is inside the area (the caller's promise), and the piece is no larger than its place (`check`); `into` is memory of our
        // own, as large. A faulty peer may write to the place meanwhile: the bytes are copied as they are, and checked only after the copy.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), bytes) };
        (self.come, self.filled, self.is_whole) = (self.come + 1, self.filled + bytes, is_last);
        Ok(())
    }

    fn check(&self, bytes: u32, most: u32, is_last: bool) -> Result<(), String> {
        if self.is_whole || self.come - self.told >= PIECES {
            return Err("a piece of a large frame came for which there is no room".into());
        }
        if bytes > most.min(PIECE_BYTES)
            || !is_last && bytes != most
            || self.filled + bytes as usize > LARGEST
        {
            let filled = self.filled;
            return Err(format!(
                "a piece of {bytes} bytes came after {filled} bytes of a large frame, expected {most} bytes"
            ));
        }
        Ok(())
    }

    /// The frame, header and payload.
    pub(super) fn whole(&self) -> Option<&[u8]> {
        self.is_whole.then(|| &self.frame[self.begin..self.begin + self.filled])
    }

    /// The frame is released.
    pub(super) fn release(&mut self) {
        if self.is_whole {
            (self.filled, self.is_whole) = (0, false);
        }
    }

    /// How many pieces were copied in all, which the sender is told now; `None`: the sender knows already.
    pub(super) fn tell(&mut self) -> Option<u32> {
        (self.come > self.told).then(|| {
            self.told = self.come;
            self.come as u32
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_waits_for_room_and_believes_no_count_that_cannot_be() {
        const MASK: u32 = u32::MAX >> 1;
        let mut sent = PiecesSent { posted: (1 << 31) - 1, copied: (1 << 31) - 1 };
        assert_eq!((sent.post(), sent.post(), sent.has_room()), ((1 << 31) - 1, 1 << 31, false));
        assert!(sent.told(2, MASK).unwrap_err().contains("3 more pieces of frames, while 2 are under way"));
        sent.told(0, MASK).unwrap();
        assert!(sent.has_room());
        assert!(sent.told(0, MASK).unwrap_err().contains("0 more"));
        sent.told(1, MASK).unwrap();
    }

    #[test]
    fn pieces_that_no_correct_sender_posts_are_refused() {
        let with =
            |filled, is_whole, told| Assembly { come: 2, told, filled, is_whole, ..Assembly::default() };
        let free = with(4096, false, 2);
        assert_eq!(free.check(4096, 4096, false), Ok(()));
        assert_eq!(free.check(0, 4096, true), Ok(()));
        for (assembly, bytes, most, is_last) in [
            (with(4096, true, 2), 4096, 4096, false),
            (with(4096, false, 0), 4096, 4096, false),
            (with(4096, false, 2), 4095, 4096, false),
            (with(4096, false, 2), 8192, 8192, false),
            (with(LARGEST - 4095, false, 2), 4096, 4096, true),
        ] {
            assert!(assembly.check(bytes, most, is_last).is_err(), "{bytes} of {most}");
        }
    }
}
