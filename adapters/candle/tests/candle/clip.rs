//! `clip_norm` of whole gradients: ranks stay together. Of divided ones: sharded.rs.

use allstream_candle::DataParallel;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Linear, Optimizer, SGD, VarBuilder, VarMap, linear};

use crate::data_parallel::{MODEL, var, vars};
use crate::support::{distance, numbers, on_ranks};

const LAYERS: usize = 6;

fn layers() -> (VarMap, Vec<Linear>) {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layers = (0..LAYERS).map(|i| linear(16, 16, vb.pp(i)).unwrap()).collect();
    (vars, layers)
}

fn loss(layers: &[Linear], rank: usize, step: usize) -> Result<Tensor> {
    let x = numbers(rank * 50 + step, &[8, 16]);
    let y = layers.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?;
    (y - 1.0)?.sqr()?.mean_all()
}

/// The root of the sum of all squares.
fn norm(vars: &VarMap, grads: &GradStore) -> f64 {
    let squares = |var: &candle_core::Var| -> Result<f64> {
        grads.get(var).unwrap().to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()
    };
    vars.all_vars().iter().map(|var| squares(var).unwrap()).sum::<f64>().sqrt()
}

#[test]
fn ranks_that_clip_do_not_drift_apart() {
    let norms = on_ranks(4, |comm| {
        let (vars, layers) = layers();
        let mut parallel = DataParallel::new(&comm, &vars).unwrap();
        let mut optimizer = SGD::new(vars.all_vars(), 0.1).unwrap();
        let mut bits = Vec::new();
        for step in 0..20 {
            let mut grads = loss(&layers, comm.rank(), step).unwrap().backward().unwrap();
            parallel.reduce(&mut grads).unwrap();
            let before = norm(&vars, &grads);
            let found = parallel.clip_norm(&mut grads, 0.1).unwrap();
            assert!((found / before - 1.0).abs() < 1e-9, "{found}, and the norm is {before}");
            assert!((norm(&vars, &grads) / before.min(0.1) - 1.0).abs() < 1e-5);
            bits.push(found.to_bits());
            optimizer.step(&grads).unwrap();
        }
        parallel.compare().unwrap();
        bits
    });
    assert!(norms.windows(2).all(|two| two[0] == two[1]), "{norms:?}");
    assert!(norms[0].iter().any(|bits| f64::from_bits(*bits) > 0.1), "nothing was clipped");
}

#[test]
fn a_nan_is_named_on_all_ranks_and_training_goes_on() {
    on_ranks(2, |comm| {
        let vars = vars(0, &MODEL);
        let mut parallel = DataParallel::new(&comm, &vars).unwrap();
        let step = |factor: f32| {
            let sum = MODEL.iter().map(|(name, _)| var(&vars, name).sum_all().unwrap());
            let sum = sum.reduce(|sum, next| (sum + next).unwrap()).unwrap();
            let mut grads = sum.backward().unwrap();
            let b = var(&vars, "b");
            let grad =
                grads.get(&b).unwrap().broadcast_mul(&Tensor::new(factor, &Device::Cpu).unwrap()).unwrap();
            grads.insert(b.as_tensor(), grad);
            grads
        };
        // One rank's infinity is in the mean of all.
        for bad in [f32::INFINITY, f32::NAN] {
            let mut grads = step(if comm.rank() == 1 { bad } else { 1.0 });
            parallel.reduce(&mut grads).unwrap();
            let error = parallel.clip_norm(&mut grads, 0.1).unwrap_err().to_string();
            assert!(
                error.contains("the gradient of b add up to") && error.contains("leave this step out"),
                "{error}"
            );
            let a = grads.get(&var(&vars, "a")).unwrap();
            assert_eq!(distance(a, &a.ones_like().unwrap()), 0.0, "nothing is changed");
        }
        let mut grads = step(1.0);
        parallel.reduce(&mut grads).unwrap();
        for most in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = parallel.clip_norm(&mut grads, most).unwrap_err().to_string();
            assert!(error.contains("expected a number above 0"), "{error}");
        }
        // Elements are all 1: what is short enough stays as it is.
        let elements = MODEL.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>() as f64;
        assert!((parallel.clip_norm(&mut grads, 100.0).unwrap() - elements.sqrt()).abs() < 1e-9);
        let a = grads.get(&var(&vars, "a")).unwrap();
        assert_eq!(distance(a, &a.ones_like().unwrap()), 0.0);
        parallel.close().unwrap();
    });
}
