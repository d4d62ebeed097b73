//! The buffers that collectives are timed on: of any type, the user's own, in the arena, or on a device. What looks at their
//! values is compiled for each type; what is timed is not.
//!
//! An input on a device is made once: the host puts a small part of it there, and the device makes the rest, and a copy of
//! it, from which it refreshes the input before every round. A result is fetched and compared a piece at a time.

use allstream::cuda::{DeviceBuf, DeviceStream, PinnedBuf};
use allstream::{AnyBuf, Buf, Comm, DType, Error, bf16, f8e4m3, f8e5m2, f16};

use super::case::{Case, PERIOD, Value};
use super::check::{self, Check};

/// Elements of an input that the host puts on a device, a whole number of periods: the device doubles them, and each doubling
/// costs about as much as this (1 ms at most).
const BEGINNING: usize = 2048 * PERIOD;
/// Bytes of a result that are fetched at a time: long beside what a copy costs (tens of microseconds), short beside what may be
/// pinned, for 8 ranks at once.
const PIECE: usize = 16 << 20;

/// Where buffers are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Vectors.
    User,
    /// The region that ranks of a host share.
    Arena,
    /// A device, in the order of this stream.
    Device(DeviceStream),
}

/// How buffers of one type, in one place, are made, filled and checked.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) dtype: DType,
    pub(crate) place: Place,
    values: Values,
}

/// Does something with a buffer of a case, which comes back.
type Use = fn(AnyBuf, &Case, bool) -> Result<AnyBuf, Error>;
/// Counts the values of a result that are not what they must be.
type Count = fn(AnyBuf, &Case, bool) -> Result<(AnyBuf, u64), Error>;
type Pair = (AnyBuf, AnyBuf);

/// What depends on the type.
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

    /// The stream in whose order buffers on a device are.
    pub(crate) fn stream(&self) -> Option<&DeviceStream> {
        match &self.place {
            Place::Device(stream) => Some(stream),
            Place::User | Place::Arena => None,
        }
    }

    /// A buffer of so many zeros.
    pub(crate) fn make(&self, comm: &Comm, len: usize) -> Result<AnyBuf, Error> {
        (self.values.make)(comm, &self.place, len)
    }

    /// Puts in the input of a case: on a device into a buffer of zeros. Done when it returns: the clock starts later.
    pub(crate) fn fill(&self, buf: AnyBuf, case: &Case, in_place: bool) -> Result<AnyBuf, Error> {
        (self.values.fill)(buf, case, in_place)
    }

    /// A buffer on a device, and a copy of it.
    pub(crate) fn copy(&self, buf: AnyBuf) -> Result<Pair, Error> {
        (self.values.copy)(buf)
    }

    /// Copies the second buffer into the first, both on a device, which does so. Done when it returns.
    pub(crate) fn refresh(&self, buf: AnyBuf, kept: AnyBuf) -> Result<Pair, Error> {
        (self.values.refresh)(buf, kept)
    }

    /// Puts zeros in, on a device by taking another buffer. Done when it returns.
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

/// Puts the input of a case into a buffer of zeros: its beginning from the host, which the device doubles until all is there.
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
