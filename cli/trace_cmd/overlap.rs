//! `allstream trace --overlap`: for each step of a training loop, how long the loop computed, how long the buckets took, how much of that
//! was hidden behind computing, and how long the loop still waited (exposed). `train::Buckets` records the steps.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::{CommRecord, Operation};

/// Steps of each rank that are printed: the last ones.
const PRINTED: usize = 4;

/// One step of one rank. Times are in milliseconds.
#[derive(Debug, Serialize)]
pub(super) struct StepReport {
    pub(super) step: u64,
    pub(super) compute_ms: f64,
    pub(super) communication_ms: f64,
    pub(super) hidden_ms: f64,
    pub(super) exposed_ms: f64,
    pub(super) buckets: Vec<BucketReport>,
}

/// One bucket of a step. Times count from the beginning of the step, except `hidden_ms`, which is a duration.
#[derive(Debug, Serialize)]
pub(super) struct BucketReport {
    pub(super) call: String,
    pub(super) submitted_ms: f64,
    pub(super) started_ms: f64,
    pub(super) finished_ms: f64,
    pub(super) hidden_ms: f64,
}

/// The steps that a rank's file still holds.
pub(super) fn steps(comm: &CommRecord) -> Vec<StepReport> {
    let by_number: BTreeMap<u64, &Operation> =
        comm.operations.iter().filter(|o| !o.point_to_point()).map(|o| (o.number, o)).collect();
    let each = |step: &super::Step| {
        let since = |at: f64| (at - step.began_us).max(0.0) / 1e3;
        let last = step.first_operation.saturating_add(step.operations);
        let ended =
            by_number.range(step.first_operation..last).filter_map(|(_, o)| Some((o, o.finished_us?)));
        let buckets: Vec<BucketReport> = ended
            .map(|(o, finished)| {
                let started = o.started_us.unwrap_or(o.submitted_us).max(o.submitted_us);
                let hidden = (finished.min(step.called_us) - started).max(0.0) / 1e3;
                let (submitted_ms, started_ms) = (since(o.submitted_us), since(started));
                let (finished_ms, hidden_ms) = (since(finished), hidden);
                BucketReport { call: o.call.clone(), submitted_ms, started_ms, finished_ms, hidden_ms }
            })
            .collect();
        StepReport {
            step: step.number,
            compute_ms: since(step.called_us),
            communication_ms: buckets.iter().map(|bucket| bucket.finished_ms - bucket.started_ms).sum(),
            hidden_ms: buckets.iter().map(|bucket| bucket.hidden_ms).sum(),
            exposed_ms: (step.ended_us - step.called_us).max(0.0) / 1e3,
            buckets,
        }
    };
    comm.steps.iter().map(each).collect()
}

/// Writes a row for each of the last steps of each rank, and the buckets of the last step of the first rank that has any.
pub(super) fn render(out: &mut String, steps: &BTreeMap<usize, Vec<StepReport>>) {
    if steps.values().all(Vec::is_empty) {
        return;
    }
    *out += "  steps, milliseconds:\n";
    *out += "    rank    step     compute  communication      hidden     exposed\n";
    for (rank, steps) in steps {
        for step in &steps[steps.len().saturating_sub(PRINTED)..] {
            let StepReport { step, compute_ms, communication_ms, hidden_ms, exposed_ms, .. } = step;
            let _ = writeln!(
                out,
                "    {rank:4}  {step:6}  {compute_ms:10.3}  {communication_ms:13.3}  {hidden_ms:10.3}  {exposed_ms:10.3}"
            );
        }
    }
    let Some((rank, step)) = steps.iter().find_map(|(rank, steps)| Some((rank, steps.last()?))) else {
        return;
    };
    let _ = writeln!(out, "  buckets of step {} on rank {rank}, milliseconds from its beginning:", step.step);
    *out += "    bucket   submitted     started    finished      hidden  call\n";
    for (i, bucket) in step.buckets.iter().enumerate() {
        let BucketReport { call, submitted_ms, started_ms, finished_ms, hidden_ms } = bucket;
        let _ = writeln!(
            out,
            "    {i:6}  {submitted_ms:10.3}  {started_ms:10.3}  {finished_ms:10.3}  {hidden_ms:10.3}  {call}"
        );
    }
}
