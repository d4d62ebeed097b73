//! Operations that a carrier of one file carries out (`engine/testing/worker.rs`): on copies that threads make, with results that come
//! back later. It is the example of `docs/adr/0033-carriers.md`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use allstream::{Algo, Error, Failed, Kind, MissingState};
use futures::executor::block_on;

use super::support::cases::{self, Oracle};
use super::support::{on_threads, worlds};
use super::whole::case_list;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn what_workers_carry_out_gives_what_the_oracle_says() {
    for (n, link) in [(1, "local"), (2, "shm"), (3, "local"), (4, "tcp")] {
        let list = Arc::new(case_list(n, 11 * n as u64));
        let oracle = Arc::new(Oracle::new(list.len(), n));
        let wanted = list.iter().filter(|(_, is_whole)| *is_whole).count() as u64;
        let all = on_threads(worlds(n, link), LIMIT, move |rank, mut comm| -> Result<u64, String> {
            let carried = comm.share().bind_workers();
            for (i, (case, _)) in list.iter().enumerate() {
                cases::run(&mut comm, case, &oracle, i)
                    .map_err(|error| format!("{link}, rank {rank} of {n}, case {i}, {case:?}: {error}"))?;
            }
            block_on(comm.close()).map_err(|error| error.to_string())?;
            Ok(carried.load(Ordering::Relaxed))
        });
        for carried in all {
            let carried = carried.unwrap().unwrap();
            assert!(carried >= wanted && wanted > 50, "{carried} of {wanted} calls went so");
        }
    }
}

#[test]
fn a_rank_that_does_not_call_is_named_and_the_buffer_comes_back_untouched() {
    let all = on_threads(worlds(3, "shm"), LIMIT, |rank, mut comm| {
        comm.share().bind_workers();
        let buf = vec![rank as f32; 1000];
        if rank == 1 {
            // It has called once less; the others say so.
            while comm.check().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        let work = comm.timeout(Duration::from_millis(300)).algo(Algo::Ring).all_reduce(buf);
        let Err(Failed { buf, error }) = work.wait() else { panic!("it did not fail") };
        let Error::Timeout { missing, operation, .. } = &error else { panic!("{error}") };
        assert_eq!(operation.signature.kind, Kind::AllReduce as u8);
        assert!(
            missing.iter().any(|one| one.rank == 1 && matches!(one.state, MissingState::NotCalled(_))),
            "{error}"
        );
        assert_eq!(buf, Some(vec![rank as f32; 1000]));
    });
    all.into_iter().for_each(|rank| rank.unwrap());
}
