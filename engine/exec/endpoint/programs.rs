//! The programs of a communicator: each is made once.

use std::collections::HashMap;
use std::sync::Arc;

use super::Endpoint;
use crate::error::Error;
use crate::plan::Program;
use crate::types::Rank;

/// Kind (with [`VARIED`](crate::types::VARIED)), algorithm, root, in place.
pub(crate) type ProgramKey = (u8, u8, Rank, bool);

/// The programs made so far. Most calls are like the one before.
#[derive(Default)]
pub(super) struct Programs {
    last: Option<(ProgramKey, Arc<Program>)>,
    all: HashMap<ProgramKey, Arc<Program>>,
}

impl Endpoint {
    /// The program for a shape: made once.
    pub(crate) fn program(
        &self,
        key: ProgramKey,
        make: impl FnOnce() -> Result<Program, Error>,
    ) -> Result<Arc<Program>, Error> {
        let mut programs = self.programs.lock();
        if let Some((last, program)) = &programs.last
            && *last == key
        {
            return Ok(program.clone());
        }
        let program = match programs.all.get(&key) {
            Some(program) => program.clone(),
            None => {
                let program = Arc::new(make()?);
                programs.all.insert(key, program.clone());
                program
            }
        };
        programs.last = Some((key, program.clone()));
        Ok(program)
    }
}
