//! Protection domains, registered memory and windows.

use std::ffi::{c_int, c_void};

use allstream_sys::verbs::{IbvContext, IbvMr, IbvMw, IbvPd};

use super::{done, made};
use crate::card::card;
use crate::codes::MW_TYPE_2;
use crate::counts::Call;
use crate::faults::called;

#[unsafe(no_mangle)]
extern "C" fn ibv_alloc_pd(context: *mut IbvContext) -> *mut IbvPd {
    made(|| {
        called(Call::AllocPd)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        if !shared.contexts.contains_key(&(context as usize)) {
            return Err(libc::EINVAL);
        }
        let domain = Box::into_raw(Box::new(IbvPd { context, handle: shared.domains.len() as u32 }));
        shared.domains.insert(domain as usize, context as usize);
        shared.report.domains = shared.domains.len() as u64;
        Ok(domain)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(domain: *mut IbvPd) -> c_int {
    done(|| {
        called(Call::DeallocPd)?;
        let mut card = card()?;
        let key = domain as usize;
        if !card.shared.domains.contains_key(&key) {
            return Err(libc::EINVAL);
        }
        if card.shared.memory.uses(key) || card.pairs.values().any(|pair| pair.domain == key) {
            return Err(libc::EBUSY);
        }
        card.shared.domains.remove(&key);
        card.shared.report.domains = card.shared.domains.len() as u64;
        // SAFETY: `ibv_alloc_pd` made this box, and the domain was just removed from the table, so it is freed once.
        drop(unsafe { Box::from_raw(domain) });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr(domain: *mut IbvPd, addr: *mut c_void, length: usize, access: c_int) -> *mut IbvMr {
    made(|| {
        called(Call::RegMr)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        let context = *shared.domains.get(&(domain as usize)).ok_or(libc::EINVAL)?;
        let told = shared.device(context).ok_or(libc::EINVAL)?;
        if shared.memory.regions() >= told.max_mr as usize {
            return Err(libc::ENOMEM);
        }
        let (key, at) = (domain as usize, addr as u64);
        let (lkey, rkey) =
            shared.memory.register(key, (at, length as u64), access, &mut shared.report, told.max_pinned)?;
        let context = context as *mut IbvContext;
        Ok(Box::into_raw(Box::new(IbvMr {
            context,
            pd: domain,
            addr,
            length,
            handle: lkey >> 8,
            lkey,
            rkey,
        })))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(region: *mut IbvMr) -> c_int {
    done(|| {
        called(Call::DeregMr)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        // SAFETY: the caller promises a region that was registered and not deregistered.
        let lkey = unsafe { (*region).lkey };
        shared.memory.deregister(lkey, &mut shared.report)?;
        // SAFETY: `ibv_reg_mr` made this box, and its key was in the table until now, so it is freed once.
        drop(unsafe { Box::from_raw(region) });
        Ok(())
    })
}

/// Makes a memory window of type 2B; this library has no other type.
pub(super) unsafe extern "C" fn alloc_mw(domain: *mut IbvPd, kind: c_int) -> *mut IbvMw {
    made(|| {
        called(Call::AllocMw)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        let context = *shared.domains.get(&(domain as usize)).ok_or(libc::EINVAL)?;
        if kind != MW_TYPE_2 {
            return Err(libc::EOPNOTSUPP);
        }
        let rkey = shared.memory.make_window(domain as usize, &mut shared.report);
        let (context, kind) = (context as *mut IbvContext, kind as u32);
        Ok(Box::into_raw(Box::new(IbvMw { context, pd: domain, rkey, handle: rkey >> 8, kind })))
    })
}

pub(super) unsafe extern "C" fn dealloc_mw(window: *mut IbvMw) -> c_int {
    done(|| {
        called(Call::DeallocMw)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        // SAFETY: the caller promises a window that was made and not freed.
        let handle = unsafe { (*window).handle };
        shared.memory.drop_window(handle << 8, &mut shared.report)?;
        // SAFETY: `alloc_mw` made this box, and its number was in the table until now, so it is freed once.
        drop(unsafe { Box::from_raw(window) });
        Ok(())
    })
}
