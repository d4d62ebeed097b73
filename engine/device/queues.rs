//! Finds out whether a stream that waits holds up another stream, and if so moves collectives to a stream that it does not hold up.
//!
//! The streams of a context share its hardware queues: 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` says. A queue starts the work
//! of all its streams in the order of submission, a "false dependency" (CUDA programming guide, environment variables), and no driver says
//! which streams share a queue. Where a stream waits for work that is on a stream already, this costs only time. But a stream that
//! waits for a word ([`DeviceSignal`]) which is written only after a collective that is on no stream yet may hold up that very collective.
//!
//! So the device is asked first. The streams that are to wait are made to wait for a word that the host writes later. Then the stream that
//! collectives run on, and a few spare streams of the driver's, are each told to write a word of their own. A stream whose word comes
//! meanwhile is not held up. If a spare stream's word comes and that of the collectives' stream does not, because this stream shares a queue or
//! has other work to do, the collectives go on with the spare one ([`Line::go_on_with`](super::context::Line::go_on_with)). So the streams' answers
//! are compared, and a slow host or device only delays them. If no stream answers within [`LOOK`], the answer is unknown, and the streams are
//! not made to wait. The spare streams are made when the first rank is bound to the device.
//!
//! An event behind a wait for such a word comes only after the wait. So while any stream waits for such a word, `waiter.rs` makes no stream of
//! ours wait for an event: that stream could hold up a user's stream in its queue, on which another rank may make its input.

mod pairs;

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use allstream_sys::cuda::CudaError;
use parking_lot::Mutex;

use super::context::{Context, Line, Standing, Way, Ways};
use super::signal::{DeviceSignal, Word};
use super::stream::DeviceStream;
use crate::error::Error;

pub(crate) use pairs::Pair;

/// How long a question waits for a first answer. If none has come by then, no stream that was asked is known to go on.
const LOOK: Duration = Duration::from_millis(20);
/// If a spare stream answers first, the stream in use gets as long again as that answer took, and at least this long.
const PATIENCE: Duration = Duration::from_micros(200);
/// How long a question spins before it sleeps between looks: a device that has nothing to do answers in about this time. Also the length of a sleep.
const SPIN: Duration = Duration::from_micros(50);
/// How many spare streams a device has that collectives or copies may go on with. They are made one after another, so likely in as many queues.
const SPARE: usize = 4;
/// At most so many streams are made, one after another, to find one that shares no queue with the streams that it must not hold up.
const TRIES: usize = 12;
/// The word that a question uses of each [`DeviceSignal`]; it uses no other.
const BELL: Word = Word::Over(0);
/// Once so many answers are kept for a stream, those about streams that are gone are dropped ([`Ways::forget`]), or all of them (`pairs.rs`).
const ANSWERS: usize = 64;

/// Whether the environment gives this process only one hardware queue, which all streams share.
fn is_one() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|text| text.trim() == "1"))
}

fn enter(list: &mut Vec<Weak<Line>>, stream: &DeviceStream) {
    list.retain(|other| other.strong_count() > 0);
    if !list.iter().any(|other| other.as_ptr() == Arc::as_ptr(&stream.0)) {
        list.push(Arc::downgrade(&stream.0));
    }
}

fn alive(list: &[Weak<Line>]) -> Vec<DeviceStream> {
    list.iter().filter_map(Weak::upgrade).map(DeviceStream).collect()
}

/// Whether `waiting` must not hold up `line`. Two ranks' own streams for one communicator may hold each other up, as this does not last: such a
/// stream waits for one collective's input only when all that its rank needs of other ranks for the collective before is on their streams.
fn concerns(waiting: &DeviceStream, line: &DeviceStream) -> bool {
    let of = |stream: &DeviceStream| stream.0.standing.lock().comm.filter(|_| stream.0.may_move());
    waiting != line && (of(line).is_none() || of(line) != of(waiting))
}

impl Ways {
    /// If many answers are kept for a stream ([`ANSWERS`]), forgets those about streams that are gone.
    fn forget(&self, context: &Context, standing: &mut Standing) {
        if standing.apart.len() < ANSWERS {
            return;
        }
        let lines = alive(&self.lines).into_iter().map(|line| line.0.way());
        let callers = alive(&context.callers.lock()).into_iter().map(|line| line.0.way());
        let ours = lines.chain(self.spare.iter().copied()).chain(context.copies_way());
        let all: Vec<u64> = ours.chain(callers).map(|way| way.id).collect();
        standing.apart.retain(|id| all.contains(id));
    }
}

/// Work that may go on with another stream of the driver.
enum Course {
    /// A rank's stream, on which there is nothing yet.
    New(DeviceStream),
    /// A rank's stream, or one for messages that a library moves. The latter never moves, nor does the former where NCCL uses it.
    Line(DeviceStream),
    /// Copies on [`Context::copies`], the stream on which nothing waits: another rank's call may wait for them.
    Copies,
}

