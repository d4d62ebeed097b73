//! Copies: when their source is read, and whether the caller waits.

use std::sync::Arc;
use std::time::Duration;

use crate::abi::{Address, Handle};
use crate::codes::{Code, Done};
use crate::context::{CONTEXTS, Context, working};
use crate::entry::call;
use crate::knobs::passes;
use crate::space::{Span, find};
use crate::stream::{Stream, Worker};

/// How often a copy that `allstream_test_cuda_pass` holds up checks whether it may run.
const HELD: Duration = Duration::from_millis(1);

/// One side of a copy.
enum Side {
    /// The driver knows this memory.
    Known(Span),
    /// Ordinary host memory, which the driver does not know and a device cannot reach.
    Pageable(usize),
    /// The bytes that were read from pageable memory when the copy was asked for.
    Staged(Box<[u8]>),
}

impl Side {
    fn device(context: &Context, at: Address, length: usize) -> Done<Self> {
        Span::new(context, at, length).map(Side::Known)
    }

    fn host(at: usize, length: usize) -> Done<Self> {
        if at == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let memory = find(at as Address, length).filter(|memory| memory.on_the_host());
        Ok(memory.map_or(Side::Pageable(at), |memory| Side::Known(Span::of(memory, at as Address))))
    }

    fn any(context: &Context, at: Address, length: usize) -> Done<Self> {
        match find(at, 1) {
            // Copies reach page-locked memory whether or not devices have an address for it.
            Some(memory) if memory.on_the_host() && memory.holds(at, length) => {
                Ok(Side::Known(Span::of(memory, at)))
            }
            Some(_) => Self::device(context, at, length),
            None => Self::host(at as usize, length),
        }
    }

    fn on_the_host(&self) -> bool {
        match self {
            Side::Known(span) => span.memory.on_the_host(),
            _ => true,
        }
    }

    fn pointer(&self) -> Done<*mut u8> {
        match self {
            Side::Known(span) => span.pointer(),
            Side::Pageable(at) => Ok(*at as *mut u8),
            Side::Staged(bytes) => Ok(bytes.as_ptr().cast_mut()),
        }
    }
}

/// Copies in two parts, with a delay after each, so that a reader that does not wait may see half of the data.
fn transfer(to: &Side, from: &Side, length: usize, worker: &Worker<'_>) -> Done {
    for part in [0..length / 2, length / 2..length] {
        let (to, from) = (to.pointer()?, from.pointer()?);
        // SAFETY: both sides are `length` bytes long. Spans were checked against their allocation, and keep it mapped. Pageable
        // memory is only ever a target: the caller promised it until the call returns, and the call waits for this copy, unless the
        // context ends first. Staged bytes were read with this length. The sides may overlap.
        unsafe { std::ptr::copy(from.add(part.start), to.add(part.start), part.len()) };
        worker.dawdle();
    }
    Ok(())
}

fn copy(stream: &Arc<Stream>, to: Side, mut from: Side, length: usize, host_waits: bool) -> Done {
    if length == 0 {
        return Ok(());
    }
    if let Side::Pageable(at) = from {
        // SAFETY: the caller promised that `length` bytes can be read there during the call, but not later: they are copied now.
        from = Side::Staged(unsafe { std::slice::from_raw_parts(at as *const u8, length) }.into());
    }
    let waits = host_waits || matches!(to, Side::Pageable(_));
    let ticket = stream.submit(move |worker| {
        if to.on_the_host() != from.on_the_host() {
            while !passes(from.on_the_host()) && worker.context.is_alive() {
                std::thread::sleep(HELD);
            }
        }
        transfer(&to, &from, length, worker)
    })?;
    if let (true, Some(ticket)) = (waits, ticket) {
        ticket.wait(&stream.context);
        stream.context.check()?;
    }
    Ok(())
}

