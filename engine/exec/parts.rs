//! The parts of an operation, several of which run at a time, in one kind of memory.

use std::cmp::Ordering;

use super::backend::Backend;
use super::lends::Lends;
use super::operation::{Operation, Part};
use super::port::{Lent, Port};
use super::run::at_once::AtOnce;
use super::run::{BUDGET, PartRun};
use crate::error::Error;
use crate::mem::{ALL, Reach};
use crate::types::Rank;

/// How many parts of one operation are in flight together. With several, a list of small buffers takes few round trips: each small
/// part takes one cell of a ring, and a ring has 16.
pub(crate) const WINDOW: usize = 16;

/// The part of an operation that is to start next: its index in the list of parts, and its number, which goes on in a second half.
#[derive(Clone, Copy, Default)]
pub(crate) struct NextPart {
    pub(super) index: usize,
    number: u16,
}

impl NextPart {
    /// The first part of an operation's second half.
    pub(crate) fn of_second_half(self) -> NextPart {
        NextPart { index: 0, ..self }
    }

    /// Whether no part of the operation has been started.
    fn is_first(self) -> bool {
        self.number == 0 && self.index == 0
    }

    fn following(self) -> NextPart {
        NextPart { index: self.index + 1, number: self.number.wrapping_add(1) }
    }
}

/// An operation, and how far its parts and its memory are.
pub(crate) struct Work<'a> {
    pub(crate) op: &'a Operation,
    pub(crate) next: &'a mut NextPart,
    /// How far the parts may go, by what has come of the operation's memory.
    pub(crate) reach: Reach,
}

/// How many rounds of a part may be touched, by what has come of the operation's memory.
fn rounds((part, rounds): Reach, order: usize) -> usize {
    match order.cmp(&part) {
        Ordering::Less => usize::MAX,
        Ordering::Equal => rounds,
        Ordering::Greater => 0,
    }
}

/// The runs of a communicator in one kind of memory. All memory is kept from one operation to the next.
#[allow(clippy::vec_box)] // they go from list to list, and are not small
pub(crate) struct Parts<B, L> {
    /// The communicator.
    comm: u64,
    /// Each new run gets a fresh backend like this one.
    backend: B,
    /// Each new run gets a clone of this.
    lends: L,
    /// The runs that have a part, in the order of their parts.
    running: Vec<Box<PartRun<B, L>>>,
    idle: Vec<Box<PartRun<B, L>>>,
    /// Whether the last pass ended because it had touched as many bytes as a pass may.
    was_long: bool,
    /// Bytes of working memory that the parts of this operation that are over have needed.
    needed: usize,
}

impl<B: Backend, L: Lends> Parts<B, L> {
    pub(crate) fn new(comm: u64, backend: B, lends: L) -> Parts<B, L> {
        let (running, idle) = (Vec::new(), Vec::new());
        Parts { comm, backend, lends, running, idle, was_long: false, needed: 0 }
    }

    /// Starts what may start, and makes one pass over all parts in flight. `reach`: how far the operation's memory has come.
    /// `news`: the only peer whose links have changed since the last pass, where that is known. Returns whether anything moved,
    /// and whether no part is left.
    pub(crate) fn pass(
        &mut self,
        work: &mut Work<'_>,
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        let Work { op, next, reach } = work;
        let reach = *reach;
        if next.is_first() && reach == ALL {
            let done = PartRun::<B, L>::at_once(&mut self.backend, (self.comm, op), port)?;
            if let (AtOnce::Posted, Some(part)) = (&done, op.parts.get(0)) {
                self.start(op, part, **next, reach);
                self.running.iter_mut().for_each(|run| run.posted_at_once());
            }
            if !matches!(done, AtOnce::Nothing) {
                **next = next.following();
                return Ok((true, matches!(done, AtOnce::All)));
            }
        }
        while self.running.len() < WINDOW
            && let Some(part) = op.parts.get(next.index)
        {
            self.start(op, part, **next, reach);
            **next = next.following();
        }
        let (mut any, mut i, mut touched) = (false, 0, 0);
        while i < self.running.len() && touched < BUDGET {
            let (earlier, rest) = self.running.split_at_mut(i);
            let Some(run) = rest.first_mut() else { break };
            let (moved, complete) = run.pass((self.comm, op), earlier, news, port)?;
            any |= moved;
            touched += run.touched();
            if complete {
                any = true;
                run.check_values()?;
                let run = self.running.remove(i);
                self.put_away(run);
            } else {
                i += 1;
            }
        }
        self.was_long = touched >= BUDGET;
        Ok((any, self.running.is_empty() && op.parts.get(next.index).is_none()))
    }

