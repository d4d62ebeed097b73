//! The tuner's table: how long each algorithm takes on this machine, as measured and as predicted.
//!
//! `allstream tune` measures each class of links and writes a [`Table`] with the [`Figures`] of each class and, for each collective,
//! number of ranks and size, the time that each algorithm takes: as predicted ([`sim::predict`](crate::sim::predict)) and, for the
//! numbers of ranks that were run, as measured. When a world forms, rank 0 reads the table, and all ranks follow rank 0's choices.
//! Nothing is measured when ranks connect, so the choice of an algorithm, and with it the last bits of a sum, does not change from
//! run to run. Without a table the rules of [`choose`](crate::plan::choose()) decide.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::link::{Lends, kinds};
use crate::plan::choices::{Choice, block};
use crate::plan::{self, Env};
use crate::types::{Algo, Kind};

pub use crate::plan::choices::{Choices, GroupShape, LinkClass};

/// The version of the file format, which each file states.
pub const FORMAT: u32 = 1;
/// The most bytes that a table's file may have.
const LONGEST: u64 = 4 << 20;
/// An algorithm is chosen instead of the rules' choice only if the rules' choice takes longer by more than this factor, as measured.
/// A smaller difference is noise: on a shared machine the medians of two runs often differ by as much, and a table that follows
/// noise is worse than the rules.
pub const MARGIN: f64 = 1.15;
/// The same factor for times that are only predicted: three of four predictions were within a factor of 2 (docs/bench/tuning.md).
pub const PREDICTED_MARGIN: f64 = 2.0;
/// The environment variable that names the table's file; `off` or `0`: no table is used.
pub const VARIABLE: &str = "ALLSTREAM_TUNING";

/// What was measured of a class of links, between a given number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The class of links, and the number of hosts and of ranks.
    #[serde(flatten)]
    pub group: GroupShape,
    /// Cores of a host. If it has more ranks than cores, the ranks share the cores.
    pub cores: usize,
    /// Microseconds that the first byte takes from rank to rank, without the work at both ends.
    pub latency_us: f64,
    /// Microseconds of work for a frame, at each end.
    pub frame_us: f64,
    /// Bytes a second from one rank to another.
    pub bandwidth: f64,
    /// Bytes a second that a rank reads and writes when it combines or copies.
    pub memory: f64,
}

/// The time that an algorithm takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimeBy {
    /// The algorithm.
    #[serde(with = "by_name")]
    pub algo: Algo,
    /// Microseconds.
    pub us: f64,
}

/// One collective at one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The shape of the group.
    #[serde(flatten)]
    pub group: GroupShape,
    /// The collective.
    #[serde(with = "by_name")]
    pub collective: Kind,
    /// Bytes of a rank's largest buffer, as `allstream perf` counts them.
    pub bytes: u64,
    /// The times that the simulator predicts.
    #[serde(default)]
    pub predicted: Vec<TimeBy>,
    /// Medians of the measured times. Empty: not measured.
    #[serde(default)]
    pub measured: Vec<TimeBy>,
}

impl Row {
    /// The algorithm that the rules choose, as they do without a table.
    pub fn rule(&self) -> Algo {
        let GroupShape { link, hosts, ranks } = self.group;
        let one_host = kinds::of(link).is_some_and(|kind| kind.lends != Lends::Nothing);
        let env = Env { n: ranks, one_host, hosts, ..Env::default() };
        plan::choose(self.collective, block(self.collective, ranks, self.bytes) as usize, &env)
    }
}

/// What `allstream tune` found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// The file's format: [`FORMAT`].
    pub format: u32,
    /// What made the table last, when and where, as text for people.
    #[serde(default)]
    pub made: String,
    /// The figures of each class of links.
    pub figures: Vec<Figures>,
    /// The times, one row for each group, collective and size.
    pub rows: Vec<Row>,
}

impl Table {
    /// Adds a newer table's figures and rows. They replace those that this table has for the same group, collective and size, except that a
    /// row with measured times stays if the newer one has none.
    pub fn merge(&mut self, newer: Table) {
        let mut figures: BTreeMap<GroupShape, Figures> =
            self.figures.drain(..).map(|f| (f.group, f)).collect();
        figures.extend(newer.figures.into_iter().map(|f| (f.group, f)));
        self.figures = figures.into_values().collect();
        let key = |row: &Row| (row.group, row.collective as u8, row.bytes);
        let mut rows: BTreeMap<_, Row> = self.rows.drain(..).map(|row| (key(&row), row)).collect();
        for new in newer.rows {
            // A row with measured times is not replaced by one that is only predicted.
            let measured = rows.get(&key(&new)).is_some_and(|old| !old.measured.is_empty());
            if !measured || !new.measured.is_empty() {
                rows.insert(key(&new), new);
            }
        }
        self.rows = rows.into_values().collect();
        (self.format, self.made) = (FORMAT, newer.made);
    }

