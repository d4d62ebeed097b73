//! The example `gpt`: in segments on 2 and 4 ranks the same weights as in one process.

use crate::support::{close, on_ranks};

#[allow(dead_code, reason = "the example's main is not called here")]
#[path = "../../examples/gpt.rs"]
mod example;

#[test]
fn a_gpt_in_segments_learns_as_in_one_process() {
    let one = on_ranks(1, |comm| example::train(&comm).unwrap()).remove(0);
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (begin, end) = (mean(&one.losses[..5]), mean(&one.losses[one.losses.len() - 5..]));
    assert!(end < 0.8 * begin, "the loss was {begin}, and is {end}");
    for n in [2, 4] {
        for rank in on_ranks(n, |comm| example::train(&comm).unwrap()) {
            assert_eq!(rank.weights.len(), one.weights.len());
            for (name, weight) in &rank.weights {
                let (_, of_one) = one.weights.iter().find(|(other, _)| other == name).unwrap();
                close(weight, of_one);
            }
        }
    }
}
