//! The collectives, written once: options, checks, submission.

use std::sync::Arc;
use std::time::Duration;

use super::Work;
use super::batch::{Batch, Message};
use super::work::Restore;
use crate::error::{Error, Failed};
use crate::exec::{Direction, Endpoint, Submission, When};
use crate::mem::{Buf, Event, Held, HostStream, Parts};
use crate::plan::{self, Algo, Env, Kind, Program, Shape};
use crate::types::{Element, NO_OP, Rank, ReduceOp, Signature};

/// A communicator with options for the next call.
///
/// Made by [`Comm::op`](super::Comm::op), [`timeout`](super::Comm::timeout), [`algo`](super::Comm::algo),
/// [`on`](super::Comm::on), [`tag`](super::Comm::tag).
#[derive(Clone, Debug)]
#[must_use = "options do nothing without a call"]
pub struct Call<'a> {
    pub(crate) side: Side<'a>,
    op: ReduceOp,
    algo: Algo,
    default_algo: Algo,
    timeout: Option<Duration>,
    after: Option<Event>,
    tag: u32,
}

/// The endpoint, and proof that calls on it are in order.
#[derive(Clone)]
pub(crate) struct Side<'a>(pub(crate) &'a Arc<Endpoint>);

impl std::fmt::Debug for Side<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.config.name)
    }
}

struct Spec {
    kind: Kind,
    root: Rank,
    count: usize,
    in_place: bool,
}

fn both<I: Buf, O: Buf>(result: Result<(), Error>, held: Option<Held>) -> Result<(I, O), Failed<(I, O)>> {
    let parts = held.and_then(Held::take::<Parts<I, O>>).map(|p| (p.input, p.output));
    settle(result, parts)
}

fn one<B: Buf>(result: Result<(), Error>, held: Option<Held>) -> Result<B, Failed<B>> {
    let parts = held.and_then(Held::take::<Parts<(), B>>).map(|p| p.output);
    settle(result, parts)
}

fn made<I: Buf>(result: Result<(), Error>, held: Option<Held>) -> Result<Vec<I::Elem>, Failed<I>> {
    let parts = held.and_then(Held::take::<Parts<I, Vec<I::Elem>>>);
    match (result, parts) {
        (Ok(()), Some(parts)) => Ok(parts.output),
        (result, parts) => Err(Failed { buf: parts.map(|p| p.input), error: lost(result) }),
    }
}

fn nothing(result: Result<(), Error>, _: Option<Held>) -> Result<(), Failed<()>> {
    result.map_err(|error| Failed { buf: Some(()), error })
}

fn settle<T>(result: Result<(), Error>, parts: Option<T>) -> Result<T, Failed<T>> {
    match (result, parts) {
        (Ok(()), Some(parts)) => Ok(parts),
        (result, buf) => Err(Failed { buf, error: lost(result) }),
    }
}

fn lost(result: Result<(), Error>) -> Error {
    result.err().unwrap_or_else(|| Error::system("finish an operation", "its buffers are gone (a bug)"))
}

