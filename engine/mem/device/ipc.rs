//! Memory and events that processes share (CUDA IPC).
//!
//! A block of the pool has a name that another process opens; so has an event that was made for it. The driver refuses to
//! open what its own process made, and wants each block opened once: ranks of one process share what they have open.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use allstream_sys::cuda::{
    CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CuEvent,
    CuIpcEventHandle, CuIpcMemHandle,
};
use parking_lot::Mutex;

use super::capture::relaxed;
use super::context::{Context, uuid};
use super::pool::Exported;
use super::stream::DeviceStream;
use super::waiter::{self, Outcome};
use crate::error::Error;

/// An event that streams of several processes record and wait for.
pub(crate) struct SharedEvent {
    context: Arc<Context>,
    raw: CuEvent,
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        // Tried also where the context cannot be entered: the driver knows whose event it is.
        let _entered = self.context.enter();
        // SAFETY: made or opened here, and nobody else has it; an event may be destroyed before it is reached.
        if let Err(error) = unsafe { self.context.cuda.event_destroy(self.raw) } {
            tracing::warn!(device = self.context.ordinal, "destroy an event between processes: {error}");
        }
    }
}

impl SharedEvent {
    /// Whether its last record is reached, whoever's it was. Never blocks.
    pub(crate) fn is_reached(&self) -> bool {
        let _relaxed = relaxed(self.context.cuda);
        // SAFETY: `self` keeps the event.
        unsafe { self.context.cuda.event_query(self.raw) }.is_ok()
    }
}

/// A block of another process's, open here. It is closed with this.
pub(crate) struct Import {
    context: Arc<Context>,
    base: u64,
    bytes: u64,
}

/// Which process's block, open in which context.
type Key = (u128, u64, usize);

/// What is open, by name.
static OPEN: Mutex<Option<HashMap<Key, Weak<Import>>>> = Mutex::new(None);

impl Drop for Import {
    fn drop(&mut self) {
        let closed = self.context.enter().and_then(|_entered| {
            // SAFETY: opened by `Import::open`, and closed once; whoever dropped this has waited for the streams that
            // used it (`retire`).
            unsafe { self.context.cuda.ipc_close_mem_handle(self.base) }
        });
        if let Err(error) = closed {
            tracing::warn!(device = self.context.ordinal, "close memory of another process: {error}");
        }
    }
}

impl Import {
    /// Opens a block of the process that drew this number, in the context of `stream`, or finds it open.
    pub(crate) fn open(stream: &DeviceStream, process: u128, name: &Exported) -> Result<Arc<Import>, Error> {
        let context = &stream.0.context;
        let key = (process, name.number, Arc::as_ptr(context).addr());
        let mut open = OPEN.lock();
        let open = open.get_or_insert_default();
        open.retain(|_, import| import.strong_count() > 0);
        if let Some(import) = open.get(&key).and_then(Weak::upgrade) {
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
        open.insert(key, Arc::downgrade(&import));
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

/// Closes what is open once the stream has come past what is on it now. Where nobody can tell, never.
pub(crate) fn retire(stream: &DeviceStream, imports: Vec<Arc<Import>>) {
    if imports.is_empty() {
        return;
    }
    match stream.point() {
        Ok(event) if event.is_complete().unwrap_or(false) => drop(imports),
        Ok(event) => {
            let then = move |outcome: Outcome| match outcome {
                Outcome::Unknown(_) => std::mem::forget(imports),
                _ => drop(imports),
            };
            waiter::watch(event, Box::new(then));
        }
        Err(_) => std::mem::forget(imports),
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
            (cuda.has_ipc_get_event_handle(), "cuIpcGetEventHandle"),
            (cuda.has_ipc_open_event_handle(), "cuIpcOpenEventHandle"),
            (cuda.has_mem_get_address_range(), "cuMemGetAddressRange"),
        ];
        needed.into_iter().find(|(there, _)| !there).map(|(_, name)| name)
    }

    /// Names memory of the pool for other processes; it is not given back to the driver as long as `keep` lives. `None`:
    /// it is not of the pool.
    pub(crate) fn export(&self, keep: &Arc<()>, at: u64, bytes: usize) -> Result<Option<Exported>, Error> {
        let (context, keep) = (&self.0.context, Arc::downgrade(keep));
        let named = context.enter().and_then(|entered| {
            context.pool.lock().export(context.cuda, &entered, &keep, (at, bytes as u64))
        });
        named.map_err(|error| context.tell("name memory for other processes", error))
    }

    /// A new event, and what other processes open it by.
    pub(crate) fn shared_event(&self) -> Result<(SharedEvent, [u8; 64]), Error> {
        let context = &self.0.context;
        context.call("make an event between processes", |cuda| {
            // SAFETY: in the device's context; destroyed with the result.
            let raw = unsafe { cuda.event_create(CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS) }?;
            let event = SharedEvent { context: context.clone(), raw };
            // SAFETY: an event for this, just made.
            let handle = unsafe { cuda.ipc_get_event_handle(raw) }?;
            Ok((event, handle.0))
        })
    }

    /// An event of another process.
    pub(crate) fn open_event(&self, handle: [u8; 64]) -> Result<SharedEvent, Error> {
        let context = &self.0.context;
        let raw = context.call("open an event of another process", |cuda| {
            // SAFETY: in the device's context. A handle is bytes that the driver looks at, whatever they are.
            unsafe { cuda.ipc_open_event_handle(CuIpcEventHandle(handle)) }
        })?;
        Ok(SharedEvent { context: context.clone(), raw })
    }

    /// The event stands for the point that the stream has now been filled to.
    pub(crate) fn record_shared(&self, event: &SharedEvent) -> Result<(), Error> {
        self.0.context.call("mark a point in a stream", |cuda| {
            // SAFETY: both exist: `self` and `event` keep them, and both are of this context (made or opened there).
            unsafe { cuda.event_record(event.raw, self.0.raw) }
        })
    }

    /// Work put here after this call starts only once what the event stands for now is reached.
    pub(crate) fn wait_shared(&self, event: &SharedEvent) -> Result<(), Error> {
        self.0.context.call("make a stream wait", |cuda| {
            // SAFETY: both exist: `self` and `event` keep them.
            unsafe { cuda.stream_wait_event(self.0.raw, event.raw, 0) }
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
