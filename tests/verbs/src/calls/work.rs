//! The calls that post requests.

use std::ffi::c_int;
use std::slice;

use allstream_sys::verbs::{IbvQp, IbvRecvWr, IbvSendWr, IbvSge};

use crate::card::card;
use crate::codes::*;
use crate::counts::{Call, fail};
use crate::faults::{called, stalls};
use crate::memory::{Binding, total};
use crate::queue_pair::{End, QueuePair, Receive, Request};

/// Copies a list of scatter/gather entries.
///
/// # Safety
/// There are `count` entries at `at`.
unsafe fn pieces(at: *const IbvSge, count: c_int) -> Result<Vec<IbvSge>, c_int> {
    match usize::try_from(count) {
        Err(_) => Err(libc::EINVAL),
        Ok(0) => Ok(Vec::new()),
        // SAFETY: the caller promises `count` entries at `at`.
        Ok(count) => Ok(unsafe { slice::from_raw_parts(at, count) }.to_vec()),
    }
}

/// Reads a request to send; an error if the queue pair does not accept it.
///
/// # Safety
/// All pointers of `wr` that its opcode uses are valid.
unsafe fn request(pair: &QueuePair, wr: &IbvSendWr) -> Result<Request, c_int> {
    completed(wr.opcode).ok_or(libc::EINVAL)?;
    let is_here = matches!(wr.opcode, BIND_MW | LOCAL_INV);
    // SAFETY: the caller promises that the list of entries is valid.
    let pieces = if is_here { Vec::new() } else { unsafe { pieces(wr.sg_list, wr.num_sge) }? };
    let bytes = total(&pieces).ok_or(libc::EINVAL)?;
    let is_inline = wr.send_flags & INLINE != 0;
    if pieces.len() > pair.cap.max_send_sge as usize
        || is_inline && (bytes > pair.cap.max_inline_data || wr.opcode == READ || is_here)
        || wr.send_flags & !(FENCE | SIGNALED | SOLICITED | INLINE) != 0
    {
        return Err(libc::EINVAL);
    }
    let mut inline = is_inline.then(Vec::new);
    if let Some(data) = &mut inline {
        for piece in &pieces {
            // SAFETY: the caller promises that the data of an inline request can be read during the call.
            data.extend(unsafe {
                slice::from_raw_parts(piece.addr as usize as *const u8, piece.length as usize)
            });
        }
    }
    let binding = (wr.opcode == BIND_MW).then(|| {
        // SAFETY: the caller promises a window and a region that were made and not freed.
        let (window, lkey) = unsafe { ((*wr.bind_mw).handle << 8, (*wr.bind_info.mr).lkey) };
        let (at, bytes, access) = (wr.bind_info.addr, wr.bind_info.length, wr.bind_info.mw_access_flags);
        Binding { window, rkey: wr.bind_rkey, lkey, at, bytes, access }
    });
    Ok(Request {
        id: wr.wr_id,
        opcode: wr.opcode,
        flags: wr.send_flags,
        pieces,
        inline,
        bytes,
        at: wr.remote_addr,
        rkey: if wr.opcode == LOCAL_INV { wr.imm_data } else { wr.rkey },
        imm: wr.imm_data,
        binding,
        is_stalled: stalls(),
        first: None,
        got: 0,
        end: End::NotYet,
    })
}

/// Posts a list of requests, up to the first that is refused, whose address is written to `bad`.
fn post<T>(
    pair: *mut IbvQp,
    mut wr: *mut T,
    bad: *mut *mut T,
    mut one: impl FnMut(&mut QueuePair, &T) -> Result<*mut T, c_int>,
    call: Call,
) -> c_int {
    let mut all = || {
        called(call)?;
        let mut card = card()?;
        let number = *card.numbers.get(&(pair as usize)).ok_or(libc::EINVAL)?;
        let posted = card.with(number, |pair, shared| {
            let mut posted = Ok(());
            let mut count = 0;
            while !wr.is_null() && posted.is_ok() {
                // SAFETY: the caller promises a list of valid requests, and `wr` is one of them.
                match one(pair, unsafe { &*wr }) {
                    Ok(next) => (wr, count) = (next, count + 1),
                    Err(code) => posted = Err(code),
                }
            }
            shared.count(pair.context, std::mem::take(&mut pair.posted));
            shared.report.requests += if call == Call::PostSend { count } else { 0 };
            if pair.state == IN_ERROR {
                pair.flush(shared);
            }
            pair.advance(shared);
            posted
        });
        posted.unwrap_or(Err(libc::EINVAL))
    };
    match all() {
        Ok(()) => 0,
        Err(code) => {
            // SAFETY: the caller promises that `bad` leads to room for an address.
            unsafe { bad.write(wr) };
            fail(code);
            code
        }
    }
}

pub(super) unsafe extern "C" fn post_send(
    pair: *mut IbvQp,
    wr: *mut IbvSendWr,
    bad: *mut *mut IbvSendWr,
) -> c_int {
    let one = |pair: &mut QueuePair, wr: &IbvSendWr| {
        if !matches!(pair.state, READY_TO_SEND | IN_ERROR) {
            return Err(libc::EINVAL);
        }
        if pair.sending.used >= pair.cap.max_send_wr {
            return Err(libc::ENOMEM);
        }
        // SAFETY: the caller promises that what the requests point to is valid.
        let request = unsafe { request(pair, wr) }?;
        pair.posted += u64::from(request.bytes);
        pair.sending.queue.push_back(request);
        pair.sending.used += 1;
        Ok(wr.next)
    };
    post(pair, wr, bad, one, Call::PostSend)
}

pub(super) unsafe extern "C" fn post_recv(
    pair: *mut IbvQp,
    wr: *mut IbvRecvWr,
    bad: *mut *mut IbvRecvWr,
) -> c_int {
    let one = |pair: &mut QueuePair, wr: &IbvRecvWr| {
        if pair.state == RESET || wr.num_sge > pair.cap.max_recv_sge as c_int {
            return Err(libc::EINVAL);
        }
        if pair.receiving.used >= pair.cap.max_recv_wr {
            return Err(libc::ENOMEM);
        }
        // SAFETY: the caller promises that what the requests point to is valid.
        let pieces = unsafe { pieces(wr.sg_list, wr.num_sge) }?;
        total(&pieces).ok_or(libc::EINVAL)?;
        pair.receiving.queue.push_back(Receive { id: wr.wr_id, pieces });
        pair.receiving.used += 1;
        Ok(wr.next)
    };
    post(pair, wr, bad, one, Call::PostRecv)
}
