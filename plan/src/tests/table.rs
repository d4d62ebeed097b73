//! The table in docs/algorithms.md lists what there is.

use super::*;
use crate::{deterministic, keeps_rank_order};

#[test]
fn the_table_of_algorithms_lists_what_there_is() {
    let text = include_str!("../../../docs/algorithms.md");
    let mut listed = Vec::new();
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> =
            line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('`')).collect();
        assert_eq!(cells.len(), 8, "{line}");
        listed.push(format!("{} {} {} {}", cells[0], cells[1], cells[5], cells[6]));
    }
    let yes = |is: bool| if is { "yes" } else { "no" };
    let mut due = Vec::new();
    for kind in Kind::ALL {
        for &algo in algorithms(kind) {
            let (order, bits) = (yes(keeps_rank_order(kind, algo)), yes(deterministic(kind, algo)));
            due.push(format!("{kind} {algo} {order} {bits}"));
        }
    }
    listed.sort();
    due.sort();
    assert_eq!(listed, due);
}
