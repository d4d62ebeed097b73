//! How many frames may be under way on a link, counted at both ends. Plain numbers: nothing here touches memory or a device.
//!
//! A receiver has [`CELLS`] cells for headers and small payloads, and fewer slots for large payloads. Frame *n* takes cell *n* modulo [`CELLS`],
//! and the *m*-th large frame takes slot *m* modulo the number of slots, so both ends know where a frame lies without being told. The sender posts
//! a frame only when the receiver has said that it released the frame that was in the same place before. So nothing unread is ever overwritten,
//! and no message finds the receiver without a receive request: it has one posted for each cell and each piece (`pieces.rs`).

use std::ops::Range;

/// The most frames that are posted and that the receiver has not released.
pub(super) const CELLS: u64 = 16;
/// The most slots for large payloads. Eight slots of 128 KB hold what a path of 100 Gbit/s carries in about 80 microseconds.
pub(super) const MOST_SLOTS: u32 = 8;

/// Set in the number that comes with a frame whose payload lies in a slot, or has come in pieces.
const LARGE: u32 = 1 << 31;
/// Set in the number that comes with a message which is a piece of a large frame, and not the last piece.
pub(super) const PART: u32 = 1 << 30;
/// Both bits are set in the number that comes with an offer: a large frame whose payload is still in the sender's memory (`offers.rs`).
pub(super) const OFFERED: u32 = LARGE | PART;
/// The bits that are left for the frame's own number.
const NUMBER: u32 = PART - 1;
/// Set in a note to the sender that counts copied pieces, and not released frames.
const COPIED: u32 = 1 << 31;
/// The bits of a note that are left for the count.
pub(super) const COUNT: u32 = COPIED - 1;

/// What the number that comes with a message tells the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// A frame, or the last piece of one.
    Frame { number: u32, large: bool },
    /// The offer of a large frame.
    Offer { number: u32 },
    /// A piece of a large frame, and not the last piece.
    Part,
}

/// A frame that has come, as the completion of its last message tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) number: u32,
    pub(super) large: bool,
    /// Only the frame's offer has come: its payload is still in the sender's memory.
    pub(super) offered: bool,
    /// Bytes of the frame's last message.
    pub(super) bytes: u32,
    /// The lane by which it came (`lane.rs`).
    pub(super) lane: usize,
}

impl Came {
    pub(super) fn of(number: u32) -> Came {
        match number & OFFERED {
            0 | LARGE => Came::Frame { number: number & NUMBER, large: number & LARGE != 0 },
            OFFERED => Came::Offer { number: number & NUMBER },
            _ => Came::Part,
        }
    }
}

/// What the receiver tells the sender: how many frames it has released, or how many pieces it has copied, since the link was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    Released(u32),
    Copied(u32),
}

impl Note {
    pub(super) fn encode(self) -> u32 {
        match self {
            Note::Released(count) => count & COUNT,
            Note::Copied(count) => count & COUNT | COPIED,
        }
    }

    pub(super) fn decode(number: u32) -> Note {
        match number & COPIED {
            0 => Note::Released(number & COUNT),
            _ => Note::Copied(number & COUNT),
        }
    }
}

/// Which of the last 64 frames are marked.
#[derive(Clone, Copy, Debug, Default)]
struct Marks(u64);

impl Marks {
    fn set(&mut self, frame: u64, marked: bool) {
        let bit = 1 << (frame % 64);
        if marked { self.0 |= bit } else { self.0 &= !bit }
    }

    fn is(self, frame: u64) -> bool {
        self.0 & 1 << (frame % 64) != 0
    }

    fn count(self, frames: Range<u64>) -> u64 {
        frames.filter(|frame| self.is(*frame)).count() as u64
    }
}

/// How many frames, and how many of them are large.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    all: u64,
    large: u64,
}

/// Where a frame lies in the receiver's area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) cell: u64,
    /// Only a large frame has one.
    pub(super) slot: Option<u64>,
}

/// The sender's side.
#[derive(Debug)]
pub(super) struct Sender {
    /// How many slots the receiver granted; 1 on a narrow link.
    slots: u64,
    large: Marks,
    posted: Count,
    /// The oldest frames, as far as the device is done with all of them: their sources are free.
    gone: Count,
    /// Later frames with which the device is done already. It is done with an offered frame only once the key to the payload is not valid any more
    /// (`offers.rs`).
    done: Marks,
    /// The frames that the receiver has said it released.
    released: Count,
}

impl Sender {
    pub(super) fn new(slots: u32) -> Sender {
        let none = Count::default();
        Sender {
            slots: slots.into(),
            large: Marks::default(),
            posted: none,
            gone: none,
            done: Marks::default(),
            released: none,
        }
    }

