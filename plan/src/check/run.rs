//! Runs all plans at once, symbolically, as [`crate::compile`] says that an executor does, over links
//! that store nothing (in an eager run: everything).
//!
//! The plans are a Kahn network (each link has one sender and one receiver, which use it in orders fixed by their plans), so
//! the outcome does not depend on the order in which steps are tried. A worklist holds the steps that may be able to go on.
//!
//! A loan is not stored in a link in any mode: the borrower works in the lender's memory. For the number of hops, the loan counts
//! as a message to the borrower, and what the borrower writes into it as a message back.

use std::collections::{HashMap, VecDeque};

use super::Fault;
use super::expr::Id;
use super::fault::{On, Wait};
use super::memory::{Memory, Valued};
use super::net::Net;
use crate::step::Holds;
use crate::{At, Loan, Operand, Rank};

/// How to run.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    /// Slices in each chunk.
    pub(super) slices: usize,
    /// Links store whatever is sent, without limit. Loans are not stored.
    pub(super) eager: bool,
    /// Combining steps and early copies, too, start only when their `dst` is free, so no result waits for it in a hand.
    pub(super) strict: bool,
    /// A message is sent only when all its slices are there, and released when all of them are taken. A chunk is lent only when
    /// all its slices may be lent, and counts as given back when all of them are.
    pub(super) whole: bool,
}

struct State {
    holds: Holds,
    /// Slices that are done. For a step that only sends from memory: slices that may be sent; for a loan: that were given back.
    computed: usize,
    /// Slices that are computed, and that all receivers have taken.
    released: usize,
    /// For a loan: slices that the borrower may use or has used.
    offered: usize,
    /// The operands gathered so far for the slice that the step is at.
    gathered: Vec<Id>,
    /// The longest chain of messages that led to these operands.
    hops: u32,
    /// The result of the slice that the step is at, once all operands are gathered.
    hand: Option<Valued>,
    /// For each slice, how many receivers have not yet taken it.
    untaken: Vec<usize>,
}

#[derive(Default)]
struct Link {
    /// Messages taken from the sender so far, and (`slice`) slices taken of the next one.
    message: usize,
    slice: usize,
    /// In an eager run: what was taken from the sender and not yet received.
    stored: VecDeque<Valued>,
}

/// A run in progress.
pub(super) struct Run<'a> {
    net: &'a Net<'a>,
    mode: Mode,
    /// The memory of all ranks.
    pub(super) memory: Memory,
    states: Vec<State>,
    links: Vec<Link>,
    work: Vec<u32>,
    queued: Vec<bool>,
    /// By cell of memory that is out on loan: the borrowers, and whether each may write it.
    lent: HashMap<usize, Vec<(Rank, bool)>>,
    /// The first touch of a cell by its owner that a loan of the cell forbade.
    pub(super) held: Option<Fault>,
    /// The longest chain of messages so far.
    pub(super) hops: u32,
}

