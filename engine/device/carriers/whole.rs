//! The carrier of operations that a library takes whole.
//!
//! The ranks first meet in a barrier over the host's links. So the library never sees ranks that disagree, and never waits for a rank that
//! does not call. If the operation is on device memory, they pass the barrier a second time, by which they agree when to launch it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::device::operation::DeviceOp;
use crate::device::whole::{BoundWhole, Called, LaunchOrder, Standing, Ticket, Turn, Whole, WholeCall};
use crate::error::{self, Error, MissingState};
use crate::exec::Work;
use crate::exec::carrier::{Carrier, Lanes, OnStream, Passed, Submission};
use crate::types::mix;

/// An operation that a library takes whole. Its parts are those by which the ranks meet: a barrier and, if each rank
/// knows only its own counts, messages without payload by which the ranks compare these.
pub(crate) struct WholeOp {
    by: Arc<dyn Whole>,
    /// The order of launches on the rank's device, if the operation is on device memory.
    order: Option<Arc<LaunchOrder>>,
    device: Option<Arc<DeviceOp>>,
    /// The memory of the barriers: when a barrier is passed, this holds the largest of the numbers that the ranks had put in theirs.
    token: Arc<AtomicU64>,
    state: Arc<Mutex<State>>,
}

/// If the operation is on device memory, nobody calls the driver, or a function of the library that may block, with this locked.
#[derive(Default)]
struct State {
    /// The call, until it is given to the library.
    call: Option<WholeCall>,
    /// The operation's place in the queue for the device, until it is launched.
    ticket: Option<Ticket>,
    /// The operation's time in the order of launches: there from when all ranks have called until the operation is launched.
    turn: Option<Turn>,
    /// Whether a command that is to ask the library about the call has been appended, and has not been carried out yet.
    is_asking: bool,
    /// Whether all of the operation is on the device's stream, and its end is marked there.
    is_on_stream: bool,
}

impl WholeOp {
    /// `device`: the operation on the device, if it is on device memory. `token`: the memory of the barriers.
    pub(crate) fn new(
        call: WholeCall,
        bound: &BoundWhole,
        device: Option<Arc<DeviceOp>>,
        token: Arc<AtomicU64>,
    ) -> WholeOp {
        let state = Arc::new(Mutex::new(State { call: Some(call), ..State::default() }));
        WholeOp { by: bound.whole.clone(), order: bound.order.clone(), device, token, state }
    }

    /// Called when a barrier is passed: all ranks have called the same. Returns whether the second barrier is to begin now: if so,
    /// this rank has named a time for the launch.
    fn begins_to_agree(&self, state: &mut State) -> bool {
        let is_first = state.turn.is_none() && state.call.is_some();
        let Some(ticket) = state.ticket.as_ref().filter(|_| is_first) else { return false };
        state.turn = ticket.turn();
        if let Some(turn) = &state.turn {
            self.token.store(turn.time(), Ordering::Relaxed);
        }
        state.turn.is_some()
    }

    /// Called when the ranks have passed the barriers: has the call given to the library when it is due, and later has the library asked how far
    /// it is with the call. Returns whether anything was done, and how far the library is.
    fn go_on(&self, state: &mut State) -> Result<(bool, Standing), Error> {
        if let Some(turn) = state.turn.as_mut().filter(|_| state.call.is_some()) {
            turn.agree(self.token.load(Ordering::Relaxed));
            if !turn.is_due() {
                return Ok((false, Standing::InProgress));
            }
        }
        let call = state.call.take();
        let moved = call.is_some();
        let Some(device) = &self.device else {
            if let Some(call) = call {
                // SAFETY: as in `launch`; the memory is the host's, so there is no stream to wait for.
                unsafe { self.by.submit(call, None) }?;
            }
            let standing = self.by.poll()?;
            return Ok((moved || standing != Standing::InProgress, standing));
        };
        if let Some(call) = call {
            device.begin()?;
            self.launch(device, call);
        }
        if state.is_on_stream {
            return Ok((true, Standing::OnStream));
        }
        if !std::mem::replace(&mut state.is_asking, true) {
            self.ask(device);
        }
        Ok((moved, Standing::InProgress))
    }

