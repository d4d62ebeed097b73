//! [`Buckets`]: the step of a training loop, from the first gradient that is pushed to the last that comes back.

mod clip;
mod join;
mod node;
mod sharded;

pub use node::NodeBuckets;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use std::vec::Drain;

use parking_lot::Mutex;

use super::bucket::{Bucket, form, packed};
use super::layout::{Options, Param, agree};
use super::report::Report;
use crate::comm::{Comm, SharedComm, Work};
use crate::device::{Device, zero_on_device};
use crate::error::{Error, Failed};
use crate::mem::{AnyBuf, Buf, Event, RawBuf, elements};
use crate::trace::Step;
use crate::types::ReduceOp;

/// Buckets of a step in flight at a time.
const MOST_IN_FLIGHT: usize = 512;
/// Parameters that an error names.
const MOST_NAMED: usize = 8;

/// Gradients of one model, reduced over all ranks in buckets while the backward pass still computes: see the
/// [module](super) for a loop, and for what happens in a step.
///
/// `B` is the buffer of a gradient: a `Vec<f32>`, any other [`Buf`], or [`AnyBuf`] where parameters have several types or places. Each is
/// owned from [`push`](Self::push) to [`finish`](Self::finish), which gives the same one back.
///
/// All ranks push a gradient of each parameter in every step, in any order, and finish. Where any rank may have none for some
/// parameter, all ranks finish by [`finish_some`](Self::finish_some).
///
/// An error of the communication ends the communicator of these buckets on all ranks, and no other. An error that says what is wrong with
/// a call ([`Error::Invalid`]) changes nothing.
pub struct Buckets<B: Buf = AnyBuf> {
    comm: Comm,
    layout: Vec<Param>,
    options: Options,
    buckets: Vec<Bucket<B>>,
    /// The bucket of each parameter.
    places: Vec<usize>,
    /// By parameter: its gradient, unless an operation has it. One that is packed stays here while its copy is reduced. While weights are
    /// gathered: those.
    grads: Vec<Option<B>>,
    is_pushed: Vec<bool>,
    /// Of parameters whose gradients are compressed: what rounding has taken from them. Else empty.
    residuals: Vec<Vec<f32>>,
    /// Parameters of which this rank has no gradient in this step, and reduces zeros.
    is_lent: Vec<bool>,
    /// The first bucket that is not launched yet, and the first that has not come back.
    launched: usize,
    landed: usize,
    /// The factor of this rank's gradients in this step, where [`Buckets::weigh`] was called.
    scale: Option<f64>,
    /// Whether there is nothing to learn: rank 0's order is known or on its way, or buckets are sharded.
    is_learnt: bool,
    /// In which order this rank has pushed in this step.
    order: Vec<u64>,
    /// The broadcast of rank 0's order.
    learning: Option<Work<Vec<u64>>>,
    /// That of a step that was joined, which comes while the next one goes on.
    ordering: Option<Work<Vec<u64>>>,
    /// For each parameter whether any rank has a gradient.
    used: Vec<u8>,
    uniting: Option<Work<Vec<u8>>>,
    /// Whether `used` is of this step: a finish that is called again does not ask again.
    is_united: bool,
    /// While weights are gathered: the first bucket whose weights have not come back.
    gathered: Option<usize>,
    /// The operation of the first bucket of this step.
    first: u64,
    /// How many steps have ended, when this one began, and when the loop asked to end it.
    steps: u64,
    began: Instant,
    called: Option<Instant>,
    last: Arc<Mutex<Last>>,
    /// Buckets that are free for a next step, while a host's stream still has those of joined steps.
    spare: join::Spare<B>,
    /// For each joined step that may not be over: how many buckets it has, and the event of its end.
    ahead: VecDeque<(usize, Event)>,
    /// Why a bucket could not be launched.
    broken: Option<Error>,
    /// Where gradients on devices are, once that is known.
    device: Option<Device>,
    /// What the last step gave back is handed out from here.
    done: Vec<B>,
    some: Vec<Option<B>>,
}

/// The last step that has ended, and parameters and bytes of each of its buckets.
#[derive(Default)]
struct Last {
    step: Option<Step>,
    shapes: Vec<(usize, usize)>,
}

