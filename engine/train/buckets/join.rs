//! A step that a stream waits for, in place of the caller.

use std::time::Instant;

use super::Buckets;
use super::gradients::Back;
use crate::comm::{Either, Ordered, Stream, push, ready};
use crate::device::DeviceStream;
use crate::error::{Error, Failed};
use crate::mem::{Buf, HostStream};
use crate::train::bucket::Placed;

const CALL: &str = "join";

/// A step that a stream waits for.
pub(super) type Joined<B> = Result<Ordered<Vec<B>, Back<B>>, Failed<Back<B>>>;

impl<B: Buf> Buckets<B> {
    /// Ends the step as [`finish`](Self::finish) does, but makes `stream` wait for the buckets, and not the caller: what comes back is for
    /// jobs on that stream, or to be awaited. The next step may begin at once.
    ///
    /// ```
    /// use allstream::HostStream;
    /// use allstream::train::{Buckets, Param};
    ///
    /// # fn backward(_: &[f32]) -> Vec<f32> { vec![1.0; 8] }
    /// # async fn training(comm: allstream::Comm) -> Result<(), allstream::Error> {
    /// let compute = HostStream::new("compute")?;
    /// let mut buckets = Buckets::new(&comm.share(), &[Param::of::<f32>(8)]).await?;
    /// let weights = vec![1.0f32; 8];
    /// buckets.push(0, backward(&weights))?;
    /// let grads = buckets.join(&compute)?; // returns at once
    /// let weights = grads.launch(&compute, move |grads: Vec<Vec<f32>>| {
    ///     weights.iter().zip(&grads[0]).map(|(w, g)| w - 0.1 * g).collect::<Vec<f32>>()
    /// });
    /// assert_eq!(weights.await?, [0.9; 8]);
    /// buckets.close().await?;
    /// # Ok(()) }
    /// # futures::executor::block_on(training(allstream::Comm::local(1).unwrap().remove(0))).unwrap();
    /// ```
    ///
    /// A rank may end one step by `join` and another by `finish`, and of one step some ranks may `join` while others `finish`.
    ///
    /// - On a [`HostStream`] packed gradients are copied back by a job on it. Steps that are not over have packed buffers of their own.
    /// - On a [`DeviceStream`](crate::cuda::DeviceStream) the stream waits for the gradients on devices that a device reduces
    ///   ([`Comm::bind_device`](crate::Comm::bind_device)); for all others, those on the host included, this call waits. A step that is
    ///   joined by a device's stream has no [`report`](Self::report). Where several ranks of one process share a device, let all of them
    ///   push their gradients before any joins (a [`barrier`](crate::SharedComm::barrier) in between does that), for the reason that
    ///   [`Work::join`](crate::Work::join) gives.
    ///
    /// The caller waits while this step's buckets and those of earlier joined steps are more than 256, as long as an earlier one is not over;
    /// and in the second step for the order of the first.
    ///
    /// # Errors
    /// As of `finish`, what is known already. What becomes known later is the error of what is returned, with all gradients that can be had.
    /// Jobs on a host's stream do not run then; on a device's stream they have run already, and the contents of the gradients are unspecified.
    pub fn join(&mut self, stream: &impl Stream) -> Joined<B> {
        self.push_accumulated();
        if let Some(problem) = self.grads.missing() {
            return Err(match self.comm.check() {
                Ok(()) => Failed { buf: None, error: Error::invalid(CALL, problem) },
                Err(error) => self.failed_here(error),
            });
        }
        if let Err(error) = self.launch_rest() {
            return Err(self.failed_here(error));
        }
        self.join_launched(stream)
    }

    /// Makes a stream wait for a step whose buckets are all launched.
    pub(super) fn join_launched(&mut self, stream: &impl Stream) -> Joined<B> {
        if matches!(stream.either(), Either::Host(_))
            && let Err(error) = self.set.make_spare(&self.comm)
        {
            return Err(Failed { buf: None, error });
        }
        self.order.learn_later(&mut self.comm);
        let buckets = self.set.buckets.len();
        let joined = match stream.either() {
            Either::Host(stream) => self.join_on_host(stream),
            Either::Device(stream) => self.join_on_device(stream)?,
        };
        self.set.ahead.push_back((buckets, joined.event().clone()));
        self.times.steps += 1;
        self.begin();
        Ok(joined)
    }

    /// Forms the buckets anew by this order, which rank 0 has broadcast. Called while none of this step's buckets is launched, or after all
    /// have come back.
    pub(super) fn reorder(&mut self, order: Vec<u64>) -> Result<(), Error> {
        let mut is_there = vec![false; self.layout.len()];
        for i in &order {
            match is_there.get_mut(*i as usize) {
                Some(there) if !*there => *there = true,
                _ => {
                    return Err(Error::protocol(
                        0,
                        format!("its order of parameters has {i}, or has it twice"),
                    ));
                }
            }
        }
        self.form(order.iter().map(|i| *i as usize))?;
        for i in (0..self.layout.len()).filter(|i| self.grads.is_pushed[*i]) {
            self.set.buckets[self.set.places[i]].fill();
        }
        self.order.is_learnt = true;
        Ok(())
    }

