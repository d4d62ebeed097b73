//! The end of an endpoint, and what may begin again: its runs and links serve the communicator's next generation.

use std::sync::Arc;

use super::run::{Run, Teardown};
use super::teardown::HANG_UP;
use super::{Endpoint, EndpointConfig, Messages, Port};
use crate::commands::LastOf;
use crate::exec::active::Active;
use crate::link::Opener;

/// What an endpoint leaves behind when it has ended: its runs, and the links to its peers.
pub(crate) struct IdleRuns {
    run: Box<Run>,
    /// Dropped behind the runs.
    commands: LastOf,
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
    /// Takes the runs out, once nothing is left to do: finished and flushed, or failed and drained. `None`: not yet,
    /// or somebody is at work on it. What has finished can still be taken from the table; nothing else happens here.
    pub(crate) fn take_runs(&self) -> Option<IdleRuns> {
        let mut run = self.run.try_lock()?;
        let in_peace = self.health.first_cause().is_none();
        // Devices are bound for good: the rings of such a communicator are not used again.
        let healthy = in_peace && self.bound.get().is_none();
        let idle = match run.teardown {
            Teardown::NotBegun | Teardown::Revoked(_) => {
                in_peace
                    && run.active.is_empty()
                    && run.messages.is_idle()
                    && run.port.is_flushed()
                    && run.messages.is_flushed()
            }
            // Peers that live hang up soon, and give slots back by it.
            Teardown::Failed(at) => run.reclaim() || self.config.now() - at > HANG_UP,
        };
        let table = self.submitted.lock();
        if !idle || !table.closed || table.inflight.running() > 0 {
            return None;
        }
        let (calls, balance) = (table.calls, table.balance(self.config.rank));
        drop(table);
        let generation = self.config.generation;
        self.health.end();
        let mut run = Box::new(std::mem::replace(&mut *run, Run::without_peers(&self.config)));
        // Who takes the links up again begins with runs of its own.
        run.active = Active::new(self.config.comm, self.config.streams_from);
        let commands = LastOf(self.commands.clone());
        Some(IdleRuns { run, commands, healthy, generation, calls, balance })
    }

    /// An endpoint that goes on with these runs, as the generation that `config` says.
    pub(crate) fn reuse(config: EndpointConfig, idle: IdleRuns) -> Arc<Endpoint> {
        let Run { mut port, mut messages, .. } = *idle.run;
        port.renew();
        messages.renew(config.comm, config.generation);
        let run = Run::new(&config, port, messages);
        Endpoint::with(config, run)
    }
}

impl IdleRuns {
    /// What opens their links.
    pub(crate) fn opener(&self) -> Arc<dyn Opener> {
        self.run.port.opener()
    }

    /// They read no more: from here on this rank touches no ring of its peers.
    pub(crate) fn stop_reading(&mut self) {
        self.run.ports().for_each(Port::stop_reading);
        self.run.messages.port().stop_reading();
        self.commands.0.hand_over();
    }

    /// Takes back what peers have released.
    pub(crate) fn reap(&mut self) {
        for port in self.run.ports() {
            let _ = port.reap(|_| {});
        }
        let _ = self.run.messages.port().reap(|_| {});
        self.commands.0.hand_over();
    }

    /// Every peer has stopped reading: what was lent is free.
    pub(crate) fn take_all_back(&mut self) {
        self.run.ports().for_each(Port::take_all_back);
        self.run.messages.port().take_all_back();
    }
}

impl Run {
    /// One for an endpoint that has ended.
    fn without_peers(config: &EndpointConfig) -> Run {
        let port = |channel| Port::new((0, 0), channel, config.region.clone(), config.opener.clone());
        let messages = Messages::new(config.comm, 0, config.generation, 0, port(1));
        let mut run = Run::new(config, port(0), messages);
        // What an ended endpoint keeps is nobody's: it is not added to what the rank keeps.
        run.active = Active::new(config.comm, config.streams_from);
        run
    }
}
