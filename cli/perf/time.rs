//! How long an operation took.

use serde::{Deserialize, Serialize};

use super::case::Case;

/// Times of one size and form.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Time {
    /// Microseconds an operation, of the slowest rank: median, least and most over rounds.
    pub(crate) median_us: f64,
    pub(crate) min_us: f64,
    pub(crate) max_us: f64,
    /// GB/s (powers of 1000) by the median.
    pub(crate) algbw: f64,
    pub(crate) busbw: f64,
    /// Wrong elements on all ranks; `None`: not looked at.
    pub(crate) wrong: Option<u64>,
    /// The median of the same by `.wait()`, in turns with these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) wait_us: Option<f64>,
    /// Microseconds an operation on the device, by events there, of the slowest rank: the median over rounds of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device_us: Option<f64>,
}

impl Time {
    /// From the sorted times of rounds, in seconds.
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
