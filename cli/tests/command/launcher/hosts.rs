//! Several hosts, with a script in the place of ssh. The script records its arguments, and runs the command for the other
//! host here, in a session of its own, behind a connection that can be cut.

use std::os::unix::fs::PermissionsExt;

use super::*;

const TOKEN: &str = "a-secret-that-no-list-of-processes-may-show";

/// `$0` is in the directory of the test. The process that copies stdin stands for the connection: killing it cuts the connection.
const SSH: &str = r#"#!/bin/sh
here=$(dirname "$0")
for host do [ "${host#-}" = "$host" ] && [ "$host" != opt ] && break; done
for command do :; done
printf '<%s>\n' "$@" > "$here/called.$host"
echo "Welcome to $host"
exec 3<&0
mkfifo "$here/in.$host"
setsid sh -c "$command" < "$here/in.$host" 3<&- &
agent=$!
cat <&3 > "$here/in.$host" &
echo $! > "$here/connection.$host"
exec 3<&-
wait $agent
code=$?
kill $(cat "$here/connection.$host") 2> /dev/null
exit $code
"#;

/// A launcher for these hosts; each rank runs `script` in a shell.
fn remote(scratch: &Scratch, hosts: &str, options: &[&str], script: &str) -> Command {
    let ssh = scratch.0.join("ssh");
    fs::write(&ssh, SSH).unwrap();
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).unwrap();
    let ssh = format!("{} -o opt", ssh.display());
    let mut all = vec!["--hosts", hosts, "--master-addr", "127.0.0.1", "--ssh", &ssh];
    all.extend(options);
    let mut command = launcher(&all, script);
    command.env("ALLSTREAM_TOKEN", TOKEN);
    command
}

fn text(scratch: &Scratch, name: &str) -> String {
    fs::read_to_string(scratch.0.join(name)).unwrap()
}

/// The command lines of all processes that contain this text.
fn shown_in_process_lists(text: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(text)).collect()
}

/// Starts ranks on several hosts that write their process ids and go on with `rest`. Returns when all have written them.
fn start(scratch: &Scratch, hosts: &str, ranks: usize, rest: &str) -> (Child, Vec<u32>) {
    let script =
        format!("echo $$ > {0}/$RANK.new && mv {0}/$RANK.new {0}/$RANK; {rest}", scratch.0.display());
    // A shell may lose a SIGINT that comes while it starts a command; then it is killed after this time.
    let child = remote(scratch, hosts, &["--kill-after", "4s"], &script).spawn().unwrap();
    let file = |rank: usize| scratch.0.join(rank.to_string());
    wait_until("all ranks have started", || (0..ranks).all(|rank| file(rank).exists()));
    (child, (0..ranks).map(|rank| fs::read_to_string(file(rank)).unwrap().trim().parse().unwrap()).collect())
}

#[test]
fn hosts_share_one_world_and_words_keep_their_bytes() {
    let scratch = Scratch::new();
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR ${ALLSTREAM_RENDEZVOUS_FD:+fd} \
                  $ALLSTREAM_TOKEN $ALLSTREAM_LINK $ALLSTREAM_PORT \"<$A>\" \"<$0>\" $(pwd); echo port $MASTER_PORT > $B/port.$RANK";
    let odd = "it's \"$(x)\" `y` \\ $A;*\t";
    let here = format!("B={}", scratch.0.display());
    let mut command = remote(&scratch, "h1:2,localhost,h2:1", &["--env", "A=x y'z", "--env", &here], script);
    command.arg(odd).env("ALLSTREAM_LINK", "shm").env("ALLSTREAM_PORT", "1").current_dir("/usr");
    let output = finish(command.spawn().unwrap());
    assert!(output.status.success(), "{output:?}");
    let rank = |rank: usize, local: usize, on_host: usize, fd: &str| {
        format!("[{rank}] {rank} 4 {local} {on_host} 127.0.0.1 {fd}{TOKEN} shm <x y'z> <{odd}> /usr")
    };
    let lines = sorted_lines(&output.stdout);
    assert_eq!(lines[..4], [rank(0, 0, 2, "fd "), rank(1, 1, 2, ""), rank(2, 0, 1, ""), rank(3, 0, 1, "")]);
    assert_eq!(lines[4..], ["[h1] Welcome to h1", "[h2] Welcome to h2"]);
    assert!((1..4).all(|rank| text(&scratch, &format!("port.{rank}")) == text(&scratch, "port.0")));
    // No word or variable of the user's is in the command for another host's shell.
    let agent = format!("<exec '{}' run --agent>", env!("CARGO_BIN_EXE_allstream"));
    for host in ["h1", "h2"] {
        assert_eq!(text(&scratch, &format!("called.{host}")), format!("<-o>\n<opt>\n<{host}>\n{agent}\n"));
    }
    assert!(!scratch.0.join("called.localhost").exists());
}

#[test]
fn a_world_forms_across_hosts() {
    let scratch = Scratch::new();
    let script = format!("exec {} --exact --ignored --nocapture launcher::sums_ranks", this_program());
    let output = finish(remote(&scratch, "h1:2,h2:2", &[], &script).spawn().unwrap());
    assert!(output.status.success(), "{output:?}");
    let sums = String::from_utf8_lossy(&output.stdout).matches("sum of 4 ranks: 10").count();
    assert_eq!(sums, 4, "{output:?}");
}

