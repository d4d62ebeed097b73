//! Operations that the ranks' devices run.
//!
//! The plans, the machines and the order of messages are those of the host; what differs is that a step's work is *put on
//! the rank's stream* where a host would do it at once, and that a link lends device memory ([`crate::device::links::peer`]). An
//! operation is over when the streams of all ranks that touch its buffers are done with it, which words in memory say
//! ([`Word::Over`](super::signal::Word::Over)).
//!
//! What is put on a stream is put there by [`Commands`](crate::commands::Commands): no function here that is called in a pass, or while
//! a communicator that has failed is ended, calls the driver.

mod binding;
mod folds;
mod given_up;
mod inputs;
mod one_launch;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use allstream_sys::cuda::CuStreamMemOp;
use parking_lot::Mutex;

use super::copied::Copied;
use super::links::ipc::Far;
use super::links::peer::PeerDevice;
use super::links::starts::Start;
use super::stream::{DeviceEvent, DeviceStream};
use super::waiter::{Stage, watch_stream};
use super::whole::Whole;
use super::workspace::Workspace;
use crate::error::Error;
use crate::link::exit::Lease;
use crate::link::waits::{Wait, kept};
use crate::mem::{Fate, Verdict, Witness};
use crate::types::Rank;
pub(crate) use binding::{Binding, DeviceLinks, limits};
use folds::{ALL, is_named};
pub(crate) use folds::{Folds, Needs};
pub(crate) use inputs::Blocked;

/// An operation that devices run.
pub(crate) struct DeviceOp {
    pub(crate) binding: Arc<Binding>,
    /// Its number among the communicator's collectives.
    number: OnceLock<u64>,
    /// One launch folds it for all ranks (`one_launch.rs`). Known with the number.
    is_for_all: OnceLock<bool>,
    /// This rank has arrived last, and is putting that launch on rank 0's stream.
    is_launching: AtomicBool,
    /// What the buffers' streams held at the call, where no word says it.
    after: Vec<DeviceEvent>,
    /// The word that the one stream of the buffers writes when it comes to the call.
    input: Option<Start>,
    folds: Folds,
    /// Set by commands: the rank's stream has been made to wait for its own inputs; and for those of all ranks.
    waits_for_input: AtomicBool,
    waits_for_all: AtomicBool,
    /// Of the buffers.
    streams: Vec<DeviceStream>,
    /// Of the buffers that it writes.
    outputs: Vec<Arc<Fate>>,
    /// If a buffer's stream waits for another collective: the ranks' streams that will wait for that stream in turn. Hardware queues were chosen so
    /// that this holds up nobody (`make_way`).
    will_wait: Mutex<Vec<DeviceStream>>,
    /// The library that takes it whole, if one does.
    taken_by: Option<Arc<dyn Whole>>,
    /// What its parts need beside the buffers. The error for which there is none.
    workspace: Result<Arc<Workspace>, Error>,
    /// Of buffers that the devices of other ranks cannot touch.
    copied: Vec<Copied>,
    /// The command that begins it is appended.
    has_begun: AtomicBool,
    /// What the driver says has gone wrong with it on the stream.
    failure: OnceLock<Error>,
    state: Mutex<State>,
}

/// Nobody calls the driver with this locked.
#[derive(Default)]
struct State {
    /// Behind all that the rank's stream does for it, where words do not say enough.
    end: Option<DeviceEvent>,
    /// It was given up.
    failed: bool,
    /// It has ended well.
    is_good: bool,
    /// Its buffers may be touched for longer than anybody waits.
    lost: Option<Option<Vec<Arc<Lease>>>>,
    /// For buffers that are handed on before it is over: from `join` on.
    verdict: Option<Arc<Verdict>>,
}

impl Witness for Far {
    fn check(&self) -> Result<(), Error> {
        Far::check(self)
    }
}

impl Drop for DeviceOp {
    /// Memory of its buffers that was dropped early is free, if the operation has ended well.
    fn drop(&mut self) {
        if let Some(verdict) = self.state.get_mut().verdict.take().filter(|verdict| verdict.is_good()) {
            verdict.let_go();
        }
        let will_wait = std::mem::take(self.will_wait.get_mut());
        if !will_wait.is_empty() {
            // It was never begun: they will not wait.
            let never = move || will_wait.iter().for_each(DeviceStream::waits_now);
            self.binding.ours.commands.put_always(never);
        }
    }
}

