//! How far a step is, and when it began and ended.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::error::Error;
use crate::mem::Buf;
use crate::trace::{Recorder, Step};
use crate::train::Report;
use crate::train::bucket::Bucket;

/// How far the buckets of a step are.
#[derive(Default)]
pub(super) struct Progress {
    /// The first bucket that is not launched yet, and the first that has not come back.
    pub(super) launched: usize,
    pub(super) landed: usize,
    /// The factor of this rank's gradients, where [`Buckets::weigh`](super::Buckets::weigh) was called.
    pub(super) scale: Option<f64>,
    /// While weights are gathered: the first bucket whose weights have not come back.
    pub(super) gathered: Option<usize>,
    /// Why a bucket could not be launched.
    pub(super) broken: Option<Error>,
}

impl Progress {
    pub(super) fn check_not_gathering(&self, call: &str) -> Result<(), Error> {
        let problem = "a gather of weights has not ended: call it again with an empty vector first";
        self.gathered.map_or(Ok(()), |_| Err(Error::invalid(call, problem)))
    }
}

/// When a step began and ended, and what is reported of the last one.
pub(super) struct Times {
    /// How many steps have ended or were joined.
    pub(super) steps: u64,
    /// The number of the operation of this step's first bucket.
    pub(super) first: u64,
    pub(super) began: Instant,
    /// When the loop asked to end this step.
    pub(super) called: Option<Instant>,
    last: Arc<Mutex<Last>>,
}

/// The last step that has ended, and how many parameters and bytes each of its buckets has.
#[derive(Default)]
struct Last {
    step: Option<Step>,
    shapes: Vec<(usize, usize)>,
}

impl Times {
    pub(super) fn new() -> Times {
        Times { steps: 0, first: 0, began: Instant::now(), called: None, last: Arc::default() }
    }

    /// Notes that all gradients of the step are back, unless that was noted before.
    pub(super) fn end<B: Buf>(&mut self, recorder: &Recorder, buckets: &[Bucket<B>]) {
        if self.called.is_some() {
            self.end_later()(recorder, buckets);
            self.called = None;
            self.steps += 1;
        }
    }

    /// Gives a function that is to be called when all gradients of the step are back.
    pub(super) fn end_later<B: Buf>(&self) -> impl FnOnce(&Recorder, &[Bucket<B>]) + Send + use<B> {
        let (number, first, began, last) = (self.steps, self.first, self.began, self.last.clone());
        let called = self.called.unwrap_or_else(Instant::now);
        move |recorder, buckets| {
            let ended = Instant::now();
            let step = Step { number, first, buckets: buckets.len() as u64, began, called, ended };
            recorder.step(step);
            let mut last = last.lock();
            last.step = Some(step);
            last.shapes.clear();
            last.shapes.extend(buckets.iter().map(Bucket::shape));
        }
    }

    pub(super) fn report(&self, recorder: &Recorder) -> Option<Report> {
        let last = self.last.lock();
        Some(Report::new(last.step.as_ref()?, &last.shapes, recorder))
    }
}
