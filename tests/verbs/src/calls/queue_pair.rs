//! Queue pairs.

use std::ffi::c_int;

use allstream_sys::verbs::{IbvPd, IbvQp, IbvQpAttr, IbvQpInitAttr};

use super::{acknowledged, done, made};
use crate::card::card;
use crate::codes::{RELIABLE, RESET};
use crate::counts::Call;
use crate::faults::called;
use crate::queue_pair::{QueuePair, Receiving, Sending};
use crate::wire::{MOST_PIECES, Route, Socket};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(domain: *mut IbvPd, attributes: *mut IbvQpInitAttr) -> *mut IbvQp {
    made(|| {
        called(Call::CreateQp)?;
        let mut card = card()?;
        let context = *card.shared.domains.get(&(domain as usize)).ok_or(libc::EINVAL)?;
        let told = card.shared.device(context).ok_or(libc::EINVAL)?;
        // SAFETY: the caller promises that the pointer leads to attributes.
        let asked = unsafe { *attributes };
        if asked.qp_type != RELIABLE || !asked.srq.is_null() {
            return Err(libc::EOPNOTSUPP);
        }
        let of_device =
            |queue: usize| card.shared.completions.context(queue).is_some_and(|owner| owner == context);
        if !of_device(asked.send_cq as usize) || !of_device(asked.recv_cq as usize) {
            return Err(libc::EINVAL);
        }
        let (cap, most_pieces) = (asked.cap, told.max_sge.min(MOST_PIECES as u32));
        if cap.max_send_wr > told.max_qp_wr
            || cap.max_recv_wr > told.max_qp_wr
            || cap.max_send_sge > most_pieces
            || cap.max_recv_sge > most_pieces
            || cap.max_inline_data > told.max_inline
        {
            return Err(libc::EINVAL);
        }
        if card.pairs.len() >= told.max_qp as usize {
            return Err(libc::ENOMEM);
        }
        let socket = Socket::bind()?;
        let number = socket.number();
        let pair = Box::into_raw(Box::new(IbvQp {
            context: context as *mut _,
            qp_context: asked.qp_context,
            pd: domain,
            send_cq: asked.send_cq,
            recv_cq: asked.recv_cq,
            srq: asked.srq,
            handle: number,
            qp_num: number,
            state: RESET,
            qp_type: asked.qp_type,
        }));
        let added = card.add(QueuePair {
            key: pair as usize,
            context,
            domain: domain as usize,
            send_cq: asked.send_cq as usize,
            recv_cq: asked.recv_cq as usize,
            cap,
            signals_all: asked.sq_sig_all != 0,
            socket,
            state: RESET,
            set: IbvQpAttr::default(),
            route: Route::default(),
            most: 0,
            posted: 0,
            seven_is_for_ever: told.seven_is_for_ever,
            sending: Sending::default(),
            receiving: Receiving::default(),
            blocked: None,
        });
        if let Err(code) = added {
            // SAFETY: the box was just made, and nobody else has its address.
            drop(unsafe { Box::from_raw(pair) });
            return Err(code);
        }
        Ok(pair)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(pair: *mut IbvQp, attributes: *mut IbvQpAttr, mask: c_int) -> c_int {
    done(|| {
        called(Call::ModifyQp)?;
        let mut card = card()?;
        let number = *card.numbers.get(&(pair as usize)).ok_or(libc::EINVAL)?;
        // SAFETY: the caller promises that the pointer leads to attributes.
        let to = unsafe { *attributes };
        let state = card.with(number, |pair, shared| {
            pair.modify(&to, mask, shared)?;
            Ok(pair.state)
        });
        let state = state.unwrap_or(Err(libc::EINVAL))?;
        // SAFETY: `pair` was found in the table, so `ibv_create_qp` made it and it was not destroyed.
        unsafe { (*pair).state = state };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(pair: *mut IbvQp) -> c_int {
    done(|| {
        called(Call::DestroyQp)?;
        let key = pair as usize;
        card()?.remove(key)?;
        acknowledged("a queue pair", || {
            let card = card()?;
            let mut contexts = card.shared.contexts.values();
            Ok(contexts.all(|context| context.events.is_acknowledged(key)))
        })?;
        card()?.shared.contexts.values_mut().for_each(|context| context.events.forget(key));
        // SAFETY: `ibv_create_qp` made this box, and `remove` took the pair out of the table, so it is freed once.
        drop(unsafe { Box::from_raw(pair) });
        Ok(())
    })
}
