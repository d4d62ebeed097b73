//! The executor in virtual time: how long a collective would take on a network that is not here.
//!
//! The machines that run real collectives run these, on links whose frames take [`Network::latency`] and
//! [`Network::bandwidth`] to arrive and carry no bytes; events are worked off in the order of their times. What is
//! found is what the plans and the executor's own rules (slices, rounds, credits) allow on such a network, not a
//! formula. What a frame costs the rank at either end, and that ranks of a host share its cores, is modelled where the network
//! says so. What is not: contention inside the network (each rank's port is, both ways), and the operating system. Frames arrive whole; over TCP ranks pass on what has
//! come of one from 32 KB on, which [`Network::slice`] of 32 KB is near to. `docs/bench/simulator.md` has predictions
//! beside measured times.
//!
//! ```
//! use allstream::sim::{Network, simulate};
//! use allstream::{Algo, Kind};
//!
//! # fn main() -> Result<(), allstream::Error> {
//! let network = Network::new(std::time::Duration::from_micros(5), 25e9);
//! let ring = simulate(Kind::AllReduce, Algo::Ring, 8, 1 << 20, &network)?;
//! // 2(n-1) hops at least, and 2(n-1)/n of the bytes through each port.
//! assert!(ring.time.as_secs_f64() > 14.0 * 5e-6);
//! # Ok(()) }
//! ```

mod net;
mod predict;

use std::sync::Arc;
use std::time::Duration;

pub use self::predict::predict;

use self::net::{Clock, Net, SimOpener};
use crate::error::Error;
use crate::exec::{self, NextPart, Operation, Part, PartList, Parts, Port, Reduction, Timed, Work};
use crate::link::SLOT;
use crate::link::region::Region;
use crate::mem::ALL;
use crate::plan::{self, Lending, Program, Shape};
use crate::types::{Algo, DType, Kind, Rank, ReduceOp, Signature};

/// The most ranks that are simulated.
pub const MOST_RANKS: usize = 1024;
/// The most bytes of a simulated collective: 1 PiB.
pub const MOST_BYTES: usize = 1 << 50;
/// Frames that a simulation is cut into at most, nearly: slices grow to keep it so.
const FRAMES: usize = 1_000_000;
/// Frames that it may be cut into where the slice was given.
const MOST_FRAMES: usize = 64 * FRAMES;
/// The longest slice: a frame says its length in 32 bits.
const MOST_SLICE: usize = 1 << 31;

/// A network: each rank has one port, which sends and receives at the same time.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Network {
    /// From one rank to another, for the first byte: the alpha of the cost models.
    pub latency: Duration,
    /// Bytes a second through a port, each way: 1 / beta.
    pub bandwidth: f64,
    /// Bytes a second that a rank reads and writes when it combines or copies. `None`: that takes no time.
    pub memory: Option<f64>,
    /// A rank's work for a frame, at each end, beside its bytes: the o of LogP.
    pub frame: Duration,
    /// Bytes a second that a rank puts on its links by its own work, as in shared memory and on loopback. `None`: no work.
    pub send: Option<f64>,
    /// Likewise, that it takes off them.
    pub receive: Option<f64>,
    /// Cores of a host, for the work of its ranks. `None`: a core for each rank.
    pub cores: Option<usize>,
    /// How ranks lend each other memory, for algorithms that have a form for that ([`plan::lending()`]). `None`: they do not.
    pub loans: Option<Loans>,
    /// A rank that is slower: its port and its memory take this many times as long.
    pub straggler: Option<(Rank, f64)>,
    /// The part of frames that are lost, and sent again after [`Network::retry`]; `0.0..1.0`.
    pub loss: f64,
    /// How long it takes until a lost frame is sent again.
    pub retry: Duration,
    /// Ranks on each host, for algorithms of two levels. `None`: they all share one.
    pub per_host: Option<usize>,
    /// Of the losses.
    pub seed: u64,
    /// Bytes of a slice. `None`: 128 KB, as executors of more than two ranks cut, or more where frames would be too many.
    pub slice: Option<usize>,
}

impl Network {
    /// A network of this latency and bandwidth, without losses, where work takes no time.
    pub fn new(latency: Duration, bandwidth: f64) -> Network {
        Network {
            latency,
            bandwidth,
            memory: None,
            frame: Duration::ZERO,
            send: None,
            receive: None,
            cores: None,
            loans: None,
            straggler: None,
            loss: 0.0,
            retry: Duration::from_millis(1),
            per_host: None,
            seed: 1,
            slice: None,
        }
    }

