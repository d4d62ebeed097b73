//! Several hosts by real ssh: two network namespaces, made and removed here, with a virtual cable between them and an sshd
//! of our own in the second. If a program or a permission is missing, a test says that it is skipped, and does not fail.

use super::*;

/// The addresses of the two namespaces, which nobody else can see.
const NEAR: &str = "10.213.7.1";
const FAR: &str = "10.213.7.2";
const PORT: &str = "2222";
/// The variable with the directory in which ranks write their process ids. All hosts get it, as all variables of ours.
const PLACE: &str = "ALLSTREAM_TEST_PLACE";

/// Two hosts of one machine, and the command by which the first reaches the second.
struct TwoHosts {
    scratch: Scratch,
    names: [String; 2],
    sshd: Option<Child>,
}

/// Runs a command to its end. The error is what it wrote to stderr.
pub(super) fn done(command: &mut Command) -> Result<(), String> {
    let shown = format!("{command:?}");
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let output = finish(child.map_err(|e| format!("{shown}: {e}"))?);
    let said = || format!("{shown}: {}", text(&output.stderr).trim());
    if output.status.success() { Ok(()) } else { Err(said()) }
}

/// The path of a program of the system, which may be in a directory that only root has in `PATH`.
pub(super) fn program(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    dirs.map(|dir| dir.join(name)).find(|at| at.is_file()).ok_or_else(|| format!("{name} is not installed"))
}

impl TwoHosts {
    /// `None` if this machine cannot have two such hosts; stderr then says why.
    fn new() -> Option<TwoHosts> {
        let made = TwoHosts::make();
        made.inspect_err(|why| others::left_out(&format!("no two hosts with ssh between them: {why}"))).ok()
    }

