//! What a host is like, as far as RDMA goes. Plain data: tests write it down, [`read`](super::read) asks for it.

use std::net::{IpAddr, Ipv6Addr};

use allstream_sys::verbs::{GidType, LinkLayer, Mtu, PortState, Transport};

/// All that the choice depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// In the order of libibverbs.
    pub(crate) devices: Vec<Device>,
    /// Devices that the kernel has, and libibverbs does not list.
    pub(crate) unlisted: Vec<String>,
    /// Whether there is a `/dev/infiniband`, through whose files libibverbs reaches devices.
    pub(crate) has_device_files: bool,
    pub(crate) locked: Locked,
    pub(crate) interfaces: Vec<Interface>,
}

/// How much memory this process may keep from being paged out, which registered memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// As much as there is: no limit, or the process is above it (`CAP_IPC_LOCK`).
    Unlimited,
    /// So many bytes (`RLIMIT_MEMLOCK`).
    UpTo(u64),
}

/// An address of an interface of the host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) ip: IpAddr,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) transport: Transport,
    /// Or why it could not be asked.
    pub(crate) ports: Result<Vec<Port>, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// From 1.
    pub(crate) number: u8,
    /// Or why it could not be asked.
    pub(crate) found: Result<Found, String>,
}

/// What a port says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) state: PortState,
    pub(crate) layer: LinkLayer,
    pub(crate) mtu: Mtu,
    pub(crate) max_mtu: Mtu,
    /// Bytes of the largest message.
    pub(crate) max_message: u32,
    /// By index; entries that are empty are left out.
    pub(crate) gids: Vec<Gid>,
}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) index: u32,
    pub(crate) kind: GidType,
    pub(crate) address: Ipv6Addr,
    /// The number of its interface; 0: none is told.
    pub(crate) interface: u32,
}

impl Gid {
    /// The address as the network knows it.
    pub(crate) fn ip(&self) -> IpAddr {
        self.address.to_ipv4_mapped().map_or(IpAddr::V6(self.address), IpAddr::V4)
    }
}
