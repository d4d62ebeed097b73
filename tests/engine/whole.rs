//! Operations that a library takes whole. The library for tests is slow and correct, and hangs or fails where it is told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use allstream::testing::Slow;
use allstream::{Algo, Comm, DType, Error, Failed, Kind, MissingState, Work};
use futures::executor::block_on;

use super::support::cases::{self, Await, Case, Combine, Form, Oracle, What};
use super::support::{on_threads, worlds};

use crate::counted::Counted;

const LIMIT: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(300);
const LEN: usize = 1000;

/// A library that takes every collective but barriers.
fn slow() -> Slow {
    let kinds = Kind::ALL.into_iter().filter(|kind| *kind != Kind::Barrier).collect();
    Slow { kinds, ..Slow::default() }
}

/// Runs each rank of a local world in a thread of its own, bound to the library that `slow` gives it.
fn ranks<R: Send + 'static>(
    n: usize,
    slow: impl Fn(usize) -> Slow,
    each: impl Fn(&Slow, Comm) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let told: Vec<Slow> = (0..n).map(slow).collect();
    let all = on_threads(worlds(n, "local"), LIMIT, move |rank, comm| {
        block_on(comm.share().bind_slow(&told[rank])).unwrap();
        each(&told[rank], comm)
    });
    all.into_iter().map(Result::unwrap).collect()
}

/// Waits for an operation that must fail: its error, and its buffer if that comes back.
fn failure<O, F>(work: Work<O, F>) -> (Error, Option<F>) {
    let Err(Failed { buf, error }) = work.wait() else { panic!("it did not fail") };
    (error, buf)
}

/// The calls to make among `n` ranks, and for each whether it must go to the library whole.
pub(crate) fn case_list(n: usize, seed: u64) -> Vec<(Case, bool)> {
    let mut all = Vec::new();
    let ops: Vec<Combine> = Combine::all();
    let forms = Form::ALL.into_iter();
    let calls = Kind::ALL.into_iter().flat_map(|kind| forms.clone().map(move |form| (kind, form)));
    for (kind, form) in calls.filter(|(kind, form)| form.is_of(*kind)) {
        for len in [0, 1, n + 1, LEN] {
            let turn = all.len() + seed as usize;
            let fits = |dtype: DType, op: Combine| op.supports(dtype) && op.fits(kind);
            let pairs = DType::ALL.into_iter().flat_map(|dtype| ops.iter().map(move |op| (dtype, *op)));
            let pairs: Vec<_> = pairs.filter(|(dtype, op)| fits(*dtype, *op)).collect();
            let Some(&(dtype, op)) = pairs.get(turn * 7 % pairs.len().max(1)) else { continue };
            let case = Case {
                what: What::Collective(kind, Algo::Auto, form),
                len,
                dtype,
                op,
                root: turn % n,
                special: turn.is_multiple_of(3),
                end: [Await::Wait, Await::Poll, Await::Later][turn % 3],
                seed: turn as u64,
                timeout: Duration::from_secs(30),
                refused: false,
            };
            let is_whole = matches!(form, Form::InPlace | Form::Into | Form::New)
                && kind != Kind::Barrier
                && !(kind.reduces() && matches!(op, Combine::Bits | Combine::Maps));
            all.push((case, is_whole));
        }
    }
    all
}

#[test]
fn what_goes_whole_gives_what_the_oracle_says() {
    for (n, link) in [(1, "local"), (2, "shm"), (3, "local"), (4, "tcp")] {
        let list = Arc::new(case_list(n, 5 * n as u64));
        let oracle = Arc::new(Oracle::new(list.len(), n));
        let told: Vec<Slow> = (0..n).map(|rank| Slow { in_progress: rank as u32 * 3, ..slow() }).collect();
        let given: Vec<_> = told.iter().map(|slow| slow.submitted.clone()).collect();
        let wanted = list.iter().filter(|(_, is_whole)| *is_whole).count();
        let all = on_threads(worlds(n, link), LIMIT, move |rank, mut comm| -> Result<(), String> {
            block_on(comm.share().bind_slow(&told[rank])).map_err(|error| error.to_string())?;
            for (i, (case, _)) in list.iter().enumerate() {
                cases::run(&mut comm, case, &oracle, i)
                    .map_err(|error| format!("{link}, rank {rank} of {n}, case {i}, {case:?}: {error}"))?;
            }
            block_on(comm.close()).map_err(|error| error.to_string())
        });
        for result in all {
            result.unwrap().unwrap();
        }
        for given in given {
            let given = given.load(Ordering::Relaxed) as usize;
            assert!(given >= wanted && wanted > 50, "{given} of {wanted} calls went whole");
        }
    }
}

