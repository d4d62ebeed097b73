//! A clock that costs next to nothing to read: every operation reads it when it ends.
//!
//! On x86-64 it is the processor's time-stamp counter, read by one instruction; the system's clock takes about forty. Ticks become times
//! only when a record is written, by the system's clock at two points. Elsewhere it is the system's clock.

use std::time::{Duration, Instant};

/// How often both clocks are read for one point.
const READINGS: u32 = 8;

/// A point in time, by the clock of the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tick(u64);

impl Tick {
    #[inline]
    pub(super) fn now() -> Tick {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 processor has the instruction, and it reads a counter only.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        #[cfg(not(target_arch = "x86_64"))]
        let ticks = {
            static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
            START.elapsed().as_nanos() as u64
        };
        Tick(ticks)
    }
}

/// One point by both clocks.
#[derive(Clone, Copy)]
pub(super) struct Both {
    tick: Tick,
    time: Instant,
}

impl Both {
    pub(super) fn now() -> Both {
        // Of several readings the one counts that took the fewest ticks: others may have been held up between the clocks.
        let read = |_| {
            let (before, time, after) = (Tick::now().0, Instant::now(), Tick::now().0);
            let took = after.saturating_sub(before);
            (took, Both { tick: Tick(before + took / 2), time })
        };
        let best =
            (1..READINGS).map(read).fold(read(0), |best, next| if next.0 < best.0 { next } else { best });
        best.1
    }

    /// When `tick` was by the system's clock, found from this point, which is no later, and from now: no earlier than `least`. Where the
    /// counter was set back meanwhile, as when a machine was moved, the answer is between the two all the same.
    pub(super) fn times(self) -> impl Fn(Tick, Instant) -> Instant {
        let now = Both::now();
        let ticks = now.tick.0.saturating_sub(self.tick.0).max(1) as f64;
        let each = (now.time - self.time).as_secs_f64() / ticks;
        move |tick, least| {
            let since = Duration::from_secs_f64(tick.0.saturating_sub(self.tick.0) as f64 * each);
            (self.time + since).min(now.time).max(least)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_the_times_of_the_system_clock() {
        let start = Both::now();
        let mut seen = Vec::new();
        let end = Instant::now() + Duration::from_millis(20);
        while Instant::now() < end {
            let before = Instant::now();
            seen.push((before, Tick::now(), Instant::now()));
        }
        let time = start.times();
        // The clocks are read one after the other.
        let slack = Duration::from_micros(100);
        for (before, tick, after) in seen {
            let found = time(tick, start.time);
            assert!(found + slack >= before && found <= after + slack, "{before:?} {found:?} {after:?}");
        }
        let (later, tick) = (Instant::now() + Duration::from_secs(1), start.tick);
        assert_eq!(time(tick, later), later, "it ended no earlier than it was submitted");
    }
}
