//! Stories that are told.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::stage::Stage;
use crate::Comm;
use crate::comm::handle::Membership;
use crate::comm::links::Housemates;
use crate::comm::runtime::process_runtime;
use crate::comm::world::{Defaults, Hub, LinksFrom, Transport, World};
use crate::error::{Error, Lost};
use crate::exec::Opener;
use crate::group::Events;
use crate::group::message::CommId;
use crate::link::local::{Gate, INPROC};
use crate::link::region::Region;
use crate::link::virtual_link::{Network, Timeline};
use crate::link::{LinkRx, LinkTx};
use crate::types::Rank;

/// The links of a rank's communicator.
struct Lines {
    network: Arc<Network>,
    comm: CommId,
    rank: Rank,
}

impl Opener for Lines {
    fn open_tx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkTx>, Error> {
        Ok(self.network.tx(self.comm.0, self.rank, peer, channel))
    }

    fn open_rx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkRx>, Error> {
        Ok(self.network.rx(self.comm.0, peer, self.rank, channel))
    }
}

/// The ranks of a story.
struct Ranks {
    stage: Arc<Stage>,
    worlds: Vec<Arc<World>>,
}

impl Ranks {
    fn new(n: usize, seed: u64) -> (Ranks, Vec<Comm>) {
        let stage = Stage::new(seed);
        let (hub, network) = (Arc::new(Hub::default()), Network::new(stage.clone()));
        let (lane, _) = process_runtime().unwrap();
        let (mut worlds, mut comms) = (Vec::new(), Vec::new());
        for rank in 0..n {
            let transport = Transport::Hub(hub.clone());
            let (mates, gate) = (Arc::new(Housemates::default()), Gate::default());
            let turns = (lane.clone(), stage.runtime(rank));
            let region = Arc::new(Region::private().unwrap());
            let settings = (Defaults::from_env().unwrap(), Arc::default());
            let near = vec![&INPROC; n];
            let who = (rank, n, *b"a story of ranks");
            let world = World::new(who, transport, (mates, gate), region, turns, near, settings);
            hub.enter(&world);
            let lines = Arc::new(Lines { network: network.clone(), comm: CommId(0), rank });
            let endpoint =
                world.endpoint(CommId(0), "world".into(), (0..n).collect(), LinksFrom::Opener(lines));
            let membership = Arc::new(Membership { world: world.clone(), mesh: None });
            comms.push(Comm::of(endpoint.unwrap(), membership, None));
            worlds.push(world);
        }
        (Ranks { stage, worlds }, comms)
    }

    /// The process of a rank ends; the others hear of it a little later.
    fn kill(&self, dead: Rank) {
        self.stage.kill(dead);
        for (rank, world) in self.worlds.iter().enumerate().filter(|(rank, _)| *rank != dead) {
            let (world, stage) = (world.clone(), self.stage.clone());
            let after = self.stage.sleep(Duration::from_millis(1 + self.stage.draw(20)));
            let hears = async move {
                after.await;
                stage.log(format!("rank {rank} hears that rank {dead} has died"));
                world.lost(dead, Lost::Died);
            };
            self.stage.spawn(rank, Box::pin(hears));
        }
    }
}

/// Elements of each buffer: some kilobytes, so that frames lend memory.
const COUNT: usize = 3000;
/// All-reduces that a rank tries.
const ROUNDS: usize = 200;

fn input(rank: Rank, round: usize) -> Vec<f32> {
    (0..COUNT).map(|i| (rank * 1000 + round * 10 + i % 7) as f32).collect()
}

/// Rank `rank` sums with the others until all is done or somebody is lost. It gives its buffer back either way.
async fn sums(stage: Arc<Stage>, n: usize, mut comm: Comm, rank: Rank, ended: Arc<AtomicUsize>) {
    for round in 0..ROUNDS {
        let inputs: Vec<_> = (0..n).map(|rank| input(rank, round)).collect();
        let expected: Vec<f32> = (0..COUNT).map(|i| inputs.iter().map(|input| input[i]).sum()).collect();
        match comm.timeout(Duration::from_secs(5)).all_reduce(input(rank, round)).await {
            Ok(sum) => {
                assert_eq!(sum, expected, "rank {rank}, round {round}");
                stage.log(format!("rank {rank} has the sum of round {round}"));
            }
            Err(failed) => {
                assert_eq!(failed.buf.map(|buf| buf.len()), Some(COUNT), "the buffer comes back");
                stage.log(format!("rank {rank} gives up in round {round}: {}", failed.error));
                break;
            }
        }
    }
    ended.fetch_add(1, Ordering::Relaxed);
}

/// `n` ranks sum, and one of them dies at some moment, if `dies`. What was told, and how many ranks came to an end.
fn story(n: usize, seed: u64, dies: bool) -> (Vec<String>, usize) {
    let (ranks, comms) = Ranks::new(n, seed);
    let (stage, ended) = (&ranks.stage, Arc::new(AtomicUsize::new(0)));
    for (rank, comm) in comms.into_iter().enumerate() {
        stage.spawn(rank, Box::pin(sums(stage.clone(), n, comm, rank, ended.clone())));
    }
    if dies {
        stage.run(Duration::from_micros(200 + stage.draw(4000)), || false);
        ranks.kill(stage.draw(n as u64) as Rank);
    }
    let last = n - usize::from(dies);
    let is_over = stage.run(Duration::from_secs(60), || ended.load(Ordering::Relaxed) == last);
    let told = stage.told();
    assert!(is_over, "seed {seed}: not over after a minute of virtual time:\n{}", told.join("\n"));
    (told, ended.load(Ordering::Relaxed))
}

#[test]
fn a_story_without_a_death_ends_with_the_right_sums_on_all_ranks() {
    let (told, ended) = story(2, 1, false);
    assert_eq!(ended, 2);
    let sums = told.iter().filter(|line| line.contains("has the sum")).count();
    assert_eq!(sums, 2 * ROUNDS);
    assert!(told.iter().any(|line| line.contains("sends")), "over the virtual links: {told:?}");
}

#[test]
fn a_seed_tells_the_same_story_twice_and_another_seed_another() {
    let (first, again, other) = (story(2, 7, true).0, story(2, 7, true).0, story(2, 8, true).0);
    let differs = first.iter().zip(&again).position(|(a, b)| a != b);
    assert_eq!(differs, None, "\n{:?}\n{:?}", differs.map(|i| &first[i]), differs.map(|i| &again[i]));
    assert_eq!(first.len(), again.len());
    assert_ne!(first, other);
}

#[test]
fn whenever_a_rank_dies_the_others_name_it_and_have_their_buffers_back() {
    for seed in 0..40 {
        let n = 2 + seed as usize % 3;
        let (told, _) = story(n, seed, true);
        let died = told.iter().find_map(|line| line.split("us  rank ").nth(1)?.strip_suffix(" dies"));
        let died = died.expect("one dies");
        let gave_up: Vec<&String> = told.iter().filter(|line| line.contains("gives up")).collect();
        assert_eq!(gave_up.len(), n - 1, "seed {seed}:\n{}", told.join("\n"));
        for line in gave_up {
            assert!(line.contains(&format!("rank {died} ")), "seed {seed}: {line}");
        }
    }
}
