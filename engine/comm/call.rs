//! A call: its options, its checks, its submission. The collectives themselves are in [`super::collectives`] and beside.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Work;
use super::memory::{Memory, RawBuffers, UNSTAGED};
use super::ordered::{Start, Stream};
use super::work::Restore;
use crate::error::{Error, Failed};
use crate::exec::{Collective, Endpoint, Part, PartList, Reduction, Submission, Tables, Then, When};
use crate::forked;
use crate::mem::{Event, Held};
use crate::plan::{self, Algo, Env, Kind, Program, Shape};
use crate::types::{
    DType, Element, FUNCTION, Function, LIST, NO_OP, Rank, ReduceOp, Signature, VARIED, digest,
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
    collective: Collective,
    when: When,
    held: Held,
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
    /// Submits it where it was prepared for.
    pub(super) fn submit<O, F>(self, endpoint: &Arc<Endpoint>, restore: Restore<O, F>) -> Work<O, F> {
        hand_over(endpoint, Submission::Collective(self.collective), self.when, self.held, restore)
    }

    /// Nothing is submitted.
    pub(super) fn give_back<O, F>(self, error: Error, restore: Restore<O, F>) -> Failed<F> {
        given_back(error, self.held, restore)
    }
}

pub(super) fn given_back<O, F>(error: Error, held: Held, restore: Restore<O, F>) -> Failed<F> {
    let none = || Failed { buf: None, error: Error::invalid("submit", "refused") };
    restore(Err(Box::new(error)), Some(held)).err().unwrap_or_else(none)
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
            deterministic: endpoint.is_deterministic(),
            timeout: None,
            after: None,
            tag: 0,
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

    pub(super) fn size(&self) -> usize {
        self.side.0.size()
    }

    pub(super) fn rank(&self) -> Rank {
        self.side.0.config.rank
    }

    pub(super) fn when(&self) -> When {
        let after = match &self.after {
            None => None,
            Some(Start::Host(event)) => Some(event.clone()),
            Some(Start::Device(event)) => Some(event.on_host()),
            Some(Start::Failed(error)) => {
                let event = Event::pending();
                event.fail(error.clone());
                Some(event)
            }
        };
        When { timeout: self.timeout, after, staged: None }
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
            Reduction::Op(ReduceOp::Avg) if matches!(kind, Kind::Scan | Kind::ExScan) => {
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

    /// The algorithm for a collective over `bytes`.
    fn pick(&self, spec: &Spec, bytes: usize) -> Result<Algo, String> {
        let (kind, endpoint) = (spec.kind, self.side.0);
        let deterministic = self.deterministic && kind.reduces();
        let in_order = kind.reduces() && matches!(&self.reduction, Reduction::Function(f) if !f.commutes());
        let fits = |algo| {
            (!deterministic || plan::deterministic(kind, algo))
                && (!in_order || plan::keeps_rank_order(kind, algo))
        };
        if self.algo != Algo::Auto {
            if plan::algorithms(kind).contains(&self.algo) && !fits(self.algo) {
                let why = if deterministic && !plan::deterministic(kind, self.algo) {
                    "does not fold in rank order in one step, which deterministic mode asks for"
                } else {
                    "does not keep the order of ranks, which a function that does not commute asks for"
                };
                return Err(format!("{} {why}", self.algo));
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
        let known = endpoint.binding().is_none() && !spec.pairwise;
        let tuned = endpoint.config.tuned.choose(kind, bytes).filter(|_| known);
        Ok(tuned.filter(|algo| fits(*algo) && there(*algo)).unwrap_or_else(|| {
            plan::choose(kind, bytes, &Env { deterministic, in_order, ..endpoint.config.env })
        }))
    }

    /// The algorithm of one part, and the program for it.
    pub(super) fn program(&self, spec: &Spec, bytes: usize) -> Result<(Algo, Arc<Program>), Error> {
        let kind = spec.kind;
        let bytes = if spec.tables.is_some() { bytes / self.size() } else { bytes };
        let algo = self.pick(spec, bytes).map_err(|problem| Error::invalid(kind.name(), problem))?;
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
        Signature {
            kind: kind as u8 | if spec.tables.is_some() { VARIED } else { 0 },
            dtype,
            op,
            algo: algo as u8,
            root: spec.root as u32,
            count: spec.count as u64,
            generation: self.side.0.config.generation,
            detail,
        }
    }

    /// What all collectives are prepared with.
    fn collective(&self, kind: Kind, signature: Signature, parts: PartList) -> Collective {
        let reduction = match kind {
            Kind::Barrier => Reduction::Op(ReduceOp::BitOr),
            _ => self.reduction.clone(),
        };
        let (call, scale) = (kind.name(), self.scale);
        Collective { call, signature, parts, reduction, scale, then: None, device: None }
    }

    /// One part: the usual case.
    fn prepare(&self, spec: Spec, dtype: DType, (input, output): RawBuffers) -> Result<Collective, Error> {
        self.check(&spec, dtype)?;
        let (algo, program) = self.program(&spec, spec.count.saturating_mul(dtype.size()))?;
        let signature = self.signature(&spec, dtype as u8, algo);
        let Spec { kind, count, tables, pairwise, .. } = spec;
        let tables = tables.map(Arc::new);
        let part = Part { program, input, output, count, dtype, tables, pairwise };
        Ok(self.collective(kind, signature, PartList::One(part)))
    }

    pub(super) fn submit<T: Element, P: Send + 'static, O, F>(
        &self,
        spec: Spec,
        parts: P,
        memory: Memory,
        restore: Restore<O, F>,
    ) -> Work<O, F> {
        let held = Held::new(parts);
        let Some(ends) = memory.on_host() else {
            let varied = spec.tables.is_some();
            let prepared = self.prepare(spec, T::DTYPE, UNSTAGED);
            return self.hand_in_staged(prepared, varied, vec![memory], held, restore);
        };
        self.hand_in(self.prepare(spec, T::DTYPE, ends), self.when(), held, restore)
    }

    /// Several parts, each of a type and a count of its own.
    pub(super) fn submit_parts<P: Send + 'static, O, F>(
        &self,
        spec: Spec,
        memory: Vec<(DType, usize, Memory)>,
        parts: P,
        restore: Restore<O, F>,
    ) -> Work<O, F> {
        let prepare = || {
            let (mut detail, mut all) = (spec.detail, Vec::with_capacity(memory.len()));
            for (dtype, count, memory) in &memory {
                let ((input, output), dtype, count) = (memory.on_host().unwrap_or(UNSTAGED), *dtype, *count);
                self.check(&spec, dtype)?;
                let (algo, program) = self.program(&spec, count.saturating_mul(dtype.size()))?;
                let what = [dtype as u8, algo as u8].into_iter().chain((count as u64).to_le_bytes());
                detail = digest(detail, what);
                all.push(Part { program, input, output, count, dtype, tables: None, pairwise: false });
            }
            let spec = Spec { count: memory.len(), detail, ..spec };
            let signature = self.signature(&spec, LIST, self.algo);
            Ok(self.collective(spec.kind, signature, PartList::Many(all)))
        };
        let (prepared, held) = (prepare(), Held::new(parts));
        if memory.iter().any(|(.., memory)| memory.on_host().is_none()) {
            let memory = memory.into_iter().map(|(.., memory)| memory).collect();
            return self.hand_in_staged(prepared, false, memory, held, restore);
        }
        self.hand_in(prepared, self.when(), held, restore)
    }

    /// An operation whose first half is `spec` and whose second half `then` makes.
    pub(super) fn submit_then<T: Element, P: Send + 'static, O, F>(
        &self,
        spec: Spec,
        parts: P,
        ends: RawBuffers,
        then: Then,
        restore: Restore<O, F>,
    ) -> Work<O, F> {
        let prepared = self.prepare(spec, T::DTYPE, ends);
        let prepared = prepared.map(|collective| Collective { then: Some(then), ..collective });
        self.hand_in(prepared, self.when(), Held::new(parts), restore)
    }

    pub(super) fn hand_in<O, F>(
        &self,
        prepared: Result<Collective, Error>,
        when: When,
        held: Held,
        restore: Restore<O, F>,
    ) -> Work<O, F> {
        match (prepared, self.desk) {
            (Ok(collective), Some(desk)) => {
                *desk.0.lock() = Some(Prepared { collective, when, held });
                Work::waiting(restore)
            }
            (Ok(collective), None) => {
                hand_over(self.side.0, Submission::Collective(collective), when, held, restore)
            }
            (Err(error), _) => Work::refused(given_back(error, held, restore), restore),
        }
    }
}

/// Submits; a refusal gives the buffers back.
pub(super) fn hand_over<O, F>(
    endpoint: &Arc<Endpoint>,
    submission: Submission,
    when: When,
    held: Held,
    restore: Restore<O, F>,
) -> Work<O, F> {
    match endpoint.submit(submission, when, held) {
        Ok(key) => Work::running(endpoint.clone(), key, restore),
        Err((error, held)) => Work::refused(given_back(error, held, restore), restore),
    }
}

fn shape<'a>(endpoint: &'a Endpoint, spec: &Spec) -> Shape<'a> {
    Shape {
        n: endpoint.size(),
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
    endpoint.program((wire, algo as u8, spec.root, spec.in_place), || {
        let plan = plan::plan(kind, algo, &shape).map_err(|e| Error::invalid(kind.name(), e.to_string()))?;
        #[cfg(any(test, feature = "testing"))]
        let plan = crate::testing::mutated(kind, shape.rank, plan);
        let program = Program::compile(&plan);
        // Of two ranks, one's plan by another algorithm may be the same, and the other's not.
        let folds_all = program.folds_all && matches!(algo, Algo::Direct | Algo::OneShot);
        // Over TCP calls of the system are what costs; of more than two ranks the rounds would be too long (`Cut`).
        let whole = shape.n == 2 && !endpoint.config.env.one_host && plan::goes_whole(kind, algo, &shape);
        Ok(Program { folds_all, whole, ..program })
    })
}
