//! Which CUDA context is a thread's current one.
//!
//! The engine enters (pushes) a context before a call of the driver that needs it, and leaves (pops) it afterwards: the thread may be a
//! user's, whose own context must then be current again. A thread that is about to make many calls makes them within [`keep`]: the first
//! context that a call enters then stays entered until all calls are made, and other calls in the same context need not enter it.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::capture::relaxed;
use super::driver::warn;
use allstream_sys::cuda::{CuContext, CuDevice, Cuda, CudaError};

/// What this thread has entered.
struct Here {
    /// How many calls of [`keep`] this thread is within, one inside another.
    keeps: u32,
    /// The context that stays entered until the outermost [`keep`] ends, once one has been entered. That end takes it out, so nothing here is to
    /// be dropped when the thread ends. And as `HERE` has no drop, it can still be used while the thread's other thread-local values are dropped.
    kept: ManuallyDrop<Option<Arc<Retained>>>,
    /// How many contexts besides `kept` are entered and not left yet. They lie above `kept` on the driver's stack of current contexts.
    above: u32,
}

thread_local! {
    static HERE: RefCell<Here> =
        const { RefCell::new(Here { keeps: 0, kept: ManuallyDrop::new(None), above: 0 }) };
}

fn change<T>(change: impl FnOnce(&mut Here) -> T) -> T {
    HERE.with_borrow_mut(change)
}

/// The primary context of a device, which is released when this is dropped.
pub(super) struct Retained {
    pub(super) context: CuContext,
    cuda: &'static Cuda,
    device: CuDevice,
    /// The device's number, for messages.
    ordinal: usize,
}

impl Retained {
    /// # Safety
    /// `device` is one that the driver gave.
    pub(super) unsafe fn new(
        cuda: &'static Cuda,
        device: CuDevice,
        ordinal: usize,
    ) -> Result<Retained, CudaError> {
        let _relaxed = relaxed(cuda);
        // SAFETY: the caller's promise; released in `drop`.
        let context = unsafe { cuda.device_primary_ctx_retain(device) }?;
        Ok(Retained { context, cuda, device, ordinal })
    }

    fn push(&self) -> Result<(), CudaError> {
        // SAFETY: retained until `self` is dropped.
        unsafe { self.cuda.ctx_push_current(self.context) }
    }

    fn pop(&self) {
        // SAFETY: pops what `push` pushed on this thread: a `Held` cannot go to another thread, and other code pops only what it pushed itself.
        if let Err(error) = unsafe { self.cuda.ctx_pop_current() } {
            warn(self.ordinal, "leave a device, which stays current on this thread", &error);
        }
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        let _relaxed = relaxed(self.cuda);
        // SAFETY: retained in `new`, and released once. No thread has it entered any more: who has entered it borrows this, or keeps a share of it.
        // Nobody uses what was made in it: each such thing has kept the `Context`.
        unsafe { self.cuda.device_primary_ctx_release(self.device) }
            .unwrap_or_else(|error| warn(self.ordinal, "close the device", &error));
    }
}

/// A context is this thread's current one as long as this is there.
pub(super) struct Held<'a> {
    of: &'a Retained,
    /// Whether dropping this leaves the context. If not, the end of [`keep`] does.
    leaves: bool,
    /// Keeps this on its thread: it is not `Send`.
    _here: PhantomData<*const ()>,
}

impl Held<'_> {
    pub(super) fn new(of: &Arc<Retained>) -> Result<Held<'_>, CudaError> {
        let (is_kept, may_keep) = change(|here| {
            let is_kept = here.kept.as_ref().is_some_and(|kept| kept.context == of.context);
            (is_kept && here.above == 0, here.keeps > 0 && here.kept.is_none() && here.above == 0)
        });
        if is_kept {
            return Ok(Held { of, leaves: false, _here: PhantomData });
        }
        if !may_keep {
            return Held::apart(of);
        }
        of.push()?;
        change(|here| *here.kept = Some(of.clone()));
        Ok(Held { of, leaves: false, _here: PhantomData })
    }

    /// Enters the context even if it is the kept one. Dropping the result leaves it.
    pub(super) fn apart(of: &Retained) -> Result<Held<'_>, CudaError> {
        of.push()?;
        change(|here| here.above += 1);
        Ok(Held { of, leaves: true, _here: PhantomData })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.leaves {
            change(|here| here.above -= 1);
            self.of.pop();
        }
    }
}

/// Leaves the kept context when the outermost [`keep`] ends.
struct Keeping(PhantomData<*const ()>);

impl Drop for Keeping {
    fn drop(&mut self) {
        let kept = change(|here| {
            here.keeps -= 1;
            if here.keeps == 0 { here.kept.take() } else { None }
        });
        // If the device was closed meanwhile, its context is released here.
        kept.inspect(|kept| kept.pop());
    }
}

/// Runs `work`. The first context that `work` enters stays entered until the outermost call of this on the thread ends. `work` must not run
/// user code, which would find that context in place of its own.
pub(crate) fn keep<T>(work: impl FnOnce() -> T) -> T {
    change(|here| here.keeps += 1);
    let _keeping = Keeping(PhantomData);
    work()
}
