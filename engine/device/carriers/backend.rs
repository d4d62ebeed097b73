//! The memory of a CUDA device as a backend of plans: where the host's backend computes at once, this one has a kernel put on the rank's
//! stream, with addresses of the device.
//!
//! An accumulator is as long as its step's chunk. No place in it is used twice, so a result can be lent to peers where it lies in the accumulator.

use std::sync::Arc;

use allstream_cuda_kernels::{self as cuda, Launch, MAX_OUTS};

use crate::device::DeviceStream;
use crate::device::operation::{Binding, Folds, limits};
use crate::device::workspace::{ALIGN, Workspace, needs};
use crate::error::Error;
use crate::exec::backend::{
    Agreement, Backend, Combined, Context, Fold, Lends, LentSlot, Prepared, Reach, Slice, Slicing, base_of,
};
use crate::exec::{Operation, Part, Payload, Port, Reduction};
use crate::link;
use crate::link::waits::{Wait, kept};
use crate::plan::{INPUT, Lending, OUTPUT, Operand, Program, SCRATCH, Slot};

/// The backend of one part that runs on a device. What the part needs beside the user's buffers is a region of the operation's workspace.
pub(super) struct Cuda {
    binding: Arc<Binding>,
    is_prepared: bool,
    region: Option<Region>,
    scratch: Option<*mut u8>,
    scaled: Option<*mut u8>,
    /// By step of the plan: where its accumulator begins, once it has one.
    accumulators: Vec<Option<*mut u8>>,
}

// SAFETY: the pointers are addresses of a device's memory, which the host never follows and which are tied to no thread. All else is Send.
unsafe impl Send for Cuda {}

/// A part's region of the operation's workspace, which is given back when this is dropped.
struct Region {
    of: Arc<Workspace>,
    start: u64,
    next: u64,
    end: u64,
}

impl Region {
    /// Takes the next `bytes` bytes. `None`: so many are not left.
    fn take(&mut self, bytes: usize) -> Option<*mut u8> {
        let at = self.next.next_multiple_of(ALIGN);
        self.next = at.checked_add(bytes as u64).filter(|end| *end <= self.end)?;
        Some(std::ptr::without_provenance_mut(at as usize))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.of.give_back(self.start);
    }
}

/// The error for something that this backend cannot do, and that nobody should have asked of it.
fn unsupported(what: &str) -> Error {
    Error::system("run a collective on a device", format!("it does not support {what} (a bug)"))
}

/// Has a kernel put on the rank's stream.
fn launch(
    binding: &Binding,
    c: Context<'_>,
    doing: &'static str,
    launch: Option<Launch>,
) -> Result<(), Error> {
    let missing = || unsupported(&format!("{:?} on {}", c.op.reduction, c.part.dtype));
    let launch = launch.ok_or_else(missing)?;
    let stream = binding.ours.stream.clone();
    // SAFETY: by the layout, every operand and every result is a chunk of one of the operation's buffers or of the part's own memory, or it
    // lies in a frame or a loan that is as long. All of it is memory of this device, or of one that this device may touch, as `Comm::bind_device`
    // has checked. The in-flight table owns the buffers until the streams of all ranks have passed the operation's end. This stream waits for
    // the streams that used the buffers before (`DeviceOp::begin`, `DeviceOp::awaits_input`), and the links order it with the streams of peers
    // that read or write the same memory (`links/`). The part's other steps, and later parts that get its region of the workspace, come on this
    // same stream. Once the communicator has failed, either the command is not carried out, or whoever gives buffers back waits until it has
    // been (`Binding::is_touched`).
    let put = move || unsafe { stream.launch(doing, &launch) };
    let operation = binding.current();
    binding.ours.commands.put(move || {
        operation.map_or(Ok(()), |operation| operation.awaits_input())?;
        put()
    });
    Ok(())
}

impl Cuda {
    pub(super) fn new(binding: Arc<Binding>) -> Cuda {
        let (region, scratch, scaled, accumulators) = (None, None, None, Vec::new());
        Cuda { binding, is_prepared: false, region, scratch, scaled, accumulators }
    }

    /// Takes `bytes` bytes of the part's region. Null for 0 bytes.
    fn get(&mut self, bytes: usize) -> Result<*mut u8, Error> {
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let short = || unsupported("a part that needs so much memory");
        self.region.as_mut().and_then(|region| region.take(bytes)).ok_or_else(short)
    }

    /// The rank's stream, on which the work is put.
    fn stream(&self) -> &DeviceStream {
        &self.binding.ours.stream
    }

