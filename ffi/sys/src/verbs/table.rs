//! The functions of the library that are used, with the versions of their symbols.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::types::*;
use super::{Verbs, VerbsError};
use crate::functions::functions;

// The library exports no functions that move data (`ibv_poll_cq`, `ibv_post_send`, `ibv_post_recv`, `ibv_req_notify_cq`), and none for memory
// windows: these are called through `IbvContext::ops`. All functions of this table are in rdma-core 32 (2020) and in every version since.
functions! {
    Verbs answers c_int, fails with VerbsError, is called:
        "As the library's manual pages ask: objects that are named exist, pointers are valid for what the function reads and writes, and registered \
         memory stays until it is deregistered.";
    required, made {
        get_device_list(count: *mut c_int) => *mut *mut IbvDevice = "ibv_get_device_list" @ "IBVERBS_1.1";
        open_device(device: *mut IbvDevice) => *mut IbvContext = "ibv_open_device" @ "IBVERBS_1.1";
        alloc_pd(context: *mut IbvContext) => *mut IbvPd = "ibv_alloc_pd" @ "IBVERBS_1.1";
        reg_mr(domain: *mut IbvPd, at: *mut c_void, bytes: usize, access: c_int) => *mut IbvMr = "ibv_reg_mr" @ "IBVERBS_1.1";
        create_comp_channel(context: *mut IbvContext) => *mut IbvCompChannel = "ibv_create_comp_channel" @ "IBVERBS_1.0";
        create_cq(context: *mut IbvContext, entries: c_int, data: *mut c_void, channel: *mut IbvCompChannel, vector: c_int) => *mut IbvCq = "ibv_create_cq" @ "IBVERBS_1.1";
        create_qp(domain: *mut IbvPd, attributes: *mut IbvQpInitAttr) => *mut IbvQp = "ibv_create_qp" @ "IBVERBS_1.1";
    }
    required, told {
        get_device_name(device: *mut IbvDevice) => *const c_char = "ibv_get_device_name" @ "IBVERBS_1.1";
        /// `status` may be any number.
        wc_status_str(status: c_uint) => *const c_char = "ibv_wc_status_str" @ "IBVERBS_1.1";
    }
    required, counted {
        /// Answers how many entries were written.
        query_gid_table(context: *mut IbvContext, entries: *mut IbvGidEntry, most: usize, flags: u32, entry_size: usize) => isize = "_ibv_query_gid_table" @ "IBVERBS_1.11";
    }
    required, done {
        close_device(context: *mut IbvContext) = "ibv_close_device" @ "IBVERBS_1.1";
        query_device(context: *mut IbvContext, attributes: *mut IbvDeviceAttr) = "ibv_query_device" @ "IBVERBS_1.1";
        query_port(context: *mut IbvContext, port: u8, attributes: *mut IbvPortAttr) = "ibv_query_port" @ "IBVERBS_1.1";
        dealloc_pd(domain: *mut IbvPd) = "ibv_dealloc_pd" @ "IBVERBS_1.1";
        dereg_mr(region: *mut IbvMr) = "ibv_dereg_mr" @ "IBVERBS_1.1";
        destroy_comp_channel(channel: *mut IbvCompChannel) = "ibv_destroy_comp_channel" @ "IBVERBS_1.0";
        destroy_cq(queue: *mut IbvCq) = "ibv_destroy_cq" @ "IBVERBS_1.1";
        get_cq_event(channel: *mut IbvCompChannel, queue: *mut *mut IbvCq, data: *mut *mut c_void) = "ibv_get_cq_event" @ "IBVERBS_1.1";
        modify_qp(pair: *mut IbvQp, attributes: *mut IbvQpAttr, mask: c_int) = "ibv_modify_qp" @ "IBVERBS_1.1";
        destroy_qp(pair: *mut IbvQp) = "ibv_destroy_qp" @ "IBVERBS_1.1";
        get_async_event(context: *mut IbvContext, event: *mut IbvAsyncEvent) = "ibv_get_async_event" @ "IBVERBS_1.1";
        /// Needed before kernel 5.12: lets this process fork while it has memory registered.
        fork_init() = "ibv_fork_init" @ "IBVERBS_1.1";
    }
    required, went {
        free_device_list(list: *mut *mut IbvDevice) => () = "ibv_free_device_list" @ "IBVERBS_1.1";
        ack_cq_events(queue: *mut IbvCq, count: c_uint) => () = "ibv_ack_cq_events" @ "IBVERBS_1.1";
        ack_async_event(event: *mut IbvAsyncEvent) => () = "ibv_ack_async_event" @ "IBVERBS_1.1";
    }
}
