//! The driver's knobs: environment variables that are read once, and functions that a test calls at run time.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::abi::{In, lock};
use crate::codes::{Code, Done};

/// The version we say we are: 12.8.
pub(crate) const VERSION: i32 = 12080;
/// `no_peer` has a bit for every pair of so many devices.
pub(crate) const MOST_DEVICES: usize = 8;

/// A call that is to fail: the `left`th from now.
struct Fault {
    name: String,
    left: u64,
    code: Code,
}

/// What is refused, or done, only where a test asks for it. Read once.
#[derive(Clone, Copy)]
pub(crate) struct Strictness {
    /// Host memory that was not asked for with `DEVICEMAP` has no device address.
    pub(crate) device_map: bool,
    /// Every call that is not about finding devices or contexts needs a current context.
    pub(crate) context: bool,
    /// A call after the process has begun to end aborts it, instead of answering `DEINITIALIZED`.
    pub(crate) abort_after_exit: bool,
    /// Memory has no handles for other processes.
    pub(crate) no_ipc: bool,
    /// Addresses of device memory that was freed are given again.
    pub(crate) reuse: bool,
    /// The machine code that ships for our devices is accepted; otherwise all machine code is refused.
    pub(crate) machine_code: bool,
    /// A call that waits for room in a full stream holds up every other call into the context; otherwise it holds up only
    /// calls that allocate memory, as measured on an H200.
    pub(crate) context_lock: bool,
}

impl Strictness {
    fn asked() -> Self {
        Strictness {
            device_map: flag("DEVICEMAP", false),
            context: flag("CONTEXT", false),
            abort_after_exit: match variable("EXIT").trim() {
                "" => false,
                "abort" => true,
                other => wrong("EXIT", other),
            },
            no_ipc: flag("NO_IPC", false),
            reuse: flag("REUSE", false),
            machine_code: flag("MACHINE_CODE", true),
            context_lock: match variable("LOCK").trim() {
                "" | "memory" => false,
                "context" => true,
                other => wrong("LOCK", other),
            },
        }
    }
}

struct Knobs {
    devices: AtomicU64,
    memory: AtomicU64,
    /// The longest delay, in microseconds; 0 for none.
    delay: AtomicU64,
    seed: AtomicU64,
    /// Bit `a * 8 + b`: devices `a` and `b` cannot reach each other.
    no_peer: AtomicU64,
    /// Instructions one launch may take.
    budget: AtomicU64,
    /// Hardware queues of a context that is made from now on.
    queues: AtomicU64,
    /// How the hardware queues are dealt to streams: a [`Deal`].
    deal: AtomicU64,
    /// How many unfinished pieces of work a stream can hold; 0: any number.
    depth: AtomicU64,
    strict: Strictness,
    /// Kernels whose name contains this text store wrong values; none do if it is empty.
    spoil: String,
    /// The system's numbers of the devices that this process sees, in its order; it sees all if there are none here.
    visible: Vec<i32>,
    /// How many more copies to the host, and how many to a device, may run; later ones wait. `u64::MAX`: no limit.
    pass: [AtomicU64; 2],
    calls: Mutex<BTreeMap<&'static str, u64>>,
    faults: Mutex<Vec<Fault>>,
    any_fault: AtomicBool,
}

