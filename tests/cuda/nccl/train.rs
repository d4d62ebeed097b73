//! Gradient buckets by NCCL.

use allstream::cuda::DeviceBuf;
use allstream::train::{Buckets, Param};

use super::{all_is_gone, bound, told, with_nccl};
use crate::support::{down, ranks, soon, up, values};

/// The communicator that buckets make for themselves is bound as that of the loop is: a step of one bucket is one kernel of NCCL's.
#[test]
fn nccl_reduces_the_buckets_of_a_loop_that_is_bound_to_it() {
    with_nccl("nccl::train::nccl_reduces_the_buckets_of_a_loop_that_is_bound_to_it", 2, &[], || {
        const LENS: [usize; 3] = [70, 3, 1000];
        let counts = ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let layout = LENS.map(|len| Param::of::<f32>(len).on_device());
            let mut buckets = soon(Buckets::new(&comm.share(), &layout)).unwrap();
            let mut step = || {
                soon(comm.barrier()).unwrap();
                let before = told().kernels;
                soon(comm.barrier()).unwrap();
                for (i, len) in LENS.into_iter().enumerate().rev() {
                    buckets.push(i, up(&stream, values(rank + i, len))).unwrap();
                }
                let grads: Vec<DeviceBuf<f32>> = soon(buckets.finish()).unwrap().collect();
                soon(comm.barrier()).unwrap();
                let kernels = told().kernels - before;
                soon(comm.barrier()).unwrap();
                for (i, grad) in grads.into_iter().enumerate() {
                    let both = values(i, LENS[i]).into_iter().zip(values(1 + i, LENS[i]));
                    assert!(down(grad) == both.map(|(a, b)| (a + b) / 2.0).collect::<Vec<f32>>(), "{i}");
                }
                kernels
            };
            let kernels = [step(), step()];
            soon(buckets.close()).unwrap();
            soon(comm.close()).unwrap();
            kernels
        });
        assert_eq!(counts, [[2, 2]; 2], "kernels of both ranks, in each step");
        all_is_gone();
    });
}
