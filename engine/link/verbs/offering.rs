//! How the sender of a link offers payloads (`offers.rs`), and ends the receiver's right to read them.

use std::ops::Range;

use super::blocks::Part;
use super::credits::{OFFERED, Place};
use super::lane::SendLane;
use super::layout::{CELL, offset};
use super::offers::{OFFERED_FROM, Offer};
use super::queue_pair::{Bind, PIECE, Tells, Write};
use super::sending::{Sending, piece};
use super::windows::Window;
use crate::error::Error;
use crate::link::{Header, Posted, SLOT};
use crate::types::Rank;

impl Sending {
    /// The receiver has released these frames. Ends the peer's right to read the payloads of those that were offered.
    pub(super) fn end_offers_of(&mut self, frames: Range<u64>) {
        for at in 0..self.lanes.len() {
            let is_over = self.is_over();
            let SendLane { lane, offering, .. } = &mut self.lanes[at];
            let Some(offering) = offering.as_ref().filter(|offering| offering.has_bound()) else { continue };
            if is_over {
                return;
            }
            let keys = frames.clone().filter_map(|frame| Some((frame + 1, offering.key(frame)?)));
            if let Err(error) = lane.pair.post_invalidates(keys) {
                self.lose(at, error);
            }
        }
    }

    /// Ends the peer's right to read whatever is offered. The link is over.
    pub(super) fn end_offers(&mut self) {
        for offering in self.lanes.iter_mut().filter_map(|lane| lane.offering.as_mut()) {
            for frame in self.credits.gone()..self.credits.posted() {
                if offering.end(frame) {
                    self.credits.is_done_with(frame);
                }
            }
        }
    }

    /// Whether the peer may read the payload of this frame by itself.
    pub(super) fn is_offered(&self, frame: u64) -> bool {
        self.lanes.iter().any(|lane| lane.is_offered(frame))
    }

    /// As [`LinkTx::post_to_copy`](crate::link::LinkTx::post_to_copy): offers the payload, if it lies in a registered buffer and is large enough.
    ///
    /// # Safety
    /// As for [`LinkTx::post`](crate::link::LinkTx::post).
    pub(super) unsafe fn post_to_copy(
        &mut self,
        header: Header,
        payload: *const u8,
    ) -> Result<Posted, Error> {
        let len = header.len as usize;
        let is_large = (OFFERED_FROM..=SLOT).contains(&len);
        // The second lane's device may lack what the first lane's has: a registration of the buffer, or a window.
        let mut at = self.lane_of_large();
        let mut window = if is_large { self.lanes[at].window_for(self.peer, payload, len) } else { None };
        if is_large && window.is_none() && at > 0 {
            at = 0;
            window = self.lanes.first.window_for(self.peer, payload, len);
        }
        let SendLane { lane, cells, to, offering, large, .. } = &mut self.lanes[at];
        let (Some((mut window, part)), Some(cells)) = (window, cells) else {
            // SAFETY: the caller's promise.
            return unsafe { self.post(header, payload) };
        };
        *large += 1;
        let (place, number) = self.credits.post(true);
        let cell = cells.at(place.cell as usize * CELL);
        let from = payload.expose_provenance() as u64;
        let (handle, key) = window.next_binding();
        let offer = Offer { header, at: from, key }.encode();
        // SAFETY: as in `post`, the cell is the link's own, free, and has room for an offer.
        unsafe { std::ptr::copy_nonoverlapping(offer.as_ptr(), cell, Offer::BYTES) };
        let frame = self.credits.posted() - 1;
        let bind = Bind { window: handle, key, registration: part.registration, at: from, bytes: len as u64 };
        let place = to.at + offset(Place { slot: None, ..place }) as u64;
        let from = [piece(cell, Offer::BYTES, cells.local_key())];
        // The completion of this request counts for no frame: the device is done with the frame when the key is not valid any more.
        let write =
            Write { id: PIECE, from: &from, to: place, key: to.key, tells: Tells::Both(number | OFFERED) };
        // SAFETY: the cell is registered and stays as it is until the frame is done with. The payload's buffer stays registered, and valid for reads,
        // until then by the caller's promise: a buffer ends its registration only when it is dropped, and its operation owns it. `window` is kept.
        let posted = unsafe { lane.pair.post_bound_write(Some(bind), write) };
        window.is_posted();
        if let Some(offering) = offering {
            offering.bind(frame, window);
        }
        if let Err(error) = posted {
            self.lose(at, error);
        }
        Ok(Posted::Held)
    }
}

impl SendLane {
    /// A window that is not bound, and where the payload is. `None`: this lane cannot offer the payload, as the receiver takes no offers, the payload
    /// is not in a buffer from `Comm::alloc` that the card has registered, or no window is free. Once the device has refused to make a window, only
    /// the windows that exist are used.
    fn window_for(&mut self, peer: Rank, payload: *const u8, len: usize) -> Option<(Window, Part)> {
        let (offering, card) = (self.offering.as_mut()?, &self.lane.card);
        let part = card.block(payload, len)?;
        let window = offering.take(|| Window::new(card.domain()))?.inspect_err(|error| {
            tracing::debug!(peer, %error, "payloads are written, as the network card makes no window");
        });
        Some((window.ok()?, part))
    }
}