impl Last {
    fn note<B: Buf>(&mut self, step: Step, buckets: &[Bucket<B>]) {
        self.step = Some(step);
        self.shapes.clear();
        self.shapes.extend(buckets.iter().map(Bucket::shape));
    }
}

impl<B: Buf> fmt::Debug for Buckets<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (params, buckets) = (self.layout.len(), self.buckets.len());
        write!(f, "Buckets({params} parameters in {buckets} buckets, {:?})", self.comm)
    }
}

/// All gradients of a step that failed, in the order of the layout; `None` where there was none, or where something may still access it.
type Back<B> = Vec<Option<B>>;

impl<B: Buf> Buckets<B> {
    /// Buckets for the gradients of these parameters, with the default [`Options`]: a mean over all ranks. Collective: all ranks of
    /// `comm` call it, with the same layout.
    ///
    /// # Errors
    /// [`Error::Invalid`], on all ranks alike, where layouts differ (it names a rank, and what that rank and rank 0 have), and for a
    /// layout that cannot be used. Else as [`dup`](SharedComm::dup), which makes a communicator for the buckets alone, and, where gradients are
    /// on devices to which `comm` is bound, as the binding of that one.
    pub async fn new(comm: &SharedComm, layout: &[Param]) -> Result<Buckets<B>, Error> {
        Buckets::with(comm, layout, Options::default()).await
    }