    /// The address of element `at` in the accumulator of the slice's step. The accumulator is made when it is first asked for.
    fn accumulator(&mut self, slice: &Slice<'_>, at: usize) -> Result<*mut u8, Error> {
        let state = &slice.state;
        if state.unit == 0 {
            return Ok(std::ptr::null_mut());
        }
        let start = match self.accumulators[slice.i] {
            Some(start) => start,
            None => {
                let start = self.get(state.len * state.unit)?;
                *self.accumulators[slice.i].insert(start)
            }
        };
        Ok(start.wrapping_add(at * state.unit))
    }

    /// Scales the input: in place where the operation is in place and leaves a result on this rank, else into a copy.
    fn scale(&mut self, c: Context<'_>, factor: f64) -> Result<(), Error> {
        let (part, unit) = (c.part, c.part.dtype.size());
        let len = part.total(if part.is_in_place() { OUTPUT } else { INPUT });
        // A rank that only gives its input (to the root of a reduce, say) keeps its buffer as it was.
        let mut to = part.output;
        if !(part.is_in_place() && part.leaves_result(&c.op.signature, true)) {
            to = self.get(len * unit)?;
            self.scaled = Some(to);
        }
        let (from, to) = (part.input.addr() as u64, [to.addr() as u64]);
        let kernel = cuda::scale(part.dtype, from, &to, len as u64, factor, self.stream().ctas());
        launch(&self.binding, c, "scale the input of a collective", kernel)
    }

    /// Has the operands of a slice combined into `out`.
    fn run(&self, slice: &Slice<'_>, out: *mut u8) -> Result<(), Error> {
        if slice.state.unit == 0 {
            return Ok(());
        }
        let (c, m) = (slice.c, slice.m as u64);
        let Reduction::Op(op) = &c.op.reduction else { return Err(unsupported("a function")) };
        let (out, ctas) = ([out.addr() as u64], self.stream().ctas());
        let mut all = [0; cuda::MAX_INS];
        let ins = addresses(slice.ins, &mut all)?;
        let kernel = match (ins, c.divisor(slice.step)) {
            ([from], None) => cuda::copy(c.part.dtype, *from, &out, m, ctas),
            (_, divisor) => cuda::reduce(c.part.dtype, *op, ins, &out, m, divisor, ctas),
        };
        launch(&self.binding, c, "run a step of a collective", kernel)
    }
}

/// Writes the pointers, as addresses of the device, to the beginning of `all`, and returns that part of it.
fn addresses<'a>(from: &[*const u8], all: &'a mut [u64]) -> Result<&'a [u64], Error> {
    let few = || unsupported(&format!("{} operands", from.len()));
    let to = all.get_mut(..from.len()).ok_or_else(few)?;
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.addr() as u64);
    Ok(to)
}

impl Backend for Cuda {
    /// No call takes long: each only puts work on a stream.
    const TAKES_TIME: bool = false;
    const SENDS_INPUT: bool = false;
    const IS_ALIGNED: bool = true;

    fn fresh(&self) -> Cuda {
        Cuda::new(self.binding.clone())
    }

    fn slicing(&self, _: &Program) -> Slicing {
        Slicing::by(limits().0)
    }

