//! What `fuzz/` feeds of this link: what a peer says of its end, the numbers that come with its frames and notes, and the headers in the area that it
//! writes to.

use super::credits::{CELLS, Receiver, Sender};
use super::hello::{BYTES, Hello};
use super::layout::{area_bytes, cut, offset};
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
            1 + u32::from(bytes[0] % 8)
        }
    };
    let area = area_bytes(slots);
    let (mut rx, mut tx) = (Receiver::new(slots), Sender::new(slots));
    let mut unreleased = 0;
    while !data.is_empty() {
        let [what] = take(data);
        match what % 4 {
            0 => {
                let number = u32::from_le_bytes(take(data));
                let bytes = u32::from_le_bytes(take(data)) % (1 << 18);
                if rx.came(number, bytes).is_err() {
                    // The link is given up.
                    return;
                }
                unreleased += 1;
                assert!(unreleased <= CELLS, "a frame was taken for which there is no cell");
            }
            1 => {
                let Some((place, bytes)) = rx.head() else { continue };
                let most = if place.slot.is_some() { SLOT } else { INLINE };
                let Ok(header) = Header::decode(&take::<HEADER_BYTES>(data), most) else { return };
                let len = HEADER_BYTES + header.len as usize;
                assert!(offset(place) + len <= area, "a frame ends beyond the area");
                let (_, last) = cut(len, 1 + u32::from(what) * 4096);
                assert!(last as usize <= len);
                let _ = bytes == last;
            }
            2 => {
                unreleased -= u64::from(rx.head().is_some());
                rx.release();
                if rx.owes() {
                    rx.tell();
                }
            }
            _ => {
                while tx.has_room() {
                    let (place, _) = tx.post(what >= 128);
                    assert!(offset(place) + HEADER_BYTES <= area, "a frame would be written beyond the area");
                    tx.is_done_with_next();
                }
                if tx.told(u32::from_le_bytes(take(data))).is_err() {
                    return;
                }
            }
        }
    }
}
