//! Send and receive: messages matched by (peer, direction, tag, number), all in progress at once.
//!
//! A small message is sent eagerly as long as the sender has credit: the receiver keeps it until its receive is posted. A larger
//! message is announced, and its data moves only after its receive is posted. So the receiver can take every frame from the link at
//! once, and no message ever waits behind another.

mod moving;
mod whole;
mod window;

use std::task::Waker;
use std::time::{Duration, Instant};

use allstream_kernels as kernels;

pub(crate) use self::moving::{Direction, Message, Overdue};
use self::moving::{Moving, Peer, Stage, Type, Unclaimed};
use self::whole::Launches;
use super::QUEUE_LIMIT;
use super::deadlines::DeadlineClock;
use super::inflight::Key;
use super::port::{FrameSource, Payload, Port};
use crate::error::Error;
use crate::link::{Frame, Header};
use crate::types::{Rank, Signature, WHOLE};

/// Messages of up to so many bytes are sent without waiting for their receive.
pub(crate) const EAGER: usize = 4096;
/// Eager messages per peer that may be on their way or unclaimed: at most 128 KB kept per peer.
const CREDITS: u32 = 32;
/// How many frames a pass takes from one peer at most, and how many it posts of one message: as many as a ring in memory has cells. So no peer starves
/// another, and a peer that sleeps is woken once for all these frames: when each frame woke it, a message of 32 MB took 82 turns of both ends.
const BURST: usize = 16;
/// How many of a peer's messages, announced or eager, may wait here for their receive: as many as it may have in flight, and its eager ones.
const UNCLAIMED: usize = QUEUE_LIMIT + CREDITS as usize;

/// Of the messages that nobody received, an error names so many at most.
const TOLD: usize = 8;

/// How much of a message of a rank to itself is copied in one pass.
const PIECE: usize = 1 << 20;

/// All messages of one endpoint.
pub(crate) struct Messages {
    comm: u64,
    rank: Rank,
    generation: u32,
    port: Port,
    peers: Vec<Peer>,
    /// Unused buffers for eager messages that come before their receive; at most [`CREDITS`].
    spare: Vec<Box<[u8]>>,
    launches: Launches,
    /// Peer, direction and tag of each message that has ended while others of its peer wait to begin.
    ended: Vec<(Rank, Direction, u32)>,
    is_used: bool,
}

impl Messages {
    pub(crate) fn new(comm: u64, rank: Rank, generation: u32, size: usize, port: Port) -> Messages {
        let peers = (0..size).map(|_| Peer { credits: CREDITS, ..Peer::default() }).collect();
        let (spare, launches) = (Vec::with_capacity(CREDITS as usize), Launches::default());
        Messages { comm, rank, generation, port, peers, spare, launches, ended: Vec::new(), is_used: false }
    }

    /// Goes on as the communicator's next generation. Credits, and those that are still owed to peers, stay as they are.
    pub(crate) fn renew(&mut self, comm: u64, generation: u32) {
        (self.comm, self.generation) = (comm, generation);
        self.port.renew();
    }

    pub(crate) fn port(&mut self) -> &mut Port {
        &mut self.port
    }

    /// Looks how much of the messages' memory has come from the device; `waker` is woken when more has.
    ///
    /// # Errors
    /// Some of it will not come.
    pub(crate) fn arrived(&mut self, waker: &Waker) -> Result<(), Error> {
        for peer in self.peers.iter_mut().filter(|peer| peer.touched) {
            for m in peer.sends.iter_mut().chain(&mut peer.recvs) {
                if let Some(staged) = m.message.staged.as_ref().filter(|_| m.filled < usize::MAX) {
                    m.arrived = staged.arrived(m.arrived, waker)?;
                    let (message, bytes) = staged.reach(m.arrived);
                    m.filled = if message > 0 { usize::MAX } else { bytes };
                }
            }
        }
        Ok(())
    }

    pub(crate) fn is_idle(&self) -> bool {
        let is_idle = |p: &Peer| p.sends.is_empty() && p.recvs.is_empty() && p.waiting.is_empty();
        self.peers.iter().all(|p| is_idle(p) && p.answers.is_empty())
    }

