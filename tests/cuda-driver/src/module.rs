//! Modules and their functions.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use allstream_cuda_kernels::Module as Shipped;

use crate::abi::{Address, Handle, In, Out, Table, fresh};
use crate::codes::{Code, Done};
use crate::context::{Context, working};
use crate::entry::call;
use crate::knobs;
use crate::ptx;
use crate::space::{Kind, Memory, Span};

pub(crate) struct Module {
    handle: Handle,
    pub(crate) context: Arc<Context>,
    pub(crate) code: ptx::Module,
    /// The memory of its variables, in the order of `code.globals`.
    globals: Vec<Arc<Memory>>,
}

pub(crate) struct Function {
    pub(crate) module: Arc<Module>,
    index: usize,
}

pub(crate) static MODULES: Table<Module> = Table::new();
pub(crate) static FUNCTIONS: Table<Function> = Table::new();

/// The most threads of a block, and those of a multiprocessor.
pub(crate) const MOST_THREADS: u32 = 1024;
const PROCESSOR_THREADS: i32 = 2048;
/// What our devices are: compute capability 9.0.
const CAPABILITY: u32 = 90;

impl Module {
    fn load(image: *const c_void) -> Done<Arc<Self>> {
        let context = working()?;
        let code = read(image)?;
        let mut globals = Vec::new();
        for global in &code.globals {
            let memory = Memory::on_device(Kind::Global, global.bytes.len().max(1), &context)?;
            let place = Span::of(memory.clone(), memory.base).pointer()?;
            // SAFETY: the memory was just made, and is at least as long as the bytes.
            unsafe { std::ptr::copy_nonoverlapping(global.bytes.as_ptr(), place, global.bytes.len()) };
            globals.push(memory);
        }
        let module = Arc::new(Module { handle: fresh(), context, code, globals });
        MODULES.add(module.handle, module.clone());
        for index in 0..module.code.entries.len() {
            FUNCTIONS.add(fresh(), Arc::new(Function { module: module.clone(), index }));
        }
        Ok(module)
    }

    pub(crate) fn end(&self) {
        let _ = MODULES.remove(self.handle);
        FUNCTIONS.retain(|function| function.module.handle != self.handle);
        for memory in &self.globals {
            let _ = memory.end();
        }
    }

    pub(crate) fn addresses(&self) -> Vec<Address> {
        self.globals.iter().map(|memory| memory.base).collect()
    }
}

impl Function {
    pub(crate) fn entry(&self) -> &ptx::Entry {
        &self.module.code.entries[self.index]
    }
}

pub(crate) fn end_all_of(context: Handle) {
    MODULES
        .all()
        .into_iter()
        .filter(|module| module.context.handle == context)
        .for_each(|module| module.end());
}

/// The size of the header that every ELF file of 64 bits begins with.
const ELF_HEADER: usize = 64;

/// The length of an ELF file of 64 bits, by its header: both of its tables lie in the file, and in the files that ptxas makes, the
/// later one is the last thing in the file.
fn elf_length(header: [u8; ELF_HEADER]) -> Option<usize> {
    const LITTLE_64: [u8; 2] = [2, 1];
    if header[4..6] != LITTLE_64 {
        return None;
    }
    let long = |at: usize| header[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let short = |at: usize| header[at..].first_chunk().map(|bytes| u64::from(u16::from_le_bytes(*bytes)));
    let end = |start: Option<u64>, size: Option<u64>, count: Option<u64>| start?.checked_add(size? * count?);
    let programs = end(long(0x20), short(0x36), short(0x38))?;
    let sections = end(long(0x28), short(0x3a), short(0x3c))?;
    usize::try_from(programs.max(sections)).ok()
}

/// The PTX that this machine code was made from, if it is the code that ships with one of our modules for our devices. The PTX runs
/// instead, as we cannot run machine code.
fn made_from(image: *const c_void) -> Option<&'static str> {
    // SAFETY: the caller of the exported function gives a whole ELF file, which begins with so many bytes.
    let length = elf_length(unsafe { image.cast::<[u8; ELF_HEADER]>().read_unaligned() })?;
    let code = |module: &&Shipped| module.machine_code(CAPABILITY / 10).filter(|code| code.len() == length);
    let mut known = Shipped::ALL.iter().filter(|module| code(module).is_some()).peekable();
    known.peek()?;
    // SAFETY: as above, and the file itself says that it is this long.
    let image = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), length) };
    known.find(|module| code(module) == Some(image)).map(|module| module.ptx())
}

