//! How the host combines a slice: it chooses where the result goes, and calls the kernels that compute it there.

use allstream_kernels as kernels;

use super::Host;
use crate::error::{Error, Members};
use crate::exec::backend::{Combined, Context, Fold, Slice};
use crate::exec::operation::Reduction;
use crate::exec::port::{Payload, Port};
use crate::types::Kind;

impl Host {
    /// Where the accumulator of a slice's step holds element `at` of the chunk. The accumulator has room for one slice, and the slice's `m`
    /// elements end within that.
    pub(super) fn accumulator(&mut self, slice: &Slice<'_>, at: usize) -> *mut u8 {
        self.memory.accumulator(slice.i)[slice.before(at) * slice.state.unit..].as_mut_ptr()
    }

    /// Combines a slice into `dst`, a staging slot that is sent, both of these, `inline` (then it is sent in a cell), or the accumulator.
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
                // The link copies a payload that fits into a ring's cell, so the result is sent from `inline`. If no slot is free,
                // only as much is combined as fits into a cell.
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
        // Only slices that are copied bypass the caches, and only if nobody, peers included, reads the destination soon. Slices that are reduced
        // gained nothing by that when it was measured: their time goes into waiting for what they read.
        let is_final = slice.dst.is_some() && slice.c.program().nodes[slice.i].is_final;
        let stays = slice.step.send.is_empty() || in_slot || slice.is_input;
        let bypasses = self.is_bypassing && slice.is_copy() && is_final && stays;
        // If the input were copied before its receiver is ready, it would be read from memory twice. So the step waits for the receiver, as
        // a step that only sends does; no other step waits for the copy. Where frames are held back it must not wait: there
        // `is_ready` is false until enough is stored.
        if bypasses && slice.is_input && !slice.is_ready && !slice.holds_back() && slice.step.send.len() == 1
        {
            return Ok(Combined::NOTHING);
        }
        if slice.is_copy() && in_slot && unit > 0 {
            // The slot comes first: after that the source is in a cache, for the copy to `dst`.
            used -= 1;
            // SAFETY: as in `run`. `outs[used]` is the slot now, which has room for a slice.
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

/// Whether any receiver cannot read the result where it is stored, and needs it in a staging slot.
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
    // SAFETY: `m` elements of every operand can be read: of our own chunks by the layout (the table owns the buffers), of frames
    // because so much of them has come. Outs have room: `dst` by the layout, slots, accumulators and `inline` by their size. An out
    // is either equal to an operand (in place) or disjoint from all: chunks of a layout do not overlap, and a slot, an accumulator
    // or `inline` is used for this slice alone.
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

/// Folds `m` elements of all ranks' inputs into all ranks' outputs (`all`). The first `bypassing` outputs are written past the caches,
/// except by a user's function.
pub(super) fn fold(fold: &Fold<'_>, m: usize, all: &[*mut u8], bypassing: usize) -> Result<(), Error> {
    let Fold { c, step, ins, .. } = *fold;
    let (streamed, outs) = all.split_at(bypassing);
    let divisor = c.divisor(step);
    // SAFETY: `m` elements are inside our chunk of every rank's buffers. The table owns ours. Peers lend theirs, and `borrow_all` has just
    // seen that they have not taken them back: peers in this process cannot do so now, as this thread holds the memory lock; as for peers in
    // other processes, `LinkRx::borrow` has checked that the memory is in their region, which stays mapped. Each rank's input and output are
    // equal or disjoint, those of two ranks are disjoint, and by the protocol this rank alone touches this chunk of them now.
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

/// The error for a user's function that has panicked.
fn failed(c: Context<'_>, name: &str) -> Error {
    let kind = c.op.signature.collective();
    Error::Function {
        call: kind.map_or("a reduction", Kind::name).into(),
        name: name.into(),
        rank: c.program().plan.rank,
        members: Members::default(),
    }
}
