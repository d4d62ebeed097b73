//! Messages from device memory to device memory that a library moves (NCCL).
//!
//! Sender and receiver find each other, and compare their calls, as for any message that is announced. Then they agree on a launch time
//! ([`Turn`]): the receiver clears the message with a time later than all that its device knows of. The sender names such a time of its own
//! device, and answers with the later of the two. Each rank gives the library, in one call, all messages that are due before any other operation.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::moving::{Answer, Direction, Message, Moving, Type};
use super::{Messages, disagree_on_time};
use crate::device::whole::{self, Called, MessagePath, Moved, Turn};
use crate::error::{Error, Operation};
use crate::exec::inflight::Key;
use crate::types::{Rank, mix};

/// Messages that the library was given at once.
struct Batch {
    path: Arc<MessagePath>,
    keys: Vec<(Rank, Key)>,
    state: Arc<Mutex<Standing>>,
    _counted: Counted,
}

/// Belongs to a batch. From when the library gets the batch until all of it is on the stream, the stream counts as one that is about to wait. If the
/// batch is given up before, the drop of this value sees to it that the stream does not count so for ever.
struct Counted(Arc<MessagePath>, Arc<Mutex<Standing>>);

impl Drop for Counted {
    fn drop(&mut self) {
        if self.1.lock().is_on_stream {
            return;
        }
        // A command does this, so that it comes behind a command that may be giving the batch to the library now. If the communicator is over, this
        // command may never be carried out. So it does not hold the path, which holds the commands: they would keep each other alive.
        let (path, state) = (Arc::downgrade(&self.0), self.1.clone());
        self.0.commands.put_always(move || {
            if std::mem::take(&mut state.lock().will_wait)
                && let Some(path) = path.upgrade()
            {
                path.stream.waits_now();
            }
        });
    }
}

/// How far the library and the device are with a batch. Nobody calls the library or the driver while holding this lock.
#[derive(Default)]
struct Standing {
    /// The turns of the batch's messages; taken out when all messages are on the stream.
    turns: Vec<Turn>,
    /// A command of [`Batch::ask`] is queued, and has not run yet.
    is_asking: bool,
    /// The stream counts as about to wait for the batch.
    will_wait: bool,
    is_on_stream: bool,
    /// The batch's result, once the stream has come to its end.
    ended: Option<Result<(), Error>>,
}

/// The batches that the library has, and how many messages it is still to get.
#[derive(Default)]
pub(super) struct Launches {
    /// How many messages have named a time, and were not given to the library yet.
    to_come: usize,
    /// Oldest first. All but the last are on the stream.
    batches: VecDeque<Batch>,
}

impl Launches {
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }
}

impl Batch {
    /// Queues a command that gives the messages to the library.
    fn launch(&self, moved: Vec<Moved>) {
        let (path, state) = (self.path.clone(), self.state.clone());
        self.path.commands.put(move || {
            let turns = std::mem::take(&mut state.lock().turns);
            let ordered = turns.first().map_or(Ok(()), |first| first.launches(&path.stream));
            state.lock().turns = turns;
            ordered?;
            path.stream.will_wait();
            state.lock().will_wait = true;
            // SAFETY: the buffers are as long as is said, of this rank's device, and the in-flight table owns them until the messages
            // have finished. Each starts after its buffer's stream has come to the call (`Call::launched_message`). If the communicator dies first,
            // `Run::tear_down` aborts the library, and gives the buffers back when no command is under way and the library is
            // quiet, or never.
            unsafe { path.whole.exchange(&moved, &path.stream) }
        });
    }

    /// Queues a command that asks the library how far it is. If the whole batch is on the stream, the command marks its end there.
    fn ask(&self) {
        let (path, state) = (self.path.clone(), self.state.clone());
        self.path.commands.put(move || {
            if path.whole.poll()? == whole::Standing::InProgress {
                state.lock().is_asking = false;
                return Ok(());
            }
            let (stream, end) = (&path.stream, path.stream.point()?);
            stream.waits_now();
            state.lock().will_wait = false;
            let turns = std::mem::take(&mut state.lock().turns);
            turns.into_iter().for_each(|turn| turn.launched(stream, end.clone()));
            let (told, waker) = (state.clone(), path.waker.clone());
            let tell = move |result| {
                told.lock().ended = Some(result);
                waker.wake();
            };
            end.then("move messages", Box::new(tell));
            state.lock().is_on_stream = true;
            path.waker.wake_by_ref();
            Ok(())
        });
    }
}

impl Messages {
    /// Names a time for a message that both its sender and its receiver have called.
    fn turn(&self, message: &Message, path: &Arc<MessagePath>) -> Turn {
        let (ours, theirs) = (self.rank as u64, message.peer as u64);
        let (from, to) = if message.direction == Direction::Send { (ours, theirs) } else { (theirs, ours) };
        // No collective has the number `u64::MAX`, so it marks the name as a message's.
        let parts = [self.generation.into(), u64::MAX, from, to, message.tag.into(), message.number];
        let name = parts.into_iter().fold(self.comm, mix);
        let (comm, number, signature) = (path.comm.clone(), message.number, message.signature);
        let what = Operation { comm, number, signature };
        path.order.turn(Called { what, name, waker: path.waker.clone() })
    }

