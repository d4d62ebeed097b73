//! Buffers: a model with candle's `batch_norm`, and what becomes of its running statistics.

use allstream_candle::{DataParallel, Options};
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{BatchNorm, Linear, ModuleT, VarBuilder, VarMap, batch_norm, linear};

use crate::data_parallel::var;
use crate::support::{close, distance, numbers, on_ranks};

struct Model(Linear, BatchNorm);

fn model() -> Result<(VarMap, Model)> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = Model(linear(4, 3, vb.pp("l"))?, batch_norm(3, 1e-5, vb.pp("bn"))?);
    var(&vars, "l.weight").set(&numbers(1, &[3, 4]))?;
    var(&vars, "l.bias").set(&numbers(2, &[3]))?;
    Ok((vars, model))
}

impl Model {
    /// The loss of the rows of this rank, in training.
    fn loss(&self, rank: usize) -> Result<Tensor> {
        let y = self.1.forward_t(&self.0.forward(&numbers(70 + rank, &[6, 4]))?, true)?;
        (y - 0.5)?.sqr()?.sqr()?.mean_all()
    }
}

/// The running statistics after one forward pass on the rows of this rank, by candle alone.
fn statistics(rank: usize) -> [Tensor; 2] {
    let (vars, model) = model().unwrap();
    model.loss(rank).unwrap();
    running(&vars)
}

fn running(vars: &VarMap) -> [Tensor; 2] {
    ["bn.running_mean", "bn.running_var"].map(|name| var(vars, name).as_tensor().copy().unwrap())
}

fn all_close(found: &[Tensor; 2], expected: &[Tensor; 2]) {
    found.iter().zip(expected).for_each(|(found, expected)| close(found, expected));
}

/// The mean over all ranks of the gradient of this variable, by candle alone.
fn expected(name: &str, ranks: usize) -> Tensor {
    let of = |rank: usize| {
        let (vars, model) = model().unwrap();
        model.loss(rank).unwrap().backward().unwrap().get(&var(&vars, name)).unwrap().clone()
    };
    let sum = (0..ranks).map(of).reduce(|sum, grad| (sum + grad).unwrap()).unwrap();
    (sum / ranks as f64).unwrap()
}

#[test]
fn running_statistics_are_rank_0s_after_each_step_and_weights_learn() {
    for options in [Options::default(), Options::default().unused_variables(true)] {
        on_ranks(3, move |comm| {
            let (vars, model) = model().unwrap();
            let mut parallel = DataParallel::with(&comm, &vars, options.compare_every(1)).unwrap();
            let names = ["bn.bias", "bn.weight", "l.bias", "l.weight"];
            assert_eq!(parallel.owned().len(), names.len(), "an optimizer gets no buffers");
            let mut grads = model.loss(comm.rank()).unwrap().backward().unwrap();
            parallel.reduce(&mut grads).unwrap();
            names.iter().for_each(|name| close(grads.get(&var(&vars, name)).unwrap(), &expected(name, 3)));
            all_close(&running(&vars), &statistics(0));
            parallel.compare().unwrap();

            let mut segments = parallel.segments();
            let y = segments.cut(&model.0.forward(&numbers(70 + comm.rank(), &[6, 4])).unwrap()).unwrap();
            let y = model.1.forward_t(&y, true).unwrap();
            let loss = (y - 0.5).unwrap().sqr().unwrap().sqr().unwrap().mean_all().unwrap();
            let grads = segments.backward(&loss).unwrap();
            names.iter().for_each(|name| close(grads.get(&var(&vars, name)).unwrap(), &expected(name, 3)));
            parallel.compare().unwrap();
            parallel.close().unwrap();
        });
    }
}

