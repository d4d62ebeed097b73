//! The calls that move data, and those that make memory windows. In C they are inline functions of the header that call through the open device's
//! table of functions ([`IbvContextOps`](super::IbvContextOps)); the methods here call through that table, too.

use std::ffi::c_int;
use std::ptr;

use super::types::{IbvCq, IbvMw, IbvPd, IbvQp, IbvRecvWr, IbvSendWr, IbvWc, MwType};
use super::{Verbs, VerbsError};

/// The error of a call that the device's driver does not implement.
fn missing(call: &'static str) -> VerbsError {
    VerbsError { call, code: libc::EOPNOTSUPP }
}

impl Verbs {
    /// `ibv_post_send`: posts a request, or a list of requests. If one of them is refused, those before it are posted all the same.
    ///
    /// # Safety
    /// As the manual page asks: the queue pair exists; the list and what it names can be read. Memory that a request names stays
    /// registered and unchanged until the request's completion was seen or the queue pair is destroyed (with `IBV_SEND_INLINE` it need not).
    ///
    /// # Errors
    /// The driver's: `ENOMEM` where the queue is full.
    pub unsafe fn post_send(&self, pair: *mut IbvQp, request: *mut IbvSendWr) -> Result<(), VerbsError> {
        let mut bad = ptr::null_mut();
        // SAFETY: the pair exists (the caller's promise), and so does the open device that the pair was made on.
        let post = unsafe { (*(*pair).context).ops.post_send };
        let post = post.ok_or_else(|| missing("ibv_post_send"))?;
        // SAFETY: the caller's promise; `bad` is room for the address of a refused request.
        self.done("ibv_post_send", unsafe { post(pair, request, &raw mut bad) })
    }

    /// `ibv_post_recv`.
    ///
    /// # Safety
    /// As for [`post_send`](Verbs::post_send), but the device writes to the memory, which nobody else may use meanwhile.
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

    /// `ibv_poll_cq`: moves completions from the queue to `into`, the oldest first, and returns how many.
    ///
    /// # Safety
    /// The completion queue exists.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn poll_cq(&self, queue: *mut IbvCq, into: &mut [IbvWc]) -> Result<usize, VerbsError> {
        // SAFETY: the queue exists (the caller's promise), and so does the open device that the queue was made on.
        let poll = unsafe { (*(*queue).context).ops.poll_cq };
        let poll = poll.ok_or_else(|| missing("ibv_poll_cq"))?;
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue exists, and `into` is room for `most` completions.
        let count = unsafe { poll(queue, most, into.as_mut_ptr()) };
        // A negative count says that the queue cannot be read, and is not an error number.
        usize::try_from(count).map_err(|_| VerbsError { call: "ibv_poll_cq", code: libc::EIO })
    }

    /// `ibv_req_notify_cq`: asks that the queue's channel gets an event at the next completion.
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
        // SAFETY: the queue exists (the caller's promise). 0: the event is for any completion, not only for solicited ones.
        self.done("ibv_req_notify_cq", unsafe { notify(queue, 0) })
    }

    /// `ibv_alloc_mw`: makes a window of type 2, which opens no memory until a request binds it.
    ///
    /// # Safety
    /// The protection domain exists.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn alloc_mw(&self, domain: *mut IbvPd) -> Result<*mut IbvMw, VerbsError> {
        // SAFETY: the domain exists (the caller's promise), and so does the open device that the domain was made on.
        let alloc = unsafe { (*(*domain).context).ops.alloc_mw };
        let alloc = alloc.ok_or_else(|| missing("ibv_alloc_mw"))?;
        // SAFETY: the domain exists (the caller's promise).
        self.made("ibv_alloc_mw", unsafe { alloc(domain, MwType::TYPE_2.0) })
    }

    /// `ibv_dealloc_mw`: frees a window. If the window is bound, its binding ends.
    ///
    /// # Safety
    /// The window exists, and is not used any more.
    ///
    /// # Errors
    /// The driver's. The window then still exists.
    pub unsafe fn dealloc_mw(&self, window: *mut IbvMw) -> Result<(), VerbsError> {
        // SAFETY: the window exists (the caller's promise), and so does the open device that the window was made on.
        let dealloc = unsafe { (*(*window).context).ops.dealloc_mw };
        let dealloc = dealloc.ok_or_else(|| missing("ibv_dealloc_mw"))?;
        // SAFETY: the caller's promise.
        self.done("ibv_dealloc_mw", unsafe { dealloc(window) })
    }
}
