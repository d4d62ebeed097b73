//! Models of how the progress thread goes to sleep: `Doorbell::ring` (engine/link/local.rs), `ProgressThread::{nudge, kick, sleep, delist}`
//! (engine/exec/progress_thread.rs), `Endpoint::arm` (engine/exec/endpoint/progress.rs). The descriptors that wake the progress thread are modelled
//! by one flag, which the models of sleep read at their end: a progress thread that fell asleep while there was work, and to which nobody has
//! written, would sleep on. (The real thread also wakes at deadlines.)
#![allow(missing_docs)]

use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use loom::thread;

const AWAKE: u32 = 0;
const ASLEEP: u32 = 2;

/// What the progress thread shares with those who wake it. Leaked, because a failing model unwinds, and loom's `Arc` cannot be dropped then.
struct World {
    /// There is a frame in a ring, or an operation in an endpoint.
    published: AtomicBool,
    /// The endpoint is on the progress thread's list.
    listed: AtomicBool,
    /// `Region::doorbell_flag`.
    flag: AtomicU32,
    /// `ProgressThread::state`.
    state: AtomicU32,
    /// Somebody has written to a descriptor that wakes the progress thread.
    written: AtomicBool,
}

fn world() -> &'static World {
    Box::leak(Box::new(World {
        published: AtomicBool::new(false),
        listed: AtomicBool::new(false),
        flag: AtomicU32::new(0),
        state: AtomicU32::new(AWAKE),
        written: AtomicBool::new(false),
    }))
}

impl World {
    /// Publishes a frame, then does what `Doorbell::ring` does.
    fn ring(&self, fenced: bool) {
        self.published.store(true, Ordering::Release);
        if fenced {
            fence(Ordering::SeqCst);
        }
        if self.flag.load(Ordering::Relaxed) != 0 && self.flag.swap(0, Ordering::AcqRel) != 0 {
            self.written.store(true, Ordering::Release);
        }
    }

