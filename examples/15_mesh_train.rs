//! Training with two kinds of parallelism at once, on a mesh of 2 x 2 ranks.
//!
//! Teaches: along the axis "dp" there are copies of the network, each with its own examples; along "tp" each layer is cut in two. In the backward
//! pass both axes communicate at the same time: the gradients of a block are averaged along "dp" while the gradient of its input is summed
//! along "tp". An axis is a communicator, and communicators are independent of each other, so two operations that are both in flight may be
//! submitted in any order, which may differ between ranks. But if one rank awaits "dp" before it submits to "tp", and another rank does it
//! the other way round, they wait for each other in a circle. That ends at the deadline, with an error that says who was missing. The mesh
//! is made anew for each epoch, which costs little: its communicators come from a pool.
//!
//! `cargo run --release --example 15_mesh_train`

use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, Mesh, ReduceOp, Work};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const BLOCKS: usize = 3;
/// How many numbers go into a block and come out of it; and how many hidden units a block has.
const WIDTH: usize = 8;
const HIDDEN: usize = 16;
const EXAMPLES: usize = 32;
const EPOCHS: usize = 5;
const STEPS: usize = 40;
const RATE: f32 = 0.1;
/// How far the weights may be from those of one rank that trained alone.
const NEAR: f32 = 1e-5;

/// How a rank calls the two axes in the backward pass.
#[derive(Clone, Copy)]
struct Habit {
    /// Submits to "tp" first, then to "dp"; else the other way round.
    tensor_first: bool,
    /// Awaits the first operation before it submits the second.
    waits_between: bool,
    /// How long an operation may take.
    deadline: Duration,
}

/// Submits to "dp" first; both operations are in flight together.
const DATA_FIRST: Habit =
    Habit { tensor_first: false, waits_between: false, deadline: Duration::from_secs(60) };

/// The habit of a rank, by its coordinates along "dp" and "tp".
type HabitOf = fn(usize, usize) -> Habit;

/// A sum over the ranks of an axis.
enum Sum {
    InFlight(Work<Vec<f32>>),
    Here(Vec<f32>),
}

impl Sum {
    async fn wait(self) -> Result<Vec<f32>> {
        match self {
            Sum::InFlight(work) => Ok(work.await?),
            Sum::Here(sum) => Ok(sum),
        }
    }
}

/// Submits a part of a sum: gradients are averaged along "dp", parts of a layer are added along "tp".
fn submit(mesh: &mut Mesh, habit: Habit, (axis, part): (&str, Vec<f32>)) -> Result<Work<Vec<f32>>> {
    let op = if axis == "dp" { ReduceOp::Avg } else { ReduceOp::Sum };
    Ok(mesh.axis(axis)?.op(op).timeout(habit.deadline).all_reduce(part))
}

/// A number between -1 and 1 that depends on `i` only, so it is the same on all ranks.
fn number(i: usize) -> f32 {
    (i.wrapping_mul(2_654_435_761) >> 8) as u16 as f32 / 32768.0 - 1.0
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(into: &mut [f32], factor: f32, other: &[f32]) {
    into.iter_mut().zip(other).for_each(|(x, y)| *x += factor * y);
}

/// The weights of a range of a block's hidden units: for each unit a row of `up`, then a row of `down`. A block makes `x` plus the sum of
/// `tanh(up . x) * down` over all its units.
fn block(at: usize, units: std::ops::Range<usize>) -> Vec<f32> {
    let row = 2 * WIDTH;
    units.flat_map(|unit| (0..row).map(move |i| 0.3 * number((at * HIDDEN + unit) * row + i))).collect()
}

/// What these units add to each example, and their activations.
fn forward(block: &[f32], inputs: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut sum, mut active) = (vec![0.0; inputs.len()], Vec::new());
    for (x, sum) in inputs.chunks_exact(WIDTH).zip(sum.chunks_exact_mut(WIDTH)) {
        for unit in block.chunks_exact(2 * WIDTH) {
            let activation = dot(&unit[..WIDTH], x).tanh();
            add(sum, activation, &unit[WIDTH..]);
            active.push(activation);
        }
    }
    (sum, active)
}

