//! [`LinkChoice`]: which links the ranks of a world may use.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::link::kinds;
use crate::types::LinkClass;

/// Which links the ranks of a world may use. All ranks must choose alike. Written as `auto` or as the name of a class.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LinkChoice(Option<LinkClass>);

impl LinkChoice {
    /// For each two ranks the nearest link: within a process its own memory, within a host shared memory; between hosts RDMA if all hosts have it and
    /// messages get through, otherwise TCP.
    pub const AUTO: LinkChoice = LinkChoice(None);
    /// The process's own memory. An error if not all ranks are in one process.
    pub const INPROC: LinkChoice = LinkChoice(Some(LinkClass::INPROC));
    /// Shared memory between all ranks, also those of one process. An error if not all ranks are on one host.
    pub const SHM: LinkChoice = LinkChoice(Some(LinkClass::SHM));
    /// TCP between all ranks.
    pub const TCP: LinkChoice = LinkChoice(Some(LinkClass::TCP));
    /// RDMA between all ranks, also those of one host. An error if a host has none.
    pub const RDMA: LinkChoice = LinkChoice(Some(LinkClass::RDMA));

    /// The class that all ranks use. `None`: each two ranks use the nearest.
    pub fn class(self) -> Option<LinkClass> {
        self.0
    }
}

impl From<LinkClass> for LinkChoice {
    fn from(class: LinkClass) -> LinkChoice {
        LinkChoice(Some(class))
    }
}

impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.as_ref().map_or("auto", LinkClass::name))
    }
}

impl fmt::Debug for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for LinkChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<LinkChoice, String> {
        let name = text.trim().to_ascii_lowercase();
        if name == "auto" {
            return Ok(LinkChoice::AUTO);
        }
        let known = name.parse().ok().filter(|class| kinds::of(*class).is_some());
        known.map(|class| LinkChoice(Some(class))).ok_or_else(|| format!("expected auto, {}", kinds::names()))
    }
}
