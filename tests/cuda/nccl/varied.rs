//! Collectives with a count for each rank, by NCCL. `what_goes_to_nccl_gives_what_the_oracle_says` compares their results with an oracle.

use std::time::Instant;

use allstream::cuda::DeviceBuf;
use allstream::{Comm, Error, Failed, Work};

use super::{SHORT, all_is_gone, bound, told, with_nccl};
use crate::support::{down, is_ours, ranks, soon, up, values};

const COUNTS: [usize; 3] = [700, 0, 1300];
const ALL: usize = 2000;

/// What `call` gave, and how many NCCL kernels it took on all ranks together.
fn counted<R>(comm: &mut Comm, call: impl FnOnce(&mut Comm) -> R) -> (R, u64) {
    soon(comm.barrier()).unwrap();
    let before = told().kernels;
    soon(comm.barrier()).unwrap();
    let result = call(comm);
    soon(comm.barrier()).unwrap();
    let after = told().kernels;
    soon(comm.barrier()).unwrap();
    (result, after - before)
}

/// A rank without anything to move has no kernel.
#[test]
fn calls_with_a_count_for_each_rank_go_to_nccl() {
    with_nccl("nccl::varied::calls_with_a_count_for_each_rank_go_to_nccl", 3, &[], || {
        ranks(3, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let zeros = |len| up(&stream, vec![0_f32; len]);
            let own = || up(&stream, values(rank, COUNTS[rank]));
            let all: Vec<f32> = (0..3).flat_map(|rank| values(rank, COUNTS[rank])).collect();
            let start = COUNTS[..rank].iter().sum::<usize>();
            let part = start..start + COUNTS[rank];

            let (given, into) = (own(), zeros(ALL));
            let (result, kernels) =
                counted(&mut comm, |comm| soon(comm.all_gather_v_into(given, into, &COUNTS)).unwrap());
            assert!(down(result.1) == all && kernels == 3, "{kernels}");

            let (given, into) = (up(&stream, values(5, ALL)), zeros(COUNTS[rank]));
            let (result, kernels) = counted(&mut comm, |comm| {
                soon(comm.scale(0.5).reduce_scatter_v_into(given, into, &COUNTS)).unwrap()
            });
            let sums: Vec<f32> = values(5, ALL)[part.clone()].iter().map(|x| x * 1.5).collect();
            assert!(down(result.1) == sums && kernels == 3, "{kernels}");

            let (given, into) = (own(), zeros(if rank == 2 { ALL } else { 0 }));
            let (result, kernels) =
                counted(&mut comm, |comm| soon(comm.gather_v_into(given, into, &COUNTS, 2)).unwrap());
            assert!(rank != 2 || down(result.1) == all);
            assert_eq!(kernels, 2);

            let given = if rank == 0 { all.clone() } else { Vec::new() };
            let (given, into) = (up(&stream, given), zeros(COUNTS[rank]));
            let (result, kernels) =
                counted(&mut comm, |comm| soon(comm.scatter_v_into(given, into, &COUNTS, 0)).unwrap());
            assert!(down(result.1) == values(rank, COUNTS[rank]));
            assert_eq!(kernels, 2);

            // Rank `from` sends rank `to` as many elements as it gets from there.
            let counts: Vec<usize> = (0..3).map(|other| COUNTS[(rank + other) % 3]).collect();
            let block = |from: usize, to: usize| values(3 * from + to, COUNTS[(from + to) % 3]);
            let given: Vec<f32> = (0..3).flat_map(|to| block(rank, to)).collect();
            let (given, into) = (up(&stream, given), zeros(ALL));
            let (result, kernels) = counted(&mut comm, |comm| {
                soon(comm.all_to_all_v_into(given, into, &counts, &counts)).unwrap()
            });
            let wanted: Vec<f32> = (0..3).flat_map(|from| block(from, rank)).collect();
            assert!(down(result.1) == wanted && kernels == 3, "{kernels}");
            soon(comm.close()).unwrap();
        });
        all_is_gone();
    });
}

type Both = (DeviceBuf<f32>, DeviceBuf<f32>);

/// The error of a call that fails, whose buffers come back.
fn failure(work: Work<Both>) -> Error {
    let Err(Failed { buf, error }) = soon(work) else { panic!("it did not fail") };
    let (input, output) = buf.unwrap();
    is_ours(input);
    is_ours(output);
    error
}

/// Law 5, where each rank knows only its own counts, and where each rank knows the counts of all.
#[test]
fn law_5_counts_that_do_not_fit_are_an_error_before_nccl_is_given_anything() {
    let test = "nccl::varied::law_5_counts_that_do_not_fit_are_an_error_before_nccl_is_given_anything";
    with_nccl(test, 3, &[], || {
        type Called = fn(&mut Comm, &dyn Fn(usize) -> DeviceBuf<f32>) -> Work<Both>;
        let calls: [Called; 4] = [
            // Rank 1 expects 6 elements of rank 0, which sends it 5.
            |comm, buf| {
                let recvs = if comm.rank() == 1 { [6, 5, 5] } else { [5; 3] };
                comm.all_to_all_v_into(buf(15), buf(recvs.iter().sum()), &[5; 3], &recvs)
            },
            |comm, buf| {
                let (own, all) = ([5, 6, 5][comm.rank()], if comm.rank() == 0 { 15 } else { 0 });
                comm.gather_v_into(buf(own), buf(all), &[5; 3], 0)
            },
            |comm, buf| {
                let (all, own) = (if comm.rank() == 2 { 15 } else { 0 }, [5, 4, 5][comm.rank()]);
                comm.scatter_v_into(buf(all), buf(own), &[5; 3], 2)
            },
            |comm, buf| {
                let counts = if comm.rank() == 1 { [5, 4, 6] } else { [5, 6, 4] };
                comm.all_gather_v_into(buf(counts[comm.rank()]), buf(15), &counts)
            },
        ];
        for (which, call) in calls.into_iter().enumerate() {
            ranks(3, |mut comm| {
                let stream = bound(&mut comm);
                let error = failure(call(&mut comm, &|len| up(&stream, vec![1.0; len])));
                assert!(
                    matches!(error, Error::Mismatch { .. }),
                    "call {which}, rank {}: {error}",
                    comm.rank()
                );
            });
            all_is_gone();
        }
        assert_eq!(told().kernels, 0);
    });
}

/// Law 4: a rank that only sends would not wait for the root by itself.
#[test]
fn law_4_a_root_that_does_not_call_is_named() {
    with_nccl("nccl::varied::law_4_a_root_that_does_not_call_is_named", 3, &[], || {
        let waits = std::sync::Barrier::new(3);
        ranks(3, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            if rank > 0 {
                let begun = Instant::now();
                let (given, into) = (up(&stream, values(rank, 5)), up(&stream, Vec::new()));
                let error = failure(comm.timeout(SHORT).gather_v_into(given, into, &[5; 3], 0));
                let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
                assert_eq!(missing.iter().map(|one| one.rank).collect::<Vec<_>>(), [0], "{error}");
                assert!(begun.elapsed() < 20 * SHORT, "{:?}", begun.elapsed());
            }
            waits.wait();
        });
        all_is_gone();
        assert_eq!(told().kernels, 0);
    });
}
