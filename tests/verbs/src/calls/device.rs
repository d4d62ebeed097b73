//! Devices: the list of devices, and calls on an open device.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Once, OnceLock};

use allstream_sys::verbs::{IbvContext, IbvContextOps, IbvDevice, IbvDeviceAttr, IbvGidEntry, IbvPortAttr};

use super::{done, made, work};
use crate::card::{card, card_if_made};
use crate::codes::{HAS_RNR_NAK, HAS_WINDOWS, HAS_WINDOWS_2B};
use crate::complain;
use crate::counts::{Call, fail};
use crate::events::Events;
use crate::faults::{called, tells};
use crate::shared::Context;
use crate::told::{self, entry, host, mtu};

/// How many lists of devices were returned and not freed yet.
static LISTS: AtomicIsize = AtomicIsize::new(0);

extern "C" fn at_exit() {
    let mut left = vec![(LISTS.load(Ordering::SeqCst).max(0) as u64, "lists of devices")];
    if let Some(card) = card_if_made() {
        let report = &card.shared.report;
        left.extend([
            (report.contexts, "open devices"),
            (report.domains, "protection domains"),
            (report.regions, "registered regions"),
            (report.windows, "windows"),
            (report.channels, "completion channels"),
            (report.completion_queues, "completion queues"),
            (report.queue_pairs, "queue pairs"),
        ]);
        if tells() {
            for (device, bytes) in &card.shared.posted {
                complain(&format!("{} was asked to carry {bytes} bytes", host().devices[*device].name));
            }
        }
        if report.refused_accesses > 0 {
            complain(&format!("{} accesses to memory were refused", report.refused_accesses));
        }
        if report.unmapped > 0 {
            complain(&format!("memory was unmapped while it was registered, {} times", report.unmapped));
        }
    }
    for (count, what) in left.into_iter().filter(|(count, _)| *count > 0) {
        complain(&format!("{count} {what} are left at the end"));
    }
}

/// The devices of the list, which keep their addresses until the process ends.
struct Made(Vec<IbvDevice>);

// SAFETY: nobody writes to the devices once they are made.
unsafe impl Send for Made {}
// SAFETY: as above.
unsafe impl Sync for Made {}