impl<'a> Call<'a> {
    pub(crate) fn new(endpoint: &'a Arc<Endpoint>, default_algo: Algo) -> Call<'a> {
        Call {
            side: Side(endpoint),
            op: ReduceOp::Sum,
            algo: Algo::Auto,
            default_algo,
            timeout: None,
            after: None,
            tag: 0,
        }
    }

    /// The reduction (default: sum).
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.op = op;
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

    /// Starts only after what `stream` holds now.
    pub fn on(self, stream: &HostStream) -> Self {
        self.after(stream.record())
    }

    /// Starts only after `event`.
    pub fn after(mut self, event: Event) -> Self {
        self.after = Some(event);
        self
    }

    /// The tag of a message (default: 0).
    pub fn tag(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }

    fn size(&self) -> usize {
        self.side.0.size()
    }

    /// The algorithm, and the program for it.
    fn resolve<T: Element>(&self, spec: &Spec) -> Result<(Algo, Arc<Program>), Error> {
        let (endpoint, n) = (self.side.0, self.size());
        let call = spec.kind.name();
        if spec.root >= n {
            let problem = format!("root {} is not in this group of {n}; roots are 0..={}", spec.root, n - 1);
            return Err(Error::invalid(call, problem));
        }
        if spec.kind.reduces() && spec.kind != Kind::Barrier && !self.op.supports(T::DTYPE) {
            let problem = format!("{} is not defined on {}", self.op, T::DTYPE);
            return Err(Error::invalid(call, problem));
        }
        let bytes = spec.count * size_of::<T>();
        let known = plan::algorithms(spec.kind);
        let algo = match (self.algo, self.default_algo) {
            (Algo::Auto, d) if d != Algo::Auto && known.contains(&d) => d,
            (Algo::Auto, _) => plan::choose(
                spec.kind,
                bytes,
                &Env { n, one_host: endpoint.config.one_host, ..Env::default() },
            ),
            (named, _) => named,
        };
        let rank = endpoint.config.rank;
        let shape = Shape { n, rank, root: spec.root, in_place: spec.in_place, ..Shape::default() };
        let key = (spec.kind as u8, algo as u8, spec.root, spec.in_place);
        let program = endpoint.program(key, || {
            let plan =
                plan::plan(spec.kind, algo, &shape).map_err(|e| Error::invalid(call, e.to_string()))?;
            #[cfg(any(test, feature = "testing"))]
            let plan = crate::testing::mutated(spec.kind, rank, plan);
            Ok(Program::compile(&plan))
        })?;
        Ok((algo, program))
    }

    fn submit<T: Element, P: Send + 'static, O, F>(
        &self,
        spec: Spec,
        parts: P,
        (input, output): (*const u8, *mut u8),
        restore: Restore<O, F>,
    ) -> Work<O, F> {
        let endpoint = self.side.0;
        let refuse = |error: Error, held: Held| match restore(Err(error), Some(held)) {
            Err(failed) => Work::refused(failed, restore),
            Ok(_) => Work::refused(Failed { buf: None, error: Error::invalid("submit", "refused") }, restore),
        };
        let held = Held::new(parts);
        let (algo, program) = match self.resolve::<T>(&spec) {
            Ok(found) => found,
            Err(error) => return refuse(error, held),
        };
        let op = if spec.kind == Kind::Barrier { ReduceOp::BitOr } else { self.op };
        let signature = Signature {
            kind: spec.kind as u8,
            dtype: T::DTYPE as u8,
            op: if spec.kind.reduces() { op as u8 } else { NO_OP },
            algo: algo as u8,
            root: spec.root as u32,
            count: spec.count as u64,
            generation: endpoint.config.generation,
            detail: 0,
        };
        let submission = Submission::Collective {
            call: spec.kind.name(),
            program,
            signature,
            input,
            output,
            count: spec.count,
            dtype: T::DTYPE,
            op,
        };
        match endpoint.submit(submission, self.when(), held) {
            Ok(key) => Work::running(endpoint.clone(), key, restore),
            Err((error, held)) => refuse(error, held),
        }
    }

    fn when(&self) -> When {
        When { timeout: self.timeout, after: self.after.clone() }
    }

    fn in_place<B: Buf>(&self, kind: Kind, root: Rank, count: usize, mut buf: B) -> Work<B> {
        let at = buf.ptr_mut().cast::<u8>();
        let spec = Spec { kind, root, count, in_place: true };
        self.submit::<B::Elem, _, _, _>(spec, Parts { input: (), output: buf }, (at, at), one::<B>)
    }

