//! The waits and limits of operations on devices, by name: builds for tests can take one away, to see that it is missed.

/// What keeps an operation on devices in order. Each is needed: `tests/cuda/hazards.rs` takes them away one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[cfg_attr(not(any(test, feature = "testing")), allow(unreachable_pub))] // `testing` gives it out.
pub enum Wait {
    /// An operation's first work, for what the buffers' streams held at the call.
    After = 1,
    /// A reader's stream, for what the sender put on its own before it posted, or for the inputs of all that it folds.
    Ready,
    /// A sender's stream, or the end of an operation that was folded, for the readers of what was lent.
    Done,
    /// The buffers' way back, for the end of the operation on the stream.
    End,
    /// After a failure: the buffers' streams, for what is still on any rank's.
    GiveUp,
    /// After a failure: our own stream, for the same, as memory of the machine's goes back in its order.
    GiveUpOurs,
    /// Memory of the machine's on its way back to the pool, for what is on the stream.
    Memory,
    /// A step that reads what another of this rank's writes, for that one to be put on the stream.
    Written,
    /// A step that writes what another reads or lends, for that one to be put on the stream, or given back.
    Read,
    /// An operation's end, for peers to give back what it lent them.
    Freed,
    /// After a failure: for a peer that is putting something on its stream right now.
    MemoryLock,
    /// A reader, for a mark that the sender has taken its memory back: it reads no more.
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
    /// Before it looks whether the communicator lives.
    Drive = 1,
    /// After that, before it takes its memory lock.
    MemoryLock,
    /// Between a look at a frame and the use of it.
    Read,
}

#[cfg(any(test, feature = "testing"))]
mod planted {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
    use std::time::Duration;

    use super::{Point, Wait};
    use crate::types::Rank;

    /// The rank in the low half, the point above it.
    static STOP: AtomicU64 = AtomicU64::new(0);
    static STOPPED: AtomicU64 = AtomicU64::new(0);

    fn number(point: Point, rank: Rank) -> u64 {
        (point as u64) << 32 | rank as u64
    }

    /// From now on, whoever comes to this point for this rank, in any communicator of the process, stays there; `None`: all
    /// go on.
    pub fn stop_at(at: Option<(Point, Rank)>) {
        STOP.store(at.map_or(0, |(point, rank)| number(point, rank)), Ordering::SeqCst);
    }

    /// Whether anybody is there.
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
pub(crate) fn stop(_: Point, _: crate::types::Rank) {}
