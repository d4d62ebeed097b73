//! [`Commands`]: what a pass (one turn at moving an endpoint's operations on) leaves to be done by a thread that holds none of the engine's locks.
//!
//! A driver may block whoever calls it: a CUDA stream has room for about a thousand pieces of work, and a thread that puts one more there waits
//! while it holds the lock of the whole context. Deadlines, aborts and the other operations of a rank must not wait for that thread. So a pass,
//! which holds the locks of its endpoint and of its rank's memory, never calls a driver: it appends commands here. The thread that made the pass
//! carries them out when it has dropped those locks; but if another thread is already carrying out commands of this endpoint, that thread
//! carries these out, too. A thread that must not block (the progress thread, the control thread, and the one that sees device work end) leaves
//! commands to a thread that each endpoint has for this.
//!
//! Commands are carried out one at a time, in the order in which they were appended.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use parking_lot::Mutex;

use crate::error::Error;
use crate::forked;

thread_local! {
    static MUST_NOT_BLOCK: Cell<bool> = const { Cell::new(false) };
    static IN_COMMAND: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is carrying out a command. Wakers and drops of users' buffers run users' code, so they must wait until the command is done,
/// or run on another thread.
pub(crate) fn is_in_command() -> bool {
    IN_COMMAND.get()
}

/// From now on this thread must not block, as many wait for what it does. So it leaves commands to the threads that endpoints have for them, and
/// carries them out itself only if the system cannot start such a thread.
pub(crate) fn never_block_here() {
    MUST_NOT_BLOCK.set(true);
}

/// Whether this thread has called [`never_block_here`].
pub(crate) fn must_not_block_here() -> bool {
    MUST_NOT_BLOCK.get()
}

type Job = Box<dyn FnOnce() -> Result<(), Error> + Send>;

/// A job that cannot fail.
fn infallible(job: impl FnOnce() + Send + 'static) -> Job {
    Box::new(move || {
        job();
        Ok(())
    })
}

struct Command {
    job: Job,
    /// Whether it is to be done although the communicator has failed.
    always: bool,
    /// It only drops something: nobody waits for that.
    drops: bool,
}

/// The endpoint holds one of these, and so do the runs that were taken out of it. When either of the two is dropped, the commands are
/// [cut](Commands::cut), and a thread empties the list: a command may own what owns the list, and if it stayed in the list, neither would ever be
/// freed.
pub(crate) struct LastOf(pub(crate) Arc<Commands>);

impl Drop for LastOf {
    fn drop(&mut self) {
        self.0.cut();
        self.0.hand_over();
    }
}

/// The commands of an endpoint.
pub(crate) struct Commands {
    list: Mutex<VecDeque<Command>>,
    /// Values to be dropped by a thread that may block, as the drop may call a driver or run a user's code.
    disposed: Mutex<Vec<Box<dyn Send>>>,
    /// `list` may hold a command. Changed under that lock.
    any: AtomicBool,
    /// `list` may hold a command that does more than drop something. Changed under that lock.
    any_awaited: AtomicBool,
    /// `disposed` may hold something. Changed under that lock.
    any_disposed: AtomicBool,
    /// The endpoint has had a command.
    were_any: AtomicBool,
    /// Held by the thread that carries commands out: the others leave theirs to that one.
    issuing: Mutex<()>,
    /// A command that was appended by [`put`](Commands::put) is being carried out.
    is_at_work: AtomicBool,
    is_cut: AtomicBool,
    failure: OnceLock<Error>,
    /// Wakes whoever drives the endpoint.
    waker: Waker,
    /// A function within which commands are carried out, if [`are_within`](Commands::are_within) has set one.
    within: OnceLock<fn(&mut dyn FnMut())>,
    /// Where this endpoint's thread is told that there are commands. `None`: the system has no thread to give.
    thread: OnceLock<Option<Sender<Arc<Commands>>>>,
}

/// As long as this exists, a command that was appended by [`put`](Commands::put) is being carried out.
struct AtWork<'a>(&'a AtomicBool);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Commands {
    /// `waker` wakes whoever drives the endpoint.
    pub(crate) fn new(waker: Waker) -> Arc<Commands> {
        let [any, any_awaited, any_disposed, were_any, is_at_work, is_cut] =
            [(); 6].map(|()| AtomicBool::new(false));
        Arc::new(Commands {
            list: Mutex::default(),
            disposed: Mutex::default(),
            any,
            any_awaited,
            any_disposed,
            were_any,
            issuing: Mutex::default(),
            is_at_work,
            is_cut,
            failure: OnceLock::new(),
            waker,
            within: OnceLock::new(),
            thread: OnceLock::new(),
        })
    }

