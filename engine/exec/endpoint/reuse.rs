//! The end of an endpoint, after which its links may serve the communicator's next generation.

use std::sync::Arc;

use super::progress::{Run, Teardown};
use super::teardown::HANG_UP;
use super::{Endpoint, EndpointConfig, Messages, Port};
use crate::commands::LastOf;
use crate::link::Opener;

/// What an endpoint leaves behind when it has ended: its runs, and the links to its peers.
pub(crate) struct IdleRuns {
    run: Box<Run>,
    /// Dropped after the runs.
    commands: LastOf,
    /// Whether the links may be used again: the communicator has not failed, and was not bound to devices.
    pub(crate) healthy: bool,
    pub(crate) generation: u32,
    /// How many collectives this rank called.
    pub(crate) calls: u64,
    /// The number of sends that this rank called minus that of receives, each weighted by its (sender, receiver, tag):
    /// over all members this adds up to 0 if every message was received.
    pub(crate) balance: u64,
}

impl Endpoint {
    /// Takes the runs out, once nothing is left to do: all has finished and been sent, or has failed and lent slots have
    /// come back (or [`HANG_UP`] has passed). `None`: not yet, or another thread drives. The table keeps the outcomes.
    pub(crate) fn take_runs(&self) -> Option<IdleRuns> {
        let mut run = self.run.try_lock()?;
        let in_peace = self.health.first_cause().is_none();
        // A communicator stays bound to its devices, so its rings are not used again.
        let healthy = in_peace && self.bound.get().is_none();
        let idle = match run.teardown {
            Teardown::NotBegun | Teardown::Revoked(_) => {
                in_peace
                    && run.active.is_empty()
                    && run.messages.is_idle()
                    && run.port.is_flushed()
                    && run.messages.is_flushed()
            }
            // Peers that live hang up soon, and so give slots back.
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
        // This frees the runs' working memory: whoever takes the links up again begins with new runs.
        run.active = Run::active(&self.config);
        let commands = LastOf(self.commands.clone());
        Some(IdleRuns { run, commands, healthy, generation, calls, balance })
    }

    /// An endpoint that goes on with the links of these runs, as the generation that `config` says.
    pub(crate) fn reuse(config: EndpointConfig, idle: IdleRuns) -> Arc<Endpoint> {
        let Run { mut port, mut messages, .. } = *idle.run;
        port.renew();
        messages.renew(config.comm, config.generation);
        let run = Run::new(&config, port, messages);
        Endpoint::with(config, run)
    }
}

impl IdleRuns {
    /// What opens the links of these runs.
    pub(crate) fn opener(&self) -> Arc<dyn Opener> {
        self.run.port.opener()
    }

    /// Stops reading: from here on this rank touches no ring of its peers.
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

    /// Takes back all that was lent, as every peer has stopped reading.
    pub(crate) fn take_all_back(&mut self) {
        self.run.ports().for_each(Port::take_all_back);
        self.run.messages.port().take_all_back();
    }
}

impl Run {
    /// A run without peers, which an endpoint that has ended keeps.
    fn without_peers(config: &EndpointConfig) -> Run {
        let port = |channel| Port::new((0, 0), channel, config.region.clone(), config.opener.clone());
        let messages = Messages::new(config.comm, 0, config.generation, 0, port(1));
        let mut run = Run::new(config, port(0), messages);
        // An ended endpoint keeps no working memory, so it need not be added to that of the rank.
        run.active = Run::active(config);
        run
    }
}
