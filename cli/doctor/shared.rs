//! Probes of two processes that share memory: of the device's, and of the host's.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use allstream_sys::cuda::{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CuIpcMemHandle};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::answer::{Answer, step};
use super::driver::{Gpu, Problem, Word, code, problem};
use super::process::{Second, given};

const BYTES: usize = 2 << 20;
const PATTERN: u8 = 0xa5;
/// What second processes say when they have done their part, and when their words are there.
const WRITTEN: &str = "the pattern is written";
const REGISTERED: &str = "its words are registered";

/// Another process opens memory of this one's, and fills it.
pub(crate) fn ipc(gpu: &'static Gpu, mut second: Second) -> Result<Answer, Problem> {
    let (memory, stream, back) = (gpu.memory(BYTES)?, gpu.stream()?, gpu.pinned(BYTES)?);
    stream.fill(&memory, 0, BYTES)?;
    stream.synchronize()?;
    step("cuIpcGetMemHandle");
    // SAFETY: memory of this context's.
    let handle = match unsafe { gpu.cuda.ipc_get_mem_handle(memory.at) } {
        Ok(handle) => handle,
        Err(error) => return Ok(Answer::no(code(&error))),
    };
    second.give(&handle.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>())?;
    if let Err(failed) = second.reaches(WRITTEN)? {
        return Ok(Answer::no(format!("in the other process: {failed}")));
    }
    step("reading what the other process wrote");
    // SAFETY: both are as long, and stay until the process ends.
    unsafe { gpu.cuda.memcpy_dtoh_async(back.0, memory.at, BYTES, stream.raw()) }?;
    stream.synchronize()?;
    // SAFETY: so many bytes, which the copy has just written, and which nobody writes any more.
    let bytes = unsafe { std::slice::from_raw_parts(back.0.cast::<u8>(), BYTES) };
    let wrong = bytes.iter().filter(|byte| **byte != PATTERN).count();
    second.end();
    Ok(match wrong {
        0 => Answer::new("yes", "the other process wrote it, and this one reads what was written"),
        wrong => Answer::no(format!("{wrong} of {BYTES} bytes are not what the other process wrote")),
    })
}

pub(crate) fn ipc_second(gpu: &'static Gpu) -> Result<(), Problem> {
    let line = given()?;
    let mut handle = CuIpcMemHandle([0; 64]);
    for (i, byte) in handle.0.iter_mut().enumerate() {
        let text = line.get(2 * i..2 * i + 2).ok_or_else(|| problem("the handle is cut off"))?;
        *byte = u8::from_str_radix(text, 16)?;
    }
    step("cuIpcOpenMemHandle");
    // SAFETY: a handle that the other process was given for memory that it keeps.
    let at = unsafe { gpu.cuda.ipc_open_mem_handle(handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) }?;
    let stream = gpu.stream()?;
    step("writing to the other process's memory");
    // SAFETY: memory of the other process, so long, until that ends.
    unsafe { gpu.cuda.memset_d8_async(at, PATTERN, BYTES, stream.raw()) }?;
    stream.synchronize()?;
    step(WRITTEN);
    // What it maps goes with the process; the first one is done by then.
    given().map(drop)
}

/// Memory of the host's that another process maps, too.
pub(crate) struct Shared {
    pub(crate) words: Vec<Word>,
    _file: OwnedFd,
}

impl Shared {
    /// Words that the second process has, too; within: what could not be registered where.
    pub(crate) fn new(
        gpu: &'static Gpu,
        second: &mut Second,
        count: usize,
    ) -> Result<Result<Shared, String>, Problem> {
        step("registering memory that two processes map");
        // Nobody opens it by this number but through this process's folder in /proc, as long as it lives.
        let file = memfd_create("allstream-doctor", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, 1 << 16)?;
        let words = match gpu.shared_words(count, file.as_fd()) {
            Ok(words) => words,
            Err(Problem(text)) => return Ok(Err(text)),
        };
        second.give(&format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))?;
        if let Err(failed) = second.reaches(REGISTERED)? {
            return Ok(Err(format!("in the other process: {failed}")));
        }
        Ok(Ok(Shared { words, _file: file }))
    }

    /// The same words, in the second process.
    pub(crate) fn given(gpu: &'static Gpu, count: usize) -> Result<Vec<Word>, Problem> {
        let path = given()?;
        let file: File = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| problem(format!("cannot open {path}: {error}")))?;
        let words = gpu.shared_words(count, file.as_fd())?;
        step(REGISTERED);
        Ok(words)
    }
}

/// Words that streams and hosts of both processes write and wait for.
const WORDS: usize = 4;

pub(crate) fn registration(gpu: &'static Gpu, mut second: Second) -> Result<Answer, Problem> {
    let shared = match Shared::new(gpu, &mut second, WORDS)? {
        Ok(shared) => shared,
        Err(text) => return Ok(Answer::no(text)),
    };
    let [to_host, from_host, to_stream, from_stream] = shared.words[..] else {
        return Err(problem("four words were asked for"));
    };
    let stream = gpu.stream()?;
    step("the other process's host waits for a word of this process's stream");
    stream.write(to_host, 1)?;
    let host = from_host.reach(1, "the other host's answer");
    step("the other process's stream waits for a word of this process's stream");
    stream.write(to_stream, 1)?;
    let other = from_stream.reach(1, "the other stream's answer");
    // Whatever came, nobody is left waiting.
    shared.words.iter().for_each(|word| word.set(Word::OPEN));
    second.end();
    let said = |answer: &Result<(), Problem>| match answer {
        Ok(()) => "yes",
        Err(_) => "no",
    };
    let remark = format!(
        "what a stream writes is seen by the other process's host: {}; by its stream: {}",
        said(&host),
        said(&other)
    );
    Ok(Answer::yes_or_no(host.is_ok() && other.is_ok(), remark))
}

pub(crate) fn registration_second(gpu: &'static Gpu) -> Result<(), Problem> {
    let words = Shared::given(gpu, WORDS)?;
    let [to_host, from_host, to_stream, from_stream] = words[..] else {
        return Err(problem("four words were asked for"));
    };
    let stream = gpu.stream()?;
    stream.wait(to_stream, 1)?;
    stream.write(from_stream, 1)?;
    to_host.reach(1, "a word of the other process's stream")?;
    from_host.set(1);
    stream.synchronize()?;
    Ok(())
}