/// From the gradient of a block's outputs: the gradient of these units, and what they add to the gradient of the block's inputs.
fn backward(block: &[f32], inputs: &[f32], active: &[f32], outputs: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut units, mut sum) = (vec![0.0; block.len()], vec![0.0; inputs.len()]);
    let mut active = active.iter();
    let examples = inputs.chunks_exact(WIDTH).zip(outputs.chunks_exact(WIDTH));
    for ((x, output), sum) in examples.zip(sum.chunks_exact_mut(WIDTH)) {
        let rows = block.chunks_exact(2 * WIDTH).zip(units.chunks_exact_mut(2 * WIDTH));
        for ((unit, gradient), activation) in rows.zip(&mut active) {
            let slope = dot(&unit[WIDTH..], output) * (1.0 - activation * activation);
            add(&mut gradient[..WIDTH], slope, x);
            add(&mut gradient[WIDTH..], *activation, output);
            add(sum, slope, &unit[..WIDTH]);
        }
    }
    (units, sum)
}

/// Makes one step of training. Returns the loss before it.
async fn step(mesh: &mut Mesh, blocks: &mut [Vec<f32>], inputs: &[f32], habit: Habit) -> Result<f32> {
    // Forward: each rank adds what its units make, and the sum over "tp" is what the whole block makes.
    let (mut x, mut kept) = (inputs.to_vec(), Vec::new());
    for block in blocks.iter() {
        let (part, active) = forward(block, &x);
        let whole = submit(mesh, habit, ("tp", part))?.await?;
        let before = x.clone();
        add(&mut x, 1.0, &whole);
        kept.push((before, active));
    }
    // The network learns to reverse each example.
    let examples = (inputs.len() / WIDTH) as f32;
    let goal = inputs.chunks_exact(WIDTH).flat_map(|x| x.iter().rev());
    let error: Vec<f32> = x.iter().zip(goal).map(|(x, goal)| x - goal).collect();
    let loss = dot(&error, &error) / examples;
    let mut gradient: Vec<f32> = error.iter().map(|e| 2.0 * e / examples).collect();

    // Backward: the gradients of each block are on their way along "dp" while the blocks before it are computed.
    let mut on_their_way = Vec::new();
    for (block, (x, active)) in blocks.iter().zip(&kept).rev() {
        let (units, part) = backward(block, x, active, &gradient);
        let (units, part) = (("dp", units), ("tp", part));
        let (first, second) = if habit.tensor_first { (part, units) } else { (units, part) };
        let first = submit(mesh, habit, first)?;
        let first = if habit.waits_between { Sum::Here(first.await?) } else { Sum::InFlight(first) };
        let second = Sum::InFlight(submit(mesh, habit, second)?);
        let (units, whole) = if habit.tensor_first { (second, first) } else { (first, second) };
        add(&mut gradient, 1.0, &whole.wait().await?);
        on_their_way.push(units);
    }
    for (block, units) in blocks.iter_mut().rev().zip(on_their_way) {
        add(block, -RATE, &units.wait().await?);
    }
    Ok(loss)
}

/// What a rank has at the end: its part of the weights, the losses of the first and the last step, and how many groups were made and reused.
struct Trained {
    blocks: Vec<Vec<f32>>,
    losses: (f32, f32),
    groups: (u64, u64),
}