    /// Appends a command that makes the device's stream wait for the operation launched there before, and then gives the call to the library.
    fn launch(&self, device: &Arc<DeviceOp>, call: WholeCall) {
        let (by, state, on) = (self.by.clone(), self.state.clone(), device.clone());
        device.binding.ours.commands.put(move || {
            let turn = state.lock().turn.take();
            let ordered = turn.as_ref().map_or(Ok(()), |turn| turn.launches(on.stream()));
            state.lock().turn = turn;
            ordered?;
            // SAFETY: the buffers are as long as the call was checked to say, and the in-flight table owns them until the
            // operation has ended. If the communicator dies first, its end aborts the library (`Bound::abort`), and gives the
            // buffers back when no command is under way and the library is quiet, or never. The stream waits for those that used the
            // buffers before (`DeviceOp::begin`), and the operation begins only after the host's event that it was submitted with.
            unsafe { by.submit(call, Some(on.stream())) }
        });
    }

    /// Appends a command that asks the library how far it is with the call. Once all of the call is on the device's stream, its end is marked there.
    fn ask(&self, device: &Arc<DeviceOp>) {
        let (by, state, on) = (self.by.clone(), self.state.clone(), device.clone());
        device.binding.ours.commands.put(move || {
            if by.poll()? == Standing::InProgress {
                state.lock().is_asking = false;
                return Ok(());
            }
            let end = on.put_end()?;
            let (turn, ticket) = {
                let mut state = state.lock();
                (state.turn.take(), state.ticket.take())
            };
            if let Some(turn) = turn {
                turn.launched(on.stream(), end);
            }
            drop(ticket);
            state.lock().is_on_stream = true;
            on.binding.ours.commands.wake();
            Ok(())
        });
    }
}

impl Carrier for WholeOp {
    fn submitted(&self, at: &Submission<'_>) {
        let &Submission { number, signature, .. } = at;
        if let Some(device) = &self.device {
            device.submitted();
        }
        if let Some(order) = &self.order {
            let what = error::Operation { comm: at.comm.to_owned(), number, signature };
            let name = mix(at.place, number);
            let ticket = order.queue(Called { what, name, waker: at.waker.clone() });
            self.state.lock().ticket = Some(ticket);
        }
    }

    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error> {
        let mut state = self.state.lock();
        if !self.device.as_ref().is_none_or(|device| device.inputs_may_be_awaited()) {
            return Ok(Passed::Going(false));
        }
        // Peers are told that this rank has called only when all that was submitted earlier for the same device is launched.
        if !state.ticket.as_ref().is_none_or(Ticket::is_first) {
            return Ok(Passed::Going(false));
        }
        let (any, is_complete) = lanes.pass_on_host(work)?;
        if !is_complete {
            return Ok(Passed::Going(any));
        }
        if self.begins_to_agree(&mut state) {
            return Ok(Passed::Again);
        }
        Ok(match self.go_on(&mut state)? {
            (moved, Standing::InProgress) => Passed::Going(any | moved),
            (_, Standing::OnStream | Standing::Over) if self.device.is_some() => Passed::OnStream,
            (_, Standing::OnStream | Standing::Over) => Passed::Complete,
        })
    }

    /// Once all ranks have called: the library. Before that: another operation in the queue for the device, if there is one.
    fn held_up(&self) -> Option<MissingState> {
        let state = self.state.lock();
        if state.call.is_none() || state.turn.is_some() {
            return Some(self.by.not_ended(state.turn.as_ref()));
        }
        let (other, is_before) = state.ticket.as_ref()?.other()?;
        Some(MissingState::LaunchOrder { other: other.to_string(), is_before })
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn meets_last(&self) -> bool {
        true
    }

    fn is_to_be_asked(&self) -> bool {
        self.state.lock().call.is_none() || self.device.as_ref().is_some_and(|device| device.is_held_back())
    }

    fn on_stream(&self) -> Option<&dyn OnStream> {
        self.device.as_ref().map(|device| device as _)
    }
}
