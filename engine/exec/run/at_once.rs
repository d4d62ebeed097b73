//! Small parts of one step, which are done at once: without a [`PartRun`], whose cursors take longer to set up than such a step takes.
//!
//! Such a step combines (or only copies) a chunk of the input and what peers have sent, keeps the result or sends it, or both. Each of its messages
//! goes in one frame; the frame's payload is copied by the link, or lies in a staging slot. So the operation's memory is free as soon as all is posted. A
//! [`PartRun`] takes the part where a frame has not come yet, where a link has no room, and where what was posted has to come back first.

use super::{PartRun, Turn};
use crate::error::Error;
use crate::exec::backend::{Backend, Context, Lends, Slice, Slicing, StepState};
use crate::exec::port::{Payload, Port};
use crate::link::region::Slot;
use crate::plan::compile::Holds;
use crate::plan::{At, INPUT, OUTPUT, Operand, Step};

/// Chunks of at most so many bytes are small.
const SMALL: usize = 4 << 10;
/// Such a step has at most so many operands.
const OPERANDS: usize = 4;

/// What was done of an operation at once.
pub(super) enum AtOnce {
    Nothing,
    /// All but this: what was posted from staging slots has to come back.
    Posted,
    All,
}

/// The state of a step that has done nothing, if the step is of this kind.
#[inline]
fn small(c: Context<'_>, step: &Step) -> Option<StepState> {
    let (part, program) = (c.part, c.program());
    let at = step.chunk()?;
    let (len, unit) = (part.range(at.slot, at.chunk).len(), part.dtype.size());
    if !(1..=SMALL).contains(&(len * unit)) || step.operands.len() > OPERANDS {
        return None;
    }
    let is_users = |at: &At| matches!(at.slot, INPUT | OUTPUT);
    let is_known = |operand: &Operand| match operand {
        Operand::Own(at) => is_users(at),
        Operand::Recv(_) => true,
        Operand::Lent(_) => false,
    };
    let is_held = match step.holds() {
        Holds::Source => true,
        Holds::Dst => step.dst.as_ref().is_some_and(is_users),
        Holds::Hand | Holds::Loan => false,
    };
    let is_plain = program.lending.is_none() && c.factor().is_none();
    let is_it = is_held && is_plain && step.operands.iter().all(is_known);
    is_it.then(|| StepState { len, unit, ..StepState::default() })
}

impl<B: Backend, L: Lends> PartRun<B, L> {
    /// Does all of an operation of one step, if that is small and can be done at once. `backend` has not begun any part.
    pub(super) fn at_once(
        backend: &mut B,
        c: Context<'_>,
        step: &Step,
        port: &mut Port,
    ) -> Result<AtOnce, Error> {
        let Some(state) = small(c, step) else { return Ok(AtOnce::Nothing) };
        let turn: Turn<'_, PartRun<B, L>> = Turn { c, part: 0, earlier: &[] };
        let address = |at: At| {
            let start = c.part.range(at.slot, at.chunk).start * state.unit;
            backend.base(c.part, at.slot).wrapping_add(start)
        };
        let (mut ins, bytes) = ([std::ptr::null(); OPERANDS], state.len * state.unit);
        for (at, operand) in ins.iter_mut().zip(&step.operands) {
            *at = match operand {
                Operand::Own(own) => address(*own).cast_const(),
                Operand::Lent(_) => return Ok(AtOnce::Nothing),
                Operand::Recv(from) => {
                    if port.rx(*from)?.is_byte_stream() {
                        return Ok(AtOnce::Nothing);
                    }
                    match turn.next_of_steps(*from, c.signature(0, &state), port)? {
                        Some(frame) if frame.is_whole(turn.message(0), bytes) => frame.data,
                        // The frame has not come, or not all of it; or it is the wrong one, and `PlanRun` will say what is wrong with it.
                        _ => return Ok(AtOnce::Nothing),
                    }
                }
            };
        }
        let dst = step.dst.map(address);
        let from = dst.map_or(ins[0], <*mut u8>::cast_const);
        let Some(slot) = room(step, (from, bytes), port)? else { return Ok(AtOnce::Nothing) };
        if dst.is_some() {
            let slice = Slice {
                c,
                i: 0,
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
            backend.check_values(c.part)?;
        }
        let payload = match slot {
            None => Payload::Memory(from),
            Some((slot, place)) => {
                // SAFETY: `from` is a chunk of the operation's memory, of so many bytes; the slot has room for them, and is ours.
                unsafe { backend.fill_slot(from, place, bytes, port) };
                Payload::Slot(slot, place)
            }
        };
        let mut is_free = true;
        for (k, &peer) in step.send.iter().enumerate() {
            let (header, source) = turn.frame(0, &state, k, (0, state.len), 0);
            is_free &= port.post(peer, header, &payload, source)?;
        }
        Ok(if is_free { AtOnce::All } else { AtOnce::Posted })
    }
}

/// Checks that there is room for a step's messages, whose payload is so many bytes at `from`. Returns the staging slot that they need. `Some(None)`: they
/// need none, as links copy the payload or the step sends nothing. `None`: there is no room, or a receiver is to read the payload where it lies.
#[inline]
#[allow(clippy::type_complexity)]
fn room(
    step: &Step,
    (from, bytes): (*const u8, usize),
    port: &mut Port,
) -> Result<Option<Option<(Slot, *mut u8)>>, Error> {
    for &peer in &step.send {
        let tx = port.tx(peer)?;
        if bytes > Port::INLINE && !tx.needs_slot(from, bytes) || !tx.room()? {
            return Ok(None);
        }
    }
    Ok(match bytes > Port::INLINE && !step.send.is_empty() {
        true => port.take_slot(bytes).map(Some),
        false => Some(None),
    })
}
