//! Runs all plans at once, symbolically: what [`crate::plan::compile`] says an executor does, over links
//! that store nothing.
//!
//! It is a Kahn network (each link has one sender and one receiver, in orders fixed by the plans), so the
//! outcome does not depend on the order in which steps are tried. A worklist holds the steps whose
//! circumstances have changed.

use std::collections::VecDeque;

use super::super::compile::Holds;
use super::super::{At, Operand, Rank};
use super::Memory;
use super::expr::{Id, NOTHING, Values};
use super::fault::{On, Wait};
use super::net::Net;

/// How to run.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    /// Slices in each chunk.
    pub(super) slices: usize,
    /// Links store whatever is sent, without limit.
    pub(super) eager: bool,
    /// A combining step or an early copy, too, starts only when its `dst` is free: no hand before that.
    pub(super) strict: bool,
    /// A message is sent only when all its slices are there, and released when all are taken.
    pub(super) whole: bool,
}

/// A value, and how many messages it took to make it.
pub(super) type Valued = (Id, u32);

struct State {
    holds: Holds,
    /// Slices that are done (lent: that may be read).
    computed: usize,
    /// Slices whose sends are all taken, and which are computed.
    released: usize,
    /// Operands of the slice in work.
    gathered: Vec<Id>,
    /// The longest chain of messages behind them.
    hops: u32,
    /// The result of the slice in work, when all is gathered.
    hand: Option<Valued>,
    /// Sends of each slice not yet taken.
    untaken: Vec<usize>,
}

#[derive(Default)]
struct Link {
    /// Messages taken from the sender so far, and slices of the next one.
    message: usize,
    slice: usize,
    /// With eager links: what is stored.
    stored: VecDeque<Valued>,
}

/// A run in progress.
pub(super) struct Run<'a> {
    net: &'a Net<'a>,
    mode: Mode,
    /// What memory holds.
    pub(super) memory: Memory,
    /// All values.
    pub(super) values: Values,
    states: Vec<State>,
    links: Vec<Link>,
    work: Vec<u32>,
    queued: Vec<bool>,
    /// The longest chain of messages so far.
    pub(super) hops: u32,
}

impl<'a> Run<'a> {
    /// Run to the end, or to where nothing moves.
    pub(super) fn new(net: &'a Net<'a>, mode: Mode, memory: Memory, values: Values) -> Run<'a> {
        let state = |g: u32| State {
            holds: net.step(g).holds(),
            computed: 0,
            released: 0,
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
            values,
            states: all.clone().map(state).collect(),
            links: (0..net.n * net.n).map(|_| Link::default()).collect(),
            work: all.rev().collect(),
            queued: vec![true; net.steps()],
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

    /// Do all that a step can do now.
    fn advance(&mut self, g: u32) {
        let (rank, i) = self.net.place(g);
        let step = &self.net.programs[rank].plan.steps[i];
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
                for k in state.gathered.len()..step.operands.len() {
                    let Some((id, hops)) = self.operand(rank, g, k, slice) else { return };
                    let state = &mut self.states[g as usize];
                    state.gathered.push(id);
                    state.hops = state.hops.max(hops);
                }
                let state = &mut self.states[g as usize];
                let id = self.values.combine(&state.gathered, step.finish);
                state.gathered.clear();
                state.hand = Some((id, std::mem::take(&mut state.hops)));
                if state.holds == Holds::Hand {
                    self.offer(rank, g);
                }
            }
            match step.dst {
                None => {
                    if self.states[g as usize].untaken[slice] > 0 {
                        return;
                    }
                    // Released by the last taker.
                    self.states[g as usize].hand = None;
                    self.states[g as usize].computed += 1;
                    self.wake_dependents(g);
                }
                Some(at) => {
                    if self.blocked_by_readers(rank, i, slice).is_some() {
                        return;
                    }
                    let state = &mut self.states[g as usize];
                    let value = state.hand.take().expect("gathered");
                    state.computed += 1;
                    self.hops = self.hops.max(value.1);
                    let cell = self.memory.index(rank, at, slice);
                    self.memory.cells[cell] = value;
                    if step.send.is_empty() {
                        self.states[g as usize].released += 1;
                    }
                    self.wake_dependents(g);
                    self.offer(rank, g);
                }
            }
        }
    }

    /// Operand k, if it is to be had: our own memory, or the message at the head of its link.
    fn operand(&mut self, rank: Rank, g: u32, k: usize, slice: usize) -> Option<Valued> {
        let net = self.net;
        let from = match net.step(g).operands[k] {
            Operand::Own(at) => return Some(self.read(rank, at, slice)),
            Operand::Recv(from) => from,
        };
        let link = from * net.n + rank;
        if self.mode.eager {
            // Stored in order, and popped in order: what is in front is ours if the count says so.
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

    /// Take the message at the head of a link from its sender, if it is ready.
    fn take(&mut self, link: usize) -> Option<Valued> {
        let whole = self.mode.whole;
        let head = &mut self.links[link];
        let &(sender, _) = self.net.sends[link].get(head.message)?;
        let slice = head.slice;
        let state = &self.states[sender as usize];
        let ready = match state.holds {
            Holds::Source | Holds::Dst if whole => state.computed == self.mode.slices,
            Holds::Source | Holds::Dst => state.computed > slice,
            Holds::Hand => state.computed == slice && state.hand.is_some(),
        };
        if !ready {
            return None;
        }
        head.slice += 1;
        if head.slice == self.mode.slices {
            (head.message, head.slice) = (head.message + 1, 0);
        }
        let (rank, _) = self.net.place(sender);
        let step = self.net.step(sender);
        let (id, hops) = match (state.holds, &step.operands[0]) {
            (Holds::Source, Operand::Own(at)) => self.read(rank, *at, slice),
            (Holds::Hand, _) => state.hand.expect("ready"),
            _ => self.read(rank, step.dst.expect("held there"), slice),
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

    /// A step has something new to send.
    fn offer(&mut self, rank: Rank, g: u32) {
        let net = self.net;
        for &to in &net.step(g).send {
            let link = rank * net.n + to;
            if self.mode.eager {
                while let Some(value) = self.take(link) {
                    self.links[link].stored.push_back(value);
                }
            }
            self.wake_receiver(link);
        }
    }

    /// The step that receives what is at the head of a link, or in front of its store.
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

    fn read(&self, rank: Rank, at: At, slice: usize) -> Valued {
        self.memory.cells[self.memory.index(rank, at, slice)]
    }

    /// The earlier step (of the rank) that keeps a slice from being gathered.
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

    /// The earlier step (of the rank) that keeps a slice from being stored.
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
        let (slice, on) = if slice == self.mode.slices {
            (state.released, to(state.released))
        } else if state.hand.is_some() {
            (
                slice,
                self.blocked_by_readers(rank, i, slice).map_or_else(|| to(slice), |s| On::Step(s as usize)),
            )
        } else if state.gathered.is_empty() && self.blocked_at_start(rank, i, slice).is_some() {
            (slice, On::Step(self.blocked_at_start(rank, i, slice).unwrap_or(0) as usize))
        } else {
            match step.operands[state.gathered.len()] {
                Operand::Recv(from) => (slice, On::From(from)),
                Operand::Own(_) => unreachable!("our own memory is there"),
            }
        };
        Wait { rank, step: i, slice, on }
    }

    /// What a piece of memory holds at the end.
    pub(super) fn holds(&self, rank: Rank, at: At, slice: usize) -> Id {
        self.read(rank, at, slice).0
    }
}

/// What memory holds before anything was written to it.
pub(super) const EMPTY: Valued = (NOTHING, 0);
