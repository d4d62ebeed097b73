//! [`Groups`], a registry of communicators by name, and [`backends`], what this build and this machine can carry collectives over.

use std::collections::BTreeMap;
use std::fmt;

use parking_lot::Mutex;

use super::{Comm, SharedComm};
use crate::device::nccl::NcclLibrary;
use crate::error::Error;
use crate::link::{kinds, verbs};
use crate::types::{LinkClass, Rank};

/// A registry of this process's communicators by name. For a name it tells whether there is one, its size, and this process's rank in it.
///
/// Each process has its own registry, and names are not compared between ranks. A process that is no member of a group
/// inserts nothing under the group's name, so its queries find nothing. A registry can be a value, or a `static` of the process:
///
/// ```
/// static GROUPS: allstream::Groups = allstream::Groups::new();
///
/// let comm = allstream::Comm::local(1)?.remove(0);
/// GROUPS.insert("tp", comm)?;
/// assert_eq!((GROUPS.rank("tp"), GROUPS.size("tp")), (Some(0), Some(1)));
/// assert!(!GROUPS.is_initialized("dp"));
/// # Ok::<(), allstream::Error>(())
/// ```
#[derive(Default)]
pub struct Groups(Mutex<BTreeMap<String, SharedComm>>);

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(&*self.0.lock()).finish()
    }
}

impl From<Comm> for SharedComm {
    fn from(comm: Comm) -> SharedComm {
        comm.share()
    }
}

impl Groups {
    /// A registry without groups.
    pub const fn new() -> Groups {
        Groups(Mutex::new(BTreeMap::new()))
    }

    /// Puts a communicator under a name; returns another handle of the communicator.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the name is taken; the registry stays as it is.
    pub fn insert(&self, name: impl Into<String>, comm: impl Into<SharedComm>) -> Result<SharedComm, Error> {
        let (name, comm) = (name.into(), comm.into());
        let mut groups = self.0.lock();
        if let Some(there) = groups.get(&name) {
            let problem = format!("a group {name:?} is there already ({there:?}); remove it first");
            drop(groups);
            return Err(Error::invalid("insert", problem));
        }
        groups.insert(name, comm.clone());
        Ok(comm)
    }

    /// The communicator of a name; `None` where there is none, or this process is no member of it.
    pub fn get(&self, name: &str) -> Option<SharedComm> {
        self.0.lock().get(name).cloned()
    }

    /// Whether a communicator has that name.
    pub fn is_initialized(&self, name: &str) -> bool {
        self.0.lock().contains_key(name)
    }

    /// This process's rank in the group, if it is a member.
    pub fn rank(&self, name: &str) -> Option<Rank> {
        self.get(name).map(|comm| comm.rank())
    }

    /// Ranks in the group, if this process is a member.
    pub fn size(&self, name: &str) -> Option<usize> {
        self.get(name).map(|comm| comm.size())
    }

    /// All names, in alphabetical order.
    pub fn names(&self) -> Vec<String> {
        self.0.lock().keys().cloned().collect()
    }

    /// Takes a communicator out of the registry. The communicator ends when its last handle is dropped.
    pub fn remove(&self, name: &str) -> Option<SharedComm> {
        self.0.lock().remove(name)
    }
}

/// What collectives can be carried over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// Links of a class other than RDMA, with memory of the host.
    Link(LinkClass),
    /// GPU memory, by the CUDA driver.
    Cuda,
    /// GPU memory, by NVIDIA's library NCCL: [`Comm::bind_nccl`](super::Comm::bind_nccl).
    Nccl,
    /// Links of the class [`LinkClass::RDMA`]: the network card reads and writes memory by itself.
    Rdma,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Backend::Link(class) => class.name(),
            Backend::Cuda => "cuda",
            Backend::Nccl => "nccl",
            Backend::Rdma => "rdma",
        })
    }
}

/// Whether a backend can be used here, and why not.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BackendStatus {
    /// The backend.
    pub backend: Backend,
    /// `Ok`, or what is missing.
    pub available: Result<(), Error>,
}

/// All backends, and for each whether this build and this machine have it. Tries what links need, such as a listening socket.
pub fn backends() -> Vec<BackendStatus> {
    let others = [
        (Backend::Cuda, crate::device::driver().map(drop)),
        (Backend::Nccl, NcclLibrary::find().map(drop)),
        (Backend::Rdma, (verbs::RDMA.probe)()),
    ];
    let links = kinds::KINDS.iter().filter(|kind| kind.class != LinkClass::RDMA);
    let links = links.map(|kind| (Backend::Link(kind.class), (kind.probe)()));
    links.chain(others).map(|(backend, available)| BackendStatus { backend, available }).collect()
}
