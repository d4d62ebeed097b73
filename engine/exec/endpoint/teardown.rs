//! How a dead communicator ends: first it takes back what it has lent (if ranks of this process are using that memory, it waits for them without a
//! time limit); then all its operations fail.

use std::sync::Arc;
use std::time::Duration;

use super::copy_backs::CopyBacks;
use super::progress::{Run, Teardown};
use super::table::Submitted;
use super::{Endpoint, Port};
use crate::error::Error;
use crate::exec::Progress;
use crate::exec::carrier::Carrier;
use crate::exec::inflight::Key;
use crate::exec::p2p::Direction;
use crate::exec::progress_thread::keep_and_look;
use crate::exec::quarantine::What;
use crate::link::exit::Lease;
use crate::link::waits::{Wait, kept};
use crate::trace::{Recorder, State};

/// How long a dead communicator, once its operations have ended, waits for staging slots that peers still hold.
pub(super) const HANG_UP: Duration = Duration::from_secs(1);

/// How long a dead communicator waits at most for peers in other processes, devices and copies that may touch its users' memory.
const READ_ON: Duration = Duration::from_millis(500);
/// How long it waits at most for a library that runs whole operations (such as NCCL) to end what it does.
const ABORT: Duration = Duration::from_secs(2);

/// What becomes of the buffers of an operation that has failed.
enum Fate {
    /// They go back to the user: nobody else touches them.
    Back,
    /// Peers in other processes, or links, may touch them until these leases are over.
    Until(Vec<Arc<Lease>>),
    /// They are on a device. Devices, and perhaps peers or links, may touch them until these leases are over.
    UntilOnDevice(Vec<Arc<Lease>>),
    /// Nobody can say for how long they may be touched.
    Never,
}

/// Until when devices may touch the memory of the communicator, which has failed; `None`: nobody can tell.
type OnDevices = Option<Arc<Lease>>;

impl Fate {
    /// What follows from the leases of the peers that were lent some of the buffers (`lent`), and of the links that may write to them (`written`).
    /// `None`: nobody can tell for how long.
    fn of(lent: Option<Vec<Arc<Lease>>>, written: Option<Vec<Arc<Lease>>>) -> Fate {
        match lent.zip(written).map(|(lent, written)| [lent, written].concat()) {
            Some(leases) if leases.is_empty() => Fate::Back,
            Some(leases) => Fate::Until(leases),
            None => Fate::Never,
        }
    }

    /// The leases until whose end the buffers are kept. `None`: they are kept for good, or not at all.
    fn leases(&self) -> Option<&[Arc<Lease>]> {
        match self {
            Fate::Until(leases) | Fate::UntilOnDevice(leases) => Some(leases),
            Fate::Back | Fate::Never => None,
        }
    }

    fn or_never(self, never: bool) -> Fate {
        if never { Fate::Never } else { self }
    }

    /// This fate, with what devices may do added: `touched` says whether they may still touch the buffers, `until` for how long.
    fn or_touched(self, touched: bool, until: &OnDevices) -> Fate {
        match (self, until) {
            (fate, _) if !touched => fate,
            (Fate::Never, _) | (_, None) => Fate::Never,
            (Fate::Back, Some(until)) if until.is_over() => Fate::Back,
            (Fate::Back, Some(until)) => Fate::UntilOnDevice(vec![until.clone()]),
            (Fate::Until(mut leases) | Fate::UntilOnDevice(mut leases), Some(until)) => {
                leases.push(until.clone());
                Fate::UntilOnDevice(leases)
            }
        }
    }
}

/// Whether copies that nothing else waits for may be under way, to or from a collective's memory.
fn is_settling(carrier: Option<&Arc<dyn Carrier>>) -> bool {
    carrier.is_some_and(|carrier| carrier.is_settling())
}

/// Gives up a collective that has failed for this cause. Returns whether a device may still touch its memory all the same.
fn cannot_give_up(carrier: Option<&Arc<dyn Carrier>>, cause: &Error) -> bool {
    let on_stream = carrier.and_then(|carrier| carrier.on_stream());
    on_stream.is_some_and(|op| op.cannot_give_up(cause))
}

impl Run {
    /// Whether nothing is queued, and no collective or message moves data or is on a device's stream.
    fn nothing_moves(&self, submitted: &Submitted) -> bool {
        let table = submitted.lock();
        !table.has_queued() && self.active.is_empty() && self.endings.is_empty() && self.messages.is_idle()
    }

