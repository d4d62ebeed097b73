//! The knobs of a test: environment variables, which are read once, and functions at run time (`calls/knobs.rs`).

use std::ffi::c_int;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::counts::{Call, NAMES};

/// A call that is to fail: the `left`th from now.
struct Fault {
    name: String,
    left: u64,
    code: c_int,
}

struct Knobs {
    /// The longest delay of a completion or of a READ's answer, in microseconds; 0: no delays.
    delay: AtomicU64,
    seed: AtomicU64,
    /// How many of a thousand packets are lost.
    loss: AtomicU64,
    /// How many requests to send there are up to the one that is stalled (1: the next one is); 0: none is.
    stall: AtomicU64,
    faults: Mutex<Vec<Fault>>,
    any_fault: AtomicBool,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn variable(name: &str) -> String {
    std::env::var(format!("ALLSTREAM_TEST_VERBS_{name}")).unwrap_or_default()
}

/// Whether the process is to say, as it ends, how much each device has carried.
pub(crate) fn tells() -> bool {
    !variable("TELL").is_empty()
}

/// Ends the process at a variable that cannot be read, so that a test with a mistyped knob does not pass by ignoring it.
fn wrong(name: &str, text: &str) -> ! {
    eprintln!("verbs for tests: ALLSTREAM_TEST_VERBS_{name}: cannot read {text:?}");
    std::process::abort()
}

fn number(name: &str, default: u64) -> AtomicU64 {
    let text = variable(name);
    let number = match text.trim() {
        "" => default,
        text => text.parse().unwrap_or_else(|_| wrong(name, text)),
    };
    AtomicU64::new(number)
}

fn knobs() -> &'static Knobs {
    static KNOBS: OnceLock<Knobs> = OnceLock::new();
    KNOBS.get_or_init(|| {
        let mut faults = Vec::new();
        for fault in variable("FAIL").split(',').map(str::trim).filter(|fault| !fault.is_empty()) {
            let parts: Vec<&str> = fault.split(':').map(str::trim).collect();
            let [name, nth, code] = parts[..] else { wrong("FAIL", fault) };
            let (Ok(left), Ok(code)) = (u64::from_str(nth), c_int::from_str(code)) else {
                wrong("FAIL", fault)
            };
            if !NAMES.contains(&name) {
                wrong("FAIL", fault);
            }
            faults.push(Fault { name: name.into(), left, code });
        }
        Knobs {
            delay: number("DELAY_US", 0),
            seed: number("SEED", 1),
            loss: number("LOSS", 0),
            stall: number("STALL", 0),
            any_fault: AtomicBool::new(!faults.is_empty()),
            faults: Mutex::new(faults),
        }
    })
}

/// Counts a call. Returns the error with which the call must fail, if a test has asked for that.
pub(crate) fn called(call: Call) -> Result<(), c_int> {
    call.count();
    let knobs = knobs();
    if !knobs.any_fault.load(Ordering::Relaxed) {
        return Ok(());
    }
    let mut faults = lock(&knobs.faults);
    let mut code = None;
    faults.retain_mut(|fault| {
        if fault.name != call.name() {
            return true;
        }
        fault.left = fault.left.saturating_sub(1);
        if fault.left == 0 {
            code = Some(fault.code);
        }
        fault.left > 0
    });
    match code {
        None => Ok(()),
        Some(code) => Err(code),
    }
}

/// Makes the `nth` call of a function from now fail. If `nth` is 0, removes the faults of this function instead; without a name, those of all
/// functions.
pub(crate) fn fail_call(name: Option<&str>, nth: u64, code: c_int) -> c_int {
    let mut faults = lock(&knobs().faults);
    let Some(name) = name else {
        faults.clear();
        return 0;
    };
    if !NAMES.contains(&name) {
        return libc::EINVAL;
    }
    if nth == 0 {
        faults.retain(|fault| fault.name != name);
    } else {
        faults.push(Fault { name: name.into(), left: nth, code });
        knobs().any_fault.store(true, Ordering::Relaxed);
    }
    0
}

pub(crate) fn set_delays(longest_us: u64, seed: u64) {
    knobs().delay.store(longest_us, Ordering::Relaxed);
    knobs().seed.store(seed, Ordering::Relaxed);
}

pub(crate) fn set_loss(of_a_thousand: u64) {
    knobs().loss.store(of_a_thousand, Ordering::Relaxed);
}

pub(crate) fn set_stall(nth: u64) {
    knobs().stall.store(nth, Ordering::Relaxed);
}

/// Counts a request to send; returns whether it is the one to be stalled.
pub(crate) fn stalls() -> bool {
    let stall = &knobs().stall;
    // Read first: in the usual case, 0, a relaxed load is enough.
    stall.load(Ordering::Relaxed) > 0
        && stall.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)) == Ok(1)
}

/// The random numbers that decide about delays and losses.
#[derive(Default)]
pub(crate) struct Draws {
    seed: Option<u64>,
    state: u64,
}

impl Draws {
    fn next(&mut self) -> u64 {
        let seed = knobs().seed.load(Ordering::Relaxed);
        if self.seed != Some(seed) {
            (self.seed, self.state) = (Some(seed), seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        }
        // xorshift64*
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Draws a delay: none half of the time, else up to the longest delay.
    pub(crate) fn delay(&mut self) -> Option<Duration> {
        let longest = knobs().delay.load(Ordering::Relaxed);
        if longest == 0 {
            return None;
        }
        let draw = self.next();
        (draw & 1 == 0).then(|| Duration::from_micros((draw >> 1) % longest + 1))
    }

    /// Draws whether a packet is lost.
    pub(crate) fn loses(&mut self) -> bool {
        let loss = knobs().loss.load(Ordering::Relaxed);
        loss > 0 && self.next() % 1000 < loss
    }
}
