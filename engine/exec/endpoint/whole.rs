//! What takes the operations of an endpoint whole.

use super::Endpoint;
use super::table::Table;
use crate::error;
use crate::exec::inflight::Key;
use crate::exec::operation::{Executor, Operation};
use crate::exec::whole::BoundWhole;

impl Endpoint {
    /// From here on a library takes operations whole, of those kinds that it takes. All ranks do this between the same two
    /// operations.
    pub(crate) fn bind_whole(&self, whole: BoundWhole) {
        let _ = self.whole.set(whole);
    }

    pub(crate) fn whole(&self) -> Option<&BoundWhole> {
        self.whole.get()
    }

    /// An operation of `table`'s next number is submitted that a device runs or a library takes whole.
    #[cold]
    pub(super) fn submit_elsewhere(&self, table: &mut Table, key: Key, operation: &mut Operation) {
        let Operation { number, signature, .. } = *operation;
        if let Some(device) = operation.device() {
            device.submitted(number);
            table.devices.insert(key.number(), device.clone());
        }
        let order = self.whole().and_then(|bound| bound.order.as_ref());
        if let (Executor::Whole(whole), Some(order)) = (&mut operation.executor, order) {
            let what = error::Operation { comm: self.config.name.clone(), number, signature };
            whole.ticket = Some(order.queue(what, self.config.runtime.waker().clone()));
        }
    }

    /// The communicator is dead: the library ends what it does.
    pub(super) fn abort_whole(&self) {
        if let Some(bound) = self.whole() {
            bound.whole.abort();
        }
    }

    /// Of a dead communicator: whether a library may still touch the memory of operations that it took, or streams that it uses
    /// have not come to their ends.
    pub(super) fn is_whole_at_work(&self) -> bool {
        let Some(bound) = self.whole() else { return false };
        let has_ended = || self.binding().is_none_or(|binding| binding.is_quiet().unwrap_or(false));
        !(bound.whole.is_quiet() && has_ended())
    }
}
