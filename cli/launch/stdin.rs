//! What ranks read from their stdin: rank 0, or each rank, reads what comes to the launcher's stdin; or no rank reads anything.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::process::ChildStdin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use super::{complain, signals};

/// The most bytes of one read.
const PIECE: usize = 64 << 10;
/// If more bytes than these wait for a rank of this host, the launcher reads no more until the rank has read some.
const AHEAD: usize = 1 << 20;
/// The bytes that an agent keeps for a rank that does not read. The agent cannot wait for the rank: the launcher's signals come through the
/// same connection.
pub(super) const KEPT_BY_AGENT: usize = 64 << 20;
/// A launcher in the background of its terminal tries again after this time whether it may read.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Which ranks read what comes to the launcher's stdin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Stdin {
    /// None: each finds the end at once
    #[default]
    None,
    /// Rank 0; the others find the end at once
    #[value(name = "0")]
    Rank0,
    /// Each has a copy
    All,
}

impl Stdin {
    pub(super) fn reaches(self, rank: usize) -> bool {
        self == Stdin::All || (self == Stdin::Rank0 && rank == 0)
    }
}

/// A rank's stdin.
#[derive(Debug)]
pub(super) enum Input {
    None,
    /// The rank inherits the launcher's stdin. If that is a terminal, the rank can write a prompt and read from it as if it ran alone.
    Inherited,
    /// A pipe, into which a thread writes what is pushed into the queue.
    Pipe(Arc<Queue>),
}

impl Input {
    /// The inputs of all ranks of a job that runs on this host alone.
    pub(super) fn of_all(which: Stdin, ranks: usize) -> io::Result<Vec<Input>> {
        if which == Stdin::All {
            let queues: Vec<_> = (0..ranks).map(|_| Arc::new(Queue::new(AHEAD))).collect();
            read_for(queues.iter().map(|queue| sink(queue.clone())).collect())?;
            return Ok(queues.into_iter().map(Input::Pipe).collect());
        }
        let has_one = |rank| which.reaches(rank) && !signals::is_in_background();
        Ok((0..ranks).map(|rank| if has_one(rank) { Input::Inherited } else { Input::None }).collect())
    }

    pub(super) fn queue(&self) -> Option<Arc<Queue>> {
        if let Input::Pipe(queue) = self { Some(queue.clone()) } else { None }
    }

