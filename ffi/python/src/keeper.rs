//! The keeper: a thread that waits for the GIL in place of the engine's threads. It drops Python objects, and polls operations whose end
//! somebody in Python waits for.
//!
//! The engine's threads serve all groups, so none of them may wait for the GIL, which a computing thread can hold for long. They send the
//! keeper a [`Task`] instead; sending never blocks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use pyo3::prelude::*;

use crate::errors;
use crate::operation::Operation;

enum Task {
    /// Drop a Python object, such as the array of an operation that nobody waited for.
    Drop(Py<PyAny>),
    /// Drop a tensor that another library has handed over in a DLPack capsule: its deleter may wait for the GIL.
    Delete(Box<dyn Send>),
    /// Poll an operation: it may be over.
    Look(Arc<dyn Operation>),
    /// Tell the sender that all tasks sent before this one are done.
    Tell(Sender<()>),
}

static TASKS: OnceLock<Sender<Task>> = OnceLock::new();
/// Set in a forked child of a process that had started the keeper: none of this module's threads exist in the child.
static FORKED: AtomicBool = AtomicBool::new(false);
/// Set when the interpreter ends: from then on no thread of this module may begin to run Python code.
static ENDED: AtomicBool = AtomicBool::new(false);
/// This module's threads hold it shared while they run Python code. The thread that ends the interpreter takes it exclusively, and so waits for them.
static INSIDE: RwLock<()> = RwLock::new(());
/// How often the thread that ends the interpreter checks for signals while it waits for this module's threads.
const ASK: Duration = Duration::from_millis(100);

/// Lets this thread run Python code: the interpreter does not end while the guard is held. `None`: the interpreter has ended, or is about
/// to. (After its end Python kills any thread that asks for the GIL; if that thread has Rust or C++ frames on its stack, the process dies.)
pub(crate) fn inside() -> Option<RwLockReadGuard<'static, ()>> {
    let inside = INSIDE.try_read();
    // `ENDED` is read with the lock held, and the thread that ends the interpreter sets it before it waits for the lock: so either `ENDED` is seen
    // here, or that thread waits for this guard.
    inside.filter(|_| !ENDED.load(Ordering::Acquire))
}

/// Starts the keeper's thread, unless it runs already. Importing the module does not start it, as programs import the module and then fork
/// their ranks.
///
/// # Errors
/// The system cannot start a thread.
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
    // If two threads start one at once, `set` fails for the later: its sender is dropped, and so its thread ends.
    let _ = TASKS.set(tasks);
    Ok(())
}

fn run(task: Task) {
    if let Task::Tell(done) = task {
        // Sending fails if the thread that asked was interrupted and no longer waits.
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
            // Still here only if the interpreter has ended: then the object cannot be dropped.
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

/// Has the keeper drop a Python object soon. Never waits.
pub(crate) fn give_back(object: Py<PyAny>) {
    leave(Task::Drop(object));
}

/// Has the keeper give a tensor back to its library soon. Never waits.
pub(crate) fn delete(tensor: Box<dyn Send>) {
    leave(Task::Delete(tensor));
}

/// Has the keeper poll an operation soon. Never waits.
pub(crate) fn look_at(operation: Arc<dyn Operation>) {
    leave(Task::Look(operation));
}

/// Whether this process was forked from one in which the module was used.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Acquire)
}

/// Python calls this in a forked child (`os.register_at_fork`), before other code runs there.
#[pyfunction]
#[pyo3(name = "_forked")]
pub(crate) fn forked() {
    if TASKS.get().is_some() {
        FORKED.store(true, Ordering::Release);
    }
}

/// Waits, without the GIL, until the keeper has done all tasks sent so far.
///
/// # Errors
/// The exception that a signal handler has raised.
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

/// Forbids this module's threads to begin running Python code, and waits, without the GIL, for those that run some now.
///
/// # Errors
/// The exception that a signal handler has raised.
pub(crate) fn close(py: Python<'_>) -> PyResult<()> {
    ENDED.store(true, Ordering::Release);
    while !py.detach(|| INSIDE.try_write_for(ASK).is_some()) {
        py.check_signals()?;
    }
    Ok(())
}
