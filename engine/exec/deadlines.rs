//! When an operation is overdue.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// If the clock was not looked at for longer than this, the process may have been stopped, or its machine suspended.
const STILL: Duration = Duration::from_millis(500);
/// How often the clock is looked at, at most.
const LOOK: Duration = Duration::from_millis(10);

/// How many of the last times in which the process stood still are remembered.
const REMEMBERED: usize = 8;

/// For how long a rank that stood still finds nothing overdue once it runs again: it first hears what it missed, and asks its
/// peers, before it blames them.
pub(super) fn grace(timeout: Duration) -> Duration {
    Duration::from_millis(200).min(timeout / 4)
}

/// The clock of the deadlines. It notices when this process itself stood still, as no peer is to be blamed for that time.
pub(crate) struct DeadlineClock {
    looked: Instant,
    /// When this process was last found to run again after it had stood still; at first, when this clock was made.
    awake: Instant,
    /// The last times in which the process stood still: from, to.
    still: VecDeque<(Instant, Instant)>,
}

impl DeadlineClock {
    pub(super) fn new(now: Instant) -> DeadlineClock {
        DeadlineClock { looked: now, awake: now, still: VecDeque::with_capacity(REMEMBERED) }
    }

    /// Whether it is time to look at deadlines again; if so, notes that the process is running.
    pub(super) fn is_time_to_look(&mut self, now: Instant) -> bool {
        let is_time = now - self.looked > LOOK;
        if is_time {
            self.look(now);
        }
        is_time
    }

    /// Notes that the process is running.
    pub(super) fn look(&mut self, now: Instant) {
        if now - self.looked > STILL {
            self.awake = now;
            if self.still.len() == REMEMBERED {
                self.still.pop_front();
            }
            self.still.push_back((self.looked, now));
        }
        self.looked = now;
    }

    /// Whether something that began at `since` has taken longer than `timeout`. The time in which this process stood still does not count: a job
    /// that was stopped as a whole goes on where it was.
    pub(super) fn is_overdue(&self, now: Instant, since: Instant, timeout: Duration) -> bool {
        if now - since <= timeout || now - self.awake <= grace(timeout) {
            return false;
        }
        let within = |(from, to): &(Instant, Instant)| to.saturating_duration_since(since.max(*from));
        now - since > timeout + self.still.iter().map(within).sum::<Duration>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A clock that was looked at every 20 ms from `start` on, for `ms` milliseconds.
    fn looked_at(start: Instant, ms: u32) -> DeadlineClock {
        let mut clock = DeadlineClock::new(start);
        (1..=ms / 20).for_each(|i| assert!(clock.is_time_to_look(start + 20 * i * MS)));
        clock
    }

    #[test]
    fn an_operation_is_overdue_after_its_time() {
        let start = Instant::now();
        let clock = looked_at(start, 2000);
        assert!(!clock.is_overdue(start + 1000 * MS, start, 1000 * MS));
        assert!(clock.is_overdue(start + 1001 * MS, start, 1000 * MS));
    }

    #[test]
    fn a_process_that_stood_still_listens_first_and_then_blames() {
        let start = Instant::now();
        let mut clock = looked_at(start, 1200);
        let back = start + 5000 * MS;
        assert!(clock.is_time_to_look(back));
        assert!(!clock.is_overdue(back + 200 * MS, start, 1000 * MS), "a fifth of a second is for its peers");
        assert!(clock.is_overdue(back + 201 * MS, start, 1000 * MS));
        assert!(
            clock.is_overdue(back + 26 * MS, start, 100 * MS),
            "but a quarter of what it may take, at most"
        );
    }

    #[test]
    fn the_time_in_which_a_process_stood_still_counts_for_no_operation() {
        let start = Instant::now();
        let mut clock = looked_at(start, 400);
        let back = start + 5000 * MS;
        assert!(clock.is_time_to_look(back));
        (1..=50).for_each(|i| assert!(clock.is_time_to_look(back + 20 * i * MS)));
        let later = back + 1000 * MS;
        assert!(!clock.is_overdue(later, start, 1400 * MS), "it ran for 400 ms before, and 1000 since");
        assert!(clock.is_overdue(later + MS, start, 1400 * MS));
        assert!(!clock.is_overdue(later, start + 1000 * MS, 1000 * MS), "called while it stood still");
        assert!(clock.is_overdue(later + MS, start + 1000 * MS, 1000 * MS));
    }

    #[test]
    fn the_clock_is_not_looked_at_all_the_time() {
        let start = Instant::now();
        let mut clock = DeadlineClock::new(start);
        assert!(!clock.is_time_to_look(start + 10 * MS));
        assert!(clock.is_time_to_look(start + 11 * MS));
        assert!(!clock.is_time_to_look(start + 20 * MS));
    }
}
