//! [`Gradients`]: what a rank has of each parameter in a step.

use std::vec::Drain;

use crate::error::{Error, Failed};
use crate::mem::{Buf, elements};
use crate::train::{Options, Param};

/// The most parameters that an error names.
const MOST_NAMED: usize = 8;

/// All gradients of a step that failed, in the order of the layout; `None` where there was none, or where something may still access it.
pub(super) type Back<B> = Vec<Option<B>>;

/// The gradients of a step, by parameter.
pub(super) struct Gradients<B> {
    /// Each gradient, unless an operation has it. A packed one stays here while its copy is reduced. While weights are gathered: the weights.
    pub(super) bufs: Back<B>,
    pub(super) is_pushed: Vec<bool>,
    /// For each parameter: whether this rank has no gradient of it in this step, and reduces zeros.
    pub(super) is_lent: Vec<bool>,
    /// For each parameter: what rounding has taken from its gradient; empty if that is not compressed. Kept from step to step.
    pub(super) residuals: Vec<Vec<f32>>,
    /// From `done` or `some` the gradients of a finished step are handed out; both are kept, so that this needs no new vector.
    done: Vec<B>,
    some: Back<B>,
}

impl<B: Buf> Gradients<B> {
    pub(super) fn new(layout: &[Param], options: &Options) -> Gradients<B> {
        let n = layout.len();
        let compressed = |param: &Param| options.wire.is_some() && param.is_compressed();
        let zeros = |param: &Param| vec![0.0; if compressed(param) { param.len() } else { 0 }];
        Gradients {
            bufs: (0..n).map(|_| None).collect(),
            is_pushed: vec![false; n],
            is_lent: vec![false; n],
            residuals: layout.iter().map(zeros).collect(),
            done: Vec::with_capacity(n),
            some: Vec::new(),
        }
    }

    /// Adds a gradient to those of earlier micro-batches. Its buffer comes back, unless it is the first.
    pub(super) fn accumulate(&mut self, i: usize, mut grad: B) -> Result<Option<B>, Failed<B>> {
        let Some(sum) = &mut self.bufs[i] else {
            self.bufs[i] = Some(grad);
            return Ok(None);
        };
        match elements::add(&mut grad, sum) {
            Some(()) => Ok(Some(grad)),
            None => Err(Failed { buf: Some(grad), error: not_added("accumulate", i) }),
        }
    }

    /// Adds what was accumulated to a gradient.
    pub(super) fn add(&mut self, call: &str, i: usize, grad: &mut B) -> Result<(), Error> {
        match &mut self.bufs[i] {
            None => Ok(()),
            Some(sum) => elements::add(sum, grad).ok_or_else(|| not_added(call, i)),
        }
    }

    /// The first parameter that has a gradient in this step, if any has: here, or with an operation.
    pub(super) fn first_begun(&self) -> Option<usize> {
        (0..self.bufs.len()).find(|i| self.is_pushed[*i] || self.bufs[*i].is_some())
    }

    /// Why the step cannot be finished: parameters without a gradient. `None`: it can.
    pub(super) fn missing(&self) -> Option<String> {
        let missing = || (0..self.is_pushed.len()).filter(|i| !self.is_pushed[*i]);
        let (found, all) = (missing().count(), self.is_pushed.len());
        if found == 0 {
            return None;
        }
        let mut names: Vec<String> = missing().take(MOST_NAMED).map(|i| i.to_string()).collect();
        if found > MOST_NAMED {
            names.push(format!("and {} more", found - MOST_NAMED));
        }
        Some(format!(
            "{found} of {all} parameters have no gradient in this step: {}; push one for each, or finish by finish_some on all ranks \
             where some may have none",
            names.join(", ")
        ))
    }

    /// Gives all back, in the order of the layout.
    pub(super) fn hand_back(&mut self) -> Drain<'_, B> {
        self.done.clear();
        self.done.extend(self.bufs.iter_mut().filter_map(Option::take));
        self.done.drain(..)
    }

    /// The same, with `None` for parameters of which no rank has a gradient: `used` is 0 for those.
    pub(super) fn hand_back_used(&mut self, used: &[u8]) -> Drain<'_, Option<B>> {
        self.some.clear();
        let bufs = self.bufs.iter_mut().zip(used);
        self.some.extend(bufs.map(|(grad, used)| grad.take().filter(|_| *used != 0)));
        self.some.drain(..)
    }

    /// Takes all gradients that are here after a step has failed, but not the zeros that this rank has reduced.
    pub(super) fn take_own(&mut self) -> Back<B> {
        let bufs = self.bufs.iter_mut().zip(&self.is_lent);
        bufs.map(|(grad, is_lent)| grad.take().filter(|_| !is_lent)).collect()
    }

    /// Takes all gradients that are here.
    pub(super) fn take(&mut self) -> Back<B> {
        self.bufs.iter_mut().map(Option::take).collect()
    }
}

fn not_added(call: &str, i: usize) -> Error {
    Error::system(
        call,
        format!("the gradient of parameter {i} cannot be added to what was accumulated (a bug)"),
    )
}
