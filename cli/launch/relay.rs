//! Relays what ranks write, in lines that name the rank. A line whose end does not come (a prompt, a progress bar that goes back to the
//! beginning of its line) is shown as far as it has come.

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{ChildStderr, ChildStdout};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::complain;
use super::logs::Log;

/// A line longer than this is relayed in pieces, each a line of its own: what is held back is bounded.
const LONGEST_LINE: usize = 4 << 20;
/// Most that is read from one pipe before the others have their turn.
const READ_AT_ONCE: usize = 64 << 10;
/// A line without an end is shown when nothing has been added to it for so long. An agent holds it back for that time, and the
/// launcher again: together for less than a second.
const QUIET: Duration = Duration::from_millis(400);
/// A line without an end is also shown when its first byte is this old, even if bytes are added all the time.
const OLD: Duration = Duration::from_millis(800);
/// A line of this length is no prompt: it is not shown before its end has come.
const LONGEST_PROMPT: usize = 16 << 10;
/// Lines that Python writes when a program reads from a stdin that is at its end.
const NO_INPUT: [&[u8]; 2] = [b"EOFError: EOF when reading a line", b"bdb.BdbQuit"];

/// The end of a rank's pipe that we read.
pub(super) enum Source {
    Stdout(ChildStdout),
    Stderr(ChildStderr),
}

/// Whether a line is an agent's greeting.
pub(super) type Greeting = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// Where in its line a stream is, after the last byte of it that was shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Start,
    Within,
    /// After a carriage return: at the start of a line that shows text already.
    Return,
}

/// One pipe of a rank or of an agent, and what has not been shown yet.
pub(super) struct Stream {
    source: Source,
    prefix: Vec<u8>,
    /// The prefix that an agent has put before the line that is being shown.
    agents_prefix: Vec<u8>,
    line: Vec<u8>,
    /// When the first and the last byte of `line` came.
    came: Option<(Instant, Instant)>,
    at: At,
    /// Lines are shown one by one, with the prefix; if `false`, bytes are passed on as they come.
    whole_lines: bool,
    /// Recognizes the agent's greeting, until that has come.
    greeting: Option<Greeting>,
    log: Option<Log>,
    /// The rank, if it has no stdin and the user was not told so yet.
    without_stdin: Option<usize>,
    open: bool,
}

impl Stream {
    pub(super) fn new(rank: usize, source: Source, log: Option<Log>, has_stdin: bool) -> Self {
        let without_stdin = (!has_stdin && matches!(source, Source::Stderr(_))).then_some(rank);
        let prefix = format!("[{rank}] ").into_bytes();
        Self { prefix, log, without_stdin, ..Self::bare(source) }
    }

    /// A stream of the agent on `host`. The agent has already put the ranks' names before their lines, if the user wants the names. Lines before
    /// the greeting (if one is to come) are not a rank's, but a login shell's: the host's name is put before them.
    pub(super) fn agent(host: &str, source: Source, whole_lines: bool, greeting: Option<Greeting>) -> Self {
        let prefix = greeting.as_ref().map(|_| format!("[{host}] ").into_bytes()).unwrap_or_default();
        Self { prefix, whole_lines, greeting, ..Self::bare(source) }
    }

