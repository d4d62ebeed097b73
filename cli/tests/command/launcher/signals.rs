//! Signals to the launcher, and those that ranks get from it; and signal settings and limits that a launcher inherits.

use std::os::unix::process::CommandExt;

use super::*;

/// A rank that makes a file `ready` once its handlers are set, and then a file for each signal that it gets, until there is a file `stop`.
/// `shell` is a command that starts the rank's own shell, or nothing. Here and below, a shell starts in the background what it waits for:
/// dash loses a signal that comes while it starts a command in the foreground.
fn listener(scratch: &Scratch, shell: &str) -> String {
    let place = scratch.0.display();
    let handlers: String = (["USR1", "USR2", "CONT", "WINCH"].iter())
        .map(|name| format!("trap ': > {place}/{name}.'$RANK {name}; "))
        .collect();
    let rank = format!(
        "{handlers}: > {place}/ready.$RANK; until [ -e {place}/stop ]; do sleep 0.02 & wait $!; done; echo end"
    );
    fs::write(scratch.0.join("rank.sh"), rank).unwrap();
    format!("{shell} /bin/sh {place}/rank.sh; exit $?")
}

fn wait_for_files(scratch: &Scratch, name: &str, ranks: usize) {
    wait_until(name, || (0..ranks).all(|rank| scratch.0.join(format!("{name}.{rank}")).exists()));
}

/// Sends each signal that does not end a job, checks that all ranks get it, and that they still end well.
fn sees_all_signals(scratch: &Scratch, child: Child, ranks: usize) {
    wait_for_files(scratch, "ready", ranks);
    for (signal, name) in
        [(Signal::USR1, "USR1"), (Signal::USR2, "USR2"), (Signal::CONT, "CONT"), (Signal::WINCH, "WINCH")]
    {
        kill_process(pid_of(child.id()), signal).unwrap();
        wait_for_files(scratch, name, ranks);
    }
    fs::write(scratch.0.join("stop"), "").unwrap();
    let output = finish(child);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(text(&output.stdout).matches("end").count(), ranks, "{output:?}");
}

#[test]
fn signals_that_end_nothing_are_handed_to_all_ranks_also_behind_a_shell() {
    let scratch = Scratch::new();
    let child = launcher(&["-n", "2"], &listener(&scratch, "")).spawn().unwrap();
    sees_all_signals(&scratch, child, 2);
    let scratch = Scratch::new();
    let child =
        launcher(&["--hosts", "localhost:1,127.0.0.1:2"], &listener(&scratch, "env")).spawn().unwrap();
    sees_all_signals(&scratch, child, 3);
}

#[test]
fn a_rank_without_a_handler_is_not_ended_by_sigusr1_and_that_is_said() {
    let scratch = Scratch::new();
    let rest = format!("until [ -e {}/stop ]; do sleep 0.02; done; echo end", scratch.0.display());
    let (mut child, _) = start_sleepers(&["-n", "2"], 2, &scratch, &rest);
    kill_process(pid_of(child.id()), Signal::USR1).unwrap();
    let said = Shown::new(child.stderr.take().unwrap()).up_to(b'\n', &mut child);
    let expected =
        "allstream run: SIGUSR1 was not handed to rank 0, 1: without a handler for it a rank would end\n";
    assert_eq!(said, expected);
    fs::write(scratch.0.join("stop"), "").unwrap();
    let output = finish(child);
    assert_eq!(
        (output.status.code(), text(&output.stdout).matches("end").count()),
        (Some(0), 2),
        "{output:?}"
    );
}

/// A rank that takes `seconds` to write a checkpoint when SIGINT or SIGTERM tells it to end.
fn checkpoints(scratch: &Scratch, seconds: &str) -> String {
    let place = scratch.0.display();
    let save = |name: &str| format!("trap 'sleep {seconds}; : > {place}/{name}.$RANK; exit 0' {name}; ");
    let (int, term) = (save("INT"), save("TERM"));
    let rank = format!("{int}{term}: > {place}/ready.$RANK; while :; do sleep 0.02 & wait $!; done");
    fs::write(scratch.0.join("rank.sh"), rank).unwrap();
    format!("/bin/sh {place}/rank.sh; true")
}

