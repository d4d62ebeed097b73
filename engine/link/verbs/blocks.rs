//! Users' buffers from [`Comm::alloc`](crate::Comm::alloc) that are registered with a network card, so that the card reads and writes them where they
//! lie. A buffer is registered when a link first carries what lies in it, and stays so until it is dropped. Other memory of users' is not registered:
//! the engine does not learn when that is freed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use allstream_sys::verbs::{Access, IbvMr};
use parking_lot::Mutex;

use super::domain::{Domain, Registered};
use crate::link::region::{Pins, Region};
use crate::trace::log::LOG;

/// A part of a registered buffer, as requests name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The key by which this process's own requests name the buffer.
    pub(super) key: u32,
    /// The buffer's registration, which exists as long as the buffer and the card.
    pub(super) registration: *mut IbvMr,
}

/// The buffers of one rank that are registered with its card.
pub(super) struct Blocks {
    domain: Arc<Domain>,
    /// What is known of the buffers that links have carried, by address: the registration, or `None` if the card did not register the buffer. What
    /// lies in such a buffer is copied to a staging slot.
    known: Mutex<BTreeMap<usize, Option<Registered>>>,
    /// Whether buffers are registered at all. They are not where libibverbs hides registered memory from forked children: a child may use its copy.
    is_on: bool,
    /// The user has been told that a buffer was not registered.
    is_told: AtomicBool,
}

impl Blocks {
    pub(super) fn new(domain: &Arc<Domain>, is_on: bool) -> Blocks {
        Blocks { domain: domain.clone(), known: Mutex::default(), is_on, is_told: AtomicBool::new(false) }
    }

    /// Where these bytes are, if all of them lie in one registered buffer of this region. Registers the buffer if it was not yet.
    pub(super) fn part(&self, region: &Region, at: *const u8, bytes: usize) -> Option<Part> {
        if !self.is_on || !region.is_page(at, bytes) {
            return None;
        }
        let (start, size) = region.block_of(at)?;
        let mut known = self.known.lock();
        let registered = known.entry(start.as_ptr() as usize).or_insert_with(|| {
            let access = [Access::LOCAL_WRITE, Access::MW_BIND];
            let registered = Registered::block(&self.domain, start, size, &access);
            registered.inspect_err(|error| self.tell(error.to_string())).ok()
        });
        registered.as_ref().filter(|registered| registered.holds(at, bytes)).map(part_of)
    }

    /// Tells the user, once, that a buffer was not registered.
    fn tell(&self, problem: String) {
        if !self.is_told.swap(true, Ordering::Relaxed) {
            let what = "a buffer from `alloc` is copied for RDMA, as it cannot be used in place";
            LOG.warn(move || tracing::warn!("{what}: {problem}"));
        }
    }
}

fn part_of(registered: &Registered) -> Part {
    Part { key: registered.local_key(), registration: registered.handle() }
}

impl Pins for Blocks {
    fn unpin(&self, at: *const u8) -> bool {
        let known = self.known.lock().remove(&(at as usize));
        known.flatten().is_none_or(Registered::end)
    }
}
