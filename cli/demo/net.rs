//! A multi-layer perceptron over one flat vector of weights: ReLU between the layers, softmax
//! cross-entropy at the end. Nothing here knows about processes or communication.

use rand::Rng;

/// The shape of a network. Its weights live outside, in a flat `Vec<f32>`: layer after layer, the
/// matrix (one row of input weights for each output) and then the biases.
#[derive(Clone, Debug)]
pub(crate) struct Mlp {
    layers: Vec<Layer>,
}

#[derive(Clone, Copy, Debug)]
struct Layer {
    inputs: usize,
    outputs: usize,
}

impl Layer {
    fn weights(self) -> usize {
        self.inputs * self.outputs
    }

    fn parameters(self) -> usize {
        self.weights() + self.outputs
    }
}

/// The results of a network for some examples, summed over them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// Cross-entropy loss.
    pub(crate) loss: f32,
    /// Number of examples classified correctly.
    pub(crate) correct: usize,
}

/// An example: the input and the index of the right output.
pub(crate) type Example<'a> = (&'a [f32], usize);

impl Mlp {
    /// A network with these layer widths, from the input to the output.
    pub(crate) fn new(widths: &[usize]) -> Self {
        let layers = widths.windows(2).map(|pair| Layer { inputs: pair[0], outputs: pair[1] }).collect();
        Self { layers }
    }

    /// Length of the vector of weights.
    pub(crate) fn parameters(&self) -> usize {
        self.layers.iter().map(|layer| layer.parameters()).sum()
    }

    /// First weights: uniform in ±sqrt(6 / inputs) (He et al.), biases zero.
    pub(crate) fn init(&self, rng: &mut impl Rng) -> Vec<f32> {
        let mut params = Vec::with_capacity(self.parameters());
        for layer in &self.layers {
            let limit = (6.0 / layer.inputs as f32).sqrt();
            params.extend((0..layer.weights()).map(|_| rng.random_range(-limit..limit)));
            params.extend((0..layer.outputs).map(|_| 0.0));
        }
        params
    }

    /// Adds the gradient of the loss of every example to `grads`, which has the length of `params`.
    pub(crate) fn add_gradient<'a>(
        &self,
        params: &[f32],
        examples: impl IntoIterator<Item = Example<'a>>,
        grads: &mut [f32],
    ) -> Tally {
        debug_assert_eq!(params.len(), grads.len());
        let mut tally = Tally::default();
        let mut values = self.scratch();
        for (input, label) in examples {
            self.forward(params, input, &mut values);
            tally.add(&mut values, label);
            self.backward(params, input, label, &mut values, grads);
        }
        tally
    }

    /// Loss and hits of these examples, without a gradient.
    pub(crate) fn evaluate<'a>(
        &self,
        params: &[f32],
        examples: impl IntoIterator<Item = Example<'a>>,
    ) -> Tally {
        let mut tally = Tally::default();
        let mut values = self.scratch();
        for (input, label) in examples {
            self.forward(params, input, &mut values);
            tally.add(&mut values, label);
        }
        tally
    }

    /// Room for the outputs of every layer.
    fn scratch(&self) -> Vec<Vec<f32>> {
        self.layers.iter().map(|l| vec![0.0; l.outputs]).collect()
    }

    /// Fills `values` with the output of every layer, the last one without an activation.
    fn forward(&self, params: &[f32], input: &[f32], values: &mut [Vec<f32>]) {
        debug_assert_eq!(params.len(), self.parameters());
        let mut rest = params;
        for (index, layer) in self.layers.iter().enumerate() {
            let (own, later) = rest.split_at(layer.parameters());
            rest = later;
            let (matrix, biases) = own.split_at(layer.weights());
            let hidden = index + 1 < self.layers.len();
            let (done, todo) = values.split_at_mut(index);
            let x = done.last().map_or(input, Vec::as_slice);
            let rows = matrix.chunks_exact(layer.inputs).zip(biases);
            for (y, (row, bias)) in todo[0].iter_mut().zip(rows) {
                let sum = bias + row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
                *y = if hidden { sum.max(0.0) } else { sum };
            }
        }
    }

    /// Adds one example's gradient to `grads`. On entry the last of `values` is the softmax of
    /// the outputs; on return `values` holds the layers' error terms.
    fn backward(
        &self,
        params: &[f32],
        input: &[f32],
        label: usize,
        values: &mut [Vec<f32>],
        grads: &mut [f32],
    ) {
        // The derivative of cross-entropy by the outputs: softmax minus the one-hot label.
        if let Some(outputs) = values.last_mut() {
            outputs[label] -= 1.0;
        }
        let mut end = params.len();
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let start = end - layer.parameters();
            let (matrix, _) = params[start..end].split_at(layer.weights());
            let (d_matrix, d_biases) = grads[start..end].split_at_mut(layer.weights());
            end = start;

            let (before, after) = values.split_at_mut(index);
            let errors = &after[0];
            let x = before.last().map_or(input, Vec::as_slice);
            let d_rows = d_matrix.chunks_exact_mut(layer.inputs).zip(d_biases);
            for (error, (d_row, d_bias)) in errors.iter().zip(d_rows) {
                *d_bias += error;
                for (d, x) in d_row.iter_mut().zip(x) {
                    *d += error * x;
                }
            }
            // The error terms of the layer before replace its outputs: where ReLU let the value
            // through, the errors weighted by this layer's matrix, elsewhere zero.
            if let Some(x) = before.last_mut() {
                for (i, value) in x.iter_mut().enumerate() {
                    let column = matrix.iter().skip(i).step_by(layer.inputs);
                    *value =
                        if *value > 0.0 { errors.iter().zip(column).map(|(e, w)| e * w).sum() } else { 0.0 };
                }
            }
        }
    }
}

