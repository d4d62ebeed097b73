//! What crosses the C boundary: pointers to results and arguments, and tables of the objects that handles name.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::codes::{Code, Done};

/// The caller's pointer to where it wants a result, or null. Only callers of the exported functions make these, and
/// promise with the call that a `T` may be written there.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// For an untyped pointer: the caller promises a place for a `T`.
    pub(crate) fn from_untyped(place: *mut c_void) -> Self {
        Out(place.cast())
    }

    pub(crate) fn set(&self, value: T) -> Done {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        self.set_if_wanted(value);
        Ok(())
    }

    pub(crate) fn set_if_wanted(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, and the caller of the exported function promised a place for a `T`. It may be unaligned
            // (C keeps some values in untyped structs), hence the unaligned write.
            unsafe { self.0.write_unaligned(value) }
        }
    }
}

/// The caller's pointer to an argument, or null. The caller promises that it may be read, as it promises that an [`Out`] may be written.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// For a pointer from a structure of the caller's: the promise covers what it points to.
    pub(crate) fn from_pointer(place: *const T) -> Self {
        In(place)
    }

    pub(crate) fn get(&self) -> Done<T> {
        self.at(0)
    }

    /// The value at `index` of an array, which the caller promised to be long enough.
    pub(crate) fn at(&self, index: usize) -> Done<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller of the exported function promised at least `index + 1` readable values.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl In<c_char> {
    pub(crate) fn text(&self) -> Done<&CStr> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller of the exported function promised a text that ends with a zero and stays
        // until the call returns; the result borrows from `self`, which lives no longer.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}

/// What callers name an object by: never an address and never given twice, so that a stale handle is noticed.
pub(crate) type Handle = u64;

/// An address as devices see it.
pub(crate) type Address = u64;

static NEXT: AtomicU64 = AtomicU64::new(0x0010_0000);

/// A number that nothing else has.
pub(crate) fn fresh() -> Handle {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// The living objects of one kind, by handle.
pub(crate) struct Table<T>(RwLock<BTreeMap<Handle, Arc<T>>>);

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Table(RwLock::new(BTreeMap::new()))
    }

    pub(crate) fn add(&self, handle: Handle, object: Arc<T>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(handle, object);
    }

    pub(crate) fn get(&self, handle: Handle) -> Done<Arc<T>> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.get(&handle).cloned().ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: Handle) -> Done<Arc<T>> {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        table.remove(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// The handle of the first object for which `wanted` is true.
    pub(crate) fn find(&self, wanted: impl Fn(&T) -> bool) -> Option<Handle> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.iter().find(|(_, object)| wanted(object)).map(|(handle, _)| *handle)
    }

    pub(crate) fn retain(&self, wanted: impl Fn(&T) -> bool) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).retain(|_, object| wanted(object));
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// Locks, even if a call panicked while it held the lock: that call has reported an error, and other calls need not fail for it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
