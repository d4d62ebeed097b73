//! How a dead communicator ends: lent memory comes back, then everything fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Endpoint, HANG_UP, Port, Run};
use crate::error::Error;
use crate::exec::Progress;
use crate::exec::device::DeviceOp;
use crate::exec::inflight::Key;
use crate::exec::lane::keep_and_look;
use crate::exec::quarantine::What;
use crate::link::exit::Lease;
use crate::trace::State;
use crate::trace::log::LOG;

/// How long a dead communicator waits for peers in other processes that touch its users' memory.
const READ_ON: Duration = Duration::from_millis(500);
/// And for a library that takes operations whole to end what it does.
const ABORT: Duration = Duration::from_secs(2);

/// What becomes of the buffers of an operation that has failed.
enum Fate {
    /// They come back: nobody else touches them.
    Back,
    /// Peers in other processes may touch them until then.
    Until(Vec<Arc<Lease>>),
    /// Nobody can say for how long they may be touched.
    Never,
}

impl Fate {
    /// By the leases of those that were lent some of it.
    fn of(leases: Option<Vec<Arc<Lease>>>) -> Fate {
        match leases {
            Some(leases) if leases.is_empty() => Fate::Back,
            Some(leases) => Fate::Until(leases),
            None => Fate::Never,
        }
    }

    fn or_never(self, never: bool) -> Fate {
        if never { Fate::Never } else { self }
    }
}

impl Run {
    /// Takes slots back that were lent. Whether none is lent any more.
    pub(super) fn reclaim(&mut self) -> bool {
        self.ports().fold(true, |back, port| port.reclaim() & back) & self.messages.reclaim()
    }
}

impl Endpoint {
    fn nothing_moves(&self, run: &Run) -> bool {
        let table = self.table.lock();
        table.collectives.is_empty()
            && table.messages.is_empty()
            && run.active.is_empty()
            && run.endings.is_empty()
            && run.messages.is_idle()
    }

    /// Fails everything once no peer can touch our buffers any more.
    pub(super) fn drain(self: &Arc<Self>, run: &mut Run) -> Progress {
        self.abort_whole();
        if let Some(at) = run.drained.filter(|_| self.table.lock().inflight.running() == 0) {
            // Slots that peers may still touch come back when they have hung up, or when their process has exited.
            if run.reclaim() {
                return Progress::Idle;
            }
            if at.elapsed() <= HANG_UP {
                return Progress::Blocked;
            }
            run.ports().for_each(Port::abandon);
            run.messages.port().abandon();
            return Progress::Idle;
        }
        if run.drained.is_some() && self.nothing_moves(run) {
            // What is left is on its way back to a device; its end wakes whoever waits.
            let now = Instant::now();
            run.look(now);
            self.end_overdue_backing((now, run.awake));
            return Progress::Blocked;
        }
        let quiet = run.ports().fold(true, |quiet, port| port.revoke() & quiet);
        if !(run.messages.revoke() && quiet) {
            return Progress::Blocked;
        }
        let revoked = match run.revoked {
            Some(at) => at,
            None => {
                run.ports().for_each(Port::hang_up);
                run.messages.hang_up();
                *run.revoked.insert(Instant::now())
            }
        };
        let on_streams = run.active.device().is_some() | !run.endings.is_empty();
        let whole = (on_streams | run.active.is_whole()) && self.is_whole_at_work();
        if whole && revoked.elapsed() < ABORT {
            return Progress::Blocked;
        }
        let on_devices = whole | self.is_on_devices(run, revoked.elapsed());
        let settling = run.active.is_settling() | run.messages.is_settling();
        let elsewhere = run.port.is_touched_elsewhere() | run.messages.port().is_touched_elsewhere();
        if (elsewhere | on_devices | settling) && revoked.elapsed() < READ_ON {
            return Progress::Blocked;
        }
        if on_devices {
            self.leave_on_devices();
        }
        run.drained = Some(Instant::now());
        let cause = self.cause().unwrap_or(Error::Closed { call: "operation".into() });
        let here = run.active.operation(&self.config.name);
        let mut failed = self.take_begun(run, on_devices, &cause);
        self.take_queued(&mut failed, &cause);
        for (key, fate) in failed {
            self.set_apart(key, fate);
            let error = match &here {
                Some(operation) => cause.clone().during(operation.clone()),
                None => cause.clone(),
            };
            self.finish(key, Err(error));
        }
        Progress::Advanced
    }

    /// Whether a device may still touch the buffers of its operation, although that has failed.
    fn cannot_give_up(device: &DeviceOp, cause: &Error) -> bool {
        // Where a rank went on without waiting for others, those may touch it yet.
        let given_up = device.give_up(cause).and_then(|()| device.check());
        let is_err = given_up.is_err();
        if let Err(error) = given_up {
            let what = "the buffers of a collective that failed on a device are not given back";
            LOG.line(move || tracing::warn!("{what}: {error}"));
        }
        is_err
    }

    /// Takes out the operations that have begun. Each answers for its own buffers: what it has lent, to whom.
    fn take_begun(&self, run: &mut Run, on_devices: bool, cause: &Error) -> Vec<(Key, Fate)> {
        let mut failed = Vec::new();
        for ending in run.endings.take() {
            let never = Self::cannot_give_up(&ending.device, cause) || on_devices;
            self.recorder.finished(ending.number, State::Failed);
            failed.push((ending.key, Fate::Back.or_never(never)));
        }
        let device = run.active.device().cloned();
        let never = run.active.is_settling()
            | (run.active.is_whole() && on_devices)
            | device.is_some_and(|device| Self::cannot_give_up(&device, cause) || on_devices);
        if let Some((key, number)) = run.active.take() {
            self.recorder.finished(number, State::Failed);
            failed.push((key, Fate::of(run.port.leases(number)).or_never(never)));
        }
        let mut messages = Vec::new();
        run.messages.take_all(|key, message| {
            let settling = message.staged.as_ref().is_some_and(|staged| staged.is_settling());
            messages.push((key, settling));
        });
        for (key, settling) in messages {
            let leases = run.messages.port().leases(key.number());
            failed.push((key, Fate::of(leases).or_never(settling)));
        }
        failed
    }

    /// The same of those that have not: nothing of theirs was lent.
    fn take_queued(&self, failed: &mut Vec<(Key, Fate)>, cause: &Error) {
        let mut table = self.table.lock();
        while let Some((key, operation, _)) = table.collectives.pop_front() {
            let never = operation.device().is_some_and(|device| Self::cannot_give_up(device, cause));
            self.recorder.finished(operation.number, State::Failed);
            failed.push((key, Fate::Back.or_never(never)));
        }
        while let Some((key, ..)) = table.messages.pop_front() {
            failed.push((key, Fate::Back));
        }
    }

    /// Puts the buffers of an operation that has failed where nobody uses them, if somebody else may touch them yet.
    fn set_apart(&self, key: Key, fate: Fate) {
        if matches!(fate, Fate::Back) {
            return;
        }
        let mut table = self.table.lock();
        if let Some(device) = table.devices.get(&key.number()) {
            device.lose();
        }
        let held = table.inflight.borrow(key);
        drop(table);
        match (held, fate) {
            (Some(held), Fate::Until(leases)) => keep_and_look(What::Buffers(held), leases),
            (held, _) => std::mem::forget(held),
        }
    }
}
