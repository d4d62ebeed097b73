//! Training with many ranks: [`Buckets`] reduce gradients while the rest of the backward pass still computes.
//!
//! ```
//! use allstream::train::{Buckets, Param};
//!
//! # fn backward() -> Vec<(usize, Vec<f32>)> { vec![(1, vec![1.0; 3]), (0, vec![0.5; 8])] }
//! # async fn training(comm: allstream::Comm) -> Result<(), allstream::Error> {
//! let layout = [Param::of::<f32>(8), Param::of::<f32>(3)];
//! let mut buckets = Buckets::new(&comm.share(), &layout).await?; // the layout is compared between ranks
//! for _step in 0..10 {
//!     for (i, grad) in backward() {
//!         buckets.push(i, grad)?; // a bucket is reduced as soon as its last gradient is here
//!     }
//!     for (i, grad) in buckets.finish().await?.enumerate() {
//!         assert_eq!(grad.len(), layout[i].len()); // the mean over all ranks, in the order of the layout
//!     }
//! }
//! buckets.close().await?;
//! # Ok(()) }
//! # futures::executor::block_on(training(allstream::Comm::local(1).unwrap().remove(0))).unwrap();
//! ```
//!
//! # The walk of a step
//! 1. **Push.** The gradient is compared with the layout (index, type, length, place); what does not fit comes back with the error, and
//!    nothing has happened. Else `Buckets` owns it, and its bucket waits for one gradient less.
//! 2. **Launch.** Buckets are submitted in one order on all ranks, each as soon as all its gradients are there and all buckets before it
//!    have been submitted. Gradients of less than 64 KB, and all that are compressed, are copied into a contiguous buffer for each element
//!    type, which a bucket on the host keeps from step to step; the others are reduced where they lie. A bucket that then is one buffer is
//!    reduced by an `all_reduce` (sharded: a `reduce_scatter`), any other by an `all_reduce_list`: one operation either way. The collectives
//!    of one communicator run one after another. So `Buckets` has a communicator of its own (a [`dup`](crate::SharedComm::dup)): no
//!    collective of the loop waits for a bucket, and no bucket for a collective of the loop.
//! 3. **Finish.** Buckets are awaited in their order, packed gradients are copied back to where they came from, and all buffers are
//!    given back in the order of the layout. On failure all gradients that can be had come back with the error.
//!
//! # An optimizer whose state is divided among the ranks
//! With [`Options::sharded`] (ZeRO stage 1) each rank gets the mean of its own part of the gradients only, updates that part of the weights with
//! the optimizer's state of that part, and [`Buckets::gather`] gives all weights to all ranks. This sends as much as `all_reduce`. Each of
//! n ranks updates one n-th of the weights, and keeps the optimizer's state of that part only.
//!
//! ```
//! use allstream::train::{Buckets, Options, Param};
//!
//! # fn backward(weights: &[Vec<f32>]) -> Vec<Vec<f32>> { weights.to_vec() }
//! # async fn training(comm: allstream::Comm) -> Result<(), allstream::Error> {
//! let mut weights = vec![vec![1.0f32; 8], vec![2.0; 3]];
//! let layout = [Param::of::<f32>(8), Param::of::<f32>(3)];
//! let mut buckets = Buckets::with(&comm.share(), &layout, Options::default().sharded()).await?;
//! let mut momentum: Vec<Vec<f32>> = (0..layout.len()).map(|i| vec![0.0; buckets.owned(i).len()]).collect();
//! for _step in 0..10 {
//!     for (i, grad) in backward(&weights).into_iter().enumerate().rev() {
//!         buckets.push(i, grad)?;
//!     }
//!     let grads: Vec<Vec<f32>> = buckets.finish().await?.collect();
//!     for (i, grad) in grads.iter().enumerate() {
//!         let owned = buckets.owned(i);
//!         let state = momentum[i].iter_mut().zip(&grad[owned.clone()]);
//!         for (weight, (momentum, grad)) in weights[i][owned].iter_mut().zip(state) {
//!             *momentum = 0.9 * *momentum + grad;
//!             *weight -= 0.1 * *momentum;
//!         }
//!     }
//!     weights = buckets.gather(weights).await?;
//! }
//! buckets.close().await?;
//! # Ok(()) }
//! # futures::executor::block_on(training(allstream::Comm::local(1).unwrap().remove(0))).unwrap();
//! ```
//!
//! # Where the time goes
//! [`Buckets::report`] says of the last step how long it computed, how long its buckets took, and how long the loop waited for them (*exposed*).
//! `allstream trace --overlap` says the same of the last steps of all ranks, and `allstream trace --perfetto` draws them.
//!
//! # Which gradients share a bucket
//! In the first step buckets take the parameters from the layout's end to its beginning, which is roughly how backward passes go. When that step
//! ends, all ranks learn the order in which rank 0 has pushed, and form the buckets anew by it (unless they are sharded). The results of a step
//! in another order are as right, but its buckets may be launched later. A bucket takes parameters until it has an eighth of all gradients, at
//! least 1 MB and at most 25 MB ([`Options::bucket_bytes`]); the first has 1 MB, so that communication begins early.
//!
//! # Gradients on devices
//! [`Param::on_device`] declares that a parameter's gradient is on a device. Such gradients share no bucket with those on the host,
//! and a rank has them all on one device. When a bucket is launched, a kernel packs its small gradients, after the work that is on their streams
//! by then; after the reduction another kernel copies them back. `finish` returns when all buckets are reduced. The copies back may still be under
//! way then, in the order of the gradients' streams.
//!
//! If the communicator that [`Buckets::new`] was given is bound to devices ([`Comm::bind_device`](crate::Comm::bind_device), or
//! [`bind_nccl`](crate::Comm::bind_nccl)), the buckets' own communicator is bound in the same way, and the devices reduce the buckets. Else the
//! buckets are staged through the host's memory. NCCL needs one order of all collectives on a device: so all ranks must make the loop's own
//! collectives on device buffers at the same place among their pushes, best between two steps.
//!
//! # What allocates
//! Once the order is learnt, a step on the host that `finish` ends allocates nothing if each bucket is one buffer: all of its gradients are
//! packed and of one type, or it has a single one. A bucket of several buffers allocates what an `all_reduce_list` does: a few small vectors. On a
//! device a bucket with packed gradients takes memory of the pool and a few small vectors in each step.

mod bucket;
mod buckets;
mod clip;
mod layout;
mod pack;
mod report;

pub use buckets::{Buckets, NodeBuckets};
pub use clip::clip_norm;
pub use layout::{Options, Param};
pub use report::{BucketReport, Report};
