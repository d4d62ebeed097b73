//! Watches over the processes of a job until all have ended. Decides what is done when one fails, and what the exit code is.

use std::io::{self, PipeWriter};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGSTOP, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH,
};

use super::event::Event;
use super::guard::Guard;
use super::member::{End, Kind, Member, peek_status};
use super::relay::{Stream, relay};
use super::signals::{self, SignalThread};
use super::{OnFailure, Policy, agent, complain, processes};

/// How long the launcher waits for a killed process to end. One that is stuck in the kernel may never end.
const KILL_TO_GIVE_UP: Duration = Duration::from_secs(5);
/// How long processes that ranks left behind may still write after the last rank has ended.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// How long the launcher still waits for an agent's greeting after the agent has ended.
const GREETING_IS_READ: Duration = Duration::from_millis(300);
/// How often the launcher checks whether processes that ranks left behind have ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What `start` returns to [`supervise`], beside the processes that it has started.
pub(super) struct Started<'a> {
    pub(super) streams: Vec<Stream>,
    pub(super) port_known: Option<PortKnown<'a>>,
}

/// Is called once rank 0's agent has told the port of the rendezvous.
pub(super) type PortKnown<'a> = Box<dyn FnOnce(&[Member], u16) -> io::Result<()> + 'a>;

/// Starts processes and watches over them until all have ended. `start` puts each process into the vector at once: if a later one does
/// not start, those in the vector are stopped.
pub(super) fn supervise<'a>(
    policy: Policy,
    events: &Sender<Event>,
    inbox: Receiver<Event>,
    start: impl FnOnce(&mut Vec<Member>, &mut Guard) -> io::Result<Started<'a>>,
) -> io::Result<Ended> {
    let _signals = SignalThread::start(events.clone())?;
    let mut guard = Guard::start()?;
    // When `stop` is dropped, the relay takes what is still in the ranks' pipes, and ends without waiting for more.
    let (stop_reader, stop) = io::pipe()?;
    let mut members = Vec::new();
    let started = start(&mut members, &mut guard);
    members.iter().for_each(|member| guard.watch(member.pid));
    let mut launcher = Launcher {
        members,
        inbox,
        phase: Phase::Running,
        codes: Codes::default(),
        relayed: false,
        policy,
        port_known: None,
        guard,
        events: events.clone(),
    };
    let relayed = started.and_then(|started| {
        launcher.port_known = started.port_known;
        let (streams, events) = (started.streams, events.clone());
        thread::Builder::new().name("relay".into()).spawn(move || {
            relay(streams, &stop_reader);
            let _ = events.send(Event::Relayed);
        })
    });
    if let Err(error) = relayed {
        launcher.kill_leftovers(true);
        launcher.reap();
        return Err(error);
    }
    launcher.wait_for_members();
    launcher.wait_for_what_they_started();
    launcher.wait_for_output(stop);
    launcher.reap();
    Ok(launcher.codes.ended(policy.on_failure))
}

/// What the launcher is doing, and until when.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    /// A rank failed; the others may end by themselves.
    Grace(Instant),
    /// The ranks have been told to end.
    Terminating(Instant),
    Killed(Instant),
}

/// What a job ended with.
pub(super) struct Ended {
    /// The exit code.
    pub(super) code: u8,
    /// A signal to the launcher ended the job.
    pub(super) signalled: bool,
}

/// What the exit code is computed from.
#[derive(Default)]
struct Codes {
    /// A signal to this process that ended the job.
    signal: Option<i32>,
    /// Whether such a signal has come at any time: then the job is not started anew.
    is_signalled: bool,
    /// Of the codes of processes that exited by themselves, before the launcher stopped them: the first other than 0, and the greatest.
    first: Option<i32>,
    worst: Option<i32>,
    /// The code of the first process that a signal killed, or to which the connection ended: 128 + signal, or ssh's code.
    lost: Option<i32>,
}

impl Codes {
    fn ended(&self, on_failure: OnFailure) -> Ended {
        let own = match on_failure {
            OnFailure::Stop => self.first,
            OnFailure::Keep => self.worst,
        };
        let code = self.signal.map(|signal| 128 + signal).or(own).or(self.lost).unwrap_or(0);
        Ended { code: u8::try_from(code).unwrap_or(1), signalled: self.is_signalled }
    }

    /// Whether a process has failed.
    fn any_failed(&self) -> bool {
        self.first.is_some() || self.lost.is_some()
    }

