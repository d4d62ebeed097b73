//! The collectives as operations of candle: results, gradients, types, and what they refuse.

use crate::support::{close, numbers, on_ranks};
use allstream::{ReduceOp, SharedComm};
use allstream_candle::{
    AllGather, AllReduce, AllReduceBackward, Broadcast, ReduceScatter, all_gather, cause, reduce_scatter,
};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, Var};

const RANKS: usize = 3;

/// The inputs of all ranks. Each rank can compute all of them.
fn inputs(shape: &[usize]) -> Vec<Tensor> {
    (0..RANKS).map(|r| numbers(r, shape)).collect()
}

/// The factors by which rank r's loss weighs the elements of its result; they differ between ranks.
fn weights(r: usize, shape: &[usize]) -> Tensor {
    numbers(50 + r, shape)
}

fn sum(tensors: &[Tensor]) -> Tensor {
    tensors[1..].iter().fold(tensors[0].clone(), |sum, t| (sum + t).unwrap())
}

/// The gradient of a variable in the loss `(y * w).sum()`.
fn gradient(var: &Var, y: &Tensor, w: &Tensor) -> Tensor {
    let grads = (y * w).unwrap().sum_all().unwrap().backward().unwrap();
    grads.get(var.as_tensor()).unwrap().clone()
}

#[test]
fn all_reduce_sums_and_its_gradient_is_as_it_comes() {
    on_ranks(RANKS, |comm| {
        let x = Var::from_tensor(&inputs(&[2, 5])[comm.rank()]).unwrap();
        let y = x.apply_op1(AllReduce::new(&comm)).unwrap();
        close(&y, &sum(&inputs(&[2, 5])));
        // The weights of rank 0 on all ranks: the gradient is right only if all compute the same loss.
        close(&gradient(&x, &y, &weights(0, &[2, 5])), &weights(0, &[2, 5]));

        let mean = x.apply_op1(AllReduce::new(&comm).op(ReduceOp::Avg)).unwrap();
        close(&mean, &(sum(&inputs(&[2, 5])) / RANKS as f64).unwrap());
        close(&gradient(&x, &mean, &weights(0, &[2, 5])), &(weights(0, &[2, 5]) / RANKS as f64).unwrap());
    });
}

#[test]
fn all_reduce_backward_sums_gradients() {
    on_ranks(RANKS, |comm| {
        let x = Var::from_tensor(&numbers(9, &[4, 3])).unwrap();
        let y = x.apply_op1(AllReduceBackward::new(&comm)).unwrap();
        close(&y, &x);
        let all: Vec<Tensor> = (0..RANKS).map(|r| weights(r, &[4, 3])).collect();
        close(&gradient(&x, &y, &weights(comm.rank(), &[4, 3])), &sum(&all));
    });
}

/// In one process: the result that all ranks should get, and the gradients of all inputs in the sum of all ranks' losses.
fn gathered_in_one_process(shape: &[usize], dim: usize) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = inputs(shape).iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let all = Tensor::cat(&vars.iter().map(|v| v.as_tensor()).collect::<Vec<_>>(), dim).unwrap();
    let losses: Vec<Tensor> =
        (0..RANKS).map(|r| (&all * weights(r, all.dims())).unwrap().sum_all().unwrap()).collect();
    let grads = sum(&losses).backward().unwrap();
    (all, vars.iter().map(|v| grads.get(v.as_tensor()).unwrap().clone()).collect())
}

#[test]
fn all_gather_is_as_cat_in_one_process_along_any_dimension() {
    on_ranks(RANKS, |comm| {
        for dim in 0..3 {
            let shape = [2, 3, 4];
            let (all, grads) = gathered_in_one_process(&shape, dim);
            let x = Var::from_tensor(&inputs(&shape)[comm.rank()]).unwrap();
            let y = all_gather(&x, AllGather::new(&comm), dim).unwrap();
            close(&y, &all);
            close(&gradient(&x, &y, &weights(comm.rank(), all.dims())), &grads[comm.rank()]);

            let alike = all_gather(&x, AllGather::new(&comm).replicated(), dim).unwrap();
            let len = shape[dim];
            let own = weights(0, all.dims()).narrow(dim, comm.rank() * len, len).unwrap();
            close(&gradient(&x, &alike, &weights(0, all.dims())), &own);
        }
    });
}

