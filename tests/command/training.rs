//! The examples that train on several ranks: their weights are those of one process, and of each other. What they run has a deadline.

use crate::examples::{example, run};

/// The numbers that stand behind these words, in the order of the lines.
fn numbers(text: &str, words: &str) -> Vec<f64> {
    let after = text.split(words).skip(1);
    after.filter_map(|rest| rest.split([' ', ',', ';', '\n']).next()?.parse().ok()).collect()
}

#[test]
fn a_mesh_trains_as_one_process_does_in_any_order_of_its_axes_and_a_circle_is_named() {
    let (code, stdout, stderr) = run(&example("15_mesh_train"), &[]);
    let what = format!("{stdout}\n{stderr}");
    assert_eq!(code, Some(0), "{what}");
    // Both in flight: in the same order on all ranks, and in opposite orders.
    let differences = numbers(&stdout, "largest difference from one process ");
    assert!(differences.len() == 2 && differences.iter().all(|most| *most <= 1e-5), "{what}");
    // Of five meshes of two axes the first is made, and the others are taken up.
    assert_eq!(stdout.matches("2 groups made, 8 taken from the pool").count(), 2, "{what}");
    // One awaited before the other is submitted: nobody comes through, and each rank hears who was missing.
    for rank in 0..4 {
        let start = format!("  rank {rank} after ");
        let line = stdout.lines().find(|line| line.starts_with(&start)).unwrap_or_default();
        assert!(line.contains("timed out after 2s: rank "), "rank {rank}: {what}");
        assert!(line.contains("has not called it"), "rank {rank}: {what}");
    }
}
