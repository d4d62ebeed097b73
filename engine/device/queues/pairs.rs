//! Finds out which of the callers' streams share a hardware queue. If two do, one that waits for a collective holds up the other, on which another
//! rank may make its input.
//!
//! Callers' streams cannot be moved to another queue. So the device is only asked about each pair, until an answer is known, in the same way as
//! about streams of ours (`queues.rs`): one stream waits for a word that the host writes, and the others are each told to write a word. A stream
//! whose word comes only when the host has let the first stream go on counts as held up by that stream. If a stream's word does not come soon
//! after that either, the stream has other work to do, and nothing is known of it.

use std::sync::Arc;
use std::time::Instant;

use super::{ANSWERS, BELL, LOOK, Probe, SPIN, alive, enter, is_one};
use crate::device::context::Context;
use crate::device::stream::DeviceStream;
use crate::error::Error;

/// What is known of two callers' streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pair {
    /// Each goes on while the other waits.
    Apart,
    /// They share a hardware queue, as far as was seen, or are the same stream of the driver.
    Together,
    /// Nobody has asked the device yet, or it has not answered.
    Unknown,
}

fn add(list: &mut Vec<u64>, id: u64) {
    if list.contains(&id) {
        return;
    }
    if list.len() >= ANSWERS {
        list.clear();
    }
    list.push(id);
}

impl DeviceStream {
    /// What is known of this stream and `other`. Streams of two devices are apart.
    pub(crate) fn pair(&self, other: &DeviceStream) -> Pair {
        let (ours, theirs) = (self.0.way(), other.0.way());
        if !self.shares_device(other) {
            return Pair::Apart;
        }
        if ours.raw == theirs.raw {
            return Pair::Together;
        }
        let standing = self.0.standing.lock();
        match (standing.apart.contains(&theirs.id), standing.together.contains(&theirs.id)) {
            (true, _) => Pair::Apart,
            (false, true) => Pair::Together,
            (false, false) => Pair::Unknown,
        }
    }

    pub(crate) fn shares_device(&self, other: &DeviceStream) -> bool {
        Arc::ptr_eq(&self.0.context, &other.0.context)
    }

    /// Notes that this stream is a caller's, so that a rank may make its input there.
    pub(in crate::device) fn made_a_callers(self) -> DeviceStream {
        enter(&mut self.0.context.callers.lock(), &self);
        self
    }

    /// All callers' streams of this stream's device.
    pub(crate) fn callers_beside(&self) -> Vec<DeviceStream> {
        alive(&self.0.context.callers.lock())
    }
}

impl Probe {
    /// Finds out which of `others` go on while `waiting` waits, unless `waiting` waits already. All are callers' streams of one device, and
    /// `waiting` is not captured into a graph meanwhile.
    pub(crate) fn learn(&mut self, waiting: &DeviceStream, others: &[DeviceStream]) {
        let context: Arc<Context> = waiting.0.context.clone();
        if is_one() || waiting.is_waiting() || self.bells.is_empty() {
            return;
        }
        // One question at a time: a stream that waits because of one question would seem to be held up in another.
        let _ways = context.ways.lock();
        for others in others.chunks(self.bells.len()) {
            match self.question(waiting, others) {
                Ok(answers) => {
                    note(waiting, others, &answers, Pair::Apart);
                    self.confirm(waiting, others, &answers);
                }
                Err(error) => {
                    tracing::debug!("a device does not say whether streams hold up each other: {error}");
                }
            }
            if self.bells.len() < others.len() {
                return;
            }
        }
    }

    /// Asks once more about the streams whose words came late, and notes what is the same both times: on a busy host any answer may be late.
    fn confirm(&mut self, waiting: &DeviceStream, others: &[DeviceStream], answers: &[Pair]) {
        let late = others.iter().zip(answers).filter(|(_, answer)| **answer == Pair::Together);
        let late: Vec<DeviceStream> = late.map(|(stream, _)| stream.clone()).collect();
        if late.is_empty() || self.bells.len() < late.len() {
            return;
        }
        if let Ok(answers) = self.question(waiting, &late) {
            note(waiting, &late, &answers, Pair::Apart);
            note(waiting, &late, &answers, Pair::Together);
        }
    }

    fn question(&mut self, waiting: &DeviceStream, others: &[DeviceStream]) -> Result<Vec<Pair>, Error> {
        self.turn = self.turn.wrapping_add(1);
        let turn = self.turn;
        let free = |stream: &DeviceStream| stream.refuse_capture("join", "it is captured").is_ok();
        // A stream that another thread is capturing is not asked: the write would become part of the graph.
        let mut asked: Vec<bool> = others.iter().map(free).collect();
        let held = self.gate.is_awaited_by(waiting, [BELL].into_iter(), turn).and_then(|()| {
            let mut all = others.iter().zip(&self.bells).zip(&asked).filter(|(_, asked)| **asked);
            all.try_for_each(|((other, bell), _)| bell.put_on(other, BELL, turn))
        });
        let came = |asked: &[bool]| -> Vec<bool> {
            let start = Instant::now();
            loop {
                let rang = |(bell, asked): (&crate::device::signal::DeviceSignal, &bool)| {
                    *asked && bell.shows(BELL, turn)
                };
                let came: Vec<bool> = self.bells.iter().zip(asked).map(rang).collect();
                if came == asked || start.elapsed() > LOOK || held.is_err() {
                    return came;
                }
                match start.elapsed() < SPIN {
                    true => std::hint::spin_loop(),
                    false => std::thread::sleep(SPIN),
                }
            }
        };
        let meanwhile = came(&asked);
        self.gate.set(BELL, turn);
        let behind = came(&asked);
        let answer = |(meanwhile, behind): (&bool, &bool)| match (meanwhile, behind) {
            (true, _) => Pair::Apart,
            (false, true) => Pair::Together,
            (false, false) => Pair::Unknown,
        };
        let answers = meanwhile.iter().zip(&behind).map(answer).collect();
        // If a capture of a stream began meanwhile, the graph may write the word whenever it runs: so the word is leaked, and not used again.
        for at in (0..asked.len()).rev() {
            if std::mem::take(&mut asked[at]) && !free(&others[at]) {
                std::mem::forget(self.bells.remove(at));
            }
        }
        held.map(|()| answers)
    }
}

/// Notes, for both streams, each answer that is `what`, as it holds in both directions. `Apart` is certain. `Together` is not: a stream whose word
/// came late may only have been slow, so nothing is concluded from it about further streams.
fn note(waiting: &DeviceStream, others: &[DeviceStream], answers: &[Pair], what: Pair) {
    for (other, _) in others.iter().zip(answers).filter(|(_, answer)| **answer == what) {
        for (stream, of) in [(waiting, other), (other, waiting)] {
            let (mut standing, id) = (stream.0.standing.lock(), of.0.way().id);
            match what {
                Pair::Apart => add(&mut standing.apart, id),
                Pair::Together => add(&mut standing.together, id),
                Pair::Unknown => {}
            }
        }
    }
}