    fn check(&self, n: usize) -> Result<(), String> {
        let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(format!("a {name} of {value} bytes a second: it must be above 0")),
        };
        positive("bandwidth", self.bandwidth)?;
        for (name, rate) in [
            ("memory bandwidth", self.memory),
            ("sending rate", self.send),
            ("receiving rate", self.receive),
            ("rate of fetching loans", self.loans.and_then(|loans| loans.fetch)),
        ] {
            rate.map_or(Ok(()), |rate| positive(name, rate))?;
        }
        if !(0.0..1.0).contains(&self.loss) {
            return Err(format!("a loss of {}: it must be at least 0 and below 1", self.loss));
        }
        match self.straggler {
            Some((rank, _)) if rank >= n => {
                Err(format!("the straggler, rank {rank}, is not among {n} ranks"))
            }
            Some((_, factor)) if !(factor.is_finite() && factor > 0.0) => {
                Err(format!("a straggler {factor} times as slow: it must be above 0"))
            }
            _ if self.per_host == Some(0) => Err("0 ranks on each host".into()),
            _ if self.cores == Some(0) => Err("0 cores".into()),
            _ if self.slice.is_some_and(|slice| slice == 0 || slice > MOST_SLICE) => {
                Err(format!("a slice of {:?} bytes: 1 to {MOST_SLICE} are possible", self.slice.unwrap_or(0)))
            }
            _ => Ok(()),
        }
    }
}

/// How ranks of one host lend each other memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loans {
    /// In staging slots of 128 KB, as ranks in processes of their own lend what lies outside shared memory; else where it lies.
    pub in_slots: bool,
    /// Bytes a second at which a rank fetches what another has lent, beside the time that [`Network::memory`] counts. `None`: at
    /// no cost.
    pub fetch: Option<f64>,
}

/// What a simulation found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Simulated {
    /// Until the last rank was done.
    pub time: Duration,
    /// Frames that were sent.
    pub frames: u64,
    /// How many of them were lost and sent again.
    pub lost: u64,
    /// Bytes of a slice.
    pub slice: usize,
}

/// A rank of a simulation, at its part of the collective.
struct SimRank {
    op: Operation,
    next: NextPart,
    parts: Parts<Timed, Timed>,
    port: Port,
    is_done: bool,
}

impl SimRank {
    /// Goes as far as it may. Whether it has come to its end by that.
    fn go_on(&mut self, news: Option<Rank>) -> Result<bool, Error> {
        while !self.is_done {
            let parts = &mut self.parts;
            let mut moved = self.port.reap(|lent| parts.freed(&lent))?;
            let mut work = Work { op: &self.op, next: &mut self.next, reach: ALL };
            let (any, complete) = parts.pass(&mut work, news, &mut self.port)?;
            moved |= any;
            self.is_done = complete;
            if complete || !moved {
                return Ok(complete);
            }
        }
        Ok(false)
    }
}