fn knobs() -> &'static Knobs {
    static KNOBS: OnceLock<Knobs> = OnceLock::new();
    KNOBS.get_or_init(|| {
        let knobs = Knobs {
            devices: AtomicU64::new(number("DEVICES", 2).clamp(1, MOST_DEVICES as u64)),
            memory: AtomicU64::new(number("MEMORY", 1 << 30)),
            delay: AtomicU64::new(number("DELAY_US", 0)),
            seed: AtomicU64::new(number("SEED", 1)),
            no_peer: AtomicU64::new(0),
            budget: AtomicU64::new(number("BUDGET", 1 << 32)),
            queues: AtomicU64::new(asked_queues()),
            deal: AtomicU64::new(match variable("DEAL").trim() {
                "" | "turn" => Deal::InTurn as u64,
                "seed" => Deal::Seeded as u64,
                "apart" => Deal::Apart as u64,
                other => wrong("DEAL", other),
            }),
            depth: AtomicU64::new(number("DEPTH", 0)),
            strict: Strictness::asked(),
            spoil: variable("SPOIL"),
            visible: visible(),
            pass: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)],
            calls: Mutex::default(),
            faults: Mutex::default(),
            any_fault: AtomicBool::new(false),
        };
        for pair in variable("NO_PEER").split(',').filter(|pair| !pair.is_empty()) {
            let (a, b) = pair.split_once('-').unwrap_or((pair, pair));
            let bits = a.trim().parse().ok().zip(b.trim().parse().ok()).and_then(|(a, b)| pair_bits(a, b));
            knobs.no_peer.fetch_or(bits.unwrap_or_else(|| wrong("NO_PEER", pair)), Ordering::Relaxed);
        }
        for fault in variable("FAIL").split(',').filter(|fault| !fault.is_empty()) {
            let parts: Vec<&str> = fault.split(':').map(str::trim).collect();
            let [name, nth, code] = parts[..] else { wrong("FAIL", fault) };
            let (Ok(left), Ok(code)) = (nth.parse(), code.parse()) else { wrong("FAIL", fault) };
            lock(&knobs.faults).push(Fault { name: name.into(), left, code: Code(code) });
            knobs.any_fault.store(true, Ordering::Relaxed);
        }
        knobs
    })
}

fn visible() -> Vec<i32> {
    let text = variable("VISIBLE");
    let numbers = text.split(',').map(str::trim).filter(|number| !number.is_empty());
    let number = |text: &str| text.parse().ok().filter(|number| (0..MOST_DEVICES as i32).contains(number));
    numbers.map(|text| number(text).unwrap_or_else(|| wrong("VISIBLE", text))).collect()
}

/// The system's number of the device that has this number in this process.
pub(crate) fn hardware(ordinal: i32) -> i32 {
    let visible = &knobs().visible;
    usize::try_from(ordinal).ok().and_then(|ordinal| visible.get(ordinal)).copied().unwrap_or(ordinal)
}

/// This process's number of the system's device `hardware`, if the process sees that device.
pub(crate) fn ordinal(hardware: i32) -> Option<i32> {
    let visible = &knobs().visible;
    if visible.is_empty() {
        return (hardware < devices() as i32).then_some(hardware);
    }
    visible.iter().position(|known| *known == hardware).map(|ordinal| ordinal as i32)
}

fn variable(name: &str) -> String {
    std::env::var(format!("ALLSTREAM_TEST_CUDA_{name}")).unwrap_or_default()
}

fn number(name: &str, default: u64) -> u64 {
    let text = variable(name);
    let text = text.trim();
    if text.is_empty() {
        return default;
    }
    let (digits, shift) = match text.as_bytes()[text.len() - 1].to_ascii_uppercase() {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: Option<u64> = digits.parse().ok();
    number.and_then(|number| number.checked_mul(1 << shift)).unwrap_or_else(|| wrong(name, text))
}

fn flag(name: &str, default: bool) -> bool {
    match variable(name).trim() {
        "" => default,
        "0" => false,
        "1" => true,
        other => wrong(name, other),
    }
}

/// Ends the process: a knob that cannot be read must not let a test pass for the wrong reason.
fn wrong(name: &str, text: &str) -> ! {
    eprintln!("ALLSTREAM_TEST_CUDA_{name}: cannot read {text:?}");
    std::process::abort()
}

fn pair_bits(a: u64, b: u64) -> Option<u64> {
    let most = MOST_DEVICES as u64;
    (a < most && b < most).then(|| 1 << (a * most + b) | 1 << (b * most + a))
}

/// Whether calls wait for the device where a real driver may wait.
pub(crate) fn waits() -> bool {
    number("WAITS", 0) != 0
}

/// What is refused, or done, only where a test asks for it.
pub(crate) fn strict() -> Strictness {
    knobs().strict
}

/// Whether a kernel of this name is to store wrong values.
pub(crate) fn spoils(kernel: &str) -> bool {
    let text = &knobs().spoil;
    !text.is_empty() && kernel.contains(text.as_str())
}

/// The most hardware queues that a context can have.
const MOST_QUEUES: u64 = 32;

/// How many hardware queues a context has: by our own variable, or else by the one that real drivers read.
fn asked_queues() -> u64 {
    let text = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").unwrap_or_default();
    number("QUEUES", text.trim().parse().unwrap_or(8)).clamp(1, MOST_QUEUES)
}

/// How the hardware queues of a context are dealt to the streams that are made in it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deal {
    /// One after the other.
    InTurn,
    /// At random, by the seed. Streams of every priority share all queues.
    Seeded,
    /// At random too. With two queues or more, the last half of them (rounded down) is for streams of the highest priority alone.
    Apart,
}

