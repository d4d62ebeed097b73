//! Device memory that processes share (CUDA IPC).
//!
//! A block of the pool has a name that another process opens. The driver refuses to open what its own process made, and
//! wants each block opened once: ranks of one process share what they have open.

use std::collections::HashMap;
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

/// A block of another process's, open here. It is closed with this.
pub(crate) struct Import {
    context: Arc<Context>,
    base: u64,
    bytes: u64,
}

/// Which process's block, open in which context.
type Key = (u128, u64, usize);

/// What is open, by name.
static OPEN: Mutex<Option<HashMap<Key, Slot>>> = Mutex::new(None);

/// A block that is open, or being opened by who holds the lock.
type Slot = Arc<Mutex<Weak<Import>>>;

impl Drop for Import {
    fn drop(&mut self) {
        self.context.close("close memory of another process", |cuda| {
            // SAFETY: opened by `Import::open`, and closed once; whoever dropped this has waited for the streams that
            // used it (`retire`).
            unsafe { cuda.ipc_close_mem_handle(self.base) }
        });
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
    /// Opens a block of the process that drew this number, in the context of `stream`, or finds it open.
    pub(crate) fn open(stream: &DeviceStream, process: u128, name: &Exported) -> Result<Arc<Import>, Error> {
        let context = &stream.0.context;
        let key = (process, name.number, Arc::as_ptr(context).addr());
        // The driver may take long: only who wants the same block waits for it.
        let slot = {
            let mut open = OPEN.lock();
            let open = open.get_or_insert_default();
            let is_used = |slot: &Slot| slot.try_lock().is_none_or(|import| import.strong_count() > 0);
            open.retain(|_, slot| Arc::strong_count(slot) > 1 || is_used(slot));
            open.entry(key).or_default().clone()
        };
        let mut slot = slot.lock();
        if let Some(import) = slot.upgrade() {
            return Ok(import);
        }
        let import = context.call("open memory of another process", |cuda| {
            let handle = CuIpcMemHandle(name.handle);
            // SAFETY: in the device's context. A handle is bytes that the driver looks at, whatever they are; what is
            // opened is closed with the import.
            let base = unsafe { cuda.ipc_open_mem_handle(handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) }?;
            let mut import = Import { context: context.clone(), base, bytes: 0 };
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
        (end <= self.bytes).then_some(self.base + offset)
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

    /// Names memory of the pool for other processes; it is not given back to the driver as long as `keep` lives. `None`:
    /// it is not of the pool.
    pub(crate) fn export(&self, keep: &Arc<()>, at: u64, bytes: usize) -> Result<Option<Exported>, Error> {
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
