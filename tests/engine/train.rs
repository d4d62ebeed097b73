//! Gradient buckets: what comes back, on every link, and what becomes of bad input and of ranks that are lost.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use allstream::train::{Buckets, Options, Param, clip_norm};
use allstream::{AnyBuf, DType, Error, Failed, Lost, bf16};
use futures::FutureExt;
use futures::executor::block_on;

use crate::support::{Ended, each, join, link_env, role, spawn_ranks};

mod compressed;
mod joined;
mod node;
mod sharded;

const LIMIT: Duration = Duration::from_secs(60);
const LINKS: [&str; 3] = ["local", "shm", "tcp"];

/// Elements of each parameter: small ones, which are packed, large ones, which are not, and one of none.
const LENS: [usize; 7] = [3, 20_000, 500, 0, 40_000, 16_384, 1_000];

/// Options with which several parameters share a bucket, and there are several buckets.
fn small_buckets() -> Options {
    Options::default().first_bucket_bytes(1_000).bucket_bytes(100_000)
}

/// The gradient of parameter `i` on a rank, in a step: numbers whose sums and means are exact.
fn grad(rank: usize, i: usize, step: usize) -> Vec<f32> {
    (0..LENS[i]).map(|k| value(rank, i, step, k)).collect()
}

fn value(rank: usize, i: usize, step: usize, k: usize) -> f32 {
    ((rank + 1) * (k % 50 + 1) + 100 * i + 1000 * step) as f32
}

fn layout() -> Vec<Param> {
    LENS.into_iter().map(Param::of::<f32>).collect()
}

/// Pushes all gradients in this `order` and finishes the step; what comes back.
fn step(buckets: &mut Buckets<Vec<f32>>, order: &[usize], grad: impl Fn(usize) -> Vec<f32>) -> Vec<Vec<f32>> {
    for i in order {
        assert!(buckets.push(*i, grad(*i)).unwrap().is_none());
    }
    block_on(buckets.finish()).unwrap().collect()
}

fn invalid<B>(failed: Result<B, impl Into<Error>>, texts: &[&str]) {
    let error: Error = failed.err().expect("an error").into();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let text = error.to_string();
    texts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
}

#[test]
fn buckets_give_what_an_all_reduce_of_each_gives_whatever_the_order() {
    for link in LINKS {
        for n in [1, 2, 3] {
            each(n, link, move |rank, mut comm| {
                let shared = comm.share();
                let mut buckets = block_on(Buckets::with(&shared, &layout(), small_buckets().sum())).unwrap();
                let orders: [[usize; 7]; 4] = [
                    [6, 5, 4, 3, 2, 1, 0],
                    [2, 6, 0, 1, 4, 3, 5],
                    [0, 1, 2, 3, 4, 5, 6],
                    [3, 1, 2, 0, 6, 5, 4],
                ];
                for (number, order) in orders.iter().enumerate() {
                    let mut order = *order;
                    // Ranks need not push in the same order.
                    order.rotate_left(rank);
                    let found = step(&mut buckets, &order, |i| grad(rank, i, number));
                    for (i, found) in found.into_iter().enumerate() {
                        let expected = comm.all_reduce(grad(rank, i, number)).wait().unwrap();
                        assert_eq!(found, expected, "{link}, {n} ranks, step {number}, parameter {i}");
                    }
                    if number == 2 {
                        buckets.relearn();
                    }
                }
                block_on(buckets.close()).unwrap();
            });
        }
    }
}

