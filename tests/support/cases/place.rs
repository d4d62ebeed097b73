//! Where the buffers of a case lie: on the host, in several types of buffers, or on a device.

use std::time::Duration;

use allstream::cuda::{DeviceBuf, DeviceStream, Transfer};
use allstream::{Buf, Element, HostBuf};

use super::boxed;

/// How long a copy to or from a device may take. The copy itself has no deadline.
const COPY: Duration = Duration::from_secs(30);

/// Makes buffers with given values, and reads what they hold afterwards.
pub trait Place {
    /// The type of inputs, and of most buffers that are worked on in place.
    type In<T: Element>: Buf<Elem = T>;
    /// The type of outputs, and of the buffers of `reduce`, `scan` and `exscan` in place.
    type Out<T: Element>: Buf<Elem = T>;
    /// The type of inputs of calls that make their output themselves.
    type New<T: Element>: Buf<Elem = T>;
    fn put<T: Element>(&self, values: &[T]) -> Result<Self::In<T>, String>;
    fn got<T: Element>(&self, buf: Self::In<T>) -> Result<Vec<T>, String>;
    fn put_out<T: Element>(&self, values: &[T]) -> Result<Self::Out<T>, String>;
    fn got_out<T: Element>(&self, buf: Self::Out<T>) -> Result<Vec<T>, String>;
    fn put_new<T: Element>(&self, values: &[T]) -> Result<Self::New<T>, String>;
}

/// Memory of the host.
pub struct Host;

impl Place for Host {
    type In<T: Element> = Vec<T>;
    type Out<T: Element> = HostBuf<T>;
    type New<T: Element> = Box<[T]>;
    fn put<T: Element>(&self, values: &[T]) -> Result<Vec<T>, String> {
        Ok(values.to_vec())
    }
    fn got<T: Element>(&self, buf: Vec<T>) -> Result<Vec<T>, String> {
        Ok(buf)
    }
    fn put_out<T: Element>(&self, values: &[T]) -> Result<HostBuf<T>, String> {
        Ok(HostBuf::from(values))
    }
    fn got_out<T: Element>(&self, buf: HostBuf<T>) -> Result<Vec<T>, String> {
        Ok(buf.to_vec())
    }
    fn put_new<T: Element>(&self, values: &[T]) -> Result<Box<[T]>, String> {
        Ok(boxed(values))
    }
}

/// Memory of a device, used in the order of this stream.
pub struct OnDevice(pub DeviceStream);

/// Waits for a copy, with a deadline.
fn copied<O: Send + 'static, F: Send + 'static>(copy: Transfer<O, F>) -> Result<O, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let done = runtime.block_on(async { tokio::time::timeout(COPY, copy).await });
    done.map_err(|_| format!("a copy was not done after {COPY:?}"))?
        .map_err(|failed| failed.error.to_string())
}

impl Place for OnDevice {
    type In<T: Element> = DeviceBuf<T>;
    type Out<T: Element> = DeviceBuf<T>;
    type New<T: Element> = DeviceBuf<T>;
    fn put<T: Element>(&self, values: &[T]) -> Result<DeviceBuf<T>, String> {
        Ok(copied(DeviceBuf::from_host(&self.0, values.to_vec()))?.1)
    }
    fn got<T: Element>(&self, buf: DeviceBuf<T>) -> Result<Vec<T>, String> {
        let len = buf.len();
        Ok(copied(buf.to_host(vec![T::default(); len]))?.1)
    }
    fn put_out<T: Element>(&self, values: &[T]) -> Result<DeviceBuf<T>, String> {
        self.put(values)
    }
    fn got_out<T: Element>(&self, buf: DeviceBuf<T>) -> Result<Vec<T>, String> {
        self.got(buf)
    }
    fn put_new<T: Element>(&self, values: &[T]) -> Result<DeviceBuf<T>, String> {
        self.put(values)
    }
}
