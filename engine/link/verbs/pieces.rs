//! Large frames on a narrow link: its receiver has registered memory for no whole one. They come piece by piece through a window of two pieces, and the
//! receiver copies each to where it puts the frame together, in memory that is not registered. So a rank with thousands of links pins little for each.
//!
//! Piece *n* lies at *n* modulo [`PIECES`] in the window. Both ends count, as they do for frames (`credits.rs`): the sender posts a piece only when the
//! receiver has said that it copied the one that was in the place before.

use super::layout::{LARGEST, PIECE_BYTES, PIECES, place_of_piece};

/// A frame that is put together begins at a multiple of so many bytes, and so does its payload, which kernels read.
const ALIGNED: usize = 64;

/// The sender's count.
#[derive(Debug, Default)]
pub(super) struct PiecesSent {
    posted: u64,
    /// Those that the receiver said to have copied.
    copied: u64,
}

impl PiecesSent {
    pub(super) fn has_room(&self) -> bool {
        self.posted - self.copied < PIECES
    }

    /// A piece is posted: which one this is. Only where there is room.
    pub(super) fn post(&mut self) -> u64 {
        self.posted += 1;
        self.posted - 1
    }

    /// The receiver says that it has copied so many pieces in all, counted in as many bits as `mask` has.
    pub(super) fn told(&mut self, count: u32, mask: u32) -> Result<(), String> {
        let more = u64::from(count.wrapping_sub(self.copied as u32) & mask);
        let under_way = self.posted - self.copied;
        if more == 0 || more > under_way {
            return Err(format!(
                "it says to have copied {more} more pieces of frames, and {under_way} are under way to it"
            ));
        }
        self.copied += more;
        Ok(())
    }
}

/// The receiver's count, and the frame that it puts together. There is one at a time: the sender may have one large frame under way (`credits.rs`).
#[derive(Default)]
pub(super) struct Assembly {
    /// Pieces that have come, and were copied.
    come: u64,
    told: u64,
    /// Room for the largest frame, from the first piece on, and where in it a frame begins.
    frame: Vec<u8>,
    begin: usize,
    /// Bytes of the frame that have come.
    filled: usize,
    /// The frame's last piece has come, and it was not released.
    is_whole: bool,
}

impl Assembly {
    /// A piece has come with so many bytes, where all but a frame's last have `most`. Copies it from the window of the area that begins there.
    ///
    /// # Safety
    /// The area of a narrow link, [`area_bytes(0)`](super::layout::area_bytes), is mapped there.
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
        // SAFETY: the place is inside of the area (the caller's promise), and a piece is no larger (`check`). A peer that breaks its word may write there
        // meanwhile: the bytes are copied as they are, and believed only after the copy.
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
                "a piece of {bytes} bytes of a large frame came behind {filled} others, expected {most}"
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

    /// How many pieces were copied in all, where the sender has not been told.
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
        assert!(sent.told(2, MASK).unwrap_err().contains("3 more pieces of frames, and 2 are under way"));
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
