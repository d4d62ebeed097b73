//! The command that runs each series, and the times that it gives.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::child;
use super::install::{Mpi, Tools};
use super::parse;
use super::what::{Collective, Series, Time};

/// One run of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run<'a> {
    pub(crate) series: Series,
    pub(crate) collective: Collective,
    pub(crate) ranks: usize,
    /// The sizes in bytes, separated by commas.
    pub(crate) sizes: &'a str,
    /// Whether our program checks every result, outside of the times that it measures. The programs of OpenMPI and Gloo always check theirs.
    pub(crate) check: bool,
    pub(crate) limit: Duration,
}

/// What a run gave: times, and what went wrong. A peer's program that failed half-way has given some times.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    pub(crate) times: Vec<Time>,
    /// Only for [`Series::Await`]: the times of [`Series::Wait`], which the same program measures in turns with `times`.
    pub(crate) in_turns: Vec<Time>,
    pub(crate) failure: Option<String>,
}

impl Run<'_> {
    /// Runs the program. `scratch` is a temporary folder.
    pub(crate) fn go(&self, tools: &Tools, root: &Path, scratch: &Path) -> Ran {
        match self.try_to_go(tools, root, scratch) {
            Ok(ran) => ran,
            Err(failure) => Ran { failure: Some(failure), ..Ran::default() },
        }
    }

    fn try_to_go(&self, tools: &Tools, root: &Path, scratch: &Path) -> Result<Ran, String> {
        let json = scratch.join("perf.json");
        let _ = fs::remove_file(&json);
        let mut command = self.command(tools, root, &json)?;
        let program = command.get_program().to_string_lossy().into_owned();
        let end = child::run(&mut command, self.limit, scratch).map_err(|e| format!("{program}: {e}"))?;
        let failure = end.failure(self.limit);
        if !self.series.is_ours() {
            let times = parse::lines(&end.stdout);
            let nothing = times.is_empty().then(|| "it gave no figures".to_owned());
            return Ok(Ran { times, failure: failure.or(nothing), ..Ran::default() });
        }
        if failure.is_some() {
            return Ok(Ran { failure, ..Ran::default() });
        }
        let text = fs::read_to_string(&json).map_err(|e| format!("its figures: {e}"))?;
        let times = |field| parse::perf(&text, field).map_err(|e| format!("its figures: {e}"));
        let in_turns = if self.series == Series::Await { times("wait_us")? } else { Vec::new() };
        Ok(Ran { times: times("median_us")?, in_turns, failure })
    }

    fn command(&self, tools: &Tools, root: &Path, json: &Path) -> Result<Command, String> {
        let ranks = self.ranks.to_string();
        let mut command = match self.series {
            Series::Memory | Series::Exchange => {
                let mut command = Command::new(&tools.limits);
                command.arg(if self.series == Series::Memory { "memory" } else { "tcp" });
                command.args([&ranks, self.sizes]);
                command
            }
            Series::MpiShm | Series::MpiTcp => self.mpi(tools.mpi.as_ref()?),
            Series::Gloo => {
                // The port is free now, and is given up for Gloo: another program could take it before, which is unlikely.
                let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
                let port = port.map_err(|error| format!("no free port: {error}"))?.port().to_string();
                let mut command = Command::new(&tools.gloo.as_ref()?.python);
                command.arg(root.join("benches/peers/gloo_all_reduce.py")).args([&ranks, &port, self.sizes]);
                command
            }
            _ => {
                let mut command = Command::new(&tools.ours);
                // Algorithms are chosen by the built-in rules, as for a user without a tuning table.
                command.env("ALLSTREAM_TUNING", "off");
                command.args(["perf", self.collective.name(), "-N", &ranks, "--sizes", self.sizes]);
                command.args(["-c", if self.check { "1" } else { "0" }, "-J"]).arg(json);
                // Binds each rank to a core if there are enough cores, as mpirun does by default (for two ranks).
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                if self.ranks <= cores && self.series != Series::Threads {
                    command.args(["--bind-to", "core"]);
                }
                command.args(match self.series {
                    Series::Threads => &["--threads"][..],
                    Series::Await => &["--link", "shm", "--await=turns"],
                    Series::Arena => &["--link", "shm", "--alloc", "arena"],
                    Series::Tcp => &["--link", "tcp"],
                    _ => &["--link", "shm"],
                });
                command
            }
        };
        command.current_dir(root);
        Ok(command)
    }

    fn mpi(&self, mpi: &Mpi) -> Command {
        let mut command = Command::new(&mpi.mpirun);
        if rustix::process::geteuid().is_root() {
            command.arg("--allow-run-as-root");
        }
        // Ranks may outnumber cores. `ob1` makes OpenMPI use the links named below, also on a machine with a faster network.
        command.args(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "--mca", "pml", "ob1"]);
        let links = match self.series {
            Series::MpiTcp => &["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"][..],
            // The name of the link over shared memory since version 5; it was `vader` before.
            _ if mpi.major() >= 5 => &["--mca", "btl", "sm,self"],
            _ => &["--mca", "btl", "vader,self"],
        };
        command.args(links).args(["-n", &self.ranks.to_string()]);
        command.arg(&mpi.program).args([self.collective.name(), self.sizes]);
        command
    }
}

