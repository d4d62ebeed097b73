//! A rank's links to all peers of one communicator, opened when first used, and the memory lent over them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::filling::Filling;
use super::progress_thread::keep_and_look;
use super::quarantine::What;
use crate::error::Error;
use crate::forked;
use crate::link::exit::Lease;
use crate::link::region::{Region, Slot, TURNED};
use crate::link::ring::CELLS;
use crate::link::{Break, Header, INLINE, LinkRx, LinkTx, Loan, Opener, Posted};
use crate::types::Rank;

/// The channel of operations that the ranks' devices run. (Collectives of the hosts have channel 0, messages channel 1.)
pub(crate) const DEVICES: u8 = 2;

/// What a frame was posted for, and how much of that is free once the frame is released.
#[derive(Clone, Copy)]
pub(crate) struct FrameSource {
    /// The operation: a collective's number, or the number of a message's key.
    pub(crate) operation: u64,
    /// Which step, and which of its receivers.
    pub(crate) step: u32,
    pub(crate) receiver: u32,
    /// Whether the receiver is expected to copy the payload, and not to combine it with other operands.
    pub(crate) is_copied: bool,
    /// Up to here what is sent is free once the frame is released. Counted in elements of the step's chunk, or in bytes of the message or of the
    /// lent chunk.
    pub(crate) end: usize,
}

/// A posted frame that the peer has not released yet. When it does, the frame's source and slot come back.
pub(crate) struct Lent {
    pub(crate) source: FrameSource,
    slot: Option<Slot>,
    /// Whether it names a user's memory, which the peer, in another process, touches where it lies.
    elsewhere: bool,
    /// Its number among the frames to the peer, from 1.
    frame: u64,
}

#[derive(Default)]
struct Peer {
    tx: Option<Box<dyn LinkTx>>,
    rx: Option<Box<dyn LinkRx>>,
    /// The frames that the peer has yet to release. A frame that left at once while this list was empty is not in it, as nothing comes back.
    lent: VecDeque<Lent>,
    /// How many frames were posted so far.
    posted: u64,
    /// Whether all that was lent to the peer was taken back, so that it reads none of that any more.
    quiet: bool,
    /// The lease of what was lent to the peer. Memory in quarantine ([`super::quarantine`]) is kept until this lease is over.
    lease: Option<Arc<Lease>>,
}

impl Peer {
    /// The lease that tells until when the peer may touch what it was lent, if that can be known without this port.
    fn lease(&mut self) -> Option<Arc<Lease>> {
        if self.lease.is_none() {
            self.lease = self.tx.as_ref().and_then(|tx| tx.lease()).map(Arc::new);
        }
        self.lease.clone()
    }
}

/// Where the payload of a frame lies when it is posted.
pub(crate) enum Payload {
    /// The operation's own memory.
    Memory(*const u8),
    /// A staging slot that holds it, and its address there.
    Slot(Slot, *const u8),
}

pub(crate) struct Port {
    opener: Arc<dyn Opener>,
    region: Arc<Region>,
    rank: Rank,
    channel: u8,
    peers: Vec<Peer>,
    dead: bool,
    /// How many bytes of staging slots are filled in turn ([`TURNED`]).
    pub(crate) turned: usize,
    /// How slots are filled.
    pub(crate) filling: Filling,
}

impl Port {
    pub(crate) fn new(
        (rank, size): (Rank, usize),
        channel: u8,
        region: Arc<Region>,
        opener: Arc<dyn Opener>,
    ) -> Port {
        let peers = (0..size).map(|_| Peer::default()).collect();
        let (turned, filling) = (TURNED, Filling::default());
        Port { opener, region, rank, channel, peers, dead: false, turned, filling }
    }

    pub(crate) fn tx(&mut self, peer: Rank) -> Result<&mut dyn LinkTx, Error> {
        let p = &mut self.peers[peer];
        if p.tx.is_none() {
            p.lent.reserve(2 * CELLS as usize);
            p.tx = Some(self.opener.open_tx(peer, self.channel)?);
        }
        match &mut p.tx {
            Some(tx) => Ok(tx.as_mut()),
            None => Err(Error::system("open a link", "no link (a bug)")),
        }
    }