pub(crate) fn deal() -> Deal {
    match knobs().deal.load(Ordering::Relaxed) {
        0 => Deal::InTurn,
        1 => Deal::Seeded,
        _ => Deal::Apart,
    }
}

pub(crate) fn queues() -> usize {
    knobs().queues.load(Ordering::Relaxed) as usize
}

/// How many unfinished pieces of work a stream can hold (on a real device about a thousand); `None`: any number.
pub(crate) fn depth() -> Option<u64> {
    Some(knobs().depth.load(Ordering::Relaxed)).filter(|depth| *depth > 0)
}

pub(crate) fn devices() -> usize {
    let knobs = knobs();
    if knobs.visible.is_empty() {
        knobs.devices.load(Ordering::Relaxed) as usize
    } else {
        knobs.visible.len()
    }
}

pub(crate) fn memory() -> usize {
    knobs().memory.load(Ordering::Relaxed) as usize
}

/// Whether two devices, by the system's numbers, can reach each other.
pub(crate) fn peers(a: i32, b: i32) -> bool {
    let bits = pair_bits(a as u64, b as u64).unwrap_or(u64::MAX);
    a != b && knobs().no_peer.load(Ordering::Relaxed) & bits == 0
}

/// Counts a call; gives the code that it is to fail with, if it is to fail.
pub(crate) fn counted(name: &'static str) -> Option<Code> {
    let knobs = knobs();
    *lock(&knobs.calls).entry(name).or_default() += 1;
    if !knobs.any_fault.load(Ordering::Relaxed) {
        return None;
    }
    let mut faults = lock(&knobs.faults);
    let mut code = None;
    faults.retain_mut(|fault| {
        if fault.name != name && fault.name != plain(name) {
            return true;
        }
        fault.left = fault.left.saturating_sub(1);
        if fault.left == 0 {
            code = Some(fault.code);
        }
        fault.left > 0
    });
    code
}

/// Counts something else than a call, which tests can query under this name like a function's calls.
pub(crate) fn note(what: &'static str) {
    *lock(&knobs().calls).entry(what).or_default() += 1;
}

/// A name without the suffix of its version.
fn plain(name: &str) -> &str {
    name.strip_suffix("_v2").or(name.strip_suffix("_v3")).unwrap_or(name)
}

/// A stream's source of delays: its own, so that a seed gives the same delays whatever other streams do.
pub(crate) struct Delays(u64);

impl Delays {
    pub(crate) fn new(salt: u64) -> Self {
        Delays((knobs().seed.load(Ordering::Relaxed) ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Half of the time nothing; else up to the longest delay.
    pub(crate) fn next_delay(&mut self) -> Option<Duration> {
        let longest = knobs().delay.load(Ordering::Relaxed);
        let draw = self.next();
        (longest > 0 && draw & 1 == 0).then(|| Duration::from_micros((draw >> 1) % longest + 1))
    }
}

pub(crate) fn budget() -> u64 {
    knobs().budget.load(Ordering::Relaxed)
}

/// Whether a copy may run now; if so, it is counted against the limit.
pub(crate) fn passes(to_device: bool) -> bool {
    let less = |left: u64| if left == u64::MAX { Some(left) } else { left.checked_sub(1) };
    let pass = &knobs().pass[usize::from(to_device)];
    pass.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok()
}

fn setter(set: impl FnOnce(&Knobs) -> Done) -> Code {
    set(knobs()).err().unwrap_or(Code::SUCCESS)
}

/// The number of devices that the next `cuInit` after a reset finds.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_devices(count: u32) -> Code {
    setter(|knobs| {
        if !(1..=MOST_DEVICES).contains(&(count as usize)) {
            return Err(Code::INVALID_VALUE);
        }
        knobs.devices.store(count.into(), Ordering::Relaxed);
        Ok(())
    })
}

/// Bytes of memory of each device, from now on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_memory(bytes: u64) -> Code {
    setter(|knobs| {
        knobs.memory.store(bytes, Ordering::Relaxed);
        Ok(())
    })
}

/// Delays of at most so many microseconds before pieces of work; 0 for none. The seed applies to streams that are made later.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_delays(longest_us: u64, seed: u64) -> Code {
    setter(|knobs| {
        knobs.delay.store(longest_us, Ordering::Relaxed);
        knobs.seed.store(seed, Ordering::Relaxed);
        Ok(())
    })
}

