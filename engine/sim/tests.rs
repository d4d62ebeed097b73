//! Tests of [`simulate`]: its times against the formulas of the alpha-beta model, where that model has one.

use super::*;

const ALPHA: Duration = Duration::from_micros(10);

fn network() -> Network {
    Network::new(ALPHA, 10e9)
}

fn seconds(kind: Kind, algo: Algo, n: usize, bytes: usize, network: &Network) -> f64 {
    simulate(kind, algo, n, bytes, network).expect("a simulation").time.as_secs_f64()
}

/// Messages of one slice or less are not pipelined: the time is that of their hops, and a hop takes the latency and one frame's bytes.
#[test]
fn small_messages_take_their_hops() {
    let (alpha, header) = (ALPHA.as_secs_f64(), 64.0 / 10e9);
    for n in [2, 3, 8, 13, 64] {
        let ring = seconds(Kind::AllReduce, Algo::Ring, n, 8, &network());
        let hops = 2.0 * (n as f64 - 1.0);
        assert!((ring / (hops * (alpha + header)) - 1.0).abs() < 0.01, "n {n}: {ring}");
        let doubling =
            seconds(Kind::AllReduce, Algo::RecursiveDoubling, n.next_power_of_two(), 8, &network());
        let hops = f64::from(n.next_power_of_two().ilog2());
        assert!((doubling / (hops * (alpha + header)) - 1.0).abs() < 0.01, "n {n}: {doubling}");
    }
}

/// A message of many slices is pipelined: a ring takes little longer than 2(n-1)/n of the bytes take through one port.
#[test]
fn large_rings_are_as_fast_as_their_ports() {
    for n in [2, 4, 8, 16] {
        let bytes = 64 << 20;
        let ring = seconds(Kind::AllReduce, Algo::Ring, n, bytes, &network());
        let least = 2.0 * (n as f64 - 1.0) / n as f64 * bytes as f64 / 10e9;
        assert!(ring >= least && ring < 1.15 * least, "n {n}: {ring}, at least {least}");
    }
}

#[test]
fn what_is_slow_shows() {
    let time = |network: &Network| seconds(Kind::AllReduce, Algo::Ring, 8, 8 << 20, network);
    let plain = time(&network());
    let straggler = time(&Network { straggler: Some((3, 4.0)), ..network() });
    assert!(straggler > 3.0 * plain && straggler < 5.0 * plain, "{straggler} to {plain}");
    let lossy = Network { loss: 0.02, ..network() };
    let found = simulate(Kind::AllReduce, Algo::Ring, 8, 8 << 20, &lossy).expect("a simulation");
    assert!(found.lost > 0 && found.time.as_secs_f64() > plain + 1e-3, "{found:?}");
    assert_eq!(
        simulate(Kind::AllReduce, Algo::Ring, 8, 8 << 20, &lossy),
        Ok(found),
        "the same seed, the same run"
    );
    let memory = time(&Network { memory: Some(20e9), ..network() });
    assert!(memory > 1.2 * plain, "{memory} to {plain}");
}

#[test]
fn every_plan_ends() {
    let network = Network { per_host: Some(4), ..network() };
    for kind in Kind::ALL {
        for &algo in plan::algorithms(kind) {
            for (n, bytes) in [(1, 100), (2, 0), (7, 1000), (16, 300_001)] {
                match simulate(kind, algo, n, bytes, &network) {
                    Ok(found) => assert_eq!(found.frames == 0, n == 1, "{kind} by {algo}, n {n}"),
                    Err(error) => assert!(error.to_string().contains(algo.name()), "{error}"),
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |n, network: &Network| {
        simulate(Kind::AllReduce, Algo::Ring, n, 8, network).expect_err("refused").to_string()
    };
    assert!(refused(0, &network()).contains("1 to 1024"));
    assert!(refused(1025, &network()).contains("1025 ranks"));
    assert!(refused(4, &Network { straggler: Some((4, 2.0)), ..network() }).contains("rank 4"));
    assert!(refused(4, &Network { loss: 1.0, ..network() }).contains("below 1"));
    assert!(refused(4, &Network { bandwidth: 0.0, ..network() }).contains("bandwidth"));
}

#[test]
fn seeds_that_follow_each_other_give_different_losses() {
    let lossy = |seed| Network { loss: 0.02, seed, ..network() };
    let run = |seed| simulate(Kind::AllReduce, Algo::Ring, 8, 8 << 20, &lossy(seed)).expect("a simulation");
    let times: std::collections::BTreeSet<_> = (0..8).map(|seed| run(seed).time).collect();
    assert_eq!(times.len(), 8, "{times:?}");
    assert!((0..8).all(|seed| run(seed).lost > 0));
}
