//! What a probe says, and how that is shown.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::driver::Problem;

/// The answer of a probe.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// `yes`, `no`, or a figure with its unit.
    pub(crate) answer: String,
    /// Details of the answer, in a few words; may be empty.
    pub(crate) remark: String,
    /// All figures that the probe measured. The key of each is its name, which ends with the unit if the figure has one.
    pub(crate) figures: BTreeMap<String, f64>,
}

impl Answer {
    pub(crate) fn new(answer: impl Into<String>, remark: impl Into<String>) -> Answer {
        Answer { answer: answer.into(), remark: remark.into(), figures: BTreeMap::new() }
    }

    pub(crate) fn yes_or_no(yes: bool, remark: impl Into<String>) -> Answer {
        Answer::new(if yes { "yes" } else { "no" }, remark)
    }

    pub(crate) fn no(remark: impl Into<String>) -> Answer {
        Answer::new("no", remark)
    }

    /// Adds a figure to the answer.
    pub(crate) fn with(mut self, name: impl Into<String>, figure: f64) -> Answer {
        self.figures.insert(name.into(), figure);
        self
    }

    pub(crate) fn with_all(mut self, figures: impl IntoIterator<Item = (String, f64)>) -> Answer {
        self.figures.extend(figures);
        self
    }
}

/// What became of a probe.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum Outcome {
    Answered(Answer),
    /// A call failed, or the process ended or hung without an answer.
    NoAnswer {
        problem: String,
    },
    /// The probe was not run, as no time was left for it.
    NotAsked {
        reason: String,
    },
}

/// A probe and its outcome: a line of the output.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) question: &'static str,
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

impl Row {
    pub(crate) fn is_answered(&self) -> bool {
        matches!(self.outcome, Outcome::Answered(_))
    }

    /// The texts of the columns for the answer and for the remark.
    fn cells(&self) -> (String, &str) {
        match &self.outcome {
            Outcome::Answered(answer) => (answer.answer.clone(), &answer.remark),
            Outcome::NoAnswer { problem } => (format!("no answer: {problem}"), ""),
            Outcome::NotAsked { reason } => (format!("not asked: {reason}"), ""),
        }
    }

    pub(crate) fn line(&self) -> String {
        let (answer, remark) = self.cells();
        let line = format!("{:<22} {:<62} {answer:<20} {remark}", self.name, self.question);
        line.trim_end().to_owned()
    }

    /// A row of the table in docs/gpu-facts.md.
    pub(crate) fn markdown(&self) -> String {
        let (answer, remark) = self.cells();
        let separator = if remark.is_empty() { "" } else { "; " };
        format!(
            "| `{}` | {} | {}{separator}{} |",
            self.name,
            self.question,
            escaped(&answer),
            escaped(remark)
        )
    }
}

/// Escapes a text for a cell of a Markdown table.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// A message of a probe's process to the process that started it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Told<'a> {
    /// The driver and the context are up.
    Ready,
    /// How far the probe has come.
    Step(&'a str),
    Answer(&'a str),
    Failed(&'a str),
    /// No probe can be run here: there is no driver, or no device.
    Nothing(&'a str),
}

impl Told<'_> {
    /// Parses a line of the process's output; `None`: no message, but something that the driver has printed.
    pub(crate) fn read(line: &str) -> Option<Told<'_>> {
        let (word, text) = line.strip_prefix('@')?.split_once(' ').unwrap_or((&line[1..], ""));
        Some(match word {
            "ready" => Told::Ready,
            "step" => Told::Step(text),
            "answer" => Told::Answer(text),
            "failed" => Told::Failed(text),
            "nothing" => Told::Nothing(text),
            _ => return None,
        })
    }
}

/// Sends a message to the process that started this one. The message begins a new line, as the driver may have printed half a line. Errors
/// are ignored: the other process may have ended.
pub(crate) fn tell(word: &str, text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = write!(stdout, "\n@{word} {}\n", text.replace('\n', " "));
    let _ = stdout.flush();
}

/// Says how far the probe has come. If the probe then hangs, the last step is shown.
pub(crate) fn step(text: &str) {
    tell("step", text);
}

/// Tells an answer, or why there is none.
pub(crate) fn tell_answer(answer: &Result<Answer, Problem>) {
    match answer {
        Ok(answer) => match serde_json::to_string(answer) {
            Ok(text) => tell("answer", &text),
            Err(error) => tell("failed", &format!("the answer cannot be written as JSON: {error}")),
        },
        Err(Problem(text)) => tell("failed", text),
    }
}

/// The median (of an even number of figures, the greater of the two in the middle); 0 if there are no figures.
pub(crate) fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

pub(crate) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Shows a time, given in microseconds, with about three digits and a fitting unit.
pub(crate) fn show_us(us: f64) -> String {
    match us {
        us if us >= 1000.0 => format!("{:.1} ms", us / 1e3),
        us if us >= 100.0 => format!("{us:.0} us"),
        us if us >= 1.0 => format!("{us:.1} us"),
        us => format!("{:.0} ns", us * 1e3),
    }
}

/// `a, b and c`; `none` if the list is empty.
pub(crate) fn listed(names: &[impl AsRef<str>]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    match names.split_last() {
        None => "none".into(),
        Some((last, [])) => (*last).into(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_prints_is_told_from_what_a_probe_says() {
        assert_eq!(Told::read("@ready "), Some(Told::Ready));
        assert_eq!(Told::read("@ready"), Some(Told::Ready));
        assert_eq!(Told::read("@step launch 3 of 7"), Some(Told::Step("launch 3 of 7")));
        for line in ["", "ready", "@", "@mention of somebody", "cuInit: @ready"] {
            assert_eq!(Told::read(line), None, "{line}");
        }
    }

    #[test]
    fn a_row_fits_a_markdown_table_whatever_is_in_it() {
        let outcome = Outcome::NoAnswer { problem: "a | b\nc".into() };
        let row = Row { name: "x", question: "is it?", seconds: 0.0, outcome };
        assert_eq!(row.markdown(), "| `x` | is it? | no answer: a \\| b c |");
        assert!(!row.is_answered());
    }
}
