//! `allstream tune`: measures the classes of links, and writes the table by which algorithms are chosen.

mod show;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

use allstream::plan::algorithms;
use allstream::sim::predict;
use allstream::tuning::{self, FORMAT, Figures, GroupShape, LinkClass, Row, Table, TimeBy};
use allstream::{Algo, Comm, Kind, LinkChoice, Rendezvous};
use clap::{Args, Parser};
use serde::{Deserialize, Serialize};

use crate::Exit;
use crate::console::Console;
use crate::error::BoxError;
use crate::launch;
use crate::own;
use crate::perf::{self, PerfArgs, Report};
use crate::units::size;

pub(crate) use show::info;

/// Numbers of ranks for which times are predicted, beside those that are measured.
const PREDICTED: [usize; 11] = [2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32];

/// From this size on, a ring's time tells the bandwidth.
const STREAM: u64 = 64 << 10;

/// Options of `allstream tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    /// How many ranks to start (default 2), one job for each number, as 2,4. Without it, under a launcher, be one of the ranks
    #[arg(short = 'N', long, value_delimiter = ',', value_name = "RANKS")]
    ranks: Vec<NonZeroUsize>,
    /// Classes of links to measure
    #[arg(long, value_parser = class, value_delimiter = ',', default_value = "inproc,shm,tcp")]
    link: Vec<LinkClass>,
    /// Collectives to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "all_reduce,reduce,broadcast,all_gather,reduce_scatter,all_to_all"
    )]
    collectives: Vec<Kind>,
    /// Sizes of a rank's largest buffer, in bytes
    #[arg(long, value_delimiter = ',', value_parser = size, default_value = "4,1K,16K,64K,256K,1M,4M,16M")]
    sizes: Vec<u64>,
    /// The table's file; what is measured is added to what it has [default: allstream/tuning.json in the user's folder for caches]
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Be one of the ranks, as the launcher's environment says
    #[arg(long, hide = true)]
    worker: bool,
    /// All ranks are threads of this process
    #[arg(long, hide = true)]
    worker_threads: Option<usize>,
    /// Where rank 0 leaves what was measured
    #[arg(long, hide = true)]
    worker_json: Option<PathBuf>,
}

/// Reads the name of a class of links. `auto` is not a class.
fn class(name: &str) -> Result<LinkClass, String> {
    let choice: LinkChoice = name.parse()?;
    choice.class().ok_or_else(|| "`auto` cannot be measured: name a class of links".into())
}

/// What one job has found.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    group: GroupShape,
    cores: usize,
    memory: f64,
    reports: Vec<Report>,
}

pub(crate) fn run(args: &TuneArgs) -> Result<Exit, BoxError> {
    let output = match (&args.output, args.worker) {
        (_, true) => PathBuf::new(),
        (Some(path), _) => path.clone(),
        (None, _) => {
            tuning::cached().ok_or("there is neither HOME nor XDG_CACHE_HOME: name a file with -o")?
        }
    };
    if args.worker || (args.ranks.is_empty() && Rendezvous::from_env().is_ok()) {
        return be_one(args, &output);
    }
    let two = [NonZeroUsize::MIN.saturating_add(1)];
    let ranks = if args.ranks.is_empty() { &two[..] } else { &args.ranks };
    if let Some(alone) = ranks.iter().find(|ranks| ranks.get() < 2) {
        return Err(format!("-N {alone}: one rank has nobody to be measured with").into());
    }
    let begun = Instant::now();
    let mut found = Vec::new();
    for &class in &args.link {
        for ranks in ranks {
            found.push(in_processes(args, class, ranks.get())?);
        }
    }
    conclude(&output, &found)?;
    Console::new(true).line(&format!("# measured in {:.0} s", begun.elapsed().as_secs_f64()))?;
    Ok(Exit::SUCCESS)
}

