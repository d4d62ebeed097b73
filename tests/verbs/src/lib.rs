//! Verbs for tests: of the functions of `libibverbs.so.1` that allstream uses, those that find devices, ports and addresses. The others refuse.
//!
//! See the README for what it can show and what it cannot. Functions carry the names and signatures of the real library, whose manual
//! pages document them; here stand only the choices that are ours.

mod refused;
mod told;

use std::ffi::{c_char, c_int};
use std::net::IpAddr;
use std::ptr;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Once, OnceLock};

use allstream_sys::verbs::{IbvContext, IbvDevice, IbvDeviceAttr, IbvGid, IbvGidEntry, IbvPortAttr};

use told::{Kind, host};

/// Lists and open devices that have not been given back.
static LISTS: AtomicIsize = AtomicIsize::new(0);
static OPEN: AtomicIsize = AtomicIsize::new(0);

/// Says what is wrong with the process that uses the library, where its tests see it.
pub(crate) fn complain(what: &str) {
    eprintln!("verbs for tests: {what}");
}

/// Leaves the reason for which a call fails.
pub(crate) fn fail(code: c_int) {
    // SAFETY: this thread's own number.
    unsafe { *libc::__errno_location() = code };
}

extern "C" fn at_exit() {
    for (count, what) in [(&LISTS, "lists of devices"), (&OPEN, "open devices")] {
        match count.load(Ordering::SeqCst) {
            0 => {}
            left => complain(&format!("{left} {what} are left at the end")),
        }
    }
}

/// The devices, which stay where they are until the process ends.
struct Made(Vec<IbvDevice>);

// SAFETY: nobody writes to them once they are made.
unsafe impl Send for Made {}
// SAFETY: as above.
unsafe impl Sync for Made {}

fn devices() -> &'static [IbvDevice] {
    static DEVICES: OnceLock<Made> = OnceLock::new();
    let made = DEVICES.get_or_init(|| {
        let device = |told: &told::Device| {
            let mut name = [0; 64];
            // The last stays 0.
            name.iter_mut().zip(told.name.bytes().take(63)).for_each(|(to, from)| *to = from as c_char);
            IbvDevice {
                _ops: [ptr::null_mut(); 2],
                node_type: 1,
                transport_type: told.transport,
                name,
                dev_name: [0; 64],
                dev_path: [0; 256],
                ibdev_path: [0; 256],
            }
        };
        Made(host().devices.iter().map(device).collect())
    });
    &made.0
}

/// What the test has said of a device of the list.
fn told_of(device: *const IbvDevice) -> Option<&'static told::Device> {
    let at = devices().iter().position(|made| ptr::eq(made, device))?;
    host().devices.get(at)
}

