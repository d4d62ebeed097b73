//! A call: its options, its checks, its submission. The collectives themselves are in [`super::collectives`] and beside.

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
    /// Where to leave what would be submitted, instead.
    pub(super) desk: Option<&'a Desk>,
}

/// The endpoint, and proof that calls on it are in order.
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

/// Where calls with several local parts leave them, so that all are looked at before the first is submitted.
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
    /// Submits it where it was prepared for; where it is refused, the buffers come back.
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
    /// The ranges of a call with a count for each rank.
    pub(super) tables: Option<Tables>,
    /// Every rank knows its own counts alone.
    pub(super) pairwise: bool,
    /// A digest of what ranks must agree on besides.
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

    /// The reduction is a function of yours. All ranks give one of the same name, which is compared.
    pub fn function<T: Element>(mut self, function: &Function<T>) -> Self {
        self.reduction = Reduction::Function(function.erased());
        self
    }

    /// Each rank's input is multiplied by this before it is summed (ranks may give different factors), as by NCCL's
    /// `PreMulSum`: in `f32` (`f64` for `f64`), rounded once to the element type. Sums of floats only; a call out of
    /// place makes a scaled copy of its input for the time that it runs.
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

    /// The algorithm (default: chosen by size and group, or `ALLSTREAM_ALGO` where it applies). The same on all ranks.
    pub fn algo(mut self, algo: Algo) -> Self {
        self.algo = algo;
        self
    }

    /// Every result is one fold over all ranks' values, in rank order: its bits then depend on nothing else, neither
    /// lengths nor links nor the algorithm. An algorithm that was named and cannot do that is refused. (Default: off,
    /// or what [`Comm::set_deterministic`](super::Comm::set_deterministic) or `ALLSTREAM_DETERMINISTIC=1` says.)
    pub fn deterministic(mut self, on: bool) -> Self {
        self.deterministic = on;
        self
    }

    /// Starts only after what `stream` holds now.
    ///
    /// After a [`DeviceStream`](crate::cuda::DeviceStream), device buffers wait on their streams, and operations on host
    /// buffers on the host.
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

    /// A number that all ranks of the call must give alike (default: 0, which is no key, so count from 1), compared as its type, length and reduction
    /// are, before any data is used: ranks whose keys differ get [`Error::Mismatch`] in place of each other's data. It tells
    /// calls apart that are equal otherwise, where several tasks share one communicator: a layer's number, a step's, a hash
    /// of a name.
    ///
    /// Keys below 2^32 are compared as they are; of longer ones 32 bits, so that two may be taken for the same once in four
    /// billion. Of a list, of bytes and of a function it is combined with what else is compared of them, with the same chance.
    /// It travels in the 24 bytes that every frame has anyway.
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

    /// What an operation on the host's memory starts after.
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
                return Err("a scale goes with a sum only".into());
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

    /// The algorithm for a collective over `bytes` of such elements.
    fn pick(&self, spec: &Spec, dtype: DType, bytes: usize) -> Result<Algo, String> {
        let (kind, endpoint) = (spec.kind, self.side.0);
        // The sum of a few of the larger numbers of an 8-bit float is out of its range, and halving them first would lose too much of the
        // smaller ones.
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
                        "{algo} does not keep the order of ranks, which a function that does not commute asks for"
                    )
                } else if eights {
                    format!(
                        "{algo} rounds sums on the way to {dtype}, whose range they may leave: an average of {dtype} is by an algorithm that adds all \
                         ranks' elements in one step; leave the algorithm to allstream, or name direct"
                    )
                } else {
                    format!(
                        "{algo} does not fold in rank order in one step, which deterministic mode asks for"
                    )
                });
            }
            return Ok(self.algo);
        }
        let default = self.default_algo;
        if default != Algo::Auto
            && fits(default)
            && plan::suitable(kind, default, &shape(endpoint, spec)).is_ok()
        {
            return Ok(default);
        }
        let there = |algo| plan::suitable(kind, algo, &shape(endpoint, spec)).is_ok();
        // The tuner has measured the host's memory, not devices', and where only ranks know their own sizes there is none.
        let known = !is_on_devices(endpoint) && !spec.pairwise;
        let tuned = endpoint.config.tuned.choose(kind, bytes).filter(|_| known);
        Ok(tuned.filter(|algo| fits(*algo) && there(*algo)).unwrap_or_else(|| {
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
        let (kind, n) = (spec.kind, self.size());
        if spec.root >= n {
            let problem = format!("root {} is not in this group of {n}; roots are 0..={}", spec.root, n - 1);
            return Err(Error::invalid(kind.name(), problem));
        }
        self.check_reduction(kind, dtype).map_err(|problem| Error::invalid(kind.name(), problem))
    }

    /// What ranks compare.
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

    /// The operation, when its parts are known.
    fn operation(&self, kind: Kind, signature: Signature, parts: PartList) -> Operation {
        let reduction = match kind {
            Kind::Barrier => Reduction::Op(ReduceOp::BitOr),
            _ => self.reduction.clone(),
        };
        let operation = Operation::new(kind.name(), signature, self.deadline(), reduction, parts);
        Operation { scale: self.scale, ..operation }
    }

    /// One part: the usual case.
    fn prepare(&self, spec: Spec, dtype: DType, (input, output): RawBuffers) -> Result<Operation, Error> {
        self.check(&spec, dtype)?;
        let (algo, program) = self.program(&spec, dtype, spec.count)?;
        let signature = self.signature(&spec, dtype as u8, algo);
        let Spec { kind, count, tables, pairwise, .. } = spec;
        let tables = tables.map(Arc::new);
        let part = Part { program, input, output, count, dtype, tables, pairwise, stated: None };
        Ok(self.operation(kind, signature, PartList::One(part)))
    }

    /// Hands in a collective on this memory, which `held` owns, if there is one that suits it.
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

    /// Several parts, each with a count of its own on memory of its own.
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

    /// An operation of two halves: `spec` on elements of this type, and what `then` makes of its outcome.
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

    /// Refuses the call. If that is because this rank's device is lost, the communicator ends: this rank can do its part no more, and the others, who
    /// may have called, would wait for it until their deadlines.
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

/// Why so many operations more have no room. Asked before the parts of a call are submitted, so that none is left without the others. A communicator that has
/// ended has room: it refuses each part for the cause of its end.
pub(super) fn no_room(endpoint: &Endpoint, call: &str, more: usize) -> Option<Error> {
    // Before the lock of the table: at the fork another thread, which is not there, may have held it.
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

/// What a call returns of what became of its submission: a refusal gives the buffers back.
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

/// The program of a spec: made once for each communicator.
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
