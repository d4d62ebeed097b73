//! The plans of all ranks as one graph, and the checks that need no run: form of steps, pairing of messages, lengths.

use super::Fault;
use super::goal::Goal;
use crate::{At, Layout, Loan, Operand, Plan, Program, Rank, Step};

/// A message as its sender knows it: the global number of the step, and the index in the step's `send` (of a loan: 0).
pub(super) type Sent = (u32, u32);

/// A loan as its borrower knows it: the lender, and the number of the loan among the messages of the link.
pub(super) type Borrow = (Rank, u32);

/// A chunk of a rank's memory.
type Piece = (Rank, At);

/// All ranks' programs, with steps numbered across ranks, and who talks to whom.
pub(super) struct Net<'a> {
    /// Gives the lengths of the chunks of tables.
    goal: &'a Goal,
    /// Ranks.
    pub(super) n: usize,
    /// Per rank, its compiled plan.
    pub(super) programs: Vec<Program>,
    /// Per rank, the number of its first step; at the end, the number of all steps.
    pub(super) base: Vec<u32>,
    /// Per step, its rank.
    pub(super) rank: Vec<u32>,
    /// Per link (`from * n + to`), its messages, including loans.
    pub(super) sends: Vec<Vec<Sent>>,
    /// Per link, the steps that receive or borrow these messages, in the same order.
    pub(super) recvs: Vec<Vec<u32>>,
    /// Per step and operand, the number of the received or lent message on its link (for our own memory: 0).
    pub(super) ordinal: Vec<Vec<u32>>,
    /// Per step, the loans that it borrows: one for each lender.
    pub(super) borrows: Vec<Vec<Borrow>>,
    /// Per step, later steps of the same rank that may wait for it.
    pub(super) dependents: Vec<Vec<u32>>,
}

impl<'a> Net<'a> {
    /// Numbers the steps and pairs the messages. The plans must be for one group, in rank order.
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
            borrows: Vec::new(),
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
                if let Some(loan) = step.loan {
                    net.sends[rank * n + loan.to].push((g, 0));
                }
                net.receives(rank, g, step);
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

