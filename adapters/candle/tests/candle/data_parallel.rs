//! `DataParallel` and `Segments`: the same gradients as in one process, and what they refuse.

use crate::support::{close, numbers, on_ranks};
use allstream::SharedComm;
use allstream_candle::{DataParallel, Options, cause};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarMap;

/// A map with these variables.
pub(crate) fn vars(seed: usize, named: &[(&str, &[usize])]) -> VarMap {
    let vars = VarMap::new();
    for (i, (name, shape)) in named.iter().enumerate() {
        let var = Var::from_tensor(&numbers(seed + i, shape)).unwrap();
        vars.data().lock().unwrap().insert((*name).to_string(), var);
    }
    vars
}

pub(crate) fn var(vars: &VarMap, name: &str) -> Var {
    vars.data().lock().unwrap()[name].clone()
}

pub(crate) const MODEL: [(&str, &[usize]); 3] = [("a", &[4, 6]), ("b", &[6, 4]), ("c", &[1, 6])];
const ROWS: usize = 4;

/// The input of a rank: each rank has other rows.
pub(crate) fn rows(rank: usize) -> Tensor {
    numbers(70 + rank, &[ROWS, 4])
}

/// The model with `a` used twice (tied), a tensor of the first segment used in the third, and `cut` between segments.
pub(crate) fn loss(
    vars: &VarMap,
    x: &Tensor,
    mut cut: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let (a, b, c) = (var(vars, "a"), var(vars, "b"), var(vars, "c"));
    let first = cut(&x.matmul(&a)?.tanh()?)?;
    let second = cut(&first.matmul(&b)?.tanh()?)?;
    let third = cut(&(second.matmul(&a)? + &first)?)?;
    third.broadcast_mul(&c)?.sqr()?.sum_all()
}

pub(crate) fn gradients(vars: &VarMap, grads: &GradStore) -> Vec<Tensor> {
    MODEL.iter().map(|(name, _)| grads.get(var(vars, name).as_tensor()).unwrap().clone()).collect()
}

/// The mean of the gradients of all ranks, in one process.
fn expected(ranks: usize) -> Vec<Tensor> {
    expected_of(&(0..ranks).collect::<Vec<_>>())
}

/// The same for these ranks only.
pub(crate) fn expected_of(ranks: &[usize]) -> Vec<Tensor> {
    let vars = vars(0, &MODEL);
    let losses = ranks.iter().map(|r| loss(&vars, &rows(*r), |y| Ok(y.clone())).unwrap());
    let sum = losses.reduce(|a, b| (a + b).unwrap()).unwrap();
    gradients(&vars, &(sum / ranks.len() as f64).unwrap().backward().unwrap())
}

#[test]
fn gradients_are_the_mean_over_ranks_in_one_pass_and_in_segments() {
    on_ranks(3, |comm| {
        // Each rank has other weights here, and gets rank 0's.
        let vars = vars(comm.rank() * 7, &MODEL);
        let options = Options::default().compare_every(1);
        let mut parallel = DataParallel::with(&comm, &vars, options).unwrap();
        let x = rows(comm.rank());
        for _ in 0..3 {
            let mut grads = loss(&vars, &x, |y| Ok(y.clone())).unwrap().backward().unwrap();
            parallel.reduce(&mut grads).unwrap();
            gradients(&vars, &grads).iter().zip(&expected(3)).for_each(|(a, b)| close(a, b));

            let mut segments = parallel.segments();
            let loss = loss(&vars, &x, |y| segments.cut(y)).unwrap();
            let grads = segments.backward(&loss).unwrap();
            gradients(&vars, &grads).iter().zip(&expected(3)).for_each(|(a, b)| close(a, b));
        }
        parallel.close().unwrap();
    });
}

#[test]
fn a_segment_that_the_loss_does_not_depend_on_changes_nothing() {
    on_ranks(2, |comm| {
        let vars = vars(0, &MODEL);
        let mut parallel = DataParallel::new(&comm, &vars).unwrap();
        let mut segments = parallel.segments();
        let x = rows(comm.rank());
        let loss = loss(&vars, &x, |y| segments.cut(y)).unwrap();
        segments.cut(&x.matmul(&var(&vars, "a")).unwrap()).unwrap();
        let grads = segments.backward(&loss).unwrap();
        gradients(&vars, &grads).iter().zip(&expected(2)).for_each(|(a, b)| close(a, b));
    });
}

