//! Wakers are other people's code: in some executors, wakers own tasks, and tasks own operations.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use allstream::{Comm, Work};

use super::house::*;

/// A task that owns an operation and is owned by its waker, as in some executors.
#[allow(dead_code)] // It is there to be dropped.
struct Task(Mutex<Option<Work<Vec<f32>>>>);

impl Wake for Task {
    fn wake(self: Arc<Self>) {}
}

fn polled(first: &mut Work<Vec<f32>>, waker: &Waker) {
    for _ in 0..20 {
        assert!(Pin::new(&mut *first).poll(&mut Context::from_waker(waker)).is_pending());
    }
}

/// Polls an operation with a waker that owns a second one of the same communicator, then calls `end`; rank 1 makes `left` calls after that.
fn owned(left: usize, end: fn(Work<Vec<f32>>, &mut [Comm])) {
    within(SOON, move || {
        let mut comms = Comm::local(2).unwrap();
        let mut first = comms[0].all_reduce(vec![1f32; 4]);
        let second = comms[0].all_reduce(vec![1f32; 4]);
        let waker = Waker::from(Arc::new(Task(Mutex::new(Some(second)))));
        polled(&mut first, &waker);
        // From here on, only the table of operations holds the waker.
        drop(waker);
        end(first, &mut comms);
        for _ in 0..left {
            comms[1].all_reduce(vec![1f32; 4]).wait().unwrap();
        }
        // The operation that the waker owned is let go, and its place is free.
        let zero = &comms[0];
        wait_until("all operations end", || zero.stats().in_flight == 0);
    });
}

#[test]
fn a_waker_that_owns_another_operation_is_dropped_with_its_work() {
    owned(2, |first, _| drop(first));
}

#[test]
fn a_waker_that_owns_another_operation_is_replaced_by_a_later_poll() {
    owned(2, |mut first, _| polled(&mut first, Waker::noop()));
}

#[test]
fn a_waker_that_owns_another_operation_is_dropped_as_its_operation_ends() {
    owned(1, |first, comms| {
        comms[1].all_reduce(vec![1f32; 4]).wait().unwrap();
        first.wait().unwrap();
        // Its place is used again: nothing of the earlier operation is left in it.
        drop(comms[0].all_reduce(vec![1f32; 4]));
        drop(comms[1].all_reduce(vec![1f32; 4]));
    });
}