/// Runs as one rank of a job that our launcher or the user's has started; or runs all ranks, as threads.
fn be_one(args: &TuneArgs, output: &Path) -> Result<Exit, BoxError> {
    let [class] = args.link[..] else {
        return Err(
            "under a launcher one class of links is measured at a time: --link tcp, or --link shm".into()
        );
    };
    let found = match args.worker_threads {
        Some(ranks) => Some(in_threads(args, ranks)?),
        None => as_rank(args, class)?,
    };
    match (found, &args.worker_json) {
        (None, _) => {}
        (Some(found), Some(path)) => std::fs::write(path, serde_json::to_vec(&found)?)?,
        (Some(found), None) => conclude(output, &[found])?,
    }
    Ok(Exit::SUCCESS)
}

/// Measures as one rank of a job. Rank 0 returns what was found, other ranks `None`.
fn as_rank(args: &TuneArgs, class: LinkClass) -> Result<Option<Found>, BoxError> {
    let runtime = perf::runtime()?;
    let rendezvous = Rendezvous::from_env()?.tuning(None);
    // Under a user's launcher `tcp` means the links that any other job gets there: in a host the nearest, between hosts TCP, or RDMA if all hosts
    // have it.
    let as_it_is = class == LinkClass::TCP && !args.worker;
    let rendezvous = if as_it_is { rendezvous } else { rendezvous.link(class.into()) };
    let mut comm = runtime.block_on(Comm::connect(rendezvous))?;
    if as_it_is && comm.hosts() == 1 && !std::env::var("ALLSTREAM_LINK").is_ok_and(|l| l == "tcp") {
        return Err(
            "--link tcp: all ranks are on one host; run `allstream tune -N ...` there without the launcher"
                .into(),
        );
    }
    // The times are stored for the class of link that the job really has between its hosts, which `links` names last: TCP or RDMA.
    let class = comm.links().pop().filter(|_| as_it_is).unwrap_or(class);
    let found = measure(&mut comm, args, class)?;
    let is_first = comm.rank() == 0;
    runtime.block_on(comm.close())?;
    Ok(is_first.then_some(found))
}

fn in_processes(args: &TuneArgs, class: LinkClass, ranks: usize) -> Result<Found, BoxError> {
    let folder = tempfile::Builder::new().prefix("allstream-tune-").tempdir()?;
    let at = folder.path().join("found.json");
    let list = |items: Vec<String>| OsString::from(items.join(","));
    let mut own = vec![
        "tune".into(),
        "--worker".into(),
        "--link".into(),
        class.name().into(),
        "--collectives".into(),
        list(args.collectives.iter().map(Kind::to_string).collect()),
        "--sizes".into(),
        list(args.sizes.iter().map(u64::to_string).collect()),
        "--worker-json".into(),
        at.clone().into(),
    ];
    let processes = if class == LinkClass::INPROC { 1 } else { ranks };
    if class == LinkClass::INPROC {
        own.extend(["--worker-threads".into(), ranks.to_string().into()]);
    }
    // Every algorithm must be allowed, and an older table must not choose any.
    let env = [(tuning::VARIABLE, "off"), ("ALLSTREAM_DETERMINISTIC", "0")]
        .map(|(name, value)| (name.into(), value.into()));
    let (program, args) = own::program(own)?;
    let job =
        launch::Job { ranks: processes, program, args, prefix: false, env: env.into(), ..Default::default() };
    if launch::run(job)? != Exit::SUCCESS {
        return Err(format!("the job of {ranks} ranks over {} failed; see above", class.name()).into());
    }
    Ok(serde_json::from_slice(&std::fs::read(&at)?)?)
}

fn in_threads(args: &TuneArgs, ranks: usize) -> Result<Found, BoxError> {
    let mut found = perf::on_threads(Comm::local(ranks)?, |comm| measure(comm, args, LinkClass::INPROC))?;
    Ok(found.swap_remove(0))
}

