//! How the sender of a link offers payloads (`offers.rs`), and ends the receiver's right to read them.

use std::ops::Range;

use super::credits::{OFFERED, Place};
use super::layout::{CELL, offset};
use super::offers::{OFFERED_FROM, Offer};
use super::queue_pair::{Bind, Write};
use super::tx::{PIECE, Sending, piece};
use super::windows::Window;
use crate::error::Error;
use crate::link::{Header, Posted, SLOT};

impl Sending {
    /// The receiver has released these frames. Ends the peer's right to read the payloads of those that were offered.
    pub(super) fn end_offers_of(&mut self, frames: Range<u64>) {
        let Some(offering) = self.offering.as_ref().filter(|offering| offering.has_bound()) else { return };
        if self.is_over() {
            return;
        }
        let keys = frames.filter_map(|frame| Some((frame + 1, offering.key(frame)?)));
        if let Err(error) = self.pair.post_invalidates(keys) {
            self.lose(error);
        }
    }

    /// Ends the peer's right to read whatever is offered. The link is over.
    pub(super) fn end_offers(&mut self) {
        let Some(offering) = &mut self.offering else { return };
        for frame in self.credits.gone()..self.credits.posted() {
            if offering.end(frame) {
                self.credits.is_done_with(frame);
            }
        }
    }

    /// Whether the peer may read the payload of this frame by itself.
    pub(super) fn is_offered(&self, frame: u64) -> bool {
        self.offering.as_ref().is_some_and(|offering| offering.key(frame).is_some())
    }

    /// As [`LinkTx::post_to_copy`]: offers the payload, if it lies in a registered buffer and is large enough.
    ///
    /// # Safety
    /// As for [`LinkTx::post`].
    pub(super) unsafe fn post_to_copy(
        &mut self,
        header: Header,
        payload: *const u8,
    ) -> Result<Posted, Error> {
        let len = header.len as usize;
        let is_large = (OFFERED_FROM..=SLOT).contains(&len);
        let part = self.offering.as_ref().filter(|_| is_large).and_then(|_| self.card.block(payload, len));
        let window = part.and_then(|part| Some((self.window()?, part)));
        let (Some((mut window, part)), Some(cells)) = (window, &self.cells) else {
            // SAFETY: the caller's promise.
            return unsafe { self.post(header, payload) };
        };
        let (place, number) = self.credits.post(true);
        let cell = cells.at(place.cell as usize * CELL);
        let at = payload.expose_provenance() as u64;
        let (handle, key) = window.next_binding();
        let offer = Offer { header, at, key }.encode();
        // SAFETY: as in `post`, the cell is the link's own, free, and has room for an offer.
        unsafe { std::ptr::copy_nonoverlapping(offer.as_ptr(), cell, Offer::BYTES) };
        let frame = self.credits.posted() - 1;
        let bind = Bind { window: handle, key, registration: part.registration, at, bytes: len as u64 };
        let to = self.to.at + offset(Place { slot: None, ..place }) as u64;
        let from = [piece(cell, Offer::BYTES, cells.local_key())];
        // The completion of this request counts for no frame: the device is done with the frame when the key is not valid any more.
        let write = Write { id: PIECE, from: &from, to, key: self.to.key, number: Some(number | OFFERED) };
        // SAFETY: the cell is registered and stays as it is until the frame is done with. The payload's buffer stays registered, and valid for reads,
        // until then by the caller's promise: a buffer ends its registration only when it is dropped, and its operation owns it. `window` is kept.
        let posted = unsafe { self.pair.post_bound_write(Some(bind), write) };
        window.is_posted();
        if let Some(offering) = &mut self.offering {
            offering.bind(frame, window);
        }
        if let Err(error) = posted {
            self.lose(error);
        }
        Ok(Posted::Held)
    }

    /// A window that is not bound. Once the device has refused to make one, only the windows that exist are used.
    fn window(&mut self) -> Option<Window> {
        let window = self.offering.as_mut()?.take(|| Window::new(self.card.domain()))?;
        window
            .inspect_err(|error| {
                tracing::debug!(peer = self.peer, %error, "payloads are written, as the network card makes no window");
            })
            .ok()
    }
}
