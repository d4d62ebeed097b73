//! Makes a program from a seed: the operations that it consists of, the same on every rank.

use allstream::plan::{self, Shape, algorithms, keeps_rank_order};
use allstream::{Algo, DType, Kind, ReduceOp};

use crate::cases::{Combine, Form};
use crate::support::host_label;
use crate::values::mix;

/// The element types of programs.
pub(crate) const TYPES: [DType; 5] = [DType::U8, DType::I32, DType::U64, DType::F32, DType::BF16];
/// While at least this many groups are open, the world included, no group is split.
const GROUPS: usize = 6;

/// Numbers that look random, the same for the same seed.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(&[self.0])
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// True in about `of` of a hundred cases.
    pub(crate) fn percent(&mut self, of: u64) -> bool {
        self.next() % 100 < of
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// A collective over one buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Collective {
    pub(crate) kind: Kind,
    pub(crate) algo: Algo,
    pub(crate) form: Form,
    pub(crate) dtype: DType,
    pub(crate) op: Combine,
    pub(crate) root: usize,
    pub(crate) len: usize,
    pub(crate) deterministic: bool,
}

/// One operation. It names ranks by their numbers in its group.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Splits the group. `children`: the number of the new group that each rank gets.
    Split {
        colors: Vec<u64>,
        keys: Vec<i64>,
        children: Vec<usize>,
    },
    /// Ends the group: by `close`, or by dropping its communicator.
    End {
        close: bool,
    },
    Collective(Collective),
    /// An all-reduce or a broadcast of two lists of buffers.
    List {
        kind: Kind,
        algo: Algo,
        op: Combine,
        root: usize,
        lens: Vec<usize>,
    },
    /// `broadcast_bytes`, or `all_gather_bytes`.
    Bytes {
        all: bool,
        root: usize,
        len: usize,
    },
    Message {
        from: usize,
        to: usize,
        tag: u32,
        dtype: DType,
        len: usize,
    },
    /// Each rank sends to the rank `by` places after it, and receives from the rank `by` places before it (modulo the group's size).
    Shift {
        by: usize,
        tag: u32,
        dtype: DType,
        len: usize,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) group: usize,
    pub(crate) act: Act,
    /// The earlier operation from whose result each rank makes its input to this operation.
    pub(crate) source: Option<usize>,
    /// Bit masks by rank of the group: which ranks drop the `Work` at once, and which make the call follow a job on a stream (`Call::on`).
    pub(crate) drops: u32,
    pub(crate) gated: u32,
}

/// A program, and the world in which it runs.
pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) link: &'static str,
    pub(crate) n: usize,
    /// The members of each group, by their ranks in the world.
    pub(crate) groups: Vec<Vec<usize>>,
    pub(crate) steps: Vec<Step>,
}

impl Program {
    /// The program of `seed`, with this many operations, in a world of `n` ranks over `link`.
    pub(crate) fn new(seed: u64, link: &'static str, n: usize, operations: usize) -> Program {
        let mut maker = Maker {
            rng: Rng(mix(&[seed, 1])),
            program: Program { seed, link, n, groups: vec![(0..n).collect()], steps: Vec::new() },
            open: vec![0],
        };
        while maker.program.steps.len() < operations {
            maker.step();
        }
        maker.program
    }
}

struct Maker {
    rng: Rng,
    program: Program,
    /// The groups that have not been ended.
    open: Vec<usize>,
}

impl Maker {
    fn step(&mut self) {
        let group = self.rng.pick(&self.open);
        let n = self.program.groups[group].len();
        let act = match self.rng.below(100) {
            0..8 if self.open.len() < GROUPS => self.split(group),
            8..11 if group != 0 => {
                self.open.retain(|g| *g != group);
                Act::End { close: self.rng.percent(50) }
            }
            11..17 => self.list(group),
            17..23 => Act::Bytes { all: self.rng.percent(50), root: self.rng.below(n), len: self.length() },
            23..33 if n > 1 => {
                let from = self.rng.below(n);
                let to = (from + 1 + self.rng.below(n - 1)) % n;
                let (tag, dtype, len) = (self.tag(), self.rng.pick(&TYPES), self.length());
                Act::Message { from, to, tag, dtype, len }
            }
            33..38 if n > 1 => {
                let (by, tag) = (1 + self.rng.below(n - 1), self.tag());
                Act::Shift { by, tag, dtype: self.rng.pick(&TYPES), len: self.length() }
            }
            _ => Act::Collective(self.collective(group)),
        };
        let steps = self.program.steps.len();
        let source = (steps > 0 && self.rng.percent(70)).then(|| {
            // Mostly one of the last eight operations.
            let back = if self.rng.percent(80) { steps.min(8) } else { steps };
            steps - 1 - self.rng.below(back)
        });
        let some =
            |rng: &mut Rng, percent| (0..n).filter(|_| rng.percent(percent)).fold(0, |m, r| m | 1 << r);
        let (drops, gated) = (some(&mut self.rng, 6), some(&mut self.rng, 8));
        self.program.steps.push(Step { group, act, source, drops, gated });
    }

