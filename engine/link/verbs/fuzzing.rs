//! What the targets in `fuzz/` feed to this link: a peer's greeting, the numbers that come with the peer's frames and notes, and the headers that it writes
//! to the area.

use super::credits::{Arrival, CELLS, COUNT, Came, Note, Place, Receiver, Sender};
use super::hello::{GREETING, Greeting};
use super::layout::{LARGEST, PIECE_BYTES, area_bytes, cut, offset, place_of_piece};
use super::offers::Offer;
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

/// Plays a peer that has passed the handshake, and then says and writes whatever it likes.
pub fn peer(data: &[u8]) {
    let data = &mut &*data;
    let bytes = take::<GREETING>(data);
    let (slots, lanes) = match Greeting::decode(&bytes) {
        Ok(greeting) => {
            assert_eq!(greeting.encode(), bytes);
            let _ = greeting.first.address().to_string();
            (greeting.first.slots, 1 + usize::from(greeting.second.is_some()))
        }
        Err(problem) => {
            assert!(!problem.is_empty());
            (u32::from(bytes[0] % 9), 1 + usize::from(bytes[1] % 2))
        }
    };
    let mut link = Link::new(slots, if slots == 0 { 1 } else { lanes });
    while !data.is_empty() {
        let [what] = take(data);
        // The link is given up once something is wrong.
        let is_right = match what % 4 {
            0 => link.comes(data),
            1 => link.reads(what, data),
            2 => link.releases(),
            _ => link.sends(what, data),
        };
        if is_right.is_none() {
            return;
        }
    }
}

/// A receiving and a sending end, both connected to that peer. A method returns `None` if the link is to be given up.
struct Link {
    /// The link has no slots: one large frame comes at a time, in pieces.
    is_narrow: bool,
    /// Bytes of the receive area.
    area: usize,
    rx: Receiver,
    lanes: usize,
    /// The area of a narrow link.
    window: Vec<u8>,
    large: Assembly,
    tx: Sender,
    pieces: PiecesSent,
}

impl Link {
    fn new(slots: u32, lanes: usize) -> Link {
        Link {
            is_narrow: slots == 0,
            area: area_bytes(slots),
            rx: Receiver::new(slots.max(1), lanes),
            lanes,
            window: vec![0; area_bytes(0)],
            large: Assembly::default(),
            tx: Sender::new(slots.max(1)),
            pieces: PiecesSent::default(),
        }
    }

    /// A message comes.
    fn comes(&mut self, data: &mut &[u8]) -> Option<()> {
        let number = u32::from_le_bytes(take(data));
        let bytes = u32::from_le_bytes(take(data)) % (1 << 18);
        let lane = take::<1>(data)[0] as usize % self.lanes;
        let arrival = |number, large, offered| Arrival { number, large, offered, bytes, lane };
        match Came::of(number) {
            Came::Part if self.is_narrow => return self.piece(bytes, false),
            Came::Part => return None,
            Came::Offer { .. } if self.is_narrow || bytes != Offer::BYTES as u32 => return None,
            Came::Offer { number } => {
                self.rx.came(arrival(number, true, true)).ok()?;
                if let Ok(offer) = Offer::decode(&take(data)) {
                    assert_eq!(Offer::decode(&offer.encode()), Ok(offer));
                }
                for frame in self.rx.unreleased().filter(|frame| self.rx.is_offered(*frame)) {
                    let slot = offset(Place { cell: 0, slot: Some(self.rx.slot(frame)) });
                    assert!(slot + LARGEST <= self.area, "a payload would be READ beyond the area");
                    assert!(
                        self.rx.lane(frame) < self.lanes,
                        "a payload would be READ by a lane that there is not"
                    );
                }
            }
            Came::Frame { number, large } => {
                self.rx.came(arrival(number, large, false)).ok()?;
                if large && self.is_narrow {
                    self.piece(bytes, true)?;
                }
            }
        }
        let unreleased = self.rx.unreleased();
        assert!(unreleased.end - unreleased.start <= CELLS, "a frame was taken for which there is no cell");
        Some(())
    }

    /// A piece of a large frame has come.
    fn piece(&mut self, bytes: u32, is_last: bool) -> Option<()> {
        // SAFETY: `window` is as large as a narrow link's area.
        unsafe { self.large.take(self.window.as_ptr(), (bytes, PIECE_BYTES), is_last) }.ok()?;
        self.large.tell();
        assert_eq!(self.large.whole().is_some(), is_last);
        if let Some((header, _)) = self.large.whole().and_then(|whole| whole.split_first_chunk()) {
            let _ = Header::decode(header, SLOT);
        }
        Some(())
    }

    /// The oldest frame is looked at.
    fn reads(&mut self, what: u8, data: &mut &[u8]) -> Option<()> {
        let Some((place, bytes)) = self.rx.head() else { return Some(()) };
        let most = if place.slot.is_some() { SLOT } else { INLINE };
        let header = Header::decode(&take::<HEADER_BYTES>(data), most).ok()?;
        let len = HEADER_BYTES + header.len as usize;
        let is_in_pieces = self.is_narrow && place.slot.is_some();
        assert!(is_in_pieces || offset(place) + len <= self.area, "a frame ends beyond the area");
        let (_, last) = cut(len, 1 + u32::from(what) * 4096);
        assert!(last as usize <= len);
        let _ = bytes == last;
        Some(())
    }

    /// The oldest frame is released.
    fn releases(&mut self) -> Option<()> {
        let head = self.rx.head();
        if head.is_some_and(|(place, _)| place.slot.is_some()) {
            self.large.release();
        }
        self.rx.release();
        if self.rx.owes() {
            self.rx.tell();
        }
        Some(())
    }

    /// Sends as many frames and pieces as there is room for; then the peer says how many it has released or copied.
    fn sends(&mut self, what: u8, data: &mut &[u8]) -> Option<()> {
        while self.tx.has_room() {
            let (place, _) = self.tx.post(what >= 128 && !self.is_narrow);
            assert!(offset(place) + HEADER_BYTES <= self.area, "a frame would be written beyond the area");
            self.tx.is_done_with_next();
        }
        while self.pieces.has_room() {
            let at = place_of_piece(self.pieces.post());
            assert!(at + PIECE_BYTES as usize <= area_bytes(0), "a piece would be written beyond the area");
        }
        let told = match Note::decode(u32::from_le_bytes(take(data))) {
            Note::Released(count) => self.tx.told(count).map(drop),
            Note::Copied(count) => self.pieces.told(count, COUNT),
        };
        told.ok()
    }
}
