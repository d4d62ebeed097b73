//! Which CUDA context is a thread's current one.
//!
//! The engine enters (pushes) a context before a call of the driver that needs it, and leaves (pops) it afterwards: the thread may be a
//! user's, whose own context must then be current again. A thread that is about to make many calls makes them within [`keep`]: the first
//! context that a call enters then stays entered until all calls are made, and other calls in the same context need not enter it.

use std::cell::Cell;
use std::marker::PhantomData;

use super::driver::warn;
use allstream_sys::cuda::{CuContext, Cuda, CudaError};

/// What this thread has entered.
#[derive(Clone, Copy)]
struct Here {
    /// How many calls of [`keep`] this thread is within, one inside another.
    keeps: u32,
    /// The context that stays entered until the outermost [`keep`] ends, once one has been entered.
    kept: Option<Retained>,
    /// How many contexts besides `kept` are entered and not left yet. They lie above it.
    above: u32,
}

thread_local! {
    static HERE: Cell<Here> = const { Cell::new(Here { keeps: 0, kept: None, above: 0 }) };
}

fn change(change: impl FnOnce(&mut Here)) {
    let mut here = HERE.get();
    change(&mut here);
    HERE.set(here);
}

fn leave(of: Retained) {
    // SAFETY: pops what `Held` pushed on this thread: a `Held` cannot go to another thread, and other code pops only what it pushed itself.
    if let Err(error) = unsafe { of.cuda.ctx_pop_current() } {
        warn(of.ordinal, "leave a device, which stays current on this thread", &error);
    }
}

/// A context that is retained, and the driver by which it is entered and left.
#[derive(Clone, Copy)]
pub(super) struct Retained {
    pub(super) context: CuContext,
    pub(super) cuda: &'static Cuda,
    /// The device's number, for messages.
    pub(super) ordinal: usize,
}

/// A context is this thread's current one as long as this is there.
pub(super) struct Held {
    of: Retained,
    /// Whether dropping this leaves the context. If not, the end of [`keep`] does.
    leaves: bool,
    /// Keeps this on its thread: it is not `Send`.
    _here: PhantomData<*const ()>,
}

impl Held {
    /// # Safety
    /// The context stays retained until this is dropped, and within [`keep`] also until [`forget`] is called for the context.
    pub(super) unsafe fn new(of: Retained) -> Result<Held, CudaError> {
        let here = HERE.get();
        let is_kept = here.kept.is_some_and(|kept| kept.context == of.context);
        if is_kept && here.above == 0 {
            return Ok(Held { of, leaves: false, _here: PhantomData });
        }
        if here.keeps == 0 || here.kept.is_some() || here.above > 0 {
            // SAFETY: the caller's promise.
            return unsafe { Held::apart(of) };
        }
        // SAFETY: the caller's promise.
        unsafe { of.cuda.ctx_push_current(of.context) }?;
        change(|here| here.kept = Some(of));
        Ok(Held { of, leaves: false, _here: PhantomData })
    }

    /// Enters the context even if it is the kept one. Dropping the result leaves it.
    ///
    /// # Safety
    /// The context stays retained until this is dropped.
    pub(super) unsafe fn apart(of: Retained) -> Result<Held, CudaError> {
        // SAFETY: the caller's promise.
        unsafe { of.cuda.ctx_push_current(of.context) }?;
        change(|here| here.above += 1);
        Ok(Held { of, leaves: true, _here: PhantomData })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.leaves {
            change(|here| here.above -= 1);
            leave(self.of);
        }
    }
}

/// Leaves the kept context when the outermost [`keep`] ends.
struct Keeping(PhantomData<*const ()>);

impl Drop for Keeping {
    fn drop(&mut self) {
        change(|here| here.keeps -= 1);
        let here = HERE.get();
        if let (0, Some(kept)) = (here.keeps, here.kept) {
            change(|here| here.kept = None);
            leave(kept);
        }
    }
}

/// Runs `work`. The first context that `work` enters stays entered until the outermost call of this on the thread ends. `work` must not run
/// user code, which would find that context in place of its own.
pub(crate) fn keep<T>(work: impl FnOnce() -> T) -> T {
    change(|here| here.keeps += 1);
    let _keeping = Keeping(PhantomData);
    work()
}

/// To be called before a context is released: leaves it, if this thread keeps it and has entered no other above it.
pub(super) fn forget(context: CuContext) {
    let here = HERE.get();
    if let Some(kept) = here.kept.filter(|kept| kept.context == context && here.above == 0) {
        change(|here| here.kept = None);
        leave(kept);
    }
}
