//! The descriptors on which the progress thread sleeps, but which it cannot read itself: each has a `Source` that reads it. They are descriptors of
//! network cards, which report failures of a card, its ports and its queues.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Weak;

use parking_lot::Mutex;
use rustix::event::epoll;

use crate::error::Error;
use crate::link::Source;

/// The number in an epoll event: `WAKE` for a descriptor that wakes the progress thread, `LINK` for a link's, and from `FIRST` on for the sources'.
pub(super) const WAKE: u64 = 0;
pub(super) const LINK: u64 = 1;
const FIRST: u64 = 2;

/// The sources. An event of a source's descriptor carries `FIRST` plus the source's index here.
#[derive(Default)]
pub(super) struct Sources(Mutex<Vec<Weak<dyn Source>>>);

impl Sources {
    /// Adds a source, and its descriptor to the epoll (edge-triggered: an event comes whenever something new has arrived, not for as long as it is
    /// unread).
    pub(super) fn add(
        &self,
        epoll: &OwnedFd,
        fd: BorrowedFd<'_>,
        source: Weak<dyn Source>,
    ) -> Result<(), Error> {
        let mut sources = self.0.lock();
        // The index of a source that is gone is used again. Events of the old descriptor may still carry that index, if another process holds that
        // descriptor open: then the new source reads in vain.
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

    /// Calls `read` of each source whose descriptor one of these events is about.
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::event::Timespec;
    use rustix::pipe::pipe;

    use super::*;

    #[derive(Default)]
    struct Reads(AtomicUsize);

    impl Source for Reads {
        fn read(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_source_reads_what_is_its_own_and_one_that_is_gone_leaves_its_place() {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let sources = Sources::default();
        let reads = [(); 3].map(|()| Arc::new(Reads::default()));
        let [(a, to_a), (b, to_b), (c, to_c)] = [(); 3].map(|()| pipe().unwrap());
        let add = |from: &OwnedFd, which: usize| {
            let source: Weak<Reads> = Arc::downgrade(&reads[which]);
            sources.add(&poll, from.as_fd(), source).unwrap();
        };
        let read = || {
            let mut events = Vec::with_capacity(8);
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), Some(&now)).unwrap();
            sources.read(&events);
            reads.each_ref().map(|reads| reads.0.load(Ordering::Relaxed))
        };
        add(&a, 0);
        add(&b, 1);
        rustix::io::write(&to_b, b"x").unwrap();
        assert_eq!(read(), [0, 1, 0]);
        assert_eq!(read(), [0, 1, 0], "told once");
        rustix::io::write(&to_a, b"x").unwrap();
        rustix::io::write(&to_b, b"x").unwrap();
        assert_eq!(read(), [1, 2, 0]);
        // The first source is gone: events for it reach nobody, until another source takes its place.
        let [gone, _, _] = &reads;
        let dead: Weak<dyn Source> = {
            let new: Arc<dyn Source> = Arc::new(Reads::default());
            Arc::downgrade(&new)
        };
        sources.0.lock()[0] = dead;
        rustix::io::write(&to_a, b"x").unwrap();
        assert_eq!(read(), [1, 2, 0]);
        assert_eq!(Arc::strong_count(gone), 1);
        drop((a, to_a));
        add(&c, 2);
        assert_eq!(sources.0.lock().len(), 2);
        rustix::io::write(&to_c, b"x").unwrap();
        assert_eq!(read(), [1, 2, 1]);
    }
}
