//! The executor in virtual time: predicts how long a collective would take on a network that is not at hand.
//!
//! Simulated ranks run the executor of real collectives, on links whose frames carry no bytes and arrive after the time that
//! [`Network::latency`] and [`Network::bandwidth`] give. Events are handled in the order of their times. So the result follows from
//! the plans and the executor's own rules (slices, rounds, credits) on such a network, not from a formula. If the network says so,
//! the model includes what a frame costs the rank at either end, and that the ranks of a host share its cores. It includes each
//! rank's port, in both directions, but no contention inside the network, and no operating system. A receiver sees a frame only when
//! all of it has arrived. Real ranks pass on parts of a frame over TCP, from 32 KB on: a [`Network::slice`] of 32 KB comes close to
//! that. `docs/bench/simulator.md` has predictions beside measured times.
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
use crate::exec::backend::MAX_LENDERS;
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
/// About the most frames of a simulation whose slice was not given: slices grow until there are at most so many.
const FRAMES: usize = 1_000_000;
/// The most frames of a simulation whose slice was given, and the most loans of one that lends in slots.
const MOST_FRAMES: usize = 64 * FRAMES;
/// The longest slice: a frame says its length in 32 bits.
const MOST_SLICE: usize = 1 << 31;

/// A network: each rank has one port, which sends and receives at the same time.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Network {
    /// How long the first byte takes from one rank to another: the alpha of the cost models.
    pub latency: Duration,
    /// Bytes a second through a port, each way: 1 / beta.
    pub bandwidth: f64,
    /// Bytes a second that a rank reads and writes when it combines or copies. `None`: that takes no time.
    pub memory: Option<f64>,
    /// How long a rank works for each frame, at either end, beside the time for its bytes: the o of LogP.
    pub frame: Duration,
    /// Bytes a second at which a sender puts data on its links by its own work, as over shared memory and loopback. `None`: no work.
    pub send: Option<f64>,
    /// Bytes a second at which a receiver takes data off its links by its own work. `None`: no work.
    pub receive: Option<f64>,
    /// Cores of a host, for the work of its ranks. `None`: a core for each rank.
    pub cores: Option<usize>,
    /// How ranks lend each other memory, in algorithms that can be run by loans ([`plan::lending()`]). `None`: they do not lend.
    pub loans: Option<Loans>,
    /// A rank that is slower, and how many times as long its port and all its work take.
    pub straggler: Option<(Rank, f64)>,
    /// The fraction of frames that are lost, and sent again after [`Network::retry`]; `0.0..1.0`.
    pub loss: f64,
    /// How long it takes until a lost frame is sent again.
    pub retry: Duration,
    /// Ranks on each host, for algorithms of two levels and for [`Network::cores`]. `None`: all ranks share one host.
    pub per_host: Option<usize>,
    /// The seed of the random losses.
    pub seed: u64,
    /// The most bytes of a slice: messages are cut into slices, and each slice is a frame. `None`: 128 KB, as in real runs of more than two ranks, or
    /// more where there would be too many frames.
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
    /// `true`: in staging slots of 128 KB, as ranks of different processes lend memory that they do not share. `false`: in place.
    pub in_slots: bool,
    /// Bytes a second at which a rank fetches what another has lent, in addition to the time by [`Network::memory`]. `None`: that
    /// takes no time.
    pub fetch: Option<f64>,
}

/// What a simulation found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Simulated {
    /// The time until the last rank was done.
    pub time: Duration,
    /// Frames that were sent.
    pub frames: u64,
    /// How often a frame was lost and sent again.
    pub lost: u64,
    /// Bytes of a slice.
    pub slice: usize,
}

/// A simulated rank, with its part of the collective.
struct SimRank {
    op: Operation,
    next: NextPart,
    parts: Parts<Timed, Timed>,
    port: Port,
    is_done: bool,
}

impl SimRank {
    /// Goes on until nothing moves any more. Returns whether the rank finished in this call. `news`: the peer from which news has come.
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

/// Simulates a collective of `bytes` bytes on each rank, out of place; if it has a root, that is rank 0. For all_gather, gather,
/// reduce_scatter, scatter and all_to_all, `bytes` is the size of one block.
///
/// # Errors
/// [`Error::Invalid`] for an algorithm that does not suit, a group of 0 or of more than [`MOST_RANKS`] ranks, more than
/// [`MOST_BYTES`] bytes, more frames than can be simulated, a network with impossible values, or a collective that would
/// take more than 200 days on it.
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
    let loans = network
        .loans
        .filter(|_| n <= MAX_LENDERS && programs.iter().any(|program| program.lending.is_some()));
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

/// The slice that was given, or one that cuts all messages into at most about [`FRAMES`] frames.
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
