//! How fast reductions run on blocks that fit L2, beside memcpy. Traffic counts every byte
//! read and every byte written.

use std::hint::black_box;
use std::time::{Duration, Instant};

use allstream_kernels::{DType, ReduceOp, copy, reduce, scale};

const BLOCK: usize = 128 << 10;

/// Seconds of one call: the best of several rounds, which others on the machine disturb.
fn seconds(budget: Duration, mut call: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    let start = Instant::now();
    while best.is_infinite() || start.elapsed() < budget {
        let round = Instant::now();
        for _ in 0..32 {
            call();
        }
        best = best.min(round.elapsed().as_secs_f64() / 32.0);
    }
    best
}

fn report(what: &str, buffers: usize, seconds: f64) {
    let rate = |bytes: usize| bytes as f64 / seconds / 1e9;
    let (traffic, output) = (rate(buffers * BLOCK), rate(BLOCK));
    let micros = seconds * 1e6;
    println!("{what:<28} {micros:8.2} us  {traffic:7.1} GB/s traffic  {output:6.1} GB/s a buffer");
}

fn main() {
    // `cargo test --benches` runs this too, without `--bench`: once through is enough.
    let measure = std::env::args().any(|arg| arg == "--bench");
    let budget = Duration::from_millis(if measure { 200 } else { 0 });
    // A normal number in every float type, so that no slow subnormals arise.
    let source: Vec<Vec<u8>> = (0..8).map(|_| vec![0x3C; BLOCK]).collect();
    let mut sink: Vec<Vec<u8>> = (0..2).map(|_| vec![0; BLOCK]).collect();
    let ins: Vec<*const u8> = source.iter().map(|b| b.as_ptr()).collect();
    let outs: Vec<*mut u8> = sink.iter_mut().map(|b| b.as_mut_ptr()).collect();

    for n in 1..=2 {
        // SAFETY: all buffers are BLOCK bytes and distinct.
        let call = || unsafe { copy(black_box(ins[0]), black_box(&outs[..n]), BLOCK) };
        report(&format!("copy to {n}"), 1 + n, seconds(budget, call));
    }
    let reduction = |dtype: DType, op: ReduceOp, k: usize, n: usize, in_place: bool| {
        let mut ins = ins[..k].to_vec();
        if in_place {
            ins[0] = outs[0];
        }
        let len = BLOCK / dtype.size();
        // SAFETY: all buffers are BLOCK bytes; only whole ones coincide.
        let call = || unsafe { reduce(dtype, op, black_box(&ins), black_box(&outs[..n]), len, None) };
        let place = if in_place { " in place" } else { "" };
        let what = format!("{dtype} {op} {k} to {n}{place}");
        report(&what, k + n, seconds(budget, call));
    };
    for k in [2, 3, 4, 8] {
        reduction(DType::F32, ReduceOp::Sum, k, 1, false);
    }
    reduction(DType::F32, ReduceOp::Sum, 2, 1, true);
    reduction(DType::F32, ReduceOp::Sum, 4, 1, true);
    reduction(DType::F32, ReduceOp::Sum, 4, 2, false);
    for dtype in [DType::F64, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2, DType::I32, DType::I8] {
        for k in [2, 4] {
            reduction(dtype, ReduceOp::Sum, k, 1, false);
        }
    }
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2] {
        reduction(dtype, ReduceOp::Max, 2, 1, false);
    }
    reduction(DType::I64, ReduceOp::Prod, 2, 1, false);
    reduction(DType::I8, ReduceOp::Prod, 2, 1, false);
    for dtype in DType::ALL.into_iter().filter(|d| d.scales()) {
        let len = BLOCK / dtype.size();
        // By -1, so that numbers stay what they are.
        // SAFETY: a buffer of BLOCK bytes.
        let call = || unsafe { scale(dtype, black_box(outs[0]), len, -1.0) };
        report(&format!("{dtype} scaled in place"), 2, seconds(budget, call));
    }
}