impl Course {
    fn go_on_with(&self, context: &Context, next: Way) -> Result<Way, CudaError> {
        let entered = context.enter()?;
        match self {
            Course::New(line) => Ok(line.0.start_with(next)),
            Course::Line(line) => line.0.go_on_with(&entered, next),
            Course::Copies => context.copies_go_on_with(&entered, next),
        }
    }
}

/// Words in the host's memory by which a device is asked which streams hold up which.
pub(crate) struct Probe {
    /// During a question, the streams that are to wait wait for this word; the host writes it at the end.
    gate: DeviceSignal,
    /// One for each stream that is asked: the stream writes this word when it comes to that write.
    bells: Vec<DeviceSignal>,
    /// The number of the last question, which is the value that its words are to show.
    turn: u32,
}

/// What becomes of a stream that collectives or copies run on when other streams are to wait.
enum Answer {
    /// None of the others holds it up.
    Stays,
    /// The spare stream of this index is held up by none of them.
    Moves(usize),
    /// No answer came.
    Unknown,
}

/// Makes a stream for the kernels by which a library moves messages: each waits on the device for the other rank's kernel.
///
/// That other kernel may be behind anything that the other rank's device does, and that may wait for this device in turn. So the stream
/// is to share no queue with the streams that collectives and copies run on, nor with `user`, on which the messages' buffers are filled.
/// Streams are made until such a one is found, at most [`TRIES`]; then the last one is taken. From here on, streams that are to wait for a
/// collective must not hold up this stream either.
///
/// The driver may wait for all work on the device before it makes a stream, and that work may wait for another rank's call. Such a call may need the
/// locks of `probe` and of [`Context::ways`]: so neither is held while a stream is made.
pub(crate) fn stream_apart(
    probe: &Mutex<Result<Probe, Error>>,
    line: &DeviceStream,
    user: &DeviceStream,
) -> Result<DeviceStream, Error> {
    let device = line.device();
    // Streams that share a queue are kept until the end, as the driver might give the next one the same queue.
    let mut made = Vec::new();
    loop {
        let stream = DeviceStream::of_the_engine(&device)?;
        let is_last = made.len() + 1 == TRIES;
        // Without words nobody can find out which streams share a queue.
        let is_taken =
            probe.lock().as_mut().map_or(true, |probe| probe.is_for_messages(&stream, user, is_last));
        if is_taken {
            return Ok(stream);
        }
        made.push(stream);
    }
}

/// Whether `way` is known to do new work while each of these streams waits.
fn is_apart(way: Way, waits: &[DeviceStream]) -> bool {
    waits.iter().all(|waiting| waiting.0.standing.lock().apart.contains(&way.id))
}

impl Probe {
    pub(crate) fn new(stream: &DeviceStream) -> Result<Probe, Error> {
        let bells = (0..=SPARE).map(|_| DeviceSignal::new(stream, 1)).collect::<Result<_, _>>()?;
        Ok(Probe { gate: DeviceSignal::new(stream, 1)?, bells, turn: 0 })
    }

    /// From here on, as long as `line` lives, collectives of this communicator run on it: no stream that waits for a collective
    /// may hold it up.
    pub(crate) fn admit(&mut self, line: &DeviceStream, comm: u64) {
        let context = &line.0.context;
        line.0.standing.lock().comm = Some(comm);
        let mut ways = context.ways.lock();
        enter(&mut ways.lines, line);
        if is_one() {
            return; // `make_way` then lets no stream wait for what is not on a stream yet
        }
        if !self.clear(&mut ways, context, &Course::New(line.clone()), &[]) {
            tracing::debug!("a rank is bound while streams wait that may hold up its collectives");
        }
    }

    /// Takes `stream` as the one for messages if it shares no queue with the streams that collectives and copies run on, nor with `user`, or if
    /// it `is_last`. Where another stream is too busy to answer, it counts as one in another queue. Returns whether it is taken.
    fn is_for_messages(&mut self, stream: &DeviceStream, user: &DeviceStream, is_last: bool) -> bool {
        let context = &stream.0.context;
        let mut ways = context.ways.lock();
        // Kept until the end, so that the stream of a communicator that closes meanwhile is not destroyed while it is asked.
        let lines = alive(&ways.lines);
        let mut others: Vec<Way> = lines.iter().map(|line| line.0.way()).collect();
        others.extend(context.copies_way());
        // A buffer of another device is refused later. Its stream has no queue here, and cannot be asked in this device's context.
        others.extend(user.shares_device(stream).then(|| user.0.way()));
        let is_apart = is_one() || others.iter().all(|other| !self.holds_up(context, stream, *other));
        if is_last && !is_apart {
            tracing::debug!("the stream for messages shares a hardware queue on this device");
        }
        if is_apart || is_last {
            enter(&mut ways.lines, stream);
        }
        is_apart || is_last
    }