    /// The inputs of an agent's ranks: the launcher sends what they read to the agent.
    pub(super) fn by_agent(which: Stdin, ranks: std::ops::Range<usize>) -> Vec<Input> {
        let queue = || Input::Pipe(Arc::new(Queue::new(KEPT_BY_AGENT)));
        ranks.map(|rank| if which.reaches(rank) { queue() } else { Input::None }).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is to be written into a rank's pipe.
#[derive(Debug)]
pub(super) struct Queue {
    most: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<Vec<u8>>,
    bytes: usize,
    /// The end has been pushed: nothing more comes.
    has_ended: bool,
    /// The rank's end of the pipe is closed: nobody reads any more.
    is_closed: bool,
}

impl Queue {
    fn new(most: usize) -> Queue {
        Queue { most, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes a piece; an empty one is the end. Waits while more than `most` bytes are queued. `false`: nobody reads any more.
    fn push(&self, piece: &[u8]) -> bool {
        let mut state = lock(&self.state);
        while state.bytes > self.most && !state.is_closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let is_closed = state.is_closed;
        self.take(state, piece);
        !is_closed
    }

    /// As `push`, but does not wait: if more than `most` bytes are queued, the end is queued in place of the piece, and this returns `false`.
    pub(super) fn push_now(&self, piece: &[u8]) -> bool {
        let state = lock(&self.state);
        let fits = state.bytes <= self.most || state.has_ended || state.is_closed;
        self.take(state, if fits { piece } else { &[] });
        fits
    }

    fn take(&self, mut state: MutexGuard<'_, State>, piece: &[u8]) {
        if state.is_closed || state.has_ended {
            return;
        }
        state.has_ended = piece.is_empty();
        state.bytes += piece.len();
        state.pieces.push_back(piece.to_vec());
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Vec<u8>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(piece) = state.pieces.pop_front() {
                state.bytes -= piece.len();
                self.changed.notify_all();
                return (!piece.is_empty()).then_some(piece);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Starts a thread that writes the queued pieces into a rank's pipe, as the rank may read slowly.
    pub(super) fn write_to(self: Arc<Self>, mut pipe: ChildStdin) -> io::Result<()> {
        let run = move || {
            while let Some(piece) = self.next() {
                if pipe.write_all(&piece).is_err() {
                    break;
                }
            }
            lock(&self.state).is_closed = true;
            self.changed.notify_all();
        };
        thread::Builder::new().name("to a rank's stdin".into()).stack_size(64 << 10).spawn(run).map(drop)
    }
}

/// A queue into which stdin is read. Dropping this queues the end of stdin: when a restart replaces the sinks, the threads that write to the
/// former ranks end.
struct Written(Arc<Queue>);

impl Drop for Written {
    fn drop(&mut self) {
        self.0.take(lock(&self.0.state), &[]);
    }
}

fn sink(queue: Arc<Queue>) -> Sink {
    let queue = Written(queue);
    Box::new(move |piece| queue.0.push(piece))
}

/// Takes the pieces that come to the launcher's stdin, and an empty one at its end. `false`: this sink takes no more.
pub(super) type Sink = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// Who gets what is read next. One thread reads for all starts of a job: after a restart, the ranks get what comes next.
struct Reader {
    sinks: Vec<Sink>,
    /// How often [`read_for`] has replaced the sinks.
    generation: u64,
    runs: bool,
    has_ended: bool,
}

static READER: Mutex<Reader> =
    Mutex::new(Reader { sinks: Vec::new(), generation: 0, runs: false, has_ended: false });

/// From now on, gives what comes to stdin to these sinks, and no longer to those of the call before.
pub(super) fn read_for(mut sinks: Vec<Sink>) -> io::Result<()> {
    let mut reader = lock(&READER);
    if reader.has_ended {
        sinks.iter_mut().for_each(|sink| _ = sink(&[]));
        return Ok(());
    }
    reader.sinks = sinks;
    reader.generation += 1;
    if !reader.runs {
        thread::Builder::new().name("stdin".into()).stack_size(256 << 10).spawn(read)?;
        reader.runs = true;
    }
    Ok(())
}

fn read() {
    signals::read_without_being_stopped();
    let mut buffer = vec![0; PIECE];
    loop {
        let length = match rustix::io::read(io::stdin(), &mut buffer) {
            Ok(length) => length,
            Err(rustix::io::Errno::INTR) => continue,
            // Stdin is a terminal, and another process group is in its foreground.
            Err(rustix::io::Errno::IO | rustix::io::Errno::AGAIN) if io::stdin().is_terminal() => {
                thread::sleep(LOOK_EVERY);
                continue;
            }
            // Another process that has this pipe, too, has made it non-blocking.
            Err(rustix::io::Errno::AGAIN) => {
                let _ = rustix::event::poll(&mut [PollFd::new(&io::stdin(), PollFlags::IN)], None);
                continue;
            }
            Err(error) => {
                complain(&format!("cannot read stdin for the ranks, who find its end: {error}"));
                0
            }
        };
        let (mut sinks, generation) = {
            let mut reader = lock(&READER);
            reader.has_ended = length == 0;
            (std::mem::take(&mut reader.sinks), reader.generation)
        };
        // Not under the lock, as the sinks may wait.
        sinks.retain_mut(|sink| sink(&buffer[..length]));
        let mut reader = lock(&READER);
        if reader.generation == generation {
            reader.sinks = sinks;
        } else if length == 0 {
            // `read_for` has set other sinks meanwhile: they get the end, too.
            reader.sinks.iter_mut().for_each(|sink| _ = sink(&[]));
        }
        if length == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_keeps_order_and_is_bounded() {
        let queue = Queue::new(3);
        assert!(queue.push_now(b"abcd"));
        assert!(!queue.push_now(b"e"), "there is more than three bytes already");
        assert!(queue.push_now(b"after the end"));
        assert_eq!((queue.next(), queue.next()), (Some(b"abcd".to_vec()), None));
    }

    #[test]
    fn a_sink_tells_that_its_rank_is_gone_and_ends_its_queue_when_it_is_dropped() {
        let queues = [(); 2].map(|()| Arc::new(Queue::new(AHEAD)));
        let [mut first, second] = queues.clone().map(sink);
        assert!(first(b"abc"));
        lock(&queues[0].state).is_closed = true;
        assert!(!first(b"def"), "nobody reads it");
        drop(second);
        assert_eq!(queues[1].next(), None);
    }

    #[test]
    fn who_has_a_stdin() {
        let has = |which: Stdin| [0, 1].map(|rank| which.reaches(rank));
        assert_eq!([Stdin::None, Stdin::Rank0, Stdin::All].map(has), [[false; 2], [true, false], [true; 2]]);
    }
}