    fn into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        (kind, root): (Kind, Rank),
        (count, expected): (usize, usize),
        input: I,
        mut output: O,
    ) -> Work<(I, O)> {
        if output.len() != expected {
            let found = output.len();
            let problem = format!("the output has {found} elements, expected {expected}");
            return refused(kind, problem, (input, output), both::<I, O>);
        }
        let memory = (input.ptr().cast::<u8>(), output.ptr_mut().cast::<u8>());
        let spec = Spec { kind, root, count, in_place: false };
        self.submit::<I::Elem, _, _, _>(spec, Parts { input, output }, memory, both::<I, O>)
    }

    fn make<I: Buf>(&self, kind: Kind, (count, len): (usize, usize), input: I) -> Work<Vec<I::Elem>, I> {
        let mut output = vec![I::Elem::default(); len];
        let memory = (input.ptr().cast::<u8>(), output.as_mut_ptr().cast::<u8>());
        let spec = Spec { kind, root: 0, count, in_place: false };
        self.submit::<I::Elem, _, _, _>(spec, Parts { input, output }, memory, made::<I>)
    }

    /// `len` elements as `n` blocks.
    fn blocks(&self, len: usize) -> Result<usize, String> {
        let n = self.size();
        if !len.is_multiple_of(n) {
            return Err(format!(
                "the buffer has {len} elements, expected a multiple of the group's size, {n}"
            ));
        }
        Ok(len / n)
    }

    /// See [`Comm::all_reduce`](super::Comm::all_reduce).
    pub fn all_reduce<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Kind::AllReduce, 0, buf.len(), buf)
    }

    /// See [`Comm::all_reduce_into`](super::Comm::all_reduce_into).
    pub fn all_reduce_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        let count = input.len();
        self.into((Kind::AllReduce, 0), (count, count), input, output)
    }

    /// See [`Comm::all_reduce_new`](super::Comm::all_reduce_new).
    pub fn all_reduce_new<I: Buf>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        let count = input.len();
        self.make(Kind::AllReduce, (count, count), input)
    }

    /// See [`Comm::broadcast`](super::Comm::broadcast).
    pub fn broadcast<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Kind::Broadcast, root, buf.len(), buf)
    }

    /// See [`Comm::broadcast_into`](super::Comm::broadcast_into).
    pub fn broadcast_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        let count = output.len();
        if self.side.0.config.rank == root && input.len() != count {
            let problem = format!("the root's input has {} elements, its output {count}", input.len());
            return refused(Kind::Broadcast, problem, (input, output), both::<I, O>);
        }
        self.into((Kind::Broadcast, root), (count, count), input, output)
    }

    /// See [`Comm::reduce`](super::Comm::reduce).
    pub fn reduce<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Kind::Reduce, root, buf.len(), buf)
    }

    /// See [`Comm::reduce_into`](super::Comm::reduce_into).
    pub fn reduce_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        let count = input.len();
        let expected = if self.side.0.config.rank == root { count } else { output.len() };
        self.into((Kind::Reduce, root), (count, expected), input, output)
    }

    /// See [`Comm::all_gather`](super::Comm::all_gather).
    pub fn all_gather<I: Buf>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        let count = input.len();
        self.make(Kind::AllGather, (count, count * self.size()), input)
    }

    /// See [`Comm::all_gather_into`](super::Comm::all_gather_into).
    pub fn all_gather_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        let count = input.len();
        self.into((Kind::AllGather, 0), (count, count * self.size()), input, output)
    }

    /// See [`Comm::all_gather_in_place`](super::Comm::all_gather_in_place).
    pub fn all_gather_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        match self.blocks(buf.len()) {
            Ok(count) => self.in_place(Kind::AllGather, 0, count, buf),
            Err(problem) => refused_one(Kind::AllGather, problem, buf),
        }
    }

    /// See [`Comm::reduce_scatter`](super::Comm::reduce_scatter).
    pub fn reduce_scatter<I: Buf>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        match self.blocks(input.len()) {
            Ok(count) => self.make(Kind::ReduceScatter, (count, count), input),
            Err(problem) => {
                let error = Error::invalid(Kind::ReduceScatter.name(), problem);
                Work::refused(Failed { buf: Some(input), error }, made::<I>)
            }
        }
    }

    /// See [`Comm::reduce_scatter_into`](super::Comm::reduce_scatter_into).
    pub fn reduce_scatter_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        match self.blocks(input.len()) {
            Ok(count) => self.into((Kind::ReduceScatter, 0), (count, count), input, output),
            Err(problem) => refused(Kind::ReduceScatter, problem, (input, output), both::<I, O>),
        }
    }

    /// See [`Comm::reduce_scatter_in_place`](super::Comm::reduce_scatter_in_place).
    pub fn reduce_scatter_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        match self.blocks(buf.len()) {
            Ok(count) => self.in_place(Kind::ReduceScatter, 0, count, buf),
            Err(problem) => refused_one(Kind::ReduceScatter, problem, buf),
        }
    }

    /// See [`Comm::barrier`](super::Comm::barrier).
    pub fn barrier(&self) -> Work<()> {
        let at = self.side.0.token();
        let spec = Spec { kind: Kind::Barrier, root: 0, count: 1, in_place: true };
        self.submit::<u8, _, _, _>(spec, (), (at, at), nothing)
    }

    fn message<B: Buf>(&self, direction: Direction, peer: Rank, tag: u32, mut buf: B) -> Work<B> {
        let (endpoint, n) = (self.side.0, self.size());
        let problem = match peer {
            p if p >= n => Some(format!("rank {p} is not in this group of {n}; ranks are 0..={}", n - 1)),
            p if p == endpoint.config.rank => Some(format!("rank {p} is this rank: a message needs another")),
            _ => None,
        };
        if let Some(problem) = problem {
            let error = Error::invalid(direction.name(), problem);
            return Work::refused(Failed { buf: Some(buf), error }, one::<B>);
        }
        let (memory, count, dtype) = (buf.ptr_mut().cast::<u8>(), buf.len(), B::Elem::DTYPE);
        let submission = Submission::Message { direction, peer, tag, memory, count, dtype };
        let held = Held::new(Parts { input: (), output: buf });
        match endpoint.submit(submission, self.when(), held) {
            Ok(key) => Work::running(endpoint.clone(), key, one::<B>),
            Err((error, held)) => {
                let failed = one::<B>(Err(error), Some(held)).err();
                let none = || Failed { buf: None, error: Error::invalid("submit", "refused") };
                Work::refused(failed.unwrap_or_else(none), one::<B>)
            }
        }
    }

    /// See [`Comm::send`](super::Comm::send).
    pub fn send<B: Buf>(&self, buf: B, to: Rank) -> Work<B> {
        self.message(Direction::Send, to, self.tag, buf)
    }

    /// See [`Comm::recv`](super::Comm::recv).
    pub fn recv<B: Buf>(&self, buf: B, from: Rank) -> Work<B> {
        self.message(Direction::Recv, from, self.tag, buf)
    }

    /// See [`Comm::batch`](super::Comm::batch).
    pub fn batch<B: Buf>(&self, messages: impl IntoIterator<Item = Message<B>>) -> Batch<B> {
        let each = |message| match message {
            Message::Send { buf, to, tag } => self.message(Direction::Send, to, tag, buf),
            Message::Recv { buf, from, tag } => self.message(Direction::Recv, from, tag, buf),
        };
        Batch::new(messages.into_iter().map(each).collect())
    }
}

fn refused<T>(kind: Kind, problem: String, buf: T, restore: Restore<T, T>) -> Work<T> {
    Work::refused(Failed { buf: Some(buf), error: Error::invalid(kind.name(), problem) }, restore)
}

fn refused_one<B: Buf>(kind: Kind, problem: String, buf: B) -> Work<B> {
    refused(kind, problem, buf, one::<B>)
}
