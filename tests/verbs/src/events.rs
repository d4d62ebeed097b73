//! Asynchronous events of an open device.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::os::fd::RawFd;

use crate::signal::Signal;

/// What has happened (`kind`), and to what: `element` is the address of a queue pair or completion queue, or the number of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: c_uint,
    pub(crate) element: usize,
}

pub(crate) struct Events {
    signal: Signal,
    waiting: VecDeque<Event>,
    /// Events that were fetched and not acknowledged.
    fetched: Vec<Event>,
}

impl Events {
    pub(crate) fn new() -> Result<Events, c_int> {
        Ok(Events { signal: Signal::new()?, waiting: VecDeque::new(), fetched: Vec::new() })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.signal.fd()
    }

    pub(crate) fn push(&mut self, event: Event) {
        self.waiting.push_back(event);
        self.signal.raise();
    }

    pub(crate) fn fetch(&mut self) -> Option<Event> {
        let event = self.waiting.pop_front()?;
        self.fetched.push(event);
        Some(event)
    }

    /// Acknowledges an event. Returns whether such an event had been fetched.
    pub(crate) fn acknowledge(&mut self, event: Event) -> bool {
        let at = self.fetched.iter().position(|fetched| *fetched == event);
        at.map(|at| self.fetched.swap_remove(at)).is_some()
    }

    pub(crate) fn is_acknowledged(&self, element: usize) -> bool {
        self.fetched.iter().all(|event| event.element != element)
    }

    /// Drops the events of this element that wait.
    pub(crate) fn forget(&mut self, element: usize) {
        let before = self.waiting.len();
        self.waiting.retain(|event| event.element != element);
        (self.waiting.len()..before).for_each(|_| self.signal.lower());
    }
}
