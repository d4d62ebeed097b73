//! [`Work`]: an operation in flight, as Python sees it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use allstream::cuda::DeviceStream;
use allstream::{Error, Event, SharedComm};
use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::PyTimeoutError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::callbacks::Place;
use crate::errors;
use crate::flight::{Flight, Landed, Value};
use crate::keeper;
use crate::memory::stream_of_others;
use crate::operation::Operation;
use crate::options::seconds;
use crate::stream::HostStream;
use crate::wait::{SLICE, poll_until};

/// How long `join` works on an operation before it looks again whether the operation is enqueued: the first time, and at most. The time doubles
/// from look to look.
const ASK: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(1));

enum State {
    Flying(Box<dyn Flight>),
    /// A thread works on the operation, or records its end, and has taken the flight out of here meanwhile.
    Away,
    /// A device's stream waits for the operation, and the arrays are free in the order of that stream. The operation's result, and the event that
    /// completes when the stream has reached the operation's end.
    Joined(Py<PyAny>, Event),
    Succeeded(Py<PyAny>),
    Failed(Error),
}

/// The functions to be called when an operation is over.
#[derive(Default)]
struct Asked {
    /// Users' functions, which may wait: a thread of the group's [`Callbacks`](crate::callbacks::Callbacks) calls them.
    callbacks: Vec<(Py<PyAny>, Py<Work>)>,
    /// This package's own functions, which never wait: the thread that records the operation's end calls them.
    wakers: Vec<(Py<PyAny>, Py<Work>)>,
    /// Whether the operation is over and no callback is left for the group's thread to call.
    told: bool,
}

/// Calls each function with its work.
fn call_all(py: Python<'_>, callbacks: Vec<(Py<PyAny>, Py<Work>)>) {
    for (callback, work) in callbacks {
        if let Err(error) = callback.call1(py, (work,)) {
            error.write_unraisable(py, Some(callback.bind(py)));
        }
    }
}

/// An operation in flight, shared by its [`Work`], the keeper, and others that wait for its end.
pub(crate) struct Flying {
    state: Mutex<State>,
    landed: Condvar,
    /// Whether somebody waits to be told of the operation's end: then the keeper must poll it, so that the engine wakes the keeper.
    watched: AtomicBool,
    /// The functions to be called at the operation's end, each with the `Work` that it gets.
    callbacks: Mutex<Asked>,
    /// The place of its callbacks among those of its group.
    place: Place,
    /// What `wait` will return, unless the engine gives the result; moved to `state` at the end.
    result: Mutex<Option<Py<PyAny>>>,
    /// If an array is on a device: the communicator, which tells whether the operation failed after a stream was made to wait for it.
    comm: Option<SharedComm>,
}

impl Wake for Flying {
    fn wake(self: Arc<Self>) {
        keeper::look_at(self);
    }
}

impl Operation for Flying {
    fn look(self: Arc<Self>) {
        let waker = Waker::from(self.clone());
        let mut cx = Context::from_waker(&waker);
        let mut state = self.state.lock();
        // Take the flight out and drop the lock while the engine works: a thread that waits for the lock may hold the GIL.
        let flight = match std::mem::replace(&mut *state, State::Away) {
            State::Flying(flight) => Ok(flight),
            other => {
                let end = if let State::Joined(_, end) = &other { Some(end.clone()) } else { None };
                *state = other;
                Err(end)
            }
        };
        drop(state);
        let mut landed = match flight {
            Ok(mut flight) => match flight.poll(&mut cx) {
                Poll::Ready(landed) => Some(landed),
                Poll::Pending => return self.put_back(flight),
            },
            Err(Some(mut end)) => match Pin::new(&mut end).poll(&mut cx) {
                Poll::Ready(_) => None,
                Poll::Pending => return,
            },
            Err(None) => return,
        };
        Python::try_attach(|py| match landed.take() {
            Some(landed) => self.land(py, landed),
            None => self.settle(py),
        });
        // `landed` still holds something only if the interpreter has ended: then the Python objects in it cannot be dropped.
        std::mem::forget(landed);
    }

    fn watch(self: Arc<Self>) {
        self.watched.store(true, Ordering::Release);
        self.look_again_if_watched();
    }

    fn is_over(&self) -> bool {
        matches!(&*self.state.lock(), State::Succeeded(_) | State::Failed(_))
    }