#[test]
fn sixteen_bit_gradients_and_variables_of_integers() {
    on_ranks(2, |comm| {
        let vars = VarMap::new();
        let half = Tensor::full(1f32, 3, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        let count = Tensor::new(&[comm.rank() as i64], &Device::Cpu).unwrap();
        for (name, value) in [("w", half), ("count", count)] {
            vars.data().lock().unwrap().insert(name.into(), Var::from_tensor(&value).unwrap());
        }
        let mut parallel = DataParallel::new(&comm, &vars).unwrap();
        assert_eq!(var(&vars, "count").to_vec1::<i64>().unwrap(), [0], "it is rank 0's");
        let loss =
            (var(&vars, "w").as_tensor() * (1.0 + 2.0 * comm.rank() as f64)).unwrap().sum_all().unwrap();
        let mut grads = loss.backward().unwrap();
        parallel.reduce(&mut grads).unwrap();
        let grad = grads.get(var(&vars, "w").as_tensor()).unwrap();
        assert_eq!(grad.dtype(), DType::BF16);
        assert_eq!(grad.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(), [2.0; 3]);
    });
}

#[test]
fn unused_variables_count_as_zeros_where_that_is_allowed() {
    on_ranks(2, |comm| {
        let vars = vars(0, &[("both", &[2]), ("neither", &[2]), ("of 1", &[2])]);
        let mut parallel =
            DataParallel::with(&comm, &vars, Options::default().unused_variables(true)).unwrap();
        let mut loss = var(&vars, "both").sum_all().unwrap();
        if comm.rank() == 1 {
            loss = (loss + var(&vars, "of 1").sum_all().unwrap()).unwrap();
        }
        let mut grads = loss.backward().unwrap();
        parallel.reduce(&mut grads).unwrap();
        let of = |name| grads.get(var(&vars, name).as_tensor()).map(|g| g.to_vec1::<f32>().unwrap());
        assert_eq!(of("both"), Some(vec![1.0; 2]));
        assert_eq!(of("of 1"), Some(vec![0.5; 2]));
        assert_eq!(of("neither"), None);
    });
}

/// A `DataParallel` for a test in which a rank fails: all ranks have made theirs when this returns, so that none hears of the failure in `new`.
fn made(comm: &SharedComm, vars: &VarMap) -> DataParallel {
    let parallel = DataParallel::new(comm, vars).unwrap();
    comm.barrier().wait().unwrap();
    parallel
}

#[test]
fn a_missing_gradient_is_named_and_nobody_waits_for_it() {
    let texts = on_ranks(2, |comm| {
        let vars = vars(0, &[("used", &[2]), ("unused", &[2])]);
        let mut parallel = made(&comm, &vars);
        let mut loss = var(&vars, "used").sum_all().unwrap();
        if comm.rank() == 1 {
            loss = (loss + var(&vars, "unused").sum_all().unwrap()).unwrap();
        }
        let mut grads = loss.backward().unwrap();
        let error = parallel.reduce(&mut grads).unwrap_err();
        if comm.rank() == 1 {
            assert!(matches!(cause(&error), Some(allstream::Error::Aborted { by: 0, .. })), "{error}");
        }
        let again = parallel.reduce(&mut grads).unwrap_err().to_string();
        assert!(again.contains("a step has failed before"), "{again}");
        comm.barrier().wait().unwrap(); // the communicator that was passed to `new` still works
        error.to_string()
    });
    assert!(texts[0].contains("no gradient in this step for unused"), "{texts:?}");
    assert!(texts[1].contains("no gradient in this step for unused"), "{texts:?}");
}

#[test]
fn a_gradient_that_is_missing_in_segments_is_named_on_all_ranks() {
    let texts = on_ranks(2, |comm| {
        let vars = vars(0, &[("a", &[4, 6]), ("b", &[4, 6])]);
        let mut parallel = made(&comm, &vars);
        let mut segments = parallel.segments();
        let first = segments.cut(&rows(0).matmul(&var(&vars, "a")).unwrap()).unwrap();
        let second = segments.cut(&rows(1).matmul(&var(&vars, "b")).unwrap()).unwrap();
        // Rank 1's loss depends on both cuts, rank 0's on the first only.
        let y = if comm.rank() == 0 { first } else { (first + second).unwrap() };
        segments.backward(&y.sqr().unwrap().sum_all().unwrap()).unwrap_err().to_string()
    });
    assert!(texts.iter().all(|text| text.contains("no gradient in this step for b")), "{texts:?}");
}

/// What every rank is told when `DataParallel` is made from these variables.
fn refusal(comm: &SharedComm, vars: &VarMap) -> String {
    DataParallel::new(comm, vars).unwrap_err().to_string()
}

#[test]
fn models_that_differ_are_refused_on_all_ranks() {
    let shapes = on_ranks(2, |comm| refusal(&comm, &vars(0, &[("w", &[2 + comm.rank(), 3])])));
    for text in &shapes {
        assert!(
            text.contains("on rank 1, a variable is w (f32 [3, 3]), and on rank 0 w (f32 [2, 3])"),
            "{text}"
        );
    }
    let missing = on_ranks(2, |comm| {
        let vars = if comm.rank() == 0 { vars(0, &[("w", &[2])]) } else { VarMap::new() };
        refusal(&comm, &vars)
    });
    assert!(missing[0].contains("there is no variable w, and on rank 0 w (f32 [2])"), "{missing:?}");
    // A variable between others is named, and not the next one. A line break in a name is no difference.
    let between = on_ranks(2, |comm| {
        let all: [(&str, &[usize]); 3] = [("a\nb", &[2]), ("c", &[2]), ("d", &[2])];
        let these = all.iter().copied().filter(|(name, _)| comm.rank() == 0 || *name != "c");
        refusal(&comm, &vars(0, &these.collect::<Vec<_>>()))
    });
    assert!(between.iter().all(|text| text.contains("on rank 1, there is no variable c, ")), "{between:?}");
    let empty = on_ranks(2, |comm| refusal(&comm, &VarMap::new()));
    assert!(empty[1].contains("has no variables"), "{empty:?}");
}

#[test]
fn weights_that_drift_apart_are_named() {
    let texts = on_ranks(5, |comm| {
        let vars = vars(0, &[("a", &[2]), ("b", &[2])]);
        let mut parallel = DataParallel::with(&comm, &vars, Options::default().compare_every(2)).unwrap();
        let step = |parallel: &mut DataParallel| {
            let loss = (var(&vars, "a").sum_all()? + var(&vars, "b").sum_all()?)?;
            parallel.reduce(&mut loss.backward()?)
        };
        step(&mut parallel).unwrap();
        if comm.rank() >= 2 {
            var(&vars, "b").set(&numbers(99, &[2])).unwrap();
        }
        if comm.rank() == 3 {
            var(&vars, "a").set(&numbers(99, &[2])).unwrap();
        }
        step(&mut parallel).unwrap();
        step(&mut parallel).unwrap_err().to_string()
    });
    for text in texts {
        let named =
            "not the same on all ranks after 2 steps: a on rank 3; b on ranks 2, 3, 4: not as on rank 0";
        assert!(text.contains(named), "{text}");
    }
}

#[test]
fn what_does_not_fit_a_variable_or_a_cut_is_refused() {
    on_ranks(1, |comm| {
        let vars = vars(0, &[("a", &[2])]);
        let mut parallel = made(&comm, &vars);
        let a = var(&vars, "a");
        let ids = Tensor::new(&[1u32], &Device::Cpu).unwrap();
        let error = parallel.segments().cut(&ids).unwrap_err().to_string();
        assert!(error.contains("is u32, expected floats"), "{error}");
        let mut grads = a.sum_all().unwrap().backward().unwrap();
        grads.insert(a.as_tensor(), numbers(0, &[3]));
        let error = parallel.reduce(&mut grads).unwrap_err().to_string();
        assert!(error.contains("gradient of a is f32 [3], expected") && error.contains("f32 [2]"), "{error}");
    });
}

#[test]
fn a_report_has_all_variables() {
    on_ranks(2, |comm| {
        let vars = vars(0, &MODEL);
        let mut parallel = DataParallel::new(&comm, &vars).unwrap();
        assert!(parallel.report().is_none(), "no step has ended");
        let mut grads = loss(&vars, &rows(comm.rank()), |y| Ok(y.clone())).unwrap().backward().unwrap();
        parallel.reduce(&mut grads).unwrap();
        let report = parallel.report().unwrap();
        assert_eq!(report.buckets.iter().map(|bucket| bucket.params).sum::<usize>(), MODEL.len());
        parallel.close().unwrap();
    });
}
