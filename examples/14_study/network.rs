//! The network that is trained, and a worker that computes its gradients, or sleeps as long.

use std::thread::sleep;
use std::time::{Duration, Instant};

use allstream::Comm;

use super::Result;

const RATE: f32 = 0.05;
/// Passes that are timed, of which the fastest counts.
const PASSES: usize = 7;

/// Dense layers of `tanh` units. Row `i` of a layer has the weights of its input `i`.
#[derive(Clone)]
pub(crate) struct Network {
    width: usize,
    pub(crate) layers: Vec<Vec<f32>>,
}

/// Some number between -1 and 1 for each `i`, the same on all ranks.
fn number(i: usize) -> f32 {
    (i.wrapping_mul(2_654_435_761) >> 8) as u16 as f32 / 32768.0 - 1.0
}

fn add(into: &mut [f32], factor: f32, other: &[f32]) {
    into.iter_mut().zip(other).for_each(|(x, y)| *x += factor * y);
}

/// Eight sums side by side, so that the compiler can use vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

impl Network {
    pub(crate) fn new(width: usize, layers: usize) -> Network {
        let scale = (3.0 / width as f32).sqrt();
        let layer = |at| (0..width * width).map(|i| scale * number(at * width * width + i)).collect();
        Network { width, layers: (0..layers).map(layer).collect() }
    }

    pub(crate) fn layer_bytes(&self) -> usize {
        4 * self.width * self.width
    }

    pub(crate) fn descend(&mut self, layer: usize, gradient: &[f32]) {
        add(&mut self.layers[layer], -RATE, gradient);
    }

    /// The largest difference between a weight here and the same weight there; NaN counts as the largest.
    pub(crate) fn difference(&self, other: &Network) -> f32 {
        let pairs = self.layers.iter().flatten().zip(other.layers.iter().flatten());
        pairs
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, |most: f32, d| if d <= most || most.is_nan() { most } else { d })
    }

    /// The inputs of each layer, then the output of the last.
    fn forward(&self, inputs: &[f32]) -> Vec<Vec<f32>> {
        let mut values = vec![inputs.to_vec()];
        for layer in &self.layers {
            let mut outputs = vec![0.0; inputs.len()];
            let examples = values[values.len() - 1].chunks_exact(self.width);
            for (x, out) in examples.zip(outputs.chunks_exact_mut(self.width)) {
                layer.chunks_exact(self.width).zip(x).for_each(|(row, x)| add(out, *x, row));
                out.iter_mut().for_each(|y| *y = y.tanh());
            }
            values.push(outputs);
        }
        values
    }

    /// Writes the gradient of a layer's weights. `slopes` is the gradient of the layer's outputs, and becomes that of its inputs.
    fn backward(&self, layer: usize, values: &[Vec<f32>], slopes: &mut [f32], gradient: &mut [f32]) {
        gradient.fill(0.0);
        let width = self.width;
        let outputs = values[layer + 1].chunks_exact(width);
        let examples = values[layer].chunks_exact(width).zip(outputs);
        for ((x, y), slope) in examples.zip(slopes.chunks_exact_mut(width)) {
            slope.iter_mut().zip(y).for_each(|(slope, y)| *slope *= 1.0 - y * y);
            gradient.chunks_exact_mut(width).zip(x).for_each(|(row, x)| add(row, *x, slope));
            let rows = self.layers[layer].chunks_exact(width);
            let next: Vec<f32> = rows.map(|row| dot(row, slope)).collect();
            slope.copy_from_slice(&next);
        }
    }
}

/// How long a step computes, in seconds.
#[derive(Clone, Default)]
pub(crate) struct Times {
    pub(crate) forward: f64,
    /// The backward pass of each layer.
    pub(crate) layers: Vec<f64>,
}

impl Times {
    /// The whole time in the backward pass, as long in each layer.
    pub(crate) fn even(total: f64, layers: usize) -> Times {
        Times { forward: 0.0, layers: vec![total / layers as f64; layers] }
    }