    pub(crate) fn is_flushed(&mut self) -> bool {
        self.port.is_flushed()
    }

    pub(crate) fn hang_up(&mut self) {
        self.port.hang_up();
    }

    pub(crate) fn reclaim(&mut self) -> bool {
        self.port.reclaim()
    }

    pub(crate) fn revoke(&mut self) -> bool {
        self.port.revoke()
    }

    /// Takes out all messages. `each` is called with each of them, and with whether a library was given it.
    pub(crate) fn take_all(&mut self, mut each: impl FnMut(Key, &Message, bool)) {
        self.launches = Launches::default();
        self.ended.clear();
        for peer in &mut self.peers {
            peer.sends
                .drain(..)
                .chain(peer.recvs.drain(..))
                .for_each(|m| each(m.key, &m.message, m.is_launched()));
            peer.waiting
                .drain()
                .flat_map(|(_, list)| list)
                .for_each(|(key, message)| each(key, &message, false));
            peer.answers.clear();
        }
    }

    /// A message that is overdue (time in which this process stood still does not count), or whose peer has left, and why it is given up.
    pub(crate) fn overdue(
        &self,
        now: Instant,
        clock: &DeadlineClock,
        has_left: &dyn Fn(Rank) -> bool,
    ) -> Option<(Message, Overdue)> {
        for (rank, peer) in self.peers.iter().enumerate() {
            for m in peer.sends.iter().chain(&peer.recvs) {
                let (waited, lacks) = (now - m.since, m.done == m.filled.min(m.message.bytes));
                let timeout = m.message.timeout;
                if clock.is_overdue(now, m.since, timeout) {
                    let why = match m.held_up() {
                        Some(state) => Overdue::HeldUp(state),
                        None if lacks && m.filled < m.message.bytes => Overdue::LacksMemory,
                        None => Overdue::Unmatched,
                    };
                    return Some((m.message.clone(), why));
                }
                if has_left(rank) && waited > Duration::from_millis(200) {
                    return Some((m.message.clone(), Overdue::Left));
                }
            }
        }
        None
    }

    /// Calls `each` once for each message that has not come and that was waited for longer than `stall`, or than a quarter of its timeout if
    /// that is less.
    pub(crate) fn long_awaited(
        &mut self,
        now: Instant,
        stall: Duration,
        mut each: impl FnMut(Rank, u64, Signature),
    ) {
        let ours = self.rank;
        for (rank, peer) in
            self.peers.iter_mut().enumerate().filter(|(rank, peer)| *rank != ours && peer.touched)
        {
            for m in peer.recvs.iter_mut().filter(|m| m.stage == Stage::Waiting && !m.told) {
                if now - m.since > stall.min(m.message.timeout / 4) {
                    m.told = true;
                    each(rank, m.message.number, m.message.signature);
                }
            }
        }
    }

    /// The messages that have come from a rank, or were announced, and were not received: the first [`TOLD`] by tag, then number.
    pub(crate) fn pending(&self, rank: Rank) -> Vec<Signature> {
        let mut unclaimed: Vec<_> = self.peers[rank].unclaimed.iter().collect();
        unclaimed.sort_unstable_by_key(|message| (message.tag, message.number));
        unclaimed.into_iter().take(TOLD).map(|message| message.signature).collect()
    }

    /// A rank whose messages were not received here, and those messages. Takes first what is still on the link from each rank. Called
    /// when no message is in progress any more.
    pub(crate) fn leftover(&mut self) -> Option<(Rank, Vec<Signature>)> {
        let (ours, size) = (self.rank, self.peers.len());
        (0..size).filter(|rank| *rank != ours).find_map(|rank| {
            // An error of the link, or of a frame on it, is no message: it only ends this loop.
            while let Ok(true) = self.take_frame(rank) {}
            let pending = self.pending(rank);
            if pending.is_empty() { None } else { Some((rank, pending)) }
        })
    }

    fn disagree(&self, number: u64, ours: Signature, peer: Rank, theirs: Signature) -> Error {
        let comm = self.comm.to_string();
        Error::mismatch(comm, number, (self.rank, ours), (peer, theirs), self.pending(peer))
    }