#[test]
fn ranks_are_told_to_end_by_the_signal_that_came_and_have_time_for_a_checkpoint() {
    for (signal, name, code) in
        [(Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143), (Signal::HUP, "TERM", 129)]
    {
        for options in [&["-n", "2"][..], &["--hosts", "localhost:1,127.0.0.1:1"]] {
            let scratch = Scratch::new();
            let child = launcher(options, &checkpoints(&scratch, "0.3")).spawn().unwrap();
            wait_for_files(&scratch, "ready", 2);
            kill_process(pid_of(child.id()), signal).unwrap();
            let output = finish(child);
            assert_eq!(output.status.code(), Some(code), "{output:?}");
            // The shell that started a rank ended at the signal, long before the rank.
            wait_for_files(&scratch, name, 2);
            let other = if name == "INT" { "TERM" } else { "INT" };
            assert!(!scratch.0.join(format!("{other}.0")).exists(), "{name}");
        }
    }
}

#[test]
fn ranks_that_do_not_end_are_killed_after_the_time_given_and_at_once_the_second_time() {
    for (kill_after, second) in [("0.5s", None), ("30s", Some(Signal::TERM)), ("30s", Some(Signal::INT))] {
        for hosts in [&["-n", "2"][..], &["--hosts", "localhost:1,127.0.0.1:1"]] {
            let scratch = Scratch::new();
            let ready = format!(
                "trap '' INT; trap ': > {0}/told.'$RANK TERM; : > {0}/ready.$RANK",
                scratch.0.display()
            );
            let rest = format!("{ready}; while :; do sleep 0.05 & wait $!; done");
            let options = [hosts, &["--kill-after", kill_after]].concat();
            let (child, pids) = start_sleepers(&options, 2, &scratch, &rest);
            wait_for_files(&scratch, "ready", 2);
            let start = Instant::now();
            kill_process(pid_of(child.id()), Signal::TERM).unwrap();
            wait_for_files(&scratch, "told", 2);
            if let Some(second) = second {
                // A terminal that closes may send SIGHUP twice, so SIGHUP does not count as the second signal.
                kill_process(pid_of(child.id()), Signal::HUP).unwrap();
                kill_process(pid_of(child.id()), second).unwrap();
            }
            let output = finish(child);
            assert_eq!(output.status.code(), Some(143), "{output:?}");
            let took = start.elapsed();
            assert!(
                took < Duration::from_secs(20) && (second.is_some() || took >= Duration::from_millis(500)),
                "{took:?}"
            );
            assert!(pids.into_iter().all(|pid| !alive(pid)));
        }
    }
}

#[test]
fn a_job_is_suspended_as_a_whole_and_goes_on() {
    let scratch = Scratch::new();
    let rest = format!("until [ -e {}/stop ]; do sleep 0.02; done", scratch.0.display());
    let (child, pids) = start_sleepers(&["-n", "2"], 2, &scratch, &rest);
    let all: Vec<u32> = pids.into_iter().chain([child.id()]).collect();
    // `D`: a shell in vfork, which waits because its child was stopped before it became another program.
    let is_still = |pid: &u32| matches!(test_support::process_state(*pid), Some('T' | 'D'));
    let are = |stopped: bool| all.iter().all(|pid| is_still(pid) == stopped);
    kill_process(pid_of(child.id()), Signal::TSTP).unwrap();
    wait_until("all stand still", || are(true));
    kill_process(pid_of(child.id()), Signal::CONT).unwrap();
    wait_until("all run", || are(false));
    fs::write(scratch.0.join("stop"), "").unwrap();
    assert_eq!(finish(child).status.code(), Some(0));
}

