//! Memory of devices: taking it, giving it back, filling it, asking about it.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use crate::abi::{Address, Handle, In, Out};
use crate::codes::{Code, Done};
use crate::context::{Context, pool_of, working};
use crate::entry::call;
use crate::knobs;
use crate::space::{self, Kind, Memory, Span, find};
use crate::stream::Stream;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(out: Out<Address>, size: usize) -> Code {
    call("cuMemAlloc_v2", || out.set(Memory::on_device(Kind::Device, size, &*working()?)?.base))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree_v2(at: Address) -> Code {
    call("cuMemFree_v2", || {
        if at == 0 {
            return Ok(());
        }
        let context = working()?;
        let memory = space::beginning(at).ok_or(Code::INVALID_VALUE)?;
        match memory.kind {
            Kind::Device => memory.end(),
            // Memory of a pool may be freed this way too, once all streams of the current context are done.
            Kind::Pool if !memory.ending.swap(true, Ordering::AcqRel) => {
                Stream::all_of(&context).iter().try_for_each(|stream| stream.synchronize())?;
                memory.end()
            }
            _ => Err(Code::INVALID_VALUE),
        }
    })
}

fn allocate_async(out: &Out<Address>, size: usize, stream: Handle) -> Done {
    let stream = Stream::named(stream)?;
    stream.context.check()?;
    out.set(Memory::on_device(Kind::Pool, size, &stream.context)?.base)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocAsync(out: Out<Address>, size: usize, stream: Handle) -> Code {
    call("cuMemAllocAsync", || allocate_async(&out, size, stream))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocFromPoolAsync(
    out: Out<Address>,
    size: usize,
    pool: Handle,
    stream: Handle,
) -> Code {
    call("cuMemAllocFromPoolAsync", || {
        if pool != pool_of(Stream::named(stream)?.context.device.ordinal) {
            return Err(Code::INVALID_VALUE);
        }
        allocate_async(&out, size, stream)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeAsync(at: Address, stream: Handle) -> Code {
    call("cuMemFreeAsync", || {
        let stream = Stream::named(stream)?;
        if at == 0 {
            return Ok(());
        }
        let memory = space::beginning(at).ok_or(Code::INVALID_VALUE)?;
        if !matches!(memory.kind, Kind::Pool | Kind::Device) || memory.ending.swap(true, Ordering::AcqRel) {
            return Err(Code::INVALID_VALUE);
        }
        stream.submit(move |_| memory.end().map_err(|_| Code::ILLEGAL_ADDRESS)).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> Code {
    call("cuMemGetInfo_v2", || {
        let used = working()?.device.used.load(Ordering::Relaxed);
        free.set_if_wanted(knobs::memory().saturating_sub(used));
        total.set_if_wanted(knobs::memory());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: Out<Address>,
    size: Out<usize>,
    at: Address,
) -> Code {
    call("cuMemGetAddressRange_v2", || {
        let memory = find(at, 1).filter(|memory| memory.kind != Kind::Registered).ok_or(Code::NOT_FOUND)?;
        base.set_if_wanted(memory.base);
        size.set_if_wanted(memory.size);
        Ok(())
    })
}

/// Writes one attribute, in its own width: for an unknown pointer -2 as the device's number, and zeros for all else. Gives whether
/// the pointer has the attribute.
fn attribute(out: *mut c_void, attribute: i32, at: Address) -> Done<bool> {
    let memory = find(at, 1);
    let known = memory.as_deref();
    let host = known.is_some_and(Memory::on_the_host);
    match attribute {
        // Memory of a pool belongs to no context.
        1 => {
            let context = known.filter(|memory| memory.kind != Kind::Pool);
            Out::from_untyped(out).set(context.map_or(0, |memory| memory.context))?;
        }
        2 => Out::from_untyped(out).set(known.map_or(0_u32, |_| if host { 1 } else { 2 }))?,
        3 => Out::from_untyped(out).set(if known.is_some() { at } else { 0 })?,
        4 => Out::from_untyped(out).set(if host { at } else { 0 })?,
        6 => Out::from_untyped(out).set(0_u32)?,
        7 => Out::from_untyped(out).set(known.map_or(0, |memory| memory.id))?,
        8 => Out::from_untyped(out).set(0_u8)?,
        9 => Out::from_untyped(out).set(known.map_or(-2, |memory| memory.device))?,
        10 => {
            Out::from_untyped(out).set(u8::from(known.is_some_and(|memory| memory.kind == Kind::Device)))?
        }
        11 => Out::from_untyped(out).set(known.map_or(0, |memory| memory.base))?,
        12 => Out::from_untyped(out).set(known.map_or(0, |memory| memory.size))?,
        13 => Out::from_untyped(out).set(u8::from(known.is_some()))?,
        // What the device of the current context may do with it: read and write, or nothing.
        16 => {
            let reached = known.is_some_and(|memory| working().is_ok_and(|context| context.reaches(memory)));
            Out::from_untyped(out).set(if reached { 3_u32 } else { 0 })?;
        }
        17 => {
            let pool = known.filter(|memory| memory.kind == Kind::Pool);
            Out::from_untyped(out).set(pool.map_or(0, |memory| pool_of(memory.device)))?;
        }
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(known.is_some() && (attribute != 4 || host))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttribute(out: *mut c_void, number: i32, at: Address) -> Code {
    call(
        "cuPointerGetAttribute",
        || {
            if attribute(out, number, at)? { Ok(()) } else { Err(Code::INVALID_VALUE) }
        },
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttributes(
    count: u32,
    numbers: In<i32>,
    places: In<*mut c_void>,
    at: Address,
) -> Code {
    call("cuPointerGetAttributes", || {
        for index in 0..count as usize {
            attribute(places.at(index)?, numbers.at(index)?, at)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerSetAttribute(_value: In<u8>, number: i32, at: Address) -> Code {
    call("cuPointerSetAttribute", || {
        // Only the attribute for synchronous copies (6) can be set; it changes nothing here.
        if number == 6 && find(at, 1).is_some() { Ok(()) } else { Err(Code::INVALID_VALUE) }
    })
}

/// The most bytes that a fill copies at a time: a multiple of every pattern's size that stays in a cache.
const COPIED: usize = 64 << 10;

/// Fills `count` elements with a pattern.
fn fill(
    context: &Context,
    at: Address,
    pattern: &[u8],
    count: usize,
    stream: &std::sync::Arc<Stream>,
) -> Done {
    let size = count.checked_mul(pattern.len()).ok_or(Code::INVALID_VALUE)?;
    if size == 0 {
        return Ok(());
    }
    if !at.is_multiple_of(pattern.len() as u64) {
        return Err(Code::INVALID_VALUE);
    }
    let span = Span::new(context, at, size)?;
    let pattern = pattern.to_vec();
    stream.submit(move |_| {
        let start = span.pointer()?;
        // Writes the pattern once, then copies what is filled already behind itself: that takes few steps, however small the
        // pattern is.
        let mut done = pattern.len();
        // SAFETY: the span is `count` patterns long, at least one, and keeps its memory mapped.
        unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), start, done) };
        while done < size {
            let more = done.min(size - done).min(COPIED);
            // SAFETY: as above; what is read lies before what is written, and both within the span.
            unsafe { std::ptr::copy_nonoverlapping(start, start.add(done), more) };
            done += more;
        }
        Ok(())
    })?;
    Ok(())
}

/// As in the real library, the call does not wait for the fill, even without a stream.
fn fill_now(at: Address, pattern: &[u8], count: usize) -> Done {
    fill(&*working()?, at, pattern, count, &Stream::named(0)?)
}

fn fill_later(at: Address, pattern: &[u8], count: usize, stream: Handle) -> Done {
    let stream = Stream::named(stream)?;
    fill(&stream.context, at, pattern, count, &stream)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD8_v2(at: Address, value: u8, count: usize) -> Code {
    call("cuMemsetD8_v2", || fill_now(at, &[value], count))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD16_v2(at: Address, value: u16, count: usize) -> Code {
    call("cuMemsetD16_v2", || fill_now(at, &value.to_le_bytes(), count))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD32_v2(at: Address, value: u32, count: usize) -> Code {
    call("cuMemsetD32_v2", || fill_now(at, &value.to_le_bytes(), count))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD8Async(
    at: Address,
    value: u8,
    count: usize,
    stream: Handle,
) -> Code {
    call("cuMemsetD8Async", || fill_later(at, &[value], count, stream))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD16Async(
    at: Address,
    value: u16,
    count: usize,
    stream: Handle,
) -> Code {
    call("cuMemsetD16Async", || fill_later(at, &value.to_le_bytes(), count, stream))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD32Async(
    at: Address,
    value: u32,
    count: usize,
    stream: Handle,
) -> Code {
    call("cuMemsetD32Async", || fill_later(at, &value.to_le_bytes(), count, stream))
}
