//! Tests of the parts of an operation and of how each chooses between loans and steps: two ranks of this process, over real rings.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::exec::backend::{Agreement, Fold, LentSlot, Reach};
use crate::exec::host::{Host, HostLoans};
use crate::exec::operation::{PartList, Reduction};
use crate::link::layout::RING_BYTES;
use crate::link::local::{Doorbell, LocalRx, LocalTx, MemoryLock};
use crate::link::region::Region;
use crate::link::{self, LinkRx, LinkTx, Opener, SLOT};
use crate::plan::{self, Lending, Program, Shape};
use crate::types::{Algo, DType, Kind, ReduceOp, Signature};

/// Rings both ways between two ranks of this process: what is sent stays where it is.
pub(in crate::exec) struct Rings {
    pub(in crate::exec) rank: usize,
    pub(in crate::exec) regions: [Arc<Region>; 2],
    at: [usize; 2],
    doorbell: Doorbell,
    memory_locks: [MemoryLock; 2],
    /// Whether links read payloads where they lie, as within one process. Else these lie in slots.
    in_place: bool,
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
            let (regions, doorbell, memory_locks) = (regions.clone(), doorbell.clone(), memory_locks.clone());
            Rings { rank, regions, at, doorbell, memory_locks, in_place: true }
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
            self.in_place.then(|| self.memory_locks[peer].clone()),
        )?))
    }
    fn open_rx(&self, peer: Rank, _: u8) -> Result<Box<dyn LinkRx>, Error> {
        let (region, at) = (self.regions[peer].clone(), self.at[peer] as u64);
        Ok(Box::new(LocalRx::new(region, at, self.doorbell.clone(), peer, self.in_place)?))
    }
}

