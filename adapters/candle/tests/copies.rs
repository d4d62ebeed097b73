//! How often an operation copies a tensor. A copy needs memory as large as the tensor, so the memory that is allocated meanwhile is counted.

#[path = "../../../tests/allocations/counting.rs"]
mod counting;
#[path = "candle/support.rs"]
#[expect(dead_code, reason = "the other tests need the rest")]
mod support;

use std::sync::atomic::Ordering;

use allstream::SharedComm;
use allstream_candle::{AllReduce, AllReduceBackward, Broadcast};
use candle_core::{DType, Device, Result, Tensor};
use counting::{BYTES, ON};

const RANKS: usize = 2;
const ELEMENTS: usize = 1 << 20;

/// Copies on each rank, by the memory that both have allocated for one call.
fn copies(call: fn(&SharedComm, &Tensor) -> Result<Tensor>) -> f64 {
    let _alone = counting::alone();
    let bytes = support::on_ranks(RANKS, move |comm| {
        let x = Tensor::ones(ELEMENTS, DType::F32, &Device::Cpu).unwrap();
        // The engine keeps what the first call allocates, so the first is not counted.
        drop(call(&comm, &x).unwrap());
        comm.barrier().wait().unwrap();
        if comm.rank() == 0 {
            BYTES.store(0, Ordering::Relaxed);
            ON.store(true, Ordering::Relaxed);
        }
        comm.barrier().wait().unwrap();
        let out = call(&comm, &x).unwrap();
        comm.barrier().wait().unwrap();
        let bytes = BYTES.load(Ordering::Relaxed);
        comm.barrier().wait().unwrap();
        ON.store(false, Ordering::Relaxed);
        drop(out);
        bytes
    });
    bytes[0] as f64 / (RANKS * ELEMENTS * size_of::<f32>()) as f64
}

#[track_caller]
fn is_about(found: f64, expected: f64) {
    assert!((found - expected).abs() < 0.02, "{found:.3} copies, expected {expected}");
}

#[test]
fn an_operation_with_a_gradient_copies_its_input_once() {
    is_about(copies(|comm, x| x.apply_op1(AllReduce::new(comm))), 1.0);
    is_about(copies(|comm, x| x.apply_op1(AllReduceBackward::new(comm))), 1.0);
    is_about(copies(|comm, x| x.apply_op1(Broadcast::new(comm, 1))), 1.0);
}

#[test]
fn an_operation_in_place_copies_nothing() {
    is_about(copies(|comm, x| x.inplace_op1(&AllReduce::new(comm)).map(|()| x.clone())), 0.0);
    is_about(copies(|comm, x| x.inplace_op1(&Broadcast::new(comm, 0)).map(|()| x.clone())), 0.0);
}
