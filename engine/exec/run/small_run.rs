//! [`SmallRun`]: runs a small operation, one whole step after another.
//!
//! An operation is small if it has one part and each of the part's messages goes in one frame, whose payload the link copies or this rank copies to
//! a staging slot. Then the memory that a step sends from is free as soon as the step's frames are posted, and what a step needs is there when all
//! frames that it receives have come. So a small operation needs none of the cursors with which a [`PlanRun`](super::plan_run::PlanRun) goes on with
//! many steps at a time, slice by slice; setting these up takes longer than small steps take.
//!
//! Where all ranks share memory, a step waits until there is room for its messages. This makes no ranks wait for each other: a link carries at most one
//! message for each step of the oldest operation that some rank has not finished, and it has room for so many, as the frames of earlier operations were
//! released. Other links may have no room until the receiver has opened its end, which it does when it first looks for a frame there. A rank that did one
//! step after another could do that too late. So over such links only operations of one step are small.
//!
//! Where something is not as it should be (no slot is free, a frame is only a part of a message, or is a wrong one), a `PlanRun` takes over behind the
//! steps that are done.

use super::{LinkUse, Turn};
use crate::error::Error;
use crate::exec::backend::{Agreement, Backend, Context, Lends, Slice, Slicing, StepState};
use crate::exec::operation::Operation;
use crate::exec::port::{Payload, Port};
use crate::link::region::Slot;
use crate::link::ring::CELLS;
use crate::plan::compile::{STEPWISE_OPERANDS, STEPWISE_STEPS};
use crate::plan::{At, Operand, Step};
use crate::types::Rank;

// A link of ranks that share memory has room for all messages of an operation.
const _: () = assert!(STEPWISE_STEPS as u64 <= CELLS);

/// Messages of at most so many bytes are small.
const SMALL: usize = 4 << 10;

/// Runs a small operation.
pub(super) struct SmallRun {
    /// The step that is next; those before it are done, but for frames that have to come back.
    pub(super) next: usize,
    /// A bit for each receiver of the step before: whether its frame has to come back before the operation ends, as the link moves it only while the
    /// receiver reads ([`LinkTx::arrives_unread`](crate::link::LinkTx::arrives_unread)). If there is one, a `PlanRun` waits for it.
    pub(super) held: u64,
    /// Whether all ranks share memory, over which links have room for 16 frames from the beginning.
    shares_memory: bool,
}

/// What a pass came to.
pub(super) enum SmallPass {
    /// The operation is not complete. The value says whether anything moved.
    Going(bool),
    Complete,
    /// The rest of the operation is for a [`PlanRun`](super::plan_run::PlanRun).
    TakeOver,
    /// The rest of the operation is for a `PlanRun`, and no later operation of the communicator is for a [`SmallRun`]: a link is of the wrong kind.
    Unsuitable,
}

/// What came of a step.
enum Stepped {
    Done,
    /// A frame that the step receives has not come, or a link has no room for what it sends.
    NotYet,
    /// The step is not for a [`SmallRun`].
    Irregular,
    /// No step with a message over this link is for a [`SmallRun`].
    Unsuitable,
}

/// The state of a step of which nothing is done; `None` if its chunk is empty or not small.
fn state_of(c: Context<'_>, step: &Step) -> Option<StepState> {
    let at = step.chunk()?;
    let (len, unit) = (c.part.range(at.slot, at.chunk).len(), c.part.dtype.size());
    (1..=SMALL).contains(&(len * unit)).then(|| StepState { len, unit, ..StepState::default() })
}

/// The number of step `i`'s message among those of a link, which are in the order of their steps.
fn number_of(messages: &[u32], i: usize) -> u32 {
    messages.iter().position(|step| *step as usize == i).unwrap_or_default() as u32
}

impl SmallRun {
    /// A run for the operation of this part, its only one, if it may be small. Its program is [stepwise](crate::plan::Program::stepwise), and of one step
    /// unless all ranks share memory.
    pub(super) fn new(c: Context<'_>, lends: &mut impl Lends) -> Option<SmallRun> {
        let bytes = c.part.count.saturating_mul(c.part.dtype.size());
        if bytes > SMALL || c.factor().is_some() {
            return None;
        }
        let by_steps = matches!(lends.agreement(c), Agreement::Steps);
        by_steps.then(|| SmallRun { next: 0, held: 0, shares_memory: lends.shares_memory() })
    }

    /// Does the next steps, as long as all that they receive is there.
    pub(super) fn pass<B: Backend>(
        &mut self,
        backend: &mut B,
        t: Turn<'_, impl LinkUse>,
        port: &mut Port,
    ) -> Result<SmallPass, Error> {
        let mut moved = false;
        while let Some(step) = t.c.program().plan.steps.get(self.next) {
            match self.step(backend, t, step, port)? {
                Stepped::Done => {
                    (moved, self.next) = (true, self.next + 1);
                    if self.held != 0 {
                        return Ok(SmallPass::TakeOver);
                    }
                }
                Stepped::NotYet => return Ok(SmallPass::Going(moved)),
                Stepped::Irregular => return Ok(SmallPass::TakeOver),
                Stepped::Unsuitable => return Ok(SmallPass::Unsuitable),
            }
        }
        backend.check_values(t.c.part)?;
        Ok(SmallPass::Complete)
    }