    fn begin(&mut self, _: Context<'_>) {}

    fn end(&mut self) {
        if self.is_prepared {
            *self = self.fresh();
        }
    }

    fn prepare(&mut self, c: Context<'_>, _: bool) -> Result<Prepared, Error> {
        if std::mem::replace(&mut self.is_prepared, true) {
            return Ok(Prepared::Ready);
        }
        let plan = &c.program().plan;
        self.accumulators.resize_with(plan.steps.len(), || None);
        let bytes = self.binding.needs(c.op, c.part);
        if bytes > 0 {
            let operation = self.binding.current();
            let workspace = operation.as_ref().and_then(|operation| operation.workspace());
            let start = workspace.and_then(|workspace| workspace.take(bytes));
            let (of, start) = workspace.cloned().zip(start).ok_or_else(|| unsupported("so much memory"))?;
            self.region = Some(Region { of, start, next: start, end: start + bytes as u64 });
        }
        let scratch = c.part.total(SCRATCH) * c.part.dtype.size();
        if plan.slots.len() > usize::from(SCRATCH) && scratch > 0 {
            self.scratch = Some(self.get(scratch)?);
        }
        c.factor().map_or(Ok(()), |factor| self.scale(c, factor))?;
        Ok(Prepared::Ready)
    }

    fn base(&self, part: &Part, slot: Slot) -> *mut u8 {
        base_of(part, slot, self.scaled, self.scratch.unwrap_or(std::ptr::null_mut()))
    }

    fn keeps(&self, wait: Wait) -> bool {
        !self.is_prepared || kept(wait)
    }

    fn combine(&mut self, slice: &Slice<'_>, _: &mut Port) -> Result<Combined, Error> {
        let state = &slice.state;
        let (out, is_dst) = match slice.dst {
            Some(dst) if slice.is_writable => (dst, true),
            _ => (self.accumulator(slice, state.got)?, false),
        };
        self.run(slice, out)?;
        // A result that has no place on this rank can be sent from the accumulator at once, if all before it was sent.
        let passes = slice.dst.is_none() && slice.is_ready && state.got == state.pos;
        let payload = (slice.is_ready && (passes || is_dst)).then_some(Payload::Memory(out));
        Ok(Combined { taken: slice.m, is_stored: is_dst || passes, payload })
    }

    fn store(&mut self, slice: &Slice<'_>) -> Result<(), Error> {
        let Some(dst) = slice.dst.filter(|_| slice.state.unit > 0) else { return Ok(()) };
        let from = self.accumulator(slice, slice.state.pos)?.addr() as u64;
        let (c, to) = (slice.c, [dst.addr() as u64]);
        let ctas = self.stream().ctas();
        let kernel = cuda::copy(c.part.dtype, from, &to, slice.m as u64, ctas);
        launch(&self.binding, c, "store a step of a collective", kernel)
    }

    fn send_accumulated(&mut self, slice: &Slice<'_>, _: &mut Port) -> Result<(usize, Payload), Error> {
        let from = self.accumulator(slice, slice.state.pos)?.cast_const();
        Ok((slice.m, Payload::Memory(from)))
    }

    /// Links between devices lend memory where it lies, and never ask for staging slots: nobody calls this.
    unsafe fn fill_slot(&mut self, _: *const u8, _: *mut u8, _: usize, _: &mut Port) {}
}

/// How the memory of devices of one host is lent: where it lies.
#[derive(Clone)]
pub(super) struct CudaLoans {
    binding: Arc<Binding>,
}

impl CudaLoans {
    pub(super) fn new(binding: &Arc<Binding>) -> CudaLoans {
        CudaLoans { binding: binding.clone() }
    }

    /// The rank's stream, on which the work is put.
    fn stream(&self) -> &DeviceStream {
        &self.binding.ours.stream
    }
}

impl Binding {
    /// Whether all ranks can lend each other the memory of a part, so that one kernel can fold what they lend. Otherwise the part runs by its steps.
    fn lends(&self, part: &Part, lending: &Lending) -> bool {
        let size = lending.plan.size;
        let longest = part.count.div_ceil(size).saturating_mul(part.dtype.size());
        let has_words = || self.all.iter().flatten().all(|device| device.has_words());
        let bytes = part.count.saturating_mul(part.dtype.size());
        self.folds_at_once(bytes) && size <= MAX_OUTS && longest <= limits().1 && has_words()
    }

    /// Which parts of an operation are folded: those whose memory all ranks can lend each other ([`lends`](Self::lends)).
    pub(crate) fn folds(&self, operation: &mut Operation) -> Folds {
        let mut folds = Folds::default();
        let (scale, reduction) = (operation.scale, operation.reduction.clone());
        let parts = operation.parts.all();
        let mut others = 0;
        for part in &*parts {
            match part.program.lending.as_ref().filter(|lending| self.lends(part, lending)) {
                Some(lending) => folds.add(lending),
                None => others += 1,
            }
        }
        // Between processes it is the rank's own stream that says when what the rank lends is ready, not the caller's.
        folds.are_all = folds.are_any() && others == 0 && self.far.is_none();
        folds.are_one = folds.are_all && parts.len() == 1;
        folds.may_be_for_all = folds.are_one && self.has_leader();
        let is_scaled = parts.iter().any(|part| part.factor(scale, &reduction).is_some());
        folds.own_work_is_lent = is_scaled || self.far.is_some();
        folds
    }

