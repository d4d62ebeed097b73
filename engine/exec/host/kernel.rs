//! What becomes of a slice on the host: where its result goes, and the one call of the kernels that brings it there.

use allstream_kernels as kernels;

use super::Host;
use crate::error::{Error, Members};
use crate::exec::backend::{Combined, Context, Slice};
use crate::exec::lends::Fold;
use crate::exec::operation::Reduction;
use crate::exec::port::{Payload, Port};
use crate::types::Kind;

impl Host {
    /// Where the accumulator of a slice's step holds element `at` of the chunk: it stands for one slice, and `m` elements end
    /// within it.
    pub(super) fn accumulator(&mut self, slice: &Slice<'_>, at: usize) -> *mut u8 {
        self.memory.accumulator(slice.i)[slice.before(at) * slice.state.unit..].as_mut_ptr()
    }

    /// Combines a slice into `dst`, a slot on its way out, both, or the accumulator.
    pub(super) fn combine_slice(&mut self, slice: &Slice<'_>, port: &mut Port) -> Result<Combined, Error> {
        if slice.must_wait() {
            return self.accumulate(slice);
        }
        let unit = slice.state.unit;
        let mut m = slice.m;
        let lent = if slice.is_input { Some(slice.ins[0]) } else { slice.dst.map(<*mut u8>::cast_const) };
        let mut outs = [std::ptr::null_mut::<u8>(); 2];
        let (mut used, mut payload, mut in_slot) = (0, None, false);
        if let Some(dst) = slice.dst {
            outs[0] = dst;
            used = 1;
            payload = lent.map(Payload::Memory);
        }
        if slice.is_ready && (slice.dst.is_none() || needs_slot(slice, lent, port)?) {
            let is_inline = m * unit <= Port::INLINE;
            let slot = if is_inline { None } else { port.take_slot(m * unit) };
            if let Some((slot, at)) = slot {
                in_slot = true;
                outs[used] = at;
                used += 1;
                payload = Some(Payload::Slot(slot, at));
            } else if slice.dst.is_none() {
                // The link copies payloads that fit a ring's cell, so the result passes through here. Where no slot is free, only
                // what fits goes.
                if !is_inline {
                    m = Port::INLINE / unit;
                }
                outs[0] = self.inline.0.as_mut_ptr();
                (used, payload) = (1, Some(Payload::Memory(outs[0])));
            } else {
                payload = None; // stored now, sent from `dst` when a slot is free
            }
        }
        if !slice.is_ready {
            payload = None;
        }
        // Only copies whose destination nobody reads soon bypass the caches, peers included. Folds gained nothing when that was
        // measured: they wait for what they read.
        let is_final = slice.dst.is_some() && slice.c.program().nodes[slice.i].is_final;
        let stays = slice.step.send.is_empty() || in_slot || slice.is_input;
        let bypasses = self.is_bypassing && slice.is_copy() && is_final && stays;
        // Copied before its receiver is ready, the input would be read from memory twice. So the step waits for the receiver, as one
        // that only sends does; no other step waits for what it stores. Where frames are held back it must not wait.
        if bypasses && slice.is_input && !slice.is_ready && !slice.holds_back() && slice.step.send.len() == 1
        {
            return Ok(Combined::NOTHING);
        }
        if slice.is_copy() && in_slot && unit > 0 {
            // The source is in a cache when it is copied once more.
            used -= 1;
            // SAFETY: as in `run`; the slot, the last of the outs, has room for a slice.
            unsafe { port.filling.copy(slice.ins[0], outs[used], m * unit) };
        }
        run(slice, m, &outs[..used], bypasses)?;
        Ok(Combined { taken: m, is_stored: true, payload })
    }

    /// Combines a slice into its step's accumulator, if it has one.
    fn accumulate(&mut self, slice: &Slice<'_>) -> Result<Combined, Error> {
        if slice.dst.is_none() && !slice.has_accumulator() {
            return Ok(Combined::NOTHING);
        }
        let out = self.accumulator(slice, slice.state.got);
        run(slice, slice.m, &[out], false)?;
        Ok(Combined { taken: slice.m, is_stored: false, payload: None })
    }
}

/// Whether a receiver cannot read the result where it is stored.
fn needs_slot(slice: &Slice<'_>, lent: Option<*const u8>, port: &mut Port) -> Result<bool, Error> {
    let (at, bytes) = (lent.unwrap_or(std::ptr::null()), slice.m * slice.state.unit);
    if bytes <= Port::INLINE {
        return Ok(false);
    }
    for &peer in &slice.step.send {
        if port.tx(peer)?.needs_slot(at, bytes) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Combines, or copies, `m` elements of the operands into `outs`.
fn run(slice: &Slice<'_>, m: usize, outs: &[*mut u8], bypasses: bool) -> Result<(), Error> {
    let (c, ins, bytes) = (slice.c, slice.ins, m * slice.state.unit);
    if slice.state.unit == 0 || outs.is_empty() {
        return Ok(());
    }
    // SAFETY: every operand has `m` elements readable: our own chunks by the layout (the table owns the buffers), frames by
    // what has come of them. Outs have room: `dst` by the layout, slots, accumulators and inline room by their size. An out is
    // either equal to an operand (in place) or disjoint from all: chunks of a layout do not overlap, and staging belongs to this
    // frame alone.
    unsafe {
        if bypasses {
            kernels::copy_streaming(ins[0], outs[0], bytes);
        } else if slice.is_copy() {
            if ins[0] != outs[0].cast_const() {
                kernels::copy(ins[0], outs, bytes);
            } else if outs.len() > 1 {
                kernels::copy(ins[0], &outs[1..], bytes);
            }
        } else {
            match &c.op.reduction {
                Reduction::Op(op) => {
                    kernels::reduce(c.part.dtype, *op, ins, outs, m, c.divisor(slice.step));
                }
                Reduction::Function(function) => {
                    if !function.combine(ins, outs, m) {
                        return Err(failed(c, function.name()));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Folds `m` elements of all ranks' inputs into all ranks' outputs, of which the first so many are written past the caches.
pub(super) fn fold(fold: &Fold<'_>, m: usize, all: &[*mut u8], bypassing: usize) -> Result<(), Error> {
    let Fold { c, step, ins, .. } = *fold;
    let (streamed, outs) = all.split_at(bypassing);
    let divisor = c.divisor(step);
    // SAFETY: `m` elements are inside our chunk of every rank's buffers: of ours, which the table owns, and of what peers lend,
    // which they have just been seen not to take back, under the memory lock where they are in this process (`LinkRx::borrow` has
    // checked the rest). Each rank's input and output are equal or disjoint, those of two ranks are disjoint, and by the protocol
    // this rank alone touches this chunk of them now.
    unsafe {
        match &c.op.reduction {
            Reduction::Op(op) if streamed.is_empty() => {
                kernels::reduce(c.part.dtype, *op, ins, outs, m, divisor);
            }
            Reduction::Op(op) => {
                kernels::reduce_streaming(c.part.dtype, *op, ins, outs, streamed, m, divisor);
            }
            Reduction::Function(function) => {
                if !function.combine(ins, all, m) {
                    return Err(failed(c, function.name()));
                }
            }
        }
    }
    Ok(())
}

/// A function of the user's has panicked.
fn failed(c: Context<'_>, name: &str) -> Error {
    let kind = c.op.signature.collective();
    Error::Function {
        call: kind.map_or("a reduction", Kind::name).into(),
        name: name.into(),
        rank: c.program().plan.rank,
        members: Members::default(),
    }
}
