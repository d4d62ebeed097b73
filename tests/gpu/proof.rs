//! That these tests see what they are for: on the driver for tests, which does wrong as it is told.

use crate::choice::Bound;
use crate::driver::Driver;
use crate::{Live, World};

const PROCESSES: World = World { short: true, ..World::of(Live::Processes, 2) };
const THREADS: World = World { short: true, ..World::of(Live::Threads, 2) };

/// What came of a world on the driver for tests with these knobs; `None` where there is nothing to judge: in a rank, and with the driver
/// of a machine, which has no knobs.
fn played(test: &str, world: World, knobs: &[(&str, &str)]) -> Option<Result<(), String>> {
    if !crate::support::is_rank() && Driver::chosen() != Driver::ForTests {
        return None;
    }
    world.play(&format!("proof::{test}"), knobs)
}

/// How many wrong results are shown, the count of cases that were wrong, and of all.
fn counts(said: &str) -> (usize, usize, usize) {
    let shown = said.lines().filter(|line| line.starts_with("rank ") && line.contains("case ")).count();
    let head =
        said.lines().find(|line| line.contains("cases were wrong")).unwrap_or_else(|| panic!("{said}"));
    let numbers: Vec<usize> = head.split(' ').filter_map(|word| word.parse().ok()).collect();
    (shown, numbers[0], numbers[1])
}

fn goes_on_past_wrong_values(said: &str) {
    let (shown, wrong, all) = counts(said);
    assert!(shown == 20 && wrong > 10 && wrong < all, "{said}");
    assert!(said.contains(" on rank 0") && said.contains(" on rank 1"), "{said}");
    assert!(!said.contains(" ended at "), "{said}");
}

#[test]
fn wrong_values_are_counted_and_end_no_process() {
    let knobs = [("ALLSTREAM_TEST_CUDA_SPOIL", "copy")];
    if let Some(result) = played("wrong_values_are_counted_and_end_no_process", PROCESSES, &knobs) {
        goes_on_past_wrong_values(&result.unwrap_err());
    }
}

#[test]
fn wrong_values_are_counted_and_end_no_thread() {
    let knobs = [("ALLSTREAM_TEST_CUDA_SPOIL", "copy")];
    if let Some(result) = played("wrong_values_are_counted_and_end_no_thread", THREADS, &knobs) {
        goes_on_past_wrong_values(&result.unwrap_err());
    }
}

/// An operation that fails ends the world, and what was wrong until then is told.
#[test]
fn an_error_ends_a_world_with_what_was_wrong_until_then() {
    let knobs =
        [("ALLSTREAM_TEST_CUDA_SPOIL", "i64"), ("ALLSTREAM_TEST_CUDA_FAIL", "cuLaunchKernel:150:719")];
    if let Some(result) = played("an_error_ends_a_world_with_what_was_wrong_until_then", THREADS, &knobs) {
        let said = result.unwrap_err();
        let (shown, wrong, _) = counts(&said);
        assert!(shown > 0 && wrong > 0, "{said}");
        assert!(said.contains("rank 0 ended at ") && said.contains("cuLaunchKernel"), "{said}");
    }
}

/// Values would be right, by way of the host: not what was to be shown.
#[test]
fn ranks_that_are_staged_fail_with_the_reason() {
    let knobs = [("ALLSTREAM_TEST_CUDA_NO_IPC", "1")];
    if let Some(result) = played("ranks_that_are_staged_fail_with_the_reason", PROCESSES, &knobs) {
        let said = result.unwrap_err();
        assert!(said.contains("Staged") && said.contains("where Peer is expected"), "{said}");
        assert!(said.contains("cuIpcGetMemHandle") && said.contains("NOT_SUPPORTED"), "{said}");
    }
}

#[test]
fn nobody_calls_the_driver_when_processes_end() {
    let knobs = [("ALLSTREAM_TEST_CUDA_EXIT", "abort")];
    if let Some(result) = played("nobody_calls_the_driver_when_processes_end", PROCESSES, &knobs) {
        result.unwrap();
    }
}

#[test]
fn nobody_calls_the_driver_when_a_process_of_threads_ends() {
    let knobs = [("ALLSTREAM_TEST_CUDA_EXIT", "abort")];
    if let Some(result) = played("nobody_calls_the_driver_when_a_process_of_threads_ends", THREADS, &knobs) {
        result.unwrap();
    }
}

/// A program that closes its communicator and returns from `main` knows of no `settle`.
#[test]
fn a_process_that_has_closed_all_ends_without_more() {
    let knobs = [("ALLSTREAM_TEST_CUDA_EXIT", "abort"), (crate::ranks::UNSETTLED, "1")];
    if let Some(result) = played("a_process_that_has_closed_all_ends_without_more", THREADS, &knobs) {
        result.unwrap();
    }
}

#[test]
fn a_process_that_has_closed_all_ends_without_more_by_nccl() {
    let knobs = [("ALLSTREAM_TEST_CUDA_EXIT", "abort"), (crate::ranks::UNSETTLED, "1")];
    let world = World { bound: Bound::Nccl, short: true, ..World::of(Live::Processes, 1) };
    if let Some(result) = played("a_process_that_has_closed_all_ends_without_more_by_nccl", world, &knobs) {
        result.unwrap();
    }
}

/// The NCCL for tests has its ranks in one process.
#[test]
fn one_rank_goes_by_the_nccl_for_tests() {
    let world = World { bound: Bound::Nccl, ..World::of(Live::Processes, 1) };
    if let Some(result) = played("one_rank_goes_by_the_nccl_for_tests", world, &[]) {
        result.unwrap();
    }
}
