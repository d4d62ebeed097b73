//! The plans of all ranks as one graph, and the checks that need no run: form, pairing, lengths.

use super::super::{At, Layout, Operand, Plan, Program, Rank, Step};
use super::Fault;
use super::goal::Goal;

/// A message as its sender knows it: global step, and which of its sends.
pub(super) type Sent = (u32, u32);

/// Whose memory, and which.
type Piece = (Rank, At);

/// All ranks' programs, with steps numbered across ranks, and who talks to whom.
pub(super) struct Net<'a> {
    /// What knows the lengths of tables.
    goal: &'a Goal,
    /// Ranks.
    pub(super) n: usize,
    /// Per rank.
    pub(super) programs: Vec<Program>,
    /// Per rank, the number of its first step; and the number of all.
    pub(super) base: Vec<u32>,
    /// Per step, its rank.
    pub(super) rank: Vec<u32>,
    /// Per link (`from * n + to`), its messages.
    pub(super) sends: Vec<Vec<Sent>>,
    /// Per link, the steps that receive them.
    pub(super) recvs: Vec<Vec<u32>>,
    /// Per step and operand, which message of its link a receive is.
    pub(super) ordinal: Vec<Vec<u32>>,
    /// Per step, later steps of the same rank that may wait for it.
    pub(super) dependents: Vec<Vec<u32>>,
}

