//! How two processes prove to each other that they know the job's secret, before either acts on what the other sends.
//!
//! ```text
//! dialer   -> preamble: "ALLS", byte order mark, version, 32 random bytes
//! acceptor -> preamble
//! dialer   -> length, purpose (JSON, at most 64 KiB), HMAC-SHA256 of (dialer, version, both nonces, purpose)
//! acceptor -> verdict, length, reason, HMAC-SHA256 of (acceptor, version, both nonces, purpose, verdict, reason)
//! ```
//! The role is part of what is signed, so neither side can be made to sign for the other; the nonces are
//! fresh, so nothing can be replayed. What follows on the connection is neither signed nor encrypted: the
//! handshake keeps out strangers and ranks of other jobs, but does not protect from whoever controls the network.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout_at};

use super::message::DataHello;
use super::registration::Registration;
use crate::types::Rank;

/// The version of all that travels between ranks: raised with each change of it.
pub(crate) const VERSION: u16 = 8;
/// How long an accepted connection may take to prove itself.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);
/// The most bytes of a purpose, or of the reason for a refusal.
pub(crate) const MAX_HELLO: usize = 64 << 10;

const MAGIC: [u8; 4] = *b"ALLS";
const ORDER: u16 = 0x0102;
const PREAMBLE: usize = 40;
const PROOF: usize = 32;

/// The job's secret. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(Arc<[u8]>);

impl Token {
    pub(crate) fn new(secret: &[u8]) -> Token {
        Token(secret.into())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Token(empty)" } else { "Token(hidden)" })
    }
}

/// Why a connection is made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// To enter a world that forms.
    Register(Box<Registration>),
    /// To be the control connection between two ranks. Addresses may lead elsewhere than to the rank that gave them (two hosts
    /// may have the same private address), so whoever answers must be `to`.
    Control { world: [u8; 16], from: Rank, to: Rank },
    /// To exchange descriptors on one host.
    Local { world: [u8; 16], from: Rank },
    /// To carry the data of a communicator to rank `to`.
    Data { world: [u8; 16], to: Rank, hello: DataHello },
    /// To say that a rank has given up connecting to the others, and why: `first` is the rank that gave up first.
    GaveUp { world: [u8; 16], from: Rank, to: Rank, first: Rank, why: String },
}

impl Purpose {
    /// Who wanted what, for messages to people.
    pub(super) fn shown(&self) -> String {
        match self {
            Purpose::Register(registration) => format!("by rank {} to register", registration.rank),
            Purpose::Control { from, .. } => format!("by rank {from} to connect the world"),
            Purpose::Local { from, .. } => format!("by rank {from} to exchange descriptors"),
            Purpose::Data { hello, .. } => format!("by rank {} for data", hello.from),
            Purpose::GaveUp { from, .. } => format!("by rank {from}, which has given up connecting"),
        }
    }
}

/// Why a handshake failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Refusal {
    /// The connection ended, or the deadline passed.
    Broken(String),
    /// The other end is no rank of this job, or one of another version.
    Stranger(String),
    /// The acceptor said no.
    Denied(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Refusal::Broken(why) | Refusal::Stranger(why) | Refusal::Denied(why)) = self;
        f.write_str(why)
    }
}

impl Refusal {
    fn broken(doing: &str) -> impl Fn(std::io::Error) -> Refusal {
        move |e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                Refusal::Broken(format!("the connection ended while {doing}"))
            }
            _ => Refusal::Broken(format!("{doing}: {e}")),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Dialer,
    Acceptor,
}

/// Both sides' random bytes, the dialer's first.
type Nonces = [[u8; 32]; 2];

fn preamble(nonce: &[u8; 32]) -> [u8; PREAMBLE] {
    let mut bytes = [0; PREAMBLE];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&ORDER.to_ne_bytes());
    bytes[6..8].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..].copy_from_slice(nonce);
    bytes
}

/// The nonce in a peer's first bytes, or why this process cannot talk to that peer.
pub(crate) fn parse_preamble(bytes: &[u8]) -> Result<[u8; 32], String> {
    let Ok(bytes) = <&[u8; PREAMBLE]>::try_from(bytes) else {
        return Err(format!("a preamble has {PREAMBLE} bytes, found {}", bytes.len()));
    };
    if bytes[..4] != MAGIC {
        return Err("it does not speak allstream (wrong first bytes): is the address right?".into());
    }
    let version = u16::from_le_bytes([bytes[6], bytes[7]]);
    if version != VERSION {
        return Err(format!(
            "it speaks version {version} of the protocol, this process version {VERSION}; use one allstream"
        ));
    }
    let order = u16::from_ne_bytes([bytes[4], bytes[5]]);
    if order != ORDER {
        let found = if order == ORDER.swap_bytes() { "the other byte order" } else { "no known byte order" };
        return Err(format!(
            "its machine has {found}; all ranks of a world must have the same (here: {})",
            endian()
        ));
    }
    let mut nonce = [0; 32];
    nonce.copy_from_slice(&bytes[8..]);
    Ok(nonce)
}

