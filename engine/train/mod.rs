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
//!    type, which a bucket on the host keeps from step to step; the others are reduced where they lie. A bucket that is one buffer then is
//!    an `all_reduce` (sharded: a `reduce_scatter`), any other an `all_reduce_list`: one operation either way. `Buckets` has a communicator
//!    of its own (a [`dup`](crate::SharedComm::dup)), because the collectives of one communicator run one after another: so nothing that
//!    the loop calls waits for buckets, nor they for it.
//! 3. **Finish.** Buckets are awaited in their order, packed gradients are copied back to where they came from, and all buffers are
//!    given back in the order of the layout. On failure all that can be had come back with the error.
//!
//! # An optimizer whose state is divided among the ranks
//! With [`Options::sharded`] (ZeRO stage 1) each rank gets the mean of its own part of the gradients only, updates that part of the weights with
//! the optimizer's state of that part, and [`Buckets::gather`] gives all weights to all ranks. As much is sent as by `all_reduce`, and of
//! n ranks each keeps the state of one n-th of the weights, and updates that.
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
//! [`Buckets::report`] says of the last step how long it computed, how long its buckets took, and how much of that was exposed: the loop waited
//! for it. `allstream trace --overlap` says so of the last steps of all ranks, and `allstream trace --perfetto` draws them.
//!
//! # Which gradients share a bucket
//! The first step takes the parameters in the layout's order from its end, which is roughly how backward passes go. At its end all ranks
//! take the order in which rank 0 has pushed, and buckets are formed anew by that (not where they are sharded). A step whose order is another
//! is as right as any; its buckets may be launched later. A bucket takes parameters until it has an eighth of all gradients, at least 1 MB and
//! at most 25 MB ([`Options::bucket_bytes`]); the first has 1 MB, so that communication begins early.
//!
//! # Gradients on devices
//! [`Param::on_device`] declares that a parameter's gradient is on a device. Such gradients share no bucket with those of the host; all of
//! a rank are on one device. A kernel packs the small ones when their bucket is launched, behind what their streams hold, and another one
//! copies them back: `finish` returns when all buckets are reduced, and gives gradients back in the order of their streams, where that copy
//! may still be under way.
//!
//! Where the communicator that [`Buckets::new`] was given is bound to devices ([`Comm::bind_device`](crate::Comm::bind_device), or
//! [`bind_nccl`](crate::Comm::bind_nccl)), the buckets' own is bound in the same way, and the devices reduce the buckets; else they are staged
//! through the host's memory. NCCL wants one order of all collectives on a device: there all ranks make the loop's own collectives on device
//! buffers at the same place among their pushes, best between two steps.
//!
//! # What allocates
//! On the host a step that `finish` ends allocates nothing once the order is learnt, if each bucket is one buffer: all of its gradients are
//! packed into that, or it has a single gradient. A bucket of several buffers costs what an `all_reduce_list` costs: a few small vectors.
//! On a device a bucket that packs takes memory of the pool and a few small vectors in each step.

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
