//! The buffers on which collectives are timed: of any type, in the user's own memory, in the arena, or on a device. Only the code that reads
//! or writes their values is compiled for each type; the code that is timed is not.
//!
//! An input on a device is made once: the host copies its beginning there, and the device makes the rest by copies. An operation in place
//! overwrites its input: for these the device keeps a second copy, from which it refreshes the input before every round. A result is fetched
//! and compared a piece at a time.

use allstream::cuda::{DeviceBuf, DeviceStream, PinnedBuf};
use allstream::{AnyBuf, Buf, Comm, DType, Error, bf16, f8e4m3, f8e5m2, f16};

use super::case::{Case, PERIOD, Value};
use super::check::{self, Check};

/// Elements of an input that the host copies to a device, a whole number of periods. The device then doubles them again and again; each
/// doubling takes about as long as this first copy (1 ms at most).
const BEGINNING: usize = 2048 * PERIOD;
/// Bytes of a result that are fetched at a time: so many that the fixed cost of a copy (tens of microseconds) does not matter, and so few
/// that 8 ranks at once can have them in pinned memory.
const PIECE: usize = 16 << 20;

/// Where buffers are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Vectors.
    User,
    /// The region that ranks of a host share.
    Arena,
    /// The memory of a device; buffers are used in the order of this stream.
    Device(DeviceStream),
}

/// How buffers of one type, in one place, are made, filled and checked.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) dtype: DType,
    pub(crate) place: Place,
    values: Values,
}

/// Does something with a buffer of a case, and returns the buffer.
type Use = fn(AnyBuf, &Case, bool) -> Result<AnyBuf, Error>;
/// Counts the wrong values of a result, and returns the buffer, too.
type Count = fn(AnyBuf, &Case, bool) -> Result<(AnyBuf, u64), Error>;
type Pair = (AnyBuf, AnyBuf);

/// The functions that are compiled for each element type.
#[derive(Clone, Copy, Debug)]
struct Values {
    make: fn(&Comm, &Place, usize) -> Result<AnyBuf, Error>,
    fill: Use,
    clear: fn(AnyBuf) -> AnyBuf,
    copy: fn(AnyBuf) -> Result<Pair, Error>,
    refresh: fn(AnyBuf, AnyBuf) -> Result<Pair, Error>,
    wrong: Count,
}

impl Memory {
    pub(crate) fn new(dtype: DType, place: Place) -> Memory {
        let values = match dtype {
            DType::Bool => Values::of::<bool>(),
            DType::I8 => Values::of::<i8>(),
            DType::I16 => Values::of::<i16>(),
            DType::I32 => Values::of::<i32>(),
            DType::I64 => Values::of::<i64>(),
            DType::U8 => Values::of::<u8>(),
            DType::U16 => Values::of::<u16>(),
            DType::U32 => Values::of::<u32>(),
            DType::U64 => Values::of::<u64>(),
            DType::F16 => Values::of::<f16>(),
            DType::BF16 => Values::of::<bf16>(),
            DType::F32 => Values::of::<f32>(),
            DType::F64 => Values::of::<f64>(),
            DType::F8E4M3 => Values::of::<f8e4m3>(),
            DType::F8E5M2 => Values::of::<f8e5m2>(),
        };
        Memory { dtype, place, values }
    }

    /// The stream in whose order buffers on a device are used; `None` for host memory.
    pub(crate) fn stream(&self) -> Option<&DeviceStream> {
        match &self.place {
            Place::Device(stream) => Some(stream),
            Place::User | Place::Arena => None,
        }
    }

    /// A buffer of `len` zeros.
    pub(crate) fn make(&self, comm: &Comm, len: usize) -> Result<AnyBuf, Error> {
        (self.values.make)(comm, &self.place, len)
    }

    /// Writes the input of a case into a buffer; one on a device must hold zeros. All is written when this returns, so none of it is timed.
    pub(crate) fn fill(&self, buf: AnyBuf, case: &Case, in_place: bool) -> Result<AnyBuf, Error> {
        (self.values.fill)(buf, case, in_place)
    }

    /// Copies a buffer on a device: returns the buffer and its copy.
    pub(crate) fn copy(&self, buf: AnyBuf) -> Result<Pair, Error> {
        (self.values.copy)(buf)
    }

    /// Copies `kept` into `buf`, both on a device, and waits until the device has done so.
    pub(crate) fn refresh(&self, buf: AnyBuf, kept: AnyBuf) -> Result<Pair, Error> {
        (self.values.refresh)(buf, kept)
    }

    /// Fills a buffer with zeros (on a device: returns a new buffer in its place). All is zero when this returns.
    pub(crate) fn clear(&self, comm: &Comm, buf: AnyBuf) -> Result<AnyBuf, Error> {
        match self.stream() {
            None => Ok((self.values.clear)(buf)),
            Some(stream) => {
                let len = buf.len();
                drop(buf);
                let buf = self.make(comm, len)?;
                stream.synchronize()?;
                Ok(buf)
            }
        }
    }