#[test]
fn reduce_scatter_is_a_part_of_the_sum_and_its_gradient_is_gathered() {
    on_ranks(RANKS, |comm| {
        for dim in 0..2 {
            let shape = [6, 9];
            let vars: Vec<Var> = inputs(&shape).iter().map(|x| Var::from_tensor(x).unwrap()).collect();
            let all = sum(&vars.iter().map(|v| v.as_tensor().clone()).collect::<Vec<_>>());
            let len = shape[dim] / RANKS;
            let part = |r: usize| all.narrow(dim, r * len, len).unwrap();
            let losses: Vec<Tensor> = (0..RANKS)
                .map(|r| (part(r) * weights(r, part(r).dims())).unwrap().sum_all().unwrap())
                .collect();
            let grads = sum(&losses).backward().unwrap();

            let x = Var::from_tensor(&inputs(&shape)[comm.rank()]).unwrap();
            let y = reduce_scatter(&x, ReduceScatter::new(&comm), dim).unwrap();
            close(&y, &part(comm.rank()));
            let own = gradient(&x, &y, &weights(comm.rank(), y.dims()));
            close(&own, grads.get(vars[comm.rank()].as_tensor()).unwrap());
        }
    });
}

#[test]
fn broadcast_gives_the_roots_and_its_gradient_is_the_roots() {
    on_ranks(RANKS, |comm| {
        let x = Var::from_tensor(&inputs(&[7])[comm.rank()]).unwrap();
        let y = x.apply_op1(Broadcast::new(&comm, 1)).unwrap();
        close(&y, &inputs(&[7])[1]);
        let all: Vec<Tensor> = (0..RANKS).map(|r| weights(r, &[7])).collect();
        let expected =
            if comm.rank() == 1 { sum(&all) } else { Tensor::zeros(7, DType::F32, &Device::Cpu).unwrap() };
        close(&gradient(&x, &y, &weights(comm.rank(), &[7])), &expected);
    });
}

#[test]
fn in_place_a_whole_tensor_and_a_part_of_one() {
    on_ranks(RANKS, |comm| {
        let x = inputs(&[4, 2])[comm.rank()].copy().unwrap();
        x.inplace_op1(&AllReduce::new(&comm)).unwrap();
        close(&x, &sum(&inputs(&[4, 2])));

        let x = inputs(&[4, 2])[comm.rank()].copy().unwrap();
        x.narrow(0, 1, 2).unwrap().inplace_op1(&Broadcast::new(&comm, 2)).unwrap();
        let (own, of_2) = (&inputs(&[4, 2])[comm.rank()], &inputs(&[4, 2])[2]);
        let row = |t: &Tensor, at| t.narrow(0, at, 1).unwrap();
        close(&x, &Tensor::cat(&[row(own, 0), row(of_2, 1), row(of_2, 2), row(own, 3)], 0).unwrap());
    });
}

