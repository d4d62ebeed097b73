//! The carrier of operations that the rank's device runs, by their plans.

use std::any::Any;
use std::sync::Arc;

use crate::device::operation::DeviceOp;
use crate::error::{Error, Missing, MissingState};
use crate::exec::Work;
use crate::exec::carrier::{Carrier, Lanes, Passed, Submission};
use crate::types::Rank;

/// An operation whose parts the rank's device runs.
pub(crate) struct OnDevice(pub(crate) Arc<DeviceOp>);

impl Carrier for OnDevice {
    fn submitted(&self, at: &Submission<'_>) {
        self.0.submitted(at.number);
    }

    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error> {
        let nowhere =
            || Error::system("run a collective on a device", "there are no links to devices (a bug)");
        let lane = lanes.device.as_mut().ok_or_else(nowhere)?;
        self.0.begin()?;
        let (any, is_complete) = lane.pass(work)?;
        if !is_complete {
            return Ok(Passed::Going(any));
        }
        self.0.ends();
        Ok(Passed::OnStream)
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn is_enqueued(&self) -> bool {
        self.0.is_enqueued()
    }

    fn is_over(&self) -> Result<bool, Error> {
        self.0.is_over()
    }

    fn tell(&self, then: Box<dyn FnOnce() + Send>) {
        self.0.watch(then);
    }

    fn has_inputs(&self) -> bool {
        self.0.has_inputs()
    }

    fn is_taken(&self) -> bool {
        self.0.is_taken()
    }

    fn late(&self, us: Rank) -> Vec<Missing> {
        late(&self.0, us)
    }

    fn give_up(&self, cause: &Error) {
        self.0.give_up(cause);
    }

    fn cannot_give_up(&self, cause: &Error) -> bool {
        self.0.cannot_give_up(cause)
    }

    fn lose(&self) {
        self.0.lose();
    }

    fn joins(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self.0.clone())
    }
}

/// Who keeps an operation from its end: the ranks whose inputs are not there. If there are none, this rank (`us`), on which the driver has not
/// put all of it on the stream, or the library that took it has not ended it.
pub(super) fn late(device: &DeviceOp, us: Rank) -> Vec<Missing> {
    let late = device.late().into_iter();
    let mut missing: Vec<_> = late.map(|rank| Missing { rank, state: MissingState::NotReady }).collect();
    let by = match device.is_enqueued() {
        false => Some(format!("the driver of {:?}, which does not answer", device.stream().device())),
        true => device.taken_by().map(|by| by.name().to_owned()),
    };
    if let Some(by) = by.filter(|_| missing.is_empty()) {
        missing.push(Missing { rank: us, state: MissingState::NotEnded { by } });
    }
    missing
}
