//! What the library and a program hand each other: structures as rdma-core's `infiniband/verbs.h` has them, field by field.
//!
//! Fields carry the header's names, and the header and the manual pages (`man ibv_post_send`) say what they mean. Enumerations are numbers here: a
//! newer library may know more of them than this crate. Structures that the library makes, and that end with fields of its own, are
//! declared only as far as they are read, and used only behind a pointer. `layout.rs` compares sizes and offsets with the header's.
#![allow(missing_docs)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::numbers::numbers;

/// A device that the library has found: an entry of the list of devices.
#[repr(C)]
pub struct IbvDevice {
    pub _ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

/// A driver's functions that the library does not export: a program calls them through this table, for speed. In C, inline functions of
/// the header do that.
#[repr(C)]
pub struct IbvContextOps {
    pub _before_alloc_mw: [*mut c_void; 7],
    pub alloc_mw: Option<unsafe extern "C" fn(*mut IbvPd, c_int) -> *mut IbvMw>,
    pub bind_mw: Option<unsafe extern "C" fn(*mut IbvQp, *mut IbvMw, *mut IbvMwBind) -> c_int>,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut IbvMw) -> c_int>,
    pub _before_poll_cq: *mut c_void,
    pub poll_cq: Option<unsafe extern "C" fn(*mut IbvCq, c_int, *mut IbvWc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut IbvCq, c_int) -> c_int>,
    pub _before_post_send: [*mut c_void; 12],
    pub post_send: Option<unsafe extern "C" fn(*mut IbvQp, *mut IbvSendWr, *mut *mut IbvSendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut IbvQp, *mut IbvRecvWr, *mut *mut IbvRecvWr) -> c_int>,
    pub _after_post_recv: [*mut c_void; 5],
}

/// An open device. The library's structure has more fields behind these.
#[repr(C)]
pub struct IbvContext {
    pub device: *mut IbvDevice,
    pub ops: IbvContextOps,
    pub cmd_fd: c_int,
    /// Readable when an event of the device has come: [`Verbs::get_async_event`](super::Verbs::get_async_event).
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

/// A device's limits.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IbvDeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// The state of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvPortAttr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// An address of a port: 16 bytes in network byte order, aligned as the header's union is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct IbvGid {
    pub raw: [u8; 16],
}

/// An entry of a device's table of addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvGidEntry {
    pub gid: IbvGid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// The part of a route to another host that routers need (the global routing header).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvGlobalRoute {
    pub dgid: IbvGid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// The route to another host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvAhAttr {
    pub grh: IbvGlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// How many requests a queue pair holds, how many pieces of memory each may name, and how many bytes each may carry inline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvQpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// The attributes with which a queue pair is made.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbvQpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut IbvCq,
    pub recv_cq: *mut IbvCq,
    pub srq: *mut c_void,
    pub cap: IbvQpCap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// New attributes for a queue pair: a call sets those that its [`QpMask`] names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvQpAttr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: IbvQpCap,
    pub ah_attr: IbvAhAttr,
    pub alt_ah_attr: IbvAhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// A piece of registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvSge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The memory that a window opens.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbvMwBindInfo {
    pub mr: *mut IbvMr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

/// A request to open a window by the separate call `ibv_bind_mw`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbvMwBind {
    pub wr_id: u64,
    pub send_flags: c_uint,
    pub bind_info: IbvMwBindInfo,
}

/// A request to send, write, read, bind a window or invalidate a key. Of the header's unions this has the members for reliable queue
/// pairs: remote memory, and the binding of a window.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbvSendWr {
    pub wr_id: u64,
    pub next: *mut IbvSendWr,
    pub sg_list: *mut IbvSge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    /// The number that goes with a message, in network byte order. In a request to invalidate a key: the key, in the host's byte order.
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub _rest_of_wr: [u32; 5],
    pub _qp_type: u64,
    pub bind_mw: *mut IbvMw,
    pub bind_rkey: u32,
    pub bind_info: IbvMwBindInfo,
}

/// A request to receive.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbvRecvWr {
    pub wr_id: u64,
    pub next: *mut IbvRecvWr,
    pub sg_list: *mut IbvSge,
    pub num_sge: c_int,
}

