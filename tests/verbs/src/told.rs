//! The host that a test describes in `ALLSTREAM_TEST_VERBS`.

use std::net::IpAddr;
use std::sync::OnceLock;

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

#[derive(Debug, Default, Deserialize)]
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
    pub(crate) gids: Vec<Gid>,
}

impl Default for Port {
    fn default() -> Self {
        let gids = Vec::new();
        Port { fails: 0, state: 4, layer: 2, mtu: 4096, max_mtu: 4096, max_message: 1 << 30, gids }
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
