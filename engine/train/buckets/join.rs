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
    /// Ends the step as [`finish`](Self::finish) does, but makes `stream` wait for the buckets, and not the caller. The result is for jobs
    /// on that stream, or can be awaited. The next step may begin at once.
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
    /// A rank may end one step by `join` and another by `finish`, and some ranks may `join` a step that others `finish`.
    ///
    /// - On a [`HostStream`] a job on the stream copies packed gradients back. Each step that is not over has packed buffers of its own.
    /// - On a [`DeviceStream`](crate::cuda::DeviceStream) the stream waits for gradients on devices, if a device reduces them
    ///   ([`Comm::bind_device`](crate::Comm::bind_device)); for all others, such as those on the host, this call waits. A step that is
    ///   joined by a device's stream has no [`report`](Self::report). If several ranks of one process share a device, let all of them
    ///   push their gradients before any joins (a [`barrier`](crate::SharedComm::barrier) in between does that), for the reason that
    ///   [`Work::join`](crate::Work::join) gives.
    ///
    /// This call waits in three cases: while this step and the joined steps that are not over have more than 256 buckets together, for the
    /// oldest joined step; if this step has more than 512 buckets, for the first ones; and in the second step, if the first was joined, for
    /// rank 0's order of the first.
    ///
    /// # Errors
    /// [`Error::Invalid`], without the gradients: some are missing, they are on a device and `stream` is of another one, or there is no memory
    /// for the next step's packed buffers; the step then goes on. Else those of `finish` that are known already. If an error becomes known later,
    /// the result fails with it and with all gradients that can be had: jobs on a host stream then do not run; on a device's stream they have
    /// run already, and the contents of the gradients are unspecified.
    pub fn join(&mut self, stream: &impl Stream) -> Joined<B> {
        self.push_accumulated();
        if let Some(problem) = self.grads.missing() {
            return Err(match self.comm.check() {
                Ok(()) => Failed { buf: None, error: Error::invalid(CALL, problem) },
                Err(error) => self.failed_here(error),
            });
        }
        if let Some(problem) = self.elsewhere(stream) {
            return Err(Failed { buf: None, error: Error::invalid(CALL, problem) });
        }
        if let Err(error) = self.launch_rest() {
            return Err(self.failed_here(error));
        }
        self.join_launched(stream)
    }

    /// What is wrong if the gradients are on one device and `stream` is of another: kernels on that stream could not copy packed gradients back.
    pub(super) fn elsewhere(&self, stream: &impl Stream) -> Option<String> {
        let (Either::Device(stream), Some(ours)) = (stream.either(), &self.device) else { return None };
        let found = stream.device();
        (found != *ours).then(|| {
            format!("the gradients are on {ours:?}, and the stream is of {found:?}: join with a stream of the gradients' device")
        })
    }

    /// Makes packed buffers for the next step if `stream` is the host's: its job keeps this step's packed buffers until it copies them back.
    pub(super) fn make_spare_for(&mut self, stream: &impl Stream) -> Result<(), Error> {
        match stream.either() {
            Either::Host(_) => self.set.make_spare(&self.comm),
            Either::Device(_) => Ok(()),
        }
    }

    /// Makes a stream wait for a step whose buckets are all launched.
    pub(super) fn join_launched(&mut self, stream: &impl Stream) -> Joined<B> {
        self.make_spare_for(stream).map_err(|error| Failed { buf: None, error })?;
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
                        format!(
                            "the order of parameters that it sent names parameter {i} twice, or there is no such parameter"
                        ),
                    ));
                }
            }
        }
        self.form(order.iter().map(|i| *i as usize))?;
        for i in (0..self.layout.len()).filter(|i| self.grads.is_pushed[*i]) {
            self.set.buckets[self.set.places[i]].fill();
        }
        Ok(())
    }

    /// Forms the buckets anew if the order that the step before was to learn has come.
    pub(super) fn take_order(&mut self) {
        if let Some(work) = self.order.of_joined.take_if(|work| work.is_finished())
            && let Err(error) = work.wait().map_err(Error::from).and_then(|order| self.reorder(order))
        {
            self.progress.broken.get_or_insert(error);
        }
    }

    /// Launches the buckets of the step that are not launched yet. Called when the loop ends the step.
    fn launch_rest(&mut self) -> Result<(), Error> {
        self.launch_first()?;
        while self.launch_next()? {}
        Ok(())
    }

    /// Launches as many of these buckets as may be in flight.
    pub(super) fn launch_first(&mut self) -> Result<(), Error> {
        self.times.called.get_or_insert_with(Instant::now);
        if let Some(work) = self.order.of_joined.take() {
            let order = work.wait()?;
            self.reorder(order)?;
        }
        self.set.wait_for_joined();
        self.launch_full();
        Ok(())
    }

    /// Waits for the oldest bucket in flight, and launches the next one. `false`: there is none, as all are launched.
    pub(super) fn launch_next(&mut self) -> Result<bool, Error> {
        if self.progress.launched == self.set.buckets.len() {
            return self.progress.broken.take().map_or(Ok(false), Err);
        }
        self.set.buckets[self.progress.landed].land_here(&mut self.grads.bufs)?;
        self.progress.landed += 1;
        self.launch_full();
        Ok(true)
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
                // The operations of a communicator end in order: the end of the last one is the end of all.
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

    /// Ends the communicator, as other ranks would wait for collectives that this one no longer calls, and gives all gradients back.
    pub(super) fn failed_here(&mut self, error: Error) -> Failed<Back<B>> {
        let error = self.end_comm(error);
        for bucket in &mut self.set.buckets {
            // The cause of the failure is known already.
            let _ = bucket.land_here(&mut self.grads.bufs);
        }
        Failed { buf: Some(self.back()), error }
    }
}

/// Puts gradients in their places.
fn place<B>(grads: &mut Back<B>, placed: Placed<B>) {
    placed.into_iter().for_each(|(i, grad)| grads[i] = Some(grad));
}

/// Puts the gradients of a failed operation in their places, and gives its error.
fn place_failed<B>(grads: &mut Back<B>, failed: Failed<Placed<B>>) -> Error {
    place(grads, failed.buf.unwrap_or_default());
    failed.error
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;

    use super::*;
    use crate::comm::Comm;
    use crate::train::{Options, Param};

    #[test]
    fn an_order_is_learnt_anew_also_while_an_older_one_is_on_its_way() {
        let comm = Comm::local(1).unwrap().remove(0);
        let layout = [Param::of::<f32>(4); 3];
        let options = Options::default().first_bucket_bytes(1).bucket_bytes(1);
        let mut buckets = block_on(Buckets::with(&comm.share(), &layout, options)).unwrap();
        let push_all = |buckets: &mut Buckets<Vec<f32>>, order: [usize; 3]| {
            order.into_iter().for_each(|i| assert!(buckets.push(i, vec![1.0; 4]).unwrap().is_none()));
        };
        push_all(&mut buckets, [2, 0, 1]);
        buckets.join(&HostStream::new("compute").unwrap()).unwrap().wait().unwrap();
        buckets.relearn();
        push_all(&mut buckets, [1, 2, 0]);
        drop(block_on(buckets.finish()).unwrap());
        assert_eq!(buckets.set.places, [2, 0, 1], "the buckets of parameters 0, 1 and 2");
    }
}
