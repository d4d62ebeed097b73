//! Every plan is right at every size, and costs what its file says.

use std::collections::BTreeMap;

use super::*;
use crate::check::{Properties, check_slices};

/// Checks every algorithm at n = 1..=64, with the roots that `cases` tries, in and out of place. Smaller groups get more slices.
fn every_size(kind: Kind) {
    for n in 1..=64 {
        for (algo, root, in_place) in cases(kind, n) {
            let plans = plans(kind, algo, n, root, in_place);
            let slices = match n {
                1..=9 => 5,
                10..=17 => 3,
                _ => 2,
            };
            let properties = check_slices(kind, root, in_place, &plans, slices).unwrap_or_else(|fault| {
                panic!("{kind} by {algo}, n {n}, root {root}, in place {in_place}: {fault}")
            });
            let what = format!("{kind} by {algo}, n {n}, root {root}, in place {in_place}: {properties:?}");
            cost(kind, algo, n, root, &properties, &what);
            assert_eq!(properties.needs_hand, needs_hand(kind, algo, n, in_place), "{what}");
        }
    }
}

/// Two ranks may send each message whole if neither plan has a hand. If one has, its peer may wait for a whole message of which
/// the hand holds one slice at a time.
#[test]
fn messages_go_whole_where_no_rank_has_a_hand() {
    let shape = Shape { n: 2, ..Shape::default() };
    assert!(goes_whole(Kind::AllReduce, Algo::Ring, &shape));
    assert!(goes_whole(Kind::Broadcast, Algo::OneShot, &shape));
    // In place both send from where they write.
    assert!(!goes_whole(Kind::AllReduce, Algo::RecursiveDoubling, &shape));
    // The root has no hand, but the other rank sends its sum from a hand.
    assert!(!goes_whole(Kind::Reduce, Algo::Direct, &shape));
}

#[test]
fn all_reduce_is_right_at_every_size() {
    every_size(Kind::AllReduce);
}

#[test]
fn broadcast_is_right_at_every_size() {
    every_size(Kind::Broadcast);
}

#[test]
fn reduce_is_right_at_every_size() {
    every_size(Kind::Reduce);
}

#[test]
fn all_gather_is_right_at_every_size() {
    every_size(Kind::AllGather);
}

#[test]
fn reduce_scatter_is_right_at_every_size() {
    every_size(Kind::ReduceScatter);
}

#[test]
fn gather_is_right_at_every_size() {
    every_size(Kind::Gather);
}

#[test]
fn scatter_is_right_at_every_size() {
    every_size(Kind::Scatter);
}

#[test]
fn all_to_all_is_right_at_every_size() {
    every_size(Kind::AllToAll);
}

#[test]
fn scan_is_right_at_every_size() {
    every_size(Kind::Scan);
}

#[test]
fn exscan_is_right_at_every_size() {
    every_size(Kind::ExScan);
}

#[test]
fn barrier_is_right_at_every_size() {
    every_size(Kind::Barrier);
}

