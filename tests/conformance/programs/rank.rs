//! Runs a program on one rank: submits the operations in order, awaits them in another order, and compares each result with the oracle's.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use allstream::{Call, Comm, Failed, HostStream, Kind, SendRecv, Work};
use futures::executor::block_on;

use super::make::{Act, Collective, Program, Rng, Step};
use super::oracle::{Bits, Oracle, Sizes, bits, blank, bytes, hash, input, of_type, seed, takes_part};
use crate::cases::{Combine, Form};
use crate::values::{Value, mix};

/// Time limit of one operation: longer than a whole program takes.
const CALL: Duration = Duration::from_secs(30);

/// An operation that was submitted, with the function that turns its result into [`Bits`].
trait Flight {
    /// Polls it once.
    fn poke(&mut self);
    /// Awaits it, in the way that `how` selects, and returns the bits of its buffers.
    fn land(self: Box<Self>, how: usize, stream: &HostStream) -> Result<Bits, String>;
}

type Take<O> = Box<dyn FnOnce(O) -> Result<Bits, String>>;

struct Flying<O, F> {
    work: Work<O, F>,
    done: Option<Result<O, Failed<F>>>,
    take: Take<O>,
}

impl<O: Send + 'static, F: Send + 'static> Flight for Flying<O, F> {
    fn poke(&mut self) {
        if self.done.is_none()
            && let Poll::Ready(done) = Pin::new(&mut self.work).poll(&mut Context::from_waker(Waker::noop()))
        {
            self.done = Some(done);
        }
    }

    fn land(self: Box<Self>, how: usize, stream: &HostStream) -> Result<Bits, String> {
        let Flying { work, done, take } = *self;
        let done = match (done, how % 4) {
            (Some(done), _) => done,
            (None, 0) => block_on(work),
            (None, 1) => match work.join(stream) {
                Ok(ordered) => ordered.launch(stream, |value| value).wait(),
                Err(failed) => Err(failed),
            },
            (None, _) => work.wait(),
        };
        take(done.map_err(|failed| failed.error.to_string())?)
    }
}

struct Swapped<T> {
    both: SendRecv<Vec<T>, Vec<T>>,
    take: Take<(Vec<T>, Vec<T>)>,
}

impl<T: Value> Flight for Swapped<T> {
    fn poke(&mut self) {}

    fn land(self: Box<Self>, how: usize, _: &HostStream) -> Result<Bits, String> {
        let done = if how.is_multiple_of(2) { self.both.wait() } else { block_on(self.both) };
        (self.take)(done.map_err(|failed| failed.error.to_string())?)
    }
}

fn fly<O: Send + 'static, F: Send + 'static>(
    work: Work<O, F>,
    take: impl FnOnce(O) -> Result<Bits, String> + 'static,
) -> Box<dyn Flight> {
    Box::new(Flying { work, done: None, take: Box::new(take) })
}

/// An operation on one buffer, which becomes the result.
fn alone<T: Value>(work: Work<Vec<T>>) -> Box<dyn Flight> {
    fly(work, |out| Ok(vec![bits(&out)]))
}

/// An operation with an input, which must stay as it was (`given`), and an output.
fn pair<T: Value>(work: Work<(Vec<T>, Vec<T>)>, given: Vec<T>) -> Box<dyn Flight> {
    fly(work, move |(kept, out)| {
        if bits(&kept) != bits(&given) {
            return Err("the input has changed".into());
        }
        Ok(vec![bits(&out)])
    })
}

struct Pending {
    at: usize,
    group: usize,
    rank: usize,
    flight: Box<dyn Flight>,
}

/// A rank in the middle of a program.
struct Running<'a> {
    program: &'a Program,
    oracle: &'a Oracle,
    me: usize,
    comms: BTreeMap<usize, Comm>,
    pending: Vec<Pending>,
    /// By operation, the hash of its result, if this rank has had it.
    hashes: Vec<Option<u64>>,
    streams: [HostStream; 2],
    rng: Rng,
}

