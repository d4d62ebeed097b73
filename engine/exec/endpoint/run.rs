//! [`Run`]: what executes on one rank's side of a communicator. Whoever has its lock drives.

use std::time::Instant;

use super::EndpointConfig;
use super::ending::{Ending, Endings};
use crate::exec::active::Active;
use crate::exec::carrier::Lane;
use crate::exec::deadlines::DeadlineClock;
use crate::exec::inflight::Key;
use crate::exec::p2p::Messages;
use crate::exec::port::Port;
use crate::types::Rank;

/// How far a dead communicator has been taken down, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Teardown {
    /// The communicator lives, or peers in this process may still touch what they were lent.
    NotBegun,
    /// Peers were told that nothing of theirs is read any more, and lent memory was taken back from this process's ranks.
    Revoked(Instant),
    /// All operations that had begun or were queued have been failed.
    Failed(Instant),
}

/// What executes: the collective in work, the messages, and the links under both.
pub(super) struct Run {
    pub(super) active: Active,
    pub(super) port: Port,
    /// Once the communicator is bound to devices: what runs parts in their memory, over links of its own.
    pub(super) device: Option<Box<dyn Lane>>,
    /// Collectives that are on a stream, and have not ended there.
    pub(super) endings: Endings,
    pub(super) messages: Messages,
    pub(super) clock: DeadlineClock,
    /// How many passes have moved nothing, modulo 2^32.
    pub(super) blocked: u32,
    /// A pass has failed, and may have left work half done: so no more passes are made. Once the communicator is marked dead, it is torn down.
    pub(super) failed: bool,
    pub(super) teardown: Teardown,
}

impl Run {
    pub(super) fn new(config: &EndpointConfig, port: Port, messages: Messages) -> Run {
        Run {
            active: Run::active(config).of_rank(&config.region),
            port,
            device: None,
            endings: Endings::default(),
            messages,
            clock: DeadlineClock::new(config.runtime.now()),
            blocked: 0,
            failed: false,
            teardown: Teardown::NotBegun,
        }
    }

    /// What works on collectives, before the first one.
    pub(super) fn active(config: &EndpointConfig) -> Active {
        Active::new(config.comm, config.streams_from, config.env.one_host)
    }

    /// Whether the next collective may begin.
    pub(super) fn may_begin(&self) -> bool {
        self.active.is_empty() && !self.endings.is_full()
    }

    /// The links of collectives: those of the host, and those of the lane.
    pub(super) fn ports(&mut self) -> impl Iterator<Item = &mut Port> {
        std::iter::once(&mut self.port).chain(self.device.as_mut().map(|device| device.port()))
    }

    /// The ranks that the collective waits for.
    pub(super) fn waiting_for(&mut self) -> Vec<Rank> {
        let mut ranks = Vec::new();
        self.active.waiting_for(&mut self.port, &mut ranks);
        if let Some(device) = &mut self.device {
            device.waiting_for(&mut ranks);
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// All of the active collective is on its stream.
    pub(super) fn enqueued(&mut self, key: Key) {
        let Some((number, signature, timeout)) = self.active.current() else { return };
        let Some(carrier) = self.active.carrier().cloned() else { return };
        self.take_active();
        self.endings.push(Ending::new(key, number, signature, timeout, carrier));
    }

    /// Forgets the collective in work, which is done or has failed. Returns its key and number.
    pub(super) fn take_active(&mut self) -> Option<(Key, u64)> {
        if let Some(device) = &mut self.device {
            device.clear();
        }
        self.active.take()
    }

    /// Takes back what collectives have lent to peers and peers have released.
    pub(super) fn reap(&mut self) {
        // If a link has failed, the next pass returns that error.
        let _ = self.port.reap(|lent| self.active.freed(&lent));
        if let Some(device) = &mut self.device {
            let _ = device.reap();
        }
    }

    /// Takes back slots that were lent. Returns whether none is lent any more.
    pub(super) fn reclaim(&mut self) -> bool {
        self.ports().fold(true, |back, port| port.reclaim() & back) & self.messages.reclaim()
    }
}
