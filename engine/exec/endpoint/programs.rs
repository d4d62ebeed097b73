//! The programs of a communicator: each is made once.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::Error;
use crate::plan::Program;
use crate::types::{Map, Rank};

/// What a program is made for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProgramKey {
    /// The collective, with [`VARIED`](crate::types::VARIED).
    pub(crate) kind: u8,
    pub(crate) algo: u8,
    pub(crate) root: Rank,
    pub(crate) in_place: bool,
}

/// The programs made so far.
#[derive(Default)]
pub(crate) struct Programs(Mutex<Known>);

/// Most calls are like the one before.
#[derive(Default)]
struct Known {
    last: Option<(ProgramKey, Arc<Program>)>,
    all: Map<ProgramKey, Arc<Program>>,
}

impl Programs {
    /// The program for a key: made once.
    pub(crate) fn get(
        &self,
        key: ProgramKey,
        make: impl FnOnce() -> Result<Program, Error>,
    ) -> Result<Arc<Program>, Error> {
        let mut known = self.0.lock();
        if let Some((last, program)) = &known.last
            && *last == key
        {
            return Ok(program.clone());
        }
        let program = match known.all.get(&key) {
            Some(program) => program.clone(),
            None => {
                let program = Arc::new(make()?);
                known.all.insert(key, program.clone());
                program
            }
        };
        known.last = Some((key, program.clone()));
        Ok(program)
    }
}
