//! An entry point for other test libraries (`tests/nccl`) that put kernels of their own on streams, as NCCL does: such work touches
//! device memory, and may wait for anything.

use std::ffi::c_void;

use crate::abi::{Address, Handle, In};
use crate::codes::{Code, Done};
use crate::entry::call;
use crate::space::Span;
use crate::stream::{Stream, Worker};

/// Bytes that a piece of work touches.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Place {
    at: Address,
    bytes: usize,
}

/// The function that the stream calls when it comes to the work, with the caller's argument and a pointer to each place in this
/// process (null for one of 0 bytes). It returns 0, or the code of a device error.
type Work = unsafe extern "C" fn(*mut c_void, *const *mut u8) -> Code;

/// The pointer that the caller gave for its function.
struct Argument(*mut c_void);

// SAFETY: we never dereference the pointer; a caller that queues work expects its function to get the pointer on another thread.
unsafe impl Send for Argument {}

fn put(stream: Handle, places: &In<Place>, count: usize, work: Option<Work>, argument: *mut c_void) -> Done {
    let (stream, work) = (Stream::named(stream)?, work.ok_or(Code::INVALID_VALUE)?);
    let mut spans = Vec::with_capacity(count);
    for place in 0..count {
        let Place { at, bytes } = places.at(place)?;
        spans.push(if bytes == 0 { None } else { Some(Span::new(&stream.context, at, bytes)?) });
    }
    let argument = Argument(argument);
    let run = move |worker: &Worker<'_>| {
        let argument = &argument;
        worker.dawdle();
        let at = |span: &Option<Span>| span.as_ref().map_or(Ok(std::ptr::null_mut()), Span::pointer);
        let places = spans.iter().map(at).collect::<Done<Vec<_>>>()?;
        // SAFETY: the caller's function, with the caller's argument, once; the spans keep the memory for as long as it runs.
        match unsafe { work(argument.0, places.as_ptr()) } {
            Code::SUCCESS => Ok(()),
            code => Err(code),
        }
    };
    // Such work cannot be captured.
    stream.submit(run)?.map(|_| ()).ok_or(Code::STREAM_CAPTURE_UNSUPPORTED)
}

/// Puts work on a stream. `places` are the `count` pieces of device memory that the work touches: they count as in use until it is over.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn allstream_test_cuda_work(
    stream: Handle,
    places: In<Place>,
    count: usize,
    work: Option<Work>,
    argument: *mut c_void,
) -> Code {
    call("allstream_test_cuda_work", || put(stream, &places, count, work, argument))
}
