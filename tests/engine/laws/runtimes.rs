//! Futures: any runtime, or none.

use std::task::Poll;
use std::thread;
use std::time::Duration;

use allstream::{Comm, Error, Failed, HostBuf, SharedComm, Work, bf16};
use futures::executor::block_on;

use super::house::*;

const fn send_unpin<T: Send + Unpin + 'static>() {}
const fn send<T: Send + 'static>() {}
const fn error<T: std::error::Error + Send + Sync + 'static>() {}
const fn shareable<T: Clone + Send + Sync + 'static>() {}

const _: () = {
    send_unpin::<Work<Vec<f32>>>();
    send_unpin::<Work<(HostBuf<bf16>, Box<[bf16]>)>>();
    send_unpin::<Work<Vec<f32>, Watched>>();
    send_unpin::<allstream::Batch<Vec<u8>>>();
    send::<Comm>();
    send::<allstream::Ordered<Vec<f32>>>();
    error::<Failed<Vec<f32>>>();
    error::<Failed<HostBuf<f32>>>();
    error::<Error>();
    shareable::<SharedComm>();
};

async fn sums(mut comm: Comm, rounds: usize) -> Result<(), Error> {
    let (n, value) = (comm.size(), comm_value(comm.rank()));
    for round in 0..rounds {
        let len = [1, 100, 20_000, 200_000][round % 4];
        let sum = comm.all_reduce(vec![value; len]).await?;
        assert!(sum.iter().all(|x| *x == total(n)), "round {round}");
    }
    let at = comm.rank();
    let (sent, got) =
        (comm.send(vec![at as u64; 9000], (at + 1) % n), comm.recv(vec![0u64; 9000], (at + n - 1) % n));
    let (sent, got) = futures::future::join(sent, got).await;
    assert_eq!((sent?.len(), got?), (9000, vec![((at + n - 1) % n) as u64; 9000]));
    comm.close().await
}

#[test]
fn futures_complete_on_every_runtime_and_on_none_mixed_in_one_group() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(5, link));
        threads(comms, move |comm| match comm.rank() {
            0 => {
                let many = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .unwrap();
                many.block_on(async { tokio::spawn(sums(comm, 24)).await.unwrap() }).unwrap();
            }
            1 => {
                let one = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                one.block_on(sums(comm, 24)).unwrap();
            }
            2 => block_on(sums(comm, 24)).unwrap(),
            3 => {
                use futures::task::LocalSpawnExt;
                let mut pool = futures::executor::LocalPool::new();
                let task = pool.spawner().spawn_local_with_handle(sums(comm, 24)).unwrap();
                pool.run_until(task).unwrap();
            }
            _ => {
                let (mut comm, n) = (comm, 5);
                for round in 0..24 {
                    let len = [1, 100, 20_000, 200_000][round % 4];
                    let sum = comm.all_reduce(vec![5f32; len]).wait().unwrap();
                    assert!(sum.iter().all(|x| *x == total(n)));
                }
                let (sent, got) = (comm.send(vec![4u64; 9000], 0), comm.recv(vec![0u64; 9000], 3));
                assert_eq!(got.wait().unwrap(), vec![3u64; 9000]);
                sent.wait().unwrap();
                block_on(comm.close()).unwrap();
            }
        });
    }
}

#[test]
fn futures_of_eight_ranks_complete_on_one_thread() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(8, link));
        within(LIMIT, move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, async move {
                let tasks: Vec<_> =
                    comms.into_iter().map(|comm| tokio::task::spawn_local(sums(comm, 12))).collect();
                for task in tasks {
                    task.await.unwrap().unwrap();
                }
            });
        });
        let comms = within(LIMIT, move || world(8, link));
        within(LIMIT, move || {
            use futures::task::LocalSpawnExt;
            let mut pool = futures::executor::LocalPool::new();
            for comm in comms {
                let task = async { sums(comm, 4).await.unwrap() };
                pool.spawner().spawn_local(task).unwrap();
            }
            pool.run();
        });
    }
}

#[test]
fn futures_lost_to_a_select_leave_the_group_whole() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let value = comm_value(comm.rank());
                for round in 0..40u64 {
                    let work = comm.all_reduce(vec![value; 60_000]);
                    tokio::select! {
                        biased;
                        sum = work => assert!(sum.unwrap().iter().all(|x| *x == 3.0)),
                        () = tokio::time::sleep(Duration::from_micros(round * 13 % 300)) => {}
                    }
                    let mut kept = comm.all_reduce(vec![value; 10]);
                    let lost = tokio::time::timeout(Duration::from_micros(1), &mut kept).await;
                    let sum = match lost {
                        Ok(sum) => sum.unwrap(),
                        Err(_) => kept.await.unwrap(),
                    };
                    assert_eq!(sum, vec![3.0; 10], "{link:?}: the same work, awaited again");
                }
                comm.close().await.unwrap();
            });
        });
    }
}

#[test]
fn futures_may_move_between_tasks_and_threads() {
    let comms = Comm::local(3).unwrap();
    threads(comms, |mut comm| {
        for len in [10usize, 300_000] {
            let mut work = comm.all_reduce(vec![1u32; len]);
            // Polled here once, with a waker that nobody hears; awaited elsewhere.
            let sum = match poll_once(&mut work) {
                Poll::Ready(sum) => sum,
                Poll::Pending => thread::spawn(move || block_on(work)).join().unwrap(),
            };
            assert_eq!(sum.unwrap(), vec![3u32; len]);
        }
        block_on(comm.close()).unwrap();
    });
}

#[test]
fn shared_comms_are_used_from_several_threads() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |comm| {
            let shared = comm.share();
            let users: Vec<_> = (0..4)
                .map(|_| {
                    let shared = shared.clone();
                    thread::spawn(move || {
                        for round in 0..50usize {
                            // All threads of all ranks call the same, so that their order does not matter.
                            let sum = shared.all_reduce(vec![(shared.rank() + 1) as u64; 500]);
                            let sum = if round % 2 == 0 { sum.wait() } else { block_on(sum) };
                            assert_eq!(sum.unwrap(), vec![6u64; 500]);
                        }
                    })
                })
                .collect();
            users.into_iter().for_each(|u| u.join().unwrap());
            assert_eq!((shared.size(), shared.name().is_empty()), (3, false));
            drop(shared);
            block_on(comm.close()).unwrap();
        });
    }
}
