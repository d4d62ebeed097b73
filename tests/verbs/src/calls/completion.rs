//! Completion queues and channels.

use std::ffi::{c_int, c_uint, c_void};

use allstream_sys::verbs::{IbvCompChannel, IbvContext, IbvCq, IbvWc};

use super::{acknowledged, done, made};
use crate::card::card;
use crate::complain;
use crate::completion::SharedCq;
use crate::counts::{Call, fail};
use crate::faults::called;
use crate::signal::{Signal, wait};

#[unsafe(no_mangle)]
extern "C" fn ibv_create_comp_channel(context: *mut IbvContext) -> *mut IbvCompChannel {
    made(|| {
        called(Call::CreateCompChannel)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        if !shared.contexts.contains_key(&(context as usize)) {
            return Err(libc::EINVAL);
        }
        let signal = Signal::new()?;
        let channel = Box::into_raw(Box::new(IbvCompChannel { context, fd: signal.fd(), refcnt: 0 }));
        shared.completions.add_channel(channel as usize, context as usize, signal);
        shared.report.channels = shared.completions.channels() as u64;
        Ok(channel)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut IbvCompChannel) -> c_int {
    done(|| {
        called(Call::DestroyCompChannel)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        shared.completions.drop_channel(channel as usize)?;
        shared.report.channels = shared.completions.channels() as u64;
        // SAFETY: `ibv_create_comp_channel` made this box, and the channel was just removed from the table, so it is freed once.
        drop(unsafe { Box::from_raw(channel) });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_cq(
    context: *mut IbvContext,
    entries: c_int,
    data: *mut c_void,
    channel: *mut IbvCompChannel,
    vector: c_int,
) -> *mut IbvCq {
    made(|| {
        called(Call::CreateCq)?;
        let mut card = card()?;
        let shared = &mut card.shared;
        let told = shared.device(context as usize).ok_or(libc::EINVAL)?;
        let capacity = usize::try_from(entries).map_err(|_| libc::EINVAL)?;
        let is_channel = channel.is_null() || shared.completions.channel_fd(channel as usize).is_some();
        if !(1..=told.max_cqe as usize).contains(&capacity) || vector != 0 || !is_channel {
            return Err(libc::EINVAL);
        }
        if shared.completions.queues() >= told.max_cq as usize {
            return Err(libc::ENOMEM);
        }
        let handle = shared.completions.queues() as u32;
        let ibv = IbvCq { context, channel, cq_context: data, handle, cqe: entries };
        let queue = Box::into_raw(Box::new(SharedCq::new(ibv)));
        shared.completions.add(queue, context as usize, channel as usize, capacity);
        shared.report.completion_queues = shared.completions.queues() as u64;
        Ok(queue.cast())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(queue: *mut IbvCq) -> c_int {
    done(|| {
        called(Call::DestroyCq)?;
        let key = queue as usize;
        let in_use = |card: &crate::card::Card| {
            card.pairs.values().any(|pair| pair.send_cq == key || pair.recv_cq == key)
        };
        {
            let card = card()?;
            if card.shared.completions.context(key).is_none() {
                return Err(libc::EINVAL);
            }
            if in_use(&card) {
                return Err(libc::EBUSY);
            }
        }
        acknowledged("a completion queue", || {
            let card = card()?;
            let mut events = card.shared.contexts.values();
            let are_seen = events.all(|context| context.events.is_acknowledged(key));
            Ok(card.shared.completions.is_acknowledged(key) && are_seen)
        })?;
        let mut card = card()?;
        let shared = &mut card.shared;
        shared.completions.drop_queue(key);
        shared.contexts.values_mut().for_each(|context| context.events.forget(key));
        shared.report.completion_queues = shared.completions.queues() as u64;
        // SAFETY: `ibv_create_cq` made this box, and the queue was just removed from the table, so it is freed once.
        drop(unsafe { Box::from_raw(queue.cast::<SharedCq>()) });
        Ok(())
    })
}

pub(super) unsafe extern "C" fn poll_cq(queue: *mut IbvCq, most: c_int, to: *mut IbvWc) -> c_int {
    let poll = || {
        called(Call::PollCq)?;
        // SAFETY: the caller promises a queue that `ibv_create_cq` has made and that was not destroyed.
        if unsafe { &*queue.cast::<SharedCq>() }.is_empty() {
            return Ok(0);
        }
        let mut card = card()?;
        let entries = card.shared.completions.poll(queue as usize, usize::try_from(most).unwrap_or(0))?;
        for (at, entry) in entries.iter().enumerate() {
            // SAFETY: the caller promises room for `most` completions, and there are no more `entries` than that.
            unsafe { to.add(at).write(entry.wc) };
            if let Some(pair) = card.pairs.get_mut(&entry.pair) {
                let used = if entry.is_receive { &mut pair.receiving.used } else { &mut pair.sending.used };
                *used = used.saturating_sub(entry.slots);
            }
        }
        card.shared.report.completions += entries.len() as u64;
        Ok(entries.len() as c_int)
    };
    // A failed poll returns a negative number; unlike other calls it does not set `errno`.
    poll().unwrap_or_else(|code: c_int| -code)
}

pub(super) unsafe extern "C" fn req_notify_cq(queue: *mut IbvCq, only_solicited: c_int) -> c_int {
    done(|| {
        called(Call::ReqNotifyCq)?;
        card()?.shared.completions.arm(queue as usize, only_solicited != 0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut IbvCompChannel,
    queue: *mut *mut IbvCq,
    data: *mut *mut c_void,
) -> c_int {
    let get = || {
        called(Call::GetCqEvent)?;
        let key = channel as usize;
        let fd = card()?.shared.completions.channel_fd(key).ok_or(libc::EINVAL)?;
        // While this waits for an event, the event may be withdrawn, because its queue is destroyed.
        let found = loop {
            wait(fd)?;
            if let Some(found) = card()?.shared.completions.fetch(key) {
                break found as *mut IbvCq;
            }
        };
        // SAFETY: `ibv_destroy_cq` frees a queue only after its fetched events are acknowledged; the caller promises room for two addresses.
        unsafe {
            data.write((*found).cq_context);
            queue.write(found);
        }
        Ok(0)
    };
    get().unwrap_or_else(|code: c_int| {
        fail(code);
        -1
    })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_cq_events(queue: *mut IbvCq, count: c_uint) {
    Call::AckCqEvents.count();
    let is_known = card().is_ok_and(|mut card| card.shared.completions.acknowledge(queue as usize, count));
    if !is_known {
        complain("more events of a completion queue are acknowledged than were fetched");
    }
}
