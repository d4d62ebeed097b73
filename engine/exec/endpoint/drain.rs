//! How a dead communicator ends: lent memory comes back, then everything fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Endpoint, HANG_UP, Port, Run};
use crate::error::Error;
use crate::exec::Progress;
use crate::exec::device::DeviceOp;
use crate::trace::State;

/// How long a dead communicator waits for peers in other processes that read its users' memory.
const READ_ON: Duration = Duration::from_millis(500);

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
        if let Some(at) = run.drained.filter(|_| self.table.lock().inflight.running() == 0) {
            // Slots that peers may still read come back when they have hung up; of a peer that never does (it was
            // stopped, or its process is gone), they are not used again.
            let back = run.ports().fold(true, |back, port| port.reclaim() & back) & run.messages.reclaim();
            return if back || at.elapsed() > HANG_UP { Progress::Idle } else { Progress::Blocked };
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
        let on_devices = self.is_on_devices(run, revoked.elapsed());
        let settling = run.active.is_settling() | run.messages.is_settling();
        let kept = run.port.is_read_elsewhere() | run.messages.is_read_elsewhere() | on_devices | settling;
        if kept && revoked.elapsed() < READ_ON {
            return Progress::Blocked;
        }
        if on_devices {
            self.leave_on_devices();
        }
        run.drained = Some(Instant::now());
        let cause = self.cause().unwrap_or(Error::Closed { call: "operation".into() });
        let here = run.active.operation(&self.config.name);
        let mut keys = Vec::new();
        let mut lost = Vec::new();
        let mut give_up = |device: &DeviceOp, key| {
            // Where a rank went on without waiting for others, those may touch it yet.
            if let Err(error) = device.give_up(&cause).and_then(|()| device.check()) {
                tracing::warn!(
                    "the buffers of a collective that failed on a device are not given back: {error}"
                );
                lost.push(key);
            }
        };
        for ending in run.endings.take() {
            give_up(&ending.device, ending.key);
            self.recorder.finished(ending.number, State::Failed);
            keys.push(ending.key);
        }
        if let (Some(device), Some(key)) = (run.active.device(), run.active.key()) {
            give_up(device, key);
        }
        if let Some((key, number)) = run.active.take(&mut run.port) {
            self.recorder.finished(number, State::Failed);
            keys.push(key);
        }
        run.messages.take_all(|key| keys.push(key));
        let mut table = self.table.lock();
        while let Some((key, request, _)) = table.collectives.pop_front() {
            if let Some(device) = &request.device {
                give_up(device, key);
            }
            self.recorder.finished(request.number, State::Failed);
            keys.push(key);
        }
        while let Some((key, ..)) = table.messages.pop_front() {
            keys.push(key);
        }
        drop(table);
        for key in keys {
            if kept || lost.contains(&key) {
                // Quarantine: a peer that never hangs up (it was stopped, or is gone), or a device, may touch it yet.
                let mut table = self.table.lock();
                if let Some(device) = table.devices.get(&key.number()) {
                    device.lose();
                }
                let held = table.inflight.borrow(key);
                drop(table);
                std::mem::forget(held);
            }
            let error = match &here {
                Some(operation) => cause.clone().during(operation.clone()),
                None => cause.clone(),
            };
            self.finish(key, Err(error));
        }
        Progress::Advanced
    }
}