    /// Appends a command, which is not begun if the communicator has failed by then. If the command fails, the next pass returns its error, and no
    /// command behind it that was appended by this function is begun.
    pub(crate) fn put(&self, job: impl FnOnce() -> Result<(), Error> + Send + 'static) {
        self.append(Command { job: Box::new(job), always: false, drops: false });
    }

    /// Appends a command that is done in any case, also when the communicator has failed.
    pub(crate) fn put_always(&self, job: impl FnOnce() + Send + 'static) {
        self.append(Command { job: infallible(job), always: true, drops: false });
    }

    /// Appends a command that drops what carried an operation out, as that drop may call a driver.
    pub(crate) fn put_drop(&self, carrier: impl Send + 'static) {
        self.append(Command { job: infallible(move || drop(carrier)), always: true, drops: true });
    }

    /// Whether the commands that are to be carried out only drop something, for which nobody waits.
    pub(crate) fn only_drop(&self) -> bool {
        !self.any_awaited.load(Ordering::Acquire)
    }

    /// From here on, commands that come one after another are carried out within one call of `within`, which must call its argument once. With a
    /// device, `within` keeps the device's context current, so that not every command has to enter the context.
    pub(crate) fn are_within(&self, within: fn(&mut dyn FnMut())) {
        let _ = self.within.set(within);
    }

    fn append(&self, command: Command) {
        let mut list = self.list.lock();
        if !command.drops {
            self.any_awaited.store(true, Ordering::Release);
        }
        list.push_back(command);
        self.any.store(true, Ordering::Release);
        drop(list);
        self.were_any.store(true, Ordering::Relaxed);
        // Either this thread then finds `issuing` free, or the thread that had it finds this command when it looks again after unlocking.
        fence(Ordering::SeqCst);
    }

    /// Drops `held`, whose drop may call a driver, or run a user's code. If this thread must not block, and the endpoint has had a command, a
    /// thread that carries commands out drops it later.
    pub(crate) fn dispose(&self, held: impl Send + 'static) {
        if !(MUST_NOT_BLOCK.get() && self.were_any.load(Ordering::Relaxed)) {
            return drop(held);
        }
        let mut disposed = self.disposed.lock();
        disposed.push(Box::new(held));
        self.any_disposed.store(true, Ordering::Release);
    }

    /// Wakes whoever drives the endpoint.
    pub(crate) fn wake(&self) {
        self.waker.wake_by_ref();
    }

