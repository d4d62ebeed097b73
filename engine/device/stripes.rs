//! Operations on device memory, through pinned memory of the host.
//!
//! The input is copied to the host on the buffer's stream, a *stripe* at a time: a part of the buffers on which the operation
//! can be carried out by itself. The operation starts when the first stripe is there, works on the copy, and goes no further
//! than what has come. What it is done with is copied back, on a stream for copies that wait for nothing. When the last copy
//! is done, the operation is finished. So one stripe is on its way from the device, another between ranks, and a third back to
//! the device. No thread waits in between: the waiter's thread sees events reached, and starts what comes next.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use parking_lot::Mutex;

use super::chores::Busy;
use super::driver::is_of_the_end;
use super::place::DevicePlace;
use super::staging::Block;
use super::stream::{DeviceEvent, DeviceStream};
use super::waiter::{self, Finish, Outcome};
use crate::commands::Commands;
use crate::error::Error;
use crate::mem::{ALL, Event, Reach, Stripe};

const ALIGN: usize = 64;
const IN: &str = "copy to the host";
const BACK: &str = "copy to the device";

/// A buffer that is staged.
pub(crate) struct Item {
    pub(crate) place: DevicePlace,
    pub(crate) bytes: usize,
    /// The operation reads it, or may leave some of its values as they are.
    pub(crate) fill: bool,
    /// The operation writes it.
    pub(crate) back: bool,
}

/// Refuses `call` if `stream`, which the call names or a buffer is on, is being captured: work of an operation between ranks would go into a
/// graph, and the operation would never be over.
pub(crate) fn refused_in_capture(stream: &DeviceStream, call: &str) -> Result<(), Error> {
    stream.refuse_capture(
        call,
        "a stream of this call is being captured into a graph, and an operation between ranks cannot be: make the call before or after the \
         capture, or on other streams",
    )
}

/// Counts things that are under way (copies on one or more streams, or stripes), and has what is called when all have ended.
struct Together {
    left: usize,
    result: Result<(), Error>,
    then: Option<Finish>,
}

impl Together {
    fn new(left: usize, then: Option<Finish>) -> Together {
        Together { left, result: Ok(()), then }
    }

    /// Keeps the first error.
    fn came(&mut self, result: Result<(), Error>) {
        if self.result.is_ok() {
            self.result = result;
        }
    }

    /// One has ended. If it was the last: what is to be called, and the result to call it with.
    fn ended(&mut self, result: Result<(), Error>) -> Option<(Finish, Result<(), Error>)> {
        self.left -= 1;
        self.came(result);
        if self.left > 0 {
            return None;
        }
        Some((self.then.take()?, self.result.clone()))
    }
}

/// Calls `then` once each of the events, which are behind copies, is reached or cannot be reached any more. Holds the block until then.
fn after_all(events: Vec<DeviceEvent>, block: &Arc<Block>, doing: &'static str, then: Finish) {
    if events.is_empty() {
        return then(Ok(()));
    }
    let copies = Arc::new(Mutex::new(Together::new(events.len(), Some(then))));
    for event in events {
        let (copies, block) = (copies.clone(), block.clone());
        let ended = move |outcome: Outcome| {
            let result = match outcome {
                Outcome::Reached => Ok(()),
                Outcome::Over(error) => Err(error.doing(doing)),
                Outcome::Unknown(error) => {
                    // The device may still copy: the block is leaked, so that nobody uses it again.
                    std::mem::forget(block);
                    Err(error.doing(doing))
                }
            };
            let last = copies.lock().ended(result);
            if let Some((then, result)) = last {
                then(result);
            }
        };
        waiter::watch(event, Box::new(ended));
    }
}

/// The copies back.
struct Back {
    /// The first stripe whose copies back have not been started.
    next: usize,
    /// Counts the stripes on their way back, and one more for the operation itself until the copies of all stripes have been started.
    running: Together,
    /// Copies back may start: the streams of buffers that are only written have come past what they held at the call. If nobody can tell, or work
    /// there has failed, this is set as well, and `next` is past all stripes: no copy back is ever started.
    is_open: bool,
    /// If the operation was over before `is_open` was set: what is to be called when the last copies have been started.
    begun: Option<Begun>,
    /// How many commands are still to start copies, plus how many stripes have copies that could not be put in full and may not be over yet.
    settling: usize,
}

/// Stripes that have not come yet: their numbers, and the events behind their copies to the host.
type Rest = std::iter::Enumerate<std::vec::IntoIter<Vec<DeviceEvent>>>;

/// Called when nothing more will be put on a stream for an operation.
pub(crate) type Begun = Box<dyn FnOnce() + Send>;

