//! What a machine puts on a device's stream: the same as [`super::kernel`] does on the host, on the device's addresses.
//!
//! A hand is as long as its chunk: nothing of it is used twice, so a result can be lent to peers from there.

use allstream_kernels::cuda::{self, Launch};

use super::{Context, Machine};
use crate::error::Error;
use crate::exec::device::DeviceOp;
use crate::exec::operation::Reduction;
use crate::exec::port::{Payload, Port};
use crate::link::waits::{Wait, kept};
use crate::mem::device::DeviceBuf;
use crate::plan::{INPUT, OUTPUT, Operand, SCRATCH};

/// Device memory of the machine's, for one part. It goes back to the pool in the stream's order.
#[derive(Default)]
pub(super) struct OnDevice {
    begun: bool,
    scratch: Option<DeviceBuf<u8>>,
    scaled: Option<DeviceBuf<u8>>,
    /// By step.
    hands: Vec<Option<DeviceBuf<u8>>>,
    /// Of a fused operation: inputs that peers have lent, and inputs with outputs; by rank.
    pub(super) inputs: Vec<Option<u64>>,
    pub(super) lent: Vec<Option<(u64, u64)>>,
    pub(super) launched: bool,
}

fn address(buf: &DeviceBuf<u8>) -> *mut u8 {
    std::ptr::without_provenance_mut(buf.as_ptr() as usize)
}

impl OnDevice {
    /// Whether a limit is there: always, but in builds for tests.
    pub(super) fn keeps(&self, wait: Wait) -> bool {
        !self.begun || kept(wait)
    }

    /// Gives the memory back.
    pub(super) fn clear(&mut self) {
        if !self.begun && self.lent.is_empty() {
            return;
        }
        let OnDevice { scratch, scaled, hands, .. } = std::mem::take(self);
        if !kept(Wait::Memory) {
            scratch
                .into_iter()
                .chain(scaled)
                .chain(hands.into_iter().flatten())
                .for_each(DeviceBuf::replaced);
        }
    }

    pub(super) fn scratch(&self) -> Option<*mut u8> {
        self.scratch.as_ref().map(address)
    }

    pub(super) fn scaled(&self) -> Option<*mut u8> {
        self.scaled.as_ref().map(address)
    }
}

/// What no kernel does.
fn unsupported(what: &str) -> Error {
    Error::system("run a collective on a device", format!("there is no kernel for {what} (a bug)"))
}

impl Machine {
    /// Before the first step: its memory, and the scaled input.
    pub(super) fn prepare_on_device(&mut self, c: Context<'_>) -> Result<(), Error> {
        let (part, Some(device)) = (c.part, &c.op.device) else { return Ok(()) };
        if std::mem::replace(&mut self.on_device.begun, true) {
            return Ok(());
        }
        let (plan, unit, stream) = (&part.program.plan, part.dtype.size(), device.stream());
        if self.part == 0 {
            device.begin()?;
        }
        self.on_device.hands.resize_with(plan.steps.len(), || None);
        if plan.slots.len() > usize::from(SCRATCH) {
            self.on_device.scratch = Some(DeviceBuf::raw(stream, part.total(SCRATCH) * unit)?);
        }
        let (Some(_), Some(factor)) = (self.scaled.take(), c.op.scale) else { return Ok(()) };
        let len = part.total(if part.is_in_place() { OUTPUT } else { INPUT });
        // A rank that only gives (to the root of a reduce, say) keeps its buffer as it was.
        let mut to = part.output;
        if !(part.is_in_place() && part.leaves_result(&c.op.signature, true)) {
            let copy = DeviceBuf::raw(stream, len * unit)?;
            to = address(&copy);
            self.on_device.scaled = Some(copy);
        }
        let launch = cuda::scale(
            part.dtype,
            part.input.addr() as u64,
            &[to.addr() as u64],
            len as u64,
            factor,
            stream.ctas(),
        );
        self.put(c, device, "scale the input of a collective", launch)
    }

    pub(super) fn put(
        &self,
        c: Context<'_>,
        device: &DeviceOp,
        doing: &str,
        launch: Option<Launch>,
    ) -> Result<(), Error> {
        let missing = || unsupported(&format!("{:?} on {}", c.op.reduction, c.part.dtype));
        let launch = launch.ok_or_else(missing)?;
        // SAFETY: all operands and results are chunks of the operation's buffers, by the layout, or of frames of that
        // length: of this device, or of one that it may touch (`Comm::bind_device` has seen to that). The buffers are in
        // the table until the stream has come past the operation's end, and their streams are waited for (`begin`); what
        // peers read or write meanwhile, and the machine's own steps, are ordered by the limits and by the links' events;
        // memory of the machine's goes back in this stream's order.
        unsafe { device.stream().launch(doing, &launch) }
    }