    pub(crate) fn rx(&mut self, peer: Rank) -> Result<&mut dyn LinkRx, Error> {
        let p = &mut self.peers[peer];
        if p.rx.is_none() {
            p.rx = Some(self.opener.open_rx(peer, self.channel)?);
        }
        match &mut p.rx {
            Some(rx) => Ok(rx.as_mut()),
            None => Err(Error::system("open a link", "no link (a bug)")),
        }
    }

    /// From here on a peer that sleeps is not woken for each frame that is posted to it or released, but once, by
    /// [`ring_bells`](Self::ring_bells). If a failure comes in between, the links are hung up, and that wakes the peer.
    pub(crate) fn hold_bells(&mut self, peer: Rank) {
        let p = &mut self.peers[peer];
        p.tx.iter_mut().for_each(|tx| tx.hold_bell());
        p.rx.iter_mut().for_each(|rx| rx.hold_bell());
    }

    /// Wakes a peer for what was posted or released since [`hold_bells`](Self::hold_bells).
    pub(crate) fn ring_bells(&mut self, peer: Rank) {
        let p = &mut self.peers[peer];
        p.tx.iter_mut().for_each(|tx| tx.ring_bell());
        p.rx.iter_mut().for_each(|rx| rx.ring_bell());
    }

    /// A staging slot for up to [`SLOT`](crate::link::SLOT) bytes, and where it is, if one is free. It goes back when whoever
    /// took it has dropped it, and all that is posted in it has been released.
    pub(crate) fn take_slot(&mut self, bytes: usize) -> Option<(Slot, *mut u8)> {
        let slot = self.region.take_slot(bytes, self.turned)?;
        let at = slot.at();
        Some((slot, at))
    }

    /// The same for a slot that the caller fills again and again: it gets the slot that was given back last.
    pub(crate) fn hold_slot(&mut self) -> Option<(Slot, *mut u8)> {
        let slot = self.region.take_warm_slot()?;
        let at = slot.at();
        Some((slot, at))
    }

    /// How many staging slots are free.
    pub(crate) fn free_slots(&self) -> usize {
        let (used, all) = self.region.slots();
        all - used
    }

    /// Posts a frame, and remembers what comes back when it is released. Returns whether the source is free already.
    pub(crate) fn post(
        &mut self,
        peer: Rank,
        header: Header,
        payload: &Payload,
        source: FrameSource,
    ) -> Result<bool, Error> {
        let is_of_devices = self.channel == DEVICES;
        debug_assert!(
            is_of_devices || self.tx(peer).is_ok_and(|tx| header.len as usize <= tx.max_frame_len())
        );
        let (at, slot) = match payload {
            Payload::Memory(at) => (*at, None),
            Payload::Slot(slot, at) => (*at, Some(slot.clone())),
        };
        let is_in_slot = slot.is_some();
        let tx = self.tx(peer)?;
        // SAFETY: memory of an operation stays in the table until every frame from it is released (`reap` moves the
        // released mark, and the operation completes only then) or the links are revoked; a slot is given back by
        // `reap` after its last release. Both are valid for `len` bytes: callers cut frames from checked ranges.
        let posted =
            unsafe { if source.is_copied { tx.post_to_copy(header, at)? } else { tx.post(header, at)? } };
        debug_assert!(is_of_devices || posted == Posted::Copied || header.len as usize > INLINE);
        let gone = posted == Posted::Copied && tx.leaves();
        let elsewhere = posted == Posted::Held && !is_in_slot && tx.touches(at, header.len as usize);
        let is_free = posted == Posted::Copied || is_in_slot && tx.arrives_unread();
        self.remember(peer, slot, gone, elsewhere, source);
        Ok(is_free)
    }

