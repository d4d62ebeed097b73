//! [`Starts`]: for each operation that a rank has begun lately, which word says that the operation's inputs are there.

use parking_lot::Mutex;

use crate::device::signal::Word;

/// A rank remembers the [`Start`]s of this many operations, the last ones: of more than may be on its stream at a time
/// (`exec/endpoint/ending.rs`).
const STARTS: usize = 2048;

/// What a word that counts operations shows from operation `number` on. These values wrap, and are compared modulo 2^32.
pub(crate) fn value(number: u64) -> u32 {
    (number as u32).wrapping_add(1)
}

/// What says that the inputs of an operation are there: one of the rank's words, once it shows this value or a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    /// [`Word::Input`], which the caller's stream writes.
    Input(u32),
    /// [`Word::Begun`], which the rank's stream writes behind its waits for the caller's streams.
    Begun(u32),
}

impl Start {
    /// For operation `number`, if it is the rank's own stream that says that the inputs are there.
    pub(crate) fn of(number: u64) -> Start {
        Start::Begun(value(number))
    }

    /// The word, and the value that it shows once the inputs are there.
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

    /// `None`: the operation is not begun yet, or [`STARTS`] others have been begun since.
    pub(super) fn get(&self, number: u64) -> Option<Start> {
        let (found, start) = self.0.lock()[number as usize % STARTS];
        (found == number).then_some(start)
    }
}
