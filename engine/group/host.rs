//! Which ranks share a process, and which share a host.

use std::sync::OnceLock;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::link::Locality;

/// Names a process: all processes of all hosts have different names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// The host. Two processes with the same one can share memory.
    pub(crate) host: String,
    /// The process id on that host.
    pub(crate) pid: u32,
    /// Drawn once per process, so that a reused process id is another process.
    nonce: u128,
}

impl Process {
    /// This process, on the host that `label` names, or on the one that the kernel names.
    pub(crate) fn this(label: Option<&str>) -> Result<Process, Error> {
        let host = match label {
            Some(label) => format!("label:{label}"),
            None => host()?,
        };
        Ok(Process { host, pid: std::process::id(), nonce: nonce()? })
    }

    pub(crate) fn locality(&self, other: &Process) -> Locality {
        if self == other {
            Locality::SameProcess
        } else if self.host == other.host {
            Locality::SameHost
        } else {
            Locality::Remote
        }
    }
}

/// Numbers names from 0, in the order in which each first comes. Returns each name's number, and then zeros until there are `size` numbers.
pub(crate) fn numbered<N: PartialEq>(names: impl Iterator<Item = N>, size: usize) -> Vec<u32> {
    let mut known = Vec::new();
    let mut number = |name: N| match known.iter().position(|k| *k == name) {
        Some(at) => at as u32,
        None => {
            known.push(name);
            known.len() as u32 - 1
        }
    };
    let mut numbers: Vec<u32> = names.map(&mut number).collect();
    numbers.resize(size, 0);
    numbers
}

/// Random bytes from the system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| Error::system("asking the system for random bytes", e))?;
    Ok(bytes)
}

/// A random number that this process draws once, and no other process has.
pub(crate) fn nonce() -> Result<u128, Error> {
    static NONCE: OnceLock<u128> = OnceLock::new();
    if let Some(nonce) = NONCE.get() {
        return Ok(*nonce);
    }
    let drawn = u128::from_le_bytes(random()?);
    Ok(*NONCE.get_or_init(|| drawn))
}

/// The kernel's name for this host: boot, network namespace and process namespace. Processes that share all three can pass descriptors over an
/// abstract unix socket, and know each other by their process ids. Containers of one host usually do not share all three.
fn host() -> Result<String, Error> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let net = std::fs::read_link("/proc/self/ns/net");
    let pid = std::fs::read_link("/proc/self/ns/pid");
    if let (Ok(boot), Ok(net), Ok(pid)) = (boot, net, pid)
        && !boot.trim().is_empty()
    {
        return Ok(format!("{}/{}/{}", boot.trim(), net.display(), pid.display()));
    }
    // Without /proc nothing proves that two processes share a host, so this process counts as a host of its own.
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(format!("{name}/{:032x}", nonce()?))
}

/// Whether another process of this host may run on a core on which this process may run, too: not if the launcher gives each rank cores of its own.
pub(crate) fn shares_cores(pid: u32) -> bool {
    let theirs = i32::try_from(pid).ok().and_then(Pid::from_raw);
    theirs.is_none_or(|theirs| share_cores(rustix::process::getpid(), theirs))
}

/// Whether two processes may run on the same core; `true` if the system does not say.
fn share_cores(a: Pid, b: Pid) -> bool {
    let [a, b] = [a, b].map(|pid| sched_getaffinity(Some(pid)).ok());
    a.zip(b).is_none_or(|(a, b)| (0..CpuSet::MAX_CPU).any(|cpu| a.is_set(cpu) && b.is_set(cpu)))
}

/// Bytes of all last-level caches of this host together (L3, on most hosts); 32 MB if the system does not say.
pub(crate) fn last_caches() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    let read = |file: &str| std::fs::read_to_string(format!("/sys/devices/system/cpu/{file}")).ok();
    let cache = |index: u32| {
        let bytes = size(&read(&format!("cpu0/cache/index{index}/size"))?)?;
        let sharers: u32 = read(&format!("cpu0/cache/index{index}/shared_cpu_map"))?
            .chars()
            .filter_map(|digit| digit.to_digit(16))
            .map(u32::count_ones)
            .sum();
        Some((bytes, sharers.max(1) as usize))
    };
    *BYTES.get_or_init(|| {
        let Some((bytes, sharers)) = (0..8).filter_map(cache).max() else { return 32 << 20 };
        let last = read("present").and_then(|list| list.trim().rsplit(['-', ',']).next()?.parse().ok());
        bytes * (last.map_or(1, |last: usize| last + 1) / sharers).max(1)
    })
}

/// A size as the system writes it: `32768K`.
fn size(text: &str) -> Option<usize> {
    let text = text.trim();
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let unit = match unit {
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_setaffinity;

    use super::*;

    #[test]
    fn cores_are_shared_unless_each_has_its_own() {
        assert!(shares_cores(std::process::id()) && shares_cores(u32::MAX));
        let all = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
        let (mut one, mut rest) = (CpuSet::new(), all);
        one.set(first);
        rest.unset(first);
        let mut sleepers = [(); 2].map(|()| std::process::Command::new("sleep").arg("60").spawn().unwrap());
        let [a, b] = [0, 1].map(|i| Pid::from_child(&sleepers[i]));
        assert!(share_cores(a, b));
        sched_setaffinity(Some(a), &one).unwrap();
        assert!(share_cores(a, b));
        if rest.count() > 0 {
            sched_setaffinity(Some(b), &rest).unwrap();
            assert!(!share_cores(a, b) && shares_cores(sleepers[1].id()));
        }
        for sleeper in &mut sleepers {
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
        }
    }

    #[test]
    fn sizes_of_caches_are_read() {
        assert_eq!(size("32768K\n"), Some(32 << 20));
        assert_eq!(size("16M"), Some(16 << 20));
        for odd in ["", "K", "12", "K12", "\u{e9}", "99999999999999999999K"] {
            assert_eq!(size(odd), None, "{odd}");
        }
        assert!(last_caches() >= 1 << 10);
    }

    #[test]
    fn locality_follows_host_then_process() {
        let here = Process::this(None).unwrap();
        assert_eq!(here.locality(&Process::this(None).unwrap()), Locality::SameProcess);
        let other = Process { pid: here.pid + 1, ..here.clone() };
        assert_eq!(here.locality(&other), Locality::SameHost);
        let reused = Process { nonce: here.nonce ^ 1, ..here.clone() };
        assert_eq!(here.locality(&reused), Locality::SameHost);
        let far = Process::this(Some("b")).unwrap();
        assert_eq!(here.locality(&far), Locality::Remote);
        assert_eq!(far.locality(&Process::this(Some("b")).unwrap()), Locality::SameProcess);
    }

    #[test]
    fn a_process_survives_the_wire() {
        let here = Process::this(None).unwrap();
        let text = serde_json::to_string(&here).unwrap();
        assert_eq!(serde_json::from_str::<Process>(&text).unwrap(), here);
    }
}
