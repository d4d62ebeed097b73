//! `allstream trace --pid`: asks the processes of a running job for their flight recorders.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use super::{Recording, parse};
use crate::launch::processes::{self, Process};

/// How long a process may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The flight recorders of all ranks in a process and in its descendants.
pub(super) fn ask(pid: u32) -> Result<Vec<Recording>, String> {
    let mut recordings = Vec::new();
    let mut asked = 0;
    for pid in with_children(pid) {
        let Some(socket) = connect(pid) else { continue };
        asked += 1;
        let problem = |problem: String| format!("process {pid}: {problem}");
        socket.set_read_timeout(Some(PATIENCE)).map_err(|e| problem(e.to_string()))?;
        for line in BufReader::new(socket).split(b'\n') {
            let line = line.map_err(|e| problem(format!("it does not answer: {e}")))?;
            recordings.push(parse(&line).map_err(problem)?);
        }
    }
    match (asked, recordings.is_empty()) {
        (0, _) => Err(format!(
            "neither process {pid} nor any that it started is in a world of allstream's, in this network namespace"
        )),
        (_, true) => Err(format!("process {pid} is another user's, or has just left its world")),
        _ => Ok(recordings),
    }
}

fn connect(pid: u32) -> Option<UnixStream> {
    let name = SocketAddr::from_abstract_name(format!("allstream-record-{pid}")).ok()?;
    UnixStream::connect_addr(&name).ok()
}

/// The process and all that descend from it, as far as the system tells.
fn with_children(pid: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for Process { pid: child, parent, .. } in processes::all() {
        let child = child.as_raw_nonzero().get().unsigned_abs();
        children.entry(parent.unsigned_abs()).or_default().push(child);
    }
    let mut all = vec![pid];
    let mut next = 0;
    while let Some(pid) = all.get(next).copied() {
        let new = children.get(&pid).into_iter().flatten().filter(|child| !all.contains(child));
        let new: Vec<u32> = new.copied().collect();
        all.extend(new);
        next += 1;
    }
    all
}
