//! [`ErasedBufs`]: the buffers that an operation in flight owns, whatever their types are. They lie in a block of memory that is used again for
//! later operations, so that an operation allocates nothing for them, and passing them on copies two words.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Arc;

use parking_lot::Mutex;

/// The input and output that an operation owns. In-place operations have only an output.
pub(crate) struct Parts<I, O> {
    pub(crate) input: I,
    pub(crate) output: O,
}

/// Words of storage in a block: enough for two device buffers.
const WORDS: usize = 12;

/// Room for [`Parts`] of any type: in place up to 96 bytes, boxed beyond.
struct Block {
    storage: [MaybeUninit<u64>; WORDS],
    /// Memory of the engine's own that the operation works on. Dropped when the parts are dropped or taken.
    also: Option<Arc<dyn Any + Send + Sync>>,
}

/// How many free blocks a thread keeps for itself, and how many all threads together keep besides.
const OWN: usize = 8;
const SHARED: usize = 4096;

thread_local! {
    /// Free blocks. A thread that submits operations and takes their outcomes uses the same ones again and again.
    #[expect(clippy::vec_box, reason = "a block's address goes to `ErasedBufs`, and the blocks are not moved")]
    static FREE: RefCell<Vec<Box<Block>>> = const { RefCell::new(Vec::new()) };
}

/// Free blocks of threads that give back more than they get, such as the progress thread, which drops the buffers that users have let go of. The lock
/// is only tried: in a forked child nobody may be left to release it.
#[expect(clippy::vec_box, reason = "as above")]
static SPARE: Mutex<Vec<Box<Block>>> = Mutex::new(Vec::new());

impl Block {
    fn get() -> Box<Block> {
        let own = FREE.try_with(|free| free.borrow_mut().pop()).ok().flatten();
        let spare = || SPARE.try_lock().and_then(|mut spare| spare.pop());
        let new = || Box::new(Block { storage: [MaybeUninit::uninit(); WORDS], also: None });
        own.or_else(spare).unwrap_or_else(new)
    }

    /// Keeps a block whose storage holds nothing any more.
    fn give_back(self: Box<Self>) {
        let mut block = Some(self);
        // A thread that is ending may have no list of its own any more.
        let _ = FREE.try_with(|free| {
            let mut free = free.borrow_mut();
            if free.len() < OWN {
                free.extend(block.take());
            }
        });
        if block.is_some()
            && let Some(mut spare) = SPARE.try_lock()
            && spare.len() < SHARED
        {
            spare.extend(block.take());
        }
    }

    fn at(&mut self) -> *mut u8 {
        self.storage.as_mut_ptr().cast()
    }
}

/// What a block's storage holds.
struct Held {
    id: fn() -> TypeId,
    drop: unsafe fn(*mut u8),
}

/// Storage for [`Parts`] of any type.
pub(crate) struct ErasedBufs {
    block: ManuallyDrop<Box<Block>>,
    held: &'static Held,
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
        let mut block = Block::get();
        let at = block.at();
        let held: &'static Held = if fits::<P>() {
            // SAFETY: `fits` has checked that a P fits the storage's size and alignment.
            unsafe { at.cast::<P>().write(parts) };
            const { &Held { id: TypeId::of::<P>, drop: drop_inline::<P> } }
        } else {
            // SAFETY: a Box is one word, aligned to 8.
            unsafe { at.cast::<Box<P>>().write(Box::new(parts)) };
            const { &Held { id: TypeId::of::<P>, drop: drop_boxed::<P> } }
        };
        ErasedBufs { block: ManuallyDrop::new(block), held }
    }

    /// Keeps something else alive until the parts are dropped or taken.
    pub(crate) fn with(mut self, also: Arc<dyn Any + Send + Sync>) -> ErasedBufs {
        self.block.also = Some(also);
        self
    }

    fn is<P: 'static>(&self) -> bool {
        (self.held.id)() == TypeId::of::<P>()
    }

    /// The parts, if they are of this type.
    pub(crate) fn get_mut<P: Send + 'static>(&mut self) -> Option<&mut P> {
        if !self.is::<P>() {
            return None;
        }
        let at = self.block.at();
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
        if !self.is::<P>() {
            return None;
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, and not dropped.
        let mut block = unsafe { ManuallyDrop::take(&mut this.block) };
        let at = block.at();
        let parts = if fits::<P>() {
            // SAFETY: `new::<P>` wrote a P here (checked above), and nobody reads or drops it again: the block is given back as one that holds nothing.
            unsafe { at.cast::<P>().read() }
        } else {
            // SAFETY: as above, with a Box<P>.
            unsafe { *at.cast::<Box<P>>().read() }
        };
        drop(block.also.take());
        block.give_back();
        Some(parts)
    }
}

impl Drop for ErasedBufs {
    fn drop(&mut self) {
        // SAFETY: `self` is being dropped, so the block is taken only once.
        let mut block = unsafe { ManuallyDrop::take(&mut self.block) };
        // SAFETY: `held` was chosen in `new` for what the storage holds, and `take` forgets `self`. If this panics, the block is freed, and what it held is
        // not dropped again.
        unsafe { (self.held.drop)(block.at()) };
        drop(block.also.take());
        block.give_back();
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
