//! Functions by which a test changes the library's behaviour at run time and reads its counters. Their names begin with `allstream_test_verbs_`.

use std::ffi::{CStr, c_char, c_int, c_uint};

use crate::card::card;
use crate::codes::{ACTIVE, DEVICE_FATAL, PORT_ACTIVE, PORT_ERR, QP_FATAL};
use crate::counts::{self, Report};
use crate::faults;
use crate::told::host;

/// A text that the caller passed; `None` if it is null or not UTF-8.
///
/// # Safety
/// `at` is null, or leads to a text that ends in a null byte and lives for `'a`.
unsafe fn text<'a>(at: *const c_char) -> Option<&'a str> {
    // SAFETY: not null, so the caller promises a text that ends in a null byte.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) })?.to_str().ok()
}

/// Makes the `nth` call from now (1 is the next) of a function fail with this `errno`. `nth` of 0 removes all faults of this function, a null name
/// those of all functions.
#[unsafe(no_mangle)]
unsafe extern "C" fn allstream_test_verbs_fail(name: *const c_char, nth: u64, code: c_int) -> c_int {
    // SAFETY: the caller promises null or a text that ends in a null byte.
    faults::fail_call(unsafe { text(name) }, nth, code)
}

/// How often a function has been called; `u64::MAX`: there is no such function.
#[unsafe(no_mangle)]
unsafe extern "C" fn allstream_test_verbs_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller promises null or a text that ends in a null byte.
    unsafe { text(name) }.and_then(counts::calls).unwrap_or(u64::MAX)
}

/// Delays completions and answers to READs by at most `longest_us` microseconds from now on; 0: no delays.
#[unsafe(no_mangle)]
extern "C" fn allstream_test_verbs_set_delays(longest_us: u64, seed: u64) {
    faults::set_delays(longest_us, seed);
}

/// Loses this many of a thousand packets that this process sends, from now on.
#[unsafe(no_mangle)]
extern "C" fn allstream_test_verbs_set_loss(of_a_thousand: u64) {
    faults::set_loss(of_a_thousand);
}

/// Stalls the `nth` request to send that is posted from now on (1 is the next), and with it all requests behind it on its queue pair. 0: all
/// stalled requests go on.
#[unsafe(no_mangle)]
extern "C" fn allstream_test_verbs_stall(nth: u64) -> c_int {
    faults::set_stall(nth);
    if nth > 0 {
        return 0;
    }
    let Ok(mut card) = card() else { return libc::EIO };
    let numbers: Vec<u32> = card.pairs.keys().copied().collect();
    for number in numbers {
        card.with(number, |pair, shared| {
            pair.sending.queue.iter_mut().for_each(|request| request.is_stalled = false);
            pair.go_on(shared);
        });
    }
    0
}

/// Changes the state of a port, for this process only, as if its cable were pulled or plugged in. Every open context of the device gets the event.
#[unsafe(no_mangle)]
unsafe extern "C" fn allstream_test_verbs_set_port(device: *const c_char, port: u8, state: c_uint) -> c_int {
    // SAFETY: the caller promises null or a text that ends in a null byte.
    let name = unsafe { text(device) }.unwrap_or_default();
    let Some(at) = host().devices.iter().position(|told| told.name == name) else { return libc::ENODEV };
    let Ok(mut card) = card() else { return libc::EIO };
    let shared = &mut card.shared;
    shared.ports.insert((at, port), state);
    let event = if state == ACTIVE { PORT_ACTIVE } else { PORT_ERR };
    let contexts = shared.contexts.iter().filter(|(_, context)| context.device == at);
    let contexts: Vec<usize> = contexts.map(|(key, _)| *key).collect();
    contexts.into_iter().for_each(|context| shared.event(context, event, port.into()));
    0
}

/// Makes each device that this process has open report a fatal error, as if the card's firmware had crashed. Requests that were posted before
/// are stalled: they send no more packets, and are not flushed.
#[unsafe(no_mangle)]
extern "C" fn allstream_test_verbs_end_devices() -> c_int {
    let Ok(mut card) = card() else { return libc::EIO };
    let numbers: Vec<u32> = card.pairs.keys().copied().collect();
    for number in numbers {
        card.with(number, |pair, _| {
            pair.sending.queue.iter_mut().for_each(|request| request.is_stalled = true)
        });
    }
    let shared = &mut card.shared;
    let contexts: Vec<usize> = shared.contexts.keys().copied().collect();
    contexts.into_iter().for_each(|context| shared.event(context, DEVICE_FATAL, 0));
    0
}

/// Puts the queue pair of this number, or all of this process (0), into the error state, as if the device had found an error of its own.
#[unsafe(no_mangle)]
extern "C" fn allstream_test_verbs_break(number: u32) -> c_int {
    let Ok(mut card) = card() else { return libc::EIO };
    let all: Vec<u32> = card.pairs.keys().copied().filter(|pair| number == 0 || *pair == number).collect();
    let mut broken =
        all.iter().map(|pair| card.with(*pair, |pair, shared| pair.fail(Some(QP_FATAL), shared)));
    if !all.is_empty() && broken.all(|found| found.is_some()) { 0 } else { libc::EINVAL }
}

/// Writes to `to` what exists now and what has happened so far.
#[unsafe(no_mangle)]
unsafe extern "C" fn allstream_test_verbs_report(to: *mut Report) -> c_int {
    let Ok(card) = card() else { return libc::EIO };
    // SAFETY: the caller promises room for a report.
    unsafe { to.write(card.shared.report) };
    0
}
