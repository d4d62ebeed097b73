//! A thread that waits for the GIL in place of the engine's threads: it gives Python objects back, and looks at operations whose end Python
//! waits for.
//!
//! Threads of the engine's serve all groups, so none of them may wait for the GIL, which a computing thread can hold for long. They leave
//! a message here, which never waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use pyo3::prelude::*;

use crate::errors;
use crate::operation::Operation;

enum Task {
    /// A buffer of an operation that nobody waited for.
    Drop(Py<PyAny>),
    /// The same, of a tensor whose library gave it by a capsule.
    Delete(Box<dyn Send>),
    /// An operation has moved on.
    Look(Arc<dyn Operation>),
    /// Somebody wants to know that all that was left before is done.
    Tell(Sender<()>),
}

static TASKS: OnceLock<Sender<Task>> = OnceLock::new();
/// Set in a child of `fork`, which has none of the threads.
static FORKED: AtomicBool = AtomicBool::new(false);
/// Set when the interpreter ends: no thread of ours may enter it from then on.
static ENDED: AtomicBool = AtomicBool::new(false);
/// Threads of ours hold it shared while they run Python. The thread that ends the interpreter takes it exclusively, and so waits for them.
static INSIDE: RwLock<()> = RwLock::new(());
/// How often the end of the interpreter asks for signals while it waits for Python that such threads run.
const ASK: Duration = Duration::from_millis(100);

/// Says that a thread of ours is about to run Python, as long as this is held: the interpreter does not end meanwhile. (After its end
/// Python ends any thread that asks for the GIL, and one with frames of Rust or C++ takes the process with it.) `None`: the interpreter has
/// ended, or is about to.
pub(crate) fn inside() -> Option<RwLockReadGuard<'static, ()>> {
    let inside = INSIDE.try_read();
    // Read with the lock held: the thread that ends the interpreter sets it before it waits for the lock.
    inside.filter(|_| !ENDED.load(Ordering::Acquire))
}

/// Starts the thread, if it does not run. Importing the module does not start it: programs import the module and then fork their ranks.
///
/// # Errors
/// The system has no thread to give.
pub(crate) fn start() -> PyResult<()> {
    if TASKS.get().is_some() {
        return Ok(());
    }
    let (tasks, queue) = channel();
    let run = move || {
        for task in queue {
            run(task);
        }
    };
    std::thread::Builder::new()
        .name("allstream-python".into())
        .spawn(run)
        .map_err(|error| errors::system("start the thread that gives Python's objects back", &error))?;
    // Where two threads come here at once, the thread of the one that is late ends with its sender.
    let _ = TASKS.set(tasks);
    Ok(())
}

fn run(task: Task) {
    if let Task::Tell(done) = task {
        // Who asked may have been interrupted meanwhile.
        let _ = done.send(());
        return;
    }
    let Some(_inside) = inside() else {
        std::mem::forget(task);
        return;
    };
    match task {
        Task::Drop(object) => {
            let mut object = Some(object);
            Python::try_attach(|_| drop(object.take()));
            // There is no interpreter any more, and nothing to give back.
            std::mem::forget(object);
        }
        Task::Delete(tensor) => drop(tensor),
        Task::Look(operation) => operation.look(),
        Task::Tell(_) => {}
    }
}

fn leave(task: Task) {
    if is_forked() {
        std::mem::forget(task);
        return;
    }
    match TASKS.get() {
        // Sending cannot fail: the thread that receives ends only with the process.
        Some(tasks) => drop(tasks.send(task)),
        None => std::mem::forget(task),
    }
}

/// Gives an object back, soon, on the thread that may wait for the GIL.
pub(crate) fn give_back(object: Py<PyAny>) {
    leave(Task::Drop(object));
}

/// Gives a tensor back to its library, soon, on the same thread.
pub(crate) fn delete(tensor: Box<dyn Send>) {
    leave(Task::Delete(tensor));
}

/// Has an operation looked at, soon.
pub(crate) fn look_at(operation: Arc<dyn Operation>) {
    leave(Task::Look(operation));
}

/// Whether this process was forked from one in which the module was used.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Acquire)
}

/// Called in a child of `os.fork`, before anything else runs there.
#[pyfunction]
#[pyo3(name = "_forked")]
pub(crate) fn forked() {
    if TASKS.get().is_some() {
        FORKED.store(true, Ordering::Release);
    }
}

/// Waits, without the GIL, until the keeper has done all that was left for it.
///
/// # Errors
/// What the handler of a signal raises.
pub(crate) fn finish(py: Python<'_>) -> PyResult<()> {
    let (done, told) = channel();
    let told = Mutex::new(told);
    match TASKS.get() {
        // Sending cannot fail: the thread that receives ends only with the process.
        Some(tasks) => drop(tasks.send(Task::Tell(done))),
        None => drop(done),
    }
    while py.detach(|| told.lock().recv_timeout(ASK)) == Err(RecvTimeoutError::Timeout) {
        py.check_signals()?;
    }
    Ok(())
}

/// Lets no thread of ours begin to run Python any more, and waits, without the GIL, for those that do.
///
/// # Errors
/// What the handler of a signal raises.
pub(crate) fn close(py: Python<'_>) -> PyResult<()> {
    ENDED.store(true, Ordering::Release);
    while !py.detach(|| INSIDE.try_write_for(ASK).is_some()) {
        py.check_signals()?;
    }
    Ok(())
}
