//! [`Buckets`]: the step of a training loop, from the first gradient that is pushed to the last that comes back.

mod clip;
mod exchange;
mod gradients;
mod join;
mod node;
mod sharded;
mod step;

pub use node::NodeBuckets;

use std::fmt;
use std::time::Instant;
use std::vec::Drain;

use self::exchange::{PushOrder, UsedParams};
use self::gradients::{Back, Gradients};
use self::step::{Progress, Times};
use super::bucket::{Bucket, BucketSet};
use super::layout::{Options, Param, agree};
use super::report::Report;
use crate::comm::{Comm, SharedComm};
use crate::device::{Device, zero_on_device};
use crate::error::{Error, Failed};
use crate::mem::{AnyBuf, Buf, RawBuf, elements};

/// At most so many buckets of a step are in flight at a time.
const MOST_IN_FLIGHT: usize = 512;

/// Gradients of one model, reduced over all ranks in buckets while the backward pass still computes: see the
/// [module](super) for a loop, and for what happens in a step.
///
/// `B` is the buffer of a gradient: a `Vec<f32>`, any other [`Buf`], or [`AnyBuf`] where parameters have several types or places. `Buckets`
/// owns each buffer from [`push`](Self::push) to [`finish`](Self::finish), which gives the same buffer back.
///
/// All ranks push a gradient of each parameter in every step, in any order, and finish. Where any rank may have none for some
/// parameter, all ranks finish by [`finish_some`](Self::finish_some).
///
/// An error of the communication ends the communicator of these buckets on all ranks, and no other. After an error that says what is
/// wrong with a call ([`Error::Invalid`]) the step goes on.
pub struct Buckets<B: Buf = AnyBuf> {
    comm: Comm,
    layout: Vec<Param>,
    options: Options,
    /// The device of this rank's gradients, once that is known.
    device: Option<Device>,
    set: BucketSet<B>,
    grads: Gradients<B>,
    progress: Progress,
    times: Times,
    order: PushOrder,
    used: UsedParams,
}

impl<B: Buf> fmt::Debug for Buckets<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (params, buckets) = (self.layout.len(), self.set.buckets.len());
        write!(f, "Buckets({params} parameters in {buckets} buckets, {:?})", self.comm)
    }
}

impl<B: Buf> Buckets<B> {
    /// Buckets for the gradients of these parameters, with the default [`Options`]: a mean over all ranks. Collective: all ranks of
    /// `comm` call it, with the same layout.
    ///
    /// # Errors
    /// [`Error::Invalid`], on all ranks alike, where layouts differ (it names a rank, and what that rank and rank 0 have), and for a
    /// layout that cannot be used. Else the errors of [`dup`](SharedComm::dup), which makes a communicator for the buckets alone, and, where
    /// gradients are on devices and `comm` is bound to one, of binding the new communicator likewise.
    pub async fn new(comm: &SharedComm, layout: &[Param]) -> Result<Buckets<B>, Error> {
        Buckets::with(comm, layout, Options::default()).await
    }

    /// As [`new`](Self::new), with these options.
    ///
    /// # Errors
    /// As [`new`](Self::new); options are compared, too.
    pub async fn with(comm: &SharedComm, layout: &[Param], options: Options) -> Result<Buckets<B>, Error> {
        let (comm_of_loop, mut comm) = (comm, comm.dup().await?);
        agree(&mut comm, layout, &options).await?;
        if layout.iter().any(Param::is_on_device) {
            comm.share().bind_like(comm_of_loop).await?;
        }
        let n = layout.len();
        let mut buckets = Buckets {
            comm,
            layout: layout.to_vec(),
            options,
            device: None,
            set: BucketSet::new(n),
            grads: Gradients::new(layout, &options),
            progress: Progress::default(),
            times: Times::new(),
            // Sharded buckets are never formed anew: the elements that a rank owns must not change.
            order: PushOrder {
                is_learnt: options.sharded,
                pushed: Vec::with_capacity(n),
                ..PushOrder::default()
            },
            used: UsedParams::default(),
        };
        buckets.form((0..n).rev())?;
        Ok(buckets)
    }

    fn form(&mut self, order: impl Iterator<Item = usize>) -> Result<(), Error> {
        self.set.form((&self.layout, &self.options), order, &self.comm)
    }

