//! Counters for tests: calls by name, and what the library does.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! calls {
    ($($call:ident $name:literal;)*) => {
        /// A function that a program calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub(crate) enum Call { $($call,)* }

        /// The names of these functions in C, in the same order.
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

    /// Counts a call.
    pub(crate) fn count(self) {
        CALLS[self as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// How often the function of this name has been called; `None`: there is no such function.
pub(crate) fn calls(name: &str) -> Option<u64> {
    let at = NAMES.iter().position(|known| *known == name)?;
    Some(CALLS[at].load(Ordering::Relaxed))
}

/// What exists now, and what has happened since the process began. The tests have a copy of this layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Report {
    /// Open devices; the numbers down to `queue_pairs` are those of objects that exist now.
    pub(crate) contexts: u64,
    pub(crate) domains: u64,
    pub(crate) regions: u64,
    /// Bytes of the pages that regions touch. A page counts once for each region, as the kernel counts it.
    pub(crate) pinned_bytes: u64,
    pub(crate) windows: u64,
    pub(crate) channels: u64,
    pub(crate) completion_queues: u64,
    pub(crate) queue_pairs: u64,
    /// Accesses to this process's memory, by itself or by a peer, that the keys do not allow: the memory was not registered (any more), or the
    /// access was out of bounds or not permitted. Each has ended in an error.
    pub(crate) refused_accesses: u64,
    /// Times that memory was found to be unmapped while it was registered.
    pub(crate) unmapped: u64,
    /// Times that a message of a peer found no posted receive.
    pub(crate) no_receive: u64,
    /// Times that a queue pair began to send packets again from an earlier one.
    pub(crate) retransmissions: u64,
    /// Completions that were lost because their queue was full.
    pub(crate) overflows: u64,
    /// Requests that were flushed.
    pub(crate) flushed: u64,
    /// Requests that were posted by `ibv_post_send`, including READs and bindings of windows.
    pub(crate) requests: u64,
    /// Completions that were polled.
    pub(crate) completions: u64,
    /// Events of completion queues that were put into a channel.
    pub(crate) wakeups: u64,
    /// The most bytes that were pinned at the same time.
    pub(crate) most_pinned_bytes: u64,
}

/// Stores the error code in `errno`.
pub(crate) fn fail(code: c_int) {
    // SAFETY: the address is that of this thread's own `errno`.
    unsafe { *libc::__errno_location() = code };
}