    fn make() -> Result<TwoHosts, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("network namespaces are made by root, and this test is run by another".into());
        }
        let (ip, sshd, keygen) = (program("ip")?, program("sshd")?, program("ssh-keygen")?);
        program("ssh")?;
        let scratch = Scratch::new();
        // The end of a cable has a name of 15 letters at most. It has this process's number, as other processes may run these tests.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed) % 10;
        let name = |end| format!("as{}{next}{end}", std::process::id());
        let mut hosts = TwoHosts { scratch, names: [name('a'), name('b')], sshd: None };
        let [near, far] = hosts.names.clone();
        let ip = |arguments: &str| done(Command::new(&ip).args(arguments.split(' ')));
        ip(&format!("netns add {near}"))?;
        ip(&format!("netns add {far}"))?;
        ip(&format!("link add {near} netns {near} type veth peer name {far} netns {far}"))?;
        for (host, address) in [(&near, NEAR), (&far, FAR)] {
            ip(&format!("-n {host} address add {address}/30 dev {host}"))?;
            ip(&format!("-n {host} link set {host} up"))?;
            ip(&format!("-n {host} link set lo up"))?;
        }
        for key in ["host", "user"] {
            done(Command::new(&keygen).args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(hosts.at(key)))?;
        }
        hosts.sshd = Some(hosts.serve(&sshd)?);
        let end = Instant::now() + DEADLINE;
        let command = hosts.ssh();
        loop {
            // If plain ssh does not work here, nothing can be learned about the launcher.
            let words = command.split(' ').chain([FAR, "true"]);
            match done(hosts.inside(0).args(words)) {
                Ok(()) => return Ok(hosts),
                Err(why) if Instant::now() > end || !why.contains("refused") => return Err(why),
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn at(&self, file: &str) -> PathBuf {
        self.scratch.0.join(file)
    }

    /// A command on one of the hosts: `ip` becomes the program, so the child is the program itself.
    fn inside(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]);
        command
    }

    fn serve(&self, sshd: &Path) -> Result<Child, String> {
        let [config, key, users] =
            ["config", "host", "user.pub"].map(|file| self.at(file).display().to_string());
        let lines = [
            format!("ListenAddress {FAR}"),
            format!("Port {PORT}"),
            format!("HostKey {key}"),
            format!("AuthorizedKeysFile {users}"),
            "PidFile none".into(),
            "UsePAM no".into(),
            "StrictModes no".into(),
            "PermitRootLogin prohibit-password".into(),
        ];
        fs::write(&config, lines.join("\n") + "\n").map_err(|e| e.to_string())?;
        // sshd wants an empty directory of its own in /run. It is made in a /run that nobody else sees.
        let script = "mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec \"$0\" -D -e -f \"$1\"";
        let mut command = self.inside(1);
        command.args(["sh", "-c", script]).arg(sshd).arg(config);
        let log = fs::File::create(self.at("log")).map_err(|e| e.to_string())?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().map_err(|e| format!("sshd: {e}"))
    }

    /// The command that reaches the other host.
    fn ssh(&self) -> String {
        let key = self.at("user").display().to_string();
        format!(
            "ssh -F none -p {PORT} -i {key} -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
             -o LogLevel=ERROR -o ServerAliveInterval=1"
        )
    }

    /// Starts rank 0 on the first host and rank 1 on the other, which run `script`. `ALLSTREAM_SSH` says how to reach it.
    fn launch(&self, script: &str) -> Child {
        self.job(&["--hosts", &format!("localhost,{FAR}"), "--", "/bin/sh", "-c", script])
    }

    /// A launcher on the first host with these arguments.
    fn job(&self, arguments: &[&str]) -> Child {
        let mut command = self.inside(0);
        command.arg(env!("CARGO_BIN_EXE_allstream"));
        command.args(["run", "--master-addr", NEAR]).args(arguments).env("ALLSTREAM_SSH", self.ssh());
        command
            .env_remove("ALLSTREAM_TOKEN")
            .env("ALLSTREAM_RENDEZVOUS_TIMEOUT", "20")
            .env("ALLSTREAM_HEARTBEAT_TIMEOUT", "2")
            .env(PLACE, &self.scratch.0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// A launcher, and the process ids of its two ranks, which have met and wait for each other for ever.
    fn waiters(&self) -> (Child, [u32; 2]) {
        let file = |rank: usize| self.at(&format!("rank.{rank}"));
        (0..2).for_each(|rank| drop(fs::remove_file(file(rank))));
        let words = "--exact --ignored --nocapture launcher::ssh::waits_for_the_other_rank";
        let child = self.launch(&format!("exec {} {words}", this_program()));
        wait_until("both ranks have met", || (0..2).all(|rank| file(rank).exists()));
        (child, [0, 1].map(|rank| fs::read_to_string(file(rank)).unwrap().trim().parse().unwrap()))
    }

    /// The processes of one of the hosts.
    fn processes(&self, host: usize) -> Vec<u32> {
        let output = Command::new("ip").args(["netns", "pids", &self.names[host]]).output();
        let pids = output.map(|output| text(&output.stdout)).unwrap_or_default();
        pids.lines().filter_map(|line| line.trim().parse().ok()).collect()
    }

    /// The ssh through which the launcher reaches the other host.
    fn connection(&self) -> u32 {
        let is_ssh = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(b"ssh\0")
        };
        self.processes(0).into_iter().find(is_ssh).expect("an ssh runs")
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for pid in (0..2).flat_map(|host| self.processes(host)) {
            let _ = kill_process(pid_of(pid), Signal::KILL);
        }
        if let Some(sshd) = &mut self.sshd {
            let _ = sshd.kill();
            let _ = sshd.wait();
        }
        for name in &self.names {
            let _ = done(Command::new("ip").args(["netns", "delete", name]));
        }
    }
}

/// A rank of which a test kills one: the rank that loses the other says so and ends, so that no time of grace is waited for.
#[test]
#[ignore = "a rank; started by other tests"]
fn waits_for_the_other_rank() {
    let mut comm = futures::executor::block_on(Comm::connect(Rendezvous::from_env().unwrap())).unwrap();
    let (rank, place) = (comm.rank(), PathBuf::from(std::env::var_os(PLACE).unwrap()));
    let draft = place.join(format!("draft.{rank}"));
    fs::write(&draft, std::process::id().to_string()).unwrap();
    fs::rename(&draft, place.join(format!("rank.{rank}"))).unwrap();
    comm.recv(vec![0u8], 1 - rank).wait().unwrap_or_else(|failed| panic!("{}", failed.error));
}

