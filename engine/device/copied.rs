//! Buffers of other libraries that the other ranks' devices cannot touch: the operation works on copies of them.
//!
//! The copies are memory of the pool, which every rank's device can touch. They are made on the rank's stream, behind what the buffers'
//! streams hold; results are copied back there before the operation's end. So this is a rank's own matter: the other ranks see an operation
//! on the device like any other, and need not agree on it.

use super::stream::DeviceStream;
use super::workspace::Workspace;
use crate::error::Error;

const DOING: &str = "copy another library's memory on its device";

/// Buffers of another library's that the devices of other ranks could not read where they lie, so that collectives worked on copies of them
/// on the same device ([`Comm::device_copies`](crate::Comm::device_copies)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCopies {
    /// How many, of all calls so far.
    pub buffers: u64,
    /// Their lengths together.
    pub bytes: u64,
    /// Why the last of them could not be read where it was, and what to do where copies are not wanted.
    pub why: String,
}

/// The copy of one buffer.
pub(crate) struct Copied {
    theirs: u64,
    ours: u64,
    bytes: usize,
    /// Whether the operation reads what the buffer holds, or leaves some of it; and whether it writes there.
    fill: bool,
    back: bool,
    memory: Workspace,
}

impl Copied {
    /// Memory for a copy, on the rank's stream.
    ///
    /// # Errors
    /// There is no such memory.
    pub(crate) fn new(
        stream: &DeviceStream,
        theirs: u64,
        bytes: usize,
        (fill, back): (bool, bool),
    ) -> Result<Copied, Error> {
        let memory = Workspace::new(stream, std::iter::once(bytes), 1)?;
        let ours =
            memory.take(bytes).ok_or_else(|| Error::system(DOING, "its memory is too short (a bug)"))?;
        Ok(Copied { theirs, ours, bytes, fill, back, memory })
    }

    /// Where the operation finds it.
    pub(crate) fn address(&self) -> u64 {
        self.ours
    }

    /// A command: the stream, on which the memory is, has come behind what the buffer's stream held.
    pub(super) fn fill(&self, stream: &DeviceStream) -> Result<(), Error> {
        if self.fill { self.copy(stream, self.theirs, self.ours) } else { Ok(()) }
    }

    /// A command: all of the operation is on the stream.
    pub(super) fn put_back(&self, stream: &DeviceStream) -> Result<(), Error> {
        if self.back { self.copy(stream, self.ours, self.theirs) } else { Ok(()) }
    }

    /// The stream has come to the end of the operation.
    pub(super) fn mark_past(&self) {
        self.memory.mark_past();
    }

    fn copy(&self, stream: &DeviceStream, from: u64, to: u64) -> Result<(), Error> {
        stream.0.context.call(DOING, |cuda| {
            // SAFETY: both have so many bytes: the one is the workspace's, the other the buffer's, which the in-flight table owns until the
            // stream has passed the operation's end. The stream waits for what the buffer's stream held at the call, and that one for the
            // operation's end.
            unsafe { cuda.memcpy_dtod_async(to, from, self.bytes, *stream.0.raw()) }
        })
    }
}