fn devices() -> &'static [IbvDevice] {
    static DEVICES: OnceLock<Made> = OnceLock::new();
    let made = DEVICES.get_or_init(|| {
        let device = |told: &told::Device| {
            let mut name = [0; 64];
            // The last byte stays 0 and ends the name.
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

/// The index of a device in the list.
fn position(device: *const IbvDevice) -> Option<usize> {
    devices().iter().position(|made| ptr::eq(made, device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut IbvDevice {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `at_exit` is a function of this library, which is never unloaded.
        let _ = unsafe { libc::atexit(at_exit) };
    });
    made(|| {
        called(Call::GetDeviceList)?;
        if host().fails != 0 {
            return Err(host().fails);
        }
        let made = devices().iter().map(|device| ptr::from_ref(device).cast_mut());
        let list: Vec<*mut IbvDevice> = made.chain([ptr::null_mut()]).collect();
        if !count.is_null() {
            // SAFETY: `count` is not null, and the caller promises that it leads to room for a number.
            unsafe { count.write(list.len() as c_int - 1) };
        }
        LISTS.fetch_add(1, Ordering::SeqCst);
        Ok(Box::into_raw(list.into_boxed_slice()).cast())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut IbvDevice) {
    if list.is_null() || LISTS.fetch_sub(1, Ordering::SeqCst) <= 0 {
        return complain("a list is freed that there is not");
    }
    let slice = ptr::slice_from_raw_parts_mut(list, devices().len() + 1);
    // SAFETY: `ibv_get_device_list` made the list with this many entries, and the caller promises to free it once.
    drop(unsafe { Box::from_raw(slice) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut IbvDevice) -> *const c_char {
    // SAFETY: the caller promises a device of a list.
    unsafe { (&raw const (*device).name).cast() }
}

/// The functions that programs call through the context. A device without memory windows has no functions for them.
fn ops(told: &told::Device) -> IbvContextOps {
    IbvContextOps {
        _before_alloc_mw: [ptr::null_mut(); 7],
        alloc_mw: told.windows.then_some(super::memory::alloc_mw as _),
        bind_mw: None,
        dealloc_mw: told.windows.then_some(super::memory::dealloc_mw as _),
        _before_poll_cq: ptr::null_mut(),
        poll_cq: Some(super::completion::poll_cq),
        req_notify_cq: Some(super::completion::req_notify_cq),
        _before_post_send: [ptr::null_mut(); 12],
        post_send: Some(work::post_send),
        post_recv: Some(work::post_recv),
        _after_post_recv: [ptr::null_mut(); 5],
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_open_device(device: *mut IbvDevice) -> *mut IbvContext {
    made(|| {
        called(Call::OpenDevice)?;
        let at = position(device).ok_or(libc::ENODEV)?;
        let told = host().devices.get(at).ok_or(libc::ENODEV)?;
        if told.fails != 0 {
            return Err(told.fails);
        }
        let events = Events::new()?;
        let mut card = card()?;
        let (ops, async_fd) = (ops(told), events.fd());
        let context = IbvContext { device, ops, cmd_fd: -1, async_fd, num_comp_vectors: 1 };
        let context = Box::into_raw(Box::new(context));
        let shared = &mut card.shared;
        shared.contexts.insert(context as usize, Context { device: at, events });
        shared.report.contexts = shared.contexts.len() as u64;
        Ok(context)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut IbvContext) -> c_int {
    done(|| {
        called(Call::CloseDevice)?;
        let mut card = card()?;
        let (key, shared) = (context as usize, &mut card.shared);
        if !shared.contexts.contains_key(&key) {
            complain("a device is closed that is not open");
            return Err(libc::EINVAL);
        }
        if shared.domains.values().any(|owner| *owner == key) || shared.completions.uses(key) {
            complain("a device is closed, and what was made of it is still there");
            return Err(libc::EBUSY);
        }
        shared.contexts.remove(&key);
        shared.report.contexts = shared.contexts.len() as u64;
        // SAFETY: `ibv_open_device` made this box, and the context was just removed from the table, so it is freed once.
        drop(unsafe { Box::from_raw(context) });
        Ok(())
    })
}

/// The test's description of an open device.
fn told_of(context: *mut IbvContext) -> Result<&'static told::Device, c_int> {
    card()?.shared.device(context as usize).ok_or(libc::ENODEV)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(context: *mut IbvContext, attributes: *mut IbvDeviceAttr) -> c_int {
    done(|| {
        called(Call::QueryDevice)?;
        let told = told_of(context)?;
        if told.attributes_fail != 0 {
            return Err(told.attributes_fail);
        }
        let number = |number: u32| c_int::try_from(number).unwrap_or(c_int::MAX);
        // SAFETY: the caller promises room for the attributes, which are numbers and arrays of numbers, so that all zeros are valid.
        unsafe {
            attributes.write_bytes(0, 1);
            let to = &mut *attributes;
            to.max_mr_size = u64::MAX;
            to.page_size_cap = 4096;
            to.max_qp = number(told.max_qp);
            to.max_qp_wr = number(told.max_qp_wr);
            to.device_cap_flags = HAS_RNR_NAK | if told.windows { HAS_WINDOWS | HAS_WINDOWS_2B } else { 0 };
            (to.max_sge, to.max_sge_rd) = (number(told.max_sge), number(told.max_sge));
            (to.max_cq, to.max_cqe) = (number(told.max_cq), number(told.max_cqe));
            (to.max_mr, to.max_pd) = (number(told.max_mr), number(told.max_mr));
            to.max_mw = if told.windows { number(told.max_mr) } else { 0 };
            to.max_qp_rd_atom = told.max_rd_atomic.into();
            to.max_qp_init_rd_atom = told.max_init_rd_atomic.into();
            to.max_res_rd_atom = c_int::from(told.max_rd_atomic).saturating_mul(number(told.max_qp));
            to.max_pkeys = 1;
            to.phys_port_cnt = told.ports.len() as u8;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(
    context: *mut IbvContext,
    number: u8,
    attributes: *mut IbvPortAttr,
) -> c_int {
    done(|| {
        called(Call::QueryPort)?;
        let card = card()?;
        let key = context as usize;
        let port = card.shared.port(key, number).ok_or(libc::EINVAL)?;
        if port.fails != 0 {
            return Err(port.fails);
        }
        let length = port.gids.iter().map(|gid| gid.index + 1).max().unwrap_or(0);
        let attributes_of = IbvPortAttr {
            state: card.shared.port_state(key, number).unwrap_or(port.state),
            max_mtu: mtu(port.max_mtu),
            active_mtu: mtu(port.mtu),
            gid_tbl_len: length as c_int,
            max_msg_sz: port.max_message,
            pkey_tbl_len: 1,
            link_layer: port.layer,
            ..IbvPortAttr::default()
        };
        // SAFETY: the caller promises room for the attributes.
        unsafe { attributes.write(attributes_of) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut IbvContext,
    entries: *mut IbvGidEntry,
    most: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let query = || {
        called(Call::QueryGidTable)?;
        let told = told_of(context)?;
        if told.gids_fail != 0 {
            return Err(told.gids_fail);
        }
        if flags != 0 || entry_size != size_of::<IbvGidEntry>() {
            return Err(libc::EOPNOTSUPP);
        }
        let of_port = |(number, port)| {
            let port: &told::Port = port;
            port.gids.iter().map(move |told| entry(number, told))
        };
        let all: Vec<IbvGidEntry> = (1..).zip(&told.ports).flat_map(of_port).collect();
        if all.len() > most {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller promises room for `most` entries, and there are no more than that.
        unsafe { entries.copy_from_nonoverlapping(all.as_ptr(), all.len()) };
        Ok(all.len() as isize)
    };
    query().unwrap_or_else(|code: c_int| {
        fail(code);
        -(code as isize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    done(|| called(Call::ForkInit))
}
