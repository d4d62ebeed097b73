//! Ranks on a CUDA device, and what the device does by itself.

use std::time::Instant;

use allstream::cuda::{self, Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Comm, Error};
use serde::{Deserialize, Serialize};

/// Copies that are in flight together, so that what it takes to wait for the last one hardly counts.
const COPIES: usize = 4;
const ROUNDS: usize = 10;
const WARMUP: usize = 2;

/// The device of a run, and how fast it copies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    /// The CUDA driver's library, and the CUDA that it supports.
    pub(crate) driver: String,
    pub(crate) cuda: String,
    /// How operations run: `peer`, by kernels there, or `staged`, through the host, and why.
    pub(crate) path: String,
    /// Copies within the device's memory: GB/s (powers of 1000) of bytes copied, the median over rounds, and the bytes
    /// of one copy.
    pub(crate) copy_gbs: f64,
    pub(crate) copy_bytes: usize,
}

/// A rank's place on its device: its buffers are there, in the order of this stream.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) stream: DeviceStream,
    path: DevicePath,
}

/// Where ranks are bound to their device, or only have buffers there (`staged`). `joins`: a stream of the buffers' waits for
/// operations, so those have another.
pub(crate) fn bind(comm: &mut Comm, ordinal: usize, staged: bool, joins: bool) -> Result<Place, Error> {
    let device = Device::new(ordinal)?;
    let stream = DeviceStream::new(&device)?;
    let path = match (staged, joins) {
        (true, _) => DevicePath::Staged { why: "asked for (--staged)".into() },
        (_, true) => futures::executor::block_on(comm.bind_device(&device))?,
        _ => futures::executor::block_on(comm.bind_stream(&stream))?,
    };
    Ok(Place { stream, path })
}

impl Facts {
    /// Measures: the device should have nothing else to do.
    pub(crate) fn of(Place { stream, path }: &Place) -> Result<Facts, Error> {
        let (device, driver) = (stream.device(), cuda::driver()?);
        let (copy_bytes, copy_gbs) = copies(stream)?;
        Ok(Facts {
            ordinal: device.ordinal(),
            name: device.name().into(),
            driver: driver.file,
            cuda: format!("{}.{}", driver.version.0, driver.version.1),
            path: match path {
                DevicePath::Peer => "peer".into(),
                DevicePath::Staged { why } => format!("staged: {why}"),
                other => format!("{other:?}"),
            },
            copy_gbs,
            copy_bytes,
        })
    }

    /// What stands above the table.
    pub(crate) fn lines(&self) -> [String; 3] {
        [
            format!("# device {}: {}, CUDA {} by {}", self.ordinal, self.name, self.cuda, self.driver),
            format!("# path: {}", self.path),
            format!(
                "# copies on the device: {:.1} GB/s of bytes copied, {} MiB each",
                self.copy_gbs,
                self.copy_bytes >> 20
            ),
        ]
    }
}

/// Bytes of a copy, and GB/s.
fn copies(stream: &DeviceStream) -> Result<(usize, f64), Error> {
    let (free, _) = stream.device().memory()?;
    let bytes = (free / 64).clamp(1 << 20, 256 << 20) >> 20 << 20;
    let buf = || DeviceBuf::<u8>::zeroed(stream, bytes);
    let mut pairs = (0..COPIES).map(|_| Ok((buf()?, buf()?))).collect::<Result<Vec<_>, Error>>()?;
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..WARMUP + ROUNDS {
        stream.synchronize()?;
        let start = Instant::now();
        let copies: Vec<_> = pairs.into_iter().map(|(from, to)| to.copy_from(from)).collect();
        pairs = copies.into_iter().map(|copy| copy.wait().map_err(Error::from)).collect::<Result<_, _>>()?;
        if round >= WARMUP {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    drop(pairs);
    stream.device().trim()?;
    times.sort_by(f64::total_cmp);
    Ok((bytes, (COPIES * bytes) as f64 / times[times.len() / 2] / 1e9))
}
