//! After an operation has failed, a link may still write to the memory that it receives into. That memory comes back only when the link
//! says that it will not write any more. In these tests, the test tells the links when to write (`engine/testing/late.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream::testing::hold_late_writes;
use allstream::{Algo, Comm, HostMemory};
use test_support::{on_threads, worlds};

use crate::harness::{self, PATIENCE};

const LEN: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_millis(300);
/// The value of each element that a link writes late.
const LATE: u32 = 0xeeee_eeee;
/// Stands for the count of a buffer that has not been dropped yet.
const NEVER: usize = usize::MAX;

/// A buffer that says, when it is dropped, how many of its elements were written late.
#[derive(Debug)]
struct Told {
    memory: Vec<u32>,
    late: Arc<AtomicUsize>,
}

fn told(len: usize) -> (Told, Arc<AtomicUsize>) {
    let late = Arc::new(AtomicUsize::new(NEVER));
    (Told { memory: vec![0; len], late: late.clone() }, late)
}

impl Drop for Told {
    fn drop(&mut self) {
        let late = self.memory.iter().filter(|x| **x == LATE).count();
        self.late.store(late, Ordering::SeqCst);
    }
}

// SAFETY: the memory is that of a `Vec`, which owns it alone and never changes its size here: it stays at its address, with `count` initialised
// elements, when `Told` moves, until `Told` is dropped.
unsafe impl HostMemory for Told {
    type Elem = u32;
    fn ptr(&self) -> *const u32 {
        self.memory.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut u32 {
        self.memory.as_mut_ptr()
    }
    fn count(&self) -> usize {
        self.memory.len()
    }
}

/// Late writes are held back until this is dropped.
struct Held;

impl Held {
    fn back() -> Held {
        hold_late_writes(true);
        Held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        hold_late_writes(false);
    }
}

/// Runs `part` on each of `n` ranks over links of the class `late`. Returns the results by rank.
fn of_ranks<R: Send + 'static>(n: usize, part: impl Fn(Comm) -> R + Send + Sync + 'static) -> Vec<R> {
    let said = on_threads(worlds(n, "late"), PATIENCE, move |_, comm| part(comm));
    said.into_iter().map(|said| said.unwrap()).collect()
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_a_link_may_still_write_to_comes_back_when_it_has_written() {
    let _alone = harness::alone();
    let held = Held::back();
    let ranks = of_ranks(2, |mut comm| {
        let (buf, late) = told(LEN);
        let first = comm.timeout(TIMEOUT).broadcast(buf, 0);
        let queued = comm.all_reduce(vec![1u32; LEN]);
        let back = first.wait().unwrap_err().buf.is_some();
        assert!(queued.wait().unwrap_err().buf.is_some(), "nothing was received into it");
        (back, comm.stats().quarantined, late, comm)
    });
    let [(sent, 0, ..), (received, 1, late, comm)] = &ranks[..] else {
        panic!("{:?}", (&ranks[0].1, &ranks[1].1))
    };
    assert!(sent, "the sender's was copied");
    assert!(!received && late.load(Ordering::SeqCst) == NEVER, "it is written to later");
    drop(held);
    until("the buffer is kept", || late.load(Ordering::SeqCst) != NEVER);
    assert_eq!(comm.stats().quarantined, 0);
    assert!((1..=LEN).contains(&late.load(Ordering::SeqCst)), "given up before it was written to");
}

#[test]
fn a_message_that_is_received_late_keeps_no_other_rank_s_buffers() {
    let _alone = harness::alone();
    let held = Held::back();
    let ranks = of_ranks(3, |mut comm| {
        let ((ours, _), (theirs, late)) = (told(LEN), told(LEN));
        if comm.rank() == 0 {
            let other = comm.timeout(TIMEOUT).recv(vec![0u32; LEN], 2);
            let (sent, received) =
                (comm.timeout(TIMEOUT).send(ours, 1), comm.timeout(TIMEOUT).recv(theirs, 1));
            let back = [sent.wait().unwrap_err().buf.is_some(), received.wait().unwrap_err().buf.is_some()];
            return (back, other.wait().unwrap_err().buf.is_some(), comm.stats().quarantined, late, comm);
        }
        let sent = (comm.rank() == 1).then(|| comm.timeout(TIMEOUT).send(ours, 0));
        let back = sent.is_none_or(|sent| sent.wait().unwrap_err().buf.is_some());
        until("the communicator lives", || comm.check().is_err());
        ([back, true], true, comm.stats().quarantined, late, comm)
    });
    let (back, other, quarantined, late, comm) = &ranks[0];
    assert_eq!(
        (back, other, quarantined),
        (&[true, false], &true, &1),
        "rank 1 alone sends what it receives"
    );
    assert!(ranks[1..].iter().all(|(back, _, quarantined, ..)| back[0] && *quarantined == 0));
    drop(held);
    until("the buffer is kept", || late.load(Ordering::SeqCst) != NEVER);
    assert_eq!(comm.stats().quarantined, 0);
    assert!((1..=LEN).contains(&late.load(Ordering::SeqCst)), "given up before it was written to");
}

/// In a binomial gather, a rank that passes blocks on receives them into scratch memory of its run. If the engine freed that memory together
/// with the communicator, the late write would crash: the allocator unmaps a block this large as soon as it is freed.
#[test]
fn memory_of_a_run_is_kept_as_its_buffers_are() {
    const BLOCK: usize = 9 << 20;
    let _alone = harness::alone();
    let held = Held::back();
    let late: Vec<_> = of_ranks(4, |mut comm| {
        let (buf, late) = told(BLOCK);
        let gather = comm.algo(Algo::Binomial).timeout(TIMEOUT).gather(buf, 0);
        let back = gather.wait().unwrap_err().buf.is_some();
        drop(comm);
        (back, late)
    });
    // Rank 2 receives the block of a child, so its own buffer is kept until the late write has been made.
    assert!(!late[2].0 && late[1].0 && late[3].0);
    drop(held);
    until("the buffer is kept", || late[2].1.load(Ordering::SeqCst) != NEVER);
}
