//! How long an operation took.

use serde::{Deserialize, Serialize};

use super::case::Case;

/// Times of one size, in place or out of place.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Time {
    /// Microseconds of an operation on the slowest rank: the median, the least and the most over the rounds.
    pub(crate) median_us: f64,
    pub(crate) min_us: f64,
    pub(crate) max_us: f64,
    /// GB/s (powers of 1000), from the median.
    pub(crate) algbw: f64,
    pub(crate) busbw: f64,
    /// The number of wrong elements on all ranks together; `None`: the result was not checked.
    pub(crate) wrong: Option<u64>,
    /// With `--await=turns`: the median in microseconds of the rounds that block in `.wait()`, which alternate with the awaited ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) wait_us: Option<f64>,
    /// Microseconds of an operation on the slowest rank's device, by the device's events: the median over separate rounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device_us: Option<f64>,
}

impl Time {
    /// The figures of rounds. `seconds`: an operation's time in each round, sorted; at least one.
    pub(crate) fn new(seconds: &[f64], bytes: usize, case: &Case, wrong: Option<u64>) -> Time {
        let median = seconds[seconds.len() / 2];
        let algbw = bytes as f64 / median / 1e9;
        let us = |seconds: Option<&f64>| seconds.map_or(0.0, |s| s * 1e6);
        Time {
            median_us: median * 1e6,
            min_us: us(seconds.first()),
            max_us: us(seconds.last()),
            algbw,
            busbw: algbw * case.what.bus_factor(case.n),
            wrong,
            wait_us: None,
            device_us: None,
        }
    }
}
