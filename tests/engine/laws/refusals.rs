//! Calls that cannot be carried out.

use std::sync::atomic::Ordering;
use std::task::Poll;

use allstream::{Algo, Comm, Error, Failed, Function, ReduceOp, Work};
use futures::executor::block_on;

use super::house::*;

fn refused<O, F>(work: Work<O, F>, words: &[&str]) -> F {
    let Err(Failed { buf, error }) = work.wait() else { panic!("it was not refused; expected {words:?}") };
    let text = error.to_string();
    assert!(matches!(error, Error::Invalid { .. }), "{text}");
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    buf.expect("the buffer comes back")
}

#[test]
fn invalid_calls_are_refused_with_the_buffer_and_nothing_is_submitted() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            // On one rank only: the others do not notice.
            if comm.rank() == 1 {
                let five = || vec![1f32; 5];
                let words = ["reduce_scatter", "5 elements", "multiple of the group's size, 3"];
                assert_eq!(refused(comm.reduce_scatter(five()), &words), five());
                assert_eq!(refused(comm.reduce_scatter_in_place(five()), &words), five());
                refused(comm.reduce_scatter_into(five(), vec![0f32; 1]), &words);
                refused(comm.all_gather_in_place(five()), &["all_gather", "5 elements", "3"]);
                let (i, o) = refused(
                    comm.all_gather_into(five(), vec![0f32; 14]),
                    &["all_gather", "output has 14", "expected 15"],
                );
                assert_eq!((i.len(), o.len()), (5, 14));
                refused(comm.all_reduce_into(five(), vec![0f32; 6]), &["all_reduce", "has 6", "expected 5"]);
                let words = ["reduce_scatter", "has 3", "expected 2"];
                refused(comm.reduce_scatter_into(vec![1f32; 6], vec![0f32; 3]), &words);
                refused(comm.reduce_into(five(), vec![0f32; 4], 1), &["reduce", "has 4", "expected 5"]);
                refused(comm.broadcast_into(five(), vec![0f32; 4], 1), &["broadcast", "5", "4"]);
                let words = ["all_reduce", "f32"];
                assert_eq!(refused(comm.op(ReduceOp::BitOr).all_reduce(five()), &words), five());
                refused(comm.op(ReduceOp::BitXor).reduce_scatter(vec![1f64; 3]), &["reduce_scatter", "f64"]);
                refused(comm.broadcast(five(), 3), &["broadcast", "root 3", "group of 3", "0..=2"]);
                refused(comm.reduce(five(), usize::MAX), &["reduce", "root", "0..=2"]);
                let words = ["all_gather", "recursive_halving", "direct", "ring"];
                assert_eq!(refused(comm.algo(Algo::RecursiveHalving).all_gather(five()), &words), five());
                refused(
                    comm.algo(Algo::Ring).broadcast(five(), 0),
                    &["broadcast", "ring", "direct", "oneshot"],
                );
                refused(comm.algo(Algo::Dissemination).all_reduce(five()), &["all_reduce", "dissemination"]);
                refused_by_new_calls(&mut comm);
                let (buf, drops) = Watched::new(4, 1.0);
                drop(comm.broadcast(buf, 8));
                assert_eq!(
                    drops.load(Ordering::SeqCst),
                    1,
                    "a refused work that is dropped frees its buffer"
                );
            }
            works(&mut comm);
            comm.barrier().wait().unwrap();
            block_on(comm.close()).unwrap();
        });
    }
}