    fn bare(source: Source) -> Self {
        Self {
            source,
            prefix: Vec::new(),
            agents_prefix: Vec::new(),
            line: Vec::new(),
            came: None,
            at: At::Start,
            whole_lines: true,
            greeting: None,
            log: None,
            without_stdin: None,
            open: true,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match &self.source {
            Source::Stdout(pipe) => pipe.as_fd(),
            Source::Stderr(pipe) => pipe.as_fd(),
        }
    }

    fn output(&self) -> Output {
        match self.source {
            Source::Stdout(_) => Output::Stdout,
            Source::Stderr(_) => Output::Stderr,
        }
    }

    /// Reads once and shows the lines that are complete. `false`: there was nothing to read.
    fn pump(&mut self, own: usize, buffer: &mut [u8]) -> bool {
        let read = match &mut self.source {
            Source::Stdout(pipe) => pipe.read(buffer),
            Source::Stderr(pipe) => pipe.read(buffer),
        };
        match read {
            Ok(0) => {
                self.open = false;
                self.end_line(own);
            }
            Ok(length) => {
                let bytes = &buffer[..length];
                if let Some(log) = &self.log {
                    log.write(bytes);
                }
                let mut whole = Vec::new();
                for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
                    self.line.extend_from_slice(piece);
                    if piece.ends_with(b"\n") || self.line.len() >= LONGEST_LINE {
                        self.take_line(&mut whole);
                    } else if !self.whole_lines && self.greeting.is_none() {
                        whole.append(&mut self.line);
                    }
                }
                let now = Instant::now();
                let first = self.came.filter(|_| whole.is_empty()).map_or(now, |(first, _)| first);
                self.came = (!self.line.is_empty()).then_some((first, now));
                self.show(own, &whole);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => {
                self.open = false;
                self.end_line(own);
            }
        }
        true
    }

    fn take_line(&mut self, whole: &mut Vec<u8>) {
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
            // The prefix is added here and not in `show`: before this line is shown, the greeting may come and clear the prefix.
            whole.extend_from_slice(&self.prefix);
        }
        let starved = |line: &[u8]| NO_INPUT.iter().any(|text| line.starts_with(text));
        if let Some(rank) = self.without_stdin.filter(|_| starved(&self.line)) {
            self.without_stdin = None;
            complain(&format!(
                "rank {rank} has no stdin; --stdin says which ranks have the launcher's (0, all, none)"
            ));
        }
        whole.append(&mut self.line);
        if !whole.ends_with(b"\n") {
            whole.push(b'\n');
        }
    }

    /// When the line that is not complete is to be shown.
    fn due(&self) -> Option<Instant> {
        let (first, last) = self.came.filter(|_| self.open && self.greeting.is_none() && self.whole_lines)?;
        (self.line.len() < LONGEST_PROMPT).then(|| (last + QUIET).min(first + OLD))
    }

    /// Shows what has come of the line.
    fn show_part(&mut self, own: usize) {
        let line = std::mem::take(&mut self.line);
        self.came = None;
        self.show(own, &line);
    }

    /// Shows the last line, and ends it.
    fn end_line(&mut self, own: usize) {
        if self.greeting.is_some() && !self.line.is_empty() {
            let mut whole = Vec::new();
            self.take_line(&mut whole);
            return self.show(own, &whole);
        }
        let mut rest = std::mem::take(&mut self.line);
        self.came = None;
        let is_open = self.at != At::Start && Screen::lock().open_line(self.output()) == Some(own);
        if self.whole_lines && (!rest.is_empty() || is_open) && !rest.ends_with(b"\n") {
            rest.push(b'\n');
        }
        self.show(own, &rest);
    }

    /// Writes this to where the rank's output goes, with the prefix at the beginning of each line, in one go.
    fn show(&mut self, own: usize, text: &[u8]) {
        if text.is_empty() {
            return;
        }
        let output = self.output();
        if !self.whole_lines {
            return write(output, text);
        }
        let mut out = Vec::new();
        {
            let mut screen = Screen::lock();
            match screen.open_line(output) {
                Some(stream) if stream == own => {}
                other => {
                    if other.is_some() {
                        out.push(b'\n');
                    }
                    if self.at == At::Within {
                        out.extend_from_slice(&self.agents_prefix);
                    }
                    self.at = At::Start;
                }
            }
            let prefix: &[u8] = if self.greeting.is_some() { b"" } else { &self.prefix };
            for piece in text.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
                // A progress bar writes a carriage return before its text or after it. A carriage return alone gets no prefix.
                let is_bare = piece == b"\r" && self.at != At::Within;
                if !is_bare && (self.at == At::Start || (self.at == At::Return && piece != b"\n")) {
                    out.extend_from_slice(prefix);
                }
                if self.at != At::Within && self.prefix.is_empty() && piece.starts_with(b"[") {
                    self.agents_prefix =
                        piece.iter().copied().take_while(|byte| *byte != b' ').chain([b' ']).collect();
                }
                out.extend_from_slice(piece);
                self.at = match piece.last() {
                    Some(b'\n') => At::Start,
                    Some(b'\r') => At::Return,
                    _ => At::Within,
                };
            }
            let place = screen.place(output);
            screen.open_lines[place] = (self.at != At::Start).then_some(own);
        }
        write(output, &out);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Output {
    Stdout,
    Stderr,
}

/// Which lines on our stdout and stderr have no end yet, so that nothing else is written behind them.
struct Screen {
    open_lines: [Option<usize>; 2],
    /// Whether both are one terminal or one file; known once something is written.
    is_one: Option<bool>,
    /// Whether the user was told that output to stdout, or to stderr, is lost.
    told: [bool; 2],
}

static SCREEN: Mutex<Screen> = Mutex::new(Screen { open_lines: [None; 2], is_one: None, told: [false; 2] });

impl Screen {
    /// Never held while something is written, which may block.
    fn lock() -> MutexGuard<'static, Screen> {
        SCREEN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&mut self, output: Output) -> usize {
        let is_one = *self.is_one.get_or_insert_with(|| {
            let of =
                |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).ok().map(|about| (about.st_dev, about.st_ino));
            let found = of(io::stdout().as_fd());
            found.is_some() && found == of(io::stderr().as_fd())
        });
        usize::from(output == Output::Stderr && !is_one)
    }

    fn open_line(&mut self, output: Output) -> Option<usize> {
        self.open_lines[self.place(output)]
    }
}

