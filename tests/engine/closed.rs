//! `close` after a failure: it is no failure to close what has failed, and what nobody has seen is told.

use std::time::{Duration, Instant};

use allstream::{Comm, Error};
use futures::executor::block_on;

use crate::support::each;

const LINKS: [&str; 3] = ["local", "shm", "tcp"];

/// A call in which the ranks disagree, on each.
fn disagree(comm: &mut Comm) -> Result<(), Error> {
    match comm.rank() {
        0 => comm.all_reduce(vec![1f32; 3]).wait().map(drop).map_err(|failed| failed.error),
        _ => comm.all_reduce(vec![1f64; 3]).wait().map(drop).map_err(|failed| failed.error),
    }
}

#[test]
fn a_failure_that_a_call_has_returned_is_none_again_when_the_communicator_is_closed() {
    for link in LINKS {
        each(2, link, |rank, mut comm| {
            let mut child = block_on(comm.dup()).unwrap();
            assert!(matches!(disagree(&mut child), Err(Error::Mismatch { .. })));
            block_on(child.close()).unwrap();
            if rank == 0 {
                assert_eq!(comm.recv(vec![0u8], 1).wait().unwrap(), [7], "the parent works on");
                comm.abort("planted");
            } else {
                drop(comm.send(vec![7u8], 0));
                let end = Instant::now() + Duration::from_secs(20);
                while comm.check().is_ok() {
                    assert!(Instant::now() < end, "the abort is not heard of");
                    std::thread::yield_now();
                }
            }
            block_on(comm.close()).expect("who aborts knows of it, and who was told of it, too");
        });
    }
}

#[test]
fn a_failure_that_nobody_has_seen_is_told_once() {
    for link in LINKS {
        each(2, link, move |rank, mut comm| {
            if rank == 0 {
                drop(comm.all_reduce(vec![1f32; 3]));
            } else {
                drop(comm.all_reduce(vec![1f64; 3]));
            }
            let other = comm.share();
            let told = block_on(comm.close()).unwrap_err();
            assert!(matches!(told, Error::Mismatch { .. }), "{link}: {told}");
            block_on(other.close()).unwrap();
        });
    }
}

#[test]
fn a_refused_call_has_told_the_failure_to_whoever_looks_at_it() {
    each(2, "local", |_, mut comm| {
        assert!(disagree(&mut comm).is_err());
        let shared = comm.share();
        drop(shared.all_reduce(vec![1u8]));
        assert!(shared.all_reduce(vec![1u8]).refused().is_some());
        block_on(comm.close()).unwrap();
    });
}