/// On rank 1 of 3.
fn refused_by_new_calls(comm: &mut Comm) {
    let of = |len| vec![1f32; len];
    // Lengths.
    refused(comm.gather_into(of(2), of(5), 1), &["gather", "output has 5", "expected 6"]);
    refused(comm.gather_in_place(of(5), 1), &["gather", "5 elements", "3"]);
    refused(comm.scatter(of(5), 2, 1), &["scatter", "the root's input has 5", "3 blocks of 2"]);
    refused(comm.scatter_in_place(of(5), 1), &["scatter", "5 elements", "3"]);
    refused(comm.all_to_all(of(5)), &["all_to_all", "5 elements", "3"]);
    refused(comm.all_to_all_into(of(6), of(3)), &["all_to_all", "output has 3", "expected 6"]);
    refused(comm.scan_into(of(5), of(4)), &["scan", "has 4", "expected 5"]);
    refused(comm.gather(of(1), 3), &["gather", "root 3", "0..=2"]);
    // Counts.
    refused(comm.all_gather_v(of(5), &[5, 5]), &["all_gather", "2 counts", "group of 3"]);
    refused(comm.all_gather_v(of(5), &[5, 4, 5]), &["all_gather", "input has 5", "rank (1), 4"]);
    refused(comm.all_gather_v_into(of(5), of(14), &[5, 5, 5]), &["output has 14", "expected 15"]);
    refused(comm.reduce_scatter_v(of(5), &[1, 1, 1]), &["reduce_scatter", "5 elements", "add up to 3"]);
    refused(comm.all_gather_v(of(5), &[usize::MAX, 5, 5]), &["all_gather", "add up to no length"]);
    refused(comm.gather_v(of(5), &[1, 4, 1], 1), &["gather", "root's input has 5", "4"]);
    refused(comm.scatter_v(of(6), &[2, 2, 2], 1, 1), &["scatter", "root's part has 1", "2"]);
    refused(comm.all_to_all_v(of(5), &[1, 2, 3], &[1, 2, 3]), &["all_to_all", "5 elements", "add up to 6"]);
    refused(comm.all_to_all_v(of(6), &[1, 2, 3], &[1, 3, 3]), &["sends itself 2", "receives 3"]);
    // Lists.
    let words = ["all_gather", "pair 1", "2 x f32", "5 x f32"];
    refused(comm.all_gather_list([of(1), of(2)], [of(3), of(5)]), &words);
    refused(comm.all_gather_list([of(1)], [of(3), of(3)]), &["1 inputs and 2 outputs"]);
    refused(comm.op(ReduceOp::BitOr).all_reduce_list((vec![vec![1u8]], [of(2)])), &["bor", "f32"]);
    // Reductions.
    refused(comm.op(ReduceOp::Avg).scan(of(5)), &["scan", "no average"]);
    refused(comm.scale(0.5).all_reduce(vec![1i32; 4]), &["scale", "floats", "i32"]);
    refused(comm.scale(0.5).op(ReduceOp::Max).all_reduce(of(4)), &["scale", "sum"]);
    refused(comm.scale(0.5).broadcast(of(4), 0), &["scale", "sum"]);
    let ordered = Function::<f32>::ordered("last", |l, r| l.copy_from_slice(r));
    refused(
        comm.function(&ordered).algo(Algo::Ring).all_reduce(of(4)),
        &["ring", "order of ranks", "commute"],
    );
    refused(comm.function(&ordered).all_reduce(vec![1f64; 4]), &["\"last\"", "f32", "f64"]);
    refused(comm.call().deterministic(true).algo(Algo::Ring).all_reduce(of(4)), &["ring", "deterministic"]);
    // Plans that one host has no use for.
    refused(comm.algo(Algo::TwoLevel).all_reduce(of(4)), &["all_reduce", "two_level"]);
}

#[test]
fn calls_after_close_of_a_shared_handle_are_refused() {
    let comms = Comm::local(2).unwrap();
    threads(comms, |comm| {
        let shared = comm.share();
        block_on(comm.close()).unwrap();
        let failed = shared.all_reduce(vec![1u8]).wait().unwrap_err();
        assert!(matches!(failed.error, Error::Closed { .. }), "{}", failed.error);
        assert_eq!(failed.buf, Some(vec![1u8]));
    });
}

#[test]
fn a_finished_work_polled_again_is_an_error_not_a_hang() {
    let mut comms = Comm::local(1).unwrap();
    let mut comm = comms.remove(0);
    let mut work = comm.all_reduce(vec![1u8]);
    assert!(matches!(poll_once(&mut work), Poll::Ready(Ok(_))));
    assert!(matches!(poll_once(&mut work), Poll::Ready(Err(Failed { buf: None, .. }))));
}