/// A collective in place on these bytes, for one of two ranks; the root is rank 0.
fn operation_on(memory: &mut [u8], rank: Rank, kind: Kind, algo: Algo, number: u64) -> Operation {
    let shape = Shape { n: 2, rank, in_place: true, ..Shape::default() };
    let plan = plan::plan(kind, algo, &shape).unwrap();
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
    let signature = Signature { kind: kind as u8, ..Signature::default() };
    let operation = Operation::new("test", signature, Duration::MAX, reduction, PartList::One(part));
    Operation { number, ..operation }
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
    let op = operation_on(&mut memory, rank, Kind::Broadcast, Algo::OneShot, 0);
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

/// Whatever the order in which two ranks make their passes, small operations come to their end, also where a run has to take over as no slot is
/// free. One after another goes over the same links, so nothing is left there.
#[test]
fn small_operations_need_no_run_unless_slots_are_missing() {
    let mut ranks = Rings::pair().map(|rings| {
        let region = rings.regions[rings.rank].clone();
        (region, parts_and_port(Rings { in_place: false, ..rings }))
    });
    let kinds = [
        (Kind::AllReduce, Algo::OneShot),
        (Kind::AllReduce, Algo::RecursiveDoubling),
        (Kind::Broadcast, Algo::OneShot),
        (Kind::Reduce, Algo::OneShot),
    ];
    let sizes = [1, Port::INLINE, Port::INLINE + 1, 4096];
    for number in 0..4096 {
        let (kind, algo) = kinds[number % 4];
        let (bytes, first, lacks_slots) = (sizes[number / 4 % 4], number / 16 % 16, number / 256 % 4);
        let mut memory = [vec![3; bytes], vec![5; bytes]];
        let ops: Vec<_> = memory
            .iter_mut()
            .enumerate()
            .map(|(r, m)| operation_on(m, r, kind, algo, number as u64))
            .collect();
        let (mut next, mut done) = ([NextPart::default(); 2], [false; 2]);
        let mut taken = Vec::new();
        for turn in 0..64 {
            // The first four passes are by the ranks that the bits of `first` name; then the ranks take turns.
            let rank = if turn < 4 { first >> turn & 1 } else { turn & 1 };
            let (region, (parts, port)) = &mut ranks[rank];
            if turn < 8 && lacks_slots >> rank & 1 == 1 {
                taken.extend(std::iter::from_fn(|| region.take_slot(SLOT, 1)));
            }
            if !done[rank] {
                port.reap(|lent| parts.freed(&lent)).unwrap();
                let mut work = Work { op: &ops[rank], next: &mut next[rank], reach: ALL };
                done[rank] = parts.pass(&mut work, None, port).unwrap().1;
                parts.waiting_for(Some(&ops[rank]), port, &mut Vec::new());
            }
        }
        let what = format!("operation {number}: {kind} by {algo} of {bytes} bytes, slots {lacks_slots}");
        assert_eq!(done, [true, true], "{what}");
        let expected = match kind {
            Kind::AllReduce => [8, 8],
            Kind::Broadcast => [3, 3],
            _ => [8, 5],
        };
        assert_eq!(memory, expected.map(|value| vec![value; bytes]), "{what}");
        let used = ranks.iter_mut().map(|(_, (parts, _))| parts.idle.drain(..).count()).sum::<usize>();
        assert!(used == 0 || bytes > Port::INLINE && lacks_slots > 0, "{what}: {used} runs");
        if kind == Kind::AllReduce && bytes > Port::INLINE && lacks_slots == 3 && first == 0 {
            assert_eq!(used, 2, "{what}: the test lets runs take over");
        }
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

/// Lends as the host does, if it `can`. Else it answers that no peer can reach the memory.
#[derive(Clone)]
struct Willing {
    can: bool,
    host: HostLoans,
}

impl Lends for Willing {
    fn begin(&mut self, c: Context<'_>, lending: &Lending) -> Agreement {
        self.host.begin(c, lending)
    }
    fn reach(&self, c: Context<'_>, peer: Rank, loan: &link::Loan, port: &mut Port) -> Result<Reach, Error> {
        if self.can { self.host.reach(c, peer, loan, port) } else { Ok(Reach::Nowhere) }
    }
    fn free_slots(&self, port: &Port) -> usize {
        self.host.free_slots(port)
    }
    fn hold_slot(&self, port: &mut Port) -> Option<LentSlot> {
        self.host.hold_slot(port)
    }
    unsafe fn fill(&mut self, from: *const u8, slot: *mut u8, bytes: usize, port: &mut Port) {
        // SAFETY: as the caller vouches.
        unsafe { self.host.fill(from, slot, bytes, port) };
    }
    unsafe fn empty(&mut self, part: &Part, slot: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: as the caller vouches.
        unsafe { self.host.empty(part, slot, to, bytes) };
    }
    fn fold(&mut self, fold: &Fold<'_>, port: &Port) -> Result<usize, Error> {
        self.host.fold(fold, port)
    }
}

/// One rank of an all_reduce in place.
struct OneRank {
    op: Operation,
    run: PartRun<Host, Willing>,
    port: Port,
    memory: Vec<u32>,
    complete: bool,
}

impl OneRank {
    fn new(rings: Rings, can: bool) -> OneRank {
        let (rank, region) = (rings.rank, rings.regions[rings.rank].clone());
        let shape = Shape { n: 2, rank, in_place: true, ..Shape::default() };
        let plan = plan::plan(Kind::AllReduce, Algo::Direct, &shape).unwrap();
        let lending = plan::lending(Kind::AllReduce, Algo::Direct, &shape).map(Lending::compile);
        assert!(lending.is_some(), "there is a plan of loans");
        let count = 100_000;
        let mut memory: Vec<u32> = (0..count as u32).map(|i| i + 1000 * rank as u32).collect();
        let part = Part {
            program: Arc::new(Program { lending, ..Program::compile(&plan) }),
            input: memory.as_ptr().cast(),
            output: memory.as_mut_ptr().cast(),
            count,
            dtype: DType::U32,
            tables: None,
            pairwise: false,
            stated: None,
        };
        let signature = Signature { kind: Kind::AllReduce as u8, ..Signature::default() };
        let parts = PartList::One(part.clone());
        let op = Operation::new("test", signature, Duration::MAX, Reduction::Op(ReduceOp::Sum), parts);
        let lends = Willing { can, host: HostLoans::new(usize::MAX, true) };
        let mut run = PartRun::new(Host::new(usize::MAX), lends);
        run.start((0, &op), part, 0, 0);
        OneRank { op, run, port: Port::new((rank, 2), 0, region, Arc::new(rings)), memory, complete: false }
    }

    fn pass(&mut self) {
        let OneRank { op, run, port, .. } = self;
        port.reap(|lent| run.freed(&lent)).unwrap();
        self.complete = self.complete || run.pass((0, op), &[], None, port).unwrap().1;
    }
}

/// Gives both ranks passes in turn until both are complete, then checks their results, and that both are done with their links.
fn end(ranks: &mut [OneRank; 2]) {
    let end = Instant::now() + Duration::from_secs(60);
    while ranks.iter().any(|rank| !rank.complete) {
        assert!(Instant::now() < end, "they did not come to their end");
        ranks.iter_mut().filter(|rank| !rank.complete).for_each(OneRank::pass);
    }
    for (rank, of) in ranks.iter().enumerate() {
        let wrong = of.memory.iter().enumerate().find(|(i, value)| **value != 2 * *i as u32 + 1000);
        assert_eq!(wrong, None, "rank {rank}");
        assert!(
            of.run.tx_done(1 - rank) && of.run.rx_done(1 - rank),
            "rank {rank} leaves its links to others"
        );
    }
}

#[test]
fn a_part_whose_peer_cannot_lend_takes_its_steps_after_it_has_lent() {
    let [zero, one] = Rings::pair();
    let mut ranks = [OneRank::new(zero, true), OneRank::new(one, false)];
    ranks[0].pass();
    assert!(ranks[0].run.loans.is_on(), "it has lent, and heard of nobody who cannot");
    assert!(!ranks[0].run.tx_done(1), "steps may follow: the link is not the next part's yet");
    ranks[1].pass();
    assert!(!ranks[1].run.loans.is_on(), "it knew before it sent anything");
    ranks[0].pass();
    assert!(!ranks[0].run.loans.is_on(), "its peer's first frame was data");
    end(&mut ranks);
}

#[test]
fn a_part_goes_by_loans_to_its_end_where_all_can() {
    let mut ranks = Rings::pair().map(|rings| OneRank::new(rings, true));
    end(&mut ranks);
    for rank in &ranks {
        assert!(rank.run.loans.is_on());
        assert_eq!(rank.run.stored(), 0, "no step has moved");
    }
}

#[test]
fn what_comes_in_stripes_goes_by_steps() {
    let mut ranks = Rings::pair().map(|rings| OneRank::new(rings, true));
    for rank in &mut ranks {
        rank.run.arrived(0);
        assert!(!rank.run.loans.is_on());
        rank.pass();
        assert!(!rank.complete, "nothing has come");
        rank.run.arrived(usize::MAX);
    }
    end(&mut ranks);
}
