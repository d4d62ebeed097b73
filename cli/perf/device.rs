//! Ranks on a CUDA device, and how fast the device itself copies.

use std::rc::Rc;

use allstream::cuda::{self, Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Comm, Error};
use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::measure::together;

/// Copies that are timed together. An untimed copy goes before them: while the device is busy with it, the host queues the others.
const COPIES: usize = 4;
const ROUNDS: usize = 10;
const WARMUP: usize = 2;

/// The device of a run, and how fast it copies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    /// The file of the CUDA driver's library.
    pub(crate) driver: String,
    /// The version of CUDA that the driver supports.
    pub(crate) cuda: String,
    /// How operations run: `peer` (by kernels on the device), `NCCL` and which, or `staged` (through the host's memory) and why.
    pub(crate) path: String,
    /// GB/s (powers of 1000) of bytes copied within the device's memory, as the device's events tell: the median over rounds. `None`: the
    /// driver cannot tell the time between events.
    pub(crate) copy_gbs: Option<f64>,
    /// The bytes of one such copy.
    pub(crate) copy_bytes: usize,
}

/// A rank's place on its device: the stream in whose order its buffers are used there.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) stream: DeviceStream,
    path: DevicePath,
    /// The clock of `stream`.
    clock: Rc<Clock>,
}

/// How operations are to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// By kernels on the device.
    Kernels,
    /// By kernels on the device, on another stream than the buffers': the buffers' stream waits for each operation (`--join`).
    KernelsJoined,
    /// By NCCL, as far as it can.
    Nccl,
    /// By the host, through its own memory: only the ranks' buffers are on the device.
    Host,
}

/// Opens the device on all ranks, and binds them to it.
pub(crate) fn bind(comm: &mut Comm, ordinal: usize, by: By) -> Result<Place, Error> {
    let stream = Device::new(ordinal).and_then(|device| DeviceStream::new(&device));
    let stream = together(comm, stream)?;
    let path = match by {
        By::Host => DevicePath::Staged { why: "asked for (--staged)".into() },
        By::KernelsJoined => futures::executor::block_on(comm.bind_device(&stream.device()))?,
        By::Kernels => futures::executor::block_on(comm.bind_stream(&stream))?,
        By::Nccl => futures::executor::block_on(comm.bind_nccl(&stream.device()))?,
    };
    let clock = together(comm, Clock::new(&stream))?;
    Ok(Place { stream, path, clock: Rc::new(clock) })
}

impl Place {
    /// The device's clock, if allstream's kernels run the operations. `None`: the host runs them through its own memory, or NCCL runs them. To
    /// time an operation, the stream waits for it, and no stream may wait for one of NCCL's before all ranks have called it.
    pub(crate) fn clock(&self) -> Option<Rc<Clock>> {
        (self.path == DevicePath::Peer).then(|| self.clock.clone())
    }
}

impl Facts {
    /// Measures the device, which should have nothing else to do meanwhile.
    pub(crate) fn of(Place { stream, path, clock }: &Place) -> Result<Facts, Error> {
        let (device, driver) = (stream.device(), cuda::driver()?);
        let (copy_bytes, copy_gbs) = copies(stream, clock)?;
        Ok(Facts {
            ordinal: device.ordinal(),
            name: device.name().into(),
            driver: driver.file,
            cuda: format!("{}.{}", driver.version.0, driver.version.1),
            path: match path {
                DevicePath::Peer => "peer".into(),
                DevicePath::Nccl { library, staged: None } => format!("NCCL: {library}"),
                DevicePath::Staged { why } => format!("staged: {why}"),
                other => format!("{other:?}"),
            },
            copy_gbs,
            copy_bytes,
        })
    }

    /// The lines above the table.
    pub(crate) fn lines(&self) -> [String; 3] {
        [
            format!("# device {}: {}, CUDA {} by {}", self.ordinal, self.name, self.cuda, self.driver),
            format!("# path: {}", self.path),
            match self.copy_gbs {
                Some(gbs) => format!(
                    "# copies on the device: {gbs:.1} GB/s of bytes copied, {} MiB each, by events",
                    self.copy_bytes >> 20
                ),
                None => "# copies on the device: N/A, the driver has no cuEventElapsedTime".into(),
            },
        ]
    }
}

/// Times copies on the device: returns the bytes of one copy, and GB/s (`None`: the driver cannot tell times).
fn copies(stream: &DeviceStream, clock: &Clock) -> Result<(usize, Option<f64>), Error> {
    let (free, _) = stream.device().memory()?;
    let bytes = (free / 64).clamp(1 << 20, 256 << 20) >> 20 << 20;
    let buf = || DeviceBuf::<u8>::zeroed(stream, bytes);
    let mut pairs = (0..=COPIES).map(|_| Ok((buf()?, buf()?))).collect::<Result<Vec<_>, Error>>()?;
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..WARMUP + ROUNDS {
        let mut copies = Vec::with_capacity(pairs.len());
        for (which, (from, to)) in pairs.into_iter().enumerate() {
            if which == 1 {
                clock.start()?;
            }
            copies.push(to.copy_from(from));
        }
        clock.stop()?;
        pairs = copies.into_iter().map(|copy| copy.wait().map_err(Error::from)).collect::<Result<_, _>>()?;
        if round >= WARMUP {
            times.extend(clock.seconds()?);
        }
    }
    drop(pairs);
    stream.device().trim()?;
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2);
    Ok((bytes, median.map(|median| (COPIES * bytes) as f64 / median / 1e9)))
}
