//! The functions that a program calls. They carry the names and signatures of the real library, whose manual pages document them; here stand only the
//! choices that are ours.

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

/// How long a call waits that waits for events to be acknowledged. The real one waits for ever.
const ACKNOWLEDGED: Duration = Duration::from_secs(2);

/// Answers what was made, or null with the reason in `errno`.
fn made<T>(make: impl FnOnce() -> Result<*mut T, c_int>) -> *mut T {
    make().unwrap_or_else(|code| {
        fail(code);
        ptr::null_mut()
    })
}

/// Answers 0, or the reason, which is in `errno`, too.
fn done(call: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match call() {
        Ok(()) => 0,
        Err(code) => {
            fail(code);
            code
        }
    }
}

/// Waits until it is so, and says what is missing where that never comes.
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
