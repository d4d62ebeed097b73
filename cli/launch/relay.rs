//! Relays what ranks write, in whole lines that name the rank.

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{ChildStderr, ChildStdout};

use rustix::event::{PollFd, PollFlags};

/// A line longer than this is relayed in pieces, each a line of its own: what is held back is bounded.
const LONGEST_LINE: usize = 4 << 20;
/// Most that is read from one pipe before the others have their turn.
const READ_AT_ONCE: usize = 64 << 10;

/// The end of a rank's pipe that we read.
pub(super) enum Source {
    Stdout(ChildStdout),
    Stderr(ChildStderr),
}

/// Whether a line is an agent's greeting.
pub(super) type Greeting = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// One pipe of a rank or of an agent, and the line that is not complete yet.
pub(super) struct Stream {
    source: Source,
    prefix: Vec<u8>,
    line: Vec<u8>,
    /// Otherwise what comes is passed on at once.
    whole_lines: bool,
    /// An agent's that has not come yet.
    greeting: Option<Greeting>,
    open: bool,
}

impl Stream {
    pub(super) fn new(rank: usize, source: Source) -> Self {
        let prefix = format!("[{rank}] ").into_bytes();
        Self { source, prefix, line: Vec::new(), whole_lines: true, greeting: None, open: true }
    }

    /// What the agent on `host` relays already names the rank, if anything is to. What comes before the greeting (if
    /// there is one to come) is not of a rank, but of a login shell: it names the host.
    pub(super) fn agent(host: &str, source: Source, whole_lines: bool, greeting: Option<Greeting>) -> Self {
        let prefix = greeting.as_ref().map(|_| format!("[{host}] ").into_bytes()).unwrap_or_default();
        Self { source, prefix, line: Vec::new(), whole_lines, greeting, open: true }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match &self.source {
            Source::Stdout(pipe) => pipe.as_fd(),
            Source::Stderr(pipe) => pipe.as_fd(),
        }
    }

    /// Reads once and writes the lines that are complete. `false`: there was nothing to read.
    fn pump(&mut self, buffer: &mut [u8]) -> bool {
        let read = match &mut self.source {
            Source::Stdout(pipe) => pipe.read(buffer),
            Source::Stderr(pipe) => pipe.read(buffer),
        };
        match read {
            Ok(0) => {
                self.open = false;
                self.flush();
            }
            Ok(length) => {
                let mut out = Vec::new();
                for piece in buffer[..length].split_inclusive(|byte| *byte == b'\n') {
                    self.line.extend_from_slice(piece);
                    if piece.ends_with(b"\n") || self.line.len() >= LONGEST_LINE {
                        self.take_line(&mut out);
                    } else if !self.whole_lines && self.greeting.is_none() {
                        out.append(&mut self.line);
                    }
                }
                self.write(&out);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => {
                self.open = false;
                self.flush();
            }
        }
        true
    }

    fn take_line(&mut self, out: &mut Vec<u8>) {
        if let Some(greeting) = &mut self.greeting {
            let greeted = greeting(&self.line);
            if greeted {
                self.greeting = None;
                self.prefix.clear();
            }
            if greeted || self.line.trim_ascii().is_empty() {
                self.line.clear();
                return;
            }
        }
        out.extend_from_slice(&self.prefix);
        out.append(&mut self.line);
        if !out.ends_with(b"\n") {
            out.push(b'\n');
        }
    }

    /// Writes the last line, which has no end.
    fn flush(&mut self) {
        if !self.line.is_empty() {
            let mut out = Vec::new();
            self.take_line(&mut out);
            self.write(&out);
        }
    }

    /// Whole lines, in one go. If nobody reads our output any more, the ranks go on: it is thrown away.
    fn write(&self, lines: &[u8]) {
        let _ = match self.source {
            Source::Stdout(_) => write_all(&mut io::stdout().lock(), lines),
            Source::Stderr(_) => write_all(&mut io::stderr().lock(), lines),
        };
    }
}

/// Writes all of it now.
pub(super) fn write_all(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

/// Relays all streams until each has ended, or until `stop` has: then what is in the pipes, and no more.
pub(super) fn relay(mut streams: Vec<Stream>, stop: &PipeReader) {
    let mut buffer = vec![0; READ_AT_ONCE];
    for stream in &streams {
        // Only our end becomes non-blocking; the rank's is another open file.
        let _ = rustix::io::ioctl_fionbio(stream.fd(), true);
    }
    while streams.iter().any(|stream| stream.open) {
        let mut polled: Vec<_> = (streams.iter().filter(|stream| stream.open))
            .map(|stream| PollFd::from_borrowed_fd(stream.fd(), PollFlags::IN))
            .collect();
        polled.push(PollFd::new(stop, PollFlags::IN));
        if rustix::event::poll(&mut polled, None).is_err() {
            continue; // interrupted
        }
        let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (stream, _) in
            streams.iter_mut().filter(|stream| stream.open).zip(&ready).filter(|(_, ready)| **ready)
        {
            stream.pump(&mut buffer);
        }
        if ready.last() == Some(&true) {
            break;
        }
    }
    for stream in streams.iter_mut().filter(|stream| stream.open) {
        // No more than a pipe holds, should somebody go on writing.
        for _ in 0..(1 << 20) / READ_AT_ONCE {
            if !(stream.open && stream.pump(&mut buffer)) {
                break;
            }
        }
        stream.flush();
    }
}