    /// Notes which messages and loans a step takes, and the number of each among the messages of its link.
    fn receives(&mut self, rank: Rank, g: u32, step: &Step) {
        let n = self.n;
        let mut next = |from: Rank| {
            let link = &mut self.recvs[from * n + rank];
            link.push(g);
            link.len() as u32 - 1
        };
        let (mut ordinals, mut borrows) = (Vec::new(), Vec::new());
        for operand in &step.operands {
            ordinals.push(match *operand {
                Operand::Recv(from) => next(from),
                Operand::Lent(from) => {
                    let message = next(from);
                    borrows.push((from, message));
                    message
                }
                Operand::Own(_) => 0,
            });
        }
        borrows.extend(step.only_into().map(|from| (from, next(from))));
        self.ordinal.push(ordinals);
        self.borrows.push(borrows);
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

    /// Elements sent by the rank that sends most, in an operation of `count` elements.
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
            for (message, (&(sender, _), &receiver)) in sends.iter().zip(recvs).enumerate() {
                let is_loan = self.step(sender).loan.is_some();
                if is_loan != self.borrows[receiver as usize].contains(&(from, message as u32)) {
                    let (step, receiver) = (self.place(sender).1, self.place(receiver).1);
                    return Err(Fault::Mispaired { from, step, to, receiver, is_loan });
                }
            }
        }
        Ok(())
    }

    /// Checks that the operands, the result, the messages and the loans of each step have the same length, whatever the count.
    fn lengths_agree(&self) -> Result<(), Fault> {
        let n = self.n;
        let counts = [0, 1, n - 1, n, n + 1, 3 * n + 2];
        for g in 0..self.steps() as u32 {
            let (rank, step) = self.place(g);
            let Some(own) = self.chunk(g) else { continue };
            let operands =
                self.step(g).operands.iter().enumerate().filter_map(|(k, operand)| match *operand {
                    Operand::Own(at) => Some((rank, at)),
                    // For a step that lends, `chunk` is the chunk that may be read.
                    Operand::Recv(from) | Operand::Lent(from) => {
                        self.chunk(self.sender(from, rank, self.ordinal[g as usize][k]))
                    }
                });
            let borrows = self.borrows[g as usize].iter();
            let written = borrows.filter(|(from, _)| self.step(g).into.contains(from));
            let written = written.filter_map(|&(from, message)| {
                self.step(self.sender(from, rank, message)).loan.map(|loan| (from, loan.write))
            });
            let lent = self.step(g).loan.map(|loan| (rank, loan.write));
            for other in operands.chain(written).chain(lent).filter(|&other| !self.alike(own, other)) {
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

    /// The step that sends or lends this message of a link.
    pub(super) fn sender(&self, from: Rank, to: Rank, message: u32) -> u32 {
        self.sends[from * self.n + to][message as usize].0
    }

    /// A chunk that has the length of a step's result: its `dst`, an operand in our own memory, or what it lends for reading. If it
    /// has none of these, the chunk of the step that sends or lends its first operand.
    fn chunk(&self, mut g: u32) -> Option<Piece> {
        for _ in 0..=self.steps() {
            let (rank, _) = self.place(g);
            let step = self.step(g);
            if let Some(at) = step.chunk() {
                return Some((rank, at));
            }
            let (Operand::Recv(from) | Operand::Lent(from)) = step.operands[0] else { return None };
            g = self.sender(from, rank, self.ordinal[g as usize][0]);
        }
        None // steps that pass their operands on in a circle: a deadlock, which the run finds
    }

    fn layout(&self, (rank, at): Piece) -> Layout {
        self.programs[rank].plan.slots[at.slot as usize]
    }

    /// Whether two pieces have the same length for every count, as they are the same chunk of the same layout.
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
    for (step, it) in plan.steps.iter().enumerate() {
        let what = match it.loan {
            Some(loan) => bad_loan(plan, it, loan),
            None => bad_step(plan, it),
        };
        if let Some(what) = what {
            return Err(Fault::Malformed { rank: plan.rank, step, what });
        }
    }
    Ok(())
}

fn exists(plan: &Plan, at: At) -> bool {
    plan.slots.get(at.slot as usize).is_some_and(|layout| at.chunk < layout.chunks())
}

fn is_peer(plan: &Plan, rank: Rank) -> bool {
    rank < plan.size && rank != plan.rank
}

/// What is wrong with the form of a step that lends.
fn bad_loan(plan: &Plan, step: &Step, loan: Loan) -> Option<&'static str> {
    if *step != (Step { loan: Some(loan), ..Step::default() }) {
        Some("a step that lends and does something else too")
    } else if !is_peer(plan, loan.to) {
        Some("lent to a rank that does not exist, or to itself")
    } else if !exists(plan, loan.read) || !exists(plan, loan.write) {
        Some("a loan of a chunk that does not exist")
    } else {
        None
    }
}

/// What is wrong with the form of a step that does not lend.
fn bad_step(plan: &Plan, step: &Step) -> Option<&'static str> {
    let lent_twice = |k: usize| {
        let operand = &step.operands[k];
        matches!(operand, Operand::Lent(_)) && step.operands[..k].contains(operand)
    };
    if step.operands.is_empty() {
        Some("nothing to combine")
    } else if step.dst.is_none() && step.send.is_empty() && step.into.is_empty() {
        Some("the result goes nowhere")
    } else if !step.dst.is_none_or(|at| exists(plan, at)) {
        Some("a result in a chunk that does not exist")
    } else if !step.operands.iter().all(|operand| match *operand {
        Operand::Recv(from) | Operand::Lent(from) => is_peer(plan, from),
        Operand::Own(at) => exists(plan, at),
    }) {
        Some("an operand that does not exist")
    } else if (0..step.operands.len()).any(lent_twice) {
        Some("a loan that is read twice")
    } else if !step.send.iter().all(|&p| is_peer(plan, p)) {
        Some("sent to a rank that does not exist, or to itself")
    } else if !step.send.is_sorted_by(|a, b| a < b) {
        Some("a send set that is not ascending, or names a rank twice")
    } else if !step.into.iter().all(|&p| is_peer(plan, p)) {
        Some("written into a loan of a rank that does not exist, or of itself")
    } else if !step.into.is_sorted_by(|a, b| a < b) {
        Some("loans to write into that are not ascending, or name a rank twice")
    } else {
        None
    }
}
