//! How ranks reach each other, by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A class of links, by its name: what ranks choose, what tables are made for, what reports speak of. Between the ranks of a
/// group it is the class of the farthest two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkClass([u8; LinkClass::LONGEST]);

impl LinkClass {
    /// All are in one process.
    pub const INPROC: LinkClass = LinkClass::named("inproc");
    /// All are on one host, and share memory.
    pub const SHM: LinkClass = LinkClass::named("shm");
    /// TCP between some of them.
    pub const TCP: LinkClass = LinkClass::named("tcp");
    /// RDMA between some of them.
    pub const RDMA: LinkClass = LinkClass::named("rdma");

    const LONGEST: usize = 8;

    /// For constants: a name that is too long does not compile there.
    pub const fn named(name: &str) -> LinkClass {
        let mut bytes = [0; LinkClass::LONGEST];
        let (from, mut at) = (name.as_bytes(), 0);
        while at < from.len() {
            bytes[at] = from[at];
            at += 1;
        }
        LinkClass(bytes)
    }

    /// As on the command line.
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

    /// Whether there are such links is not asked here.
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
