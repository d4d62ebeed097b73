//! `abort()`, timeouts and full queues end one communicator, or one call, and nothing else.

use std::time::{Duration, Instant};

use allstream::{Comm, Error, MissingState};
use serde_json::json;

use crate::harness::{self, Link, Me, Plan, SOON, among_others, say};

const SIZE: usize = 3;

async fn abort_one(world: &mut Comm, reason: &str) {
    let mut doomed = world.dup().await.unwrap();
    let mut sibling = world.dup().await.unwrap();
    let mut nephew = doomed.dup().await.unwrap();
    world.barrier().await.unwrap();
    let begun = Instant::now();
    if world.rank() == 2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        doomed.abort(reason);
    } else {
        let large = doomed.all_reduce(vec![1f32; 1 << 20]);
        let queued = doomed.barrier();
        let message = doomed.recv(vec![0u8; 10], 2);
        let large = large.await.unwrap_err();
        assert!(is_abort(&large.error), "{}", large.error);
        assert!(large.buf.is_some());
        assert!(is_abort(&queued.await.unwrap_err().error));
        assert!(is_abort(&message.await.unwrap_err().error));
    }
    assert!(begun.elapsed() < SOON);
    let later = doomed.all_reduce(vec![1u8]).await.unwrap_err();
    assert!(is_abort(&later.error) && later.buf.is_some(), "{}", later.error);
    assert!(is_abort(&doomed.check().unwrap_err()));
    doomed.close().await.expect("calls have returned the failure: to close is none");
    for comm in [&mut sibling, &mut nephew, world] {
        assert_eq!(comm.all_reduce(vec![1i32; 1000]).await.unwrap(), vec![SIZE as i32; 1000]);
    }
    let mut fresh = world.dup().await.unwrap();
    fresh.barrier().await.unwrap();
    for comm in [fresh, sibling, nephew] {
        comm.close().await.unwrap();
    }
}

const REASON: &str = "a test says so";

/// Of a long reason only the beginning is told.
fn is_abort(error: &Error) -> bool {
    matches!(error, Error::Aborted { by: 2, reason, .. } if reason.starts_with(REASON) && reason.len() < 1 << 20)
}

pub(crate) async fn aborts(me: Me) {
    let mut world = me.connect().await;
    let long = REASON.to_owned() + &"\u{1}\u{2030}".repeat(1 << 20);
    for reason in [REASON, &long, REASON] {
        abort_one(&mut world, reason).await;
    }
    world.close().await.unwrap();
    say("well", json!({}));
}

#[test]
fn abort_ends_one_communicator_on_all_ranks_and_no_other() {
    let _turn = among_others();
    harness::on_threads(harness::world(Link::Local, SIZE), |mut world| async move {
        abort_one(&mut world, REASON).await
    });
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("aborts", SIZE, link).start();
        job.ranks.iter().for_each(|r| drop(r.hear("well")));
        job.finish();
    }
}

/// A timeout on a group of two of three ranks, large enough that data is under way.
async fn time_out_a_child(world: &mut Comm) {
    let rank = world.rank();
    let mut child = world.split(u64::from(rank == 1), 0).await.unwrap();
    if child.size() == 2 {
        if child.rank() == 0 {
            let begun = Instant::now();
            let failed =
                child.timeout(Duration::from_millis(500)).all_reduce(vec![1f32; 4 << 20]).await.unwrap_err();
            let Error::Timeout { missing, .. } = &failed.error else { panic!("{}", failed.error) };
            assert_eq!((missing.len(), missing[0].rank), (1, 1), "{}", failed.error);
            assert!(matches!(missing[0].state, MissingState::NotCalled(None)), "{}", failed.error);
            assert!(failed.buf.is_some() && begun.elapsed() < SOON);
        } else {
            tokio::time::sleep(Duration::from_millis(800)).await;
            let late = child.all_reduce(vec![1f32; 4 << 20]).await.unwrap_err();
            assert!(
                matches!(late.error, Error::Timeout { rank: 0, .. }) && late.buf.is_some(),
                "{}",
                late.error
            );
        }
    }
    let sum = world.all_reduce(vec![1f32; 1 << 20]).await.unwrap();
    assert!(sum.iter().all(|x| *x == SIZE as f32));
    drop(child);
    let mut again = world.split(u64::from(rank == 1), 0).await.unwrap();
    let size = again.size() as f32;
    assert!(again.all_reduce(vec![1f32; 1 << 20]).await.unwrap().iter().all(|x| *x == size));
    again.close().await.unwrap();
}

pub(crate) async fn child_timeout(me: Me) {
    let mut world = me.connect().await;
    for _ in 0..2 {
        time_out_a_child(&mut world).await;
    }
    world.close().await.unwrap();
    say("well", json!({}));
}

#[test]
fn a_timeout_on_a_child_leaves_the_world_working() {
    let _turn = among_others();
    harness::on_threads(
        harness::world(Link::Local, SIZE),
        |mut w| async move { time_out_a_child(&mut w).await },
    );
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("child_timeout", SIZE, link).start();
        job.ranks.iter().for_each(|r| drop(r.hear("well")));
        job.finish();
    }
}

#[test]
fn calls_far_ahead_of_the_other_rank_are_queued_on_every_link_and_complete() {
    let _turn = among_others();
    const CALLS: usize = 1500;
    for link in [Link::Local, Link::Shm, Link::Tcp] {
        let (tell, told) = std::sync::mpsc::channel();
        let (tell, told) = (
            std::sync::Arc::new(std::sync::Mutex::new(Some(tell))),
            std::sync::Arc::new(std::sync::Mutex::new(told)),
        );
        harness::on_threads(harness::world(link, 2), move |mut comm| {
            let (tell, told) = (tell.clone(), told.clone());
            async move {
                let is_first = comm.rank() == 0;
                if !is_first {
                    told.lock().unwrap().recv_timeout(harness::PATIENCE).unwrap();
                }
                let works: Vec<_> = (0..CALLS).map(|i| comm.all_reduce(vec![i as f32; 100])).collect();
                if is_first {
                    tell.lock().unwrap().take().unwrap().send(()).unwrap();
                }
                for (i, work) in works.into_iter().enumerate() {
                    assert_eq!(work.await.unwrap(), vec![2.0 * i as f32; 100]);
                }
                comm.close().await.unwrap();
            }
        });
    }
}
