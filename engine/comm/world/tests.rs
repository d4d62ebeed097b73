//! What a world's communicators hear of losses, in whatever order things happen.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::comm::runtime::process_runtime;
use crate::exec::progress_thread;
use crate::link::local::INPROC;

/// Ranks of the world; rank 0 is the one that hears.
const SIZE: usize = 5;
/// Groups of these ranks: the world ranks of each, in its order. A test makes a group at some time, or never.
const GROUPS: [&[Rank]; 6] = [&[0, 1, 2, 3, 4], &[3, 0], &[0, 1, 2], &[4, 2, 0], &[1, 0, 4, 3], &[0]];

#[derive(Clone, Debug)]
enum Step {
    Make(usize),
    Lost(Rank, Lost),
    /// A rank leaves: in peace, or for the loss of another.
    Goodbye(Rank, Option<(Rank, Lost)>),
    /// A rank says that a group is dead.
    Abort(usize, Rank),
}

fn how() -> impl Strategy<Value = Lost> {
    prop_oneof![Just(Lost::Died), (1u64..4).prop_map(|s| Lost::Silent(Duration::from_secs(s)))]
}

fn step() -> impl Strategy<Value = Step> {
    let cause = proptest::option::of((0..SIZE, how()));
    prop_oneof![
        4 => (0..GROUPS.len()).prop_map(Step::Make),
        2 => (1..SIZE, how()).prop_map(|(rank, how)| Step::Lost(rank, how)),
        2 => (1..SIZE, cause).prop_map(|(rank, cause)| Step::Goodbye(rank, cause)),
        1 => (0..GROUPS.len(), 1..SIZE).prop_map(|(group, from)| Step::Abort(group, from)),
    ]
}

/// Rank 0's place in a world whose other ranks do not exist: what rank 0 sends goes nowhere.
fn world() -> Arc<World> {
    let id = *b"losses and leave";
    let (mates, memory_lock, region) =
        (ProcessRanks::of(id), MemoryLock::default(), Arc::new(Region::private().unwrap()));
    mates.enter(0, region.clone(), memory_lock.clone());
    let transport = Transport::Hub(Arc::default());
    let settings = (Defaults::from_env().unwrap(), Arc::default());
    let near = vec![&INPROC; SIZE];
    World::new(
        (0, id),
        transport,
        (mates, memory_lock),
        (region, None),
        process_runtime().unwrap(),
        near,
        settings,
    )
}

fn id(group: usize) -> CommId {
    CommId(group as u64 + 1)
}

fn abort(group: usize, from: Rank) -> Error {
    Error::aborted(from, format!("group {group}, says rank {from}"))
}

/// What a group is to know, from all that was heard so far: its cause, and who has left.
fn expected(group: usize, heard: &[Step]) -> (Option<Error>, Vec<bool>) {
    let members = GROUPS[group];
    let place = |rank: Rank| members.iter().position(|m| *m == rank);
    let (mut cause, mut left, mut known) = (None, vec![false; members.len()], [false; SIZE]);
    for step in heard {
        let new = match step {
            Step::Make(_) | Step::Goodbye(_, None) => None,
            Step::Lost(rank, how) | Step::Goodbye(_, Some((rank, how))) => {
                let again = std::mem::replace(&mut known[*rank], true);
                place(*rank).filter(|_| !again).map(|rank| Error::lost(rank, *how))
            }
            Step::Abort(of, from) => place(*from).filter(|_| *of == group).map(|_| abort(group, *from)),
        };
        cause = cause.or(new);
        if let Step::Goodbye(rank, _) = step
            && let Some(place) = place(*rank)
        {
            left[place] = true;
        }
    }
    (cause, left)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// Each group fails for the first loss of a member that was heard of, be it before or after the group was made, and knows who has left.
    #[test]
    fn every_group_hears_of_losses_and_leaves_in_any_order(steps in proptest::collection::vec(step(), 1..24)) {
        let world = world();
        let mut groups: Vec<Option<Arc<Endpoint>>> = vec![None; GROUPS.len()];
        let mut heard = Vec::new();
        for step in steps {
            match step.clone() {
                Step::Make(group) if groups[group].is_none() => {
                    let lines = LinksFrom::NewRings(vec![0; GROUPS[group].len()]);
                    let made = world.endpoint(id(group), format!("group {group}"), GROUPS[group].to_vec(), lines);
                    groups[group] = Some(made.unwrap());
                }
                Step::Make(_) => {}
                Step::Lost(rank, how) => world.lost(rank, how),
                Step::Goodbye(rank, cause) => {
                    let cause = cause.map(|(rank, how)| Error::lost(rank, how));
                    world.goodbye(rank, cause);
                }
                Step::Abort(group, from) => {
                    world.message(from, Message::Abort { comm: id(group), cause: abort(group, from) });
                }
            }
            heard.push(step);
            for (group, endpoint) in groups.iter().enumerate() {
                let Some(endpoint) = endpoint else { continue };
                let known = (endpoint.health.cause().cloned(), endpoint.peers.all_left());
                prop_assert_eq!(known, expected(group, &heard), "group {} after {:?}", group, heard);
            }
        }
    }
}

