//! The calls that move data. In C they are inline functions of the header, which go through the table of the open device
//! ([`IbvContextOps`](super::IbvContextOps)); so they do here.

use std::ffi::c_int;
use std::ptr;

use super::types::{IbvCq, IbvQp, IbvRecvWr, IbvSendWr, IbvWc};
use super::{Verbs, VerbsError};

/// Of a device whose driver leaves a call out.
fn missing(call: &'static str) -> VerbsError {
    VerbsError { call, code: libc::EOPNOTSUPP }
}

impl Verbs {
    /// `ibv_post_send`: a request, or a list of them. Where it fails, those before the one that was refused are on their way.
    ///
    /// # Safety
    /// As the manual page asks: the queue pair exists, the list and what it names can be read. Memory that a request names (but with
    /// `IBV_SEND_INLINE`) stays registered, and stays as it is, until the request's completion was seen, or the queue pair is destroyed.
    ///
    /// # Errors
    /// The driver's: `ENOMEM` where the queue is full.
    pub unsafe fn post_send(&self, pair: *mut IbvQp, request: *mut IbvSendWr) -> Result<(), VerbsError> {
        let mut bad = ptr::null_mut();
        // SAFETY: the pair exists (the caller's promise), and so does the device that it is of.
        let post = unsafe { (*(*pair).context).ops.post_send };
        let post = post.ok_or_else(|| missing("ibv_post_send"))?;
        // SAFETY: the caller's promise; room for the request that is refused.
        self.done("ibv_post_send", unsafe { post(pair, request, &raw mut bad) })
    }

    /// `ibv_post_recv`.
    ///
    /// # Safety
    /// As for [`post_send`](Verbs::post_send); the memory is written to.
    ///
    /// # Errors
    /// The driver's: `ENOMEM` where the queue is full.
    pub unsafe fn post_recv(&self, pair: *mut IbvQp, request: *mut IbvRecvWr) -> Result<(), VerbsError> {
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post_send`.
        let post = unsafe { (*(*pair).context).ops.post_recv };
        let post = post.ok_or_else(|| missing("ibv_post_recv"))?;
        // SAFETY: as in `post_send`.
        self.done("ibv_post_recv", unsafe { post(pair, request, &raw mut bad) })
    }

    /// `ibv_poll_cq`: how many completions it has put there, the oldest first.
    ///
    /// # Safety
    /// The completion queue exists.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn poll_cq(&self, queue: *mut IbvCq, into: &mut [IbvWc]) -> Result<usize, VerbsError> {
        // SAFETY: the queue exists (the caller's promise), and so does the device that it is of.
        let poll = unsafe { (*(*queue).context).ops.poll_cq };
        let poll = poll.ok_or_else(|| missing("ibv_poll_cq"))?;
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: room for so many.
        let count = unsafe { poll(queue, most, into.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| VerbsError { call: "ibv_poll_cq", code: count.saturating_abs() })
    }

    /// `ibv_req_notify_cq`: the queue's channel is to tell of the next completion.
    ///
    /// # Safety
    /// The completion queue exists.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn req_notify_cq(&self, queue: *mut IbvCq) -> Result<(), VerbsError> {
        // SAFETY: as in `poll_cq`.
        let notify = unsafe { (*(*queue).context).ops.req_notify_cq };
        let notify = notify.ok_or_else(|| missing("ibv_req_notify_cq"))?;
        // SAFETY: the caller's promise. Any completion, not only of those that ask for it.
        self.done("ibv_req_notify_cq", unsafe { notify(queue, 0) })
    }
}
