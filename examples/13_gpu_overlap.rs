//! How much of an all-reduce of GPU buffers hides behind a kernel of yours.
//!
//! Teaches: an all-reduce of a device buffer follows the buffer's own stream, not the stream on which your kernels run, so
//! both go on at once; and a kernel of yours (by cudarc) can run on a stream of allstream's, by its `CUstream`.
//!
//! Two ranks (threads) have a GPU each, or share one. First the all-reduce goes through the host's memory, then by kernels
//! on the GPUs. For each way this prints the slower rank's time, as a median over rounds: of matrix products alone, of the
//! all-reduce alone, of both on two streams, and of both on one stream, as on CUDA's default stream. There are as many
//! products as take about as long as the all-reduce. The figure to look at is `together` over the longer of the two: 1 is
//! perfect.
//!
//! `cargo run --release --features cudarc --example 13_gpu_overlap [-- MEGABYTES [SIDE]]`: the size of the all-reduce (default
//! 64), and the rows of a square matrix (default 1024). Without a GPU it says what is missing, and exits with code 0.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, device_count};
use allstream::{Comm, Error, ReduceOp};
use cudarc::driver::{CudaContext, result, sys};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RANKS: usize = 2;
const ROUNDS: usize = 7;
const THREADS: u32 = 256;
const MATMUL: &str = include_str!("matmul.ptx");

/// Products of two matrices, on a stream.
struct Products {
    context: Arc<CudaContext>,
    kernel: sys::CUfunction,
    stream: DeviceStream,
    a: DeviceBuf<f32>,
    b: DeviceBuf<f32>,
    c: DeviceBuf<f32>,
    side: u32,
}

impl Products {
    fn new(device: &Device, side: u32) -> Result<Products> {
        let context = CudaContext::new(device.ordinal())?;
        let stream = DeviceStream::new(device)?;
        let of = |value: f32| {
            let host = vec![value; (side * side) as usize];
            DeviceBuf::from_host(&stream, host).wait().map(|(_, buf)| buf)
        };
        let (a, b, c) = (of(0.5)?, of(2.0)?, of(0.0)?);
        context.bind_to_thread()?;
        let text = CString::new(MATMUL)?;
        // SAFETY: the device's context is current on this thread; the text is PTX and ends in a zero. The module is never unloaded.
        let kernel = unsafe {
            let module = result::module::load_data(text.as_ptr().cast())?;
            result::module::get_function(module, CString::new("matmul")?)?
        };
        Ok(Products { context, kernel, stream, a, b, c, side })
    }

    /// Puts this many products on the stream.
    fn launch(&self, times: u64) -> Result<()> {
        self.context.bind_to_thread()?;
        let (mut a, mut b, mut c) = (self.a.as_ptr(), self.b.as_ptr(), self.c.as_ptr());
        let mut side = self.side;
        let grid = (side * side).div_ceil(THREADS);
        for _ in 0..times {
            let mut parameters = [
                (&raw mut a).cast::<c_void>(),
                (&raw mut b).cast(),
                (&raw mut c).cast(),
                (&raw mut side).cast(),
            ];
            // SAFETY: these are the parameters of the kernel, which reads `side * side` floats of a and b and writes as many
            // to c. Each buffer has so many, and follows this stream, which exists as long as `self`.
            unsafe {
                let stream = self.stream.as_raw().cast();
                result::launch_kernel(
                    self.kernel,
                    (grid, 1, 1),
                    (THREADS, 1, 1),
                    0,
                    stream,
                    &mut parameters,
                )?;
            }
        }
        Ok(())
    }

    fn check(self) -> Result<()> {
        let (_, c) = self.c.to_host(vec![0.0; (self.side * self.side) as usize]).wait()?;
        let expected = self.side as f32;
        if c.iter().all(|x| *x == expected) { Ok(()) } else { Err("the products are wrong".into()) }
    }
}

/// The median over rounds of the slowest rank's time, which all ranks get. All ranks start a round together.
fn median(comm: &mut Comm, mut round: impl FnMut(&mut Comm) -> Result<()>) -> Result<Duration> {
    let mut nanos = Vec::new();
    for _ in 0..ROUNDS {
        comm.barrier().wait()?;
        let start = Instant::now();
        round(comm)?;
        nanos.push(start.elapsed().as_nanos() as u64);
    }
    let mut nanos = comm.op(ReduceOp::Max).all_reduce(nanos).wait()?;
    nanos.sort_unstable();
    Ok(Duration::from_nanos(nanos[ROUNDS / 2]))
}

