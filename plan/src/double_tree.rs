//! Double binary tree: two trees, half of the data each, and no rank is an inner node of both.
//!
//! all_reduce: `2 ceil(log2 n)` hops; a rank sends at most `2 * count`: half of the data once up and twice down in the tree
//! in which it is an inner node, and once up in the other. So it sends about as much as in a ring, at the latency of a tree.
//! Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
//! Computing 35(12), 2009.
//!
//! In the first tree the ranks are in order from left to right, and the ranks 0, 2, 4, ... are leaves. In the second, rank 0 is
//! the root, and its only child is the root of such a tree of the other ranks: there the ranks 1, 3, 5, ... are leaves. (The
//! source makes the second tree by mirroring or shifting the first. Here lower ranks are on the left in both trees, so every
//! sum is combined in rank order.)

use crate::shape::send;
use crate::tree::Tree;
use crate::{Operand, Plan, Rank, Shape, Step};

/// Chunk 0 goes up and down the first tree, chunk 1 up and down the second. The steps of both trees that go up come before
/// all that go down: the trees share links, and the messages of a link keep the order of the steps.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let second = match s.rank {
        0 => Tree { upper: vec![root(1, s.n - 1)], ..Tree::default() },
        rank => {
            let tree = in_order(1, s.n - 1, rank);
            Tree { parent: tree.parent.or(Some(0)), ..tree }
        }
    };
    let trees = [in_order(0, s.n, s.rank), second];
    let up = |(chunk, tree): (usize, &Tree)| tree.up(s.own(chunk), Some(s.out(chunk)));
    let down = |(chunk, tree): (usize, &Tree)| -> Step {
        let top = || send(Operand::Own(s.out(chunk)), tree.children());
        tree.down(s.out(chunk)).unwrap_or_else(top)
    };
    let both = || trees.iter().enumerate();
    s.split(2, both().map(up).chain(both().map(down)).collect())
}

/// The root of the tree of `size` ranks from `first` on.
fn root(first: Rank, size: usize) -> Rank {
    first + (1 << size.ilog2()) - 1
}

/// A rank's place in the tree of `size` ranks from `first` on: the ranks before the root are a complete binary tree, those after it a tree of the
/// same sort.
fn in_order(mut first: Rank, mut size: usize, rank: Rank) -> Tree {
    let mut parent = None;
    loop {
        let top = root(first, size);
        let (before, after) = (top - first, size - 1 - (top - first));
        if rank == top {
            let lower = (before > 0).then(|| root(first, before)).into_iter().collect();
            let upper = (after > 0).then(|| root(top + 1, after)).into_iter().collect();
            return Tree { parent, lower, upper };
        }
        parent = Some(top);
        (first, size) = if rank < top { (first, before) } else { (top + 1, after) };
    }
}
