//! The carrier of operations on device memory that the host runs, on copies of that memory.

use std::sync::Arc;
use std::task::Waker;

use crate::device::Staged;
use crate::error::Error;
use crate::exec::Work;
use crate::exec::carrier::{Carrier, Ended, Lanes, Passed, Started};
use crate::mem::{ALL, Reach};

/// An operation that the host runs on copies of device memory.
pub(crate) struct OnHost(pub(crate) Arc<Staged>);

impl Carrier for OnHost {
    fn reach(&self) -> Reach {
        // Memory that is copied in one piece has come when the operation begins, as the operation starts only after that copy.
        if self.0.is_striped() { (0, 0) } else { ALL }
    }

    fn arrived(&self, known: usize, waker: &Waker) -> Result<(usize, Reach), Error> {
        let arrived = self.0.arrived(known, waker)?;
        Ok((arrived, self.0.reach(arrived)))
    }

    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error> {
        let (any, is_complete) = lanes.pass_on_host(work)?;
        if any && self.0.is_striped() {
            self.0.done(lanes.stored_on_host(*work.next).min(work.reach));
        }
        Ok(if is_complete && work.reach == ALL { Passed::Complete } else { Passed::Going(any) })
    }

    fn is_settling(&self) -> bool {
        self.0.is_settling()
    }

    fn copies_back(&self) -> bool {
        true
    }

    fn copy_back(self: Arc<Self>, started: Started, ended: Ended) {
        self.0.back(started, ended);
    }
}
