//! A call: its options, its checks, its submission. The collectives themselves are in [`super::collectives`] and
//! the files beside it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use super::bind::is_on_devices;
use super::memory::{Memory, RawBuffers, UNSTAGED};
use super::ordered::{Start, Stream};
use super::work::Submitted;
use crate::device::is_loss;
use crate::error::Error;
use crate::exec::carrier::Carried;
use crate::exec::{Endpoint, Key, Operation, Part, PartList, ProgramKey, Reduction, Then};
use crate::forked;
use crate::mem::{ErasedBufs, Event};
use crate::plan::{self, Algo, Env, Kind, Lending, Program, Shape};
use crate::types::{
    DType, Element, FUNCTION, Function, LIST, NO_OP, Rank, ReduceOp, Signature, Tables, VARIED, digest,
};

/// A communicator with options for the next call.
///
/// Made by [`Comm::op`](super::Comm::op), [`timeout`](super::Comm::timeout), [`algo`](super::Comm::algo),
/// [`on`](super::Comm::on), [`tag`](super::Comm::tag), and the others of that kind.
#[derive(Clone, Debug)]
#[must_use = "options do nothing without a call"]
pub struct Call<'a> {
    pub(super) side: Side<'a>,
    reduction: Reduction,
    scale: Option<f64>,
    algo: Algo,
    default_algo: Algo,
    deterministic: bool,
    pub(super) after: Option<Start>,
    pub(super) timeout: Option<Duration>,
    pub(super) tag: u32,
    pub(super) key: u64,
    /// If there is a desk, the call leaves its operation there and does not submit it.
    pub(super) desk: Option<&'a Desk>,
}

/// The endpoint of a call. On a `Comm` the lifetime is that of an exclusive borrow of the handle: as long as this lives, no other call is made.
#[derive(Clone)]
pub(super) struct Side<'a>(pub(super) &'a Arc<Endpoint>);

impl std::fmt::Debug for Side<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.config.name)
    }
}

/// A collective that is not submitted yet.
pub(super) struct Prepared {
    carried: Carried,
    after: Option<Event>,
    held: ErasedBufs,
}

/// Where a call on a node leaves the operation of each local rank, so that all are checked before the first is submitted.
#[derive(Default)]
pub(super) struct Desk(Mutex<Option<Prepared>>);

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Desk")
    }
}

impl Desk {
    pub(super) fn take(&self) -> Option<Prepared> {
        self.0.lock().take()
    }
}

impl Prepared {
    /// Submits the collective to the endpoint for which it was prepared. With `refused`, submits nothing: the buffers come back with this error.
    pub(super) fn end(self, endpoint: &Arc<Endpoint>, refused: Option<&Error>) -> Submitted {
        match refused {
            None => submitted(endpoint, endpoint.submit_collective(self.carried, self.after, self.held)),
            Some(error) => Submitted::refused(error.clone(), self.held),
        }
    }
}

/// What is called.
pub(super) struct Spec {
    pub(super) kind: Kind,
    pub(super) root: Rank,
    pub(super) count: usize,
    pub(super) in_place: bool,
    /// Where the ranks' blocks lie in the buffers, in a call with a count for each rank.
    pub(super) tables: Option<Tables>,
    /// Each rank knows only its own counts: sender and receiver compare theirs, message by message.
    pub(super) pairwise: bool,
    /// A digest of whatever else must be the same on all ranks.
    pub(super) detail: u32,
}

impl Spec {
    pub(super) fn of(kind: Kind, root: Rank, count: usize, in_place: bool) -> Spec {
        Spec { kind, root, count, in_place, tables: None, pairwise: false, detail: 0 }
    }
}

impl<'a> Call<'a> {
    pub(crate) fn new(endpoint: &'a Arc<Endpoint>, default_algo: Algo) -> Call<'a> {
        Call {
            side: Side(endpoint),
            reduction: Reduction::Op(ReduceOp::Sum),
            scale: None,
            algo: Algo::Auto,
            default_algo,
            deterministic: endpoint.deterministic.load(Ordering::Relaxed),
            timeout: None,
            after: None,
            tag: 0,
            key: 0,
            desk: None,
        }
    }

    /// The reduction (default: sum).
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.reduction = Reduction::Op(op);
        self
    }

    /// Reduces by a function of yours. All ranks must give a function of the same name: the names are compared.
    pub fn function<T: Element>(mut self, function: &Function<T>) -> Self {
        self.reduction = Reduction::Function(function.erased());
        self
    }

