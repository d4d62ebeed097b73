//! The programs of `benches/shaped.sh`: they measure what a line can do, and how long an all_reduce takes on it.
//!
//! - `shaped line listen ADDR`, then `shaped line ADDR`: latency and bandwidth of a TCP connection.
//! - `shaped rank BYTES,.. ALGO,..`: joins as the environment says; rank 0 prints how long each algorithm took at each size.

#![allow(missing_docs)]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use allstream::plan::{Env, choose};
use allstream::{Algo, Comm, Kind, ReduceOp, Rendezvous};

type Res<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Bytes of a frame's header: no message is smaller.
const SMALL: usize = 64;
const LARGE: usize = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Res<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["line", "listen", at] => listen(at)?,
        ["line", at] => line(at)?,
        ["rank", bytes, algos] => rank(bytes, algos)?,
        // This is not an error: a plain `cargo bench` runs every program without arguments.
        _ => eprintln!(
            "shaped line listen ADDR | shaped line ADDR | shaped rank BYTES,.. ALGO,.. (see shaped.sh)"
        ),
    }
    Ok(())
}

/// What is timed on the line: a name, the bytes of a question, and how often it is sent. Each answer has [`SMALL`] bytes.
const TASKS: [(&str, usize, usize); 3] = [("small", SMALL, 2000), ("64K", 64 << 10, 200), ("16M", LARGE, 9)];

fn listen(at: &str) -> Res<()> {
    let (mut socket, _) = TcpListener::bind(at)?.accept()?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut buf = vec![0; LARGE];
    for (_, bytes, times) in TASKS {
        for _ in 0..times {
            socket.read_exact(&mut buf[..bytes])?;
            socket.write_all(&buf[..SMALL])?;
        }
    }
    Ok(())
}

fn line(at: &str) -> Res<()> {
    let until = Instant::now() + PATIENCE;
    let mut socket = loop {
        match TcpStream::connect(at) {
            Ok(socket) => break socket,
            // The other end is not there yet.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused && Instant::now() < until => {
                sleep(Duration::from_millis(20));
            }
            Err(e) => return Err(e.into()),
        }
    };
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut buf = vec![1; LARGE];
    let mut alpha = 0.0;
    for (name, bytes, times) in TASKS {
        let mut took = Vec::with_capacity(times);
        for _ in 0..times {
            let start = Instant::now();
            socket.write_all(&buf[..bytes])?;
            socket.read_exact(&mut buf[..SMALL])?;
            took.push(start.elapsed().as_secs_f64());
        }
        took.sort_by(f64::total_cmp);
        let median = took[times / 2];
        match bytes {
            SMALL => {
                alpha = median / 2.0;
                println!("line latency_us={:.2}", alpha * 1e6);
            }
            // The latencies of the question's first byte and of the answer do not count. In 64K_us only the answer's is left out.
            LARGE => println!("line bandwidth={:.0}", bytes as f64 / (median - 2.0 * alpha)),
            _ => println!("line {name}_us={:.2}", (median - alpha) * 1e6),
        }
    }
    Ok(())
}

fn rank(bytes: &str, algos: &str) -> Res<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let mut comm = runtime.block_on(Comm::connect(Rendezvous::from_env()?))?;
    for bytes in bytes.split(',') {
        let bytes: usize = bytes.parse()?;
        for algo in algos.split(',') {
            measure(&mut comm, bytes, algo.parse()?)?;
        }
    }
    runtime.block_on(comm.close())?;
    Ok(())
}

/// Times one operation at a time, out of place, after a barrier, as the simulator assumes; the slowest rank's time counts.
fn measure(comm: &mut Comm, bytes: usize, algo: Algo) -> Res<()> {
    let n = comm.size();
    let times = (20_000_000 / bytes).clamp(7, 41);
    let (mut input, mut output) = (vec![1f32; bytes / 4], vec![0f32; bytes / 4]);
    let mut took = Vec::with_capacity(times);
    for round in 0..times + 2 {
        output.fill(0.0);
        output = std::hint::black_box(output);
        comm.barrier().wait()?;
        let start = Instant::now();
        (input, output) = comm.algo(algo).all_reduce_into(input, output).wait()?;
        let mine = start.elapsed().as_secs_f64();
        output = std::hint::black_box(output);
        if let Some(wrong) = output.iter().find(|x| **x != n as f32) {
            return Err(format!("rank {}: {wrong} by {algo} at {bytes} bytes, not {n}", comm.rank()).into());
        }
        let slowest = comm.op(ReduceOp::Max).all_reduce(vec![mine]).wait()?[0];
        // The first two rounds do not count: a connection is opened when a rank first needs it.
        if round >= 2 {
            took.push(slowest);
        }
    }
    if comm.rank() == 0 {
        let env = Env { n, one_host: false, hosts: n, ..Env::default() };
        let is = if algo == Algo::Auto { choose(Kind::AllReduce, bytes, &env) } else { algo };
        took.sort_by(f64::total_cmp);
        println!(
            "all_reduce n={n} bytes={bytes} algo={algo} is={is} med_us={:.1} min_us={:.1} max_us={:.1}",
            took[times / 2] * 1e6,
            took[0] * 1e6,
            took[times - 1] * 1e6
        );
    }
    Ok(())
}
