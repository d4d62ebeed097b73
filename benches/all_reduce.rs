//! All-reduce time by size, measured as the programs in `benches/peers` do: f32, sum, in place, operations back to back
//! after one barrier. A round counts as the slowest rank's time; the median and the minimum over rounds are printed.
//!
//! `cargo bench --bench all_reduce -- RANKS [LINK] [wait|await] [ALGO]` starts the ranks itself; `LINK` is shm, tcp,
//! or threads (ranks of one process).

#![allow(missing_docs)]

use std::net::TcpListener;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use allstream::{Algo, Comm, LinkChoice, ReduceOp, Rendezvous};

const BYTES: [usize; 12] = [
    4,
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    8 << 20,
    16 << 20,
    32 << 20,
    128 << 20,
];

type Res<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Res<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let ranks: usize = args.first().map_or(Ok(2), |a| a.parse())?;
    let link = args.get(1).map_or("shm", String::as_str).to_owned();
    let asynchronous = args.get(2).is_some_and(|a| a == "await");
    let algo: Algo = args.get(3).map_or("auto", String::as_str).parse()?;
    if let Ok(rank) = std::env::var("BENCH_RANK") {
        let choice = if link == "tcp" { LinkChoice::TCP } else { LinkChoice::SHM };
        let rendezvous = Rendezvous::tcp(&std::env::var("BENCH_AT")?, rank.parse()?, ranks)?;
        let rendezvous = rendezvous.token(std::env::var("BENCH_TOKEN")?).link(choice);
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let mut comm = runtime.block_on(Comm::connect(rendezvous))?;
        measure(&mut comm, &link, asynchronous.then_some(&runtime), algo)?;
        runtime.block_on(comm.close())?;
        return Ok(ExitCode::SUCCESS);
    }
    if link == "threads" {
        let comms = Comm::local(ranks)?;
        std::thread::scope(|scope| {
            let run = |mut comm: Comm| -> Res<()> {
                let runtime = tokio::runtime::Builder::new_current_thread().build()?;
                measure(&mut comm, "threads", asynchronous.then_some(&runtime), algo)
            };
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().try_for_each(|t| t.join().map_err(|_| "a rank panicked")?)
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    // This port is free now. The ranks start at once, so hardly anybody takes it before rank 0 does.
    let at = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let token = format!("{:x}", std::process::id());
    let start = |rank: usize| -> std::io::Result<Child> {
        Command::new(std::env::current_exe()?)
            .args(&args)
            .env("BENCH_RANK", rank.to_string())
            .env("BENCH_AT", format!("tcp://{at}"))
            .env("BENCH_TOKEN", &token)
            .spawn()
    };
    let mut children = (0..ranks).map(start).collect::<std::io::Result<Vec<_>>>()?;
    let mut ok = true;
    for child in &mut children {
        ok &= child.wait()?.success();
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn measure(comm: &mut Comm, link: &str, runtime: Option<&tokio::runtime::Runtime>, algo: Algo) -> Res<()> {
    let n = comm.size();
    for bytes in BYTES {
        let count = bytes / 4;
        let iterations = (200_000_000 / (bytes + 20_000)).clamp(5, 2000);
        let group = if bytes <= 65_536 { 20 } else { 1 };
        let rounds = iterations.div_ceil(group).max(5);
        let mut buf = vec![1f32; count];
        let mut times = Vec::new();
        for round in 0..rounds + 2 {
            buf.fill(1.0);
            buf = std::hint::black_box(buf);
            comm.barrier().wait()?;
            let start = Instant::now();
            for _ in 0..group {
                let work = comm.algo(algo).all_reduce(buf);
                buf = match runtime {
                    Some(runtime) => runtime.block_on(work)?,
                    None => work.wait()?,
                };
            }
            let mine = start.elapsed().as_secs_f64() / group as f64;
            // The compiler must not do the check while the clock runs.
            buf = std::hint::black_box(buf);
            let product = (n as f32).powi(group as i32);
            // Where the product of so many rounds has more digits than an f32, sums of another order are rounded otherwise.
            let near = |x: &f32| *x == product || (x / product - 1.0).abs() < 1e-4;
            if !buf.iter().all(near) {
                let wrong = format!("wrong result at {bytes} bytes: {}", buf[0]);
                // The other ranks wait for this one's next call: they hear why it does not come.
                comm.share().abort(wrong.as_str());
                return Err(format!("rank {}: {wrong}", comm.rank()).into());
            }
            let slowest = comm.op(ReduceOp::Max).all_reduce(vec![mine]).wait()?[0];
            if round >= 2 {
                times.push(slowest);
            }
        }
        times.sort_by(f64::total_cmp);
        if comm.rank() == 0 {
            let median = Duration::from_secs_f64(times[times.len() / 2]);
            println!(
                "allstream {link} allreduce n={n} bytes={bytes} med={:.2}us min={:.2}us algbw={:.3}",
                median.as_secs_f64() * 1e6,
                times[0] * 1e6,
                bytes as f64 / median.as_secs_f64() / 1e9
            );
        }
    }
    Ok(())
}
