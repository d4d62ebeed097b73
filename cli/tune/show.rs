//! `allstream info --tuning`: the table by which algorithms are chosen.

use crate::Exit;
use std::io::{self, Write};

use allstream::tuning::{self, Row, Table, TimeBy};

use crate::error::BoxError;

/// Prints the table in use, or says that there is none.
pub(crate) fn info() -> Result<Exit, BoxError> {
    let mut out = io::stdout().lock();
    match tuning::from_env()? {
        Some((path, table)) => {
            writeln!(out, "# {}: {}", path.display(), table.made)?;
            lines(&table, false).iter().try_for_each(|line| writeln!(out, "{line}"))?;
        }
        None => {
            let place =
                tuning::cached().map_or("no folder for caches".into(), |path| path.display().to_string());
            writeln!(
                out,
                "# no table ({place}): algorithms are chosen by rules. `allstream tune -N 2,4` makes one"
            )?;
        }
    }
    Ok(Exit::SUCCESS)
}

/// The table as it is printed: all of it, or only what was measured.
pub(super) fn lines(table: &Table, only_measured: bool) -> Vec<String> {
    let mut lines = vec![format!(
        "# {:<8}{:>6}{:>6}{:>6}{:>12}{:>12}{:>16}{:>16}",
        "link", "ranks", "hosts", "cores", "hop (us)", "frame (us)", "line (GB/s)", "memory (GB/s)"
    )];
    for f in &table.figures {
        lines.push(format!(
            "  {:<8}{:>6}{:>6}{:>6}{:>12.2}{:>12.2}{:>16.2}{:>16.2}",
            f.group.link.name(),
            f.group.ranks,
            f.group.hosts,
            f.cores,
            f.latency_us,
            f.frame_us,
            f.bandwidth / 1e9,
            f.memory / 1e9
        ));
    }
    lines.push(format!(
        "# {:<8}{:<16}{:>6}{:>6}{:>12}  {:<20}{:>14}{:>14}  {:<20}{}",
        "link",
        "collective",
        "ranks",
        "hosts",
        "bytes",
        "chosen",
        "predicted us",
        "measured us",
        "rules",
        "by the others, us"
    ));
    let rows = table.rows.iter().filter(|row| !only_measured || !row.measured.is_empty());
    lines.extend(rows.filter_map(|row| line(table, row)));
    lines
}

fn line(table: &Table, row: &Row) -> Option<String> {
    let times = table.ranking(row);
    let (best, others) = times.split_first()?;
    let by = |times: &[TimeBy]| times.iter().find(|time| time.algo == best.algo).map(|time| time.us);
    let shown = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.2}"));
    let rule = row.rule();
    let by_rule = if rule == best.algo { "same" } else { rule.name() };
    let others: Vec<_> = others.iter().map(|time| format!("{} {:.2}", time.algo, time.us)).collect();
    Some(format!(
        "  {:<8}{:<16}{:>6}{:>6}{:>12}  {:<20}{:>14}{:>14}  {:<20}{}",
        row.group.link.name(),
        row.collective,
        row.group.ranks,
        row.group.hosts,
        row.bytes,
        best.algo,
        shown(by(&row.predicted)),
        shown(by(&row.measured)),
        by_rule,
        others.join(", ")
    ))
}