impl<'a> Run<'a> {
    /// Runs all plans to their end, or until no step can go on.
    pub(super) fn new(net: &'a Net<'a>, mode: Mode, memory: Memory) -> Run<'a> {
        let state = |g: u32| State {
            holds: net.step(g).holds(),
            computed: 0,
            released: 0,
            offered: 0,
            gathered: Vec::with_capacity(net.step(g).operands.len()),
            hops: 0,
            hand: None,
            untaken: vec![net.step(g).send.len(); mode.slices],
        };
        let all = 0..net.steps() as u32;
        let mut run = Run {
            net,
            mode,
            memory,
            states: all.clone().map(state).collect(),
            links: (0..net.n * net.n).map(|_| Link::default()).collect(),
            work: all.rev().collect(),
            queued: vec![true; net.steps()],
            lent: HashMap::new(),
            held: None,
            hops: 0,
        };
        while let Some(g) = run.work.pop() {
            run.queued[g as usize] = false;
            run.advance(g);
        }
        run
    }

    /// The first unfinished step of each rank that has one.
    pub(super) fn waits(&self) -> Vec<Wait> {
        let unfinished = |rank: Rank| {
            let mut steps = self.net.base[rank]..self.net.base[rank + 1];
            steps.find(|&g| self.states[g as usize].released < self.mode.slices)
        };
        (0..self.net.n).filter_map(unfinished).map(|g| self.wait(g)).collect()
    }

    /// Does all that a step can do now.
    fn advance(&mut self, g: u32) {
        let (rank, i) = self.net.place(g);
        let step = &self.net.programs[rank].plan.steps[i];
        if let Some(loan) = step.loan {
            return self.lend(rank, g, loan);
        }
        loop {
            let state = &self.states[g as usize];
            let slice = state.computed;
            if slice == self.mode.slices {
                return;
            }
            if state.hand.is_none() {
                if state.gathered.is_empty() && self.blocked_at_start(rank, i, slice).is_some() {
                    return;
                }
                if state.holds == Holds::Source {
                    self.states[g as usize].computed += 1;
                    self.offer(rank, g);
                    continue;
                }
                let Some(value) = self.combine(rank, g, slice) else { return };
                let state = &mut self.states[g as usize];
                state.hand = Some(value);
                if state.holds == Holds::Hand {
                    self.give_back(rank, g, slice, value);
                    self.offer(rank, g);
                }
            }
            match step.dst {
                None => {
                    if self.states[g as usize].untaken[slice] > 0 {
                        return;
                    }
                    let state = &mut self.states[g as usize];
                    state.hand = None;
                    state.computed += 1;
                    // If the slice was sent, `take` counted it as released when the last receiver took it.
                    if step.send.is_empty() {
                        state.released += 1;
                    }
                    self.wake_dependents(g);
                }
                Some(at) => {
                    if self.blocked_by_readers(rank, i, slice).is_some() {
                        return;
                    }
                    let state = &mut self.states[g as usize];
                    let value = state.hand.take().expect("gathered");
                    state.computed += 1;
                    self.touch(rank, at, slice, true);
                    self.write(rank, at, slice, value);
                    self.give_back(rank, g, slice, value);
                    if step.send.is_empty() {
                        self.states[g as usize].released += 1;
                    }
                    self.wake_dependents(g);
                    self.offer(rank, g);
                }
            }
        }
    }

    /// The result of a slice, if all its operands and all loans that it is written into are there.
    fn combine(&mut self, rank: Rank, g: u32, slice: usize) -> Option<Valued> {
        let net = self.net;
        let step = net.step(g);
        for k in self.states[g as usize].gathered.len()..step.operands.len() {
            let (id, hops) = self.operand(rank, g, k, slice)?;
            let state = &mut self.states[g as usize];
            state.gathered.push(id);
            state.hops = state.hops.max(hops);
        }
        if self.missing_loan(rank, g, slice).is_some() {
            return None;
        }
        let state = &mut self.states[g as usize];
        let id = self.memory.values.combine(&state.gathered, step.finish);
        state.gathered.clear();
        Some((id, std::mem::take(&mut state.hops)))
    }

    /// Offers the borrower every slice of a loan that no earlier step uses any more.
    fn lend(&mut self, rank: Rank, g: u32, loan: Loan) {
        let (_, i) = self.net.place(g);
        loop {
            let slice = self.states[g as usize].offered;
            if slice == self.mode.slices || self.blocked_at_start(rank, i, slice).is_some() {
                return;
            }
            self.touch(rank, loan.read, slice, false);
            self.touch(rank, loan.write, slice, true);
            for (at, writes) in cells(loan) {
                let cell = self.memory.index(rank, at, slice);
                self.lent.entry(cell).or_default().push((loan.to, writes));
            }
            self.states[g as usize].offered += 1;
            self.wake_receiver(rank * self.net.n + loan.to);
        }
    }

    /// The first rank whose loan of this slice the step must still wait for.
    fn missing_loan(&self, rank: Rank, g: u32, slice: usize) -> Option<Rank> {
        let mut borrows = self.net.borrows[g as usize].iter();
        borrows.find(|&&(from, message)| self.lender(from, rank, message, slice).is_none()).map(|b| b.0)
    }

    /// The step that lends this slice of a message of the link, if the slice is offered and next on the link.
    fn lender(&self, from: Rank, to: Rank, message: u32, slice: usize) -> Option<u32> {
        let head = &self.links[from * self.net.n + to];
        if (head.message, head.slice) != (message as usize, slice) || !head.stored.is_empty() {
            return None;
        }
        let lender = self.net.sender(from, to, message);
        let offered = self.states[lender as usize].offered;
        let is_offered = if self.mode.whole { offered == self.mode.slices } else { offered > slice };
        is_offered.then_some(lender)
    }

    /// Writes a step's result into the loans that its `into` names, and gives back this slice of all loans that it borrows.
    fn give_back(&mut self, rank: Rank, g: u32, slice: usize, value: Valued) {
        let net = self.net;
        for &(from, message) in &net.borrows[g as usize] {
            let link = from * net.n + rank;
            let lender = net.sender(from, rank, message);
            let Some(loan) = net.step(lender).loan else { continue };
            if net.step(g).into.contains(&from) {
                self.write(from, loan.write, slice, (value.0, value.1 + 1));
            }
            for (at, writes) in cells(loan) {
                let cell = self.memory.index(from, at, slice);
                let Some(holders) = self.lent.get_mut(&cell) else { continue };
                if let Some(k) = holders.iter().position(|holder| *holder == (rank, writes)) {
                    holders.swap_remove(k);
                }
                if holders.is_empty() {
                    self.lent.remove(&cell);
                }
            }
            self.next_slice(link);
            let is_last = slice + 1 == self.mode.slices;
            if !self.mode.whole || is_last {
                let state = &mut self.states[lender as usize];
                (state.computed, state.released) = (slice + 1, slice + 1);
                self.wake_dependents(lender);
            }
            self.store(link);
            self.wake_receiver(link);
        }
    }

    /// Operand k, if it is there: our own memory, or the message or the loan at the head of its link.
    fn operand(&mut self, rank: Rank, g: u32, k: usize, slice: usize) -> Option<Valued> {
        let net = self.net;
        let from = match net.step(g).operands[k] {
            Operand::Own(at) => {
                self.touch(rank, at, slice, false);
                return Some(self.read(rank, at, slice));
            }
            Operand::Lent(from) => {
                let lender = self.lender(from, rank, net.ordinal[g as usize][k], slice)?;
                let (id, hops) = self.read(from, net.step(lender).loan?.read, slice);
                return Some((id, hops + 1));
            }
            Operand::Recv(from) => from,
        };
        let link = from * net.n + rank;
        if self.mode.eager {
            // The link stores slices in order: the one in front is ours if its number on the link is.
            let l = &mut self.links[link];
            let front = l.message * self.mode.slices + l.slice - l.stored.len();
            let ours = net.ordinal[g as usize][k] as usize * self.mode.slices + slice;
            let value = if front == ours { l.stored.pop_front()? } else { return None };
            self.wake_receiver(link);
            return Some(value);
        }
        let head = &self.links[link];
        if (head.message, head.slice) != (net.ordinal[g as usize][k] as usize, slice) {
            return None;
        }
        self.take(link)
    }

    /// Takes the next slice of the message at the head of a link from its sender, if it is ready.
    fn take(&mut self, link: usize) -> Option<Valued> {
        let whole = self.mode.whole;
        let head = &self.links[link];
        let &(sender, _) = self.net.sends[link].get(head.message)?;
        let slice = head.slice;
        let state = &self.states[sender as usize];
        let ready = match state.holds {
            Holds::Source | Holds::Dst if whole => state.computed == self.mode.slices,
            Holds::Source | Holds::Dst => state.computed > slice,
            Holds::Hand => state.computed == slice && state.hand.is_some(),
            // A loan is borrowed, not taken.
            Holds::Loan => false,
        };
        if !ready {
            return None;
        }
        let hand = state.hand;
        self.next_slice(link);
        let (rank, _) = self.net.place(sender);
        let step = self.net.step(sender);
        let (id, hops) = match (step.holds(), &step.operands[0]) {
            (Holds::Hand, _) => hand.expect("ready"),
            (Holds::Source, &Operand::Own(at)) => {
                self.touch(rank, at, slice, false);
                self.read(rank, at, slice)
            }
            _ => {
                let at = step.dst.expect("held there");
                self.touch(rank, at, slice, false);
                self.read(rank, at, slice)
            }
        };
        let state = &mut self.states[sender as usize];
        state.untaken[slice] -= 1;
        let is_last = slice + 1 == self.mode.slices;
        if state.untaken[slice] == 0 && (!whole || is_last) {
            state.released = if whole { self.mode.slices } else { state.released + 1 };
            let hand = state.holds == Holds::Hand;
            self.wake_dependents(sender);
            if hand {
                self.wake(sender);
            }
        }
        self.wake_receiver(link);
        Some((id, hops + 1))
    }

    /// Tells the receivers of a step that it has something new to send.
    fn offer(&mut self, rank: Rank, g: u32) {
        let net = self.net;
        for &to in &net.step(g).send {
            let link = rank * net.n + to;
            self.store(link);
            self.wake_receiver(link);
        }
    }

    /// Moves a link to its next slice, as the slice at its head has been taken, or given back.
    fn next_slice(&mut self, link: usize) {
        let head = &mut self.links[link];
        head.slice += 1;
        if head.slice == self.mode.slices {
            (head.message, head.slice) = (head.message + 1, 0);
        }
    }

    /// In an eager run: stores in the link all that its sender has ready, up to the next loan.
    fn store(&mut self, link: usize) {
        while self.mode.eager
            && let Some(value) = self.take(link)
        {
            self.links[link].stored.push_back(value);
        }
    }

    /// Wakes the step that receives the next slice of a link, whether that slice is stored or not.
    fn wake_receiver(&mut self, link: usize) {
        let l = &self.links[link];
        let message = (l.message * self.mode.slices + l.slice - l.stored.len()) / self.mode.slices;
        if let Some(&g) = self.net.recvs[link].get(message) {
            self.wake(g);
        }
    }

    fn wake_dependents(&mut self, g: u32) {
        let net = self.net;
        net.dependents[g as usize].iter().for_each(|&d| self.wake(d));
    }

    fn wake(&mut self, g: u32) {
        if !std::mem::replace(&mut self.queued[g as usize], true) {
            self.work.push(g);
        }
    }

    /// To be called when a rank is about to read or write a piece of its own memory. Notes a fault if a borrower may write the piece, or
    /// if the rank is about to write what a borrower may read.
    fn touch(&mut self, rank: Rank, at: At, slice: usize, writes: bool) {
        let holders = self.lent.get(&self.memory.index(rank, at, slice));
        let holder = holders.and_then(|all| all.iter().find(|&&(_, written)| written || writes));
        if let Some(&(by, _)) = holder {
            self.held.get_or_insert(Fault::Held { rank, at, by });
        }
    }

    fn write(&mut self, rank: Rank, at: At, slice: usize, value: Valued) {
        self.hops = self.hops.max(value.1);
        let cell = self.memory.index(rank, at, slice);
        self.memory.cells[cell] = value;
    }

    fn read(&self, rank: Rank, at: At, slice: usize) -> Valued {
        self.memory.cells[self.memory.index(rank, at, slice)]
    }

    /// The earlier step of the same rank for which step `i` must wait before it gathers this slice.
    fn blocked_at_start(&self, rank: Rank, i: usize, slice: usize) -> Option<u32> {
        let program = &self.net.programs[rank];
        let base = self.net.base[rank];
        let early = program.plan.steps[i].gathers_early() && !self.mode.strict;
        let unwritten = |s: &&u32| self.states[(base + **s) as usize].computed <= slice;
        program.nodes[i]
            .after_write
            .iter()
            .find(unwritten)
            .copied()
            .or_else(|| if early { None } else { self.blocked_by_readers(rank, i, slice) })
    }

    /// The earlier step of the same rank for which step `i` must wait before it stores this slice.
    fn blocked_by_readers(&self, rank: Rank, i: usize, slice: usize) -> Option<u32> {
        let base = self.net.base[rank];
        let unread = |s: &&u32| {
            let state = &self.states[(base + **s) as usize];
            state.computed <= slice || state.released <= slice
        };
        self.net.programs[rank].nodes[i].after_read.iter().find(unread).copied()
    }

    fn wait(&self, g: u32) -> Wait {
        let (rank, i) = self.net.place(g);
        let state = &self.states[g as usize];
        let step = self.net.step(g);
        let to = |slice: usize| {
            let untaken = |&to: &Rank| {
                let link = rank * self.net.n + to;
                let mine = self.net.sends[link].iter().position(|s| s.0 == g).expect("sent there");
                (self.links[link].message, self.links[link].slice) <= (mine, slice)
            };
            On::To(step.send.iter().copied().find(untaken).unwrap_or(rank))
        };
        let slice = state.computed;
        let blocked = |slice: usize| self.blocked_at_start(rank, i, slice).map(|s| On::Step(s as usize));
        let (slice, on) = if let Some(loan) = step.loan {
            let next = state.offered;
            let is_out = if self.mode.whole { next == self.mode.slices } else { next > slice };
            (slice, if is_out { None } else { blocked(next) }.unwrap_or(On::Back(loan.to)))
        } else if slice == self.mode.slices {
            (state.released, to(state.released))
        } else if state.hand.is_some() {
            (
                slice,
                self.blocked_by_readers(rank, i, slice).map_or_else(|| to(slice), |s| On::Step(s as usize)),
            )
        } else if let Some(on) = blocked(slice).filter(|_| state.gathered.is_empty()) {
            (slice, on)
        } else {
            match step.operands.get(state.gathered.len()) {
                Some(&Operand::Recv(from)) => (slice, On::From(from)),
                Some(&Operand::Lent(from)) => (slice, On::Loan(from)),
                Some(Operand::Own(_)) => unreachable!("our own memory is there"),
                None => (slice, On::Loan(self.missing_loan(rank, g, slice).unwrap_or(rank))),
            }
        };
        Wait { rank, step: i, slice, on }
    }
}

/// The chunks of the lender's memory that a loan covers, each once, and whether the borrower may write it.
fn cells(loan: Loan) -> impl Iterator<Item = (At, bool)> {
    let only_read = (loan.read != loan.write).then_some((loan.read, false));
    only_read.into_iter().chain([(loan.write, true)])
}