const fn endian() -> &'static str {
    if cfg!(target_endian = "little") { "little-endian" } else { "big-endian" }
}

/// The length of what follows, checked before anything is allocated for it.
pub(crate) fn parse_length(bytes: [u8; 4]) -> Result<usize, String> {
    let len = u32::from_le_bytes(bytes) as usize;
    if len > MAX_HELLO {
        return Err(format!("it announced {len} bytes where at most {MAX_HELLO} are allowed"));
    }
    Ok(len)
}

/// What a dialer wants, from bytes whose proof was checked.
pub(crate) fn parse_purpose(bytes: &[u8]) -> Result<Purpose, String> {
    serde_json::from_slice(bytes).map_err(|e| format!("its purpose does not parse: {e}"))
}

fn mac(token: &Token, role: Role, nonces: &Nonces, parts: &[&[u8]]) -> Option<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&token.0).ok()?;
    mac.update(match role {
        Role::Dialer => b"allstream handshake: dialer\0\0",
        Role::Acceptor => b"allstream handshake: acceptor",
    });
    mac.update(&VERSION.to_le_bytes());
    mac.update(&nonces[0]);
    mac.update(&nonces[1]);
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    Some(mac)
}

fn prove(token: &Token, role: Role, nonces: &Nonces, parts: &[&[u8]]) -> [u8; PROOF] {
    // HMAC takes keys of any length, so `mac` never returns `None`. If it did, a proof of zeros would prove nothing.
    mac(token, role, nonces, parts).map_or([0; PROOF], |m| m.finalize().into_bytes().into())
}

/// Compares in constant time.
fn proven(token: &Token, role: Role, nonces: &Nonces, parts: &[&[u8]], proof: &[u8]) -> bool {
    mac(token, role, nonces, parts).is_some_and(|m| m.verify_slice(proof).is_ok())
}

fn nonce() -> Result<[u8; 32], Refusal> {
    super::host::random().map_err(|e| Refusal::Broken(e.to_string()))
}

const ACCEPTED: u8 = 0;
/// Sent without a proof: a dialer that does not know the secret learns nothing else.
const UNKNOWN: u8 = 1;
const DENIED: u8 = 2;

/// The dialer's side: proves that it knows the secret, says what the connection is for, and learns whether it is let in.
pub(crate) async fn dial<S>(
    stream: &mut S,
    token: &Token,
    purpose: &Purpose,
    deadline: Instant,
) -> Result<(), Refusal>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let talk = async {
        let ours = nonce()?;
        let doing = Refusal::broken("sending the first bytes of the handshake");
        stream.write_all(&preamble(&ours)).await.map_err(doing)?;
        let mut bytes = [0; PREAMBLE];
        stream
            .read_exact(&mut bytes)
            .await
            .map_err(Refusal::broken("waiting for the answer to the handshake"))?;
        let nonces = [ours, parse_preamble(&bytes).map_err(Refusal::Stranger)?];

        let hello = serde_json::to_vec(purpose).map_err(|e| Refusal::Broken(e.to_string()))?;
        if hello.len() > MAX_HELLO {
            return Err(Refusal::Broken(format!(
                "the purpose takes {} bytes, more than {MAX_HELLO}",
                hello.len()
            )));
        }
        let mut out = (hello.len() as u32).to_le_bytes().to_vec();
        out.extend_from_slice(&hello);
        out.extend_from_slice(&prove(token, Role::Dialer, &nonces, &[&hello]));
        stream.write_all(&out).await.map_err(Refusal::broken("sending the proof"))?;

        let waiting = || Refusal::broken("waiting for the verdict");
        let verdict = stream.read_u8().await.map_err(waiting())?;
        let reason = read_bounded(stream).await?;
        if verdict == UNKNOWN {
            return Err(Refusal::Denied(clean(&reason)));
        }
        let mut proof = [0; PROOF];
        stream.read_exact(&mut proof).await.map_err(waiting())?;
        if !proven(token, Role::Acceptor, &nonces, &[&hello, &[verdict], &reason], &proof) {
            let why = "it could not prove that it knows the job's secret (ALLSTREAM_TOKEN must be the same on all ranks)";
            return Err(Refusal::Stranger(why.into()));
        }
        if verdict == ACCEPTED { Ok(()) } else { Err(Refusal::Denied(clean(&reason))) }
    };
    timeout_at(deadline, talk)
        .await
        .unwrap_or_else(|_| Err(Refusal::Broken("no answer to the handshake in time".into())))
}