    /// Times of a row, fastest first: the measured ones; if there are none, the predicted ones, each corrected by the ratio of the
    /// measured to the predicted time of its algorithm at the nearest number of ranks that was measured.
    pub fn times(&self, row: &Row) -> Vec<TimeBy> {
        let mut times = if row.measured.is_empty() { self.corrected(row) } else { row.measured.clone() };
        times.retain(|time| time.us.is_finite() && time.us > 0.0);
        times.sort_by(|a, b| a.us.total_cmp(&b.us));
        times
    }

    fn corrected(&self, row: &Row) -> Vec<TimeBy> {
        let apart = |a: f64, b: f64| (a.max(1.0).ln() - b.max(1.0).ln()).abs();
        // Blocks are whole elements, so with another number of ranks the same size is a few bytes more or less. Sizes within a factor
        // of 3 (its logarithm is 1.1) count as the same; `distance` prefers the nearest.
        let same = |other: &&Row| {
            !other.measured.is_empty()
                && (other.group.link, other.group.hosts) == (row.group.link, row.group.hosts)
                && other.collective == row.collective
                && apart(other.bytes as f64, row.bytes as f64) < 1.1
        };
        let distance = |other: &&Row| {
            apart(other.group.ranks as f64, row.group.ranks as f64)
                + apart(other.bytes as f64, row.bytes as f64) / 100.0
        };
        let nearest = self.rows.iter().filter(same).min_by(|a, b| f64::total_cmp(&distance(a), &distance(b)));
        let by = |times: &[TimeBy], algo| times.iter().find(|time| time.algo == algo).map(|time| time.us);
        let off = |algo| Some(by(&nearest?.measured, algo)? / by(&nearest?.predicted, algo)?);
        let corrected = |time: &TimeBy| TimeBy { us: time.us * off(time.algo).unwrap_or(1.0), ..*time };
        row.predicted.iter().map(corrected).collect()
    }

    /// The [`times`](Table::times) in the order in which algorithms are chosen: the rules' choice first, unless another one is
    /// faster by more than [`MARGIN`] ([`PREDICTED_MARGIN`] if nothing was measured).
    pub fn ranking(&self, row: &Row) -> Vec<TimeBy> {
        let mut times = self.times(row);
        let rule = row.rule();
        let margin = if row.measured.is_empty() { PREDICTED_MARGIN } else { MARGIN };
        let near = |time: &TimeBy| time.algo == rule && time.us <= margin * times[0].us;
        if let Some(at) = times.iter().position(near) {
            times[..=at].rotate_right(1);
        }
        times
    }

    /// The first algorithm of each row's [`ranking`](Table::ranking): all that an engine keeps of a table.
    pub fn choices(&self) -> Choices {
        let chosen = |row: &Row| {
            let algo = self.ranking(row).first()?.algo;
            Some(Choice { group: row.group, kind: row.collective, bytes: row.bytes, algo })
        };
        Choices::new(self.rows.iter().filter_map(chosen))
    }

    /// Reads a table.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name and what is wrong with it.
    pub fn read(path: &Path) -> Result<Table, Error> {
        Table::find(path).map_err(|why| match why {
            NoTable::Missing => invalid(path, "there is no such file; `allstream tune -o FILE` makes one"),
            NoTable::Bad(problem) => invalid(path, &problem),
        })
    }

