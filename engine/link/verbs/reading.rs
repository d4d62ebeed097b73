//! How the receiver of a link READs the payloads of offered frames (`offers.rs`), and hands them out.

use allstream_sys::verbs::IbvSge;

use super::credits::{CELLS, MOST_SLOTS, Place};
use super::layout::offset;
use super::offers::{Offer, Stage, Taken, To};
use super::queue_pair::Read;
use super::receiving::{READ, Receiving};
use crate::error::Error;
use crate::link::{Frame, HEADER_BYTES};

/// READs that are to be posted together, by each lane.
#[derive(Default)]
struct ReadLists([ReadList; 2]);

#[derive(Default)]
struct ReadList {
    list: [Read; MOST_SLOTS as usize],
    count: usize,
}

impl Receiving {
    pub(super) fn oldest_is_offered(&self) -> bool {
        let frames = self.credits.unreleased();
        !frames.is_empty() && self.credits.is_offered(frames.start)
    }

    /// The oldest frame that was not released, if it is an offered one.
    pub(super) fn oldest_offer(&mut self) -> Result<Option<Taken>, Error> {
        let oldest = self.credits.unreleased().start;
        if self.oldest_is_offered() { self.offer(oldest).map(Some) } else { Ok(None) }
    }

    /// The offer of a frame that came as an offer. It is read from the area once: a faulty peer may write there later.
    fn offer(&mut self, frame: u64) -> Result<Taken, Error> {
        if let Some(taken) = self.taking.get(frame) {
            return Ok(taken);
        }
        let place = Place { cell: frame % CELLS, slot: None };
        let Some(area) = self.area.memory() else {
            return Err(Error::system("receive by RDMA", "the link has no area any more (a bug)"));
        };
        // SAFETY: an offer in a cell lies inside the area, and bytes need no alignment. The bytes that are checked are those that are used, as they are
        // read once.
        let bytes = unsafe { area.at(offset(place)).cast::<[u8; Offer::BYTES]>().read_volatile() };
        let offer = Offer::decode(&bytes).map_err(|problem| Error::protocol(self.peer, problem))?;
        Ok(self.taking.take(frame, offer, self.credits.lane(frame)))
    }

    /// An offered frame as the link's user sees it. The user can read only those of its bytes that were READ to its slot.
    pub(super) fn frame_of(&self, taken: &Taken) -> Frame {
        let (data, ready) = match (taken.stage, self.slot(self.credits.unreleased().start)) {
            (Stage::Here(To::Slot, bytes), Some(slot)) => (slot.wrapping_add(taken.done).cast_const(), bytes),
            _ => (std::ptr::null(), 0),
        };
        Frame { header: taken.offer.header, data, ready, done: taken.done }
    }

    /// Where the payload of a frame lies if it is in the frame's slot.
    fn slot(&self, frame: u64) -> Option<*mut u8> {
        let place = Place { cell: 0, slot: Some(self.credits.slot(frame)) };
        self.area.memory().map(|area| area.at(offset(place) + HEADER_BYTES))
    }

    /// Has the payloads of all offered frames READ to their slots, as many at once as may be.
    pub(super) fn read_to_slots(&mut self) -> Result<(), Error> {
        let mut reads = ReadLists::default();
        let mut added = Ok(());
        for frame in self.credits.unreleased() {
            if added.is_ok() && self.credits.is_offered(frame) {
                added = self.offer(frame).map(|taken| {
                    if taken.stage == Stage::Idle {
                        self.read_to_slot(frame, &taken, &mut reads);
                    }
                });
            }
        }
        // What was added is counted as under way, so it is posted even if a later offer is wrong. SAFETY: all READs are of `read_to_slot`. A slot is
        // registered for writes and as large as any payload. It is the frame's until the frame is released, which is after the completion, and the
        // area stays until the queue pair is destroyed. (A faulty peer may write to a slot, too, which changes only what is copied.)
        unsafe { self.post(reads) };
        added
    }

    /// Adds the READ of what is left of a frame to its slot. Returns whether there was room for it.
    fn read_to_slot(&mut self, frame: u64, taken: &Taken, reads: &mut ReadLists) -> bool {
        let (Some(slot), Some(area)) = (self.slot(frame), self.area.of_lane(taken.lane)) else {
            return false;
        };
        let at = slot.wrapping_add(taken.done).expose_provenance() as u64;
        let into = IbvSge { addr: at, length: taken.left() as u32, lkey: area.local_key() };
        self.read(frame, taken, (To::Slot, into), reads)
    }

    /// Adds the READ of a frame's next bytes to where `into` says. Returns whether there was room for it.
    fn read(&mut self, frame: u64, taken: &Taken, (to, into): (To, IbvSge), reads: &mut ReadLists) -> bool {
        let most = usize::from(self.lanes[taken.lane].reads);
        if self.is_broken || self.taking.under_way(taken.lane) >= most {
            return false;
        }
        let from = taken.offer.at + taken.done as u64;
        self.taking.reads(frame, to, into.length as usize);
        let of_lane = &mut reads.0[taken.lane];
        of_lane.list[of_lane.count] = Read { id: frame + READ, into, from, key: taken.offer.key };
        of_lane.count += 1;
        true
    }