    /// Receive `i` from `rank` has met its send: names a time, and queues the answer that clears the send.
    pub(super) fn clears(&mut self, rank: Rank, i: usize) {
        let message = &self.peers[rank].recvs[i].message;
        let (tag, number) = (message.tag, message.number);
        let turn = message.whole.as_ref().map(|path| self.turn(message, path));
        let time = turn.as_ref().map_or(0, Turn::time);
        self.launches.to_come += usize::from(turn.is_some());
        let peer = &mut self.peers[rank];
        peer.recvs[i].turn = turn;
        peer.answers.push_back(Answer { kind: Type::Clear, tag, number, time });
    }

    /// The receiver has cleared send `i` to `rank`, and named `time`: agrees on the later of `time` and a time of this rank, and queues that as the
    /// answer.
    pub(super) fn cleared(&mut self, rank: Rank, i: usize, time: u64) {
        let message = &self.peers[rank].sends[i].message;
        let (tag, number) = (message.tag, message.number);
        let Some(mut turn) = message.whole.as_ref().map(|path| self.turn(message, path)) else { return };
        let time = time.max(turn.time());
        turn.agree(time);
        self.launches.to_come += 1;
        let peer = &mut self.peers[rank];
        peer.sends[i].turn = Some(turn);
        peer.answers.push_back(Answer { kind: Type::Agree, tag, number, time });
    }

    /// The sender has answered with the time on which both ends of this receive agree.
    pub(super) fn agreed(&mut self, rank: Rank, (tag, number): (u32, u64), time: u64) -> Result<(), Error> {
        let mut recvs = self.peers[rank].recvs.iter_mut();
        let found = recvs.find(|m| m.message.tag == tag && m.message.number == number);
        match found.and_then(|m| m.turn.as_mut()).filter(|turn| turn.time() <= time) {
            Some(turn) => turn.agree(time),
            None => return Err(disagree_on_time(rank)),
        }
        Ok(())
    }

    /// Whether the library may have messages of ours.
    pub(crate) fn is_launched(&self) -> bool {
        !self.launches.is_empty()
    }

    /// Whether the library has yet to put some of its messages on the stream.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.launches.batches.back().is_some_and(|batch| !batch.state.lock().is_on_stream)
    }

    /// Drives the batches that the library has, and gives it the messages that are due. Returns whether anything moved.
    pub(super) fn launch(&mut self) -> Result<bool, Error> {
        let mut any = false;
        while self.end_batch()? {
            any = true;
        }
        if let Some(batch) = self.launches.batches.back() {
            let mut state = batch.state.lock();
            if !state.is_on_stream {
                if !std::mem::replace(&mut state.is_asking, true) {
                    batch.ask();
                }
                return Ok(any);
            }
        }
        Ok(self.launches.to_come > 0 && self.launch_due()? || any)
    }

    /// Gives the library the messages that are due, as one batch. Returns whether there were any.
    fn launch_due(&mut self) -> Result<bool, Error> {
        let all = || self.peers.iter().flat_map(|peer| peer.sends.iter().chain(&peer.recvs));
        let mut timed = all().filter_map(|m| Some((m.turn.as_ref()?.number(), m))).collect::<Vec<_>>();
        timed.sort_unstable_by_key(|(number, _)| *number);
        let find = |number: u64| timed.binary_search_by_key(&number, |(number, _)| *number).ok();
        let Some(path) = timed.first().and_then(|(_, m)| m.message.whole.clone()) else { return Ok(false) };
        let due = path.order.due(|number| find(number).is_some());
        let due: Vec<&Moving> = due.into_iter().filter_map(|number| Some(timed[find(number)?].1)).collect();
        if due.is_empty() {
            return Ok(false);
        }
        let moved = |m: &&Moving| {
            let Message { peer, memory, bytes, direction, .. } = m.message;
            Moved { peer, is_sent: direction == Direction::Send, memory, bytes }
        };
        let moved: Vec<Moved> = due.iter().map(moved).collect();
        let keys: Vec<(Rank, Key)> = due.iter().map(|m| (m.message.peer, m.key)).collect();
        let turns = keys.iter().filter_map(|(peer, key)| self.peers[*peer].of(*key)?.turn.take()).collect();
        let state = Arc::new(Mutex::new(Standing { turns, ..Standing::default() }));
        let counted = Counted(path.clone(), state.clone());
        let batch = Batch { path, keys, state, _counted: counted };
        batch.launch(moved);
        self.launches.to_come -= batch.keys.len();
        self.launches.batches.push_back(batch);
        Ok(true)
    }

    /// Notes that the messages of the oldest batch were moved, if they were.
    fn end_batch(&mut self) -> Result<bool, Error> {
        let Some(batch) = self.launches.batches.front() else { return Ok(false) };
        let ended = batch.state.lock().ended.clone();
        let is_over = ended.transpose()?.is_some();
        // Asked in both cases: a batch that failed may never end on its stream, and one that has ended may have failed.
        batch.path.whole.check()?;
        if !is_over {
            return Ok(false);
        }
        let Some(batch) = self.launches.batches.pop_front() else { return Ok(false) };
        for (peer, key) in batch.keys {
            if let Some(m) = self.peers[peer].of(key) {
                (m.done, m.freed) = (m.message.bytes, m.message.bytes);
            }
        }
        Ok(true)
    }
}