/// Runs a program on one rank of a world.
///
/// # Errors
/// What went wrong first: a call that failed, or a result that differs from the oracle's.
pub(crate) fn run(world: Comm, program: &Program, oracle: &Oracle) -> Result<(), String> {
    let me = world.rank();
    let stream = |name| HostStream::new(name).map_err(|e| e.to_string());
    let mut rank = Running {
        program,
        oracle,
        me,
        comms: BTreeMap::from([(0, world)]),
        pending: Vec::new(),
        hashes: vec![None; program.steps.len()],
        streams: [stream("before")?, stream("after")?],
        rng: Rng(mix(&[program.seed, me as u64, 2])),
    };
    for (at, step) in program.steps.iter().enumerate() {
        let Some(local) = program.groups[step.group].iter().position(|m| *m == me) else { continue };
        rank.step(at, step, local).map_err(|e| format!("rank {me}, operation {at} ({step:?}): {e}"))?;
    }
    rank.land_if(|_| true)?;
    // (All ranks close their communicators in the same order, because each `close` waits a while for the other members to close.)
    while let Some((_, comm)) = rank.comms.pop_last() {
        block_on(comm.close()).map_err(|e| format!("rank {me}, at the end: {e}"))?;
    }
    Ok(())
}

impl Running<'_> {
    fn step(&mut self, at: usize, step: &Step, rank: usize) -> Result<(), String> {
        match &step.act {
            Act::Split { colors, keys, children } => {
                let comm = self.comms.get_mut(&step.group).ok_or("no group")?;
                let child = block_on(comm.split(colors[rank], keys[rank])).map_err(|e| e.to_string())?;
                let (id, expected) = (children[rank], &self.program.groups[children[rank]]);
                if child.size() != expected.len() || expected[child.rank()] != self.me {
                    return Err(format!("rank {} of {} in {expected:?}", child.rank(), child.size()));
                }
                self.comms.insert(id, child);
                return Ok(());
            }
            Act::End { close } => {
                self.land_if(|p| p.group == step.group)?;
                let comm = self.comms.remove(&step.group).ok_or("no group")?;
                return if *close { block_on(comm.close()).map_err(|e| e.to_string()) } else { Ok(()) };
            }
            _ if !takes_part(step, rank) => return Ok(()),
            _ => {}
        }
        // The input is made from an earlier result, which must be there first.
        if let Some(source) = step.source {
            self.land_if(|p| p.at == source)?;
        }
        let source = step.source.and_then(|s| self.hashes[s]);
        let (own, common) = (seed(self.program, at, rank, source), seed(self.program, at, 0, None));
        let n = self.program.groups[step.group].len();
        let mut call = self.comms.get_mut(&step.group).ok_or("no group")?.call().timeout(CALL);
        if step.gated & 1 << rank != 0 {
            let pause = Duration::from_micros(own % 300);
            self.streams[0].launch(move || std::thread::sleep(pause));
            call = call.on(&self.streams[0]);
        }
        let flight = submit(call, step, (n, rank), (own, common));
        if step.drops & 1 << rank == 0 {
            self.pending.push(Pending { at, group: step.group, rank, flight });
        }
        self.some_of_it()
    }

    /// Now and then polls or awaits some of the operations in flight.
    fn some_of_it(&mut self) -> Result<(), String> {
        while !self.pending.is_empty() {
            match self.rng.below(100) {
                0..30 => {
                    let i = self.rng.below(self.pending.len());
                    self.land(i)?;
                }
                30..45 => {
                    let i = self.rng.below(self.pending.len());
                    self.pending[i].flight.poke();
                }
                45 => self.land_if(|_| true)?,
                _ => break,
            }
        }
        Ok(())
    }

    fn land_if(&mut self, which: impl Fn(&Pending) -> bool) -> Result<(), String> {
        while let Some(i) = self.pending.iter().position(&which) {
            self.land(i)?;
        }
        Ok(())
    }

    fn land(&mut self, i: usize) -> Result<(), String> {
        let Pending { at, rank, flight, .. } = self.pending.swap_remove(i);
        let step = &self.program.steps[at];
        let what = |e: String| format!("rank {}, the result of operation {at} ({step:?}): {e}", self.me);
        let found = flight.land(self.rng.below(8), &self.streams[1]).map_err(what)?;
        let expected = &self.oracle.results[at][rank];
        if found != *expected {
            return Err(what(differ(&found, expected)));
        }
        self.hashes[at] = Some(hash(&found));
        Ok(())
    }
}

