//! Contexts: the owners of a device's objects, each thread's stack of them, and the errors that stick to them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::abi::{Handle, In, Out, Table, fresh, lock};
use crate::codes::{Code, Done};
use crate::device::{Device, device};
use crate::entry::call;
use crate::event;
use crate::knobs;
use crate::space::{self, Kind, Memory};
use crate::stream::{Queues, STREAMS, Stream};

pub(crate) struct Context {
    pub(crate) handle: Handle,
    pub(crate) device: Arc<Device>,
    pub(crate) flags: u32,
    alive: AtomicBool,
    /// The code of the first error of work in this context, or 0. No work runs after an error.
    error: AtomicU32,
    /// Contexts whose memory this one reaches.
    peers: Mutex<BTreeSet<Handle>>,
    /// Locked while work is queued: so all submissions have one order, and work depends only on what was submitted before it.
    pub(crate) order: Mutex<Queues>,
    /// The stream 0, once it was used.
    pub(crate) legacy: Mutex<Option<Arc<Stream>>>,
    /// Locked by a call that waits for room in a stream, if the knob `LOCK` is `context`: all other calls wait until it goes on.
    blocked: Mutex<()>,
    /// How many calls wait for room in one of the context's streams.
    crowded: AtomicU32,
}

/// Counts a call in `crowded` while the call waits for room in one of the context's streams.
pub(crate) struct Crowd<'a>(&'a Context);

