//! [`Operation`]: an operation in flight, as modules see it that do not know the Python classes.

use std::sync::Arc;

use pyo3::prelude::*;

/// An operation in flight. Implemented by [`Flying`](crate::work::Flying).
pub(crate) trait Operation: Send + Sync {
    /// Polls the operation; if it is over, records its end. Called on the keeper's thread.
    fn look(self: Arc<Self>);
    /// Notes that somebody waits for the operation's end: from now on the keeper polls it until it is over.
    fn watch(self: Arc<Self>);
    fn is_over(&self) -> bool;
    /// Calls the callbacks, also those that are added meanwhile. Called on a thread of the group's [`Callbacks`](crate::callbacks::Callbacks), when
    /// the operation is over.
    fn call_back(&self, py: Python<'_>);
}
