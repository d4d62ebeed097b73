//! Memory and events of other processes.
//!
//! A handle names a file descriptor of the process that made the handle. Other processes open it under `/proc` while that process
//! lives: nobody has to serve requests, and nothing is left behind.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::abi::{Address, Handle, Out, lock};
use crate::codes::{Code, Done};
use crate::context::working;
use crate::entry::call;
use crate::event::{Event, Shared};
use crate::knobs;
use crate::space::{self, Kind, Memory, find};
use crate::stream::settle;

const MEMORY: u64 = u64::from_le_bytes(*b"test-mem");
/// The device number of memory whose device this process does not see.
const HIDDEN: i32 = -1;
const EVENT: u64 = u64::from_le_bytes(*b"test-evt");
/// The only flag; real drivers open memory only with this flag.
const LAZY_PEER_ACCESS: u32 = 1;

/// `CUipcMemHandle` and `CUipcEventHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Token([u8; 64]);

/// The contents of a token.
#[derive(Clone, Copy)]
struct Words {
    what: u64,
    process: u64,
    file: u64,
    offset: u64,
    size: u64,
    device: u64,
    id: u64,
    /// The address of the memory in the process that made the token.
    base: u64,
}

impl Token {
    fn new(words: Words) -> Self {
        let Words { what, process, file, offset, size, device, id, base } = words;
        let mut bytes = [0; 64];
        for (place, word) in
            bytes.chunks_exact_mut(8).zip([what, process, file, offset, size, device, id, base])
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Token(bytes)
    }

    /// The contents, if the token is of the wanted kind and another process made it.
    fn read(&self, wanted: u64) -> Done<Words> {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&self.0[index * 8..][..8]);
            u64::from_le_bytes(word)
        };
        let [what, process, file, offset, size, device, id, base] = [0, 1, 2, 3, 4, 5, 6, 7].map(word);
        if what != wanted {
            return Err(Code::INVALID_HANDLE);
        }
        if process == u64::from(std::process::id()) {
            return Err(Code::INVALID_CONTEXT);
        }
        Ok(Words { what, process, file, offset, size, device, id, base })
    }
}

impl Words {
    fn open(&self) -> Done<OwnedFd> {
        let path = format!("/proc/{}/fd/{}", self.process, self.file);
        let file: File =
            OpenOptions::new().read(true).write(true).open(path).map_err(|_| Code::MAP_FAILED)?;
        Ok(file.into())
    }
}

/// Memory of another process that is mapped here.
struct Import {
    memory: Arc<Memory>,
    /// How often it was opened.
    opened: u32,
    /// The address of the memory in the process that made the token.
    base: u64,
}

/// By the process that made the token, the memory's id there, and our context.
type Imports = BTreeMap<(u64, u64, Handle), Import>;

static IMPORTS: Mutex<Imports> = Mutex::new(BTreeMap::new());

/// The handle is for the whole allocation, wherever in it the pointer is.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetMemHandle(out: Out<Token>, at: Address) -> Code {
    call("cuIpcGetMemHandle", || {
        supported()?;
        let memory = find(at, 1).filter(|memory| memory.kind == Kind::Device).ok_or(Code::INVALID_VALUE)?;
        let (Some(file), Some(offset)) = (memory.file(), memory.offset()) else {
            return Err(Code::INVALID_VALUE);
        };
        let words = Words {
            what: MEMORY,
            process: std::process::id().into(),
            file,
            offset: offset as u64,
            size: memory.size as u64,
            device: knobs::hardware(memory.device) as u64,
            id: memory.id,
            base: memory.base,
        };
        memory.exported.store(true, Ordering::Release);
        out.set(Token::new(words))
    })
}

/// In some containers, and on parts of a divided device (MIG), processes cannot share memory.
fn supported() -> Done {
    if knobs::strict().no_ipc { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
}

fn open(out: &Out<Address>, token: Token, flags: u32) -> Done {
    supported()?;
    let context = working()?;
    if flags != LAZY_PEER_ACCESS {
        return Err(Code::INVALID_VALUE);
    }
    let words = token.read(MEMORY)?;
    // The memory may be on a device that this process does not see.
    let (owner, ours) = (words.device as i32, context.device.hardware());
    if owner != ours && !knobs::peers(owner, ours) {
        return Err(Code::PEER_ACCESS_UNSUPPORTED);
    }
    let key = (words.process, words.id, context.handle);
    settle();
    let mut imports = lock(&IMPORTS);
    imports.retain(|_, import| !import.memory.is_freed());
    if let Some(import) = imports.get_mut(&key) {
        import.opened += 1;
        return out.set(import.memory.base);
    }
    // Older memory of that process, freed there since, is still mapped here and lay at these addresses: real drivers refuse this.
    let lies_there = |import: &Import| {
        import.base < words.base + words.size && words.base < import.base + import.memory.size as u64
    };
    let mut same = imports.iter().filter(|(other, _)| (other.0, other.2) == (key.0, key.2));
    if same.any(|(_, import)| lies_there(import)) {
        return Err(Code::ALREADY_MAPPED);
    }
    let file = words.open()?;
    let ordinal = knobs::ordinal(owner).unwrap_or(HIDDEN);
    let memory = Memory::imported(&file, words.offset as usize, words.size as usize, ordinal, &context)?;
    out.set(memory.base)?;
    imports.insert(key, Import { memory, opened: 1, base: words.base });
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenMemHandle(out: Out<Address>, token: Token, flags: u32) -> Code {
    call("cuIpcOpenMemHandle", || open(&out, token, flags))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenMemHandle_v2(out: Out<Address>, token: Token, flags: u32) -> Code {
    call("cuIpcOpenMemHandle_v2", || open(&out, token, flags))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcCloseMemHandle(at: Address) -> Code {
    call("cuIpcCloseMemHandle", || {
        working()?;
        let memory = space::beginning(at).filter(|memory| memory.kind == Kind::Imported);
        let memory = memory.ok_or(Code::INVALID_VALUE)?;
        let mut imports = lock(&IMPORTS);
        let key = imports.iter().find(|(_, import)| import.memory.base == memory.base).map(|(key, _)| *key);
        let key = key.ok_or(Code::INVALID_VALUE)?;
        if let Some(import) = imports.get_mut(&key) {
            import.opened -= 1;
            if import.opened > 0 {
                return Ok(());
            }
        }
        imports.remove(&key);
        memory.end()
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetEventHandle(out: Out<Token>, event: Handle) -> Code {
    call("cuIpcGetEventHandle", || {
        let event = Event::named(event)?;
        // Only the process that made the event can make a handle for it.
        let shared = event.shared.as_ref().and_then(|shared| shared.file.as_ref());
        let file = shared.ok_or(Code::INVALID_HANDLE)?.as_raw_fd() as u64;
        let process = std::process::id().into();
        out.set(Token::new(Words {
            what: EVENT,
            process,
            file,
            offset: 0,
            size: 0,
            device: 0,
            id: 0,
            base: 0,
        }))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenEventHandle(out: Out<Handle>, token: Token) -> Code {
    call("cuIpcOpenEventHandle", || {
        let context = working()?;
        let shared = Shared::opened(&token.read(EVENT)?.open()?)?;
        out.set(Event::make(&context, Event::BETWEEN_PROCESSES, Some(Arc::new(shared))).handle())
    })
}
