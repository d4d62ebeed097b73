//! An open device, and memory that is registered with it: pinned, so that the device reads and writes it by itself.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use allstream_sys::verbs::{Access, IbvContext, IbvDeviceAttr, IbvMr, IbvPd, Verbs, VerbsError};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::Error;
use crate::forked;
use crate::link::region::Region;

/// Bytes that this process has registered.
static REGISTERED: AtomicUsize = AtomicUsize::new(0);

/// Bytes of memory that this process has registered with network cards, and so keeps from being paged out.
pub(crate) fn registered_bytes() -> usize {
    REGISTERED.load(Ordering::Relaxed)
}

/// Whether a non-blocking call failed only because there is nothing yet, or because a signal interrupted it.
pub(super) fn is_not_yet(error: &VerbsError) -> bool {
    [Errno::AGAIN, Errno::INTR].into_iter().any(|errno| errno.raw_os_error() == error.code)
}

/// An open device with a protection domain: a queue pair can only use memory that is registered in its own domain.
pub(super) struct Domain {
    pub(super) verbs: &'static Verbs,
    context: NonNull<IbvContext>,
    domain: NonNull<IbvPd>,
}

// SAFETY: both pointers are handles of libibverbs, which any thread may use: the library locks what it changes.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// Opens a device by its name.
    pub(super) fn open(verbs: &'static Verbs, device: &str) -> Result<Domain, VerbsError> {
        let devices = verbs.devices()?;
        let at = (0..devices.len()).find(|at| devices.name(*at) == device);
        let gone = VerbsError { call: "ibv_open_device", code: Errno::NODEV.raw_os_error() };
        let context = devices.open(at.ok_or_else(|| gone.clone())?)?.into_raw();
        // SAFETY: the device was just opened.
        let domain = unsafe { verbs.alloc_pd(context.as_ptr()) };
        match domain.map(NonNull::new) {
            Ok(Some(domain)) => Ok(Domain { verbs, context, domain }),
            failed => {
                // SAFETY: the context is open, is closed only here, and nothing was made on it.
                let _ = unsafe { verbs.close_device(context.as_ptr()) };
                Err(failed.err().unwrap_or(gone))
            }
        }
    }

    pub(super) fn context(&self) -> *mut IbvContext {
        self.context.as_ptr()
    }

    pub(super) fn domain(&self) -> *mut IbvPd {
        self.domain.as_ptr()
    }

    /// The device's limits.
    pub(super) fn attributes(&self) -> Result<IbvDeviceAttr, VerbsError> {
        let mut attributes = std::mem::MaybeUninit::<IbvDeviceAttr>::zeroed();
        // SAFETY: the device is open, and `attributes` has room for what the call writes.
        unsafe { self.verbs.query_device(self.context(), attributes.as_mut_ptr()) }?;
        // SAFETY: the structure consists of numbers and arrays of numbers, for which zero is a valid value.
        Ok(unsafe { attributes.assume_init() })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if forked::is_forked() {
            return; // the device is the parent's: freeing its domain here would free it for the parent too
        }
        // SAFETY: whatever was made in this domain holds an `Arc` of it while in use, so this is the last use of both handles. If a call fails, what it
        // should have freed stays until the process ends: nobody could do anything about that.
        unsafe {
            let _ = self.verbs.dealloc_pd(self.domain());
            let _ = self.verbs.close_device(self.context());
        }
    }
}