/// This test needs no ssh: the agent of this host, which must not take the variable for an option, inherits it too.
#[test]
fn agents_start_ranks_where_the_variable_says_how_to_reach_hosts() {
    let mut command = launcher(&["--hosts", "localhost:2"], "echo $RANK of $WORLD_SIZE");
    let output = finish(command.env("ALLSTREAM_SSH", "/nowhere/ssh -x").spawn().unwrap());
    assert!(output.status.success(), "{output:?}");
    assert_eq!(sorted_lines(&output.stdout), ["[0] 0 of 2", "[1] 1 of 2"]);
    // The variable's command is what reaches another host, and `--ssh` wins over it.
    let far = |options: &[&str]| {
        let options = [&["--hosts", "far"], options].concat();
        let mut command = launcher(&options, "true");
        text(&finish(command.env("ALLSTREAM_SSH", "/nowhere/ssh -x").spawn().unwrap()).stderr)
    };
    assert!(far(&[]).contains("host far: cannot start `/nowhere/ssh`"), "{}", far(&[]));
    assert!(far(&["--ssh", "/nowhere/else"]).contains("cannot start `/nowhere/else`"));
}

#[test]
fn a_world_forms_over_real_ssh() {
    let Some(hosts) = TwoHosts::new() else { return };
    let script = format!("exec {} --exact --ignored --nocapture launcher::sums_ranks", this_program());
    let output = finish(hosts.launch(&script));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout).matches("sum of 2 ranks: 3").count(), 2, "{output:?}");
}

#[test]
fn whatever_is_killed_over_real_ssh_the_job_ends_and_no_process_is_left() {
    let Some(hosts) = TwoHosts::new() else { return };
    let kill = |pid: u32| kill_process(pid_of(pid), Signal::KILL).unwrap();
    // Kill a rank on the other host.
    let (child, pids) = hosts.waiters();
    kill(pids[1]);
    let output = finish(child);
    // The code of the killed rank, or of rank 0, which lost it: whichever the launcher hears of first.
    assert!(matches!(output.status.code(), Some(137 | 101)), "{output:?}");
    assert!(text(&output.stderr).contains("rank 1"), "{output:?}");
    wait_until("no rank is left", || pids.iter().all(|pid| !alive(*pid)));
    // Kill the connection.
    let (child, pids) = hosts.waiters();
    kill(hosts.connection());
    let output = finish(child);
    assert!(!output.status.success() && text(&output.stderr).contains(&format!("host {FAR}")), "{output:?}");
    wait_until("no rank is left", || pids.iter().all(|pid| !alive(*pid)));
    // Kill the launcher.
    let (mut child, pids) = hosts.waiters();
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("no rank is left", || pids.iter().all(|pid| !alive(*pid)));
    wait_until("no process is left on the first host", || hosts.processes(0).is_empty());
}

#[test]
fn a_host_whose_cable_is_cut_is_lost_and_the_other_host_goes_on() {
    let Some(hosts) = TwoHosts::new() else { return };
    let program = crate::examples::example("16_survive").display().to_string();
    let slots = format!("localhost:2,{FAR}:2");
    let child = hosts.job(&["--hosts", &slots, "--on-failure", "keep", "--", &program]);
    let mut is_cut = false;
    let (lines, output) = survive::follow(child, || {
        if !std::mem::replace(&mut is_cut, true) {
            let [near, _] = &hosts.names;
            done(Command::new("ip").args(["-n", near, "link", "set", near, "down"])).unwrap();
        }
    });
    // No goodbye comes, and no end of a connection: only heartbeats tell, those of the ranks and that of the launcher's ssh.
    assert!(lines.iter().any(|line| line.ends_with("2 ranks go on without [2, 3]")), "{lines:#?} {output:?}");
    survive::assert_survived(&lines, 2);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(
        text(&output.stderr).contains(&format!("host {FAR} (ranks 2 to 3) exited with code 255")),
        "{output:?}"
    );
}