#[test]
fn what_a_call_asks_for_decides_who_carries_it_out() {
    let counts = ranks(
        2,
        |_| slow(),
        |slow, mut comm| {
            let buf = || vec![1.5_f32; LEN];
            let mut counts = Vec::new();
            let mut before = 0;
            let mut step = |what: &'static str| {
                let now = slow.submitted.load(Ordering::Relaxed);
                counts.push((what, now - std::mem::replace(&mut before, now)));
            };
            comm.all_reduce(buf()).wait().unwrap();
            step("plain");
            comm.algo(Algo::Ring).all_reduce(buf()).wait().unwrap();
            step("named");
            comm.call().deterministic(true).all_reduce(buf()).wait().unwrap();
            step("deterministic");
            comm.call().deterministic(true).broadcast(buf(), 0).wait().unwrap();
            step("deterministic, and nothing is reduced");
            comm.scale(0.5).all_reduce(buf()).wait().unwrap();
            step("scaled");
            comm.all_reduce_list(vec![buf(), buf()]).wait().unwrap();
            step("a list");
            comm.barrier().wait().unwrap();
            step("a barrier");
            counts
        },
    );
    for counts in counts {
        let wanted = [
            ("plain", 1),
            ("named", 0),
            ("deterministic", 0),
            ("deterministic, and nothing is reduced", 1),
            ("scaled", 1),
            ("a list", 1),
            ("a barrier", 0),
        ];
        assert_eq!(counts, wanted);
    }
}

/// Law 5: ranks compare their calls before the library is given anything.
#[test]
fn law_5_a_disagreement_is_an_error_before_the_library_is_given_anything() {
    type Called = fn(&mut Comm, usize) -> Work<Vec<f32>>;
    let calls: [(&str, Called); 3] = [
        ("lengths", |comm, rank| comm.all_reduce(vec![1.0; LEN + rank])),
        ("collectives", |comm, rank| match rank {
            0 => comm.all_reduce(vec![1.0; LEN]),
            _ => comm.broadcast(vec![1.0; LEN], 0),
        }),
        // One rank's call goes whole, the other's does not.
        ("who carries it out", |comm, rank| match rank {
            0 => comm.all_reduce(vec![1.0; LEN]),
            _ => comm.algo(Algo::Ring).all_reduce(vec![1.0; LEN]),
        }),
    ];
    for (what, call) in calls {
        let given = ranks(
            2,
            |_| slow(),
            move |slow, mut comm| {
                let rank = comm.rank();
                let (error, buf) = failure(call(&mut comm, rank));
                assert!(
                    matches!(error, Error::Mismatch { .. }) && error.to_string().contains("whole"),
                    "{what}: {error}"
                );
                assert!(buf.is_some_and(|buf| buf.iter().all(|x| *x == 1.0)), "{what}: the buffer as it was");
                slow.submitted.load(Ordering::Relaxed)
            },
        );
        assert_eq!(given, [0, 0], "{what}");
    }
}

/// Law 4: the deadline ends a call that one rank does not make, and which the library therefore is not given.
#[test]
fn law_4_a_rank_that_does_not_call_is_a_timeout_that_names_it() {
    let waits = std::sync::Barrier::new(3);
    let given = ranks(
        3,
        |_| slow(),
        move |slow, mut comm| {
            if comm.rank() < 2 {
                let (error, buf) = failure(comm.timeout(SHORT).all_reduce(vec![1.0_f32; LEN]));
                let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
                let named: Vec<_> = missing.iter().map(|one| one.rank).collect();
                assert!(named == [2] && buf.is_some(), "{error}");
            }
            waits.wait();
            slow.submitted.load(Ordering::Relaxed)
        },
    );
    assert_eq!(given, [0, 0, 0]);
}

/// Law 4: the library hangs on one rank, and so on all.
#[test]
fn law_4_a_library_that_hangs_is_a_timeout_and_buffers_come_back() {
    for in_progress in [0, 3] {
        let hangs = move |rank| Slow { hang_at: (rank == 1).then_some(2), in_progress, ..slow() };
        ranks(3, hangs, |_, mut comm| {
            for _ in 0..2 {
                let buf = comm.all_reduce(vec![1.0_f32; LEN]).wait().unwrap();
                assert!(buf.iter().all(|x| *x == 3.0));
            }
            let work = comm.timeout(SHORT).all_reduce(vec![1.0_f32; LEN]);
            let queued = comm.all_reduce(vec![2.0_f32; LEN]);
            let (error, buf) = failure(work);
            let Error::Timeout { missing, rank, .. } = &error else { panic!("{error}") };
            let hung = missing.iter().filter(|one| matches!(one.state, MissingState::NotEnded { .. }));
            assert_eq!(hung.map(|one| one.rank).collect::<Vec<_>>(), [*rank], "{error}");
            assert!(error.to_string().contains("the slow library for tests"), "{error}");
            assert_eq!(buf.unwrap(), [1.0; LEN]);
            assert_eq!(failure(queued).1.unwrap(), [2.0; LEN], "what had not begun is as it was");
        });
    }
}