impl Drop for Crowd<'_> {
    fn drop(&mut self) {
        self.0.crowded.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(crate) static CONTEXTS: Table<Context> = Table::new();
/// Pairs of devices: the first may use memory of the second's pool.
pub(crate) static POOL_ACCESS: Mutex<BTreeSet<(i32, i32)>> = Mutex::new(BTreeSet::new());

thread_local! {
    static CURRENT: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    pub(crate) fn create(device: &Arc<Device>, flags: u32) -> Arc<Self> {
        let context = Arc::new(Context {
            handle: fresh(),
            device: device.clone(),
            flags,
            alive: AtomicBool::new(true),
            error: AtomicU32::new(0),
            peers: Mutex::default(),
            order: Mutex::new(Queues::new(knobs::queues())),
            legacy: Mutex::default(),
            blocked: Mutex::default(),
            crowded: AtomicU32::new(0),
        });
        CONTEXTS.add(context.handle, context.clone());
        context
    }

    /// Its streams, events and memory end with it.
    pub(crate) fn destroy(&self) {
        self.alive.store(false, Ordering::Release);
        let _ = CONTEXTS.remove(self.handle);
        lock(&self.order).forget();
        lock(&self.legacy).take().inspect(|stream| stream.close());
        for stream in STREAMS.all().into_iter().filter(|stream| stream.context.handle == self.handle) {
            let _ = STREAMS.remove(stream.handle);
            stream.close();
        }
        event::end_all_of(self.handle);
        crate::module::end_all_of(self.handle);
        for memory in space::all().into_iter().filter(|memory| memory.context == self.handle) {
            let _ = memory.end();
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// The error that sticks, if one does.
    pub(crate) fn check(&self) -> Done {
        match self.error.load(Ordering::Acquire) {
            _ if !self.is_alive() => Err(Code::CONTEXT_IS_DESTROYED),
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// From now on everything in this context fails with this code, unless an earlier error sticks to it already.
    pub(crate) fn fail(&self, code: Code) {
        let _ = self.error.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// A call that waits for room in one of this context's streams keeps the result while it waits.
    pub(crate) fn crowd(&self) -> Crowd<'_> {
        self.crowded.fetch_add(1, Ordering::AcqRel);
        Crowd(self)
    }

    /// Such a call keeps this result as well if it is to hold up all other calls.
    pub(crate) fn hold(&self) -> MutexGuard<'_, ()> {
        lock(&self.blocked)
    }

    /// Every call that concerns this context calls this first: it waits while another call holds up the context.
    pub(crate) fn pass(&self) {
        if knobs::depth().is_some() && knobs::strict().context_lock {
            drop(lock(&self.blocked));
        }
    }

    /// Calls that allocate memory call this first: it waits while any call waits for room in a stream.
    pub(crate) fn pass_for_memory(&self) {
        while self.crowded.load(Ordering::Acquire) > 0 && self.is_alive() {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }

    /// Whether this context's work may use that memory.
    pub(crate) fn reaches(&self, memory: &Memory) -> bool {
        if memory.on_the_host() {
            return memory.is_mapped();
        }
        if memory.context == self.handle {
            return true;
        }
        if memory.device == self.device.ordinal && memory.kind != Kind::Imported {
            return true;
        }
        match memory.kind {
            Kind::Pool => lock(&POOL_ACCESS).contains(&(self.device.ordinal, memory.device)),
            _ => lock(&self.peers).contains(&memory.context),
        }
    }
}

/// Whether this thread has a current context.
pub(crate) fn has_current() -> bool {
    CURRENT.with_borrow(|stack| stack.last().is_some_and(|handle| *handle != 0))
}

/// The context this thread works in.
pub(crate) fn current() -> Done<Arc<Context>> {
    let handle = CURRENT.with_borrow(|stack| stack.last().copied()).filter(|handle| *handle != 0);
    let context = handle.ok_or(Code::INVALID_CONTEXT)?;
    CONTEXTS.get(context).map_err(|_| Code::CONTEXT_IS_DESTROYED)
}

/// The same; an error that sticks to the context fails the call.
pub(crate) fn working() -> Done<Arc<Context>> {
    let context = current()?;
    context.check()?;
    Ok(context)
}

fn known(handle: Handle) -> Done<Arc<Context>> {
    let context = CONTEXTS.get(handle).map_err(|_| Code::INVALID_CONTEXT)?;
    context.pass();
    Ok(context)
}

fn create(out: &Out<Handle>, flags: u32, ordinal: i32) -> Done {
    let context = Context::create(&device(ordinal)?, flags);
    CURRENT.with_borrow_mut(|stack| stack.push(context.handle));
    out.set(context.handle)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxCreate_v2(out: Out<Handle>, flags: u32, ordinal: i32) -> Code {
    call("cuCtxCreate_v2", || create(&out, flags, ordinal))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxDestroy_v2(handle: Handle) -> Code {
    call("cuCtxDestroy_v2", || {
        let context = known(handle)?;
        if lock(&context.device.primary).context.as_ref().is_some_and(|primary| primary.handle == handle) {
            return Err(Code::INVALID_CONTEXT);
        }
        context.destroy();
        CURRENT.with_borrow_mut(|stack| {
            if stack.last() == Some(&handle) {
                stack.pop();
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetCurrent(out: Out<Handle>) -> Code {
    call("cuCtxGetCurrent", || out.set(CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSetCurrent(handle: Handle) -> Code {
    call("cuCtxSetCurrent", || {
        if handle != 0 {
            known(handle)?;
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if handle != 0 {
                stack.push(handle);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPushCurrent_v2(handle: Handle) -> Code {
    call("cuCtxPushCurrent_v2", || {
        known(handle)?;
        CURRENT.with_borrow_mut(|stack| stack.push(handle));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPopCurrent_v2(out: Out<Handle>) -> Code {
    call("cuCtxPopCurrent_v2", || {
        let handle = CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        out.set_if_wanted(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetDevice(out: Out<i32>) -> Code {
    call("cuCtxGetDevice", || out.set(current()?.device.ordinal))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetFlags(out: Out<u32>) -> Code {
    call("cuCtxGetFlags", || out.set(current()?.flags))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetApiVersion(handle: Handle, out: Out<u32>) -> Code {
    call("cuCtxGetApiVersion", || {
        if handle != 0 {
            known(handle)?;
        }
        out.set(3020)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSynchronize() -> Code {
    call("cuCtxSynchronize", || {
        let context = working()?;
        Stream::all_of(&context).iter().try_for_each(|stream| stream.synchronize())
    })
}

/// The lowest and the highest: a smaller number is more urgent.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) -> Code {
    call("cuCtxGetStreamPriorityRange", || {
        current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(crate::stream::MOST_URGENT);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) -> Code {
    call("cuCtxEnablePeerAccess", || {
        let (context, peer) = (working()?, known(peer)?);
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if context.device.ordinal == peer.device.ordinal {
            return Err(Code::INVALID_DEVICE);
        }
        if !knobs::peers(context.device.hardware(), peer.device.hardware()) {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        let new = lock(&context.peers).insert(peer.handle);
        if new { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxDisablePeerAccess(peer: Handle) -> Code {
    call("cuCtxDisablePeerAccess", || {
        let (context, peer) = (working()?, known(peer)?);
        let old = lock(&context.peers).remove(&peer.handle);
        if old { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
    })
}

/// A pool's handle is this number, shifted by 16 bits, and the number of its device: each device has one pool.
const POOL: u64 = 0x9001;

pub(crate) fn pool_of(device: i32) -> Handle {
    POOL << 16 | device as u64
}

fn device_of(pool: Handle) -> Done<i32> {
    if pool >> 16 != POOL {
        return Err(Code::INVALID_VALUE);
    }
    Ok(device((pool & 0xffff) as i32).map_err(|_| Code::INVALID_VALUE)?.ordinal)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetDefaultMemPool(out: Out<Handle>, ordinal: i32) -> Code {
    call("cuDeviceGetDefaultMemPool", || out.set(pool_of(device(ordinal)?.ordinal)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetMemPool(out: Out<Handle>, ordinal: i32) -> Code {
    call("cuDeviceGetMemPool", || out.set(pool_of(device(ordinal)?.ordinal)))
}

/// `CUmemAccessDesc`: a kind of place (1: a device), its number, and the rights (0: none, 1: read, 3: read and write).
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    kind: i32,
    id: i32,
    rights: u32,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolSetAccess(pool: Handle, map: In<Access>, count: usize) -> Code {
    call("cuMemPoolSetAccess", || {
        let owner = device_of(pool)?;
        for index in 0..count {
            let access = map.at(index)?;
            let peer = device(access.id)?.ordinal;
            if access.kind != 1 || (peer == owner && access.rights != 3) {
                return Err(Code::INVALID_VALUE);
            }
            if peer != owner && !knobs::peers(knobs::hardware(peer), knobs::hardware(owner)) {
                return Err(Code::INVALID_DEVICE);
            }
            let mut all = lock(&POOL_ACCESS);
            if access.rights == 3 {
                all.insert((peer, owner))
            } else {
                all.remove(&(peer, owner))
            };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolGetAccess(out: Out<u32>, pool: Handle, at: In<[i32; 2]>) -> Code {
    call("cuMemPoolGetAccess", || {
        let (owner, [_, peer]) = (device_of(pool)?, at.get()?);
        let reached = peer == owner || lock(&POOL_ACCESS).contains(&(peer, owner));
        out.set(if reached { 3 } else { 0 })
    })
}

/// Has no effect: memory that is freed here never stays in a pool, so a threshold for it changes nothing.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolSetAttribute(
    pool: Handle,
    _attribute: i32,
    _value: In<u64>,
) -> Code {
    call("cuMemPoolSetAttribute", || device_of(pool).map(|_| ()))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolTrimTo(pool: Handle, _keep: usize) -> Code {
    call("cuMemPoolTrimTo", || device_of(pool).map(|_| ()))
}