    /// Whether `waiting` is seen to hold up `other`: `other` goes on only as soon as `waiting` does.
    fn holds_up(&mut self, context: &Arc<Context>, waiting: &DeviceStream, other: Way) -> bool {
        let waits = std::slice::from_ref(waiting);
        if matches!(self.find(context, other, &[], waits), Answer::Stays) {
            return false;
        }
        let Some(bell) = self.bells.first() else { return false };
        let (turn, start) = (self.turn, Instant::now());
        while !bell.shows(BELL, turn) && start.elapsed() < LOOK {
            std::thread::sleep(SPIN);
        }
        bell.shows(BELL, turn)
    }

    /// Finds out whether these streams may wait for work that nobody has put on a stream yet without holding up their device's collectives,
    /// which are moved to a spare stream where that helps. `false`: they may not. After `true` they count as waiting, and the caller calls
    /// [`DeviceStream::waits_now`] for each once it was made to wait, or will not be. None of them may be captured into a graph meanwhile.
    /// `needs_copies`: they may not hold up copies either.
    pub(crate) fn make_way<'a>(
        &mut self,
        streams: impl Iterator<Item = &'a DeviceStream>,
        needs_copies: bool,
    ) -> bool {
        if is_one() {
            return false;
        }
        let mut rest: Vec<DeviceStream> = streams.cloned().collect();
        let mut done = Vec::new();
        while let Some(first) = rest.first() {
            let context = first.0.context.clone();
            let (here, elsewhere): (Vec<_>, _) =
                rest.into_iter().partition(|stream| Arc::ptr_eq(&stream.0.context, &context));
            rest = elsewhere;
            if !self.make_way_on(&context, &here, needs_copies) {
                done.iter().for_each(DeviceStream::waits_now);
                return false;
            }
            done.extend(here);
        }
        true
    }

    /// The same for streams of one device.
    fn make_way_on(&mut self, context: &Arc<Context>, all: &[DeviceStream], needs_copies: bool) -> bool {
        let mut ways = context.ways.lock();
        for line in alive(&ways.lines) {
            if !self.clear(&mut ways, context, &Course::Line(line), all) {
                return false;
            }
        }
        // This rank's collectives need no copies. So if no stream for copies is found that these streams do not hold up, they may wait all
        // the same, unless another rank may need copies before it calls.
        let beside = match self.clear(&mut ways, context, &Course::Copies, all) {
            true => None,
            false => context.copies_way().map(|way| way.id),
        };
        if needs_copies && beside.is_some() {
            return false;
        }
        for waiting in all {
            enter(&mut ways.waiting, waiting);
            let mut standing = waiting.0.standing.lock();
            standing.soon += 1;
            // Also where it is `None`: what was found when the stream waited before is over with that wait.
            standing.beside = beside;
            ways.forget(context, &mut standing);
        }
        true
    }

    /// Sees to it that what runs on this course is held up by none of the streams that wait, nor by `more`: it stays where
    /// it is, or goes on with a spare stream. `false`: it may be held up.
    fn clear(
        &mut self,
        ways: &mut Ways,
        context: &Arc<Context>,
        course: &Course,
        more: &[DeviceStream],
    ) -> bool {
        let mut waits: Vec<_> = ways.waiting().into_iter().map(DeviceStream).collect();
        let (way, may_move) = match course {
            Course::New(line) | Course::Line(line) => {
                waits.retain(|waiting| concerns(waiting, line));
                (line.0.way(), line.0.may_move())
            }
            Course::Copies => {
                let Some(way) = context.copies_way() else { return true };
                if waits.iter().any(|waiting| waiting.0.standing.lock().beside == Some(way.id)) {
                    return false;
                }
                (way, true)
            }
        };
        // If this stream is held up already, it is not moved, and the answer is no: the spare stream would first have to wait for it, and
        // would hold up what shares the spare one's queue.
        let is_free = matches!(self.find(context, way, &[], &waits), Answer::Stays);
        if !is_free && !matches!(course, Course::New(_)) {
            return false;
        }
        let more = more.iter().filter(|waiting| match course {
            Course::New(line) | Course::Line(line) => concerns(waiting, line),
            Course::Copies => true,
        });
        waits.extend(more.cloned());
        let spare: &[Way] = if may_move { &ways.spare } else { &[] };
        let next = match self.find(context, way, spare, &waits) {
            Answer::Stays => return true,
            Answer::Unknown => return false,
            Answer::Moves(index) => ways.spare.remove(index),
        };
        match course.go_on_with(context, next) {
            // The stream that was left goes to the end of the list, to be tried last, as work may still be on it.
            Ok(left) => ways.spare.push(left),
            Err(error) => {
                tracing::warn!(device = context.ordinal, "work stays on its stream: {error}");
                ways.spare.push(next);
                return false;
            }
        }
        true
    }

    /// Which of `way` and `spare` is held up by none of `waits`: `way` if that is so of it, else one of `spare`.
    fn find(&mut self, context: &Arc<Context>, way: Way, spare: &[Way], waits: &[DeviceStream]) -> Answer {
        if is_apart(way, waits) {
            return Answer::Stays;
        }
        // `learn` gives up each word whose write a capture may have recorded, and by now none is left.
        if self.bells.is_empty() {
            return Answer::Unknown;
        }
        let asked: Vec<Way> = [way].into_iter().chain(spare.iter().copied()).take(self.bells.len()).collect();
        let known: Vec<bool> = asked.iter().map(|way| is_apart(*way, waits)).collect();
        let came = self.ask(context, &asked, waits, &known).unwrap_or_else(|error| {
            tracing::debug!("a device does not say whether streams hold up each other: {error}");
            known
        });
        for (way, _) in asked.iter().zip(&came).filter(|(_, came)| **came) {
            for waiting in waits {
                let mut standing = waiting.0.standing.lock();
                if !standing.apart.contains(&way.id) {
                    standing.apart.push(way.id);
                }
            }
        }
        match came.iter().position(|came| *came) {
            None => Answer::Unknown,
            Some(0) => Answer::Stays,
            Some(index) => Answer::Moves(index - 1),
        }
    }

    /// Which of `ways` do new work while all of `waits` wait. Returns as soon as `ways[0]` has answered; otherwise [`PATIENCE`] or longer after
    /// another one has, or after [`LOOK`] without any answer. `known`: which of `ways` are already known to go on.
    fn ask(
        &mut self,
        context: &Arc<Context>,
        ways: &[Way],
        waits: &[DeviceStream],
        known: &[bool],
    ) -> Result<Vec<bool>, Error> {
        self.turn = self.turn.wrapping_add(1);
        let (turn, gate) = (self.turn, &self.gate);
        let held = waits.iter().try_for_each(|waiting| gate.is_awaited_by(waiting, [BELL].into_iter(), turn));
        let asked = held.and_then(|()| {
            let mut asked = ways.iter().zip(&self.bells);
            asked
                .try_for_each(|(way, bell)| bell.put_on(&DeviceStream::of_context(context, *way), BELL, turn))
        });
        let start = Instant::now();
        let mut came = known.to_vec();
        let mut most = if came.contains(&true) { PATIENCE } else { LOOK };
        while asked.is_ok() && !came[0] && start.elapsed() < most {
            match start.elapsed() < SPIN {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(SPIN),
            }
            let before = came.contains(&true);
            for (came, bell) in came.iter_mut().zip(&self.bells) {
                *came |= bell.shows(BELL, turn);
            }
            if !before && came.contains(&true) {
                let now = start.elapsed();
                most = now + now.max(PATIENCE);
            }
        }
        self.gate.set(BELL, turn);
        asked.map(|()| came)
    }
}

