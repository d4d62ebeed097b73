//! Events: points in streams, and the time they were reached.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::abi::{Handle, Out, Table, fresh, lock};
use crate::codes::{Code, Done};
use crate::context::{Context, current, working};
use crate::entry::call;
use crate::knobs;
use crate::space::Mapping;
use crate::stream::{Stream, Ticket};

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub(crate) struct Event {
    handle: Handle,
    pub(crate) context: Arc<Context>,
    pub(crate) flags: u32,
    point: Mutex<Option<Point>>,
    /// The last record went into a graph.
    captured: AtomicBool,
    /// For an event between processes: the page they share.
    pub(crate) shared: Option<Arc<Shared>>,
}

/// The point of the last record in its stream, and the time when it was reached.
#[derive(Clone)]
struct Point {
    ticket: Ticket,
    reached: Arc<OnceLock<Instant>>,
}

/// A page that processes share: how many records there were, and which of them were reached.
///
/// A wait is for the record that was the last one when the wait was asked for. A later record, of any process, may be reached
/// earlier and must not end that wait: so each record has a place of its own that tells whether it was reached.
pub(crate) struct Shared {
    mapping: Mapping,
    /// The page's file, in the process that made the event.
    pub(crate) file: Option<std::os::fd::OwnedFd>,
}

/// Words of the page: the number of records, then the places that tell which records were reached.
/// A place is used again `WORDS - 1` records later: nobody waits for a record that old.
const WORDS: usize = crate::space::PAGE / 8;