/// Compares hops and bytes with what the algorithms' files say.
fn cost(kind: Kind, algo: Algo, n: usize, root: Rank, properties: &Properties, what: &str) {
    use Kind::*;
    if n == 1 {
        assert_eq!((properties.hops, properties.sent, properties.messages), (0, 0.0, 0), "{what}");
        return;
    }
    let (f, all, up) = (n as f64, n as f64 - 1.0, n.next_power_of_two().ilog2() as usize);
    let (down, share) = (n.ilog2() as usize, (n as f64 - 1.0) / n as f64);
    // Hops that folding adds to recursive doubling: one, before or after the exchanges; or both, if the ranks at both ends of one chain of them fold.
    let (extra, power) = (n - (1 << down), 1 << down);
    let (folded, folds) = (usize::from(extra > 0), usize::from(extra > 0) + usize::from(2 * extra > power));
    // The number of ranks in the largest binomial subtree below the root.
    let top = 1 << (n - 1).ilog2();
    let subtree = (top / 2).max(n - top) as f64;
    let after_shift = (n - 1).next_power_of_two().ilog2() as usize;
    let (hops, sent) = match (kind, algo) {
        (Scan | ExScan, Algo::OneShot) => (1, all),
        (Scan | ExScan, Algo::Chain) => (n - 1, 1.0),
        (Scan, _) => (down, up as f64),
        (ExScan, _) => (1 + (n - 1).ilog2() as usize, 1.0 + after_shift as f64),
        (AllReduce | Broadcast, Algo::OneShot) => (1, all),
        (Reduce, Algo::OneShot) => (1, 1.0),
        (AllReduce, Algo::Naive) => (2, all),
        (AllReduce, Algo::Direct) => (2, 2.0 * share),
        (AllReduce, Algo::Ring) => (2 * (n - 1), 2.0 * share),
        (AllReduce, Algo::RecursiveDoubling) => (down + folds, (down + folded) as f64),
        (AllReduce, Algo::HalvingDoubling) => (2 * down, 2.0 * share),
        (AllReduce, Algo::DoubleBinaryTree) => (2 * up, [1.0, 1.5, 2.0][n.min(4) - 2]),
        (AllReduce, Algo::Mst) => (mst(n, 0) * 2, up as f64),
        // TwoLevel, here with two ranks to a host: `two_levels_on_any_hosts` checks its costs.
        (AllReduce, _) => return,
        (Broadcast, Algo::Binomial) => (down, up as f64),
        (Broadcast, Algo::Mst) if root == 0 => (mst(n, 0), up as f64),
        (Broadcast, Algo::Mst) => {
            assert!(properties.sent <= up as f64 && properties.sent >= down as f64, "{what}");
            (mst(n, root), properties.sent)
        }
        (Broadcast, Algo::ScatterAllGather) => (n - 1, 2.0 * share),
        (Broadcast, Algo::Direct) if n == 2 => (1, 1.0),
        (Broadcast, Algo::Direct) => (2, 2.0 * share),
        (Reduce, Algo::Direct) => (2, 1.0),
        (Reduce, Algo::Binomial) => (down, 1.0),
        (Reduce, Algo::Mst) => (mst(n, root), 1.0),
        (Reduce, Algo::ScatterAllGather) => (n, 1.0),
        (Broadcast | Reduce, _) => (n - 1, 1.0),
        (Barrier, _) => (up, up as f64),
        (AllGather | ReduceScatter, Algo::Ring) => (n - 1, all),
        (AllGather | ReduceScatter, Algo::RecursiveDoubling | Algo::RecursiveHalving) => (down, all),
        (AllGather | ReduceScatter | AllToAll, _) => (1, all),
        (Gather, Algo::Binomial) => (down, subtree),
        (Scatter, Algo::Binomial) => (down, all),
        (Gather, _) => (1, 1.0),
        (Scatter, _) => (1, all),
    };
    assert_eq!(properties.hops, hops, "{what}");
    assert!((properties.sent - sent).abs() < 1e-9 * f, "{what}: not {sent}");
}

/// Hops from the root of a minimum spanning tree: never more than `ceil(log2 n)`, the number of halvings.
fn mst(n: usize, root: Rank) -> usize {
    fn depth(left: usize, right: usize, root: usize) -> usize {
        if left == right {
            return 0;
        }
        let mid = (left + right) / 2;
        if root <= mid {
            depth(left, mid, root).max(1 + depth(mid + 1, right, right))
        } else {
            depth(mid + 1, right, root).max(1 + depth(left, mid, left))
        }
    }
    let hops = depth(0, n - 1, root);
    assert!(hops <= n.next_power_of_two().ilog2() as usize, "n {n}, root {root}: {hops}");
    hops
}

/// Whether the plans would deadlock if every step gathered only when its `dst` is free.
fn needs_hand(kind: Kind, algo: Algo, n: usize, in_place: bool) -> bool {
    match (kind, algo) {
        (Kind::AllReduce, Algo::OneShot) => in_place && n > 1,
        (Kind::AllReduce, Algo::RecursiveDoubling) => (in_place && n > 1) || n > 3,
        (Kind::ReduceScatter, Algo::Ring) => !in_place && n > 2,
        (Kind::AllToAll, _) => in_place && n > 1,
        (Kind::Barrier, _) => n > 1,
        _ => false,
    }
}

