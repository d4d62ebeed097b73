//! `Segments`: wherever a model is cut, gradients equal those of candle's backward pass over the whole model, and differences of the loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use allstream_candle::DataParallel;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, Var};
use candle_nn::{VarMap, ops};

use crate::support::{distance, numbers, on_ranks};

/// Rows and columns of the weights and of the input.
const WIDTH: usize = 4;
/// By how much the check by differences moves a weight up and down.
const STEP: f64 = 1e-5;

type Cut<'a> = &'a mut dyn FnMut(&Tensor) -> Result<Tensor>;

/// A loss of three weights and an input, and where it is cut.
type Model = fn([&Tensor; 3], &Tensor, Cut<'_>) -> Result<Tensor>;

/// Each uses a weight or a tensor in several segments, in its own way.
const MODELS: [(&str, Model); 11] = [
    ("one weight in three neighbours", |[a, b, c], x, cut| {
        let y = cut(&x.matmul(a)?.tanh()?)?;
        let y = cut(&y.matmul(a)?.tanh()?)?;
        let y = cut(&y.matmul(a)?.tanh()?)?;
        y.matmul(b)?.matmul(c)?.sqr()?.sum_all()
    }),
    ("one weight in the first and the last segment", |[a, b, c], x, cut| {
        let y = cut(&x.matmul(a)?.tanh()?)?;
        let y = cut(&y.matmul(b)?.tanh()?)?;
        let y = cut(&y.matmul(c)?.tanh()?)?;
        y.matmul(&a.t()?)?.sqr()?.sum_all()
    }),
    ("all weights again in reverse", |[a, b, c], x, cut| {
        let mut y = x.clone();
        for weight in [a, b, c, c, b, a] {
            y = cut(&y.matmul(weight)?.tanh()?)?;
        }
        y.sqr()?.sum_all()
    }),
    ("a cut tensor as a factor in two later segments", |[a, b, c], x, cut| {
        let first = cut(&x.matmul(a)?.tanh()?)?;
        let second = cut(&(first.matmul(b)?.tanh()? * &first)?)?;
        let third = cut(&(second.matmul(c)?.tanh()? * &first)?)?;
        (third * &first)?.sum_all()
    }),
    ("a cut tensor as a summand in two later segments", |[a, b, c], x, cut| {
        let first = cut(&x.matmul(a)?.tanh()?)?;
        let second = cut(&(first.matmul(b)?.tanh()? + &first)?)?;
        let third = cut(&(second.matmul(c)?.tanh()? + &first)?)?;
        (third + &first)?.sqr()?.sum_all()
    }),
    ("a cut tensor times itself, and as a divisor", |[a, b, c], x, cut| {
        let first = cut(&(x.matmul(a)?.sqr()? + 1.0)?)?;
        let second = cut(&first.matmul(b)?.div(&first)?)?;
        let third = cut(&(&second * &second)?.matmul(c)?)?;
        (third / first)?.sqr()?.sum_all()
    }),
    ("a product of two cut tensors with a weight of both", |[a, b, c], x, cut| {
        let left = cut(&x.matmul(a)?.tanh()?)?;
        let right = cut(&x.matmul(b)?.tanh()?)?;
        let both = cut(&left.matmul(&right.t()?)?.matmul(a)?)?;
        (both * right.matmul(b)?)?.matmul(c)?.sqr()?.sum_all()
    }),
    ("attention with one weight for queries, keys and the end", |[a, b, c], x, cut| {
        let y = cut(&x.matmul(c)?)?;
        let (queries, keys) = (y.matmul(a)?, y.matmul(b)?);
        let y = cut(&(ops::softmax(&queries.matmul(&keys.t()?)?, 1)?.matmul(&y)? + &y)?)?;
        share_of_the_first(&y.matmul(a)?)
    }),
    ("a tensor beside its own cut", |[a, b, c], x, cut| {
        let before = x.matmul(a)?.tanh()?;
        let after = cut(&before)?;
        let y = cut(&(after.matmul(b)? * &before)?)?;
        (y.matmul(c)? * before)?.sum_all()
    }),
    ("a weight that is cut, and a cut that is cut again", |[a, b, c], x, cut| {
        let weight = cut(a)?;
        let y = cut(&x.matmul(&weight)?.tanh()?)?;
        let y = cut(&y)?;
        let y = cut(&(y.matmul(&weight)?.matmul(b)? * y.matmul(a)?)?)?;
        y.matmul(c)?.sqr()?.sum_all()
    }),
    ("cuts that the loss does not depend on", |[a, b, c], x, cut| {
        let first = cut(&x.matmul(a)?.tanh()?)?;
        cut(&first.matmul(b)?.matmul(c)?)?;
        let second = cut(&(first.matmul(c)? * &first)?)?;
        cut(&second.matmul(a)?)?;
        second.matmul(a)?.matmul(b)?.sqr()?.sum_all()
    }),
];

/// A loss that is not linear in any element: the negative log-softmax of the first column, summed over all rows.
fn share_of_the_first(y: &Tensor) -> Result<Tensor> {
    ops::log_softmax(y, 1)?.narrow(1, 0, 1)?.sum_all()?.neg()
}

fn f64s(seed: usize) -> Tensor {
    numbers(seed, &[WIDTH, WIDTH]).to_dtype(DType::F64).unwrap()
}

/// The weights, which are the same on all ranks.
fn weights() -> (VarMap, [Var; 3]) {
    let (vars, all) = (VarMap::new(), [1, 2, 3].map(|seed| Var::from_tensor(&f64s(seed)).unwrap()));
    for (name, var) in ["a", "b", "c"].iter().zip(&all) {
        vars.data().lock().unwrap().insert((*name).to_string(), var.clone());
    }
    (vars, all)
}

/// The mean of the losses of all ranks, by candle alone.
fn mean_loss(model: Model, weights: [&Tensor; 3], ranks: usize) -> Tensor {
    let loss = |rank: usize| model(weights, &f64s(70 + rank), &mut |y| Ok(y.clone())).unwrap();
    let sum = (0..ranks).map(loss).reduce(|sum, loss| (sum + loss).unwrap()).unwrap();
    (sum / ranks as f64).unwrap()
}

fn of(grads: &GradStore, weights: &[Var; 3]) -> [Tensor; 3] {
    weights.each_ref().map(|weight| grads.get(weight).unwrap().clone())
}

/// The gradients of all weights by central differences of the loss.
fn by_differences(model: Model, weights: &[Var; 3], ranks: usize) -> [Tensor; 3] {
    [0, 1, 2].map(|which| {
        let values = weights[which].flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let loss = |k: usize, by: f64| {
            let mut values = values.clone();
            values[k] += by;
            let moved = Tensor::from_vec(values, (WIDTH, WIDTH), weights[which].device()).unwrap();
            let mut all = weights.each_ref().map(Var::as_tensor);
            all[which] = &moved;
            mean_loss(model, all, ranks).to_scalar::<f64>().unwrap()
        };
        let slopes = (0..values.len()).map(|k| (loss(k, STEP) - loss(k, -STEP)) / (2.0 * STEP));
        Tensor::from_vec(slopes.collect(), (WIDTH, WIDTH), weights[which].device()).unwrap()
    })
}

#[test]
fn gradients_are_those_of_candle_alone_and_of_differences_of_the_loss() {
    for n in [1, 2] {
        on_ranks(n, move |comm| {
            let (vars, weights) = weights();
            let mut parallel = DataParallel::new(&comm, &vars).unwrap();
            for (name, model) in MODELS {
                let all = weights.each_ref().map(Var::as_tensor);
                let expected = of(&mean_loss(model, all, n).backward().unwrap(), &weights);
                let mut segments = parallel.segments();
                let loss = model(all, &f64s(70 + comm.rank()), &mut |y| segments.cut(y)).unwrap();
                let found = of(&segments.backward(&loss).unwrap(), &weights);
                let differences = by_differences(model, &weights, n);
                for (which, found) in ["a", "b", "c"].iter().zip(&found).enumerate() {
                    let (weight, found) = found;
                    let size = expected[which].abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
                    let (exact, rough) =
                        (distance(found, &expected[which]), distance(found, &differences[which]));
                    assert!(
                        f64::from(exact) <= 1e-12 * size
                            && f64::from(rough) <= 1e-6 * size.max(1.0)
                            && size > 1e-3,
                        "{name}, {n} ranks: the gradient of {weight}, up to {size}, is off by {exact} of candle's, {rough} of differences"
                    );
                }
            }
            parallel.close().unwrap();
        });
    }
}

/// Gives the input unchanged, and counts its backward passes.
struct Counts(Arc<AtomicUsize>);

impl CustomOp1 for Counts {
    fn name(&self) -> &'static str {
        "counts"
    }
    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(Some(grad.clone()))
    }
}

#[test]
fn each_segment_is_differentiated_once() {
    on_ranks(1, |comm| {
        let (vars, [a, b, c]) = weights();
        let counts: [_; 3] = std::array::from_fn(|_| Arc::new(AtomicUsize::new(0)));
        let mut parallel = DataParallel::new(&comm, &vars).unwrap();
        let mut segments = parallel.segments();
        let mut y = f64s(70);
        for (var, count) in [&a, &b, &c].into_iter().zip(&counts) {
            let weight = var.apply_op1(Counts(count.clone())).unwrap();
            y = segments.cut(&y.matmul(&weight).unwrap().tanh().unwrap()).unwrap();
        }
        segments.backward(&y.sqr().unwrap().sum_all().unwrap()).unwrap();
        assert_eq!(counts.map(|count| count.load(Ordering::Relaxed)), [1, 1, 1]);
    });
}
