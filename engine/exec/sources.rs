//! What reads the descriptors that the progress thread sleeps on and does not know how to read: a network card's, which tells that the card has failed.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Weak;

use parking_lot::Mutex;
use rustix::event::epoll;

use crate::error::Error;
use crate::link::Source;

/// What an event of the epoll carries: of a descriptor that wakes the progress thread, of a link's, and from here on of a source's.
pub(super) const WAKE: u64 = 0;
pub(super) const LINK: u64 = 1;
const FIRST: u64 = 2;

/// The sources, each in the place that the events of its descriptor carry.
#[derive(Default)]
pub(super) struct Sources(Mutex<Vec<Weak<dyn Source>>>);

impl Sources {
    /// Adds a source, and its descriptor to the epoll: told each time that something has come, not for as long as it is there.
    pub(super) fn add(
        &self,
        epoll: &OwnedFd,
        fd: BorrowedFd<'_>,
        source: Weak<dyn Source>,
    ) -> Result<(), Error> {
        let mut sources = self.0.lock();
        // Whoever drops a source closes its descriptor, so that no event carries its place any more.
        let place = sources.iter().position(|source| source.strong_count() == 0).unwrap_or(sources.len());
        let data = epoll::EventData::new_u64(FIRST + place as u64);
        epoll::add(epoll, fd, data, epoll::EventFlags::IN | epoll::EventFlags::ET)
            .map_err(|e| Error::system("watch a network card's descriptor", e))?;
        match sources.get_mut(place) {
            Some(free) => *free = source,
            None => sources.push(source),
        }
        Ok(())
    }

    /// Has each source read that one of these events is about.
    pub(super) fn read(&self, events: &[epoll::Event]) {
        for event in events {
            let Some(place) = event.data.u64().checked_sub(FIRST) else { continue };
            let source = self.0.lock().get(place as usize).and_then(Weak::upgrade);
            if let Some(source) = source {
                source.read();
            }
        }
    }
}
