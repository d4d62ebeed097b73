//! Streams: threads that do work in the order it came.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::abi::{Handle, Out, Table, fresh, lock};
use crate::capture;
use crate::codes::{Code, Done};
use crate::context::{Context, working};
use crate::entry::call;
use crate::knobs::{self, Deal, Delays};

/// The smallest priority number, which is the most urgent one.
pub(crate) const MOST_URGENT: i32 = -5;
/// Handles of streams that exist without being created: stream 0 (0 names it as well), and the calling thread's own stream.
const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;
const NON_BLOCKING: u32 = 1;
/// Makes the random numbers by which queues are dealt differ from those of the delays, which have the same seed.
const SALT: u64 = 0x71ee5;
/// How often a thread that waits checks whether there is still something to wait for.
const LOOK: Duration = Duration::from_millis(50);

type Work = Box<dyn FnOnce(&Worker<'_>) -> Done + Send>;

pub(crate) struct Stream {
    pub(crate) handle: Handle,
    pub(crate) context: Arc<Context>,
    flags: u32,
    priority: i32,
    /// Stream 0: ordered with all blocking streams of its context.
    legacy: bool,
    /// The hardware queue that its work goes through.
    lane: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<(Vec<Ticket>, Work)>,
    submitted: u64,
    completed: u64,
    /// No more work comes; the worker ends when it has done what is queued.
    closed: bool,
    capture: Capture,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Capture {
    #[default]
    None,
    Active,
    Invalid,
}

/// A point in a stream: it is reached when `number` pieces of work are done.
#[derive(Clone)]
pub(crate) struct Ticket {
    stream: Arc<Stream>,
    number: u64,
}

/// The hardware queues of a context: 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` or the knob `QUEUES` says. Each new stream is
/// dealt one, in turn or at random ([`Deal`]). The work in a queue runs in the order in which it was submitted, whichever streams
/// it belongs to: so a stream that waits holds up all later work of the streams that share its queue.
pub(crate) struct Queues {
    last: Vec<Option<Ticket>>,
    made: usize,
    deal: Deal,
    random: Delays,
}

impl Queues {
    pub(crate) fn new(count: usize) -> Self {
        let mut random = Delays::new(SALT);
        // The first random numbers of neighbouring seeds are alike, so they are skipped.
        for _ in 0..8 {
            random.next();
        }
        Queues { last: (0..count).map(|_| None).collect(), made: 0, deal: knobs::deal(), random }
    }

    /// A queue for a new stream.
    fn next(&mut self, is_urgent: bool) -> usize {
        self.made += 1;
        let all = self.last.len();
        let usual = all.div_ceil(2);
        let mut draw = |from: usize, below: usize| from + self.random.next() as usize % (below - from);
        match self.deal {
            Deal::InTurn => (self.made - 1) % all,
            Deal::Apart if all > 1 && is_urgent => draw(usual, all),
            Deal::Apart if all > 1 => draw(0, usual),
            Deal::Apart | Deal::Seeded => draw(0, all),
        }
    }

    /// For a context that ends: tickets keep their streams alive, and so the context itself.
    pub(crate) fn forget(&mut self) {
        self.last.fill(None);
    }
}

/// What a piece of work can use while it runs.
pub(crate) struct Worker<'a> {
    pub(crate) context: &'a Context,
    delays: &'a RefCell<Delays>,
}

impl Worker<'_> {
    /// A delay, sometimes, if the knobs say so.
    pub(crate) fn dawdle(&self) {
        if let Some(delay) = self.delays.borrow_mut().next_delay() {
            std::thread::sleep(delay);
        }
    }
}

pub(crate) static STREAMS: Table<Stream> = Table::new();

thread_local! {
    /// This thread's own streams, by context.
    static OWN: RefCell<BTreeMap<Handle, Own>> = const { RefCell::new(BTreeMap::new()) };
}

/// A thread's own stream, which is closed when the thread ends.
struct Own(Arc<Stream>);

impl Drop for Own {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Ticket {
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.stream.queue).completed >= self.number
    }

    /// Waits until the point is reached, or the context that waits has ended.
    pub(crate) fn wait(&self, waiter: &Context) {
        let mut queue = lock(&self.stream.queue);
        while queue.completed < self.number && waiter.is_alive() {
            let woken = self.stream.changed.wait_timeout(queue, LOOK);
            queue = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.stream.context
    }
}

