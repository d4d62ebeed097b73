//! What the launcher does when ranks fail: it stops the others or lets them work on, may start the job anew, and ends with an exit code.

use super::*;

/// What the launcher itself said.
fn complaints(output: &Output) -> Vec<String> {
    let lines = text(&output.stderr);
    lines.lines().filter_map(|line| line.strip_prefix("allstream run: ")).map(String::from).collect()
}

#[test]
fn ranks_that_are_kept_work_on_and_the_worst_own_code_is_the_jobs() {
    let keep = ["-n", "3", "--on-failure", "keep", "--grace", "0s"];
    // Rank 0 ends last, long after the launcher would have stopped it without `keep`.
    for (code_of_0, code_of_2, expected) in [(0, 0, 0), (4, 2, 4)] {
        let script = format!(
            "case $RANK in 1) kill -9 $$;; 2) echo done; exit {code_of_2};; 0) sleep 1; echo done; exit {code_of_0};; esac"
        );
        let output = run(&keep, &script);
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        assert_eq!(sorted_lines(&output.stdout), ["[0] done", "[2] done"]);
        let said = complaints(&output);
        // If rank 2 fails too, it may fail before rank 1 does.
        let place = said.iter().position(|line| line.contains("was killed by signal 9")).unwrap();
        let words =
            format!("was killed by signal 9; the others work on ({} ranks have not failed)", 2 - place);
        assert!(said[place].ends_with(&words), "{said:?}");
    }
    let killed = run(&keep, "kill -9 $$");
    assert_eq!(killed.status.code(), Some(128 + 9), "no rank has a code of its own: {killed:?}");
}

#[test]
fn kept_ranks_are_stopped_when_fewer_are_left_than_are_of_use() {
    let scratch = Scratch::new();
    let options = ["-n", "3", "--on-failure", "keep", "--min-ranks", "2", "--grace", "0s"];
    // Rank 2 fails after rank 1 has ended: it waits until rank 1 is a zombie, which the launcher reaps only at the end.
    let rest = format!(
        "case $RANK in 1) exit 8;; 2) until grep -q ') Z ' /proc/$(cat {}/1)/stat; do sleep 0.05; done; sleep 0.1; \
         exit 9;; esac; exec sleep 1000",
        scratch.0.display()
    );
    let (child, pids) = start_sleepers(&options, 3, &scratch, &rest);
    let output = finish(child);
    assert_eq!(output.status.code(), Some(9), "the worst of the ranks that ended by themselves");
    let said = complaints(&output);
    assert!(
        said[0].ends_with("exited with code 8; the others work on (2 ranks have not failed)"),
        "{said:?}"
    );
    let stopped = "exited with code 9; 1 ranks are left, fewer than --min-ranks; stopping the other ranks";
    assert!(said[1].ends_with(stopped), "{said:?}");
    assert!(pids.into_iter().all(|pid| !alive(pid)));
    let refused = run(&["-n", "3", "--min-ranks", "2"], "true");
    assert!(text(&refused.stderr).contains("--min-ranks is for --on-failure keep"), "{refused:?}");
}

#[test]
fn a_job_that_failed_starts_anew_as_often_as_it_may() {
    // Both ranks fail in attempts 0 and 1, and succeed in attempt 2: the variable tells them how often the job was started anew.
    let script = "echo attempt $ALLSTREAM_RESTART $MASTER_PORT; exit $((2 - $ALLSTREAM_RESTART))";
    let output = run(&["-n", "2", "--restarts", "5"], script);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let lines = sorted_lines(&output.stdout);
    let attempts: Vec<&str> = lines.iter().map(|line| &line[..13]).collect();
    let expected = [0, 1].map(|rank| [0, 1, 2].map(|attempt| format!("[{rank}] attempt {attempt}")));
    assert_eq!(attempts, expected.concat());
    let said = complaints(&output);
    let anew: Vec<&String> = said.iter().filter(|line| line.contains("anew")).collect();
    assert_eq!(anew[1], "the job failed with code 1; it starts anew (restart 2 of 5)", "{said:?}");
    assert_eq!(anew.len(), 2);
    let given_up = run(&["-n", "1", "--restarts", "1"], "exit 3");
    assert_eq!(given_up.status.code(), Some(3), "{given_up:?}");
}

#[test]
fn a_job_that_was_stopped_by_a_signal_does_not_start_anew() {
    let scratch = Scratch::new();
    let (child, _) = start_sleepers(&["-n", "2", "--restarts", "3"], 2, &scratch, "exec sleep 1000");
    kill_process(pid_of(child.id()), Signal::INT).unwrap();
    let output = finish(child);
    assert_eq!((output.status.code(), complaints(&output).len()), (Some(130), 0), "{output:?}");
}

