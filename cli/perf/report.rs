//! nccl-tests' table, and the same as JSON.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::case::{Case, What};
use super::device::Facts;
use super::time::Time;
use super::tuning::{self, Choice};

/// The measurements of one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Bytes of the largest buffer of a rank, and elements as the collective counts them.
    pub(crate) size: usize,
    pub(crate) count: usize,
    pub(crate) out_of_place: Time,
    pub(crate) in_place: Option<Time>,
}

impl Row {
    fn times(&self) -> impl Iterator<Item = &Time> {
        [Some(&self.out_of_place), self.in_place.as_ref()].into_iter().flatten()
    }
}

/// All sizes of one algorithm on one link.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Series {
    pub(crate) link: String,
    pub(crate) algo: String,
    pub(crate) rows: Vec<Row>,
    /// The tuner's choices, if these were checked; then there are no rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) choices: Vec<Choice>,
}

/// What was measured, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) version: String,
    pub(crate) collective: String,
    pub(crate) dtype: String,
    pub(crate) op: String,
    pub(crate) root: Option<usize>,
    pub(crate) ranks: usize,
    pub(crate) threads: bool,
    pub(crate) alloc: String,
    pub(crate) completion: String,
    pub(crate) cores: usize,
    /// The device that buffers are on, if they are on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<Facts>,
    pub(crate) series: Vec<Series>,
}

impl Report {
    pub(crate) fn wrong(&self) -> u64 {
        let rows = self.series.iter().flat_map(|series| &series.rows);
        rows.flat_map(Row::times).filter_map(|time| time.wrong).sum()
    }

    /// The mean of all bus bandwidths, in place and out of place, as nccl-tests prints it.
    fn mean_busbw(&self) -> f64 {
        let all: Vec<f64> =
            self.series.iter().flat_map(|s| &s.rows).flat_map(Row::times).map(|time| time.busbw).collect();
        if all.is_empty() { 0.0 } else { all.iter().sum::<f64>() / all.len() as f64 }
    }

    /// The lines after the table.
    pub(crate) fn footer(&self) -> Vec<String> {
        let choices: Vec<_> =
            self.series.iter().filter_map(|series| tuning::footer(&series.choices)).collect();
        if !choices.is_empty() {
            return choices;
        }
        let checked =
            self.series.iter().flat_map(|s| &s.rows).flat_map(Row::times).any(|time| time.wrong.is_some());
        let verdict = match (checked, self.wrong()) {
            (false, _) => "N/A".into(),
            (true, 0) => "0 OK".into(),
            (true, wrong) => format!("{wrong} FAILED"),
        };
        vec![
            format!("# Out of bounds values : {verdict}"),
            format!("# Avg bus bandwidth    : {:.4}", self.mean_busbw()),
        ]
    }

    pub(crate) fn write(&self, path: &std::path::Path) -> io::Result<()> {
        let mut file = io::BufWriter::new(std::fs::File::create(path)?);
        serde_json::to_writer_pretty(&mut file, self)?;
        writeln!(file)?;
        file.flush()
    }

    pub(crate) fn read(path: &std::path::Path) -> io::Result<Report> {
        Ok(serde_json::from_reader(io::BufReader::new(std::fs::File::open(path)?))?)
    }
}

/// The lines above the columns. With `on_device` there are columns for the time on the device.
pub(crate) fn head(on_device: bool) -> [String; 3] {
    let dev = |text: &str| if on_device { format!("{text:>10}") } else { String::new() };
    let half = |names: [&str; 5]| {
        format!("{:>10}{}{:>9}{:>9}{:>8}", names[0], dev(names[1]), names[2], names[3], names[4])
    };
    let [time, units] =
        [["time", "dev", "algbw", "busbw", "#wrong"], ["(us)", "(us)", "(GB/s)", "(GB/s)", ""]].map(half);
    let left = |names: [&str; 5]| {
        format!("#{:>12}{:>13}{:>8}{:>8}{:>6}", names[0], names[1], names[2], names[3], names[4])
    };
    let room = dev("");
    [
        format!("#{:47}{:>24}{room}{room}{:>36}", "", "out-of-place", "in-place"),
        format!("{}{time}{time}", left(["size", "count", "type", "redop", "root"])),
        format!("{}{units}{units}", left(["(B)", "(elements)", "", "", ""])),
    ]
}

/// One line of the table.
pub(crate) fn line(row: &Row, case: &Case, dtype: &str, on_device: bool) -> String {
    let op = if case.what.reduces() { case.op.name() } else { "none" };
    let root = if case.what.rooted() { case.root.to_string() } else { "-1".into() };
    let dev = |time: Option<&Time>| match time.and_then(|time| time.device_us) {
        _ if !on_device => String::new(),
        Some(us) => format!("{us:>10.2}"),
        None => format!("{:>10}", "N/A"),
    };
    let time = |time: Option<&Time>| match time {
        Some(t) => {
            let wrong = t.wrong.map_or("N/A".into(), |wrong| wrong.to_string());
            format!("{:>10.2}{}{:>9.3}{:>9.3}{wrong:>8}", t.median_us, dev(time), t.algbw, t.busbw)
        }
        None => format!("{:>10}{}{:>9}{:>9}{:>8}", "N/A", dev(None), "N/A", "N/A", "N/A"),
    };
    let (out, within) = (time(Some(&row.out_of_place)), time(row.in_place.as_ref()));
    format!(" {:>12}{:>13}{dtype:>8}{op:>8}{root:>6}{out}{within}", row.size, row.count)
}

/// A remark for the user on what the times mean, where they are not those of whole operations.
pub(crate) fn remark(what: What) -> Option<&'static str> {
    (what == What::PingPong).then_some("# pingpong: ranks 0 and 1; the time is half of there and back")
}

#[cfg(test)]
mod tests {
    use allstream::{Kind, ReduceOp};

    use super::*;

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let case = Case::new(What::Collective(Kind::AllReduce), ReduceOp::Sum, 0, (0, 4), 1 << 20);
        let time = Time::new(&[1e-3, 2e-3, 9e-3], 4 << 20, &case, Some(0));
        assert_eq!((time.median_us, time.min_us, time.max_us), (2000.0, 1000.0, 9000.0));
        assert!((time.algbw - 2.097).abs() < 1e-3 && (time.busbw - 1.5 * time.algbw).abs() < 1e-9);
    }

    #[test]
    fn columns_stand_under_their_names() {
        let case = Case::new(What::Collective(Kind::Broadcast), ReduceOp::Sum, 1, (0, 2), 256);
        let time = Time { device_us: Some(0.25), ..Time::new(&[1e-6], 1024, &case, Some(3)) };
        let row = Row { size: 1024, count: 256, out_of_place: time, in_place: None };
        for on_device in [false, true] {
            let (head, line) = (head(on_device), line(&row, &case, "f32", on_device));
            assert!(head.iter().skip(1).all(|head| head.len() == line.len()), "{head:?}\n{line}");
            assert!(line.contains(" none     1") && line.ends_with("N/A") && line.contains(" 3 "), "{line}");
            assert_eq!(head[1].matches(" dev ").count(), if on_device { 2 } else { 0 }, "{head:?}");
            assert_eq!(line.contains("1.00      0.25 "), on_device, "{line}");
        }
    }
}