    fn start(&mut self, op: &Operation, part: &Part, next: NextPart, reach: Reach) {
        let new = || Box::new(PartRun::new(self.backend.fresh(), self.lends.clone()));
        let mut run = self.idle.pop().unwrap_or_else(new);
        run.start((self.comm, op), part.clone(), next.number, next.index);
        run.arrived(rounds(reach, next.index));
        self.running.push(run);
    }

    fn put_away(&mut self, mut run: Box<PartRun<B, L>>) {
        self.needed += run.memory().1;
        run.clear();
        self.idle.push(run);
    }

    /// More of the operation's memory has come.
    pub(crate) fn arrived(&mut self, reach: Reach) {
        self.running.iter_mut().for_each(|run| run.arrived(rounds(reach, run.order)));
    }

    /// How far the results are complete: all parts before the returned one, and so many rounds of that.
    pub(crate) fn stored(&self, next: NextPart) -> Reach {
        self.running.first().map_or((next.index, 0), |first| (first.order, first.stored()))
    }

    /// Forgets the parts in flight, as the operation is done or has failed. Returns how many bytes of working memory it has needed.
    pub(crate) fn clear(&mut self) -> usize {
        while let Some(run) = self.running.pop() {
            self.put_away(run);
        }
        self.was_long = false;
        std::mem::take(&mut self.needed)
    }

    /// Notes memory that a receiver has given back.
    pub(crate) fn freed(&mut self, lent: &Lent) {
        if let Some(run) = self.running.iter_mut().find(|run| run.posted(lent)) {
            run.freed(lent);
        }
    }

    /// Whether the last pass ended because it had taken long, and not because nothing was left to do.
    pub(crate) fn was_long(&self) -> bool {
        self.was_long
    }

