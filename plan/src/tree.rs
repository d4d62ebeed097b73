//! Trees: what a rank does in one, and the minimum spanning tree and the binomial tree themselves.
//!
//! | collective | tree | hops | a rank sends | source |
//! |---|---|---|---|---|
//! | broadcast | minimum spanning | at most `ceil(log2 n)` | at most `ceil(log2 n) * count` (the root 0 that) | Barnett et al., "Interprocessor collective communication library (InterCom)", 1994; Chan et al., "Collective communication: theory, practice, and experience", 2007 |
//! | reduce | minimum spanning | the same | `count` | the same |
//! | all_reduce | minimum spanning, root 0 | twice that | `ceil(log2 n) * count` | the same: reduce, then broadcast |
//! | broadcast | binomial | `floor(log2 n)` | the root `ceil(log2 n) * count` | Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005 |
//! | reduce | binomial | `floor(log2 n)` | `count` | the same |
//!
//! A rank reduces its own and what all its children send in one step. In the minimum spanning tree every subtree is a
//! run of neighbouring ranks, whatever the root, so operands are in rank order. The binomial tree counts ranks from the
//! root and goes round the end of the group: its order is that of the ranks only from root 0.
//!
//! In a reduce a rank that is not the root keeps nothing: what it sends on is in the hand.

use crate::shape::{keep, send};
use crate::{At, Operand, Plan, Rank, Shape, Step};

/// A rank's place in a tree.
#[derive(Debug, Default)]
pub(super) struct Tree {
    /// Where its sum goes, and the result comes from; none: it is the root.
    pub(super) parent: Option<Rank>,
    /// Children whose sums come before its own.
    pub(super) lower: Vec<Rank>,
    /// Children whose sums come after its own.
    pub(super) upper: Vec<Rank>,
}

impl Tree {
    /// The minimum spanning tree: halve the ranks again and again, with one messenger from half to half.
    pub(super) fn minimum_spanning(s: &Shape, root: Rank) -> Tree {
        let mut tree = Tree::default();
        let (mut left, mut right, mut root) = (0, s.n - 1, root);
        while left < right {
            let mid = usize::midpoint(left, right);
            let messenger = if root <= mid { right } else { left };
            if s.rank == root {
                if messenger < root { &mut tree.lower } else { &mut tree.upper }.push(messenger);
            } else if s.rank == messenger {
                tree.parent = Some(root);
            }
            let low = s.rank <= mid;
            root = if low == (root <= mid) { root } else { messenger };
            (left, right) = if low { (left, mid) } else { (mid + 1, right) };
        }
        // Halves were cut off from the outside in.
        tree.upper.reverse();
        tree
    }

    /// The binomial tree, ranks counted from the root: the parent of v is v without its lowest bit.
    pub(super) fn binomial(s: &Shape) -> Tree {
        let v = s.past_root();
        let upper = (0..).map(|k| 1 << k).take_while(|bit| *bit < below(v, s.n));
        let parent = (v > 0).then(|| s.real(v & (v - 1)));
        Tree { parent, lower: vec![], upper: upper.map(|bit| s.real(v + bit)).collect() }
    }

    /// Our own and the children's sums, on to the parent; or finished, if we are the root.
    pub(super) fn up(&self, own: Operand, kept: Option<At>) -> Step {
        let recv = |ranks: &[Rank]| ranks.iter().copied().map(Operand::Recv).collect::<Vec<_>>();
        let operands = [recv(&self.lower), vec![own], recv(&self.upper)].concat();
        let dst = if operands.len() == 1 { None } else { kept };
        let send = self.parent.into_iter().collect();
        Step { operands, dst, send, finish: self.parent.is_none(), ..Step::default() }
    }

    /// What comes from the parent, kept and on to the children; nothing for the root.
    pub(super) fn down(&self, dst: At) -> Option<Step> {
        let step = |parent| Step { send: self.children(), ..keep(Operand::Recv(parent), dst) };
        self.parent.map(step)
    }

    /// All children, ascending: a set to send to.
    pub(super) fn children(&self) -> Vec<Rank> {
        let mut all = [self.lower.as_slice(), &self.upper].concat();
        all.sort_unstable();
        all
    }
}

/// How many numbers the binomial subtree of `v` has, from `v` on.
pub(super) fn below(v: usize, n: usize) -> usize {
    if v == 0 { n } else { (1 << v.trailing_zeros()).min(n - v) }
}

/// From the root down.
pub(super) fn broadcast(s: &Shape, tree: &Tree) -> Plan {
    let root = || Step { dst: (!s.in_place).then(|| s.out(0)), ..send(s.own(0), tree.children()) };
    s.split(1, vec![tree.down(s.out(0)).unwrap_or_else(root)])
}

/// Up to the root.
pub(super) fn reduce(s: &Shape, tree: &Tree) -> Plan {
    let kept = (s.rank == s.root).then(|| s.out(0));
    s.split(1, vec![tree.up(s.own(0), kept)])
}

/// Up to rank 0 and down again.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let tree = Tree::minimum_spanning(s, 0);
    let mut up = tree.up(s.own(0), Some(s.out(0)));
    if s.rank == 0 {
        up.send = tree.children();
    }
    s.split(1, [Some(up), tree.down(s.out(0))].into_iter().flatten().collect())
}