/// Runs a collective of `bytes` on each rank (for all_gather, gather: of one block; for reduce_scatter, scatter,
/// all_to_all: likewise of one block), out of place, from rank 0 where it has a root.
///
/// # Errors
/// [`Error::Invalid`] for an algorithm that does not suit, a group of none or more than [`MOST_RANKS`], more than
/// [`MOST_BYTES`] or more frames than can be simulated, a network that cannot be, or a collective that would take more
/// than 200 days on it.
pub fn simulate(
    kind: Kind,
    algo: Algo,
    n: usize,
    bytes: usize,
    network: &Network,
) -> Result<Simulated, Error> {
    let invalid = |problem: String| Error::invalid(format!("simulate {kind}"), problem);
    if n == 0 || n > MOST_RANKS {
        return Err(invalid(format!("{n} ranks: 1 to {MOST_RANKS} can be simulated")));
    }
    if bytes > MOST_BYTES {
        return Err(invalid(format!("{bytes} bytes: at most {MOST_BYTES} can be simulated")));
    }
    network.check(n).map_err(invalid)?;
    let hosts: Vec<u32> = (0..n).map(|r| network.per_host.map_or(0, |per| (r / per) as u32)).collect();
    let program = |rank| {
        let shape = Shape { n, rank, hosts: &hosts, ..Shape::default() };
        plan::plan(kind, algo, &shape)
            .map(|plan| {
                let lending = plan::lending(kind, algo, &shape).map(Lending::compile);
                Arc::new(Program { lending, ..Program::compile(&plan) })
            })
            .map_err(|e| invalid(e.to_string()))
    };
    let programs = (0..n).map(program).collect::<Result<Vec<_>, _>>()?;
    let slice = slice(&programs, bytes, network.slice).map_err(invalid)?;
    let loans = network.loans.filter(|_| programs.iter().any(|program| program.lending.is_some()));
    if loans.is_some_and(|loans| loans.in_slots) {
        // A loan for each piece of each chunk, from every rank to every other.
        let pieces = bytes.div_ceil(n).div_ceil(SLOT).saturating_mul(n * (n - 1));
        if pieces > MOST_FRAMES {
            return Err(invalid(format!(
                "{pieces} loans by slots of {SLOT} bytes: too many to be simulated"
            )));
        }
    }
    let net = Net::new(n, network);
    let region = Arc::new(Region::private()?);
    let signature = Signature { kind: kind as u8, algo: algo as u8, ..Signature::default() };
    let count = if kind == Kind::Barrier { 1 } else { bytes };
    let loans = loans.map(|loans| match loans.in_slots {
        true => exec::Loans::InSlots,
        false => exec::Loans::InPlace,
    });
    let rank_of = |(rank, program): (Rank, Arc<Program>)| {
        let (input, output) = (std::ptr::null(), std::ptr::null_mut());
        let part = Part {
            program,
            input,
            output,
            count,
            dtype: DType::U8,
            tables: None,
            pairwise: false,
            stated: None,
        };
        let reduction = Reduction::Op(ReduceOp::Sum);
        let timed = Timed::new(Arc::new(Clock(net.clone(), rank)), slice, loans);
        SimRank {
            op: Operation::new("sim", signature, Duration::MAX, reduction, PartList::One(part)),
            next: NextPart::default(),
            parts: Parts::new(0, timed.clone(), timed),
            port: Port::new((rank, n), 0, region.clone(), Arc::new(SimOpener(net.clone(), rank))),
            is_done: false,
        }
    };
    let mut ranks: Vec<SimRank> = programs.into_iter().enumerate().map(rank_of).collect();
    let (mut end, mut left) = (0, n);
    let mut go_on = |rank: Rank, news: Option<Rank>| -> Result<(), Error> {
        if ranks[rank].go_on(news)? {
            left -= 1;
            end = end.max(net.at(rank));
        }
        Ok(())
    };
    for rank in 0..n {
        go_on(rank, None)?;
    }
    while let Some((at, rank, peer)) = net.next() {
        net.reach(rank, at);
        go_on(rank, Some(peer))?;
    }
    if left > 0 {
        return Err(invalid(format!("{left} ranks never ended (a bug)")));
    }
    if end >= net::END {
        return Err(invalid("on this network it would take more than 200 days".into()));
    }
    let (frames, lost) = net.counts();
    Ok(Simulated { time: Duration::from_nanos(end.div_ceil(1000)), frames, lost, slice })
}

/// The slice that was given, or one that cuts all messages into at most about [`FRAMES`].
fn slice(programs: &[Arc<Program>], bytes: usize, given: Option<usize>) -> Result<usize, String> {
    let chunk = |program: &Program, i: &u32| {
        let at = program.plan.steps[*i as usize].chunk();
        at.map_or(0, |at| program.plan.slots[usize::from(at.slot)].range(at.chunk, bytes).len())
    };
    let frames = |slice: usize| -> usize {
        let messages = programs.iter().flat_map(|p| p.sends.iter().flatten().map(move |i| (p, i)));
        messages.map(|(p, i)| chunk(p, i).div_ceil(slice).max(1)).fold(0, usize::saturating_add)
    };
    if let Some(slice) = given {
        let frames = frames(slice);
        return match frames <= MOST_FRAMES {
            true => Ok(slice),
            false => Err(format!("{frames} frames by slices of {slice} bytes: too many to be simulated")),
        };
    }
    let mut slice = SLOT;
    while frames(slice) > FRAMES && slice <= bytes {
        if slice >= MOST_SLICE {
            return Err(format!("{bytes} bytes among {} ranks: too many to be simulated", programs.len()));
        }
        slice *= 2;
    }
    Ok(slice)
}

#[cfg(test)]
mod tests;