    /// Bytes of a workspace that a part needs.
    pub(super) fn needs(&self, op: &Operation, part: &Part) -> usize {
        let lends = part.program.lending.as_ref().is_some_and(|lending| self.lends(part, lending));
        let scaled = part.factor(op.scale, &op.reduction).is_some();
        // Each step's accumulator, the scratch memory, the scaled copy and the region itself begin at a multiple of `ALIGN`.
        needs(part.kept_on_device(scaled, lends), part.program.plan.steps.len() + 3)
    }
}

impl Lends for CudaLoans {
    /// Ranks in one process lend each other memory for parts of any size; ranks in several processes only for large ones, as the kernel that folds
    /// is then put on a stream only when all ranks are ready (`device/links/ipc.rs`). A part whose chunks are longer than a frame can lend
    /// ([`limits`]) runs by its steps, in slices. So does every part in a group that is too large for one kernel ([`MAX_OUTS`]), or that has a device
    /// without words (between processes every device has words: `comm/reach.rs`). All ranks decide alike: they see the same lengths and know where
    /// all devices are.
    fn begin(&mut self, c: Context<'_>, lending: &Lending) -> Agreement {
        let is_known = || self.binding.current().is_some_and(|operation| operation.is_folded());
        match self.binding.lends(c.part, lending) && is_known() {
            true => Agreement::Known,
            false => Agreement::Steps,
        }
    }

    fn reach(&self, _: Context<'_>, _: usize, _: &link::Loan, _: &mut Port) -> Result<Reach, Error> {
        Ok(Reach::InPlace)
    }

    fn free_slots(&self, _: &Port) -> usize {
        0
    }

    fn hold_slot(&self, _: &mut Port) -> Option<LentSlot> {
        None
    }

    /// As [`Cuda::fill_slot`].
    unsafe fn fill(&mut self, _: *const u8, _: *mut u8, _: usize, _: &mut Port) {}

    /// As [`Cuda::fill_slot`].
    unsafe fn empty(&mut self, _: &Part, _: *const u8, _: *mut u8, _: usize) {}

    fn before_lending(
        &mut self,
        c: Context<'_>,
        lending: &Lending,
        base: &dyn Fn(Slot) -> *mut u8,
    ) -> Result<(), Error> {
        let nowhere = || unsupported("an operation that was not begun");
        let operation = self.binding.current().ok_or_else(nowhere)?;
        if !operation.is_for_all() {
            return Ok(());
        }
        let step = lending.fold.map(|i| &lending.plan.steps[i]).ok_or_else(nowhere)?;
        let own = step.operands.iter().find_map(|operand| match operand {
            Operand::Own(at) => Some(at.slot),
            _ => None,
        });
        let (input, output) = own.zip(step.dst.map(|at| at.slot)).ok_or_else(nowhere)?;
        let Reduction::Op(op) = c.op.reduction else { return Err(unsupported("a function")) };
        let (dtype, count, divisor) = (c.part.dtype, c.part.count as u64, c.divisor(step));
        let fold = move |ins: &[u64], outs: &[u64], ctas| {
            let launch = cuda::reduce(dtype, op, ins, outs, count, divisor, ctas);
            launch.ok_or_else(|| unsupported(&format!("{op:?} on {dtype}")))
        };
        let memory = [input, output].map(|slot| base(slot).addr() as u64);
        operation.arrives(c.op.signature, memory, fold);
        Ok(())
    }

    /// Has one kernel put on the stream, which folds all operands into all results.
    fn fold(&mut self, fold: &Fold<'_>, _: &Port) -> Result<usize, Error> {
        let c = fold.c;
        let operation =
            self.binding.current().ok_or_else(|| unsupported("an operation that was not begun"))?;
        if operation.is_for_all() {
            return Ok(fold.m); // the rank that arrives last launches it for all
        }
        let Reduction::Op(op) = &c.op.reduction else { return Err(unsupported("a function")) };
        let (mut all_ins, mut all_outs) = ([0; cuda::MAX_INS], [0; MAX_OUTS]);
        let ins = addresses(fold.ins, &mut all_ins)?;
        let outs = all_outs.get_mut(..fold.outs.len()).ok_or_else(|| unsupported("so many results"))?;
        outs.iter_mut().zip(fold.outs).for_each(|(to, out)| *to = out.at.addr() as u64);
        let ctas = self.stream().ctas();
        let divisor = c.divisor(fold.step);
        let kernel = cuda::reduce(c.part.dtype, *op, ins, outs, fold.m as u64, divisor, ctas);
        let launch = kernel.ok_or_else(|| unsupported(&format!("{op:?} on {}", c.part.dtype)))?;
        // SAFETY: as in `launch`. The kernel comes behind what the streams of all ranks held at their calls: `DeviceOp::fold` makes this stream
        // wait for those of this process, and the loans of other processes were seen only when their streams had come there (`links/ipc.rs`).
        operation
            .fold(fold.is_last, move |stream| unsafe { stream.launch("fold what all ranks lend", &launch) });
        Ok(fold.m)
    }
}
