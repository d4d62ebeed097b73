//! Sharded buckets: an optimizer whose state is divided among the ranks gives what the whole one gives.

use allstream::SharedComm;

use super::*;

/// Numbers that change with the rank, with the parameter and with the step, and whose sums are rounded.
fn noise(rank: usize, i: usize, step: usize) -> Vec<f32> {
    let seed = (rank * 31 + i * 17 + step * 7) as f32;
    (0..LENS[i]).map(|k| (seed + k as f32 * 0.37).sin()).collect()
}

/// One step of gradient descent with momentum on these elements.
fn update(weights: &mut [f32], momentum: &mut [f32], grads: &[f32]) {
    for ((weight, momentum), grad) in weights.iter_mut().zip(momentum).zip(grads) {
        *momentum = 0.9 * *momentum + grad;
        *weight -= 0.1 * *momentum;
    }
}

/// Weights after four steps.
fn train(shared: &SharedComm, options: Options, rank: usize, is_sharded: bool) -> Vec<Vec<f32>> {
    let mut buckets = block_on(Buckets::with(shared, &layout(), options)).unwrap();
    let mut weights: Vec<Vec<f32>> = (0..LENS.len()).map(|i| noise(9, i, 9)).collect();
    let mut momentum: Vec<Vec<f32>> = (0..LENS.len()).map(|i| vec![0.0; buckets.owned(i).len()]).collect();
    for number in 0..4 {
        // Not in the layout's order: what a rank owns is the same whatever the order.
        let grads = step(&mut buckets, &[6, 4, 5, 3, 0, 2, 1], |i| noise(rank, i, number));
        for (i, grad) in grads.iter().enumerate() {
            let owned = buckets.owned(i);
            update(&mut weights[i][owned.clone()], &mut momentum[i], &grad[owned]);
        }
        if is_sharded {
            weights = block_on(buckets.gather(weights)).unwrap();
        }
    }
    block_on(buckets.close()).unwrap();
    weights
}

#[test]
fn a_divided_optimizer_gives_the_bits_of_a_whole_one() {
    for link in LINKS {
        for n in [1, 2, 3] {
            each(n, link, move |rank, mut comm| {
                comm.set_deterministic(true);
                let shared = comm.share();
                let whole = train(&shared, small_buckets(), rank, false);
                let divided = train(&shared, small_buckets().sharded(), rank, true);
                for (i, (whole, divided)) in whole.iter().zip(&divided).enumerate() {
                    let bits = |weights: &[f32]| weights.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert!(bits(whole) == bits(divided), "{link}, {n} ranks: parameter {i}");
                }
            });
        }
    }
}

/// A step's gradients by buckets that are not sharded, clipped to norm 2, and their norm before that.
fn clipped_whole(shared: &SharedComm, rank: usize, number: usize) -> (Vec<Vec<f32>>, f64) {
    let mut buckets = block_on(Buckets::with(shared, &layout(), small_buckets())).unwrap();
    let mut grads = step(&mut buckets, &[6, 5, 4, 3, 2, 1, 0], |i| noise(rank, i, number));
    let mut same = grads.clone();
    let norm = clip_norm(&mut grads, 2.0).unwrap();
    assert_eq!(block_on(buckets.clip_norm(&mut same, 2.0)).unwrap(), norm);
    assert!(same == grads, "of buckets that are not sharded both are one");
    (grads, norm)
}