    /// Does the next step, if what it receives is there and what it sends can go now. Otherwise it changes nothing.
    #[inline]
    fn step<B: Backend>(
        &mut self,
        backend: &mut B,
        t: Turn<'_, impl LinkUse>,
        step: &Step,
        port: &mut Port,
    ) -> Result<Stepped, Error> {
        let (c, i, program) = (t.c, self.next, t.c.program());
        let Some(state) = state_of(c, step) else { return Ok(Stepped::Irregular) };
        let bytes = state.len * state.unit;
        let address = |at: At| {
            let start = c.part.range(at.slot, at.chunk).start * state.unit;
            backend.base(c.part, at.slot).wrapping_add(start)
        };
        let mut ins = [std::ptr::null(); STEPWISE_OPERANDS];
        if let Some(not_done) = operands(&mut ins, t, i, step, &state, address, port)? {
            return Ok(not_done);
        }
        let dst = step.dst.map(address);
        let from = dst.map_or(ins[0], <*mut u8>::cast_const);
        let room = room(step, (from, bytes), port)?;
        match room {
            Room::Copied | Room::InSlot(..) => {}
            Room::NotYet if self.shares_memory => return Ok(Stepped::NotYet),
            Room::NotYet | Room::NoSlot => return Ok(Stepped::Irregular),
            Room::Unsuitable => return Ok(Stepped::Unsuitable),
        }
        if dst.is_some() {
            let slice = Slice {
                c,
                i,
                step,
                state,
                m: state.len,
                ins: &ins[..step.operands.len()],
                dst,
                is_writable: true,
                is_ready: false,
                is_input: false,
                slicing: Slicing::by(1),
            };
            backend.combine(&slice, port)?;
            for operand in &step.operands {
                if let Operand::Recv(from) = operand {
                    port.rx(*from)?.release(bytes);
                }
            }
        }
        let payload = match room {
            Room::InSlot(slot, place) => {
                // SAFETY: `from` is a chunk of the operation's memory, of so many bytes; the slot has room for them, and is ours.
                unsafe { backend.fill_slot(from, place, bytes, port) };
                Payload::Slot(slot, place)
            }
            _ => Payload::Memory(from),
        };
        for (k, &peer) in step.send.iter().enumerate() {
            let (header, source) = t.frame(i, &state, k, (0, state.len), number_of(&program.sends[peer], i));
            // What is sent was copied, so the step's memory is free. A slot goes back by itself when its receiver has released it.
            let is_free = port.post(peer, header, &payload, source)?;
            self.held |= u64::from(!is_free) << k;
        }
        Ok(Stepped::Done)
    }

    /// Adds the ranks whose frames the next step waits for or, if all have come, those to which it cannot send for want of room.
    pub(super) fn waiting_for(&self, op: &Operation, port: &mut Port, ranks: &mut Vec<Rank>) {
        let step = op.parts.get(0).and_then(|part| part.program.plan.steps.get(self.next));
        let Some(step) = step else { return };
        let before = ranks.len();
        for operand in &step.operands {
            if let Operand::Recv(from) = operand
                && !matches!(port.rx(*from).and_then(|rx| rx.peek(0)), Ok(Some(_)))
            {
                ranks.push(*from);
            }
        }
        if ranks.len() == before {
            let is_full = |peer: &&Rank| matches!(port.tx(**peer).and_then(|tx| tx.room()), Ok(false));
            ranks.extend(step.send.iter().filter(is_full));
        }
    }
}

/// Finds step `i`'s operands. If one is not there, or not as it should be, returns what that makes of the step.
#[inline]
fn operands(
    ins: &mut [*const u8; STEPWISE_OPERANDS],
    t: Turn<'_, impl LinkUse>,
    i: usize,
    step: &Step,
    state: &StepState,
    address: impl Fn(At) -> *mut u8,
    port: &mut Port,
) -> Result<Option<Stepped>, Error> {
    for (at, operand) in ins.iter_mut().zip(&step.operands) {
        let from = match operand {
            Operand::Recv(from) => *from,
            Operand::Own(own) => {
                *at = address(*own).cast_const();
                continue;
            }
            Operand::Lent(_) => return Ok(Some(Stepped::Irregular)),
        };
        // A link that is a stream of bytes brings what it can straight to its place.
        if port.rx(from)?.is_byte_stream() {
            return Ok(Some(Stepped::Unsuitable));
        }
        let message = t.message(number_of(&t.c.program().recvs[from], i));
        *at = match t.next_of_steps(from, t.c.signature(i, state), port)? {
            None => return Ok(Some(Stepped::NotYet)),
            Some(frame) if frame.is_whole(message, state.len * state.unit) => frame.data,
            Some(_) => return Ok(Some(Stepped::Irregular)),
        };
    }
    Ok(None)
}

/// How a step's messages can go.
enum Room {
    /// Each in the ring's cell, or copied by the link; or the step sends nothing.
    Copied,
    /// In this staging slot, which is there.
    InSlot(Slot, *mut u8),
    /// A link has no room yet.
    NotYet,
    /// No slot is free.
    NoSlot,
    /// A link neither takes slots nor copies so much.
    Unsuitable,
}

/// Finds out how a step's messages can go, whose payload is so many bytes at `from`.
#[inline]
fn room(step: &Step, (from, bytes): (*const u8, usize), port: &mut Port) -> Result<Room, Error> {
    let is_long = bytes > Port::INLINE;
    for &peer in &step.send {
        let tx = port.tx(peer)?;
        // A peer of this process could read the payload where it lies, but then the operation would have to wait for that.
        if is_long && !tx.needs_slot(from, bytes) && !tx.can_lend_slots() {
            return Ok(Room::Unsuitable);
        }
        if !tx.room()? {
            return Ok(Room::NotYet);
        }
    }
    if !is_long || step.send.is_empty() {
        return Ok(Room::Copied);
    }
    Ok(port.take_slot(bytes).map_or(Room::NoSlot, |(slot, at)| Room::InSlot(slot, at)))
}
