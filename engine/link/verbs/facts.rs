//! What there is to know of a host for RDMA, as plain data: [`read`](super::read) asks the host for it, and tests make it up.

use std::net::{IpAddr, Ipv6Addr};

use allstream_sys::verbs::{GidType, LinkLayer, Mtu, PortState, Transport};

/// All that the choice of ports depends on, of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// In the order in which libibverbs lists them.
    pub(crate) devices: Vec<Device>,
    /// Devices that the kernel has but libibverbs does not list.
    pub(crate) unlisted: Vec<String>,
    /// Whether there is a `/dev/infiniband`, through whose files libibverbs reaches devices.
    pub(crate) has_device_files: bool,
    pub(crate) locked: Locked,
    pub(crate) interfaces: Vec<Interface>,
}

/// How much memory this process may lock, that is, keep from being paged out. Registering memory locks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// As much as there is: there is no limit, or the process may exceed it (`CAP_IPC_LOCK`).
    Unlimited,
    /// This many bytes (`RLIMIT_MEMLOCK`).
    UpTo(u64),
}

/// An address of one of the host's network interfaces.
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
    /// This process may run on none of the processors that are near to the device (on its NUMA node).
    pub(crate) is_far: bool,
    /// The ports, or why the device could not be queried.
    pub(crate) ports: Result<Vec<Port>, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// Counted from 1.
    pub(crate) number: u8,
    /// What the port says, or why it could not be queried.
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
    /// The codes of its width and of its speed: ports with the same codes are as fast as each other.
    pub(crate) rate: (u8, u8),
    /// The addresses in the port's table, without its empty entries.
    pub(crate) gids: Vec<Gid>,
}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) index: u32,
    pub(crate) kind: GidType,
    pub(crate) address: Ipv6Addr,
    /// The number of the network interface that it belongs to; 0: the driver names none.
    pub(crate) interface: u32,
}

impl Gid {
    /// The GID as an IP address: IPv4 if it is an IPv4-mapped one.
    pub(crate) fn ip(&self) -> IpAddr {
        self.address.to_ipv4_mapped().map_or(IpAddr::V6(self.address), IpAddr::V4)
    }
}