impl Tally {
    /// Counts one example and turns the network's outputs into their softmax.
    fn add(&mut self, values: &mut [Vec<f32>], label: usize) {
        let Some(outputs) = values.last_mut() else {
            return;
        };
        let largest = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if outputs[label] == largest {
            self.correct += 1;
        }
        for y in outputs.iter_mut() {
            *y = (*y - largest).exp();
        }
        let sum: f32 = outputs.iter().sum();
        for y in outputs.iter_mut() {
            *y /= sum;
        }
        // A probability that underflows to zero still has a finite loss.
        self.loss -= outputs[label].max(f32::MIN_POSITIVE).ln();
    }
}

/// Stochastic gradient descent with momentum.
#[derive(Debug)]
pub(crate) struct Sgd {
    velocity: Vec<f32>,
    rate: f32,
    momentum: f32,
}

impl Sgd {
    /// An optimizer at rest, for this many weights.
    pub(crate) fn new(parameters: usize, rate: f32, momentum: f32) -> Self {
        Self { velocity: vec![0.0; parameters], rate, momentum }
    }

    /// One step along the mean gradient of `rows` examples, given as the sum `grads`.
    pub(crate) fn step(&mut self, params: &mut [f32], grads: &[f32], rows: usize) {
        let rows = rows as f32;
        for ((p, v), g) in params.iter_mut().zip(&mut self.velocity).zip(grads) {
            *v = self.momentum * *v + g / rows;
            *p -= self.rate * *v;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn gradient_is_the_slope_of_the_loss() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let net = Mlp::new(&[6, 8, 7, 4]);
        let mut params = net.init(&mut rng);
        let inputs: Vec<[f32; 6]> = (0..5).map(|_| rng.random()).collect();
        let examples = || inputs.iter().enumerate().map(|(i, x)| (&x[..], i % 4));

        let mut grads = vec![0.0; net.parameters()];
        let tally = net.add_gradient(&params, examples(), &mut grads);
        assert_eq!(tally, net.evaluate(&params, examples()));

        const STEP: f32 = 2e-3;
        let (mut error, mut norm) = (0.0, 0.0);
        for i in 0..params.len() {
            let at = params[i];
            params[i] = at + STEP;
            let above = net.evaluate(&params, examples()).loss;
            params[i] = at - STEP;
            let below = net.evaluate(&params, examples()).loss;
            params[i] = at;
            let slope = (above - below) / (2.0 * STEP);
            error += (slope - grads[i]).powi(2);
            norm += grads[i].powi(2);
        }
        assert!(norm > 1.0, "the gradient is not trivially zero: {norm}");
        let relative = (error / norm).sqrt();
        assert!(relative < 2e-3, "relative error {relative}");
    }

    #[test]
    fn gradients_add_up() {
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        let net = Mlp::new(&[3, 4, 2]);
        let params = net.init(&mut rng);
        assert_eq!(params.len(), 3 * 4 + 4 + 4 * 2 + 2);
        let (a, b): ([f32; 3], [f32; 3]) = (rng.random(), rng.random());
        let mut both = vec![0.0; params.len()];
        let tally = net.add_gradient(&params, [(&a[..], 0), (&b[..], 1)], &mut both);
        let mut one = vec![0.0; params.len()];
        let first = net.add_gradient(&params, [(&a[..], 0)], &mut one);
        let second = net.add_gradient(&params, [(&b[..], 1)], &mut one);
        assert_eq!(one, both);
        assert_eq!(tally.loss, first.loss + second.loss);
    }

    #[test]
    fn momentum_carries_on() {
        let mut sgd = Sgd::new(1, 0.5, 0.5);
        let mut params = [1.0];
        sgd.step(&mut params, &[4.0], 2);
        assert_eq!(params, [0.0]); // velocity 2
        sgd.step(&mut params, &[0.0], 2);
        assert_eq!(params, [-0.5]); // velocity 1
    }
}