#[test]
fn what_a_parent_ignores_or_blocks_does_no_harm() {
    let inherits = |script: &str| {
        let mut command = launcher(&["-n", "2"], script);
        // SAFETY: between fork and exec only async-signal-safe work is allowed. These three functions are, on memory of the closure's own.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                let mut all = std::mem::zeroed();
                libc::sigfillset(&mut all);
                libc::sigprocmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
                Ok(())
            })
        };
        command.spawn().unwrap()
    };
    let output = finish(inherits("echo $(grep -E 'Sig(Blk|Ign)' /proc/self/status)"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    for line in sorted_lines(&output.stdout) {
        let masks: Vec<&str> = line.split_whitespace().collect();
        let ["SigBlk:", blocked, "SigIgn:", ignored] = masks[1..] else { panic!("{line}") };
        let [blocked, ignored] = [blocked, ignored].map(|mask| u64::from_str_radix(mask, 16).unwrap());
        assert_eq!((blocked, ignored & (1 << (libc::SIGCHLD - 1))), (0, 0), "{line}");
    }
    let scratch = Scratch::new();
    assert_eq!(finish(inherits("exit $((3 + RANK))")).status.code().map(|code| code / 3), Some(1));
    // Signals that the parent blocked still reach the launcher.
    let child = inherits(&checkpoints(&scratch, "0"));
    wait_for_files(&scratch, "ready", 2);
    kill_process(pid_of(child.id()), Signal::TERM).unwrap();
    assert_eq!(finish(child).status.code(), Some(143));
    wait_for_files(&scratch, "TERM", 2);
}

/// A soft limit of 24 descriptors is too low for the pipes of 16 ranks: the launcher raises its own, and each rank gets the one of 24.
#[test]
fn a_small_limit_of_descriptors_is_for_the_ranks_and_not_for_the_launcher() {
    let shell = "ulimit -Sn 24; exec \"$0\" run -n 16 -- /bin/sh -c 'ulimit -n'";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", shell, env!("CARGO_BIN_EXE_allstream")]).env_remove("ALLSTREAM_TOKEN");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = finish(command.spawn().unwrap());
    assert!(output.status.success(), "{output:?}");
    assert!(
        sorted_lines(&output.stdout).iter().filter(|line| line.ends_with("] 24")).count() == 16,
        "{output:?}"
    );
}

/// The launcher is process 1 in a namespace of its own, as in a container.
#[test]
fn as_process_1_the_launcher_reaps_what_has_lost_its_parent() {
    let unshare = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"];
    if let Err(why) = ssh::done(Command::new("unshare").args(unshare).arg("true")) {
        return others::left_out(&format!("no namespace of processes: {why}"));
    }
    // Orphans end one after the other while the rank works on. The rank exits with the number of those that nobody has reaped.
    let script = "for i in 1 2 3 4 5; do (sleep 0.0$i & exec true); done
        i=0
        while zombies=$(grep -l '^PPid:[^0-9]*1$' /proc/[0-9]*/status | xargs grep -l '^State:.*Z' | wc -l);
            [ $zombies != 0 ] || [ $(grep -l '^Name:.*sleep' /proc/[0-9]*/status | wc -l) != 0 ]
        do sleep 0.05; i=$((i+1)); [ $i = 100 ] && exit $zombies; done
        exit 0";
    let mut command = Command::new("unshare");
    command
        .args(unshare)
        .arg(env!("CARGO_BIN_EXE_allstream"))
        .args(["run", "-n", "1", "--", "/bin/sh", "-c", script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = finish(command.spawn().unwrap());
    assert_eq!(output.status.code(), Some(0), "zombies of process 1: {output:?}");
}

/// Each rank starts a process in a session of its own, one in the background and one behind a shell. None may outlive the launcher.
#[test]
fn a_killed_launcher_leaves_nothing_of_what_ranks_have_started() {
    for options in [&["-n", "2"][..], &["--hosts", "localhost:1,127.0.0.1:1"]] {
        let scratch = Scratch::new();
        let place = scratch.0.display();
        let tell = |name: &str| {
            format!(
                "sh -c 'echo $$ > {place}/{name}.'$RANK'.new; mv {place}/{name}.'$RANK'.new {place}/{name}.'$RANK'; exec sleep 1000'"
            )
        };
        let script = format!("setsid {} & {} & {}; true", tell("daemon"), tell("background"), tell("behind"));
        let mut child = launcher(options, &script).spawn().unwrap();
        for name in ["daemon", "background", "behind"] {
            wait_for_files(&scratch, name, 2);
        }
        let pids = scratch.pids();
        assert_eq!(pids.len(), 6);
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until("nothing is left", || pids.iter().all(|pid| !alive(*pid)));
    }
}

/// The directory of this process's cgroup, if this user may make cgroups below it; otherwise the reason.
fn own_cgroup() -> Result<PathBuf, String> {
    let (own, mounts) = ["cgroup", "mounts"]
        .map(|name| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default())
        .into();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).ok_or("no cgroup of version 2")?;
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
    let place =
        mount.and_then(|line| line.split(' ').nth(1)).ok_or("cgroups of version 2 are not mounted")?;
    let own = Path::new(place).join(own);
    let probe = own.join(Scratch::new().0.file_name().unwrap());
    fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)).map_err(|error| error.to_string())?;
    Ok(own)
}