/// Reads an image: PTX, or machine code whose PTX we know.
fn read(image: *const c_void) -> Done<ptx::Module> {
    if image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller gives an image: a binary of one of the two kinds below, or a text that ends with a
    // zero. The comparison ends at the first byte that differs, so it reads nothing behind a text of fewer than four bytes.
    let is_binary = |magic: &[u8]| (0..4).all(|at| unsafe { image.cast::<u8>().add(at).read() } == magic[at]);
    if is_binary(&[0x50, 0xed, 0x55, 0xba]) {
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    if is_binary(b"\x7fELF") {
        let text = Some(image).filter(|_| knobs::strict().machine_code).and_then(made_from);
        let module = parsed(text.ok_or(Code::NO_BINARY_FOR_GPU)?)?;
        knobs::note("cuModuleLoadData, machine code");
        return Ok(module);
    }
    // SAFETY: the caller promised a text that ends with a zero.
    let text = unsafe { CStr::from_ptr(image.cast()) };
    let module = parsed(text.to_str().map_err(|_| Code::INVALID_PTX)?)?;
    knobs::note("cuModuleLoadData, PTX");
    Ok(module)
}

fn parsed(text: &str) -> Done<ptx::Module> {
    let module = ptx::parse(text).map_err(|refused| {
        // The code alone does not tell the cause; stderr is where its reader looks next.
        eprintln!("cuda driver for tests: PTX line {}: {}", refused.line, refused.why);
        *crate::abi::lock(&LAST_REFUSAL) = format!("line {}: {}", refused.line, refused.why);
        if refused.why.starts_with(".version") { Code::UNSUPPORTED_PTX_VERSION } else { Code::INVALID_PTX }
    })?;
    if module.target > CAPABILITY { Err(Code::NO_BINARY_FOR_GPU) } else { Ok(module) }
}

static LAST_REFUSAL: std::sync::Mutex<String> = std::sync::Mutex::new(String::new());

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadData(out: Out<Handle>, image: *const c_void) -> Code {
    call("cuModuleLoadData", || out.set(Module::load(image)?.handle))
}

/// Of the options, only the place for errors (5) and its size (6) mean anything here.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadDataEx(
    out: Out<Handle>,
    image: *const c_void,
    count: u32,
    options: In<i32>,
    values: In<*mut c_void>,
) -> Code {
    call("cuModuleLoadDataEx", || {
        let result = Module::load(image);
        let (mut place, mut size) = (std::ptr::null_mut::<u8>(), 0);
        for index in 0..count as usize {
            match options.at(index)? {
                5 => place = values.at(index)?.cast(),
                6 => size = values.at(index)? as usize,
                _ => {}
            }
        }
        if matches!(result, Err(Code::INVALID_PTX | Code::UNSUPPORTED_PTX_VERSION))
            && !place.is_null()
            && size > 0
        {
            let log = crate::abi::lock(&LAST_REFUSAL);
            let length = log.len().min(size - 1);
            // SAFETY: not null, and the caller gave so much room; the text and its zero fit.
            unsafe {
                std::ptr::copy_nonoverlapping(log.as_ptr(), place, length);
                place.add(length).write(0);
            }
        }
        out.set(result?.handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleUnload(module: Handle) -> Code {
    call("cuModuleUnload", || {
        MODULES.get(module)?.end();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleGetFunction(
    out: Out<Handle>,
    module: Handle,
    name: In<c_char>,
) -> Code {
    call("cuModuleGetFunction", || {
        MODULES.get(module)?;
        let name = name.text()?.to_str().map_err(|_| Code::NOT_FOUND)?;
        let wanted = |function: &Function| function.module.handle == module && function.entry().name == name;
        out.set(FUNCTIONS.find(wanted).ok_or(Code::NOT_FOUND)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleGetGlobal_v2(
    at: Out<Address>,
    size: Out<usize>,
    module: Handle,
    name: In<c_char>,
) -> Code {
    call("cuModuleGetGlobal_v2", || {
        let module = MODULES.get(module)?;
        let name = name.text()?.to_str().map_err(|_| Code::NOT_FOUND)?;
        let index =
            module.code.globals.iter().position(|global| global.name == name).ok_or(Code::NOT_FOUND)?;
        at.set_if_wanted(module.globals[index].base);
        size.set_if_wanted(module.code.globals[index].bytes.len());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFuncGetModule(out: Out<Handle>, function: Handle) -> Code {
    call("cuFuncGetModule", || out.set(FUNCTIONS.get(function)?.module.handle))
}

/// Threads of a block, shared, constant and local memory, registers, versions.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFuncGetAttribute(out: Out<i32>, attribute: i32, function: Handle) -> Code {
    call("cuFuncGetAttribute", || {
        let function = FUNCTIONS.get(function)?;
        out.set(match attribute {
            0 => MOST_THREADS as i32,
            1 | 2 | 7 => 0,
            3 => function.entry().local as i32,
            4 => 32,
            // The virtual architecture that the PTX was made for, and the real one that the code is for.
            5 => function.module.code.target as i32,
            6 => CAPABILITY as i32,
            8 => 49152,
            9..=15 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFuncSetAttribute(function: Handle, attribute: i32, _value: i32) -> Code {
    call("cuFuncSetAttribute", || {
        FUNCTIONS.get(function)?;
        if matches!(attribute, 8..=15) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFuncSetCacheConfig(function: Handle, _config: i32) -> Code {
    call("cuFuncSetCacheConfig", || FUNCTIONS.get(function).map(|_| ()))
}

fn blocks(function: Handle, threads: i32) -> Done<i32> {
    FUNCTIONS.get(function)?;
    if !(1..=MOST_THREADS as i32).contains(&threads) {
        return Err(Code::INVALID_VALUE);
    }
    Ok((PROCESSOR_THREADS / threads).min(32))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    out: Out<i32>,
    function: Handle,
    threads: i32,
    _shared: usize,
) -> Code {
    call("cuOccupancyMaxActiveBlocksPerMultiprocessor", || out.set(blocks(function, threads)?))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    out: Out<i32>,
    function: Handle,
    threads: i32,
    _shared: usize,
    _flags: u32,
) -> Code {
    call("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", || out.set(blocks(function, threads)?))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxPotentialBlockSize(
    grid: Out<i32>,
    block: Out<i32>,
    function: Handle,
    _shared_of: *const c_void,
    _shared: usize,
    limit: i32,
) -> Code {
    call("cuOccupancyMaxPotentialBlockSize", || {
        let threads = if limit > 0 { limit.min(MOST_THREADS as i32) } else { MOST_THREADS as i32 };
        grid.set(blocks(function, threads)? * crate::device::PROCESSORS)?;
        block.set(threads)
    })
}