impl Mpi {
    /// The first number in "mpirun (Open MPI) 4.1.4"; 0 if there is none.
    fn major(&self) -> u32 {
        let words = self.version.split_whitespace();
        words.filter_map(|word| word.split('.').next()?.parse().ok()).next().unwrap_or(0)
    }
}

/// A temporary folder for what programs write, removed on drop.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(root: &Path) -> Result<Scratch, String> {
        let folder = crate::runner::target(root).join(format!("peers/run-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Scratch(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools() -> Tools {
        let version = "mpirun (Open MPI) 4.1.4".into();
        Tools {
            ours: "allstream".into(),
            limits: "limits".into(),
            mpi: Ok(Mpi { mpirun: "mpirun".into(), program: "mpi_collectives".into(), version }),
            gloo: Err("no torch".into()),
        }
    }

    fn run(series: Series) -> Run<'static> {
        let (collective, limit) = (Collective::AllReduce, Duration::from_secs(60));
        Run { series, collective, ranks: 4, sizes: "4,1024", check: false, limit }
    }

    fn words(series: Series, tools: &Tools) -> Result<String, String> {
        let command = run(series).command(tools, Path::new("/"), Path::new("j"))?;
        let words = [command.get_program()].into_iter().chain(command.get_args());
        Ok(words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn each_series_is_run_in_its_way() {
        let mut tools = tools();
        let ours = "allstream perf all_reduce -N 4 --sizes 4,1024 -c 0 -J j --link shm";
        assert_eq!(words(Series::Shm, &tools).as_deref(), Ok(ours));
        assert_eq!(words(Series::Arena, &tools), Ok(format!("{ours} --alloc arena")));
        assert_eq!(words(Series::Exchange, &tools).as_deref(), Ok("limits tcp 4 4,1024"));
        assert!(words(Series::MpiShm, &tools).unwrap().contains("--mca btl vader,self -n 4 mpi_collectives"));
        assert_eq!(words(Series::Gloo, &tools), Err("no torch".into()));
        tools.mpi.as_mut().unwrap().version = "mpirun (Open MPI) 5.0.2".into();
        assert!(words(Series::MpiShm, &tools).unwrap().contains("--mca btl sm,self"));
    }

    #[test]
    fn a_program_that_fails_is_named_and_what_it_gave_is_kept() {
        let scratch = Scratch(std::env::temp_dir().join(format!("allstream-peers-{}", std::process::id())));
        fs::create_dir_all(&scratch.0).unwrap();
        let program = scratch.0.join("program");
        let script = "#!/bin/sh\necho time all_reduce in_place 4 4 2.5\necho out of luck >&2\nexit 1\n";
        fs::write(&program, script).unwrap();
        let mode = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
        fs::set_permissions(&program, mode).unwrap();
        let tools = Tools { limits: program.clone(), ours: program, ..tools() };
        let peer = run(Series::Memory).go(&tools, &scratch.0, &scratch.0);
        assert_eq!(peer.times.len(), 1);
        assert_eq!(peer.failure.as_deref(), Some("exit status: 1: out of luck"));
        let ours = run(Series::Shm).go(&tools, &scratch.0, &scratch.0);
        assert!(ours.times.is_empty() && ours.failure.is_some());
        let missing = run(Series::Gloo).go(&tools, &scratch.0, &scratch.0);
        assert_eq!(missing.failure.as_deref(), Some("no torch"));
    }
}