#[test]
fn a_norm_is_that_of_the_whole_model_where_gradients_are_divided() {
    for n in [1, 2, 3] {
        let norms = each(n, "local", |rank, mut comm| {
            comm.set_deterministic(true);
            let shared = comm.share();
            let mut buckets = block_on(Buckets::with(&shared, &layout(), small_buckets().sharded())).unwrap();
            let (whole, norm_of_whole) = clipped_whole(&shared, rank, 5);
            let given = step(&mut buckets, &[6, 5, 4, 3, 2, 1, 0], |i| noise(rank, i, 5));
            let mut clipped = given.clone();
            let norm = block_on(buckets.clip_norm(&mut clipped, 2.0)).unwrap();
            assert!((norm / norm_of_whole - 1.0).abs() < 1e-12, "{norm}, and {norm_of_whole} of the whole");
            for i in 0..LENS.len() {
                let owned = buckets.owned(i);
                for k in 0..LENS[i] {
                    let found = clipped[i][k];
                    if owned.contains(&k) {
                        assert!((found - whole[i][k]).abs() <= 1e-6 * whole[i][k].abs());
                    } else {
                        assert_eq!(found.to_bits(), given[i][k].to_bits(), "this rank does not own it");
                    }
                }
            }
            let mut same = given.clone();
            block_on(buckets.clip_norm(&mut same, norm * 1.001)).unwrap();
            assert!(
                buckets.owned(1).all(|k| same[1][k] == given[1][k]),
                "what is short enough stays as it is"
            );
            norm.to_bits()
        });
        assert!(norms.windows(2).all(|two| two[0] == two[1]), "all ranks have the same bits: {norms:?}");
    }
}

#[test]
fn a_nan_that_one_rank_has_is_named_on_all_and_a_begun_step_is_not_clipped() {
    each(3, "local", |rank, comm| {
        let shared = comm.share();
        let mut buckets = block_on(Buckets::with(&shared, &layout(), small_buckets().sharded())).unwrap();
        let mut grads = step(&mut buckets, &[6, 5, 4, 3, 2, 1, 0], |i| {
            let mut grad = noise(rank, i, 0);
            if i == 4 && rank == 1 {
                grad[39_999] = f32::NAN;
            }
            grad
        });
        let before = grads.clone();
        invalid(
            block_on(buckets.clip_norm(&mut grads, 0.5)),
            &["gradient 4 add up to NaN", "skip this step"],
        );
        let bits = |grads: &[Vec<f32>]| grads.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&grads) == bits(&before), "nothing is changed");
        invalid(block_on(buckets.clip_norm(&mut grads, f64::NAN)), &["is NaN, expected a number above 0"]);
        invalid(block_on(buckets.clip_norm(&mut grads[1..], 1.0)), &["6 gradients", "layout has 7"]);
        buckets.push(2, noise(rank, 2, 1)).unwrap();
        invalid(block_on(buckets.clip_norm(&mut grads, 1.0)), &["parameter 2", "before the first push"]);
    });
}

#[test]
fn ranks_own_every_element_once() {
    each(3, "local", |rank, comm| {
        let shared = comm.share();
        let options = small_buckets().sharded();
        let buckets = block_on(Buckets::<Vec<f32>>::with(&shared, &layout(), options)).unwrap();
        for (i, len) in LENS.into_iter().enumerate() {
            let mut owners = vec![0u32; len];
            owners[buckets.owned(i)].fill(1 << (8 * rank));
            let owners = shared.all_reduce(owners).wait().unwrap();
            assert!(owners.iter().all(|owners| [1, 1 << 8, 1 << 16].contains(owners)), "parameter {i}");
        }
    });
}

