//! The figures as Markdown, and as JSON.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::bars::{BARS, Comparison, PAIRS};
use super::what::{Case, Collective, Figures, Form, Series};

/// What the report says besides the figures.
#[derive(Clone, Debug, Default)]
pub(crate) struct About {
    /// Day and time (UTC). The next two describe the machine and the commit.
    pub(crate) date: String,
    pub(crate) machine: String,
    pub(crate) commit: String,
    /// The command that made the report.
    pub(crate) command: String,
    pub(crate) rounds: usize,
    /// For OpenMPI and for Gloo: the version, or why it is left out.
    pub(crate) peers: Vec<String>,
    /// The programs that failed, each with the reason.
    pub(crate) failures: Vec<String>,
}

/// All comparisons: every case of every pair for which both series have a time.
pub(crate) fn compare(figures: &Figures) -> Vec<Comparison> {
    let both = |case: Case| {
        PAIRS.into_iter().filter_map(move |pair| {
            let (ours, theirs) = (figures.median(case, pair.0)?, figures.median(case, pair.1)?);
            Some(Comparison::new(case, pair, ours, theirs))
        })
    };
    figures.cases().into_iter().flat_map(both).collect()
}

pub(crate) fn markdown(about: &About, figures: &Figures) -> String {
    let compared = compare(figures);
    let mut text = head(about);
    text += &summary(&compared);
    // A section for each collective, form and number of ranks; in its tables a row for each size.
    let sections: BTreeSet<(Collective, Form, usize)> =
        figures.cases().into_iter().map(|case| (case.collective, case.form, case.ranks)).collect();
    for section in sections {
        text += &tables(section, figures, &compared);
    }
    text
}

fn head(about: &About) -> String {
    let mut text = format!(
        "# Beside OpenMPI, Gloo and what the machine can do\n\nMade by `{}`, {}, at {}. {}.\n\n",
        about.command, about.date, about.commit, about.machine
    );
    text += &format!(
        "Microseconds, the median of {} interleaved rounds of all programs. They measure alike: f32, sum; two passes that \
         do not count; in each pass buffers are filled, then a barrier, then operations back to back (20 up to 64 KB, \
         one above that), then a barrier that is not timed; the slowest rank's time of an operation; the median over passes (100 up to 64 KB, above that \
         200 MB / size, at least 5). Gloo makes 20 passes up to 64 KB, at most 400 above. Bytes are those of a rank's \
         largest buffer. Results are checked when the clock has stopped: ours in the first round, the others' always. \
         A row that no bar is for has a ratio alone.\n\n\
         \"shm\" and \"tcp\" are `.wait()` between processes with users' own buffers; \"shm .await\" awaits on a \
         current-thread runtime, in turns with `.wait()`; \"shm arena\" has buffers of `comm.alloc()`; \"threads\" are ranks of one process. \
         \"memory floor\": as many threads as cores read every rank's buffer once and write every rank's buffer once, \
         and wait for nobody in between. \"tcp exchange\": each rank sends what an all_reduce sends, and receives as \
         much, over loopback TCP, and does nothing else. OpenMPI yields when idle, as ranks may outnumber cores. Where they do not, \
         its ranks and ours are bound to a core each (mpirun's default for two, `--bind-to core` of ours).\n\n",
        about.rounds
    );
    for peer in &about.peers {
        text += &format!("- {peer}\n");
    }
    for failure in &about.failures {
        text += &format!("- **failed**: {failure}\n");
    }
    text
}

/// A row for each bar: how many comparisons it is for, how many pass, and the worst.
fn summary(compared: &[Comparison]) -> String {
    let mut text = String::from("\n| bar | at most | rows | pass | worst |\n|---|---|---|---|---|\n");
    for (index, bar) in BARS.iter().enumerate() {
        let rows: Vec<&Comparison> = compared.iter().filter(|row| row.bar == Some(index)).collect();
        let measure = |row: &Comparison| bar.limit.measure(row.ours, row.theirs);
        let worst = rows.iter().max_by(|a, b| measure(a).total_cmp(&measure(b)));
        let worst = worst.map_or("not measured".into(), |row| {
            let Case { collective, form, ranks, bytes } = row.case;
            let of = if bar.collectives.len() == 1 {
                String::new()
            } else {
                format!("{} {}, ", collective.name(), form.words())
            };
            format!("{} at {of}{bytes} B, {ranks} ranks", bar.limit.show(measure(row)))
        });
        let pass = rows.iter().filter(|row| row.short().is_none()).count();
        let most = bar.limit.show(bar.limit.most());
        text += &format!("| {} | {most} | {} | {pass} | {worst} |\n", bar.words(), rows.len());
    }
    text
}

