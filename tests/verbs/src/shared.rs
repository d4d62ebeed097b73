//! What all queue pairs of a process share.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_uint};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Instant;
use std::{io, ptr};

use crate::codes::{ACTIVE, DOWN};
use crate::completion::{Completions, Entry};
use crate::counts::Report;
use crate::events::{Event, Events};
use crate::faults::Draws;
use crate::memory::Memory;
use crate::told::{self, host};

/// An open device.
pub(crate) struct Context {
    /// The device's index in the test's description of the host.
    pub(crate) device: usize,
    pub(crate) events: Events,
}

pub(crate) struct Shared {
    pub(crate) contexts: HashMap<usize, Context>,
    /// Protection domains and their contexts, both by address.
    pub(crate) domains: HashMap<usize, usize>,
    pub(crate) memory: Memory,
    pub(crate) completions: Completions,
    pub(crate) report: Report,
    pub(crate) draws: Draws,
    pub(crate) timer: Timer,
    /// Ports whose state has changed since the process began.
    pub(crate) ports: HashMap<(usize, u8), c_uint>,
    /// For each device, by its index in the test's description: bytes of requests to send that were posted.
    pub(crate) posted: BTreeMap<usize, u64>,
}

impl Shared {
    pub(crate) fn new() -> Result<Shared, c_int> {
        Ok(Shared {
            contexts: HashMap::new(),
            domains: HashMap::new(),
            memory: Memory::default(),
            completions: Completions::default(),
            report: Report::default(),
            draws: Draws::default(),
            timer: Timer::new()?,
            ports: HashMap::new(),
            posted: BTreeMap::new(),
        })
    }

    /// The test's description of an open device.
    pub(crate) fn device(&self, context: usize) -> Option<&'static told::Device> {
        host().devices.get(self.contexts.get(&context)?.device)
    }

    /// The test's description of a port of an open device. Ports count from 1.
    pub(crate) fn port(&self, context: usize, number: u8) -> Option<&'static told::Port> {
        self.device(context)?.ports.get(usize::from(number).wrapping_sub(1))
    }

    /// The current state of a port.
    pub(crate) fn port_state(&self, context: usize, number: u8) -> Option<c_uint> {
        let (device, told) = (self.contexts.get(&context)?.device, self.port(context, number)?);
        let most = host().devices.get(device)?.most_bytes;
        if most > 0 && self.posted.get(&device).is_some_and(|posted| *posted >= most) {
            return Some(DOWN);
        }
        Some(self.ports.get(&(device, number)).copied().unwrap_or(told.state))
    }

    /// Counts bytes that were posted to a queue pair of this open device.
    pub(crate) fn count(&mut self, context: usize, bytes: u64) {
        if let Some(context) = self.contexts.get(&context) {
            *self.posted.entry(context.device).or_default() += bytes;
        }
    }

    pub(crate) fn is_active(&self, context: usize, number: u8) -> bool {
        self.port_state(context, number) == Some(ACTIVE)
    }

    pub(crate) fn complete(&mut self, queue: usize, entry: Entry) {
        let delay = self.draws.delay();
        if let Some(due) = self.completions.push(queue, entry, delay, &mut self.report) {
            self.timer.wake_at(due);
        }
    }

    pub(crate) fn event(&mut self, context: usize, kind: c_uint, element: usize) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.push(Event { kind, element });
        }
    }
}

/// Wakes the card's thread (`card.rs`) when something is due.
pub(crate) struct Timer {
    fd: OwnedFd,
    armed: Option<Instant>,
}

impl Timer {
    fn new() -> Result<Timer, c_int> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: the call takes no pointers; it makes a descriptor.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        // SAFETY: the descriptor was just made, and nobody else owns it.
        Ok(Timer { fd: unsafe { OwnedFd::from_raw_fd(fd) }, armed: None })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Makes the card's thread wake at this time or earlier.
    pub(crate) fn wake_at(&mut self, at: Instant) {
        if self.armed.is_some_and(|armed| armed <= at) {
            return;
        }
        self.armed = Some(at);
        let left = at.saturating_duration_since(Instant::now());
        // A time of zero would disarm the timer.
        let nanoseconds = i64::from(left.subsec_nanos()).max(1);
        let it_value = libc::timespec { tv_sec: left.as_secs() as libc::time_t, tv_nsec: nanoseconds };
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let setting = libc::itimerspec { it_interval: never, it_value };
        // SAFETY: the descriptor is a timer's, and the kernel reads the setting during the call.
        unsafe { libc::timerfd_settime(self.fd(), 0, &raw const setting, ptr::null_mut()) };
    }

    /// Called when the timer has woken the thread: the timer is no longer armed.
    pub(crate) fn fired(&mut self) {
        let mut count = 0u64;
        // SAFETY: there is room for the number of eight bytes.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), size_of::<u64>()) };
        self.armed = None;
    }
}