    /// Multiplies this rank's input by `factor` before it is summed (ranks may give different factors), as NCCL's
    /// `PreMulSum` does: in `f32` (`f64` for `f64`), rounded once to the element type. Only for sums of floats. A call
    /// out of place keeps a scaled copy of its input while it runs.
    pub fn scale(mut self, factor: f64) -> Self {
        self.scale = Some(factor);
        self
    }

    /// How long the operation may be the oldest unfinished one before the group is aborted (default: 5 minutes, or
    /// `ALLSTREAM_TIMEOUT` seconds).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The algorithm (default: chosen by size and group, or `ALLSTREAM_ALGO` where it applies). It must be the same on all ranks.
    pub fn algo(mut self, algo: Algo) -> Self {
        self.algo = algo;
        self
    }

    /// Makes each element of a result one fold over all ranks' values, in rank order: its bits then depend on these values
    /// alone, not on lengths, links or the algorithm. A named algorithm that cannot do this is refused. (Default: off,
    /// or what [`Comm::set_deterministic`](super::Comm::set_deterministic) or `ALLSTREAM_DETERMINISTIC=1` says.)
    pub fn deterministic(mut self, on: bool) -> Self {
        self.deterministic = on;
        self
    }

    /// Starts only after what `stream` holds now.
    ///
    /// If it is a [`DeviceStream`](crate::cuda::DeviceStream), the streams of device buffers wait for it; an operation on
    /// host buffers waits for it on the host.
    pub fn on(mut self, stream: &impl Stream) -> Self {
        self.after = Some(stream.start());
        self
    }

    /// Starts only after `event`.
    pub fn after(mut self, event: Event) -> Self {
        self.after = Some(Start::Host(event));
        self
    }

    /// The tag of a message (default: 0).
    pub fn tag(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }

    /// A number that must be the same on all ranks of the call (default: 0, which means no key, so count from 1). Ranks compare it, as they
    /// compare type, length and reduction, before any data is used: ranks whose keys differ get [`Error::Mismatch`] and not each other's data.
    /// Where several tasks share one communicator, a key tells apart calls that are equal otherwise: give a layer's number, a step's number,
    /// or a hash of a name.
    ///
    /// Keys below 2^32 are compared as they are. Of a larger key a 32-bit digest is compared: two such keys are taken for equal once in four
    /// billion. Where ranks also compare counts, bytes, a list's buffers or a function's name, they compare one 32-bit digest of these and of the
    /// key: calls that differ are then taken for equal once in four billion, too. The key makes no frame longer: it is part of the 24 bytes by
    /// which each frame says what was called.
    ///
    /// ```
    /// # use allstream::Comm;
    /// # fn main() -> Result<(), allstream::Error> {
    /// # let mut comm = Comm::local(1)?.remove(0);
    /// let (layer, grads) = (7, vec![0.5f32; 16]);
    /// let grads = comm.key(layer).all_reduce(grads).wait()?;
    /// # assert_eq!(grads[0], 0.5); Ok(()) }
    /// ```
    pub fn key(mut self, key: u64) -> Self {
        self.key = key;
        self
    }

    pub(super) fn size(&self) -> usize {
        self.side.0.config.size()
    }

    /// Whether no algorithm was named, by the call or by the environment.
    pub(super) fn is_free(&self) -> bool {
        self.algo == Algo::Auto && self.default_algo == Algo::Auto
    }

    pub(super) fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    pub(super) fn rank(&self) -> Rank {
        self.side.0.config.rank
    }

    /// The event that an operation on host memory waits for before it starts.
    pub(super) fn after_on_host(&self) -> Option<Event> {
        match &self.after {
            None => None,
            Some(Start::Host(event)) => Some(event.clone()),
            Some(Start::Device(event)) => Some(event.on_host()),
            Some(Start::Failed(error)) => {
                let event = Event::pending();
                event.fail(error.clone());
                Some(event)
            }
        }
    }

    /// The deadline of the operation.
    pub(super) fn deadline(&self) -> Duration {
        self.timeout.unwrap_or(self.side.0.config.timeout)
    }

