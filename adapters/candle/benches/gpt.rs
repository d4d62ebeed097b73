//! Two measurements of the GPT of the example `gpt`. Their results are in docs/bench/candle.md.
//!
//! `cargo bench --bench gpt -- loss [STEPS [RANKS]]`: its loss after STEPS steps (500) on RANKS ranks (2), with gradients that are sent as
//! f32, bf16 and f16.
//!
//! `benches/gpt.sh`: how much of its communication a larger GPT in segments waits for. Each rank runs in a network namespace with shaped
//! lines. All ranks share the cores of one machine, so the time to compute is measured before, in one process (`gpt alone BATCH`), and each
//! rank sleeps as long in place of computing (`gpt rank BUCKET_MB TIMES`).

#[allow(dead_code, reason = "the example's main is not called here")]
#[path = "../examples/gpt.rs"]
mod example;

use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use allstream::{Comm, DType, Rendezvous, SharedComm, train};
use allstream_candle::{DataParallel, Options};
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor, Var};
use candle_nn::{Optimizer, SGD, VarMap};
use pollster::block_on;

use example::{Gpt, Size, characters, rows};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The model on shaped lines: 6.3 million weights, 25 MB of gradients.
const LARGE: Size = Size { context: 64, width: 256, heads: 8, blocks: 8 };
/// The printed loss is the mean of this many last steps, over all ranks.
const LAST: usize = 20;
const WARM_UP: usize = 3;
const ROUNDS: usize = 11;

/// How long each part of a step takes, in seconds.
#[derive(Clone)]
struct Times {
    forward: f64,
    optimizer: f64,
    /// The backward pass of each segment, from the first to the last.
    backward: Vec<f64>,
}

impl Times {
    fn words(&self) -> Vec<f64> {
        [self.forward, self.optimizer].into_iter().chain(self.backward.iter().copied()).collect()
    }

    fn of(words: &[f64]) -> Option<Times> {
        let [forward, optimizer, backward @ ..] = words else { return None };
        let is_whole = backward.len() == LARGE.blocks + 2;
        is_whole.then(|| Times { forward: *forward, optimizer: *optimizer, backward: backward.to_vec() })
    }
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Makes one step, cut as `Segments` cuts it, and times each part.
fn timed_step(model: &Gpt, optimizer: &mut SGD, inputs: &Tensor, targets: &Tensor) -> Result<Times> {
    let start = Instant::now();
    let mut ends = vec![model.embed(inputs)?];
    let mut cuts: Vec<Var> = Vec::new();
    for i in 0..=model.blocks() {
        let cut = Var::from_tensor(&ends[i].detach())?;
        let end =
            if i < model.blocks() { model.block(i, &cut)? } else { model.end(cut.as_tensor(), targets)? };
        cuts.push(cut);
        ends.push(end);
    }
    let forward = start.elapsed().as_secs_f64();
    let mut backward = vec![0.0; ends.len()];
    let mut all = Vec::new();
    let mut grad: Option<Tensor> = None;
    for (i, end) in ends.iter().enumerate().rev() {
        let start = Instant::now();
        let mut grads = match &grad {
            Some(grad) => (end * grad)?.sum_all()?.backward()?,
            None => end.backward()?,
        };
        backward[i] = start.elapsed().as_secs_f64();
        grad = i.checked_sub(1).and_then(|before| Some(grads.remove(cuts[before].as_tensor())?.detach()));
        all.push(grads);
    }
    let start = Instant::now();
    for grads in &all {
        optimizer.step(grads)?;
    }
    Ok(Times { forward, optimizer: start.elapsed().as_secs_f64(), backward })
}

/// What each part of a step takes while nothing else runs: medians of `ROUNDS` steps.
fn alone(batch: usize) -> Result<Times> {
    let (text, different) = characters()?;
    let vars = VarMap::new();
    let model = Gpt::new(LARGE, different, &vars)?;
    let mut optimizer = SGD::new(vars.all_vars(), 0.01)?;
    let starts = (0..batch).map(|i| i * 97 % (text.len() - LARGE.context - 1));
    let [inputs, targets] = [0, 1].map(|shift| rows(&text, starts.clone(), LARGE.context, shift));
    let (inputs, targets) = (inputs?, targets?);
    let mut all = Vec::new();
    for round in 0..WARM_UP + ROUNDS {
        let times = timed_step(&model, &mut optimizer, &inputs, &targets)?;
        if round >= WARM_UP {
            all.push(times.words());
        }
    }
    let words: Vec<f64> =
        (0..all[0].len()).map(|i| median(all.iter().map(|words: &Vec<f64>| words[i]))).collect();
    Times::of(&words).ok_or_else(|| "a step has other parts".into())
}

/// Stands for what a segment computes from a variable: one number, whose backward pass takes so many seconds.
struct Sleeps(f64);

impl CustomOp1 for Sleeps {
    fn name(&self) -> &'static str {
        "sleep"
    }
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }
    fn bwd(&self, arg: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        sleep(Duration::from_secs_f64(self.0));
        let shape = vec![1; arg.rank()];
        grad.reshape(shape)?.broadcast_as(arg.shape())?.contiguous().map(Some)
    }
}