    /// Fails all operations once nobody else can touch their buffers, or the time to wait is over: then buffers that may still be touched are set apart.
    pub(super) fn tear_down(&mut self, of: &Arc<Endpoint>) -> Progress {
        if kept(Wait::Revoked) {
            of.commands.cut();
        }
        of.look_again.set(None);
        if let Some(bound) = of.bound() {
            bound.abort();
        }
        if let Teardown::Failed(at) = self.teardown {
            if of.submitted.running() == 0 {
                return self.end_slots(of.config.now() - at);
            }
            if self.nothing_moves(&of.submitted) {
                // The results of the operations that are left are being copied back to a device; the end of a copy wakes whoever waits.
                let now = of.config.now();
                self.clock.look(now);
                self.end_overdue_copy_backs(of, now);
                return Progress::Blocked;
            }
        }
        let quiet = self.ports().fold(true, |quiet, port| port.revoke() & quiet);
        if !(self.messages.revoke() && quiet) {
            return Progress::Blocked;
        }
        if self.teardown == Teardown::NotBegun {
            self.ports().for_each(Port::hang_up);
            self.messages.hang_up();
            self.give_all_up(&of.submitted, &of.health.failed_of());
            self.teardown = Teardown::Revoked(of.config.now());
        }
        let since = match self.teardown {
            Teardown::Revoked(at) => of.config.now() - at,
            // The operations that fail now were submitted after all others had failed, and have lent nothing: so nothing is waited for.
            Teardown::NotBegun | Teardown::Failed(_) => ABORT,
        };
        let elsewhere = self.active.carrier().is_some_and(|carrier| carrier.is_elsewhere());
        let given = elsewhere | !self.endings.is_empty() | self.messages.is_launched();
        let whole = given && of.bound().is_some_and(|bound| bound.is_library_at_work(since));
        if whole && since < ABORT {
            return Progress::Blocked;
        }
        let lane = self.device.as_deref_mut();
        let on_devices = whole | of.bound().is_some_and(|bound| bound.is_touched(lane, since));
        let settling = is_settling(self.active.carrier()) | self.messages.is_settling();
        let elsewhere = self.port.is_touched_elsewhere() | self.messages.port().is_touched_elsewhere();
        if (elsewhere | on_devices | settling) && since < READ_ON {
            return Progress::Blocked;
        }
        if let Some(bound) = of.bound().filter(|_| on_devices) {
            bound.leave();
        }
        self.teardown = Teardown::Failed(of.config.now());
        self.fail_all(of, on_devices);
        Progress::Advanced
    }

    /// Tells the carriers of all collectives that have begun or are queued that these have failed.
    fn give_all_up(&self, submitted: &Submitted, cause: &Error) {
        let begun = self.endings.carriers().chain(self.active.carrier());
        begun.filter_map(|carrier| carrier.on_stream()).for_each(|op| op.give_up(cause));
        let table = submitted.lock();
        let queued = table.collectives.iter().filter_map(|(_, carried, _)| carried.carrier.as_ref());
        queued.filter_map(|carrier| carrier.on_stream()).for_each(|op| op.give_up(cause));
    }

    /// All operations have ended. A slot that a peer may still touch comes back when the peer has released it or hung up, or when the
    /// peer's process has exited. After [`HANG_UP`] nobody waits for slots any longer: those on links that have a lease go to the quarantine.
    fn end_slots(&mut self, since_failed: Duration) -> Progress {
        if self.reclaim() {
            return Progress::Idle;
        }
        if since_failed <= HANG_UP {
            return Progress::Blocked;
        }
        self.ports().for_each(Port::abandon);
        self.messages.port().abandon();
        Progress::Idle
    }

    /// Fails what has begun and what is queued.
    fn fail_all(&mut self, of: &Endpoint, on_devices: bool) {
        let cause = of.health.failed_of();
        let here = self.active.operation(&of.config.name);
        let bound = of.bound();
        let until = bound.and_then(|bound| bound.touched_until());
        let until = until.map(|until| Arc::new(Lease::written(&of.config.region, until)));
        let keep_remains = || {
            if let Some(remains) = bound.and_then(|bound| bound.remains()) {
                match &until {
                    Some(until) => keep_and_look(What::Remains(remains), vec![until.clone()]),
                    None => std::mem::forget(remains),
                }
            }
        };
        keep_remains();
        let mut failed = self.take_begun(of, (on_devices, &until), &cause);
        of.submitted.take_queued(&mut failed, &until, &of.recorder, &cause);
        // Once more, for operations that were given up only in between, as they were called after the communicator had failed.
        keep_remains();
        for (key, fate) in failed {
            of.submitted.set_apart(key, fate, &of.copy_backs);
            let error = match &here {
                Some(operation) => cause.clone().during(operation.clone()),
                None => cause.clone(),
            };
            of.finish(key, Err(error));
        }
    }

