//! The example `digits`: as good on several ranks as in one process, and with the same weights.

#[allow(dead_code, reason = "the example's main is not called here")]
#[path = "../../examples/digits.rs"]
mod example;

use crate::support::{close, on_ranks};

#[test]
fn four_ranks_learn_digits_as_one_process_does() {
    let one = on_ranks(1, |comm| example::train(&comm).unwrap()).remove(0);
    assert!(one.accuracy > 0.9, "{}", one.accuracy);
    for rank in on_ranks(4, |comm| example::train(&comm).unwrap()) {
        assert_eq!(rank.weights.len(), 4);
        for (name, weight) in &rank.weights {
            let (_, of_one) = one.weights.iter().find(|(other, _)| other == name).unwrap();
            close(weight, of_one);
        }
    }
}