    /// Whether a frame of any size may be posted.
    pub(super) fn has_room(&self) -> bool {
        let is_free =
            |back: Count| self.posted.all - back.all < CELLS && self.posted.large - back.large < self.slots;
        is_free(self.gone) && is_free(self.released)
    }

    /// Counts a frame as posted. Returns where it goes, and the number that goes with it. To be called only if there is room.
    pub(super) fn post(&mut self, large: bool) -> (Place, u32) {
        let Count { all, large: before } = self.posted;
        self.large.set(all, large);
        self.posted = Count { all: all + 1, large: before + u64::from(large) };
        let number = all as u32 & NUMBER | if large { LARGE } else { 0 };
        (Place { cell: all % CELLS, slot: large.then(|| before % self.slots) }, number)
    }

    /// The device is done with the oldest frame that it was not done with.
    pub(super) fn is_done_with_next(&mut self) {
        self.is_done_with(self.gone.all);
    }

    /// The device is done with this frame; the first one that was posted has number 0.
    pub(super) fn is_done_with(&mut self, frame: u64) {
        if (self.gone.all..self.posted.all).contains(&frame) {
            self.done.set(frame, true);
        }
        while self.gone.all < self.posted.all && self.done.is(self.gone.all) {
            self.done.set(self.gone.all, false);
            self.gone.large += u64::from(self.large.is(self.gone.all));
            self.gone.all += 1;
        }
    }

    /// The receiver says that it has released `count` frames in all (its note has only the bits of [`COUNT`]). Returns those frames that it had
    /// not said to have released before.
    pub(super) fn told(&mut self, count: u32) -> Result<Range<u64>, String> {
        let more = u64::from(count.wrapping_sub(self.released.all as u32) & COUNT);
        let under_way = self.posted.all - self.released.all;
        if more == 0 || more > under_way {
            return Err(format!(
                "it says to have released {more} more frames, and {under_way} are under way to it"
            ));
        }
        let before = self.released.all;
        let all = before + more;
        self.released = Count { all, large: self.released.large + self.large.count(before..all) };
        Ok(before..all)
    }

    /// Whether a posted frame is large. To be asked only before the frame is counted as [done with](Self::is_done_with).
    pub(super) fn is_large(&self, frame: u64) -> bool {
        self.large.is(frame)
    }

    pub(super) fn posted(&self) -> u64 {
        self.posted.all
    }

    pub(super) fn gone(&self) -> u64 {
        self.gone.all
    }
}

/// The receiver's side.
///
/// A frame counts as come only once all earlier frames have: where a link has two lanes, a frame can overtake one that goes by the other lane.
#[derive(Debug)]
pub(super) struct Receiver {
    slots: u64,
    lanes: usize,
    large: Marks,
    /// For each frame that has come and was not released: bytes of the message that brought its number.
    bytes: [u32; CELLS as usize],
    come: Count,
    /// Frames that have overtaken others, each at its number modulo [`CELLS`].
    early: [Option<Arrival>; CELLS as usize],
    released: Count,
    told: Count,
    /// Which frames came as offers, and which came by the second lane.
    offered: Marks,
    second: Marks,
    /// An offered frame was released since the sender was last told.
    is_awaited: bool,
}

impl Receiver {
    pub(super) fn new(slots: u32, lanes: usize) -> Receiver {
        let none = Count::default();
        Receiver {
            slots: slots.into(),
            lanes,
            large: Marks::default(),
            bytes: [0; CELLS as usize],
            come: none,
            early: [None; CELLS as usize],
            released: none,
            told: none,
            offered: Marks::default(),
            second: Marks::default(),
            is_awaited: false,
        }
    }

    /// A frame has come.
    pub(super) fn came(&mut self, arrival: Arrival) -> Result<(), String> {
        let expected = self.come.all as u32 & NUMBER;
        let ahead = u64::from(arrival.number.wrapping_sub(expected) & NUMBER);
        if ahead > 0 {
            return self.came_early(arrival, ahead);
        }
        self.count(arrival)?;
        while let Some(next) = self.early[(self.come.all % CELLS) as usize].take() {
            self.count(next)?;
        }
        Ok(())
    }

    /// A frame has come early: its number is `ahead` numbers after that of the frame that is expected next.
    fn came_early(&mut self, arrival: Arrival, ahead: u64) -> Result<(), String> {
        let frame = self.come.all + ahead;
        let early = &mut self.early[(frame % CELLS) as usize];
        if self.lanes == 1 || frame - self.released.all >= CELLS || early.is_some() {
            let expected = self.come.all as u32 & NUMBER;
            return Err(format!("a frame came as number {}, expected {expected}", arrival.number));
        }
        *early = Some(arrival);
        Ok(())
    }

