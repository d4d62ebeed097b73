//! Which hosts take how many ranks: `--hosts` and mpirun's host files.

use std::net::IpAddr;
use std::ops::Range;

/// A host, and how many ranks it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// The host as ssh accepts it: a name, `user@name`, or an address without brackets.
    pub(crate) name: String,
    /// At least 1.
    pub(crate) slots: usize,
}

impl Host {
    /// The name or address, without the user.
    pub(crate) fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, address)| address)
    }

    /// Whether this is the host that we run on (its name is `own`), so that no ssh is needed. With `user@` ssh is always used.
    pub(crate) fn is_here(&self, own: &str) -> bool {
        let short = |name: &str| name.split('.').next().unwrap_or(name).to_ascii_lowercase();
        let same = |name: &str| {
            // `node1` and `node1.cluster` are the same host, but `node1.a` and `node1.b` are two.
            let bare = !name.contains('.') || !own.contains('.');
            name.eq_ignore_ascii_case(own) || (bare && short(name) == short(own))
        };
        self.is_loopback() || (self.name.parse::<IpAddr>().is_err() && same(&self.name))
    }

    /// Whether the name is `localhost` or a loopback address, and so means another host on each host.
    pub(crate) fn is_loopback(&self) -> bool {
        self.name.eq_ignore_ascii_case("localhost")
            || self.name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

/// Reads `host1:4,user@host2:4,[::1]:2,host3`; without a number a host takes one rank.
pub(crate) fn list(text: &str) -> Result<Vec<Host>, String> {
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    let hosts = entries.map(entry).collect::<Result<Vec<_>, _>>()?;
    if hosts.is_empty() {
        return Err("no host; expected HOST:SLOTS,HOST:SLOTS,...".into());
    }
    Ok(merged(hosts))
}

/// Reads a host file: one host in each line, followed by `slots=4`, `:4` or neither; `#` begins a comment. `max_slots` is
/// allowed and has no effect, as a host never gets more ranks than slots.
pub(crate) fn file(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().replace('=', " = ");
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        let host = entry(first).and_then(|mut host| {
            while let Some(key) = words.next() {
                let (Some("="), Some(value)) = (words.next(), words.next()) else {
                    return Err(format!("`{key}` has no value; expected slots=N"));
                };
                match key {
                    "slots" => host.slots = count(value)?,
                    "max_slots" | "max-slots" => {
                        count(value)?;
                    }
                    _ => return Err(format!("`{key}` is not known; expected slots=N")),
                }
            }
            Ok(host)
        });
        hosts.push(host.map_err(|problem| format!("line {}: {problem}", number + 1))?);
    }
    if hosts.is_empty() {
        return Err("it names no host".into());
    }
    Ok(merged(hosts))
}

fn entry(text: &str) -> Result<Host, String> {
    let literal = text.parse::<IpAddr>().is_ok();
    let (name, slots) = match text.rsplit_once(':') {
        // An IP address without brackets: its colons separate no number.
        _ if literal => (text, 1),
        Some((name, slots)) if !slots.ends_with(']') => (name, count(slots)?),
        _ => (text, 1),
    };
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let known = |c: char| c.is_ascii_alphanumeric() || "@.-_".contains(c);
    // A name that begins with `-` would be an option of ssh.
    if bare.parse::<IpAddr>().is_err()
        && (bare.is_empty() || bare.starts_with(['-', '@']) || !bare.chars().all(known))
    {
        return Err(format!("`{text}` is not a host; expected HOST or HOST:SLOTS, such as node1:4"));
    }
    Ok(Host { name: bare.into(), slots })
}

fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(format!("`{text}` is not a number of ranks (1 or more)")),
    }
}

/// A host that is named several times gets the sum of its slots.
fn merged(hosts: Vec<Host>) -> Vec<Host> {
    let mut all: Vec<Host> = Vec::new();
    for host in hosts {
        match all.iter_mut().find(|known| known.name == host.name) {
            Some(known) => known.slots = known.slots.saturating_add(host.slots),
            None => all.push(host),
        }
    }
    all
}

