//! What the user has asked of RDMA by environment variables: which devices and addresses to use, and the settings of queue pairs.

use std::fmt;

pub(crate) const DEVICE: &str = "ALLSTREAM_RDMA_DEVICE";
pub(crate) const GID: &str = "ALLSTREAM_RDMA_GID";
const TIMEOUT: &str = "ALLSTREAM_RDMA_TIMEOUT";
const RETRY: &str = "ALLSTREAM_RDMA_RETRY";
const TRAFFIC_CLASS: &str = "ALLSTREAM_RDMA_TC";
const SERVICE_LEVEL: &str = "ALLSTREAM_RDMA_SL";
const PKEY: &str = "ALLSTREAM_RDMA_PKEY";
pub(super) const MEMORY: &str = "ALLSTREAM_RDMA_MEMORY";

/// What the user has asked for; nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(crate) devices: Option<Named>,
    /// The index of the address to use on each port.
    pub(crate) gid: Option<u32>,
    /// After how long an unacknowledged packet is sent again: 4.096 us, doubled so many times. 0: never.
    pub(crate) timeout: Option<u8>,
    /// How many times it is sent again before the connection counts as broken.
    pub(crate) retry: Option<u8>,
    /// The byte by which networks give some packets priority: of RoCE packets, and of InfiniBand packets between subnets.
    pub(crate) traffic_class: Option<u8>,
    /// The number by which an InfiniBand subnet, or for RoCE a VLAN, gives some packets priority.
    pub(crate) service_level: Option<u8>,
    /// The index of the partition key in the port's table.
    pub(crate) pkey: Option<u16>,
    /// Bytes of memory that a rank may register for what its peers send. Once they are used up, new links are narrow.
    pub(crate) memory: Option<usize>,
}

/// Which devices: these in this order, or all but these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) all_but: bool,
    pub(crate) names: Vec<Name>,
}

/// A device, or one port of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) device: String,
    pub(crate) port: Option<u8>,
}

impl Name {
    pub(crate) fn means(&self, device: &str, port: u8) -> bool {
        self.device == device && self.port.is_none_or(|own| own == port)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.device),
            None => f.write_str(&self.device),
        }
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in self.names.iter().enumerate() {
            let before = if at > 0 {
                ","
            } else if self.all_but {
                "^"
            } else {
                ""
            };
            write!(f, "{before}{name}")?;
        }
        Ok(())
    }
}

impl Wishes {
    /// Reads the variables by `get`. An empty one counts as not set.
    ///
    /// # Errors
    /// A variable cannot be understood: its name and value, and what was expected.
    pub(crate) fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Wishes, String> {
        let get = |name| get(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let devices = get(DEVICE).map(|text| {
            named(&text).map_err(|problem| {
                format!(
                    "{DEVICE} is `{text}`: {problem}; expected names of devices as `ibv_devices` lists them, each with a port if need be \
                     (`mlx5_0`, `mlx5_0,mlx5_1:1`), or `^` before them for all but those"
                )
            })
        });
        let gid = get(GID).map(|text| {
            let index = text.parse::<u32>().ok();
            index.ok_or_else(|| {
                format!("{GID} is `{text}`; expected the index of an address of the port's, such as 3")
            })
        });
        let memory = get(MEMORY).map(|text| {
            let bytes = text.parse::<usize>().ok().and_then(|mib| mib.checked_mul(1 << 20));
            bytes.ok_or_else(|| format!("{MEMORY} is `{text}`; expected MiB of memory, such as 40"))
        });
        let number = |name, most: u16, what: &str| {
            let Some(text) = get(name) else { return Ok(None) };
            let number = text.parse::<u16>().ok().filter(|number| *number <= most);
            number.map(Some).ok_or_else(|| format!("{name} is `{text}`; expected {what}, from 0 to {most}"))
        };
        let small = |name, most: u8, what| {
            let number = number(name, most.into(), what)?;
            Ok::<_, String>(number.and_then(|number| u8::try_from(number).ok()))
        };
        Ok(Wishes {
            devices: devices.transpose()?,
            gid: gid.transpose()?,
            timeout: small(TIMEOUT, 31, "the code of a time (4.096 us, doubled so often)")?,
            retry: small(RETRY, 7, "how often a packet is sent again")?,
            traffic_class: small(TRAFFIC_CLASS, 255, "a traffic class")?,
            service_level: small(SERVICE_LEVEL, 15, "a service level")?,
            pkey: number(PKEY, u16::MAX, "the index of a partition key")?,
            memory: memory.transpose()?,
        })
    }
}

impl Wishes {
    /// Whether the user has named a device or an address to use, rather than only devices to leave out.
    pub(crate) fn names_a_port(&self) -> bool {
        self.gid.is_some() || self.devices.as_ref().is_some_and(|named| !named.all_but)
    }
}

fn named(text: &str) -> Result<Named, String> {
    let (all_but, list) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
    let names = list.split(',').map(str::trim).map(|name| {
        let (device, port) = match name.split_once(':') {
            None => (name, None),
            Some((device, port)) => {
                let number = port.parse::<u8>().ok().filter(|number| *number > 0);
                (
                    device,
                    Some(number.ok_or_else(|| format!("`{port}` is no port, which are counted from 1"))?),
                )
            }
        };
        match device {
            "" => Err("a name is empty".to_owned()),
            device if device.contains(['^', '=', '/']) || device.contains(char::is_whitespace) => {
                Err(format!("`{device}` is no name of a device"))
            }
            device => Ok(Name { device: device.to_owned(), port }),
        }
    });
    Ok(Named { all_but, names: names.collect::<Result<_, _>>()? })
}
