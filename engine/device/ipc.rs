//! Device memory that processes share (CUDA IPC).
//!
//! A block here is one allocation of the driver's, made by the pool or by another library (`allocations.rs`). Other processes open a
//! block by its name ([`Exported`]). The driver does not open a block in the process that allocated it. A block is opened only once in each
//! context of another process, and the ranks that use the context share it.
//!
//! Another library may free its allocation while it is still open here. Nobody reads the allocation then, as a buffer goes back to its
//! owner only when all ranks are done with it. But as long as this process has a freed block open, the driver opens no newer block that
//! lies at the same addresses. So the freed block is closed before the newer one is opened.

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

/// A block of another process that is open here. It is closed when this is dropped, or when a newer block has taken its place.
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
    /// The number that the block has in its process. Newer blocks have greater numbers.
    number: u64,
    /// The address of our [`Context`] in which it is open.
    context: usize,
}

/// The blocks of other processes that are open here, or are being opened.
static OPEN: Mutex<Option<HashMap<BlockKey, Arc<Slot>>>> = Mutex::new(None);

/// A block that is open, or is being opened by the thread that holds the lock of `import`.
struct Slot {
    /// Where the block lies in its own process, and its length.
    theirs: (u64, u64),
    import: Mutex<Weak<Import>>,
}

impl Drop for Import {
    fn drop(&mut self) {
        self.close();
    }
}

/// A block of another process that is being opened. The driver may wait for all work on the device before it opens a block. So a thread
/// of its own calls the driver, and holds no lock meanwhile but that of the block.
pub(crate) struct Opening(Arc<OnceLock<Result<Arc<Import>, Error>>>);

impl Opening {
    /// Begins to open a block as [`Import::open`] does. `waker` is woken when the block is open, or when opening it has failed.
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

    /// The block; `None`: it is not open yet.
    ///
    /// # Errors
    /// The block cannot be opened.
    pub(crate) fn opened(&self) -> Result<Option<&Arc<Import>>, Error> {
        self.0.get().map(|opened| opened.as_ref().map_err(Error::clone)).transpose()
    }
}

impl Import {
    /// Closes the block, which no stream uses any more. A second call does nothing.
    fn close(&self) {
        if self.is_open.swap(false, Ordering::AcqRel) {
            self.context.close("close memory of another process", |cuda| {
                // SAFETY: `Import::open` opened the block, and it is closed only once (`is_open`). If `drop` calls this, no stream uses the
                // block: whoever put work on it kept the import until the stream was past that (`retire`). If `close_freed` calls it, the
                // owner has freed the block, which it may do only when the streams of all ranks are done with it.
                unsafe { cuda.ipc_close_mem_handle(self.base) }
            });
        }
    }

    /// Closes the older blocks of the same process that lie where its newer block `key` lies, as the process must have freed them. The driver
    /// may wait for the device meanwhile.
    fn close_freed(key: BlockKey, (start, bytes): (u64, u64)) {
        let is_freed = |open: &BlockKey, (other, length): (u64, u64)| {
            // Whoever opens a block takes, beside its own lock, those of older blocks only. So no two threads wait for each other.
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

    /// Opens a block in the context of `stream`, or finds it open there. `process` is the number that the block's process has drawn.
    pub(crate) fn open(stream: &DeviceStream, process: u128, name: &Exported) -> Result<Arc<Import>, Error> {
        let context = &stream.0.context;
        let key = BlockKey { process, number: name.number, context: Arc::as_ptr(context).addr() };
        let theirs = (name.base, name.bytes);
        // The driver may take long, so `OPEN` is not locked while it is called. Only threads that want the same block, or a newer block
        // in its place, wait.
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
            // SAFETY: the device's context is current (`call`). The driver checks the bytes of a handle, whatever they are. The import
            // closes what is opened.
            let base = unsafe { cuda.ipc_open_mem_handle(handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) }?;
            let is_open = AtomicBool::new(true);
            let mut import = Import { context: context.clone(), base, bytes: 0, is_open };
            let (mut start, mut bytes) = (0, 0_usize);
            // SAFETY: the driver gave the address; `start` and `bytes` are room for both answers.
            unsafe { cuda.mem_get_address_range(&raw mut start, &raw mut bytes, base) }?;
            import.bytes = (bytes as u64).saturating_sub(base.saturating_sub(start));
            Ok(import)
        })?;
        let import = Arc::new(import);
        *slot = Arc::downgrade(&import);
        Ok(import)
    }

    /// The address in this process of `bytes` bytes at `offset` in the block. `None`: not all of them are in the block, or it is closed.
    pub(crate) fn at(&self, offset: u64, bytes: usize) -> Option<u64> {
        let end = offset.checked_add(bytes as u64)?;
        (self.is_open() && end <= self.bytes).then_some(self.base + offset)
    }

    /// Whether the block is open still. It is closed as soon as a newer block shows that its owner has freed it.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// How many bytes the block has.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Drops `held`, which keeps memory of other processes open, once the stream has come past all that is on it now. If nobody can tell
/// whether it has, `held` is never dropped.
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
    /// A function of the driver's that sharing needs and this driver lacks, if there is one.
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

    /// The name by which other processes open this memory. If it is of the pool, its block is not given back to the driver as long as
    /// `keep` lives. `None`: it is not of the pool, and [`share`](Self::share) has not given it a name.
    pub(crate) fn export(&self, keep: &Arc<()>, at: u64, bytes: usize) -> Result<Option<Exported>, Error> {
        let named = self.export_of_pool(keep, at, bytes)?;
        Ok(named.or_else(|| self.0.context.allocations.lock().name(at, bytes as u64)))
    }

    /// Gives memory a name for [`export`](Self::export), whoever allocated it. `Ok(Err(why))`: it can have none.
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

    /// Whether this device can touch memory of another process's device, whose UUID is `other`, as far as that can be told before such
    /// memory is opened. `Ok(Err(why))`: it cannot.
    pub(crate) fn reaches(&self, other: [u8; 16]) -> Result<Result<(), String>, Error> {
        let context = &self.0.context;
        if other == context.uuid {
            return Ok(Ok(()));
        }
        let tell = |error| context.tell("look for the device of another process", error);
        // SAFETY: only asks for a number; the driver is initialised, as there is a context.
        let count = unsafe { context.cuda.device_get_count() }.map_err(tell)?;
        for index in 0..count {
            // SAFETY: `index` is less than the number of devices.
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
        // The other device is hidden from this process (CUDA_VISIBLE_DEVICES), so the driver cannot be asked about it. Its memory can
        // still be opened if the two devices reach each other. If they do not, opening it fails.
        Ok(Ok(()))
    }
}