    /// One pass over all peers with messages. Calls `finished` for each that completes.
    pub(crate) fn pass(&mut self, mut finished: impl FnMut(Key, &Message)) -> Result<bool, Error> {
        let mut any = self.launch()?;
        let peers = &mut self.peers;
        any |= self.port.reap(|lent| {
            for peer in peers.iter_mut() {
                let found = peer.sends.iter_mut().find(|m| m.key.number() == lent.source.operation);
                if let Some(m) = found {
                    m.freed = m.freed.max(lent.source.end);
                }
            }
        })?;
        for rank in 0..self.peers.len() {
            if !self.peers[rank].touched {
                continue;
            }
            if rank == self.rank {
                any |= self.copy_own();
            } else {
                self.port.hold_bells(rank);
                for _ in 0..BURST {
                    if !self.take_frame(rank)? {
                        break;
                    }
                    any = true;
                }
                any |= self.post(rank)?;
                self.port.ring_bells(rank);
            }
            let peer = &mut self.peers[rank];
            let (mut wrong, any_wait, ended) = (None, !peer.waiting.is_empty(), &mut self.ended);
            for list in [&mut peer.sends, &mut peer.recvs] {
                list.retain(|m| {
                    let done = m.stage == Stage::Moving
                        && m.done == m.message.bytes
                        && (m.message.direction == Direction::Recv || m.freed == m.message.bytes);
                    if done {
                        let problem = m.message.wrong_value();
                        if problem.is_some() {
                            wrong = problem;
                            return true;
                        }
                        any = true;
                        finished(m.key, &m.message);
                        if any_wait {
                            ended.push((rank, m.message.direction, m.message.tag));
                        }
                    }
                    !done
                });
            }
            if let Some(problem) = wrong {
                return Err(Error::protocol(rank, problem));
            }
        }
        Ok(any)
    }

    /// Copies more of the messages of this rank to itself, without a link. The two halves of such a message have the same number. A pass
    /// copies one piece of each message, so that other work of this rank has its turn.
    fn copy_own(&mut self) -> bool {
        let Peer { sends, recvs, .. } = &mut self.peers[self.rank];
        let mut any = false;
        for recv in recvs {
            let number = recv.message.number;
            let Some(send) = sends.iter_mut().find(|send| send.message.number == number) else { continue };
            (recv.stage, send.stage) = (Stage::Moving, Stage::Moving);
            let bytes = send.message.bytes.min(recv.message.bytes).min(send.filled);
            let done = recv.done;
            let len = bytes.saturating_sub(done).min(PIECE);
            if len == 0 {
                continue;
            }
            let (from, to) = (send.message.memory.wrapping_add(done), recv.message.memory.wrapping_add(done));
            // SAFETY: `len` bytes from `done` are inside both buffers, which the table owns until their messages finish; as
            // each is the only owner of its memory, they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
            (recv.done, send.done, send.freed) = (done + len, done + len, done + len);
            if let Some(staged) = &recv.message.staged {
                staged.done((0, recv.done));
            }
            any = true;
        }
        any
    }

    fn header(&self, kind: Type, signature: Signature, number: u64, offset: usize, len: usize) -> Header {
        let message = kind as u32;
        Header {
            comm: self.comm as u32,
            op: number,
            offset: offset as u64,
            len: len as u32,
            message,
            signature,
        }
    }

