use super::*;

fn operation(number: u64, call: &str, state: &str, waiting_for: &[usize]) -> serde_json::Value {
    serde_json::json!({
        "number": number, "call": call, "state": state, "submitted_us": 1e6, "started_us": 1.5e6,
        "finished_us": null, "waiting_for": waiting_for, "bytes_done": 8,
    })
}

fn recording(rank: usize, size: usize, operations: &[serde_json::Value]) -> Recording {
    let members: Vec<usize> = (0..size).collect();
    let value = serde_json::json!({
        "version": 1, "world": "c0ffee", "rank": rank, "size": size, "pid": 100 + rank, "host": "h",
        "written_at_unix_ms": 3000, "cause": null, "unknown": "ignored",
        "comms": [{"id": 0, "name": "world", "rank": rank, "members": members, "poisoned": null,
            "operations": operations}],
    });
    parse(value.to_string().as_bytes()).unwrap()
}

fn findings(report: &Report) -> Vec<&str> {
    report.worlds[0].communicators[0].verdict.iter().map(|finding| finding.text.as_str()).collect()
}

#[test]
fn the_rank_that_has_not_called_is_named() {
    let done = operation(5, "barrier", "done", &[]);
    let open = operation(6, "all_reduce(f32 x 100, sum, direct)", "running", &[2]);
    let files = (0..4).map(|rank| match rank {
        2 => recording(2, 4, std::slice::from_ref(&done)),
        _ => recording(rank, 4, &[open.clone(), done.clone()]),
    });
    let report = merge(files.collect(), None);
    let expected = "rank 2 has not called #6 all_reduce(f32 x 100, sum, direct); ranks 0,1,3 wait for it";
    assert_eq!(findings(&report), [expected]);
    let text = render(&report);
    assert!(text.contains("#6 all_reduce(f32 x 100, sum, direct), running for 1.500 s"), "{text}");
    assert!(text.contains(&format!("=> {expected}")), "{text}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["worlds"][0]["communicators"][0]["verdict"][0]["kind"], "behind");
}

#[test]
fn a_disagreement_is_named_with_both_calls() {
    let files = (0..3).map(|rank| {
        let call = if rank == 1 { "all_reduce(f32 x 8)" } else { "all_reduce(f32 x 9)" };
        recording(rank, 3, &[operation(1, call, "failed", &[])])
    });
    let report = merge(files.collect(), None);
    let expected = "the ranks disagree about #1: rank 1 called all_reduce(f32 x 8); ranks 0,2 called all_reduce(f32 x 9)";
    assert_eq!(findings(&report), [expected]);
}

#[test]
fn a_rank_without_a_file_may_have_died() {
    let open = operation(1, "barrier", "running", &[2]);
    let report = merge(vec![recording(0, 3, std::slice::from_ref(&open)), recording(1, 3, &[open])], None);
    assert_eq!(report.worlds[0].missing, [2]);
    assert_eq!(
        findings(&report),
        [
            "no file from rank 2: it may have died",
            "all called #1 barrier; ranks 0,1 have not finished it, waiting for rank 2"
        ]
    );
}

#[test]
fn point_to_point_numbers_are_not_compared() {
    let files = vec![
        recording(0, 2, &[operation(1, "message(f32 x 8)", "done", &[])]),
        recording(1, 2, &[operation(1, "message(f32 x 9)", "done", &[])]),
    ];
    assert_eq!(findings(&merge(files, None)), ["nothing is under way, and the ranks agree"]);
}

#[test]
fn the_later_of_two_files_of_a_rank_counts() {
    let mut old = recording(0, 1, &[operation(1, "barrier", "running", &[])]);
    old.written_at_unix_ms = 1.0;
    let new = recording(0, 1, &[operation(1, "barrier", "done", &[])]);
    assert_eq!(findings(&merge(vec![new, old], None)), ["nothing is under way, and the ranks agree"]);
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let text = render(&merge(vec![recording(0, 1, &[operation(1, "x\u{1b}[2J\ty", "done", &[])])], None));
    assert!(!text.contains('\u{1b}'));
}

#[test]
fn bad_files_are_refused_with_a_reason() {
    assert!(parse(b"{").unwrap_err().contains("not a flight recorder's file"));
    assert!(parse(b"{\"version\": 2}").unwrap_err().contains("version 2"));
    assert!(parse(b"{\"version\": 1}").unwrap_err().contains("missing field"));
    let error = load(Path::new("/nowhere/at/all.json")).unwrap_err();
    assert!(error.contains("No such file"), "{error}");
}

#[test]
fn runs_of_ranks_are_short() {
    assert_eq!(list(&[0, 1, 2, 3, 7, 9, 10]), "0-3,7,9,10");
}
