//! Log files (`--log-dir`): one for each rank, with what the rank writes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::complain;

/// A rank's file, for its stdout and its stderr.
#[derive(Clone)]
pub(super) struct Log(Arc<Mutex<Open>>);

struct Open {
    rank: usize,
    path: PathBuf,
    /// `None` after a write has failed.
    file: Option<File>,
}

impl Log {
    /// Opens `DIR/rank-N.log`, and makes the directory. A job that was started anew appends to the file that the rank wrote before the
    /// restart: first a line that says so.
    ///
    /// # Errors
    /// The system's, with the path.
    pub(super) fn open(dir: &Path, rank: usize, restart: u32) -> io::Result<Log> {
        let path = dir.join(format!("rank-{rank}.log"));
        let anew = restart == 0;
        let open = || {
            fs::create_dir_all(dir)?;
            let mut file =
                OpenOptions::new().create(true).write(true).truncate(anew).append(!anew).open(&path)?;
            if !anew {
                writeln!(file, "allstream run: restart {restart}")?;
            }
            Ok(file)
        };
        let file = open().map_err(|error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("cannot write the log {} of rank {rank}: {error}", path.display()),
            )
        })?;
        Ok(Log(Arc::new(Mutex::new(Open { rank, path, file: Some(file) }))))
    }

    /// Writes what the rank has written. After a failed write, the user is told once, nothing more is written, and the rank works on.
    pub(super) fn write(&self, bytes: &[u8]) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Err(error)) = open.file.as_mut().map(|file| file.write_all(bytes)) else { return };
        open.file = None;
        let (path, rank) = (open.path.display(), open.rank);
        complain(&format!("the log {path} of rank {rank} ends here: {error}"));
    }
}
