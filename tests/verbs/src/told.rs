//! The host that a test describes in `ALLSTREAM_TEST_VERBS`.

use std::net::IpAddr;
use std::sync::OnceLock;

use allstream_sys::verbs::{IbvGid, IbvGidEntry};
use serde::Deserialize;

const VARIABLE: &str = "ALLSTREAM_TEST_VERBS";

/// What there is. Every `fails` is the `errno` with which a call fails; 0: it does not.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Host {
    /// Asking for the list of devices.
    pub(crate) fails: i32,
    pub(crate) devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// As the header counts them: 0 is InfiniBand and RoCE, 1 is iWARP.
    pub(crate) transport: i32,
    /// Opening it.
    pub(crate) fails: i32,
    pub(crate) attributes_fail: i32,
    pub(crate) gids_fail: i32,
    pub(crate) ports: Vec<Port>,
    /// Queue pairs, completion queues and registered regions that a process can have.
    pub(crate) max_qp: u32,
    pub(crate) max_cq: u32,
    pub(crate) max_mr: u32,
    /// Requests that a queue holds, pieces that one has, and bytes that it carries inline.
    pub(crate) max_qp_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
    /// Completions that a queue holds.
    pub(crate) max_cqe: u32,
    /// READs of a queue pair that are answered, and that are asked, at the same time.
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_init_rd_atomic: u8,
    /// Whether it has windows of type 2B.
    pub(crate) windows: bool,
    /// Bytes that a process may pin; 0: any number.
    pub(crate) max_pinned: u64,
    /// Whether seven retries are retries without end, as on Soft-RoCE.
    pub(crate) seven_is_for_ever: bool,
}

impl Default for Device {
    fn default() -> Self {
        Device {
            name: String::new(),
            transport: 0,
            fails: 0,
            attributes_fail: 0,
            gids_fail: 0,
            ports: Vec::new(),
            max_qp: 4096,
            max_cq: 4096,
            max_mr: 1 << 16,
            max_qp_wr: 16384,
            max_sge: 16,
            max_inline: 220,
            max_cqe: 1 << 16,
            max_rd_atomic: 16,
            max_init_rd_atomic: 16,
            windows: true,
            max_pinned: 0,
            seven_is_for_ever: false,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Port {
    /// Asking it.
    pub(crate) fails: i32,
    /// As the header counts them: 1 is down, 4 is active.
    pub(crate) state: u32,
    /// 1 is InfiniBand, 2 is Ethernet.
    pub(crate) layer: u8,
    /// In bytes; what is no MTU is told as the number 0.
    pub(crate) mtu: u32,
    pub(crate) max_mtu: u32,
    pub(crate) max_message: u32,
    /// The network that it is on: ports reach each other where this is the same number.
    pub(crate) rail: u32,
    pub(crate) gids: Vec<Gid>,
}

impl Default for Port {
    fn default() -> Self {
        let gids = Vec::new();
        let (mtu, max_mtu, max_message) = (4096, 4096, 1 << 30);
        Port { fails: 0, state: 4, layer: 2, mtu, max_mtu, max_message, rail: 0, gids }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gid {
    pub(crate) index: u32,
    #[serde(default)]
    pub(crate) kind: Kind,
    pub(crate) address: IpAddr,
    /// The number of its interface.
    #[serde(default)]
    pub(crate) interface: u32,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Ib,
    RoceV1,
    #[default]
    RoceV2,
}

/// The host of this process. It stays what it was when it was first asked for.
pub(crate) fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| match std::env::var(VARIABLE) {
        Err(_) => Host::default(),
        Ok(text) => serde_json::from_str(&text).unwrap_or_else(|error| {
            crate::complain(&format!("{VARIABLE}: {error}"));
            Host { fails: libc::EINVAL, ..Host::default() }
        }),
    })
}

/// An MTU as the header counts them.
pub(crate) fn mtu(bytes: u32) -> u32 {
    (1..=5).find(|code| 128 << code == bytes).unwrap_or(0)
}

/// An entry of the table of addresses.
pub(crate) fn entry(port: u32, told: &Gid) -> IbvGidEntry {
    let address = match told.address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let gid_type = match told.kind {
        Kind::Ib => 0,
        Kind::RoceV1 => 1,
        Kind::RoceV2 => 2,
    };
    let gid = IbvGid { raw: address.octets() };
    IbvGidEntry { gid, gid_index: told.index, port_num: port, gid_type, ndev_ifindex: told.interface }
}