#[test]
fn the_buffer_that_comes_back_is_the_one_that_was_pushed_and_holds_the_mean() {
    each(2, "local", |rank, comm| {
        let mut buckets = block_on(Buckets::new(&comm.share(), &layout())).unwrap();
        for _ in 0..3 {
            let pushed: Vec<Vec<f32>> = LENS.into_iter().map(|len| vec![rank as f32; len]).collect();
            let at: Vec<_> = pushed.iter().map(|grad| grad.as_ptr()).collect();
            pushed
                .into_iter()
                .enumerate()
                .for_each(|(i, grad)| assert!(buckets.push(i, grad).unwrap().is_none()));
            for (i, grad) in block_on(buckets.finish()).unwrap().enumerate() {
                assert_eq!(grad.as_ptr(), at[i]);
                assert_eq!(grad, vec![0.5; LENS[i]]);
            }
        }
    });
}

#[test]
fn parameters_of_several_types_share_buckets() {
    for link in LINKS {
        each(3, link, move |rank, comm| {
            let layout = [
                Param::of::<f32>(100),
                Param::of::<bf16>(7),
                Param::of::<f64>(30_000),
                Param::new(DType::I32, 5),
                Param::of::<f32>(3),
            ];
            let mut buckets =
                block_on(Buckets::with(&comm.share(), &layout, Options::default().sum())).unwrap();
            for _ in 0..3 {
                let one = rank as u8 + 1;
                buckets.push(3, AnyBuf::new(vec![i32::from(one); 5])).unwrap();
                buckets.push(1, AnyBuf::new(vec![bf16::from_f32(f32::from(one)); 7])).unwrap();
                buckets.push(2, AnyBuf::new(vec![f64::from(one); 30_000])).unwrap();
                buckets.push(0, AnyBuf::new(vec![f32::from(one); 100])).unwrap();
                buckets.push(4, AnyBuf::zeroed(DType::F32, 3).unwrap()).unwrap();
                let all: Vec<AnyBuf> = block_on(buckets.finish()).unwrap().collect();
                assert_eq!(all[0].as_slice::<f32>(), Some(&[6.0; 100][..]));
                assert_eq!(all[1].as_slice::<bf16>(), Some(&[bf16::from_f32(6.0); 7][..]));
                assert_eq!(all[2].as_slice::<f64>(), Some(&[6.0; 30_000][..]));
                assert_eq!(all[3].as_slice::<i32>(), Some(&[6; 5][..]));
                assert_eq!(all[4].as_slice::<f32>(), Some(&[0.0; 3][..]));
            }
        });
    }
}

#[test]
fn a_full_bucket_is_on_its_way_at_once_and_nothing_waits_for_the_others() {
    for link in LINKS {
        let finished = Arc::new(Barrier::new(2));
        each(2, link, move |rank, mut comm| {
            let layout = [Param::of::<f32>(50_000), Param::of::<f32>(10)];
            let options = Options::default().first_bucket_bytes(1);
            let mut buckets = block_on(Buckets::with(&comm.share(), &layout, options)).unwrap();
            for number in 0..2 {
                buckets.push(1, vec![rank as f32; 10]).unwrap();
                if rank == 0 {
                    buckets.push(0, vec![1.0; 50_000]).unwrap();
                }
                // The loop's own collectives do not wait for the bucket that only rank 0 has filled.
                assert_eq!(comm.all_reduce(vec![1_u8]).wait().unwrap(), [2], "{link}");
                if rank == 1 {
                    buckets.push(0, vec![3.0; 50_000]).unwrap();
                }
                // Once the order is learnt (step 1), rank 1 ends its step although rank 0 has only pushed, and not called `finish`.
                if number == 1 && rank == 0 {
                    finished.wait();
                }
                let all: Vec<_> = block_on(buckets.finish()).unwrap().collect();
                assert_eq!(all, [vec![2.0; 50_000], vec![0.5; 10]], "{link}");
            }
            if rank == 1 {
                finished.wait();
            }
        });
    }
}