    /// Lends a peer memory for reading and writing, the operation's own or a slot that was taken, and remembers it.
    pub(crate) fn lend(
        &mut self,
        peer: Rank,
        header: Header,
        (loan, slot): (Loan, Option<Slot>),
        source: FrameSource,
    ) -> Result<(), Error> {
        let tx = self.tx(peer)?;
        // SAFETY: as in `post`, memory of an operation stays in the table, and a slot stays taken, until the frame is released or the
        // links are revoked. The run that lends the memory does not touch it until then.
        unsafe { tx.lend(header, loan)? };
        let elsewhere = slot.is_none()
            && [loan.input, loan.output.cast_const()].into_iter().any(|at| tx.touches(at, loan.bytes));
        self.remember(peer, slot, false, elsewhere, source);
        Ok(())
    }

    /// Counts a frame that was posted, and remembers what comes back when it is released. A frame that is `gone`, without a slot, is
    /// forgotten if no other is outstanding: so nobody asks for the count of released frames, which is on a cache line that the peer writes.
    fn remember(&mut self, peer: Rank, slot: Option<Slot>, gone: bool, elsewhere: bool, source: FrameSource) {
        let p = &mut self.peers[peer];
        p.posted += 1;
        if !(gone && slot.is_none() && p.lent.is_empty()) {
            p.lent.push_back(Lent { source, slot, elsewhere, frame: p.posted });
        }
    }

    /// Takes back what peers have released, and calls `freed` for each frame. Returns whether there was any.
    pub(crate) fn reap(&mut self, mut freed: impl FnMut(Lent)) -> Result<bool, Error> {
        let mut any = false;
        for p in &mut self.peers {
            if p.lent.is_empty() {
                continue;
            }
            let Some(tx) = &mut p.tx else { continue };
            let released = tx.released()?;
            while p.lent.front().is_some_and(|lent| lent.frame <= released) {
                let Some(lent) = p.lent.pop_front() else { break };
                any = true;
                freed(lent);
            }
        }
        Ok(any)
    }

    /// Whether every posted frame has left this process's own memory, and peers have been told of each release that an operation of theirs waits
    /// for.
    pub(crate) fn is_flushed(&mut self) -> bool {
        let is_flushed = |p: &mut Peer| {
            p.tx.as_mut().is_none_or(|tx| tx.is_flushed()) && p.rx.as_mut().is_none_or(|rx| rx.is_flushed())
        };
        self.dead || self.peers.iter_mut().all(is_flushed)
    }

    /// A frame that came and was not asked for: its sender called something that we did not. Looks at all peers, also
    /// those whose link was never opened; a link that cannot be opened now has nothing to tell.
    pub(crate) fn leftover(&mut self) -> Option<(Rank, Header)> {
        let ours = self.rank;
        (0..self.peers.len()).filter(|peer| *peer != ours).find_map(|peer| {
            let frame = self.rx(peer).ok()?.peek(0).ok()??;
            Some((peer, frame.header))
        })
    }

    /// The connections that have broken and that no earlier call has returned, with the rank at the other end.
    pub(crate) fn breaks(&mut self) -> impl Iterator<Item = (Rank, Break)> {
        self.peers.iter_mut().enumerate().flat_map(|(peer, p)| {
            let sending = p.tx.as_mut().and_then(|tx| tx.take_break());
            let receiving = p.rx.as_mut().and_then(|rx| rx.take_break());
            sending.into_iter().chain(receiving).map(move |what| (peer, what))
        })
    }

    /// Tells all peers on this host that nothing of theirs is read here any more.
    pub(crate) fn hang_up(&mut self) {
        let ours = self.rank;
        for peer in (0..self.peers.len()).filter(|peer| *peer != ours) {
            if let Ok(rx) = self.rx(peer) {
                rx.hang_up();
            }
        }
    }

    /// Takes back what a dead communicator's links have released, and all that was lent to processes that have exited.
    /// `true` when no slot is lent any more.
    pub(crate) fn reclaim(&mut self) -> bool {
        let _ = self.reap(|_| {});
        for p in self.peers.iter_mut().filter(|p| !p.lent.is_empty()) {
            if p.tx.as_ref().is_some_and(|tx| tx.has_exited()) {
                p.lent.clear();
            }
        }
        self.peers.iter().all(|p| p.lent.iter().all(|lent| lent.slot.is_none()))
    }