    /// What `ProgressThread::enlist` does, then `ProgressThread::nudge`.
    fn enlist(&self) {
        self.listed.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) == ASLEEP {
            fence(Ordering::SeqCst);
            if self.state.swap(AWAKE, Ordering::AcqRel) != AWAKE {
                self.written.store(true, Ordering::Release);
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The ringer has no fence between publishing and reading the flag.
    Ringer,
    /// The sleeper has no fence between setting its flag and looking again for work.
    Fence,
    /// The sleeper does not look again for work after it has set its flag.
    Look,
}

/// A peer publishes a frame and rings, while the progress thread sets its region's flag and looks again for work.
fn doorbell(fault: Fault) {
    loom::model(move || {
        let w = world();
        let ringer = thread::spawn(move || w.ring(fault != Fault::Ringer));
        w.flag.store(1, Ordering::Release);
        if fault != Fault::Fence {
            fence(Ordering::SeqCst);
        }
        let asleep = fault == Fault::Look || !w.published.load(Ordering::Acquire);
        ringer.join().unwrap();
        let woken = w.written.load(Ordering::Acquire);
        assert!(!asleep || woken, "the doorbell was lost");
    });
}

#[test]
fn a_bell_is_never_lost() {
    doorbell(Fault::None);
}

#[test]
#[should_panic(expected = "the doorbell was lost")]
fn control_ringing_without_a_fence_is_caught() {
    doorbell(Fault::Ringer);
}

#[test]
#[should_panic(expected = "the doorbell was lost")]
fn control_sleeping_without_a_fence_is_caught() {
    doorbell(Fault::Fence);
}

#[test]
#[should_panic(expected = "the doorbell was lost")]
fn control_sleeping_without_a_second_look_is_caught() {
    doorbell(Fault::Look);
}

/// The progress thread falls asleep, wakes and falls asleep again while a peer rings: no ring is lost, whichever flag it meets.
#[test]
fn a_flag_taken_down_and_put_up_again_still_wakes() {
    loom::model(|| {
        let w = world();
        let ringer = thread::spawn(move || w.ring(true));
        w.flag.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        let mut found = w.published.load(Ordering::Acquire);
        // Something else wakes the thread: it clears the flag, makes a pass and falls asleep again.
        w.flag.store(0, Ordering::Relaxed);
        found |= w.published.load(Ordering::Acquire);
        w.flag.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        found |= w.published.load(Ordering::Acquire);
        ringer.join().unwrap();
        let woken = w.written.load(Ordering::Acquire);
        assert!(found || woken, "the doorbell was lost");
    });
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fresh {
    /// If the second look finds an endpoint that is new on the list, the progress thread stays awake: the region's flag is not set yet.
    KeepsAwake,
    /// The progress thread falls asleep although the endpoint is new.
    IsSleptOver,
}

/// A submission enlists an endpoint, and a peer rings, while the progress thread falls asleep.
fn enlisting(fresh: Fresh) {
    loom::model(move || {
        let w = world();
        let submitter = thread::spawn(move || w.enlist());
        let peer = thread::spawn(move || w.ring(true));
        let seen = w.listed.load(Ordering::Acquire);
        // `ProgressThread::sleep`
        w.state.store(ASLEEP, Ordering::Release);
        if seen {
            w.flag.store(1, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        let now = w.listed.load(Ordering::Acquire);
        let moved = now && w.published.load(Ordering::Acquire);
        let new = now && !seen && fresh == Fresh::KeepsAwake;
        let asleep = w.state.load(Ordering::Relaxed) != AWAKE && !moved && !new;
        submitter.join().unwrap();
        peer.join().unwrap();
        let woken = w.written.load(Ordering::Acquire);
        assert!(!asleep || woken, "the progress thread slept over an endpoint");
    });
}

#[test]
fn an_endpoint_enlisted_while_the_lane_falls_asleep_is_not_slept_over() {
    enlisting(Fresh::KeepsAwake);
}

#[test]
#[should_panic(expected = "the progress thread slept over an endpoint")]
fn control_sleeping_over_a_fresh_endpoint_is_caught() {
    enlisting(Fresh::IsSleptOver);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unfenced {
    Nobody,
    Submitter,
    ProgressThread,
}

/// The progress thread found nothing to do for an endpoint and takes it off its list, while an operation is submitted to that endpoint.
/// Either the submitter or the progress thread puts the endpoint back on the list.
fn taking_off(unfenced: Unfenced) {
    loom::model(move || {
        let w = world();
        let enlisted: &AtomicBool = Box::leak(Box::new(AtomicBool::new(true)));
        w.listed.store(true, Ordering::Relaxed);
        // `Endpoint::submit_collective`: the operation is queued, then `arm` runs.
        let submitter = thread::spawn(move || {
            w.published.store(true, Ordering::Relaxed);
            if unfenced != Unfenced::Submitter {
                fence(Ordering::SeqCst);
            }
            if !enlisted.load(Ordering::Relaxed) && !enlisted.swap(true, Ordering::AcqRel) {
                w.listed.store(true, Ordering::Release);
            }
        });
        // `ProgressThread::delist`
        w.listed.store(false, Ordering::Relaxed);
        enlisted.store(false, Ordering::Release);
        if unfenced != Unfenced::ProgressThread {
            fence(Ordering::SeqCst);
        }
        if w.published.load(Ordering::Relaxed) && !enlisted.swap(true, Ordering::AcqRel) {
            w.listed.store(true, Ordering::Release);
        }
        submitter.join().unwrap();
        assert!(w.listed.load(Ordering::Acquire), "an operation is left to nobody");
    });
}

#[test]
fn an_operation_submitted_while_its_endpoint_is_taken_off_the_list_is_seen() {
    taking_off(Unfenced::Nobody);
}

#[test]
#[should_panic(expected = "an operation is left to nobody")]
fn control_submitting_without_a_fence_is_caught() {
    taking_off(Unfenced::Submitter);
}

#[test]
#[should_panic(expected = "an operation is left to nobody")]
fn control_taking_off_without_a_fence_is_caught() {
    taking_off(Unfenced::ProgressThread);
}
