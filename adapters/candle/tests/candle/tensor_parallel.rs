//! The layers whose weights are divided: the same outputs and gradients as of the whole layers in one process.

use allstream::SharedComm;
use allstream_candle::{ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, shard};
use candle_core::backprop::GradStore;
use candle_core::{Device, Module, Result, Tensor, Var};
use candle_nn::{Embedding, Linear};

use crate::support::{close, numbers, on_ranks};

const RANKS: usize = 2;

/// A variable of this rank's part of a tensor.
fn part(full: &Tensor, dim: usize, comm: &SharedComm) -> Var {
    Var::from_tensor(&shard(full, dim, comm).unwrap()).unwrap()
}

/// The gradient of a rank's part is that part of the gradient of the whole.
fn same_gradient(whole: (&GradStore, &Var), own: (&GradStore, &Var), dim: usize, comm: &SharedComm) {
    let whole = whole.0.get(whole.1.as_tensor()).unwrap();
    close(own.0.get(own.1.as_tensor()).unwrap(), &shard(whole, dim, comm).unwrap());
}

/// Some loss of an output.
fn loss(y: &Tensor) -> Tensor {
    (y.sqr().unwrap() * numbers(77, y.dims())).unwrap().sum_all().unwrap()
}

#[test]
fn an_mlp_of_a_column_and_a_row_parallel_layer_is_the_whole_mlp() {
    on_ranks(RANKS, |comm| {
        let [w1, b1, w2, b2] = [numbers(1, &[8, 4]), numbers(2, &[8]), numbers(3, &[6, 8]), numbers(4, &[6])];
        let whole = [&w1, &b1, &w2, &b2].map(|t| Var::from_tensor(t).unwrap());
        let x = numbers(5, &[2, 3, 4]);
        let of = |v: &Var| v.as_tensor().clone();

        let (x_one, x_own) = (Var::from_tensor(&x).unwrap(), Var::from_tensor(&x).unwrap());
        let first = Linear::new(of(&whole[0]), Some(of(&whole[1])));
        let second = Linear::new(of(&whole[2]), Some(of(&whole[3])));
        let expected = second.forward(&first.forward(&x_one).unwrap().relu().unwrap()).unwrap();

        let own =
            [part(&w1, 0, &comm), part(&b1, 0, &comm), part(&w2, 1, &comm), Var::from_tensor(&b2).unwrap()];
        let first = ColumnParallelLinear::new(of(&own[0]), Some(of(&own[1])), &comm).unwrap();
        let second = RowParallelLinear::new(of(&own[2]), Some(of(&own[3])), &comm).unwrap();
        let y = second.forward(&first.forward(&x_own).unwrap().relu().unwrap()).unwrap();
        close(&y, &expected);

        let (whole_grads, own_grads) = (loss(&expected).backward().unwrap(), loss(&y).backward().unwrap());
        for (i, dim) in [(0, 0), (1, 0), (2, 1)] {
            same_gradient((&whole_grads, &whole[i]), (&own_grads, &own[i]), dim, &comm);
        }
        for (whole, own) in [(&whole[3], &own[3]), (&x_one, &x_own)] {
            close(own_grads.get(own.as_tensor()).unwrap(), whole_grads.get(whole.as_tensor()).unwrap());
        }
    });
}

#[test]
fn a_column_parallel_layer_gathers_its_output_on_every_rank() {
    on_ranks(RANKS, |comm| {
        let w = numbers(1, &[6, 4]);
        let (whole, own) = (Var::from_tensor(&w).unwrap(), part(&w, 0, &comm));
        let x = numbers(2, &[3, 4]);
        let expected = Linear::new(whole.as_tensor().clone(), None).forward(&x).unwrap();
        let layer = ColumnParallelLinear::new(own.as_tensor().clone(), None, &comm).unwrap().gather_output();
        let y = layer.forward(&x).unwrap();
        close(&y, &expected);
        let (whole_grads, own_grads) = (loss(&expected).backward().unwrap(), loss(&y).backward().unwrap());
        same_gradient((&whole_grads, &whole), (&own_grads, &own), 0, &comm);
    });
}

#[test]
fn a_vocabulary_parallel_embedding_is_the_whole_embedding() {
    on_ranks(RANKS, |comm| {
        let w = numbers(1, &[6, 3]);
        let (whole, own) = (Var::from_tensor(&w).unwrap(), part(&w, 0, &comm));
        let ids = Tensor::new(&[[0u32, 5, 2], [3, 3, 1]], &Device::Cpu).unwrap();
        let expected = Embedding::new(whole.as_tensor().clone(), 3).forward(&ids).unwrap();
        let y = VocabParallelEmbedding::new(own.as_tensor().clone(), &comm).unwrap().forward(&ids).unwrap();
        close(&y, &expected);
        let (whole_grads, own_grads) = (loss(&expected).backward().unwrap(), loss(&y).backward().unwrap());
        same_gradient((&whole_grads, &whole), (&own_grads, &own), 0, &comm);
    });
}

#[test]
fn shapes_and_ids_that_do_not_fit_are_refused_with_what_to_do() {
    let refuse = |op: fn(SharedComm) -> Result<Tensor>, parts: &[&str]| {
        for result in on_ranks(RANKS, op) {
            let text = result.unwrap_err().to_string();
            parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in {text}"));
        }
    };
    refuse(|comm| shard(&numbers(0, &[5, 2]), 0, &comm), &["is 5", "a multiple of the number of ranks, 2"]);
    refuse(|comm| shard(&numbers(0, &[4, 2]), 2, &comm), &["dimension 2", "[4, 2]"]);
    refuse(
        |comm| {
            let layer = ColumnParallelLinear::new(numbers(0, &[2, 4]), None, &comm)?;
            layer.forward(&numbers(0, &[3, 5]))
        },
        &["ColumnParallelLinear", "[3, 5]", "the last 4"],
    );
    refuse(
        |comm| {
            let bias = Some(numbers(0, &[4]));
            RowParallelLinear::new(numbers(0, &[2, 4]), bias, &comm)?.forward(&numbers(0, &[3, 4]))
        },
        &["RowParallelLinear", "the bias has shape [4], expected [2]"],
    );
    refuse(
        |comm| {
            let layer = VocabParallelEmbedding::new(numbers(0, &[3, 2]), &comm)?;
            layer.forward(&Tensor::new(&[1u32, 6], &Device::Cpu)?)
        },
        &["id 1 is 6, expected 0..6"],
    );
    refuse(
        |comm| VocabParallelEmbedding::new(numbers(0, &[3, 2]), &comm)?.forward(&numbers(0, &[2])),
        &["the ids are f32, expected integers"],
    );
}
