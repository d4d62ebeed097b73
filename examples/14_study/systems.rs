//! Three ways from gradients to the next weights.

use std::mem;
use std::time::Instant;

use allstream::train::{Buckets, Options, Param};
use allstream::{Comm, ReduceOp};

use super::Result;
use super::network::Worker;

#[derive(Clone, Copy)]
pub(crate) enum System {
    ParameterServer,
    AllReduce,
    Buckets,
}

pub(crate) const SYSTEMS: [(&str, System); 3] = [
    ("parameter server", System::ParameterServer),
    ("all-reduce", System::AllReduce),
    ("buckets", System::Buckets),
];

/// Trains one step, in which connections are made, and then `steps` more. Returns the seconds of the latter, on the slowest rank.
pub(crate) async fn train(system: System, comm: &mut Comm, worker: &mut Worker, steps: u64) -> Result<f64> {
    let mut buckets = None;
    if let System::Buckets = system {
        let layout: Vec<Param> =
            worker.network.layers.iter().map(|layer| Param::of::<f32>(layer.len())).collect();
        // Each layer is a bucket of its own.
        let options = Options::default().first_bucket_bytes(1).bucket_bytes(1);
        buckets = Some(Buckets::with(&comm.share(), &layout, options).await?);
    }
    let mut begun = Instant::now();
    for step in 0..=steps {
        match (system, &mut buckets) {
            (System::ParameterServer, _) => parameter_server(comm, worker).await?,
            (_, Some(buckets)) => overlapped(buckets, worker).await?,
            (_, None) => all_reduce(comm, worker).await?,
        }
        if step == 0 {
            comm.barrier().await?;
            begun = Instant::now();
        }
    }
    let mine = begun.elapsed().as_secs_f64();
    if let Some(buckets) = buckets {
        buckets.close().await?;
    }
    Ok(comm.op(ReduceOp::Max).all_reduce_value(mine).await?)
}

/// The backward pass; then each gradient is reduced to its parameter's owner, which makes the step and broadcasts the new weights.
///
/// Each collective is submitted as early as possible. The collectives of one communicator run one after another, each on the lines of
/// all workers.
async fn parameter_server(comm: &mut Comm, worker: &mut Worker) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let mut reducing = Vec::new();
    let mut gradients = Vec::new();
    worker.step(|layer, gradient| {
        gradients.push((layer, gradient));
        Ok(())
    })?;
    for (layer, gradient) in gradients {
        reducing.push((layer, comm.op(ReduceOp::Avg).reduce(gradient, layer % size)));
    }
    let mut broadcasting = Vec::new();
    for (layer, work) in reducing {
        let gradient = work.await?;
        if layer % size == rank {
            worker.network.descend(layer, &gradient);
        }
        worker.gradients[layer] = gradient;
        let weights = mem::take(&mut worker.network.layers[layer]);
        broadcasting.push((layer, comm.broadcast(weights, layer % size)));
    }
    for (layer, work) in broadcasting {
        worker.network.layers[layer] = work.await?;
    }
    Ok(())
}

/// The backward pass; then one all-reduce of all gradients, and the step of every parameter on every rank.
async fn all_reduce(comm: &mut Comm, worker: &mut Worker) -> Result<()> {
    let mut gradients = vec![Vec::new(); worker.network.layers.len()];
    worker.step(|layer, gradient| {
        gradients[layer] = gradient;
        Ok(())
    })?;
    worker.gradients = comm.op(ReduceOp::Avg).all_reduce_list(gradients).await?;
    for (layer, gradient) in worker.gradients.iter().enumerate() {
        worker.network.descend(layer, gradient);
    }
    Ok(())
}

/// Each gradient is on its way while those of the layers before it are computed.
async fn overlapped(buckets: &mut Buckets<Vec<f32>>, worker: &mut Worker) -> Result<()> {
    worker.step(|layer, gradient| {
        buckets.push(layer, gradient)?;
        Ok(())
    })?;
    for (layer, gradient) in buckets.finish().await?.enumerate() {
        worker.network.descend(layer, &gradient);
        worker.gradients[layer] = gradient;
    }
    Ok(())
}
