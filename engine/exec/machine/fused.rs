//! An all_reduce that folds everyone's input in rank order, once, on devices that touch each other's memory: one kernel a
//! rank. Rank p folds chunk p of all inputs and writes it to all outputs, so the devices together read every input once
//! and write every output once, which is the least there is.
//!
//! A rank lends each peer the peer's chunk of its input and of its output, in one frame where they are one; the peer gives
//! them back behind its kernel, and then the rank's output is complete. In place no chunk is touched by two ranks.

use std::sync::Arc;

use allstream_kernels::cuda::{self, MAX_OUTS};

use super::frames::check_frame;
use super::{Context, Cursor, Machine, NodeRun, RECEIVER_BITS};
use crate::error::Error;
use crate::exec::device::{DeviceOp, limits};
use crate::exec::operation::Reduction;
use crate::exec::port::{Payload, Port};
use crate::link::{Frame, Header};
use crate::plan::{Layout, Rank};

/// The message that lends the input, and the one that lends the output.
const INPUT: u32 = 0;
const OUTPUT: u32 = 1;
/// Frames that lend all.
const ALL: usize = 2;

impl Context<'_> {
    /// Whether one kernel a rank does it. Such a kernel writes to memory of other ranks, which between processes only they may:
    /// a stream that let go of a dead rank goes on at a time when a survivor has its memory back. A chunk that is too long for
    /// one frame goes step by step, in slices; all ranks see the same lengths.
    pub(super) fn is_fused(&self) -> bool {
        let program = &self.part.program;
        let near = |device: &Arc<DeviceOp>| device.binding.far.is_none();
        self.op.device.as_ref().is_some_and(near)
            && program.lending.is_some()
            && program.plan.size <= MAX_OUTS
            && self.longest_chunk() <= limits().1
    }

    /// Bytes.
    fn longest_chunk(&self) -> usize {
        self.part.count.div_ceil(self.part.program.plan.size).saturating_mul(self.part.dtype.size())
    }
}

impl Machine {
    /// The first element of a rank's chunk, and its bytes.
    fn chunk_of(&self, c: Context<'_>, rank: Rank) -> (usize, usize) {
        let layout = Layout::Split { parts: c.part.program.plan.size as u32 };
        let range = layout.range(rank as u32, c.part.count);
        (range.start * c.part.dtype.size(), range.len() * c.part.dtype.size())
    }

    pub(super) fn advance_fused(
        &mut self,
        c: Context<'_>,
        device: &DeviceOp,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        let (size, rank) = (c.part.program.plan.size, c.part.program.plan.rank);
        let others = || (0..size).filter(move |peer| *peer != rank);
        let mut moved = false;
        for peer in others() {
            moved |= self.lend_all(c, peer, port)?;
        }
        if !self.on_device.launched {
            for peer in others() {
                moved |= self.borrow_all(c, peer, port)?;
            }
            if others().all(|peer| self.on_device.lent[peer].is_some()) {
                self.fold_all(c, device)?;
                for peer in others() {
                    let bytes = self.chunk_of(c, rank).1;
                    port.rx(peer)?.release(bytes);
                    self.rx[peer] = Cursor { message: 0, round: self.rounds };
                }
                (self.on_device.launched, moved) = (true, true);
            }
        }
        let given_back = others().all(|peer| self.freed[peer] == ALL);
        Ok((moved, self.on_device.launched && given_back))
    }

    fn base(&self, c: Context<'_>) -> (*const u8, *mut u8) {
        let scaled = self.on_device.scaled().filter(|_| c.op.scale.is_some());
        (scaled.map_or(c.part.input, <*mut u8>::cast_const), c.part.output)
    }

    /// Lends a peer its chunk of our memory. Whether anything was lent.
    fn lend_all(&mut self, c: Context<'_>, peer: Rank, port: &mut Port) -> Result<bool, Error> {
        let (input, output) = self.base(c);
        let (start, bytes) = self.chunk_of(c, peer);
        let mut any = false;
        while self.tx[peer].round < self.rounds
            && c.earlier.iter().all(|machine| machine.tx_done(peer))
            && port.tx(peer)?.room()?
        {
            let one = input == output.cast_const();
            let message = if one { OUTPUT } else { self.tx[peer].message };
            let at = if message == INPUT { input } else { output.cast_const() };
            let header = Header {
                comm: c.setting.comm as u32,
                op: c.op.number,
                offset: 0,
                len: u32::try_from(bytes).map_err(|_| too_long(bytes))?,
                message: self.message(message),
                signature: c.op.signature,
            };
            let receiver = peer as u32 | u32::from(self.part) << RECEIVER_BITS;
            let end = if message == INPUT { 1 } else { ALL };
            port.post(
                peer,
                header,
                &Payload::Memory(at.wrapping_add(start)),
                (c.op.number, 0, receiver, end),
            )?;
            self.tx[peer] = match message {
                INPUT => Cursor { message: OUTPUT, round: 0 },
                _ => Cursor { message: 0, round: self.rounds },
            };
            any = true;
        }
        Ok(any)
    }