    /// For a dead communicator: whether peers in other processes, or network cards by themselves, may still touch users' memory.
    pub(crate) fn is_touched_elsewhere(&mut self) -> bool {
        self.reclaim();
        // Each link is told to stop writing.
        let writes = |p: &mut Peer| p.rx.as_mut().is_some_and(|rx| !rx.revoke());
        let is_written = self.peers.iter_mut().fold(false, |any, p| writes(p) | any);
        is_written || self.peers.iter().any(|p| p.lent.iter().any(|lent| lent.elsewhere))
    }

    /// The leases of the links from these peers that may still write to what is received from them. `None`: for one of them it cannot be
    /// known until when.
    pub(crate) fn written_until(&mut self, from: Range<Rank>) -> Option<Vec<Arc<Lease>>> {
        let region = &self.region;
        let links = self.peers.iter_mut().enumerate().filter(|(peer, _)| from.contains(peer));
        let writing = links.filter_map(|(_, p)| p.rx.as_mut()).filter_map(|rx| (!rx.revoke()).then_some(rx));
        writing.map(|rx| rx.writes_until().map(|until| Arc::new(Lease::written(region, until)))).collect()
    }

    /// The leases of the peers that may still touch memory of operation `owner`. `None`: for one of them it cannot be known until when.
    pub(crate) fn leases(&mut self, owner: u64) -> Option<Vec<Arc<Lease>>> {
        let keeps =
            |p: &&mut Peer| p.lent.iter().any(|lent| lent.elsewhere && lent.source.operation == owner);
        self.peers.iter_mut().filter(keeps).map(Peer::lease).collect()
    }

    /// Nobody drives this port any more: slots that peers have not given back go to the quarantine, which frees them when the peers'
    /// leases are over.
    pub(crate) fn abandon(&mut self) {
        self.reclaim();
        for p in self.peers.iter_mut().filter(|p| p.lent.iter().any(|lent| lent.slot.is_some())) {
            if let Some(lease) = p.lease() {
                let slots = p.lent.drain(..).filter_map(|lent| lent.slot).map(Slot::downgrade).collect();
                keep_and_look(What::Slots(slots), vec![lease]);
            }
        }
    }

    /// For links between devices: whether peers in other processes may still touch users' memory.
    pub(crate) fn is_read_elsewhere(&mut self) -> bool {
        self.peers.iter_mut().any(|p| p.tx.as_mut().is_some_and(|tx| tx.is_read_elsewhere()))
    }

    /// Takes all lent memory back, for good. `true` once no peer can be reading it; `false`: ask again.
    pub(crate) fn revoke(&mut self) -> bool {
        self.dead = true;
        let revoke = |Peer { tx, quiet, .. }: &mut Peer| {
            tx.as_mut().is_none_or(|tx| {
                *quiet = *quiet || tx.revoke();
                *quiet
            })
        };
        // All peers are told in this pass, also those after one that is still reading.
        self.peers.iter_mut().fold(true, |all, peer| revoke(peer) & all)
    }

    /// Keeps the links for the communicator's next generation. What is still lent belongs to none of the new operations.
    pub(crate) fn renew(&mut self) {
        self.peers.iter_mut().flat_map(|p| &mut p.lent).for_each(|lent| lent.source.operation = u64::MAX);
    }

    /// Reads no more: from here on this rank touches no memory of its peers. What it lent stays lent.
    pub(crate) fn stop_reading(&mut self) {
        self.peers.iter_mut().for_each(|p| p.rx = None);
    }

