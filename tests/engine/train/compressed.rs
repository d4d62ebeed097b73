//! Compressed buckets: half the bytes, and what rounding takes is not lost.

use allstream::{SharedComm, f16};

use super::*;

#[test]
fn gradients_are_rounded_and_what_rounding_takes_comes_in_the_next_step() {
    for link in LINKS {
        each(2, link, move |_, comm| {
            let shared = comm.share();
            // A parameter that is packed anyway, one that is packed only to be compressed, and one of another type.
            let layout = [Param::of::<f32>(100), Param::of::<f32>(50_000), Param::of::<f64>(3)];
            let options = Options::default().compress(DType::BF16);
            let mut buckets = block_on(Buckets::<AnyBuf>::with(&shared, &layout, options)).unwrap();
            // `exact` is between two bf16 numbers, at a third of the way: each step gives one of them, and their mean approaches it.
            let exact = 1.0 + 2f32.powi(-7) / 3.0;
            let mut sum = 0.0;
            for number in 1..=30 {
                let grads = [vec![exact; 100], vec![-exact; 50_000]].map(AnyBuf::new);
                for (i, grad) in grads.into_iter().enumerate() {
                    assert!(buckets.push(i, grad).unwrap().is_none());
                }
                assert!(buckets.push(2, AnyBuf::new(vec![1.0 / 3.0; 3])).unwrap().is_none());
                let back: Vec<AnyBuf> = block_on(buckets.finish()).unwrap().collect();
                let (small, large) = (back[0].as_slice::<f32>().unwrap(), back[1].as_slice::<f32>().unwrap());
                assert!([1.0, 1.0 + 2f32.powi(-7)].contains(&small[0]), "{link}: {}", small[0]);
                assert!(small.iter().all(|x| *x == small[0]) && large.iter().all(|x| *x == -small[0]));
                assert_eq!(
                    back[2].as_slice::<f64>(),
                    Some(&[1.0 / 3.0; 3][..]),
                    "other types are sent as they are"
                );
                sum += f64::from(small[0]);
                let off = (sum - f64::from(number as f32) * f64::from(exact)).abs();
                assert!(off <= 2f64.powi(-7), "after {number} steps the sum is off by {off}");
            }
            block_on(buckets.close()).unwrap();
        });
    }
}

/// Five ranks over TCP add small buckets two by two: partial sums are stored in the type that is sent, and must fit it.
#[test]
fn averages_do_not_overflow_in_what_is_sent() {
    each(5, "tcp", |_, comm| {
        let shared = comm.share();
        let layout = [Param::of::<f32>(300), Param::of::<f16>(300)];
        let options = Options::default().compress(DType::F16);
        let mut buckets = block_on(Buckets::<AnyBuf>::with(&shared, &layout, options)).unwrap();
        assert!(buckets.push(0, AnyBuf::new(vec![60_000f32; 300])).unwrap().is_none());
        assert!(buckets.push(1, AnyBuf::new(vec![f16::MAX; 300])).unwrap().is_none());
        let back: Vec<AnyBuf> = block_on(buckets.finish()).unwrap().collect();
        let compressed = back[0].as_slice::<f32>().unwrap();
        assert!(compressed.iter().all(|x| (x - 60_000.0).abs() < 100.0), "{}", compressed[0]);
        let own = back[1].as_slice::<f16>().unwrap();
        assert!(own.iter().all(|x| x.is_finite() && x.to_f32() > 65_000.0), "{}", own[0]);
        block_on(buckets.close()).unwrap();
    });
}

/// Bytes of the operations that reduced gradients, as the flight recorder has them.
fn bytes(shared: &SharedComm, options: Options, rank: usize) -> u64 {
    let mut buckets = block_on(Buckets::with(shared, &layout(), options)).unwrap();
    step(&mut buckets, &[0, 1, 2, 3, 4, 5, 6], |i| grad(rank, i, 0));
    let count = buckets.report().unwrap().buckets.len();
    let record = std::fs::read(shared.record().unwrap()).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let comms = record["comms"].as_array().unwrap();
    let comm = comms.iter().rfind(|comm| !comm["steps"].as_array().unwrap().is_empty()).unwrap();
    let first = &comm["steps"][0]["first_operation"];
    let operations = comm["operations"].as_array().unwrap();
    let at = operations.iter().position(|operation| operation["number"] == *first).unwrap();
    let bytes = operations[at..at + count].iter().map(|operation| operation["bytes"].as_u64().unwrap()).sum();
    block_on(buckets.close()).unwrap();
    bytes
}

#[test]
fn half_as_many_bytes_are_reduced() {
    each(2, "shm", |rank, comm| {
        let shared = comm.share();
        // Every bucket is one buffer, of which the recorder knows the bytes.
        let whole = bytes(&shared, Options::default().bucket_bytes(1).first_bucket_bytes(1), rank);
        let options = Options::default().bucket_bytes(1).first_bucket_bytes(1).compress(DType::F16);
        assert_eq!(bytes(&shared, options, rank) * 2, whole);
    });
}

