//! Copies small buffers of a device into one contiguous buffer, and back: with one kernel, however many they are.

use std::sync::Arc;

use allstream_cuda_kernels::{Direction, Packed, Segment, pack};

use super::buf::DeviceBuf;
use super::place::DevicePlace;
use super::staging::Block;
use super::stream::DeviceStream;
use super::transfer::refused_in_capture;
use super::waiter::{self, Outcome};
use crate::error::Error;
use crate::types::DType;

const DOING: &str = "pack gradients on a device";
/// Parts begin at multiples of this many bytes. The kernel copies vectors of this size where source and destination are aligned alike.
pub(crate) const ALIGNED: usize = 16;
/// The number of 64-bit words in a row of the table that the kernel reads.
const ROW: usize = size_of::<Segment>() / size_of::<u64>();

/// One of the small buffers that are packed.
pub(crate) struct Part {
    pub(crate) place: DevicePlace,
    /// The byte of the contiguous buffer at which this part begins.
    pub(crate) at: usize,
    pub(crate) bytes: usize,
}

/// What the kernel reads: which bytes of the contiguous buffer belong to which part. The table's memory is used, and goes back to the pool, in the
/// order of the contiguous buffer's stream.
pub(crate) struct Table {
    /// `None`: no part has any bytes.
    rows: Option<DeviceBuf<u64>>,
    count: u32,
}

/// Copies all parts into the contiguous buffer, on its stream, behind what the streams of the parts hold now. These streams wait for the copies.
///
/// # Safety
/// The contiguous buffer and the parts have the lengths that are given, belong to the caller, are each in the order of their stream, and do not overlap.
pub(crate) unsafe fn pack_on_device(
    contiguous: (&DevicePlace, usize),
    parts: &[Part],
) -> Result<Table, Error> {
    let stream = &contiguous.0.stream;
    let others = || streams(parts).filter(|other| !is_same(other, stream));
    // Checked before any stream waits for another: to wait for one that is being captured would take the waiting one into the capture.
    streams(parts).chain([stream]).try_for_each(|stream| refused_in_capture(stream, DOING))?;
    let table = Table::new(stream, parts)?;
    for other in others() {
        stream.wait_for_stream(other)?;
    }
    // SAFETY: the caller's promise; the stream is the contiguous buffer's, and has just been made to wait for the others.
    unsafe { put(stream, contiguous, &table, Direction::Pack) }?;
    all_wait_for(stream, others())?;
    Ok(table)
}

/// Copies all parts back out of the contiguous buffer, on `stream`, by the table with which they were packed. Makes no stream wait for another: the
/// caller does that ([`all_wait_for`]). Allocates no memory: a driver that allocates may wait until the whole device is idle, while `stream` may wait
/// for operations that other ranks have not called yet.
///
/// # Safety
/// As for [`pack_on_device`], but all of the memory is in the order of `stream`, which waits for the contiguous buffer's stream if that is
/// another one. The caller makes the contiguous buffer's stream wait for this kernel before it drops that buffer or the table.
pub(crate) unsafe fn unpack_on_device(
    stream: &DeviceStream,
    contiguous: (&DevicePlace, usize),
    table: &Table,
) -> Result<(), Error> {
    let packed_on = &contiguous.0.stream;
    if !are_of_one_device(stream, packed_on) {
        let (here, there) = (packed_on.device(), stream.device());
        return Err(Error::invalid(
            DOING,
            format!("they are packed on {here:?}, and the stream is of {there:?}"),
        ));
    }
    // SAFETY: the caller's promise.
    unsafe { put(stream, contiguous, table, Direction::Unpack) }
}

/// Whether both are the same stream of the driver. (The handles alone do not tell: those of all devices' default streams are null.)
pub(crate) fn is_same(a: &DeviceStream, b: &DeviceStream) -> bool {
    a == b || are_of_one_device(a, b) && a.as_raw() == b.as_raw()
}

fn are_of_one_device(a: &DeviceStream, b: &DeviceStream) -> bool {
    Arc::ptr_eq(&a.0.context, &b.0.context)
}

/// The streams of the parts. Neighbouring parts that have the same stream give it once.
pub(crate) fn streams(parts: &[Part]) -> impl Iterator<Item = &DeviceStream> {
    parts.chunk_by(|a, b| is_same(&a.place.stream, &b.place.stream)).map(|alike| &alike[0].place.stream)
}

