//! Ranks that are threads of this process, and share a device: none of them joins a stream with an operation before all have called it (`Work::join`).

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Looks before a thread that waits gives its core away each time.
const SPINS: u32 = 100;

#[derive(Debug, Default)]
struct Meeting {
    /// How often ranks have come, all together.
    came: AtomicUsize,
    /// A rank comes no more.
    is_left: AtomicBool,
}

/// A rank's place in the meeting. When it is dropped, nobody waits for the rank any more.
#[derive(Debug)]
pub(crate) struct Seat {
    meeting: Arc<Meeting>,
    ranks: usize,
    turn: Cell<usize>,
}

impl Seat {
    /// For so many ranks.
    pub(crate) fn all(ranks: usize) -> Vec<Seat> {
        let meeting = Arc::<Meeting>::default();
        (0..ranks).map(|_| Seat { meeting: meeting.clone(), ranks, turn: Cell::new(0) }).collect()
    }

    /// Waits until all ranks have come here as often as this one. If a rank has left, the operation says why.
    pub(crate) fn meet(&self) {
        self.turn.set(self.turn.get() + 1);
        let all = self.turn.get() * self.ranks;
        let mut came = self.meeting.came.fetch_add(1, Ordering::AcqRel) + 1;
        let mut spins = 0;
        while came < all && !self.meeting.is_left.load(Ordering::Acquire) {
            spins += 1;
            match spins < SPINS {
                true => std::hint::spin_loop(),
                false => std::thread::yield_now(),
            }
            came = self.meeting.came.load(Ordering::Acquire);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.meeting.is_left.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_goes_on_before_all_have_come() {
        const ROUNDS: usize = 200;
        let called: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            for (rank, seat) in Seat::all(3).into_iter().enumerate() {
                let called = &called;
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        called[rank].store(round, Ordering::Release);
                        seat.meet();
                        let all = called.iter().all(|calls| calls.load(Ordering::Acquire) >= round);
                        assert!(all, "rank {rank}, round {round}: {called:?}");
                    }
                });
            }
        });
    }

    #[test]
    fn nobody_waits_for_a_rank_that_has_left() {
        let mut seats = Seat::all(2);
        drop(seats.pop());
        seats[0].meet();
    }
}