#[test]
fn micro_batches_add_up_and_their_buffers_come_back() {
    for link in LINKS {
        each(2, link, move |rank, comm| {
            let mut buckets =
                block_on(Buckets::with(&comm.share(), &layout(), small_buckets().sum())).unwrap();
            for number in 0..3 {
                for (i, len) in LENS.into_iter().enumerate() {
                    assert!(buckets.accumulate(i, grad(rank, i, 0)).unwrap().is_none(), "the first is kept");
                    let spare = buckets.accumulate(i, grad(rank, i, 1)).unwrap();
                    assert_eq!(spare, Some(grad(rank, i, 1)), "the second comes back as it was");
                    // Parameters 5 and 6 are only accumulated: `finish` submits them without a push.
                    if i < 5 {
                        assert_eq!(
                            buckets.push(i, grad(rank, i, number)).unwrap().map(|b| b.len()),
                            Some(len)
                        );
                    }
                }
                for (i, found) in block_on(buckets.finish()).unwrap().enumerate() {
                    let sum = |k: usize| -> f32 {
                        let of = |rank| value(rank, i, 0, k) + value(rank, i, 1, k);
                        let last = |rank| if i < 5 { value(rank, i, number, k) } else { 0.0 };
                        (0..2).map(|rank| of(rank) + last(rank)).sum()
                    };
                    assert!(found.iter().enumerate().all(|(k, x)| *x == sum(k)), "{link}: parameter {i}");
                }
            }
        });
    }
}

#[test]
fn what_some_ranks_lack_is_reduced_as_zeros_and_what_all_lack_is_none() {
    for link in LINKS {
        each(3, link, move |rank, comm| {
            let mut buckets =
                block_on(Buckets::with(&comm.share(), &layout(), small_buckets().sum())).unwrap();
            for number in 0..4 {
                // Nobody has parameters 1 and 2, one rank alone has 4 and 6, all have the others.
                let has = |rank: usize, i: usize| match i {
                    1 | 2 => false,
                    4 | 6 => rank == number % 3,
                    _ => true,
                };
                for i in (0..LENS.len()).filter(|i| has(rank, *i)) {
                    buckets.push(i, grad(rank, i, number)).unwrap();
                }
                // What the memory holds before does not matter.
                let memory = |_, param: &Param| vec![7.0; param.len()];
                let all: Vec<_> = block_on(buckets.finish_some(memory)).unwrap().collect();
                for (i, found) in all.into_iter().enumerate() {
                    let ranks: Vec<usize> = (0..3).filter(|rank| has(*rank, i)).collect();
                    let sum = |k: usize| -> f32 { ranks.iter().map(|rank| value(*rank, i, number, k)).sum() };
                    let expected = (!ranks.is_empty()).then(|| (0..LENS[i]).map(sum).collect());
                    assert!(found == expected, "{link}: parameter {i}");
                }
            }
        });
    }
}

#[test]
fn a_mean_by_samples_weighs_ranks_by_their_share() {
    for link in LINKS {
        each(2, link, move |rank, comm| {
            let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets())).unwrap();
            block_on(buckets.weigh([1.0, 3.0][rank])).unwrap();
            let all = step(&mut buckets, &[0, 1, 2, 3, 4, 5, 6], |i| vec![[8.0, 4.0][rank]; LENS[i]]);
            assert!(all.iter().zip(LENS).all(|(found, len)| *found == vec![5.0; len]), "{link}");
            // The weights were for one step only.
            let all = step(&mut buckets, &[0, 1, 2, 3, 4, 5, 6], |i| vec![[8.0, 4.0][rank]; LENS[i]]);
            assert!(all.iter().zip(LENS).all(|(found, len)| *found == vec![6.0; len]), "{link}");
            invalid(block_on(buckets.weigh([1.0, f64::NAN][rank])), &["rank 1", "NaN samples"]);
            invalid(block_on(buckets.weigh(0.0)), &["no rank has any samples"]);
            invalid(block_on(buckets.weigh(f64::MAX)), &["inf samples together"]);
            buckets.push(4, vec![0.0; LENS[4]]).unwrap();
            invalid(block_on(buckets.weigh(1.0)), &["parameter 4 was pushed before"]);
        });
    }
}

