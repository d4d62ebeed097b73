//! Data-parallel training: every process works on its share of each global batch, and the sum of
//! their gradients moves the same weights everywhere.

use std::io;
use std::ops::Range;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::data::{Digit, Split};
use super::net::{Example, Mlp, Sgd};
use crate::error::BoxError;

/// What to train, and how. Equal plans over equal data give equal weights.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Widths of the layers, from the pixels to the classes.
    pub(crate) widths: Vec<usize>,
    /// Passes over the training rows.
    pub(crate) epochs: usize,
    /// Rows of one step, over all processes together.
    pub(crate) global_batch: usize,
    /// Learning rate.
    pub(crate) rate: f32,
    /// Momentum.
    pub(crate) momentum: f32,
    /// Seed of the first weights and of the shuffles.
    pub(crate) seed: u64,
}

impl Plan {
    /// The network to train.
    pub(crate) fn net(&self) -> Mlp {
        Mlp::new(&self.widths)
    }

    /// Number of steps over this many training rows.
    pub(crate) fn steps(&self, rows: usize) -> usize {
        self.epochs * rows.div_ceil(self.global_batch)
    }
}

/// Which part of the rows a process works on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    /// The process, below `size`.
    pub(crate) rank: usize,
    /// Number of processes.
    pub(crate) size: usize,
}

impl Share {
    /// Everything, for a training in one process.
    pub(crate) const WHOLE: Self = Self { rank: 0, size: 1 };

    /// This process's contiguous part of `rows` rows. The parts differ by one row at most, and
    /// some are empty where there are more processes than rows.
    pub(crate) fn of(self, rows: usize) -> Range<usize> {
        rows * self.rank / self.size..rows * (self.rank + 1) / self.size
    }
}

/// What the training tells whoever watches it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// A step is done.
    Step,
    /// An epoch is done.
    Epoch(Epoch),
}

/// An epoch in numbers, over the rows of all processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    /// Its number, from 1.
    pub(crate) number: usize,
    /// Mean loss of the training rows, each with the weights at the start of the step that used it.
    pub(crate) loss: f32,
    /// Share of the training rows classified correctly, with the same weights as for `loss`.
    pub(crate) train_accuracy: f32,
    /// Share of the test rows classified correctly with the weights at the end of the epoch.
    pub(crate) test_accuracy: f32,
}

/// Trains on this process's share and returns the weights, which are the same in every process.
///
/// `sum` adds a vector up over all processes, element by element; every process calls it equally
/// often, with vectors of equal length.
pub(crate) async fn train(
    plan: &Plan,
    data: &Split,
    share: Share,
    mut sum: impl AsyncFnMut(Vec<f32>) -> Result<Vec<f32>, BoxError>,
    mut watch: impl FnMut(Event) -> io::Result<()>,
) -> Result<Vec<f32>, BoxError> {
    let net = plan.net();
    // Seeded alike everywhere: all processes start from the same weights and agree on the order.
    let mut rng = ChaCha8Rng::seed_from_u64(plan.seed);
    let mut params = net.init(&mut rng);
    let mut order: Vec<&Digit> = data.train.iter().collect();
    let mut sgd = Sgd::new(params.len(), plan.rate, plan.momentum);
    let mut grads = vec![0.0; params.len()];

    for number in 1..=plan.epochs {
        order.shuffle(&mut rng);
        let (mut loss, mut correct) = (0.0, 0);
        for batch in order.chunks(plan.global_batch) {
            let own = batch[share.of(batch.len())].iter().copied();
            grads.fill(0.0);
            let tally = net.add_gradient(&params, own.map(example), &mut grads);
            loss += tally.loss;
            correct += tally.correct;

            grads = sum(grads).await?;
            sgd.step(&mut params, &grads, batch.len());
            watch(Event::Step)?;
        }
        let own_test = &data.test[share.of(data.test.len())];
        let test = net.evaluate(&params, own_test.iter().map(example));
        let totals = sum(vec![loss, correct as f32, test.correct as f32]).await?;
        let [loss, correct, test_correct] = totals[..] else {
            return Err("the sum of 3 numbers is not 3 numbers".into());
        };
        watch(Event::Epoch(Epoch {
            number,
            loss: loss / data.train.len() as f32,
            train_accuracy: correct / data.train.len() as f32,
            test_accuracy: test_correct / data.test.len() as f32,
        }))?;
    }
    Ok(params)
}

/// Share of these digits that the network classifies correctly.
pub(crate) fn accuracy(net: &Mlp, params: &[f32], digits: &[Digit]) -> f32 {
    let tally = net.evaluate(params, digits.iter().map(example));
    tally.correct as f32 / digits.len() as f32
}

fn example(digit: &Digit) -> Example<'_> {
    (&digit.pixels, digit.label)
}

#[cfg(test)]
mod tests {
    use super::super::{REQUIRED_ACCURACY, data, plan};
    use super::*;

    fn train_alone(epochs: usize) -> (Vec<f32>, Vec<Epoch>) {
        let mut seen = Vec::new();
        let data = data::load().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let params = runtime
            .block_on(train(
                &plan(epochs),
                &data,
                Share::WHOLE,
                async |v| Ok(v),
                |event| {
                    if let Event::Epoch(epoch) = event {
                        seen.push(epoch);
                    }
                    Ok(())
                },
            ))
            .unwrap();
        (params, seen)
    }

    #[test]
    fn one_process_learns_to_read() {
        let (params, epochs) = train_alone(super::super::EPOCHS);
        let last = epochs.last().unwrap();
        assert_eq!(last.number, super::super::EPOCHS);
        assert!(last.loss < epochs[0].loss / 10.0);
        let data = data::load().unwrap();
        let accuracy = accuracy(&plan(1).net(), &params, &data.test);
        assert!(accuracy >= REQUIRED_ACCURACY, "accuracy {accuracy}");
        assert_eq!(accuracy, last.test_accuracy);
    }

    #[test]
    fn training_repeats_itself() {
        assert_eq!(train_alone(2).0, train_alone(2).0);
    }

    #[test]
    fn shares_cover_every_row_once() {
        for (rows, size) in [(128, 4), (29, 4), (2, 4), (0, 3), (7, 1)] {
            let parts = (0..size).map(|rank| Share { rank, size }.of(rows));
            let rebuilt: Vec<usize> = parts.clone().flatten().collect();
            assert!(rebuilt.into_iter().eq(0..rows));
            assert!(parts.clone().all(|part| part.len() <= rows.div_ceil(size)));
        }
    }
}