    /// Whether the reduction is defined, on this type and in this collective.
    fn check_reduction(&self, kind: Kind, dtype: DType) -> Result<(), String> {
        if let Some(factor) = self.scale {
            if !matches!(self.reduction, Reduction::Op(ReduceOp::Sum)) || !kind.reduces() {
                return Err("a scale is possible only with a sum, in a collective that reduces".into());
            }
            if !dtype.scales() {
                return Err(format!("a scale ({factor}) is for floats, not for {dtype}"));
            }
        }
        if !kind.reduces() || kind == Kind::Barrier {
            return Ok(());
        }
        match &self.reduction {
            Reduction::Op(ReduceOp::Avg) if kind.is_scan() => {
                Err("a scan has no average: divide its sum by the number of ranks so far".into())
            }
            Reduction::Op(op) if !op.supports(dtype) => Err(format!("{op} is not defined on {dtype}")),
            Reduction::Function(_) if dtype == DType::Bool => {
                Err("functions are for numbers: send bool as u8".into())
            }
            Reduction::Function(f) if f.dtype() != dtype => {
                Err(format!("the function {:?} is for {}, the buffer holds {dtype}", f.name(), f.dtype()))
            }
            _ => Ok(()),
        }
    }

    /// The algorithm for a collective over `bytes` bytes of elements of this type.
    fn pick(&self, spec: &Spec, dtype: DType, bytes: usize) -> Result<Algo, String> {
        let (kind, endpoint) = (spec.kind, self.side.0);
        // A few large 8-bit floats add up to more than the type can hold. Halving all elements before they are added, as averages of `f16` do
        // (`Part::halved`), would lose too much of the small ones. So an average of 8-bit floats needs an algorithm that adds all ranks' elements in
        // one step.
        let eights =
            kind.reduces() && matches!(self.reduction, Reduction::Op(ReduceOp::Avg)) && dtype.is_float8();
        let deterministic = (self.deterministic && kind.reduces()) || eights;
        let in_order = kind.reduces() && matches!(&self.reduction, Reduction::Function(f) if !f.commutes());
        let fits = |algo| {
            (!deterministic || plan::deterministic(kind, algo))
                && (!in_order || plan::keeps_rank_order(kind, algo))
        };
        if self.algo != Algo::Auto {
            if plan::algorithms(kind).contains(&self.algo) && !fits(self.algo) {
                let algo = self.algo;
                return Err(if !deterministic || plan::deterministic(kind, algo) {
                    format!(
                        "{algo} does not keep the order of ranks, which a function that does not commute needs"
                    )
                } else if eights {
                    format!(
                        "{algo} rounds partial sums to {dtype}, which they may overflow: an average of {dtype} needs an algorithm that adds all \
                         ranks' elements in one step; name no algorithm, or direct"
                    )
                } else {
                    format!("{algo} does not fold in rank order in one step, which deterministic mode needs")
                });
            }
            return Ok(self.algo);
        }
        let there = |algo| plan::suitable(kind, algo, &shape(endpoint, spec)).is_ok();
        let default = self.default_algo;
        if default != Algo::Auto && fits(default) && there(default) {
            return Ok(default);
        }
        // The tuner has measured in host memory, not on devices. Where each rank knows only its own counts, there is no common size to look up.
        let is_known =
            |algo: &Algo| !spec.pairwise && fits(*algo) && there(*algo) && !is_on_devices(endpoint);
        Ok(endpoint.config.tuned.choose(kind, bytes).filter(is_known).unwrap_or_else(|| {
            plan::choose(kind, bytes, &Env { deterministic, in_order, ..endpoint.config.env })
        }))
    }

    /// The algorithm of one part, and the program for it.
    pub(super) fn program(
        &self,
        spec: &Spec,
        dtype: DType,
        count: usize,
    ) -> Result<(Algo, Arc<Program>), Error> {
        let (kind, bytes) = (spec.kind, count.saturating_mul(dtype.size()));
        let bytes = if spec.tables.is_some() { bytes / self.size() } else { bytes };
        let algo = self.pick(spec, dtype, bytes).map_err(|problem| Error::invalid(kind.name(), problem))?;
        Ok((algo, program(self.side.0, algo, spec)?))
    }

    fn check(&self, spec: &Spec, dtype: DType) -> Result<(), Error> {
        forked::check()?;
        self.check_root(spec)?;
        let kind = spec.kind;
        self.check_reduction(kind, dtype).map_err(|problem| Error::invalid(kind.name(), problem))
    }

    fn check_root(&self, spec: &Spec) -> Result<(), Error> {
        let (root, n) = (spec.root, self.size());
        if root < n {
            return Ok(());
        }
        let problem = format!("root {root} is not in this group of {n}; roots are 0..={}", n - 1);
        Err(Error::invalid(spec.kind.name(), problem))
    }

