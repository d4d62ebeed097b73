//! Tests of how a part chooses between loans and steps: two ranks of this process, over real rings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::exec::host::{Host, HostLoans};
use crate::exec::lends::{Agreement, Fold, LentSlot, Reach};
use crate::exec::operation::{PartList, Reduction};
use crate::exec::parts::tests::Rings;
use crate::link;
use crate::plan::{self, Lending, Program, Shape};
use crate::types::{Algo, DType, Kind, ReduceOp, Signature};

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