/// An operation whose input is on its way to the host.
pub(crate) struct Staged {
    items: Vec<Item>,
    /// Where each item is in the block.
    offsets: Vec<usize>,
    block: Arc<Block>,
    stripes: Vec<Stripe>,
    /// By stripe: reached when all that the operation reads of it is there.
    ready: Vec<Event>,
    back: Mutex<Back>,
    commands: Arc<Commands>,
}

/// While this exists, a command may put copies to the device on a stream at any time.
struct Copying(Arc<Staged>);

impl Copying {
    fn new(staged: Arc<Staged>) -> Copying {
        staged.back.lock().settling += 1;
        Copying(staged)
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.0.back.lock().settling -= 1;
    }
}

impl Staged {
    /// Starts the copies to the host. `items` and `stripes` are not empty. The copies back are started by `commands`, which are the endpoint's.
    /// An error if a buffer's stream is being captured, if there is no pinned memory, or if a copy cannot be put on its stream.
    pub(crate) fn begin(
        items: Vec<Item>,
        stripes: Vec<Stripe>,
        commands: &Arc<Commands>,
    ) -> Result<Arc<Staged>, Error> {
        let (mut offsets, mut bytes) = (Vec::with_capacity(items.len()), 0usize);
        for item in &items {
            offsets.push(bytes);
            bytes = bytes.saturating_add(item.bytes.next_multiple_of(ALIGN));
        }
        let Some(first) = items.first() else {
            return Err(Error::system("stage an operation", "it has no device buffers (a bug)"));
        };
        for item in &items {
            refused_in_capture(&item.place.stream, IN)?;
        }
        let block = Arc::new(Block::new(&first.place.stream.0.context, bytes)?);
        let ready = stripes.iter().map(|_| Event::pending()).collect();
        let running = Together::new(1, None);
        let back = Mutex::new(Back { next: 0, running, is_open: false, begun: None, settling: 0 });
        let commands = commands.clone();
        let staged = Arc::new(Staged { items, offsets, block, stripes, ready, back, commands });
        let put = || -> Result<_, Error> {
            let fills: Vec<Vec<DeviceEvent>> =
                (0..staged.stripes.len()).map(|i| staged.fill(i)).collect::<Result<_, _>>()?;
            // Copies back go by another stream, so they start only when what the buffers' streams hold now is over.
            let only_written = staged.items.iter().filter(|item| item.back && !item.fill && item.bytes > 0);
            let outputs: Vec<DeviceEvent> =
                only_written.map(|item| item.place.stream.point()).collect::<Result<_, _>>()?;
            Ok((fills, outputs))
        };
        let (fills, outputs) = put().inspect_err(|_| staged.settle())?;
        staged.clone().watch(fills.into_iter().enumerate());
        let again = staged.clone();
        after_all(outputs, &staged.block, BACK, Box::new(move |result| again.open(result)));
        Ok(staged)
    }

    /// Has the waiter's thread wait for the events of these stripes, one stripe after another.
    fn watch(self: Arc<Self>, mut stripes: Rest) {
        // Stripes without copies are there at once. This is a loop and no recursion, as there may be thousands of them.
        let next = stripes.by_ref().find(|(stripe, events)| {
            if events.is_empty() {
                self.come(*stripe, Ok(()));
            }
            !events.is_empty()
        });
        let Some((stripe, events)) = next else { return };
        let staged = self.clone();
        let then: Finish = Box::new(move |result| {
            staged.come(stripe, result);
            staged.watch(stripes);
        });
        after_all(events, &self.block, IN, then);
    }

    /// A stripe is on the host; or, with an error, it will never be.
    fn come(&self, stripe: usize, result: Result<(), Error>) {
        let filled = self.items.iter().filter(|item| item.fill);
        let mut fates = filled.filter_map(|item| item.place.fate.as_ref());
        match result.and_then(|()| fates.try_for_each(|fate| fate.check())) {
            Ok(()) => self.ready[stripe].fire(true),
            Err(error) => self.ready[stripe].fail(error),
        }
    }

    /// The streams of buffers that are only written have come past what they held at the call; or, with an error, the driver has reported a failure.
    /// This thread may be the waiter's, so it makes no call of the driver: a stream that is full would block it.
    fn open(self: Arc<Self>, result: Result<(), Error>) {
        let begun = {
            let mut back = self.back.lock();
            back.is_open = true;
            if result.is_err() {
                back.next = self.stripes.len();
            }
            back.running.came(result);
            back.begun.take()
        };
        if let Some(begun) = begun {
            let commands = self.commands.clone();
            commands.put_always(move || self.end(begun));
            commands.issue();
        }
    }

