//! The order of launches on a device.
//!
//! A library's kernel waits on the device for the kernels of its peers. If two operations are launched in one order on one device and in the
//! other order on another, each kernel may hold what the other needs, for ever. So all operations that libraries take are launched in the same
//! order on all devices, over all communicators:
//!
//! - Collectives queue for their rank's device when they are submitted ([`Ticket`]). As long as a collective is not first in the queue, its rank
//!   does not even tell its peers that it has called. So ranks that submit in different orders wait for each other on the host, where the
//!   deadline ends the wait. Messages do not queue: sender and receiver of each find each other on the host, in any order.
//! - When all ranks of an operation have called it, they agree on a time ([`Turn`]): each rank names a time that is later than all times its
//!   device knows of, and the latest of the named times counts. A device launches the operation with the earliest time, once no other operation
//!   can get an earlier one. All ranks have called by then, so they agree soon after they have named times. This is Skeen's total order (Birman
//!   and Joseph, "Reliable communication in the presence of failures", ACM TOCS 5(1), 1987).
//!
//! Streams of one device may start their work in any order. So an operation that is launched also waits, on the device, for the end of the
//! operation that was launched there before it, if that is on another stream.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;

use parking_lot::Mutex;

use crate::device::stream::{DeviceEvent, DeviceStream};
use crate::error::{Error, Operation};
use crate::types::Rank;

/// An operation, and the waker of whoever drives its communicator.
pub(crate) struct Called {
    pub(crate) what: Operation,
    /// The operation's name, the same on all of its ranks. No other operation has this name.
    pub(crate) name: u64,
    pub(crate) waker: Waker,
}

/// The place of an operation in the order: its time; for equal times its name; then a number that no other operation of this process has.
type When = (u64, u64, u64);

struct Due {
    called: Called,
    is_agreed: bool,
}

/// The operations whose ranks agree, or have agreed, on a time.
#[derive(Default)]
struct Dues {
    /// The latest time that was named or agreed on.
    clock: u64,
    all: BTreeMap<When, Due>,
}

impl Dues {
    /// The waker of whoever drives the first operation, if that operation may be launched.
    fn next(&self) -> Option<Waker> {
        self.all.values().next().filter(|next| next.is_agreed).map(|next| next.called.waker.clone())
    }
}

/// The operations that are to be launched on a device, and the one that was launched last.
#[derive(Default)]
pub(crate) struct LaunchOrder {
    /// The queue: each operation, with the number of its [`Ticket`].
    waiting: Mutex<VecDeque<(u64, Called)>>,
    dues: Mutex<Dues>,
    /// The stream of the operation that was launched last, and the event that marks its end there.
    last: Mutex<Option<(DeviceStream, DeviceEvent)>>,
}

/// Whether a test has switched the order off.
fn is_any_order() -> bool {
    #[cfg(any(test, feature = "testing"))]
    return crate::testing::faults::launches_are_in_any_order();
    #[cfg(not(any(test, feature = "testing")))]
    false
}

fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl LaunchOrder {
    /// The order of the device with this UUID. Where ranks may share a device, each has an order of its own (`sharer`: its world rank): two
    /// ranks' kernels of one operation wait for each other, so neither kernel may be held up until the other has ended.
    pub(crate) fn of(device: [u8; 16], sharer: Option<Rank>) -> Arc<LaunchOrder> {
        type Known = (([u8; 16], Option<Rank>), Weak<LaunchOrder>);
        static ALL: Mutex<Vec<Known>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        all.retain(|(_, order)| order.strong_count() > 0);
        let of = (device, sharer);
        let known = all.iter().find(|(known, _)| *known == of).and_then(|(_, order)| order.upgrade());
        known.unwrap_or_else(|| {
            let order = Arc::new(LaunchOrder::default());
            all.push((of, Arc::downgrade(&order)));
            order
        })
    }

    /// Puts an operation at the end of the queue.
    pub(crate) fn queue(self: &Arc<Self>, called: Called) -> Ticket {
        let mut waiting = self.waiting.lock();
        let number = number();
        waiting.push_back((number, called));
        Ticket { order: self.clone(), number }
    }

    /// Names a time for an operation that all of its ranks have called.
    pub(crate) fn turn(self: &Arc<Self>, called: Called) -> Turn {
        let mut dues = self.dues.lock();
        dues.clock = dues.clock.saturating_add(1);
        let when = (dues.clock, called.name, number());
        dues.all.insert(when, Due { called, is_agreed: false });
        Turn { order: self.clone(), when }
    }

    /// The [numbers](Turn::number) of the operations that may be launched now, in their order: from the first one up to, and without, the first
    /// that has no agreed time or for which `belong` is false.
    pub(crate) fn due(&self, belong: impl Fn(u64) -> bool) -> Vec<u64> {
        let dues = self.dues.lock();
        let all = dues.all.iter().map(|(when, due)| (when.2, due.is_agreed && belong(when.2)));
        let all = all.filter(|(_, may)| *may || !is_any_order());
        all.take_while(|(_, may)| *may).map(|(number, _)| number).collect()
    }
}

/// An operation's place in the queue. It is dropped, which gives the place up, when the operation has been launched, or never will be.
pub(crate) struct Ticket {
    order: Arc<LaunchOrder>,
    number: u64,
}

impl Ticket {
    pub(crate) fn is_first(&self) -> bool {
        is_any_order() || self.order.waiting.lock().front().is_some_and(|(first, _)| *first == self.number)
    }

    /// Names a time for the operation, which all ranks have called.
    pub(crate) fn turn(&self) -> Option<Turn> {
        let called = {
            let waiting = self.order.waiting.lock();
            let (_, called) = waiting.iter().find(|(number, _)| *number == self.number)?;
            Called { what: called.what.clone(), name: called.name, waker: called.waker.clone() }
        };
        Some(self.order.turn(called))
    }