/// The variables of each segment of the model, found by their names.
fn segments(vars: &VarMap) -> Result<Vec<Vec<Var>>> {
    let vars = vars.data().lock().map_err(|_| "a thread panicked")?;
    let is_in = |segment: usize, name: &str| match segment {
        0 => name.starts_with("tokens.") || name.starts_with("positions."),
        last if last == LARGE.blocks + 1 => name.starts_with("tokens.") || name.starts_with("norm."),
        block => name.starts_with(&format!("block_{}.", block - 1)),
    };
    let of =
        |segment| vars.iter().filter(|(name, _)| is_in(segment, name)).map(|(_, var)| var.clone()).collect();
    Ok((0..LARGE.blocks + 2).map(of).collect())
}

/// Makes steps of a model that sleeps in place of computing. Gives for each step the report's compute, communication and exposed, in seconds.
fn steps(
    parallel: &mut DataParallel,
    segments: &[Vec<Var>],
    times: &Times,
    comm: &SharedComm,
) -> Result<Vec<[f64; 3]>> {
    let mut found = Vec::new();
    for round in 0..WARM_UP + ROUNDS {
        sleep(Duration::from_secs_f64(times.forward));
        let mut pass = parallel.segments();
        let mut x = Tensor::zeros(1, candle_core::DType::F32, &candle_core::Device::Cpu)?;
        for (k, vars) in segments.iter().enumerate() {
            for (i, var) in vars.iter().enumerate() {
                let backward = if i == 0 { times.backward[k] } else { 0.0 };
                x = (x + var.as_tensor().apply_op1(Sleeps(backward))?)?;
            }
            if k + 1 < segments.len() {
                x = pass.cut(&x)?;
            }
        }
        let grads = pass.backward(&(x.sum_all()? * (comm.rank() + 1) as f64)?)?;
        sleep(Duration::from_secs_f64(times.optimizer));
        let grad = grads.get(segments[1][0].as_tensor()).ok_or("a gradient is missing")?;
        let (mean, expected) =
            (grad.flatten_all()?.get(0)?.to_scalar::<f32>()?, (comm.size() + 1) as f32 / 2.0);
        if mean != expected {
            return Err(format!("a gradient is {mean}, expected {expected}").into());
        }
        let report = parallel.report().ok_or("there is no report")?;
        if round >= WARM_UP {
            found.push([report.compute, report.communication, report.exposed].map(|time| time.as_secs_f64()));
        }
    }
    Ok(found)
}

/// The median over all steps of one of the three times, on the rank where that is largest.
fn slowest(comm: &SharedComm, found: &[[f64; 3]], which: usize) -> Result<f64> {
    let mine = median(found.iter().map(|step| step[which]));
    let all = comm.all_gather(vec![mine]).wait().map_err(|failed| failed.error)?;
    Ok(all.into_iter().fold(0.0, f64::max))
}

