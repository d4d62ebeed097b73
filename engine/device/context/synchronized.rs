//! The streams of a context for which threads wait: such a stream is not destroyed before the last of these waits has ended.

use allstream_sys::cuda::CuStream;

/// See the module.
#[derive(Default)]
pub(super) struct Synchronized {
    /// A stream for each wait. A stream that several threads wait for is here several times.
    waits: Vec<CuStream>,
    /// Those of them that nobody else has any more.
    given_up: Vec<CuStream>,
}

impl Synchronized {
    /// A thread is about to wait for a stream, which exists.
    pub(super) fn begin(&mut self, stream: CuStream) {
        self.waits.push(stream);
    }

    /// A wait has ended. Whether the caller is to destroy the stream.
    pub(super) fn end(&mut self, stream: CuStream) -> bool {
        if let Some(at) = self.waits.iter().position(|waited| *waited == stream) {
            self.waits.swap_remove(at);
        }
        if self.waits.contains(&stream) {
            return false;
        }
        let given_up = self.given_up.iter().position(|given_up| *given_up == stream);
        given_up.map(|at| self.given_up.swap_remove(at)).is_some()
    }

    /// Nobody has this stream any more, except threads that wait for it. Whether the caller is to destroy it now; otherwise the last of
    /// these threads does.
    pub(super) fn give_up(&mut self, stream: CuStream) -> bool {
        let is_waited_for = self.waits.contains(&stream);
        if is_waited_for {
            self.given_up.push(stream);
        }
        !is_waited_for
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_destroyed_once_and_not_before_the_last_wait_for_it_has_ended() {
        let [a, b] = [8, 16].map(|at| CuStream(std::ptr::without_provenance_mut(at)));
        let mut synchronized = Synchronized::default();
        assert!(synchronized.give_up(b), "nobody waits for it");
        [a, a, b].into_iter().for_each(|stream| synchronized.begin(stream));
        assert!(!synchronized.give_up(a), "two threads wait for it");
        assert!(!synchronized.end(a), "one still does");
        assert!(!synchronized.end(b), "its owner still has it");
        assert!(synchronized.end(a), "the last wait for it");
        // The driver may give the same handle to a new stream.
        synchronized.begin(a);
        assert!(!synchronized.end(a));
        assert!(synchronized.give_up(a));
    }
}