/// A column of a table: the times of a series, which appear once, or a pair's comparison, which follows the times of both its series.
enum Column {
    Time(Series),
    Pair(usize),
}

fn columns(pairs: &[usize]) -> Vec<Column> {
    let mut seen = Vec::new();
    let mut columns = Vec::new();
    for &pair in pairs {
        for series in [PAIRS[pair].0, PAIRS[pair].1] {
            if !seen.contains(&series) {
                seen.push(series);
                columns.push(Column::Time(series));
            }
        }
        columns.push(Column::Pair(pair));
    }
    columns
}

/// One table for memory, one for TCP.
fn tables(section: (Collective, Form, usize), figures: &Figures, compared: &[Comparison]) -> String {
    let (collective, form, ranks) = section;
    let of = |case: &Case| (case.collective, case.form, case.ranks) == section;
    let rows: Vec<&Comparison> = compared.iter().filter(|row| of(&row.case)).collect();
    let cases: Vec<Case> = figures.cases().into_iter().filter(of).collect();
    let mut text = String::new();
    for tcp in [false, true] {
        let there = |pair: usize| rows.iter().any(|row| row.pair == PAIRS[pair]);
        let wanted = |pair: &usize| (PAIRS[*pair].0 == Series::Tcp) == tcp;
        let pairs: Vec<usize> = (0..PAIRS.len()).filter(wanted).filter(|pair| there(*pair)).collect();
        let mut columns = columns(&pairs);
        // Our series are shown also where there is nothing to compare them with.
        for series in Series::ALL.into_iter().filter(|series| series.is_ours()) {
            let here = (series == Series::Tcp) == tcp;
            let alone = !columns.iter().any(|column| matches!(column, Column::Time(s) if *s == series));
            if here && alone && cases.iter().any(|case| figures.median(*case, series).is_some()) {
                columns.push(Column::Time(series));
            }
        }
        if columns.is_empty() {
            continue;
        }
        let link = if tcp { "TCP" } else { "memory" };
        text += &format!("\n## {}, {}, {ranks} ranks, {link}\n\n| bytes |", collective.name(), form.words());
        for column in &columns {
            text += &match column {
                Column::Time(series) => format!(" {} |", series.name()),
                Column::Pair(pair) => {
                    let (ours, theirs) = PAIRS[*pair];
                    let by = if ours == Series::Await { "less" } else { "/" };
                    format!(" {} {by} {} |", ours.name(), theirs.name())
                }
            };
        }
        text += &format!("\n|---|{}\n", "---|".repeat(columns.len()));
        for case in &cases {
            text += &format!("| {} |", case.bytes);
            for column in &columns {
                let cell = match column {
                    Column::Time(series) => figures.median(*case, *series).map(time),
                    Column::Pair(pair) => {
                        let found = rows.iter().find(|row| row.case == *case && row.pair == PAIRS[*pair]);
                        found.map(|row| row.words())
                    }
                };
                text += &format!(" {} |", cell.as_deref().unwrap_or("-"));
            }
            text += "\n";
        }
    }
    text
}