/// A copy without a stream runs in stream 0. The call waits if one side is host memory, and only then.
fn now(length: usize, sides: impl FnOnce(&Context) -> Done<(Side, Side)>) -> Done {
    let context = working()?;
    if length == 0 {
        return Ok(());
    }
    let (to, from) = sides(&context)?;
    let waits = to.on_the_host() || from.on_the_host();
    copy(&Stream::named(0)?, to, from, length, waits)
}

fn later(stream: Handle, length: usize, sides: impl FnOnce(&Context) -> Done<(Side, Side)>) -> Done {
    let stream = Stream::named(stream)?;
    stream.context.check()?;
    if length == 0 {
        return Ok(());
    }
    let (to, from) = sides(&stream.context)?;
    copy(&stream, to, from, length, false)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyHtoD_v2(to: Address, from: usize, length: usize) -> Code {
    call("cuMemcpyHtoD_v2", || {
        now(length, |context| Ok((Side::device(context, to, length)?, Side::host(from, length)?)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoH_v2(to: usize, from: Address, length: usize) -> Code {
    call("cuMemcpyDtoH_v2", || {
        now(length, |context| Ok((Side::host(to, length)?, Side::device(context, from, length)?)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoD_v2(to: Address, from: Address, length: usize) -> Code {
    call("cuMemcpyDtoD_v2", || {
        now(length, |context| Ok((Side::device(context, to, length)?, Side::device(context, from, length)?)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpy(to: Address, from: Address, length: usize) -> Code {
    call("cuMemcpy", || {
        now(length, |context| Ok((Side::any(context, to, length)?, Side::any(context, from, length)?)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: Address,
    from: usize,
    length: usize,
    stream: Handle,
) -> Code {
    call("cuMemcpyHtoDAsync_v2", || {
        later(stream, length, |context| Ok((Side::device(context, to, length)?, Side::host(from, length)?)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: usize,
    from: Address,
    length: usize,
    stream: Handle,
) -> Code {
    call("cuMemcpyDtoHAsync_v2", || {
        later(stream, length, |context| Ok((Side::host(to, length)?, Side::device(context, from, length)?)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: Address,
    from: Address,
    length: usize,
    stream: Handle,
) -> Code {
    call("cuMemcpyDtoDAsync_v2", || {
        later(stream, length, |context| {
            Ok((Side::device(context, to, length)?, Side::device(context, from, length)?))
        })
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyAsync(
    to: Address,
    from: Address,
    length: usize,
    stream: Handle,
) -> Code {
    call("cuMemcpyAsync", || {
        later(stream, length, |context| {
            Ok((Side::any(context, to, length)?, Side::any(context, from, length)?))
        })
    })
}

/// Each side is reached by its own context, so the two contexts need no peer access to each other.
fn peer_sides(to: (Address, Handle), from: (Address, Handle), length: usize) -> Done<(Side, Side)> {
    let side = |(at, context)| {
        let context = CONTEXTS.get(context).map_err(|_| Code::INVALID_CONTEXT)?;
        context.check()?;
        Side::device(&context, at, length)
    };
    Ok((side(to)?, side(from)?))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyPeer(
    to: Address,
    to_context: Handle,
    from: Address,
    from_context: Handle,
    length: usize,
) -> Code {
    call("cuMemcpyPeer", || {
        working()?;
        let (target, source) = peer_sides((to, to_context), (from, from_context), length)?;
        // The copy comes after all work that both contexts have queued.
        for context in [to_context, from_context] {
            let context = CONTEXTS.get(context).map_err(|_| Code::INVALID_CONTEXT)?;
            Stream::all_of(&context).iter().try_for_each(|stream| stream.synchronize())?;
        }
        copy(&Stream::named(0)?, target, source, length, true)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyPeerAsync(
    to: Address,
    to_context: Handle,
    from: Address,
    from_context: Handle,
    length: usize,
    stream: Handle,
) -> Code {
    call("cuMemcpyPeerAsync", || {
        later(stream, length, |_| peer_sides((to, to_context), (from, from_context), length))
    })
}
