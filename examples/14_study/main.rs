//! One training, three ways to communicate, more and more workers: a study of what each way costs.
//!
//! Teaches: the same loop with (1) a sharded parameter server, where each parameter has an owner to which all gradients of it are reduced,
//! and which broadcasts the new weights; (2) an all-reduce of all gradients after the backward pass; (3) buckets, which are reduced
//! while the backward pass still computes. Each worker has a batch of its own, of the same size, so with n workers a step
//! trains on n times as many examples. Every way ends with the same weights, which is checked.
//!
//! It prints a table as the design document of Ray's collective library has it ("ray.util.collective", its study of spaCy): the mean and
//! the standard deviation of some trials, the speed-up over the parameter server, and the scalability n * t1 / tn, where
//! tn is the time of n workers. `--chart` draws the table.
//!
//! ```sh
//! cargo run --release --example 14_study                               # 1, 2, 4, 8 processes of this host over TCP
//! cargo run --release --example 14_study -- --help
//! benches/study.sh                                                     # in network namespaces with shaped lines
//! ```
//!
//! Where workers share few cores, a table of times says more of the cores than of the network. With `--computing sleep`, rank 0
//! measures once how long each layer computes while nothing else runs, and then all workers sleep that long instead. `--simulate`
//! adds rows for worlds that are too large for this machine.

mod forecast;
mod launch;
mod network;
mod report;
mod systems;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use allstream::{Comm, ReduceOp};
use clap::{Parser, ValueEnum};

use network::{Network, Times, Worker};
use report::Row;
use systems::{SYSTEMS, train};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How far the weights of two systems may be from each other.
const NEAR: f32 = 1e-5;

/// One training by a sharded parameter server, by all-reduce, and by overlapped buckets.
#[derive(Parser)]
struct Options {
    /// How many workers, one row of the table for each
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8", value_parser = at_least_one())]
    workers: Vec<u64>,
    /// Trials of each system
    #[arg(long, default_value_t = 3, value_parser = at_least_one())]
    trials: u64,
    /// Steps of a trial, after one that does not count
    #[arg(long, default_value_t = 10, value_parser = at_least_one())]
    steps: u64,
    /// Layers of the network, each a parameter
    #[arg(long, default_value_t = 8, value_parser = at_least_one())]
    layers: u64,
    /// Units of each layer; a parameter has 4 * width * width bytes
    #[arg(long, default_value_t = 128, value_parser = at_least_one())]
    width: u64,
    /// Examples of each worker in a step
    #[arg(long, default_value_t = 16, value_parser = at_least_one())]
    batch: u64,
    #[arg(long, value_enum, default_value_t = Computing::Real)]
    computing: Computing,
    /// The address of rank 0
    #[arg(long, default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Rank r runs in the network namespace PREFIX followed by r; start this program, which is rank 0, in that of rank 0
    #[arg(long, value_name = "PREFIX")]
    netns: Option<String>,
    /// Add rows for so many workers by the simulator of `allstream sim`, on lines of --latency-us and --bandwidth
    #[arg(long, value_delimiter = ',', requires_all = ["latency_us", "bandwidth"], value_parser = at_least_one())]
    simulate: Vec<u64>,
    /// Microseconds from worker to worker
    #[arg(long)]
    latency_us: Option<f64>,
    /// Bytes a second of each worker's line, each way
    #[arg(long)]
    bandwidth: Option<f64>,
    /// Where to draw the chart, an SVG
    #[arg(long, value_name = "PATH")]
    chart: Option<PathBuf>,
}

fn at_least_one() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..)
}

/// What a worker does between two gradients.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Computing {
    /// Computes them
    Real,
    /// Sleeps as long as that takes when nothing else runs
    Sleep,
    /// Sleeps, all in the backward pass, as long as an all-reduce of all gradients takes with so many workers
    Communicating,
}