#[test]
fn what_does_not_fit_comes_back_and_the_step_goes_on() {
    each(2, "local", |rank, comm| {
        let layout = [Param::of::<f32>(4), Param::of::<f32>(20_000), Param::of::<f32>(4)];
        let mut buckets: Buckets = block_on(Buckets::new(&comm.share(), &layout)).unwrap();
        let floats = |len: usize| AnyBuf::new(vec![rank as f32 * 2.0; len]);
        for _ in 0..2 {
            let refused = buckets.push(3, floats(4)).unwrap_err();
            assert_eq!(
                refused.buf.as_ref().and_then(|buf| buf.as_slice::<f32>()),
                Some(&[rank as f32 * 2.0; 4][..])
            );
            invalid(Err::<(), _>(refused), &["push", "no parameter 3", "has 3, 0..=2"]);
            invalid(buckets.push(0, floats(5)), &["parameter 0 is 5 x f32", "in the layout 4 x f32"]);
            let doubles = buckets.push(1, AnyBuf::new(vec![0_f64; 20_000]));
            invalid(doubles, &["parameter 1 is 20000 x f64", "in the layout 20000 x f32"]);
            invalid(buckets.accumulate(2, floats(0)), &["accumulate", "parameter 2 is 0 x f32"]);
            buckets.push(0, floats(4)).unwrap();
            invalid(buckets.push(0, floats(4)), &["parameter 0 was pushed before in this step"]);
            invalid(buckets.accumulate(0, floats(4)), &["parameter 0 was pushed before"]);
            let failed = block_on(buckets.finish()).map(|_| ()).unwrap_err();
            assert!(failed.buf.is_none(), "the step goes on");
            invalid(Err::<(), _>(failed), &["finish", "2 of 3 parameters", ": 1, 2;"]);
            let short = block_on(buckets.finish_some(|_, _| AnyBuf::new(vec![1_u8]))).map(|_| ());
            invalid(short, &["finish_some", "parameter 1 is 1 x u8"]);
            buckets.push(1, floats(20_000)).unwrap();
            buckets.push(2, floats(4)).unwrap();
            let all: Vec<_> = block_on(buckets.finish()).unwrap().collect();
            assert!(all.iter().all(|grad| grad.as_slice::<f32>().unwrap().iter().all(|x| *x == 1.0)));
        }
        block_on(buckets.close()).unwrap();
    });
}

#[test]
fn layouts_that_differ_are_an_error_on_all_ranks_that_names_one() {
    for link in LINKS {
        each(3, link, move |rank, mut comm| {
            let layout =
                |odd: usize| [Param::of::<f32>(4), Param::of::<f32>(if rank == odd { 9 } else { 8 })];
            let made =
                |layout: &[Param], options| block_on(Buckets::<AnyBuf>::with(&comm.share(), layout, options));
            let options = Options::default();
            let texts = ["parameter 1 is 9 x f32 on rank 2", "and 8 x f32 on rank 0"];
            invalid(made(&layout(2), options), &texts);
            invalid(
                made(&layout(0), options),
                &["parameter 1 is 8 x f32 on rank 1", "and 9 x f32 on rank 0"],
            );
            let longer = &layout(9)[..if rank == 1 { 1 } else { 2 }];
            invalid(made(longer, options), &["number of parameters is 1 on rank 1", "and 2 on rank 0"]);
            let other = if rank == 2 { options.sum() } else { options };
            invalid(made(&layout(9), other), &["reduction", "on rank 2"]);
            invalid(made(&[], options), &["no parameters"]);
            invalid(made(&layout(9), options.bucket_bytes(0)), &["0 bytes"]);
            invalid(made(&[Param::of::<bool>(3)], options), &["parameter 0 is 3 x bool", "no mean"]);
            made(&layout(9), options).unwrap();
            assert_eq!(
                comm.all_reduce(vec![1_u8]).wait().unwrap(),
                [3],
                "{link}: the communicator itself is well"
            );
        });
    }
}