/// Where the elements of a tensor are.
fn place(x: &Tensor) -> *const f32 {
    match &*x.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(values)) => values.as_ptr(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn in_place_nothing_is_copied_and_else_the_input_stays_as_it_is() {
    on_ranks(RANKS, |comm| {
        let x = inputs(&[40, 50])[comm.rank()].copy().unwrap();
        let before = place(&x);
        let y = x.apply_op1(AllReduce::new(&comm)).unwrap();
        close(&x, &inputs(&[40, 50])[comm.rank()]);
        x.inplace_op1(&AllReduce::new(&comm)).unwrap();
        assert_eq!(place(&x), before);
        close(&x, &y);
    });
}

#[test]
fn every_type_that_both_have_comes_through_all_operations() {
    on_ranks(RANKS, |comm| {
        let r = comm.rank();
        let types = [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64];
        for dtype in types.into_iter().chain([DType::BF16, DType::F16, DType::F32, DType::F64]) {
            let x = Tensor::full(r as u32 + 1, (3, 2), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let first = |t: &Tensor| {
                t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()[0]
            };
            let six = x.apply_op1(AllReduce::new(&comm)).unwrap();
            assert_eq!((six.dtype(), first(&six)), (dtype, 6.0));
            let six = x.apply_op1(ReduceScatter::new(&comm)).unwrap();
            assert_eq!((six.dtype(), six.dims(), first(&six)), (dtype, &[1, 2][..], 6.0));
            let all = x.apply_op1(AllGather::new(&comm)).unwrap();
            assert_eq!((all.dtype(), all.dims(), first(&all)), (dtype, &[9, 2][..], 1.0));
            x.inplace_op1(&Broadcast::new(&comm, 2)).unwrap();
            assert_eq!((x.dtype(), first(&x)), (dtype, 3.0));
        }
    });
}

fn texts<R>(results: Vec<candle_core::Result<R>>) -> Vec<String> {
    results.into_iter().map(|result| result.err().expect("it is refused").to_string()).collect()
}

#[test]
fn a_tensor_that_does_not_fit_is_refused_with_what_to_do() {
    let refuse = |op: fn(SharedComm) -> candle_core::Result<Tensor>, parts: &[&str]| {
        for text in texts(on_ranks(RANKS, op)) {
            parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in {text}"));
        }
    };
    refuse(
        |comm| numbers(0, &[4, 3]).t()?.apply_op1(AllReduce::new(&comm)),
        &["all_reduce", "shape [3, 4] has strides [1, 3]", ".contiguous()"],
    );
    refuse(
        |comm| numbers(0, &[4, 3]).apply_op1(ReduceScatter::new(&comm)),
        &["dimension 0", "[4, 3] is 4", "a multiple of the number of ranks, 3", "pad_with_zeros(0, 0, 2)"],
    );
    refuse(
        |comm| numbers(0, &[1]).squeeze(0)?.apply_op1(AllGather::new(&comm)),
        &["is a scalar", "unsqueeze(0)"],
    );
    refuse(
        |comm| all_gather(&numbers(0, &[4, 3]), AllGather::new(&comm), 2),
        &["dimension 2", "[4, 3] has dimensions 0..2"],
    );
    refuse(
        |comm| {
            let f8 = numbers(0, &[4]).to_dtype(DType::F8E4M3)?;
            f8.apply_op1(AllReduce::new(&comm))
        },
        &["element type that allstream does not have", ".to_dtype("],
    );
    refuse(
        |comm| numbers(0, &[4]).apply_op1(Broadcast::new(&comm, 3)),
        &["broadcast of a tensor of f32 and shape [4]", "3"],
    );
    refuse(
        |comm| {
            let x = Var::from_tensor(&numbers(0, &[4]))?;
            let y = x.apply_op1(AllReduce::new(&comm).op(ReduceOp::Max))?;
            y.sum_all()?.backward()?;
            Ok(y)
        },
        &["max has no gradient", "detach"],
    );
}

#[test]
fn ranks_that_differ_in_shape_type_or_operation_get_an_error() {
    let differ = |op: fn(SharedComm) -> candle_core::Result<Tensor>| {
        let results = on_ranks(2, op);
        assert!(results.iter().all(|result| {
            let error = result.as_ref().expect_err("ranks differ");
            matches!(cause(error), Some(allstream::Error::Mismatch { .. }))
        }));
        texts(results)
    };
    let of_shapes = differ(|comm| {
        let shape = if comm.rank() == 0 { [2, 3] } else { [3, 2] };
        numbers(0, &shape).apply_op1(AllReduce::new(&comm))
    });
    assert!(of_shapes[0].contains("[2, 3]") && of_shapes[1].contains("[3, 2]"), "{of_shapes:?}");
    differ(|comm| numbers(0, &[2 + comm.rank(), 3]).apply_op1(AllGather::new(&comm)));
    differ(|comm| {
        let dtype = if comm.rank() == 0 { DType::F32 } else { DType::F64 };
        numbers(0, &[6]).to_dtype(dtype)?.apply_op1(AllReduce::new(&comm))
    });
    differ(|comm| {
        let x = numbers(0, &[6]);
        if comm.rank() == 0 { x.apply_op1(AllReduce::new(&comm)) } else { x.apply_op1(AllGather::new(&comm)) }
    });
}

#[test]
fn after_a_failure_in_place_the_tensor_still_has_its_elements() {
    on_ranks(2, |comm| {
        comm.abort("enough");
        let x = numbers(0, &[3]);
        let error = x.inplace_op1(&AllReduce::new(&comm)).unwrap_err();
        assert!(error.to_string().contains("enough"), "{error}");
        assert_eq!(x.to_vec1::<f32>().unwrap().len(), 3);
    });
}
