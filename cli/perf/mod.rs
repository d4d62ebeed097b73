//! `allstream perf`: how long a collective takes, by size, in the form of nccl-tests.

mod case;
mod check;
mod clock;
mod device;
mod measure;
mod meeting;
mod memory;
mod plot;
mod report;
mod time;
mod tuning;

use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use allstream::{Algo, Comm, DType, Error, Kind, LinkChoice, ReduceOp, Rendezvous};
use clap::{Args, ValueEnum};

use crate::Exit;
use crate::console::Console;
use crate::error::BoxError;
use crate::launch::{self, bind::Bind};
use crate::own;
use crate::units::size;
use case::{Case, What};
use measure::{Effort, measure, measure_in_place, together};
use meeting::Seat;
use memory::{Memory, Place};
pub(crate) use report::Report;
use report::{Row, Series};
pub(crate) use time::Time;

/// Options of `allstream perf`.
#[derive(Clone, Debug, Args)]
pub(crate) struct PerfArgs {
    /// all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter, scan, exscan, send_recv
    /// or pingpong
    collective: What,
    /// Smallest size of a rank's largest buffer (K, M, G are powers of 1024)
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "4", value_parser = size)]
    minbytes: u64,
    /// Largest size
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "32M", value_parser = size)]
    maxbytes: u64,
    /// Each size is the one before times this
    #[arg(short = 'f', long, value_name = "FACTOR", default_value = "4")]
    stepfactor: f64,
    /// Each size is the one before plus this, instead of a factor
    #[arg(short = 'i', long, value_name = "SIZE", value_parser = size, conflicts_with = "stepfactor")]
    stepbytes: Option<u64>,
    /// These sizes, as 4,64K,1M, instead of a range
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = size,
          conflicts_with_all = ["minbytes", "maxbytes", "stepfactor", "stepbytes"])]
    sizes: Vec<u64>,
    /// Timed operations of each size and form (default: by size, 5 to 2000; with --device by their time, 5 to 500; with
    /// --join by size, 25 to 5000)
    #[arg(short = 'n', long, value_name = "N")]
    iters: Option<NonZeroUsize>,
    /// Untimed operations before (default: two rounds; with --join one)
    #[arg(short = 'w', long, value_name = "N")]
    warmup_iters: Option<usize>,
    /// Compare the results with an oracle: 1, or 0
    #[arg(short = 'c', long, value_name = "0|1", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    check: u8,
    /// Reduction: sum, prod, min, max, avg, band, bor, bxor
    #[arg(short = 'o', long, default_value = "sum")]
    op: ReduceOp,
    /// Element type: f32, bf16, f16, f64, f8e4m3, f8e5m2, i8..i64, u8..u64, bool
    #[arg(short = 'd', long, default_value = "f32")]
    datatype: DType,
    /// Root of broadcast, reduce, gather and scatter
    #[arg(short = 'r', long, default_value_t = 0)]
    root: usize,
    /// Write all figures to this file
    #[arg(short = 'J', long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a picture of time and busbw over size to this file (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Start so many ranks (default 2). Without it, under a launcher (allstream run, torchrun, mpirun, srun), be one
    #[arg(short = 'N', long, value_name = "RANKS")]
    ranks: Option<NonZeroUsize>,
    /// Ranks are threads of one process, which read each other's buffers in place
    #[arg(long)]
    threads: bool,
    /// What each process that is started is bound to, of the cores here (default: `core`, where ranks do not outnumber
    /// cores; else `none`). Under a launcher that is the launcher's: `allstream run --bind-to core`
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with = "threads")]
    bind_to: Option<Bind>,
    /// Links between ranks, by class, or the nearest (auto); several, one job each, as shm,tcp
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    link: Vec<LinkChoice>,
    /// Algorithms, one table each, as ring,direct
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    algo: Vec<Algo>,
    /// Whose memory: the user's own, or the arena's, which peers read in place (`comm.alloc()`)
    #[arg(long, value_enum, default_value_t = Alloc::User)]
    alloc: Alloc,
    /// Buffers in the memory of a CUDA device, the one with this number, for all ranks (default 0); above the table, how
    /// fast the device copies, and in it the time on the device, by events (dev)
    #[arg(long, value_name = "ORDINAL", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    device: Option<usize>,
    /// With --device: operations through the host's memory, also where the ranks' devices reach each other
    #[arg(long, requires = "device")]
    staged: bool,
    /// With --device: by NCCL, for what it can do
    #[arg(long, requires = "device", conflicts_with_all = ["staged", "join"])]
    nccl: bool,
    /// With --device: operations are joined with a stream, one behind the other, and nobody waits before the last
    #[arg(long, requires = "device", conflicts_with = "awaits")]
    join: bool,
    /// Await each operation on a current-thread runtime, instead of blocking in `.wait()`; or both, in turns: the table is
    /// of the awaited ones, and the figures of -J have the others beside them
    #[arg(long = "await", value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true,
          default_missing_value = "always")]
    awaits: Option<Awaits>,
    /// Instead of the table: each size by the algorithm that is chosen and by each that can be named, interleaved, and how
    /// far the choice is from the best
    #[arg(long, conflicts_with_all = ["algo", "plot", "device"])]
    check_tuning: bool,
    /// Be one of the ranks, as the launcher's environment says
    #[arg(long, hide = true)]
    worker: bool,
    /// The link of this one's job
    #[arg(long, hide = true)]
    worker_link: Option<LinkChoice>,
    /// Cores of the host, of which a rank that is bound sees its own alone
    #[arg(long, hide = true)]
    worker_cores: Option<usize>,
    /// Where rank 0 of a job leaves the figures for the one who started it
    #[arg(long, hide = true)]
    worker_json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Awaits {
    /// Each operation
    Always,
    /// Every other group of operations
    Turns,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Alloc {
    /// A `Vec`
    User,
    /// `comm.alloc()`
    Arena,
}

pub(crate) fn run(args: &PerfArgs) -> Result<Exit, BoxError> {
    check(args)?;
    if args.worker || (args.ranks.is_none() && !args.threads && Rendezvous::from_env().is_ok()) {
        if let (Some(_), false) = (args.bind_to, args.worker) {
            return Err(
                "--bind-to is for the ranks that perf starts (-N), and this one was started by a launcher: \
                        bind them there, as by `allstream run --bind-to core`"
                    .into(),
            );
        }
        if args.link.len() > 1 && !args.worker {
            return Err("--link names several links, and the ranks of a job that a launcher has started have one: start a job for each".into());
        }
        let rendezvous = Rendezvous::from_env()?;
        let runtime = runtime()?;
        // If the command names no link, `ALLSTREAM_LINK` may.
        let said = args.worker_link.or(args.link.first().copied()).filter(|link| *link != LinkChoice::AUTO);
        let asked = || std::env::var("ALLSTREAM_LINK").ok().and_then(|link| link.parse().ok());
        let link = said.or_else(asked).unwrap_or_default();
        let rendezvous = rendezvous.link(link);
        let mut comm = runtime.block_on(Comm::connect(rendezvous))?;
        let report = measure_all(&mut comm, args, link, None)?;
        let is_first = comm.rank() == 0;
        runtime.block_on(comm.close())?;
        return if is_first { conclude(args, &report) } else { Ok(Exit::SUCCESS) };
    }
    if args.threads { in_threads(args) } else { in_processes(args) }
}

/// Refuses wrong options that can be found before any rank is started.
fn check(args: &PerfArgs) -> Result<(), BoxError> {
    let ranks = args.ranks.map_or(2, NonZeroUsize::get);
    let wrong = if args.minbytes > args.maxbytes {
        format!("-b {} is more than -e {}", args.minbytes, args.maxbytes)
    } else if args.stepbytes.is_none() && !(args.stepfactor > 1.0 && args.stepfactor.is_finite()) {
        format!("-f {}: expected a factor above 1", args.stepfactor)
    } else if args.stepbytes == Some(0) {
        "-i 0: expected a step of at least one byte".into()
    } else if args.what_reduces() && !args.op.supports(args.datatype) {
        format!("{} is not defined on {}", args.op, args.datatype)
    } else if args.ranks.is_some() && args.root >= ranks {
        format!("-r {}: there are {ranks} ranks, roots are 0..={}", args.root, ranks - 1)
    } else if args.collective == What::PingPong && args.ranks.is_some() && ranks < 2 {
        "pingpong needs two ranks".into()
    } else if args.threads
        && args.link.iter().any(|link| !matches!(*link, LinkChoice::AUTO | LinkChoice::INPROC))
    {
        "--threads: ranks of one process read each other's memory; --link is for processes".into()
    } else if !args.threads && args.link.contains(&LinkChoice::INPROC) {
        "--link inproc is for the ranks of one process: add --threads".into()
    } else if args.device.is_some() && args.alloc == Alloc::Arena {
        "--alloc arena is memory of the host's, --device is not: leave one of them out".into()
    } else if args.datatype == DType::Bool && args.alloc == Alloc::Arena {
        "--alloc arena is memory that other ranks write, and not every byte is a bool: take -d u8, or --alloc user".into()
    } else if args.check_tuning && !matches!(args.collective, What::Collective(_)) {
        format!("--check-tuning: {} is a message, and no algorithm is chosen for it", args.collective)
    } else if args.join && !matches!(args.collective, What::Collective(_)) {
        format!("--join: {} is a message, and no stream waits for those", args.collective)
    } else {
        return Ok(());
    };
    Err(wrong.into())
}

impl PerfArgs {
    /// How operations on a device are to run.
    fn by(&self) -> device::By {
        match (self.staged, self.nccl, self.join) {
            (true, ..) => device::By::Host,
            (_, true, _) => device::By::Nccl,
            (.., true) => device::By::KernelsJoined,
            _ => device::By::Kernels,
        }
    }

    fn what_reduces(&self) -> bool {
        self.collective.reduces()
    }

    /// The sizes in bytes: as `--sizes` lists them, or of the range, the smallest first.
    fn sizes(&self) -> Vec<u64> {
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let mut sizes = Vec::new();
        let mut size = self.minbytes;
        while size <= self.maxbytes {
            sizes.push(size);
            let next = match self.stepbytes {
                Some(step) => size.saturating_add(step),
                None => (size as f64 * self.stepfactor) as u64,
            };
            size = next.max(size.saturating_add(1));
            if size == u64::MAX {
                break;
            }
        }
        sizes
    }

    /// A case of about this many bytes; `unit` is the size of an element.
    fn case(&self, comm: &Comm, bytes: u64, unit: usize) -> Result<Case, BoxError> {
        let elements = usize::try_from(bytes)? / unit;
        Ok(Case::new(self.collective, self.op, self.root, (comm.rank(), comm.size()), elements))
    }

    /// The cases of all sizes. A size that rounds to the same number of elements as the one before is left out.
    fn cases(&self, comm: &Comm, unit: usize) -> Result<Vec<Case>, BoxError> {
        let mut cases = self
            .sizes()
            .into_iter()
            .map(|bytes| self.case(comm, bytes, unit))
            .collect::<Result<Vec<_>, _>>()?;
        cases.dedup_by_key(|case| case.elements());
        Ok(cases)
    }
}

pub(crate) fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn in_threads(args: &PerfArgs) -> Result<Exit, BoxError> {
    let ranks = args.ranks.map_or(2, NonZeroUsize::get);
    let comms = Comm::local(ranks)?;
    let seats = Mutex::new(Seat::all(ranks));
    let seat = || seats.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let reports = on_threads(comms, |comm| measure_all(comm, args, LinkChoice::INPROC, seat()))?;
    match reports.first() {
        Some(report) => conclude(args, report),
        None => Ok(Exit::SUCCESS),
    }
}

/// Runs `each` for every rank, on a thread for each; returns the results in rank order.
pub(crate) fn on_threads<T: Send>(
    comms: Vec<Comm>,
    each: impl Fn(&mut Comm) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, BoxError> {
    std::thread::scope(|scope| {
        let each = &each;
        let start = |mut comm: Comm| scope.spawn(move || each(&mut comm));
        let threads: Vec<_> = comms.into_iter().map(start).collect();
        let ended = threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked")?);
        let (ended, mut failed): (Vec<_>, Vec<BoxError>) = ended.fold(Default::default(), |mut all, one| {
            match one {
                Ok(one) => all.0.push(one),
                Err(error) => all.1.push(error),
            }
            all
        });
        // A rank that failed by itself knows why; the others only report that they lost it, so their errors come last.
        let is_echo = |error: &BoxError| matches!(error.downcast_ref(), Some(Error::PeerLost { .. }));
        failed.sort_by_key(is_echo);
        failed.into_iter().next().map_or(Ok(ended), Err)
    })
}

/// Processors on which this process may run.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// Runs a job for each link. Rank 0 of each job leaves its figures in a file, which this process reads.
fn in_processes(args: &PerfArgs) -> Result<Exit, BoxError> {
    let folder = tempfile::Builder::new().prefix("allstream-perf-").tempdir()?;
    let ranks = args.ranks.map_or(2, NonZeroUsize::get);
    let bind = args.bind_to.unwrap_or_else(|| Bind::that_fits(ranks));
    let mut whole: Option<Report> = None;
    for &link in &args.link {
        let at = folder.path().join(format!("{link}.json"));
        let mut own = own::arguments();
        own.extend(["--worker", "--worker-link", &link.to_string(), "--worker-json"].map(Into::into));
        own.push(at.clone().into());
        own.push("--worker-cores".into());
        own.push(cores().to_string().into());
        if args.bind_to.is_none() {
            // So that rank 0 can print how the ranks are bound.
            own.extend(["--bind-to", bind.name()].map(Into::into));
        }
        let (program, args) = own::program(own)?;
        let job = launch::Job { ranks, program, args, prefix: false, bind, ..Default::default() };
        let code = launch::run(job)?;
        if code != Exit::SUCCESS {
            return Ok(code);
        }
        let part = Report::read(&at)?;
        match &mut whole {
            Some(whole) => whole.series.extend(part.series),
            None => whole = Some(part),
        }
    }
    match whole {
        Some(report) => conclude(args, &report),
        None => Ok(Exit::SUCCESS),
    }
}

/// Prints the footer, and writes the files that were asked for. Rank 0 of a job that `perf` itself started only hands the figures over.
fn conclude(args: &PerfArgs, report: &Report) -> Result<Exit, BoxError> {
    if let Some(path) = &args.worker_json {
        report.write(path).map_err(|error| named("the figures", path, &error))?;
        return Ok(Exit::SUCCESS);
    }
    let console = Console::new(true);
    for line in report.footer() {
        console.line(&line)?;
    }
    if let Some(path) = &args.json {
        report.write(path).map_err(|error| named("--json", path, &error))?;
    }
    if let Some(path) = &args.plot {
        plot::write(report, path).map_err(|error| named("--plot", path, &error))?;
    }
    match report.wrong() {
        0 => Ok(Exit::SUCCESS),
        wrong => Err(format!("{wrong} elements are wrong").into()),
    }
}

fn named(option: &str, path: &Path, error: &dyn std::fmt::Display) -> BoxError {
    format!("{option} {}: {error}", path.display()).into()
}

/// Measures on a communicator that exists already, for commands other than `perf`.
pub(crate) fn on(comm: &mut Comm, args: &PerfArgs) -> Result<Report, BoxError> {
    check(args)?;
    measure_all(comm, args, args.link.first().copied().unwrap_or_default(), None)
}

/// Measures all sizes with all algorithms; rank 0 prints each line at once. `seat`: this rank's, if all ranks are threads of one process.
fn measure_all(
    comm: &mut Comm,
    args: &PerfArgs,
    link: LinkChoice,
    seat: Option<Seat>,
) -> Result<Report, BoxError> {
    if args.root >= comm.size() {
        return Err(format!("-r {}: there are {} ranks", args.root, comm.size()).into());
    }
    if args.collective == What::PingPong && comm.size() < 2 {
        return Err("pingpong needs two ranks".into());
    }
    let console = Console::new(comm.rank() == 0);
    let place = args.device.map(|ordinal| device::bind(comm, ordinal, args.by())).transpose()?;
    // Rank 0 alone measures the device, while the other ranks wait in `together`.
    let facts = match &place {
        Some(place) if comm.rank() == 0 => device::Facts::of(place).map(Some),
        _ => Ok(None),
    };
    let device = together(comm, facts)?;
    let cores = args.worker_cores.unwrap_or_else(cores);
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION").into(),
        collective: args.collective.name().into(),
        dtype: args.datatype.name().into(),
        op: if args.what_reduces() { args.op.name().into() } else { "none".into() },
        root: args.collective.rooted().then_some(args.root),
        ranks: comm.size(),
        threads: args.threads,
        alloc: match (args.device, args.alloc) {
            (Some(_), _) => "device",
            (None, Alloc::Arena) => "arena",
            (None, Alloc::User) => "user",
        }
        .into(),
        device,
        completion: match (args.awaits, args.join) {
            (Some(Awaits::Always), _) => "await",
            (Some(Awaits::Turns), _) => "await, and wait in turns",
            (_, true) => "join",
            _ => "wait",
        }
        .into(),
        cores,
        series: Vec::new(),
    };
    let memory = match (&place, args.alloc) {
        (Some(place), _) => Place::Device(place.stream.clone()),
        (None, Alloc::User) => Place::User,
        (None, Alloc::Arena) => Place::Arena,
    };
    let memory = Memory::new(args.datatype, memory);
    let seat = seat.map(Rc::new);
    let links = comm.links().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let over =
        if link == LinkChoice::AUTO && !links.is_empty() { format!(" ({links})") } else { String::new() };
    for &algo in &args.algo {
        let places = if args.threads { "threads" } else { "processes" };
        let bound = match args.bind_to.unwrap_or_default() {
            Bind::None => "",
            Bind::Core => ", each bound to its share of the cores",
            Bind::Numa => ", each bound to its share of the NUMA nodes",
        };
        console.line(&format!(
            "# allstream {} {}: {} {places} on {cores} cores{bound}, link {}{over}, algorithm {algo}, {} memory, .{}",
            report.version,
            args.collective,
            comm.size(),
            link,
            report.alloc,
            report.completion
        ))?;
        for line in report.device.iter().flat_map(device::Facts::lines) {
            console.line(&line)?;
        }
        if let Some(remark) = report::remark(args.collective) {
            console.line(remark)?;
        }
        let mut effort = Effort {
            algo,
            iters: args.iters.map(NonZeroUsize::get),
            warmup: args.warmup_iters,
            check: args.check == 1,
            runtime: args.awaits.map(|_| runtime()).transpose()?,
            in_turns: args.awaits == Some(Awaits::Turns),
            joins: args.join,
            seat: seat.clone(),
            clock: place.as_ref().and_then(device::Place::clock),
            ..Effort::usual(memory.clone())
        };
        let mut series = Series { link: link.to_string(), algo: algo.name().into(), ..Series::default() };
        self::series(comm, args, &mut effort, &console, &mut series)?;
        report.series.push(series);
    }
    Ok(report)
}

/// Times an all_reduce of this many bytes of `f32`, summed in place, with the default options. All ranks call this together, and all get the
/// same times.
pub(crate) fn all_reduce_time(comm: &mut Comm, bytes: usize) -> Result<Time, Error> {
    let effort = Effort::usual(Memory::new(DType::F32, Place::User));
    let place = (comm.rank(), comm.size());
    let what = What::Collective(Kind::AllReduce);
    let case = Case::new(what, ReduceOp::Sum, 0, place, bytes / DType::F32.size());
    measure_in_place(comm, &case, &effort)
}

/// Measures all sizes over one link with one algorithm.
fn series(
    comm: &mut Comm,
    args: &PerfArgs,
    effort: &mut Effort,
    console: &Console,
    series: &mut Series,
) -> Result<(), BoxError> {
    if args.check_tuning {
        series.choices = tuning::check(comm, args, effort, console)?;
    } else {
        report::head(args.device.is_some()).iter().try_for_each(|line| console.line(line))?;
        series.rows = rows(comm, args, effort, console)?;
    }
    Ok(())
}

fn rows(comm: &mut Comm, args: &PerfArgs, effort: &Effort, console: &Console) -> Result<Vec<Row>, BoxError> {
    let dtype = effort.memory.dtype;
    let cases = args.cases(comm, dtype.size())?;
    let bar = console.bar("sizes", cases.len());
    let mut rows = Vec::new();
    for case in cases {
        bar.inc(1);
        let size = case.elements() * dtype.size();
        let (out_of_place, in_place) = measure(comm, &case, effort)?;
        let row = Row { size, count: case.count, out_of_place, in_place };
        console.line(&report::line(&row, &case, dtype.name(), args.device.is_some()))?;
        rows.push(row);
    }
    bar.finish_and_clear();
    Ok(rows)
}