/// Rank 0 tells rank 1, and nobody else: "I have not heard from rank 2".
#[test]
fn what_a_rank_hears_it_passes_on_and_who_hears_that_it_is_lost_goes_no_further() {
    let silent = Lost::Silent(Duration::from_secs(3));
    let mut comms = crate::Comm::local(3).unwrap();
    let worlds: Vec<_> = comms.iter().map(|comm| comm.0.membership.world.clone()).collect();
    worlds[1].message(0, Message::Abort { comm: CommId(0), cause: Error::lost(2, silent) });
    let end = std::time::Instant::now() + Duration::from_secs(20);
    for comm in &comms {
        while comm.check().is_ok() {
            assert!(std::time::Instant::now() < end, "rank {} does not hear of it", comm.rank());
            std::thread::sleep(Duration::from_millis(1));
        }
        let cause = comm.check().unwrap_err();
        assert!(matches!(cause, Error::PeerLost { rank: 2, how, .. } if how == silent), "{cause}");
    }
    let lost = comms.pop().unwrap();
    // The lost rank waits for the others only until they tell it that it is lost.
    let error = futures::executor::block_on(lost.shrink_within(Duration::from_secs(20))).unwrap_err();
    assert!(matches!(error, Error::PeerLost { rank: 2, how, .. } if how == silent), "{error}");
    let others = comms.into_iter().map(|comm| comm.shrink_within(Duration::from_secs(20)));
    for made in futures::executor::block_on(futures::future::join_all(others)) {
        let (comm, verdict) = made.unwrap();
        assert_eq!((comm.size(), verdict.survivors, verdict.lost), (2, vec![0, 1], vec![2]));
    }
}

/// A rank that was in two communicators dies. If a call on one of them has returned the loss, closing the other returns no error; if no call has,
/// one close returns it, once.
#[test]
fn to_close_tells_a_loss_that_no_call_has_told() {
    use futures::executor::block_on;
    let mut comms = crate::Comm::local(3).unwrap();
    let dups = block_on(futures::future::join_all(comms.iter_mut().map(crate::Comm::dup)));
    let mut all: Vec<_> = comms.into_iter().zip(dups.into_iter().map(Result::unwrap)).collect();
    all.truncate(2);
    for (comm, _) in &all {
        comm.0.membership.world.lost(2, Lost::Died);
    }
    let is_loss = |error: &Error| matches!(error, Error::PeerLost { rank: 2, how: Lost::Died, .. });
    for (rank, (comm, mut dup)) in all.into_iter().enumerate() {
        if rank == 0 {
            assert!(is_loss(&dup.all_reduce(vec![1u8]).wait().unwrap_err().error));
        } else {
            // Nobody looks at the result.
            drop(dup.all_reduce(vec![1u8]));
            assert!(is_loss(&block_on(comm.share().close()).unwrap_err()));
        }
        block_on(comm.close()).unwrap();
        block_on(dup.close()).unwrap();
    }
}

#[test]
fn a_peer_that_makes_our_bell_block_does_not_stop_our_lane() {
    crate::exec::spoil(progress_thread().unwrap().doorbell());
    let mut comms = crate::Comm::local(2).unwrap();
    let (one, other) = comms.split_at_mut(1);
    for _ in 0..20 {
        let works = [one[0].barrier(), other[0].barrier()];
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || works.map(|work| tell.send(work.wait().is_ok())));
        assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(true));
        std::thread::sleep(Duration::from_millis(2)); // so that the progress thread naps in between
    }
}
