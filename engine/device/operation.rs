//! Operations that the ranks' devices run.
//!
//! The plans, the executor and the order of messages are those of the host. What differs is that a step's work is *put on the rank's stream*
//! where a host would do it at once, and that a link lends device memory ([`crate::device::links::peer`]). An operation is over when the
//! streams of all ranks that touch its buffers are done with it, as words in memory say ([`Word::Over`](super::signal::Word::Over), or
//! [`Word::OverForAll`](super::signal::Word::OverForAll)).
//!
//! [`Commands`](crate::commands::Commands) put the work on streams: no function here that is called in a pass, or to end a communicator that
//! has failed, calls the driver.

mod binding;
mod folds;
mod given_up;
mod inputs;
mod one_launch;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use allstream_sys::cuda::CuStreamMemOp;
use parking_lot::Mutex;

use super::context::Joined;
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
    /// Its number among this rank's operations on devices in the communicator; all ranks give it the same.
    number: OnceLock<u64>,
    /// Whether one launch folds it for all ranks (`one_launch.rs`). Known with the number.
    is_for_all: OnceLock<bool>,
    /// Whether this rank has arrived last, and is putting that launch on rank 0's stream now.
    is_launching: AtomicBool,
    /// The events behind what the buffers' streams held at the call. Empty if there is `input`.
    after: Vec<DeviceEvent>,
    /// The word that the stream of the buffers writes behind what it held at the call, if they have only one stream and a word can be used.
    input: Option<Start>,
    folds: Folds,
    /// Set by commands: whether the rank's stream has been made to wait for this rank's inputs, and for those of all ranks.
    waits_for_input: AtomicBool,
    waits_for_all: AtomicBool,
    /// The streams in whose order the buffers are used.
    streams: Vec<DeviceStream>,
    /// What becomes of the contents of the buffers that it writes.
    outputs: Vec<Arc<Fate>>,
    /// Those operations for which the buffers' streams waited at the call, and of which some work was on no stream then.
    behind: Vec<Weak<dyn Joined>>,
    /// Since when the operation is put off because of these ([`inputs_may_be_awaited`](Self::inputs_may_be_awaited)).
    held_since: OnceLock<Instant>,
    /// If there were such operations at the call: the ranks' streams that are still to be made to wait for the buffers' streams. `make_way` has
    /// seen to it at the call that they hold up no collective, even if they have to wait before all work of those operations is on streams.
    will_wait: Mutex<Vec<DeviceStream>>,
    /// The library that takes it whole, if one does.
    taken_by: Option<Arc<dyn Whole>>,
    /// The memory that its parts need beside the buffers; or why there is none.
    workspace: Result<Arc<Workspace>, Error>,
    /// The copies of buffers that the devices of other ranks cannot touch.
    copied: Vec<Copied>,
    /// Whether [`begin`](Self::begin) has been called.
    has_begun: AtomicBool,
    /// The driver's error, if work on the stream has failed.
    failure: OnceLock<Error>,
    state: Mutex<State>,
}

/// Nobody calls the driver with this locked.
#[derive(Default)]
struct State {
    /// The event behind its work on the [line](DeviceOp::line), where words do not say enough.
    end: Option<DeviceEvent>,
    /// It was given up.
    failed: bool,
    /// It has ended well.
    is_good: bool,
    /// `Some`: the operation has failed, and somebody may still touch its buffers. What is in it says until when ([`DeviceOp::lose`]).
    lost: Option<Option<Vec<Arc<Lease>>>>,
    /// How it ends, for buffers that are handed on before it has ended. `Some` once `join` has been called.
    verdict: Option<Arc<Verdict>>,
}

impl Witness for Far {
    fn check(&self) -> Result<(), Error> {
        Far::check(self)
    }
}

impl Drop for DeviceOp {
    /// If the operation has ended well, frees the memory of those of its buffers that were dropped before the end.
    fn drop(&mut self) {
        if let Some(verdict) = self.state.get_mut().verdict.take().filter(|verdict| verdict.is_good()) {
            verdict.let_go();
        }
        let will_wait = std::mem::take(self.will_wait.get_mut());
        if !will_wait.is_empty() {
            // These streams were not made to wait, and will not be: the operation was never begun, or its commands were cut.
            let never = move || will_wait.iter().for_each(DeviceStream::waits_now);
            self.binding.ours.commands.put_always(never);
        }
    }
}

