//! `send` and `recv`, with a log of what was sent and received.

use std::time::{Duration, Instant};

use allstream::{Buf, Comm, Error, Rank};

type Result<T> = std::result::Result<T, Error>;

/// One message, as this rank saw it.
pub(crate) struct Entry {
    pub(crate) sent: bool,
    pub(crate) peer: Rank,
    pub(crate) elements: usize,
    /// When the call was made and when the buffer came back, since the start of the trial.
    pub(crate) from: Duration,
    pub(crate) to: Duration,
}

/// A rank, and the log of what it has sent and received.
pub(crate) struct Peer {
    pub(crate) comm: Comm,
    pub(crate) log: Vec<Entry>,
    /// Times in the log count from here.
    pub(crate) start: Instant,
    /// Memory to receive into, kept from one message to the next.
    pub(crate) spare: Vec<f32>,
}

impl Peer {
    pub(crate) fn new(comm: Comm) -> Peer {
        Peer { comm, log: Vec::new(), start: Instant::now(), spare: Vec::new() }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.comm.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.comm.size()
    }

    /// The spare memory, at this length; the caller puts it back.
    pub(crate) fn spare(&mut self, len: usize) -> Vec<f32> {
        self.spare.resize(len, 0.0);
        std::mem::take(&mut self.spare)
    }

    /// Sends a buffer, and returns it when it may be changed again.
    pub(crate) fn send<B: Buf>(&mut self, buf: B, to: Rank) -> Result<B> {
        let (from, elements) = (self.start.elapsed(), buf.len());
        let buf = self.comm.send(buf, to).wait()?;
        self.note(true, to, elements, from);
        Ok(buf)
    }

    /// Receives as many elements as the buffer has.
    pub(crate) fn recv<B: Buf>(&mut self, buf: B, sender: Rank) -> Result<B> {
        let (from, elements) = (self.start.elapsed(), buf.len());
        let buf = self.comm.recv(buf, sender).wait()?;
        self.note(false, sender, elements, from);
        Ok(buf)
    }

    /// Sends one buffer and receives into another at the same time. Both are submitted before either is waited for: if
    /// every rank first waited for its send, no rank would get to receive.
    pub(crate) fn exchange<S: Buf, R: Buf>(
        &mut self,
        (out, to): (S, Rank),
        (into, sender): (R, Rank),
    ) -> Result<(S, R)> {
        let (from, lens) = (self.start.elapsed(), (out.len(), into.len()));
        let sent = self.comm.send(out, to);
        let received = self.comm.recv(into, sender);
        let into = received.wait()?;
        self.note(false, sender, lens.1, from);
        let out = sent.wait()?;
        self.note(true, to, lens.0, from);
        Ok((out, into))
    }

    fn note(&mut self, sent: bool, peer: Rank, elements: usize, from: Duration) {
        self.log.push(Entry { sent, peer, elements, from, to: self.start.elapsed() });
    }

    /// Prints the logs of all ranks on rank 0, to which the others send theirs: message by message if `whole`, else summed up.
    pub(crate) fn tell_log(&mut self, whole: bool) -> Result<()> {
        let text = if whole { self.messages() } else { self.summary() };
        if self.rank() == 0 {
            print!("{text}");
            for rank in 1..self.size() {
                let len = self.comm.recv(vec![0_u64], rank).wait()?[0];
                let text = self.comm.recv(vec![0_u8; len as usize], rank).wait()?;
                print!("{}", String::from_utf8_lossy(&text));
            }
            println!();
        } else {
            let text = text.into_bytes();
            let _ = self.comm.send(vec![text.len() as u64], 0).wait()?;
            let _ = self.comm.send(text, 0).wait()?;
        }
        Ok(())
    }

    fn messages(&self) -> String {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let line = |entry: &Entry| {
            let what = if entry.sent { "sent to" } else { "received from" };
            let Entry { peer, elements, .. } = entry;
            let (rank, from, to) = (self.rank(), ms(entry.from), ms(entry.to));
            format!(
                "  rank {rank:<3} {what:<13} {peer:<3} {elements:>9} elements {from:>11.3} to {to:>11.3} ms\n"
            )
        };
        self.log.iter().map(line).collect()
    }

    fn summary(&self) -> String {
        let side = |sent: bool, to: &str| {
            let entries = || self.log.iter().filter(move |entry| entry.sent == sent);
            let mut peers: Vec<_> = entries().map(|entry| entry.peer).collect();
            peers.sort_unstable();
            peers.dedup();
            let bytes: usize = entries().map(|entry| entry.elements * size_of::<f32>()).sum();
            format!("{:>3} {to} {peers:?}, {bytes} bytes", entries().count())
        };
        format!("  rank {:<3} sent {}; received {}\n", self.rank(), side(true, "to"), side(false, "from"))
    }
}