/// Law 3: what a library may still touch does not come back, and is not dropped either.
#[test]
fn law_3_what_an_aborted_library_may_still_touch_is_kept() {
    let deaf = |rank| Slow { hang_at: Some(0), is_deaf: rank == 0, ..slow() };
    ranks(2, deaf, |_, mut comm| {
        let drops = Arc::new(AtomicUsize::new(0));
        let work = comm.timeout(SHORT).all_reduce(Counted(vec![1.0; LEN], drops.clone()));
        let begun = Instant::now();
        let (_, buf) = failure(work);
        let is_kept = buf.is_none();
        assert_eq!(is_kept, comm.rank() == 0);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        drop(buf);
        assert_eq!(drops.load(Ordering::Relaxed), usize::from(!is_kept));
    });
}

/// Law 3: the library fails when it seemed to be done.
#[test]
fn law_3_a_library_that_fails_late_gives_the_buffer_back() {
    let fails = |rank| Slow { fail_at: (rank == 1).then_some(1), ..slow() };
    ranks(3, fails, |_, mut comm| {
        comm.all_reduce(vec![1.0_f32; LEN]).wait().unwrap();
        let next = comm.all_reduce(vec![1.0_f32; LEN]);
        let last = comm.all_reduce(vec![1.0_f32; LEN]);
        // Ranks whose library did not fail may have finished this operation by then.
        if let Err(Failed { buf, error }) = next.wait() {
            assert!(matches!(error, Error::Library { rank: 1, .. }), "{error}");
            assert_eq!(buf.unwrap().len(), LEN);
        } else {
            assert_ne!(comm.rank(), 1);
        }
        let (error, buf) = failure(last);
        assert!(matches!(error, Error::Library { rank: 1, .. }) && buf.is_some(), "{error}");
        let again = comm.check().unwrap_err();
        assert_eq!(again, error);
    });
}

/// Laws 2 and 4: operations that nobody waits for end all the same; an abort ends those that the library has.
#[test]
fn law_2_what_nobody_waits_for_runs_on_and_an_abort_ends_it() {
    let hangs = |_| Slow { hang_at: Some(2), in_progress: 2, ..slow() };
    let both_have_looked = std::sync::Barrier::new(2);
    ranks(2, hangs, move |slow, mut comm| {
        let drops = Arc::new(AtomicUsize::new(0));
        drop(comm.all_reduce(Counted(vec![1.0; LEN], drops.clone())));
        drop(comm.broadcast(Counted(vec![1.0; LEN], drops.clone()), 1));
        drop(comm.all_reduce(Counted(vec![1.0; LEN], drops.clone())));
        let end = Instant::now() + LIMIT;
        while drops.load(Ordering::Relaxed) < 2 || slow.submitted.load(Ordering::Relaxed) < 3 {
            assert!(Instant::now() < end, "{} dropped", drops.load(Ordering::Relaxed));
            thread::yield_now();
        }
        assert_eq!(drops.load(Ordering::Relaxed), 2, "the third hangs");
        both_have_looked.wait();
        if comm.rank() == 0 {
            comm.abort("a test");
        }
        while drops.load(Ordering::Relaxed) < 3 {
            assert!(Instant::now() < end, "the abort gives the third back");
            thread::yield_now();
        }
        assert!(matches!(comm.check(), Err(Error::Aborted { by: 0, .. })));
    });
}

#[test]
fn messages_and_what_is_not_taken_go_on_beside_a_library_that_is_busy() {
    let some = |_| Slow { kinds: vec![Kind::AllReduce], in_progress: 5, ..Slow::default() };
    ranks(2, some, |slow, mut comm| {
        let (rank, peer) = (comm.rank() as u32, 1 - comm.rank());
        let whole = comm.all_reduce(vec![1.0_f32; LEN]);
        let exchange = comm.send_recv(vec![rank; 50_000], peer, vec![9; 50_000], peer);
        let (sent, received) = exchange.wait().unwrap();
        assert!(sent[0] == rank && received.iter().all(|x| *x == peer as u32));
        let gathered = comm.all_gather(vec![rank]).wait().unwrap();
        assert_eq!(gathered, [0, 1]);
        assert_eq!(whole.wait().unwrap(), [2.0; LEN]);
        assert_eq!(slow.submitted.load(Ordering::Relaxed), 1);
    });
}