/// Which ranks each host gets: the hosts are filled in their order, with `ranks` ranks in all (`None`: as many as there are slots). A host
/// that gets no rank is left out.
pub(crate) fn placed(hosts: &[Host], ranks: Option<usize>) -> Result<Vec<(Host, Range<usize>)>, String> {
    let slots = hosts.iter().fold(0usize, |sum, host| sum.saturating_add(host.slots));
    let ranks = ranks.unwrap_or(slots);
    if ranks > slots {
        return Err(format!(
            "{ranks} ranks do not fit {slots} slots; give the hosts more (HOST:SLOTS, or slots=N in a host file)"
        ));
    }
    let mut next = 0;
    let mut placed = Vec::new();
    for host in hosts {
        let count = host.slots.min(ranks - next);
        if count > 0 {
            placed.push((host.clone(), next..next + count));
        }
        next += count;
    }
    Ok(placed)
}

/// Quotes a text for a POSIX shell, so that the shell reads it as one word with exactly these bytes.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, slots: usize) -> Host {
        Host { name: name.into(), slots }
    }

    #[test]
    fn lists_of_hosts() {
        let read = |text: &str| list(text).unwrap();
        assert_eq!(read("a:4,b:2"), [host("a", 4), host("b", 2)]);
        assert_eq!(read(" a , me@b.c:2,"), [host("a", 1), host("me@b.c", 2)]);
        assert_eq!(
            read("[fe80::1]:3,::1,[::2],10.0.0.1:2"),
            [host("fe80::1", 3), host("::1", 1), host("::2", 1), host("10.0.0.1", 2)]
        );
        assert_eq!(read("a:1,b,a:2"), [host("a", 3), host("b", 1)]);
        for bad in ["", ",", "a:0", "a:x", ":4", "-oProxyCommand=x:1", "a b:1", "a;b", "@a", "a:-1", "$(x)"] {
            assert!(list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn host_files() {
        let text = "# the cluster\nnode1 slots=4 max_slots=8\n\nnode2 slots = 2 # two\nnode3:3\nnode4\n";
        let hosts = [host("node1", 4), host("node2", 2), host("node3", 3), host("node4", 1)];
        assert_eq!(file(text).unwrap(), hosts);
        for (bad, words) in [
            ("a slots=0", "line 1"),
            ("a\nb cores=4", "line 2: `cores`"),
            ("a slots", "`slots` has no value"),
            ("# nothing", "names no host"),
        ] {
            let error = file(bad).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn ranks_fill_hosts_in_order() {
        let hosts = [host("a", 2), host("b", 3), host("c", 1)];
        let ranges = |ranks| -> Vec<_> {
            placed(&hosts, ranks).unwrap().into_iter().map(|(host, ranks)| (host.name, ranks)).collect()
        };
        assert_eq!(ranges(None), [("a".into(), 0..2), ("b".into(), 2..5), ("c".into(), 5..6)]);
        assert_eq!(ranges(Some(3)), [("a".into(), 0..2), ("b".into(), 2..3)]);
        assert!(placed(&hosts, Some(7)).unwrap_err().contains("7 ranks do not fit 6 slots"));
    }

    #[test]
    fn this_host_is_known_by_its_names() {
        for name in ["localhost", "127.0.0.1", "127.1.2.3", "::1", "node1", "NODE1", "node1.cluster"] {
            assert!(host(name, 1).is_here("node1"), "{name}");
        }
        assert!(host("node1", 1).is_here("node1.cluster"));
        for name in ["node2", "10.0.0.1", "me@node1", "me@localhost", "node1.b"] {
            assert!(!host(name, 1).is_here("node1.a"), "{name}");
        }
        assert_eq!(host("me@node1", 1).address(), "node1");
    }

    #[test]
    fn words_for_a_shell() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
