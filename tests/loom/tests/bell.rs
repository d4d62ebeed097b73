//! Models of how the progress thread goes to sleep: `Doorbell::ring` (engine/link/local.rs), `ProgressThread::{nudge, kick, sleep, delist}`
//! (engine/exec/progress thread.rs), `Endpoint::arm` (engine/exec/endpoint.rs). The eventfd is a flag that is looked at once all is over: a progress thread that went to sleep then,
//! with work there and nobody having written to its eventfd, would sleep on. (The real one has deadlines as well.)
#![allow(missing_docs)]

use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use loom::thread;

const AWAKE: u32 = 0;
const ASLEEP: u32 = 2;

/// What the progress thread and those who wake it share. Leaked: a failing model unwinds, and loom's `Arc` cannot be dropped then.
struct World {
    /// A frame in a ring.
    published: AtomicBool,
    /// An endpoint on the progress thread's list.
    listed: AtomicBool,
    /// `Region::doorbell_flag`.
    flag: AtomicU32,
    /// `ProgressThread::state`.
    state: AtomicU32,
    /// The eventfd has been written to.
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
    /// `Doorbell::ring`, after publishing.
    fn ring(&self, fenced: bool) {
        self.published.store(true, Ordering::Release);
        if fenced {
            fence(Ordering::SeqCst);
        }
        if self.flag.load(Ordering::Relaxed) != 0 && self.flag.swap(0, Ordering::AcqRel) != 0 {
            self.written.store(true, Ordering::Release);
        }
    }

    /// `ProgressThread::enlist`, `ProgressThread::nudge`.
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
    /// The ringer does not fence between what it published and its look at the flag.
    Ringer,
    /// The sleeper does not fence between its flag and its second look.
    Fence,
    /// The sleeper does not look again after it has set its flag.
    Look,
}

/// A peer publishes a frame and rings while the progress thread sets its region's flag and looks again.
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

/// Two go to sleep one after the other and one rings: the flag that the first left behind does not matter.
#[test]
fn a_flag_taken_down_and_put_up_again_still_wakes() {
    loom::model(|| {
        let w = world();
        let ringer = thread::spawn(move || w.ring(true));
        w.flag.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        let mut found = w.published.load(Ordering::Acquire);
        // Woken by something else: awake, a pass, asleep again.
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
    /// An endpoint that the second look finds new keeps the progress thread awake: its region's flag is not up.
    KeepsAwake,
    /// The progress thread sleeps all the same.
    IsSleptOver,
}

/// A submission enlists an endpoint, and its peer rings, while the progress thread falls asleep without end.
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

/// An operation is submitted to an endpoint that the progress thread, which found nothing to do there, takes off its list. One of the
/// two puts it back.
fn taking_off(unfenced: Unfenced) {
    loom::model(move || {
        let w = world();
        let enlisted: &AtomicBool = Box::leak(Box::new(AtomicBool::new(true)));
        w.listed.store(true, Ordering::Relaxed);
        // `Endpoint::submit`: `is_queued` is set, then `arm`.
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