impl DeviceOp {
    /// An operation on buffers in the order of these streams, to start after what is on them now.
    pub(crate) fn new(
        binding: Arc<Binding>,
        streams: Vec<DeviceStream>,
        outputs: Vec<Arc<Fate>>,
        taken_by: Option<Arc<dyn Whole>>,
        Needs { workspace, copied, mut folds }: Needs,
    ) -> Result<DeviceOp, Error> {
        if !copied.is_empty() {
            // The rank's stream fills what is lent, and empties it behind the other ranks' work.
            debug_assert!(!folds.may_be_for_all, "one device touches all memory that is on it");
            folds = Folds { are_all: false, are_one: false, own_work_is_lent: true, ..folds };
        }
        let input = match &streams[..] {
            [stream] if folds.are_all => binding.ours.put_input(stream)?,
            _ => None,
        };
        let after = match input {
            Some(_) => Vec::new(),
            None => streams.iter().map(DeviceStream::point).collect::<Result<_, _>>()?,
        };
        // Where no way can be made, another communicator's collective may have to wait for this one's deadline.
        let is_in_a_chain = streams.iter().any(DeviceStream::is_waiting);
        let mut will_wait = if is_in_a_chain { binding.work_on(&folds) } else { Vec::new() };
        if is_in_a_chain && !binding.ours.make_way(will_wait.iter(), false) {
            will_wait.clear();
        }
        Ok(DeviceOp {
            binding,
            number: OnceLock::new(),
            is_for_all: OnceLock::new(),
            is_launching: AtomicBool::new(false),
            after,
            input,
            folds,
            waits_for_input: AtomicBool::new(false),
            waits_for_all: AtomicBool::new(false),
            streams,
            outputs,
            will_wait: Mutex::new(will_wait),
            taken_by,
            workspace,
            copied,
            has_begun: AtomicBool::new(false),
            failure: OnceLock::new(),
            state: Mutex::default(),
        })
    }

    /// It has been submitted, with this number among the communicator's collectives.
    pub(crate) fn submitted(&self, number: u64) {
        let _ = self.number.set(number);
        let _ = self.is_for_all.set(self.binding.ours.arrivals.is_for_all(number, self.folds.may_be_for_all));
        self.binding.ours.called(number);
    }

    fn number(&self) -> u64 {
        self.number.get().copied().unwrap_or_default()
    }

    /// The library that takes it whole, if one does.
    pub(crate) fn taken_by(&self) -> Option<&Arc<dyn Whole>> {
        self.taken_by.as_ref()
    }

    /// Where this rank's work for it goes.
    pub(crate) fn stream(&self) -> &DeviceStream {
        &self.binding.ours.stream
    }