    /// Takes the frame at the head of the link from `rank`, or what has come of its data, and returns whether it took anything. Only an
    /// eager message whose payload has not come whole has to wait.
    fn take_frame(&mut self, rank: Rank) -> Result<bool, Error> {
        let Some(frame) = self.port.rx(rank)?.peek(0)? else { return Ok(false) };
        let header = frame.header;
        let wrong = |problem: &str| Error::protocol(rank, problem);
        // A credit may still be on its way when all members take the communicator up again: it counts in the next generation, too.
        let late = header.message == Type::Credit as u32 && header.signature.generation < self.generation;
        if !late && (header.comm != self.comm as u32 || header.signature.generation != self.generation) {
            return Err(wrong("a message frame of another communicator"));
        }
        let (tag, number) = (header.signature.root, header.op);
        match Type::of(&header).ok_or_else(|| wrong("a message frame of unknown type"))? {
            Type::Eager => {
                let len = header.len as usize;
                if len > EAGER || header.signature.kind & WHOLE != 0 {
                    return Err(wrong(
                        "an eager message that is too long, or of a device's memory: those have to be announced",
                    ));
                }
                if self.peers[rank].taken >= CREDITS {
                    return Err(wrong("more eager messages than its credit allows"));
                }
                let Some(frame) = self.port.rx(rank)?.peek(len)? else { return Ok(false) };
                // SAFETY: `peek(len)` gave the frame, so all `len` bytes of its payload are here, and are copied before it is released.
                // The sender does not write them until then; a hostile one can only change what is copied. `to` has room for `len` bytes.
                let data = |to: *mut u8| unsafe { std::ptr::copy_nonoverlapping(frame.data, to, len) };
                match self.matching(rank, tag, number, header.signature)? {
                    Some(i) if self.peers[rank].recvs[i].message.bytes == len => {
                        let peer = &mut self.peers[rank];
                        let m = &mut peer.recvs[i];
                        if len > 0 {
                            data(m.message.memory);
                        }
                        (m.stage, m.done) = (Stage::Moving, len);
                        peer.owed += 1;
                    }
                    Some(_) => return Err(wrong("an eager message whose length differs from its signature")),
                    None => {
                        let mut place =
                            self.spare.pop().unwrap_or_else(|| vec![0u8; EAGER].into_boxed_slice());
                        data(place.as_mut_ptr());
                        self.keep(rank, tag, number, header.signature, Some((place, len)))?;
                    }
                }
                self.port.rx(rank)?.release(len);
                self.peers[rank].taken += 1;
            }
            Type::Announce => {
                self.port.rx(rank)?.release(0);
                match self.matching(rank, tag, number, header.signature)? {
                    Some(i) => {
                        self.peers[rank].recvs[i].stage = Stage::Moving;
                        self.clears(rank, i);
                    }
                    None => self.keep(rank, tag, number, header.signature, None)?,
                }
            }
            Type::Clear => {
                self.port.rx(rank)?.release(0);
                let sends = &mut self.peers[rank].sends;
                let is_it = |m: &Moving| {
                    (m.message.tag, m.message.number) == (tag, number) && m.stage == Stage::Waiting
                };
                let i = sends.iter().position(is_it);
                let i = i.ok_or_else(|| wrong("a go-ahead for a message that was not announced to it"))?;
                sends[i].stage = Stage::Moving;
                self.cleared(rank, i, header.offset);
            }
            Type::Agree => {
                self.port.rx(rank)?.release(0);
                self.agreed(rank, (tag, number), header.offset)?;
            }
            Type::Credit => {
                self.port.rx(rank)?.release(0);
                let credits = &mut self.peers[rank].credits;
                *credits = credits.saturating_add(header.offset as u32).min(CREDITS);
            }
            Type::Data => return self.take_data(rank, &frame),
        }
        Ok(true)
    }

    fn take_data(&mut self, rank: Rank, frame: &Frame) -> Result<bool, Error> {
        let (tag, number) = (frame.header.signature.root, frame.header.op);
        let recvs = &mut self.peers[rank].recvs;
        let m = recvs.iter_mut().find(|m| m.message.tag == tag && m.message.number == number);
        let may_come = |m: &&mut Moving| m.stage == Stage::Moving && m.message.whole.is_none();
        let m = m
            .filter(may_come)
            .ok_or_else(|| Error::protocol(rank, "data of a message for which no receive is matched"))?;
        let left = frame.header.len as usize - frame.done;
        if (frame.header.offset as usize).wrapping_add(frame.done) != m.done
            || left > m.message.bytes - m.done
        {
            let problem = "data of a message at a wrong offset".to_owned();
            return Err(Error::protocol(rank, problem));
        }
        let at = m.message.memory.wrapping_add(m.done);
        let rx = self.port.rx(rank)?;
        let taken = if rx.is_byte_stream() {
            // SAFETY: the message's bytes from `done` on lie in the receive's buffer, which the table owns, and nobody else writes them.
            unsafe { rx.receive_into(at, m.message.bytes - m.done, 1)? }
        } else {
            // SAFETY: `ready` bytes can be read, and fit (`left`, as above). The two do not overlap: the frame is the peer's or the link's.
            unsafe { kernels::copy(frame.data, &[at], frame.ready) };
            rx.release(frame.ready);
            frame.ready
        };
        m.done += taken;
        if let Some(staged) = &m.message.staged {
            staged.done((0, m.done));
        }
        Ok(taken > 0)
    }

