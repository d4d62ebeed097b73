//! Calls that cannot be carried out.

use std::sync::atomic::Ordering;
use std::task::Poll;

use allstream::{Algo, Comm, Error, Failed, ReduceOp, Work};
use futures::executor::block_on;

use crate::house::*;

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
                let words = ["all_gather", "recursive_doubling", "direct", "ring"];
                assert_eq!(refused(comm.algo(Algo::RecursiveDoubling).all_gather(five()), &words), five());
                refused(
                    comm.algo(Algo::Ring).broadcast(five(), 0),
                    &["broadcast", "ring", "direct", "oneshot"],
                );
                refused(comm.algo(Algo::Dissemination).all_reduce(five()), &["all_reduce", "dissemination"]);
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
