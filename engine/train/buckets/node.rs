//! [`NodeBuckets`]: the gradients of several devices of one process.

use std::fmt;

use super::Buckets;
use super::gradients::Back;
use crate::comm::{Node, Ordered, Stream, all_of, first_error, together};
use crate::error::{Error, Failed};
use crate::mem::{AnyBuf, Buf};
use crate::train::{Options, Param};

/// [`Buckets`] for each device of a [`Node`]: each device pushes its own gradients, and one call finishes the step of all.
///
/// ```
/// use allstream::Node;
/// use allstream::train::{NodeBuckets, Options, Param};
///
/// # async fn training(mut node: Node) -> Result<(), allstream::Error> {
/// let layout = [Param::of::<f32>(8), Param::of::<f32>(3)];
/// let mut buckets = NodeBuckets::with(&mut node, &layout, Options::default()).await?;
/// for device in 0..node.devices() {
///     for i in (0..layout.len()).rev() {
///         buckets.device(device)?.push(i, vec![device as f32; layout[i].len()])?;
///     }
/// }
/// let grads: Vec<Vec<Vec<f32>>> = buckets.finish().await?; // by device, then by parameter
/// assert_eq!(grads[0], grads[1]);
/// buckets.close().await?;
/// # Ok(()) }
/// # futures::executor::block_on(training(allstream::Node::local(2).unwrap())).unwrap();
/// ```
pub struct NodeBuckets<B: Buf = AnyBuf>(Vec<Buckets<B>>);

/// A step that a stream of each device waits for.
type JoinedNode<B> = Result<Vec<Ordered<Vec<B>, Back<B>>>, Failed<Vec<Back<B>>>>;

impl<B: Buf> fmt::Debug for NodeBuckets<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NodeBuckets").field(&self.0).finish()
    }
}

impl<B: Buf> NodeBuckets<B> {
    /// As [`Buckets::with`], for each device. Collective: all processes of the node's group call it.
    ///
    /// # Errors
    /// As of `Buckets::with`.
    pub async fn with(node: &mut Node, layout: &[Param], options: Options) -> Result<NodeBuckets<B>, Error> {
        let each =
            node.comms().iter().map(|comm| async { Buckets::with(&comm.share(), layout, options).await });
        all_of(each).await.map(NodeBuckets)
    }

    /// A device's own buckets, to push to and to ask for its report. A step is [finished](Self::finish) for all devices together.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the node has no such device.
    pub fn device(&mut self, device: usize) -> Result<&mut Buckets<B>, Error> {
        let devices = self.0.len();
        let none = || format!("there is no device {device}: the node has {devices}");
        self.0.get_mut(device).ok_or_else(|| Error::invalid("NodeBuckets::device", none()))
    }

    /// All devices' buckets, for instance to give each to a thread that pushes.
    pub fn devices(&mut self) -> &mut [Buckets<B>] {
        &mut self.0
    }

    /// Ends the step by making a stream of each device wait for its buckets, and not the caller: [`Buckets::join`] of all devices. Gives a
    /// result for each device.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is not one stream for each device, if the gradients of one of the node's devices are on another CUDA device
    /// than its stream, if a device has no gradient of some parameters (the error names device and parameters), or if there is no memory for
    /// the next step's packed buffers; the step then goes on. Else the errors of `Buckets::join` that are known already, with all gradients
    /// that can be had.
    pub fn join(&mut self, streams: &[impl Stream]) -> JoinedNode<B> {
        let (found, devices) = (streams.len(), self.0.len());
        if found != devices {
            let why = format!("{found} streams for the {devices} devices of a node: one for each is needed");
            return Err(Failed { buf: None, error: Error::invalid("NodeBuckets::join", why) });
        }
        if let Err(error) = self.check_whole("join") {
            let Some(dead) = self.dead() else { return Err(Failed { buf: None, error }) };
            return Err(self.failed_here(&dead));
        }
        let elsewhere = |(device, (buckets, stream)): (usize, (&Buckets<B>, _))| {
            buckets.elsewhere(stream).map(|problem| format!("stream {device}: {problem}"))
        };
        if let Some(problem) = self.0.iter().zip(streams).enumerate().find_map(elsewhere) {
            return Err(Failed { buf: None, error: Error::invalid("NodeBuckets::join", problem) });
        }
        // All devices launch before any joins. A join may wait for the other devices' part of a bucket, which this thread launches, too.
        self.launch_rest().map_err(|error| self.failed_here(&error))?;
        let mut spares = self.0.iter_mut().zip(streams);
        spares
            .try_for_each(|(buckets, stream)| buckets.make_spare_for(stream))
            .map_err(|error| Failed { buf: None, error })?;
        let joined = self.0.iter_mut().zip(streams).map(|(buckets, stream)| buckets.join_launched(stream));
        all_or_back(joined.collect(), Ordered::wait)
    }

