//! Devices, and what can be asked of them.

use std::ffi::c_char;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::abi::{Out, lock};
use crate::codes::{Code, Done};
use crate::context::Context;
use crate::entry::call;
use crate::knobs;
use crate::space::Arena;

pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) arena: Arc<Arena>,
    /// Bytes allocated.
    pub(crate) used: AtomicUsize,
    pub(crate) primary: Mutex<Primary>,
}

/// A device's primary context, and how many times it is retained.
#[derive(Default)]
pub(crate) struct Primary {
    pub(crate) context: Option<Arc<Context>>,
    pub(crate) held: u32,
    pub(crate) flags: u32,
}

impl Device {
    /// Waits while a call holds up the primary context, if there is one.
    fn pass_primary(&self) {
        let context = lock(&self.primary).context.clone();
        context.inspect(|context| context.pass());
    }

    /// The system's number of the device, which is the same in every process.
    pub(crate) fn hardware(&self) -> i32 {
        knobs::hardware(self.ordinal)
    }
}

static DEVICES: RwLock<Vec<Arc<Device>>> = RwLock::new(Vec::new());

/// Makes as many devices as the knob says, unless there are some already.
pub(crate) fn make_all() -> Done {
    let mut devices = DEVICES.write().unwrap_or_else(PoisonError::into_inner);
    if devices.is_empty() {
        for ordinal in 0..knobs::devices() as i32 {
            let arena = Arc::new(Arena::new()?);
            devices.push(Arc::new(Device {
                ordinal,
                arena,
                used: AtomicUsize::new(0),
                primary: Mutex::default(),
            }));
        }
    }
    Ok(())
}

pub(crate) fn forget_all() {
    DEVICES.write().unwrap_or_else(PoisonError::into_inner).clear();
}

pub(crate) fn count() -> usize {
    DEVICES.read().unwrap_or_else(PoisonError::into_inner).len()
}

pub(crate) fn device(ordinal: i32) -> Done<Arc<Device>> {
    let devices = DEVICES.read().unwrap_or_else(PoisonError::into_inner);
    let device = usize::try_from(ordinal).ok().and_then(|ordinal| devices.get(ordinal));
    device.cloned().ok_or(Code::INVALID_DEVICE)
}

/// A device's count of allocated bytes; a change has no effect if the device is gone.
pub(crate) fn used(ordinal: i32) -> Used {
    Used(device(ordinal).ok())
}

pub(crate) struct Used(Option<Arc<Device>>);

impl Used {
    pub(crate) fn fetch_sub(&self, bytes: usize, order: Ordering) {
        if let Some(device) = &self.0 {
            device.used.fetch_sub(bytes, order);
        }
    }
}

/// A device's UUID, which is the same in every process: it is made from the system's number.
pub(crate) fn uuid(ordinal: i32) -> [u8; 16] {
    let mut uuid = *b"cuda-for-tests\0\0";
    uuid[15] = knobs::hardware(ordinal) as u8;
    uuid
}

/// Multiprocessors.
pub(crate) const PROCESSORS: i32 = 8;

