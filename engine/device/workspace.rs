//! [`Workspace`]: the device memory that the parts of an operation need beside the user's buffers.
//!
//! The thread that calls the operation gets it, as the driver may block whoever asks for memory; the parts take regions of it later, while
//! locks are held. All of an operation's work is on one stream, so where regions are used again, a part can have one at once that another part
//! has given back.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::blocks;
use super::buf::DeviceBuf;
use super::stream::DeviceStream;
use crate::error::Error;

/// Pieces of a region begin at multiples of this, as pieces of the pool do.
pub(crate) const ALIGN: u64 = blocks::ALIGN;

/// Bytes that a region needs for `pieces` pieces, which have `bytes` bytes altogether and each begin at a multiple of [`ALIGN`].
pub(crate) fn needs(bytes: usize, pieces: usize) -> usize {
    if bytes == 0 { 0 } else { bytes.saturating_add(pieces * ALIGN as usize) }
}

/// See the module.
pub(crate) struct Workspace {
    address: u64,
    bytes: usize,
    /// The stream has come to the end of the operation.
    is_past: AtomicBool,
    state: Mutex<State>,
}

struct State {
    memory: Option<DeviceBuf<u8>>,
    /// Where the next region begins, if each part has a region of its own length and none is used again.
    next: usize,
    /// The length of all regions, if they are of one length and are used again.
    each: Option<usize>,
    /// Where those regions begin that no part has.
    free: Vec<usize>,
}

impl Workspace {
    /// For an operation on `stream` of which at most `together` parts run at a time, and whose parts need so many bytes each.
    ///
    /// # Errors
    /// There is no such memory.
    pub(crate) fn new(
        stream: &DeviceStream,
        parts: impl Iterator<Item = usize> + Clone,
        together: usize,
    ) -> Result<Workspace, Error> {
        let sum = parts.clone().fold(0usize, usize::saturating_add);
        let most = parts.max().unwrap_or(0);
        let equal = most.saturating_mul(together);
        let (bytes, each) = if equal < sum { (equal, Some(most)) } else { (sum, None) };
        let memory = DeviceBuf::raw(stream, bytes)?;
        let free = each.map_or(Vec::new(), |each| (0..together).map(|i| i * each).collect());
        let (address, memory) = (memory.as_ptr(), Some(memory));
        let is_past = AtomicBool::new(false);
        Ok(Workspace { address, bytes, is_past, state: Mutex::new(State { memory, next: 0, each, free }) })
    }

    /// Takes a region of so many bytes, and returns its address. `None`: there is no room, as more was asked for than `new` was told.
    pub(crate) fn take(&self, bytes: usize) -> Option<u64> {
        let mut state = self.state.lock();
        let at = match state.each {
            Some(each) => state.free.pop().filter(|_| bytes <= each)?,
            None => {
                let at = state.next;
                state.next = at.checked_add(bytes).filter(|end| *end <= self.bytes)?;
                at
            }
        };
        Some(self.address + at as u64)
    }

    /// A part is done with its region, which begins at this address.
    pub(crate) fn give_back(&self, address: u64) {
        let mut state = self.state.lock();
        if state.each.is_some() {
            state.free.push((address - self.address) as usize);
        }
    }

    /// The stream has come to the end of the operation: nobody touches the memory any more.
    pub(crate) fn mark_past(&self) {
        self.is_past.store(true, Ordering::Release);
    }

    /// Gives the memory back at once, whatever is still on the stream.
    pub(crate) fn release(&self) {
        if let Some(memory) = self.state.lock().memory.take() {
            memory.replaced();
        }
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // If the stream is not past the operation, the memory goes back behind what the stream holds now, as that of any buffer.
        if *self.is_past.get_mut() {
            self.release();
        }
    }
}
