//! Which ranks get what comes to the launcher's stdin.

use std::io::Write;

use super::*;

const HOSTS: [&str; 2] = ["--hosts", "localhost:1,127.0.0.1:1"];
const HERE: [&str; 2] = ["-n", "2"];

/// Runs ranks, and writes `input` to the launcher's stdin.
fn fed(options: &[&str], script: &str, input: &[u8]) -> Output {
    let mut child = launcher(options, script).stdin(Stdio::piped()).spawn().unwrap();
    let (mut pipe, input) = (child.stdin.take().unwrap(), input.to_vec());
    // Another thread writes: if no rank reads, the launcher takes only so much, and then writing blocks.
    let writer = thread::spawn(move || _ = pipe.write_all(&input));
    let output = finish(child);
    writer.join().unwrap();
    output
}

#[test]
fn stdin_goes_to_rank_0_to_all_or_to_none() {
    let script = "read x; echo \"got:$x\"; cat | wc -c";
    for ranks in [HERE, HOSTS] {
        for (which, expected) in [
            (&[][..], ["[0] 4", "[0] got:hello", "[1] 0", "[1] got:"]),
            (&["--stdin", "0"], ["[0] 4", "[0] got:hello", "[1] 0", "[1] got:"]),
            (&["--stdin", "all"], ["[0] 4", "[0] got:hello", "[1] 4", "[1] got:hello"]),
            (&["--stdin", "none"], ["[0] 0", "[0] got:", "[1] 0", "[1] got:"]),
        ] {
            let output = fed(&[&ranks[..], which].concat(), script, b"hello\nyou\n");
            assert_eq!(sorted_lines(&output.stdout), expected, "{ranks:?} {which:?} {output:?}");
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        }
    }
}

#[test]
fn much_of_it_arrives_whole_and_ranks_that_do_not_read_hold_up_nothing() {
    let input: Vec<u8> = (0..3_000_000_u32).flat_map(|i| i.to_le_bytes()).take(3_000_000).collect();
    let sum = "cksum; exit 0";
    let expected = {
        let mut child = Command::new("cksum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&input).unwrap();
        text(&finish(child).stdout)
    };
    for options in [&["--stdin", "all"][..], &HOSTS, &["--stdin", "all", HOSTS[0], HOSTS[1]]] {
        let options = if options.contains(&"--hosts") { options.to_vec() } else { [options, &HERE].concat() };
        let output = fed(&options, sum, &input);
        let ranks = if options.contains(&"all") { 2 } else { 1 };
        assert_eq!(text(&output.stdout).matches(expected.trim()).count(), ranks, "{options:?} {output:?}");
        assert!(fed(&options, "exit 0", &input).status.success());
    }
}

/// A debugger's prompt has no end of line, and must be shown before the user types an answer.
#[test]
fn a_prompt_is_shown_and_its_answer_read() {
    let script = "[ $RANK = 0 ] || exit 0; printf '(Pdb) '; read x; echo \"answer $x\"; printf '(Pdb) '; read x; echo \"answer $x\"";
    for options in [HERE, HOSTS] {
        let mut child = launcher(&options, script).stdin(Stdio::piped()).spawn().unwrap();
        let (mut answers, shown) = (child.stdin.take().unwrap(), Shown::new(child.stdout.take().unwrap()));
        for answer in ["c\n", "q\n"] {
            assert_eq!(shown.up_to(b')', &mut child), "[0] (Pdb)");
            answers.write_all(answer.as_bytes()).unwrap();
            assert_eq!(shown.up_to(b'\n', &mut child), format!(" answer {answer}"));
        }
        assert!(finish(child).status.success());
    }
}

/// The program `script` gives the launcher a terminal. The ranks are not in the terminal's foreground process group.
#[test]
fn rank_0_reads_a_terminal_and_no_rank_is_stopped() {
    if let Err(why) = ssh::program("script") {
        return others::left_out(&format!("no terminal: {why}"));
    }
    let rank =
        "if [ $RANK = 0 ]; then [ -t 0 ] && read x && echo \"got:$x\"; else read x || echo nothing; fi";
    let command = format!("'{}' run -n 2 -- /bin/sh -c '{rank}'", env!("CARGO_BIN_EXE_allstream"));
    let mut script = Command::new("script");
    script.args(["-q", "-e", "-c", &command, "/dev/null"]).env_remove("ALLSTREAM_TOKEN");
    let mut child =
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut keyboard = child.stdin.take().unwrap();
    keyboard.write_all(b"hello\n").unwrap();
    let output = finish(child);
    drop(keyboard);
    let said = text(&output.stdout);
    assert!(
        output.status.success() && said.contains("[0] got:hello") && said.contains("[1] nothing"),
        "{output:?}"
    );
}

#[test]
fn a_rank_that_asks_for_input_in_vain_is_told_that_it_has_no_stdin() {
    let python = "[ $RANK = 1 ] && echo 'EOFError: EOF when reading a line' >&2; exit 0";
    let output = run(&HERE, python);
    assert!(text(&output.stderr).contains("allstream run: rank 1 has no stdin; --stdin says"), "{output:?}");
}