    /// Puts the copies of a stripe to the host on the buffers' streams, and one event behind them on each of these streams.
    fn fill(&self, stripe: usize) -> Result<Vec<DeviceEvent>, Error> {
        let mut streams = Vec::<&DeviceStream>::new();
        let mut note = |stream| {
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        };
        for (i, range) in self.pieces(stripe, |item| item.fill) {
            let place = &self.items[i].place;
            let (from, to) = self.ends(i, &range);
            place.stream.0.context.call(IN, |cuda| {
                // SAFETY: both sides have this many bytes (`Buf` promises it, and the block is laid out so). The copy is in the
                // order of the buffer's stream. The block is held until the copy is done (`watch` and `after_all`, or `settle`).
                // The buffer is held as long, or is freed in the order of its stream.
                unsafe { cuda.memcpy_dtoh_async(to.cast(), from, range.len(), *place.stream.0.raw()) }
            })?;
            note(&place.stream);
        }
        streams.into_iter().map(DeviceStream::record).collect()
    }

    /// Those pieces of a stripe that are not empty, and belong to items for which `which` is true: the item's index, and the range of its bytes.
    fn pieces(
        &self,
        stripe: usize,
        which: fn(&Item) -> bool,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let pieces = self.stripes[stripe].pieces.iter();
        pieces.filter(move |(i, range)| which(&self.items[*i]) && !range.is_empty()).cloned()
    }

    /// Where this range of an item's bytes begins on the device, and on the host.
    fn ends(&self, item: usize, range: &Range<usize>) -> (u64, *mut u8) {
        let address = self.items[item].place.address + range.start as u64;
        (address, self.block.at(self.offsets[item] + range.start))
    }

    /// Where an item's bytes begin on the host.
    pub(crate) fn at(&self, item: usize) -> *mut u8 {
        self.block.at(self.offsets[item])
    }

    /// The host memory, to be held as long as the operation may touch it.
    pub(crate) fn memory(&self) -> Arc<dyn std::any::Any + Send + Sync> {
        self.block.clone()
    }

    /// Reached when the operation may start.
    pub(crate) fn ready(&self) -> Option<Event> {
        self.ready.first().cloned()
    }

    /// Whether the operation has several stripes.
    pub(crate) fn is_striped(&self) -> bool {
        self.stripes.len() > 1
    }

    /// How many stripes have come; `before`: how many were known to. If more are still to come, `waker` is woken when the next one does.
    ///
    /// # Errors
    /// The cause for which a stripe will never come.
    pub(crate) fn arrived(&self, before: usize, waker: &Waker) -> Result<usize, Error> {
        let mut arrived = before;
        while let Some(ready) = self.ready.get(arrived)
            && !ready.subscribe(waker)
        {
            if ready.is_failed() {
                return Err(ready.cause().unwrap_or_else(|| Error::system(IN, "it failed (a bug)")));
            }
            arrived += 1;
        }
        Ok(arrived)
    }

    /// How far the operation may go when so many stripes have come.
    pub(crate) fn reach(&self, arrived: usize) -> Reach {
        match arrived.checked_sub(1) {
            None => (0, 0),
            Some(last) => self.stripes.get(last).map_or(ALL, |stripe| stripe.reach),
        }
    }

    /// The operation is done with all before `reach`: if copies back may start, has a command start those of the stripes that end
    /// there or before. The operation is not over yet, and still owns its buffers.
    pub(crate) fn done(self: &Arc<Self>, reach: Reach) {
        let any = {
            let back = self.back.lock();
            back.is_open && self.stripes.get(back.next).is_some_and(|stripe| stripe.reach <= reach)
        };
        if any {
            let copying = Copying::new(self.clone());
            self.commands.put(move || {
                copying.0.start_back(reach);
                Ok(())
            });
        }
    }

    /// Starts the copies back of the stripes that end at `reach` or before, if copies back may start. Calls the driver.
    fn start_back(self: &Arc<Self>, reach: Reach) {
        loop {
            let stripe = {
                let mut back = self.back.lock();
                let next = back.next;
                if !back.is_open || self.stripes.get(next).is_none_or(|stripe| stripe.reach > reach) {
                    return;
                }
                back.next += 1;
                back.running.left += 1;
                next
            };
            let staged = self.clone();
            let ended: Finish = Box::new(move |result| staged.ended(result));
            let (result, streams) = self.put_back(stripe);
            match result {
                Ok(events) => after_all(events, &self.block, BACK, ended),
                Err(error) => self.clone().settle_back(streams, error, ended),
            }
        }
    }