    fn call_back(&self, py: Python<'_>) {
        loop {
            let mut asked = self.callbacks.lock();
            let callbacks = std::mem::take(&mut asked.callbacks);
            asked.told = callbacks.is_empty();
            drop(asked);
            if callbacks.is_empty() {
                return;
            }
            call_all(py, callbacks);
        }
    }
}

impl Flying {
    /// Releases the arrays, records how the operation ended, and tells all who wait for its end.
    fn land(self: &Arc<Self>, py: Python<'_>, Landed { outcome, memory }: Landed) {
        for memory in memory {
            if outcome.is_ok() {
                memory.is_done_with();
            }
            memory.release(py);
        }
        let given = self.result.lock().take();
        let state = match outcome {
            Err(error) => State::Failed(error),
            Ok(Value::Given) => State::Succeeded(given.unwrap_or_else(|| py.None())),
            Ok(Value::Bytes(bytes)) => State::Succeeded(PyBytes::new(py, &bytes).into_any().unbind()),
            Ok(Value::AllBytes(all)) => {
                let all = PyList::new(py, all.iter().map(|bytes| PyBytes::new(py, bytes)));
                all.map_or_else(
                    |_| State::Succeeded(py.None()),
                    |list| State::Succeeded(list.into_any().unbind()),
                )
            }
        };
        *self.state.lock() = state;
        self.tell(py);
    }

    /// Called once the end is recorded: wakes waiting threads, calls the wakers, and has the group's thread call the callbacks.
    fn tell(self: &Arc<Self>, py: Python<'_>) {
        self.landed.notify_all();
        let mut asked = self.callbacks.lock();
        let wakers = std::mem::take(&mut asked.wakers);
        asked.told = asked.callbacks.is_empty();
        let is_told = asked.told;
        drop(asked);
        call_all(py, wakers);
        if !is_told {
            self.place.over(self.clone());
        }
    }

    /// Releases the arrays in the order of a stream that waits for the operation. `end` completes when the stream has reached the operation's end.
    fn land_in_order(self: &Arc<Self>, py: Python<'_>, landed: Landed, end: Event) {
        if landed.outcome.is_err() {
            return self.land(py, landed);
        }
        landed.memory.into_iter().for_each(|memory| memory.release(py));
        let result = self.result.lock().take().unwrap_or_else(|| py.None());
        *self.state.lock() = State::Joined(result, end);
        self.landed.notify_all();
    }

    /// If a stream waits for the operation and has reached its end: records how it ended, and tells all who wait for that.
    fn settle(self: &Arc<Self>, py: Python<'_>) {
        let mut state = self.state.lock();
        let end = match &*state {
            State::Joined(_, end) if end.is_complete() => end.clone(),
            _ => return,
        };
        // A stream goes on after a failed operation as after any other: so ask the communicator whether it has failed.
        let failure = self.comm.as_ref().and_then(|comm| comm.check().err()).or_else(|| end.wait().err());
        let joined = std::mem::replace(&mut *state, State::Away);
        let unused = match (joined, failure) {
            (State::Joined(result, _), None) => {
                *state = State::Succeeded(result);
                None
            }
            (joined, failure) => {
                *state = failure.map_or(State::Away, State::Failed);
                Some(joined)
            }
        };
        drop(state);
        // Not under the lock, as dropping the result may run Python code.
        drop(unused);
        self.tell(py);
    }

    /// Waits, without the GIL, until the operation's end is recorded. Runs on the thread of a host stream.
    pub(crate) fn wait_without_gil(&self) {
        let mut state = self.state.lock();
        while !matches!(&*state, State::Succeeded(_) | State::Failed(_)) {
            self.landed.wait(&mut state);
        }
    }

    /// Has the keeper poll the operation if somebody waits to be told of its end. That is needed whenever another thread has polled the operation
    /// or waited for it: the engine then knows that thread's waker in place of the keeper's, and would not wake the keeper.
    fn look_again_if_watched(self: &Arc<Self>) {
        if self.watched.load(Ordering::Acquire) && !self.is_over() {
            keeper::look_at(self.clone());
        }
    }

    /// Whether a device runs the operation, and not all of its work is on the devices' streams yet.
    fn is_to_be_enqueued(&self) -> bool {
        matches!(&*self.state.lock(), State::Flying(flight) if !flight.is_enqueued())
    }