/// Runs `allstream perf` with these arguments on an existing communicator.
fn perf(comm: &mut Comm, class: LinkClass, args: &[&str]) -> Result<Report, BoxError> {
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: PerfArgs,
    }
    let threads: &[&str] = if class == LinkClass::INPROC { &["--threads"] } else { &[] };
    let line = Line::try_parse_from(["perf"].iter().chain(args).chain(threads))?;
    perf::on(comm, &line.args)
}

fn measure(comm: &mut Comm, args: &TuneArgs, class: LinkClass) -> Result<Found, BoxError> {
    let mut sizes = args.sizes.clone();
    sizes.sort_unstable();
    let sizes: Vec<_> = sizes.iter().map(u64::to_string).collect();
    let mut reports = Vec::new();
    // All_reduce is always measured: the figures of the links come from its times.
    let others = args.collectives.iter().filter(|kind| **kind != Kind::AllReduce);
    for kind in [Kind::AllReduce].iter().chain(others) {
        let line = [kind.name(), "--check-tuning", "-c", "0", "--sizes", &sizes.join(",")];
        reports.push(perf(comm, class, &line)?);
    }
    Ok(Found {
        group: GroupShape { link: class, hosts: comm.hosts(), ranks: comm.size() },
        cores: std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
        memory: memory(),
        reports,
    })
}

