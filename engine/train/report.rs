//! What a step of a training loop spent on computing and on waiting.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use crate::trace::{Recorder, Step};

/// Where the time of a step went, on this rank: [`Buckets::report`](super::Buckets::report). Its `Display` is a table; as JSON, times are in
/// microseconds.
///
/// `compute + exposed` is what the step took. What the network costs is `exposed`; what it would cost without overlap is about
/// `communication`. The times are the flight recorder's: `allstream trace --overlap` prints the same of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// How many steps of these buckets came before this one.
    pub step: u64,
    /// From the end of the step before until `finish` was called: the loop computed, or did something else.
    #[serde(rename = "compute_us", serialize_with = "us")]
    pub compute: Duration,
    /// The sum of what the buckets took, each from when its reduction began on this rank until it had ended here. This includes the time in
    /// which the rank waited for others.
    #[serde(rename = "communication_us", serialize_with = "us")]
    pub communication: Duration,
    /// The part of `communication` before `finish` was called: the loop computed meanwhile.
    #[serde(rename = "hidden_us", serialize_with = "us")]
    pub hidden: Duration,
    /// From the call of `finish` until all gradients were back: the loop waited.
    #[serde(rename = "exposed_us", serialize_with = "us")]
    pub exposed: Duration,
    /// The buckets, in the order in which they were launched. Only the last 256 operations are known: buckets before these are missing.
    pub buckets: Vec<BucketReport>,
}

/// One bucket of a step. Times count from the beginning of the step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BucketReport {
    /// Parameters in it.
    pub params: usize,
    /// Bytes of their gradients.
    pub bytes: usize,
    /// When it was submitted: all its gradients were there, and the buckets before it were submitted.
    #[serde(rename = "submitted_us", serialize_with = "us")]
    pub submitted: Duration,
    /// When its reduction began.
    #[serde(rename = "started_us", serialize_with = "us")]
    pub started: Duration,
    /// When its reduction had ended.
    #[serde(rename = "finished_us", serialize_with = "us")]
    pub finished: Duration,
    /// How much of its reduction was before `finish` was called.
    #[serde(rename = "hidden_us", serialize_with = "us")]
    pub hidden: Duration,
}

fn us<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64() * 1e6)
}

impl Report {
    /// `shapes`: parameters and bytes of each bucket.
    pub(super) fn new(step: &Step, shapes: &[(usize, usize)], recorder: &Recorder) -> Report {
        let since = |at: Instant| at.saturating_duration_since(step.began);
        let mut buckets = Vec::with_capacity(shapes.len());
        for (&(params, bytes), number) in shapes.iter().zip(step.first..) {
            let Some((submitted, started, finished)) = recorder.times(number) else { continue };
            let hidden = finished.min(step.called).saturating_duration_since(started);
            let (submitted, started, finished) = (since(submitted), since(started), since(finished));
            buckets.push(BucketReport { params, bytes, submitted, started, finished, hidden });
        }
        Report {
            step: step.number,
            compute: since(step.called),
            communication: buckets.iter().map(|bucket| bucket.finished.saturating_sub(bucket.started)).sum(),
            hidden: buckets.iter().map(|bucket| bucket.hidden).sum(),
            exposed: step.ended.saturating_duration_since(step.called),
            buckets,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        writeln!(
            f,
            "step {}: compute {:.3} ms, communication {:.3} ms, of which hidden {:.3} ms; exposed {:.3} ms",
            self.step,
            ms(self.compute),
            ms(self.communication),
            ms(self.hidden),
            ms(self.exposed)
        )?;
        writeln!(f, "  bucket  params       bytes  submitted ms  started ms  finished ms  hidden ms")?;
        for (i, bucket) in self.buckets.iter().enumerate() {
            writeln!(
                f,
                "  {i:6}  {:6}  {:10}  {:12.3}  {:10.3}  {:11.3}  {:9.3}",
                bucket.params,
                bucket.bytes,
                ms(bucket.submitted),
                ms(bucket.started),
                ms(bucket.finished),
                ms(bucket.hidden)
            )?;
        }
        Ok(())
    }
}
