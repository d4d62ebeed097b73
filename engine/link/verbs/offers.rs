//! Large frames that are offered: the payload stays in the sender's memory, and the receiver READs it, mostly straight to where it belongs.
//!
//! The sender offers a frame if the payload lies in a registered buffer (`blocks.rs`) and the receiver only copies it. It binds a window to the payload,
//! and writes to the frame's cell an [`Offer`]: the frame's header, the payload's address, and the window's key. Both ends count the frame as any
//! large frame, so the frame has a slot: the receiver READs the payload to the slot if it cannot READ it to its place. Once the receiver has released
//! the frame, it tells the sender by a note. It may put the note off while it READs to operations' memory, unless half of the cells or slots were
//! released since its last note. The sender then invalidates the key, and only after that is the payload's memory free.

use allstream_sys::verbs::{DeviceCap, IbvDeviceAttr};

use super::credits::{CELLS, MOST_SLOTS};
use super::layout::CELL;
use super::windows::Window;
use crate::link::{HEADER_BYTES, Header, INLINE, SLOT};

/// Payloads of fewer bytes are written, not offered: the offer and the READ would take longer than the copies that they save.
pub(super) const OFFERED_FROM: usize = 64 << 10;

/// How many READs may be under way at once on a queue pair: what the device can do, but no more than a link makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reads {
    /// READs of the peer that this device answers. 0 for a device without memory windows of type 2B, which offers nothing to a peer.
    pub(super) answered: u8,
    /// READs that this device makes.
    pub(super) asked: u8,
}

impl Reads {
    pub(super) const NONE: Reads = Reads { answered: 0, asked: 0 };

    pub(super) fn of(limits: &IbvDeviceAttr) -> Reads {
        let most = |limit: i32| limit.clamp(0, MOST_SLOTS as i32) as u8;
        let has_windows = limits.device_cap_flags & DeviceCap::MEM_WINDOW_TYPE_2B.0 != 0;
        Reads {
            answered: if has_windows { most(limits.max_qp_rd_atom) } else { 0 },
            asked: most(limits.max_qp_init_rd_atom),
        }
    }
}

/// What a sender writes to the cell of a frame whose payload it offers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offer {
    pub(super) header: Header,
    /// Where the payload is in the sender's memory.
    pub(super) at: u64,
    /// The key by which the payload can be read.
    pub(super) key: u32,
}

impl Offer {
    pub(super) const BYTES: usize = HEADER_BYTES + 16;

    pub(super) fn encode(&self) -> [u8; Offer::BYTES] {
        let mut bytes = [0; Offer::BYTES];
        let (header, rest) = bytes.split_at_mut(HEADER_BYTES);
        header.copy_from_slice(&self.header.encode());
        rest[..8].copy_from_slice(&self.at.to_le_bytes());
        rest[8..12].copy_from_slice(&self.key.to_le_bytes());
        bytes
    }

    /// Reads an offer that a peer has written, or says what is wrong with it.
    pub(super) fn decode(bytes: &[u8; Offer::BYTES]) -> Result<Offer, String> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&bytes[..HEADER_BYTES]);
        let header = Header::decode(&header, SLOT)?;
        let at = u64::from(u32_at(HEADER_BYTES)) | u64::from(u32_at(HEADER_BYTES + 4)) << 32;
        let (key, rest) = (u32_at(HEADER_BYTES + 8), u32_at(HEADER_BYTES + 12));
        if header.len as usize <= INLINE || at.checked_add(header.len.into()).is_none() || rest != 0 {
            return Err(format!("an impossible offer of {} bytes at {at:#x}", header.len));
        }
        Ok(Offer { header, at, key })
    }
}

const _: () = assert!(Offer::BYTES <= CELL);

/// The sender's side: the windows of the frames that are offered.
#[derive(Default)]
pub(super) struct Offering {
    /// Windows that are not bound.
    free: Vec<Window>,
    /// The device has refused to make a window.
    is_refused: bool,
    /// The windows of offered frames, each at the frame's number modulo [`CELLS`].
    bound: [Option<Window>; CELLS as usize],
}

impl Offering {
    /// A window that is not bound; `make` makes one if there is none. `None`: all are bound, and the device makes no more.
    pub(super) fn take<E>(&mut self, make: impl FnOnce() -> Result<Window, E>) -> Option<Result<Window, E>> {
        if let Some(window) = self.free.pop() {
            return Some(Ok(window));
        }
        if self.is_refused {
            return None;
        }
        // Room for all that there will ever be: nothing is allocated later.
        self.free.reserve(MOST_SLOTS as usize);
        let made = make();
        self.is_refused = made.is_err();
        Some(made)
    }

