//! What a step would take with more workers than there are: the collectives by the simulator, computing as it was measured.

use std::time::Duration;

use allstream::Kind;
use allstream::plan::{Env, choose};
use allstream::sim::{self, simulate};

use super::Result;
use super::network::{Network, Times};

/// Ranks pass on what has come of a frame from this size on, and simulated frames arrive whole.
const SLICE: usize = 32 << 10;

/// Seconds of a step by each system, in their order, on lines of a latency (seconds) and a bandwidth (bytes a second).
pub(crate) fn seconds(n: usize, network: &Network, times: &Times, line: (f64, f64)) -> Result<[f64; 3]> {
    let mut net = sim::Network::new(Duration::from_secs_f64(line.0), line.1);
    net.slice = Some(SLICE);
    let collective = |kind: Kind, bytes: usize| -> Result<f64> {
        let algo = choose(kind, bytes, &Env { n, hosts: n, ..Env::default() });
        Ok(simulate(kind, algo, n, bytes, &net)?.time.as_secs_f64())
    };
    let (layer, layers) = (network.layer_bytes(), network.layers.len());
    let computing = times.forward + times.backward();
    let by_owner = collective(Kind::Reduce, layer)? + collective(Kind::Broadcast, layer)?;
    let whole = collective(Kind::AllReduce, layer * layers)?;
    let bucket = collective(Kind::AllReduce, layer)?;
    // A bucket begins when its gradient is there and the one before it is done.
    let (mut ready, mut done) = (times.forward, 0.0_f64);
    for time in times.layers.iter().rev() {
        ready += time;
        done = done.max(ready) + bucket;
    }
    Ok([computing + layers as f64 * by_owner, computing + whole, done])
}
