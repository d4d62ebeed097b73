//! Asynchronous events, and the words for how a request has ended.

use std::ffi::{c_char, c_int, c_uint, c_void};

use allstream_sys::verbs::{IbvAsyncEvent, IbvContext};

use crate::card::card;
use crate::complain;
use crate::counts::{Call, fail};
use crate::events::Event;
use crate::faults::called;
use crate::signal::wait;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(context: *mut IbvContext, event: *mut IbvAsyncEvent) -> c_int {
    let get = || {
        called(Call::GetAsyncEvent)?;
        let key = context as usize;
        let fd = card()?.shared.contexts.get(&key).ok_or(libc::EINVAL)?.events.fd();
        // An event may be withdrawn, with what it was about, while it is waited for.
        let found = loop {
            wait(fd)?;
            let mut card = card()?;
            let context = card.shared.contexts.get_mut(&key).ok_or(libc::EINVAL)?;
            if let Some(found) = context.events.fetch() {
                break found;
            }
        };
        let element = found.element as *mut c_void;
        // SAFETY: the caller's, who promises room.
        unsafe { event.write(IbvAsyncEvent { element, event_type: found.kind }) };
        Ok(0)
    };
    get().unwrap_or_else(|code: c_int| {
        fail(code);
        -1
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_async_event(event: *mut IbvAsyncEvent) {
    Call::AckAsyncEvent.count();
    // SAFETY: the caller's: an event.
    let IbvAsyncEvent { element, event_type } = unsafe { *event };
    let event = Event { kind: event_type, element: element as usize };
    let acknowledge = |card: &mut crate::card::Card| {
        card.shared.contexts.values_mut().any(|context| context.events.acknowledge(event))
    };
    if !card().is_ok_and(|mut card| acknowledge(&mut card)) {
        complain("an event is acknowledged that was not fetched");
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(status: c_uint) -> *const c_char {
    let text = match status {
        0 => c"success",
        1 => c"local length error",
        2 => c"local QP operation error",
        3 => c"local EE context operation error",
        4 => c"local protection error",
        5 => c"Work Request Flushed Error",
        6 => c"memory management operation error",
        7 => c"bad response error",
        8 => c"local access error",
        9 => c"remote invalid request error",
        10 => c"remote access error",
        11 => c"remote operation error",
        12 => c"transport retry counter exceeded",
        13 => c"RNR retry counter exceeded",
        _ => c"unknown",
    };
    text.as_ptr()
}
