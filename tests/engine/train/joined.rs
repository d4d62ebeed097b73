//! Steps that a stream waits for, and the caller does not.

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};

use allstream::train::{Buckets, Options, Param};
use allstream::{AnyBuf, DType, Error, HostStream};
use futures::executor::block_on;

use crate::support::each;

use super::{LENS, LIMIT, LINKS, all_back, grad, invalid, layout, small_buckets, step};

/// The mean over `n` ranks, which all ranks get.
fn mean(n: usize, i: usize, number: usize) -> Vec<f32> {
    let all: Vec<_> = (0..n).map(|rank| grad(rank, i, number)).collect();
    (0..LENS[i]).map(|k| all.iter().map(|grad| grad[k]).sum::<f32>() / n as f32).collect()
}

#[test]
fn steps_that_are_joined_go_on_in_the_order_of_the_stream_and_the_caller_runs_ahead() {
    for link in LINKS {
        each(2, link, move |rank, comm| {
            let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets())).unwrap();
            let compute = HostStream::new("compute").unwrap();
            let (open, gate) = channel::<()>();
            compute.launch(move || gate.recv_timeout(LIMIT).unwrap());
            let mut weights = Vec::new();
            // The second step has the order that was learnt in the first; the third step has another.
            for (number, order) in
                [[0, 6, 1, 5, 2, 4, 3], [0, 6, 1, 5, 2, 4, 3], [6, 5, 4, 3, 2, 1, 0]].iter().enumerate()
            {
                for i in order {
                    buckets.push(*i, grad(rank, *i, number)).unwrap();
                }
                let grads = buckets.join(&compute).unwrap();
                assert!(!grads.event().is_complete(), "{link}: the stream has not come to it");
                weights.push(grads.launch(&compute, |grads: Vec<Vec<f32>>| grads));
            }
            assert!(buckets.report().is_none(), "no step is over");
            open.send(()).unwrap();
            for (number, grads) in weights.into_iter().enumerate() {
                for (i, grad) in block_on(grads).unwrap().into_iter().enumerate() {
                    assert!(grad == mean(2, i, number), "{link}: parameter {i} of step {number}");
                }
            }
            let report = buckets.report().unwrap();
            assert_eq!(report.step, 2);
            assert_eq!(report.buckets.iter().map(|bucket| bucket.params).sum::<usize>(), LENS.len());
            // The same step may be finished on one rank and joined on the other.
            for number in 3..6 {
                if (rank + number).is_multiple_of(2) {
                    let found = step(&mut buckets, &[6, 5, 4, 3, 2, 1, 0], |i| grad(rank, i, number));
                    assert!(found.iter().enumerate().all(|(i, found)| *found == mean(2, i, number)));
                } else {
                    for i in 0..LENS.len() {
                        buckets.push(i, grad(rank, i, number)).unwrap();
                    }
                    let found = buckets.join(&compute).unwrap().wait().unwrap();
                    assert!(found.iter().enumerate().all(|(i, found)| *found == mean(2, i, number)));
                }
            }
            block_on(buckets.close()).unwrap();
        });
    }
}

#[test]
fn what_is_compressed_sharded_or_relearnt_may_be_joined() {
    each(2, "shm", |rank, comm| {
        let compute = HostStream::new("compute").unwrap();
        for options in
            [small_buckets().compress(DType::BF16), small_buckets().sharded(), small_buckets().sum()]
        {
            let [mut joined, mut finished] =
                [0, 1].map(|_| block_on(Buckets::with(&comm.share(), &layout(), options)).unwrap());
            for number in 0..4 {
                for i in [3, 0, 6, 1, 5, 2, 4] {
                    joined.push(i, grad(rank, i, number)).unwrap();
                }
                let expected = step(&mut finished, &[3, 0, 6, 1, 5, 2, 4], |i| grad(rank, i, number));
                let found = joined.join(&compute).unwrap().wait().unwrap();
                for i in 0..LENS.len() {
                    let owned = finished.owned(i);
                    assert!(found[i][owned.clone()] == expected[i][owned], "parameter {i} of step {number}");
                }
                if options == small_buckets().sharded() {
                    assert_eq!(block_on(joined.gather(found)).unwrap().len(), LENS.len());
                }
                if number == 1 {
                    joined.relearn();
                }
            }
        }
    });
}

#[test]
fn more_buckets_than_may_be_in_flight_are_waited_for() {
    each(2, "local", |_, comm| {
        let layout = [Param::of::<f32>(1); 700];
        let options = Options::default().first_bucket_bytes(1).bucket_bytes(1);
        let mut buckets = block_on(Buckets::with(&comm.share(), &layout, options)).unwrap();
        let compute = HostStream::new("compute").unwrap();
        let mut all = Vec::new();
        for number in 0..3 {
            for i in 0..layout.len() {
                buckets.push(i, vec![(number * i) as f32]).unwrap();
            }
            all.push(buckets.join(&compute).unwrap());
        }
        for (number, grads) in all.into_iter().enumerate() {
            let grads = grads.wait().unwrap();
            assert!(grads.iter().enumerate().all(|(i, grad)| grad[..] == [(number * i) as f32]));
        }
    });
}

#[test]
fn a_step_that_lacks_gradients_is_not_joined_and_goes_on() {
    each(1, "local", |_, comm| {
        let layout = [Param::of::<f32>(4), Param::of::<u8>(2)];
        let mut buckets = block_on(Buckets::with(&comm.share(), &layout, Options::default().sum())).unwrap();
        let compute = HostStream::new("compute").unwrap();
        buckets.push(1, AnyBuf::new(vec![1_u8; 2])).unwrap();
        let failed = buckets.join(&compute).unwrap_err();
        assert!(failed.buf.is_none());
        invalid(Err::<(), _>(failed), &["join", "1 of 2 parameters", ": 0;"]);
        buckets.accumulate(0, AnyBuf::new(vec![2_f32; 4])).unwrap();
        let all = buckets.join(&compute).unwrap().wait().unwrap();
        assert_eq!(
            (all[0].as_slice::<f32>(), all[1].as_slice::<u8>()),
            (Some(&[2.0; 4][..]), Some(&[1; 2][..]))
        );
    });
}

#[test]
fn of_a_rank_that_is_lost_the_stream_hears_and_all_gradients_come_back() {
    for link in LINKS {
        let ready = Arc::new(Barrier::new(3));
        each(3, link, move |rank, comm| {
            let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets())).unwrap();
            step(&mut buckets, &[6, 5, 4, 3, 2, 1, 0], |i| grad(rank, i, 0));
            if rank == 2 {
                ready.wait();
                drop(buckets);
                return drop(comm);
            }
            let compute = HostStream::new("compute").unwrap();
            for i in 0..LENS.len() {
                buckets.push(i, grad(rank, i, 1)).unwrap();
            }
            let grads = buckets.join(&compute).unwrap();
            ready.wait();
            let failed = grads.launch(&compute, |grads| grads).wait().unwrap_err();
            assert!(matches!(failed.error, Error::PeerLost { rank: 2, .. }), "{link}: {}", failed.error);
            all_back(failed.buf, &[0, 1, 2, 3, 4, 5, 6]);
            assert!(compute.is_failed(), "what would use the gradients does not run");
            // Calls of the next step fail with the same error.
            let pushed = buckets.push(0, grad(rank, 0, 2)).unwrap_err();
            assert_eq!(
                (pushed.buf.map(|buf| buf.len()), pushed.error),
                (Some(LENS[0]), failed.error.clone())
            );
            assert_eq!(buckets.join(&compute).unwrap_err().error, failed.error);
        });
    }
}