/// Checks that the gradients of the parameters in `pushed`, and no others, have come back.
fn all_back(buf: Option<Vec<Option<Vec<f32>>>>, pushed: &[usize]) {
    let back = buf.expect("the gradients come back");
    let lens: Vec<_> = back.iter().map(|grad| grad.as_ref().map(Vec::len)).collect();
    let expected: Vec<_> =
        LENS.iter().enumerate().map(|(i, len)| pushed.contains(&i).then_some(*len)).collect();
    assert_eq!(lens, expected);
}

/// Rank 2 is gone, after all have pushed two parameters: what the others hear when they push the rest and finish.
fn hears_of_a_loss(buckets: &mut Buckets<Vec<f32>>, rank: usize) -> Error {
    // A rank that hears of the loss while it pushes gets that gradient back, and goes on with the next.
    let mut pushed = vec![6, 5];
    for i in [4, 3, 2, 1, 0] {
        match buckets.push(i, grad(rank, i, 1)) {
            Ok(_) => pushed.push(i),
            Err(failed) => {
                assert_eq!(failed.buf.map(|buf| buf.len()), Some(LENS[i]));
                assert!(matches!(failed.error, Error::PeerLost { .. }), "{}", failed.error);
            }
        }
    }
    let failed = block_on(buckets.finish()).map(|_| ()).unwrap_err();
    assert!(failed.error.to_string().contains("rank 2 (world rank 2)"), "{}", failed.error);
    all_back(failed.buf, &pushed);
    failed.error
}

#[test]
fn a_rank_that_leaves_in_the_middle_is_named_and_all_gradients_come_back() {
    for link in LINKS {
        let called = Arc::new(Barrier::new(3));
        each(3, link, move |rank, comm| {
            let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets())).unwrap();
            step(&mut buckets, &[6, 5, 4, 3, 2, 1, 0], |i| grad(rank, i, 0));
            buckets.push(6, grad(rank, 6, 1)).unwrap();
            buckets.push(5, grad(rank, 5, 1)).unwrap();
            called.wait();
            if rank == 2 {
                drop(buckets);
                return drop(comm);
            }
            let error = hears_of_a_loss(&mut buckets, rank);
            assert!(matches!(error, Error::PeerLost { rank: 2, how: Lost::Left, .. }), "{link}: {error}");
            let again = buckets.push(0, grad(rank, 0, 1)).unwrap_err();
            assert_eq!((again.buf.map(|buf| buf.len()), again.error), (Some(LENS[0]), error));
        });
    }
}

#[test]
fn who_gives_up_gets_all_gradients_and_the_others_hear_why() {
    for link in LINKS {
        let pushed = Arc::new(Barrier::new(2));
        each(2, link, move |rank, mut comm| {
            let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets())).unwrap();
            for i in [6, 5, 4] {
                buckets.push(i, grad(rank, i, 0)).unwrap();
            }
            buckets.accumulate(1, grad(rank, 1, 0)).unwrap();
            pushed.wait();
            if rank == 0 {
                all_back(Some(block_on(buckets.abandon("the loss is NaN"))), &[6, 5, 4, 1]);
            } else {
                let failed = loop {
                    // Until this rank has heard of the abort.
                    match block_on(buckets.finish()).map(|_| ()) {
                        Err(Failed { buf: None, .. }) => std::thread::yield_now(),
                        other => break other.unwrap_err(),
                    }
                };
                assert!(
                    matches!(&failed.error, Error::Aborted { by: 0, reason, .. } if reason == "the loss is NaN")
                );
                all_back(failed.buf, &[6, 5, 4, 1]);
            }
            assert_eq!(
                comm.all_reduce(vec![1_u8]).wait().unwrap(),
                [2],
                "{link}: the communicator itself is well"
            );
        });
    }
}