/// How far an accepted connection has come with proving itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Stage {
    /// It has said nothing.
    Silent,
    /// Its first bytes were those of a rank.
    Speaking,
    /// It knows the secret.
    Proven,
}

/// The [`Stage`] of a handshake, which another task reads meanwhile.
#[derive(Default)]
pub(crate) struct Progress(AtomicU8);

impl Progress {
    pub(crate) fn stage(&self) -> Stage {
        match self.0.load(Ordering::Acquire) {
            0 => Stage::Silent,
            1 => Stage::Speaking,
            _ => Stage::Proven,
        }
    }

    fn reach(&self, stage: Stage) {
        self.0.store(stage as u8, Ordering::Release);
    }
}

/// The acceptor's side: lets the dialer prove itself, asks `admit` whether its purpose is welcome, and tells it the answer.
pub(crate) async fn accept<S, T, F>(
    stream: &mut S,
    token: &Token,
    deadline: Instant,
    progress: &Progress,
    admit: F,
) -> Result<T, Refusal>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: FnOnce(Purpose) -> Result<T, String>,
{
    let talk = async {
        let mut bytes = [0; PREAMBLE];
        stream
            .read_exact(&mut bytes)
            .await
            .map_err(Refusal::broken("waiting for the first bytes of the handshake"))?;
        let theirs = parse_preamble(&bytes);
        let ours = nonce()?;
        if theirs.is_ok() || bytes[..4] == MAGIC {
            // A rank of another version or byte order is answered, too, so that it can say what is wrong.
            let doing = Refusal::broken("answering the handshake");
            stream.write_all(&preamble(&ours)).await.map_err(doing)?;
        }
        let nonces = [theirs.map_err(Refusal::Stranger)?, ours];
        progress.reach(Stage::Speaking);

        let hello = read_bounded(stream).await?;
        let mut proof = [0; PROOF];
        stream.read_exact(&mut proof).await.map_err(Refusal::broken("waiting for the proof"))?;
        if !proven(token, Role::Dialer, &nonces, &[&hello], &proof) {
            let why = "the secret does not match (ALLSTREAM_TOKEN must be the same on all ranks)";
            write_verdict(stream, UNKNOWN, why, None).await?;
            return Err(Refusal::Stranger("it could not prove that it knows the job's secret".into()));
        }
        progress.reach(Stage::Proven);
        let answer = parse_purpose(&hello).and_then(admit);
        let (verdict, reason) = match &answer {
            Ok(_) => (ACCEPTED, ""),
            Err(why) => (DENIED, why.as_str()),
        };
        let end = (0..=reason.len().min(MAX_HELLO)).rev().find(|i| reason.is_char_boundary(*i)).unwrap_or(0);
        let reason = &reason[..end];
        let proof = prove(token, Role::Acceptor, &nonces, &[&hello, &[verdict], reason.as_bytes()]);
        write_verdict(stream, verdict, reason, Some(proof)).await?;
        answer.map_err(Refusal::Denied)
    };
    timeout_at(deadline, talk)
        .await
        .unwrap_or_else(|_| Err(Refusal::Broken("it did not complete the handshake in time".into())))
}

async fn write_verdict<S>(
    stream: &mut S,
    verdict: u8,
    reason: &str,
    proof: Option<[u8; PROOF]>,
) -> Result<(), Refusal>
where
    S: AsyncWrite + Unpin,
{
    let mut out = vec![verdict];
    out.extend_from_slice(&(reason.len() as u32).to_le_bytes());
    out.extend_from_slice(reason.as_bytes());
    out.extend_from_slice(proof.as_ref().map_or(&[], |p| &p[..]));
    stream.write_all(&out).await.map_err(Refusal::broken("sending the verdict"))
}

async fn read_bounded<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Vec<u8>, Refusal> {
    let waiting = || Refusal::broken("reading from the handshake");
    let mut len = [0; 4];
    stream.read_exact(&mut len).await.map_err(waiting())?;
    let mut bytes = vec![0; parse_length(len).map_err(Refusal::Stranger)?];
    stream.read_exact(&mut bytes).await.map_err(waiting())?;
    Ok(bytes)
}

/// Text from outside, fit for a log.
fn clean(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(2000).collect()
}

#[cfg(test)]
#[path = "tests/handshake.rs"]
mod tests;
