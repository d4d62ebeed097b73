//! The order of launches on a device.
//!
//! Kernels of a library wait on the device for those of their peers. Two of them of different communicators, launched in one order on
//! one device and in the other order on another, may each hold what the other needs, for ever. So what a library is to take whole is
//! launched in the order in which it was submitted, over all communicators of a device in this process; and before it is first in
//! that order this rank does not even tell its peers that it has called. Ranks that submit in different orders so wait for each
//! other on the host, where the deadline ends it.
//!
//! Streams of one device may start what is on them in any order. So what is launched also waits, on the device, for the end of what was
//! launched there before on another stream.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;

use parking_lot::Mutex;

use crate::error::{Error, Operation};
use crate::mem::device::{DeviceEvent, DeviceStream};

struct Waiting {
    ticket: u64,
    what: Operation,
    /// Of whoever drives its communicator.
    waker: Waker,
}

/// The operations that are to be launched on a device, and the last one that was.
#[derive(Default)]
pub(crate) struct LaunchOrder {
    waiting: Mutex<VecDeque<Waiting>>,
    /// Its stream, and its end there.
    last: Mutex<Option<(DeviceStream, DeviceEvent)>>,
}

impl LaunchOrder {
    /// Of the device with this identity.
    pub(crate) fn of(device: [u8; 16]) -> Arc<LaunchOrder> {
        static ALL: Mutex<Vec<([u8; 16], Weak<LaunchOrder>)>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        all.retain(|(_, order)| order.strong_count() > 0);
        let known = all.iter().find(|(known, _)| *known == device).and_then(|(_, order)| order.upgrade());
        known.unwrap_or_else(|| {
            let order = Arc::new(LaunchOrder::default());
            all.push((device, Arc::downgrade(&order)));
            order
        })
    }

    /// The next place in the order.
    pub(crate) fn queue(self: &Arc<Self>, what: Operation, waker: Waker) -> Ticket {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut waiting = self.waiting.lock();
        let ticket = NEXT.fetch_add(1, Ordering::Relaxed);
        waiting.push_back(Waiting { ticket, what, waker });
        Ticket { order: self.clone(), ticket }
    }
}

/// An operation's place in the order. It is given up with this: when the operation has been launched, or never will be.
pub(crate) struct Ticket {
    order: Arc<LaunchOrder>,
    ticket: u64,
}

impl Ticket {
    pub(crate) fn is_first(&self) -> bool {
        #[cfg(any(test, feature = "testing"))]
        if crate::testing::launches_are_in_any_order() {
            return true;
        }
        self.order.waiting.lock().front().is_some_and(|first| first.ticket == self.ticket)
    }

    /// The operation is about to be launched: its stream waits for what was launched before on another.
    pub(crate) fn launches(&self, stream: &DeviceStream) -> Result<(), Error> {
        #[cfg(any(test, feature = "testing"))]
        if crate::testing::launches_are_in_any_order() {
            return Ok(());
        }
        match &*self.order.last.lock() {
            Some((last, end)) if last != stream => stream.wait_event(end),
            _ => Ok(()),
        }
    }

    /// It has been launched, and this is its end.
    pub(crate) fn launched(self, stream: &DeviceStream, end: DeviceEvent) {
        let before = self.order.last.lock().replace((stream.clone(), end));
        drop(before);
    }

    /// Another operation that is in the way of this one, or that this one is in the way of; and whether it is the first of the two.
    pub(crate) fn other(&self) -> Option<(Operation, bool)> {
        let waiting = self.order.waiting.lock();
        let first = waiting.front()?;
        if first.ticket != self.ticket {
            return Some((first.what.clone(), true));
        }
        waiting.get(1).map(|next| (next.what.clone(), false))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let (gone, next) = {
            let mut waiting = self.order.waiting.lock();
            let at = waiting.iter().position(|waiting| waiting.ticket == self.ticket);
            let gone = at.and_then(|at| waiting.remove(at));
            let is_next = at == Some(0);
            (gone, waiting.front().filter(|_| is_next).map(|next| next.waker.clone()))
        };
        drop(gone);
        if let Some(next) = next {
            next.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Signature;

    fn what(number: u64) -> Operation {
        Operation { comm: "test".into(), number, signature: Signature::default() }
    }

    #[test]
    fn launches_keep_the_order_of_submission_and_name_each_other() {
        let order = LaunchOrder::of([7; 16]);
        assert!(Arc::ptr_eq(&order, &LaunchOrder::of([7; 16])), "one for each device");
        assert!(!Arc::ptr_eq(&order, &LaunchOrder::of([8; 16])));
        let ticket = |number| order.queue(what(number), Waker::noop().clone());
        let [first, second, third] = [1, 2, 3].map(ticket);
        assert!(first.is_first() && !second.is_first());
        assert_eq!(second.other(), Some((what(1), true)));
        assert_eq!(first.other(), Some((what(2), false)));
        drop(second);
        assert_eq!(first.other(), Some((what(3), false)), "one that fails gives its place up");
        drop(first);
        assert!(third.is_first() && third.other().is_none());
    }
}
