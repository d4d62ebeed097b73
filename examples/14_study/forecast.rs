//! How long a step would take with more workers than there are: collectives as the simulator predicts, computing as measured.

use std::time::Duration;

use allstream::Kind;
use allstream::plan::{Env, choose};
use allstream::sim::{self, simulate};

use super::Result;
use super::network::{Network, Times};

/// Real ranks pass on a part of a frame once this many bytes have come. Simulated frames arrive whole, so they are made this small.
const SLICE: usize = 32 << 10;

/// Seconds of a step by each system, in the order of `SYSTEMS`. `line`: latency (seconds) and bandwidth (bytes a second).
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
    // A bucket's all-reduce begins when its gradient is there and the all-reduce before it is done.
    let (mut ready, mut done) = (times.forward, 0.0_f64);
    for time in times.layers.iter().rev() {
        ready += time;
        done = done.max(ready) + bucket;
    }
    Ok([computing + layers as f64 * by_owner, computing + whole, done])
}
