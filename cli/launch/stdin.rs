//! What ranks read from their stdin: what comes to the launcher's, on rank 0 or on all ranks; or nothing.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::process::ChildStdin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{complain, signals};

/// Read at once.
const PIECE: usize = 64 << 10;
/// How much waits for a rank of this host before no more is read.
const AHEAD: usize = 1 << 20;
/// How much an agent keeps for a rank that does not read: the agent has to go on listening to the launcher, which speaks by the same
/// connection.
pub(super) const KEPT_BY_AGENT: usize = 64 << 20;
/// How often a launcher in the background of its terminal looks whether it may read.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Which ranks have what comes to the launcher's stdin.
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
    /// The launcher's own. Where that is a terminal, a rank can read it and write a prompt as if it ran alone.
    Inherited,
    /// A pipe, into which somebody else writes what is pushed here.
    Pipe(Arc<Queue>),
}

impl Input {
    /// Of the ranks of a job that is on this host alone.
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

    /// Of ranks of this host, for whom the launcher speaks to their agent.
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
    /// Nothing more comes.
    has_ended: bool,
    /// Nobody reads any more.
    is_closed: bool,
}

impl Queue {
    fn new(most: usize) -> Queue {
        Queue { most, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes a piece; the empty one is the end. Waits while there is too much already. `false`: nobody reads.
    fn push(&self, piece: &[u8]) -> bool {
        let mut state = lock(&self.state);
        while state.bytes > self.most && !state.is_closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.take(state, piece)
    }

    /// The same without waiting: where there is too much already, this is the end, and `false`.
    pub(super) fn push_now(&self, piece: &[u8]) -> bool {
        let state = lock(&self.state);
        let fits = state.bytes <= self.most || state.has_ended || state.is_closed;
        self.take(state, if fits { piece } else { &[] }) && fits
    }

    fn take(&self, mut state: MutexGuard<'_, State>, piece: &[u8]) -> bool {
        if state.is_closed || state.has_ended {
            return true;
        }
        state.has_ended = piece.is_empty();
        state.bytes += piece.len();
        state.pieces.push_back(piece.to_vec());
        self.changed.notify_all();
        !state.is_closed
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

    /// Writes what comes into a rank's pipe, on a thread: a rank may take its time.
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

fn sink(queue: Arc<Queue>) -> Sink {
    Box::new(move |piece| queue.push(piece))
}

/// Takes pieces of what comes to the launcher's stdin, the empty one at its end. `false`: nobody needs more.
pub(super) type Sink = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// Who gets what is read next. A job that starts anew goes on where the one before it was.
struct Reader {
    sinks: Vec<Sink>,
    /// How often the sinks have been changed.
    generation: u64,
    runs: bool,
    has_ended: bool,
}

static READER: Mutex<Reader> =
    Mutex::new(Reader { sinks: Vec::new(), generation: 0, runs: false, has_ended: false });

/// Gives what comes to stdin from now on to these, and no longer to those before.
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
            // Read from a terminal whose foreground is somebody else's.
            Err(rustix::io::Errno::IO | rustix::io::Errno::AGAIN) if io::stdin().is_terminal() => {
                thread::sleep(LOOK_EVERY);
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
        // Not under the lock: they may wait.
        sinks.retain_mut(|sink| sink(&buffer[..length]));
        let mut reader = lock(&READER);
        if reader.generation == generation {
            reader.sinks = sinks;
        } else if length == 0 {
            // Others have come meanwhile.
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
    fn who_has_a_stdin() {
        let has = |which: Stdin| [0, 1].map(|rank| which.reaches(rank));
        assert_eq!([Stdin::None, Stdin::Rank0, Stdin::All].map(has), [[false; 2], [true, false], [true; 2]]);
    }
}