impl<'a> Net<'a> {
    /// Number the steps and pair the messages; the plans are of one size and in rank order.
    pub(super) fn new(plans: &[Plan], goal: &'a Goal) -> Result<Net<'a>, Fault> {
        let n = plans.len();
        plans.iter().try_for_each(well_formed)?;
        let mut net = Net {
            goal,
            n,
            programs: plans.iter().map(Program::compile).collect(),
            base: vec![0],
            rank: Vec::new(),
            sends: vec![Vec::new(); n * n],
            recvs: vec![Vec::new(); n * n],
            ordinal: Vec::new(),
            dependents: Vec::new(),
        };
        for (rank, plan) in plans.iter().enumerate() {
            let base = net.rank.len() as u32;
            for (i, step) in plan.steps.iter().enumerate() {
                let g = base + i as u32;
                net.rank.push(rank as u32);
                for (k, &to) in step.send.iter().enumerate() {
                    net.sends[rank * n + to].push((g, k as u32));
                }
                let ordinal = step.operands.iter().map(|operand| match *operand {
                    Operand::Recv(from) => {
                        let link = &mut net.recvs[from * n + rank];
                        link.push(g);
                        link.len() as u32 - 1
                    }
                    Operand::Own(_) => 0,
                });
                net.ordinal.push(ordinal.collect());
                net.dependents.push(Vec::new());
                let node = &net.programs[rank].nodes[i];
                for &earlier in node.after_write.iter().chain(&node.after_read) {
                    net.dependents[(base + earlier) as usize].push(g);
                }
            }
            net.base.push(net.rank.len() as u32);
        }
        net.paired()?;
        net.lengths_agree()?;
        Ok(net)
    }

    /// Steps of all ranks.
    pub(super) fn steps(&self) -> usize {
        self.rank.len()
    }

    /// Rank and local number of a step.
    pub(super) fn place(&self, g: u32) -> (Rank, usize) {
        let rank = self.rank[g as usize] as usize;
        (rank, (g - self.base[rank]) as usize)
    }

    /// A step.
    pub(super) fn step(&self, g: u32) -> &Step {
        let (rank, i) = self.place(g);
        &self.programs[rank].plan.steps[i]
    }

    /// Elements that a rank sends of an operation of `count`, the most of all ranks.
    pub(super) fn most_sent(&self, count: usize) -> usize {
        let sent = |rank: usize| -> usize {
            let steps = self.base[rank]..self.base[rank + 1];
            steps.map(|g| self.step(g).send.len() * self.chunk(g).map_or(0, |c| self.len(c, count))).sum()
        };
        (0..self.n).map(sent).max().unwrap_or(0)
    }

    fn paired(&self) -> Result<(), Fault> {
        for (link, (sends, recvs)) in self.sends.iter().zip(&self.recvs).enumerate() {
            let (from, to) = (link / self.n, link % self.n);
            if let Some(&(g, _)) = sends.get(recvs.len()) {
                return Err(Fault::Unreceived { from, step: self.place(g).1, to });
            }
            if let Some(&g) = recvs.get(sends.len()) {
                return Err(Fault::Unsent { from, to, step: self.place(g).1 });
            }
        }
        Ok(())
    }

    /// The operands, the result and the messages of every step have one length, whatever the count.
    fn lengths_agree(&self) -> Result<(), Fault> {
        let n = self.n;
        let counts = [0, 1, n - 1, n, n + 1, 3 * n + 2];
        for g in 0..self.steps() as u32 {
            let (rank, step) = self.place(g);
            let Some(own) = self.chunk(g) else { continue };
            for (k, operand) in self.step(g).operands.iter().enumerate() {
                let other = match *operand {
                    Operand::Own(at) => Some((rank, at)),
                    Operand::Recv(from) => {
                        let message = self.ordinal[g as usize][k] as usize;
                        self.chunk(self.sends[from * n + rank][message].0)
                    }
                };
                let Some(other) = other.filter(|&other| !self.alike(own, other)) else { continue };
                for count in counts {
                    let (own, other) = (self.len(own, count), self.len(other, count));
                    if own != other {
                        return Err(Fault::Length { rank, step, count, own, other });
                    }
                }
            }
        }
        Ok(())
    }

    /// The chunk whose length a step has: its `dst` or an own operand, or, of one that only passes on what
    /// it receives, that of the first message it receives.
    fn chunk(&self, mut g: u32) -> Option<Piece> {
        for _ in 0..=self.steps() {
            let (rank, _) = self.place(g);
            let step = self.step(g);
            if let Some(at) = step.chunk() {
                return Some((rank, at));
            }
            let Operand::Recv(from) = step.operands[0] else { return None };
            let message = self.ordinal[g as usize][0] as usize;
            g = self.sends[from * self.n + rank][message].0;
        }
        None // passed on in a circle: a deadlock
    }

    fn layout(&self, (rank, at): Piece) -> Layout {
        self.programs[rank].plan.slots[at.slot as usize]
    }

    /// Whether two pieces have one length without a look at it.
    fn alike(&self, one: Piece, other: Piece) -> bool {
        let layout = self.layout(one);
        layout == self.layout(other)
            && one.1.chunk == other.1.chunk
            && !matches!(layout, Layout::Table { .. })
    }

    /// Elements of a piece in an operation of `count`.
    fn len(&self, piece: Piece, count: usize) -> usize {
        match self.layout(piece) {
            Layout::Table { .. } => self.goal.count_at(piece.0, piece.1),
            layout => layout.range(piece.1.chunk, count).len(),
        }
    }
}

fn well_formed(plan: &Plan) -> Result<(), Fault> {
    let exists = |at: At| plan.slots.get(at.slot as usize).is_some_and(|l| at.chunk < l.chunks());
    let peer = |p: Rank| p < plan.size && p != plan.rank;
    for (i, step) in plan.steps.iter().enumerate() {
        let what = if step.operands.is_empty() {
            "nothing to combine"
        } else if step.dst.is_none() && step.send.is_empty() {
            "the result goes nowhere"
        } else if !step.dst.is_none_or(exists) {
            "a result in a chunk that does not exist"
        } else if !step.operands.iter().all(|o| match *o {
            Operand::Recv(from) => peer(from),
            Operand::Own(at) => exists(at),
        }) {
            "an operand that does not exist"
        } else if !step.send.iter().all(|&p| peer(p)) {
            "sent to a rank that does not exist, or to itself"
        } else if !step.send.is_sorted_by(|a, b| a < b) {
            "a send set that is not ascending, or names a rank twice"
        } else {
            continue;
        };
        return Err(Fault::Malformed { rank: plan.rank, step: i, what });
    }
    Ok(())
}
