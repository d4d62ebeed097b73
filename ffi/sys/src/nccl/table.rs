//! The functions of the library that are used, by the names of `nccl.h`.

use std::ffi::{c_int, c_void};

use super::Nccl;
use super::types::*;
use crate::cuda::CuStream;
use crate::functions::functions;

// All of these functions are in version 2.14 and in every version since, so any such library loads.
functions! {
    Nccl answers NcclResult, fails with NcclError, is called:
        "The communicator exists. The memory is of its device, as long as said, and stays, used by nobody else out of the stream's order, until \
         the stream has come past the work.";
    required, check {
        get_version() -> c_int = "ncclGetVersion";
        /// See [`Nccl::unique_id`].
        get_unique_id() -> NcclUniqueId = "ncclGetUniqueId";
    }
    // Functions that may answer that the library goes on with the work after the call (`ncclInProgress`).
    required, begun {
        /// See [`Nccl::init`].
        comm_init_rank_config(size: c_int, id: NcclUniqueId, rank: c_int, config: *mut NcclConfig) -> NcclComm = "ncclCommInitRankConfig";
        /// Does not wait for the end. No other call of the communicator may be in progress.
        finalize(comm: NcclComm) = "ncclCommFinalize";
        /// The communicator was finalized before, and must not be used again.
        destroy(comm: NcclComm) = "ncclCommDestroy";
        all_reduce((input: *const c_void, output: *mut c_void, count: usize), dtype: NcclDataType, op: NcclRedOp, (comm: NcclComm, stream: CuStream)) = "ncclAllReduce";
        broadcast((input: *const c_void, output: *mut c_void, count: usize), dtype: NcclDataType, root: c_int, (comm: NcclComm, stream: CuStream)) = "ncclBroadcast";
        /// The output is written on the root alone.
        reduce((input: *const c_void, output: *mut c_void, count: usize), dtype: NcclDataType, (op: NcclRedOp, root: c_int), (comm: NcclComm, stream: CuStream)) = "ncclReduce";
        /// Each rank gives `count` elements.
        all_gather((input: *const c_void, output: *mut c_void, count: usize), dtype: NcclDataType, (comm: NcclComm, stream: CuStream)) = "ncclAllGather";
        /// Each rank gets `count` elements.
        reduce_scatter((input: *const c_void, output: *mut c_void, count: usize), dtype: NcclDataType, op: NcclRedOp, (comm: NcclComm, stream: CuStream)) = "ncclReduceScatter";
        send((from: *const c_void, count: usize), dtype: NcclDataType, to: c_int, (comm: NcclComm, stream: CuStream)) = "ncclSend";
        recv((to: *mut c_void, count: usize), dtype: NcclDataType, from: c_int, (comm: NcclComm, stream: CuStream)) = "ncclRecv";
        /// See [`Nccl::group`].
        group_end() = "ncclGroupEnd";
    }
    required, check {
        /// See [`Nccl::async_error`].
        comm_get_async_error(comm: NcclComm, state: *mut NcclResult) = "ncclCommGetAsyncError";
        /// Blocks until the communicator's work on the device has ended. Nobody may use the communicator during the call or after it.
        abort(comm: NcclComm) = "ncclCommAbort";
        /// See [`Nccl::group`].
        group_start() = "ncclGroupStart";
    }
}
