//! [`Starts`]: what says that the inputs of a rank's operations are there.

use parking_lot::Mutex;

use crate::device::signal::Word;

/// A rank remembers the [`Start`]s of so many operations: of more than fit on its stream at a time.
const STARTS: usize = 2048;

/// What a word that counts operations shows from this operation on. These numbers wrap, and are compared as numbers on a circle.
pub(crate) fn value(number: u64) -> u32 {
    (number as u32).wrapping_add(1)
}

/// What says that the inputs of an operation are there: one of the rank's words, and what it shows then.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    /// [`Word::Input`], which the caller's stream writes.
    Input(u32),
    /// [`Word::Begun`], which the rank's stream writes behind its waits for the caller's streams.
    Begun(u32),
}

impl Start {
    /// For an operation of which the rank's own stream says that the inputs are there.
    pub(crate) fn of(number: u64) -> Start {
        Start::Begun(value(number))
    }

    /// The word, and what it shows then.
    pub(super) fn word(self) -> (Word, u32) {
        match self {
            Start::Input(value) => (Word::Input, value),
            Start::Begun(value) => (Word::Begun, value),
        }
    }
}

/// The [`Start`]s of the [`STARTS`] operations that were begun last, each with the operation's number.
pub(super) struct Starts(Mutex<Box<[(u64, Start)]>>);

impl Starts {
    pub(super) fn new() -> Starts {
        Starts(Mutex::new(vec![(u64::MAX, Start::Begun(0)); STARTS].into()))
    }

    pub(super) fn set(&self, number: u64, start: Start) {
        self.0.lock()[number as usize % STARTS] = (number, start);
    }

    /// `None`: the operation is not begun yet, or many have been begun since.
    pub(super) fn get(&self, number: u64) -> Option<Start> {
        let (found, start) = self.0.lock()[number as usize % STARTS];
        (found == number).then_some(start)
    }
}
