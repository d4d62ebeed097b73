//! What an open device tells of itself: that it has failed, a port, a queue pair or a completion queue. These events come by a descriptor of the
//! device's. Of some failures nothing else tells: what was posted just never completes.

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

/// Links have the events read at most this often, in milliseconds.
const APART: u64 = 10;

/// The events of a device, for the links of one rank that go over one of its ports.
pub(super) struct Events {
    domain: Arc<Domain>,
    device: String,
    port: u8,
    /// Whether the progress thread listens to the device.
    is_listened_to: AtomicBool,
    /// One thread reads at a time, so that a port that went down and is up again is not told the other way round.
    reading: Mutex<()>,
    since: Instant,
    /// When links had the events read last, in milliseconds from `since`.
    read_at: AtomicU64,
    /// Whether `failed` names anything. Links ask for it whenever they are asked whether they broke.
    has_failures: AtomicBool,
    failed: Mutex<Failed>,
}

/// What has failed, by the event that told of it.
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

    /// Has the progress thread read what the device tells, if it does not yet.
    pub(super) fn listen(self: &Arc<Self>, reactor: &dyn Reactor) -> Result<(), Error> {
        if self.is_listened_to.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let weak = Arc::downgrade(self);
        let listened = reactor.listen(self.descriptor(), weak);
        listened.inspect_err(|_| self.is_listened_to.store(false, Ordering::Relaxed))
    }

    /// Reads what the device has told, if nobody has for some time: while callers drive their operations themselves, the progress thread does not.
    fn read_now_and_then(&self) {
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last = self.read_at.load(Ordering::Relaxed);
        if now >= last.saturating_add(APART) && self.read_at.swap(now, Ordering::Relaxed) == last {
            self.read();
        }
    }

    /// Why nothing more comes of a queue pair, if the device has told so: in words.
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

    /// Whether the port is down, as far as the device has told by now.
    pub(super) fn is_port_down(&self) -> bool {
        self.read();
        self.failed.lock().port
    }

    /// The queue pair is destroyed: another one may get its number, or its completion queue the address.
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
                // SAFETY: such an event is about a queue pair, which is not destroyed before the event is acknowledged.
                let number = unsafe { (*event.element.cast::<IbvQp>()).qp_num };
                failed.pairs.push((number, kind));
            }
            EventType::CQ_ERR => failed.queues.push((event.element.addr(), kind)),
            EventType::PORT_ERR | EventType::PORT_ACTIVE => {
                // The number is in the first four bytes of what else holds a pointer.
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
            // SAFETY: the device is open, and its descriptor does not block; room for an event.
            match unsafe { self.domain.verbs.get_async_event(self.domain.context(), &raw mut event) } {
                Ok(()) => {
                    self.take(&event);
                    // SAFETY: an event that was just given, acknowledged once.
                    let _ = unsafe { self.domain.verbs.ack_async_event(&raw mut event) };
                }
                Err(error) if is_not_yet(&error) => return,
                Err(error) => {
                    let device = self.device.clone();
                    return LOG.debug(move || tracing::debug!("what {device} tells cannot be read: {error}"));
                }
            }
        }
    }
}