impl DeviceOp {
    /// An operation on buffers that are used in the order of these streams. It starts after what is on the streams now.
    pub(crate) fn new(
        binding: Arc<Binding>,
        streams: Vec<DeviceStream>,
        outputs: Vec<Arc<Fate>>,
        taken_by: Option<Arc<dyn Whole>>,
        Needs { workspace, copied, mut folds }: Needs,
    ) -> Result<DeviceOp, Error> {
        if !copied.is_empty() {
            // The rank's stream fills the copies that are lent, and copies the results back behind the other ranks' work.
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
        let behind: Vec<_> =
            streams.iter().flat_map(|stream| stream.0.standing.lock().joined().to_vec()).collect();
        // If no way can be made, and the operation is put off for too long, it may hold up another communicator's collective until the deadline.
        let is_behind = !behind.is_empty();
        let mut will_wait = if is_behind { binding.work_on(&folds, input.is_some()) } else { Vec::new() };
        if is_behind && !binding.ours.make_way(will_wait.iter(), false) {
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
            behind,
            held_since: OnceLock::new(),
            will_wait: Mutex::new(will_wait),
            taken_by,
            workspace,
            copied,
            has_begun: AtomicBool::new(false),
            failure: OnceLock::new(),
            state: Mutex::default(),
        })
    }

    /// Called when it is submitted, under the lock of the endpoint's table: gets its number. Collectives on the host are not counted here. They write
    /// no words, and after very many of them a word that shows the last operation's number, modulo 2^32, would seem to show the next one's.
    pub(crate) fn submitted(&self) {
        let number = self.binding.ours.next_call();
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

    /// The stream on which this rank's own work for it is put.
    pub(crate) fn stream(&self) -> &DeviceStream {
        &self.binding.ours.stream
    }

    /// Called in each pass once it is the operation's turn: from then on passes put its work on the stream. Only the first call does anything.
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
        // One launch for all ranks waits for the event behind each rank's own work, so no link need make a peer wait for that work.
        ours.starts(number, self.start(), self.folds.own_work_is_lent && !self.is_for_all());
        let operation = self.clone();
        ours.commands.put(move || {
            let ours = &operation.binding.ours;
            if operation.input.is_some() {
                // The first work that is put on a stream is put behind a wait for the word. The driver is not called here, so it cannot block.
                ours.takes(number);
                return Ok(());
            }
            let mut after = operation.after.iter().filter(|_| kept(Wait::After));
            let ordered = after.try_for_each(|event| operation.stream().wait_event(event));
            operation.waits_for_its_input();
            ordered?;
            ours.begins(number)?;
            // Not earlier: while the driver blocks in one of these calls, it has not taken the operation.
            ours.takes(number);
            operation.copied.iter().try_for_each(|copied| copied.fill(operation.stream()))
        });
        Ok(())
    }

    /// The word that says when its inputs are there.
    fn start(&self) -> Start {
        self.input.unwrap_or_else(|| Start::of(self.number()))
    }

    /// The memory that the parts need beside the buffers, if there is any.
    pub(crate) fn workspace(&self) -> Option<&Arc<Workspace>> {
        self.workspace.as_ref().ok()
    }

    /// Whether any of its parts are folded, as the call has found out.
    pub(crate) fn is_folded(&self) -> bool {
        self.folds.are_any()
    }

    /// The devices of the other ranks of this process, as far as they are in `bits`: bit `r` stands for rank `r`.
    fn others(&self, bits: u64) -> impl Iterator<Item = &Arc<PeerDevice>> {
        let all = self.binding.all.iter().enumerate().filter(move |(rank, _)| is_named(bits, *rank));
        all.filter_map(|(_, device)| device.as_ref())
            .filter(|device| !Arc::ptr_eq(device, &self.binding.ours))
    }

