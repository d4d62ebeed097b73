//! Ranks as threads, and what tests compare.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use allstream::{Comm, SharedComm};
use candle_core::{Device, Result, Tensor};

/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs `rank` on `n` threads, each a rank of one world, and gives the results by rank. Panics if a rank panics, or does not end in time.
pub(crate) fn on_ranks<R: Send + 'static>(
    n: usize,
    rank: impl Fn(SharedComm) -> R + Clone + Send + 'static,
) -> Vec<R> {
    run(Comm::local(n).unwrap(), rank)
}

/// The same on deterministic communicators: sums have the same bits, whichever collective computes them.
pub(crate) fn on_deterministic_ranks<R: Send + 'static>(
    n: usize,
    rank: impl Fn(SharedComm) -> R + Clone + Send + 'static,
) -> Vec<R> {
    let mut comms = Comm::local(n).unwrap();
    comms.iter_mut().for_each(|comm| comm.set_deterministic(true));
    run(comms, rank)
}

fn run<R: Send + 'static>(
    comms: Vec<Comm>,
    rank: impl Fn(SharedComm) -> R + Clone + Send + 'static,
) -> Vec<R> {
    let (n, (done, results)) = (comms.len(), mpsc::channel());
    for (r, comm) in comms.into_iter().enumerate() {
        let (done, rank) = (done.clone(), rank.clone());
        thread::spawn(move || {
            let result = rank(comm.share());
            let _ = done.send((r, result));
        });
    }
    drop(done);
    let mut all: Vec<(usize, R)> = (0..n)
        .map(|_| results.recv_timeout(DEADLINE).expect("a rank panicked, or did not end in time"))
        .collect();
    all.sort_by_key(|(r, _)| *r);
    all.into_iter().map(|(_, result)| result).collect()
}

/// Small numbers that differ from element to element and from seed to seed.
pub(crate) fn numbers(seed: usize, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i: usize| ((i * 37 + seed * 101) % 41) as f32 / 20.0 - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// The largest difference of two tensors of one shape.
pub(crate) fn distance(a: &Tensor, b: &Tensor) -> f32 {
    let difference = || -> Result<f32> {
        a.sub(b)?.abs()?.flatten_all()?.to_dtype(candle_core::DType::F32)?.max(0)?.to_scalar()
    };
    assert_eq!(a.dims(), b.dims());
    difference().unwrap()
}

/// Asserts that two tensors are the same, but for rounding.
#[track_caller]
pub(crate) fn close(a: &Tensor, b: &Tensor) {
    let distance = distance(a, b);
    assert!(distance <= 1e-5, "they differ by {distance}:\n{a}\n{b}");
}
