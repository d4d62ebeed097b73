//! Constants of the C header `verbs.h`, as plain numbers. (`allstream-sys` has some of them too, in types of its own.)

use std::ffi::{c_int, c_uint};

/// Bits of `ibv_access_flags`.
pub(crate) const LOCAL_WRITE: c_uint = 1;
pub(crate) const REMOTE_WRITE: c_uint = 1 << 1;
pub(crate) const REMOTE_READ: c_uint = 1 << 2;
pub(crate) const REMOTE_ATOMIC: c_uint = 1 << 3;
pub(crate) const MW_BIND: c_uint = 1 << 4;
pub(crate) const RELAXED_ORDERING: c_uint = 1 << 20;

/// Bits of `ibv_device_cap_flags`.
pub(crate) const HAS_RNR_NAK: c_uint = 1 << 12;
pub(crate) const HAS_WINDOWS: c_uint = 1 << 17;
pub(crate) const HAS_WINDOWS_2B: c_uint = 1 << 24;

/// `ibv_qp_type` of reliable connections.
pub(crate) const RELIABLE: c_uint = 2;
/// `ibv_mw_type` of windows that a request binds.
pub(crate) const MW_TYPE_2: c_int = 2;

/// `ibv_qp_state`.
pub(crate) const RESET: c_uint = 0;
pub(crate) const INIT: c_uint = 1;
pub(crate) const READY_TO_RECEIVE: c_uint = 2;
pub(crate) const READY_TO_SEND: c_uint = 3;
pub(crate) const IN_ERROR: c_uint = 6;

/// Bits of `ibv_qp_attr_mask`.
pub(crate) const M_STATE: c_int = 1;
pub(crate) const M_CUR_STATE: c_int = 1 << 1;
pub(crate) const M_ACCESS: c_int = 1 << 3;
pub(crate) const M_PKEY: c_int = 1 << 4;
pub(crate) const M_PORT: c_int = 1 << 5;
pub(crate) const M_AV: c_int = 1 << 7;
pub(crate) const M_PATH_MTU: c_int = 1 << 8;
pub(crate) const M_TIMEOUT: c_int = 1 << 9;
pub(crate) const M_RETRY: c_int = 1 << 10;
pub(crate) const M_RNR_RETRY: c_int = 1 << 11;
pub(crate) const M_RQ_PSN: c_int = 1 << 12;
pub(crate) const M_MAX_READS: c_int = 1 << 13;
pub(crate) const M_ALT_PATH: c_int = 1 << 14;
pub(crate) const M_RNR_TIMER: c_int = 1 << 15;
pub(crate) const M_SQ_PSN: c_int = 1 << 16;
pub(crate) const M_MAX_DEST_READS: c_int = 1 << 17;
pub(crate) const M_PATH_MIG: c_int = 1 << 18;
pub(crate) const M_DEST: c_int = 1 << 20;

/// `ibv_wr_opcode`.
pub(crate) const WRITE: c_uint = 0;
pub(crate) const WRITE_WITH_IMM: c_uint = 1;
pub(crate) const SEND: c_uint = 2;
pub(crate) const SEND_WITH_IMM: c_uint = 3;
pub(crate) const READ: c_uint = 4;
pub(crate) const LOCAL_INV: c_uint = 7;
pub(crate) const BIND_MW: c_uint = 8;

/// Bits of `ibv_send_flags`.
pub(crate) const FENCE: c_uint = 1;
pub(crate) const SIGNALED: c_uint = 1 << 1;
pub(crate) const SOLICITED: c_uint = 1 << 2;
pub(crate) const INLINE: c_uint = 1 << 3;

/// `ibv_wc_opcode` of what is received.
pub(crate) const WC_RECV: c_uint = 128;
pub(crate) const WC_RECV_WITH_IMM: c_uint = 129;
/// Bit of `ibv_wc_flags`.
pub(crate) const WC_WITH_IMM: c_uint = 1 << 1;

/// `ibv_wc_status`.
pub(crate) const SUCCESS: c_uint = 0;
pub(crate) const LOC_LEN_ERR: c_uint = 1;
pub(crate) const LOC_QP_OP_ERR: c_uint = 2;
pub(crate) const LOC_PROT_ERR: c_uint = 4;
pub(crate) const WR_FLUSH_ERR: c_uint = 5;
pub(crate) const MW_BIND_ERR: c_uint = 6;
pub(crate) const REM_INV_REQ_ERR: c_uint = 9;
pub(crate) const REM_ACCESS_ERR: c_uint = 10;
pub(crate) const REM_OP_ERR: c_uint = 11;
pub(crate) const RETRY_EXC_ERR: c_uint = 12;
pub(crate) const RNR_RETRY_EXC_ERR: c_uint = 13;

/// `ibv_event_type`.
pub(crate) const CQ_ERR: c_uint = 0;
pub(crate) const QP_FATAL: c_uint = 1;
pub(crate) const QP_REQ_ERR: c_uint = 2;
pub(crate) const QP_ACCESS_ERR: c_uint = 3;
pub(crate) const COMM_EST: c_uint = 4;
pub(crate) const DEVICE_FATAL: c_uint = 8;
pub(crate) const PORT_ACTIVE: c_uint = 9;
pub(crate) const PORT_ERR: c_uint = 10;

/// `ibv_port_state` of a port that can be used.
pub(crate) const ACTIVE: c_uint = 4;
pub(crate) const DOWN: c_uint = 1;

/// The `ibv_wc_opcode` in the completion of a request with this `ibv_wr_opcode`; `None`: this library does not accept such requests.
pub(crate) fn completed(opcode: c_uint) -> Option<c_uint> {
    match opcode {
        SEND | SEND_WITH_IMM => Some(0),
        WRITE | WRITE_WITH_IMM => Some(1),
        READ => Some(2),
        BIND_MW => Some(5),
        LOCAL_INV => Some(6),
        _ => None,
    }
}