    /// Every peer has stopped reading: all that was lent to them is free, except slots that a network card of this rank may still touch. Those go to
    /// the quarantine.
    pub(crate) fn take_all_back(&mut self) {
        for p in &mut self.peers {
            if p.lent.iter().any(|lent| lent.slot.is_some())
                && let Some(lease) = p.lease().filter(|lease| !lease.is_of_peers())
            {
                let slots = p.lent.drain(..).filter_map(|lent| lent.slot).map(Slot::downgrade).collect();
                keep_and_look(What::Slots(slots), vec![lease]);
            }
            (p.tx, p.posted) = (None, 0);
            p.lent.clear();
            if let Some(lease) = p.lease.take() {
                lease.end();
            }
        }
    }

    /// What opens the links.
    pub(crate) fn opener(&self) -> Arc<dyn Opener> {
        self.opener.clone()
    }

    /// The longest payload that a ring's cell holds, so that it needs no slot.
    pub(crate) const INLINE: usize = INLINE;
}

impl Drop for Port {
    fn drop(&mut self) {
        if forked::is_forked() {
            return; // asking a link what was released would send what it has queued
        }
        self.abandon();
        // What is left are slots on links that have no lease. They stay taken for the life of the region, which ends with the last
        // communicator of the world.
        self.peers
            .iter_mut()
            .flat_map(|p| p.lent.drain(..))
            .filter_map(|lent| lent.slot)
            .for_each(Slot::leave);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::link::INLINE;

    /// Copies small payloads, and reports as many frames as released as the test has set.
    struct Counting(Arc<AtomicU64>);

    impl LinkTx for Counting {
        fn room(&mut self) -> Result<bool, Error> {
            Ok(true)
        }
        fn needs_slot(&self, _: *const u8, _: usize) -> bool {
            false
        }
        unsafe fn post(&mut self, header: Header, _: *const u8) -> Result<Posted, Error> {
            Ok(if header.len as usize <= INLINE { Posted::Copied } else { Posted::Held })
        }
        fn released(&mut self) -> Result<u64, Error> {
            Ok(self.0.load(Ordering::Relaxed))
        }
        fn revoke(&mut self) -> bool {
            true
        }
    }

    struct Open(Arc<AtomicU64>);

    impl Opener for Open {
        fn open_tx(&self, _: Rank, _: u8) -> Result<Box<dyn LinkTx>, Error> {
            Ok(Box::new(Counting(self.0.clone())))
        }
        fn open_rx(&self, _: Rank, _: u8) -> Result<Box<dyn LinkRx>, Error> {
            Err(Error::system("open", "nothing is received"))
        }
    }

    #[test]
    fn frames_come_back_in_order_whatever_was_copied_before_them() {
        let released = Arc::new(AtomicU64::new(0));
        let region = Arc::new(Region::shared().unwrap());
        let mut port = Port::new((0, 2), 0, region, Arc::new(Open(released.clone())));
        let source = vec![0u8; 1000];
        let post = |port: &mut Port, number: usize, len: u32| {
            let header = Header { comm: 0, op: 0, offset: 0, len, message: 0, signature: Default::default() };
            let from = FrameSource { operation: 7, step: 0, receiver: 0, is_copied: false, end: number };
            port.post(1, header, &Payload::Memory(source.as_ptr()), from).unwrap()
        };
        let back = |port: &mut Port, count: u64| {
            released.store(count, Ordering::Relaxed);
            let mut seen = Vec::new();
            port.reap(|lent| seen.push((lent.source.operation, lent.source.end))).unwrap();
            seen
        };
        // The first two are not remembered: they were copied while nothing was outstanding.
        for (number, len) in [(1, 8), (2, 100), (3, 1000), (4, 8), (5, 1000)] {
            assert_eq!(post(&mut port, number, len), len < 1000, "whether the source is free");
        }
        assert_eq!(back(&mut port, 2), []);
        assert_eq!(back(&mut port, 3), [(7, 3)]);
        assert_eq!(back(&mut port, 4), [(7, 4)]);
        port.renew();
        assert_eq!(back(&mut port, 5), [(u64::MAX, 5)], "of no operation of the next generation");
        post(&mut port, 6, 8);
        post(&mut port, 7, 1000);
        assert_eq!(back(&mut port, 6), []);
        assert_eq!(back(&mut port, 7), [(7, 7)]);
    }
}
