//! Device memory that processes share (CUDA IPC).
//!
//! A block of the pool has a name that another process opens. The driver refuses to open what its own process made, and
//! wants each block opened once: ranks of one process share what they have open.
//!
//! So has an allocation of another library's (`allocations.rs`). Its owner may free it while it is still open here: nobody reads it then,
//! as buffers go back to their owners when all ranks are done with them. But the driver opens nothing that lies where a freed allocation
//! lay before this process has closed that one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

use allstream_sys::cuda::{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CuIpcMemHandle};
use parking_lot::Mutex;

use super::blocks::Exported;
use super::chores::{Busy, drop_later};
use super::context::Context;
use super::driver::uuid;
use super::stream::DeviceStream;
use super::waiter::{self, Outcome};
use crate::error::Error;

/// A block of another process's, open here. It is closed with this, or before.
pub(crate) struct Import {
    context: Arc<Context>,
    base: u64,
    bytes: u64,
    is_open: AtomicBool,
}

/// Which block is open, and where.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct BlockKey {
    process: u128,
    /// The block's, in that process. Later blocks have greater numbers.
    number: u64,
    /// The address of our context in which it is open.
    context: usize,
}

/// What is open, by name.
static OPEN: Mutex<Option<HashMap<BlockKey, Arc<Slot>>>> = Mutex::new(None);

/// A block that is open, or being opened by who holds the lock.
struct Slot {
    /// Where it lies in the process that has it, and its length.
    theirs: (u64, u64),
    import: Mutex<Weak<Import>>,
}

impl Drop for Import {
    fn drop(&mut self) {
        self.close();
    }
}

/// A block of another process that is being opened. The driver may first wait for all that is on the device, so a thread of its
/// own asks it, which holds nothing that others need.
pub(crate) struct Opening(Arc<OnceLock<Result<Arc<Import>, Error>>>);

impl Opening {
    /// Begins to open a block as [`Import::open`] does; `waker` is woken when it is open, or cannot be opened.
    pub(crate) fn begin(stream: &DeviceStream, process: u128, name: &Exported, waker: Waker) -> Opening {
        let opened = Arc::new(OnceLock::new());
        let (stream, name, tell) = (stream.clone(), *name, opened.clone());
        let busy = Busy::new();
        let open = move || {
            let _ = tell.set(Import::open(&stream, process, &name));
            waker.wake();
            drop((tell, stream));
            drop(busy);
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-open".into()).spawn(open) {
            let _ = opened.set(Err(Error::system("open memory of another process (a thread)", error)));
        }
        Opening(opened)
    }

    /// The block, once it is open.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(crate) fn opened(&self) -> Result<Option<&Arc<Import>>, Error> {
        self.0.get().map(|opened| opened.as_ref().map_err(Error::clone)).transpose()
    }
}

impl Import {
    /// Closes it, once: no stream reads it any more.
    fn close(&self) {
        if self.is_open.swap(false, Ordering::AcqRel) {
            self.context.close("close memory of another process", |cuda| {
                // SAFETY: opened by `Import::open`, and closed once (`is_open`). Whoever dropped this has waited for the streams that used
                // it (`retire`). Or its owner has freed it (`close_freed`), which has its memory back only when the streams of all ranks
                // are done with it.
                unsafe { cuda.ipc_close_mem_handle(self.base) }
            });
        }
    }

    /// Closes what the same process had before where this block of its lies: that was freed. The driver may wait for the device.
    fn close_freed(key: BlockKey, (start, bytes): (u64, u64)) {
        let is_freed = |open: &BlockKey, (other, length): (u64, u64)| {
            // Numbers grow: so one that opens waits for the older ones alone, and no two for each other.
            (open.process, open.context) == (key.process, key.context)
                && open.number < key.number
                && other < start.saturating_add(bytes)
                && start < other.saturating_add(length)
        };
        let freed: Vec<_> = {
            let open = OPEN.lock();
            let freed = open.iter().flatten().filter(|(key, slot)| is_freed(key, slot.theirs));
            freed.map(|(_, slot)| slot.clone()).collect()
        };
        for import in freed.iter().filter_map(|slot| slot.import.lock().upgrade()) {
            import.close();
        }
    }

    /// Opens a block of the process that drew this number, in the context of `stream`, or finds it open.
    pub(crate) fn open(stream: &DeviceStream, process: u128, name: &Exported) -> Result<Arc<Import>, Error> {
        let context = &stream.0.context;
        let key = BlockKey { process, number: name.number, context: Arc::as_ptr(context).addr() };
        let theirs = (name.base, name.bytes);
        // The driver may take long: only who wants the same block waits for it.
        let slot = {
            let mut open = OPEN.lock();
            let open = open.get_or_insert_default();
            let is_used = |slot: &Slot| slot.import.try_lock().is_none_or(|import| import.strong_count() > 0);
            open.retain(|_, slot| Arc::strong_count(slot) > 1 || is_used(slot));
            open.entry(key).or_insert_with(|| Arc::new(Slot { theirs, import: Mutex::default() })).clone()
        };
        let mut slot = slot.import.lock();
        if let Some(import) = slot.upgrade() {
            return Ok(import);
        }
        Import::close_freed(key, theirs);
        let import = context.call("open memory of another process", |cuda| {
            let handle = CuIpcMemHandle(name.handle);
            // SAFETY: in the device's context. A handle is bytes that the driver looks at, whatever they are; what is
            // opened is closed with the import.
            let base = unsafe { cuda.ipc_open_mem_handle(handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) }?;
            let is_open = AtomicBool::new(true);
            let mut import = Import { context: context.clone(), base, bytes: 0, is_open };
            let (mut start, mut bytes) = (0, 0_usize);
            // SAFETY: an address that the driver gave; room for both answers.
            unsafe { cuda.mem_get_address_range(&raw mut start, &raw mut bytes, base) }?;
            import.bytes = (bytes as u64).saturating_sub(base.saturating_sub(start));
            Ok(import)
        })?;
        let import = Arc::new(import);
        *slot = Arc::downgrade(&import);
        Ok(import)
    }

