//! Whether the process of a peer has exited, and until when a peer may touch what it was lent.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::cells::RawRing;
use super::region::Region;

/// A process of this host, by a descriptor that stands for it alone: its number may be given to another one later.
#[derive(Clone, Debug)]
pub(crate) struct Exit(Arc<OwnedFd>);

impl Exit {
    /// The descriptor is one that `pidfd_open` gives.
    pub(crate) fn of(process: OwnedFd) -> Exit {
        Exit(Arc::new(process))
    }

    /// Whether the process has exited: none of its threads runs any more, so nothing is written by it. One that is stopped
    /// has not.
    pub(crate) fn has_come(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&*self.0, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&now)), Ok(1..)) && fds[0].revents().contains(PollFlags::IN)
    }
}

/// The time for which a peer that has not given back what it was lent may touch it, where it is not in this process.
pub(crate) struct Lease {
    /// The ring lies in this region: nobody has what was lent once that is gone.
    region: Weak<Region>,
    ring: u64,
    /// Frames that were posted in it.
    posted: u64,
    exit: Option<Exit>,
    over: AtomicBool,
}

impl Lease {
    pub(super) fn new(region: &Arc<Region>, ring: u64, posted: u64, exit: Option<Exit>) -> Lease {
        Lease { region: Arc::downgrade(region), ring, posted, exit, over: AtomicBool::new(false) }
    }

    /// Whether it is over: the peer has released all frames, or has said that it uses nothing of ours any more; or its
    /// process has exited.
    pub(crate) fn is_over(&self) -> bool {
        if self.over.load(Ordering::Acquire) || self.exit.as_ref().is_some_and(Exit::has_come) {
            return true;
        }
        let Some(region) = self.region.upgrade() else { return true };
        RawRing::new(region, self.ring).is_ok_and(|ring| ring.has_released(self.posted))
    }

    /// The peer has said so in another way. From here on the ring is not looked at: its memory may serve another one.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Whether what was lent is in this region, or was lent through a ring that is.
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