/// Whether two devices can reach each other.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_peers(a: u32, b: u32, can: bool) -> Code {
    setter(|knobs| {
        let bits = pair_bits(a.into(), b.into()).ok_or(Code::INVALID_VALUE)?;
        if can {
            knobs.no_peer.fetch_and(!bits, Ordering::Relaxed);
        } else {
            knobs.no_peer.fetch_or(bits, Ordering::Relaxed);
        }
        Ok(())
    })
}

/// Instructions that one launch may take before it is a timeout.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_budget(instructions: u64) -> Code {
    setter(|knobs| {
        knobs.budget.store(instructions, Ordering::Relaxed);
        Ok(())
    })
}

/// How many hardware queues a context gets that is made from now on; 0: as many as the environment variables say.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_queues(count: u32) -> Code {
    setter(|knobs| {
        let count = if count == 0 { asked_queues() } else { count.into() };
        if count > MOST_QUEUES {
            return Err(Code::INVALID_VALUE);
        }
        knobs.queues.store(count, Ordering::Relaxed);
        Ok(())
    })
}

/// How contexts that are made from now on deal their hardware queues to streams: 0 one after the other, 1 at random, 2 at random and apart
/// by priority. The seed is that of the delays.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_deal(deal: u32) -> Code {
    setter(|knobs| {
        if deal > Deal::Apart as u32 {
            return Err(Code::INVALID_VALUE);
        }
        knobs.deal.store(deal.into(), Ordering::Relaxed);
        Ok(())
    })
}

/// How many unfinished pieces of work a stream can hold; 0: any number. Calls that wait for room follow the change.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_set_depth(pieces: u64) -> Code {
    setter(|knobs| {
        knobs.depth.store(pieces, Ordering::Relaxed);
        Ok(())
    })
}

/// From now on `copies` copies to the host (0) or to a device (1) run, asynchronous or not; later ones wait, and hold up their
/// streams. All ones: no limit.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_pass(direction: u32, copies: u64) -> Code {
    setter(|knobs| {
        let pass = knobs.pass.get(direction as usize).ok_or(Code::INVALID_VALUE)?;
        pass.store(copies, Ordering::Release);
        Ok(())
    })
}

/// Makes the `nth` call of a function from now on (1 is the next) fail. A name without its version suffix means all versions.
/// Several faults can be set; an `nth` of 0 takes back all faults of this name, a null name all faults.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn allstream_test_cuda_fail(name: In<c_char>, nth: u64, code: Code) -> Code {
    setter(|knobs| {
        let mut faults = lock(&knobs.faults);
        if name.is_null() {
            faults.clear();
            return Ok(());
        }
        let name = name.text()?.to_str().map_err(|_| Code::INVALID_VALUE)?.to_owned();
        if nth == 0 {
            faults.retain(|fault| fault.name != name);
        } else {
            faults.push(Fault { name, left: nth, code });
            knobs.any_fault.store(true, Ordering::Relaxed);
        }
        Ok(())
    })
}

/// How often a function has been called; its name may lack the suffix of its version.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn allstream_test_cuda_calls(name: In<c_char>) -> u64 {
    let Ok(Ok(wanted)) = name.text().map(|name| name.to_str()) else { return 0 };
    let calls = lock(&knobs().calls);
    calls.iter().filter(|(name, _)| **name == wanted || plain(name) == wanted).map(|(_, count)| count).sum()
}
