//! The example `gpt`: in segments on 1, 2 and 4 ranks the same weights as by candle alone.

use allstream::{DType, train};
use allstream_candle::Options;

use crate::support::{close, on_ranks};

#[allow(dead_code, reason = "the example's main is not called here")]
#[path = "../../examples/gpt.rs"]
mod example;

const STEPS: usize = 100;

/// The mean loss of the last steps, over all ranks.
fn last_loss(ranks: &[example::Trained]) -> f32 {
    let last = ranks.iter().flat_map(|rank| &rank.losses[rank.losses.len() - 20..]);
    last.sum::<f32>() / (20 * ranks.len()) as f32
}

#[test]
fn a_gpt_whose_gradients_are_sent_in_16_bits_learns_as_well() {
    let train = |wire: Option<DType>| {
        let options = train::Options::default();
        let options = wire.map_or(options, |wire| options.compress(wire));
        let train = move |comm| example::train(&comm, STEPS, Options::default().buckets(options)).unwrap();
        last_loss(&on_ranks(2, train))
    };
    let (whole, rounded) = (train(None), train(Some(DType::BF16)));
    assert!(rounded <= 1.01 * whole, "the loss is {rounded}, and {whole} without rounding");
}

#[test]
fn a_gpt_in_segments_learns_as_by_candle_alone() {
    let one = example::train_alone(STEPS).unwrap();
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (begin, end) = (mean(&one.losses[..5]), mean(&one.losses[one.losses.len() - 5..]));
    assert!(end < 0.8 * begin, "the loss was {begin}, and is {end}");
    for n in [1, 2, 4] {
        for rank in on_ranks(n, |comm| example::train(&comm, STEPS, Options::default()).unwrap()) {
            assert_eq!(rank.weights.len(), one.weights.len());
            for (name, weight) in &rank.weights {
                let (_, of_one) = one.weights.iter().find(|(other, _)| other == name).unwrap();
                close(weight, of_one);
            }
        }
    }
}
