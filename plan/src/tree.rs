//! Trees: what a rank does in a tree, and the shapes of the minimum spanning tree and of the binomial tree.
//!
//! | collective | tree | hops | a rank sends | source |
//! |---|---|---|---|---|
//! | broadcast | minimum spanning | at most `ceil(log2 n)` | at most `ceil(log2 n) * count` (root 0 exactly that) | Barnett et al., "Interprocessor collective communication library (InterCom)", 1994; Chan et al., "Collective communication: theory, practice, and experience", 2007 |
//! | reduce | minimum spanning | the same | `count` | the same |
//! | all_reduce | minimum spanning, root 0 | twice that | `ceil(log2 n) * count` | the same: reduce, then broadcast |
//! | broadcast | binomial | `floor(log2 n)` | the root `ceil(log2 n) * count` | Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005 |
//! | reduce | binomial | `floor(log2 n)` | `count` | the same |
//!
//! A rank reduces its own data and what all its children send in one step. In the minimum spanning tree every subtree is a
//! run of neighbouring ranks, whatever the root, so operands are in rank order. The binomial tree counts ranks from the
//! root and wraps round the end of the group, so it combines in rank order only if the root is rank 0.
//!
//! In a reduce a rank that is not the root stores nothing: the sum that it sends is in the hand (`compile.rs`).

use crate::shape::{keep, send};
use crate::{At, Operand, Plan, Rank, Shape, Step};

/// A rank's place in a tree.
#[derive(Debug, Default)]
pub(super) struct Tree {
    /// The rank that it sends its sum to, and gets the result from; `None` for the root.
    pub(super) parent: Option<Rank>,
    /// Children whose sums come before its own data in the order of operands, ascending.
    pub(super) lower: Vec<Rank>,
    /// Children whose sums come after its own data, in the order of operands.
    pub(super) upper: Vec<Rank>,
}

impl Tree {
    /// The minimum spanning tree: halve the ranks again and again. The half without the root is led by its outermost rank, the root's child.
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
        // The range shrank towards the root, so the highest of these children was found first.
        tree.upper.reverse();
        tree
    }

    /// The binomial tree, ranks counted from the root: the parent of v is v without its lowest set bit.
    pub(super) fn binomial(s: &Shape) -> Tree {
        let v = s.past_root();
        let upper = (0..).map(|k| 1 << k).take_while(|bit| *bit < below(v, s.n));
        let parent = (v > 0).then(|| s.real(v & (v - 1)));
        Tree { parent, lower: vec![], upper: upper.map(|bit| s.real(v + bit)).collect() }
    }

    /// Combines our own data and the children's sums, stores the result in `kept`, and sends it to the parent; the root finishes it instead.
    pub(super) fn up(&self, own: Operand, kept: Option<At>) -> Step {
        let recv = |ranks: &[Rank]| ranks.iter().copied().map(Operand::Recv).collect::<Vec<_>>();
        let operands = [recv(&self.lower), vec![own], recv(&self.upper)].concat();
        let dst = if operands.len() == 1 { None } else { kept };
        let send = self.parent.into_iter().collect();
        Step { operands, dst, send, finish: self.parent.is_none(), ..Step::default() }
    }

    /// Stores what the parent sends, and passes it on to the children; `None` for the root.
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

/// The number of ranks in the binomial subtree of `v`: `v` and those right after it.
pub(super) fn below(v: usize, n: usize) -> usize {
    if v == 0 { n } else { (1 << v.trailing_zeros()).min(n - v) }
}

/// The data go from the root down.
pub(super) fn broadcast(s: &Shape, tree: &Tree) -> Plan {
    let root = || Step { dst: (!s.in_place).then(|| s.out(0)), ..send(s.own(0), tree.children()) };
    s.split(1, vec![tree.down(s.out(0)).unwrap_or_else(root)])
}

/// Sums go up to the root.
pub(super) fn reduce(s: &Shape, tree: &Tree) -> Plan {
    let kept = (s.rank == s.root).then(|| s.out(0));
    s.split(1, vec![tree.up(s.own(0), kept)])
}

/// Sums go up to rank 0, and the result down again.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let tree = Tree::minimum_spanning(s, 0);
    let mut up = tree.up(s.own(0), Some(s.out(0)));
    if s.rank == 0 {
        up.send = tree.children();
    }
    s.split(1, [Some(up), tree.down(s.out(0))].into_iter().flatten().collect())
}
