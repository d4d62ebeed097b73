//! Whether the process of a peer has exited, and until when a peer may touch what it was lent.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::cells::RawRing;
use super::region::Region;

/// A process of this host. It is named by a descriptor that stands for this process alone, and not by its number, which the system may give to
/// another process later.
#[derive(Clone, Debug)]
pub(crate) struct Exit(Arc<OwnedFd>);

impl Exit {
    /// `process` is a descriptor from `pidfd_open`.
    pub(crate) fn of(process: OwnedFd) -> Exit {
        Exit(Arc::new(process))
    }

    /// Whether the process has exited: none of its threads runs any more, so it writes nothing. A process that is stopped
    /// has not exited.
    pub(crate) fn has_come(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&*self.0, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&now)), Ok(1..)) && fds[0].revents().contains(PollFlags::IN)
    }
}

/// Says whether something is over.
pub(crate) type IsOver = Box<dyn Fn() -> bool + Send + Sync>;

/// The time for which somebody else may touch memory of this rank. The lease tells when that time is over.
pub(crate) struct Lease {
    /// The region of the rank whose memory it is.
    region: Weak<Region>,
    until: Until,
    over: AtomicBool,
}

enum Until {
    /// A peer in another process has released all `posted` frames of this ring in the region, or has hung up. Nobody can touch what was
    /// lent once the peer's process has exited, or the region is gone.
    Released { ring: u64, posted: u64, exit: Option<Exit> },
    /// This function, which is from a link or a device that touches memory by itself, returns `true`.
    Written(IsOver),
}

impl Lease {
    fn new(region: &Arc<Region>, until: Until) -> Lease {
        Lease { region: Arc::downgrade(region), until, over: AtomicBool::new(false) }
    }

    /// A lease of what a peer in another process was lent.
    pub(super) fn lent(region: &Arc<Region>, ring: u64, posted: u64, exit: Option<Exit>) -> Lease {
        Lease::new(region, Until::Released { ring, posted, exit })
    }

    /// A lease of what a link or a device may touch by itself, until `until` returns `true`.
    pub(crate) fn written(region: &Arc<Region>, until: IsOver) -> Lease {
        Lease::new(region, Until::Written(until))
    }

    /// Whether the lease is over: nobody touches the memory any more.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
            || match &self.until {
                Until::Written(is_over) => is_over(),
                Until::Released { exit: Some(exit), .. } if exit.has_come() => true,
                Until::Released { ring, posted, .. } => self.region.upgrade().is_none_or(|region| {
                    RawRing::new(region, *ring).is_ok_and(|ring| ring.has_released(*posted))
                }),
            }
    }

    /// Whether it is a lease of what a peer was lent, and not of what a link or a device of this rank may touch.
    pub(crate) fn is_of_peers(&self) -> bool {
        matches!(self.until, Until::Released { .. })
    }

    /// Ends a lease of what a peer was lent: the peer has said in another way that it touches the memory no more. From here on the ring is not
    /// read, as its memory may serve another ring.
    pub(crate) fn end(&self) {
        if self.is_of_peers() {
            self.over.store(true, Ordering::Release);
        }
    }

    /// Whether it is a lease of the memory of the rank with this region.
    pub(crate) fn is_of(&self, region: &Arc<Region>) -> bool {
        std::ptr::eq(self.region.as_ptr(), Arc::as_ptr(region))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

    use super::*;

    #[test]
    fn a_stopped_process_has_not_exited_and_a_killed_one_has() {
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let exit = Exit::of(pidfd_open(pid, PidfdFlags::empty()).unwrap());
        assert!(!exit.has_come());
        kill_process(pid, Signal::STOP).unwrap();
        assert!(!exit.has_come());
        kill_process(pid, Signal::KILL).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        // Nobody has waited for it yet: it has exited all the same.
        while !exit.has_come() {
            assert!(Instant::now() < end);
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(exit.has_come());
    }
}