/// Describes the first element that differs from the expected one.
fn differ(found: &Bits, expected: &Bits) -> String {
    if found.len() != expected.len() {
        return format!("{} buffers, expected {}", found.len(), expected.len());
    }
    for (b, (found, expected)) in found.iter().zip(expected).enumerate() {
        if found.len() != expected.len() {
            return format!("buffer {b} has {} elements, expected {}", found.len(), expected.len());
        }
        let wrong: Vec<usize> = (0..found.len()).filter(|i| found[*i] != expected[*i]).collect();
        if let Some(&i) = wrong.first() {
            let (x, y, more) = (found[i], expected[i], wrong.len() - 1);
            return format!("buffer {b}[{i}] is {x:#x}, expected {y:#x}, and {more} more are wrong");
        }
    }
    "nothing (a bug of the test)".into()
}

fn submit(call: Call<'_>, step: &Step, at: (usize, usize), seeds: (u64, u64)) -> Box<dyn Flight> {
    let ((n, rank), (own, _)) = (at, seeds);
    match &step.act {
        Act::Collective(c) => of_type!(c.dtype, T => {
            let mut call = call.algo(c.algo).deterministic(c.deterministic);
            if c.kind.reduces() && c.kind != Kind::Barrier {
                call = c.op.option::<T>(call, rank);
            }
            collective::<T>(call, c, at, seeds)
        }),
        Act::List { kind, algo, op, root, lens } => {
            let buffer = |(j, len): (usize, &usize)| input::<u64>(Some(*op), mix(&[own, j as u64]), *len);
            let mut all: Vec<Vec<u64>> = lens.iter().enumerate().map(buffer).collect();
            let rest = all.split_off(all.len() / 2);
            let call = if let Combine::Op(op) = op { call.op(*op) } else { call };
            let call = call.algo(*algo);
            let work = match kind {
                Kind::Broadcast => call.broadcast_list((all, rest), *root),
                _ => call.all_reduce_list((all, rest)),
            };
            fly(work, |(first, rest)| Ok([first, rest].concat()))
        }
        Act::Bytes { all, root, len } => {
            let given = input::<u8>(None, own, bytes(*all, *len, own));
            if *all {
                fly(call.all_gather_bytes(given), |all| Ok(all.iter().map(|b| bits(b)).collect()))
            } else {
                let given = if rank == *root { given } else { vec![1; len % 9] };
                alone(call.broadcast_bytes(given, *root))
            }
        }
        Act::Message { from, to, tag, dtype, len } => of_type!(*dtype, T => {
            if rank == *from {
                alone(call.tag(*tag).send(input::<T>(None, own, *len), *to))
            } else {
                alone(call.tag(*tag).recv(blank::<T>(own, *len), *from))
            }
        }),
        Act::Shift { by, tag, dtype, len } => of_type!(*dtype, T => {
            let (given, to, from) = (input::<T>(None, own, *len), (rank + by) % n, (rank + n - by) % n);
            let both = call.tag(*tag).send_recv(given.clone(), to, blank::<T>(own, *len), from);
            let take = move |(kept, got): (Vec<T>, Vec<T>)| {
                if bits(&kept) != bits(&given) {
                    return Err("what was sent has changed".into());
                }
                Ok(vec![bits(&got)])
            };
            Box::new(Swapped { both, take: Box::new(take) })
        }),
        Act::Split { .. } | Act::End { .. } => unreachable!("done by the caller"),
    }
}

