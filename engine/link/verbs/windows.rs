//! Memory windows of type 2B: each opens a part of a registered buffer to the peer at the other end of one queue pair, for reading, from the request that
//! binds it until the request that invalidates its key.

use std::ptr::NonNull;
use std::sync::Arc;

use allstream_sys::verbs::{IbvMw, VerbsError};

use super::domain::Domain;
use crate::forked;

/// The bits of a key that change with each binding.
const COUNTED: u32 = 0xff;

/// A window, which one request binds at a time.
pub(super) struct Window {
    domain: Arc<Domain>,
    /// `None` once it was given back.
    handle: Option<NonNull<IbvMw>>,
    /// The key that the last binding gave it, or that it had at first.
    key: u32,
}

// SAFETY: the pointer is a handle of libibverbs, which any thread may use; the other fields change only through `&mut`.
unsafe impl Send for Window {}

impl Window {
    pub(super) fn new(domain: &Arc<Domain>) -> Result<Window, VerbsError> {
        // SAFETY: the protection domain exists as long as `domain`.
        let handle = NonNull::new(unsafe { domain.verbs.alloc_mw(domain.domain()) }?);
        // SAFETY: the window was just made.
        let key = handle.map_or(0, |handle| unsafe { handle.as_ref() }.rkey);
        Ok(Window { domain: domain.clone(), handle, key })
    }

    /// The window, for the request that binds it next, and the key that the window has from then on.
    pub(super) fn next_binding(&mut self) -> (*mut IbvMw, u32) {
        self.key = self.key & !COUNTED | self.key.wrapping_add(1) & COUNTED;
        (self.handle.map_or(std::ptr::null_mut(), NonNull::as_ptr), self.key)
    }

    /// The request that binds the window was posted, or may have been. The library does not note the new key, and needs it at the next binding.
    pub(super) fn is_posted(&mut self) {
        if let Some(mut handle) = self.handle {
            // SAFETY: the window exists, and nobody else uses its structure now: requests that name it are posted under the link's lock.
            unsafe { handle.as_mut() }.rkey = self.key;
        }
    }

    /// The key of the last binding.
    pub(super) fn key(&self) -> u32 {
        self.key
    }

    /// Gives the window back, and so ends its binding. Returns whether the peer cannot read through it any more.
    pub(super) fn end(&mut self) -> bool {
        if forked::is_forked() {
            return false; // the window is the parent's
        }
        let Some(handle) = self.handle.take() else { return true };
        // SAFETY: `new` made the window, which is given back only here. A window that is not bound is named by no request; if it is bound, no further
        // request will name it, and the library allows to free it.
        match unsafe { self.domain.verbs.dealloc_mw(handle.as_ptr()) } {
            Ok(()) => true,
            Err(error) => {
                tracing::error!("a memory window stays open: {error}");
                self.handle = Some(handle);
                false
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.end();
    }
}