    /// Combines `m` elements of the operands into `dst` or the hand, and lends the result to the receivers.
    pub(super) fn combine_on_device(
        &mut self,
        c: Context<'_>,
        device: &DeviceOp,
        i: usize,
        (m, writable, ready): (usize, usize, bool),
        ins: &[*const u8],
        port: &mut Port,
    ) -> Result<usize, Error> {
        let program = &c.part.program;
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let to_hand = step.dst.is_none() || writable < m;
        let out = match step.dst {
            Some(at) if !to_hand => self.address(c.part, at, &node, node.got),
            _ if node.unit == 0 => std::ptr::null_mut(),
            _ => self.hand_on_device(device, i)?.wrapping_add(node.got * node.unit),
        };
        self.run_on_device(c, device, i, m, ins, out)?;
        for operand in &step.operands {
            if let Operand::Recv(from) = operand {
                port.rx(*from)?.release(m * node.unit);
            }
        }
        // From the hand it can go at once, where it goes nowhere else.
        let passes = step.dst.is_none() && ready && node.got == node.pos;
        self.gathered(program, i, m, !to_hand || passes);
        if ready && (passes || !to_hand) {
            for k in 0..step.send.len() {
                self.post(c, i, (k, node.pos, m), &Payload::Memory(out), port)?;
            }
        }
        Ok(m)
    }

    fn hand_on_device(&mut self, device: &DeviceOp, i: usize) -> Result<*mut u8, Error> {
        let node = &self.nodes[i];
        let bytes = node.len * node.unit;
        let hand = &mut self.on_device.hands[i];
        let hand = match hand {
            Some(hand) => hand,
            None => hand.insert(DeviceBuf::raw(device.stream(), bytes)?),
        };
        Ok(address(hand))
    }

    fn run_on_device(
        &self,
        c: Context<'_>,
        device: &DeviceOp,
        i: usize,
        m: usize,
        ins: &[*const u8],
        out: *mut u8,
    ) -> Result<(), Error> {
        let plan = &c.part.program.plan;
        let (node, step) = (&self.nodes[i], &plan.steps[i]);
        if node.unit == 0 {
            return Ok(());
        }
        let Reduction::Op(op) = &c.op.reduction else { return Err(unsupported("a function")) };
        let finish = c.divides(step).then_some(plan.size as u32);
        let (out, ctas) = ([out.addr() as u64], device.stream().ctas());
        let mut all = [0; cuda::MAX_INS];
        let Some(ins) = all.get_mut(..ins.len()).map(|all| {
            all.iter_mut().zip(ins).for_each(|(to, from)| *to = from.addr() as u64);
            &*all
        }) else {
            return Err(unsupported(&format!("{} operands", ins.len())));
        };
        let launch = match (ins, finish) {
            ([from], None) => cuda::copy(c.part.dtype, *from, &out, m as u64, ctas),
            _ => cuda::reduce(c.part.dtype, *op, ins, &out, m as u64, finish, ctas),
        };
        self.put(c, device, "run a step of a collective", launch)
    }

    /// Moves what the hand holds to where it belongs, or lends it to the receivers, once that may be.
    pub(super) fn empty_hand_on_device(
        &mut self,
        c: Context<'_>,
        device: &DeviceOp,
        i: usize,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let program = &c.part.program;
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let m = node.got - node.pos;
        let hand = match node.unit {
            0 => std::ptr::null_mut(),
            unit => self.hand_on_device(device, i)?.wrapping_add(node.pos * unit),
        };
        match step.dst {
            Some(dst) => {
                if self.read_limit(program, i) < node.got {
                    return Ok(false);
                }
                if node.unit > 0 {
                    let to = self.address(c.part, dst, &node, node.pos);
                    let (from, to) = (hand.addr() as u64, [to.addr() as u64]);
                    let launch = cuda::copy(c.part.dtype, from, &to, m as u64, device.stream().ctas());
                    self.put(c, device, "store a step of a collective", launch)?;
                }
            }
            None => {
                if !self.receivers_ready(c, i, port)? {
                    return Ok(false);
                }
                for k in 0..step.send.len() {
                    self.post(c, i, (k, node.pos, m), &Payload::Memory(hand), port)?;
                }
            }
        }
        self.nodes[i].pos += m;
        Ok(true)
    }
}
