//! The buffers that collectives are timed on: of any type, the user's own, in the arena, or on a device. What looks at their
//! values is compiled for each type; what is timed is not.

use allstream::cuda::{DeviceBuf, DeviceStream};
use allstream::{AnyBuf, Comm, DType, Error, bf16, f8e4m3, f8e5m2, f16};

use super::case::{Case, Value};

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

/// Counts the values of a result that are not what they must be.
type Count = fn(AnyBuf, &Case, bool) -> Result<(AnyBuf, u64), Error>;

/// What depends on the type.
#[derive(Clone, Copy, Debug)]
struct Values {
    make: fn(&Comm, &Place, usize) -> Result<AnyBuf, Error>,
    fill: fn(AnyBuf, &Case, bool) -> Result<AnyBuf, Error>,
    clear: fn(AnyBuf) -> Result<AnyBuf, Error>,
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

    /// A buffer of so many elements.
    pub(crate) fn make(&self, comm: &Comm, len: usize) -> Result<AnyBuf, Error> {
        (self.values.make)(comm, &self.place, len)
    }

    /// Puts in the input of a case. Done when it returns: the clock starts later.
    pub(crate) fn fill(&self, buf: AnyBuf, case: &Case, in_place: bool) -> Result<AnyBuf, Error> {
        (self.values.fill)(buf, case, in_place)
    }

    /// Puts zeros in.
    pub(crate) fn clear(&self, buf: AnyBuf) -> Result<AnyBuf, Error> {
        (self.values.clear)(buf)
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
            fill: |buf, case, in_place| written::<T>(buf, |values| case.fill(values, in_place)),
            clear: |buf| written::<T>(buf, |values| values.fill(T::of(0))),
            wrong: |buf, case, in_place| match buf.as_slice::<T>() {
                Some(values) => {
                    let wrong = case.wrong(values, in_place);
                    Ok((buf, wrong))
                }
                None => {
                    let (buf, host) = on_device::<T>(buf)?;
                    let (buf, host) = buf.to_host(host).wait()?;
                    Ok((AnyBuf::new(buf), case.wrong(&host, in_place)))
                }
            },
        }
    }
}

/// The buffer when `write` has written it, or zeros on the host that then go to the device.
fn written<T: Value>(mut buf: AnyBuf, write: impl FnOnce(&mut [T])) -> Result<AnyBuf, Error> {
    if let Some(values) = buf.as_mut_slice::<T>() {
        write(values);
        return Ok(buf);
    }
    let (buf, mut host) = on_device::<T>(buf)?;
    write(&mut host);
    Ok(AnyBuf::new(buf.copy_from_host(host).wait()?.1))
}

/// A buffer on a device, and as many zeros on the host.
fn on_device<T: Value>(buf: AnyBuf) -> Result<(DeviceBuf<T>, Vec<T>), Error> {
    let buf = buf.into_inner::<DeviceBuf<T>>().map_err(|other| Error::Invalid {
        call: "perf".into(),
        problem: format!("{other:?} is no buffer of {} on a device", T::DTYPE),
    })?;
    let host = vec![T::of(0); buf.len()];
    Ok((buf, host))
}