/// What the launcher has to write on stderr before a line of its own: a line feed if the last line there has no end yet. That line then counts
/// as ended.
pub(super) fn end_open_line() -> &'static [u8] {
    let mut screen = Screen::lock();
    let place = screen.place(Output::Stderr);
    if screen.open_lines[place].take().is_some() { b"\n" } else { b"" }
}

/// Writes ranks' output to ours. If that fails, the output is lost and the ranks go on. The user is told so once, except where
/// nobody reads our output any more.
fn write(output: Output, bytes: &[u8]) {
    let (written, name) = match output {
        Output::Stdout => (write_all(&mut io::stdout().lock(), bytes), "stdout"),
        Output::Stderr => (write_all(&mut io::stderr().lock(), bytes), "stderr"),
    };
    let Err(error) = written else { return };
    if error.kind() == io::ErrorKind::BrokenPipe {
        return;
    }
    let was_told = std::mem::replace(&mut Screen::lock().told[usize::from(output == Output::Stderr)], true);
    if !was_told {
        let text = format!("what ranks write to {name} is lost from here on: {error}");
        // Usually stdout and stderr are files on one full disk: then the message goes to the terminal, if there is one.
        if output == Output::Stderr || write_complaint(&text).is_err() {
            let _ = File::options()
                .write(true)
                .open("/dev/tty")
                .and_then(|mut terminal| writeln!(terminal, "allstream run: {text}"));
        }
    }
}

/// One line on stderr, of the launcher's own.
pub(super) fn write_complaint(text: &str) -> io::Result<()> {
    let line = [end_open_line(), format!("allstream run: {text}\n").as_bytes()].concat();
    write_all(&mut io::stderr().lock(), &line)
}

/// Writes all of it now.
pub(super) fn write_all(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

/// Relays all streams until each has ended, or until `stop` has: then only what is still in the pipes is relayed.
pub(super) fn relay(mut streams: Vec<Stream>, stop: &PipeReader) {
    let mut buffer = vec![0; READ_AT_ONCE];
    for stream in &streams {
        // Only our end becomes non-blocking; the rank's is another open file.
        let _ = rustix::io::ioctl_fionbio(stream.fd(), true);
    }
    while streams.iter().any(|stream| stream.open) {
        let due = streams.iter().filter_map(Stream::due).min();
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled: Vec<_> = (streams.iter().filter(|stream| stream.open))
            .map(|stream| PollFd::from_borrowed_fd(stream.fd(), PollFlags::IN))
            .collect();
        polled.push(PollFd::new(stop, PollFlags::IN));
        if rustix::event::poll(&mut polled, left.as_ref()).is_err() {
            continue; // interrupted
        }
        let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        let open = streams.iter_mut().enumerate().filter(|(_, stream)| stream.open);
        for ((own, stream), _) in open.zip(&ready).filter(|(_, ready)| **ready) {
            stream.pump(own, &mut buffer);
        }
        let now = Instant::now();
        let due =
            streams.iter_mut().enumerate().filter(|(_, stream)| stream.due().is_some_and(|due| due <= now));
        due.for_each(|(own, stream)| stream.show_part(own));
        if ready.last() == Some(&true) {
            break;
        }
    }
    for (own, stream) in streams.iter_mut().enumerate().filter(|(_, stream)| stream.open) {
        // No more than a pipe holds, should somebody go on writing.
        for _ in 0..(1 << 20) / READ_AT_ONCE {
            if !(stream.open && stream.pump(own, &mut buffer)) {
                break;
            }
        }
        stream.end_line(own);
    }
}