#[test]
fn a_finish_that_is_dropped_is_called_again() {
    each(2, "local", |rank, comm| {
        let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets().sum())).unwrap();
        for number in 0..3 {
            for i in 0..LENS.len() {
                buckets.push(i, grad(rank, i, number)).unwrap();
            }
            let all = loop {
                let finish = std::pin::pin!(buckets.finish_some(|_, param| vec![0.0; param.len()]));
                // Polled once, then dropped.
                if let Some(all) = finish.now_or_never() {
                    break all.unwrap().collect::<Vec<_>>();
                }
            };
            for (i, found) in all.into_iter().enumerate() {
                let expected =
                    grad(0, i, number).iter().zip(grad(1, i, number)).map(|(a, b)| a + b).collect();
                assert!(found == Some(expected), "parameter {i}");
            }
        }
    });
}

#[test]
fn a_process_that_dies_in_the_middle_of_backward_is_named_and_all_gradients_come_back() {
    if role() {
        let mut comm = join();
        let rank = comm.rank();
        let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets())).unwrap();
        step(&mut buckets, &[6, 5, 4, 3, 2, 1, 0], |i| grad(rank, i, 0));
        buckets.push(6, grad(rank, 6, 1)).unwrap();
        buckets.push(5, grad(rank, 5, 1)).unwrap();
        // Once the barrier has ended on any rank, all have pushed; it may fail on the others, as rank 2 dies then.
        let _ = comm.barrier().wait();
        if rank == 2 {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
        let error = hears_of_a_loss(&mut buckets, rank);
        assert!(matches!(error, Error::PeerLost { rank: 2, how: Lost::Died, .. }), "{error}");
        return;
    }
    let name = "train::a_process_that_dies_in_the_middle_of_backward_is_named_and_all_gradients_come_back";
    for link in ["shm", "tcp"] {
        let ended = spawn_ranks(name, 3, LIMIT, |rank| link_env(link, rank, 3)).wait(LIMIT);
        assert!(ended[..2].iter().all(Ended::success), "{link}: {ended:?}");
    }
}

#[test]
fn a_report_says_where_the_time_of_a_step_went_and_so_does_the_record() {
    for link in LINKS {
        each(2, link, move |rank, comm| {
            let shared = comm.share();
            let mut buckets = block_on(Buckets::with(&shared, &layout(), small_buckets())).unwrap();
            assert!(buckets.report().is_none(), "no step has ended");
            for number in 0..3 {
                step(&mut buckets, &[0, 1, 2, 3, 4, 5, 6], |i| grad(rank, i, 0));
                let report = buckets.report().unwrap();
                assert_eq!(report.step, number);
                assert_eq!(report.buckets.iter().map(|bucket| bucket.params).sum::<usize>(), LENS.len());
                let bytes: usize = report.buckets.iter().map(|bucket| bucket.bytes).sum();
                assert_eq!(bytes, 4 * LENS.iter().sum::<usize>());
                let (mut took, mut hidden) = (Duration::ZERO, Duration::ZERO);
                for bucket in &report.buckets {
                    assert!(
                        bucket.submitted <= bucket.started && bucket.started <= bucket.finished,
                        "{report}"
                    );
                    assert!(bucket.finished <= report.compute + report.exposed, "{report}");
                    assert!(bucket.hidden <= bucket.finished - bucket.started, "{report}");
                    (took, hidden) = (took + bucket.finished - bucket.started, hidden + bucket.hidden);
                }
                assert_eq!((report.communication, report.hidden), (took, hidden));
                let json = serde_json::to_value(&report).unwrap();
                let exposed = json["exposed_us"].as_f64().unwrap();
                assert!((exposed - report.exposed.as_secs_f64() * 1e6).abs() < 1e-6);
            }
            let record = std::fs::read(shared.record().unwrap()).unwrap();
            let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
            let has_steps = |comm: &&serde_json::Value| !comm["steps"].as_array().unwrap().is_empty();
            let comm = record["comms"].as_array().unwrap().iter().find(has_steps).unwrap();
            let steps = comm["steps"].as_array().unwrap();
            assert_eq!(steps.len(), 3);
            let (first, count) = (&steps[2]["first_operation"], steps[2]["operations"].as_u64().unwrap());
            assert_eq!(count as usize, buckets.report().unwrap().buckets.len());
            let operations = comm["operations"].as_array().unwrap();
            let at = operations.iter().position(|operation| operation["number"] == *first).unwrap();
            let last = &operations[at + count as usize - 1];
            assert_eq!(last["state"], "done", "the last bucket had ended when the step had");
            block_on(buckets.close()).unwrap();
        });
    }
}

