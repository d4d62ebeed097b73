//! [`Operation`]: what others need of an operation in flight, without knowing how Python sees it.

use std::sync::Arc;

use pyo3::prelude::*;

/// An operation in flight, of whose end somebody is to be told. Implemented by [`Flying`](crate::work::Flying).
pub(crate) trait Operation: Send + Sync {
    /// On the keeper's thread: whether it has ended.
    fn look(self: Arc<Self>);
    /// Somebody is to be told of its end.
    fn watch(self: Arc<Self>);
    fn is_over(&self) -> bool;
    /// On the group's thread, when it is over: calls the callbacks, also those that come meanwhile.
    fn call_back(&self, py: Python<'_>);
}