/// Trains on `shape[0]` parts of the data and `shape[1]` parts of each layer.
async fn train(world: &mut Comm, shape: [usize; 2], habit: HabitOf) -> Result<Trained> {
    let (mut blocks, mut losses) = (Vec::new(), Vec::new());
    for _ in 0..EPOCHS {
        let mut mesh = world.mesh([("dp", shape[0]), ("tp", shape[1])]).await?;
        let (dp, tp) = (mesh.coordinate("dp")?, mesh.coordinate("tp")?);
        if blocks.is_empty() {
            let units = HIDDEN / shape[1];
            blocks = (0..BLOCKS).map(|at| block(at, tp * units..(tp + 1) * units)).collect();
        }
        let examples = EXAMPLES / shape[0] * WIDTH;
        let inputs: Vec<f32> = (dp * examples..(dp + 1) * examples).map(|i| number(i + 1_000_003)).collect();
        for _ in 0..STEPS {
            losses.push(step(&mut mesh, &mut blocks, &inputs, habit(dp, tp)).await?);
        }
        mesh.close().await?;
    }
    let pool = world.stats().pool;
    Ok(Trained { blocks, losses: (losses[0], losses[losses.len() - 1]), groups: (pool.misses, pool.hits) })
}

/// Trains on a world of threads. Returns what each rank came to, and after how long.
fn on_ranks(shape: [usize; 2], habit: HabitOf) -> Result<Vec<(Result<Trained>, Duration)>> {
    let spawn = |mut world: Comm| {
        thread::spawn(move || {
            let begun = Instant::now();
            let trained = block_on(train(&mut world, shape, habit));
            // The world is kept until all ranks have ended.
            (trained, begun.elapsed(), world)
        })
    };
    let threads: Vec<_> = Comm::local(shape[0] * shape[1])?.into_iter().map(spawn).collect();
    let ends: std::result::Result<Vec<_>, _> = threads.into_iter().map(|thread| thread.join()).collect();
    let ends = ends.map_err(|_| "a rank panicked")?;
    Ok(ends.into_iter().map(|(trained, after, _)| (trained, after)).collect())
}

/// Trains on 2 x 2 ranks, and checks how far the weights of any of them are from those of one rank that trained alone.
fn compare(what: &str, alone: &Trained, habit: HabitOf) -> Result<()> {
    let mut largest = 0.0_f32;
    for (rank, (trained, _)) in on_ranks([2, 2], habit)?.into_iter().enumerate() {
        let trained = trained.map_err(|error| format!("{what}: rank {rank}: {error}"))?;
        for (ours, whole) in trained.blocks.iter().zip(&alone.blocks) {
            let theirs = &whole[rank % 2 * ours.len()..][..ours.len()];
            let differences = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
            // NaN is not near anything.
            largest =
                differences.fold(largest, |most: f32, d| if d <= most || most.is_nan() { most } else { d });
        }
        if rank == 0 {
            let ((first, last), (made, taken)) = (trained.losses, trained.groups);
            println!(
                "{what}: loss on rank 0 {first:.4} to {last:.4}; {made} groups made, {taken} taken from the pool"
            );
        }
    }
    println!("  largest difference from one process {largest:.1e}, at most {NEAR:.0e} is allowed");
    if largest <= NEAR { Ok(()) } else { Err(format!("{what}: {largest:e} from one process").into()) }
}

fn main() -> Result<()> {
    let data_first = |_, _| DATA_FIRST;
    let alone = on_ranks([1, 1], data_first)?.remove(0).0?;
    println!("one process: loss {:.4} to {:.4}", alone.losses.0, alone.losses.1);
    compare("2 x 2 ranks, \"dp\" first", &alone, data_first)?;
    // On both axes, each of the ranks 1 and 2 has rank 0 or rank 3 as its neighbour.
    let turned = |dp, tp| Habit { tensor_first: dp != tp, ..DATA_FIRST };
    compare("2 x 2 ranks, \"tp\" first on ranks 1 and 2", &alone, turned)?;

    println!("the same order, but each rank awaits one axis before it submits to the other:");
    // A short deadline, so that the circle is soon found.
    let circle =
        |dp, tp| Habit { tensor_first: dp != tp, waits_between: true, deadline: Duration::from_secs(2) };
    for (rank, (trained, after)) in on_ranks([2, 2], circle)?.into_iter().enumerate() {
        match trained {
            Ok(_) => return Err(format!("rank {rank} came through a circle, expected a timeout").into()),
            Err(error) => println!("  rank {rank} after {:.1} s: {error}", after.as_secs_f64()),
        }
    }
    Ok(())
}
