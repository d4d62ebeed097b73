//! The end of an endpoint, and what may begin again: its machines and links serve the communicator's next generation.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Active, Endings, Endpoint, EndpointConfig, HANG_UP, Messages, Port, Run};
use crate::exec::p2p::Direction;
use crate::exec::port::Opener;
use crate::types::{Rank, mix};

/// What an endpoint leaves behind when it has ended: its machines, and the links to its peers.
pub(crate) struct Machines {
    run: Box<Run>,
    /// It ended in peace: nothing was failed.
    pub(crate) healthy: bool,
    pub(crate) generation: u32,
    /// Collectives called.
    pub(crate) calls: u64,
    /// Sends called here, less receives called here, each weighed by its (sender, receiver, tag): over all members they
    /// add up to 0 where every message was received.
    pub(crate) balance: u64,
}

impl Endpoint {
    /// Takes the machines out, once nothing is left to do: finished and flushed, or failed and drained. `None`: not yet,
    /// or somebody is at work on it. What has finished can still be taken from the table; nothing else happens here.
    pub(crate) fn hollow(&self) -> Option<Machines> {
        let mut run = self.run.try_lock()?;
        // Devices are bound for good: the rings of such a communicator are not used again.
        let healthy = self.cause.get().is_none() && self.binding.get().is_none();
        let idle = match run.drained {
            None => {
                self.cause.get().is_none()
                    && run.active.is_empty()
                    && run.messages.is_idle()
                    && run.port.is_flushed()
                    && run.messages.is_flushed()
            }
            // Peers that live hang up soon, and give slots back by it.
            Some(at) => run.reclaim() || at.elapsed() > HANG_UP,
        };
        let table = self.table.lock();
        if !idle || !table.closed || table.inflight.running() > 0 {
            return None;
        }
        let (calls, rank) = (table.next, self.config.rank);
        let each = |(&(peer, direction, tag), &n): (&(Rank, Direction, u32), &u64)| match direction {
            Direction::Send => weight(rank, peer, tag).wrapping_mul(n),
            Direction::Recv => weight(peer, rank, tag).wrapping_mul(n).wrapping_neg(),
        };
        let balance = table.numbers.iter().map(each).fold(0, u64::wrapping_add);
        drop(table);
        let generation = self.config.generation;
        self.hollowed.store(true, Ordering::Release);
        let mut run = Box::new(std::mem::replace(&mut *run, nothing(&self.config)));
        // Who takes the links up again begins with machines of its own.
        run.active = Active::new(self.config.comm, self.config.streams_from);
        Some(Machines { run, healthy, generation, calls, balance })
    }

    /// An endpoint that goes on with these machines, as the generation that `config` says.
    pub(crate) fn again(config: EndpointConfig, machines: Machines) -> Arc<Endpoint> {
        let Run { mut port, mut messages, .. } = *machines.run;
        port.renew();
        messages.renew(config.comm, config.generation);
        let active = Active::new(config.comm, config.streams_from).of_rank(&config.region);
        let run = Run { active, port, messages, ..nothing(&config) };
        Endpoint::with(config, run)
    }
}

impl Machines {
    /// What opens their links.
    pub(crate) fn opener(&self) -> Arc<dyn Opener> {
        self.run.port.opener()
    }

    /// They read no more: from here on this rank touches no ring of its peers.
    pub(crate) fn stop_reading(&mut self) {
        self.run.ports().for_each(Port::stop_reading);
        self.run.messages.port().stop_reading();
    }

    /// Takes back what peers have released.
    pub(crate) fn reap(&mut self) {
        for port in self.run.ports() {
            let _ = port.reap(|_| {});
        }
        let _ = self.run.messages.port().reap(|_| {});
    }

    /// Every peer has stopped reading: what was lent is free.
    pub(crate) fn take_all_back(&mut self) {
        self.run.ports().for_each(Port::take_all_back);
        self.run.messages.port().take_all_back();
    }
}

/// Machines without peers, for an endpoint that has ended.
fn nothing(config: &EndpointConfig) -> Run {
    let port = |channel| Port::new((0, 0), channel, config.region.clone(), config.opener.clone());
    Run {
        active: Active::new(config.comm, config.streams_from),
        port: port(0),
        devices: None,
        endings: Endings::default(),
        messages: Messages::new(config.comm, 0, config.generation, 0, port(1)),
        checked: Instant::now(),
        awake: Instant::now(),
        blocked: 0,
        failed: false,
        drained: None,
        revoked: None,
    }
}

/// A number for (sender, receiver, tag), odd and as good as random: different ones do not cancel out.
fn weight(from: Rank, to: Rank, tag: u32) -> u64 {
    mix(mix((from as u64) << 32 ^ to as u64, tag.into()), 0) | 1
}