/// Runs a rank on a shaped line. Rank 0 prints a row of the table. `bucket_mb`: 0 for the default.
fn rank(bucket_mb: usize, times: &Times) -> Result<()> {
    let comm = block_on(Comm::connect(Rendezvous::from_env()?))?;
    let shared = comm.share();
    let vars = VarMap::new();
    let (_, different) = characters()?;
    Gpt::new(LARGE, different, &vars)?;
    let buckets = train::Options::default();
    let buckets = if bucket_mb == 0 { buckets } else { buckets.bucket_bytes(bucket_mb << 20) };
    let options = Options::default().buckets(buckets);
    let mut parallel = DataParallel::with(&shared, &vars, options)?;
    let segments = segments(&vars)?;
    let silent = Times { forward: 0.0, optimizer: 0.0, backward: vec![0.0; times.backward.len()] };
    let alone = steps(&mut parallel, &segments, &silent, &shared)?;
    let beside = steps(&mut parallel, &segments, times, &shared)?;
    let alone = slowest(&shared, &alone, 1)?;
    let [computing, communicating, exposed] =
        [0, 1, 2].map(|which| slowest(&shared, &beside, which).map(|time| time * 1e3));
    let (computing, communicating, exposed) = (computing?, communicating?, exposed?);
    let report = parallel.report().ok_or("there is no report")?;
    if shared.rank() == 0 {
        let slept: f64 = times.words().iter().sum::<f64>() * 1e3;
        let backward = times.backward.iter().sum::<f64>() * 1e3;
        let alone = alone * 1e3;
        let size = if bucket_mb == 0 { "default".to_owned() } else { bucket_mb.to_string() };
        println!(
            "| {} | {size} | {} | {slept:.0}, of which backward {backward:.0} | {computing:.0} | {alone:.0} | {communicating:.0} | {exposed:.1} | {:.3} | {:.3} |",
            shared.size(),
            report.buckets.len(),
            exposed / alone,
            exposed / communicating,
        );
        eprint!("{report}");
    }
    parallel.close()?;
    drop(shared);
    Ok(block_on(comm.close())?)
}

/// The mean loss of the last steps over all ranks.
fn loss(ranks: usize, steps: usize, wire: Option<DType>) -> Result<f64> {
    let options = train::Options::default();
    let options = Options::default().buckets(wire.map_or(options, |wire| options.compress(wire)));
    let spawn = |comm: Comm| thread::spawn(move || example::train(&comm.share(), steps, options));
    let ranks: Vec<_> = Comm::local(ranks)?.into_iter().map(spawn).collect();
    let mut last = Vec::new();
    for rank in ranks {
        let trained = rank.join().map_err(|_| "a rank panicked")??;
        let losses = &trained.losses[trained.losses.len().saturating_sub(LAST)..];
        last.extend(losses.iter().map(|loss| f64::from(*loss)));
    }
    Ok(last.iter().sum::<f64>() / last.len() as f64)
}

fn number(word: Option<&String>, default: usize) -> Result<usize> {
    Ok(word.map(|word| word.parse()).transpose()?.unwrap_or(default))
}

fn main() -> Result<()> {
    // Cargo adds `--bench`.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.first().map(String::as_str) {
        Some("alone") => {
            let words = alone(number(words.get(1), 4)?.max(1))?.words();
            println!("{}", words.iter().map(|word| format!("{word:.6}")).collect::<Vec<_>>().join(" "));
        }
        Some("rank") => {
            let times: Vec<f64> =
                words[2..].iter().map(|word| word.parse()).collect::<std::result::Result<_, _>>()?;
            let times = Times::of(&times).ok_or("expected a time for each part of a step")?;
            rank(number(words.get(1), 0)?, &times)?;
        }
        Some("loss") | None => {
            let (steps, ranks) = (number(words.get(1), 500)?.max(1), number(words.get(2), 2)?.max(1));
            let whole = loss(ranks, steps, None)?;
            println!("| ranks | steps | gradients | loss | to f32 |\n|---|---|---|---|---|");
            println!("| {ranks} | {steps} | f32 | {whole:.6} | 1 |");
            for wire in [DType::BF16, DType::F16] {
                let rounded = loss(ranks, steps, Some(wire))?;
                println!("| {ranks} | {steps} | {wire} | {rounded:.6} | {:.6} |", rounded / whole);
            }
        }
        Some(other) => {
            return Err(format!("there is no measurement {other:?}, expected loss, alone or rank").into());
        }
    }
    Ok(())
}