/// Makes other streams wait for what `stream` holds now. If that fails, this thread waits for `stream` instead, so that nothing is out of order.
///
/// # Errors
/// The wait of this thread fails, too.
pub(crate) fn all_wait_for<'a>(
    stream: &DeviceStream,
    others: impl Iterator<Item = &'a DeviceStream>,
) -> Result<(), Error> {
    let mut others = others.peekable();
    if others.peek().is_none() {
        return Ok(());
    }
    stream.make_wait(others).or_else(|_| stream.synchronize())
}

/// Makes all bytes of a buffer zero, in the order of its stream. The caller has the buffer to itself, as with a `&mut` to it.
pub(crate) fn zero_on_device(place: &DevicePlace, bytes: usize) -> Result<(), Error> {
    // SAFETY: the buffer has this many bytes, and exists until its stream has passed this point, as `Buf` promises; `place.stream` is the stream
    // in whose order the buffer is.
    unsafe { place.stream.zero(place.address, bytes) }
}

impl Table {
    /// A table of these parts, in the order of a stream of their device.
    fn new(stream: &DeviceStream, parts: &[Part]) -> Result<Table, Error> {
        let elsewhere = |part: &&Part| !are_of_one_device(&part.place.stream, stream);
        if let Some(part) = parts.iter().find(elsewhere) {
            let (here, there) = (stream.device(), part.place.stream.device());
            return Err(Error::invalid(DOING, format!("a buffer is on {there:?}, and another on {here:?}")));
        }
        let rows: Vec<Segment> = parts
            .iter()
            .filter(|part| part.bytes > 0)
            .map(|part| Segment { tensor: part.place.address, first: part.at as u64, len: part.bytes as u64 })
            .collect();
        let count =
            u32::try_from(rows.len()).map_err(|_| Error::invalid(DOING, "there are too many buffers"))?;
        if rows.is_empty() {
            return Ok(Table { rows: None, count });
        }
        let table = DeviceBuf::raw(stream, ROW * rows.len())?;
        fill(stream, &table, &rows)?;
        Ok(Table { rows: Some(table), count })
    }
}

/// Puts the kernel on a stream.
///
/// # Safety
/// As for [`unpack_on_device`].
unsafe fn put(
    stream: &DeviceStream,
    (contiguous, bytes): (&DevicePlace, usize),
    table: &Table,
    direction: Direction,
) -> Result<(), Error> {
    let Some(rows) = &table.rows else { return Ok(()) };
    let job = Packed {
        tensors: DType::U8,
        buffer: DType::U8,
        segments: rows.as_ptr(),
        count: table.count,
        contiguous: contiguous.address,
        len: bytes as u64,
        factor: 1.0,
    };
    let launch = pack(&job, direction, stream.ctas())
        .ok_or_else(|| Error::system(DOING, "there is no kernel that copies bytes (a bug)"))?;
    stream.load([launch.kernel].into_iter())?;
    // SAFETY: the caller owns the segments, and promises their order and that none overlap; none reaches beyond the contiguous buffer
    // (`Packing::parts` checks it). The table was filled in the order of the contiguous buffer's stream. `stream` is that stream, or waits
    // for it; if it waits, the caller makes the buffer's stream wait for this kernel before the table's memory goes back to the pool.
    unsafe { stream.launch(DOING, &launch) }
}

/// Copies the rows to the table, in the order of its stream, through pinned memory: a copy from other memory may block its caller.
fn fill(stream: &DeviceStream, table: &DeviceBuf<u64>, rows: &[Segment]) -> Result<(), Error> {
    let context = &stream.0.context;
    let bytes = size_of_val(rows);
    let block = Block::new(context, bytes)?;
    // SAFETY: the block has at least `bytes` bytes, which nobody else uses; a row is three words, without gaps.
    unsafe { block.at(0).copy_from_nonoverlapping(rows.as_ptr().cast(), bytes) };
    let copied = context.call(DOING, |cuda| {
        // SAFETY: both sides have at least `bytes` bytes (the table has room for all rows). The block is kept until the copy is over, and the
        // table is in this stream's order.
        unsafe { cuda.memcpy_htod_async(table.as_ptr(), block.at(0).cast(), bytes, *stream.0.raw()) }
    });
    match copied.and_then(|()| stream.point()) {
        Ok(copied) => waiter::watch(copied, Box::new(move |outcome| let_go(block, &outcome))),
        Err(error) => {
            let over = stream.synchronize();
            let_go(block, &over.map_or_else(Outcome::Unknown, |()| Outcome::Reached));
            return Err(error);
        }
    }
    Ok(())
}

/// Gives pinned memory back; or leaks it, if nobody can tell whether the device is done with it.
fn let_go(block: Block, outcome: &Outcome) {
    if matches!(outcome, Outcome::Unknown(_)) {
        std::mem::forget(block);
    }
}