    /// Makes a device's stream wait for the operation; called without the GIL. Returns the operation's result, which is there in the order of that
    /// stream, and an event that completes when the stream has reached the operation's end. `None`: no device runs the operation, it is over, a
    /// stream waits for it already, or another thread has taken its flight.
    fn join_on_device(&self, stream: &DeviceStream) -> Option<(Landed, Result<Event, Error>)> {
        let mut state = self.state.lock();
        let flight = match std::mem::replace(&mut *state, State::Away) {
            State::Flying(flight) => flight,
            other => {
                *state = other;
                return None;
            }
        };
        drop(state);
        match flight.join(stream) {
            Ok(landed) => Some((landed, stream.record().map(|end| end.on_host()))),
            Err(flight) => {
                self.put_back(flight);
                None
            }
        }
    }

    /// Puts the flight back after a thread had it, as the operation is not over.
    fn put_back(&self, flight: Box<dyn Flight>) {
        *self.state.lock() = State::Flying(flight);
        self.landed.notify_all();
    }

    /// Works on the operation, or waits for it, for `most` at most. Returns the operation's result if this thread has seen the operation end; the
    /// caller must hand that result to `land`.
    fn wait_slice(&self, most: Duration) -> Option<Landed> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Away) {
            State::Flying(flight) => {
                drop(state);
                match flight.wait_for(most) {
                    Ok(landed) => Some(landed),
                    Err(flight) => {
                        self.put_back(flight);
                        None
                    }
                }
            }
            State::Joined(result, end) => {
                let mut seen = end.clone();
                *state = State::Joined(result, end);
                drop(state);
                let _ = poll_until(Instant::now() + most, |cx| Pin::new(&mut seen).poll(cx));
                None
            }
            other => {
                let is_away = matches!(other, State::Away);
                *state = other;
                if is_away {
                    self.landed.wait_for(&mut state, most);
                }
                None
            }
        }
    }
}

/// An operation in flight. It runs whether or not anybody waits for it.
///
/// `wait()`, or `await`, returns its result or raises its error. Its arrays must be neither read nor written before it is done.
#[pyclass(frozen, weakref, module = "allstream")]
pub(crate) struct Work(pub(crate) Arc<Flying>);

impl Work {
    /// The `Work` of a submitted operation. `result`: what `wait` returns; `place`: that of its callbacks; `comm`: its communicator, if an array is
    /// on a device.
    ///
    /// # Errors
    /// The engine has refused the operation; its arrays are released.
    pub(crate) fn new(
        py: Python<'_>,
        flight: impl Flight + 'static,
        result: Py<PyAny>,
        place: Place,
        comm: Option<SharedComm>,
    ) -> PyResult<Work> {
        if let Some(error) = flight.refused() {
            let mut flight = flight;
            if let Poll::Ready(landed) = flight.poll(&mut Context::from_waker(Waker::noop())) {
                landed.memory.into_iter().for_each(|memory| memory.release(py));
            }
            return Err(errors::of(py, &error));
        }
        Ok(Work(Arc::new(Flying {
            state: Mutex::new(State::Flying(Box::new(flight))),
            landed: Condvar::new(),
            watched: AtomicBool::new(false),
            callbacks: Mutex::default(),
            place,
            result: Mutex::new(Some(result)),
            comm,
        })))
    }

    /// The operation's result or error, if its end is recorded.
    fn outcome(&self, py: Python<'_>) -> Option<PyResult<Py<PyAny>>> {
        let error = match &*self.0.state.lock() {
            State::Succeeded(result) => return Some(Ok(result.clone_ref(py))),
            State::Failed(error) => error.clone(),
            State::Flying(_) | State::Away | State::Joined(..) => return None,
        };
        Some(Err(errors::of(py, &error)))
    }

    /// Polls the operation once. Returns whether it is over.
    fn look(&self, py: Python<'_>) -> bool {
        match py.detach(|| self.0.wait_slice(Duration::ZERO)) {
            Some(landed) => self.0.land(py, landed),
            None => self.0.settle(py),
        }
        self.0.look_again_if_watched();
        self.0.is_over()
    }
}

