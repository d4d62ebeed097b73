//! What `allstream trace` prints.

use super::ranks::{list, name_ranks};
use super::{OperationReport, RankReport, Report, State, overlap, times};

pub(super) fn render(report: &Report) -> String {
    let mut out = String::new();
    for world in &report.worlds {
        out += &format!("world {}, {} ranks, {} files\n", world.world, world.size, world.ranks.len());
        if !world.missing.is_empty() {
            out += &format!("  no file from {}\n", name_ranks(&world.missing));
        }
        for (rank, cause) in &world.causes {
            out += &format!("  rank {rank} wrote its file because: {cause}\n");
        }
        for comm in &world.communicators {
            out += &format!("\ncommunicator {} `{}`, {} ranks", comm.id, comm.name, comm.members.len());
            if comm.members.iter().enumerate().any(|(rank, member)| rank != *member) {
                let members: Vec<_> = comm.members.iter().map(usize::to_string).collect();
                out += &format!(" (in the world: {})", members.join(","));
            }
            out += "\n";
            let mut rows = vec![["rank", "last finished", "is in", "waiting for"].map(String::from)];
            rows.extend(comm.ranks.iter().map(row));
            out += &table(&rows);
            for finding in &comm.verdict {
                out += &format!("  => {}\n", finding.text);
            }
            times::render(&mut out, &comm.times);
            overlap::render(&mut out, &comm.steps);
        }
        out += "\n";
    }
    // Names and causes come from files: nothing of them may steer the terminal.
    out.chars().map(|char| if char.is_control() && char != '\n' { '\u{fffd}' } else { char }).collect()
}

fn row(rank: &RankReport) -> [String; 4] {
    let none = || "-".to_string();
    let failed = |operation: &OperationReport| if operation.state == State::Failed { ", failed" } else { "" };
    let last = rank.last_finished.as_ref();
    let current = rank.current.as_ref();
    let state = |operation: &OperationReport| match operation.state {
        State::Queued => "queued",
        _ => "running",
    };
    [
        rank.rank.to_string(),
        last.map_or_else(none, |last| format!("#{} {}{}", last.number, last.call, failed(last))),
        current.map_or_else(none, |now| {
            format!("#{} {}, {} for {:.3} s", now.number, now.call, state(now), now.seconds)
        }),
        current.filter(|now| !now.waiting_for.is_empty()).map_or_else(none, |now| list(&now.waiting_for)),
    ]
}

fn table(rows: &[[String; 4]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..4).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::from(" ");
        for (cell, width) in row.iter().zip(&widths) {
            line += &format!(" {cell:width$} ");
        }
        out += line.trim_end();
        out += "\n";
    }
    out
}
