//! Ranks of one host meet without being told where: rank 0 leaves a note in a directory that only this user can enter.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::address::Address;
use super::addresses::lengthen_queue;
use super::env::{Listener, Rendezvous};
use super::handshake::Token;
use super::host;
use crate::error::Error;

/// How often a rank looks whether the note is there.
const LOOK: Duration = Duration::from_millis(20);
/// The most bytes of a note.
const LONGEST: u64 = 1 << 10;

#[derive(Serialize, Deserialize)]
struct Note {
    port: u16,
    secret: String,
}

/// A note that was left. Dropping this removes it.
pub(super) struct Left(PathBuf);

impl Drop for Left {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Fills in where the ranks meet, and the secret. Rank 0 also gets a [`Left`], which it keeps until it is connected to all others or has failed.
pub(super) async fn settle(
    mut rendezvous: Rendezvous,
    path: &Path,
) -> Result<(Rendezvous, Option<Left>), Error> {
    let begun = Instant::now();
    let (note, left) = if rendezvous.rank == 0 {
        let (note, left, listener) = leave(path).map_err(|problem| rendezvous.error(problem))?;
        rendezvous.listener = Some(Listener::Given(Arc::new(listener)));
        (note, Some(left))
    } else {
        (await_note(&rendezvous, path, begun + rendezvous.timeout).await?, None)
    };
    rendezvous.address = Some(Address { host: Ipv4Addr::LOCALHOST.to_string(), port: note.port });
    rendezvous.token = Some(Token::new(note.secret.as_bytes()));
    rendezvous.timeout = rendezvous.timeout.saturating_sub(begun.elapsed());
    Ok((rendezvous, left))
}

/// Opens rank 0's listener, and leaves a note that says where it is.
fn leave(path: &Path) -> Result<(Note, Left, TcpListener), String> {
    let shown = path.display();
    let failed = |e: io::Error| format!("leaving a note for the other ranks at {shown}: {e}");
    check_dir(path)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| lengthen_queue(&listener).map(|()| listener))
        .map_err(|e| format!("listening at 127.0.0.1: {e}"))?;
    let port = listener.local_addr().map_err(|e| format!("listening at 127.0.0.1: {e}"))?.port();
    let bytes = host::random::<32>().map_err(|e| e.to_string())?;
    let note = Note { port, secret: bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    // Written under another name first, so that whoever looks finds the whole note or none.
    let draft = path.with_extension(format!("draft{}", std::process::id()));
    let text = serde_json::to_vec(&note).map_err(|e| failed(e.into()))?;
    let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft);
    written.and_then(|mut file| file.write_all(&text)).and_then(|()| fs::rename(&draft, path)).map_err(
        |e| {
            let _ = fs::remove_file(&draft);
            failed(e)
        },
    )?;
    Ok((note, Left(path.into()), listener))
}

/// Waits for rank 0's note.
async fn await_note(rendezvous: &Rendezvous, path: &Path, deadline: Instant) -> Result<Note, Error> {
    loop {
        match read(path) {
            Ok(note) => return Ok(note),
            Err(None) if Instant::now() + LOOK < deadline => tokio::time::sleep(LOOK).await,
            Err(None) => {
                return Err(rendezvous.error(format!(
                    "rank 0 did not say within {:?} where it listens, by a note at that path. Did it start, and does it \
                     run on this host?",
                    rendezvous.timeout
                )));
            }
            Err(Some(problem)) => return Err(rendezvous.error(problem)),
        }
    }
}

/// The note; `None`: there is none yet.
fn read(path: &Path) -> Result<Note, Option<String>> {
    let failed =
        |e: &dyn std::fmt::Display| Some(format!("reading rank 0's note at {}: {e}", path.display()));
    check_dir(path).map_err(Some)?;
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(None),
        Err(e) => return Err(failed(&e)),
        Ok(found) if !found.is_file() || found.len() > LONGEST => return Err(failed(&"it is no note")),
        Ok(_) => {}
    }
    match fs::read(path) {
        // The note was removed since the call above. Rank 0 of this world does that only when this rank, too, is connected to it, or when it has
        // failed: so most likely the note was another world's.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(None),
        Err(e) => Err(failed(&e)),
        Ok(text) => serde_json::from_slice(&text).map_err(|e| failed(&e)),
    }
}

/// Only this user may enter the directory: whoever could write there could pose as rank 0.
fn check_dir(path: &Path) -> Result<(), String> {
    let dir = path.parent().unwrap_or(path);
    let found = fs::metadata(dir).map_err(|e| {
        format!(
            "the launcher's directory {} (PMIX_SERVER_TMPDIR): {e}; set MASTER_ADDR and MASTER_PORT instead",
            dir.display()
        )
    })?;
    if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
        return Err(format!(
            "the launcher's directory {} (PMIX_SERVER_TMPDIR) is open to others, so ranks cannot trust what lies there; \
             set MASTER_ADDR, MASTER_PORT and ALLSTREAM_TOKEN instead",
            dir.display()
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "tests/note.rs"]
mod tests;
