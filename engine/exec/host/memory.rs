//! The working memory that a run allocates for itself, beside the users' buffers and what links lend it.

use std::cell::UnsafeCell;

use crate::link::SLOT;

/// 64-byte aligned words. They are in a cell, as they are written through pointers that come from a shared reference to this memory.
#[repr(C, align(64))]
struct Line(UnsafeCell<[u64; 8]>);

/// Makes room for so many bytes.
fn grow(lines: &mut Vec<Line>, bytes: usize) {
    let wanted = bytes.div_ceil(size_of::<Line>());
    if lines.len() < wanted {
        lines.resize_with(wanted, || Line(UnsafeCell::new([0; 8])));
    }
}

/// The working memory of a run. It is kept from one part to the next, until its owner drops it.
#[derive(Default)]
pub(super) struct Memory {
    /// By step: room for one slice, or nothing if the step has never needed it.
    accumulators: Vec<Vec<u8>>,
    /// The third slot of plans that have one.
    scratch: Vec<Line>,
    /// A scaled copy of the input.
    scaled: Vec<Line>,
    /// How many accumulators have memory.
    filled: usize,
    /// Bytes that the part has asked for beside accumulators.
    wanted: usize,
}

impl Memory {
    /// A part of so many steps begins, with so many bytes of scratch.
    pub(super) fn begin(&mut self, steps: usize, scratch: usize) {
        if self.accumulators.len() < steps {
            self.accumulators.resize_with(steps, Vec::new);
        }
        grow(&mut self.scratch, scratch);
        self.scaled.clear();
        self.wanted = scratch;
    }

    /// The accumulator of a step.
    pub(super) fn accumulator(&mut self, step: usize) -> &mut [u8] {
        let accumulator = &mut self.accumulators[step];
        if accumulator.is_empty() {
            accumulator.resize(SLOT, 0);
            self.filled += 1;
        }
        accumulator
    }

    /// The third slot.
    pub(super) fn scratch(&self) -> *mut u8 {
        self.scratch.as_ptr().cast::<u8>().cast_mut()
    }

    /// The scaled copy of the input, if this part has one.
    pub(super) fn scaled(&self) -> Option<*mut u8> {
        (!self.scaled.is_empty()).then(|| self.scaled.as_ptr().cast::<u8>().cast_mut())
    }

    /// Room for a scaled copy of so many bytes.
    pub(super) fn scale(&mut self, bytes: usize) -> *mut u8 {
        if self.scaled.is_empty() {
            self.wanted += bytes;
        }
        grow(&mut self.scaled, bytes);
        self.scaled.as_mut_ptr().cast()
    }

    /// Bytes that are kept.
    pub(super) fn kept(&self) -> usize {
        (self.scratch.capacity() + self.scaled.capacity()) * size_of::<Line>() + self.filled * SLOT
    }

    /// Bytes that the part has needed. All accumulators that have memory are counted, as it is not noted which of them the part has used.
    pub(super) fn needed(&self) -> usize {
        self.wanted + self.filled * SLOT
    }
}
