//! What moves data, or would have to do with it: not here.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use allstream_sys::verbs::{
    IbvAsyncEvent, IbvCompChannel, IbvContext, IbvContextOps, IbvCq, IbvMr, IbvPd, IbvQp, IbvQpAttr,
    IbvQpInitAttr,
};

use super::{complain, fail};

/// Functions that are there and refuse: pointers are null, numbers say why.
macro_rules! refuses {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> $answer {
            $(let _ = $argument;)*
            fail(libc::EOPNOTSUPP);
            <$answer as Refusal>::REFUSAL
        }
    )*};
}

trait Refusal {
    const REFUSAL: Self;
}

impl Refusal for c_int {
    const REFUSAL: c_int = libc::EOPNOTSUPP;
}

impl<T> Refusal for *mut T {
    const REFUSAL: *mut T = ptr::null_mut();
}

refuses! {
    ibv_alloc_pd(context: *mut IbvContext) -> *mut IbvPd;
    ibv_dealloc_pd(domain: *mut IbvPd) -> c_int;
    ibv_reg_mr(domain: *mut IbvPd, at: *mut c_void, bytes: usize, access: c_int) -> *mut IbvMr;
    ibv_dereg_mr(region: *mut IbvMr) -> c_int;
    ibv_create_comp_channel(context: *mut IbvContext) -> *mut IbvCompChannel;
    ibv_destroy_comp_channel(channel: *mut IbvCompChannel) -> c_int;
    ibv_create_cq(context: *mut IbvContext, entries: c_int, data: *mut c_void, channel: *mut IbvCompChannel, vector: c_int) -> *mut IbvCq;
    ibv_destroy_cq(queue: *mut IbvCq) -> c_int;
    ibv_get_cq_event(channel: *mut IbvCompChannel, queue: *mut *mut IbvCq, data: *mut *mut c_void) -> c_int;
    ibv_create_qp(domain: *mut IbvPd, attributes: *mut IbvQpInitAttr) -> *mut IbvQp;
    ibv_modify_qp(pair: *mut IbvQp, attributes: *mut IbvQpAttr, mask: c_int) -> c_int;
    ibv_destroy_qp(pair: *mut IbvQp) -> c_int;
    ibv_get_async_event(context: *mut IbvContext, event: *mut IbvAsyncEvent) -> c_int;
    ibv_fork_init() -> c_int;
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_cq_events(_queue: *mut IbvCq, _count: c_uint) {
    complain("events of a queue are acknowledged, and no queue has ever been made");
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_async_event(_event: *mut IbvAsyncEvent) {
    complain("an event is acknowledged, and none has ever come");
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(_status: c_uint) -> *const c_char {
    c"a status (for tests)".as_ptr()
}

/// No device has any.
pub(crate) fn ops() -> IbvContextOps {
    IbvContextOps {
        _before_alloc_mw: [ptr::null_mut(); 7],
        alloc_mw: None,
        bind_mw: None,
        dealloc_mw: None,
        _before_poll_cq: ptr::null_mut(),
        poll_cq: None,
        req_notify_cq: None,
        _before_post_send: [ptr::null_mut(); 12],
        post_send: None,
        post_recv: None,
        _after_post_recv: [ptr::null_mut(); 5],
    }
}