/// Kilobytes of memory that this process has.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn ten_thousand_steps_take_no_more_memory_than_a_thousand() {
    if role() {
        let comm = join();
        let rank = comm.rank();
        let mut buckets = block_on(Buckets::with(&comm.share(), &layout(), small_buckets())).unwrap();
        let mut grads: Vec<Vec<f32>> = (0..LENS.len()).map(|i| grad(rank, i, 0)).collect();
        let mut after_1000 = 0;
        for number in 0..10_000 {
            for (i, grad) in grads.into_iter().enumerate() {
                assert!(buckets.push(i, grad).unwrap().is_none());
            }
            grads = block_on(buckets.finish()).unwrap().collect();
            if number == 1000 {
                after_1000 = memory();
            }
        }
        let grown = memory().saturating_sub(after_1000);
        assert!(grown < 1024, "rank {rank} has {grown} kB more after 10,000 steps than after 1,000");
        return block_on(buckets.close()).unwrap();
    }
    let name = "train::ten_thousand_steps_take_no_more_memory_than_a_thousand";
    for link in ["shm", "tcp"] {
        let ended = spawn_ranks(name, 2, 2 * LIMIT, |rank| link_env(link, rank, 2)).wait(2 * LIMIT);
        assert!(ended.iter().all(Ended::success), "{link}: {ended:?}");
    }
}

#[test]
fn clipping_gives_all_ranks_the_same_bits_and_refuses_what_is_no_number() {
    let clipped = each(3, "local", |rank, comm| {
        let mut buckets = block_on(Buckets::new(&comm.share(), &layout())).unwrap();
        let all = step(&mut buckets, &[0, 1, 2, 3, 4, 5, 6], |i| grad(rank, i, 0));
        let mut clipped = all.clone();
        let norm = clip_norm(&mut clipped, 2.5).unwrap();
        let length =
            |grads: &[Vec<f32>]| grads.iter().flatten().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        assert!((norm / length(&all) - 1.0).abs() < 1e-9 && (length(&clipped) / 2.5 - 1.0).abs() < 1e-5);
        let mut same = all.clone();
        clip_norm(&mut same, norm * 1.001).unwrap();
        assert!(same == all, "what is short enough stays as it is");
        let mut bad = all.clone();
        bad[4][1234] = f32::NAN;
        invalid(clip_norm(&mut bad, 2.5), &["gradient 4", "NaN"]);
        assert!(bad[..4] == all[..4] && bad[5..] == all[5..], "nothing is changed");
        invalid(clip_norm(&mut bad, 0.0), &["is 0, expected a number above 0"]);
        invalid(clip_norm(&mut [vec![1_i32]], 1.0), &["gradient 0 is 1 x i32"]);
        let mut types = [AnyBuf::new(vec![3.0_f64]), AnyBuf::new(vec![bf16::from_f32(4.0)])];
        assert_eq!(clip_norm(&mut types, 2.5).unwrap(), 5.0);
        assert_eq!(types[1].as_slice::<bf16>(), Some(&[bf16::from_f32(2.0)][..]));
        clipped
    });
    assert!(clipped.windows(2).all(|pair| pair[0] == pair[1]));
}
