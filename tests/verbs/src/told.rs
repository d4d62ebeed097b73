//! The host that a test describes in `ALLSTREAM_TEST_VERBS`.

use std::net::IpAddr;
use std::sync::OnceLock;

use allstream_sys::verbs::{IbvGid, IbvGidEntry};
use serde::Deserialize;

const VARIABLE: &str = "ALLSTREAM_TEST_VERBS";

/// The host. Each field `fails`, here and below, is the `errno` with which the call that its comment names fails; 0: it does not.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Host {
    /// `ibv_get_device_list`.
    pub(crate) fails: i32,
    pub(crate) devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// As in the C header: 0 is InfiniBand and RoCE, 1 is iWARP.
    pub(crate) transport: i32,
    /// `ibv_open_device`; the two fields below are for `ibv_query_device` and for the query of the table of addresses.
    pub(crate) fails: i32,
    pub(crate) attributes_fail: i32,
    pub(crate) gids_fail: i32,
    pub(crate) ports: Vec<Port>,
    /// How many queue pairs, completion queues and registered regions a process can have.
    pub(crate) max_qp: u32,
    pub(crate) max_cq: u32,
    pub(crate) max_mr: u32,
    /// How many requests a queue holds, how many pieces a request has, and how many bytes it carries inline, at most.
    pub(crate) max_qp_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
    /// How many completions a queue holds at most.
    pub(crate) max_cqe: u32,
    /// How many READs a queue pair answers at the same time, and (`max_init_rd_atomic`) how many it sends.
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_init_rd_atomic: u8,
    /// Whether the device has memory windows of type 2B.
    pub(crate) windows: bool,
    /// How many bytes a process may pin; 0: any number.
    pub(crate) max_pinned: u64,
    /// Once a process has asked the device to carry so many bytes, the device's ports are down for that process; 0: they never go down.
    pub(crate) most_bytes: u64,
    /// Whether a retry count of 7 means that retries never end, as on Soft-RoCE.
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
            most_bytes: 0,
            seven_is_for_ever: false,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Port {
    /// `ibv_query_port`.
    pub(crate) fails: i32,
    /// As in the C header: 1 is down, 4 is active.
    pub(crate) state: u32,
    /// 1 is InfiniBand, 2 is Ethernet.
    pub(crate) layer: u8,
    /// In bytes. If this is no valid MTU, programs get the code 0.
    pub(crate) mtu: u32,
    pub(crate) max_mtu: u32,
    pub(crate) max_message: u32,
    /// The network of the port: ports with the same number reach each other.
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
    /// The index of the address's network interface.
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

/// The host of this process. The variable is read only once.
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

/// The code of an MTU in the C header; 0: there is no such MTU.
pub(crate) fn mtu(bytes: u32) -> u32 {
    (1..=5).find(|code| 128 << code == bytes).unwrap_or(0)
}

/// The entry of a port's table of addresses.
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