struct Times {
    path: String,
    products: u64,
    computing: Duration,
    communicating: Duration,
    together: Duration,
    one_stream: Duration,
}

fn measure(comm: &mut Comm, work: &Products, path: String, len: usize) -> Result<Times> {
    let own = DeviceStream::new(&work.stream.device())?;
    let mut grads = Some(DeviceBuf::<f32>::zeroed(&own, len)?);
    let taken = || Error::Invalid { call: "13_gpu_overlap".into(), problem: "the buffer is lost".into() };
    let mut reduce = |comm: &mut Comm| -> Result<()> {
        grads = Some(comm.all_reduce(grads.take().ok_or_else(taken)?).wait()?);
        Ok(())
    };
    reduce(comm)?;
    let communicating = median(comm, &mut reduce)?;
    // Finds how many products take that long: starts with one, and corrects the number twice by the measured time.
    let (mut products, mut computing) = (1, Duration::ZERO);
    for guess in 0..3 {
        if guess > 0 {
            let ratio = communicating.as_secs_f64() / computing.as_secs_f64().max(1e-9);
            products = (products as f64 * ratio).round().clamp(1.0, 1e5) as u64;
        }
        computing = median(comm, |_| {
            work.launch(products)?;
            Ok(work.stream.synchronize()?)
        })?;
    }
    let together = median(comm, |comm| {
        work.launch(products)?;
        reduce(comm)?;
        Ok(work.stream.synchronize()?)
    })?;
    // Now the gradients follow the stream that computes, so the products and the all-reduce run one after the other.
    let mut grads = Some(grads.take().ok_or_else(taken)?.on(&work.stream)?);
    let one_stream = median(comm, |comm| {
        work.launch(products)?;
        grads = Some(comm.all_reduce(grads.take().ok_or_else(taken)?).wait()?);
        Ok(work.stream.synchronize()?)
    })?;
    Ok(Times { path, products, computing, communicating, together, one_stream })
}

fn rank(mut comm: Comm, devices: usize, len: usize, side: u32) -> Result<Vec<Times>> {
    let device = Device::new(comm.rank() % devices)?;
    let work = Products::new(&device, side)?;
    let mut times = vec![measure(&mut comm, &work, "through the host's memory".into(), len)?];
    match block_on(comm.bind_device(&device))? {
        DevicePath::Peer => times.push(measure(&mut comm, &work, "by kernels on the GPUs".into(), len)?),
        path => println!("the GPUs do not reach each other: {path:?}"),
    }
    work.check()?;
    block_on(comm.close())?;
    Ok(times)
}

fn main() -> Result<()> {
    let devices = match device_count() {
        Ok(0) => {
            println!("there is no CUDA device here");
            return Ok(());
        }
        Ok(count) => count,
        Err(error) => {
            println!("{error}");
            return Ok(());
        }
    };
    let mut arguments = std::env::args().skip(1);
    let megabytes: f64 = arguments.next().map_or(Ok(64.0), |text| text.parse())?;
    let side: u32 = arguments.next().map_or(Ok(1024), |text| text.parse())?;
    if !(1..1 << 15).contains(&side) {
        return Err("a matrix has 1 to 32767 rows".into());
    }
    let len = (megabytes * 1e6 / 4.0) as usize;
    println!(
        "{RANKS} ranks on {} GPUs, all-reduce of {megabytes} MB, median of {ROUNDS} rounds",
        devices.min(RANKS)
    );
    let comms = Comm::local(RANKS)?.into_iter();
    let threads: Vec<_> = comms.map(|comm| thread::spawn(move || rank(comm, devices, len, side))).collect();
    let mut all = Vec::new();
    for thread in threads {
        all.push(thread.join().map_err(|_| "a rank panicked")??);
    }
    for times in &all[0] {
        let Times { path, products, computing, communicating, together, one_stream } = times;
        let ms = |time: &Duration| time.as_secs_f64() * 1e3;
        let longer = computing.max(communicating);
        println!("\nall-reduce {path}");
        println!(
            "  computing alone      {:9.3} ms ({products} products of {side}x{side} matrices)",
            ms(computing)
        );
        println!("  communicating alone  {:9.3} ms", ms(communicating));
        println!(
            "  together             {:9.3} ms, {:.2} of the longer",
            ms(together),
            ms(together) / ms(longer)
        );
        println!(
            "  on one stream        {:9.3} ms, {:.2} of the longer",
            ms(one_stream),
            ms(one_stream) / ms(longer)
        );
    }
    Ok(())
}
