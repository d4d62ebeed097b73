//! Work that is neither copy nor kernel: values written and waited for, and functions of the host.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use crate::abi::{Address, Handle, In};
use crate::codes::{Code, Done};
use crate::entry::{call, host_function};
use crate::space::Span;
use crate::stream::{Stream, Worker};

/// A word in memory that others change.
struct Word {
    span: Span,
    wide: bool,
}

impl Word {
    fn new(stream: &Stream, at: Address, wide: bool) -> Done<Self> {
        let size = if wide { 8 } else { 4 };
        if !at.is_multiple_of(size) {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Word { span: Span::new(&stream.context, at, size as usize)?, wide })
    }

    fn load(&self) -> Done<u64> {
        let place = self.span.pointer()?;
        // SAFETY: the span covers the word and keeps it mapped, and the word is aligned; atomic, as others write the word.
        Ok(unsafe {
            if self.wide {
                AtomicU64::from_ptr(place.cast()).load(Ordering::Acquire)
            } else {
                AtomicU32::from_ptr(place.cast()).load(Ordering::Acquire).into()
            }
        })
    }

    fn store(&self, value: u64) -> Done {
        let place = self.span.pointer()?;
        fence(Ordering::SeqCst);
        // SAFETY: as for `load`.
        unsafe {
            if self.wide {
                AtomicU64::from_ptr(place.cast()).store(value, Ordering::Release);
            } else {
                AtomicU32::from_ptr(place.cast()).store(value as u32, Ordering::Release);
            }
        }
        Ok(())
    }

    fn meets(&self, value: u64, how: u32) -> Done<bool> {
        let found = self.load()?;
        let mask = if self.wide { u64::MAX } else { u32::MAX.into() };
        Ok(match how {
            // Cyclic, for counters that wrap around.
            0 if self.wide => found.wrapping_sub(value) as i64 >= 0,
            0 => (found as u32).wrapping_sub(value as u32) as i32 >= 0,
            1 => found == value & mask,
            2 => found & value & mask != 0,
            _ => !(found | value) & mask != 0,
        })
    }
}

/// What a stream does with a word when it comes there.
enum Deed {
    Write(u64),
    Wait { value: u64, how: u32 },
}

/// A word, and what a stream does with it.
struct Errand {
    word: Word,
    deed: Deed,
}

impl Errand {
    fn write(stream: &Stream, at: Address, value: u64, flags: u32, wide: bool) -> Done<Self> {
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Errand { word: Word::new(stream, at, wide)?, deed: Deed::Write(value) })
    }

    fn wait(stream: &Stream, at: Address, value: u64, flags: u32, wide: bool) -> Done<Self> {
        const FLUSH: u32 = 1 << 30;
        let how = flags & !FLUSH;
        if how > 3 {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Errand { word: Word::new(stream, at, wide)?, deed: Deed::Wait { value, how } })
    }

    fn run(&self, worker: &Worker<'_>) -> Done {
        let (value, how) = match self.deed {
            Deed::Write(value) => return self.word.store(value),
            Deed::Wait { value, how } => (value, how),
        };
        let mut polls = 0_u32;
        while !self.word.meets(value, how)? {
            // If the context has ended, or other work in it has failed, this wait ends too.
            worker.context.check()?;
            polls += 1;
            // Polls fast at first, then rarely, so as not to occupy a core.
            if polls < 100 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(20)) }
        }
        Ok(())
    }
}

fn write(stream: Handle, at: Address, value: u64, flags: u32, wide: bool) -> Done {
    let stream = Stream::named(stream)?;
    let errand = Errand::write(&stream, at, value, flags, wide)?;
    stream.submit(move |worker| errand.run(worker)).map(|_| ())
}

fn wait(stream: Handle, at: Address, value: u64, flags: u32, wide: bool) -> Done {
    let stream = Stream::named(stream)?;
    let errand = Errand::wait(&stream, at, value, flags, wide)?;
    stream.submit(move |worker| errand.run(worker)).map(|_| ())
}

/// `CUstreamBatchMemOpParams`, with the fields of the writes and waits of values.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct BatchedOp {
    operation: u32,
    at: Address,
    value: u64,
    flags: u32,
    _alias: u64,
    _pad: u64,
}

/// Many operations in one call, done in the order of the list.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamBatchMemOp_v2(
    stream: Handle,
    count: u32,
    operations: In<BatchedOp>,
    flags: u32,
) -> Code {
    const MOST: u32 = 256;
    let errand = |stream: &Stream, op: BatchedOp| match op.operation {
        1 => Errand::wait(stream, op.at, op.value & u64::from(u32::MAX), op.flags, false),
        2 => Errand::write(stream, op.at, op.value & u64::from(u32::MAX), op.flags, false),
        4 => Errand::wait(stream, op.at, op.value, op.flags, true),
        5 => Errand::write(stream, op.at, op.value, op.flags, true),
        _ => Err(Code::NOT_SUPPORTED),
    };
    call("cuStreamBatchMemOp_v2", || {
        let stream = Stream::named(stream)?;
        if flags != 0 || !(1..=MOST).contains(&count) {
            return Err(Code::INVALID_VALUE);
        }
        let all = (0..count as usize).map(|index| errand(&stream, operations.at(index)?));
        let all = all.collect::<Done<Vec<_>>>()?;
        stream.submit(move |worker| all.iter().try_for_each(|errand| errand.run(worker))).map(|_| ())
    })
}

macro_rules! values {
    ($($name:ident $does:ident $value:ty;)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(stream: Handle, at: Address, value: $value, flags: u32) -> Code {
            call(stringify!($name), || $does(stream, at, value.into(), flags, size_of::<$value>() == 8))
        }
    )*};
}

values! {
    cuStreamWriteValue32 write u32;
    cuStreamWriteValue32_v2 write u32;
    cuStreamWriteValue64 write u64;
    cuStreamWriteValue64_v2 write u64;
    cuStreamWaitValue32 wait u32;
    cuStreamWaitValue32_v2 wait u32;
    cuStreamWaitValue64 wait u64;
    cuStreamWaitValue64_v2 wait u64;
}

/// A pointer of the caller's that goes back to the caller's function.
struct Argument(*mut c_void);

// SAFETY: we never dereference the pointer; a caller that queues a host function expects it to get the pointer on another thread.
unsafe impl Send for Argument {}

impl Argument {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// The function is not called once the context has failed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchHostFunc(
    stream: Handle,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
) -> Code {
    call("cuLaunchHostFunc", || {
        let (stream, function) = (Stream::named(stream)?, function.ok_or(Code::INVALID_VALUE)?);
        let argument = Argument(argument);
        let work = move |_: &Worker<'_>| {
            // SAFETY: the caller's function, with the caller's argument, once, as the caller asked.
            host_function(|| unsafe { function(argument.get()) });
            Ok(())
        };
        stream.submit(work).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamAddCallback(
    stream: Handle,
    function: Option<unsafe extern "C" fn(Handle, Code, *mut c_void)>,
    argument: *mut c_void,
    flags: u32,
) -> Code {
    call("cuStreamAddCallback", || {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (named, function) = (Stream::named(stream)?, function.ok_or(Code::INVALID_VALUE)?);
        let argument = Argument(argument);
        let work = move |_: &Worker<'_>| {
            // SAFETY: as for `cuLaunchHostFunc`.
            host_function(|| unsafe { function(stream, Code::SUCCESS, argument.get()) });
            Ok(())
        };
        named.submit(work).map(|_| ())
    })
}