    /// A window that [`take`](Offering::take) gave is bound to the payload of a frame.
    pub(super) fn bind(&mut self, frame: u64, window: Window) {
        self.bound[(frame % CELLS) as usize] = Some(window);
    }

    /// Whether any frame is offered.
    pub(super) fn has_bound(&self) -> bool {
        self.bound.iter().any(Option::is_some)
    }

    /// The key of a frame's window, if the frame is offered.
    pub(super) fn key(&self, frame: u64) -> Option<u32> {
        self.bound[(frame % CELLS) as usize].as_ref().map(Window::key)
    }

    /// The key of a frame's window is not valid any more, if the frame is offered.
    pub(super) fn is_over(&mut self, frame: u64) {
        self.free.extend(self.bound[(frame % CELLS) as usize].take());
    }

    /// Gives back the window of a frame, so that the peer cannot read the payload any more. `false`: the frame is not offered, or the device keeps the
    /// window.
    pub(super) fn end(&mut self, frame: u64) -> bool {
        let bound = &mut self.bound[(frame % CELLS) as usize];
        let ended = bound.as_mut().is_some_and(Window::end);
        if ended {
            *bound = None;
        }
        ended
    }
}

/// Where a READ puts what it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    /// The frame's slot.
    Slot,
    /// An operation's memory at this address.
    Place(u64),
}

/// How far the receiver is with the payload of an offered frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No READ is posted for what is left of the payload.
    Idle,
    Reading(To, usize),
    /// So many bytes from [`Taken::done`] on have been read.
    Here(To, usize),
    /// The READ failed.
    Failed,
}

/// An offer that the receiver has taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) offer: Offer,
    /// The lane by which the offer came, and by which the payload is READ.
    pub(super) lane: usize,
    /// Bytes that are released.
    pub(super) done: usize,
    pub(super) stage: Stage,
}

impl Taken {
    /// Bytes that are not released.
    pub(super) fn left(&self) -> usize {
        self.offer.header.len as usize - self.done
    }

    /// Whether this frame goes on where another one ends: both are of one message, whose elements have `unit` bytes.
    pub(super) fn follows(&self, before: &Taken, unit: usize) -> bool {
        let (a, b) = (&before.offer.header, &self.offer.header);
        let is_same = (a.comm, a.op, a.message) == (b.comm, b.op, b.message) && a.signature == b.signature;
        let elements = (a.len as usize).checked_div(unit).unwrap_or(0) as u64;
        is_same && a.offset.checked_add(elements) == Some(b.offset)
    }
}

/// The receiver's side: the offers that have come and were not released, and the READs under way.
#[derive(Default)]
pub(super) struct Taking {
    /// Each at its frame's number modulo [`CELLS`].
    taken: [Option<Taken>; CELLS as usize],
    /// The frames for which a READ is posted.
    reading: Vec<u64>,
}

impl Taking {
    pub(super) fn new() -> Taking {
        Taking { reading: Vec::with_capacity(MOST_SLOTS as usize), ..Taking::default() }
    }

    pub(super) fn take(&mut self, frame: u64, offer: Offer, lane: usize) -> Taken {
        *self.taken[(frame % CELLS) as usize].insert(Taken { offer, lane, done: 0, stage: Stage::Idle })
    }

    pub(super) fn get(&self, frame: u64) -> Option<Taken> {
        self.taken[(frame % CELLS) as usize]
    }

    /// How many READs are posted by this lane.
    pub(super) fn under_way(&self, lane: usize) -> usize {
        self.reading.iter().filter_map(|frame| self.get(*frame)).filter(|taken| taken.lane == lane).count()
    }

    /// Whether a READ is posted that writes to an operation's memory.
    pub(super) fn writes(&self) -> bool {
        let is_to_place = |taken: &Taken| matches!(taken.stage, Stage::Reading(To::Place(_), _));
        self.reading.iter().filter_map(|frame| self.get(*frame)).any(|taken| is_to_place(&taken))
    }