    /// How many elements of a case's result are wrong.
    pub(crate) fn wrong(&self, buf: AnyBuf, case: &Case, in_place: bool) -> Result<(AnyBuf, u64), Error> {
        (self.values.wrong)(buf, case, in_place)
    }
}

impl Values {
    fn of<T: Value>() -> Values {
        Values {
            make: |comm, place, len| match place {
                Place::User => Ok(AnyBuf::new(vec![T::of(0); len])),
                Place::Arena => comm.alloc::<T>(len).map(AnyBuf::new),
                Place::Device(stream) => DeviceBuf::<T>::zeroed(stream, len).map(AnyBuf::new),
            },
            fill: |mut buf, case, in_place| match buf.as_mut_slice::<T>() {
                Some(values) => {
                    case.fill(values, in_place);
                    Ok(buf)
                }
                None => filled(on_device::<T>(buf)?, case, in_place).map(AnyBuf::new),
            },
            clear: |mut buf| {
                buf.as_mut_slice::<T>().into_iter().for_each(|values| values.fill(T::of(0)));
                buf
            },
            copy: |buf| {
                let buf = on_device::<T>(buf)?;
                let stream = buf.stream().clone();
                let (buf, copy) = buf.copy_to(&stream).wait()?;
                Ok((AnyBuf::new(buf), AnyBuf::new(copy)))
            },
            refresh: |buf, kept| {
                let (kept, buf) = on_device::<T>(buf)?.copy_from(on_device::<T>(kept)?).wait()?;
                Ok((AnyBuf::new(buf), AnyBuf::new(kept)))
            },
            wrong: |buf, case, in_place| match buf.as_slice::<T>() {
                Some(values) => {
                    let wrong = check::wrong(case, values, in_place);
                    Ok((buf, wrong))
                }
                None => {
                    let (buf, wrong) = wrong_on_device(on_device::<T>(buf)?, case, in_place)?;
                    Ok((AnyBuf::new(buf), wrong))
                }
            },
        }
    }
}

/// Writes the input of a case into a buffer of zeros. The host copies the beginning; the device then doubles what is there until all is.
fn filled<T: Value>(mut buf: DeviceBuf<T>, case: &Case, in_place: bool) -> Result<DeviceBuf<T>, Error> {
    let (len, own) = (buf.len(), case.own(buf.len(), in_place));
    let mut beginning = vec![T::of(0); own.len().min(BEGINNING)];
    case.begin(&mut beginning);
    let mut done = beginning.len();
    let mut parts = buf.split(&[own.start, done, len - own.start - done])?;
    let (_, part) = parts.remove(1).copy_from_host(beginning).wait()?;
    parts.push(part);
    buf = DeviceBuf::join(parts)?;
    while done < own.len() {
        let more = done.min(own.len() - done);
        let rest = len - own.start - done - more;
        let mut parts = buf.split(&[own.start, more, done - more, more, rest])?;
        let (to, from) = (parts.remove(3), parts.remove(1));
        let (from, to) = to.copy_from(from).wait()?;
        parts.extend([from, to]);
        buf = DeviceBuf::join(parts)?;
        done += more;
    }
    Ok(buf)
}

/// How many elements of a result on a device are wrong: fetched and compared a piece at a time.
fn wrong_on_device<T: Value>(
    buf: DeviceBuf<T>,
    case: &Case,
    in_place: bool,
) -> Result<(DeviceBuf<T>, u64), Error> {
    let result = case.result(in_place);
    if result.is_empty() || buf.len() < result.end {
        return Ok((buf, result.len() as u64));
    }
    let whole = PIECE / size_of::<T>();
    let (pieces, rest) = (result.len() / whole, result.len() % whole);
    let lens = [result.start].into_iter().chain(std::iter::repeat_n(whole, pieces));
    let lens: Vec<_> = lens.chain([rest, buf.len() - result.end]).collect();
    let mut check = Check::new(case);
    let (mut at, mut wrong, mut host) = (0, 0, None);
    let mut parts = Vec::with_capacity(lens.len());
    for part in buf.split(&lens)? {
        if !result.contains(&part.offset()) || part.is_empty() {
            parts.push(part);
            continue;
        }
        let room = host.take().filter(|room: &PinnedBuf<T>| room.len() == part.len());
        let room = room.map_or_else(|| PinnedBuf::zeroed(&part.device(), part.len()), Ok)?;
        let (part, room) = part.to_host(room).wait()?;
        wrong += check.wrong(at, &room);
        at += part.len();
        parts.push(part);
        host = Some(room);
    }
    Ok((DeviceBuf::join(parts)?, wrong))
}

fn on_device<T: Value>(buf: AnyBuf) -> Result<DeviceBuf<T>, Error> {
    buf.into_inner::<DeviceBuf<T>>().map_err(|other| Error::Invalid {
        call: "perf".into(),
        problem: format!("{other:?} is no buffer of {} on a device", T::DTYPE),
    })
}