/// The same of an open one.
///
/// # Safety
/// The context is open.
unsafe fn told_of_open(context: *const IbvContext) -> Option<&'static told::Device> {
    // SAFETY: the caller's.
    told_of(unsafe { (*context).device })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut IbvDevice {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a function of this library, which is never closed.
        let _ = unsafe { libc::atexit(at_exit) };
    });
    if host().fails != 0 {
        fail(host().fails);
        return ptr::null_mut();
    }
    let made = devices().iter().map(|device| ptr::from_ref(device).cast_mut());
    let list: Vec<*mut IbvDevice> = made.chain([ptr::null_mut()]).collect();
    if !count.is_null() {
        // SAFETY: the caller's, who promises room for a number.
        unsafe { count.write(list.len() as c_int - 1) };
    }
    LISTS.fetch_add(1, Ordering::SeqCst);
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut IbvDevice) {
    if list.is_null() || LISTS.fetch_sub(1, Ordering::SeqCst) <= 0 {
        return complain("a list is freed that there is not");
    }
    let slice = ptr::slice_from_raw_parts_mut(list, devices().len() + 1);
    // SAFETY: made above with so many entries, and freed once, as the caller promises.
    drop(unsafe { Box::from_raw(slice) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut IbvDevice) -> *const c_char {
    // SAFETY: the caller's: a device of a list.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_open_device(device: *mut IbvDevice) -> *mut IbvContext {
    let code = match told_of(device) {
        Some(told) if told.fails == 0 => {
            OPEN.fetch_add(1, Ordering::SeqCst);
            let (ops, none) = (refused::ops(), -1);
            let context = IbvContext { device, ops, cmd_fd: none, async_fd: none, num_comp_vectors: 1 };
            return Box::into_raw(Box::new(context));
        }
        Some(told) => told.fails,
        None => libc::ENODEV,
    };
    fail(code);
    ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut IbvContext) -> c_int {
    if context.is_null() || OPEN.fetch_sub(1, Ordering::SeqCst) <= 0 {
        complain("a device is closed that is not open");
        return libc::EINVAL;
    }
    // SAFETY: made by `ibv_open_device`, and closed once, as the caller promises.
    drop(unsafe { Box::from_raw(context) });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(context: *mut IbvContext, attributes: *mut IbvDeviceAttr) -> c_int {
    // SAFETY: the caller's.
    let Some(told) = (unsafe { told_of_open(context) }) else { return libc::ENODEV };
    if told.attributes_fail != 0 {
        return told.attributes_fail;
    }
    // SAFETY: the caller's, who promises room; numbers and arrays of numbers, for which zero is a value.
    unsafe {
        attributes.write_bytes(0, 1);
        (*attributes).phys_port_cnt = told.ports.len() as u8;
    }
    0
}

/// An MTU as the header counts them.
fn mtu(bytes: u32) -> u32 {
    (1..=5).find(|code| 128 << code == bytes).unwrap_or(0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(
    context: *mut IbvContext,
    number: u8,
    attributes: *mut IbvPortAttr,
) -> c_int {
    // SAFETY: the caller's.
    let told = unsafe { told_of_open(context) };
    let Some(port) = told.and_then(|told| told.ports.get(usize::from(number).wrapping_sub(1))) else {
        return libc::EINVAL;
    };
    if port.fails != 0 {
        return port.fails;
    }
    let length = port.gids.iter().map(|gid| gid.index + 1).max().unwrap_or(0);
    let attributes_of = IbvPortAttr {
        state: port.state,
        max_mtu: mtu(port.max_mtu),
        active_mtu: mtu(port.mtu),
        gid_tbl_len: length as c_int,
        max_msg_sz: port.max_message,
        link_layer: port.layer,
        ..IbvPortAttr::default()
    };
    // SAFETY: the caller's, who promises room.
    unsafe { attributes.write(attributes_of) };
    0
}

fn entry(port: u32, told: &told::Gid) -> IbvGidEntry {
    let address = match told.address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let gid_type = match told.kind {
        Kind::Ib => 0,
        Kind::RoceV1 => 1,
        Kind::RoceV2 => 2,
    };
    let gid = IbvGid { raw: address.octets() };
    IbvGidEntry { gid, gid_index: told.index, port_num: port, gid_type, ndev_ifindex: told.interface }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut IbvContext,
    entries: *mut IbvGidEntry,
    most: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let failed = |code: c_int| -(code as isize);
    // SAFETY: the caller's.
    let Some(told) = (unsafe { told_of_open(context) }) else { return failed(libc::ENODEV) };
    if told.gids_fail != 0 {
        return failed(told.gids_fail);
    }
    if flags != 0 || entry_size != size_of::<IbvGidEntry>() {
        return failed(libc::EOPNOTSUPP);
    }
    let of_port = |(number, port)| {
        let port: &told::Port = port;
        port.gids.iter().map(move |told| entry(number, told))
    };
    let all: Vec<IbvGidEntry> = (1..).zip(&told.ports).flat_map(of_port).collect();
    if all.len() > most {
        return failed(libc::EINVAL);
    }
    // SAFETY: the caller's, who promises room for `most`.
    unsafe { entries.copy_from_nonoverlapping(all.as_ptr(), all.len()) };
    all.len() as isize
}