fn collective<T: Value>(
    call: Call<'_>,
    c: &Collective,
    (n, rank): (usize, usize),
    (own, common): (u64, u64),
) -> Box<dyn Flight> {
    let (sizes, root, is_root) = (Sizes::new(c, n, common), c.root, rank == c.root);
    let op = c.kind.reduces().then_some(c.op);
    let given: Vec<T> = input(op, own, sizes.input(c, rank));
    let out = || blank::<T>(own, sizes.output(c, rank));
    // A buffer of all blocks, with this rank's block in its place.
    let placed = || {
        let mut buf = blank::<T>(own, sizes.total());
        buf[sizes.block(rank)].copy_from_slice(&given);
        buf
    };
    let (counts, mine) = (sizes.counts(), sizes.block(rank));
    let own_block = move |buf: Vec<T>| Ok(vec![bits(&buf[mine])]);
    let of_root = |counts| if is_root { counts } else { &[][..] };
    let kept = given.clone();
    match (c.kind, c.form) {
        (Kind::AllReduce, Form::InPlace) => alone(call.all_reduce(given)),
        (Kind::AllReduce, Form::Into) => pair(call.all_reduce_into(given, out()), kept),
        (Kind::AllReduce, _) => alone(call.all_reduce_new(given)),
        (Kind::Broadcast, Form::InPlace) => {
            alone(call.broadcast(if is_root { given } else { blank(own, c.len) }, root))
        }
        (Kind::Broadcast, _) => pair(call.broadcast_into(given, out(), root), kept),
        (Kind::Reduce, Form::InPlace) => alone(call.reduce(given, root)),
        (Kind::Reduce, _) => pair(call.reduce_into(given, out(), root), kept),
        (Kind::AllGather, Form::InPlace) => alone(call.all_gather_in_place(placed())),
        (Kind::AllGather, Form::Into) => pair(call.all_gather_into(given, out()), kept),
        (Kind::AllGather, Form::InPlaceV) => alone(call.all_gather_v_in_place(placed(), counts)),
        (Kind::AllGather, Form::IntoV) => pair(call.all_gather_v_into(given, out(), counts), kept),
        (Kind::AllGather, Form::NewV) => alone(call.all_gather_v(given, counts)),
        (Kind::AllGather, _) => alone(call.all_gather(given)),
        (Kind::ReduceScatter, Form::InPlace) => fly(call.reduce_scatter_in_place(given), own_block),
        (Kind::ReduceScatter, Form::Into) => pair(call.reduce_scatter_into(given, out()), kept),
        (Kind::ReduceScatter, Form::InPlaceV) => {
            fly(call.reduce_scatter_v_in_place(given, counts), own_block)
        }
        (Kind::ReduceScatter, Form::IntoV) => pair(call.reduce_scatter_v_into(given, out(), counts), kept),
        (Kind::ReduceScatter, Form::NewV) => alone(call.reduce_scatter_v(given, counts)),
        (Kind::ReduceScatter, _) => alone(call.reduce_scatter(given)),
        (Kind::Gather, Form::InPlace) => {
            alone(call.gather_in_place(if is_root { placed() } else { given }, root))
        }
        (Kind::Gather, Form::Into) => pair(call.gather_into(given, out(), root), kept),
        (Kind::Gather, Form::IntoV) => pair(call.gather_v_into(given, out(), of_root(counts), root), kept),
        (Kind::Gather, Form::NewV) => alone(call.gather_v(given, of_root(counts), root)),
        (Kind::Gather, _) => alone(call.gather(given, root)),
        (Kind::Scatter, Form::InPlace) => {
            alone(call.scatter_in_place(if is_root { given } else { blank(own, c.len) }, root))
        }
        (Kind::Scatter, Form::Into) => pair(call.scatter_into(given, out(), root), kept),
        (Kind::Scatter, Form::IntoV) => pair(call.scatter_v_into(given, out(), of_root(counts), root), kept),
        (Kind::Scatter, Form::NewV) => alone(call.scatter_v(given, of_root(counts), counts[rank], root)),
        (Kind::Scatter, _) => alone(call.scatter(given, c.len, root)),
        (Kind::AllToAll, Form::InPlace) => alone(call.all_to_all_in_place(given)),
        (Kind::AllToAll, Form::Into) => pair(call.all_to_all_into(given, out()), kept),
        (Kind::AllToAll, Form::IntoV) => {
            pair(call.all_to_all_v_into(given, out(), sizes.sends(rank), &sizes.recvs(rank)), kept)
        }
        (Kind::AllToAll, Form::NewV) => {
            alone(call.all_to_all_v(given, sizes.sends(rank), &sizes.recvs(rank)))
        }
        (Kind::AllToAll, _) => alone(call.all_to_all(given)),
        (Kind::Scan, Form::InPlace) => alone(call.scan(given)),
        (Kind::Scan, _) => pair(call.scan_into(given, out()), kept),
        (Kind::ExScan, Form::InPlace) => alone(call.exscan(given)),
        (Kind::ExScan, _) => pair(call.exscan_into(given, out()), kept),
        (Kind::Barrier, _) => fly(call.barrier(), |()| Ok(vec![Vec::new()])),
    }
}
