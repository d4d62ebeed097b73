//! An optimizer whose state is divided among the ranks gives the same weights as a whole one, to the bit.

use allstream::SharedComm;
use allstream_candle::{DataParallel, Options};
use candle_core::{Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarMap};

use crate::data_parallel::{self, MODEL, rows, var};
use crate::support::{close, numbers, on_deterministic_ranks, on_ranks};

const STEPS: usize = 4;

/// A variable beside those of the small model: of 80 KB, which is too large to share a sharded bucket with others.
const LARGE: (&str, &[usize]) = ("large", &[4, 5_000]);

fn vars() -> VarMap {
    data_parallel::vars(0, &[MODEL[0], MODEL[1], MODEL[2], LARGE])
}

fn loss(vars: &VarMap, rank: usize, cut: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let large = rows(rank).matmul(&var(vars, LARGE.0))?.tanh()?.sum_all()?;
    data_parallel::loss(vars, &rows(rank), cut)? + large
}

/// How a step is made.
#[derive(Clone, Copy)]
struct Way {
    in_segments: bool,
    /// The norm to which gradients are clipped.
    most: Option<f64>,
}

/// Weights after some steps, the norms before clipping, and how many elements this rank's optimizer has.
fn train(comm: &SharedComm, way: Way, is_sharded: bool) -> (Vec<Tensor>, Vec<f64>, usize) {
    let vars = vars();
    let options = Options::default().sharded(is_sharded).compare_every(1);
    let mut parallel = DataParallel::with(comm, &vars, options).unwrap();
    let owned = parallel.owned();
    let elements = owned.iter().map(|var| var.elem_count()).sum();
    let mut optimizer = AdamW::new(owned, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() }).unwrap();
    let mut norms = Vec::new();
    for _ in 0..STEPS {
        let mut grads = if way.in_segments {
            let mut segments = parallel.segments();
            let loss = loss(&vars, comm.rank(), |y| segments.cut(y)).unwrap();
            segments.backward(&loss).unwrap()
        } else {
            let mut grads = loss(&vars, comm.rank(), |y| Ok(y.clone())).unwrap().backward().unwrap();
            parallel.reduce(&mut grads).unwrap();
            grads
        };
        norms.extend(way.most.map(|most| parallel.clip_norm(&mut grads, most).unwrap()));
        optimizer.step(&grads).unwrap();
        parallel.gather().unwrap();
    }
    parallel.compare().unwrap();
    parallel.close().unwrap();
    let names = MODEL.iter().chain([&LARGE]).map(|(name, _)| *name);
    (names.map(|name| var(&vars, name).as_tensor().copy().unwrap()).collect(), norms, elements)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn a_divided_adamw_gives_the_bits_of_a_whole_one_and_keeps_one_nth_of_its_state() {
    let all = vars().all_vars().iter().map(|var| var.elem_count()).sum::<usize>();
    for n in [1, 2, 3] {
        for in_segments in [false, true] {
            let kept = on_deterministic_ranks(n, move |comm| {
                let way = Way { in_segments, most: None };
                let (whole, _, of_whole) = train(&comm, way, false);
                let (divided, _, kept) = train(&comm, way, true);
                assert_eq!(of_whole, all);
                for (whole, divided) in whole.iter().zip(&divided) {
                    assert!(bits(whole) == bits(divided), "{n} ranks, in segments: {in_segments}");
                }
                let start = numbers(0, MODEL[0].1);
                assert!(bits(&whole[0]) != bits(&start), "the optimizer has done nothing");
                kept
            });
            assert_eq!(kept.iter().sum::<usize>(), all, "every element has one owner");
            assert!(kept.iter().all(|kept| *kept <= all / n + 2), "{kept:?} of {all}");
        }
    }
}

#[test]
fn the_norm_is_that_of_the_whole_model() {
    for n in [2, 3] {
        let norms = on_deterministic_ranks(n, |comm| {
            let way = Way { in_segments: false, most: Some(1.0) };
            let (whole, norms, _) = train(&comm, way, false);
            let (divided, found, _) = train(&comm, way, true);
            whole.iter().zip(&divided).for_each(|(whole, divided)| close(whole, divided));
            assert!(norms.iter().all(|norm| *norm > 1.0), "nothing was clipped: {norms:?}");
            for (norm, found) in norms.iter().zip(&found) {
                assert!((found / norm - 1.0).abs() < 1e-5, "{found}, and {norm} of the whole model");
            }
            found.iter().map(|norm| norm.to_bits()).collect::<Vec<_>>()
        });
        assert!(norms.windows(2).all(|two| two[0] == two[1]), "all ranks have the same bits: {norms:?}");
    }
}

#[test]
fn what_would_train_from_old_weights_or_clip_nothing_is_refused() {
    on_ranks(2, |comm| {
        let vars = vars();
        let mut parallel = DataParallel::with(&comm, &vars, Options::default().sharded(true)).unwrap();
        let mut optimizer = AdamW::new(parallel.owned(), ParamsAdamW::default()).unwrap();
        let backward = || loss(&vars, comm.rank(), |y| Ok(y.clone())).unwrap().backward().unwrap();
        let mut grads = backward();
        let error = parallel.clip_norm(&mut grads, 1.0).unwrap_err().to_string();
        assert!(error.contains("reduce the gradients first"), "{error}");
        parallel.reduce(&mut grads).unwrap();
        // If the optimizer's step is skipped, no gather is needed before the next `reduce`.
        let mut grads = backward();
        parallel.reduce(&mut grads).unwrap();
        let whole: Vec<Var> = vars.all_vars();
        assert!(
            whole.iter().all(|var| grads.get(var).is_none()),
            "an optimizer of whole variables gets nothing"
        );
        optimizer.step(&grads).unwrap();
        // The error below ends the communicator on all ranks, so both must have ended the step before.
        comm.barrier().wait().unwrap();
        let error = parallel.reduce(&mut backward()).unwrap_err().to_string();
        assert!(error.contains("call `gather` after each step"), "{error}");
    });
}

#[test]
fn a_variable_that_no_rank_has_a_gradient_of_stays_as_it_is() {
    on_ranks(2, |comm| {
        let vars = data_parallel::vars(0, &[("unused", &[40]), ("used", &[40])]);
        let options = Options::default().sharded(true).unused_variables(true);
        let mut parallel = DataParallel::with(&comm, &vars, options).unwrap();
        let mut optimizer = AdamW::new(parallel.owned(), ParamsAdamW::default()).unwrap();
        let mut grads = var(&vars, "used").sum_all().unwrap().backward().unwrap();
        parallel.reduce(&mut grads).unwrap();
        optimizer.step(&grads).unwrap();
        parallel.gather().unwrap();
        parallel.compare().unwrap();
        let is_changed = |name, seed| bits(&var(&vars, name)) != bits(&numbers(seed, &[40]));
        assert!(!is_changed("unused", 0) && is_changed("used", 1));
    });
}