    /// The signature, which ranks compare before they use each other's data.
    fn signature(&self, spec: &Spec, dtype: u8, algo: Algo) -> Signature {
        let (kind, mut detail) = (spec.kind, spec.detail);
        let op = match &self.reduction {
            _ if !kind.reduces() => NO_OP,
            _ if kind == Kind::Barrier => ReduceOp::BitOr as u8,
            Reduction::Op(op) => *op as u8,
            Reduction::Function(f) => {
                detail = digest(detail, f.name().bytes());
                FUNCTION
            }
        };
        let signature = Signature {
            kind: kind as u8 | if spec.tables.is_some() { VARIED } else { 0 },
            dtype,
            op,
            algo: algo as u8,
            root: spec.root as u32,
            count: spec.count as u64,
            generation: self.side.0.config.generation,
            detail,
        };
        signature.with_key(self.key)
    }

    /// Makes an operation of its parts.
    fn operation(&self, kind: Kind, signature: Signature, parts: PartList) -> Operation {
        let reduction = match kind {
            Kind::Barrier => Reduction::Op(ReduceOp::BitOr),
            _ => self.reduction.clone(),
        };
        let operation = Operation::new(kind.name(), signature, self.deadline(), reduction, parts);
        Operation { scale: self.scale, ..operation }
    }

    /// Checks a call and makes its operation, of one part: the usual case.
    fn prepare(&self, spec: Spec, dtype: DType, (input, output): RawBuffers) -> Result<Operation, Error> {
        self.check(&spec, dtype)?;
        let (algo, program) = self.program(&spec, dtype, spec.count)?;
        let signature = self.signature(&spec, dtype as u8, algo);
        let Spec { kind, count, tables, pairwise, .. } = spec;
        let tables = tables.map(Arc::new);
        let part = Part { program, input, output, count, dtype, tables, pairwise, stated: None };
        Ok(self.operation(kind, signature, PartList::One(part)))
    }

    /// Submits a collective on `memory`, which `held` owns. If `spec` is an error, or does not suit the memory, the buffers come back with the error.
    pub(super) fn submit(
        &self,
        kind: Kind,
        spec: Result<Spec, String>,
        memory: Memory,
        held: ErasedBufs,
    ) -> Submitted {
        let (spec, dtype) = match spec.and_then(|spec| Ok((spec, memory.dtype()?))) {
            Ok(known) => known,
            Err(problem) => {
                let problem = memory.unfit().map_or(problem, str::to_owned);
                return Submitted::refused(Error::invalid(kind.name(), problem), held);
            }
        };
        let Some(ends) = memory.on_host() else {
            let varied = spec.tables.is_some();
            let prepared = self.prepare(spec, dtype, UNSTAGED);
            return self.hand_in_staged(prepared, varied, vec![memory], held);
        };
        self.hand_in(self.prepare(spec, dtype, ends).map(Carried::from), self.after_on_host(), held)
    }

    /// Submits one operation of several parts, each with its own count and its own memory.
    pub(super) fn submit_parts(
        &self,
        spec: Spec,
        parts: Result<Vec<(usize, Memory)>, String>,
        held: ErasedBufs,
    ) -> Submitted {
        let parts = match parts {
            Ok(parts) => parts,
            Err(problem) => return Submitted::refused(Error::invalid(spec.kind.name(), problem), held),
        };
        let prepare = || {
            // The list may be empty.
            self.check_root(&spec)?;
            let (mut detail, mut all) = (spec.detail, Vec::with_capacity(parts.len()));
            for (count, memory) in &parts {
                let ((input, output), count) = (memory.on_host().unwrap_or(UNSTAGED), *count);
                let dtype = memory.output.dtype;
                self.check(&spec, dtype)?;
                let (algo, program) = self.program(&spec, dtype, count)?;
                let what = [dtype as u8, algo as u8].into_iter().chain((count as u64).to_le_bytes());
                detail = digest(detail, what);
                all.push(Part {
                    program,
                    input,
                    output,
                    count,
                    dtype,
                    tables: None,
                    pairwise: false,
                    stated: None,
                });
            }
            let spec = Spec { count: parts.len(), detail, ..spec };
            let signature = self.signature(&spec, LIST, self.algo);
            Ok(self.operation(spec.kind, signature, PartList::Many(all)))
        };
        let prepared = prepare();
        if parts.iter().any(|(_, memory)| memory.on_host().is_none()) {
            let memory = parts.into_iter().map(|(_, memory)| memory).collect();
            return self.hand_in_staged(prepared, false, memory, held);
        }
        self.hand_in(prepared.map(Carried::from), self.after_on_host(), held)
    }

    /// Submits an operation of two halves: first `spec`, on elements of this type, then the parts that `then` makes from its result.
    pub(super) fn submit_then(
        &self,
        spec: Spec,
        dtype: DType,
        ends: RawBuffers,
        then: Then,
        held: ErasedBufs,
    ) -> Submitted {
        let prepared = self.prepare(spec, dtype, ends);
        let prepared = prepared.map(|operation| Operation { then: Some(then), ..operation });
        self.hand_in(prepared.map(Carried::from), self.after_on_host(), held)
    }