/// Microseconds with about three digits.
fn time(us: f64) -> String {
    match us {
        us if us < 10.0 => format!("{us:.2}"),
        us if us < 100.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

pub(crate) fn json(about: &About, figures: &Figures) -> Value {
    let case = |case: Case| {
        json!({"collective": case.collective.name(), "form": case.form.name(), "ranks": case.ranks,
               "bytes": case.bytes})
    };
    let with = |mut value: Value, more: Value| {
        if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
            value.extend(more);
        }
        value
    };
    let times = figures.iter().map(|(of, series, rounds)| {
        let median = figures.median(of, series);
        with(case(of), json!({"program": series.name(), "median_us": median, "rounds_us": rounds}))
    });
    let compared = compare(figures).into_iter().map(|row| {
        let bar = row.bar.map(|bar| BARS[bar].words());
        let more = json!({"ours": row.pair.0.name(), "theirs": row.pair.1.name(), "ours_us": row.ours,
            "theirs_us": row.theirs, "ratio": row.ours / row.theirs, "bar": bar,
            "at_most": row.limit().map(|limit| limit.most()),
            "pass": row.bar.map(|_| row.short().is_none())});
        with(case(row.case), more)
    });
    json!({
        "date": about.date, "machine": about.machine, "commit": about.commit, "command": about.command,
        "rounds": about.rounds, "peers": about.peers, "failures": about.failures,
        "times": times.collect::<Vec<_>>(), "compared": compared.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::what::Time;
    use super::*;

    fn figures() -> Figures {
        let mut figures = Figures::default();
        let mut add = |collective, bytes, series, us: &[f64]| {
            let case = Case { collective, form: Form::InPlace, ranks: 2, bytes };
            us.iter().for_each(|us| figures.add(series, Time { case, us: *us }));
        };
        add(Collective::AllReduce, 4, Series::Shm, &[0.5, 9.0, 0.75]);
        add(Collective::AllReduce, 4, Series::Await, &[3.0]);
        add(Collective::AllReduce, 4, Series::Wait, &[0.75]);
        add(Collective::AllReduce, 4, Series::MpiShm, &[0.5]);
        add(Collective::AllReduce, 65536, Series::Shm, &[10.0]);
        add(Collective::AllReduce, 65536, Series::MpiShm, &[100.0]);
        add(Collective::AllReduce, 65536, Series::Tcp, &[33.3]);
        add(Collective::Broadcast, 65536, Series::Shm, &[12.0]);
        figures
    }

    fn about() -> About {
        About {
            date: "2026-01-02".into(),
            machine: "2 cores".into(),
            commit: "abc".into(),
            command: "cargo xtask peers".into(),
            rounds: 3,
            peers: vec!["mpirun (Open MPI) 4.1.4".into(), "no torch: left out".into()],
            failures: vec!["OpenMPI tcp: cut off after 300 s".into()],
        }
    }

    #[test]
    fn the_table_shows_times_ratios_and_verdicts() {
        let text = markdown(&about(), &figures());
        let expected = "\n## all_reduce, in place, 2 ranks, memory\n\n\
            | bytes | shm | OpenMPI shm | shm / OpenMPI shm | shm .await | shm .wait in turns | shm .await less shm .wait in turns |\n\
            |---|---|---|---|---|---|---|\n\
            | 4 | 0.75 | 0.50 | **1.50** (short of 1.20 by 25 %) | 3.00 | 0.75 | **+2.25 us** (short of +1.00 us by 1.25 us) |\n\
            | 65536 | 10.0 | 100 | 0.10 (pass, 0.45) | - | - | - |\n\
            \n## all_reduce, in place, 2 ranks, TCP\n\n\
            | bytes | tcp |\n|---|---|\n| 4 | - |\n| 65536 | 33.3 |\n\
            \n## broadcast, in place, 2 ranks, memory\n\n| bytes | shm |\n|---|---|\n| 65536 | 12.0 |\n";
        assert!(text.ends_with(expected), "{text}");
        for line in [
            "Made by `cargo xtask peers`, 2026-01-02, at abc. 2 cores.",
            "- no torch: left out",
            "- **failed**: OpenMPI tcp: cut off after 300 s",
            "| all_reduce: shm / OpenMPI shm, 4 B to 16 KB, 2 and 4 ranks | 1.20 | 1 | 0 | 1.50 at 4 B, 2 ranks |",
            "| all_reduce: shm / OpenMPI shm, 64 KB | 0.45 | 1 | 1 | 0.10 at 65536 B, 2 ranks |",
            "| all_reduce: tcp / OpenMPI tcp, every size | 1.00 | 0 | 0 | not measured |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    #[test]
    fn json_has_every_round_and_verdict() {
        let value = json(&about(), &figures());
        let times = value["times"].as_array().unwrap();
        assert_eq!(times.len(), 8);
        let shm = times.iter().find(|time| time["program"] == "shm" && time["bytes"] == 4).unwrap();
        assert_eq!(shm["rounds_us"], json!([0.5, 9.0, 0.75]));
        let passes: Vec<_> = value["compared"].as_array().unwrap().iter().map(|row| &row["pass"]).collect();
        assert_eq!(passes, [&json!(false), &json!(false), &json!(true)]);
        assert_eq!(value["compared"][2]["bar"], "all_reduce: shm / OpenMPI shm, 64 KB");
    }
}
