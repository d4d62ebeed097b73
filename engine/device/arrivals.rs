//! [`Arrivals`]: which operations one launch folds for all ranks of a communicator, and what the ranks bring to the next such launch.
//!
//! Each rank arrives by a command, and shows its loans to its peers by later commands. The last rank to arrive gets what all have brought, and
//! puts the launch on rank 0's stream in the command by which it arrives. So the launch is on the stream before any rank has seen the loans of all
//! peers, and only then does a rank arrive at the next operation. The last rank, too, arrives there by a later command. So no two launches are put
//! on the stream at once.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::stream::DeviceEvent;
use crate::types::{Rank, Signature};

/// Streams write some words ([`Word`](super::signal::Word)) only for operations of some kinds. No word may fall behind by half of the range of its
/// 32-bit numbers, which are compared modulo 2^32: so at least one of any `2 * REFRESH` operations on devices has all words written. (Operations on
/// the host write no words, and do not count.)
pub(crate) const REFRESH: u64 = 1 << 28;

/// Called when the launch is on rank 0's stream. If others than the ranks may put work there, too, it gets the event behind the launch.
pub(crate) type IsPut = Box<dyn FnOnce(Option<&DeviceEvent>) + Send>;

/// What a rank brings to an operation that one launch folds for all ranks.
pub(crate) struct Arrival {
    pub(crate) rank: Rank,
    /// The operation's number among the communicator's operations on devices, as this rank counts them.
    pub(crate) number: u64,
    pub(crate) signature: Signature,
    /// Addresses on the device: where this rank's input is, and where its result goes.
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// The event behind the work by which the rank's own stream first scales the input, if there is such work.
    pub(crate) own_work: Option<DeviceEvent>,
    pub(crate) is_put: IsPut,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Arrivals {
    /// The ranks that have arrived at an operation at which others have not arrived yet.
    here: Mutex<Vec<Arrival>>,
    /// The number of the last operation that no launch folded for all ranks: each rank's own stream worked for that operation.
    apart: AtomicU64,
}

impl Arrivals {
    /// Called when an operation is submitted, in the order of the numbers. Returns whether one launch folds it for all ranks. `may_be`: whether one
    /// launch could. After [`REFRESH`] such operations in a row the answer is no even then, so that each rank's stream can write all words again.
    /// All ranks submit the same operations, so they decide alike.
    pub(crate) fn is_for_all(&self, number: u64, may_be: bool) -> bool {
        let is_for_all = may_be && number.wrapping_sub(self.apart.load(Ordering::Relaxed)) < REFRESH;
        if !is_for_all {
            self.apart.store(number, Ordering::Relaxed);
        }
        is_for_all
    }

    /// A rank arrives. If it is the last of `size` ranks, and all have called the same operation, returns what all have brought, by rank. If they
    /// have called different ones, returns `None`, and nothing is launched: the ranks find out when they compare the signatures of their loans.
    pub(crate) fn arrives(&self, arrival: Arrival, size: usize) -> Option<Vec<Arrival>> {
        let mut here = self.here.lock();
        here.push(arrival);
        if here.len() < size {
            return None;
        }
        let mut all = std::mem::take(&mut *here);
        drop(here);
        all.sort_unstable_by_key(|arrival| arrival.rank);
        let called = |arrival: &Arrival| (arrival.number, arrival.signature);
        let agree = all
            .iter()
            .enumerate()
            .all(|(rank, arrival)| arrival.rank == rank && called(arrival) == called(&all[0]));
        agree.then_some(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(rank: Rank, number: u64, count: u64) -> Arrival {
        let signature = Signature { count, ..Signature::default() };
        let (input, output) = (100 + rank as u64, 200 + rank as u64);
        Arrival { rank, number, signature, input, output, own_work: None, is_put: Box::new(|_| ()) }
    }

    #[test]
    fn the_last_rank_has_what_all_have_brought() {
        let arrivals = Arrivals::default();
        for number in 3..5 {
            assert!(arrivals.arrives(arrival(2, number, 7), 3).is_none());
            assert!(arrivals.arrives(arrival(0, number, 7), 3).is_none());
            let all = arrivals.arrives(arrival(1, number, 7), 3).unwrap();
            assert_eq!(all.iter().map(|arrival| arrival.input).collect::<Vec<_>>(), [100, 101, 102]);
        }
    }

    #[test]
    fn nobody_launches_what_ranks_disagree_on() {
        let arrivals = Arrivals::default();
        assert!(arrivals.arrives(arrival(0, 3, 7), 2).is_none());
        assert!(arrivals.arrives(arrival(1, 3, 8), 2).is_none(), "lengths");
        assert!(arrivals.arrives(arrival(0, 3, 7), 2).is_none());
        assert!(arrivals.arrives(arrival(1, 4, 7), 2).is_none(), "which operation it is");
        assert!(arrivals.arrives(arrival(0, 3, 7), 2).is_none());
        assert!(arrivals.arrives(arrival(0, 3, 7), 2).is_none(), "one rank twice");
    }

    #[test]
    fn now_and_then_each_ranks_stream_works() {
        let arrivals = Arrivals::default();
        assert!(arrivals.is_for_all(0, true) && arrivals.is_for_all(REFRESH - 1, true));
        assert!(!arrivals.is_for_all(REFRESH, true));
        assert!(arrivals.is_for_all(REFRESH + 1, true) && !arrivals.is_for_all(REFRESH + 2, false));
        assert!(arrivals.is_for_all(2 * REFRESH + 1, true) && !arrivals.is_for_all(2 * REFRESH + 2, true));
    }
}
