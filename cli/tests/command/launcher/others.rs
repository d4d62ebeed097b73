//! Ranks that other launchers start. A launcher that is not installed here is reported as skipped, and fails no test.

use std::io::Write;
use std::path::Path;

use super::slurm::Slurm;
use super::*;

/// The path of a program: the one that this variable has, or one in `PATH`.
pub(super) fn installed(program: &str, variable: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|dir| dir.join(program)).find(|path| path.is_file());
    if found.is_none() {
        left_out(&format!("{program} is not in PATH, and {variable} is not set"));
    }
    found
}

/// Says why something is skipped: on stderr itself, as the test's captured output is shown only if the test fails.
pub(super) fn left_out(why: &str) {
    let _ = std::io::stderr().write_all(format!("\nskipped: {why}\n").as_bytes());
}

/// Runs a launcher whose ranks are this program. Of allstream's variables they see a timeout and what `env` has, no others.
fn sums(launcher: &Path, options: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = without_ranks(launcher);
    command
        .args(options)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "launcher::sums_ranks"])
        .env("ALLSTREAM_RENDEZVOUS_TIMEOUT", "20")
        .envs(env.iter().copied());
    finish(command.spawn().unwrap())
}

/// A command without the variables of launchers, under one of which this test may itself run; its output is piped.
pub(super) fn without_ranks(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (key, _) in std::env::vars_os() {
        let text = key.to_string_lossy();
        let names =
            ["ALLSTREAM_", "OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE"];
        if names.iter().any(|name| text.starts_with(name)) {
            command.env_remove(&key);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn assert_sums(output: &Output, ranks: usize) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = format!("sum of {ranks} ranks: {}", ranks * (ranks + 1) / 2);
    assert!(output.status.success() && text.matches(&expected).count() == ranks, "{output:?}");
}

/// Open MPI's `mpirun`, if it is here.
pub(super) fn open_mpi() -> Option<PathBuf> {
    let mpirun = installed("mpirun.openmpi", "ALLSTREAM_TEST_MPIRUN")?;
    let version = Command::new(&mpirun).arg("--version").output().unwrap();
    // Where Debian has renamed the program, it prints the second name.
    let said = text(&version.stdout);
    if !["Open MPI", "OpenRTE"].iter().any(|name| said.contains(name)) {
        left_out(&format!("{} is not Open MPI's", mpirun.display()));
        return None;
    }
    Some(mpirun)
}

/// A port that was free a moment ago.
pub(super) fn free_port() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

#[test]
fn mpich_needs_an_address_and_a_secret() {
    let Some(mpiexec) = installed("mpiexec.hydra", "ALLSTREAM_TEST_MPIEXEC") else { return };
    let options = ["-n", "3", "-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", &free_port()];
    assert_sums(&sums(&mpiexec, &options, &[("ALLSTREAM_TOKEN", "of this test")]), 3);
    let output = sums(&mpiexec, &["-n", "2"], &[]);
    let said = [&output.stdout[..], &output.stderr].map(text).concat();
    assert!(!output.status.success() && said.contains("add -genv MASTER_ADDR HOST"), "{output:?}");
}

#[test]
fn srun_says_where_ranks_meet() {
    let Some(slurm) = Slurm::start() else { return };
    let conf = slurm.conf();
    let env = [("SLURM_CONF", &*conf), ("ALLSTREAM_TOKEN", "of this test")];
    assert_sums(&sums(Path::new("srun"), &["--overcommit", "-n", "3"], &env), 3);
}

/// A batch script is itself no rank, although Slurm's variables in it look like a rank's.
#[test]
fn a_batch_script_without_srun_is_told_so_at_once() {
    let Some(slurm) = Slurm::start() else { return };
    let (scratch, conf) = (Scratch::new(), slurm.conf());
    let (script, log) = (scratch.0.join("script"), scratch.0.join("log").display().to_string());
    let rank = format!("{} --exact --ignored --nocapture launcher::sums_ranks", this_program());
    fs::write(&script, format!("#!/bin/sh\n{rank}\nsrun --overcommit -n 2 {rank}\n")).unwrap();
    let mut command = without_ranks(Path::new("sbatch"));
    command.args(["--wait", "--overcommit", "-n", "2", "--export=ALL", "-o", &log]).arg(script);
    command.env("SLURM_CONF", conf).env("ALLSTREAM_TOKEN", "of this test");
    let output = finish(command.spawn().unwrap());
    let said = fs::read_to_string(&log).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert!(said.contains("Start them all by srun in the script"), "{said}");
    assert_eq!(said.matches("sum of 2 ranks: 3").count(), 2, "{said}");
}

#[test]
fn mpirun_on_one_host_needs_nothing_set() {
    let Some(mpirun) = open_mpi() else { return };
    // Without `--allow-run-as-root` Open MPI refuses to run as root.
    let options = ["-n", "4", "--oversubscribe", "--allow-run-as-root"];
    assert_sums(&sums(&mpirun, &options, &[]), 4);
    // Several worlds of one job do not meet each other.
    let twice = "\"$0\" \"$@\" && exec \"$0\" \"$@\"";
    let output = sums(&mpirun, &[&options[..], &["sh", "-c", twice]].concat(), &[]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).matches("sum of 4 ranks: 10").count(),
        8,
        "{output:?}"
    );
}

#[test]
fn torchrun_whose_agent_holds_the_port_is_no_obstacle() {
    let Some(torchrun) = installed("torchrun", "ALLSTREAM_TEST_TORCHRUN") else { return };
    let port = free_port();
    let address = ["--master-addr", "127.0.0.1", "--master-port", &port];
    let options = [&["--nproc-per-node", "2", "--no-python"], &address[..]].concat();
    assert_sums(&sums(&torchrun, &options, &[("ALLSTREAM_TOKEN", "of this test")]), 2);
}

/// A pod sets RANK and WORLD_SIZE, and both processes that mpirun starts in it inherit them. For one of the two they agree with mpirun's
/// variables, so it finds nothing wrong, and waits for the other.
#[test]
fn a_place_that_two_launchers_give_is_named_at_once_by_the_rank_that_waits_too() {
    let (program, port) = (std::env::current_exe().unwrap(), free_port());
    let begun = Instant::now();
    let ranks = ["0", "1"].map(|rank| {
        let mut command = without_ranks(&program);
        command.args(["--exact", "--ignored", "--nocapture", "launcher::sums_ranks"]);
        command.envs([("RANK", "0"), ("WORLD_SIZE", "2")]);
        command.envs([("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_SIZE", "2")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("ALLSTREAM_TOKEN", "t")]);
        command.env("ALLSTREAM_RENDEZVOUS_TIMEOUT", "60").spawn().unwrap()
    });
    for output in ranks.map(finish) {
        let said = [&output.stdout[..], &output.stderr].map(text).concat();
        assert!(!output.status.success(), "{said}");
        for pair in ["by RANK=0 and WORLD_SIZE=2", "by OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2"] {
            assert!(said.contains(pair), "{pair}: {said}");
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
