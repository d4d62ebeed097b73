//! A process that the launcher started: a rank, or the agent of a host.

use std::io;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::agent;
use super::event::Event;
use super::stdin::Sink;

/// The exit code of ssh when its connection has failed; otherwise ssh exits with the command's code.
const SSH_ENDED: i32 = 255;

/// How a process ended.
pub(super) enum End {
    /// By itself, with this code.
    Own(i32),
    /// Not by itself: a signal ended the process (or, as an agent's exit code says, one of the agent's ranks), or the connection to the
    /// agent ended. The code is 128 + signal, or ssh's.
    Lost(i32),
}

/// A process that the launcher started.
pub(super) struct Member {
    pub(super) child: Child,
    /// Also its process group, as long as the child has not been reaped.
    pub(super) pid: Pid,
    pub(super) ended: bool,
    /// It has not ended well.
    pub(super) failed: bool,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    Rank {
        rank: usize,
        host: Option<String>,
    },
    /// The agent of a host, which starts the ranks there.
    Agent(Agent),
}

pub(super) struct Agent {
    pub(super) host: String,
    pub(super) ranks: Range<usize>,
    /// A thread writes to the agent's stdin what is sent here. Dropping this makes that thread close the agent's stdin: the sinks of
    /// [`Member::stdin_sink`] hold the sender only while they send.
    pub(super) orders: Option<Arc<Sender<Said>>>,
    pub(super) greeted: bool,
    /// The agent has ended, and its greeting may still be on its way.
    pub(super) may_have_greeted: bool,
}

/// What an agent is told.
pub(super) struct Said {
    pub(super) bytes: Vec<u8>,
    /// Is told when the bytes have been written.
    pub(super) written: Option<Sender<()>>,
}

impl Member {
    /// Sends a line to an agent. An agent that has ended does not read it.
    pub(super) fn say(&self, line: Vec<u8>) {
        if let Kind::Agent(Agent { orders: Some(orders), .. }) = &self.kind {
            let _ = orders.send(Said { bytes: line, written: None });
        }
    }

    /// A sink that hands the launcher's stdin to an agent: a call returns once the connection has taken the piece. `None`: it is no agent.
    pub(super) fn stdin_sink(&self) -> Option<Sink> {
        let Kind::Agent(Agent { orders: Some(orders), .. }) = &self.kind else { return None };
        let orders = Arc::downgrade(orders);
        Some(Box::new(move |piece| {
            let (written, is_written) = mpsc::channel();
            let said = Said { bytes: agent::stdin(piece), written: Some(written) };
            let sent = orders.upgrade().is_some_and(|orders| orders.send(said).is_ok());
            sent && is_written.recv().is_ok()
        }))
    }

    /// Signals its process group, also when the member itself has ended: processes that it started may still live in the group. The
    /// member is not reaped yet, so the group's number cannot belong to anybody else.
    pub(super) fn signal(&self, signal: Signal) {
        // Fails only if there is nobody left to signal.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    /// Ranks that end with it.
    pub(super) fn ranks(&self) -> Range<usize> {
        match &self.kind {
            Kind::Rank { rank, .. } => *rank..rank + 1,
            Kind::Agent(agent) => agent.ranks.clone(),
        }
    }

    /// Whether it is an agent whose greeting has not come: as far as is known, it has started no rank.
    pub(super) fn is_unheard(&self) -> bool {
        matches!(&self.kind, Kind::Agent(agent) if !agent.greeted)
    }

    /// To be called when the member has ended. Returns whether it is an agent whose greeting has not come, and this is the first call.
    pub(super) fn has_ended_unheard(&mut self) -> bool {
        match &mut self.kind {
            Kind::Agent(agent) if !agent.greeted => !std::mem::replace(&mut agent.may_have_greeted, true),
            _ => false,
        }
    }

    /// How the member ended. An agent exits with the code that its ranks have come to; if the connection ends before, ssh exits with `SSH_ENDED`.
    pub(super) fn end(&self, status: ExitStatus) -> End {
        match (status.code(), &self.kind) {
            (Some(code), Kind::Agent(_)) if code == SSH_ENDED || code > 128 => End::Lost(code),
            (Some(code), _) => End::Own(code),
            (None, _) => End::Lost(status.signal().map_or(1, |signal| 128 + signal)),
        }
    }

    /// A text that says that it has failed, and how.
    pub(super) fn tell(&self, status: ExitStatus) -> String {
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => format!("ended: {status}"),
        };
        let why = match &self.kind {
            Kind::Agent(agent) if !agent.greeted => {
                " before a rank had started there (can it be reached without a password, and is this version of \
                 allstream where --remote-bin says?)"
            }
            _ => "",
        };
        format!("{} {how}{why}", self.name())
    }

    /// Its name in messages.
    pub(super) fn name(&self) -> String {
        let pid = self.pid;
        match &self.kind {
            Kind::Rank { rank, host: None } => format!("rank {rank} (pid {pid})"),
            Kind::Rank { rank, host: Some(host) } => format!("rank {rank} on {host} (pid {pid})"),
            Kind::Agent(Agent { host, ranks, .. }) if ranks.len() == 1 => {
                format!("host {host} (rank {})", ranks.start)
            }
            Kind::Agent(Agent { host, ranks, .. }) => {
                format!("host {host} (ranks {} to {})", ranks.start, ranks.end.saturating_sub(1))
            }
        }
    }
}

/// Waits until a child has ended, and says how, without reaping it.
pub(super) fn peek_status(pid: Pid) -> io::Result<ExitStatus> {
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => {
                // As wait(2) packs it: the exit code in the second byte, or the signal in the first.
                let packed = match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => (code & 0xff) << 8,
                    (None, Some(signal)) => signal,
                    (None, None) => 1 << 8,
                };
                return Ok(ExitStatus::from_raw(packed));
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Adds a child to the members, and starts a thread that sends [`Event::Ended`] when the child has ended.
pub(super) fn watch(
    members: &mut Vec<Member>,
    child: Child,
    kind: Kind,
    events: &Sender<Event>,
) -> io::Result<()> {
    let pid = Pid::from_child(&child);
    let member = members.len();
    members.push(Member { child, pid, ended: false, failed: false, kind });
    let events = events.clone();
    thread::Builder::new().name(format!("waits for {member}")).stack_size(64 << 10).spawn(move || {
        let _ = peek_status(pid);
        let _ = events.send(Event::Ended(member));
    })?;
    Ok(())
}