#[pymethods]
impl Work {
    /// Blocks until the operation is done, and returns its result.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let end = match timeout {
            None => None,
            Some(timeout) => Instant::now().checked_add(seconds(py, "wait", "timeout", timeout)?),
        };
        loop {
            if let Some(outcome) = self.outcome(py) {
                return outcome;
            }
            let rest = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()).min(SLICE));
            if let Some(landed) = py.detach(|| self.0.wait_slice(rest)) {
                self.0.land(py, landed);
                continue;
            }
            self.0.settle(py);
            if let Err(interrupted) = py.check_signals() {
                self.0.look_again_if_watched();
                return Err(interrupted);
            }
            if end.is_some_and(|end| Instant::now() >= end) && !self.0.is_over() {
                self.0.look_again_if_watched();
                let text =
                    format!("the operation is not done after {} s; it goes on", timeout.unwrap_or_default());
                return Err(PyTimeoutError::new_err(text));
            }
        }
    }

    /// As `wait()`.
    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.wait(py, None)
    }

    /// Whether the operation is over: `wait` would return, or raise, at once.
    fn done(&self, py: Python<'_>) -> bool {
        self.0.is_over() || self.look(py)
    }

    /// The operation's error. None if it has succeeded, or is not over.
    fn exception(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        if !self.done(py) {
            return None;
        }
        match self.outcome(py) {
            Some(Err(error)) => Some(error.into_value(py).into_any()),
            _ => None,
        }
    }

    /// Calls `callback` with this work when the operation is over; at once, if it is over already. Else a thread of the group calls it, after the
    /// callbacks of the group's earlier collectives. The callback may wait.
    fn add_done_callback(slf: &Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let (py, flying) = (slf.py(), &slf.get().0);
        let mut asked = flying.callbacks.lock();
        // If the operation is over, but earlier callbacks of it still wait to be called, this callback waits behind them.
        if asked.told || asked.callbacks.is_empty() && flying.is_over() {
            drop(asked);
            call_all(py, vec![(callback, slf.clone().unbind())]);
            return Ok(());
        }
        if asked.callbacks.is_empty() {
            flying.place.expect(flying.clone());
        }
        asked.callbacks.push((callback, slf.clone().unbind()));
        drop(asked);
        flying.clone().watch();
        Ok(())
    }

    /// As `add_done_callback`, for a function of this package that never waits: the thread that records the end calls it.
    fn _tell(slf: &Bound<'_, Self>, waker: Py<PyAny>) {
        let flying = &slf.get().0;
        let mut asked = flying.callbacks.lock();
        if flying.is_over() {
            drop(asked);
            return call_all(slf.py(), vec![(waker, slf.clone().unbind())]);
        }
        asked.wakers.push((waker, slf.clone().unbind()));
        drop(asked);
        flying.clone().watch();
    }

    /// Makes all that is put on `stream` later start only after this operation. For a `HostStream` the caller does not wait. For a stream of a device
    /// the caller waits until all of the operation's work is on the devices' streams. If no device runs the operation, another such stream waits for
    /// it already, or another thread works on it just then, the caller waits until the operation is over.
    fn join(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = stream.py();
        if let Ok(stream) = stream.cast::<HostStream>() {
            let flying = self.0.clone();
            self.0.clone().watch();
            stream.get().after(move || flying.wait_without_gil());
            return Ok(());
        }
        let stream = stream_of_others(stream, "join")?;
        // Other libraries may make further streams, unknown to the engine, wait for `stream`. None of them may wait for work that is not on its
        // device's stream yet: if both streams share a hardware queue, the waiting one would block the work for which it waits.
        let (mut slice, mut looked) = (ASK.0, Instant::now());
        while self.0.is_to_be_enqueued() {
            match py.detach(|| self.0.wait_slice(slice)) {
                Some(landed) => self.0.land(py, landed),
                None => slice = ASK.1.min(2 * slice),
            }
            if looked.elapsed() > SLICE {
                if let Err(interrupted) = py.check_signals() {
                    self.0.look_again_if_watched();
                    return Err(interrupted);
                }
                looked = Instant::now();
            }
        }
        let Some((landed, end)) = py.detach(|| self.0.join_on_device(&stream)) else {
            // No device runs the operation, it is over, another thread works on it now, or another stream waits for it already. A second stream is
            // not made to wait: it could block the first if both share a hardware queue.
            return self.wait(py, None).map(drop);
        };
        match end {
            Ok(end) => self.0.land_in_order(py, landed, end),
            Err(error) => self.0.land(py, Landed { outcome: landed.outcome.and(Err(error)), ..landed }),
        }
        self.0.look_again_if_watched();
        // Raises the operation's error, if it has failed already.
        self.outcome(py).map_or(Ok(()), |outcome| outcome.map(drop))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("allstream._asyncio")?.call_method1(intern!(slf.py(), "awaited"), (slf,))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match &*self.0.state.lock() {
            State::Flying(_) | State::Away | State::Joined(..) => "<allstream.Work in flight>".into(),
            State::Succeeded(_) => "<allstream.Work done>".into(),
            State::Failed(error) => {
                let _ = py;
                format!("<allstream.Work failed: {error}>")
            }
        }
    }
}