    /// Counts the next frame as come.
    fn count(&mut self, arrival: Arrival) -> Result<(), String> {
        let Count { all, large: before } = self.come;
        if all - self.released.all >= CELLS {
            return Err(format!(
                "a frame came while {CELLS} were not released, as many as there is room for"
            ));
        }
        if arrival.large && before - self.released.large >= self.slots {
            return Err(format!(
                "a large frame came while {} were not released, as many as there are slots",
                self.slots
            ));
        }
        self.large.set(all, arrival.large);
        self.offered.set(all, arrival.offered);
        self.second.set(all, arrival.lane > 0);
        self.bytes[(all % CELLS) as usize] = arrival.bytes;
        self.come = Count { all: all + 1, large: before + u64::from(arrival.large) };
        Ok(())
    }

    /// The frames that have come and were not released.
    pub(super) fn unreleased(&self) -> Range<u64> {
        self.released.all..self.come.all
    }

    pub(super) fn is_offered(&self, frame: u64) -> bool {
        self.offered.is(frame)
    }

    /// The lane by which a frame came that was not released.
    pub(super) fn lane(&self, frame: u64) -> usize {
        usize::from(self.second.is(frame))
    }

    /// Where the payload of a large frame that was not released belongs.
    pub(super) fn slot(&self, frame: u64) -> u64 {
        (self.released.large + self.large.count(self.released.all..frame)) % self.slots
    }

    /// The oldest frame that has come and was not released: where it lies, and the bytes of the message that brought its number.
    pub(super) fn head(&self) -> Option<(Place, u32)> {
        let Count { all, large } = self.released;
        let cell = all % CELLS;
        let place = Place { cell, slot: self.large.is(all).then(|| large % self.slots) };
        (all < self.come.all).then(|| (place, self.bytes[cell as usize]))
    }

    /// The oldest frame is released.
    pub(super) fn release(&mut self) {
        if self.released.all < self.come.all {
            self.released.large += u64::from(self.large.is(self.released.all));
            self.is_awaited |= self.offered.is(self.released.all);
            self.released.all += 1;
        }
    }

    /// Whether an offered frame was released since the sender was last told: the sender's operation may wait to be told.
    pub(super) fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Whether the sender is to be told now: half of its cells, or half of its slots, were released since it was last told. A sender that waits
    /// for room always hears of some: it has filled all cells or all slots, and half of them are released sooner or later.
    pub(super) fn owes(&self) -> bool {
        let half = (self.slots / 2).max(1);
        self.released.all - self.told.all >= CELLS / 2 || self.released.large - self.told.large >= half
    }