/// Bytes a second that a core reads and writes, in pieces as large as staging slots.
fn memory() -> f64 {
    const PIECE: usize = 128 << 10;
    let (from, mut to) = (vec![1u8; PIECE], vec![0u8; PIECE]);
    let mut times: Vec<f64> = (0..200)
        .map(|_| {
            let begun = Instant::now();
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
            begun.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    2.0 * PIECE as f64 / times[times.len() / 2].max(1e-9)
}

impl Found {
    fn times(&self, kind: Kind) -> impl Iterator<Item = (u64, Vec<TimeBy>)> {
        let report = self.reports.iter().find(move |report| report.collective == kind.name());
        report.into_iter().flat_map(|report| &report.series).flat_map(|series| &series.choices).map(
            |choice| {
                let named = choice
                    .named
                    .iter()
                    .filter_map(|(name, us)| Some(TimeBy { algo: name.parse().ok()?, us: *us }));
                (choice.size as u64, named.collect())
            },
        )
    }

    /// The figures with which the model predicts three measured times of all_reduce: of the ring with the fewest bytes (the latency) and
    /// with the most (the bandwidth), and of one_shot, where every rank sends to all, with the fewest (the work for a frame).
    fn figures(&self) -> Result<Figures, BoxError> {
        let mut figures = Figures {
            group: self.group,
            cores: self.cores,
            latency_us: 1.0,
            frame_us: 0.1,
            bandwidth: 1e10,
            memory: self.memory,
        };
        let rows: Vec<_> = self.times(Kind::AllReduce).collect();
        let (Some(least), Some(most)) = (rows.first(), rows.last()) else {
            return Err("nothing was measured".into());
        };
        type Set = fn(&mut Figures, f64);
        let mut fit = |(bytes, times): &(u64, Vec<TimeBy>),
                       algo: Algo,
                       set: Set,
                       range: (f64, f64)|
         -> Result<(), BoxError> {
            let measured = times.iter().find(|time| time.algo == algo);
            let measured = measured
                .ok_or_else(|| format!("all_reduce by {algo} was not measured: is deterministic mode on?"))?;
            let (mut low, mut high) = range;
            // A larger value makes the prediction slower. Bisects the logarithm, as the value may be of any magnitude.
            for _ in 0..30 {
                let middle = (low * high).sqrt();
                set(&mut figures, middle);
                let time = predict(Kind::AllReduce, algo, self.group.ranks, *bytes, &figures);
                let time = time.ok_or_else(|| format!("{} ranks cannot be simulated", self.group.ranks))?;
                if time < measured.us { low = middle } else { high = middle }
            }
            Ok(())
        };
        // Each figure that is fitted changes the best values of the other figures a little, so all fits are repeated.
        for _ in 0..3 {
            fit(least, Algo::Ring, |figures, us| figures.latency_us = us, (0.01, 1e5))?;
            fit(least, Algo::OneShot, |figures, us| figures.frame_us = us, (0.01, 1e5))?;
            // The time of a few bytes says nothing about the bandwidth.
            if most.0 >= STREAM {
                fit(most, Algo::Ring, |figures, us| figures.bandwidth = 1e6 / us, (1e-6, 10.0))?;
            }
        }
        Ok(figures)
    }
}

/// The table of what was measured, and of what is predicted from it.
fn table(found: &[Found]) -> Result<Table, BoxError> {
    let figures = found.iter().map(Found::figures).collect::<Result<Vec<Figures>, BoxError>>()?;
    let mut rows: Vec<Row> = Vec::new();
    for (found, figures) in found.iter().zip(&figures) {
        for collective in found.reports.iter().filter_map(|report| report.collective.parse::<Kind>().ok()) {
            for (bytes, measured) in found.times(collective) {
                let (group, predicted) =
                    (found.group, predictions(collective, found.group.ranks, bytes, figures));
                rows.push(Row { group, collective, bytes, predicted, measured });
            }
        }
    }
    // The times of other numbers of ranks are predicted with the figures of the nearest number that was measured; only for ranks of one host, since
    // more ranks might also be more hosts.
    let apart = |f: &Figures, ranks: usize| ((f.group.ranks as f64).ln() - (ranks as f64).ln()).abs();
    for ranks in PREDICTED {
        let measured: BTreeSet<_> = figures.iter().map(|f| f.group.link).collect();
        for link in measured {
            let group = GroupShape { link, hosts: 1, ranks };
            let near = figures.iter().filter(|f| f.group == GroupShape { ranks: f.group.ranks, ..group });
            let Some(figures) = near.min_by(|a, b| apart(a, ranks).total_cmp(&apart(b, ranks))) else {
                continue;
            };
            let there: Vec<(Kind, u64)> = rows
                .iter()
                .filter(|row| row.group == figures.group)
                .map(|row| (row.collective, row.bytes))
                .collect();
            for (collective, bytes) in there {
                if figures.group.ranks != ranks {
                    let predicted = predictions(collective, ranks, bytes, figures);
                    rows.push(Row { group, collective, bytes, predicted, measured: Vec::new() });
                }
            }
        }
    }
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("", |(_, name)| name);
    let (version, cores) = (env!("CARGO_PKG_VERSION"), found.first().map_or(0, |found| found.cores));
    let now = humantime::format_rfc3339_seconds(std::time::SystemTime::now());
    let made = format!("allstream {version}, {now}, {cores} cores, {cpu}");
    Ok(Table { format: FORMAT, made, figures, rows })
}

fn predictions(kind: Kind, ranks: usize, bytes: u64, figures: &Figures) -> Vec<TimeBy> {
    let by = |algo: &Algo| Some(TimeBy { algo: *algo, us: predict(kind, *algo, ranks, bytes, figures)? });
    algorithms(kind).iter().filter_map(by).collect()
}

/// Adds what was found to the file, and prints it.
fn conclude(output: &Path, found: &[Found]) -> Result<(), BoxError> {
    let new = table(found)?;
    let console = Console::new(true);
    show::lines(&new, true).iter().try_for_each(|line| console.line(line))?;
    // An old table that cannot be read is no reason to lose what was measured now.
    let mut all = match output.exists().then(|| Table::read(output)) {
        Some(Ok(table)) => table,
        Some(Err(error)) => {
            console.line(&format!("# the table that was there is replaced: {error}"))?;
            Table::default()
        }
        None => Table::default(),
    };
    all.merge(new);
    all.write(output)?;
    console.line(&format!("# written to {}", output.display()))?;
    Ok(())
}