/// Ways to place ranks on hosts: in runs, dealt out in turn, on hosts of different sizes, on one big host among small ones.
fn placements(n: usize) -> Vec<Vec<u32>> {
    let numbered = |of: Vec<usize>| -> Vec<u32> {
        let mut seen = Vec::new();
        let number = |host: &usize| match seen.iter().position(|h| h == host) {
            Some(at) => at as u32,
            None => {
                seen.push(*host);
                seen.len() as u32 - 1
            }
        };
        of.iter().map(number).collect()
    };
    let mut all: Vec<Vec<usize>> = Vec::new();
    for p in [2, 3, 4, n / 2, n - 1].into_iter().filter(|p| (1..n).contains(p)) {
        all.push((0..n).map(|rank| rank / p).collect());
        all.push((0..n).map(|rank| rank % p).collect());
        // The first p on one host, the others alone.
        all.push((0..n).map(|rank| rank.saturating_sub(p - 1)).collect());
    }
    all.push((0..n).map(|rank| rank.checked_ilog2().unwrap_or(0) as usize).collect());
    all.push((0..n).map(|rank| (rank * rank + rank / 3) % 5).collect());
    let mut all: Vec<_> = all.into_iter().map(numbered).collect();
    all.sort();
    all.dedup();
    all.retain(|hosts| {
        suitable(Kind::AllReduce, Algo::TwoLevel, &Shape { n, hosts, ..Shape::default() }).is_ok()
    });
    all
}

#[test]
fn two_levels_on_any_hosts() {
    let mut in_order = BTreeMap::new();
    // All sizes up to 34; of larger ones, which take longest, every fifth and the two largest, or all with ALLSTREAM_TEST_FULL=1.
    let is_full = std::env::var("ALLSTREAM_TEST_FULL").is_ok_and(|v| !v.is_empty() && v != "0");
    for n in (3..=64).filter(|n| is_full || *n <= 34 || n % 5 == 0 || *n >= 63) {
        for hosts in placements(n) {
            let h = hosts.iter().max().map_or(0, |&last| last as usize + 1);
            // Large groups take long: only in place if n is even, only out of place if it is odd.
            for in_place in [false, true].into_iter().filter(|p| n <= 17 || *p == n.is_multiple_of(2)) {
                let shape = Shape { n, in_place, hosts: &hosts, ..Shape::default() };
                let plans = plans_of(Kind::AllReduce, Algo::TwoLevel, &shape);
                let slices = if n <= 17 { 3 } else { 2 };
                let properties = check_slices(Kind::AllReduce, 0, in_place, &plans, slices)
                    .unwrap_or_else(|fault| panic!("{hosts:?}, in place {in_place}: {fault}"));
                assert_eq!(properties.hops, 4, "{hosts:?}");
                assert!(!properties.needs_hand && !properties.one_step, "{hosts:?}");
                *in_order.entry((hosts.is_sorted(), properties.in_order)).or_insert(0) += 1;
                for host in 0..h as u32 {
                    let sent = between(&plans, &hosts, host);
                    let due = 2.0 * (h as f64 - 1.0) / h as f64;
                    assert!((sent - due).abs() < 1e-9, "host {host} sends {sent}, not {due}: {hosts:?}");
                }
            }
        }
    }
    // Runs of ranks are combined in rank order, others not.
    assert_eq!(in_order.into_keys().collect::<Vec<_>>(), [(false, false), (true, true)]);
}

/// What a host sends to other hosts, in multiples of the operation's count.
fn between(plans: &[Plan], hosts: &[u32], host: u32) -> f64 {
    let away = |plan: &Plan| -> usize {
        plan.steps.iter().flat_map(|s| &s.send).filter(|&&to| hosts[to] != host).count()
    };
    let messages: usize = plans.iter().filter(|p| hosts[p.rank] == host).map(away).sum();
    messages as f64 / f64::from(plans[0].slots[0].chunks())
}
