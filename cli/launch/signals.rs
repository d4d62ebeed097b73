//! Signals to the launcher, as events.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::Event;

/// Takes SIGINT, SIGTERM and SIGHUP while it lives; before and after they do what they do by default.
pub(super) struct SignalThread {
    handle: signal_hook::iterator::Handle,
    by_default: &'static AtomicBool,
}

impl SignalThread {
    pub(super) fn start(events: Sender<Event>) -> io::Result<Self> {
        // A handler stays installed for ever, so "as by default" is a flag that it looks at.
        static BY_DEFAULT: OnceLock<Arc<AtomicBool>> = OnceLock::new();
        let ignored = ignored_signals();
        // One that is ignored stays so: this is how nohup and shells' background jobs ask for it.
        let taken = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
        if BY_DEFAULT.get().is_none() {
            let flag = BY_DEFAULT.get_or_init(|| Arc::new(AtomicBool::new(false)));
            for signal in taken.clone() {
                signal_hook::flag::register_conditional_default(signal, Arc::clone(flag))?;
            }
        }
        let by_default = BY_DEFAULT.get_or_init(|| Arc::new(AtomicBool::new(false)));
        by_default.store(false, Ordering::SeqCst);
        let mut signals = Signals::new(taken)?;
        let handle = signals.handle();
        thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let _ = events.send(Event::Signal(signal));
            }
        })?;
        Ok(Self { handle, by_default })
    }
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        self.handle.close();
        self.by_default.store(true, Ordering::SeqCst);
    }
}

/// The signals that this process ignores, as a mask with signal 1 at bit 0.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