impl DeviceStream {
    /// Makes the other streams that the engine needs on this device. To be called before any stream waits for a collective, as the driver may
    /// wait for all work on the device before it makes a stream. The engine does without streams that cannot be made.
    pub(crate) fn make_ahead(&self) {
        let context = &self.0.context;
        let mut ways = context.ways.lock();
        if std::mem::replace(&mut ways.made, true) {
            return;
        }
        let Ok(entered) = context.enter() else { return };
        context.make_streams(&entered);
        let spare = if is_one() { 0 } else { SPARE };
        let make = |_| Way::make(context, &entered, |_least, greatest| greatest).ok();
        ways.spare.extend((0..spare).map_while(make));
    }

    /// From now on this stream counts as waiting for work that may not be on a stream yet; [`waits_now`](Self::waits_now) says up to which point.
    pub(crate) fn will_wait(&self) {
        let mut ways = self.0.context.ways.lock();
        enter(&mut ways.waiting, self);
        self.0.standing.lock().soon += 1;
    }

    /// Called once for each time that [`Probe::make_way`] or [`will_wait`](Self::will_wait) has counted this stream as waiting, when it was made to
    /// wait or will not be: it counts as waiting until it has come to this point. If no point can be recorded, it goes on counting as waiting.
    pub(crate) fn waits_now(&self) {
        let until = self.point();
        let mut standing = self.0.standing.lock();
        if let Ok(until) = until {
            standing.soon = standing.soon.saturating_sub(1);
            standing.until = Some(until.0);
        }
    }

    /// Whether it waits for work that may not be on a stream yet.
    pub(crate) fn is_waiting(&self) -> bool {
        self.0.standing.lock().is_waiting()
    }
}
