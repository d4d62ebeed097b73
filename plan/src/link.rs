//! How ranks reach each other, by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The name of a class of links. Users choose links by it, each row of a tuning table is for one class, and reports name it. The
/// class of a group is that of the link between the two ranks that are farthest apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkClass([u8; LinkClass::LONGEST]);

impl LinkClass {
    /// All ranks are in one process.
    pub const INPROC: LinkClass = LinkClass::named("inproc");
    /// All ranks are on one host, and share memory.
    pub const SHM: LinkClass = LinkClass::named("shm");
    /// TCP between some ranks.
    pub const TCP: LinkClass = LinkClass::named("tcp");
    /// RDMA between some ranks.
    pub const RDMA: LinkClass = LinkClass::named("rdma");

    const LONGEST: usize = 8;

    /// The class with this name. A name of more than 8 bytes panics; in a constant it does not compile.
    pub const fn named(name: &str) -> LinkClass {
        let mut bytes = [0; LinkClass::LONGEST];
        let (from, mut at) = (name.as_bytes(), 0);
        while at < from.len() {
            bytes[at] = from[at];
            at += 1;
        }
        LinkClass(bytes)
    }

    /// The name, as on the command line.
    pub fn name(&self) -> &str {
        let len = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        std::str::from_utf8(&self.0[..len]).unwrap_or_default()
    }
}

impl fmt::Display for LinkClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for LinkClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for LinkClass {
    type Err = String;

    /// Accepts every well-formed name, whether or not there are links of that class.
    fn from_str(name: &str) -> Result<LinkClass, String> {
        let is_name = (1..=Self::LONGEST).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if is_name { Ok(LinkClass::named(name)) } else { Err(format!("`{name}` names no class of links")) }
    }
}

impl Serialize for LinkClass {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name())
    }
}

impl<'d> Deserialize<'d> for LinkClass {
    fn deserialize<D: Deserializer<'d>>(from: D) -> Result<LinkClass, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}
