//! What operations on devices cost the host: how often the driver is called, and how soon an end is noticed.

use std::sync::Barrier;

use crate::support::{all_calls, bound, child, down, ranks, soon, up};

/// Calls of the driver by a rank for an operation on 4 KB in place, in the steady state: those that enter and leave a context count, too.
/// The operations are awaited one by one, and each begins on all ranks at once.
fn calls_of_an_operation(n: usize, devices: usize) -> Vec<(String, f64)> {
    const OPERATIONS: u64 = 200;
    let all = Barrier::new(n);
    let mut counts = ranks(n, |mut comm| {
        let stream = bound(&mut comm, devices);
        let mut buf = up(&stream, vec![0f32; 1024]);
        let mut before = Vec::new();
        for i in 0..OPERATIONS + 50 {
            if i == 50 {
                all.wait();
                before = all_calls();
            }
            all.wait();
            buf = soon(comm.all_reduce(buf)).unwrap();
        }
        all.wait();
        let after = all_calls();
        all.wait();
        assert!(down(buf).iter().all(|x| *x == 0.0));
        soon(comm.close()).unwrap();
        let each = |count: u64| count as f64 / (OPERATIONS * n as u64) as f64;
        let both = before.into_iter().zip(after);
        let both = both.filter(|(before, after)| before.1 < after.1);
        both.map(|(before, after)| (before.0, each(after.1 - before.1))).collect::<Vec<_>>()
    });
    counts.swap_remove(0)
}

/// A small operation is as expensive as its calls of the driver.
#[test]
fn a_small_operation_makes_few_calls() {
    let two = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("costs::a_small_operation_makes_few_calls", two, || {
        for (n, devices) in [(2, 1), (4, 1), (4, 2), (8, 2)] {
            let calls = calls_of_an_operation(n, devices);
            let sum: f64 = calls.iter().map(|(_, count)| count).sum();
            eprintln!("{n} ranks on {devices} devices: {sum:.2} calls a rank: {calls:.2?}");
            assert!(
                sum <= 9.0,
                "{sum} calls of the driver a rank, with {n} ranks on {devices} devices: {calls:.2?}"
            );
        }
    });
}
