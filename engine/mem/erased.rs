//! [`ErasedBufs`]: the buffers that an operation in flight owns, whatever their types are. They are kept in place, so an
//! operation allocates nothing for them.

use std::any::{Any, TypeId};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// The input and output that an operation owns. In-place operations have only an output.
pub(crate) struct Parts<I, O> {
    pub(crate) input: I,
    pub(crate) output: O,
}

/// Words of storage: two device buffers fit.
const WORDS: usize = 12;

/// Storage for [`Parts`] of any type: in place up to 96 bytes, boxed beyond.
pub(crate) struct ErasedBufs {
    storage: [MaybeUninit<u64>; WORDS],
    drop: unsafe fn(*mut u8),
    holds: TypeId,
    /// Memory of the engine's own that the operation works on. Dropped when the parts are dropped or taken.
    also: Option<Arc<dyn Any + Send + Sync>>,
}

const fn fits<P>() -> bool {
    size_of::<P>() <= WORDS * 8 && align_of::<P>() <= 8
}

unsafe fn drop_inline<P>(at: *mut u8) {
    // SAFETY: called by `ErasedBufs::drop` only, with the storage into which `ErasedBufs::new::<P>` wrote a P.
    unsafe { at.cast::<P>().drop_in_place() }
}

unsafe fn drop_boxed<P>(at: *mut u8) {
    // SAFETY: called by `ErasedBufs::drop` only; `ErasedBufs::new::<P>` stored a Box<P> there.
    unsafe { at.cast::<Box<P>>().drop_in_place() }
}

impl ErasedBufs {
    /// Takes ownership of the parts. They are `Send`, as the table of operations may drop them on another thread.
    pub(crate) fn new<P: Send + 'static>(parts: P) -> ErasedBufs {
        let mut storage = [MaybeUninit::<u64>::uninit(); WORDS];
        let at = storage.as_mut_ptr().cast::<u8>();
        let drop = if fits::<P>() {
            // SAFETY: `fits` has checked that a P fits the storage's size and alignment.
            unsafe { at.cast::<P>().write(parts) };
            drop_inline::<P> as unsafe fn(*mut u8)
        } else {
            // SAFETY: a Box is one word, aligned to 8.
            unsafe { at.cast::<Box<P>>().write(Box::new(parts)) };
            drop_boxed::<P> as unsafe fn(*mut u8)
        };
        ErasedBufs { storage, drop, holds: TypeId::of::<P>(), also: None }
    }

    /// Keeps something else as long as the parts.
    pub(crate) fn with(mut self, also: Arc<dyn Any + Send + Sync>) -> ErasedBufs {
        self.also = Some(also);
        self
    }

    /// The parts, if they are of this type.
    pub(crate) fn get_mut<P: Send + 'static>(&mut self) -> Option<&mut P> {
        if self.holds != TypeId::of::<P>() {
            return None;
        }
        let at = self.storage.as_mut_ptr().cast::<u8>();
        if fits::<P>() {
            // SAFETY: `new::<P>` wrote a P here (checked above); it is borrowed as `self` is.
            Some(unsafe { &mut *at.cast::<P>() })
        } else {
            // SAFETY: as above, with a Box<P>.
            Some(unsafe { (*at.cast::<Box<P>>()).as_mut() })
        }
    }

    /// Gives the parts back, if they are of this type.
    pub(crate) fn take<P: Send + 'static>(self) -> Option<P> {
        if self.holds != TypeId::of::<P>() {
            return None;
        }
        let mut this = std::mem::ManuallyDrop::new(self);
        drop(this.also.take());
        let at = this.storage.as_mut_ptr().cast::<u8>();
        Some(if fits::<P>() {
            // SAFETY: `new::<P>` wrote a P here (checked above); ManuallyDrop keeps it from being dropped as well.
            unsafe { at.cast::<P>().read() }
        } else {
            // SAFETY: as above, with a Box<P>.
            unsafe { *at.cast::<Box<P>>().read() }
        })
    }
}

impl Drop for ErasedBufs {
    fn drop(&mut self) {
        // SAFETY: `drop` was chosen in `new` for what the storage holds, and `take` forgets `self`.
        unsafe { (self.drop)(self.storage.as_mut_ptr().cast()) }
    }
}

// SAFETY: `new` requires P: Send, and ErasedBufs gives no shared access to it; `also` is Send.
unsafe impl Send for ErasedBufs {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_or_are_dropped_once() {
        let witness = Arc::new(());
        let small = ErasedBufs::new((vec![1u8, 2], witness.clone()));
        let large = ErasedBufs::new(([7u64; 40], witness.clone()));
        let (bytes, _) = small.take::<(Vec<u8>, Arc<()>)>().unwrap();
        assert_eq!(bytes, [1, 2]);
        assert_eq!(Arc::strong_count(&witness), 2);
        drop(large);
        assert_eq!(Arc::strong_count(&witness), 1);
        let mut large = ErasedBufs::new(([7u64; 40], witness.clone()));
        assert!(large.get_mut::<Vec<u8>>().is_none());
        large.get_mut::<([u64; 40], Arc<()>)>().unwrap().0[0] = 9;
        let (words, w) = large.take::<([u64; 40], Arc<()>)>().unwrap();
        assert_eq!((words[0], words[39], Arc::strong_count(&w)), (9, 7, 2));
        assert!(
            ErasedBufs::new(w).take::<Vec<u8>>().is_none(),
            "another type is refused, and what is held dropped"
        );
        assert_eq!(Arc::strong_count(&witness), 1);
    }
}
