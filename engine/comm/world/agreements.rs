//! A rank's agreements ([`Comm::agree`](crate::Comm::agree)): what it has called, heard and decided on each of its communicators.

mod board;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;

use self::board::{Board, Out, Refusal, WINDOW};
use super::World;
use crate::error::{Error, Lost, Members};
use crate::exec::Endpoint;
use crate::forked;
use crate::group::message::{CommId, Message, Outcome, Step};
use crate::mem::Promise;
use crate::types::{Map, Rank};

/// This many messages of each rank, the last ones, are kept for communicators on which this rank has not called `agree` yet.
const EARLY: usize = 256;
/// The agreements of this many communicators are remembered. If there are more, those of communicators that nobody holds any more are forgotten.
const TABLES: usize = 1024;
/// After its deadline a rank listens for this long before it gives up: if its process was stopped, messages may be waiting.
const LISTEN: Duration = Duration::from_millis(20);

/// The outcome of an [`agree`](crate::Comm::agree): the same on every rank that gets one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Verdict {
    /// Whether every survivor's flag was `true`.
    pub flag: bool,
    /// The ranks whose flags were counted, ascending: alive when the verdict was made, or gone in peace after they had
    /// voted.
    pub survivors: Vec<Rank>,
    /// The ranks that died, fell silent or left before they had voted, ascending: all that are not survivors.
    pub lost: Vec<Rank>,
}

impl Verdict {
    fn new(size: usize, outcome: &Outcome) -> Verdict {
        let is_lost = |rank: &Rank| outcome.lost.iter().any(|(r, _)| r == rank);
        let (lost, survivors) = (0..size).partition(is_lost);
        Verdict { flag: outcome.flag, survivors, lost }
    }
}

/// What a caller gets.
pub(in crate::comm) type Answer = Result<Verdict, Error>;

/// A caller that has no answer yet.
struct Waiter {
    answer: Promise<Answer>,
    /// Ends the timer when it is dropped.
    _timer: oneshot::Sender<()>,
}

/// A communicator's agreements.
struct Table {
    board: Board,
    /// World rank of each member.
    members: Vec<Rank>,
    /// The members, as errors name them.
    named: Members,
    waiters: Map<u64, Waiter>,
    endpoint: Weak<Endpoint>,
    /// How many tables had been made when this one was made, itself included: a younger table has a larger number.
    made: u64,
}

/// What a rank said in a communicator's agreement: the communicator, the members that it knows lost, and its step.
type Early = (CommId, Vec<(Rank, Lost)>, Step);

/// A rank's agreements, of all its communicators.
#[derive(Default)]
pub(crate) struct Agreements {
    /// Ranks of the world that are gone, in the order heard.
    lost: Vec<(Rank, Lost)>,
    /// The tables of the communicators on which this rank has called `agree`. They outlive the communicators' handles, since slower members may
    /// still ask.
    tables: Map<CommId, Table>,
    /// By sender: what it said in the agreements of communicators on which this rank has not called `agree` yet.
    early: Map<Rank, VecDeque<Early>>,
    made: u64,
}

/// Answers to be given once no lock is held: a waker may call anything.
type Answers = Vec<(Promise<Answer>, Answer)>;

fn fill(answers: Answers) {
    for (promise, answer) in answers {
        promise.keep(answer);
    }
}

fn expelled(members: &Members, rank: Rank, how: Lost) -> Error {
    Error::lost(rank, how).among(members)
}

