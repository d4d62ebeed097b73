//! What the environment says for every communicator of a world.

use std::str::FromStr;
use std::time::Duration;

use super::pool;
use crate::error::Error;
use crate::types::Algo;

/// Settings that the environment gives every communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) timeout: Duration,
    pub(crate) algo: Algo,
    pub(crate) deterministic: bool,
    /// Idle communicators that a world keeps.
    pub(crate) pool: usize,
    pub(crate) nccl: NcclUse,
}

/// `ALLSTREAM_NCCL`: whether communicators that are bound to devices use NCCL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum NcclUse {
    /// As the program says: `bind_nccl` uses it, `bind_device` does not.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always: `bind_device` uses it, too.
    Require,
}

impl FromStr for NcclUse {
    type Err = String;

    fn from_str(text: &str) -> Result<NcclUse, String> {
        match text {
            "auto" => Ok(NcclUse::Auto),
            "off" => Ok(NcclUse::Off),
            "require" => Ok(NcclUse::Require),
            other => Err(format!(
                "{other:?}: expected auto (bind_nccl takes NCCL, bind_device does not), off (neither does) or require (both do)"
            )),
        }
    }
}

/// The value of a variable, parsed, if it is set and not empty. An error names the variable.
fn variable<T>(name: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<Option<T>, Error> {
    let said = std::env::var(name).ok().filter(|text| !text.is_empty());
    said.map(|text| parse(text.trim()).map_err(|problem| Error::invalid(name, problem))).transpose()
}

impl Defaults {
    pub(crate) fn from_env() -> Result<Defaults, Error> {
        let seconds = |text: &str| {
            let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            time.filter(|d| !d.is_zero())
                .ok_or_else(|| format!("{text:?} is not a number of seconds above 0"))
        };
        let switch = |text: &str| match text {
            "" | "0" => Ok(false),
            "1" => Ok(true),
            other => Err(format!("{other:?}: expected 1 (on) or 0 (off)")),
        };
        let number = |text: &str| {
            let problem = |_| format!("{text:?} is not a number of idle communicators to keep (0: none)");
            text.parse().map_err(problem)
        };
        Ok(Defaults {
            timeout: variable("ALLSTREAM_TIMEOUT", seconds)?.unwrap_or(Duration::from_secs(300)),
            algo: variable("ALLSTREAM_ALGO", str::parse)?.unwrap_or(Algo::Auto),
            deterministic: variable("ALLSTREAM_DETERMINISTIC", switch)?.unwrap_or(false),
            pool: variable("ALLSTREAM_POOL", number)?.unwrap_or(pool::CAPACITY),
            nccl: variable("ALLSTREAM_NCCL", str::parse)?.unwrap_or_default(),
        })
    }
}
