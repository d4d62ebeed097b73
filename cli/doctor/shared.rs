//! Probes in which two processes share memory: the device's in [`ipc`], the host's in [`registration`].

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use allstream_sys::cuda::{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CuIpcMemHandle};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::answer::{Answer, step};
use super::driver::{Gpu, Problem, Word, code, problem};
use super::process::{Second, given};

const BYTES: usize = 2 << 20;
const PATTERN: u8 = 0xa5;
/// The step that the second process of `ipc` says when it has filled the memory.
const WRITTEN: &str = "the pattern is written";
/// The step that a second process says when it has registered the shared words.
const REGISTERED: &str = "its words are registered";

/// The second process opens device memory of this one and fills it, and this process reads what the memory then holds.
pub(crate) fn ipc(gpu: &'static Gpu, mut second: Second) -> Result<Answer, Problem> {
    let (memory, stream, back) = (gpu.memory(BYTES)?, gpu.stream()?, gpu.pinned(BYTES)?);
    stream.fill(&memory, 0, BYTES)?;
    stream.synchronize()?;
    step("cuIpcGetMemHandle");
    // SAFETY: the memory was allocated in this context, and is not freed.
    let handle = match unsafe { gpu.cuda.ipc_get_mem_handle(memory.at) } {
        Ok(handle) => handle,
        Err(error) => return Ok(Answer::no(code(&error))),
    };
    second.give(&handle.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>())?;
    if let Err(failed) = second.reaches(WRITTEN)? {
        return Ok(Answer::no(format!("in the other process: {failed}")));
    }
    step("reading what the other process wrote");
    // SAFETY: both have `BYTES` bytes, and nothing frees them before the process ends.
    unsafe { gpu.cuda.memcpy_dtoh_async(back.0, memory.at, BYTES, stream.raw()) }?;
    stream.synchronize()?;
    // SAFETY: `back` has `BYTES` bytes. The copy has just written all of them, and nobody writes them any more.
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
    // SAFETY: the driver gave the first process this handle, for memory that the first process does not free.
    let at = unsafe { gpu.cuda.ipc_open_mem_handle(handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) }?;
    let stream = gpu.stream()?;
    step("writing to the other process's memory");
    // SAFETY: the other process's memory has `BYTES` bytes, and stays until that process ends.
    unsafe { gpu.cuda.memset_d8_async(at, PATTERN, BYTES, stream.raw()) }?;
    stream.synchronize()?;
    step(WRITTEN);
    // The memory has to stay mapped until the first process has read it. Then the first process closes this one's stdin, and this one ends.
    given().map(drop)
}

/// Words in host memory that a second process maps, too. Both processes have registered the memory with the driver.
pub(crate) struct Shared<const N: usize> {
    pub(crate) words: [Word; N],
    _file: OwnedFd,
}

impl<const N: usize> Shared<N> {
    /// Registers the words here, and has the second process do the same. The inner error says why one of the two could not; if it is the second, the
    /// error says so.
    pub(crate) fn new(gpu: &'static Gpu, second: &mut Second) -> Result<Result<Self, String>, Problem> {
        step("registering memory that two processes map");
        // The file has no name: the second process opens it through this process's directory in /proc, as long as this process lives.
        let file = memfd_create("allstream-doctor", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, 1 << 16)?;
        let words = match gpu.shared_words(file.as_fd()) {
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
    pub(crate) fn given(gpu: &'static Gpu) -> Result<[Word; N], Problem> {
        let path = given()?;
        let file: File = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| problem(format!("cannot open {path}: {error}")))?;
        let words = gpu.shared_words(file.as_fd())?;
        step(REGISTERED);
        Ok(words)
    }
}

/// Words that streams and hosts of both processes write and wait for.
const WORDS: usize = 4;

pub(crate) fn registration(gpu: &'static Gpu, mut second: Second) -> Result<Answer, Problem> {
    let shared = match Shared::<WORDS>::new(gpu, &mut second)? {
        Ok(shared) => shared,
        Err(text) => return Ok(Answer::no(text)),
    };
    let [to_host, from_host, to_stream, from_stream] = shared.words;
    let stream = gpu.stream()?;
    step("the other process's host waits for a word of this process's stream");
    stream.write(to_host, 1)?;
    let host = from_host.reach(1, "the other host's answer");
    step("the other process's stream waits for a word of this process's stream");
    stream.write(to_stream, 1)?;
    let other = from_stream.reach(1, "the other stream's answer");
    // Whatever the answers were, this ends every wait for a word, of streams and of hosts.
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
    let [to_host, from_host, to_stream, from_stream] = Shared::<WORDS>::given(gpu)?;
    let stream = gpu.stream()?;
    stream.wait(to_stream, 1)?;
    stream.write(from_stream, 1)?;
    to_host.reach(1, "a word of the other process's stream")?;
    from_host.set(1);
    stream.synchronize()?;
    Ok(())
}
