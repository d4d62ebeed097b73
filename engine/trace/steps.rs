//! Steps of a training loop in the flight recorder: which operations reduced their gradients, and when the loop computed and waited.

use std::collections::VecDeque;
use std::time::Instant;

use serde::Serialize;

/// Steps kept of each communicator.
const KEEP: usize = 64;

/// A step, as the gradient buckets of one rank saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// How many steps came before this one.
    pub(crate) number: u64,
    /// The number of its first bucket's operation. The numbers of the other buckets' operations follow.
    pub(crate) first: u64,
    pub(crate) buckets: u64,
    /// When the step before this one had ended or was joined (for the first step: when the buckets were made). From then on the loop computed.
    pub(crate) began: Instant,
    /// When the loop began to wait for all gradients. `ended`: when it had them.
    pub(crate) called: Instant,
    pub(crate) ended: Instant,
}

/// The last steps, oldest first.
#[derive(Default)]
pub(super) struct Steps(VecDeque<Step>);

impl Steps {
    pub(super) fn keep(&mut self, step: Step) {
        if self.0.is_empty() {
            self.0.reserve_exact(KEEP);
        }
        if self.0.len() == KEEP {
            self.0.pop_front();
        }
        self.0.push_back(step);
    }

    pub(super) fn on_record(&self, at: impl Fn(Instant) -> f64) -> Vec<StepOnRecord> {
        let each = |step: &Step| StepOnRecord {
            number: step.number,
            first_operation: step.first,
            operations: step.buckets,
            began_us: at(step.began),
            called_us: at(step.called),
            ended_us: at(step.ended),
        };
        self.0.iter().map(each).collect()
    }
}

/// A step, as the file has it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepOnRecord {
    number: u64,
    first_operation: u64,
    operations: u64,
    began_us: f64,
    called_us: f64,
    ended_us: f64,
}