/// What both of two ranks call: rank 1 ends, and rank 0 returns the error that it gets from that.
fn loses_the_other() -> allstream::Error {
    let mut comm = futures::executor::block_on(Comm::connect(Rendezvous::from_env().unwrap())).unwrap();
    if comm.rank() == 1 {
        std::process::exit(3);
    }
    comm.all_reduce(vec![1u8]).wait().unwrap_err().error
}

/// A rank that loses the other one, and prints its error and the error's file.
#[test]
#[ignore = "a rank; started by other tests"]
fn loses_a_rank() {
    let error = loses_the_other();
    println!("{error}");
    println!("record: {}", error.record().unwrap().display());
}

#[test]
fn the_last_line_and_the_error_say_where_flight_recorders_are() {
    let scratch = Scratch::new();
    let script =
        format!("exec {} --exact --ignored --nocapture launcher::failures::loses_a_rank", this_program());
    let mut command = launcher(&["-n", "2"], &script);
    let output = finish(command.env("ALLSTREAM_TRACE_DIR", "").env("TMPDIR", &scratch.0).spawn().unwrap());
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let stdout = text(&output.stdout);
    let record =
        stdout.lines().find_map(|line| line.split_once("record: ")?.1.trim().to_owned().into()).unwrap();
    assert!(stdout.contains("rank 1 was lost (its connection ended without a goodbye)"), "{stdout}");
    assert!(stdout.contains(&format!("(flight recorder: {record})")), "{stdout}");
    let dir = Path::new(&record).parent().unwrap();
    let of_user = format!("allstream-{}", rustix::process::geteuid().as_raw());
    assert!(dir.starts_with(scratch.0.join(of_user)), "{record}");
    let last = complaints(&output).pop().unwrap();
    assert_eq!(
        last,
        format!(
            "what the ranks did last is in {0}: `allstream trace --times {0}` lays it side by side",
            dir.display()
        )
    );
    let told = allstream(&["trace", &dir.display().to_string()], &[]);
    assert!(text(&told.stdout).contains("no file from rank 1: it may have died"), "{told:?}");
}

/// If no flight recorder can be written, a rank's error names no file, and the launcher names no directory.
#[test]
fn a_record_that_cannot_be_written_is_not_named() {
    let rank = format!(
        "exec {} --exact --ignored --nocapture launcher::failures::loses_a_rank_unrecorded",
        this_program()
    );
    let scratch = Scratch::new();
    let file = scratch.0.join("file");
    fs::write(&file, "").unwrap();
    for dir in [&file, &file.join("below")] {
        let mut command = launcher(&["-n", "2"], &rank);
        let output = finish(command.env("ALLSTREAM_TRACE_DIR", dir).spawn().unwrap());
        let said = [text(&output.stdout), text(&output.stderr)].concat();
        assert!(said.contains("rank 1 was lost") && said.contains("no record"), "{said}");
        assert!(!said.contains("(flight recorder:") && !said.contains("allstream trace"), "{said}");
    }
}

/// The temporary directory is open to all users. Another one may have put a link there, in the place of this user's directory: ranks write
/// nothing to where it leads.
#[test]
fn flight_recorders_do_not_go_where_a_link_in_the_place_of_the_users_directory_leads() {
    let rank = format!(
        "exec {} --exact --ignored --nocapture launcher::failures::loses_a_rank_unrecorded",
        this_program()
    );
    let scratch = Scratch::new();
    let theirs = scratch.0.join("theirs");
    fs::create_dir(&theirs).unwrap();
    let of_user = format!("allstream-{}", rustix::process::geteuid().as_raw());
    std::os::unix::fs::symlink(&theirs, scratch.0.join(of_user)).unwrap();
    let mut command = launcher(&["-n", "2"], &rank);
    let output = finish(command.env_remove("ALLSTREAM_TRACE_DIR").env("TMPDIR", &scratch.0).spawn().unwrap());
    let said = [text(&output.stdout), text(&output.stderr)].concat();
    assert!(said.contains("rank 1 was lost") && said.contains("no record"), "{said}");
    assert_eq!(fs::read_dir(&theirs).unwrap().count(), 0, "{said}");
}

/// A rank that loses the other one, and says whether its error names a file.
#[test]
#[ignore = "a rank; started by other tests"]
fn loses_a_rank_unrecorded() {
    let error = loses_the_other();
    println!("{error}; {}", error.record().map_or("no record", |_| "a record"));
}