impl Agreements {
    /// The table of a communicator. If this is the first call, makes it, and takes in all that was heard before.
    fn table(&mut self, endpoint: &Arc<Endpoint>, comm: CommId, out: &mut Vec<Out>) -> &mut Table {
        let config = &endpoint.config;
        if !self.tables.contains_key(&comm) {
            self.forget();
        }
        let Agreements { lost, tables, early, made } = self;
        tables.entry(comm).or_insert_with(|| {
            let mut board = Board::new(config.rank, config.members.len());
            let place = |rank: &Rank| config.members.iter().position(|m| m == rank);
            for (from, messages) in early {
                let mine: VecDeque<Early>;
                (mine, *messages) = messages.drain(..).partition(|(c, ..)| *c == comm);
                for (_, lost, step) in mine {
                    if let Some(from) = place(from) {
                        board.hear(from, &lost, step, out);
                    }
                }
            }
            let lost: Vec<_> = lost.iter().filter_map(|(r, how)| place(r).map(|r| (r, *how))).collect();
            board.lose(&lost, out);
            *made += 1;
            Table {
                board,
                members: config.members.clone(),
                named: config.named(),
                waiters: Map::default(),
                endpoint: Arc::downgrade(endpoint),
                made: *made,
            }
        })
    }

    /// Makes room for one more table, if one can go.
    fn forget(&mut self) {
        if self.tables.len() < TABLES {
            return;
        }
        let idle = |t: &Table| t.endpoint.strong_count() == 0 && t.waiters.is_empty() && !t.board.is_open();
        let oldest =
            self.tables.iter().filter(|(_, t)| idle(t)).min_by_key(|(_, t)| t.made).map(|(id, _)| *id);
        if let Some(oldest) = oldest {
            self.tables.remove(&oldest);
        }
    }
}

impl Table {
    /// Does what the board says. The caller holds the lock of all tables, so that messages are sent in order. Returns the answers to be given.
    fn carry_out(&mut self, world: &World, comm: CommId, out: Vec<Out>) -> Answers {
        let mut answers = Answers::new();
        for out in out {
            match out {
                Out::Send { to, lost, step } => {
                    if let Some(&to) = self.members.get(to) {
                        world.send(to, Message::Agree { comm, lost, step });
                    }
                }
                Out::Decided { number, outcome } => {
                    if let Some(waiter) = self.waiters.remove(&number) {
                        answers.push((waiter.answer, Ok(Verdict::new(self.members.len(), &outcome))));
                    }
                }
                Out::Expelled(how) => {
                    let me = self.members.iter().position(|m| *m == world.rank).unwrap_or_default();
                    for (_, waiter) in self.waiters.drain() {
                        answers.push((waiter.answer, Err(expelled(&self.named, me, how))));
                    }
                }
            }
        }
        answers
    }
}

impl World {
    /// Votes in the next agreement of a communicator, or in the one by which its survivors make the communicator `shrunk`. Returns the promise of
    /// the answer.
    pub(in crate::comm) fn agree(
        self: &Arc<World>,
        endpoint: &Arc<Endpoint>,
        shrunk: Option<CommId>,
        flag: bool,
        timeout: Duration,
    ) -> Promise<Answer> {
        let promise = Promise::pending();
        let answers = match self.try_agree(endpoint, shrunk, flag, timeout, &promise) {
            Ok(answers) => answers,
            Err(error) => vec![(promise.clone(), Err(error))],
        };
        fill(answers);
        promise
    }