/// What a rank does: all trials of all systems. Returns the seconds of each system's trials, on the slowest rank.
async fn study(comm: &mut Comm, options: &Options, alone: Option<Times>) -> Result<Vec<Vec<f64>>> {
    let new = || Network::new(options.width as usize, options.layers as usize);
    let times = match options.computing {
        Computing::Real => None,
        // Rank 0 has measured how long computing takes.
        Computing::Sleep => Some(Times::shared(comm, alone.unwrap_or_default()).await?),
        Computing::Communicating => {
            let silent = Times::even(0.0, options.layers as usize);
            let mut worker = Worker::new(new(), comm.rank(), options.batch as usize, Some(silent));
            let (_, all_reduce) = SYSTEMS[1];
            let mut trials = Vec::new();
            for _ in 0..options.trials {
                trials.push(train(all_reduce, comm, &mut worker, options.steps).await?);
            }
            trials.sort_by(f64::total_cmp);
            let total = trials[trials.len() / 2] / options.steps as f64;
            if comm.rank() == 0 {
                let n = comm.size();
                eprintln!(
                    "{n} workers: an all-reduce of all gradients takes {total:.4} s, so computing takes as long"
                );
            }
            Some(Times::shared(comm, Times::even(total, options.layers as usize)).await?)
        }
    };
    let mut seconds = vec![Vec::new(); SYSTEMS.len()];
    for _ in 0..options.trials {
        let mut first: Option<Network> = None;
        for ((name, system), seconds) in SYSTEMS.into_iter().zip(&mut seconds) {
            let mut worker = Worker::new(new(), comm.rank(), options.batch as usize, times.clone());
            seconds.push(train(system, comm, &mut worker, options.steps).await?);
            let first = first.get_or_insert_with(|| worker.network.clone());
            let mine = worker.network.difference(first);
            let most = comm.op(ReduceOp::Max).all_reduce_value(mine).await?;
            // NaN is not near anything.
            if most.is_nan() || most > NEAR {
                let (least, _) = SYSTEMS[0];
                return Err(format!(
                    "the weights by {name} are {most:e} from those by {least}; expected at most {NEAR:e}"
                )
                .into());
            }
        }
    }
    Ok(seconds)
}

fn run(options: &Options) -> Result<()> {
    if launch::is_started() {
        return launch::join(async |comm| study(comm, options, None).await.map(drop));
    }
    let network = Network::new(options.width as usize, options.layers as usize);
    let times = Worker::new(network.clone(), 0, options.batch as usize, None).measure();
    let place = if options.netns.is_some() { "network namespaces" } else { "loopback" };
    println!(
        "{} layers of {} KB, {} examples a worker, {} steps, {} trials, {place}, computing {}",
        options.layers,
        network.layer_bytes() >> 10,
        options.batch,
        options.steps,
        options.trials,
        match options.computing {
            Computing::Real => "as it is".into(),
            Computing::Sleep => format!(
                "sleeps {:.1} ms forward and {:.1} ms backward a step",
                times.forward * 1e3,
                times.backward() * 1e3
            ),
            Computing::Communicating => "sleeps as long as communicating takes".into(),
        }
    );
    let mut rows = Vec::new();
    for &n in &options.workers {
        let n = n as usize;
        let seconds = launch::start(n, options.listen, options.netns.as_deref(), async |comm| {
            study(comm, options, Some(times.clone())).await
        })?;
        rows.push(Row::measured(n, &seconds));
    }
    if let (Some(latency), Some(bandwidth)) = (options.latency_us, options.bandwidth) {
        for &n in &options.simulate {
            let seconds = forecast::seconds(n as usize, &network, &times, (latency / 1e6, bandwidth))?;
            rows.push(Row::simulated(n as usize, seconds.map(|step| step * options.steps as f64)));
        }
    }
    print!("{}", report::table(&rows));
    if let Some(path) = &options.chart {
        report::chart(&rows, path)?;
    }
    println!("the weights of all systems are within {NEAR:.0e} of each other, in every trial");
    Ok(())
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("14_study: {error}");
            ExitCode::FAILURE
        }
    }
}
