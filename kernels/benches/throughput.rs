//! How fast reductions run on blocks that fit L2, beside copies. Throughput counts every byte read and every byte written.
//!
//! `cargo bench -p allstream-kernels -- [NAMES]`

#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Duration;

use allstream_kernels::{DType, ReduceOp, copy, reduce, scale};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const BLOCK: usize = 128 << 10;

/// One reduction: type, operator, how many inputs, how many outputs, and whether the first output is the first input (in place).
struct Case(DType, ReduceOp, usize, usize, bool);

fn cases() -> Vec<Case> {
    use ReduceOp::{Max, Prod, Sum};
    let mut cases = vec![
        Case(DType::F32, Sum, 3, 1, false),
        Case(DType::F32, Sum, 8, 1, false),
        Case(DType::F32, Sum, 2, 1, true),
        Case(DType::F32, Sum, 4, 1, true),
        Case(DType::F32, Sum, 4, 2, false),
        Case(DType::I64, Prod, 2, 1, false),
        Case(DType::I8, Prod, 2, 1, false),
    ];
    use DType::{BF16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32};
    for dtype in [F32, F64, BF16, F16, F8E4M3, F8E5M2, I32, I8] {
        cases.extend([2, 4].map(|inputs| Case(dtype, Sum, inputs, 1, false)));
    }
    cases.extend([F32, BF16, F16, F8E4M3, F8E5M2].map(|dtype| Case(dtype, Max, 2, 1, false)));
    cases
}

fn blocks(c: &mut Criterion) {
    // A normal number in every float type, so that no slow subnormals arise.
    let source: Vec<Vec<u8>> = (0..8).map(|_| vec![0x3C; BLOCK]).collect();
    let mut sink: Vec<Vec<u8>> = (0..2).map(|_| vec![0; BLOCK]).collect();
    let sources: Vec<*const u8> = source.iter().map(|b| b.as_ptr()).collect();
    let outs: Vec<*mut u8> = sink.iter_mut().map(|b| b.as_mut_ptr()).collect();
    let mut group = c.benchmark_group("blocks");
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500));
    for n in 1..=2 {
        group.throughput(Throughput::Bytes(((1 + n) * BLOCK) as u64));
        group.bench_function(format!("copy to {n}"), |b| {
            // SAFETY: all buffers are BLOCK bytes and distinct.
            b.iter(|| unsafe { copy(black_box(sources[0]), black_box(&outs[..n]), BLOCK) });
        });
    }
    for Case(dtype, op, inputs, outputs, in_place) in cases() {
        let mut ins = sources[..inputs].to_vec();
        if in_place {
            ins[0] = outs[0];
        }
        let len = BLOCK / dtype.size();
        let place = if in_place { " in place" } else { "" };
        group.throughput(Throughput::Bytes(((inputs + outputs) * BLOCK) as u64));
        group.bench_function(format!("{dtype} {op} {inputs} to {outputs}{place}"), |b| {
            b.iter(|| {
                // SAFETY: all buffers are BLOCK bytes; only whole ones coincide.
                unsafe { reduce(dtype, op, black_box(&ins), black_box(&outs[..outputs]), len, None) }
            });
        });
    }
    group.throughput(Throughput::Bytes(2 * BLOCK as u64));
    for dtype in DType::ALL.into_iter().filter(|d| d.scales()) {
        let len = BLOCK / dtype.size();
        group.bench_function(format!("{dtype} scaled in place"), |b| {
            // By -1, so that numbers change only their sign.
            // SAFETY: a buffer of BLOCK bytes.
            b.iter(|| unsafe { scale(dtype, black_box(outs[0]), len, -1.0) });
        });
    }
    group.finish();
}

criterion_group!(kernels, blocks);
criterion_main!(kernels);