impl Shared {
    fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the mapping is a whole page, aligned, zeroed when new, and lives as long as `self`; every process uses it only as
        // these atomic words.
        unsafe { &*(self.mapping.address() as *const [AtomicU64; WORDS]) }
    }

    fn place(&self, number: u64) -> &AtomicU64 {
        &self.words()[1 + number as usize % (WORDS - 1)]
    }

    fn recorded(&self) -> u64 {
        self.words()[0].load(Ordering::Acquire)
    }

    fn reach(&self, number: u64) {
        self.place(number).fetch_max(number, Ordering::AcqRel);
    }

    /// Number 0 is the state before the first record: nothing to wait for.
    fn is_done(&self, number: u64) -> bool {
        number == 0 || self.place(number).load(Ordering::Acquire) >= number
    }

    /// Polls: the other process cannot wake us.
    fn wait(&self, number: u64, waiter: &Context) {
        while !self.is_done(number) && waiter.is_alive() {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

pub(crate) static EVENTS: Table<Event> = Table::new();

pub(crate) fn end_all_of(context: Handle) {
    for event in EVENTS.all().into_iter().filter(|event| event.context.handle == context) {
        let _ = EVENTS.remove(event.handle);
    }
}

impl Event {
    pub(crate) const BETWEEN_PROCESSES: u32 = INTERPROCESS | DISABLE_TIMING;

    pub(crate) fn make(context: &Arc<Context>, flags: u32, shared: Option<Arc<Shared>>) -> Arc<Self> {
        let event = Arc::new(Event {
            handle: fresh(),
            context: context.clone(),
            flags,
            point: Mutex::default(),
            captured: AtomicBool::new(false),
            shared,
        });
        EVENTS.add(event.handle, event.clone());
        event
    }

    /// The event that a caller's handle names.
    pub(crate) fn named(handle: Handle) -> Done<Arc<Self>> {
        let event = EVENTS.get(handle)?;
        event.context.pass();
        Ok(event)
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// A record that was captured into a graph does not run, so nobody can ask whether it was reached.
    fn not_captured(&self) -> Done {
        if self.captured.load(Ordering::Acquire) { Err(Code::CAPTURED_EVENT) } else { Ok(()) }
    }

    fn point(&self) -> Option<Point> {
        lock(&self.point).clone()
    }

    /// Whether all work before the last record is done; true if there was no record.
    fn is_done(&self) -> bool {
        match &self.shared {
            Some(shared) => shared.is_done(shared.recorded()),
            None => self.point().is_none_or(|point| point.ticket.is_done()),
        }
    }

    fn record(&self, stream: &Arc<Stream>) -> Done {
        if stream.context.handle != self.context.handle {
            return Err(Code::INVALID_HANDLE);
        }
        let reached = Arc::new(OnceLock::new());
        let mark = reached.clone();
        // The number that this record has in the page, once it is known that the record is queued: were it counted before, a wait for a record that
        // the stream has refused, or that went into a graph, would never end. 0: not known yet.
        let counted = Arc::new(AtomicU64::new(0));
        let (shared, number) = (self.shared.clone(), counted.clone());
        // Queued under the lock, so that `point` is that of the record that was queued last.
        let mut point = lock(&self.point);
        let ticket = stream.submit(move |worker| {
            let _ = mark.set(Instant::now());
            if let Some(shared) = shared {
                while number.load(Ordering::Acquire) == 0 && worker.context.is_alive() {
                    std::thread::yield_now();
                }
                shared.reach(number.load(Ordering::Acquire));
            }
            Ok(())
        })?;
        self.captured.store(ticket.is_none(), Ordering::Release);
        if let Some(ticket) = ticket {
            if let Some(shared) = &self.shared {
                let number = shared.words()[0].fetch_add(1, Ordering::AcqRel) + 1;
                counted.store(number, Ordering::Release);
            }
            *point = Some(Point { ticket, reached });
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(out: Out<Handle>, flags: u32) -> Code {
    call("cuEventCreate", || {
        let context = working()?;
        let known = BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS;
        // The manual demands that an event between processes be made without timing.
        if flags & !known != 0 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
            return Err(Code::INVALID_VALUE);
        }
        if flags & BLOCKING_SYNC != 0 {
            knobs::note("cuEventCreate, blocking");
        }
        let shared = if flags & INTERPROCESS != 0 { Some(Arc::new(Shared::new()?)) } else { None };
        out.set(Event::make(&context, flags, shared).handle)
    })
}

impl Shared {
    pub(crate) fn opened(file: &std::os::fd::OwnedFd) -> Done<Self> {
        Ok(Shared { mapping: Mapping::of_file(file, 0, crate::space::PAGE)?, file: None })
    }

    fn new() -> Done<Self> {
        let file = crate::space::memfd(crate::space::PAGE)?;
        Ok(Shared { mapping: Mapping::of_file(&file, 0, crate::space::PAGE)?, file: Some(file) })
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventDestroy_v2(handle: Handle) -> Code {
    call("cuEventDestroy_v2", || {
        Event::named(handle)?;
        EVENTS.remove(handle).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Code {
    call("cuEventRecord", || Event::named(event)?.record(&Stream::named(stream)?))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: u32) -> Code {
    call("cuEventRecordWithFlags", || Event::named(event)?.record(&Stream::named(stream)?))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventQuery(event: Handle) -> Code {
    call("cuEventQuery", || {
        let event = Event::named(event)?;
        event.context.check()?;
        event.not_captured()?;
        if event.is_done() { Ok(()) } else { Err(Code::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventSynchronize(event: Handle) -> Code {
    call("cuEventSynchronize", || {
        // The reference demands a current context for this wait.
        current()?;
        let event = Event::named(event)?;
        event.context.check()?;
        event.not_captured()?;
        if event.flags & BLOCKING_SYNC == 0 {
            knobs::note("cuEventSynchronize, spinning");
        }
        if let Some(shared) = &event.shared {
            shared.wait(shared.recorded(), &event.context);
        } else if let Some(point) = event.point() {
            point.ticket.wait(&event.context);
            point.ticket.context().check()?;
        }
        event.context.check()
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) -> Code {
    call("cuStreamWaitEvent", || {
        let (stream, event) = (Stream::named(stream)?, Event::named(event)?);
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        // The wait is for the last record so far; a later record changes nothing.
        if let Some(shared) = event.shared.clone() {
            let number = shared.recorded();
            stream.submit(move |worker| {
                shared.wait(number, worker.context);
                Ok(())
            })?;
        } else if let Some(point) = event.point() {
            stream.submit(move |worker| {
                point.ticket.wait(worker.context);
                Ok(())
            })?;
        }
        Ok(())
    })
}

fn elapsed(out: &Out<f32>, start: Handle, end: Handle) -> Done {
    let (start, end) = (Event::named(start)?, Event::named(end)?);
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Code::INVALID_HANDLE);
    }
    let (Some(start), Some(end)) = (start.point(), end.point()) else {
        return Err(Code::INVALID_HANDLE);
    };
    let (Some(from), Some(to)) = (start.reached.get(), end.reached.get()) else {
        return Err(Code::NOT_READY);
    };
    let forth = to.saturating_duration_since(*from).as_secs_f32();
    let back = from.saturating_duration_since(*to).as_secs_f32();
    out.set((forth - back) * 1e3)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventElapsedTime(out: Out<f32>, start: Handle, end: Handle) -> Code {
    call("cuEventElapsedTime", || elapsed(&out, start, end))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventElapsedTime_v2(out: Out<f32>, start: Handle, end: Handle) -> Code {
    call("cuEventElapsedTime_v2", || elapsed(&out, start, end))
}
