//! Faults planted on purpose, for this repository's own tests.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::plan::mutate::{self, Mutation};
use crate::plan::{Kind, Plan, Rank};

/// Which of the two plans of a program is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The steps. The program then has no plan of loans.
    Steps,
    /// The plan of loans.
    Loans,
}

/// A plan that is broken: which, whose, and how.
#[derive(Clone, Copy, Debug)]
pub struct Planted {
    /// Of which collective.
    pub kind: Kind,
    /// On which rank.
    pub rank: Rank,
    /// Which of its plans.
    pub plan: Broken,
    /// At which step.
    pub step: usize,
    /// How.
    pub mutation: Mutation,
}

static PLANTED: Mutex<Option<Planted>> = Mutex::new(None);

thread_local! {
    /// What is planted in the story (a simulated run, `testing/story/`) that runs on this thread.
    static IN_STORY: Cell<Option<Planted>> = const { Cell::new(None) };
}

/// Runs `tell`, a story, in which the plans that `planted` describes are broken. Stories on other threads are not affected.
#[cfg(test)]
pub(crate) fn planted_in_story<R>(planted: Planted, tell: impl FnOnce() -> R) -> R {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            IN_STORY.set(None);
        }
    }
    IN_STORY.set(Some(planted));
    let _ends = Ends;
    tell()
}

/// From now on, the plans that `planted` describes are broken (`None`: no plan is).
pub fn plant(planted: Option<Planted>) {
    *PLANTED.lock() = planted;
}

/// The plans of a rank, steps and loans, broken if that was planted.
pub(crate) fn mutated(
    kind: Kind,
    rank: Rank,
    (mut steps, mut loans): (Plan, Option<Plan>),
) -> (Plan, Option<Plan>) {
    if let Some(planted) = IN_STORY.get().or_else(|| *PLANTED.lock())
        && (planted.kind, planted.rank) == (kind, rank)
    {
        match planted.plan {
            Broken::Steps => {
                mutate::apply(&mut steps, planted.step, &planted.mutation);
                loans = None;
            }
            Broken::Loans => {
                loans.iter_mut().for_each(|plan| mutate::apply(plan, planted.step, &planted.mutation));
            }
        }
    }
    (steps, loans)
}

thread_local! {
    static QUEUE_LIMIT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Communicators that `make` makes on this thread take at most `limit` operations in flight.
pub fn with_queue_limit<R>(limit: usize, make: impl FnOnce() -> R) -> R {
    QUEUE_LIMIT.set(Some(limit));
    let made = make();
    QUEUE_LIMIT.set(None);
    made
}

pub(crate) fn queue_limit() -> Option<usize> {
    QUEUE_LIMIT.get()
}

static FOLDED_SMALL: AtomicBool = AtomicBool::new(false);

/// From now on, every other all_reduce in memory that all ranks can touch is folded at once, by its plan of loans, however small it is; the others
/// are only from the usual size on.
pub fn fold_small(on: bool) {
    FOLDED_SMALL.store(on, Ordering::Relaxed);
}

pub(crate) fn folded_from(number: u64) -> Option<usize> {
    (FOLDED_SMALL.load(Ordering::Relaxed) && !number.is_multiple_of(2)).then_some(0)
}

static LENT_BY_TURNS: AtomicBool = AtomicBool::new(false);

/// From now on, rank r lends its memory for operation number k only if bit r of k / 3 is set. If one rank does not lend, none folds the operation
/// at once.
pub fn lend_by_turns(on: bool) {
    LENT_BY_TURNS.store(on, Ordering::Relaxed);
}

pub(crate) fn keeps_to_itself(rank: Rank, number: u64) -> bool {
    LENT_BY_TURNS.load(Ordering::Relaxed) && (number / 3) >> rank & 1 == 0
}

static FRAMES: AtomicUsize = AtomicUsize::new(0);

/// From now on, one frame between devices lends at most so many bytes (not 4 GiB), and a slice has half as many (not 1 GiB).
pub fn frames_of(bytes: usize) {
    FRAMES.store(bytes, Ordering::Relaxed);
}

pub(crate) fn longest_frame() -> Option<usize> {
    Some(FRAMES.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
}

static FOLDED_FAR: AtomicUsize = AtomicUsize::new(usize::MAX);

/// From now on, the devices of ranks in several processes fold all_reduces of `bytes` bytes or more at once, and no smaller ones.
/// To be called with the same number in each of these processes.
pub fn fold_between_processes_from(bytes: usize) {
    FOLDED_FAR.store(bytes, Ordering::Relaxed);
}

pub(crate) fn folded_between_processes_from() -> Option<usize> {
    Some(FOLDED_FAR.load(Ordering::Relaxed)).filter(|bytes| *bytes < usize::MAX)
}

static CALLED: AtomicU64 = AtomicU64::new(0);

/// Communicators that are made from now on number their collectives from `calls` on, as if so many, all of them on host memory, had been called
/// before.
pub fn called_before(calls: u64) {
    CALLED.store(calls, Ordering::Relaxed);
}

pub(crate) fn calls_before() -> u64 {
    CALLED.load(Ordering::Relaxed)
}

static STREAMED: AtomicBool = AtomicBool::new(false);

/// From now on, of every four operations two write their results past the caches, however small these are, and the other two do not.
pub fn stream_small(on: bool) {
    STREAMED.store(on, Ordering::Relaxed);
}

pub(crate) fn streams(number: u64) -> Option<bool> {
    STREAMED.load(Ordering::Relaxed).then_some(number / 2 % 2 == 1)
}

static ANY_ORDER: AtomicBool = AtomicBool::new(false);

/// From now on, each operation that a library takes whole is launched as soon as all ranks have called it, and not in an order that is the same
/// on all ranks.
pub fn launch_in_any_order(on: bool) {
    ANY_ORDER.store(on, Ordering::Relaxed);
}

pub(crate) fn launches_are_in_any_order() -> bool {
    ANY_ORDER.load(Ordering::Relaxed)
}
