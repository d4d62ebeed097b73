//! Models of the ring of frames: the file `engine/link/ring.rs` itself, over memory in which loom detects every data race.
#![allow(missing_docs, dead_code)]

#[path = "../../../engine/link/ring.rs"]
mod ring;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;

use ring::{Consumer, Producer, RingMemory};

const CELLS: usize = 2;
const FRAMES: u64 = 4;

/// Which mistake the memory makes on purpose.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// A cell is published without release ordering.
    Publish,
    /// Released cells are given back without release ordering.
    Release,
}

/// The cells and the payloads that their frames lend. Nothing but the protocol keeps the two threads from touching them at the same time.
struct Memory {
    laps: [AtomicU32; CELLS],
    released: AtomicU64,
    frames: [UnsafeCell<u64>; CELLS],
    lent: [UnsafeCell<u64>; CELLS],
    fault: Fault,
}

/// Leaked memory, because a failing model unwinds, and loom's `Arc` cannot be dropped then.
#[derive(Clone, Copy)]
struct Shared(&'static Memory);

impl Shared {
    fn new(fault: Fault) -> Shared {
        Shared(Box::leak(Box::new(Memory {
            laps: std::array::from_fn(|_| AtomicU32::new(0)),
            released: AtomicU64::new(0),
            frames: std::array::from_fn(|_| UnsafeCell::new(0)),
            lent: std::array::from_fn(|_| UnsafeCell::new(0)),
            fault,
        })))
    }

    /// Writes the sender's memory that frame `i` will lend.
    fn fill(&self, i: u64) {
        // SAFETY: loom reports a race here as a failure; the value is a plain integer.
        self.0.lent[i as usize % CELLS].with_mut(|p| unsafe { *p = 100 + i });
    }

    fn look(&self, i: u64) -> u64 {
        // SAFETY: as in `fill`.
        self.0.lent[i as usize % CELLS].with(|p| unsafe { *p })
    }
}

impl RingMemory for Shared {
    type Frame = u64;
    const CELLS: u64 = CELLS as u64;

    fn lap_acquire(&self, cell: usize) -> u32 {
        self.0.laps[cell].load(Ordering::Acquire)
    }
    fn publish(&self, cell: usize, lap: u32) {
        let order = if self.0.fault == Fault::Publish { Ordering::Relaxed } else { Ordering::Release };
        self.0.laps[cell].store(lap, order);
    }
    fn released_acquire(&self) -> u64 {
        self.0.released.load(Ordering::Acquire)
    }
    fn release(&self, count: u64) {
        let order = if self.0.fault == Fault::Release { Ordering::Relaxed } else { Ordering::Release };
        self.0.released.store(count, order);
    }
    fn write(&self, cell: usize, frame: u64) {
        // SAFETY: as in `fill`.
        self.0.frames[cell].with_mut(|p| unsafe { *p = frame });
    }
    fn read(&self, cell: usize) -> u64 {
        // SAFETY: as in `fill`.
        self.0.frames[cell].with(|p| unsafe { *p })
    }
}

/// Sends four frames through a ring of two cells, so that every cell, and the memory lent with it, is used again.
fn hand_over(fault: Fault) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        let memory = Shared::new(fault);
        let mut consumer = Consumer::new(memory);
        let receiver = thread::spawn(move || {
            for i in 0..FRAMES {
                let frame = loop {
                    match consumer.peek() {
                        Some(frame) => break frame,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(frame, i, "frames arrive in order");
                assert_eq!(consumer.memory().look(i), 100 + i, "what is lent is whole");
                consumer.release();
            }
            assert!(consumer.peek().is_none());
        });
        let mut producer = Producer::new(memory);
        for i in 0..FRAMES {
            while !producer.room() {
                thread::yield_now();
            }
            assert!(i - producer.released() < CELLS as u64);
            memory.fill(i);
            producer.post(i);
        }
        receiver.join().unwrap();
        assert_eq!(producer.released(), FRAMES);
    });
}

#[test]
fn frames_and_lent_memory_are_handed_over_without_a_race() {
    hand_over(Fault::None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn control_a_cell_published_without_release_is_caught() {
    hand_over(Fault::Publish);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn control_a_cell_given_back_without_release_is_caught() {
    hand_over(Fault::Release);
}

/// A receiver that publishes an impossible count of released frames does not make the sender take lent memory back.
#[test]
fn an_impossible_count_of_released_frames_is_not_believed() {
    loom::model(|| {
        let memory = Shared::new(Fault::None);
        let mut producer = Producer::new(memory);
        producer.post(0);
        producer.post(1);
        let liar = thread::spawn(move || {
            for count in [3, u64::MAX - 1, 0] {
                memory.release(count);
            }
        });
        assert_eq!(producer.released(), 0);
        assert!(!producer.room());
        liar.join().unwrap();
        assert_eq!(producer.released(), 0);
    });
}

/// A receiver closes while frames are unread: all lent memory is the sender's again, and the sender may write to it.
fn closing(fault: Fault) {
    loom::model(move || {
        let memory = Shared::new(fault);
        let mut producer = Producer::new(memory);
        memory.fill(0);
        producer.post(0);
        memory.fill(1);
        producer.post(1);
        let mut consumer = Consumer::new(memory);
        let receiver = thread::spawn(move || {
            if consumer.peek().is_some() {
                assert_eq!(consumer.memory().look(0), 100);
            }
            consumer.close();
        });
        while producer.released() < 2 {
            thread::yield_now();
        }
        assert!(producer.room());
        memory.fill(2);
        memory.fill(3);
        producer.post(2);
        receiver.join().unwrap();
        assert_eq!(producer.released(), 3, "nothing stays lent to who has closed");
    });
}

#[test]
fn a_receiver_that_closes_gives_everything_back() {
    closing(Fault::None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn control_closing_without_release_is_caught() {
    closing(Fault::Release);
}
