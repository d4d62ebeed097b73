//! The waits that order operations on devices, by name. Builds for tests can take one away (to see that tests fail without it). They can also stop a
//! rank at a [`Point`], and slow readers down.

/// The waits that keep an operation on devices in order. Each is needed: `tests/cuda/hazards.rs` takes them away one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[cfg_attr(not(any(test, feature = "testing")), allow(unreachable_pub))] // The feature `testing` exports it.
pub enum Wait {
    /// An operation's first work waits for what was on the buffers' streams at the call.
    After = 1,
    /// A reader's stream waits for what the sender put on its own stream before it posted. A fold waits for all ranks' inputs.
    Ready,
    /// A sender's stream, or the end of an operation that was folded, waits for the readers of the lent memory.
    Done,
    /// The user gets the buffers back only after the end of the operation on the stream.
    End,
    /// After a failure: the buffers' streams wait for what is still on any rank's stream.
    GiveUp,
    /// After a failure: our own stream waits for the same, as the operation's workspace goes back to the pool in the order of that stream.
    GiveUpOurs,
    /// An operation's workspace goes back to the pool only behind what is on the stream.
    Memory,
    /// A step that reads what another step of this rank writes waits until that other step is on the stream.
    Written,
    /// A step that writes what another step reads or lends waits until that other step is on the stream, or the loan is given back.
    Read,
    /// An operation ends only after peers have given back what it lent them.
    Freed,
    /// After a failure: we wait for a peer that is reading our memory, or putting work on its stream, right now.
    MemoryLock,
    /// A reader reads nothing more once the sender has marked that it takes its memory back.
    Revoked,
}

#[cfg(any(test, feature = "testing"))]
impl Wait {
    /// All of them.
    pub const ALL: [Wait; 12] = [
        Wait::After,
        Wait::Ready,
        Wait::Done,
        Wait::End,
        Wait::GiveUp,
        Wait::GiveUpOurs,
        Wait::Memory,
        Wait::Written,
        Wait::Read,
        Wait::Freed,
        Wait::MemoryLock,
        Wait::Revoked,
    ];
}

/// Where a test can stop a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[cfg_attr(not(any(test, feature = "testing")), allow(unreachable_pub))]
pub enum Point {
    /// Before the rank looks whether its communicator has failed.
    Drive = 1,
    /// After `Drive`, before the rank takes its memory lock.
    MemoryLock,
    /// After a reader has seen a frame, before it uses it.
    Read,
}

#[cfg(any(test, feature = "testing"))]
mod planted {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
    use std::time::Duration;

    use super::{Point, Wait};
    use crate::types::Rank;

    /// Where ranks are to stop: the rank in the low half, the point in the high half; 0: nowhere.
    static STOP: AtomicU64 = AtomicU64::new(0);
    static STOPPED: AtomicU64 = AtomicU64::new(0);

    fn number(point: Point, rank: Rank) -> u64 {
        (point as u64) << 32 | rank as u64
    }

    /// From now on, a thread that comes to this point for this rank, in any communicator of the process, stays there;
    /// `None`: all threads go on.
    pub fn stop_at(at: Option<(Point, Rank)>) {
        STOP.store(at.map_or(0, |(point, rank)| number(point, rank)), Ordering::SeqCst);
    }

    /// Whether a thread is stopped at the point that [`stop_at`] named.
    pub fn is_stopped() -> bool {
        STOPPED.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn stop(point: Point, rank: Rank) {
        let here = || STOP.load(Ordering::SeqCst) == number(point, rank);
        if here() {
            STOPPED.fetch_add(1, Ordering::SeqCst);
            while here() {
                std::thread::sleep(Duration::from_millis(1));
            }
            STOPPED.fetch_sub(1, Ordering::SeqCst);
        }
    }

    static TAKEN: AtomicU8 = AtomicU8::new(0);
    static LONGEST_US: AtomicU64 = AtomicU64::new(0);
    static DRAWN: AtomicU64 = AtomicU64::new(0);

    /// Takes a wait away, in the whole process; `None`: all are there.
    pub fn take_away(wait: Option<Wait>) {
        TAKEN.store(wait.map_or(0, |wait| wait as u8), Ordering::SeqCst);
    }

    /// From now on a reader dawdles for up to so long between looking at a frame and reading it.
    pub fn slow_readers(longest: Duration) {
        LONGEST_US.store(longest.as_micros() as u64, Ordering::SeqCst);
    }

    pub(crate) fn kept(wait: Wait) -> bool {
        TAKEN.load(Ordering::Relaxed) != wait as u8
    }

    pub(crate) fn dawdle() {
        let longest = LONGEST_US.load(Ordering::Relaxed);
        if longest > 0 {
            let drawn = DRAWN.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros((drawn >> 32) % longest));
        }
    }
}

#[cfg(any(test, feature = "testing"))]
pub use planted::{is_stopped, slow_readers, stop_at, take_away};

#[cfg(any(test, feature = "testing"))]
pub(crate) use planted::{dawdle, kept, stop};

#[cfg(not(any(test, feature = "testing")))]
pub(crate) fn kept(_: Wait) -> bool {
    true
}

#[cfg(not(any(test, feature = "testing")))]
pub(crate) fn dawdle() {}

#[cfg(not(any(test, feature = "testing")))]
#[inline(always)] // nothing is left of it in builds for users
pub(crate) fn stop(_: Point, _: crate::types::Rank) {}