    /// What has failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// The communicator has failed: from here on only those commands are begun that are to be done always.
    pub(crate) fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
    }

    /// Whether no command that was appended by [`put`](Self::put) is being carried out. After [`cut`](Self::cut) none is begun any more.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_at_work.load(Ordering::SeqCst)
    }

    /// Whether there is anything to do. In a forked child there is not: what was appended is the parent's.
    fn is_due(&self) -> bool {
        (self.any.load(Ordering::Acquire) || self.any_disposed.load(Ordering::Acquire))
            && !forked::is_forked()
    }

    /// Sees to it that all commands are carried out: by this thread, if it may block and no other thread is carrying them out. The caller holds none
    /// of the engine's locks.
    pub(crate) fn issue(self: &Arc<Self>) {
        if MUST_NOT_BLOCK.get() {
            self.hand_over();
        } else if self.is_due() {
            self.carry_out();
        }
    }

    /// Has this endpoint's thread carry all commands out. If the system cannot start that thread, the calling thread carries them out.
    pub(crate) fn hand_over(self: &Arc<Self>) {
        if !self.is_due() {
            return;
        }
        let start = || {
            let (sender, told) = channel::<Arc<Commands>>();
            let work = move || told.iter().for_each(|commands| commands.carry_out());
            std::thread::Builder::new().name("allstream-calls".into()).spawn(work).ok().map(|_| sender)
        };
        match self.thread.get_or_init(start) {
            Some(thread) => drop(thread.send(self.clone())),
            None => self.carry_out(),
        }
    }

    fn carry_out(&self) {
        while self.any.load(Ordering::Acquire) {
            let Some(issuing) = self.issuing.try_lock() else { break };
            while let Some(first) = self.next(false) {
                self.carry_out_row(first);
            }
            drop(issuing);
            // See `append`.
            fence(Ordering::SeqCst);
        }
        // With `issuing` unlocked: a user's code may wait for an operation of this endpoint, whose commands this thread, or another, carries
        // out meanwhile.
        if self.any_disposed.load(Ordering::Acquire) && !IN_COMMAND.get() {
            let disposed = {
                let mut disposed = self.disposed.lock();
                self.any_disposed.store(false, Ordering::Release);
                std::mem::take(&mut *disposed)
            };
            for held in disposed {
                // A panic in it (reported on stderr) ends here.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(held)));
            }
        }
    }

    /// Carries out `first`. If that is not a command that is done always, also carries out the commands behind it until the next is one that is done
    /// always (which it leaves), all within one call of `within`. A command that is done always is carried out alone and outside of `within`: it may
    /// drop a user's value, whose code must not run in there.
    fn carry_out_row(&self, first: Command) {
        let within = self.within.get().filter(|_| !first.always);
        let mut next = Some(first);
        let mut all = || {
            while let Some(command) = next.take() {
                let is_last = command.always;
                self.carry_out_one(command);
                next = if is_last { None } else { self.next(true) };
            }
        };
        match within {
            Some(within) => within(&mut all),
            None => all(),
        }
    }

    /// Takes the next command from the list; with `of_a_row`, leaves a command that is done always, and returns `None`.
    fn next(&self, of_a_row: bool) -> Option<Command> {
        let mut list = self.list.lock();
        let next = match list.front() {
            Some(command) if of_a_row && command.always => None,
            _ => list.pop_front(),
        };
        if list.is_empty() {
            self.any_awaited.store(false, Ordering::Release);
        }
        self.any.store(!list.is_empty(), Ordering::Release);
        next
    }

    fn carry_out_one(&self, Command { job, always, .. }: Command) {
        let panicked = |_| Err(Error::system("carry a command out", "it panicked (a bug)"));
        let run = || {
            IN_COMMAND.set(true);
            let result = catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(panicked);
            IN_COMMAND.set(false);
            result
        };
        if always {
            // A job that is done always returns no error: it tells by itself of what has failed.
            let _ = run();
            return;
        }
        self.is_at_work.store(true, Ordering::SeqCst);
        let at_work = AtWork(&self.is_at_work);
        // Either the thread that cuts the commands sees that this one is at work, or this thread sees that the commands are cut.
        if !self.is_cut.load(Ordering::SeqCst)
            && let Err(error) = run()
        {
            let _ = self.failure.set(error);
            self.cut();
            self.wake();
        }
        drop(at_work);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn failed() -> Error {
        Error::system("carry a command out", "it fails in a test")
    }

    fn commands() -> Arc<Commands> {
        Commands::new(Waker::noop().clone())
    }

    #[test]
    fn what_is_only_to_be_dropped_is_told_from_what_somebody_waits_for() {
        let commands = commands();
        commands.put_drop(());
        assert!(commands.only_drop());
        commands.put(|| Ok(()));
        commands.put_drop(());
        assert!(!commands.only_drop(), "a job stands between two drops");
        commands.issue();
        commands.put_drop(());
        assert!(commands.only_drop(), "the job is done");
        commands.put_always(|| ());
        assert!(!commands.only_drop());
        commands.issue();
        assert!(!commands.is_due());
    }

    #[test]
    fn commands_of_many_threads_are_all_carried_out_one_at_a_time_and_in_the_order_of_each() {
        const EACH: usize = 500;
        let (commands, done, at_work) = (commands(), Arc::new(Mutex::new(Vec::new())), AtomicUsize::new(0));
        let at_work = Arc::new(at_work);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (commands, done, at_work) = (commands.clone(), done.clone(), at_work.clone());
                scope.spawn(move || {
                    if thread == 0 {
                        never_block_here();
                    }
                    for i in 0..EACH {
                        let (done, at_work) = (done.clone(), at_work.clone());
                        commands.put(move || {
                            assert_eq!(at_work.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                            done.lock().push((thread, i));
                            at_work.fetch_sub(1, Ordering::SeqCst);
                            Ok(())
                        });
                        commands.issue();
                    }
                });
            }
        });
        let start = Instant::now();
        while done.lock().len() < 4 * EACH {
            assert!(start.elapsed() < PATIENCE, "a command was forgotten: {}", done.lock().len());
            std::thread::yield_now();
        }
        let done = done.lock();
        for thread in 0..4 {
            let of = done.iter().filter(|(by, _)| *by == thread).map(|(_, i)| *i);
            assert!(of.eq(0..EACH), "the commands of a thread keep their order");
        }
    }

    #[test]
    fn behind_a_command_that_fails_only_those_are_done_that_are_done_always() {
        let (commands, count) = (commands(), Arc::new(AtomicUsize::new(0)));
        let counts = |by: usize| {
            let count = count.clone();
            move || {
                count.fetch_add(by, Ordering::SeqCst);
            }
        };
        let (before, behind) = (counts(1), counts(10));
        commands.put(move || {
            before();
            Ok(())
        });
        commands.put(|| Err(failed()));
        commands.put(move || {
            behind();
            Ok(())
        });
        commands.put_always(counts(100));
        commands.issue();
        assert_eq!(count.load(Ordering::SeqCst), 101);
        assert_eq!(commands.check().map_err(|error| error.to_string()), Err(failed().to_string()));
    }

    #[test]
    fn a_thread_that_must_not_block_goes_on_while_a_command_blocks_and_a_cut_takes_the_rest_away() {
        let (commands, held_up) = (commands(), Arc::new(Barrier::new(2)));
        let (tell, told) = mpsc::channel();
        let blocks = held_up.clone();
        let begun = tell.clone();
        commands.put(move || {
            begun.send("begun").unwrap();
            blocks.wait();
            Ok(())
        });
        let again = commands.clone();
        std::thread::spawn(move || {
            never_block_here();
            again.issue();
        })
        .join()
        .unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok("begun"));
        let taken_away = tell.clone();
        commands.put(move || {
            taken_away.send("taken away").unwrap();
            Ok(())
        });
        commands.cut();
        assert!(!commands.is_idle(), "the one that blocks is at work");
        commands.put_always(move || tell.send("always").unwrap());
        commands.issue();
        held_up.wait();
        assert_eq!(told.recv_timeout(PATIENCE), Ok("always"));
        assert!(commands.is_idle());
    }

    struct Panics(Arc<AtomicUsize>);

    impl Drop for Panics {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
            std::panic::panic_any("a drop of a test");
        }
    }

    #[test]
    fn what_panics_ends_neither_the_thread_nor_what_comes_behind() {
        let (commands, dropped) = (commands(), Arc::new(AtomicUsize::new(0)));
        let (tell, told) = mpsc::channel();
        let (again, drops) = (commands.clone(), dropped.clone());
        commands.put_always(|| std::panic::panic_any("a command of a test"));
        std::thread::spawn(move || {
            never_block_here();
            again.dispose(Panics(drops));
            again.issue();
            let last = again.clone();
            again.put_always(move || tell.send(last.is_idle()).unwrap());
            again.issue();
        })
        .join()
        .unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
        let start = Instant::now();
        while dropped.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < PATIENCE, "what was disposed of is dropped");
            std::thread::yield_now();
        }
        commands.put(|| std::panic::panic_any("a command of a test"));
        commands.issue();
        assert!(commands.is_idle() && commands.check().is_err(), "the next pass hears of it");
    }
}