/// An attribute, by its number; `None` for a number that CUDA does not define.
#[allow(clippy::match_overlapping_arm, reason = "the last range is for all that no other arm names")]
fn attribute(attribute: i32, ordinal: i32) -> Option<i32> {
    Some(match attribute {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        // Bytes of shared memory of a block, bytes of constant memory, threads of a warp.
        8 => 49152,
        9 => 65536,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65536,
        13 | 36 => 1_500_000,
        14 => 512,
        // Few processors: a grid that is sized to them stays small for the interpreter.
        16 => PROCESSORS,
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 90 => 1,
        33 => ordinal + 1,
        37 => 4096,
        38 => 32 << 20,
        39 => 2048,
        40 => 3,
        75 => 9,
        76 => 0,
        81 => 233_472,
        // Devices can use host pointers of registered memory; stream memory operations (v1, of 64 bits, NOR); registering of host memory.
        91..=94 | 99 => 1,
        97 => 232_448,
        // Flushing of remote writes, memory pools, stream memory operations (of 64 bits, NOR), events between processes.
        98 | 115 | 122 | 123 | 125 => 1,
        106 => 32,
        1..=150 => 0,
        _ => return None,
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetCount(count_: Out<i32>) -> Code {
    call("cuDeviceGetCount", || count_.set(count() as i32))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGet(out: Out<i32>, ordinal: i32) -> Code {
    call("cuDeviceGet", || out.set(device(ordinal)?.ordinal))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, ordinal: i32) -> Code {
    call("cuDeviceGetName", || {
        let text = format!("CUDA device for tests {}\0", device(ordinal)?.ordinal);
        let length = usize::try_from(length).unwrap_or(0);
        if name.is_null() || length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let taken = text.len().min(length);
        // SAFETY: not null, and the caller gave room for `length` bytes, of which at least one and at most all are written. The
        // last byte written is a zero.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, taken);
            name.add(taken - 1).write(0);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetAttribute(out: Out<i32>, number: i32, ordinal: i32) -> Code {
    call("cuDeviceGetAttribute", || {
        let ordinal = device(ordinal)?.ordinal;
        out.set(attribute(number, ordinal).ok_or(Code::INVALID_VALUE)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid(out: Out<[u8; 16]>, ordinal: i32) -> Code {
    call("cuDeviceGetUuid", || out.set(uuid(device(ordinal)?.ordinal)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, ordinal: i32) -> Code {
    call("cuDeviceGetUuid_v2", || out.set(uuid(device(ordinal)?.ordinal)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceTotalMem_v2(out: Out<usize>, ordinal: i32) -> Code {
    call("cuDeviceTotalMem_v2", || {
        device(ordinal)?;
        out.set(knobs::memory())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetPCIBusId(out: *mut c_char, length: i32, ordinal: i32) -> Code {
    call("cuDeviceGetPCIBusId", || {
        let text = format!("0000:{:02x}:00.0\0", device(ordinal)?.ordinal + 1);
        if out.is_null() || (length as usize) < text.len() || length < 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller gave room for `length` bytes, which are enough.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, text.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetByPCIBusId(out: Out<i32>, text: crate::abi::In<c_char>) -> Code {
    call("cuDeviceGetByPCIBusId", || {
        let text = text.text()?.to_str().map_err(|_| Code::INVALID_VALUE)?;
        let text = text.strip_prefix("0000:").unwrap_or(text);
        let bus = text.strip_suffix(":00.0").and_then(|bus| i32::from_str_radix(bus, 16).ok());
        out.set(device(bus.ok_or(Code::INVALID_VALUE)? - 1)?.ordinal)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: Out<u64>, ordinal: i32) -> Code {
    call("cuDevicePrimaryCtxRetain", || {
        let device = device(ordinal)?;
        device.pass_primary();
        let mut primary = lock(&device.primary);
        let flags = primary.flags;
        let context = primary.context.get_or_insert_with(|| Context::create(&device, flags)).clone();
        out.set(context.handle)?;
        primary.held += 1;
        Ok(())
    })
}

fn release(ordinal: i32) -> Done {
    let device = device(ordinal)?;
    device.pass_primary();
    let mut primary = lock(&device.primary);
    primary.held = primary.held.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    if primary.held == 0 {
        let context = primary.context.take();
        drop(primary);
        context.inspect(|context| context.destroy());
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRelease(ordinal: i32) -> Code {
    call("cuDevicePrimaryCtxRelease", || release(ordinal))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: i32) -> Code {
    call("cuDevicePrimaryCtxRelease_v2", || release(ordinal))
}

/// The way out of a sticky error.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(ordinal: i32) -> Code {
    call("cuDevicePrimaryCtxReset_v2", || {
        let device = device(ordinal)?;
        device.pass_primary();
        let context = {
            let mut primary = lock(&device.primary);
            primary.held = 0;
            primary.context.take()
        };
        context.inspect(|context| context.destroy());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    ordinal: i32,
    flags: Out<u32>,
    active: Out<i32>,
) -> Code {
    call("cuDevicePrimaryCtxGetState", || {
        let device = device(ordinal)?;
        device.pass_primary();
        let primary = lock(&device.primary);
        flags.set(primary.flags)?;
        active.set(primary.context.is_some().into())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxSetFlags_v2(ordinal: i32, flags: u32) -> Code {
    call("cuDevicePrimaryCtxSetFlags_v2", || {
        let device = device(ordinal)?;
        lock(&device.primary).flags = flags;
        Ok(())
    })
}

/// Makes a device's primary context fail, as if a kernel had: everything there gives this code until it is reset.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_break(ordinal: i32, code: Code) -> Code {
    let broken = device(ordinal).and_then(|device| {
        let primary = lock(&device.primary);
        primary.context.as_ref().map(|context| context.fail(code)).ok_or(Code::INVALID_CONTEXT)
    });
    broken.err().unwrap_or(Code::SUCCESS)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceCanAccessPeer(out: Out<i32>, ordinal: i32, peer: i32) -> Code {
    call("cuDeviceCanAccessPeer", || {
        let (a, b) = (device(ordinal)?.hardware(), device(peer)?.hardware());
        out.set(knobs::peers(a, b).into())
    })
}

/// 1: performance rank, 2: access, 3: native atomics, 4: arrays.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetP2PAttribute(
    out: Out<i32>,
    attribute: i32,
    from: i32,
    to: i32,
) -> Code {
    call("cuDeviceGetP2PAttribute", || {
        let (a, b) = (device(from)?.hardware(), device(to)?.hardware());
        match attribute {
            _ if a == b => Err(Code::INVALID_DEVICE),
            1 | 4 => out.set(0),
            2 | 3 => out.set(knobs::peers(a, b).into()),
            _ => Err(Code::INVALID_VALUE),
        }
    })
}
