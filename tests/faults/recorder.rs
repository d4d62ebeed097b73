//! The flight recorder: after a timeout every rank's file is there, and `allstream trace` says who is behind.

use std::process::Command;

use serde_json::Value;

use crate::harness::{Link, Plan, among_others};

#[test]
fn after_a_timeout_the_files_of_all_ranks_say_who_is_behind() {
    let _turn = among_others();
    let job = Plan::new("never_calls", 3, Link::Shm).start();
    // By then the others have failed, and rank 1 has not called: its own file says so.
    for rank in [0, 2] {
        job.ranks[rank].hear("failed");
    }
    let dir = job.traces.0.clone();
    let files = || {
        let entries = std::fs::read_dir(&dir).unwrap().flatten().map(|e| e.path());
        let mut files: Vec<_> = entries.filter(|p| p.extension().is_some_and(|e| e == "json")).collect();
        files.sort();
        files
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while files().len() < 3 && std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let files = files();
    assert_eq!(files.len(), 3, "{files:?}");
    for (rank, path) in files.iter().enumerate() {
        assert!(path.to_string_lossy().ends_with(&format!("-rank{rank}.json")), "{path:?}");
        let text = std::fs::read(path).unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        assert_eq!((value["rank"].as_u64(), value["size"].as_u64()), (Some(rank as u64), Some(3)));
        assert!(value["cause"].as_str().is_some_and(|c| c.contains("timed out")), "{value}");
    }
    let trace = |args: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_allstream")).arg("trace").args(args).arg(&dir).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = trace(&[]);
    println!("{text}");
    assert!(text.contains("rank 1 has not called #2 all_reduce("), "{text}");
    assert!(text.contains("ranks 0,2 wait for it"), "{text}");
    let json: Value = serde_json::from_str(&trace(&["--json"])).unwrap();
    let verdict = json["worlds"][0]["communicators"][0]["verdict"].as_array().unwrap().clone();
    assert!(verdict.iter().any(|f| f["ranks"] == serde_json::json!([1]) && f["number"] == 2), "{verdict:?}");
    job.ranks[1].hear("failed");
    job.finish();
}