    /// The index of the posted receive for a message, if there is one; an error if their signatures differ.
    fn matching(
        &mut self,
        rank: Rank,
        tag: u32,
        number: u64,
        theirs: Signature,
    ) -> Result<Option<usize>, Error> {
        let recvs = &self.peers[rank].recvs;
        let is_it =
            |m: &Moving| m.stage != Stage::Moving && m.message.tag == tag && m.message.number == number;
        let found = recvs.iter().position(is_it);
        match found.map(|i| recvs[i].message.signature) {
            Some(ours) if ours != theirs => Err(self.disagree(number, ours, rank, theirs)),
            _ => Ok(found),
        }
    }

    fn keep(
        &mut self,
        rank: Rank,
        tag: u32,
        number: u64,
        signature: Signature,
        data: Option<(Box<[u8]>, usize)>,
    ) -> Result<(), Error> {
        let kept = &mut self.peers[rank].unclaimed;
        if kept.len() >= UNCLAIMED {
            let problem = format!("more than {UNCLAIMED} messages that nobody asked for");
            return Err(Error::protocol(rank, problem));
        }
        kept.push(Unclaimed { tag, number, signature, data });
        Ok(())
    }

    /// Matches new receives, and sends this rank all that may be sent: answers, credits and messages.
    fn post(&mut self, rank: Rank) -> Result<bool, Error> {
        let mut any = self.claim(rank)?;
        // Answers first: somebody waits for them.
        while !self.peers[rank].answers.is_empty() {
            if !self.port.tx(rank)?.room()? {
                return Ok(any);
            }
            let Some(answer) = self.peers[rank].answers.pop_front() else { break };
            let signature = Signature { root: answer.tag, ..self.blank() };
            self.short(rank, answer.kind, signature, answer.number, answer.time)?;
            any = true;
        }
        if self.peers[rank].owed >= CREDITS / 2 && self.port.tx(rank)?.room()? {
            let owed = std::mem::take(&mut self.peers[rank].owed);
            self.peers[rank].taken -= owed;
            self.short(rank, Type::Credit, self.blank(), 0, owed.into())?;
        }
        for i in 0..self.peers[rank].sends.len() {
            for _ in 0..BURST {
                if !self.send(rank, i)? {
                    break;
                }
                any = true;
            }
        }
        Ok(any)
    }

    fn blank(&self) -> Signature {
        let generation = self.generation;
        Signature { kind: crate::types::KIND_P2P, generation, ..Signature::default() }
    }

    fn short(&mut self, rank: Rank, kind: Type, s: Signature, number: u64, offset: u64) -> Result<(), Error> {
        let header = Header { offset, ..self.header(kind, s, number, 0, 0) };
        let nothing = FrameSource { operation: u64::MAX, step: 0, receiver: 0, is_copied: false, end: 0 };
        self.port.post(rank, header, &Payload::Memory(std::ptr::null()), nothing)?;
        Ok(())
    }