    fn split(&mut self, group: usize) -> Act {
        let members = self.program.groups[group].clone();
        let n = members.len();
        let kinds = if self.rng.percent(30) { 1 } else { 3 };
        let colors: Vec<u64> = (0..n).map(|_| self.rng.below(kinds) as u64 * 11).collect();
        let turned = self.rng.percent(50);
        let keys: Vec<i64> =
            (0..n).map(|r| if turned { self.rng.below(3) as i64 - 1 } else { r as i64 }).collect();
        let mut children = vec![0; n];
        let mut all = colors.clone();
        all.sort_unstable();
        all.dedup();
        for color in all {
            let mut mates: Vec<usize> = (0..n).filter(|r| colors[*r] == color).collect();
            mates.sort_by_key(|r| (keys[*r], *r));
            let id = self.program.groups.len();
            mates.iter().for_each(|r| children[*r] = id);
            self.program.groups.push(mates.iter().map(|r| members[*r]).collect());
            self.open.push(id);
        }
        Act::Split { colors, keys, children }
    }

    fn tag(&mut self) -> u32 {
        self.rng.below(3) as u32
    }

    fn length(&mut self) -> usize {
        match self.rng.below(40) {
            0 => 0,
            1..4 => 1,
            4..24 => self.rng.below(70),
            24..36 => self.rng.below(3000),
            36..39 => self.rng.below(20_000),
            _ => self.rng.below(100_000),
        }
    }

    /// The number of each member's host; hosts are numbered in the order of their first ranks in the group.
    fn hosts(&self, group: usize) -> Vec<u32> {
        let world = self.program.n;
        let label = |m: &usize| if self.program.link == "mixed" { host_label(*m, world) } else { "a" };
        let labels: Vec<_> = self.program.groups[group].iter().map(label).collect();
        labels.iter().map(|l| u32::from(*l != labels[0])).collect()
    }

    /// A random algorithm that has a plan in this group and `fits`; or `Algo::Auto`.
    fn algo(
        &mut self,
        group: usize,
        kind: Kind,
        form: Form,
        root: usize,
        fits: impl Fn(Algo) -> bool,
    ) -> Algo {
        let (n, hosts) = (self.program.groups[group].len(), self.hosts(group));
        let (in_place, varied, hosts) = (form.in_place(kind), form.varies(), &hosts[..]);
        let suits = |algo: &Algo| {
            let plan = |rank| plan::plan(kind, *algo, &Shape { n, rank, root, in_place, varied, hosts });
            (0..n).all(|rank| plan(rank).is_ok())
        };
        let named = algorithms(kind).iter().copied().filter(suits);
        let all: Vec<Algo> = named.chain([Algo::Auto]).filter(|algo| fits(*algo)).collect();
        self.rng.pick(&all)
    }

    fn collective(&mut self, group: usize) -> Collective {
        let n = self.program.groups[group].len();
        let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|k| !algorithms(*k).is_empty()).collect();
        let kind = self.rng.pick(&kinds);
        let forms: Vec<Form> = Form::ALL
            .into_iter()
            .filter(|f| f.is_of(kind) && !matches!(f, Form::List | Form::Bytes))
            .collect();
        let form = self.rng.pick(&forms);
        let (dtype, root) = (self.rng.pick(&TYPES), if kind.rooted() { self.rng.below(n) } else { 0 });
        let ops: Vec<Combine> = Combine::all()
            .into_iter()
            .filter(|op| op.supports(dtype) && op.fits(kind) && *op != Combine::Scaled)
            .collect();
        let op = self.rng.pick(&ops);
        // A result that is rounded is known to the bit only if it is one fold in rank order, so only such algorithms are used.
        let rounded = dtype.is_float() && kind.reduces() && !op.is_exact();
        let algo = self.algo(group, kind, form, root, |algo| match (rounded, op) {
            (true, _) => matches!(algo, Algo::OneShot | Algo::Direct | Algo::Naive | Algo::Auto),
            (_, Combine::Maps) => algo == Algo::Auto || keeps_rank_order(kind, algo),
            _ => true,
        });
        let len = self.length() / if kind.varies() { n } else { 1 };
        let deterministic = rounded && algo == Algo::Auto;
        Collective { kind, algo, form, dtype, op, root, len, deterministic }
    }

    fn list(&mut self, group: usize) -> Act {
        let n = self.program.groups[group].len();
        let kind = self.rng.pick(&[Kind::AllReduce, Kind::Broadcast]);
        let root = if kind.rooted() { self.rng.below(n) } else { 0 };
        let op = self.rng.pick(&[
            Combine::Op(ReduceOp::Sum),
            Combine::Op(ReduceOp::Max),
            Combine::Op(ReduceOp::BitXor),
        ]);
        let many = self.rng.below(30);
        let lens = (0..many).map(|_| self.length() / 10).collect();
        Act::List { kind, algo: self.algo(group, kind, Form::List, root, |_| true), op, root, lens }
    }
}
