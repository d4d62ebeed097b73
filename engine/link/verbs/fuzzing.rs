//! What `fuzz/` feeds of this link: what a peer says of its end, the numbers that come with its frames and notes, and the headers in the area that it
//! writes to.

use super::credits::{CELLS, COUNT, Came, Note, Receiver, Sender};
use super::hello::{BYTES, Hello};
use super::layout::{area_bytes, cut, offset};
use super::pieces::{Assembly, PiecesSent};
use crate::link::{HEADER_BYTES, Header, INLINE, SLOT};

/// The next `N` bytes; zeros once there are no more.
fn take<const N: usize>(data: &mut &[u8]) -> [u8; N] {
    let (head, rest) = data.split_at(N.min(data.len()));
    *data = rest;
    let mut bytes = [0; N];
    bytes[..head.len()].copy_from_slice(head);
    bytes
}

/// A peer that has passed the handshake, and says and writes what it likes.
pub fn peer(data: &[u8]) {
    let data = &mut &*data;
    let bytes = take::<BYTES>(data);
    let slots = match Hello::decode(&bytes) {
        Ok(hello) => {
            assert_eq!(hello.encode(), bytes);
            let _ = hello.address().to_string();
            hello.slots
        }
        Err(problem) => {
            assert!(!problem.is_empty());
            u32::from(bytes[0] % 9)
        }
    };
    let area = area_bytes(slots);
    // A narrow link has no slots, and one large frame at a time, which comes in pieces.
    let is_narrow = slots == 0;
    let (mut rx, mut tx) = (Receiver::new(slots.max(1)), Sender::new(slots.max(1)));
    let mut pieces = PiecesSent::default();
    let (mut large, window) = (Assembly::default(), vec![0u8; area_bytes(0)]);
    let mut unreleased = 0;
    while !data.is_empty() {
        let [what] = take(data);
        match what % 4 {
            0 => {
                let number = u32::from_le_bytes(take(data));
                let bytes = u32::from_le_bytes(take(data)) % (1 << 18);
                let came = match Came::of(number) {
                    Came::Frame { number, large } => rx.came((number, large), bytes),
                    Came::Part if is_narrow => {
                        // SAFETY: as large as a narrow link's area.
                        let taken =
                            unsafe { large.take(window.as_ptr(), (bytes, super::layout::PIECE), false) };
                        if taken.is_err() {
                            return;
                        }
                        large.tell();
                        continue;
                    }
                    Came::Part => return,
                };
                if came.is_err() {
                    // The link is given up.
                    return;
                }
                if is_narrow && let Came::Frame { large: true, .. } = Came::of(number) {
                    // SAFETY: as above.
                    if unsafe { large.take(window.as_ptr(), (bytes, super::layout::PIECE), true) }.is_err() {
                        return;
                    }
                    large.tell();
                    let frame = large.whole().expect("its last piece has come");
                    if let Some((header, _)) = frame.split_first_chunk() {
                        let _ = Header::decode(header, SLOT);
                    }
                }
                unreleased += 1;
                assert!(unreleased <= CELLS, "a frame was taken for which there is no cell");
            }
            1 => {
                let Some((place, bytes)) = rx.head() else { continue };
                let most = if place.slot.is_some() { SLOT } else { INLINE };
                let Ok(header) = Header::decode(&take::<HEADER_BYTES>(data), most) else { return };
                let len = HEADER_BYTES + header.len as usize;
                let is_in_pieces = is_narrow && place.slot.is_some();
                assert!(is_in_pieces || offset(place) + len <= area, "a frame ends beyond the area");
                let (_, last) = cut(len, 1 + u32::from(what) * 4096);
                assert!(last as usize <= len);
                let _ = bytes == last;
            }
            2 => {
                unreleased -= u64::from(rx.head().is_some());
                if rx.head().is_some_and(|(place, _)| place.slot.is_some()) {
                    large.release();
                }
                rx.release();
                if rx.owes() {
                    rx.tell();
                }
            }
            _ => {
                while tx.has_room() {
                    let (place, _) = tx.post(what >= 128 && !is_narrow);
                    assert!(offset(place) + HEADER_BYTES <= area, "a frame would be written beyond the area");
                    tx.is_done_with_next();
                }
                while pieces.has_room() {
                    let at = super::layout::place_of_piece(pieces.post());
                    assert!(
                        at + super::layout::PIECE as usize <= area_bytes(0),
                        "a piece would be written beyond the area"
                    );
                }
                let told = match Note::decode(u32::from_le_bytes(take(data))) {
                    Note::Released(count) => tx.told(count),
                    Note::Copied(count) => pieces.told(count, COUNT),
                };
                if told.is_err() {
                    return;
                }
            }
        }
    }
}
