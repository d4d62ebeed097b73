//! `allstream sim`: how long each algorithm would take on a network that is not here.

use crate::Exit;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use allstream::plan::{Shape, algorithms, suitable};
use allstream::sim::{Network, Simulated, simulate};
use allstream::{Algo, Kind};
use clap::Args;
use serde::Serialize;

use crate::units::{bus_factor, rate, size};

/// Options of `allstream sim`.
#[derive(Debug, Args)]
pub(crate) struct SimArgs {
    /// The collective: all_reduce, broadcast, ...
    collective: Kind,
    /// Ranks: 1 to 1024
    #[arg(short = 'n', long, value_name = "N", value_parser = ranks)]
    ranks: usize,
    /// Bytes of each rank's buffer, as nccl-tests counts them (K, M, G are powers of 1024); for collectives of
    /// several blocks, the bytes of all blocks together
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = size)]
    bytes: u64,
    /// Latency from rank to rank, such as 5us
    #[arg(long, default_value = "5us", value_parser = humantime::parse_duration)]
    alpha: Duration,
    /// Bandwidth of each rank's port, each way, such as 25GB/s (powers of 1000)
    #[arg(long, default_value = "25GB/s", value_parser = rate)]
    beta: f64,
    /// Bandwidth at which a rank combines and copies; without it, this work takes no time
    #[arg(long, value_name = "RATE", value_parser = rate)]
    memory: Option<f64>,
    /// A slow rank, and how many times as long it takes for everything, such as 3:2.5
    #[arg(long, value_name = "RANK:FACTOR", value_parser = straggler)]
    straggler: Option<(usize, f64)>,
    /// The fraction of frames that are lost and sent again, such as 0.01
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// How long it takes until a lost frame is sent again
    #[arg(long, default_value = "1ms", value_parser = humantime::parse_duration)]
    retry: Duration,
    /// Ranks on each host, for algorithms of two levels
    #[arg(long, value_name = "N")]
    per_host: Option<usize>,
    /// Bytes of a slice (default: 128K, or more where frames would be too many)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    slice: Option<u64>,
    /// Only these algorithms; may be given several times
    #[arg(long)]
    algo: Vec<Algo>,
    /// Print a line of JSON for each algorithm instead of the table
    #[arg(long)]
    json: bool,
}

fn straggler(text: &str) -> Result<(usize, f64), String> {
    let parse = |(rank, factor): (&str, &str)| Some((rank.parse().ok()?, factor.parse().ok()?));
    text.split_once(':').and_then(parse).ok_or_else(|| "expected RANK:FACTOR, such as 3:2.5".into())
}

fn ranks(text: &str) -> Result<usize, String> {
    let n: usize = text.parse().map_err(|error| format!("{error}"))?;
    let most = allstream::sim::MOST_RANKS;
    if (1..=most).contains(&n) { Ok(n) } else { Err(format!("1 to {most} ranks can be simulated")) }
}

#[derive(Serialize)]
struct Row {
    collective: &'static str,
    algorithm: &'static str,
    ranks: usize,
    bytes: u64,
    seconds: f64,
    /// Bytes a second. `busbw` is `algbw` multiplied by nccl-tests' factor, for comparison with a port's bandwidth.
    algbw: f64,
    busbw: f64,
    frames: u64,
    lost: u64,
    slice: usize,
}

pub(crate) fn run(args: &SimArgs) -> Result<Exit, Box<dyn std::error::Error + Send + Sync>> {
    let (kind, n) = (args.collective, args.ranks);
    let mut network = Network::new(args.alpha, args.beta);
    network.memory = args.memory;
    network.straggler = args.straggler;
    network.loss = args.loss;
    network.retry = args.retry;
    network.per_host = args.per_host;
    network.slice = args.slice.map(|slice| slice as usize);
    let blocks =
        matches!(kind, Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll | Kind::Gather | Kind::Scatter);
    // As in `perf`, each block has a byte at least, and the table tells the size that the blocks add up to.
    let count = if blocks { (args.bytes as usize / n.max(1)).max(1) } else { args.bytes as usize };
    let bytes = if blocks { count * n } else { count } as u64;
    let hosts: Vec<u32> = (0..n).map(|r| args.per_host.map_or(0, |per| (r / per.max(1)) as u32)).collect();
    let named: &[Algo] = if args.algo.is_empty() { algorithms(kind) } else { &args.algo };
    let mut out = io::stdout().lock();
    if !args.json {
        writeln!(
            out,
            "# {kind}, {n} ranks, {bytes} bytes, latency {:?}, {:.3} GB/s a port",
            args.alpha,
            args.beta / 1e9
        )?;
        writeln!(out, "# simulated: the executor on links in virtual time, out of place")?;
        let head = ["algorithm", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "frames", "slice (KB)"];
        let [a, b, c, d, e, f] = head;
        writeln!(out, "{a:<20}{b:>16}{c:>14}{d:>14}{e:>12}{f:>12}")?;
    }
    for &algo in named {
        let shape = Shape { n, hosts: &hosts, ..Shape::default() };
        if let Err(why) = suitable(kind, algo, &shape)
            && args.algo.is_empty()
            && n > 0
        {
            if !args.json {
                writeln!(out, "{:<20}{:>16}  {}", algo.name(), "-", why.why)?;
            }
            continue;
        }
        let begun = Instant::now();
        let Simulated { time, frames, lost, slice, .. } = simulate(kind, algo, n, count, &network)?;
        tracing::info!("{algo}: {frames} frames simulated in {:.1?}", begun.elapsed());
        let seconds = time.as_secs_f64();
        let algbw = if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 };
        let busbw = algbw * bus_factor(kind, n);
        if args.json {
            let (collective, algorithm) = (kind.name(), algo.name());
            let row =
                Row { collective, algorithm, ranks: n, bytes, seconds, algbw, busbw, frames, lost, slice };
            writeln!(out, "{}", serde_json::to_string(&row)?)?;
        } else {
            writeln!(
                out,
                "{:<20}{:>16.2}{:>14.3}{:>14.3}{:>12}{:>12}",
                algo.name(),
                seconds * 1e6,
                algbw / 1e9,
                busbw / 1e9,
                frames,
                slice >> 10
            )?;
        }
        out.flush()?;
    }
    Ok(Exit::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stragglers_and_collectives_are_read() {
        assert_eq!(straggler("3:2.5"), Ok((3, 2.5)));
        assert!(straggler("3").is_err());
        assert!("allreduce".parse::<Kind>().unwrap_err().contains("all_reduce"));
    }
}