    /// Returns what the sender is told now: how many frames were released in all.
    pub(super) fn tell(&mut self) -> u32 {
        (self.told, self.is_awaited) = (self.released, false);
        self.released.all as u32
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use proptest::prelude::*;

    use super::*;

    /// A message with this number comes by this lane.
    fn came(rx: &mut Receiver, number: u32, bytes: u32, lane: usize) -> Result<(), String> {
        let arrival = |number, large, offered| Arrival { number, large, offered, bytes, lane };
        match Came::of(number) {
            Came::Frame { number, large } => rx.came(arrival(number, large, false)),
            Came::Offer { number } => rx.came(arrival(number, true, true)),
            Came::Part => Err("a piece".into()),
        }
    }

    /// Two ends, and what is on its way between them.
    struct Both {
        tx: Sender,
        rx: Receiver,
        /// The numbers of the frames on their way, for each lane.
        frames: [Vec<u32>; 2],
        notes: Vec<u32>,
        /// Places in the area that hold a frame which was not released.
        taken: Vec<Place>,
    }

    impl Both {
        fn new(slots: u32) -> Both {
            let (frames, notes, taken) = (Default::default(), Vec::new(), Vec::new());
            Both { tx: Sender::new(slots), rx: Receiver::new(slots, 2), frames, notes, taken }
        }

        fn step(&mut self, what: u8) {
            match what % 6 {
                0 | 1 | 5 if self.tx.has_room() => {
                    let (place, number) = self.tx.post(matches!(what % 6, 1 | 5));
                    let number = if what % 6 == 5 { number | OFFERED } else { number };
                    let meets = |other: &&Place| {
                        other.cell == place.cell || other.slot.is_some() && other.slot == place.slot
                    };
                    assert_eq!(self.taken.iter().find(meets), None, "{place:?} is written over");
                    self.taken.push(place);
                    self.frames[usize::from(what / 6 % 2)].push(number);
                }
                2 => {
                    let first = usize::from(what / 6 % 2);
                    let Some(lane) =
                        [first, 1 - first].into_iter().find(|lane| !self.frames[*lane].is_empty())
                    else {
                        return;
                    };
                    let number = self.frames[lane].remove(0);
                    if number & PART == 0 {
                        self.tx.is_done_with(u64::from(number & NUMBER));
                    }
                    came(&mut self.rx, number, 64, lane).unwrap();
                    let overtaken =
                        self.frames.iter().flatten().any(|other| other & NUMBER < number & NUMBER);
                    assert!(overtaken || self.rx.head().is_some());
                }
                3 => {
                    if let Some((place, bytes)) = self.rx.head() {
                        assert_eq!((place, bytes), (self.taken.remove(0), 64));
                        let frames = self.rx.unreleased();
                        let large = frames.clone().zip(iter::once(&place).chain(&self.taken));
                        for (frame, place) in large.filter(|(_, place)| place.slot.is_some()) {
                            assert_eq!(Some(self.rx.slot(frame)), place.slot);
                        }
                        let is_offered = self.rx.is_offered(frames.start);
                        self.rx.release();
                        assert!(!is_offered || self.rx.is_awaited(), "the sender waits to hear of it");
                    }
                    if self.rx.owes() || self.rx.is_awaited() {
                        self.notes.push(self.rx.tell());
                    }
                }
                // Once the sender has got this note, nobody reads what it offered in the released frames.
                4 if !self.notes.is_empty() => {
                    let released = self.tx.told(self.notes.remove(0)).unwrap();
                    released.for_each(|frame| self.tx.is_done_with(frame));
                }
                _ => {}
            }
            // Neither end ever sends more messages than the other has receive requests posted.
            assert!(
                self.frames.iter().flatten().count() <= CELLS as usize && self.notes.len() <= CELLS as usize
            );
        }
    }

    proptest! {
        #[test]
        fn nothing_is_written_over_and_both_ends_agree(slots in 1u32..=MOST_SLOTS, steps in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut both = Both::new(slots);
            steps.into_iter().for_each(|what| both.step(what));
            // Whatever the steps were: once all that is under way has been dealt with, there is room again.
            for _ in 0..200 {
                (2..5).for_each(|what| both.step(what));
            }
            prop_assert!(both.tx.has_room() && both.taken.is_empty());
            prop_assert_eq!(both.tx.gone(), both.tx.posted());
        }

        #[test]
        fn numbers_from_outside_are_believed_or_refused(number: u32, bytes: u32, count: u32) {
            let is_next = number & !LARGE == 0 || number == OFFERED;
            prop_assert_eq!(came(&mut Receiver::new(2, 1), number, bytes, 0).is_ok(), is_next);
            let is_near = number & OFFERED != PART && u64::from(number & NUMBER) < CELLS;
            prop_assert_eq!(came(&mut Receiver::new(2, 2), number, bytes, 1).is_ok(), is_near);
            let mut tx = Sender::new(2);
            tx.post(false);
            prop_assert_eq!(tx.told(count).is_ok(), count & COUNT == 1);
            prop_assert_eq!(Note::decode(count).encode(), count);
        }
    }

    #[test]
    fn a_sender_that_does_not_wait_for_room_is_refused() {
        let mut rx = Receiver::new(2, 1);
        (0..CELLS as u32).for_each(|number| came(&mut rx, number, 64, 0).unwrap());
        assert!(came(&mut rx, CELLS as u32, 64, 0).unwrap_err().contains("16 were not released"));
        let mut rx = Receiver::new(2, 1);
        (0..2).for_each(|number| came(&mut rx, number | LARGE, 64, 0).unwrap());
        assert!(came(&mut rx, 2 | LARGE, 64, 0).unwrap_err().contains("2 were not released"));
        came(&mut rx, 2, 64, 0).unwrap();
    }

    #[test]
    fn a_frame_that_overtakes_another_counts_once_that_has_come() {
        let mut rx = Receiver::new(2, 2);
        came(&mut rx, 1 | LARGE, 64, 1).unwrap();
        came(&mut rx, 2, 10, 0).unwrap();
        assert!(came(&mut rx, 1, 64, 0).is_err(), "it has come already");
        assert_eq!((rx.head(), rx.unreleased()), (None, 0..0));
        came(&mut rx, LARGE, 70, 0).unwrap();
        assert_eq!((rx.unreleased(), rx.lane(0), rx.lane(1), rx.lane(2)), (0..3, 0, 1, 0));
        let places = [(Some(0), 70), (Some(1), 64), (None, 10)];
        for (slot, bytes) in places {
            let (place, last) = rx.head().unwrap();
            assert_eq!((place.slot, last), (slot, bytes));
            rx.release();
        }
        // As many as there is room for may come early, and none beyond.
        let beyond = 3 + CELLS as u32;
        assert!(came(&mut rx, beyond, 64, 1).unwrap_err().contains("number 19, expected 3"));
        came(&mut rx, beyond - 1, 64, 1).unwrap();
    }
}
