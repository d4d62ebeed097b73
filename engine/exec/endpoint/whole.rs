//! What takes the operations of an endpoint whole.

use std::sync::Arc;

use super::Endpoint;
use super::table::Table;
use crate::device::DeviceStream;
use crate::device::whole::{BoundWhole, Called, MessagePath};
use crate::error::{self, Error};
use crate::exec::inflight::Key;
use crate::exec::operation::{Executor, Operation};
use crate::types::mix;

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
            let name = [self.config.generation.into(), number].into_iter().fold(self.config.comm, mix);
            whole.ticket =
                Some(order.queue(Called { what, name, waker: self.config.runtime.waker().clone() }));
        }
    }

    /// What messages on this rank's device go by, from or to a buffer on this stream.
    pub(crate) fn message_path(
        &self,
        bound: &BoundWhole,
        user: &DeviceStream,
    ) -> Result<Arc<MessagePath>, Error> {
        let lacks = || Error::system("move a message on a device", "there is no device (a bug)");
        let (binding, order) = self.binding().zip(bound.order.as_ref()).ok_or_else(lacks)?;
        let mut path = binding.message_path.lock();
        if let Some(path) = &*path {
            return Ok(path.clone());
        }
        let stream = binding.ours.stream_for_messages(user)?;
        let (comm, waker) = (self.config.name.clone(), self.config.runtime.waker().clone());
        let (whole, order) = (bound.whole.clone(), order.clone());
        let path = path.insert(Arc::new(MessagePath { whole, order, stream, comm, waker }));
        Ok(path.clone())
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
