//! `cargo xtask peers`: times our collectives, OpenMPI, Gloo and what the machine can do, with the same sizes and ranks, in interleaved rounds.

mod bars;
mod child;
mod install;
mod parse;
mod programs;
mod table;
mod what;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Args;
use parse_size::Config;

use install::Tools;
use programs::{Run, Scratch};
use table::About;
use what::{Collective, Figures, Link, Series};

#[derive(Clone, Debug, Args)]
pub(crate) struct PeersArgs {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "2,4,8", value_parser = ranks)]
    ranks: Vec<usize>,
    /// Interleaved rounds; the figures are their medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Sizes of a rank's largest buffer, as 4,64K,1M (K, M, G are powers of 1024)
    #[arg(long, value_delimiter = ',', value_parser = size,
          default_value = "4,1K,4K,16K,64K,256K,1M,4M,8M,16M,32M,128M")]
    sizes: Vec<u64>,
    /// Smallest size, instead of a list
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = size, conflicts_with = "sizes")]
    minbytes: Option<u64>,
    /// Largest size, instead of a list
    #[arg(short = 'e', long, value_name = "SIZE", value_parser = size, conflicts_with = "sizes")]
    maxbytes: Option<u64>,
    /// Each size is the one before times this, instead of a list
    #[arg(short = 'f', long, value_name = "FACTOR", conflicts_with = "sizes",
          value_parser = clap::value_parser!(u32).range(2..))]
    stepfactor: Option<u32>,
    /// Which collectives
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "all_reduce,reduce_scatter,all_gather,broadcast,reduce,all_to_all"
    )]
    collectives: Vec<Collective>,
    /// Which links
    #[arg(long, value_enum, value_delimiter = ',', default_value = "shm,tcp")]
    links: Vec<Link>,
    /// Install torch (for Gloo) with pip, under target/peers, if no Python has it
    #[arg(long)]
    torch: bool,
    /// The package index to install torch from: torch from an index for CPUs alone is several times smaller
    #[arg(long, value_name = "URL", requires = "torch")]
    torch_index: Option<String>,
    /// A Python that has torch (or the variable PYTHON)
    #[arg(long)]
    python: Option<PathBuf>,
    /// Install nothing: what is missing is left out
    #[arg(long)]
    no_install: bool,
    /// A program that takes longer is cut off
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Write the table to this file, too (Markdown)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write all figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    Config::new().with_binary().parse_size(text).map_err(|error| error.to_string())
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 2..=256) => Ok(ranks),
        _ => Err("expected a number of ranks, 2 to 256".into()),
    }
}

impl PeersArgs {
    /// The sizes to measure, in bytes, in increasing order.
    fn sizes(&self) -> Result<BTreeSet<u64>, String> {
        if self.minbytes.is_none() && self.maxbytes.is_none() && self.stepfactor.is_none() {
            return Ok(self.sizes.iter().copied().collect());
        }
        let (least, most) = (self.minbytes.unwrap_or(4), self.maxbytes.unwrap_or(32 << 20));
        if least == 0 || least > most {
            return Err(format!("-b {least} -e {most}: expected a smallest size from 1 to the largest"));
        }
        let factor = u64::from(self.stepfactor.unwrap_or(4));
        Ok(std::iter::successors(Some(least), |size| size.checked_mul(factor))
            .take_while(|size| *size <= most)
            .collect())
    }
}

