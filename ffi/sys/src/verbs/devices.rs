//! The devices of this host and their attributes, by safe functions.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use super::types::{IbvContext, IbvDevice, IbvDeviceAttr, IbvGidEntry, IbvPortAttr, Transport};
use super::{Verbs, VerbsError};

/// More entries than the address table of any device has. If a device claims more, room for no more than this is made.
const MOST_GIDS: usize = 1 << 16;

/// The devices that the library has found.
#[derive(Debug)]
pub struct Devices<'a> {
    verbs: &'a Verbs,
    list: NonNull<*mut IbvDevice>,
    count: usize,
}

impl Verbs {
    /// The devices of this host, as they are now.
    ///
    /// # Errors
    /// The library's: above all that the kernel has no support for such devices.
    pub fn devices(&self) -> Result<Devices<'_>, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: `count` is room for a number.
        let list = unsafe { self.get_device_list(&raw mut count) }?;
        let gone = VerbsError { call: "ibv_get_device_list", code: 0 };
        let list = NonNull::new(list).ok_or(gone)?;
        Ok(Devices { verbs: self, list, count: usize::try_from(count).unwrap_or(0) })
    }
}

impl Devices<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn at(&self, at: usize) -> *mut IbvDevice {
        assert!(at < self.count, "device {at} of {}", self.count);
        // SAFETY: `at` is less than `count`, the number of pointers that the library has put into the list.
        unsafe { self.list.as_ptr().add(at).read() }
    }

    /// What a device is called, such as `mlx5_0`.
    ///
    /// # Panics
    /// There is no such device.
    pub fn name(&self, at: usize) -> String {
        // SAFETY: a device of the list, which is there as long as `self` is.
        match unsafe { self.verbs.get_device_name(self.at(at)) } {
            // SAFETY: a text of the library's, which ends in a null byte and is there as long as the list.
            Ok(name) => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            Err(_) => format!("device {at}, which has no name"),
        }
    }

    /// What transport a device uses, such as InfiniBand or iWARP.
    ///
    /// # Panics
    /// There is no such device.
    pub fn transport(&self, at: usize) -> Transport {
        // SAFETY: a device of the list, whose structure is the header's.
        Transport(unsafe { (*self.at(at)).transport_type })
    }

    /// Opens a device.
    ///
    /// # Errors
    /// The library's: this process may not open the device, or the device is gone.
    ///
    /// # Panics
    /// There is no such device.
    pub fn open(&self, at: usize) -> Result<Context<'_>, VerbsError> {
        // SAFETY: a device of the list, which is there as long as `self` is.
        let context = unsafe { self.verbs.open_device(self.at(at)) }?;
        let gone = VerbsError { call: "ibv_open_device", code: 0 };
        let context = NonNull::new(context).ok_or(gone)?;
        Ok(Context { verbs: self.verbs, context, of_list: PhantomData })
    }
}

impl Drop for Devices<'_> {
    fn drop(&mut self) {
        // SAFETY: the list that the library gave, given back once. No open device borrows it any more. The function cannot fail.
        let _ = unsafe { self.verbs.free_device_list(self.list.as_ptr()) };
    }
}

/// An open device. It is closed when this value is dropped.
#[derive(Debug)]
pub struct Context<'a> {
    verbs: &'a Verbs,
    context: NonNull<IbvContext>,
    of_list: PhantomData<&'a IbvDevice>,
}

impl Context<'_> {
    /// The device's limits, and how many ports it has.
    ///
    /// # Errors
    /// The library's.
    pub fn attributes(&self) -> Result<IbvDeviceAttr, VerbsError> {
        let mut attributes = MaybeUninit::<IbvDeviceAttr>::zeroed();
        // SAFETY: the device is open; `attributes` is room for what is written.
        unsafe { self.verbs.query_device(self.context.as_ptr(), attributes.as_mut_ptr()) }?;
        // SAFETY: `attributes` was zeroed, and has numbers and arrays of numbers, for which zero is a value.
        Ok(unsafe { attributes.assume_init() })
    }

    /// The attributes of a port. Ports are counted from 1.
    ///
    /// # Errors
    /// The library's.
    pub fn port(&self, number: u8) -> Result<IbvPortAttr, VerbsError> {
        let mut attributes = IbvPortAttr::default();
        // SAFETY: the device is open. The function in this version (`IBVERBS_1.1`) writes the structure as it was in that version;
        // newer fields were put behind the old ones, and `IbvPortAttr` has all of them.
        unsafe { self.verbs.query_port(self.context.as_ptr(), number, &raw mut attributes) }?;
        Ok(attributes)
    }

    /// The addresses of all ports of the device. `most` is how many there are at most: if there are more, the library fails.
    ///
    /// # Errors
    /// The library's.
    pub fn gids(&self, most: usize) -> Result<Vec<IbvGidEntry>, VerbsError> {
        let mut entries = vec![IbvGidEntry::default(); most.min(MOST_GIDS)];
        // SAFETY: the device is open; `entries` is room for as many entries as are asked for, of the size that is given. There are no flags: 0.
        let count = unsafe {
            self.verbs.query_gid_table(
                self.context.as_ptr(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<IbvGidEntry>(),
            )
        }?;
        entries.truncate(usize::try_from(count).unwrap_or(0));
        Ok(entries)
    }
}

impl Context<'_> {
    /// The open device itself, which the caller has to close from now on. It may outlive the list that it was opened from.
    pub fn into_raw(self) -> NonNull<IbvContext> {
        let context = self.context;
        std::mem::forget(self);
        context
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: the device is open, and is closed once. If closing fails, nothing can be done about it.
        let _ = unsafe { self.verbs.close_device(self.context.as_ptr()) };
    }
}
