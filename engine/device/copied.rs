//! Buffers of other libraries that the other ranks' devices cannot touch: the operation works on copies of them.
//!
//! The copies are memory of the pool, which every rank's device can touch. They are made on the rank's stream, behind what the buffers'
//! streams hold; results are copied back there before the operation's end. So the copying is a rank's own matter, of which the others need not
//! know.

use super::stream::DeviceStream;
use super::workspace::Workspace;
use crate::error::Error;

const DOING: &str = "copy another library's memory on its device";

/// Buffers of another library's that the devices of other ranks could not read where they lie, so that collectives worked on copies of them
/// on the same device ([`Comm::device_copies`](crate::Comm::device_copies)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCopies {
    /// How many such buffers the calls so far have had.
    pub buffers: u64,
    /// The sum of their lengths, in bytes.
    pub bytes: u64,
    /// Why the last of them could not be read where it was, and what to do if no copies are wanted.
    pub why: String,
}

/// The copy of one buffer.
pub(crate) struct Copied {
    theirs: u64,
    ours: u64,
    bytes: usize,
    /// `fill`: whether the operation reads the buffer, or may leave some of its values as they are. `back`: whether it writes to the buffer.
    fill: bool,
    back: bool,
    memory: Workspace,
}

impl Copied {
    /// Gets memory for the copy of a buffer of `bytes` bytes at `theirs`, for use in the order of the rank's stream.
    ///
    /// # Errors
    /// There is not that much memory.
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

    /// The address of the copy, which the operation uses in place of the buffer's.
    pub(crate) fn address(&self) -> u64 {
        self.ours
    }

    /// Called in a command: copies the buffer, if that is needed. The rank's stream already waits for what the buffer's stream held at the call.
    pub(super) fn fill(&self, stream: &DeviceStream) -> Result<(), Error> {
        if self.fill { self.copy(stream, self.theirs, self.ours) } else { Ok(()) }
    }

    /// Called in a command: copies the results back, if there are any. The rest of this rank's work for the operation is on the stream by now.
    pub(super) fn put_back(&self, stream: &DeviceStream) -> Result<(), Error> {
        if self.back { self.copy(stream, self.ours, self.theirs) } else { Ok(()) }
    }

    /// The stream has come to the end of the operation, so nobody touches the copy any more.
    pub(super) fn mark_past(&self) {
        self.memory.mark_past();
    }

    fn copy(&self, stream: &DeviceStream, from: u64, to: u64) -> Result<(), Error> {
        stream.0.context.call(DOING, |cuda| {
            // SAFETY: both memories have `bytes` bytes. One is the workspace's, used in this stream's order. The other is the buffer's, which the
            // in-flight table owns until this stream has passed the operation's end; this stream waits for what the buffer's stream held at the call.
            // A stream that joins the operation waits for that end. After a failure the buffer's stream is made to wait for this stream, or the
            // buffer comes back only once this stream is quiet (`Binding::is_touched`).
            unsafe { cuda.memcpy_dtod_async(to, from, self.bytes, *stream.0.raw()) }
        })
    }
}