    /// A READ is posted for the next `bytes` bytes of a frame.
    pub(super) fn reads(&mut self, frame: u64, to: To, bytes: usize) {
        if let Some(taken) = &mut self.taken[(frame % CELLS) as usize] {
            taken.stage = Stage::Reading(to, bytes);
            self.reading.push(frame);
        }
    }

    /// The READ of this frame has ended.
    pub(super) fn has_read(&mut self, frame: u64, is_good: bool) {
        self.reading.retain(|other| *other != frame);
        if let Some(taken) = &mut self.taken[(frame % CELLS) as usize]
            && let Stage::Reading(to, bytes) = taken.stage
        {
            taken.stage = if is_good { Stage::Here(to, bytes) } else { Stage::Failed };
        }
    }

    /// So many bytes of those that are here are released. Returns whether that was the frame's last byte.
    pub(super) fn release(&mut self, frame: u64, bytes: usize) -> bool {
        let at = &mut self.taken[(frame % CELLS) as usize];
        let Some(taken) = at else { return true };
        taken.done += bytes;
        taken.stage = match taken.stage {
            Stage::Here(To::Slot, here) if here > bytes => Stage::Here(To::Slot, here - bytes),
            _ => Stage::Idle,
        };
        let is_whole = taken.left() == 0;
        if is_whole {
            *at = None;
        }
        is_whole
    }

    /// The queue pairs are gone: no READ is under way any more.
    pub(super) fn end(&mut self) {
        while let Some(frame) = self.reading.last().copied() {
            self.has_read(frame, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::Signature;

    fn header(offset: u64, len: u32) -> Header {
        Header { comm: 7, op: 3, offset, len, message: 1, signature: Signature::default() }
    }

    fn offer(offset: u64, len: u32) -> Offer {
        Offer { header: header(offset, len), at: 0x7f00_0000_1000, key: 0x1234 }
    }

    proptest! {
        #[test]
        fn an_offer_survives_the_wire_and_what_no_sender_says_is_refused(len in 0u32..=SLOT as u32 + 1, at: u64, key: u32, last: u8) {
            let said = Offer { header: header(5, len), at, key };
            let mut bytes = said.encode();
            bytes[Offer::BYTES - 1] = last;
            let is_possible = len > INLINE as u32 && len <= SLOT as u32 && at.checked_add(len.into()).is_some() && last == 0;
            match Offer::decode(&bytes) {
                Ok(read) => prop_assert!(is_possible && read == said),
                Err(problem) => prop_assert!(!is_possible && !problem.is_empty()),
            }
        }
    }

    #[test]
    fn a_frame_follows_another_of_its_message_whose_elements_it_continues() {
        let taken = |offer| Taken { offer, lane: 0, done: 0, stage: Stage::Idle };
        let first = taken(offer(100, 4000));
        assert!(taken(offer(1100, 8)).follows(&first, 4) && taken(offer(4100, 8)).follows(&first, 1));
        assert!(!taken(offer(1100, 8)).follows(&first, 8) && !taken(offer(100, 8)).follows(&first, 4));
        let mut other = taken(offer(1100, 8));
        other.offer.header.message = 2;
        assert!(!other.follows(&first, 4));
    }

    #[test]
    fn payloads_come_in_parts_and_each_read_ends_by_itself() {
        let mut taking = Taking::new();
        taking.take(16, offer(0, 1000), 0);
        taking.take(17, offer(1000, 1000), 1);
        let stage = |taking: &Taking, frame| taking.get(frame).unwrap().stage;
        taking.reads(16, To::Place(64), 600);
        taking.reads(17, To::Slot, 1000);
        assert!(taking.writes() && taking.under_way(0) == 1 && taking.under_way(1) == 1);
        taking.has_read(16, true);
        assert_eq!((stage(&taking, 16), taking.writes()), (Stage::Here(To::Place(64), 600), false));
        // The rest of the payload is READ once there is room for it.
        assert!(!taking.release(16, 600));
        assert_eq!((stage(&taking, 16), taking.get(16).unwrap().left()), (Stage::Idle, 400));
        taking.has_read(17, true);
        assert!(!taking.release(17, 300));
        assert_eq!(stage(&taking, 17), Stage::Here(To::Slot, 700));
        taking.reads(16, To::Place(664), 400);
        // The queue pairs are gone.
        taking.end();
        assert_eq!((stage(&taking, 16), taking.under_way(0)), (Stage::Failed, 0));
        assert!(taking.release(17, 700) && taking.get(17).is_none());
    }
}
