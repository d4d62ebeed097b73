//! Which context is a thread's current one.
//!
//! Each call of the driver that needs a context enters it and leaves it again, as the thread may be anybody's. A thread that is about to make
//! many calls [keeps](keep) the first context that one of them enters until all are made: then each of those calls enters no more than
//! it has to.

use std::cell::Cell;
use std::marker::PhantomData;

use super::driver::warn;
use super::handle::Handle;
use allstream_sys::cuda::{CuContext, Cuda, CudaError};

/// What this thread has entered.
#[derive(Clone, Copy)]
struct Here {
    /// How many times this thread is within [`keep`].
    keeps: u32,
    /// What is kept, and the device's number for messages.
    kept: Option<(CuContext, &'static Cuda, usize)>,
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

fn leave(cuda: &Cuda, ordinal: usize) {
    // SAFETY: pops what was pushed on this thread (`Held` cannot leave it, and nobody else pops ours).
    if let Err(error) = unsafe { cuda.ctx_pop_current() } {
        warn(ordinal, "leave a device, which stays current on this thread", &error);
    }
}

/// A context is this thread's current one as long as this is there.
pub(super) struct Held<'a> {
    handle: &'a Handle,
    /// It is left with this; else it is what is kept.
    leaves: bool,
    /// The thread's.
    _here: PhantomData<*const ()>,
}

impl Held<'_> {
    pub(super) fn new(handle: &Handle) -> Result<Held<'_>, CudaError> {
        let here = HERE.get();
        let is_kept = here.kept.is_some_and(|(context, ..)| context == handle.raw());
        if is_kept && here.above == 0 {
            return Ok(Held { handle, leaves: false, _here: PhantomData });
        }
        if here.keeps == 0 || here.kept.is_some() || here.above > 0 {
            return Held::apart(handle);
        }
        // SAFETY: the context is retained as long as the handle is there.
        unsafe { handle.cuda.ctx_push_current(handle.raw()) }?;
        change(|here| here.kept = Some((handle.raw(), handle.cuda, handle.ordinal)));
        Ok(Held { handle, leaves: false, _here: PhantomData })
    }

    /// Enters the context although it may be what is kept, and leaves it again.
    pub(super) fn apart(handle: &Handle) -> Result<Held<'_>, CudaError> {
        // SAFETY: the context is retained as long as the handle is there.
        unsafe { handle.cuda.ctx_push_current(handle.raw()) }?;
        change(|here| here.above += 1);
        Ok(Held { handle, leaves: true, _here: PhantomData })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.leaves {
            change(|here| here.above -= 1);
            leave(self.handle.cuda, self.handle.ordinal);
        }
    }
}

/// Leaves what is kept when the outermost [`keep`] ends.
struct Keeping(PhantomData<*const ()>);

impl Drop for Keeping {
    fn drop(&mut self) {
        change(|here| here.keeps -= 1);
        let here = HERE.get();
        if let (0, Some((_, cuda, ordinal))) = (here.keeps, here.kept) {
            change(|here| here.kept = None);
            leave(cuda, ordinal);
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
    if let Some((kept, cuda, ordinal)) = here.kept
        && kept == context
        && here.above == 0
    {
        change(|here| here.kept = None);
        leave(cuda, ordinal);
    }
}