    fn try_agree(
        self: &Arc<World>,
        endpoint: &Arc<Endpoint>,
        shrunk: Option<CommId>,
        flag: bool,
        timeout: Duration,
        promise: &Promise<Answer>,
    ) -> Result<Answers, Error> {
        // A thread of the parent may have held the lock when this process was forked.
        forked::check()?;
        let (comm, mut out) = (shrunk.unwrap_or(CommId(endpoint.config.comm)), Vec::new());
        let mut all = self.losses.agreements.lock();
        let table = all.table(endpoint, comm, &mut out);
        let called = table.board.call(flag, &mut out);
        let mut timed = Ok(());
        if let Ok(number) = called {
            let (world, name) = (Arc::downgrade(self), endpoint.config.name.clone());
            let call = shrunk.map_or_else(|| format!("agree #{number}"), |_| "shrink".to_owned());
            let runtime = self.runtime.clone();
            let mut expires = Box::pin(async move {
                runtime.sleep(timeout).await;
                runtime.sleep(LISTEN).await;
                if let Some(world) = world.upgrade() {
                    world.agree_expired(comm, (call, name), number, timeout);
                }
            });
            let (_timer, mut answered) = oneshot::channel();
            let either = move |cx: &mut Context<'_>| match Pin::new(&mut answered).poll(cx) {
                Poll::Ready(_) => Poll::Ready(()),
                Poll::Pending => expires.as_mut().poll(cx),
            };
            // If there is no timer, the call fails. But its vote was cast, so `carry_out` still sends it to the other ranks.
            timed = self.runtime.spawn(Box::pin(poll_fn(either))).map(drop);
            if timed.is_ok() {
                table.waiters.insert(number, Waiter { answer: promise.clone(), _timer });
            }
        }
        let answers = table.carry_out(self, comm, out);
        match called {
            Ok(_) => timed.map(|()| answers),
            Err(Refusal::Expelled(how)) => Err(expelled(&endpoint.config.named(), endpoint.config.rank, how)),
            Err(Refusal::Full) => Err(Error::QueueFull { call: "agree".into(), limit: WINDOW as usize }),
        }
    }

    fn agree_expired(&self, id: CommId, (call, comm): (String, String), number: u64, after: Duration) {
        let given_up = {
            let mut all = self.losses.agreements.lock();
            let Some(table) = all.tables.get_mut(&id) else { return };
            let Some(waiter) = table.waiters.remove(&number) else { return };
            let rank = table.members.iter().position(|m| *m == self.rank).unwrap_or_default();
            let missing = table.board.missing(number);
            // No communicator ends, so no flight recorder is written that the error could name.
            let members = table.named.clone().recorded_in(None);
            (waiter.answer, Err(Error::NoVerdict { call, comm, rank, after, missing, members }))
        };
        fill(vec![given_up]);
    }

    /// A rank of the world has sent a step of an agreement.
    pub(super) fn agree_heard(&self, from: Rank, comm: CommId, lost: &[(Rank, Lost)], step: Step) {
        let answers = {
            let mut all = self.losses.agreements.lock();
            match all.tables.get_mut(&comm) {
                Some(table) => {
                    let Some(from) = table.members.iter().position(|m| *m == from) else { return };
                    let mut out = Vec::new();
                    table.board.hear(from, lost, step, &mut out);
                    table.carry_out(self, comm, out)
                }
                None => {
                    let early = all.early.entry(from).or_default();
                    if early.len() == EARLY {
                        early.pop_front();
                    }
                    early.push_back((comm, lost.to_vec(), step));
                    return;
                }
            }
        };
        fill(answers);
    }

    /// A rank of the world is gone. It may be this rank, if others have declared it lost.
    pub(super) fn agree_lost(&self, rank: Rank, how: Lost) {
        let mut answers = Answers::new();
        {
            let mut all = self.losses.agreements.lock();
            if all.lost.iter().any(|(r, _)| *r == rank) {
                return;
            }
            all.lost.push((rank, how));
            for (comm, table) in &mut all.tables {
                let Some(rank) = table.members.iter().position(|m| *m == rank) else { continue };
                let mut out = Vec::new();
                table.board.lose(&[(rank, how)], &mut out);
                answers.extend(table.carry_out(self, *comm, out));
            }
        }
        fill(answers);
    }

    /// A rank says goodbye. The loss for which it leaves is taken in first: if that is this rank's own, this rank is expelled before it can
    /// reach a verdict without the leaver.
    pub(super) fn agree_goodbye(&self, rank: Rank, cause: &Option<Error>) {
        if let Some(Error::PeerLost { rank: dead, how, .. }) = cause {
            self.agree_lost(*dead, *how);
        }
        self.agree_lost(rank, Lost::Left);
    }
}