#[test]
fn what_is_no_number_does_not_stay() {
    each(2, "local", |rank, comm| {
        let shared = comm.share();
        let options = Options::default().sum().compress(DType::F16);
        let mut buckets = block_on(Buckets::with(&shared, &[Param::of::<f32>(3)], options)).unwrap();
        let mut reduce = |grad: Vec<f32>| {
            assert!(buckets.push(0, grad).unwrap().is_none());
            block_on(buckets.finish()).unwrap().next().unwrap()
        };
        let bad = if rank == 0 { vec![f32::NAN, 1e6, 1.0] } else { vec![1.0; 3] };
        let back = reduce(bad);
        assert!(back[0].is_nan() && back[1] == f32::INFINITY && back[2] == 2.0, "{back:?}");
        assert_eq!(reduce(vec![1.0; 3]), [2.0; 3], "the next step knows nothing of it");
        assert!(f16::from_f32(1e6).is_infinite());
    });
}

#[test]
fn types_that_cannot_be_compressed_to_are_refused_on_all_ranks() {
    each(2, "local", |_, comm| {
        let shared = comm.share();
        let with = |options| block_on(Buckets::<Vec<f32>>::with(&shared, &layout(), options)).map(drop);
        invalid(
            with(Options::default().compress(DType::F64)),
            &["cannot be compressed to f64", "bf16 or f16"],
        );
        invalid(with(Options::default().compress(DType::BF16).sharded()), &["both sharded and compressed"]);
    });
}

const PIXELS: usize = 64;
const CLASSES: usize = 10;

/// Images of digits, with their labels; every fifth is held out for testing.
fn digits() -> Vec<([f32; PIXELS], usize)> {
    let lines = include_str!("../../../cli/data/digits.txt").lines();
    let rows = lines.filter_map(|line| line.split_once(' ').filter(|(label, _)| *label != "#"));
    let brightness = |c: char| c.to_digit(17).unwrap() as f32 / 16.0;
    rows.map(|(label, image)| {
        let mut pixels = [0.0; PIXELS];
        pixels.iter_mut().zip(image.chars()).for_each(|(pixel, c)| *pixel = brightness(c));
        (pixels, label.parse().unwrap())
    })
    .collect()
}

fn scores(weights: &[f32], pixels: &[f32; PIXELS]) -> [f32; CLASSES] {
    std::array::from_fn(|class| {
        let row = &weights[class * PIXELS..][..PIXELS];
        row.iter().zip(pixels).map(|(w, x)| w * x).sum()
    })
}

/// The share of held-out digits that softmax regression gets right, after 200 steps on this rank's part of the others.
fn accuracy(shared: &SharedComm, options: Options) -> f64 {
    let digits = digits();
    let (rank, ranks) = (shared.rank(), shared.size());
    let mut buckets =
        block_on(Buckets::with(shared, &[Param::of::<f32>(PIXELS * CLASSES)], options)).unwrap();
    let mut weights = vec![0.0; PIXELS * CLASSES];
    let ours = || digits.iter().enumerate().filter(|(i, _)| i % 5 != 0 && i % ranks == rank).map(|(_, d)| d);
    let count = ours().count() as f32;
    for _ in 0..200 {
        let mut gradient = vec![0.0; PIXELS * CLASSES];
        for (pixels, label) in ours() {
            let scores = scores(&weights, pixels).map(f32::exp);
            let sum: f32 = scores.iter().sum();
            for (class, score) in scores.into_iter().enumerate() {
                let off = (score / sum - f32::from(u8::from(class == *label))) / count;
                let row = &mut gradient[class * PIXELS..][..PIXELS];
                row.iter_mut().zip(pixels).for_each(|(g, x)| *g += off * x);
            }
        }
        assert!(buckets.push(0, gradient).unwrap().is_none());
        let gradient = block_on(buckets.finish()).unwrap().next().unwrap();
        weights.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= 2.0 * g);
    }
    block_on(buckets.close()).unwrap();
    let held_out = || digits.iter().step_by(5);
    let right = |(pixels, label): &&([f32; PIXELS], usize)| {
        let scores = scores(&weights, pixels);
        (0..CLASSES).max_by(|a, b| scores[*a].total_cmp(&scores[*b])) == Some(*label)
    };
    held_out().filter(right).count() as f64 / held_out().count() as f64
}

#[test]
fn the_digits_are_learnt_as_well() {
    each(2, "shm", |rank, comm| {
        let shared = comm.share();
        let whole = accuracy(&shared, Options::default());
        for wire in [DType::BF16, DType::F16] {
            let compressed = accuracy(&shared, Options::default().compress(wire));
            if rank == 0 {
                println!("accuracy on the digits: {whole:.4} by f32, {compressed:.4} by {wire}");
            }
            assert!(whole > 0.9 && compressed > whole - 0.005, "{whole} by f32, {compressed} by {wire}");
        }
    });
}
