//! Which context is a thread's current one.
//!
//! Each call of the driver that needs a context enters it and leaves it again, as the thread may be anybody's. A thread that is about to make
//! many calls [keeps](keep) the first context that one of them enters until all are made: then each of those calls enters no more than
//! it has to.

use std::cell::Cell;
use std::marker::PhantomData;

use super::driver::warn;
use allstream_sys::cuda::{CuContext, Cuda, CudaError};

/// What this thread has entered.
#[derive(Clone, Copy)]
struct Here {
    /// How many times this thread is within [`keep`].
    keeps: u32,
    /// What is kept.
    kept: Option<Retained>,
    /// How many contexts are entered on top of that.
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
    // SAFETY: pops what was pushed on this thread (`Held` cannot leave it, and nobody else pops ours).
    if let Err(error) = unsafe { of.cuda.ctx_pop_current() } {
        warn(of.ordinal, "leave a device, which stays current on this thread", &error);
    }
}

/// A context that is retained, with what calls its driver.
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
    /// It is left with this; else it is what is kept.
    leaves: bool,
    /// The thread's.
    _here: PhantomData<*const ()>,
}

impl Held {
    /// # Safety
    /// The context stays retained until this is dropped; and until [`forget`] is called for it, if it may be kept.
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

    /// Enters the context although it may be what is kept, and leaves it again.
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

/// Leaves what is kept when the outermost [`keep`] ends.
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

/// Does something in which the first context that is entered stays this thread's current one until all is done. No code of a user's may run in
/// it that expects to find its own context.
pub(crate) fn keep<T>(work: impl FnOnce() -> T) -> T {
    change(|here| here.keeps += 1);
    let _keeping = Keeping(PhantomData);
    work()
}

/// The context is about to go: it is no longer kept.
pub(super) fn forget(context: CuContext) {
    let here = HERE.get();
    if let Some(kept) = here.kept.filter(|kept| kept.context == context && here.above == 0) {
        change(|here| here.kept = None);
        leave(kept);
    }
}
