//! What is counted for tests: calls by name, and what happens behind them.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! calls {
    ($($call:ident $name:literal;)*) => {
        /// A function that a program calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub(crate) enum Call { $($call,)* }

        /// Their names in C, in the same order.
        pub(crate) const NAMES: &[&str] = &[$($name,)*];
    };
}

calls! {
    GetDeviceList "ibv_get_device_list";
    OpenDevice "ibv_open_device";
    CloseDevice "ibv_close_device";
    QueryDevice "ibv_query_device";
    QueryPort "ibv_query_port";
    QueryGidTable "_ibv_query_gid_table";
    AllocPd "ibv_alloc_pd";
    DeallocPd "ibv_dealloc_pd";
    RegMr "ibv_reg_mr";
    DeregMr "ibv_dereg_mr";
    AllocMw "ibv_alloc_mw";
    DeallocMw "ibv_dealloc_mw";
    CreateCompChannel "ibv_create_comp_channel";
    DestroyCompChannel "ibv_destroy_comp_channel";
    CreateCq "ibv_create_cq";
    DestroyCq "ibv_destroy_cq";
    PollCq "ibv_poll_cq";
    ReqNotifyCq "ibv_req_notify_cq";
    GetCqEvent "ibv_get_cq_event";
    AckCqEvents "ibv_ack_cq_events";
    CreateQp "ibv_create_qp";
    ModifyQp "ibv_modify_qp";
    DestroyQp "ibv_destroy_qp";
    PostSend "ibv_post_send";
    PostRecv "ibv_post_recv";
    GetAsyncEvent "ibv_get_async_event";
    AckAsyncEvent "ibv_ack_async_event";
    ForkInit "ibv_fork_init";
}

static CALLS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

impl Call {
    pub(crate) fn name(self) -> &'static str {
        NAMES[self as usize]
    }

    /// Counts one.
    pub(crate) fn count(self) {
        CALLS[self as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// How often the function of this name has been called; `None`: there is none.
pub(crate) fn calls(name: &str) -> Option<u64> {
    let at = NAMES.iter().position(|known| *known == name)?;
    Some(CALLS[at].load(Ordering::Relaxed))
}

/// What there is now, and what has happened since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Report {
    /// What lives.
    pub(crate) contexts: u64,
    pub(crate) domains: u64,
    pub(crate) regions: u64,
    /// Whole pages, of each region by itself, as the kernel counts them.
    pub(crate) pinned_bytes: u64,
    pub(crate) windows: u64,
    pub(crate) channels: u64,
    pub(crate) completion_queues: u64,
    pub(crate) queue_pairs: u64,
    /// Accesses to this process's memory, its own or a peer's, that the keys do not allow: not registered (any more), beyond the bounds,
    /// or without the permission. Each has ended in an error.
    pub(crate) refused_accesses: u64,
    /// Memory that was unmapped while it was registered.
    pub(crate) unmapped: u64,
    /// Times that a message of a peer's found no receive posted.
    pub(crate) no_receive: u64,
    /// Times that a queue pair began again from a packet that it had sent.
    pub(crate) retransmissions: u64,
    /// Completion queues that had no room for a completion.
    pub(crate) overflows: u64,
    /// Requests that were flushed.
    pub(crate) flushed: u64,
    /// Requests to send that were posted, READs and bindings of windows too.
    pub(crate) requests: u64,
    /// Completions that were polled.
    pub(crate) completions: u64,
    /// Events of completion queues that were told by a channel.
    pub(crate) wakeups: u64,
    /// The most bytes that were pinned at a time.
    pub(crate) most_pinned_bytes: u64,
}

/// Answers as the library's functions do that leave their reason in `errno`.
pub(crate) fn fail(code: c_int) {
    // SAFETY: this thread's own number.
    unsafe { *libc::__errno_location() = code };
}
