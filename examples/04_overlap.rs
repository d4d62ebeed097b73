//! How much of an all-reduce hides behind computation.
//!
//! Teaches: a collective runs from the call on, so work that is done between the call and `.wait()` overlaps with it.
//! Two ranks (threads) each multiply matrices on a stream while 32 MB of gradients are all-reduced. The number of
//! products is chosen so that both take about as long. It prints medians over rounds, of the slower rank:
//! computing alone, communicating alone, and both together; what is *exposed* is together minus computing alone.
//!
//! Read the result with the machine in mind. On a CPU the engine's copies and additions use the same cores and the
//! same memory bus as the computation: with as many computing threads as cores, no core is left for communication. The
//! line "beside a sleep" shows the other end: the stream only sleeps, as a host does while a device computes.
//!
//! `cargo run --release --example 04_overlap`

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, Error, HostStream, ReduceOp};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RANKS: usize = 2;
/// Elements of the all-reduce: 32 MB.
const GRADIENTS: usize = 8 << 20;
/// Rows and columns of a matrix.
const SIDE: usize = 192;
const ROUNDS: usize = 11;

/// `c += a * b`. The innermost loop goes along rows, so that the compiler can use vectors.
fn multiply(a: &[f32], b: &[f32], c: &mut [f32]) {
    for (row, out) in a.chunks_exact(SIDE).zip(c.chunks_exact_mut(SIDE)) {
        for (x, line) in row.iter().zip(b.chunks_exact(SIDE)) {
            for (o, y) in out.iter_mut().zip(line) {
                *o += x * y;
            }
        }
    }
}

/// Puts `times` products on the stream.
fn compute(stream: &HostStream, matrix: &Arc<Vec<f32>>, times: u64) {
    let matrix = matrix.clone();
    stream.launch(move || {
        let mut out = vec![0.0; SIDE * SIDE];
        for _ in 0..times {
            multiply(black_box(&matrix), &matrix, &mut out);
        }
        black_box(out);
    });
}

/// The median over rounds of the slowest rank's time, the same on all ranks. Each round starts together.
fn median(
    comm: &mut Comm,
    mut round: impl FnMut(&mut Comm) -> std::result::Result<(), Error>,
) -> Result<Duration> {
    let mut nanos = Vec::new();
    for _ in 0..ROUNDS {
        comm.barrier().wait()?;
        let start = Instant::now();
        round(comm)?;
        nanos.push(start.elapsed().as_nanos() as u64);
    }
    let mut nanos = comm.op(ReduceOp::Max).all_reduce(nanos).wait()?;
    nanos.sort_unstable();
    Ok(Duration::from_nanos(nanos[ROUNDS / 2]))
}

struct Times {
    products: u64,
    computing: Duration,
    communicating: Duration,
    together: Duration,
    beside_sleep: Duration,
}

fn rank(mut comm: Comm) -> Result<Times> {
    let stream = HostStream::new("compute")?;
    let matrix = Arc::new(vec![1e-3_f32; SIDE * SIDE]);
    let mut gradients = vec![1.0_f32; GRADIENTS];

    // The average of equal values is that value, so the buffer can be reduced again and again.
    let mut average = |comm: &mut Comm| {
        let work = comm.op(ReduceOp::Avg).all_reduce(std::mem::take(&mut gradients));
        gradients = work.wait()?;
        Ok(())
    };
    average(&mut comm)?; // first touch of all memory
    let communicating = median(&mut comm, &mut average)?;

    // As many products as take as long as communicating: two guesses, each from the measured time of the one before.
    let (mut products, mut computing) = (16, Duration::ZERO);
    for guess in 0..3 {
        if guess > 0 {
            let ratio = communicating.as_secs_f64() / computing.as_secs_f64();
            products = (products as f64 * ratio).round().max(1.0) as u64;
        }
        computing = median(&mut comm, |_| {
            compute(&stream, &matrix, products);
            stream.synchronize()
        })?;
    }

    let mut both = |job: &dyn Fn(&HostStream)| {
        median(&mut comm, |comm| {
            job(&stream);
            let work = comm.op(ReduceOp::Avg).all_reduce(std::mem::take(&mut gradients));
            // Here a training loop would go on with the next layer.
            stream.synchronize()?;
            gradients = work.wait()?;
            Ok(())
        })
    };
    let together = both(&|stream| compute(stream, &matrix, products))?;
    let beside_sleep = both(&|stream| stream.launch(move || thread::sleep(computing)))?;
    Ok(Times { products, computing, communicating, together, beside_sleep })
}

fn main() -> Result<()> {
    let cores = thread::available_parallelism()?;
    println!(
        "{RANKS} ranks, {cores} cores, all-reduce of {} MB, median of {ROUNDS} rounds",
        (GRADIENTS * 4) >> 20
    );
    let threads: Vec<_> = Comm::local(RANKS)?.into_iter().map(|comm| thread::spawn(|| rank(comm))).collect();
    let mut times = Vec::new();
    for thread in threads {
        times.push(thread.join().map_err(|_| "a rank panicked")??);
    }
    let Times { products, computing, communicating, together, beside_sleep } = &times[0];
    let ms = |d: &Duration| d.as_secs_f64() * 1e3;
    let exposed = |together: &Duration| {
        let exposed = together.saturating_sub(*computing);
        let share = 100.0 * exposed.as_secs_f64() / communicating.as_secs_f64();
        format!("{:.1} ms, {share:.0} % of communicating alone", ms(&exposed))
    };
    println!(
        "computing alone       {:6.1} ms ({products} products of {SIDE}x{SIDE} matrices)",
        ms(computing)
    );
    println!("communicating alone   {:6.1} ms", ms(communicating));
    println!("together              {:6.1} ms; exposed {}", ms(together), exposed(together));
    println!("beside a sleep as long{:6.1} ms; exposed {}", ms(beside_sleep), exposed(beside_sleep));
    if cores.get() < 2 * RANKS {
        println!("({RANKS} computing threads and the engine share {cores} cores: they compete)");
    }
    Ok(())
}