    /// Launches the buckets of all devices that are not launched yet, in rounds: a device that has as many in flight as it may waits for its oldest
    /// bucket before it launches another, and that bucket ends only once the other devices have launched it, too.
    fn launch_rest(&mut self) -> Result<(), Error> {
        self.0.iter_mut().try_for_each(Buckets::launch_first)?;
        let mut is_left = true;
        while is_left {
            is_left = false;
            for buckets in &mut self.0 {
                is_left |= buckets.launch_next()?;
            }
        }
        Ok(())
    }

    /// Pushes what was accumulated. If gradients are missing, returns an error that names the first device without some of them.
    fn check_whole(&mut self, call: &str) -> Result<(), Error> {
        self.0.iter_mut().for_each(Buckets::push_accumulated);
        let missing = |(device, buckets): (usize, &Buckets<B>)| Some((device, buckets.grads.missing()?));
        let Some((device, problem)) = self.0.iter().enumerate().find_map(missing) else { return Ok(()) };
        Err(Error::invalid(call, format!("on device {device} of the node, {problem}")))
    }

    /// Why the communicator of a device is dead, if one is.
    fn dead(&self) -> Option<Error> {
        self.0.iter().find_map(|buckets| buckets.comm.check().err())
    }

    /// Ends the communicators of all devices, and gives all gradients back.
    fn failed_here(&mut self, error: &Error) -> Failed<Vec<Back<B>>> {
        let back = |buckets: &mut Buckets<B>| buckets.failed_here(error.clone()).buf.unwrap_or_default();
        Failed { buf: Some(self.0.iter_mut().map(back).collect()), error: error.clone() }
    }

    /// Waits until all buckets of all devices are reduced, and gives every gradient back: by device, then in the order of the layout. See
    /// [`Buckets::finish`].
    ///
    /// # Errors
    /// [`Error::Invalid`] that names a device and its parameters without a gradient; the step goes on then. Else the cause for which the
    /// communicator of these buckets is dead, and all gradients that can be had.
    pub async fn finish(&mut self) -> Result<Vec<Vec<B>>, Failed<Vec<Back<B>>>> {
        // Checked before anything is awaited: else other devices would wait for operations that a device without all gradients never calls.
        if let Err(error) = self.check_whole("finish") {
            let Some(dead) = self.dead() else { return Err(Failed { buf: None, error }) };
            let all = together(self.0.iter_mut().map(Buckets::take_back)).await;
            return Err(Failed { buf: Some(all), error: dead });
        }
        let each = self.0.iter_mut().map(|buckets| async { buckets.finish().await.map(Iterator::collect) });
        all_or_back(together(each).await, Ok)
    }

    /// Closes the communicators of these buckets, between two steps. See [`Comm::close`](crate::Comm::close).
    ///
    /// # Errors
    /// As of `Comm::close`.
    pub async fn close(self) -> Result<(), Error> {
        all_of(self.0.into_iter().map(Buckets::close)).await
    }
}

/// The results of all devices; or the first error, and all gradients that can be had. `wait` gets the gradients of a device that did not fail.
fn all_or_back<T, B>(
    results: Vec<Result<T, Failed<Back<B>>>>,
    wait: impl Fn(T) -> Result<Vec<B>, Failed<Back<B>>>,
) -> Result<Vec<T>, Failed<Vec<Back<B>>>> {
    let Some(error) = first_error(&results) else {
        return Ok(results.into_iter().filter_map(Result::ok).collect());
    };
    let back = |result: Result<T, Failed<Back<B>>>| match result.and_then(&wait) {
        Ok(grads) => grads.into_iter().map(Some).collect(),
        Err(failed) => failed.buf.unwrap_or_default(),
    };
    Err(Failed { buf: Some(results.into_iter().map(back).collect()), error })
}
