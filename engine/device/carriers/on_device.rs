//! The carrier of operations that the ranks' devices run by their plans.

use std::any::Any;
use std::sync::Arc;

use crate::device::operation::DeviceOp;
use crate::error::{Error, Missing, MissingState};
use crate::exec::Work;
use crate::exec::carrier::{Carrier, Lanes, OnStream, Passed, Submission};
use crate::link::exit::Lease;
use crate::types::Rank;

/// An operation whose parts the rank's device runs.
pub(crate) struct OnDevice(pub(crate) Arc<DeviceOp>);

impl Carrier for OnDevice {
    fn submitted(&self, _: &Submission<'_>) {
        self.0.submitted();
    }

    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error> {
        let nowhere =
            || Error::system("run a collective on a device", "there are no links to devices (a bug)");
        let lane = lanes.device.as_mut().ok_or_else(nowhere)?;
        if !self.0.may_begin() {
            return Ok(Passed::Going(false));
        }
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

    /// True while ranks in other processes lend memory that is not ready: nothing wakes this rank when that memory becomes ready, so the endpoint
    /// has to ask. Also true while the operation is put off, as nothing wakes this rank when the operation has been put off for too long.
    fn is_to_be_asked(&self) -> bool {
        self.0.is_held_back() || self.0.binding.far.as_ref().is_some_and(|far| far.is_unready())
    }

    /// The driver, where this rank has arrived last and is giving it the launch for all ranks: the peers wait until that call returns.
    fn held_up(&self) -> Option<MissingState> {
        let by = || format!("the driver of {:?}, which does not answer", self.0.stream().device());
        self.0.is_launching().then(|| MissingState::NotEnded { by: by() })
    }

    fn lacks_inputs(&self) -> bool {
        self.0.lacks_inputs()
    }

    fn unready(&self) -> Vec<Rank> {
        self.0.unready()
    }

    fn on_stream(&self) -> Option<&dyn OnStream> {
        Some(&self.0)
    }
}

impl OnStream for Arc<DeviceOp> {
    fn is_enqueued(&self) -> bool {
        DeviceOp::is_enqueued(self)
    }

    fn is_over(&self) -> Result<bool, Error> {
        DeviceOp::is_over(self)
    }

    fn tell(&self, then: Box<dyn FnOnce() + Send>) {
        self.watch(then);
    }

    fn has_inputs(&self) -> bool {
        DeviceOp::has_inputs(self)
    }

    fn is_taken(&self) -> bool {
        DeviceOp::is_taken(self)
    }

    /// The ranks whose inputs are not there. If no input is missing: this rank, if a library has put the operation on the stream and has not ended
    /// it. Otherwise the ranks whose devices are still at work, or whose drivers have not put all of the operation on the stream.
    fn late(&self, us: Rank) -> Vec<Missing> {
        let late = DeviceOp::late(self).into_iter();
        let missing: Vec<_> = late.map(|rank| Missing { rank, state: MissingState::NotReady }).collect();
        if !missing.is_empty() {
            return missing;
        }
        let not_ended = |rank, by| Missing { rank, state: MissingState::NotEnded { by } };
        if let Some(library) = self.taken_by().filter(|_| self.is_put()) {
            return vec![not_ended(us, library.name().to_owned())];
        }
        let device = self.stream().device();
        let busy = self.at_work().into_iter().map(|(rank, is_put)| match is_put {
            true => not_ended(rank, "its device".to_owned()),
            false if rank == us => {
                not_ended(rank, format!("the driver of {device:?}, which does not answer"))
            }
            false => not_ended(rank, "its device's driver, which does not answer".to_owned()),
        });
        busy.collect()
    }

    fn give_up(&self, cause: &Error) {
        DeviceOp::give_up(self, cause);
    }

    fn cannot_give_up(&self, cause: &Error) -> bool {
        DeviceOp::cannot_give_up(self, cause)
    }

    fn lose(&self, until: Option<Vec<Arc<Lease>>>) {
        DeviceOp::lose(self, until);
    }

    fn joins(&self) -> Arc<dyn Any + Send + Sync> {
        self.clone()
    }
}