#[test]
fn the_first_failure_on_any_host_gives_the_exit_code_and_stops_all() {
    let scratch = Scratch::new();
    let rest = "if [ $RANK = 2 ]; then exit 7; fi; exec sleep 1000";
    let (child, pids) = start(&scratch, "h1:2,h2:1,localhost:1", 4, rest);
    let output = finish(child);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    for words in ["rank 2 on h2 (pid ", "host h2 (rank 2) exited with code 7; stopping the other hosts\n"] {
        assert!(stderr.contains(words), "`{words}` is missing in: {stderr}");
    }
    assert!(pids.into_iter().all(|pid| !alive(pid)));
}

#[test]
fn signals_to_the_launcher_reach_all_hosts_and_the_secret_is_in_no_list_of_processes() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let scratch = Scratch::new();
        let (child, pids) = start(&scratch, "h1:2,h2:2", 4, "sleep 1000; true");
        assert_eq!(shown_in_process_lists(TOKEN), [""; 0]);
        kill_process(pid_of(child.id()), signal).unwrap();
        let output = finish(child);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(pids.into_iter().all(|pid| !alive(pid)));
    }
}

#[test]
fn a_killed_launcher_leaves_no_process_on_any_host() {
    let scratch = Scratch::new();
    let (mut child, pids) = start(&scratch, "h1:2,localhost:1,h2:1", 4, "exec sleep 1000");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the ranks have ended", || pids.iter().all(|pid| !alive(*pid)));
    let connection = |host: &str| text(&scratch, &format!("connection.{host}")).trim().parse().unwrap();
    wait_until("the connections have ended", || ["h1", "h2"].iter().all(|host| !alive(connection(host))));
}

#[test]
fn a_host_whose_connection_ends_stops_its_ranks_and_the_others() {
    let scratch = Scratch::new();
    let (child, pids) = start(&scratch, "h1:1,h2:2", 3, "exec sleep 1000");
    let connection = text(&scratch, "connection.h2").trim().parse().unwrap();
    kill_process(pid_of(connection), Signal::KILL).unwrap();
    let output = finish(child);
    assert_eq!(output.status.code(), Some(129), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("host h2 (ranks 1 to 2)"), "{output:?}");
    assert!(pids.into_iter().all(|pid| !alive(pid)));
}

#[test]
fn what_is_written_without_prefix_arrives_as_it_is() {
    let scratch = Scratch::new();
    let script = "printf 'one\\ntwo '; printf three >&2";
    let output = finish(remote(&scratch, "h1:1", &["--no-prefix"], script).spawn().unwrap());
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[h1] Welcome to h1\none\ntwo ");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "three");
}

#[test]
fn a_host_file_places_the_ranks() {
    let scratch = Scratch::new();
    let path = scratch.0.join("hosts");
    fs::write(&path, "# two of one\nlocalhost slots=2 max_slots=4\n127.0.0.1 slots=2\n").unwrap();
    let script = "echo $LOCAL_RANK of $LOCAL_WORLD_SIZE";
    let output = run(&["-n", "3", "--host-file", path.to_str().unwrap()], script);
    assert_eq!(sorted_lines(&output.stdout), ["[0] 0 of 2", "[1] 1 of 2", "[2] 0 of 1"], "{output:?}");
}

#[test]
fn hosts_that_cannot_be_used_are_named() {
    let says = |options: &[&str], code: i32, words: &str| {
        let start = Instant::now();
        let output = run(options, "true");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && stderr.contains(words), "{words}: {output:?}");
        assert!(start.elapsed() < Duration::from_secs(10), "{words}");
    };
    says(&["--hosts", "h1:2", "-n", "3"], 1, "3 ranks do not fit 2 slots");
    says(&["--hosts", "-oProxyCommand=x"], 1, "is not a host");
    says(&["--host-file", "/nowhere/hosts"], 1, "cannot read the host file /nowhere/hosts");
    says(&["-n", "1", "--dir", "/"], 1, "--dir");
    says(&["-n", "1", "--ssh", "ssh"], 1, "--ssh");
    says(&["--hosts", "h1,h2", "--ssh", "/nowhere/ssh"], 1, "host h1: cannot start `/nowhere/ssh`");
    // These have one host each: if two failed, either could be the first that is named.
    says(&["--hosts", "h1", "--ssh", "false"], 1, "host h1 (rank 0) exited with code 1 before a rank");
    says(&["--hosts", "h1", "--ssh", "true"], 1, "--remote-bin");
    says(&["--hosts", "localhost", "--dir", "/nowhere"], 1, "on localhost: cannot enter /nowhere");
}

#[test]
fn hosts_work_on_when_a_rank_or_a_whole_host_is_lost() {
    let scratch = Scratch::new();
    let wait = format!("until [ -e {}/go ]; do sleep 0.05; done", scratch.0.display());
    let there = scratch.0.join("there");
    let script = format!(
        "case $RANK in 1) kill -9 $$;; 3) touch {}; exec sleep 1000;; *) {wait}; echo done $RANK;; esac",
        there.display()
    );
    let options = ["--on-failure", "keep", "--grace", "0s"];
    let mut child = remote(&scratch, "h1:2,h2:1,h3:1", &options, &script).spawn().unwrap();
    wait_until("the third host has its rank", || there.exists());
    kill_process(pid_of(text(&scratch, "connection.h3").trim().parse().unwrap()), Signal::KILL).unwrap();
    let shown = Shown::new(child.stderr.take().unwrap());
    let lost = loop {
        let line = shown.up_to(b'\n', &mut child);
        if line.contains("host h3") {
            break line;
        }
    };
    fs::write(scratch.0.join("go"), "").unwrap();
    let output = finish(child);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let lines = sorted_lines(&output.stdout);
    assert_eq!(lines[..2], ["[0] done 0", "[2] done 2"]);
    assert!(lost.contains("host h3 (rank 3) exited with code 129; the others work on (3 ranks"), "{lost}");
}