    pub(crate) fn backward(&self) -> f64 {
        self.layers.iter().sum()
    }

    /// Gives the times of rank 0 to all ranks.
    pub(crate) async fn shared(comm: &mut Comm, times: Times) -> Result<Times> {
        let all = std::iter::once(times.forward).chain(times.layers);
        let bytes = comm.broadcast_bytes(all.flat_map(f64::to_le_bytes).collect(), 0).await?;
        let mut all = bytes.as_chunks().0.iter().map(|time| f64::from_le_bytes(*time));
        Ok(Times { forward: all.next().unwrap_or_default(), layers: all.collect() })
    }
}

/// A rank of the training: the network, its own examples, and memory for the gradients.
pub(crate) struct Worker {
    pub(crate) network: Network,
    pub(crate) gradients: Vec<Vec<f32>>,
    inputs: Vec<f32>,
    /// A number that differs between ranks.
    pull: f32,
    /// How long to sleep instead of computing.
    times: Option<Times>,
}

impl Worker {
    pub(crate) fn new(network: Network, rank: usize, batch: usize, times: Option<Times>) -> Worker {
        let gradients = network.layers.iter().map(|layer| vec![0.0; layer.len()]).collect();
        let count = batch * network.width;
        let inputs = (0..count).map(|i| number(rank * count + i)).collect();
        Worker { network, gradients, inputs, pull: 0.01 * (rank as f32 + 1.0), times }
    }

    /// Computes, and hands over the gradient of each layer, from the last to the first, as soon as it is there.
    pub(crate) fn step(&mut self, mut ready: impl FnMut(usize, Vec<f32>) -> Result<()>) -> Result<()> {
        if let Some(times) = &self.times {
            pause(times.forward);
            for (at, time) in times.layers.iter().enumerate().rev() {
                pause(*time);
                // Any gradient will do that differs between ranks and depends on the weights, and takes no time to make.
                let mut gradient = std::mem::take(&mut self.gradients[at]);
                let weights = &self.network.layers[at];
                gradient.iter_mut().zip(weights).for_each(|(g, w)| *g = 0.1 * w + self.pull);
                ready(at, gradient)?;
            }
            return Ok(());
        }
        let (values, mut slopes) = self.forward();
        for at in (0..self.network.layers.len()).rev() {
            let mut gradient = std::mem::take(&mut self.gradients[at]);
            self.network.backward(at, &values, &mut slopes, &mut gradient);
            ready(at, gradient)?;
        }
        Ok(())
    }

    /// The values of all layers, and the gradient of the outputs. The network learns to reverse the numbers of each example.
    fn forward(&self) -> (Vec<Vec<f32>>, Vec<f32>) {
        let values = self.network.forward(&self.inputs);
        let goal = self.inputs.chunks_exact(self.network.width).flat_map(|x| x.iter().rev());
        let count = self.inputs.len() as f32;
        let error = values[values.len() - 1].iter().zip(goal).map(|(y, goal)| 2.0 * (y - goal) / count);
        let slopes = error.collect();
        (values, slopes)
    }

    /// Times several passes on this machine; for the forward pass and for each layer the fastest counts.
    pub(crate) fn measure(&mut self) -> Times {
        let mut least = Times { forward: f64::MAX, layers: vec![f64::MAX; self.network.layers.len()] };
        for _ in 0..PASSES {
            let begun = Instant::now();
            let (values, mut slopes) = self.forward();
            least.forward = least.forward.min(begun.elapsed().as_secs_f64());
            for at in (0..self.network.layers.len()).rev() {
                let begun = Instant::now();
                self.network.backward(at, &values, &mut slopes, &mut self.gradients[at]);
                least.layers[at] = least.layers[at].min(begun.elapsed().as_secs_f64());
            }
        }
        least
    }
}

fn pause(seconds: f64) {
    if seconds > 0.0 {
        sleep(Duration::from_secs_f64(seconds));
    }
}