    /// Another operation of the queue, and whether it comes before this one: the first of the queue, or, if this one is the first, the second.
    pub(crate) fn other(&self) -> Option<(Operation, bool)> {
        let waiting = self.order.waiting.lock();
        let (number, first) = waiting.front()?;
        if *number != self.number {
            return Some((first.what.clone(), true));
        }
        waiting.get(1).map(|(_, next)| (next.what.clone(), false))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let (gone, next) = {
            let mut waiting = self.order.waiting.lock();
            let at = waiting.iter().position(|(number, _)| *number == self.number);
            let gone = at.and_then(|at| waiting.remove(at));
            let is_next = at == Some(0);
            (gone, waiting.front().filter(|_| is_next).map(|(_, next)| next.waker.clone()))
        };
        drop(gone);
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// An operation's time. It is dropped, which gives the time up, when the operation has been launched, or never will be.
pub(crate) struct Turn {
    order: Arc<LaunchOrder>,
    when: When,
}

impl Turn {
    /// The time that this rank has named, or that all ranks have agreed on.
    pub(crate) fn time(&self) -> u64 {
        self.when.0
    }

    pub(crate) fn number(&self) -> u64 {
        self.when.2
    }

    /// All ranks of the operation have named a time, and `time` is the latest of these. A second call does not change the operation's time.
    pub(crate) fn agree(&mut self, time: u64) {
        let mut dues = self.order.dues.lock();
        // This is called in each pass: the first call has woken whoever is next.
        if dues.all.get(&self.when).is_none_or(|due| due.is_agreed) {
            return;
        }
        let Some(due) = dues.all.remove(&self.when) else { return };
        self.when.0 = time;
        dues.clock = dues.clock.max(time);
        dues.all.insert(self.when, Due { is_agreed: true, ..due });
        let next = dues.next();
        drop(dues);
        if let Some(next) = next {
            next.wake();
        }
    }

    pub(crate) fn is_due(&self) -> bool {
        !self.order.due(|number| number == self.number()).is_empty()
    }

    /// The operation that is to be launched first, unless that is this one.
    pub(crate) fn before(&self) -> Option<Operation> {
        let dues = self.order.dues.lock();
        let (first, due) = dues.all.first_key_value()?;
        (*first != self.when).then(|| due.called.what.clone())
    }

    /// The operation is about to be launched: makes its stream wait for the operation launched before it, if that is on another stream.
    pub(crate) fn launches(&self, stream: &DeviceStream) -> Result<(), Error> {
        match &*self.order.last.lock() {
            Some((last, end)) if last != stream && !is_any_order() => stream.wait_event(end),
            _ => Ok(()),
        }
    }

    /// The operation has been launched on `stream`, where `end` marks its end.
    pub(crate) fn launched(self, stream: &DeviceStream, end: DeviceEvent) {
        let before = self.order.last.lock().replace((stream.clone(), end));
        drop(before);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (gone, next) = {
            let mut dues = self.order.dues.lock();
            (dues.all.remove(&self.when), dues.next())
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

    fn called(name: u64) -> Called {
        Called { what: what(name), name, waker: Waker::noop().clone() }
    }

    #[test]
    fn launches_keep_the_order_of_submission_and_name_each_other() {
        let order = LaunchOrder::of([7; 16], None);
        assert!(Arc::ptr_eq(&order, &LaunchOrder::of([7; 16], None)), "one for each device");
        assert!(!Arc::ptr_eq(&order, &LaunchOrder::of([8; 16], None)));
        assert!(!Arc::ptr_eq(&order, &LaunchOrder::of([7; 16], Some(0))), "one for each rank that shares it");
        let [first, second, third] = [1, 2, 3].map(|name| order.queue(called(name)));
        assert!(first.is_first() && !second.is_first());
        assert_eq!(second.other(), Some((what(1), true)));
        assert_eq!(first.other(), Some((what(2), false)));
        drop(second);
        assert_eq!(first.other(), Some((what(3), false)), "one that fails gives its place up");
        drop(first);
        assert!(third.is_first() && third.other().is_none());
    }

    #[test]
    fn what_is_due_earliest_is_launched_when_nothing_can_come_before_it() {
        let order = LaunchOrder::of([9; 16], None);
        let [mut first, mut second] = [1, 2].map(|name| order.turn(called(name)));
        second.agree(second.time());
        assert!(!second.is_due(), "the first may become due before it");
        assert_eq!(second.before(), Some(what(1)));
        first.agree(5);
        assert!(second.is_due() && !first.is_due());
        let third = order.turn(called(3));
        assert_eq!(third.time(), 6, "later than all that is known");
        drop(second);
        assert!(first.is_due());
        drop(first);
        assert!(!third.is_due(), "it is not agreed on");
    }

    /// Each of three devices has two operations, each shared with another device. Whatever times they name, they do not wait in a circle.
    #[test]
    fn devices_that_agree_in_pairs_launch_in_one_order() {
        for round in 0..6_usize {
            let orders = [20, 21, 22].map(|id| LaunchOrder::of([id + 10 * round as u8; 16], None));
            // Each operation names its times on its two devices, in different orders.
            let mut ends: Vec<(usize, usize, Turn)> = Vec::new();
            for step in 0..6 {
                let step = (step * [1, 5][round % 2] + round) % 6;
                let (operation, device) = (step % 3, (step % 3 + step / 3) % 3);
                ends.push((operation, device, orders[device].turn(called(operation as u64))));
            }
            for operation in 0..3 {
                let times = ends.iter().filter(|end| end.0 == operation).map(|end| end.2.time());
                let latest = times.max().unwrap();
                ends.iter_mut().filter(|end| end.0 == operation).for_each(|end| end.2.agree(latest));
            }
            for _ in 0..3 {
                let is_due = |operation| ends.iter().all(|end| end.0 != operation || end.2.is_due());
                let next =
                    (0..3).find(|operation| ends.iter().any(|end| end.0 == *operation) && is_due(*operation));
                let next = next.expect("one is due on both of its devices");
                ends.retain(|end| end.0 != next);
            }
        }
    }
}
