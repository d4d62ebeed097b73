//! Messages of a device's memory that a library moves.
//!
//! Sender and receiver find each other, and compare what they call, as for any message that is announced. When they have, the receiver
//! clears it with the time at which its device could launch it; the sender knows another, and tells the receiver the later of both
//! ([`Turn`]). Each gives the library what is due, as much at once as is due one behind the other.

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
}

/// How far the library and the device are with a batch. Nobody calls either with this locked.
#[derive(Default)]
struct Standing {
    /// Until all is on the stream.
    turns: Vec<Turn>,
    /// A command that asks the library how far it is has been appended, and has not been carried out.
    is_asking: bool,
    is_on_stream: bool,
    /// How it ended there, once it has.
    ended: Option<Result<(), Error>>,
}

/// What the library has, and is to get.
#[derive(Default)]
pub(super) struct Launches {
    /// How many messages have a time, and were not given to it.
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
    /// Has the messages given to the library.
    fn launch(&self, moved: Vec<Moved>) {
        let (path, state) = (self.path.clone(), self.state.clone());
        self.path.commands.put(move || {
            let turns = std::mem::take(&mut state.lock().turns);
            let ordered = turns.first().map_or(Ok(()), |first| first.launches(&path.stream));
            state.lock().turns = turns;
            ordered?;
            path.stream.will_wait();
            // SAFETY: the buffers are as long as is said, of this rank's device, and the in-flight table owns them until the messages
            // have finished. Their streams have come to the calls (`Call::launched`). If the communicator dies first,
            // `Run::tear_down` aborts the library, and gives the buffers back when no command is under way and the library is
            // quiet, or never.
            unsafe { path.whole.exchange(&moved, &path.stream) }
        });
    }

    /// Has the library asked how far it is. When all is on the stream, its end is marked there.
    fn ask(&self) {
        let (path, state) = (self.path.clone(), self.state.clone());
        self.path.commands.put(move || {
            if path.whole.poll()? == whole::Standing::InProgress {
                state.lock().is_asking = false;
                return Ok(());
            }
            let (stream, end) = (&path.stream, path.stream.point()?);
            stream.waits_now();
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
    /// Names a time for a message whose both ends were called.
    fn turn(&self, message: &Message, path: &Arc<MessagePath>) -> Turn {
        let (ours, theirs) = (self.rank as u64, message.peer as u64);
        let (from, to) = if message.direction == Direction::Send { (ours, theirs) } else { (theirs, ours) };
        // No collective has so high a number.
        let parts = [self.generation.into(), u64::MAX, from, to, message.tag.into(), message.number];
        let name = parts.into_iter().fold(self.comm, mix);
        let (comm, number, signature) = (path.comm.clone(), message.number, message.signature);
        let what = Operation { comm, number, signature };
        path.order.turn(Called { what, name, waker: path.waker.clone() })
    }

    /// A receive, `i` of those from `rank`, has its send: gives the answer to that.
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

    /// A send, `i` of those to `rank`, was cleared with this time.
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

    /// Both ends of a receive have agreed on this time.
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

    /// Whether the library is at some of them on the host.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.launches.batches.back().is_some_and(|batch| !batch.state.lock().is_on_stream)
    }

    /// Goes on with what the library has, and gives it what is due. Whether anything moved.
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

    /// Gives the library what is due.
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
        let batch = Batch { path, keys, state };
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
        // What has failed there may never come to its end, and what has come to it may have failed.
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