    /// The address of so many bytes of it, here; `None`: they are not all in it.
    pub(crate) fn at(&self, offset: u64, bytes: usize) -> Option<u64> {
        let end = offset.checked_add(bytes as u64)?;
        (self.is_open() && end <= self.bytes).then_some(self.base + offset)
    }

    /// Whether its owner has not freed it, as far as is known here.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// How many bytes there are.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Drops what other processes have lent, or share, once the stream has come past what is on it now. Where nobody can tell,
/// never.
pub(crate) fn retire(stream: &DeviceStream, held: impl Send + 'static) {
    match stream.point() {
        Ok(event) if event.is_complete().unwrap_or(false) => drop_later(held),
        Ok(event) => {
            let then = move |outcome: Outcome| match outcome {
                Outcome::Unknown(_) => std::mem::forget(held),
                _ => drop_later(held),
            };
            waiter::watch(event, Box::new(then));
        }
        Err(_) => std::mem::forget(held),
    }
}

impl DeviceStream {
    /// A function that sharing needs and this driver lacks.
    pub(crate) fn missing_for_sharing(&self) -> Option<&'static str> {
        let cuda = self.0.context.cuda;
        let needed = [
            (cuda.has_ipc_get_mem_handle(), "cuIpcGetMemHandle"),
            (cuda.has_ipc_open_mem_handle(), "cuIpcOpenMemHandle"),
            (cuda.has_ipc_close_mem_handle(), "cuIpcCloseMemHandle"),
            (cuda.has_mem_get_address_range(), "cuMemGetAddressRange"),
            (cuda.has_mem_host_register(), "cuMemHostRegister"),
            (cuda.has_mem_host_unregister(), "cuMemHostUnregister"),
            (cuda.has_mem_host_get_device_pointer(), "cuMemHostGetDevicePointer"),
            (cuda.has_stream_wait_value32(), "cuStreamWaitValue32"),
            (cuda.has_stream_write_value32(), "cuStreamWriteValue32"),
        ];
        needed.into_iter().find(|(there, _)| !there).map(|(_, name)| name)
    }

    /// Names memory for other processes: of the pool, which is not given back to the driver as long as `keep` lives, or memory that
    /// [`share`](Self::share) was told of. `None`: it is neither.
    pub(crate) fn export(&self, keep: &Arc<()>, at: u64, bytes: usize) -> Result<Option<Exported>, Error> {
        let named = self.export_of_pool(keep, at, bytes)?;
        Ok(named.or_else(|| self.0.context.allocations.lock().name(at, bytes as u64)))
    }

    /// Sees to it that memory has a name, whoever allocated it; if it can have none: why.
    pub(crate) fn share(&self, keep: &Arc<()>, at: u64, bytes: usize) -> Result<Result<(), String>, Error> {
        match self.export_of_pool(keep, at, bytes)? {
            Some(_) => Ok(Ok(())),
            None => Ok(self.0.context.share(at, bytes as u64)),
        }
    }

    fn export_of_pool(&self, keep: &Arc<()>, at: u64, bytes: usize) -> Result<Option<Exported>, Error> {
        let (context, keep) = (&self.0.context, Arc::downgrade(keep));
        context.within("name memory for other processes", |entered| {
            context.pool.lock().export(context.cuda, entered, &keep, (at, bytes as u64))
        })
    }

    /// Whether this device can touch the memory of another process's device, of this identity, as far as that can be seen
    /// before it is opened. If not: why.
    pub(crate) fn reaches(&self, other: [u8; 16]) -> Result<Result<(), String>, Error> {
        let context = &self.0.context;
        if other == context.uuid {
            return Ok(Ok(()));
        }
        let tell = |error| context.tell("look for the device of another process", error);
        // SAFETY: asks for a number.
        let count = unsafe { context.cuda.device_get_count() }.map_err(tell)?;
        for index in 0..count {
            // SAFETY: the index is of a device.
            let device = unsafe { context.cuda.device_get(index) }.map_err(tell)?;
            if uuid(context.cuda, device).map_err(tell)? != other {
                continue;
            }
            let can = context.cuda.has_device_can_access_peer()
                // SAFETY: two devices that the driver gave.
                && unsafe { context.cuda.device_can_access_peer(context.device, device) }.map_err(tell)? != 0;
            let why = || format!("device {} cannot reach the memory of device {index}", context.ordinal);
            return Ok(can.then_some(()).ok_or_else(why));
        }
        // It is hidden from this process (CUDA_VISIBLE_DEVICES), so the driver cannot be asked for it. Its memory can be opened
        // all the same, where the devices can; whoever does hears of it where they cannot.
        Ok(Ok(()))
    }
}