/// A command that starts a process outside its rank's session, with nothing of the job in its environment. The process writes its id and
/// its cgroup to files.
fn escaped(scratch: &Scratch) -> String {
    let place = scratch.0.display();
    let rank = format!(
        "grep ^0:: /proc/self/cgroup | cut -c4- > {place}/cgroup.$1; echo $$ > {place}/escaped.$1.new; \
         mv {place}/escaped.$1.new {place}/escaped.$1; exec sleep 1000"
    );
    fs::write(scratch.0.join("escaped.sh"), rank).unwrap();
    format!("env -i PATH=\"$PATH\" setsid sh {place}/escaped.sh $RANK > {place}/output 2>&1 &")
}

/// A process that has left its rank's session and environment is found by the job's cgroup. The cgroup is removed at the end.
#[test]
fn in_a_cgroup_nothing_is_left_of_a_job_whatever_has_become_of_the_launcher() {
    let own = match own_cgroup() {
        Ok(own) => own,
        Err(why) => return others::left_out(&format!("no cgroup for the ranks of a job: {why}")),
    };
    // The launcher is killed, or is told to end the job, or the ranks fail.
    for (rest, signal) in
        [("exec sleep 1000", Some(Signal::KILL)), ("exec sleep 1000", Some(Signal::TERM)), ("exit 3", None)]
    {
        for options in [&["-n", "2"][..], &["--hosts", "localhost:1,127.0.0.1:1"]] {
            let scratch = Scratch::new();
            let script = format!(
                "{} until [ -e {}/escaped.$RANK ]; do sleep 0.02; done; {rest}",
                escaped(&scratch),
                scratch.0.display()
            );
            let child = launcher(options, &script).spawn().unwrap();
            wait_for_files(&scratch, "escaped", 2);
            let pids = scratch.pids();
            assert_eq!(pids.len(), 2);
            if let Some(signal) = signal {
                kill_process(pid_of(child.id()), signal).unwrap();
            }
            finish(child);
            wait_until("nothing is left", || pids.iter().all(|pid| !alive(*pid)));
            wait_for_cgroups_to_go(&own, &scratch);
        }
    }
}

fn wait_for_cgroups_to_go(own: &Path, scratch: &Scratch) {
    for rank in 0..2 {
        let named = fs::read_to_string(scratch.0.join(format!("cgroup.{rank}"))).unwrap();
        let name = Path::new(named.trim_end()).file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("allstream-"), "rank {rank} was in {named}");
        wait_until("the cgroup is gone", || !own.join(name).exists());
    }
}

/// After a job that has ended well, a process with its own session may live on, in the cgroup in which the launcher was started.
#[test]
fn what_outlives_a_job_that_ended_well_goes_back_to_the_launchers_cgroup() {
    let own = match own_cgroup() {
        Ok(own) => own,
        Err(why) => return others::left_out(&format!("no cgroup for the ranks of a job: {why}")),
    };
    let scratch = Scratch::new();
    let wait = format!("until [ -e {}/escaped.$RANK ]; do sleep 0.02; done", scratch.0.display());
    let output = run(&["-n", "2"], &format!("{} {wait}", escaped(&scratch)));
    assert!(output.status.success(), "{output:?}");
    wait_for_cgroups_to_go(&own, &scratch);
    let pids = scratch.pids();
    assert_eq!(pids.len(), 2);
    let procs = fs::read_to_string(own.join("cgroup.procs")).unwrap();
    assert!(pids.iter().all(|pid| procs.lines().any(|line| line == pid.to_string())), "{pids:?}: {procs}");
}