    fn find(path: &Path) -> Result<Table, NoTable> {
        let bad = |error: &dyn std::fmt::Display| NoTable::Bad(error.to_string());
        let about = match std::fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(NoTable::Missing),
            other => other.map_err(|error| bad(&error))?,
        };
        if !about.is_file() || about.len() > LONGEST {
            return Err(NoTable::Bad(format!("no file of at most {LONGEST} bytes")));
        }
        let text = std::fs::read(path).map_err(|error| bad(&error))?;
        let table: Table = serde_json::from_slice(&text).map_err(|error| bad(&error))?;
        if table.format != FORMAT {
            let problem =
                format!("its format is {}, this version reads {FORMAT}: make it anew", table.format);
            return Err(NoTable::Bad(problem));
        }
        let mut classes =
            table.figures.iter().map(|f| f.group.link).chain(table.rows.iter().map(|r| r.group.link));
        if let Some(other) = classes.find(|class| kinds::of(*class).is_none()) {
            let problem = format!("it is of links `{other}`, this version has {}", kinds::names());
            return Err(NoTable::Bad(problem));
        }
        Ok(table)
    }

    /// Writes the table to another file and renames that, so that a concurrent reader sees the old table or the new one.
    ///
    /// # Errors
    /// [`Error::System`] with the file's name.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let failed = |error: io::Error| Error::system(format!("write the table {}", path.display()), error);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let text = serde_json::to_vec(self).map_err(|error| failed(error.into()))?;
        if text.len() as u64 > LONGEST {
            let problem = format!("{} bytes; {LONGEST} are read. Measure fewer sizes", text.len());
            return Err(Error::system(format!("write the table {}", path.display()), problem));
        }
        // Two threads of this process may write at a time, and each needs a file of its own.
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}.{}", std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed)));
        let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        written.map_err(failed)
    }
}

enum NoTable {
    Missing,
    Bad(String),
}

fn invalid(path: &Path, problem: &str) -> Error {
    Error::invalid("read the tuner's table", format!("{}: {problem}", path.display()))
}

/// The table's usual path: `allstream/tuning.json` in the user's folder for caches (`XDG_CACHE_HOME`, else `~/.cache`). `None`:
/// neither `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cached() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(folder.join("allstream").join("tuning.json"))
}

/// The table's path, and whether [`VARIABLE`] names it; if not, it is that of [`cached`]. `None`: the variable turns the table off,
/// or there is no folder for caches.
fn place() -> Option<(PathBuf, bool)> {
    match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(value) if value == "off" || value == "0" => None,
        Some(path) => Some((path.into(), true)),
        None => Some((cached()?, false)),
    }
}

fn load(path: &Path, named: bool) -> Result<Option<Table>, Error> {
    if named {
        return Table::read(path).map(Some);
    }
    Ok(match Table::find(path) {
        Ok(table) => Some(table),
        Err(NoTable::Missing) => None,
        Err(NoTable::Bad(problem)) => {
            let path = path.display();
            tracing::warn!("the tuner's table {path} is not used: {problem}; `allstream tune` makes it anew");
            None
        }
    })
}

/// The table in use, and its path: the file that [`VARIABLE`] names, or else that of [`cached`]. `None`: the variable turns the table
/// off; or it is not set, and [`cached`] gives no path, or there is no file at that path, or the file cannot be read (which logs a
/// warning).
///
/// # Errors
/// [`Error::Invalid`] if the file that the variable names cannot be read.
pub fn from_env() -> Result<Option<(PathBuf, Table)>, Error> {
    let Some((path, named)) = place() else { return Ok(None) };
    Ok(load(&path, named)?.map(|table| (path, table)))
}

/// A file's path, when it was last written and how long it was when it was read, and the choices of its table.
type Remembered = (PathBuf, Option<(Option<SystemTime>, u64)>, Choices);

/// The choices of the table of [`from_env`]. A file is read again only if it has changed.
pub(crate) fn choices_from_env() -> Result<Choices, Error> {
    static LAST: Mutex<Option<Remembered>> = Mutex::new(None);
    let Some((path, named)) = place() else { return Ok(Choices::default()) };
    let about = std::fs::metadata(&path).ok().map(|about| (about.modified().ok(), about.len()));
    if let Some(last) = &*LAST.lock()
        && about.is_some()
        && (&last.0, last.1) == (&path, about)
    {
        return Ok(last.2.clone());
    }
    let Some(table) = load(&path, named)? else { return Ok(Choices::default()) };
    tracing::info!("algorithms are chosen by the table {}: {}", path.display(), table.made);
    let choices = table.choices();
    *LAST.lock() = Some((path, about, choices.clone()));
    Ok(choices)
}

/// Reads and writes collectives and algorithms by their names.
mod by_name {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<T: std::fmt::Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'d, T, D>(from: D) -> Result<T, D::Error>
    where
        T: std::str::FromStr<Err = String>,
        D: Deserializer<'d>,
    {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