#[test]
fn buffers_are_averaged_or_left_alone_where_that_is_asked_for() {
    on_ranks(3, |comm| {
        let after_a_step = |options: Options| {
            let (vars, model) = model().unwrap();
            let mut parallel = DataParallel::with(&comm, &vars, options).unwrap();
            parallel.reduce(&mut model.loss(comm.rank()).unwrap().backward().unwrap()).unwrap();
            parallel.compare().unwrap();
            running(&vars)
        };
        let all: Vec<[Tensor; 2]> = (0..3).map(statistics).collect();
        let mean = |i: usize| ((&all[0][i] + &all[1][i]).unwrap() + &all[2][i]).unwrap() / 3.0;
        all_close(&after_a_step(Options::default().average_buffers()), &[0, 1].map(|i| mean(i).unwrap()));
        all_close(&after_a_step(Options::default().broadcast_buffers(false)), &all[comm.rank()]);
    });
}

#[test]
fn buffers_that_differ_are_told_apart_from_weights() {
    let texts = on_ranks(3, |comm| {
        let (vars, model) = model().unwrap();
        let parallel = DataParallel::new(&comm, &vars).unwrap();
        model.loss(comm.rank()).unwrap();
        parallel.compare().unwrap_err().to_string()
    });
    for text in texts {
        let named = "the buffers are not: bn.running_mean on ranks 1, 2; bn.running_var on ranks 1, 2: not as on rank 0";
        assert!(text.contains("the weights are the same") && text.contains(named), "{text}");
    }
}

#[test]
fn buffers_have_other_names_too_and_are_saved_and_loaded_whole() {
    let named = || {
        let (vars, model) = model().unwrap();
        for (name, value) in [("ema.shadow", numbers(5, &[2])), ("scale", numbers(6, &[2, 2]))] {
            vars.data().lock().unwrap().insert(name.into(), Var::from_tensor(&value).unwrap());
        }
        let steps = Var::from_tensor(&Tensor::new(&[7i64], &Device::Cpu).unwrap()).unwrap();
        vars.data().lock().unwrap().insert("steps".into(), steps);
        (vars, model)
    };
    let texts = on_ranks(2, move |comm| {
        let (vars, model) = named();
        let options = Options::default().buffer_names(&["shadow", "scale"]);
        let mut parallel = DataParallel::with(&comm, &vars, options).unwrap();
        let shadow = var(&vars, "ema.shadow");
        shadow.set(&numbers(40 + comm.rank(), &[2])).unwrap();
        let steps = var(&vars, "steps");
        steps.set(&Tensor::new(&[8 + comm.rank() as i64], &Device::Cpu).unwrap()).unwrap();
        // The loss depends on a buffer. Its gradient is removed, so that no optimizer changes the buffer.
        let loss = (model.loss(comm.rank()).unwrap() + shadow.sum_all().unwrap()).unwrap();
        let mut grads = loss.backward().unwrap();
        parallel.reduce(&mut grads).unwrap();
        assert!(grads.get(&shadow).is_none());
        assert_eq!(distance(&shadow, &numbers(40, &[2])), 0.0, "it is rank 0's");
        assert_eq!(steps.to_vec1::<i64>().unwrap(), [8], "it is rank 0's");

        let path =
            std::env::temp_dir().join(format!("allstream-candle-{}-{}", std::process::id(), comm.rank()));
        vars.save(&path).unwrap();
        let (mut loaded, _) = named();
        loaded.load(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        all_close(&running(&loaded), &statistics(0));

        let mut unnamed = DataParallel::new(&comm, &vars).unwrap();
        comm.barrier().wait().unwrap();
        let mut grads = model.loss(comm.rank()).unwrap().backward().unwrap();
        let missing = unnamed.reduce(&mut grads).unwrap_err().to_string();
        let other = if comm.rank() == 0 { Options::default() } else { options };
        (missing, DataParallel::with(&comm, &vars, other).err().unwrap().to_string())
    });
    for (missing, differ) in texts {
        assert!(
            missing.contains("ema.shadow, scale") && missing.contains("Options::buffer_names"),
            "{missing}"
        );
        assert!(
            differ.contains("the options are Options")
                && differ.contains("\"shadow\"")
                && differ.contains("give the same Options"),
            "{differ}"
        );
    }
}