impl Stream {
    fn start(context: &Arc<Context>, flags: u32, priority: i32, legacy: bool) -> Done<Arc<Self>> {
        let lane = lock(&context.order).next(priority == MOST_URGENT);
        let stream = Arc::new(Stream {
            handle: fresh(),
            context: context.clone(),
            flags,
            priority,
            legacy,
            lane,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let worker = stream.clone();
        let thread = std::thread::Builder::new().name(format!("cuda stream {:x}", stream.handle));
        thread.spawn(move || worker.run()).map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(stream)
    }

    fn run(&self) {
        let delays = RefCell::new(Delays::new(self.handle));
        let worker = Worker { context: &self.context, delays: &delays };
        loop {
            let (after, work) = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(next) = queue.work.pop_front() {
                        break next;
                    }
                    if queue.closed || !self.context.is_alive() {
                        return;
                    }
                    let woken = self.changed.wait_timeout(queue, LOOK);
                    queue = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
            };
            after.iter().for_each(|ticket| ticket.wait(&self.context));
            worker.dawdle();
            if self.context.check().is_ok() {
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&worker)));
                if let Err(code) = result.unwrap_or(Err(Code::UNKNOWN)) {
                    self.context.fail(code);
                }
            }
            lock(&self.queue).completed += 1;
            self.changed.notify_all();
        }
    }

    /// Queues work; gives the point behind it. While the stream is being captured, the work is dropped and the result is `None`.
    pub(crate) fn submit(
        self: &Arc<Self>,
        work: impl FnOnce(&Worker<'_>) -> Done + Send + 'static,
    ) -> Done<Option<Ticket>> {
        self.context.check()?;
        let full =
            |queue: &Queue| knobs::depth().is_some_and(|depth| queue.submitted - queue.completed >= depth);
        let (mut held, mut crowds) = (None, None);
        let (mut queues, mut after, mut queue) = loop {
            let queues = lock(&self.context.order);
            let after = self.comes_after()?;
            let mut queue = lock(&self.queue);
            match queue.capture {
                Capture::None => {}
                Capture::Active => return Ok(None),
                Capture::Invalid => return Err(Code::STREAM_CAPTURE_INVALIDATED),
            }
            if !full(&queue) || !self.context.is_alive() {
                break (queues, after, queue);
            }
            if crowds.is_none() {
                knobs::note("waiting for room");
                crowds = Some(self.context.crowd());
            }
            if knobs::strict().context_lock {
                // `queues` stays locked, so no stream of the context gets work, and `held` keeps out its other calls.
                held.get_or_insert_with(|| self.context.hold());
                while full(&queue) && self.context.is_alive() {
                    let woken = self.changed.wait_timeout(queue, LOOK);
                    queue = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
                break (queues, after, queue);
            }
            // Without the lock, other streams of the context can get work meanwhile.
            drop(queues);
            drop(self.changed.wait_timeout(queue, LOOK));
        };
        drop(crowds);
        let before = &mut queues.last[self.lane];
        // Work of the same stream is in order without a ticket.
        after.extend(before.take().filter(|ticket| !Arc::ptr_eq(&ticket.stream, self)));
        queue.work.push_back((after, Box::new(work)));
        queue.submitted += 1;
        let ticket = Ticket { stream: self.clone(), number: queue.submitted };
        *before = Some(ticket.clone());
        drop(queue);
        self.changed.notify_all();
        Ok(Some(ticket))
    }

    /// The points that this stream must wait for because stream 0 and the blocking streams wait for each other.
    fn comes_after(self: &Arc<Self>) -> Done<Vec<Ticket>> {
        let mut after = Vec::new();
        if self.legacy {
            for stream in Stream::all_of(&self.context) {
                if stream.flags & NON_BLOCKING == 0 && !stream.legacy {
                    if stream.is_capturing() {
                        return Err(Code::STREAM_CAPTURE_IMPLICIT);
                    }
                    after.push(stream.here());
                }
            }
        } else if self.flags & NON_BLOCKING == 0 {
            after.extend(lock(&self.context.legacy).as_ref().map(|legacy| legacy.here()));
        }
        after.retain(|ticket| !ticket.is_done());
        Ok(after)
    }

    /// The point behind all that is queued now.
    pub(crate) fn here(self: &Arc<Self>) -> Ticket {
        Ticket { stream: self.clone(), number: lock(&self.queue).submitted }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        lock(&self.queue).capture != Capture::None
    }

    /// Makes the stream's capture invalid, if one is under way.
    pub(crate) fn invalidate(&self) {
        let mut queue = lock(&self.queue);
        if queue.capture == Capture::Active {
            queue.capture = Capture::Invalid;
        }
    }

    /// Fails, and makes the capture invalid, if the stream is being captured: for calls that are forbidden then.
    fn not_capturing(&self) -> Done {
        let mut queue = lock(&self.queue);
        if queue.capture == Capture::None {
            return Ok(());
        }
        queue.capture = Capture::Invalid;
        Err(Code::STREAM_CAPTURE_UNSUPPORTED)
    }

    pub(crate) fn synchronize(self: &Arc<Self>) -> Done {
        self.not_capturing()?;
        self.context.check()?;
        self.here().wait(&self.context);
        self.context.check()
    }

    /// No more work comes; what is queued is still done.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    /// The stream that a caller's handle names.
    pub(crate) fn named(handle: Handle) -> Done<Arc<Self>> {
        match handle {
            0 | LEGACY => {
                let context = working()?;
                let mut legacy = lock(&context.legacy);
                if legacy.is_none() {
                    *legacy = Some(Stream::start(&context, 0, 0, true)?);
                }
                legacy.clone().ok_or(Code::UNKNOWN)
            }
            PER_THREAD => {
                let context = working()?;
                OWN.with_borrow_mut(|own| {
                    if let Some(own) = own.get(&context.handle) {
                        return Ok(own.0.clone());
                    }
                    own.retain(|_, own| own.0.context.is_alive());
                    let stream = Stream::start(&context, 0, 0, false)?;
                    OWN_STREAMS.add(stream.handle, stream.clone());
                    own.insert(context.handle, Own(stream.clone()));
                    Ok(stream)
                })
            }
            _ => {
                let stream = STREAMS.get(handle)?;
                stream.context.pass();
                Ok(stream)
            }
        }
    }

    /// All living streams of a context, also those that nobody created: stream 0 and the threads' own.
    pub(crate) fn all_of(context: &Context) -> Vec<Arc<Self>> {
        let mut all = STREAMS.all();
        all.extend(OWN_STREAMS.all());
        all.retain(|stream| stream.context.handle == context.handle);
        all.extend(lock(&context.legacy).clone());
        all
    }
}

/// If the knob `WAITS` is set, waits for all work that is queued in the current context at this moment: real drivers may do so in calls
/// that allocate or free memory, load code or make streams.
pub(crate) fn settle() {
    static WAITS: std::sync::LazyLock<bool> = std::sync::LazyLock::new(knobs::waits);
    if *WAITS && let Ok(context) = working() {
        Stream::all_of(&context).iter().for_each(|stream| stream.here().wait(&context));
    }
}

/// The threads' own streams. They stay after their threads, with nothing to do, until a reset.
pub(crate) static OWN_STREAMS: Table<Stream> = Table::new();

fn create(out: &Out<Handle>, flags: u32, priority: i32) -> Done {
    let context = working()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    settle();
    let stream = Stream::start(&context, flags, priority.clamp(MOST_URGENT, 0), false)?;
    STREAMS.add(stream.handle, stream.clone());
    out.set(stream.handle)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreate(out: Out<Handle>, flags: u32) -> Code {
    call("cuStreamCreate", || create(&out, flags, 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreateWithPriority(
    out: Out<Handle>,
    flags: u32,
    priority: i32,
) -> Code {
    call("cuStreamCreateWithPriority", || create(&out, flags, priority))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamDestroy_v2(handle: Handle) -> Code {
    call("cuStreamDestroy_v2", || {
        if handle <= PER_THREAD {
            return Err(Code::INVALID_HANDLE);
        }
        Stream::named(handle)?;
        STREAMS.remove(handle)?.close();
        capture::is_over(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamSynchronize(handle: Handle) -> Code {
    call("cuStreamSynchronize", || Stream::named(handle)?.synchronize())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamQuery(handle: Handle) -> Code {
    call("cuStreamQuery", || {
        let stream = Stream::named(handle)?;
        stream.not_capturing()?;
        stream.context.check()?;
        if stream.here().is_done() { Ok(()) } else { Err(Code::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetCtx(handle: Handle, out: Out<Handle>) -> Code {
    call("cuStreamGetCtx", || out.set(Stream::named(handle)?.context.handle))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetPriority(handle: Handle, out: Out<i32>) -> Code {
    call("cuStreamGetPriority", || out.set(Stream::named(handle)?.priority))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetFlags(handle: Handle, out: Out<u32>) -> Code {
    call("cuStreamGetFlags", || out.set(Stream::named(handle)?.flags))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetId(handle: Handle, out: Out<u64>) -> Code {
    call("cuStreamGetId", || out.set(Stream::named(handle)?.handle))
}

/// 0: no, 1: active, 2: invalidated.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamIsCapturing(handle: Handle, out: Out<i32>) -> Code {
    call("cuStreamIsCapturing", || {
        let stream = Stream::named(handle)?;
        let capture = lock(&stream.queue).capture;
        out.set(capture as i32)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamBeginCapture_v2(handle: Handle, mode: u32) -> Code {
    call("cuStreamBeginCapture_v2", || {
        let stream = Stream::named(handle)?;
        if mode > capture::RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        if stream.legacy {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut queue = lock(&stream.queue);
        if queue.capture != Capture::None {
            return Err(Code::ILLEGAL_STATE);
        }
        queue.capture = Capture::Active;
        drop(queue);
        capture::begins(&stream, mode);
        Ok(())
    })
}

/// The graph is an empty one: what was captured is forgotten.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamEndCapture(handle: Handle, graph: Out<Handle>) -> Code {
    call("cuStreamEndCapture", || {
        let stream = Stream::named(handle)?;
        capture::may_end(stream.handle)?;
        capture::is_over(stream.handle);
        let capture = std::mem::take(&mut lock(&stream.queue).capture);
        graph.set_if_wanted(0);
        match capture {
            Capture::None => Err(Code::ILLEGAL_STATE),
            Capture::Invalid => Err(Code::STREAM_CAPTURE_INVALIDATED),
            Capture::Active => {
                let empty = fresh();
                GRAPHS.add(empty, Arc::new(()));
                graph.set(empty)
            }
        }
    })
}

static GRAPHS: Table<()> = Table::new();

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphDestroy(graph: Handle) -> Code {
    call("cuGraphDestroy", || GRAPHS.remove(graph).map(|_| ()))
}