    /// The same with options.
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
            buckets: Vec::new(),
            places: vec![0; n],
            grads: (0..n).map(|_| None).collect(),
            is_pushed: vec![false; n],
            residuals: residuals(layout, &options),
            is_lent: vec![false; n],
            launched: 0,
            landed: 0,
            scale: None,
            // Sharded buckets are never formed anew: what a rank owns must not change.
            is_learnt: options.sharded,
            order: Vec::with_capacity(n),
            learning: None,
            ordering: None,
            used: Vec::new(),
            uniting: None,
            is_united: false,
            gathered: None,
            first: 0,
            steps: 0,
            began: Instant::now(),
            called: None,
            last: Arc::default(),
            spare: Arc::default(),
            ahead: VecDeque::new(),
            broken: None,
            device: None,
            done: Vec::with_capacity(n),
            some: Vec::new(),
        };
        buckets.form((0..n).rev())?;
        Ok(buckets)
    }

    fn form(&mut self, order: impl Iterator<Item = usize>) -> Result<(), Error> {
        let memory = |dtype, len| packed(&self.comm, dtype, len);
        let how = (&self.options, self.comm.size());
        self.buckets = form(&self.layout, order, how, memory)?;
        for (k, bucket) in self.buckets.iter().enumerate() {
            bucket.members().for_each(|i| self.places[i] = k);
        }
        Ok(())
    }

    /// Hands in the gradient of parameter `i` of the layout, the last or only one of this step. If its bucket is complete now, and those
    /// before it are launched, it is launched before this returns, unless 512 are in flight or the order of a joined step is still to come;
    /// nothing is waited for.
    ///
    /// Where gradients of the same parameter were [accumulated](Self::accumulate), their sum is added to this one first, and the buffer
    /// that held it comes back.
    ///
    /// # Errors
    /// The gradient comes back, and nothing has happened: [`Error::Invalid`] where there is no such parameter, its gradient has another
    /// length, type or place, or it was pushed before in this step; the cause, where the communicator is dead:
    /// [`finish`](Self::finish) then
    /// gives
    /// back what was pushed before.
    pub fn push(&mut self, i: usize, mut grad: B) -> Result<Option<B>, Failed<B>> {
        if let Err(error) = self.check("push", i, &mut grad).and_then(|()| self.add("push", i, &mut grad)) {
            return Err(Failed { buf: Some(grad), error });
        }
        let spare = self.grads[i].replace(grad);
        self.enter(i);
        Ok(spare)
    }

    /// Adds a gradient of parameter `i` to those of earlier micro-batches of this step. Nothing is sent before the last one is
    /// [pushed](Self::push), or the step is finished. The first is kept; of all others the buffer comes back at once, its contents
    /// unchanged.
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
        match &mut self.grads[i] {
            None => self.grads[i] = Some(grad),
            Some(sum) => match elements::add(&mut grad, sum) {
                Some(()) => return Ok(Some(grad)),
                None => return Err(Failed { buf: Some(grad), error: not_added("accumulate", i) }),
            },
        }
        Ok(None)
    }

    /// Adds what was accumulated to a gradient.
    fn add(&mut self, call: &str, i: usize, grad: &mut B) -> Result<(), Error> {
        match &mut self.grads[i] {
            None => Ok(()),
            Some(sum) => elements::add(sum, grad).ok_or_else(|| not_added(call, i)),
        }
    }

    fn check(&self, call: &str, i: usize, grad: &mut B) -> Result<(), Error> {
        let invalid = |problem: String| Err(Error::invalid(call, problem));
        if i >= self.layout.len() {
            let n = self.layout.len();
            return invalid(format!("there is no parameter {i}: the layout has {n}, 0..={}", n - 1));
        }
        self.check_fits(call, ("gradient", i), grad, &mut self.device.clone())?;
        if self.gathered.is_some() {
            return invalid(
                "a gather of weights has not ended: call it again with an empty vector first".into(),
            );
        }
        if self.is_pushed[i] {
            return invalid(format!(
                "parameter {i} was pushed before in this step: finish the step first; of several micro-batches push the last, and \
                 accumulate the others"
            ));
        }
        self.comm.check()
    }

    /// Checks that a buffer has the type, length and place of parameter `i`, and is on the device `ours`, which it sets if there is none yet.
    /// `what` names the buffer in errors.
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

    /// The gradient of a parameter is complete.
    fn enter(&mut self, i: usize) {
        self.is_pushed[i] = true;
        if self.device.is_none() && self.layout[i].is_on_device() {
            let place = self.grads[i].as_mut().and_then(|grad| RawBuf::of(grad).on_device());
            self.device = place.map(|place| place.stream.device());
        }
        self.buckets[self.places[i]].fill();
        self.order.push(i as u64);
        self.launch();
    }

    /// Launches all buckets that may be launched now. If one is refused, the end of the step gives the error.
    fn launch(&mut self) {
        let before = self.launched;
        self.launch_full();
        // After the last bucket the loop ends the step, and drives the operations itself: to wake the progress thread would cost more.
        if self.launched > before && self.launched < self.buckets.len() {
            self.buckets[before].leave_to_progress_thread();
        }
    }

    fn launch_full(&mut self) {
        self.take_order();
        while self.ordering.is_none()
            && let Some(bucket) = self.buckets.get_mut(self.launched)
        {
            if !bucket.is_full() || self.launched - self.landed >= MOST_IN_FLIGHT {
                return;
            }
            let how = (self.options.op, self.scale);
            // Once a bucket could not be launched, no later one is: the other ranks would take that for the missing one.
            if self.broken.is_none()
                && let Err(error) = bucket.launch(&mut self.comm, how, (&mut self.grads, &mut self.residuals))
            {
                self.comm.abort(error.to_string());
                self.broken = Some(error);
            }
            if self.launched == 0 {
                self.first = self.comm.recorder().last().unwrap_or_default();
            }
            self.launched += 1;
        }
    }

    /// Makes this step's result the mean over the samples of all ranks. This rank's gradients are means over `samples` of them, and are
    /// multiplied by its share of all samples. Collective, before the first push of a step; one number of each rank is gathered, so call it
    /// when the batch is known, and await it to its end.
    ///
    /// # Errors
    /// [`Error::Invalid`] where gradients were pushed in this step already, and for a layout with integers, of which there is no weighed
    /// mean; on all ranks alike where a rank gives a number that is negative, infinite or a NaN, and where the sum is 0. Else as a collective.
    pub async fn weigh(&mut self, samples: f64) -> Result<(), Error> {
        let invalid = |problem: String| Err(Error::invalid("weigh", problem));
        if let Some(i) = self.layout.iter().position(|param| !param.dtype().scales()) {
            return invalid(format!("parameter {i} is {}: only floats can be weighed", self.layout[i]));
        }
        if let Some(i) = self.is_pushed.iter().position(|is_pushed| *is_pushed) {
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
        self.scale = Some(samples / sum);
        Ok(())
    }

    /// Waits until all buckets are reduced, and gives every gradient back: the mean over all ranks (or their sum), in the order of the
    /// layout. The buckets are then ready for the next step, also where what is returned is dropped.
    ///
    /// What was accumulated, and not pushed, is pushed now.
    ///
    /// Cancel safe: where the future is dropped, call it again to end the step.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the parameters without a gradient; the step goes on then: push them and finish, or
    /// [`abandon`](Self::abandon) it. Else the cause for which the communicator of these buckets is dead, and all gradients that can be
    /// had, reduced or not.
    pub async fn finish(&mut self) -> Result<Drain<'_, B>, Failed<Vec<Option<B>>>> {
        self.push_accumulated();
        if let Some(problem) = self.missing() {
            return Err(self.refused(Error::invalid("finish", problem)).await);
        }
        self.land(false).await?;
        self.done.clear();
        self.done.extend(self.grads.iter_mut().filter_map(Option::take));
        Ok(self.done.drain(..))
    }

    /// [`finish`](Self::finish), where ranks may have no gradient for some parameters. Where any rank has one, the others reduce zeros,
    /// which count in the mean, and get the result in memory that `memory(i, param)` gives; where no rank has any, the result is `None`.
    /// All ranks call it, also those
    /// that have all.
    ///
    /// # Errors
    /// As `finish`; [`Error::Invalid`] where `memory` gives what does not fit, and then the step goes on.
    pub async fn finish_some(
        &mut self,
        mut memory: impl FnMut(usize, &Param) -> B,
    ) -> Result<Drain<'_, Option<B>>, Failed<Vec<Option<B>>>> {
        self.push_accumulated();
        for i in 0..self.layout.len() {
            if self.is_pushed[i] {
                continue;
            }
            let mut zeros = memory(i, &self.layout[i]);
            if let Err(error) = self.check("finish_some", i, &mut zeros) {
                return Err(self.refused(error).await);
            }
            if let Err(error) = zero(&mut zeros) {
                return Err(self.refused(error).await);
            }
            self.grads[i] = Some(zeros);
            self.is_lent[i] = true;
            self.enter(i);
        }
        self.land(true).await?;
        self.some.clear();
        let is_used = self.used.iter().map(|used| *used != 0);
        self.some.extend(
            self.grads.iter_mut().zip(is_used).map(|(grad, is_used)| grad.take().filter(|_| is_used)),
        );
        Ok(self.some.drain(..))
    }

    /// Forgets the order that was learnt: the end of this step, or of the next if none has begun, learns it anew. All ranks call it in
    /// the same step. Nothing is learnt where buckets are sharded.
    pub fn relearn(&mut self) {
        self.is_learnt = self.options.sharded;
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

    /// What is returned of a step that cannot be finished as it is: if the communicator is dead, why, and all gradients.
    async fn refused(&mut self, error: Error) -> Failed<Back<B>> {
        match self.comm.check() {
            Ok(()) => Failed { buf: None, error },
            Err(error) => Failed { buf: Some(self.take_back().await), error },
        }
    }

    fn push_accumulated(&mut self) {
        for i in 0..self.layout.len() {
            if !self.is_pushed[i] && self.grads[i].is_some() {
                self.enter(i);
            }
        }
    }

    /// What is wrong with a step that is to be finished.
    fn missing(&self) -> Option<String> {
        let missing = || (0..self.layout.len()).filter(|i| !self.is_pushed[*i]);
        let (found, all) = (missing().count(), self.layout.len());
        if found == 0 {
            return None;
        }
        let mut names: Vec<String> = missing().take(MOST_NAMED).map(|i| i.to_string()).collect();
        if found > MOST_NAMED {
            names.push(format!("and {} more", found - MOST_NAMED));
        }
        Some(format!(
            "{found} of {all} parameters have no gradient in this step: {}; push one for each, or finish by finish_some on all ranks \
             where some may have none",
            names.join(", ")
        ))
    }

    /// Waits for all buckets, then for what ranks tell each other at the end of a step.
    async fn land(&mut self, unites: bool) -> Result<(), Failed<Back<B>>> {
        self.called.get_or_insert_with(Instant::now);
        match self.try_land(unites).await {
            Ok(()) => {
                self.begin();
                Ok(())
            }
            Err(error) => {
                let error = self.broken.take().unwrap_or(error);
                // Where the communicator is not dead, the others would wait for what this rank does not call any more.
                if self.comm.check().is_ok() {
                    self.comm.abort(error.to_string());
                }
                Err(Failed { buf: Some(self.take_back().await), error })
            }
        }
    }

    async fn try_land(&mut self, unites: bool) -> Result<(), Error> {
        if let Some(work) = &mut self.ordering {
            let order = work.await;
            self.ordering = None;
            self.reorder(order?)?;
        }
        while self.landed < self.buckets.len() {
            self.launch_full();
            self.buckets[self.landed].land(&mut self.grads).await?;
            self.landed += 1;
        }
        self.broken.take().map_or(Ok(()), Err)?;
        self.note_step();
        if unites && !self.is_united {
            self.unite().await?;
        }
        if !self.is_learnt {
            self.learn().await?;
        }
        Ok(())
    }

    /// Finds out of which parameters any rank has a gradient.
    async fn unite(&mut self) -> Result<(), Error> {
        let work = self.uniting.get_or_insert_with(|| {
            self.used.clear();
            self.used.extend(self.is_lent.iter().map(|is_lent| u8::from(!is_lent)));
            self.comm.op(ReduceOp::Max).all_reduce(std::mem::take(&mut self.used))
        });
        let used = work.await;
        self.uniting = None;
        self.used = used?;
        self.is_united = true;
        Ok(())
    }

    /// Forms buckets by the order in which rank 0 has pushed.
    async fn learn(&mut self) -> Result<(), Error> {
        let work =
            self.learning.get_or_insert_with(|| self.comm.broadcast(std::mem::take(&mut self.order), 0));
        let order = work.await;
        self.learning = None;
        self.reorder(order?)
    }

    /// Where the time of the last step went that was finished; `None` before the first.
    pub fn report(&self) -> Option<Report> {
        let last = self.last.lock();
        Some(Report::new(last.step.as_ref()?, &last.shapes, self.comm.recorder()))
    }

    /// All gradients of this step are back.
    fn note_step(&mut self) {
        let Some(called) = self.called.take() else { return };
        let (buckets, ended) = (self.buckets.len() as u64, Instant::now());
        let step = Step { number: self.steps, first: self.first, buckets, began: self.began, called, ended };
        self.comm.recorder().step(step);
        self.last.lock().note(step, &self.buckets);
        self.steps += 1;
    }

    /// The next step.
    fn begin(&mut self) {
        (self.began, self.called) = (Instant::now(), None);
        self.gathered = None;
        (self.launched, self.landed, self.scale) = (0, 0, None);
        (self.learning, self.uniting, self.broken) = (None, None, None);
        self.is_pushed.fill(false);
        self.is_lent.fill(false);
        self.is_united = false;
        self.order.clear();
        self.buckets.iter_mut().for_each(Bucket::empty);
    }

    /// Waits for what is on its way on a communicator that is dead, and gives all back.
    async fn take_back(&mut self) -> Back<B> {
        for bucket in &mut self.buckets {
            // Why is known already.
            let _ = bucket.land(&mut self.grads).await;
        }
        self.back()
    }

    /// All that is here, of a step that has failed.
    fn back(&mut self) -> Back<B> {
        let lent = self.is_lent.iter();
        let back =
            self.grads.iter_mut().zip(lent).map(|(grad, is_lent)| grad.take().filter(|_| !is_lent)).collect();
        self.begin();
        back
    }
}

/// For each parameter whose gradient is compressed as many zeros as it has elements.
fn residuals(layout: &[Param], options: &Options) -> Vec<Vec<f32>> {
    let compressed = |param: &Param| options.wire.is_some() && param.is_compressed();
    layout.iter().map(|param| vec![0.0; if compressed(param) { param.len() } else { 0 }]).collect()
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

fn not_added(call: &str, i: usize) -> Error {
    Error::system(
        call,
        format!("the gradient of parameter {i} cannot be added to what was accumulated (a bug)"),
    )
}
