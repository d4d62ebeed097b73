//! The example `llama`: divided over two ranks it generates what candle-transformers' model does.

use crate::support::on_ranks;

#[allow(dead_code, reason = "the example's main is not called here")]
#[path = "../../examples/llama.rs"]
mod example;

#[test]
fn a_llama_on_two_ranks_generates_the_tokens_of_one_process() {
    let expected = example::in_one_process().unwrap();
    let different: std::collections::HashSet<u32> = expected.iter().copied().collect();
    assert!(different.len() > 8, "a model that repeats itself would show little: {expected:?}");
    for tokens in on_ranks(2, |comm| example::generate(&comm).unwrap()) {
        assert_eq!(tokens, expected);
    }
}