    fn own(&mut self, code: i32) {
        self.worst = self.worst.max(Some(code));
        if code != 0 {
            self.first.get_or_insert(code);
        }
    }
}

struct Launcher<'a> {
    members: Vec<Member>,
    inbox: Receiver<Event>,
    phase: Phase,
    codes: Codes,
    relayed: bool,
    policy: Policy,
    port_known: Option<PortKnown<'a>>,
    guard: Guard,
    /// For events that the launcher sends to itself later.
    events: Sender<Event>,
}

impl Launcher<'_> {
    fn wait_for_members(&mut self) {
        while self.members.iter().any(|member| !member.ended) {
            let event = match self.phase {
                Phase::Running => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Phase::Grace(until) | Phase::Terminating(until) | Phase::Killed(until) => {
                    self.inbox.recv_timeout(until.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended(member)) => self.ended(member),
                Ok(Event::Greeted { member, port }) => self.greeted(member, port),
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Ok(Event::Cut) => {
                    self.stopped_by(SIGHUP);
                    self.kill();
                }
                Ok(Event::Relayed) => self.relayed = true,
                Err(_) => match self.phase {
                    Phase::Running | Phase::Grace(_) => self.terminate(SIGTERM),
                    Phase::Terminating(_) => self.kill(),
                    Phase::Killed(_) => {
                        for member in self.members.iter().filter(|member| !member.ended) {
                            complain(&format!("{} did not end when killed", member.name()));
                        }
                        // For agents on other hosts this kills ssh, whose connection may be stuck.
                        self.signal_all(Signal::KILL);
                        return;
                    }
                },
            }
        }
    }

    /// Called after all members have ended. If they were told to end, waits for their children: a member may be a shell that has ended at
    /// once, while its child, the user's program, still writes a checkpoint.
    fn wait_for_what_they_started(&mut self) {
        while let Phase::Terminating(until) = self.phase {
            let now = Instant::now();
            if processes::living(&self.rank_sessions(), None).is_empty() {
                return;
            }
            if now >= until {
                return self.kill();
            }
            match self.inbox.recv_timeout(LOOK_EVERY.min(until - now)) {
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Ok(Event::Cut) => self.kill(),
                Ok(Event::Relayed) => self.relayed = true,
                Ok(Event::Ended(_) | Event::Greeted { .. }) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn rank_sessions(&self) -> Vec<Pid> {
        let ranks = self.members.iter().filter(|member| matches!(member.kind, Kind::Rank { .. }));
        ranks.map(|member| member.pid).collect()
    }

    /// Waits until all output is relayed. The ranks have ended, but processes that they started may hold their pipes open for ever.
    fn wait_for_output(&mut self, stop: PipeWriter) {
        let mut stop = Some(stop);
        let mut until = Instant::now() + LEFTOVERS;
        while !self.relayed {
            let event = if stop.is_some() {
                self.inbox.recv_timeout(until.saturating_duration_since(Instant::now()))
            } else {
                // The relay writes only what is in the pipes now, but the reader of the launcher's output may be slow.
                self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match event {
                Ok(Event::Relayed) => self.relayed = true,
                Ok(Event::Ended(_) | Event::Greeted { .. }) => {}
                Ok(Event::Signal(SIGCHLD)) => self.reap_orphans(),
                // No rank is left that could get the signal.
                Ok(Event::Signal(signal)) if !signals::ends(signal) => {}
                Ok(event @ (Event::Signal(_) | Event::Cut)) => {
                    let signal = if let Event::Signal(signal) = event { signal } else { SIGHUP };
                    self.codes.is_signalled = true;
                    if (self.codes.any_failed() || self.codes.signal.is_some()) && stop.is_none() {
                        break;
                    }
                    self.stopped_by(signal);
                    until = Instant::now();
                }
                Err(_) => {
                    self.kill_leftovers(false);
                    stop = None;
                }
            }
        }
        // Also ranks whose output is not relayed can leave processes. A process that has made its own session, to outlive the job, may live
        // on if the job has ended well.
        let ended_well = matches!(self.phase, Phase::Running) && !self.codes.any_failed();
        self.kill_leftovers(!ended_well);
    }

    fn ended(&mut self, member: usize) {
        let Some(state) = self.members.get_mut(member) else { return };
        // If its ranks ended at once, an agent may have ended before the relay has read its greeting: the event is sent again later.
        if state.has_ended_unheard() {
            let events = self.events.clone();
            let again = move || {
                thread::sleep(GREETING_IS_READ);
                let _ = events.send(Event::Ended(member));
            };
            if thread::Builder::new().stack_size(64 << 10).spawn(again).is_ok() {
                return;
            }
        }
        state.ended = true;
        // The launcher has stopped the members, so this one did not end by itself.
        if matches!(self.phase, Phase::Terminating(_) | Phase::Killed(_)) {
            return;
        }
        // The status is unknown only if somebody else has reaped the member: then it counts as code 1.
        let mut status = peek_status(state.pid).unwrap_or(ExitStatus::from_raw(1 << 8));
        if status.success() && state.is_unheard() {
            status = ExitStatus::from_raw(1 << 8);
        }
        let end = state.end(status);
        match end {
            End::Own(code) => self.codes.own(code),
            End::Lost(code) => _ = self.codes.lost.get_or_insert(code),
        }
        if matches!(end, End::Own(0)) {
            return;
        }
        state.failed = true;
        match (self.phase, self.policy.on_failure) {
            (Phase::Running, OnFailure::Stop) => self.stop_others(member, status, ""),
            (Phase::Running, OnFailure::Keep) => {
                let left: usize = self.members.iter().filter(|m| !m.failed).map(|m| m.ranks().len()).sum();
                let running = self.members.iter().any(|member| !member.ended);
                // Without rank 0's agent the other agents never hear where the ranks meet, and start none.
                let unstarted = self.port_known.is_some() && member == 0;
                if running && !unstarted && left >= self.policy.min_ranks {
                    let said = self.members[member].tell(status);
                    complain(&format!("{said}; the others work on ({left} ranks have not failed)"));
                } else {
                    let fewer = format!("{left} ranks are left, fewer than --min-ranks; ");
                    let why = match (running, unstarted) {
                        (false, _) => "",
                        (true, true) => "the ranks cannot meet without rank 0; ",
                        (true, false) => &fewer,
                    };
                    self.stop_others(member, status, why);
                }
            }
            _ => {}
        }
    }

    /// A member has failed, and the others are to end. They get the time of grace to report what they saw.
    fn stop_others(&mut self, member: usize, status: ExitStatus, why: &str) {
        let others = if matches!(self.members[member].kind, Kind::Rank { .. }) { "ranks" } else { "hosts" };
        let left = self.members.iter().any(|member| !member.ended);
        let rest = if left { format!("; {why}stopping the other {others}") } else { String::new() };
        complain(&format!("{}{rest}", self.members[member].tell(status)));
        // If no rank has started, there is nothing to report.
        let started = |member: &Member| !member.is_unheard();
        if self.members.iter().any(started) {
            self.phase = Phase::Grace(Instant::now() + self.policy.grace);
        } else {
            self.terminate(SIGTERM);
        }
    }

    /// A signal to this process ends the job. If ranks are already being stopped after a failure, the exit code still tells of the failure.
    fn stopped_by(&mut self, signal: i32) {
        self.codes.is_signalled = true;
        if matches!(self.phase, Phase::Running) {
            self.codes.signal.get_or_insert(signal);
        }
    }

    fn greeted(&mut self, member: usize, port: u16) {
        if let Some(Member { kind: Kind::Agent(agent), .. }) = self.members.get_mut(member) {
            agent.greeted = true;
        }
        if member != 0 || !matches!(self.phase, Phase::Running) {
            return;
        }
        if let Some(Err(error)) = self.port_known.take().map(|tell| tell(&self.members, port)) {
            complain(&format!("cannot tell the other hosts what to start: {error}"));
            self.codes.own(1);
            self.terminate(SIGTERM);
        }
    }

    fn signalled(&mut self, signal: i32) {
        match (signal, self.phase) {
            (SIGCHLD, _) => self.reap_orphans(),
            (SIGTSTP, _) => {
                self.hand_on(SIGSTOP);
                // Stops this process, as the terminal has asked. When SIGCONT wakes it, it hands SIGCONT to the ranks.
                let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
            }
            (SIGUSR1 | SIGUSR2 | SIGCONT | SIGWINCH | SIGSTOP, _) => self.hand_on(signal),
            (SIGINT | SIGTERM | SIGHUP, Phase::Running | Phase::Grace(_)) => {
                self.stopped_by(signal);
                // SIGHUP (the terminal has gone) ends the job as SIGTERM does, and more programs handle SIGTERM.
                self.terminate(if signal == SIGHUP { SIGTERM } else { signal });
            }
            // A second SIGINT or SIGTERM kills at once; not a second SIGHUP, as a terminal that goes away may send two.
            (SIGINT | SIGTERM, Phase::Terminating(_)) => {
                self.stopped_by(signal);
                self.kill();
            }
            (SIGHUP, Phase::Terminating(_)) | (SIGINT | SIGTERM | SIGHUP, Phase::Killed(_)) => {
                self.stopped_by(signal);
            }
            _ => {}
        }
    }

    /// Hands a signal that does not end the job to all ranks, on all hosts.
    fn hand_on(&self, signal: i32) {
        let Some(to_ranks) = Signal::from_named_raw(signal) else { return };
        let mut without_handler = Vec::new();
        for member in self.members.iter().filter(|member| !member.ended) {
            match &member.kind {
                Kind::Agent(agent) if agent.greeted => member.say(agent::signal(signal)),
                Kind::Agent(_) => {}
                Kind::Rank { rank, .. } if matches!(signal, SIGUSR1 | SIGUSR2) => {
                    let takers = processes::that_take(to_ranks, member.pid);
                    if takers.is_empty() {
                        without_handler.push(rank.to_string());
                    }
                    for pid in takers {
                        // Fails if the process has just ended.
                        let _ = rustix::process::kill_process(pid, to_ranks);
                    }
                }
                Kind::Rank { .. } => {
                    for pid in processes::living(&[member.pid], None) {
                        let _ = rustix::process::kill_process(pid, to_ranks);
                    }
                }
            }
        }
        if !without_handler.is_empty() {
            let (name, ranks) = (signals::name(signal), without_handler.join(", "));
            complain(&format!(
                "SIG{name} was not handed to rank {ranks}: without a handler for it a rank would end"
            ));
        }
    }

    /// Sends the ranks this signal, which tells them to end.
    fn terminate(&mut self, signal: i32) {
        let to_ranks = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
        for member in &self.members {
            match &member.kind {
                Kind::Agent(agent) if agent.greeted => member.say(agent::signal(signal)),
                // Without a greeting the connection may still be being made: this ends ssh, or the agent.
                Kind::Agent(_) => member.signal(Signal::TERM),
                Kind::Rank { .. } => {
                    member.signal(to_ranks);
                    // A stopped process would not handle the signal before it continues.
                    member.signal(Signal::CONT);
                }
            }
        }
        self.phase = Phase::Terminating(Instant::now() + self.policy.kill_after);
    }

    fn kill(&mut self) {
        for member in &mut self.members {
            match &mut member.kind {
                // Closes the agent's stdin, on whichever host the agent is: then the agent kills its ranks. Before the greeting there may be nobody
                // who reads that stdin, so such an agent's process is killed, as a rank's is.
                Kind::Agent(agent) if agent.greeted => drop(agent.orders.take()),
                _ => member.signal(Signal::KILL),
            }
        }
        // This is for the ranks of this host; agents do so for theirs when their stdin ends.
        self.guard.kill(&self.rank_sessions());
        self.phase = Phase::Killed(Instant::now() + KILL_TO_GIVE_UP);
    }

    /// Kills what ranks have left behind in their sessions; with `everything`, also the job's processes that have left these sessions.
    fn kill_leftovers(&self, everything: bool) {
        self.signal_all(Signal::KILL);
        let sessions: Vec<Pid> = self.members.iter().map(|member| member.pid).collect();
        if everything {
            self.guard.kill(&sessions);
        } else {
            processes::kill(&sessions, None);
        }
    }

    /// If the launcher is process 1 of a container, it becomes the parent of all processes whose own parent has ended, and has to reap them.
    fn reap_orphans(&self) {
        let own = rustix::process::getpid();
        if !own.is_init() {
            return;
        }
        let is_ours = |pid| self.guard.is(pid) || self.members.iter().any(|member| member.pid == pid);
        let dead = processes::all().into_iter().filter(|process| process.is_zombie && process.parent == 1);
        for process in dead.filter(|process| !is_ours(process.pid)) {
            let _ = rustix::process::waitid(
                WaitId::Pid(process.pid),
                WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
            );
        }
    }

    fn signal_all(&self, signal: Signal) {
        self.members.iter().for_each(|member| member.signal(signal));
    }

    fn reap(&mut self) {
        for member in &mut self.members {
            // Half a second at most: a member that could not be killed is left to init.
            let until = Instant::now() + Duration::from_millis(if member.ended { 0 } else { 500 });
            while matches!(member.child.try_wait(), Ok(None)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