/// How a request has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IbvWc {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network byte order.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// Registered memory.
#[repr(C)]
pub struct IbvMr {
    pub context: *mut IbvContext,
    pub pd: *mut IbvPd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// A window on registered memory.
#[repr(C)]
pub struct IbvMw {
    pub context: *mut IbvContext,
    pub pd: *mut IbvPd,
    pub rkey: u32,
    pub handle: u32,
    pub kind: c_uint,
}

/// A protection domain: a queue pair may use only memory of its own domain.
#[repr(C)]
pub struct IbvPd {
    pub context: *mut IbvContext,
    pub handle: u32,
}

/// A completion channel: its descriptor is readable when a completion queue has told it of a completion.
#[repr(C)]
pub struct IbvCompChannel {
    pub context: *mut IbvContext,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// A completion queue. The library's structure has more fields behind these.
#[repr(C)]
pub struct IbvCq {
    pub context: *mut IbvContext,
    pub channel: *mut IbvCompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

/// A queue pair. The library's structure has more fields behind these.
#[repr(C)]
pub struct IbvQp {
    pub context: *mut IbvContext,
    pub qp_context: *mut c_void,
    pub pd: *mut IbvPd,
    pub send_cq: *mut IbvCq,
    pub recv_cq: *mut IbvCq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_uint,
    pub qp_type: c_uint,
}

/// An event of a device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbvAsyncEvent {
    /// What the event is about: a pointer, or in its first four bytes the number of a port.
    pub element: *mut c_void,
    pub event_type: c_uint,
}

numbers! {
    /// [`IbvPortAttr::state`].
    PortState(c_uint) {
        0 NOP IBV_PORT_NOP;
        1 DOWN IBV_PORT_DOWN;
        2 INIT IBV_PORT_INIT;
        3 ARMED IBV_PORT_ARMED;
        4 ACTIVE IBV_PORT_ACTIVE;
        5 ACTIVE_DEFER IBV_PORT_ACTIVE_DEFER;
    }
    /// [`IbvPortAttr::link_layer`]. Old drivers of devices that have only InfiniBand leave it unspecified.
    LinkLayer(u8) {
        0 UNSPECIFIED IBV_LINK_LAYER_UNSPECIFIED;
        1 INFINIBAND IBV_LINK_LAYER_INFINIBAND;
        2 ETHERNET IBV_LINK_LAYER_ETHERNET;
    }
    /// [`IbvGidEntry::gid_type`].
    GidType(u32) {
        0 IB IBV_GID_TYPE_IB;
        1 ROCE_V1 IBV_GID_TYPE_ROCE_V1;
        2 ROCE_V2 IBV_GID_TYPE_ROCE_V2;
    }
    /// [`IbvDevice::transport_type`].
    Transport(c_int) {
        0 IB IBV_TRANSPORT_IB;
        1 IWARP IBV_TRANSPORT_IWARP;
        2 USNIC IBV_TRANSPORT_USNIC;
        3 USNIC_UDP IBV_TRANSPORT_USNIC_UDP;
        4 UNSPECIFIED IBV_TRANSPORT_UNSPECIFIED;
    }
    /// [`IbvPortAttr::active_mtu`], and the `path_mtu` of a queue pair.
    Mtu(c_uint) {
        1 BYTES_256 IBV_MTU_256;
        2 BYTES_512 IBV_MTU_512;
        3 BYTES_1024 IBV_MTU_1024;
        4 BYTES_2048 IBV_MTU_2048;
        5 BYTES_4096 IBV_MTU_4096;
    }
    /// [`IbvQpAttr::qp_state`].
    QpState(c_uint) {
        0 RESET IBV_QPS_RESET;
        1 INIT IBV_QPS_INIT;
        2 RTR IBV_QPS_RTR;
        3 RTS IBV_QPS_RTS;
        6 ERR IBV_QPS_ERR;
    }
    /// [`IbvQpInitAttr::qp_type`].
    QpType(c_uint) {
        2 RC IBV_QPT_RC;
    }
    /// Which fields of [`IbvQpAttr`] a call changes, as bits.
    QpMask(c_uint) {
        0x1 STATE IBV_QP_STATE;
        0x8 ACCESS_FLAGS IBV_QP_ACCESS_FLAGS;
        0x10 PKEY_INDEX IBV_QP_PKEY_INDEX;
        0x20 PORT IBV_QP_PORT;
        0x80 AV IBV_QP_AV;
        0x100 PATH_MTU IBV_QP_PATH_MTU;
        0x200 TIMEOUT IBV_QP_TIMEOUT;
        0x400 RETRY_CNT IBV_QP_RETRY_CNT;
        0x800 RNR_RETRY IBV_QP_RNR_RETRY;
        0x1000 RQ_PSN IBV_QP_RQ_PSN;
        0x2000 MAX_QP_RD_ATOMIC IBV_QP_MAX_QP_RD_ATOMIC;
        0x8000 MIN_RNR_TIMER IBV_QP_MIN_RNR_TIMER;
        0x10000 SQ_PSN IBV_QP_SQ_PSN;
        0x20000 MAX_DEST_RD_ATOMIC IBV_QP_MAX_DEST_RD_ATOMIC;
        0x100000 DEST_QPN IBV_QP_DEST_QPN;
    }
    /// What registered memory, or a queue pair, may be used for, as bits. This process's own requests may always read the memory.
    Access(c_uint) {
        0x1 LOCAL_WRITE IBV_ACCESS_LOCAL_WRITE;
        0x2 REMOTE_WRITE IBV_ACCESS_REMOTE_WRITE;
        0x4 REMOTE_READ IBV_ACCESS_REMOTE_READ;
        0x10 MW_BIND IBV_ACCESS_MW_BIND;
    }
    /// [`IbvSendWr::opcode`].
    WrOpcode(c_uint) {
        0 RDMA_WRITE IBV_WR_RDMA_WRITE;
        1 RDMA_WRITE_WITH_IMM IBV_WR_RDMA_WRITE_WITH_IMM;
        2 SEND IBV_WR_SEND;
        3 SEND_WITH_IMM IBV_WR_SEND_WITH_IMM;
        4 RDMA_READ IBV_WR_RDMA_READ;
        7 LOCAL_INV IBV_WR_LOCAL_INV;
        8 BIND_MW IBV_WR_BIND_MW;
    }
    /// [`IbvSendWr::send_flags`], as bits.
    SendFlags(c_uint) {
        0x2 SIGNALED IBV_SEND_SIGNALED;
        0x8 INLINE IBV_SEND_INLINE;
    }
    /// [`IbvMw::kind`].
    MwType(c_int) {
        1 TYPE_1 IBV_MW_TYPE_1;
        2 TYPE_2 IBV_MW_TYPE_2;
    }
    /// [`IbvDeviceAttr::device_cap_flags`], as bits.
    DeviceCap(c_uint) {
        0x100_0000 MEM_WINDOW_TYPE_2B IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    }
    /// [`IbvWc::status`].
    WcStatus(c_uint) {
        0 SUCCESS IBV_WC_SUCCESS;
        5 WR_FLUSH_ERR IBV_WC_WR_FLUSH_ERR;
        10 REM_ACCESS_ERR IBV_WC_REM_ACCESS_ERR;
        12 RETRY_EXC_ERR IBV_WC_RETRY_EXC_ERR;
        13 RNR_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR;
    }
    /// [`IbvAsyncEvent::event_type`].
    EventType(c_uint) {
        0 CQ_ERR IBV_EVENT_CQ_ERR;
        1 QP_FATAL IBV_EVENT_QP_FATAL;
        2 QP_REQ_ERR IBV_EVENT_QP_REQ_ERR;
        3 QP_ACCESS_ERR IBV_EVENT_QP_ACCESS_ERR;
        4 COMM_EST IBV_EVENT_COMM_EST;
        8 DEVICE_FATAL IBV_EVENT_DEVICE_FATAL;
        9 PORT_ACTIVE IBV_EVENT_PORT_ACTIVE;
        10 PORT_ERR IBV_EVENT_PORT_ERR;
    }
    /// [`IbvWc::opcode`].
    WcOpcode(c_uint) {
        128 RECV IBV_WC_RECV;
        129 RECV_RDMA_WITH_IMM IBV_WC_RECV_RDMA_WITH_IMM;
    }
}

impl QpMask {
    /// All these bits in one number, of the type that the library takes.
    pub fn all(parts: &[QpMask]) -> c_int {
        parts.iter().fold(0, |all, part| all | part.0 as c_int)
    }
}

impl Mtu {
    /// The size in bytes; `None` for a number that stands for no size.
    pub fn bytes(self) -> Option<u32> {
        (1..=5).contains(&self.0).then(|| 128 << self.0)
    }
}
