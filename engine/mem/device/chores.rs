//! A thread of the process that gives things back to the driver.
//!
//! The driver may wait for all that is on the device before it takes memory back (`cuMemFree`, `cuMemFreeHost`,
//! `cuMemHostUnregister`, `cuIpcCloseMemHandle`). Who drops the last handle of something may be a thread that others wait for:
//! the one that sees work end, or one that runs a communicator. This one nobody waits for, and it holds nothing.

use std::any::Any;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

type Thing = Box<dyn Any + Send>;

/// Drops it on that thread; here, where the system has no thread to give.
pub(super) fn drop_later(thing: impl Any + Send) {
    static THREAD: OnceLock<Option<Sender<Thing>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (sender, things) = channel::<Thing>();
        let thread = std::thread::Builder::new().name("allstream-chores".into());
        thread.spawn(move || things.into_iter().for_each(drop)).ok().map(|_| sender)
    });
    if let Some(thread) = thread {
        // It ends with the process. What cannot be sent is dropped with the error.
        let _ = thread.send(Box::new(thing));
    }
}
