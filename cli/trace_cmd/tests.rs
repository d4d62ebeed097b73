use super::ranks::list;
use super::*;

const TIMES: Wanted<'_> = Wanted { times: Some(None), overlap: false, asked: false };

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
    let report = merge(files.collect(), &Wanted::default());
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
    let report = merge(files.collect(), &Wanted::default());
    let expected = "the ranks disagree about #1: rank 1 called all_reduce(f32 x 8); ranks 0,2 called all_reduce(f32 x 9)";
    assert_eq!(findings(&report), [expected]);
}

#[test]
fn a_rank_without_a_file_may_have_died() {
    let open = operation(1, "barrier", "running", &[2]);
    let report = merge(
        vec![recording(0, 3, std::slice::from_ref(&open)), recording(1, 3, &[open])],
        &Wanted::default(),
    );
    assert_eq!(report.worlds[0].missing, [2]);
    assert_eq!(
        findings(&report),
        [
            "no file from rank 2: it may have died",
            "all that left a file have called #1 barrier; ranks 0,1 have not finished it, waiting for rank 2"
        ]
    );
}

#[test]
fn a_rank_whose_process_was_not_asked_is_not_called_dead() {
    let files = vec![recording(0, 2, &[operation(1, "barrier", "running", &[1])])];
    let report = merge(files, &Wanted { asked: true, ..Wanted::default() });
    let expected = "no file from rank 1: not asked: give the launcher's process to hear of all";
    assert_eq!(findings(&report)[0], expected);
}

#[test]
fn point_to_point_numbers_are_not_compared() {
    let files = vec![
        recording(0, 2, &[operation(1, "message(f32 x 8)", "done", &[])]),
        recording(1, 2, &[operation(1, "message(f32 x 9)", "done", &[])]),
    ];
    assert_eq!(findings(&merge(files, &Wanted::default())), ["nothing is under way, and the ranks agree"]);
}

