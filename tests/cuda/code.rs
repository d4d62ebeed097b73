//! Which code of ours a device gets: machine code, or PTX that its driver compiles.

use allstream::{Comm, DType, ReduceOp};

use crate::support::{bound, calls, child, down, ranks, soon, up, values};

const LEN: usize = 3000;

/// How often a driver was given each that it took: machine code, and PTX.
fn loads() -> [u64; 2] {
    ["cuModuleLoadData, machine code", "cuModuleLoadData, PTX"].map(calls)
}

/// Kernels of several modules.
fn compute() {
    ranks(2, |mut comm: Comm| {
        let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
        let sums: Vec<f32> = values(0, LEN).iter().zip(values(1, LEN)).map(|(a, b)| a + b).collect();
        assert!(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()) == sums);
        let whole = soon(comm.op(ReduceOp::Max).all_reduce(up(&stream, vec![rank as i16; 9]))).unwrap();
        assert_eq!(down(whole), [1; 9], "{:?}", DType::I16);
        let all = soon(comm.all_gather_into(up(&stream, vec![rank as u8; 3]), up(&stream, vec![9; 6])));
        assert_eq!(down(all.unwrap().1), [0, 0, 0, 1, 1, 1]);
        soon(comm.close()).unwrap();
    });
}

#[test]
fn a_device_gets_our_machine_code() {
    child("code::a_device_gets_our_machine_code", &[], || {
        compute();
        let [code, ptx] = loads();
        assert!(code >= 3 && ptx == 0, "{code} modules of machine code, {ptx} of PTX");
        assert_eq!(calls("cuModuleLoadData"), code, "each was taken at once");
    });
}

/// A driver that is older than the machine code, or newer, compiles the PTX.
#[test]
fn a_driver_that_takes_no_machine_code_of_ours_gets_ptx() {
    let knobs = [("ALLSTREAM_TEST_CUDA_MACHINE_CODE", "0")];
    child("code::a_driver_that_takes_no_machine_code_of_ours_gets_ptx", &knobs, || {
        compute();
        let [code, ptx] = loads();
        assert!(code == 0 && ptx >= 3, "{code} modules of machine code, {ptx} of PTX");
        assert_eq!(calls("cuModuleLoadData"), 2 * ptx, "each was tried as machine code first");
    });
}