    /// Hands in the gradient of parameter `i` of the layout: the only one of this step, or that of the last micro-batch. A bucket that this
    /// completes is launched at once if all before it are, unless 512 are in flight, or the order learnt from a [joined](Self::join) step is
    /// still to come. The call waits for nothing.
    ///
    /// Where gradients of the same parameter were [accumulated](Self::accumulate), their sum is added to this one first, and the buffer
    /// that held it comes back.
    ///
    /// # Errors
    /// The gradient comes back, and nothing has happened: [`Error::Invalid`] where there is no such parameter, its gradient has another
    /// length, type or place, or it was pushed before in this step; or, where the communicator is dead, the cause of that:
    /// [`finish`](Self::finish) then gives back what was pushed before.
    pub fn push(&mut self, i: usize, mut grad: B) -> Result<Option<B>, Failed<B>> {
        let checked = self.check("push", i, &mut grad);
        if let Err(error) = checked.and_then(|()| self.grads.add("push", i, &mut grad)) {
            return Err(Failed { buf: Some(grad), error });
        }
        let spare = self.grads.bufs[i].replace(grad);
        self.enter(i);
        Ok(spare)
    }

    /// Adds a gradient of parameter `i` to those of earlier micro-batches of this step. Nothing is sent before the last one is
    /// [pushed](Self::push), or the step is finished. The first gradient is kept; the buffers of all others come back at once, unchanged.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn accumulate(&mut self, i: usize, mut grad: B) -> Result<Option<B>, Failed<B>> {
        if let Err(error) = self.check("accumulate", i, &mut grad) {
            return Err(Failed { buf: Some(grad), error });
        }
        if self.layout[i].is_on_device() {
            let problem = format!(
                "the gradient of parameter {i} is on a device: add it to the others there, and push the sum"
            );
            return Err(Failed { buf: Some(grad), error: Error::invalid("accumulate", problem) });
        }
        self.grads.accumulate(i, grad)
    }

    fn check(&self, call: &str, i: usize, grad: &mut B) -> Result<(), Error> {
        let invalid = |problem: String| Err(Error::invalid(call, problem));
        if i >= self.layout.len() {
            let n = self.layout.len();
            return invalid(format!("there is no parameter {i}: the layout has {n}, 0..={}", n - 1));
        }
        self.check_fits(call, ("gradient", i), grad, &mut self.device.clone())?;
        self.progress.check_not_gathering(call)?;
        if self.grads.is_pushed[i] {
            return invalid(format!(
                "parameter {i} was pushed before in this step: finish the step first; of several micro-batches push the last, and \
                 accumulate the others"
            ));
        }
        self.comm.check()
    }

    /// Checks that a buffer has the type, length and place of parameter `i`. If it is on a device, that must be `ours`, the device of this rank's
    /// gradients; sets `ours` if that is not known yet. `what` names the buffer in errors.
    fn check_fits(
        &self,
        call: &str,
        (what, i): (&str, usize),
        buf: &mut B,
        ours: &mut Option<Device>,
    ) -> Result<(), Error> {
        let (found, param) = (RawBuf::of(buf), &self.layout[i]);
        let invalid = |problem: String| Err(Error::invalid(call, problem));
        if let Some(why) = found.unfit() {
            return invalid(format!("the {what} of parameter {i} cannot be used: {why}"));
        }
        let here = Param::new(found.dtype, found.len);
        let here = if found.device_memory().is_some() { here.on_device() } else { here };
        if here != *param {
            return invalid(format!("the {what} of parameter {i} is {here}, and in the layout {param}"));
        }
        let Some(place) = found.on_device() else { return Ok(()) };
        let found = place.stream.device();
        let ours = ours.get_or_insert_with(|| found.clone());
        if found != *ours {
            return invalid(format!(
                "the {what} of parameter {i} is on {found:?}, and this rank's first was on {ours:?}: all of a rank are on one device; for \
                 several devices of a process take NodeBuckets"
            ));
        }
        Ok(())
    }

    /// Notes that the gradient of a parameter is complete, and launches all buckets that may be launched now.
    fn enter(&mut self, i: usize) {
        self.grads.is_pushed[i] = true;
        if self.device.is_none() && self.layout[i].is_on_device() {
            let place = self.grads.bufs[i].as_mut().and_then(|grad| RawBuf::of(grad).on_device());
            self.device = place.map(|place| place.stream.device());
        }
        self.set.buckets[self.set.places[i]].fill();
        self.order.pushed.push(i as u64);
        self.launch();
    }

    /// Launches all buckets that may be launched now. If a launch fails, the end of the step gives the error.
    fn launch(&mut self) {
        let before = self.progress.launched;
        self.launch_full();
        // After the last bucket the loop ends the step, and drives the operations itself: to wake the progress thread would cost more.
        if self.progress.launched > before && self.progress.launched < self.set.buckets.len() {
            self.set.buckets[before].leave_to_progress_thread();
        }
    }

    fn launch_full(&mut self) {
        self.take_order();
        let progress = &mut self.progress;
        while self.order.of_joined.is_none()
            && let Some(bucket) = self.set.buckets.get_mut(progress.launched)
        {
            if !bucket.is_full() || progress.launched - progress.landed >= MOST_IN_FLIGHT {
                return;
            }
            let how = (self.options.op, progress.scale);
            let grads = (&mut self.grads.bufs[..], &mut self.grads.residuals[..]);
            // Once a bucket could not be launched, no later one is: the other ranks would take the later one for the one that is missing.
            if progress.broken.is_none()
                && let Err(error) = bucket.launch(&mut self.comm, how, grads)
            {
                self.comm.abort(error.to_string());
                progress.broken = Some(error);
            }
            if progress.launched == 0 {
                self.times.first = self.comm.recorder().last().unwrap_or_default();
            }
            progress.launched += 1;
        }
    }

    /// Makes this step's result the mean over the samples of all ranks. This rank's gradients are means over its own `samples`
    /// samples, and are multiplied by its share of all samples. Collective, before the first push of a step. One number of each rank is
    /// gathered: call this when the size of the batch is known, and await it to its end.
    ///
    /// # Errors
    /// [`Error::Invalid`] where gradients were pushed in this step already, and for a layout with integers, of which there is no weighed
    /// mean; on all ranks alike where a rank gives a number that is negative, infinite or a NaN, and where the sum is 0 or infinite. Else as a collective.
    pub async fn weigh(&mut self, samples: f64) -> Result<(), Error> {
        let invalid = |problem: String| Err(Error::invalid("weigh", problem));
        if let Some(i) = self.layout.iter().position(|param| !param.dtype().scales()) {
            return invalid(format!("parameter {i} is {}: only floats can be weighed", self.layout[i]));
        }
        if let Some(i) = self.grads.is_pushed.iter().position(|is_pushed| *is_pushed) {
            return invalid(format!(
                "parameter {i} was pushed before in this step: weigh a step before its first push"
            ));
        }
        let all = self.comm.all_gather(vec![samples]).await?;
        if let Some(rank) = all.iter().position(|samples| !(samples.is_finite() && *samples >= 0.0)) {
            let (rank, found) = (self.comm.named_rank(rank), all[rank]);
            return invalid(format!("{rank} has {found} samples, expected a number that is not negative"));
        }
        let sum: f64 = all.iter().sum();
        if sum <= 0.0 {
            return invalid("no rank has any samples in this step, expected at least one".into());
        }
        if !sum.is_finite() {
            return invalid(format!(
                "the ranks have {sum} samples together, expected a number that `f64` can hold"
            ));
        }
        self.progress.scale = Some(samples / sum);
        Ok(())
    }

    /// Waits until all buckets are reduced, and gives every gradient back: the mean over all ranks (or their sum), in the order of the
    /// layout. The buckets are then ready for the next step, even if the returned iterator is dropped.
    ///
    /// Gradients that were accumulated, and not pushed, are pushed now.
    ///
    /// Cancel safe: where the future is dropped, call it again to end the step.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the parameters without a gradient; the step goes on then: push them and finish, or
    /// [`abandon`](Self::abandon) it. Else the cause for which the communicator of these buckets is dead, and all gradients that can be
    /// had, reduced or not.
    pub async fn finish(&mut self) -> Result<Drain<'_, B>, Failed<Vec<Option<B>>>> {
        self.push_accumulated();
        if let Some(problem) = self.grads.missing() {
            return Err(self.refused(Error::invalid("finish", problem)).await);
        }
        self.land(false).await?;
        Ok(self.grads.hand_back())
    }

    /// [`finish`](Self::finish), where ranks may have no gradient for some parameters. Where any rank has one, the others reduce zeros,
    /// which count in the mean, and get the result in memory that `memory(i, param)` gives; where no rank has any, the result is `None`.
    /// All ranks call it, also those that have all gradients.
    ///
    /// # Errors
    /// As `finish`; [`Error::Invalid`] where `memory` gives a buffer that does not fit the parameter: the step then goes on.
    pub async fn finish_some(
        &mut self,
        mut memory: impl FnMut(usize, &Param) -> B,
    ) -> Result<Drain<'_, Option<B>>, Failed<Vec<Option<B>>>> {
        self.push_accumulated();
        for i in 0..self.layout.len() {
            if self.grads.is_pushed[i] {
                continue;
            }
            let mut zeros = memory(i, &self.layout[i]);
            if let Err(error) = self.check("finish_some", i, &mut zeros) {
                return Err(self.refused(error).await);
            }
            if let Err(error) = zero(&mut zeros) {
                return Err(self.refused(error).await);
            }
            self.grads.bufs[i] = Some(zeros);
            self.grads.is_lent[i] = true;
            self.enter(i);
        }
        self.land(true).await?;
        Ok(self.grads.hand_back_used(&self.used.used))
    }

    /// Forgets the order of rank 0's pushes, by which buckets are formed: it is learnt anew at the end of this step, or of the next if none
    /// has begun. All ranks call it in the same step. Nothing is learnt where buckets are sharded.
    pub fn relearn(&mut self) {
        self.order.is_learnt = self.options.sharded;
    }

    /// Gives up: ends the communicator of these buckets on all ranks, for this reason, and gives back all gradients of the step that can
    /// be had.
    pub async fn abandon(mut self, reason: impl Into<String>) -> Vec<Option<B>> {
        self.comm.abort(reason);
        self.take_back().await
    }

    /// Closes the communicator of these buckets, between two steps. See [`Comm::close`].
    ///
    /// # Errors
    /// As of `Comm::close`.
    pub async fn close(self) -> Result<(), Error> {
        self.comm.close().await
    }

    /// The failure of a finish that was refused for `error`; if the communicator is dead, the cause of that, with all gradients.
    async fn refused(&mut self, error: Error) -> Failed<Back<B>> {
        match self.comm.check() {
            Ok(()) => Failed { buf: None, error },
            Err(error) => Failed { buf: Some(self.take_back().await), error },
        }
    }

    fn push_accumulated(&mut self) {
        for i in 0..self.layout.len() {
            if !self.grads.is_pushed[i] && self.grads.bufs[i].is_some() {
                self.enter(i);
            }
        }
    }

    /// Waits for all buckets and, if rank 0's order is still to be learnt, for that. `unites`: also finds out which parameters have a gradient on
    /// any rank ([`UsedParams::unite`]).
    async fn land(&mut self, unites: bool) -> Result<(), Failed<Back<B>>> {
        self.times.called.get_or_insert_with(Instant::now);
        match self.try_land(unites).await {
            Ok(()) => {
                self.begin();
                Ok(())
            }
            Err(error) => Err(self.failed(error).await),
        }
    }

    async fn try_land(&mut self, unites: bool) -> Result<(), Error> {
        if let Some(work) = &mut self.order.of_joined {
            let order = work.await;
            self.order.of_joined = None;
            self.reorder(order?)?;
        }
        while self.progress.landed < self.set.buckets.len() {
            self.launch_full();
            self.set.buckets[self.progress.landed].land(&mut self.grads.bufs).await?;
            self.progress.landed += 1;
        }
        self.progress.broken.take().map_or(Ok(()), Err)?;
        self.times.end(self.comm.recorder(), &self.set.buckets);
        if unites {
            self.used.unite(&mut self.comm, &self.grads.is_lent).await?;
        }
        if !self.order.is_learnt {
            let order = self.order.learn(&mut self.comm).await?;
            self.reorder(order)?;
            self.order.is_learnt = true;
        }
        Ok(())
    }

    /// How the time of the last finished step was spent; `None` before the end of the first.
    pub fn report(&self) -> Option<Report> {
        self.times.report(self.comm.recorder())
    }

    /// Makes all ready for the next step.
    fn begin(&mut self) {
        (self.times.began, self.times.called) = (Instant::now(), None);
        self.progress = Progress::default();
        self.grads.is_pushed.fill(false);
        self.grads.is_lent.fill(false);
        self.order.learning = None;
        self.order.pushed.clear();
        (self.used.uniting, self.used.is_united) = (None, false);
        self.set.buckets.iter_mut().for_each(Bucket::empty);
    }

    /// Ends the communicator for an error, if it is not dead: other ranks would wait for collectives that this one no longer calls. Gives the cause.
    fn end_comm(&mut self, error: Error) -> Error {
        let error = self.progress.broken.take().unwrap_or(error);
        if self.comm.check().is_ok() {
            self.comm.abort(error.to_string());
        }
        error
    }

    /// A step has failed: ends the communicator, and gives all gradients back.
    async fn failed(&mut self, error: Error) -> Failed<Back<B>> {
        let error = self.end_comm(error);
        Failed { buf: Some(self.take_back().await), error }
    }

    /// Waits for the operations in flight of a communicator that is dead, and gives all gradients back.
    async fn take_back(&mut self) -> Back<B> {
        for bucket in &mut self.set.buckets {
            // The cause of the failure is known already.
            let _ = bucket.land(&mut self.grads.bufs).await;
        }
        self.back()
    }

    /// Gives all gradients that are here of a step that has failed, and makes all ready for the next.
    fn back(&mut self) -> Back<B> {
        let back = self.grads.take_own();
        self.begin();
        back
    }
}

/// Makes all elements zero, on a device in the order of the buffer's stream.
fn zero(buf: &mut impl Buf) -> Result<(), Error> {
    let raw = RawBuf::of(buf);
    match raw.on_device() {
        Some(place) => zero_on_device(&place, raw.bytes()),
        None => elements::zero(buf)
            .ok_or_else(|| Error::system("finish_some", "memory for a gradient cannot be written (a bug)")),
    }
}