    /// The operation is over on the host: starts the copies back that are left, now or when copies back may start. Calls `begun`
    /// when nothing more will be put on a stream for it, and `finish` when all is back.
    pub(crate) fn back(self: &Arc<Self>, begun: Begun, finish: Finish) {
        // An error is also logged, as nobody may be waiting for the operation any more.
        let finish: Finish = Box::new(|result| {
            if let Err(error) = &result
                && !is_of_the_end(error)
            {
                tracing::warn!("an operation on device memory: {error}");
            }
            finish(result);
        });
        {
            let mut back = self.back.lock();
            back.running.then = Some(finish);
            if !back.is_open {
                back.begun = Some(begun);
                return;
            }
        }
        self.end(begun);
    }

    fn end(self: &Arc<Self>, begun: Begun) {
        self.start_back(ALL);
        begun();
        self.ended(Ok(()));
    }

    /// Whether copies for which no buffer's stream waits may be on their way, or may be put on a stream at any time.
    pub(crate) fn is_settling(&self) -> bool {
        self.back.lock().settling > 0
    }

    fn ended(&self, result: Result<(), Error>) {
        let last = self.back.lock().running.ended(result);
        if let Some((then, result)) = last {
            then(result);
        }
    }

    /// Starts the copies of a stripe to the device. The buffers' streams wait for them, so that what is put there later comes
    /// after them, whatever becomes of the operation. Returns the events behind the copies, and these streams.
    fn put_back(&self, stripe: usize) -> (Result<Vec<DeviceEvent>, Error>, Vec<DeviceStream>) {
        let mut streams = Vec::<DeviceStream>::new();
        for (i, _) in self.pieces(stripe, |item| item.back) {
            let stream = &self.items[i].place.stream;
            if !streams.contains(stream) {
                if let Err(error) = refused_in_capture(stream, BACK) {
                    return (Err(error), Vec::new());
                }
                streams.push(stream.clone());
            }
        }
        let put = |stream: &DeviceStream| {
            let context = &stream.0.context;
            let event = context.within(BACK, |entered| {
                let copies = context.copies(entered)?;
                for (i, range) in self.pieces(stripe, |item| item.back) {
                    if self.items[i].place.stream != *stream {
                        continue;
                    }
                    let (to, from) = self.ends(i, &range);
                    // SAFETY: both sides have this many bytes, as in `fill`. The buffer's stream has come past what it held at
                    // the call (the events of its copies to the host say so, or `open`). It waits for this copy (below), or the
                    // buffer is not given back before the copy is over (`settle_back`). No step of the operation writes this
                    // part of the block any more (`done`, `back`). `after_all` or `settle_back` holds the block until the copy has ended.
                    unsafe {
                        context.cuda.memcpy_htod_async(to, from.cast_const().cast(), range.len(), *copies)
                    }?;
                }
                context.mark(entered, *copies)
            });
            let event = DeviceEvent::of(context, event?);
            stream.wait_event(&event)?;
            Ok(event)
        };
        (streams.iter().map(put).collect(), streams)
    }

    /// A call of the driver failed: there may be copies back for which the buffers' streams do not wait. The streams for copies
    /// hold nothing that waits, so they end shortly. Another thread waits for that; no buffer is given back before.
    fn settle_back(self: Arc<Self>, streams: Vec<DeviceStream>, error: Error, ended: Finish) {
        self.back.lock().settling += 1;
        let busy = Busy::new();
        let wait = move || {
            // Waits for all of them, even if one fails.
            let over = |stream: &&DeviceStream| stream.0.context.synchronize_copies().is_ok();
            if streams.iter().filter(over).count() < streams.len() {
                // The device has failed: nothing runs there any more that could use the buffers. The block is leaked, so that
                // nobody uses it again.
                std::mem::forget(self.block.clone());
            }
            self.back.lock().settling -= 1;
            ended(Err(error));
            drop((self, streams));
            drop(busy);
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-settle".into()).spawn(wait) {
            tracing::warn!("an operation on device memory does not end: {error}");
        }
    }

    /// A call of the driver failed: copies may be on the buffers' streams. Another thread waits until these streams have done
    /// what they hold, and holds the block until then; or for good, if nobody can tell.
    fn settle(&self) {
        let block = self.block.clone();
        let streams: Vec<DeviceStream> = self.items.iter().map(|item| item.place.stream.clone()).collect();
        let (held, busy) = (ManuallyDrop::new(block), Busy::new());
        let wait = move || {
            if streams.iter().all(|stream| stream.synchronize().is_ok()) {
                drop(ManuallyDrop::into_inner(held));
            }
            drop(streams);
            drop(busy);
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-settle".into()).spawn(wait) {
            tracing::warn!("pinned memory is lost: {error}");
        }
    }
}
