//! A clock that costs next to nothing to read: every operation reads it when it ends.
//!
//! On x86-64 it is the processor's time-stamp counter, which one instruction reads; reading the system's clock takes about forty instructions.
//! Ticks are converted to times only when somebody asks for a record, by means of two points at which both clocks were read. On other processors
//! this clock is the system's.

use std::time::{Duration, Instant};

/// How often both clocks are read to find one [`Both`].
const READINGS: u32 = 8;

/// A point in time, by this module's clock.
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

/// One point in time, by this module's clock and by the system's.
#[derive(Clone, Copy)]
pub(super) struct Both {
    tick: Tick,
    time: Instant,
}

impl Both {
    pub(super) fn now() -> Both {
        // Of several readings the one that took the fewest ticks is taken: in the others the thread may have been held up between the clocks.
        let read = |_| {
            let (before, time, after) = (Tick::now().0, Instant::now(), Tick::now().0);
            let took = after.saturating_sub(before);
            (took, Both { tick: Tick(before + took / 2), time })
        };
        let best =
            (1..READINGS).map(read).fold(read(0), |best, next| if next.0 < best.0 { next } else { best });
        best.1
    }

    /// The point, by the system's clock.
    pub(super) fn time(self) -> Instant {
        self.time
    }

    /// Gives a function that converts a tick, which must be no earlier than this point, to the system's time: by linear interpolation
    /// between this point and now. The result is never before `least`, and never after now unless `least` is. That is so even if the
    /// counter was set back meanwhile, as when a virtual machine was moved to another host.
    pub(super) fn times(self) -> impl Fn(Tick, Instant) -> Instant {
        let now = Both::now();
        let ticks = now.tick.0.saturating_sub(self.tick.0).max(1) as f64;
        let elapsed = now.time - self.time;
        let each = elapsed.as_secs_f64() / ticks;
        move |tick, least| {
            let since = Duration::try_from_secs_f64(tick.0.saturating_sub(self.tick.0) as f64 * each);
            (self.time + since.map_or(elapsed, |since| since.min(elapsed))).max(least)
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
        let set_back = Both { tick: Tick(1 << 60), time: start.time - Duration::from_secs(24 * 3600) };
        let found = set_back.times()(Tick((1 << 60) + (1 << 58)), set_back.time);
        assert!(found <= Instant::now(), "a counter that was set back gives no time to come");
        let (later, tick) = (Instant::now() + Duration::from_secs(1), start.tick);
        assert_eq!(time(tick, later), later, "it ended no earlier than it was submitted");
    }
}