    /// Takes the order that the step before has learnt, if it has come.
    pub(super) fn take_order(&mut self) {
        if let Some(work) = self.order.of_joined.take_if(|work| work.is_finished())
            && let Err(error) = work.wait().map_err(Error::from).and_then(|order| self.reorder(order))
        {
            self.progress.broken.get_or_insert(error);
        }
    }

    /// Launches what is left of the step, which the loop wants to end now.
    pub(super) fn launch_rest(&mut self) -> Result<(), Error> {
        self.times.called.get_or_insert_with(Instant::now);
        if let Some(work) = self.order.of_joined.take() {
            let order = work.wait()?;
            self.reorder(order)?;
        }
        self.set.wait_for_joined();
        self.launch_full();
        while self.progress.launched < self.set.buckets.len() {
            self.set.buckets[self.progress.landed].land_here(&mut self.grads.bufs)?;
            self.progress.landed += 1;
            self.launch_full();
        }
        self.progress.broken.take().map_or(Ok(()), Err)
    }

    fn join_on_host(&mut self, stream: &HostStream) -> Ordered<Vec<B>, Back<B>> {
        if let Some(last) = self.set.buckets.last() {
            last.leave_to_progress_thread();
        }
        let next = self.set.spare.lock().pop().unwrap_or_default();
        let mut buckets = std::mem::replace(&mut self.set.buckets, next);
        let (mut grads, end) = (self.grads.take(), self.times.end_later());
        let (recorder, spare) = (self.comm.recorder().clone(), self.set.spare.clone());
        push(stream, move || {
            let mut result = Ok(());
            for bucket in &mut buckets {
                let landed = bucket.land_here(&mut grads);
                result = result.and(landed);
            }
            if let Err(error) = result {
                return Err(Failed { buf: Some(grads), error });
            }
            end(&recorder, &buckets);
            spare.lock().push(buckets);
            Ok(grads.into_iter().flatten().collect())
        })
    }

    fn join_on_device(&mut self, stream: &DeviceStream) -> Joined<B> {
        let mut last: Option<Ordered<Placed<B>, Placed<B>>> = None;
        for k in 0..self.set.buckets.len() {
            let error = match self.set.buckets[k].join(stream, &mut self.grads.bufs) {
                None => self.set.buckets[k].land_here(&mut self.grads.bufs).err(),
                Some(Err(failed)) => Some(place_failed(&mut self.grads.bufs, failed)),
                // The operations of a communicator end in their order: the last one says of all whether they have.
                Some(Ok(joined)) => match last.replace(joined).map(Ordered::in_order) {
                    None => None,
                    Some(Ok(placed)) => {
                        place(&mut self.grads.bufs, placed);
                        None
                    }
                    Some(Err(failed)) => Some(place_failed(&mut self.grads.bufs, failed)),
                },
            };
            if let Some(error) = error {
                match last.map(Ordered::wait) {
                    Some(Ok(placed)) => place(&mut self.grads.bufs, placed),
                    Some(Err(failed)) => drop(place_failed(&mut self.grads.bufs, failed)),
                    None => {}
                }
                return Err(self.failed_here(error));
            }
        }
        let mut grads = self.grads.take();
        Ok(match last {
            None => ready(Ok(grads.into_iter().flatten().collect())),
            Some(last) => last.then(move |result| match result {
                Ok(placed) => {
                    place(&mut grads, placed);
                    Ok(grads.into_iter().flatten().collect())
                }
                Err(failed) => {
                    let error = place_failed(&mut grads, failed);
                    Err(Failed { buf: Some(grads), error })
                }
            }),
        })
    }

    /// Ends the communicator, so that the others do not wait for what this rank does not call any more, and gives all back.
    pub(super) fn failed_here(&mut self, error: Error) -> Failed<Back<B>> {
        let error = self.end_comm(error);
        for bucket in &mut self.set.buckets {
            // Why is known already.
            let _ = bucket.land_here(&mut self.grads.bufs);
        }
        Failed { buf: Some(self.back()), error }
    }
}

/// Gradients get their places.
fn place<B>(grads: &mut Back<B>, placed: Placed<B>) {
    placed.into_iter().for_each(|(i, grad)| grads[i] = Some(grad));
}

/// The same with those that came back with an error.
fn place_failed<B>(grads: &mut Back<B>, failed: Failed<Placed<B>>) -> Error {
    place(grads, failed.buf.unwrap_or_default());
    failed.error
}
