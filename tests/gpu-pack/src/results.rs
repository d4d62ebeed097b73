//! What came of the steps: a folder, and the archive that is made of it after each of them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::archive::{self, Entry, QUICK};
use crate::machine::Machine;

/// Bytes of all files in the archive together, before they are compressed: an archive is never larger than 16 MiB.
pub const MOST: usize = 15 << 20;
/// Of a file that is longer, so much of its beginning and so much of its end are kept.
const HEAD: usize = 64 << 10;
const TAIL: usize = 192 << 10;

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// One step's line.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub stage: &'static str,
    pub step: String,
    pub seconds: f64,
    pub result: Verdict,
    /// Why it was skipped, or how it failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
}

impl Outcome {
    /// As it stands in the summary.
    pub fn line(&self) -> String {
        let result = match self.result {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
        };
        let why = if self.why.is_empty() { String::new() } else { format!(": {}", self.why) };
        format!("{:<9} {:<36} {:>6.1} s  {result}{why}", self.stage, self.step, self.seconds)
    }
}

/// All results, in a folder of their own.
#[derive(Debug)]
pub struct Results {
    folder: PathBuf,
    archive: PathBuf,
    mark: Option<String>,
    cuda: String,
    outcomes: Vec<Outcome>,
    tables: Vec<String>,
}

#[derive(Serialize)]
struct File<'a> {
    /// Whether these are figures of a device; if not, `mark` says why.
    measured_on_device: bool,
    mark: &'a Option<String>,
    cuda: &'a str,
    seconds: f64,
    steps: &'a [Outcome],
    /// The figures of each table, as `allstream` wrote them.
    tables: serde_json::Map<String, Value>,
}

impl Results {
    /// Begins with what is known of the machine. Files go below `folder`; the archive is `archive`.
    pub fn begin(folder: &Path, archive: &Path, machine: &Machine) -> io::Result<Results> {
        for below in ["logs", "tables", "stacks"] {
            fs::create_dir_all(folder.join(below))?;
        }
        let about = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let text = format!(
            "{}\n{}\n{}",
            machine.mark.clone().unwrap_or_default(),
            about("/proc/version"),
            machine.info
        );
        fs::write(folder.join("machine.txt"), text.trim_start())?;
        Ok(Results {
            folder: folder.to_owned(),
            archive: archive.to_owned(),
            mark: machine.mark.clone(),
            cuda: machine.cuda.clone(),
            outcomes: Vec::new(),
            tables: Vec::new(),
        })
    }

    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    pub fn log(&self, step: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{step}.txt"))
    }

    pub fn stacks(&self, step: &str) -> PathBuf {
        self.folder.join("stacks").join(format!("{step}.txt"))
    }

    /// Where flight recorders go.
    pub fn traces(&self, step: &str) -> PathBuf {
        self.folder.join("traces").join(step)
    }

    /// Where a table's figures go: the name says so where they are none of a device.
    pub fn figures(&self, step: &str) -> PathBuf {
        self.folder.join("tables").join(format!("{}.json", self.table_name(step)))
    }

    fn table_name(&self, step: &str) -> String {
        let prefix = if self.mark.is_some() { "not-measured-" } else { "" };
        format!("{prefix}{step}")
    }

    /// Keeps a step's log as a table, too.
    pub fn add_table(&mut self, step: &str) -> io::Result<()> {
        let mark = self.mark.as_ref().map(|mark| format!("# {mark}\n")).unwrap_or_default();
        let text = fs::read(self.log(step)).unwrap_or_default();
        let to = self.folder.join("tables").join(format!("{}.txt", self.table_name(step)));
        fs::write(to, [mark.as_bytes(), &text].concat())?;
        self.tables.push(step.to_owned());
        Ok(())
    }

    /// Writes down what a step came to, and the archive anew.
    pub fn add(&mut self, outcome: Outcome) -> io::Result<u64> {
        self.outcomes.push(outcome);
        let lines: String = self.outcomes.iter().map(|outcome| outcome.line() + "\n").collect();
        let mark = self.mark.as_ref().map(|mark| format!("{mark}\n")).unwrap_or_default();
        fs::write(self.folder.join("summary.txt"), mark + &lines)?;
        let mut tables = serde_json::Map::new();
        for step in &self.tables {
            let read =
                fs::read(self.figures(step)).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            if let Some(figures) = read {
                tables.insert(step.clone(), figures);
            }
        }
        let file = File {
            measured_on_device: self.mark.is_none(),
            mark: &self.mark,
            cuda: &self.cuda,
            seconds: self.outcomes.iter().map(|outcome| outcome.seconds).sum(),
            steps: &self.outcomes,
            tables,
        };
        fs::write(self.folder.join("results.json"), serde_json::to_vec_pretty(&file)?)?;
        let mut entries = archive::entries(&self.folder)?;
        bound(&mut entries, MOST);
        archive::write(&entries, &self.archive, QUICK)
    }
}

/// Cuts each long log, stack file and trace to its beginning and its end, and all files to so many bytes together: the room goes first to
/// summaries and tables, which are otherwise not cut, then to logs, stacks and traces, in this order.
fn bound(entries: &mut Vec<Entry>, most: usize) {
    let weight = |entry: &Entry| match entry.name.split('/').next() {
        Some("logs") => 1,
        Some("stacks") => 2,
        Some("traces") => 3,
        _ => 0,
    };
    entries.sort_by_key(weight);
    let mut left = most;
    for entry in entries.iter_mut() {
        let bytes = entry.content.len();
        if weight(entry) > 0 && bytes > HEAD + TAIL {
            let note = format!("\n[... {} bytes are left out ...]\n", bytes - HEAD - TAIL);
            let content = &entry.content;
            entry.content = [&content[..HEAD], note.as_bytes(), &content[bytes - TAIL..]].concat();
        }
        if entry.content.len() > left {
            entry.content.truncate(left);
        }
        left -= entry.content.len();
    }
    entries.retain(|entry| !entry.content.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_cut_before_tables_and_all_stays_within_the_bound() {
        let entry = |name: &str, bytes: usize| Entry {
            name: name.into(),
            content: vec![b'x'; bytes],
            is_executable: false,
        };
        let mut entries =
            vec![entry("logs/a", 1 << 20), entry("traces/b", 3000), entry("results.json", 400_000)];
        bound(&mut entries, 700_000);
        let sizes: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.content.len())).collect();
        assert_eq!((sizes[0], sizes[2].0), (("results.json", 400_000), "traces/b"));
        assert!(sizes[1].1 > HEAD + TAIL && sizes[1].1 < HEAD + TAIL + 100, "{sizes:?}");
        bound(&mut entries, 400_001);
        assert_eq!(entries.iter().map(|entry| entry.content.len()).sum::<usize>(), 400_001);
    }
}
