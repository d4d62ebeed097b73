//! Stories of ranks that take means: without a death, with one, and with broken plans.

use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::stage::Stage;
use crate::Comm;
use crate::comm::handle::Membership;
use crate::comm::links::ProcessRanks;
use crate::comm::runtime::process_runtime;
use crate::comm::world::{Defaults, Hub, Transport, World};
use crate::error::{Error, Lost};
use crate::exec::Opener;
use crate::group::Events;
use crate::group::message::CommId;
use crate::link::local::{INPROC, MemoryLock};
use crate::link::region::Region;
use crate::link::{LinkRx, LinkTx};
use crate::plan::mutate::mutations;
use crate::plan::{Shape, plan};
use crate::testing::faults::{Broken, Planted, planted_in_story};
use crate::testing::virtual_link::{Network, Timeline};
use crate::types::{Algo, Kind, Rank, ReduceOp};

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
pub(super) struct Ranks {
    pub(super) stage: Arc<Stage>,
    worlds: Vec<Arc<World>>,
}

impl Ranks {
    pub(super) fn new(n: usize, seed: u64) -> (Ranks, Vec<Comm>) {
        let stage = Stage::new(seed);
        let (hub, network) = (Arc::new(Hub::default()), Network::new(stage.clone()));
        let (progress_thread, _) = process_runtime().unwrap();
        let (mut worlds, mut comms) = (Vec::new(), Vec::new());
        for rank in 0..n {
            let transport = Transport::Hub(hub.clone());
            let (mates, memory_lock) = (Arc::new(ProcessRanks::default()), MemoryLock::default());
            let turns = (progress_thread.clone(), stage.runtime(rank));
            let region = Arc::new(Region::private().unwrap());
            let settings = (Defaults::from_env().unwrap(), Arc::default());
            let near = vec![&INPROC; n];
            let who = (rank, *b"a story of ranks");
            let world =
                World::new(who, transport, (mates, memory_lock), (region, None), turns, near, settings);
            hub.enter(&world);
            let network = network.clone();
            let links =
                move |comm, rank| Arc::new(Lines { network: network.clone(), comm, rank }) as Arc<dyn Opener>;
            assert!(world.common.opener.set(Box::new(links)).is_ok(), "a new world");
            let endpoint = world.world_endpoint();
            let membership = Arc::new(Membership { world: world.clone(), mesh: None });
            comms.push(Comm::of(endpoint.unwrap(), membership, None));
            worlds.push(world);
        }
        (Ranks { stage, worlds }, comms)
    }

