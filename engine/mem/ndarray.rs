//! Arrays of `ndarray` as buffers.

use ndarray::{Array, Dimension};

use super::HostMemory;
use crate::types::Element;

/// An owned array (`Array1`, `Array2`, ..) in standard layout, its elements row by row without gaps. It comes back with its shape. An
/// array in another layout (transposed, or every second column of a larger one) is refused, as ranks would combine elements in
/// different orders. `array.as_standard_layout().into_owned()` makes a copy in standard layout. Needs the feature `ndarray`.
// SAFETY: point by point of the contract:
// - Same answer: the elements of an `Array` are on the heap and stay there when it moves; shape and layout change through `&mut self`
//   only. An array in another layout has a `count()` of 0.
// - Valid, initialised, aligned: in standard layout the `len()` elements from `as_ptr()` on are the array's own, in one piece; safe code
//   makes arrays of initialised elements only.
// - Unique: an `Array` owns its storage. Views borrow it, so none lives when it is moved into an operation. (`ArcArray` shares its
//   storage, and is another type.)
// - It may be dropped on any thread: it is `Send`, as its elements and its dimension are.
unsafe impl<T: Element, D: Dimension + 'static> HostMemory for Array<T, D> {
    type Elem = T;
    fn ptr(&self) -> *const T {
        self.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut T {
        self.as_mut_ptr()
    }
    fn count(&self) -> usize {
        if self.is_standard_layout() { self.len() } else { 0 }
    }
    fn unfit(&self) -> Option<&'static str> {
        let problem = "the array is not in standard layout (row by row without gaps), in which all ranks must have it; \
                       array.as_standard_layout().into_owned() makes a copy that is";
        (!self.is_standard_layout()).then_some(problem)
    }
}