#[test]
fn the_later_of_two_files_of_a_rank_counts() {
    let mut old = recording(0, 1, &[operation(1, "barrier", "running", &[])]);
    old.written_at_unix_ms = 1.0;
    let new = recording(0, 1, &[operation(1, "barrier", "done", &[])]);
    assert_eq!(
        findings(&merge(vec![new, old], &Wanted::default())),
        ["nothing is under way, and the ranks agree"]
    );
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let text = render(&merge(
        vec![recording(0, 1, &[operation(1, "x\u{1b}[2J\ty", "done", &[])])],
        &Wanted::default(),
    ));
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

#[test]
fn messages_that_wait_are_named_with_their_peer_and_tag() {
    let mut file = recording(1, 2, &[]);
    let message = |tag: u32, finished: Option<f64>| Message {
        direction: "recv".into(),
        peer: 0,
        tag,
        call: "message(f32 x 8)".into(),
        submitted_us: 1e6,
        finished_us: finished,
    };
    file.comms[0].messages = vec![message(1, Some(1.5e6)), message(9, None), message(7, None)];
    let report = merge(vec![recording(0, 2, &[]), file], &Wanted::default());
    let expected = "rank 1 waits in recv from rank 0, tag 9: message(f32 x 8), for 2.000 s; 1 more messages wait after it";
    assert_eq!(findings(&report), [expected]);
}

/// Ten calls of two ranks. Rank 1 always calls `late` ms after rank 0, and the operation then takes `takes` ms.
fn timed(late: f64, takes: f64) -> Report {
    let files = (0..2).map(|rank| {
        let calls = (0..10).map(|number| {
            let called = 1e6 + number as f64 * 1e4 + rank as f64 * late * 1e3;
            let ended = 1e6 + number as f64 * 1e4 + (late + takes) * 1e3;
            serde_json::json!({ "number": number, "call": "all_reduce(f32 x 8, sum, direct)", "collective": "all_reduce",
                "algo": "direct", "bytes": 32, "state": "done", "submitted_us": called, "started_us": called,
                "finished_us": ended })
        });
        recording(rank, 2, &calls.collect::<Vec<_>>())
    });
    merge(files.collect(), &TIMES)
}

#[test]
fn times_tell_a_slow_rank_from_a_slow_operation() {
    let late = timed(4.0, 0.5);
    let [times] = &late.worlds[0].communicators[0].times[..] else { panic!("{late:?}") };
    assert_eq!((times.calls, times.last.get(&1), times.last.get(&0)), (10, Some(&10), None));
    let near = |found: f64, expected: f64| (found - expected).abs() < 1e-3;
    assert!(near(times.late_ms.median, 4.0) && near(times.after_ms.median, 0.5), "{times:?}");
    assert!(near(times.between_ms.unwrap(), 10.0), "{times:?}");
    assert!(
        times.verdict.starts_with("It is the code of rank 1: it came last in 10 of 10 calls, 4.00 ms"),
        "{times:?}"
    );
    assert!(render(&late).contains("last to call:           rank 1 10 times"));
    let slow = timed(0.1, 6.0);
    let [times] = &slow.worlds[0].communicators[0].times[..] else { panic!("{slow:?}") };
    assert!(times.verdict.starts_with("Ranks come together, and the operation takes 6.00 ms"), "{times:?}");
    assert!(times.verdict.contains("that is 60 %"), "{times:?}");
}

#[test]
fn ranks_that_are_bound_apart_share_no_cores() {
    let verdict = |cores: &dyn Fn(usize) -> Vec<usize>| {
        let call = serde_json::json!({ "number": 0, "call": "barrier()", "state": "done", "submitted_us": 1e6,
            "started_us": 1e6, "finished_us": 1.01e6 });
        let mut files: Vec<Recording> =
            (0..3).map(|rank| recording(rank, 3, std::slice::from_ref(&call))).collect();
        for file in &mut files {
            file.core_numbers = cores(file.rank);
            file.cores = file.core_numbers.len();
        }
        merge(files, &TIMES).worlds[0].communicators[0].times[0].verdict.clone()
    };
    let share = |cores: &dyn Fn(usize) -> Vec<usize>| verdict(cores).contains("3 ranks share 2 cores");
    assert!(!share(&|rank| vec![rank]) && share(&|_| vec![4, 5]) && share(&|rank| vec![rank / 2]));
}

#[test]
fn times_are_told_of_survivors_alone() {
    let call = |late: f64| {
        serde_json::json!({ "number": 0, "call": "barrier()", "state": "done", "submitted_us": 1e6 + late,
            "started_us": 1e6 + late, "finished_us": 1.01e6 })
    };
    let report = merge(vec![recording(0, 3, &[call(0.0)]), recording(2, 3, &[call(8e3)])], &TIMES);
    let [times] = &report.worlds[0].communicators[0].times[..] else { panic!("{report:?}") };
    assert_eq!((times.calls, &times.unknown[..], times.last.get(&2)), (1, &[1][..], Some(&1)));
    assert!(render(&report).contains("not counted:            rank 1, of which there is no file"));
}

#[test]
fn clocks_of_hosts_are_put_right() {
    let mut files: Vec<Recording> = (0..2)
        .map(|rank| {
            let at = 1e6 + rank as f64 * 5e6;
            let call = serde_json::json!({ "number": 0, "call": "barrier()", "state": "done", "submitted_us": at,
                "started_us": at, "finished_us": at + 100.0 });
            recording(rank, 2, &[call])
        })
        .collect();
    // Rank 1's host is five seconds ahead.
    files[1].clock = Some(Clock { offset_us: -5e6, error_us: 40.0, found_us: 3e6 });
    let report = merge(files, &TIMES);
    let [times] = &report.worlds[0].communicators[0].times[..] else { panic!("{report:?}") };
    assert!(times.late_ms.median < 1e-3 && times.clocks_ms >= 0.04, "{times:?}");
    assert!(
        times.verdict.starts_with("Nobody is waited for: ranks come together, as far as clocks tell"),
        "{times:?}"
    );
}

#[test]
fn the_table_says_what_is_expected() {
    let row = |bytes: u64, us: f64| {
        serde_json::json!({ "link": "shm", "hosts": 1, "ranks": 2, "collective": "all_reduce", "bytes": bytes,
            "measured": [{ "algo": "direct", "us": us }] })
    };
    let table: Table = serde_json::from_value(
        serde_json::json!({ "format": 1, "figures": [], "rows": [row(16, 10.0), row(64, 40.0)] }),
    )
    .unwrap();
    let call = serde_json::json!({ "number": 0, "call": "all_reduce(f32 x 8, sum, direct)", "collective": "all_reduce",
        "algo": "direct", "bytes": 32, "state": "done", "submitted_us": 1e6, "started_us": 1e6, "finished_us": 1.0005e6 });
    let mut files: Vec<Recording> =
        (0..2).map(|rank| recording(rank, 2, std::slice::from_ref(&call))).collect();
    files.iter_mut().for_each(|file| file.comms[0].link = "shm".into());
    let report = merge(files, &Wanted { times: Some(Some(&table)), overlap: false, asked: false });
    let [times] = &report.worlds[0].communicators[0].times[..] else { panic!("{report:?}") };
    // 32 bytes are half way between 16 and 64 on a logarithmic scale, and so are 20 us between 10 and 40.
    assert!((times.expected_ms.unwrap() - 0.02).abs() < 1e-6, "{times:?}");
    assert!(times.verdict.contains("500.0 us where 20.0 us are expected"), "{times:?}");
    assert!(times.verdict.starts_with("It is the network, or the machine"), "{times:?}");
}

/// A rank with two buckets: one ends before the computing of the step does, the other half a millisecond after.
fn with_a_step() -> Recording {
    let bucket = |number: u64, [submitted, started, finished]: [f64; 3]| {
        serde_json::json!({
            "number": number, "call": "all_reduce(f32 x 8, avg)", "state": "done", "submitted_us": submitted,
            "started_us": started, "finished_us": finished, "bytes": 32,
        })
    };
    let mut file = recording(0, 1, &[]);
    let operations = [bucket(7, [2e3, 2e3, 3e3]), bucket(8, [2.5e3, 3e3, 5.5e3])];
    let step = serde_json::json!({
        "number": 4, "first_operation": 7, "operations": 2, "began_us": 1e3, "called_us": 5e3, "ended_us": 5.6e3,
    });
    let message = serde_json::json!({
        "direction": "recv", "peer": 0, "tag": 3, "call": "message(f32 x 1)", "submitted_us": 4e3, "finished_us": null,
    });
    let comm = &mut file.comms[0];
    comm.operations = operations.into_iter().map(|o| serde_json::from_value(o).unwrap()).collect();
    comm.steps = vec![serde_json::from_value(step).unwrap()];
    comm.messages = vec![serde_json::from_value(message).unwrap()];
    file
}

#[test]
fn a_step_is_computing_and_what_is_exposed() {
    let report = merge(vec![with_a_step()], &Wanted { times: None, overlap: true, asked: false });
    let step = &report.worlds[0].communicators[0].steps[&0][0];
    let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    near(step.compute_ms, 4.0);
    near(step.communication_ms, 1.0 + 2.5);
    near(step.hidden_ms, 1.0 + 2.0);
    near(step.exposed_ms, 0.6);
    near(step.buckets[1].submitted_ms, 1.5);
    near(step.buckets[1].finished_ms, 4.5);
    let text = render(&report);
    assert!(text.contains("       0       4       4.000          3.500       3.000       0.600"), "{text}");
    assert!(!render(&merge(vec![with_a_step()], &Wanted::default())).contains("steps"));
}

#[test]
fn a_trace_has_a_row_for_operations_messages_and_steps() {
    let trace = perfetto::trace(&[with_a_step()]);
    let trace: serde_json::Value = serde_json::from_str(&trace.to_string()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let mut rows: Vec<_> = events
        .iter()
        .filter(|event| event["name"] == "thread_name")
        .map(|event| (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
        .collect();
    rows.sort_unstable();
    assert_eq!(
        rows,
        [(0, "world operations"), (1, "world queued operations"), (2, "world messages"), (3, "world steps")]
    );
    let whole = |event: &&serde_json::Value| event["ph"] == "X";
    let spans: Vec<_> = events
        .iter()
        .filter(whole)
        .map(|event| {
            (event["name"].as_str().unwrap(), event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())
        })
        .collect();
    // Microseconds from the beginning of the step, which is the first event.
    let call = "all_reduce(f32 x 8, avg)";
    let expected = [(call, 1e3, 1e3), (call, 2e3, 2.5e3), ("compute", 0.0, 4e3), ("exposed", 4e3, 600.0)];
    assert_eq!(spans, expected);
    let beside: Vec<_> = events.iter().filter(|event| event["ph"] == "b").collect();
    assert_eq!(beside.len(), 2, "the wait of the second bucket in the queue, and a message without an end");
    assert_eq!(beside[1]["name"], "recv from rank 0 tag 3");
    for begun in beside {
        let ends = |event: &&serde_json::Value| event["ph"] == "e" && event["id"] == begun["id"];
        assert_eq!(events.iter().filter(ends).count(), 1);
    }
}

/// Operations on devices, of which one begins before another has ended. In one row the viewer would draw it as a part of that one.
#[test]
fn operations_that_overlap_have_rows_of_their_own() {
    let operation = |number: u64, started: f64, finished: f64| {
        serde_json::json!({
            "number": number, "call": format!("all_reduce {number}"), "state": "done", "submitted_us": started,
            "started_us": started, "finished_us": finished,
        })
    };
    // Operation 2 ends within operation 1, operation 3 begins within it and ends later, and operation 4 begins when operation 1 has ended.
    let spans = [(1, 1e3, 4e3), (2, 2e3, 3e3), (3, 3.5e3, 6e3), (4, 4e3, 5e3)];
    let mut file = recording(0, 1, &[]);
    let operations =
        spans.map(|(number, from, to)| serde_json::from_value(operation(number, from, to)).unwrap());
    file.comms[0].operations = operations.into();
    let trace: serde_json::Value = serde_json::from_str(&perfetto::trace(&[file]).to_string()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |row: u64, about: &str| {
        let of_row = |event: &&serde_json::Value| event["tid"] == row && event["name"] == about;
        events.iter().find(of_row).map(|event| event["args"].clone()).unwrap()
    };
    let found: Vec<_> = events
        .iter()
        .filter(|event| event["ph"] == "X")
        .map(|event| {
            let row = named(event["tid"].as_u64().unwrap(), "thread_name");
            (event["name"].as_str().unwrap(), row["name"].as_str().unwrap().to_owned())
        })
        .collect();
    let expected = [("1", ""), ("2", " 2"), ("3", " 2"), ("4", "")]
        .map(|(number, row)| (format!("all_reduce {number}"), format!("world operations{row}")));
    let found: Vec<_> = found.into_iter().map(|(name, row)| (name.to_owned(), row)).collect();
    assert_eq!(found, expected);
    // The second row stands next to the first, before that of queued operations.
    assert_eq!(
        (named(0, "thread_sort_index"), named(4, "thread_sort_index")),
        (serde_json::json!({"sort_index": 0}), serde_json::json!({"sort_index": 0}))
    );
}
