//! Which ranks share a process, which a host.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// How near another rank is, for the choice of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locality {
    /// In this very process.
    SameProcess,
    /// On this host, where memory can be shared.
    SameHost,
    /// Reached over the network only.
    Remote,
}

/// Names a process among all of all hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// The host: two processes with the same can share memory.
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

/// Numbers names from 0 in the order in which they come first; `size` numbers in all.
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

/// A number that this process has drawn, and no other.
pub(crate) fn nonce() -> Result<u128, Error> {
    static NONCE: OnceLock<u128> = OnceLock::new();
    if let Some(nonce) = NONCE.get() {
        return Ok(*nonce);
    }
    let drawn = u128::from_le_bytes(random()?);
    Ok(*NONCE.get_or_init(|| drawn))
}

/// Boot, network namespace and process namespace: who shares all three can pass a descriptor over an
/// abstract unix socket and knows the other by its process id. Containers of one host do not.
fn host() -> Result<String, Error> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let net = std::fs::read_link("/proc/self/ns/net");
    let pid = std::fs::read_link("/proc/self/ns/pid");
    if let (Ok(boot), Ok(net), Ok(pid)) = (boot, net, pid)
        && !boot.trim().is_empty()
    {
        return Ok(format!("{}/{}/{}", boot.trim(), net.display(), pid.display()));
    }
    // Without /proc nothing proves that two processes share a host: the process is a host of its own.
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(format!("{name}/{:032x}", nonce()?))
}

#[cfg(test)]
mod tests {
    use super::*;

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
