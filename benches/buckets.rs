//! What gradient buckets cost: beside one call on as much memory, and how much of their communication computing does not hide.
//!
//! `cargo bench --bench buckets -- [ROUNDS]`. Ranks are threads of this process (`local`), or processes of this host (`shm`), which it
//! starts itself. The two sides of a ratio take turns, round by round. A time is that of the slowest rank, and each printed time is the
//! median over rounds.

#![allow(missing_docs)]

use std::net::TcpListener;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use allstream::train::{Buckets, Options, Param};
use allstream::{Comm, DType, LinkChoice, ReduceOp, Rendezvous};
use futures::executor::block_on;

type Res<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
type Grads = Vec<Vec<f32>>;

fn main() -> Res<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let rounds: usize = args.first().map_or(Ok(100), |a| a.parse())?;
    if let Ok(rank) = std::env::var("BENCH_RANK") {
        let place = Rendezvous::tcp(
            &std::env::var("BENCH_AT")?,
            rank.parse()?,
            std::env::var("BENCH_RANKS")?.parse()?,
        )?;
        let place = place.token(std::env::var("BENCH_TOKEN")?).link(LinkChoice::SHM);
        measure(block_on(Comm::connect(place))?, "shm", rounds)?;
        return Ok(ExitCode::SUCCESS);
    }
    println!("| ranks | link | what | buckets, us | compared with, us | ratio |\n|---|---|---|---|---|---|");
    for n in [2, 4] {
        std::thread::scope(|scope| {
            let comms = Comm::local(n)?.into_iter();
            let ranks: Vec<_> =
                comms.map(|comm| scope.spawn(move || measure(comm, "local", rounds))).collect();
            ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked")?)
        })?;
        if !processes(n, &args)? {
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts `n` ranks as processes, and waits for them. Returns whether all went well.
fn processes(n: usize, args: &[String]) -> Res<bool> {
    // A port that is free now. The ranks start at once, so that hardly anybody takes it in between.
    let at = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let start = |rank: usize| -> std::io::Result<Child> {
        Command::new(std::env::current_exe()?)
            .args(args)
            .env("BENCH_RANK", rank.to_string())
            .env("BENCH_RANKS", n.to_string())
            .env("BENCH_AT", format!("tcp://{at}"))
            .env("BENCH_TOKEN", format!("{:x}", std::process::id()))
            .spawn()
    };
    let mut children = (0..n).map(start).collect::<std::io::Result<Vec<_>>>()?;
    let ended = children.iter_mut().map(|child| Ok(child.wait()?.success()));
    Ok(ended.collect::<Res<Vec<bool>>>()?.into_iter().all(|ok| ok))
}

/// Calls `f` once all ranks are there. Returns its result, and the seconds that the slowest rank's call took.
fn timed<T>(comm: &mut Comm, f: impl FnOnce() -> Res<T>) -> Res<(T, f64)> {
    comm.barrier().wait()?;
    let begun = Instant::now();
    let result = f()?;
    let mine = begun.elapsed().as_secs_f64();
    Ok((result, comm.op(ReduceOp::Max).all_reduce(vec![mine]).wait()?[0]))
}

/// One step: pushes each gradient after computing for this long. Returns the reduced gradients.
fn step(buckets: &mut Buckets<Vec<f32>>, grads: Grads, computing: Duration) -> Res<Grads> {
    for (i, grad) in grads.into_iter().enumerate().rev() {
        compute(computing);
        buckets.push(i, grad)?;
    }
    Ok(block_on(buckets.finish())?.collect())
}

/// Stands for computing: takes this long, but sleeps, so that it needs no processor.
fn compute(time: Duration) {
    if time > Duration::ZERO {
        std::thread::sleep(time);
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Buckets for `count` gradients of `len` elements, and the gradients. These are zero, and stay so however often they are summed.
fn model(comm: &mut Comm, (count, len): (usize, usize), options: Options) -> Res<(Buckets<Vec<f32>>, Grads)> {
    let mut buckets = block_on(Buckets::with(&comm.share(), &vec![Param::of::<f32>(len); count], options))?;
    let mut grads = vec![vec![0f32; len]; count];
    for _ in 0..5 {
        grads = step(&mut buckets, grads, Duration::ZERO)?;
    }
    Ok((buckets, grads))
}

fn measure(mut comm: Comm, link: &str, rounds: usize) -> Res<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let show = |what: &str, buckets: f64, other: f64, ratio: f64| {
        if rank == 0 {
            println!("| {n} | {link} | {what} | {:.1} | {:.1} | {ratio:.3} |", buckets * 1e6, other * 1e6);
        }
    };
    let one = Options::default().first_bucket_bytes(usize::MAX).sum();
    // All gradients in one bucket, against `all_reduce_list` of the same gradients.
    for shape in [(8, 1 << 19), (64, 1 << 15)] {
        let (mut buckets, mut grads) = model(&mut comm, shape, one)?;
        let mut list = grads.clone();
        let mut times = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let time;
            (grads, time) = timed(&mut comm, || step(&mut buckets, grads, Duration::ZERO))?;
            times.0.push(time);
            let shared = comm.share();
            let (back, time) = timed(&mut comm, || Ok(block_on(shared.all_reduce_list(list))?))?;
            list = back;
            times.1.push(time);
        }
        let (a, b) = (median(times.0), median(times.1));
        let what = format!("one bucket of {} x {} KB / all_reduce_list", shape.0, shape.1 * 4 / 1024);
        show(&what, a, b, a / b);
    }
    // Small gradients, which are packed into buckets, against one call on as many bytes.
    let shape = (100, 1024);
    let (mut buckets, mut grads) = model(&mut comm, shape, Options::default().sum())?;
    let mut whole = vec![0f32; shape.0 * shape.1];
    let mut times = (Vec::new(), Vec::new());
    for _ in 0..10 * rounds {
        let time;
        (grads, time) = timed(&mut comm, || step(&mut buckets, grads, Duration::ZERO))?;
        times.0.push(time);
        let shared = comm.share();
        let (back, time) = timed(&mut comm, || Ok(block_on(shared.all_reduce(whole))?))?;
        whole = back;
        times.1.push(time);
    }
    let (a, b) = (median(times.0), median(times.1));
    show("100 x 4 KB / one all_reduce of 400 KB", a, b, a / b);
    compressed(&mut comm, rounds, &show)?;
    for mb in [4, 25] {
        exposed(&mut comm, rounds, mb, &show)?;
    }
    block_on(comm.close())?;
    Ok(())
}

/// Buckets that send their gradients rounded to 16 bits, against buckets that send them as they are.
fn compressed(comm: &mut Comm, rounds: usize, show: &dyn Fn(&str, f64, f64, f64)) -> Res<()> {
    let one = Options::default().first_bucket_bytes(usize::MAX).sum();
    let (mut halves, mut grads) = model(comm, (8, 1 << 19), one.compress(DType::BF16))?;
    let (mut whole, mut others) = model(comm, (8, 1 << 19), one)?;
    let mut times = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let time;
        (grads, time) = timed(comm, || step(&mut halves, grads, Duration::ZERO))?;
        times.0.push(time);
        let time;
        (others, time) = timed(comm, || step(&mut whole, others, Duration::ZERO))?;
        times.1.push(time);
    }
    let (a, b) = (median(times.0), median(times.1));
    show("one bucket of 8 x 2048 KB as bf16 / as f32", a, b, a / b);
    Ok(())
}

/// Eight buckets beside computing that takes as long as they take alone: how much of that time computing does not hide.
fn exposed(comm: &mut Comm, rounds: usize, mb: usize, show: &dyn Fn(&str, f64, f64, f64)) -> Res<()> {
    let each = Options::default().first_bucket_bytes(1).bucket_bytes(1).sum();
    let (mut buckets, mut grads) = model(comm, (8, mb << 18), each)?;
    let mut alone = Vec::new();
    for _ in 0..rounds {
        let time;
        (grads, time) = timed(comm, || step(&mut buckets, grads, Duration::ZERO))?;
        alone.push(time);
    }
    // All ranks compute equally long.
    let total = comm.broadcast(vec![median(alone)], 0).wait()?[0];
    let piece = Duration::from_secs_f64(total / 8.0);
    let (mut computing, mut both, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let eight = || {
            (0..8).for_each(|_| compute(piece));
            Ok(())
        };
        computing.push(timed(comm, eight)?.1);
        let time;
        (grads, time) = timed(comm, || step(&mut buckets, grads, piece))?;
        both.push(time);
        let time;
        (grads, time) = timed(comm, || step(&mut buckets, grads, Duration::ZERO))?;
        alone.push(time);
    }
    let (computing, both, alone) = (median(computing), median(both), median(alone));
    let exposed = both - computing;
    let what = format!("8 buckets of {mb} MB beside computing: exposed / communicating alone");
    show(&what, exposed, alone, exposed / alone);
    Ok(())
}