    /// It is this operation's turn: what is put on the stream from now on is its own. The first of these calls counts.
    ///
    /// # Errors
    /// There is no memory for what it needs beside its buffers.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<(), Error> {
        if self.has_begun.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let workspace = self.workspace.as_ref().map_err(Error::clone)?;
        *self.binding.current.lock() = Arc::downgrade(self);
        if !kept(Wait::Memory) {
            workspace.release();
        }
        let (ours, number) = (&self.binding.ours, self.number());
        // One launch for all ranks itself waits for each rank's own work, so no link need make a peer wait for it.
        ours.starts(number, self.start(), self.folds.own_work_is_lent && !self.is_for_all());
        let operation = self.clone();
        ours.commands.put(move || {
            operation.binding.ours.takes(number);
            if operation.input.is_some() {
                return Ok(()); // its first work waits for the word
            }
            let mut after = operation.after.iter().filter(|_| kept(Wait::After));
            let ordered = after.try_for_each(|event| operation.stream().wait_event(event));
            operation.waits_for_its_input();
            ordered?;
            operation.binding.ours.begins(number)?;
            operation.copied.iter().try_for_each(|copied| copied.fill(operation.stream()))
        });
        Ok(())
    }

    /// What says that its inputs are there.
    fn start(&self) -> Start {
        self.input.unwrap_or_else(|| Start::of(self.number()))
    }

    /// What the parts need beside the buffers.
    pub(crate) fn workspace(&self) -> Option<&Arc<Workspace>> {
        self.workspace.as_ref().ok()
    }

    /// Whether any of its parts may be folded, as the call has found out.
    pub(crate) fn is_folded(&self) -> bool {
        self.folds.are_any()
    }

    /// Of the ranks that these bits name, those that are others than this one.
    fn others(&self, bits: u64) -> impl Iterator<Item = &Arc<PeerDevice>> {
        let all = self.binding.all.iter().enumerate().filter(move |(rank, _)| is_named(bits, *rank));
        all.filter_map(|(_, device)| device.as_ref())
            .filter(|device| !Arc::ptr_eq(device, &self.binding.ours))
    }

    /// Has a kernel put on the rank's stream which folds what all ranks lend of a part, behind the inputs of all. `is_last`: all of the part is
    /// folded then.
    pub(crate) fn fold(
        self: &Arc<Self>,
        is_last: bool,
        launch: impl FnOnce(&DeviceStream) -> Result<(), Error> + Send + 'static,
    ) {
        let operation = self.clone();
        self.binding.ours.commands.put(move || {
            let mut words = operation.wait_for_input();
            if !operation.waits_for_all.swap(true, Ordering::Relaxed) {
                let number = operation.number();
                for other in operation.others(operation.folds.lent_by).filter(|_| kept(Wait::Ready)) {
                    let problem = "it lends memory for a collective that it has not begun (a bug)";
                    let missing = || Error::system("wait for a rank's input", problem);
                    words.push(other.wait_for_start(number).ok_or_else(missing)?);
                }
            }
            operation.stream().put_words("make a stream wait for all ranks' inputs", &mut words)?;
            operation.waits_for_its_input();
            launch(operation.stream())?;
            // At once: if the command of `ends` came later, the context would have to be entered once more for it.
            if is_last && operation.folds.are_one { operation.put_over() } else { Ok(()) }
        });
    }

    /// For the rank's stream: the wait for its own input, if the stream does not wait for it yet.
    fn wait_for_input(&self) -> Vec<CuStreamMemOp> {
        let (ours, number) = (&self.binding.ours, self.number());
        if self.waits_for_input.load(Ordering::Relaxed) {
            return Vec::new();
        }
        ours.wait_for_start(number).filter(|_| kept(Wait::After)).into_iter().collect()
    }

    /// A command: makes the rank's stream wait for its own input, if it does not yet.
    pub(crate) fn awaits_input(&self) -> Result<(), Error> {
        let mut words = self.wait_for_input();
        self.stream().put_words("make a stream wait for its rank's input", &mut words)?;
        self.waits_for_its_input();
        Ok(())
    }

    /// A command: the rank's stream has been made to wait for its own input.
    fn waits_for_its_input(&self) {
        self.waits_for_input.store(true, Ordering::Relaxed);
        self.has_waits(self.stream());
    }

    /// A command: this stream, of whichever rank, has been made to wait for this rank's input.
    fn has_waits(&self, stream: &DeviceStream) {
        let mut will_wait = self.will_wait.lock();
        let at = will_wait.iter().position(|other| other == stream);
        let made = at.map(|at| will_wait.swap_remove(at));
        drop(will_wait);
        if let Some(stream) = made {
            stream.waits_now();
        }
    }

    /// All of it has been handed to the commands: marks its end behind that.
    pub(crate) fn ends(self: &Arc<Self>) {
        let operation = self.clone();
        self.binding.ours.commands.put(move || operation.put_over());
    }

    /// A command: all of what the rank's stream does for it is there, and words are to say when it is done.
    fn put_over(&self) -> Result<(), Error> {
        let (ours, number) = (&self.binding.ours, self.number());
        if ours.is_put_over(number) {
            return Ok(());
        }
        if self.is_for_all() {
            let problem = "all ranks lend memory for it, and none has put it on a stream (a bug)";
            return Err(Error::system("fold what all ranks lend", problem));
        }
        self.copied.iter().try_for_each(|copied| copied.put_back(self.stream()))?;
        if ours.has_words() {
            let mut words = self.wait_for_input();
            let refreshes = ours.refreshes(number);
            words.extend(ours.begun(number).filter(|_| refreshes));
            let whose = self.others(if refreshes { ALL } else { self.folds.lent_by }).chain([ours]);
            words.extend(whose.filter_map(|whose| ours.over_for(whose, number)));
            words.extend(self.binding.over_for_all(number).into_iter().flatten().filter(|_| refreshes));
            self.stream().put_words("end a collective", &mut words)?;
            self.waits_for_its_input();
        } else {
            ours.tell_when_over(number)?;
        }
        // Without words this event says that the operation is over. It also says so where the stream is a caller's: that stream is not asked, as it
        // may have other work behind the operation, or be captured by then.
        if !(ours.has_words() && ours.stream.is_alone()) {
            self.state.lock().end = Some(self.stream().point()?);
        }
        self.binding.has_put(number, [ours]);
        Ok(())
    }

    /// A command: all of it is on the stream. Returns the end there.
    pub(crate) fn put_end(&self) -> Result<DeviceEvent, Error> {
        self.put_over()?;
        self.stream().point()
    }

    /// The ranks whose streams touch its buffers, unless one launch folds it for all ranks.
    fn workers(&self) -> impl Iterator<Item = &Arc<PeerDevice>> {
        self.others(self.folds.lent_to).filter(|_| kept(Wait::Done)).chain([&self.binding.ours])
    }

    /// Whether all that the rank's own stream does for it is there.
    pub(crate) fn is_put(&self) -> bool {
        self.binding.ours.is_put_over(self.number())
    }

    /// The ranks on whose streams it is not over, with whether all of it is there: of those whose streams touch its buffers.
    pub(crate) fn at_work(&self) -> Vec<(Rank, bool)> {
        let (ours, number) = (&self.binding.ours, self.number());
        if self.is_for_all() {
            // All ranks' device is this one.
            let busy = (!ours.has_ended_for_all(number)).then(|| (ours.rank(), self.is_put()));
            return busy.into_iter().collect();
        }
        let busy = self.workers().filter(|device| !ours.has_ended_by(device, number));
        busy.map(|device| (device.rank(), device.is_put_over(number))).collect()
    }

    /// Whether all of it is on the streams.
    pub(crate) fn is_enqueued(&self) -> bool {
        match self.is_for_all() {
            true => self.is_put(),
            false => self.workers().all(|device| device.is_put_over(self.number())),
        }
    }

    /// Whether the streams have come to its end.
    fn has_ended(&self) -> bool {
        let (ours, number) = (&self.binding.ours, self.number());
        match self.is_for_all() {
            true => ours.has_ended_for_all(number),
            false => self.workers().all(|device| ours.has_ended_by(device, number)),
        }
    }

    /// Whether all streams have come to its end. No call of the driver's.
    pub(crate) fn is_over(&self) -> Result<bool, Error> {
        let over = !kept(Wait::End) || self.has_ended();
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        // What has failed there may never come to its end.
        if let Some(library) = &self.taken_by
            && let Err(error) = library.check()
        {
            return if library.gives_way() { Ok(false) } else { Err(error) };
        }
        if over {
            self.check()?;
            let mut state = self.state.lock();
            state.is_good = true;
            state.verdict.iter().for_each(|verdict| verdict.settle(Ok(())));
            drop(state);
            self.workspace.iter().for_each(|workspace| workspace.mark_past());
            self.copied.iter().for_each(Copied::mark_past);
        }
        Ok(over)
    }

    /// An error if this rank, or one in another process, has let go: then what has come to its end is not to be used.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.binding.far.as_ref().map_or(Ok(()), |far| far.check())
    }

    /// Whether the streams of its buffers have come to the call. May call the driver.
    fn has_come_to_call(&self) -> bool {
        match self.input {
            Some(start) => self.binding.ours.shows(start),
            None => self.after.iter().all(|event| event.is_complete().unwrap_or(true)),
        }
    }

    /// Whether its own inputs are there. No call of the driver's.
    pub(crate) fn has_inputs(&self) -> bool {
        self.binding.ours.shows(self.start()) || self.binding.ours.is_told_begun(self.number())
    }

    /// Whether the driver has taken its first work. No call of the driver's.
    pub(crate) fn is_taken(&self) -> bool {
        self.binding.ours.has_put(self.number())
    }

    /// Whether ranks in other processes have all called it, and this rank's own inputs are not there although the driver has taken what says so.
    pub(crate) fn lacks_inputs(&self) -> bool {
        let Some(far) = &self.binding.far else { return false };
        // What they lend is given back to them as soon as this rank's stream has the kernel.
        let all_have_called = far.all_have_lent() || self.waits_for_all.load(Ordering::Relaxed);
        all_have_called && self.is_taken() && !self.has_inputs()
    }

    /// The ranks in other processes whose inputs are not there, of those that lend memory for it.
    pub(crate) fn unready(&self) -> Vec<Rank> {
        self.binding.far.iter().flat_map(|far| far.unready()).collect()
    }

    /// The ranks whose inputs are not there, though they have called.
    pub(crate) fn late(&self) -> Vec<Rank> {
        let is_late = |device: &Arc<PeerDevice>| device.is_late(self.number());
        let all = self.binding.all.iter().enumerate();
        all.filter_map(|(rank, device)| device.as_ref().is_some_and(is_late).then_some(rank)).collect()
    }

    /// Has the driver asked now and then whether the stream on which the operation ends (`line`) has failed, until it has come to that end. Calls
    /// `then` when it has failed, or has come to the end though no word has said so.
    pub(crate) fn watch(self: &Arc<Self>, then: impl FnOnce() + Send + 'static) {
        let (operation, ours, number) = (self.clone(), self.binding.ours.clone(), self.number());
        let told = move |result: Result<(), Error>| {
            match result {
                Ok(()) if operation.state.lock().failed => {}
                Ok(()) if operation.is_for_all() => operation.binding.tell_over_for_all(number),
                Ok(()) => {
                    operation.binding.ours.tell_over(operation.others(operation.folds.lent_by), number);
                }
                Err(error) => drop(operation.failure.set(error)),
            }
            then();
        };
        if ours.has_words() && self.line().is_alone() {
            let is_for_all = self.is_for_all();
            let stage = move || match is_for_all {
                true if ours.has_ended_for_all(number) => Stage::Over,
                false if ours.has_ended_by(&ours, number) => Stage::Over,
                _ if ours.is_put_over(number) => Stage::There,
                _ => Stage::Coming,
            };
            return watch_stream(self.line(), "run a collective", Box::new(stage), Box::new(told));
        }
        let operation = self.clone();
        self.binding.ours.commands.put(move || {
            // Set by the command before this one.
            let end = operation.state.lock().end.clone();
            if let Some(end) = end {
                end.then("run a collective", Box::new(told));
            }
            Ok(())
        });
    }

    /// Whether the rank's own stream, or the one that it is launched on, is one of those that `join` makes wait.
    pub(crate) fn is_on(&self, stream: &DeviceStream) -> bool {
        self.streams.iter().chain([stream]).any(|stream| stream == self.stream() || stream == self.line())
    }

    /// Sees to it that a stream, and those of the buffers, may wait for what is not on the rank's stream yet, and do not keep it
    /// from getting there. `false`: they might. Else to be followed by `waits_now`.
    pub(crate) fn make_way(&self, stream: &DeviceStream) -> bool {
        self.binding.ours.make_way(self.streams.iter().chain([stream]), self.needs_copies())
    }

    /// They have been made to wait, or will not be.
    pub(crate) fn waits_now(&self, stream: &DeviceStream) {
        self.streams.iter().chain([stream]).for_each(DeviceStream::waits_now);
    }

    /// Makes a stream, and those of the buffers, wait for the operation's end. `false`: it was given up, and
    /// nothing waits.
    pub(crate) fn join(&self, stream: &DeviceStream) -> Result<bool, Error> {
        let end = {
            let mut state = self.state.lock();
            if state.failed {
                return Ok(false);
            }
            let witness = |far: &Arc<Far>| Arc::downgrade(far) as Weak<dyn Witness>;
            let library = |whole: &Arc<dyn Whole>| Arc::downgrade(whole) as Weak<dyn Witness>;
            let far = || self.binding.far.as_ref().map(witness);
            let verdict = || Arc::new(Verdict::new(self.taken_by.as_ref().map(library).or_else(far)));
            let is_good = state.is_good;
            let verdict = state.verdict.get_or_insert_with(verdict);
            // Another thread may have seen the end already: it had no verdict to settle.
            if is_good {
                verdict.settle(Ok(()));
            }
            state.end.clone().filter(|_| !self.binding.ours.has_words())
        };
        // Where all of it is on streams, they write the words; the host does, where it is given up meanwhile.
        let mut all = self.streams.iter().chain([stream]);
        if let Some(end) = end {
            return all.try_for_each(|stream| stream.wait_event(&end)).map(|()| true);
        }
        let (ours, is_early) = (&self.binding.ours, !self.is_enqueued());
        all.try_for_each(|stream| {
            let is_awaited = || match self.is_for_all() {
                true => ours.await_end_for_all(stream, self.number()),
                false => ours.await_ends(stream, self.workers(), self.number()),
            };
            if !is_early {
                return is_awaited();
            }
            self.note_join(stream, false);
            let awaited = is_awaited();
            self.note_join(stream, awaited.is_ok());
            awaited
        })
        .map(|()| true)
    }

    /// After `join`: its buffers are handed on, and depend on how it ends.
    ///
    /// # Errors
    /// The cause for which it has failed.
    pub(crate) fn hand_on(&self) -> Result<(), Error> {
        let Some(verdict) = self.state.lock().verdict.clone() else { return Ok(()) };
        self.outputs.iter().for_each(|output| output.depend_on(&verdict));
        verdict.ask()
    }
}
