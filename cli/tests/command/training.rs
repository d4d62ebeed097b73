//! The examples that train on several ranks: their weights are near those of one process, or near each other. Every run has a deadline.

use crate::examples::{example, run};

/// The numbers that follow these words in the text, in order.
fn numbers(text: &str, words: &str) -> Vec<f64> {
    let after = text.split(words).skip(1);
    after.filter_map(|rest| rest.split([' ', ',', ';', '\n']).next()?.parse().ok()).collect()
}

#[test]
fn a_mesh_trains_as_one_process_does_in_any_order_of_its_axes_and_a_circle_is_named() {
    let (code, stdout, stderr) = run(&example("15_mesh_train"), &[]);
    let what = format!("{stdout}\n{stderr}");
    assert_eq!(code, Some(0), "{what}");
    // Operations on both axes are in flight at once: submitted in one order on all ranks, and then in opposite orders.
    let differences = numbers(&stdout, "largest difference from one process ");
    assert!(differences.len() == 2 && differences.iter().all(|most| *most <= 1e-5), "{what}");
    // Of five meshes with two axes each, the first makes its groups, and the other four take theirs from the pool.
    assert_eq!(stdout.matches("2 groups made, 8 taken from the pool").count(), 2, "{what}");
    // If each rank awaits one axis before it submits to the other, no rank gets through, and each is told who was missing.
    for rank in 0..4 {
        let start = format!("  rank {rank} after ");
        let line = stdout.lines().find(|line| line.starts_with(&start)).unwrap_or_default();
        assert!(line.contains("timed out after 2s: rank "), "rank {rank}: {what}");
        assert!(line.contains("has not called it"), "rank {rank}: {what}");
    }
}

/// A table's rows, cut into cells.
fn rows(text: &str) -> Vec<Vec<&str>> {
    let lines = text.lines().filter(|line| line.starts_with("| "));
    lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

#[test]
fn a_parameter_server_an_all_reduce_and_buckets_give_the_same_weights() {
    let program = example("14_study");
    let small = ["--workers", "1,2,3", "--trials", "2", "--steps", "2", "--layers", "3", "--width", "24"];
    for more in [&["--computing", "real"][..], &["--computing", "sleep"], &["--computing", "communicating"]] {
        let (code, stdout, stderr) = run(&program, &[&small[..], more].concat());
        // The example fails if weights differ by more than 1e-5, on any rank, in any trial.
        assert_eq!(code, Some(0), "{more:?}: {stdout}\n{stderr}");
        let told = "the weights of all systems are within 1e-5 of each other, in every trial";
        assert!(stdout.contains(told), "{more:?}: {stdout}");
        let rows = rows(&stdout);
        assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), ["workers", "1", "2", "3"], "{stdout}");
        assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{stdout}");
    }
}

#[test]
fn the_study_marks_what_is_simulated_and_draws_what_it_prints() {
    let folder = tempfile::tempdir().unwrap();
    let chart = folder.path().join("study.svg");
    let mut args = vec!["--workers", "1,2", "--trials", "1", "--steps", "1", "--width", "16"];
    args.extend(["--simulate", "16", "--latency-us", "40", "--bandwidth", "25e6"]);
    args.extend(["--chart", chart.to_str().unwrap()]);
    let (code, stdout, stderr) = run(&example("14_study"), &args);
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    assert_eq!(rows(&stdout)[3][0], "16 (simulated)", "{stdout}");
    let drawn = std::fs::read_to_string(chart).unwrap();
    for name in ["runtime", "speed-up", "scalability", "parameter server", "all-reduce", "buckets"] {
        assert!(drawn.contains(name), "{name} is not in the chart");
    }
}

#[test]
fn the_study_says_what_is_wrong_with_its_options() {
    let program = example("14_study");
    for (args, told) in [
        (&["--workers", "0"][..], "0 is not in 1.."),
        (&["--simulate", "16"], "--latency-us"),
        (&["--listen", "192.0.2.1", "--workers", "2"], "listen at 192.0.2.1"),
    ] {
        let (code, _, stderr) = run(&program, args);
        assert!(code.is_some_and(|code| code != 0), "{args:?}: {stderr}");
        assert!(stderr.contains(told), "{args:?}: {stderr}");
    }
}