    /// Matches new receives with what has already come.
    fn claim(&mut self, rank: Rank) -> Result<bool, Error> {
        let mut any = false;
        for i in 0..self.peers[rank].recvs.len() {
            let peer = &mut self.peers[rank];
            let m = &mut peer.recvs[i];
            if m.stage != Stage::New {
                continue;
            }
            m.stage = Stage::Waiting;
            let t = &m.message;
            let found = peer.unclaimed.iter().position(|u| u.tag == t.tag && u.number == t.number);
            let Some(found) = found else { continue };
            let (number, ours) = (t.number, t.signature);
            let Unclaimed { signature, data, .. } = peer.unclaimed.swap_remove(found);
            if signature != ours {
                return Err(self.disagree(number, ours, rank, signature));
            }
            any = true;
            m.stage = Stage::Moving;
            let Some((place, len)) = data else {
                self.clears(rank, i);
                continue;
            };
            if len != t.bytes {
                let problem = "an eager message whose length differs from its signature".to_owned();
                return Err(Error::protocol(rank, problem));
            }
            // SAFETY: `len` bytes are all of the receive's buffer, which the table owns, and `place` has `EAGER` bytes, no fewer.
            unsafe { std::ptr::copy_nonoverlapping(place.as_ptr(), t.memory, len) };
            m.done = len;
            peer.owed += 1;
            if self.spare.len() < CREDITS as usize {
                self.spare.push(place);
            }
        }
        Ok(any)
    }

    fn send(&mut self, rank: Rank, i: usize) -> Result<bool, Error> {
        let m = &self.peers[rank].sends[i];
        let (stage, done, key, t) = (m.stage, m.done, m.key, m.message.clone());
        let end = t.bytes.min(m.filled);
        if stage == Stage::Waiting
            || (stage == Stage::Moving && (done == t.bytes || done == end || t.whole.is_some()))
            || !self.port.tx(rank)?.room()?
        {
            return Ok(false);
        }
        let source = FrameSource { operation: key.number(), step: 0, receiver: 0, is_copied: true, end: 0 };
        if stage == Stage::New {
            let eager = t.bytes <= EAGER && self.peers[rank].credits > 0 && t.whole.is_none();
            // Without a free slot the message is announced: its data then goes in ring cells, which need no slots.
            let payload = if eager { self.payload(rank, t.memory, t.bytes)? } else { None };
            if let Some(payload) = payload {
                let header = self.header(Type::Eager, t.signature, t.number, 0, t.bytes);
                let free = self.port.post(rank, header, &payload, FrameSource { end: t.bytes, ..source })?;
                let peer = &mut self.peers[rank];
                peer.credits -= 1;
                let m = &mut peer.sends[i];
                (m.stage, m.done) = (Stage::Moving, t.bytes);
                if free {
                    m.freed = t.bytes;
                }
            } else {
                self.short(rank, Type::Announce, t.signature, t.number, 0)?;
                self.peers[rank].sends[i].stage = Stage::Waiting;
            }
            return Ok(true);
        }
        let most = self.port.tx(rank)?.max_frame_len();
        let mut len = (end - done).min(most - most % t.unit);
        let at = t.memory.wrapping_add(done);
        let payload = match self.payload(rank, at, len)? {
            Some(payload) => payload,
            None => {
                len = Port::INLINE;
                Payload::Memory(at)
            }
        };
        let header = self.header(Type::Data, t.signature, t.number, done, len);
        let free = self.port.post(rank, header, &payload, FrameSource { end: done + len, ..source })?;
        let m = &mut self.peers[rank].sends[i];
        if free && m.freed == done {
            m.freed = done + len;
        }
        m.done = done + len;
        Ok(true)
    }

    /// The payload as the link can take it: in place, or copied to a slot; `None` when no slot is free.
    fn payload(&mut self, rank: Rank, at: *mut u8, len: usize) -> Result<Option<Payload>, Error> {
        if len <= Port::INLINE || !self.port.tx(rank)?.needs_slot(at, len) {
            return Ok(Some(Payload::Memory(at)));
        }
        Ok(self.port.take_slot(len).map(|(slot, place)| {
            // SAFETY: `len` bytes of the send's buffer, which the table owns, are copied to a slot that is ours and has room.
            unsafe { self.port.filling.copy(at, place, len) };
            Payload::Slot(slot, place)
        }))
    }
}

fn disagree_on_time(peer: Rank) -> Error {
    Error::protocol(peer, "a launch time for a message that needs none")
}

#[cfg(test)]
mod tests;
