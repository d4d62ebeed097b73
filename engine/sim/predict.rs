//! Times that the tuner's table has no measurement of, predicted by the simulator on links like those that were measured.

use std::time::Duration;

use super::{Loans, MOST_RANKS, Network, simulate};
use crate::link::{Lends, kinds};
use crate::plan::choices::block;
use crate::plan::{Shape, algorithms, suitable};
use crate::tuning::Figures;
use crate::types::{Algo, Kind};

/// Bytes a second, more than any port has: no port is between ranks of one host, so only their own work limits them.
const NO_PORT: f64 = 1e15;

/// Predicts how many microseconds a collective takes by an algorithm, on links with these figures. `bytes`: the size of a rank's
/// largest buffer, as `allstream perf` counts it. `None`: there is no such plan, it cannot be simulated, or the figures are impossible.
pub fn predict(kind: Kind, algo: Algo, ranks: usize, bytes: u64, figures: &Figures) -> Option<f64> {
    let Figures { bandwidth, memory, latency_us, frame_us, .. } = *figures;
    let possible = [bandwidth, memory].iter().all(|rate| rate.is_finite() && *rate > 0.0)
        && [latency_us, frame_us].iter().all(|us| us.is_finite() && *us >= 0.0);
    if !(1..=MOST_RANKS).contains(&ranks) || !possible || figures.cores == 0 {
        return None;
    }
    let per_host = ranks.div_ceil(figures.group.hosts.max(1));
    let hosts: Vec<u32> = (0..ranks).map(|rank| (rank / per_host) as u32).collect();
    let shape = Shape { n: ranks, hosts: &hosts, ..Shape::default() };
    if !algorithms(kind).contains(&algo) || suitable(kind, algo, &shape).is_err() {
        return None;
    }
    let bytes = usize::try_from(block(kind, ranks, bytes)).ok()?;
    let lends = kinds::of(figures.group.link)?.lends;
    let simulated = simulate(kind, algo, ranks, bytes, &network(figures, lends, per_host)).ok()?;
    Some(simulated.time.as_secs_f64() * 1e6)
}

fn micros(us: f64) -> Duration {
    Duration::try_from_secs_f64(us / 1e6).unwrap_or_default()
}

/// Between hosts ports limit the bytes, and ranks work for frames and on their own memory. On one host the cores do all the work.
fn network(figures: &Figures, lends: Lends, per_host: usize) -> Network {
    let one_host = figures.group.hosts <= 1;
    let bandwidth = if one_host { NO_PORT } else { figures.bandwidth };
    let mut network = Network::new(micros(figures.latency_us), bandwidth);
    network.memory = Some(figures.memory);
    network.frame = micros(figures.frame_us);
    network.cores = Some(figures.cores);
    network.per_host = (!one_host).then_some(per_host);
    if one_host {
        // Lent memory is fetched from another rank's core at the measured bandwidth of the ring. Only the reader does that, whereas over the
        // ring both ends copy each byte.
        let (in_slots, fetch) = (lends == Lends::Regions, Some(figures.bandwidth));
        network.loans = (lends != Lends::Nothing).then_some(Loans { in_slots, fetch });
        // The measured bandwidth is that of the slower end. `memory` already counts the receiver's copy (each byte is read and
        // written), so the time of that copy is subtracted. In one process the sender copies nothing.
        let each = 1.0 / figures.bandwidth;
        network.send = (lends != Lends::Anything).then_some(figures.bandwidth);
        network.receive = Some(each - 2.0 / figures.memory).filter(|left| *left > 0.0).map(|left| 1.0 / left);
    }
    network
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::{GroupShape, LinkClass};

    fn figures(link: LinkClass) -> Figures {
        Figures {
            group: GroupShape { link, hosts: 1, ranks: 2 },
            cores: 2,
            latency_us: 0.5,
            frame_us: 0.2,
            bandwidth: 10e9,
            memory: 40e9,
        }
    }

    /// Where a collective's time is mostly one of the given figures, the prediction is that figure.
    #[test]
    fn predictions_follow_the_figures() {
        let at =
            |kind, algo, ranks, bytes, figures: &Figures| predict(kind, algo, ranks, bytes, figures).unwrap();
        let tcp = Figures { latency_us: 10.0, frame_us: 3.0, bandwidth: 2e9, ..figures(LinkClass::TCP) };
        // Both ranks send at the same time: work for the frame at the sender, the latency, work for it at the receiver.
        let small = at(Kind::AllReduce, Algo::OneShot, 2, 4, &tcp);
        assert!((small - 16.0).abs() < 1.0, "{small}");
        // 16 MB one way at 2 GB/s are 8 ms.
        let large = at(Kind::Broadcast, Algo::OneShot, 2, 16 << 20, &tcp);
        assert!((large / 8389.0 - 1.0).abs() < 0.2, "{large}");
        // Four ranks take twice as long on two cores as on four.
        let four = |cores| at(Kind::AllGather, Algo::Direct, 4, 16 << 20, &Figures { cores, ..tcp });
        assert!((four(2) / four(4) - 2.0).abs() < 0.3, "{} {}", four(2), four(4));
        // In shared memory an all_reduce folds lent memory at once: that takes less time than a ring's steps.
        let shm = figures(LinkClass::SHM);
        assert!(
            at(Kind::AllReduce, Algo::Direct, 2, 4 << 20, &shm)
                < at(Kind::AllReduce, Algo::Ring, 2, 4 << 20, &shm)
        );
        assert_eq!(predict(Kind::AllReduce, Algo::TwoLevel, 4, 64, &shm), None, "one host has no two levels");
        assert_eq!(predict(Kind::AllReduce, Algo::Pairwise, 4, 64, &shm), None, "no such plan");
        assert_eq!(
            predict(Kind::AllReduce, Algo::Ring, usize::MAX, 64, &shm),
            None,
            "more than can be simulated"
        );
        for bandwidth in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(predict(Kind::AllReduce, Algo::Ring, 2, 64, &Figures { bandwidth, ..shm }), None);
        }
    }
}