#[test]
fn weights_that_do_not_fit_come_back_and_nothing_has_happened() {
    each(2, "shm", |rank, comm| {
        let shared = comm.share();
        let weights = || (0..LENS.len()).map(|i| grad(rank, i, 0)).collect::<Vec<_>>();
        let refused = |buckets: &mut Buckets<Vec<f32>>, weights: Vec<Vec<f32>>, texts: &[&str]| {
            let lens: Vec<usize> = weights.iter().map(Vec::len).collect();
            let failed = block_on(buckets.gather(weights)).unwrap_err();
            let back = failed.buf.unwrap();
            assert!(back.iter().map(|weight| weight.as_ref().unwrap().len()).eq(lens), "all come back");
            let text = failed.error.to_string();
            assert!(matches!(failed.error, Error::Invalid { .. }), "{text}");
            texts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
        };
        let mut whole = block_on(Buckets::with(&shared, &layout(), small_buckets())).unwrap();
        refused(&mut whole, weights(), &["not sharded", "Options::sharded"]);
        let mut buckets = block_on(Buckets::with(&shared, &layout(), small_buckets().sharded())).unwrap();
        refused(&mut buckets, weights()[..6].to_vec(), &["6 weights were given, and the layout has 7"]);
        let mut short = weights();
        short[2].pop();
        refused(&mut buckets, short, &["weight of parameter 2 is 499 x f32, and in the layout 500 x f32"]);
        assert!(buckets.push(3, grad(rank, 3, 0)).unwrap().is_none());
        refused(&mut buckets, weights(), &["parameter 3 has a gradient", "finish the step first"]);
        // A gather that is dropped goes on where it is called again, and until then no step begins.
        step(&mut buckets, &[0, 1, 2, 4, 5, 6], |i| grad(rank, i, 0));
        if rank == 0 {
            assert!(buckets.gather(weights()).now_or_never().is_none(), "the other has not called it");
            invalid(buckets.push(0, grad(rank, 0, 0)), &["a gather of weights has not ended"]);
            shared.barrier().wait().unwrap();
            refused(&mut buckets, weights(), &["the last gather has not ended"]);
        } else {
            shared.barrier().wait().unwrap();
        }
        let given = if rank == 0 { Vec::new() } else { weights() };
        let gathered = block_on(buckets.gather(given)).unwrap();
        for (i, weight) in gathered.iter().enumerate() {
            let of_1 = grad(1, i, 0);
            let differs = weight.iter().zip(grad(0, i, 0)).zip(of_1).find(|((x, a), b)| *x != a && *x != b);
            assert!(differs.is_none() && weight.len() == LENS[i], "parameter {i}");
            let owned = buckets.owned(i);
            assert_eq!(weight[owned.clone()], grad(rank, i, 0)[owned], "what this rank owns is its own");
        }
        block_on(buckets.close()).unwrap();
        block_on(whole.close()).unwrap();
    });
}

/// A gradient of 64 KB or more is not copied into a bucket: while it is reduced, the operation owns it.
#[test]
fn weights_are_not_gathered_while_an_operation_has_all_gradients() {
    each(2, "local", |rank, comm| {
        let shared = comm.share();
        let layout = [Param::of::<f32>(1 << 15)];
        let options = small_buckets().sharded();
        let mut buckets = block_on(Buckets::<Vec<f32>>::with(&shared, &layout, options)).unwrap();
        let ours = vec![rank as f32; 1 << 15];
        assert!(buckets.push(0, ours.clone()).unwrap().is_none());
        let failed = block_on(buckets.gather(vec![ours])).unwrap_err();
        assert!(failed.error.to_string().contains("parameter 0 has a gradient"), "{}", failed.error);
        assert_eq!(failed.buf.unwrap().len(), 1);
        let reduced: Vec<Vec<f32>> = block_on(buckets.finish()).unwrap().collect();
        let owned = buckets.owned(0);
        assert!(reduced[0][owned].iter().all(|x| *x == 0.5), "the step goes on");
        block_on(buckets.close()).unwrap();
    });
}

#[test]
fn a_rank_that_leaves_while_weights_are_gathered_is_named_and_all_weights_come_back() {
    for link in LINKS {
        each(2, link, move |rank, comm| {
            let shared = comm.share();
            let options = small_buckets().sharded();
            let mut buckets = block_on(Buckets::with(&shared, &layout(), options)).unwrap();
            if rank == 1 {
                return;
            }
            let weights: Vec<Vec<f32>> = (0..LENS.len()).map(|i| grad(rank, i, 0)).collect();
            let Failed { buf, error } = block_on(buckets.gather(weights)).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 1, how: Lost::Left, .. }), "{link}: {error}");
            all_back(buf, &[0, 1, 2, 3, 4, 5, 6]);
        });
    }
}

#[test]
fn a_rank_that_does_not_shard_is_named() {
    each(2, "local", |rank, comm| {
        let shared = comm.share();
        let options = if rank == 0 { small_buckets().sharded() } else { small_buckets() };
        let failed = block_on(Buckets::<Vec<f32>>::with(&shared, &layout(), options));
        invalid(failed.map(drop), &["the sharded (1: yes) is 0 on rank 1 (world rank 1) and 1 on rank 0"]);
    });
}