    /// Appends the command that calls `launch` to put a kernel on the rank's stream, behind waits for the inputs of all ranks. The kernel folds what
    /// the ranks lend of a part. `is_last`: it is the last kernel of the part.
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
                    let problem = "the rank lends memory for a collective that it has not begun (a bug)";
                    let missing = || Error::system("wait for a rank's input", problem);
                    words.push(other.wait_for_start(number).ok_or_else(missing)?);
                }
            }
            operation.stream().put_words("make a stream wait for all ranks' inputs", &mut words)?;
            operation.waits_for_its_input();
            launch(operation.stream())?;
            // Not left to the command of `ends`: if that came later, the context would have to be entered once more for it.
            if is_last && operation.folds.are_one { operation.put_over() } else { Ok(()) }
        });
    }

    /// The wait of the rank's stream for this rank's inputs. Empty if it is on the stream already.
    fn wait_for_input(&self) -> Vec<CuStreamMemOp> {
        let (ours, number) = (&self.binding.ours, self.number());
        if self.waits_for_input.load(Ordering::Relaxed) {
            return Vec::new();
        }
        ours.wait_for_start(number).filter(|_| kept(Wait::After)).into_iter().collect()
    }

    /// Called in a command: makes the rank's stream wait for this rank's inputs, if it does not yet.
    pub(crate) fn awaits_input(&self) -> Result<(), Error> {
        let mut words = self.wait_for_input();
        self.stream().put_words("make a stream wait for its rank's input", &mut words)?;
        self.waits_for_its_input();
        Ok(())
    }

    /// Called in a command, when the rank's stream has been made to wait for this rank's inputs.
    fn waits_for_its_input(&self) {
        self.waits_for_input.store(true, Ordering::Relaxed);
        self.has_waits(self.stream());
    }

    /// Called in a command, when this stream, this rank's own or rank 0's, has been made to wait for this rank's inputs.
    fn has_waits(&self, stream: &DeviceStream) {
        let mut will_wait = self.will_wait.lock();
        let at = will_wait.iter().position(|other| other == stream);
        let made = at.map(|at| will_wait.swap_remove(at));
        drop(will_wait);
        if let Some(stream) = made {
            stream.waits_now();
        }
    }

    /// Called when all its work is among the commands: appends the command that marks its end.
    pub(crate) fn ends(self: &Arc<Self>) {
        let operation = self.clone();
        self.binding.ours.commands.put(move || operation.put_over());
    }

    /// Called in a command, when all its work is on the rank's stream: puts the writes there by which words say that the work is done.
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
        // Without words this event says that the operation is over. It is also needed if the stream is a caller's: the driver is not asked about such
        // a stream itself (`watch`), which may have other work behind the operation, or be captured by then.
        if !(ours.has_words() && ours.stream.is_alone()) {
            self.state.lock().end = Some(self.stream().point()?);
        }
        self.binding.has_put(number, [ours]);
        Ok(())
    }

    /// Called in a command, when all its work is on the rank's stream: marks its end, and returns the event behind that.
    pub(crate) fn put_end(&self) -> Result<DeviceEvent, Error> {
        self.put_over()?;
        self.stream().point()
    }

    /// The ranks whose streams touch its buffers, unless one launch folds it for all ranks.
    fn workers(&self) -> impl Iterator<Item = &Arc<PeerDevice>> {
        self.others(self.folds.lent_to).filter(|_| kept(Wait::Done)).chain([&self.binding.ours])
    }

    /// Whether all work of the rank's own stream for it has been put on that stream.
    pub(crate) fn is_put(&self) -> bool {
        self.binding.ours.is_put_over(self.number())
    }

    /// Of the ranks whose streams touch its buffers: those whose streams are not done with it, each with whether all its work has been put there.
    pub(crate) fn at_work(&self) -> Vec<(Rank, bool)> {
        let (ours, number) = (&self.binding.ours, self.number());
        if self.is_for_all() {
            // All ranks share this rank's device, so this rank stands for all.
            let busy = (!ours.has_ended_for_all(number)).then(|| (ours.rank(), self.is_put()));
            return busy.into_iter().collect();
        }
        let busy = self.workers().filter(|device| !ours.has_ended_by(device, number));
        busy.map(|device| (device.rank(), device.is_put_over(number))).collect()
    }

    /// Whether all of it is on the streams that touch its buffers.
    pub(crate) fn is_enqueued(&self) -> bool {
        match self.is_for_all() {
            true => self.is_put(),
            false => self.workers().all(|device| device.is_put_over(self.number())),
        }
    }

    /// Whether the streams that touch its buffers have come to its end, as words (or, without words, the driver) have said.
    fn has_ended(&self) -> bool {
        let (ours, number) = (&self.binding.ours, self.number());
        match self.is_for_all() {
            true => ours.has_ended_for_all(number),
            false => self.workers().all(|device| ours.has_ended_by(device, number)),
        }
    }

    /// Whether the streams have come to its end, and the result is good. An error: work for it has failed, or a rank has let go. Calls no driver.
    pub(crate) fn is_over(&self) -> Result<bool, Error> {
        let over = !kept(Wait::End) || self.has_ended();
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        // What has failed in a library may never come to its end.
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

    /// An error if this rank, or one in another process, has let go (`links/ipc.rs`): then even a result that is there may be wrong.
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

    /// Whether this rank's inputs are there. Calls no driver.
    pub(crate) fn has_inputs(&self) -> bool {
        self.binding.ours.shows(self.start()) || self.binding.ours.is_told_begun(self.number())
    }

    /// Whether the driver has taken its first work, the waits for this rank's inputs. If the caller's stream writes a word for the inputs, there is
    /// no such work, and the answer is yes once the command of [`begin`](Self::begin) is carried out. Calls no driver.
    pub(crate) fn is_taken(&self) -> bool {
        self.binding.ours.has_put(self.number())
    }

    /// Whether all ranks have called it, and it waits for this rank's inputs. If all ranks are in this process: whether the rank's stream must not
    /// wait for the inputs yet. Else: whether the inputs are missing, or, if the driver has not taken the first work, those of the operation before.
    /// If the driver does not take it although nothing on the rank's stream waits for inputs, that is the driver's fault: then the answer is no.
    pub(crate) fn lacks_inputs(&self) -> bool {
        if self.waits_for_its_inputs_alone() {
            return true;
        }
        let Some(far) = &self.binding.far else { return false };
        // Once the command for the kernel is appended, the loans are given back, and `all_have_lent` says no. `waits_for_all` is set when that
        // command is carried out.
        let all_have_called = far.all_have_lent() || self.waits_for_all.load(Ordering::Relaxed);
        all_have_called && if self.is_taken() { !self.has_inputs() } else { self.is_behind_inputs() }
    }

    /// Whether this rank's inputs of the operation before are missing. While they are, the rank's stream may be full, and then the driver blocks.
    fn is_behind_inputs(&self) -> bool {
        self.number().checked_sub(1).is_some_and(|before| self.binding.ours.is_late(before))
    }

    /// The ranks in other processes that lend memory for it, but whose inputs are not there, and those of this process whose inputs are held back.
    pub(crate) fn unready(&self) -> Vec<Rank> {
        let far = self.binding.far.iter().flat_map(|far| far.unready());
        far.chain(self.held_back()).collect()
    }

    /// The ranks of this process whose inputs are not there, though their drivers were given the operation.
    pub(crate) fn late(&self) -> Vec<Rank> {
        let is_late = |device: &Arc<PeerDevice>| device.is_late(self.number());
        let all = self.binding.all.iter().enumerate();
        all.filter_map(|(rank, device)| device.as_ref().is_some_and(is_late).then_some(rank)).collect()
    }

    /// Makes `waiter.rs` watch the end of the operation on its [`line`](Self::line). `then` is called when the driver reports a failure there or that
    /// the stream has come to the end. If a word has already said that the stream has come to the end, `then` may never be called.
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
            // An earlier command has set it: for one launch, that of the rank that has arrived last.
            let end = operation.state.lock().end.clone();
            if let Some(end) = end {
                end.then("run a collective", Box::new(told));
            }
            Ok(())
        });
    }

    /// Whether the rank's own stream, or the one on which the operation ends, is among the streams that `join(stream)` makes wait.
    pub(crate) fn is_on(&self, stream: &DeviceStream) -> bool {
        self.streams.iter().chain([stream]).any(|stream| stream == self.stream() || stream == self.line())
    }

    /// Sees to it that `stream` and the buffers' streams, if they wait for work that is not on the rank's stream yet, do not hold that work up.
    /// `false`: they might hold it up. After `true` the caller calls [`waits_now`](Self::waits_now).
    pub(crate) fn make_way(&self, stream: &DeviceStream) -> bool {
        self.binding.ours.make_way(self.streams.iter().chain([stream]), self.needs_copies())
    }

    /// Called after [`make_way`](Self::make_way), when the same streams have been made to wait, or will not be.
    pub(crate) fn waits_now(&self, stream: &DeviceStream) {
        self.streams.iter().chain([stream]).for_each(DeviceStream::waits_now);
    }

    /// Makes a stream, and those of the buffers, wait for the operation's end. `false`: the operation was given up, and no stream was made to
    /// wait.
    pub(crate) fn join(self: &Arc<Self>, stream: &DeviceStream) -> Result<bool, Error> {
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
            // If another thread has seen the end already, there was no verdict yet for it to settle.
            if is_good {
                verdict.settle(Ok(()));
            }
            state.end.clone().filter(|_| !self.binding.ours.has_words())
        };
        // Even if the operation is given up meanwhile, the waits end: the ranks' streams write the words, or the host does (`DeviceSignal::release`).
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

    /// Called after `join`, when its buffers are handed on before its end: from now on their contents depend on how it ends.
    ///
    /// # Errors
    /// The operation has failed, for this cause.
    pub(crate) fn hand_on(&self) -> Result<(), Error> {
        let Some(verdict) = self.state.lock().verdict.clone() else { return Ok(()) };
        self.outputs.iter().for_each(|output| output.depend_on(&verdict));
        verdict.ask()
    }
}