    /// Adds the ranks whose frames, or whose room, the parts wait for.
    pub(crate) fn waiting_for(&self, port: &mut Port, ranks: &mut Vec<Rank>) {
        self.running.iter().for_each(|run| run.waiting_for(port, ranks));
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Bytes of working memory that idle runs keep.
    pub(crate) fn kept(&self) -> usize {
        self.idle.iter().map(|run| run.memory().0).sum()
    }

    /// Lets idle runs keep so many bytes together at most. Returns how many they keep now.
    pub(crate) fn give_memory_back(&mut self, most: usize) -> usize {
        let mut kept = 0;
        for run in &mut self.idle {
            let more = run.memory().0;
            match kept + more > most {
                true => run.give_memory_back(),
                false => kept += more,
            }
        }
        kept
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::exec::host::{Host, HostLoans};
    use crate::exec::operation::{PartList, Reduction};
    use crate::link::Opener;
    use crate::link::layout::RING_BYTES;
    use crate::link::local::{Doorbell, LocalRx, LocalTx, MemoryLock};
    use crate::link::region::Region;
    use crate::link::{LinkRx, LinkTx, SLOT};
    use crate::plan::{self, Program, Shape};
    use crate::types::{Algo, DType, Kind, ReduceOp, Signature};

    /// Rings both ways between two ranks of this process: what is sent stays where it is.
    pub(in crate::exec) struct Rings {
        pub(in crate::exec) rank: usize,
        pub(in crate::exec) regions: [Arc<Region>; 2],
        at: [usize; 2],
        doorbell: Doorbell,
        memory_locks: [MemoryLock; 2],
    }

    impl Rings {
        /// The rings of each of two ranks.
        pub(in crate::exec) fn pair() -> [Rings; 2] {
            let regions = [(); 2].map(|()| Arc::new(Region::shared().unwrap()));
            let at = [0, 1].map(|rank: usize| regions[rank].alloc(RING_BYTES).unwrap());
            let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            let doorbell = Doorbell::new(regions[0].clone(), Arc::<OwnedFd>::new(fd));
            let memory_locks = [(); 2].map(|()| MemoryLock::default());
            [0, 1].map(|rank| {
                let (regions, doorbell, memory_locks) =
                    (regions.clone(), doorbell.clone(), memory_locks.clone());
                Rings { rank, regions, at, doorbell, memory_locks }
            })
        }
    }

    impl Opener for Rings {
        fn open_tx(&self, peer: Rank, _: u8) -> Result<Box<dyn LinkTx>, Error> {
            let (region, at) = (self.regions[self.rank].clone(), self.at[self.rank]);
            Ok(Box::new(LocalTx::new(
                region,
                at,
                self.doorbell.clone(),
                Some(self.memory_locks[peer].clone()),
            )?))
        }
        fn open_rx(&self, peer: Rank, _: u8) -> Result<Box<dyn LinkRx>, Error> {
            let (region, at) = (self.regions[peer].clone(), self.at[peer] as u64);
            Ok(Box::new(LocalRx::new(region, at, self.doorbell.clone(), peer, true)?))
        }
    }

    /// A broadcast of these bytes from rank 0, for one of two ranks.
    fn broadcast_of(memory: &mut [u8], rank: Rank) -> Operation {
        let shape = Shape { n: 2, rank, in_place: true, ..Shape::default() };
        let plan = plan::plan(Kind::Broadcast, Algo::OneShot, &shape).unwrap();
        let part = Part {
            program: Arc::new(Program::compile(&plan)),
            input: memory.as_ptr(),
            output: memory.as_mut_ptr(),
            count: memory.len(),
            dtype: DType::U8,
            tables: None,
            pairwise: false,
            stated: None,
        };
        let reduction = Reduction::Op(ReduceOp::Sum);
        let signature = Signature { kind: Kind::Broadcast as u8, ..Signature::default() };
        Operation::new("test", signature, Duration::MAX, reduction, PartList::One(part))
    }

    fn parts_and_port(rings: Rings) -> (Parts<Host, HostLoans>, Port) {
        let (rank, region) = (rings.rank, rings.regions[rings.rank].clone());
        let parts = Parts::new(0, Host::new(usize::MAX), HostLoans::new(usize::MAX, true));
        (parts, Port::new((rank, 2), 0, region, Arc::new(rings)))
    }

    /// Broadcasts `bytes` from rank 0. Returns the most bytes that one pass of this rank touched.
    fn broadcast(rings: Rings, bytes: usize) -> usize {
        let rank = rings.rank;
        let mut memory = vec![1 - rank as u8; bytes];
        let op = broadcast_of(&mut memory, rank);
        let (mut parts, mut port) = parts_and_port(rings);
        let mut next = NextPart::default();
        let (mut most, end) = (0, Instant::now() + Duration::from_secs(60));
        while Instant::now() < end {
            port.reap(|lent| parts.freed(&lent)).unwrap();
            let mut work = Work { op: &op, next: &mut next, reach: ALL };
            let (_, complete) = parts.pass(&mut work, None, &mut port).unwrap();
            most = parts.running.iter().map(|run| run.touched()).sum::<usize>().max(most);
            if complete {
                assert!(memory.iter().all(|value| *value == 1), "what rank 0 had");
                return most;
            }
        }
        panic!("rank {rank} did not come to its end");
    }

    #[test]
    fn a_small_part_of_one_step_is_done_at_once_where_it_can_be() {
        let [mut root, mut leaf] = Rings::pair().map(parts_and_port);
        // So many passes of the leaf before the root's first, how many bytes, and which of the two then need no run.
        let cases = [(0, 1, [true, true]), (0, Port::INLINE, [true, true]), (1, 8, [true, false])];
        for (early, bytes, at_once) in cases.into_iter().chain([(0, Port::INLINE + 1, [false, true])]) {
            let mut memory = [vec![1; bytes], vec![0; bytes]];
            let [from, to] = &mut memory;
            let ops = [broadcast_of(from, 0), broadcast_of(to, 1)];
            let mut next = [NextPart::default(); 2];
            let mut pass = |rank: usize, (parts, port): &mut (Parts<Host, HostLoans>, Port)| {
                port.reap(|lent| parts.freed(&lent)).unwrap();
                let mut work = Work { op: &ops[rank], next: &mut next[rank], reach: ALL };
                parts.pass(&mut work, None, port).unwrap()
            };
            for _ in 0..early {
                assert_eq!(pass(1, &mut leaf), (false, false), "nothing has come yet");
            }
            let (_, is_posted) = pass(0, &mut root);
            assert_eq!(pass(1, &mut leaf), (true, true));
            assert!(is_posted || pass(0, &mut root).1, "what was lent has come back");
            let used = [&mut root, &mut leaf].map(|(parts, _)| parts.idle.drain(..).count());
            assert_eq!(used.map(|runs| runs == 0), at_once, "{bytes} bytes, {early} passes early");
            assert_eq!(memory[1], vec![1; bytes]);
        }
    }

    /// This holds however fast the peer is. It has to: a pass holds the memory lock, for which the rank's other communicators wait.
    #[test]
    fn a_pass_touches_no_more_than_its_budget() {
        let ranks = Rings::pair().map(|rings| std::thread::spawn(move || broadcast(rings, 256 << 20)));
        for rank in ranks {
            let most = rank.join().unwrap();
            assert!(most <= BUDGET + SLOT, "a pass touched {most} bytes");
        }
    }
}
