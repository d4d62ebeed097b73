//! The functions that a program calls. All but those in [`knobs`] carry the names and signatures of the real library, whose manual pages
//! document them; the comments here explain only what differs from those.

mod completion;
mod device;
mod event;
mod knobs;
mod memory;
mod queue_pair;
mod work;

use std::ffi::c_int;
use std::ptr;
use std::time::{Duration, Instant};

use crate::complain;
use crate::counts::fail;

/// How long a call that destroys something waits for its events to be acknowledged. The real library waits for ever.
const ACKNOWLEDGED: Duration = Duration::from_secs(2);

/// Returns what `make` has made, or null with the error in `errno`.
fn made<T>(make: impl FnOnce() -> Result<*mut T, c_int>) -> *mut T {
    make().unwrap_or_else(|code| {
        fail(code);
        ptr::null_mut()
    })
}

/// Returns 0, or the error, which is in `errno` too.
fn done(call: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match call() {
        Ok(()) => 0,
        Err(code) => {
            fail(code);
            code
        }
    }
}

/// Waits until `is_so` holds, that is, until all events of `what` are acknowledged. After `ACKNOWLEDGED` it complains and fails.
fn acknowledged(what: &str, mut is_so: impl FnMut() -> Result<bool, c_int>) -> Result<(), c_int> {
    let end = Instant::now() + ACKNOWLEDGED;
    while !is_so()? {
        if Instant::now() > end {
            complain(&format!("{what} is destroyed, and not all of its events were acknowledged"));
            return Err(libc::EBUSY);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
