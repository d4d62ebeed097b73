//! [`Address`]: where ranks meet, as a user or a launcher writes it.

use std::fmt;
use std::net::Ipv6Addr;

/// `host:port`; an IPv6 address stands in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Address {
    /// Parses `host:port`, `[::1]:port`, with or without `tcp://` before it.
    pub(super) fn parse(text: &str) -> Result<Address, String> {
        let wanted = || format!("expected tcp://HOST:PORT (an IPv6 address in brackets), found `{text}`");
        let rest = match text.split_once("://") {
            Some(("tcp", rest)) => rest,
            Some((scheme, _)) => return Err(format!("{}: `{scheme}` is not supported, `tcp` is", wanted())),
            None => text,
        };
        let (host, port) = rest.trim_end_matches('/').rsplit_once(':').ok_or_else(wanted)?;
        Ok(Address {
            host: host_name(host).map_err(|e| format!("{}: {e}", wanted()))?,
            port: port_number(port).map_err(|e| format!("{}: {e}", wanted()))?,
        })
    }
}

/// A host name or an address; an IPv6 address must be in brackets where a port follows.
pub(super) fn host_name(text: &str) -> Result<String, String> {
    let (inner, bracketed) = match text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        Some(inner) => (inner, true),
        None => (text, false),
    };
    if inner.is_empty() {
        return Err("the host is empty".into());
    }
    let bare = inner.split('%').next().unwrap_or(inner);
    if bracketed && bare.parse::<Ipv6Addr>().is_err() {
        return Err(format!("`{inner}` is not an IPv6 address"));
    }
    if !bracketed && inner.contains(':') {
        return Err(format!("an IPv6 address is written in brackets: [{inner}]"));
    }
    if inner.chars().any(|c| c.is_whitespace() || c.is_control() || "/@[]".contains(c)) {
        return Err(format!("`{inner}` is not a host name"));
    }
    Ok(inner.into())
}

pub(super) fn port_number(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(0) => Err("port 0 cannot be known to the other ranks".into()),
        Ok(port) => Ok(port),
        Err(_) => Err(format!("`{text}` is not a port (1 to 65535)")),
    }
}
