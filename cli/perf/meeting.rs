//! A meeting point for ranks that are threads of this process and share a device: none of them joins an operation (`Work::join`) before all
//! have called it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How often a waiting thread looks in a spin loop, before it yields its core after each look.
const SPINS: u32 = 100;

#[derive(Debug, Default)]
struct Meeting {
    /// How many calls of `meet` all ranks have made, in sum.
    came: AtomicUsize,
    /// A rank has dropped its seat, and comes no more.
    is_left: AtomicBool,
}

/// A rank's place in the meeting. Once a seat is dropped, no rank waits in `meet` any more.
#[derive(Debug)]
pub(crate) struct Seat {
    meeting: Arc<Meeting>,
    ranks: usize,
    turn: Cell<usize>,
}

impl Seat {
    /// The seats of this many ranks, one for each.
    pub(crate) fn all(ranks: usize) -> Vec<Seat> {
        let meeting = Arc::<Meeting>::default();
        (0..ranks).map(|_| Seat { meeting: meeting.clone(), ranks, turn: Cell::new(0) }).collect()
    }

    /// Waits until all ranks have called this as often as this rank. Returns at once if a rank has left: then the operation fails and says why.
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