    /// Takes out the operations that have begun. What becomes of each one's buffers depends on what it has lent itself, and to whom.
    fn take_begun(
        &mut self,
        of: &Endpoint,
        (on_devices, until): (bool, &OnDevices),
        cause: &Error,
    ) -> Vec<(Key, Fate)> {
        let mut failed = Vec::new();
        for ending in self.endings.take() {
            let touched = cannot_give_up(Some(&ending.carrier), cause) || on_devices;
            of.recorder.finished(ending.number, State::Failed);
            let fate = Fate::Back.or_never(is_settling(Some(&ending.carrier)));
            failed.push((ending.key, fate.or_touched(touched, until)));
            of.commands.put_drop(ending.carrier);
        }
        let carrier = self.active.carrier();
        let settling = is_settling(carrier);
        let touched = cannot_give_up(carrier, cause)
            | carrier.is_some_and(|carrier| carrier.is_elsewhere() && on_devices);
        let written = self.port.written_until(0..of.config.size());
        if let Some((key, number)) = self.active.id() {
            of.recorder.finished(number, State::Failed);
            let fate = Fate::of(self.port.leases(number), written.clone()).or_never(settling);
            let fate = fate.or_touched(touched, until);
            if let Fate::Back = fate {
                self.active.make_values_valid();
            }
            failed.push((key, fate));
        }
        self.clear(of, written);
        let mut messages = Vec::new();
        self.messages.take_all(|key, message, is_launched| {
            let settling = message.staged.as_ref().is_some_and(|staged| staged.is_settling());
            let settling = settling | (is_launched && on_devices);
            messages.push((key, settling, message.clone()));
        });
        for (key, settling, message) in messages {
            let port = self.messages.port();
            let end = message.peer + usize::from(message.direction == Direction::Recv);
            let fate = Fate::of(port.leases(key.number()), port.written_until(message.peer..end));
            let fate = fate.or_never(settling);
            if let Fate::Back = fate {
                message.wrong_value();
            }
            failed.push((key, fate));
        }
        failed
    }

    /// Ends what ran the collective. Links that still write may write to memory of the run's own: that is then kept until the leases of these links
    /// (`written`) are over; `None`: for good.
    fn clear(&mut self, of: &Endpoint, written: Option<Vec<Arc<Lease>>>) {
        if written.as_ref().is_some_and(Vec::is_empty) {
            self.take_active();
            return;
        }
        let new = Run::active(&of.config);
        if let Some(device) = &mut self.device {
            device.clear();
        }
        let memory = (std::mem::replace(&mut self.active, new), of.token.clone());
        match written {
            Some(leases) => keep_and_look(What::Run(Box::new(memory)), leases),
            None => std::mem::forget(memory),
        }
    }
}

impl Submitted {
    /// Takes out the operations that have not begun. Nothing of theirs was lent to peers.
    fn take_queued(
        &self,
        failed: &mut Vec<(Key, Fate)>,
        until: &OnDevices,
        recorder: &Recorder,
        cause: &Error,
    ) {
        // Dropped once the table is unlocked: an operation may own a user's reduction function, whose drop runs the user's code.
        let mut queued = Vec::new();
        let mut table = self.lock();
        while let Some((key, carried, _)) = table.collectives.pop_front() {
            let carrier = carried.carrier.as_ref();
            let touched = cannot_give_up(carrier, cause);
            recorder.finished(carried.operation.number, State::Failed);
            failed.push((key, Fate::Back.or_never(is_settling(carrier)).or_touched(touched, until)));
            queued.push(carried);
        }
        while let Some((key, ..)) = table.messages.pop_front() {
            failed.push((key, Fate::Back));
        }
        drop(table);
        drop(queued);
    }

    /// If somebody else may still touch the buffers of an operation that has failed, puts them into quarantine, or leaks them.
    fn set_apart(&self, key: Key, fate: Fate, copy_backs: &CopyBacks) {
        if matches!(fate, Fate::Back) {
            return;
        }
        let mut table = self.lock();
        if let Some(on_stream) = table.joinable.get(&key.number()).and_then(|carrier| carrier.on_stream()) {
            // If a stream has joined the operation, whoever joined it may have the buffers, and learns from this that they must be kept.
            on_stream.lose(fate.leases().map(<[_]>::to_vec));
        }
        let (held, carrier) = (table.inflight.borrow(key), copy_backs.carrier_of(key));
        drop(table);
        let carrier = carrier.map(|carrier| Box::new(carrier) as Box<dyn Send>);
        match (held, fate) {
            (Some(held), Fate::Until(leases)) => keep_and_look(What::Buffers(held, carrier), leases),
            (Some(held), Fate::UntilOnDevice(leases)) => {
                keep_and_look(What::OnDevice(held, carrier), leases);
            }
            (None, Fate::Until(leases) | Fate::UntilOnDevice(leases)) => {
                if let Some(carrier) = carrier {
                    keep_and_look(What::Remains(carrier), leases);
                }
            }
            kept => std::mem::forget((kept, carrier)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_that_may_be_touched_until_leases_are_over_are_kept_no_longer_than_that() {
        assert!(Fate::Until(Vec::new()).leases().is_some());
        assert!(Fate::UntilOnDevice(Vec::new()).leases().is_some());
        assert!(Fate::Never.leases().is_none());
    }
}