    /// The process of a rank ends; the others hear of it a little later.
    pub(super) fn kill(&self, dead: Rank) {
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

/// What is told: so many ranks take means so often, by this algorithm.
#[derive(Clone, Copy)]
struct Plot {
    n: usize,
    rounds: usize,
    algo: Algo,
    /// A rank dies at some moment.
    dies: bool,
}

/// What became of a story.
struct Told {
    log: Vec<String>,
    /// All ranks that live have come to an end.
    is_over: bool,
}

impl Told {
    fn lines(&self, words: &str) -> usize {
        self.log.iter().filter(|line| line.contains(words)).count()
    }
}

fn input(rank: Rank, round: usize) -> Vec<f32> {
    (0..COUNT).map(|i| (rank * rank * 1000 + round * 10 + i % 7) as f32).collect()
}

/// A rank takes means with the others until all is done, one is wrong or somebody is lost. It has its buffer back in any case.
async fn means(stage: Arc<Stage>, plot: Plot, mut comm: Comm, rank: Rank, ended: Arc<AtomicUsize>) {
    for round in 0..plot.rounds {
        let inputs: Vec<_> = (0..plot.n).map(|rank| input(rank, round)).collect();
        let mean = |i: usize| inputs.iter().map(|input| input[i]).sum::<f32>() / plot.n as f32;
        let is_right = |means: &Vec<f32>| means.iter().enumerate().all(|(i, x)| (x - mean(i)).abs() < 0.01);
        let call = comm.timeout(Duration::from_secs(5)).algo(plot.algo).op(ReduceOp::Avg);
        match call.all_reduce(input(rank, round)).await {
            Ok(means) if is_right(&means) => stage.log(format!("rank {rank} has the means of round {round}")),
            Ok(_) => {
                stage.log(format!("rank {rank} has wrong means of round {round}"));
                break;
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

/// Tells a story from a seed.
fn tell(plot: Plot, seed: u64) -> Told {
    let (ranks, comms) = Ranks::new(plot.n, seed);
    let (stage, ended) = (&ranks.stage, Arc::new(AtomicUsize::new(0)));
    for (rank, comm) in comms.into_iter().enumerate() {
        stage.spawn(rank, Box::pin(means(stage.clone(), plot, comm, rank, ended.clone())));
    }
    if plot.dies {
        stage.run(Duration::from_micros(200 + stage.draw(4000)), || false);
        ranks.kill(stage.draw(plot.n as u64) as Rank);
    }
    let last = plot.n - usize::from(plot.dies);
    let is_over = stage.run(Duration::from_secs(60), || ended.load(Ordering::Relaxed) == last);
    Told { log: stage.told(), is_over }
}

/// Many means; if `dies`, a death interrupts one of them.
fn plot(n: usize, dies: bool) -> Plot {
    Plot { n, rounds: 200, algo: Algo::Auto, dies }
}

#[test]
fn a_story_without_a_death_ends_with_the_right_means_on_all_ranks() {
    let told = tell(plot(2, false), 1);
    assert!(told.is_over);
    assert_eq!(told.lines("has the means"), 2 * 200);
    assert!(told.lines("sends") > 0, "over the virtual links: {:?}", told.log);
}

#[test]
fn a_seed_tells_the_same_story_twice_and_another_seed_another() {
    let [first, again, other] = [7, 7, 8].map(|seed| tell(plot(2, true), seed).log);
    let differs = first.iter().zip(&again).position(|(a, b)| a != b);
    assert_eq!(differs, None, "\n{:?}\n{:?}", differs.map(|i| &first[i]), differs.map(|i| &again[i]));
    assert_eq!(first.len(), again.len());
    assert_ne!(first, other);
}

#[test]
fn whenever_a_rank_dies_the_others_name_it_and_have_their_buffers_back() {
    for seed in 0..40 {
        let n = 2 + seed as usize % 3;
        let told = tell(plot(n, true), seed);
        assert!(told.is_over, "seed {seed}:\n{}", told.log.join("\n"));
        let died = |line: &String| Some(line.split_once("us  rank ")?.1.strip_suffix(" dies")?.to_owned());
        let died = told.log.iter().find_map(died).expect("one dies");
        let gave_up: Vec<&String> = told.log.iter().filter(|line| line.contains("gives up")).collect();
        assert_eq!(gave_up.len(), n - 1, "seed {seed}:\n{}", told.log.join("\n"));
        for line in gave_up {
            assert!(line.contains(&format!("rank {died} ")), "seed {seed}: {line}");
        }
    }
}

/// A plan is broken in one story only. That story notices each broken plan of a rank, by wrong means, the deadline or a panic; a story that another
/// thread tells meanwhile ends well each time.
#[test]
fn every_broken_plan_is_noticed_in_its_story_and_in_no_other() {
    let plot = Plot { n: 3, rounds: 1, algo: Algo::Ring, dies: false };
    let shape = Shape { n: 3, rank: 1, in_place: true, ..Shape::default() };
    let all = mutations(Kind::AllReduce, &plan(Kind::AllReduce, Algo::Ring, &shape).unwrap());
    assert!(all.len() > 20, "{}", all.len());
    let ends_well = |told: &Told| told.is_over && told.lines("has the means") == 3;
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| (0..all.len() as u64).all(|seed| ends_well(&tell(plot, seed))));
        for (seed, (step, mutation)) in all.iter().enumerate() {
            let (plan, step, mutation) = (Broken::Steps, *step, *mutation);
            let planted = Planted { kind: Kind::AllReduce, rank: 1, plan, step, mutation };
            let told = planted_in_story(planted, || catch_unwind(|| tell(plot, seed as u64)));
            // The kernels may panic at a plan that makes no sense at all: then it was noticed.
            let Ok(told) = told else { continue };
            assert!(!ends_well(&told), "{planted:?} was not noticed:\n{}", told.log.join("\n"));
        }
        assert!(beside.join().unwrap(), "nothing was planted in the other story");
    });
}