    /// Looks at what a peer lends. Whether anything has come.
    fn borrow_all(&mut self, c: Context<'_>, peer: Rank, port: &mut Port) -> Result<bool, Error> {
        if self.on_device.lent[peer].is_some() || !c.earlier.iter().all(|machine| machine.rx_done(peer)) {
            return Ok(false);
        }
        let Some(frame) = port.rx(peer)?.peek(0)? else { return Ok(false) };
        check_frame(&frame, c, c.op.signature, peer)?;
        let bytes = self.chunk_of(c, c.part.program.plan.rank).1;
        let input = self.on_device.inputs[peer];
        let at = frame.data.addr() as u64;
        let message = frame.header.message;
        if frame.header.len as usize != bytes || frame.done > 0 {
            return Err(wrong(peer, &frame, bytes));
        }
        if message == self.message(INPUT) && input.is_none() {
            self.on_device.inputs[peer] = Some(at);
            // What gives it back is the other frame, behind the kernel: no rank goes on before it has both.
            port.rx(peer)?.release(bytes);
            return Ok(true);
        }
        if message != self.message(OUTPUT) {
            return Err(wrong(peer, &frame, bytes));
        }
        self.on_device.lent[peer] = Some((input.unwrap_or(at), at));
        Ok(true)
    }

    fn fold_all(&self, c: Context<'_>, device: &DeviceOp) -> Result<(), Error> {
        let plan = &c.part.program.plan;
        let (start, bytes) = self.chunk_of(c, plan.rank);
        if bytes == 0 {
            return Ok(());
        }
        let (input, output) = self.base(c);
        let ours = (input.addr() as u64 + start as u64, output.addr() as u64 + start as u64);
        let (mut ins, mut outs) = ([0; MAX_OUTS], [0; MAX_OUTS]);
        for (rank, lent) in self.on_device.lent.iter().enumerate() {
            (ins[rank], outs[rank]) = lent.unwrap_or(ours);
        }
        let Reduction::Op(op) = &c.op.reduction else {
            return Err(Error::system("run a collective on a device", "a function has no kernel (a bug)"));
        };
        let launch = cuda::reduce(
            c.part.dtype,
            *op,
            &ins[..plan.size],
            &outs[..plan.size],
            (bytes / c.part.dtype.size()) as u64,
            c.averages().then_some(plan.size as u32),
            device.stream().ctas(),
        );
        self.put(c, device, "run an all_reduce", launch)
    }

    /// What a fused operation needs besides; in `start`.
    pub(super) fn start_fused(&mut self, size: usize) {
        self.rounds = 1;
        self.freed.clear();
        self.freed.resize(size, 0);
        // Frames that come back name the first step.
        if let Some(first) = self.nodes.first_mut() {
            *first = NodeRun::default();
        }
        self.on_device.lent = vec![None; size];
        self.on_device.inputs = vec![None; size];
    }

    /// Adds the ranks that a fused operation waits for.
    pub(super) fn fused_waits_for(&self, c: &[Rank], ranks: &mut Vec<Rank>) {
        let missing = |peer: &&Rank| {
            (!self.on_device.launched && self.on_device.lent[**peer].is_none()) || self.freed[**peer] < ALL
        };
        ranks.extend(c.iter().filter(missing));
    }
}

fn too_long(bytes: usize) -> Error {
    Error::system("run an all_reduce", format!("no frame lends a chunk of {bytes} bytes (a bug)"))
}

fn wrong(peer: Rank, frame: &Frame, expected: usize) -> Error {
    let problem = format!(
        "message {} of {} bytes in an all_reduce on devices, expected one that lends {expected}",
        frame.header.message, frame.header.len
    );
    Error::Protocol { peer, problem }
}