/// Measures, prints the table, and writes the files. Fails if our own programs cannot be built or fail, or a file cannot be written; a peer that
/// is missing or fails is only reported.
pub(crate) fn run(args: &PeersArgs, root: &Path) -> Result<ExitCode, String> {
    let sizes: Vec<String> = args.sizes()?.iter().map(u64::to_string).collect();
    let scratch = Scratch::new(root)?;
    child::take_signals(&scratch.0).map_err(|error| format!("cannot take signals: {error}"))?;
    let tools = install::tools(args, root, &scratch.0)?;
    let about = About {
        date: said("date", &["-u", "+%Y-%m-%d %H:%M UTC"], root),
        machine: machine(),
        commit: said("git", &["describe", "--always", "--dirty"], root),
        command: command(std::env::args().skip(1)),
        rounds: 0,
        peers: vec![
            tools.mpi.as_ref().map_or_else(Clone::clone, |mpi| mpi.version.clone()),
            tools.gloo.as_ref().map_or_else(Clone::clone, |gloo| format!("Gloo of torch {}", gloo.version)),
        ],
        failures: Vec::new(),
    };
    let mut job = Job {
        args,
        root,
        tools,
        sizes: sizes.join(","),
        scratch,
        about,
        figures: Figures::default(),
        failed: BTreeSet::new(),
    };
    for round in 1..=usize::from(args.rounds) {
        job.round(round);
        job.about.rounds = round;
        // Written after each round, so that a run that is stopped leaves the figures of the rounds before.
        job.write()?;
    }
    println!("{}", table::markdown(&job.about, &job.figures));
    let ours = job.failed.iter().any(|(series, ..)| series.is_ours());
    Ok(if ours { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

struct Job<'a> {
    args: &'a PeersArgs,
    root: &'a Path,
    tools: Tools,
    /// The sizes in bytes, separated by commas.
    sizes: String,
    scratch: Scratch,
    about: About,
    figures: Figures,
    /// Programs that failed. They are not run again, as one that hangs would hang in every round.
    failed: BTreeSet<(Series, Collective, usize)>,
}

impl Job<'_> {
    /// Runs every program once, for all ranks and collectives.
    fn round(&mut self, round: usize) {
        for &ranks in &self.args.ranks {
            for &collective in &self.args.collectives {
                // Each round begins with another series: what ran just before, spinning or asleep, shows in the times of the smallest sizes.
                let mut order = Series::ALL;
                order.rotate_left((round - 1) % Series::ALL.len());
                for series in order {
                    if self.has(series, collective) && !self.failed.contains(&(series, collective, ranks)) {
                        self.one(round, ranks, collective, series);
                    }
                }
            }
        }
    }

    /// Whether this series is to be run for this collective, and its program is here.
    fn has(&self, series: Series, collective: Collective) -> bool {
        let there = match series {
            Series::Wait => false, // the run of `Await` gives its times
            Series::Gloo => self.tools.gloo.is_ok(),
            series => !series.is_mpi() || self.tools.mpi.is_ok(),
        };
        there && series.times(collective) && series.on(&self.args.links)
    }

    fn one(&mut self, round: usize, ranks: usize, collective: Collective, series: Series) {
        let limit = Duration::from_secs(self.args.limit);
        let run = Run { series, collective, ranks, sizes: &self.sizes, check: round == 1, limit };
        let start = Instant::now();
        let ran = run.go(&self.tools, self.root, &self.scratch.0);
        let what = format!("{}, {ranks} ranks, {}", collective.name(), series.name());
        let end = ran.failure.as_deref().unwrap_or("done");
        eprintln!("round {round}: {what}: {end}, {:.1} s", start.elapsed().as_secs_f64());
        ran.times.into_iter().for_each(|time| self.figures.add(series, time));
        ran.in_turns.into_iter().for_each(|time| self.figures.add(Series::Wait, time));
        if let Some(failure) = ran.failure {
            self.failed.insert((series, collective, ranks));
            self.about.failures.push(format!("{what}, round {round}: {failure}"));
        }
    }

    fn write(&self) -> Result<(), String> {
        let write = |path: &Path, text: String| {
            fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
        };
        if let Some(path) = &self.args.out {
            write(path, table::markdown(&self.about, &self.figures))?;
        }
        if let Some(path) = &self.args.json {
            write(path, format!("{:#}\n", table::json(&self.about, &self.figures)))?;
        }
        Ok(())
    }
}

/// The command as it was typed, without the options that name files or a package index of this machine: the table that shows it is committed.
fn command(arguments: impl Iterator<Item = String>) -> String {
    let mut text = String::from("cargo xtask");
    let mut path = false;
    for argument in arguments {
        let names_a_path = ["--out", "--json", "--python", "--torch-index"];
        let skip = path || names_a_path.iter().any(|name| argument.starts_with(name));
        path = !path && names_a_path.contains(&argument.as_str());
        if !skip {
            text += &format!(" {argument}");
        }
    }
    text
}

/// What a small command prints; "unknown" and the program's name if it prints nothing.
fn said(program: &str, arguments: &[&str], root: &Path) -> String {
    let output = Command::new(program).args(arguments).current_dir(root).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.ok().filter(|text| !text.is_empty()).unwrap_or_else(|| format!("unknown ({program})"))
}

/// The number of cores, the processor's name, and the load average before the measurement.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |line: &str| Some(line.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned());
    let name = info.lines().find_map(field).unwrap_or_else(|| std::env::consts::ARCH.into());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown").to_owned();
    format!("{cores} cores, {name}; load {load} before")
}

#[cfg(test)]
mod tests {
    use clap::{Parser, ValueEnum};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        peers: PeersArgs,
    }

    fn args(line: &str) -> Result<PeersArgs, String> {
        let words = ["peers"].into_iter().chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.peers).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_are_a_list_or_a_range() {
        let sizes = |line: &str| args(line).and_then(|args| args.sizes()).map(Vec::from_iter);
        assert_eq!(sizes("--sizes 1M,4,64K"), Ok(vec![4, 64 << 10, 1 << 20]));
        assert_eq!(sizes("-b 4 -e 1K -f 8"), Ok(vec![4, 32, 256]));
        assert_eq!(sizes("-b 1M"), Ok(vec![1 << 20, 4 << 20, 16 << 20]));
        assert_eq!(sizes("").unwrap().len(), 12);
        assert!(sizes("-b 2K -e 1K").unwrap_err().contains("-b 2048 -e 1024"));
        assert!(sizes("--sizes 4 -b 4").is_err() && sizes("-f 1").is_err() && sizes("--sizes x").is_err());
    }

    #[test]
    fn the_command_line_is_read() {
        let args = args("--ranks 2,3 --collectives reduce,all_to_all --links tcp --rounds 5").unwrap();
        assert_eq!((args.ranks, args.rounds, args.links), (vec![2, 3], 5, vec![Link::Tcp]));
        assert_eq!(args.collectives, [Collective::Reduce, Collective::AllToAll]);
        let defaults = self::args("").unwrap();
        assert_eq!((defaults.ranks, defaults.links.len()), (vec![2, 4, 8], 2));
        assert_eq!(defaults.collectives.len(), Collective::value_variants().len());
        for wrong in ["--ranks 1", "--rounds 0", "--collectives gather", "--limit 0", "--torch-index x"] {
            assert!(self::args(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_command_is_told_without_paths() {
        let words = |line: &str| command(line.split(' ').map(String::from));
        let line = "peers --out /a/b.md --rounds 3 --json=/a/j --python /p/python --links shm";
        assert_eq!(words(line), "cargo xtask peers --rounds 3 --links shm");
    }
}