/// Which memory is registered, and what keeps it mapped.
enum Memory {
    /// A mapping that `Registered::new` made. It ends with the registration.
    Own,
    /// A part of this region, which keeps it mapped.
    OfRegion(#[allow(dead_code)] Arc<Region>),
    /// Memory that its owner keeps mapped until the registration has ended: a user's buffer, or memory that is registered with another device, too.
    Block,
}

/// Registered memory. It is a shared mapping, so that a fork leaves its pages in place: in a private mapping, copy-on-write could give this process a
/// copy of a page after a fork, while the device went on using the old page.
pub(super) struct Registered {
    domain: Arc<Domain>,
    /// `None` once it was given back.
    handle: Option<NonNull<IbvMr>>,
    at: NonNull<u8>,
    bytes: usize,
    memory: Memory,
}

// SAFETY: the memory stays mapped until drop, and is accessed only through raw pointers, whose users state their own protocol; any thread may use the
// library's handle.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// New memory, all zero, registered with the device for this access.
    pub(super) fn new(domain: &Arc<Domain>, bytes: usize, access: &[Access]) -> Result<Registered, Error> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses touches no existing memory.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, flags, MapFlags::SHARED) };
        let at = at.map_err(|e| Error::os(format!("map {bytes} bytes for a link over RDMA"), e))?;
        let at = NonNull::new(at.cast::<u8>()).ok_or_else(|| {
            Error::system("map memory for a link over RDMA", "the system returned address 0")
        })?;
        match register(domain, at, bytes, access) {
            Ok(handle) => Ok(Registered::of(domain, handle, (at, bytes), Memory::Own)),
            Err(error) => {
                // SAFETY: the mapping from above, whole, which nobody else knows.
                let _ = unsafe { munmap(at.as_ptr().cast(), bytes) };
                Err(error)
            }
        }
    }

    /// The staging slots of a rank's region, from which the device reads what is sent.
    pub(super) fn slots_of(domain: &Arc<Domain>, region: &Arc<Region>) -> Result<Registered, Error> {
        let (at, bytes) = region.all_slots();
        let handle = register(domain, at, bytes, &[])?;
        Ok(Registered::of(domain, handle, (at, bytes), Memory::OfRegion(region.clone())))
    }

    /// Memory of somebody else's. The caller keeps it mapped until the registration is dropped, or [`end`](Registered::end) has returned.
    pub(super) fn block(
        domain: &Arc<Domain>,
        at: NonNull<u8>,
        bytes: usize,
        access: &[Access],
    ) -> Result<Registered, Error> {
        let handle = register(domain, at, bytes, access)?;
        Ok(Registered::of(domain, handle, (at, bytes), Memory::Block))
    }

    fn of(
        domain: &Arc<Domain>,
        handle: NonNull<IbvMr>,
        (at, bytes): (NonNull<u8>, usize),
        memory: Memory,
    ) -> Registered {
        Registered { domain: domain.clone(), handle: Some(handle), at, bytes, memory }
    }

    /// Ends the registration. Returns whether the device does not use the memory any more.
    pub(super) fn end(mut self) -> bool {
        self.deregister()
    }

    /// The registration's handle, by which requests to bind a window name the memory.
    pub(super) fn handle(&self) -> *mut IbvMr {
        self.handle.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.at
    }

    /// The address at this offset in the memory.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.at.as_ptr().wrapping_add(offset)
    }

    pub(super) fn holds(&self, at: *const u8, bytes: usize) -> bool {
        let offset = (at as usize).checked_sub(self.at.as_ptr() as usize);
        offset.and_then(|offset| offset.checked_add(bytes)).is_some_and(|end| end <= self.bytes)
    }

    /// The key by which this process's own requests name the memory.
    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: registered until drop.
        self.handle.map_or(0, |handle| unsafe { handle.as_ref() }.lkey)
    }

    /// The key by which other hosts' requests name the memory, if they may access it.
    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: registered until drop.
        self.handle.map_or(0, |handle| unsafe { handle.as_ref() }.rkey)
    }
}

fn register(
    domain: &Domain,
    at: NonNull<u8>,
    bytes: usize,
    access: &[Access],
) -> Result<NonNull<IbvMr>, Error> {
    let access = access.iter().fold(0, |all, access| all | access.0 as i32);
    let failed = |problem: String| {
        Error::system(
            format!("register {bytes} bytes of memory with a network card"),
            format!(
                "{problem}; {} bytes are registered; if locked memory is limited, raise the limit: `ulimit -l unlimited`, or start the container \
                 with --ulimit memlock=-1",
                registered_bytes()
            ),
        )
    };
    // SAFETY: the domain exists; `bytes` bytes are mapped at `at`, and their owner keeps them mapped until the registration is gone.
    let handle = unsafe { domain.verbs.reg_mr(domain.domain(), at.as_ptr().cast::<c_void>(), bytes, access) };
    let handle = handle.map_err(|error| failed(error.to_string()))?;
    let handle = NonNull::new(handle).ok_or_else(|| failed("ibv_reg_mr gave nothing".into()))?;
    REGISTERED.fetch_add(bytes, Ordering::Relaxed);
    Ok(handle)
}

impl Registered {
    /// Ends the registration, if that was not tried before. Returns whether the device does not use the memory any more.
    fn deregister(&mut self) -> bool {
        if forked::is_forked() {
            return false; // the registration is the parent's
        }
        let Some(handle) = self.handle.take() else { return false };
        // SAFETY: `register` made the handle, which is given back only here. No queue pair has a request left that names the memory. For a link's
        // memory its owner has made sure (`QueuePair::destroy`). A user's buffer gets here when the buffer is given back, which is after its
        // operations and any leases on it are over, or when the card is dropped, which is after all links, as each keeps the card alive.
        if let Err(error) = unsafe { self.domain.verbs.dereg_mr(handle.as_ptr()) } {
            // The device may still use the memory, so it stays mapped for good.
            tracing::error!("{} bytes stay registered with a network card: {error}", self.bytes);
            let memory = std::mem::replace(&mut self.memory, Memory::Block);
            std::mem::forget(memory);
            return false;
        }
        REGISTERED.fetch_sub(self.bytes, Ordering::Relaxed);
        if matches!(self.memory, Memory::Own) {
            // SAFETY: the mapping that `new` made, whole; the device does not use it any more, and nobody else knows it.
            let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
        }
        true
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.deregister();
    }
}
