//! Data parallel training of a small network on handwritten digits, compared with the same training in one process.
//!
//! Teaches: every rank has the whole model and a part of each batch. `DataParallel` gives all ranks the same weights at the start, and
//! averages the gradients before each step. Ranks are threads here. Where they are processes, each gets its communicator from
//! `Comm::connect`.
//!
//! `cargo run --release --example digits`

use std::thread;

use allstream::{Comm, SharedComm};
use allstream_candle::{DataParallel, Options};
use candle_core::{DType, Device, Error, Module, Result, Tensor};
use candle_nn::{Optimizer, SGD, Sequential, VarBuilder, VarMap, linear, loss, seq};

/// One handwritten digit a line: its label, a space, and its 64 pixels, each as one figure to the base 17.
const DIGITS: &str = include_str!("../../../cli/data/digits.txt");
const PIXELS: usize = 64;
/// One digit in so many is held out for testing: no rank trains on it.
const HELD_OUT: usize = 5;
const BATCH: usize = 128;
const EPOCHS: usize = 30;

/// What a rank has when it has trained.
pub struct Trained {
    /// The weights, by name.
    pub weights: Vec<(String, Tensor)>,
    /// The share of the held-out digits that its model reads right.
    pub accuracy: f32,
}

/// All digits: pixels of 0 to 1, and labels. Those that are held out for testing come last.
fn digits() -> Result<(Tensor, Tensor)> {
    let bad = |line: &str| Error::Msg(format!("digits.txt: expected a label and 64 pixels, found {line:?}"));
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    let lines = DIGITS.lines().filter(|line| !line.starts_with('#')).enumerate();
    let (train, test): (Vec<_>, Vec<_>) = lines.partition(|(i, _)| i % HELD_OUT != 0);
    for (_, line) in train.into_iter().chain(test) {
        let (label, image) = line.split_once(' ').ok_or_else(|| bad(line))?;
        labels.push(label.parse::<u32>().map_err(|_| bad(line))?);
        for pixel in image.chars() {
            pixels.push(pixel.to_digit(17).ok_or_else(|| bad(line))? as f32 / 16.0);
        }
    }
    let n = labels.len();
    Ok((Tensor::from_vec(pixels, (n, PIXELS), &Device::Cpu)?, Tensor::from_vec(labels, n, &Device::Cpu)?))
}

fn model(vars: &VarMap) -> Result<Sequential> {
    let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
    Ok(seq().add(linear(PIXELS, 32, vb.pp("hidden"))?).add(|x: &Tensor| x.relu()).add(linear(
        32,
        10,
        vb.pp("output"),
    )?))
}

/// Sets all variables to numbers that look random and are the same in every run. Those with which candle begins differ from run to run.
fn start(vars: &VarMap) -> Result<()> {
    let mut vars: Vec<_> = vars.data().lock().unwrap().clone().into_iter().collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    let mut state = 1u32;
    for (_, var) in vars {
        let values = (0..var.elem_count()).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 * 0.4 - 0.2
        });
        var.set(&Tensor::from_iter(values, &Device::Cpu)?.reshape(var.shape())?)?;
    }
    Ok(())
}

/// Trains as one rank of `comm`. Only rank 0 calls `start`: the other ranks begin with candle's random numbers, which `DataParallel`
/// replaces with rank 0's.
pub fn train(comm: &SharedComm) -> Result<Trained> {
    let (n, rank) = (comm.size(), comm.rank());
    let (pixels, labels) = digits()?;
    let held_out = pixels.dim(0)?.div_ceil(HELD_OUT);
    let trained = pixels.dim(0)? - held_out;

    let vars = VarMap::new();
    let model = model(&vars)?;
    if rank == 0 {
        start(&vars)?;
    }
    let mut parallel = DataParallel::with(comm, &vars, Options::default().compare_every(20))?;
    let mut optimizer = SGD::new(vars.all_vars(), 0.3)?;
    for step in 0..EPOCHS * (trained / BATCH) {
        let part = BATCH / n;
        let at = step % (trained / BATCH) * BATCH + rank * part;
        let logits = model.forward(&pixels.narrow(0, at, part)?)?;
        let mut grads = loss::cross_entropy(&logits, &labels.narrow(0, at, part)?)?.backward()?;
        parallel.reduce(&mut grads)?;
        optimizer.step(&grads)?;
    }
    parallel.compare()?;
    parallel.close()?;

    let found = model.forward(&pixels.narrow(0, trained, held_out)?)?.argmax(1)?;
    let right = found.eq(&labels.narrow(0, trained, held_out)?)?.to_dtype(DType::F32)?.mean_all()?;
    let weights =
        vars.data().lock().unwrap().iter().map(|(k, v)| (k.clone(), v.as_detached_tensor())).collect();
    Ok(Trained { weights, accuracy: right.to_scalar()? })
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let spawn = |comm: Comm| thread::spawn(move || train(&comm.share()));
    let ranks: Vec<_> = Comm::local(4)?.into_iter().map(spawn).collect();
    let alone = train(&Comm::local(1)?.remove(0).share())?;
    for (rank, thread) in ranks.into_iter().enumerate() {
        let trained = thread.join().map_err(|_| "a rank panicked")??;
        let mut largest = 0f32;
        for (name, weight) in &trained.weights {
            let of_one = alone.weights.iter().find(|(other, _)| other == name).ok_or("another model")?;
            largest = largest.max((weight - &of_one.1)?.abs()?.flatten_all()?.max(0)?.to_scalar()?);
        }
        println!(
            "rank {rank}: reads {:.1} % of new digits; largest weight difference to one process {largest:.1e}",
            100.0 * trained.accuracy
        );
    }
    Ok(())
}