    pub(super) fn hand_in(
        &self,
        #[cfg_attr(
            not(any(test, feature = "testing")),
            expect(unused_mut, reason = "tests alone change it")
        )]
        mut prepared: Result<Carried, Error>,
        after: Option<Event>,
        #[cfg_attr(
            not(any(test, feature = "testing")),
            expect(unused_mut, reason = "tests alone change it")
        )]
        mut held: ErasedBufs,
    ) -> Submitted {
        #[cfg(any(test, feature = "testing"))]
        {
            prepared = self.taken_whole_on_host(prepared);
            if let (Ok(carried), None) = (&mut prepared, &after) {
                held = crate::testing::worker::carry(self.side.0, carried, held);
            }
        }
        match (prepared, self.desk) {
            (Ok(carried), Some(desk)) => {
                *desk.0.lock() = Some(Prepared { carried, after, held });
                Submitted::elsewhere()
            }
            (Ok(carried), None) => {
                submitted(self.side.0, self.side.0.submit_collective(carried, after, held))
            }
            (Err(error), _) => self.refused(error, held),
        }
    }

    /// Refuses the call. If the cause is that this rank's device is lost, also ends the communicator: this rank can no longer do its part, and
    /// the other ranks, which may have made the call already, would wait for this rank until their deadlines.
    #[cold]
    pub(super) fn refused(&self, error: Error, held: ErasedBufs) -> Submitted {
        if !is_loss(&error) {
            return Submitted::refused(error, held);
        }
        let endpoint = self.side.0;
        let error = error.of_rank(endpoint.config.rank, &endpoint.config.named());
        endpoint.fail(error.clone());
        endpoint.tell();
        Submitted::refused_by(endpoint, error, held)
    }
}

/// The error if the queue has no room for `more` operations. Asked before the parts of a call are submitted, so that all of them are submitted
/// or none. `None` for a communicator that has ended: it refuses each part with the cause of its end.
pub(super) fn no_room(endpoint: &Endpoint, call: &str, more: usize) -> Option<Error> {
    // Checked before the table of operations is locked: another thread may have held its lock at the fork, and in the child nobody releases it.
    if forked::is_forked() {
        return Some(forked::refusal());
    }
    if endpoint.health.cause().is_some() {
        return None;
    }
    let limit = endpoint.config.queue_limit;
    (endpoint.submitted.running().saturating_add(more) > limit)
        .then(|| Error::QueueFull { call: call.into(), limit })
}

/// Makes what a call returns from the outcome of its submission. A refusal gives the buffers back.
pub(super) fn submitted(endpoint: &Arc<Endpoint>, outcome: Result<Key, (Error, ErasedBufs)>) -> Submitted {
    match outcome {
        Ok(key) => Submitted::running(endpoint.clone(), key),
        Err((error, held)) => Submitted::refused_by(endpoint, error, held),
    }
}

fn shape<'a>(endpoint: &'a Endpoint, spec: &Spec) -> Shape<'a> {
    Shape {
        n: endpoint.config.size(),
        rank: endpoint.config.rank,
        root: spec.root,
        in_place: spec.in_place,
        varied: spec.tables.is_some(),
        hosts: &endpoint.config.hosts,
    }
}

/// The program for a spec and an algorithm: compiled once for each communicator, then found in the endpoint's cache.
pub(super) fn program(endpoint: &Arc<Endpoint>, algo: Algo, spec: &Spec) -> Result<Arc<Program>, Error> {
    let (kind, shape) = (spec.kind, shape(endpoint, spec));
    let wire = kind as u8 | if shape.varied { VARIED } else { 0 };
    let key = ProgramKey { kind: wire, algo: algo as u8, root: spec.root, in_place: spec.in_place };
    endpoint.programs.get(key, || {
        let plan = plan::plan(kind, algo, &shape).map_err(|e| Error::invalid(kind.name(), e.to_string()))?;
        let loans = plan::lending(kind, algo, &shape);
        #[cfg(any(test, feature = "testing"))]
        let (plan, loans) = crate::testing::faults::mutated(kind, shape.rank, (plan, loans));
        let (program, lending) = (Program::compile(&plan), loans.map(Lending::compile));
        let whole = endpoint.config.has_long_frames && plan::goes_whole(kind, algo, &shape);
        Ok(Program { lending, whole, one_fold: plan::deterministic(kind, algo), ..program })
    })
}
