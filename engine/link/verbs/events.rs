//! The asynchronous events of an open device, which come through a descriptor of the device. They report that the device, a port, a queue pair or a
//! completion queue has failed. Some failures show in no other way: the posted requests just never complete.

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use allstream_sys::verbs::{EventType, IbvAsyncEvent, IbvCq, IbvQp, VerbsError};
use parking_lot::Mutex;
use rustix::io::{Errno, ioctl_fionbio};

use super::domain::{Domain, is_not_yet};
use crate::error::Error;
use crate::link::{Reactor, Source};
use crate::trace::log::LOG;

/// Links read the events at most once in this many milliseconds.
const APART: u64 = 10;

/// The events of a device, for the links of one rank that go over one of its ports.
pub(super) struct Events {
    domain: Arc<Domain>,
    device: String,
    port: u8,
    /// Whether the progress thread listens to the device.
    is_listened_to: AtomicBool,
    /// Held by the one thread that reads, so that events are taken in order: a port that went down and came up again must not be noted as down.
    reading: Mutex<()>,
    since: Instant,
    /// When a link last read the events, in milliseconds after `since`.
    read_at: AtomicU64,
    /// Whether `failed` has ever named anything but the port. Links look at this first, whenever they are asked whether they broke.
    has_failures: AtomicBool,
    failed: Mutex<Failed>,
}

/// What has failed, with the event that reported it.
#[derive(Default)]
struct Failed {
    device: Option<EventType>,
    /// The port is down.
    port: bool,
    /// Queue pairs, by their numbers.
    pairs: Vec<(u32, EventType)>,
    /// Completion queues, by their addresses.
    queues: Vec<(usize, EventType)>,
}

impl Events {
    pub(super) fn of(domain: &Arc<Domain>, device: &str, port: u8) -> Result<Events, VerbsError> {
        let events = Events {
            domain: domain.clone(),
            device: device.to_owned(),
            port,
            is_listened_to: AtomicBool::new(false),
            reading: Mutex::default(),
            since: Instant::now(),
            read_at: AtomicU64::new(0),
            has_failures: AtomicBool::new(false),
            failed: Mutex::default(),
        };
        let os = |errno: Errno| VerbsError { call: "ioctl", code: errno.raw_os_error() };
        ioctl_fionbio(events.descriptor(), true).map_err(os)?;
        Ok(events)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the device is open as long as `self`, and so is its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.domain.context()).async_fd) }
    }

    /// Makes the progress thread read the device's events, unless it does so already.
    pub(super) fn listen(self: &Arc<Self>, reactor: &dyn Reactor) -> Result<(), Error> {
        if self.is_listened_to.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let weak = Arc::downgrade(self);
        let listened = reactor.listen(self.descriptor(), weak);
        listened.inspect_err(|_| self.is_listened_to.store(false, Ordering::Relaxed))
    }

    /// Reads the device's events, unless a link did so in the last `APART` milliseconds. Links must do so, as the progress thread reads none while
    /// callers drive their operations themselves.
    fn read_now_and_then(&self) {
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last = self.read_at.load(Ordering::Relaxed);
        if now >= last.saturating_add(APART) && self.read_at.swap(now, Ordering::Relaxed) == last {
            self.read();
        }
    }

    /// Why nothing more comes from a queue pair, in words. `None`: the device has reported no failure that affects it.
    pub(super) fn problem(&self, pair: u32, queue: *const IbvCq) -> Option<String> {
        self.read_now_and_then();
        if !self.has_failures.load(Ordering::Acquire) {
            return None;
        }
        let failed = self.failed.lock();
        let of_pair = || failed.pairs.iter().find(|(number, _)| *number == pair);
        let of_queue = || failed.queues.iter().find(|(at, _)| *at == queue.addr());
        let (what, event) = match (failed.device, of_pair(), of_queue()) {
            (Some(event), ..) => ("that it has failed", event),
            (_, Some((_, event)), _) => ("that this queue pair has failed", *event),
            (.., Some((_, event))) => ("that the queue pair's completion queue has failed", *event),
            _ => return None,
        };
        Some(format!("the network card {} says {what} ({event:?})", self.device))
    }

    /// Whether the port is down, as far as the device has reported by now.
    pub(super) fn is_port_down(&self) -> bool {
        self.read();
        self.failed.lock().port
    }

    /// Forgets what was reported of a queue pair that is now destroyed, and of its completion queue: a later pair may get the same number, and a
    /// later queue the same address.
    pub(super) fn forget(&self, pair: u32, queue: *const IbvCq) {
        if self.has_failures.load(Ordering::Acquire) {
            let mut failed = self.failed.lock();
            failed.pairs.retain(|(number, _)| *number != pair);
            failed.queues.retain(|(at, _)| *at != queue.addr());
        }
    }

    fn take(&self, event: &IbvAsyncEvent) {
        let kind = EventType(event.event_type);
        let mut failed = self.failed.lock();
        match kind {
            EventType::DEVICE_FATAL => failed.device = Some(kind),
            EventType::QP_FATAL | EventType::QP_REQ_ERR | EventType::QP_ACCESS_ERR => {
                // SAFETY: the element of such an event is a queue pair, and `ibv_destroy_qp` returns only after the event was acknowledged.
                let number = unsafe { (*event.element.cast::<IbvQp>()).qp_num };
                failed.pairs.push((number, kind));
            }
            EventType::CQ_ERR => failed.queues.push((event.element.addr(), kind)),
            EventType::PORT_ERR | EventType::PORT_ACTIVE => {
                // For these events the union, which otherwise holds a pointer, holds the port's number in its first four bytes.
                if event.element.addr() as u32 == u32::from(self.port) {
                    failed.port = kind == EventType::PORT_ERR;
                    drop(failed);
                    self.tell_of_port(kind == EventType::PORT_ERR);
                }
                return;
            }
            _ => {
                drop(failed);
                let device = self.device.clone();
                return LOG.debug(move || tracing::debug!("the network card {device} tells of {kind:?}"));
            }
        }
        self.has_failures.store(true, Ordering::Release);
    }

    fn tell_of_port(&self, is_down: bool) {
        let (device, port) = (self.device.clone(), self.port);
        LOG.warn(move || match is_down {
            true => tracing::warn!(
                "port {port} of the network card {device} is down: packets are sent again for as long as ALLSTREAM_RDMA_TIMEOUT and \
                 ALLSTREAM_RDMA_RETRY say; look at its cable, or at its interface with `ip link`"
            ),
            false => tracing::warn!("port {port} of the network card {device} is up again"),
        });
    }
}

impl Source for Events {
    fn read(&self) {
        let _alone = self.reading.lock();
        loop {
            let mut event = IbvAsyncEvent { element: ptr::null_mut(), event_type: 0 };
            // SAFETY: the device is open, its descriptor does not block, and `event` has room for an event.
            match unsafe { self.domain.verbs.get_async_event(self.domain.context(), &raw mut event) } {
                Ok(()) => {
                    self.take(&event);
                    // SAFETY: `get_async_event` has just given this event, which is acknowledged only here.
                    let _ = unsafe { self.domain.verbs.ack_async_event(&raw mut event) };
                }
                Err(error) if is_not_yet(&error) => return,
                Err(error) => {
                    let device = self.device.clone();
                    return LOG.debug(move || {
                        tracing::debug!("the events of the network card {device} cannot be read: {error}")
                    });
                }
            }
        }
    }
}