    /// Posts READs, by one call for each lane.
    ///
    /// # Safety
    /// As for [`QueuePair::post_reads`](super::queue_pair::QueuePair::post_reads).
    unsafe fn post(&mut self, mut reads: ReadLists) {
        for (at, reads) in reads.0.iter_mut().enumerate().filter(|(_, reads)| reads.count > 0) {
            // SAFETY: the caller's promise.
            if let Err(error) = unsafe { self.lanes[at].lane.pair.post_reads(&mut reads.list[..reads.count]) }
            {
                self.lose(at, &error);
            }
        }
    }

    /// As [`LinkRx::receive_into`](crate::link::LinkRx::receive_into), if the oldest frame is an offered one. The payloads of the message's next frames
    /// are READ in the same call, behind the first one's.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn receive_into(
        &mut self,
        dst: *mut u8,
        max: usize,
        unit: usize,
    ) -> Result<usize, Error> {
        let Some(taken) = self.oldest_offer()? else { return Ok(0) };
        let oldest = self.credits.unreleased().start;
        let (place, whole) = (dst.expose_provenance() as u64, |bytes: usize| bytes - bytes % unit.max(1));
        let elsewhere = || {
            let problem = "the memory is not that in which an earlier call has ended (a bug)";
            Error::system("receive by RDMA", problem)
        };
        let got = match taken.stage {
            Stage::Here(To::Place(at), bytes) if at == place && bytes <= max => bytes,
            Stage::Reading(To::Place(at), bytes) if at == place && bytes <= max => 0,
            Stage::Here(To::Place(_), _) | Stage::Reading(To::Place(_), _) => return Err(elsewhere()),
            Stage::Here(To::Slot, bytes) => {
                let bytes = whole(bytes.min(max));
                if let Some(slot) = self.slot(oldest) {
                    let from = slot.wrapping_add(taken.done).cast_const();
                    // SAFETY: so many bytes were READ to the slot, and `dst` has room for them (the caller's promise). The two do not overlap: the
                    // slot is the link's own memory.
                    unsafe { std::ptr::copy_nonoverlapping(from, dst, bytes) };
                }
                bytes
            }
            Stage::Idle | Stage::Failed | Stage::Reading(To::Slot, _) => 0,
        };
        if got > 0 {
            self.release_offered(got);
        }
        // SAFETY: the caller's promise: the room behind the bytes that this call returns is the link's until later calls have returned that too.
        unsafe { self.read_ahead((dst.wrapping_add(got), max - got), unit)? };
        Ok(got)
    }

    /// Has the oldest frames READ to `dst`, which has room for `max` bytes, as far as they are offered, of one message, and fit.
    ///
    /// # Safety
    /// As for [`LinkRx::receive_into`](crate::link::LinkRx::receive_into).
    unsafe fn read_ahead(&mut self, (dst, max): (*mut u8, usize), unit: usize) -> Result<(), Error> {
        let mut reads = ReadLists::default();
        let added = self.add_ahead((dst, max), unit, &mut reads);
        // What was added is counted as under way, so it is posted even if a later offer is wrong. SAFETY: for slots as in `read_to_slots`. The other
        // memory lies in a registered buffer, which its operation owns; the link may write there (the caller's promise) until a call has returned
        // these bytes, or `revoke` has returned `true`, or what `writes_until` gave says that writing is over.
        unsafe { self.post(reads) };
        added
    }

    fn add_ahead(
        &mut self,
        (mut at, mut room): (*mut u8, usize),
        unit: usize,
        reads: &mut ReadLists,
    ) -> Result<(), Error> {
        let mut before = None;
        for frame in self.credits.unreleased() {
            if !self.credits.is_offered(frame) || room == 0 {
                break;
            }
            let taken = self.offer(frame)?;
            if before.is_some_and(|before| !taken.follows(&before, unit)) {
                break;
            }
            let bytes = taken.left().min(room) / unit.max(1) * unit.max(1);
            if taken.stage == Stage::Idle && bytes > 0 {
                let into = self.lanes[taken.lane].lane.card.block(at, bytes).map(|part| IbvSge {
                    addr: at.expose_provenance() as u64,
                    length: bytes as u32,
                    lkey: part.key,
                });
                // If this lane takes no more READs now, the loop goes on: the other lane may take those of the frames behind this one.
                match into {
                    Some(into) => self.read(frame, &taken, (To::Place(into.addr), into), reads),
                    None => self.read_to_slot(frame, &taken, reads),
                };
            }
            if bytes < taken.left() {
                break; // the next frame's payload belongs behind all of this one's
            }
            (at, room, before) = (at.wrapping_add(bytes), room - bytes, Some(taken));
        }
        Ok(())
    }

    /// So many bytes of the oldest frame, an offered one, are released.
    pub(super) fn release_offered(&mut self, bytes: usize) {
        if bytes > 0 && self.taking.release(self.credits.unreleased().start, bytes) {
            self.release();
        }
    }

    /// Stops what the device writes to operations' memory. Returns whether it writes no more.
    pub(super) fn revoke(&mut self) -> bool {
        if self.taking.writes() {
            self.is_lost |= !self.lanes.fail();
            let _ = self.look();
            // A device that has failed completes nothing more, and no device completes a request that it never got.
            let is_lost = self.is_lost || self.lanes.iter().any(|lane| lane.lane.pair.problem().is_some());
            if self.taking.writes() && is_lost && self.lanes.destroy() {
                self.taking.end();
            }
        }
        !self.taking.writes()
    }
}
