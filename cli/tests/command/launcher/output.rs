//! What ranks write: lines without an end, files of their own, and disks that are full.

use super::*;

/// A progress bar is one line until its end; each state is shown while the rank works.
#[test]
fn progress_bars_and_unfinished_lines_are_shown_as_they_come() {
    for options in [&["-n", "2"][..], &["--hosts", "localhost:1,127.0.0.1:1"]] {
        let scratch = Scratch::new();
        let wait = |name: &str| format!("until [ -e {}/{name} ]; do sleep 0.02; done", scratch.0.display());
        let script = format!(
            "if [ $RANK = 0 ]; then printf '\\rstep 1/'; {}; printf '\\rstep 2/\\rstep 3\\r\\n'; printf 'part '; {}; echo whole; \
             else {}; echo line; fi",
            wait("a"),
            wait("c"),
            wait("b")
        );
        let mut child = launcher(options, &script).spawn().unwrap();
        let shown = Shown::new(child.stdout.take().unwrap());
        let mut until = |end: u8| shown.up_to(end, &mut child);
        let go = |name: &str| fs::write(scratch.0.join(name), "").unwrap();
        assert_eq!(until(b'/'), "\r[0] step 1/");
        go("a");
        assert_eq!(until(b'\n'), "\r[0] step 2/\r[0] step 3\r\n");
        assert_eq!(until(b'p'), "[0] p");
        assert_eq!(until(b' '), "art ");
        // Another rank's line gets a line of its own, and what then follows of the unfinished line is shown with its rank again.
        go("b");
        assert_eq!((until(b'\n'), until(b'\n')), ("\n".into(), "[1] line\n".into()));
        go("c");
        assert_eq!(until(b'\n'), "[0] whole\n");
        assert!(finish(child).status.success());
    }
}

#[test]
fn each_rank_has_a_log_file_which_a_restart_continues() {
    for options in [&["-n", "2"][..], &["--hosts", "localhost:1,127.0.0.1:1"]] {
        let scratch = Scratch::new();
        let logs = scratch.0.join("made/here");
        let dir = logs.display().to_string();
        let options = [options, &["--log-dir", &dir, "--restarts", "1", "--grace", "0s"]].concat();
        // Both ranks of the first attempt have written before it fails.
        let script = format!(
            "echo out $RANK; echo err $RANK >&2; printf 'no end'; touch {0}/$RANK.$ALLSTREAM_RESTART; \
             until [ -e {0}/0.$ALLSTREAM_RESTART ] && [ -e {0}/1.$ALLSTREAM_RESTART ]; do sleep 0.02; done; \
             exit $((1 - ALLSTREAM_RESTART))",
            scratch.0.display()
        );
        let output = run(&options, &script);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        for rank in 0..2 {
            let log = fs::read_to_string(logs.join(format!("rank-{rank}.log"))).unwrap();
            let (first, second) = log.split_once("allstream run: restart 1\n").unwrap();
            for part in [first, second] {
                let mut pieces = vec![format!("out {rank}\n"), format!("err {rank}\n"), "no end".to_string()];
                pieces.retain(|piece| !part.contains(piece.as_str()));
                assert!(pieces.is_empty(), "{pieces:?} is missing in {log:?}");
            }
        }
        assert!(text(&output.stdout).contains("[1] out 1"), "the output is shown as well: {output:?}");
        // A job that is not a restart begins its files anew.
        run(&["-n", "2", "--log-dir", &dir], "echo new");
        assert_eq!(fs::read_to_string(logs.join("rank-1.log")).unwrap(), "new\n");
    }
    let refused = run(&["-n", "1", "--log-dir", "/proc/nowhere"], "true");
    assert!(
        text(&refused.stderr).contains("cannot write the log /proc/nowhere/rank-0.log of rank 0"),
        "{refused:?}"
    );
}

#[test]
fn a_full_disk_is_said_and_the_job_works_on() {
    let scratch = Scratch::new();
    std::os::unix::fs::symlink("/dev/full", scratch.0.join("rank-1.log")).unwrap();
    let dir = scratch.0.display().to_string();
    let mut command =
        launcher(&["-n", "2", "--log-dir", &dir], "echo one; sleep 0.2; echo two; exit $((RANK + 3))");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = finish(command.stdout(full).spawn().unwrap());
    let said = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(3 | 4)), "{output:?}");
    assert_eq!(
        said.matches("what ranks write to stdout is lost from here on: No space left").count(),
        1,
        "{said}"
    );
    let log = format!("the log {dir}/rank-1.log of rank 1 ends here: No space left");
    assert_eq!(said.matches(&log).count(), 1, "{said}");
    assert_eq!(fs::read_to_string(scratch.0.join("rank-0.log")).unwrap(), "one\ntwo\n");
}

/// `ulimit -f` sets such a limit. A process that exceeds it gets SIGXFSZ, and dies unless it handles that signal.
#[test]
fn a_limit_for_the_size_of_files_does_not_end_the_launcher() {
    let scratch = Scratch::new();
    let at = scratch.0.join("out");
    let shell = "ulimit -f 1; exec \"$0\" run -n 1 -- /bin/sh -c 'head -c 4000 /dev/zero; exit 5' > \"$1\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", shell, env!("CARGO_BIN_EXE_allstream")]).arg(&at).env_remove("ALLSTREAM_TOKEN");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = finish(command.spawn().unwrap());
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    assert!(text(&output.stderr).contains("is lost from here on: File too large"), "{output:?}");
}
