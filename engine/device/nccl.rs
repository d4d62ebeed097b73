//! NCCL as a library that takes collectives on a device's memory whole ([`Whole`]).
//!
//! A call of NCCL may return before all of its work is on the stream ([`Standing::InProgress`]). Until then nobody puts anything else on
//! that stream. NCCL also keeps the `CUstream` that it was called with, so `Comm::bind_nccl` makes a stream whose `CUstream` never changes.

mod varied;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::{Duration, Instant};

use allstream_cuda_kernels as cuda;
use allstream_sys::cuda::CuStream;
use allstream_sys::nccl::{
    LIBRARY_VARIABLE, Nccl, NcclComm, NcclDataType, NcclError, NcclRedOp, NcclResult, NcclUniqueId,
};
use parking_lot::Mutex;

use super::buf::DeviceBuf;
use super::chores::{Busy, end_before_libraries};
use super::stream::DeviceStream;
use super::whole::{ID, Library, Moved, Piece, Sharing, Standing, Whole, WholeCall};
use crate::error::Error;
use crate::forked;
use crate::mem::Witness;
use crate::types::{DType, Kind, Rank, ReduceOp};

/// How long a communicator that nobody needs any more may take to end in peace.
const FINALIZE: Duration = Duration::from_secs(2);

/// NCCL's own variable that allows several ranks to share one device.
pub(crate) const LEAVE_TO_SHARE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// The first version of NCCL that looks at it: 2.30, as NCCL numbers it.
const SHARING: i32 = 23000;

/// NCCL, NVIDIA's library of collectives, as this process has loaded it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NcclFound {
    /// The file that it was loaded from.
    pub file: String,
    /// Its version, such as `2.30.7`.
    pub version: String,
}

/// The NCCL of this process. It is loaded when this or [`Comm::bind_nccl`](crate::Comm::bind_nccl) is first called; the documentation of
/// the latter says where it is looked for.
///
/// ```
/// match allstream::cuda::nccl() {
///     Ok(nccl) => println!("NCCL {} by {}", nccl.version, nccl.file),
///     Err(error) => println!("{error}"), // which files were looked for, and what to install
/// }
/// ```
///
/// # Errors
/// [`Error::Unavailable`]: there is no NCCL, or none that can be used.
pub fn nccl() -> Result<NcclFound, Error> {
    let NcclLibrary(nccl) = NcclLibrary::find()?;
    Ok(NcclFound { file: nccl.file().to_owned(), version: nccl.version() })
}

/// The NCCL of this process.
#[derive(Clone, Copy)]
pub(crate) struct NcclLibrary(&'static Nccl);

impl NcclLibrary {
    /// Finds NCCL, and loads it if that has not been done yet.
    ///
    /// # Errors
    /// [`Error::Unavailable`], which says what was looked for, and what to do.
    pub(crate) fn find() -> Result<NcclLibrary, Error> {
        Nccl::get().map(NcclLibrary).map_err(|missing| {
            let advice = format!(
                "install NCCL 2.14 or newer (libnccl.so.2 of the system; or pip's nvidia-nccl-cu13, or -cu12 for a driver of CUDA 12, in \
                 the Python environment that VIRTUAL_ENV or CONDA_PREFIX names), or set {LIBRARY_VARIABLE} to its path"
            );
            Error::Unavailable { what: "NCCL".into(), problem: format!("{missing}; {advice}") }
        })
    }

    /// An error of NCCL's as one of ours. It names the file, since other hosts may have NCCL in another file.
    fn told(self, rank: Rank, error: &NcclError) -> Error {
        Error::library(format!("{} ({})", self.name(), self.0.file()), rank, error.to_string())
    }
}

impl Library for NcclLibrary {
    fn name(&self) -> String {
        format!("NCCL {}", self.0.version())
    }

    fn sharing(&self) -> Sharing {
        match std::env::var(LEAVE_TO_SHARE) {
            _ if self.0.version_code() < SHARING => Sharing::Unknown,
            Ok(text) if is_switched_on(&text) => Sharing::Yes,
            _ => Sharing::NoLeave,
        }
    }

    fn id(&self) -> Result<[u8; ID], Error> {
        self.0.unique_id().map(|id| id.0).map_err(|error| self.told(0, &error))
    }

    fn open(
        &self,
        id: &[u8; ID],
        (rank, size): (Rank, usize),
        stream: Option<&DeviceStream>,
    ) -> Result<Arc<dyn Whole>, Error> {
        let stream = stream.ok_or_else(|| Error::invalid("bind_nccl", "there is no stream (a bug)"))?.clone();
        // The numbers fit: a world has at most `MOST_RANKS` ranks.
        let (size, place) = (size as i32, (rank, size));
        let made = stream.with_raw("make a communicator of NCCL", |_| {
            self.0.init(size, &NcclUniqueId(*id), rank as i32)
        })?;
        let comm = made.map_err(|error| self.told(rank, &error))?;
        // By now NCCL has used its own copy of CUDA's runtime, which tears itself down when the process ends. The process is to wait, before
        // that, for our threads that still call NCCL or the driver.
        static ONCE: Once = Once::new();
        ONCE.call_once(end_before_libraries);
        let (comm, kept) = (Arc::new(Mutex::new(Some(comm))), Mutex::default());
        let is_aborted = AtomicBool::new(false);
        let quiet = Arc::new(AtomicBool::new(false));
        let (library, name, _open) = (*self, self.name(), Busy::while_open());
        let streams = Arc::default();
        let cuda_failed = OnceLock::new();
        Ok(Arc::new(NcclEnd {
            library,
            name,
            place,
            stream,
            streams,
            comm,
            is_aborted,
            kept,
            quiet,
            cuda_failed,
            _open,
        }))
    }
}

/// How long an error of NCCL's that says only that CUDA has failed is held back, so that the driver's own error comes first.
const DRIVER_FIRST: Duration = Duration::from_millis(200);

/// One rank's end of a communicator of NCCL's.
struct NcclEnd {
    library: NcclLibrary,
    name: String,
    place: (Rank, usize),
    /// The stream of the rank that opened it. It is kept because NCCL may still use it.
    stream: DeviceStream,
    /// The streams of calls that may not be on their streams yet: threads of NCCL's put work there after the call has returned.
    streams: Arc<Mutex<Vec<DeviceStream>>>,
    /// The communicator, until it is aborted or dropped. Whoever passes it to NCCL holds this lock during the call, which may block as
    /// long as the driver does.
    comm: Arc<Mutex<Option<NcclComm>>>,
    is_aborted: AtomicBool,
    /// The copies of inputs that a call needs, until all of the call is on the stream.
    kept: Mutex<Vec<DeviceBuf<u8>>>,
    /// Whether the abort has succeeded. If it failed, this stays false.
    quiet: Arc<AtomicBool>,
    /// When NCCL first said that CUDA has failed.
    cuda_failed: OnceLock<Instant>,
    _open: Busy,
}

impl NcclEnd {
    /// Calls NCCL with the communicator.
    fn with<T>(&self, call: impl FnOnce(NcclComm) -> Result<T, NcclError>) -> Result<T, Error> {
        let comm = self.comm.lock();
        call(self.there(*comm)?).map_err(|error| self.library.told(self.place.0, &error))
    }

    /// The communicator, unless it is aborted.
    fn there(&self, comm: Option<NcclComm>) -> Result<NcclComm, Error> {
        let aborted = || Error::library(&*self.name, self.place.0, "its communicator was aborted");
        comm.filter(|_| !self.is_aborted.load(Ordering::Acquire)).ok_or_else(aborted)
    }

    /// Makes calls of NCCL on a stream, all in one group of NCCL's.
    fn in_group(
        &self,
        stream: &DeviceStream,
        calls: impl FnOnce((NcclComm, CuStream)) -> Result<(), NcclError>,
    ) -> Result<(), Error> {
        let mut streams = self.streams.lock();
        if !streams.contains(stream) {
            streams.push(stream.clone());
        }
        drop(streams);
        stream.with_raw("give an operation to NCCL", |raw| {
            self.with(|comm| self.library.0.group(|| calls((comm, raw))))
        })?
    }

    fn state(&self) -> Result<NcclResult, Error> {
        let comm = self.comm.lock();
        self.asked(self.there(*comm)?)
    }

    /// What NCCL says of the communicator's state. The caller holds the communicator's lock, and has seen that the communicator is there.
    fn asked(&self, comm: NcclComm) -> Result<NcclResult, Error> {
        // SAFETY: the caller holds the communicator's lock during the call, and has seen that the communicator is there.
        unsafe { self.library.0.async_error(comm) }.map_err(|error| {
            if error.code == NcclResult::UNHANDLED_CUDA_ERROR {
                self.cuda_failed.get_or_init(Instant::now);
            }
            self.library.told(self.place.0, &error)
        })
    }

    /// How many elements of a piece's input have to be copied to memory of ours; 0: none. That is so in two cases: the input is to be
    /// scaled and the output is no place for the scaled input, or the results would overwrite the input before NCCL has read it.
    fn copied(&self, call: &WholeCall, piece: &Piece) -> usize {
        let (rank, size) = self.place;
        match call.kind {
            Kind::ReduceScatter if call.scale.is_some() && piece.tables.is_some() => piece.count,
            _ if piece.tables.is_some() => 0,
            Kind::AllToAll if piece.is_in_place() => size * piece.count,
            Kind::ReduceScatter if call.scale.is_some() => size * piece.count,
            // A rank that is not the root keeps its buffer as it was.
            Kind::Reduce if call.scale.is_some() && rank != call.root => piece.count,
            _ => 0,
        }
    }

    /// Does what NCCL does not do: scales the input of a piece (into the output, or a copy), or copies it to where the results do not
    /// overwrite it. In a reduce_scatter in place this also makes the rank's own block the output.
    ///
    /// # Safety
    /// As for [`Whole::submit`].
    unsafe fn prepare(
        &self,
        call: &WholeCall,
        piece: &mut Piece,
        stream: &DeviceStream,
    ) -> Result<(), Error> {
        let (dtype, from, ctas) = (piece.dtype, piece.input.addr() as u64, stream.ctas());
        let copied = self.copied(call, piece);
        if call.kind == Kind::ReduceScatter && piece.is_in_place() && piece.tables.is_none() {
            piece.output = piece.block(piece.output, self.place.0);
        }
        if call.scale.is_none() && copied == 0 {
            return Ok(());
        }
        let copy = if copied > 0 { Some(DeviceBuf::raw(stream, copied * dtype.size())?) } else { None };
        let to = copy.as_ref().map_or(piece.output.addr() as u64, DeviceBuf::as_ptr);
        let count = copied.max(piece.count) as u64;
        let launch = match call.scale {
            Some(factor) => cuda::scale(dtype, from, &[to], count, factor, ctas),
            None => cuda::copy(dtype, from, &[to], count, ctas),
        };
        let missing =
            || Error::system("prepare a call of NCCL", format!("there is no kernel for {dtype} (a bug)"));
        // SAFETY: the caller promises that the operation's memory is on this device and is used in the order of this stream. Our copy
        // goes back to the pool in the same order.
        unsafe { stream.launch("prepare a call of NCCL", &launch.ok_or_else(missing)?) }?;
        piece.input = std::ptr::without_provenance(to as usize);
        self.kept.lock().extend(copy);
        Ok(())
    }

    /// Calls NCCL for one piece. The caller has begun a group of NCCL's.
    ///
    /// # Safety
    /// As for [`Whole::submit`].
    unsafe fn enqueue(
        &self,
        (call, piece): (&WholeCall, &Piece),
        at: (NcclComm, CuStream),
    ) -> Result<(), NcclError> {
        if let Some(tables) = &piece.tables {
            // SAFETY: the caller's promise.
            return unsafe { self.enqueue_varied(call, piece, tables, at) };
        }
        let (nccl, (rank, size), bytes, root) = (self.library.0, self.place, piece.bytes(), call.root);
        let to = |peer: Rank, from: *const u8| {
            // SAFETY: the caller's promise: a block of the operation's memory, or of a copy of it.
            unsafe { nccl.send((from.cast(), bytes), NcclDataType::UINT8, peer as i32, at) }
        };
        let from = |peer: Rank, to: *mut u8| {
            // SAFETY: as above.
            unsafe { nccl.recv((to.cast(), bytes), NcclDataType::UINT8, peer as i32, at) }
        };
        let block = |of: Rank| piece.block(piece.output, of);
        let input_block = |of: Rank| piece.block(piece.input.cast_mut(), of).cast_const();
        match call.kind {
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => {
                let (dtype, op) = (data_type(piece.dtype), red_op(call.op, piece.dtype));
                // `takes` has refused types and reductions that NCCL does not have.
                let (Some(dtype), Some(op)) = (dtype, op) else { return Ok(()) };
                let ends = (piece.input.cast(), piece.output.cast(), piece.count);
                match call.kind {
                    // SAFETY: as above.
                    Kind::AllReduce => unsafe { nccl.all_reduce(ends, dtype, op, at) },
                    // SAFETY: as above.
                    Kind::Reduce => unsafe { nccl.reduce(ends, dtype, (op, root as i32), at) },
                    // SAFETY: as above.
                    _ => unsafe { nccl.reduce_scatter(ends, dtype, op, at) },
                }
            }
            Kind::Broadcast => {
                let ends = (piece.input.cast(), piece.output.cast(), bytes);
                // SAFETY: as above.
                unsafe { nccl.broadcast(ends, NcclDataType::UINT8, root as i32, at) }
            }
            Kind::AllGather => {
                let ends = (piece.own_input(rank).cast(), piece.output.cast(), bytes);
                // SAFETY: as above.
                unsafe { nccl.all_gather(ends, NcclDataType::UINT8, at) }
            }
            Kind::Gather if rank == root => {
                let own = piece.own_input(rank);
                if own != block(rank).cast_const() {
                    to(rank, own)?;
                    from(rank, block(rank))?;
                }
                (0..size).filter(|peer| *peer != rank).try_for_each(|peer| from(peer, block(peer)))
            }
            Kind::Gather => to(root, piece.input),
            Kind::Scatter if rank == root => {
                if !piece.is_in_place() {
                    to(rank, input_block(rank))?;
                    from(rank, piece.output)?;
                }
                (0..size).filter(|peer| *peer != rank).try_for_each(|peer| to(peer, input_block(peer)))
            }
            Kind::Scatter => from(root, piece.output),
            Kind::AllToAll => (0..size).try_for_each(|peer| {
                to(peer, input_block(peer))?;
                from(peer, block(peer))
            }),
            // `takes` has refused all other collectives.
            _ => Ok(()),
        }
    }
}

impl Witness for NcclEnd {
    fn check(&self) -> Result<(), Error> {
        // If another thread is in a call of NCCL, that thread hears what has failed. This one does not wait for it, as the call may block.
        let Some(comm) = self.comm.try_lock() else { return Ok(()) };
        self.asked(self.there(*comm)?).map(drop)
    }
}

impl Whole for NcclEnd {
    fn name(&self) -> &str {
        &self.name
    }

    fn takes(&self, call: &WholeCall) -> bool {
        match call.kind {
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => call
                .pieces
                .iter()
                .all(|piece| data_type(piece.dtype).is_some() && red_op(call.op, piece.dtype).is_some()),
            kind => matches!(
                kind,
                Kind::Broadcast | Kind::AllGather | Kind::Gather | Kind::Scatter | Kind::AllToAll
            ),
        }
    }

    fn get_ready(&self, call: &WholeCall, stream: &DeviceStream) -> Result<(), Error> {
        let bytes: usize =
            call.pieces.iter().map(|piece| self.copied(call, piece) * piece.dtype.size()).sum();
        let kind = if call.scale.is_some() { cuda::Kind::Scale } else { cuda::Kind::Copy };
        if bytes > 0 || call.scale.is_some() {
            stream.load(call.pieces.iter().filter_map(|piece| cuda::kernel(piece.dtype, kind)))?;
        }
        if bytes > 0 { stream.reserve(bytes) } else { Ok(()) }
    }

    unsafe fn submit(&self, mut call: WholeCall, stream: Option<&DeviceStream>) -> Result<(), Error> {
        let stream = stream.unwrap_or(&self.stream);
        let mut pieces = std::mem::take(&mut call.pieces);
        // Pieces without elements need no call. But `count` has no meaning in a collective in which each rank knows only its own counts.
        pieces.retain(|piece| piece.count > 0 || piece.tables.is_some() && !call.kind.reduces());
        for piece in &mut pieces {
            // SAFETY: the caller's promise.
            unsafe { self.prepare(&call, piece, stream) }?;
        }
        if pieces.is_empty() {
            return Ok(());
        }
        self.in_group(stream, |at| {
            // SAFETY: the caller's promise, and the communicator is there.
            pieces.iter().try_for_each(|piece| unsafe { self.enqueue((&call, piece), at) })
        })
    }

    fn moves_messages(&self) -> bool {
        true
    }

    unsafe fn exchange(&self, messages: &[Moved], stream: &DeviceStream) -> Result<(), Error> {
        let nccl = self.library.0;
        self.in_group(stream, |at| {
            messages.iter().try_for_each(|message| {
                let &Moved { peer, is_sent, memory, bytes } = message;
                match is_sent {
                    // SAFETY: the caller's promise, and the communicator is there.
                    true => unsafe {
                        nccl.send((memory.cast_const().cast(), bytes), NcclDataType::UINT8, peer as i32, at)
                    },
                    // SAFETY: as above.
                    false => unsafe {
                        nccl.recv((memory.cast(), bytes), NcclDataType::UINT8, peer as i32, at)
                    },
                }
            })
        })
    }

    /// If CUDA has failed, NCCL says only that. The engine asks the driver, too, whose error says which device has failed and what to do. So
    /// NCCL's error is held back for a while.
    fn gives_way(&self) -> bool {
        self.cuda_failed.get().is_some_and(|since| since.elapsed() < DRIVER_FIRST)
    }

    fn poll(&self) -> Result<Standing, Error> {
        let state = self.state();
        if state.is_err() && self.cuda_failed.get().is_some() {
            // If the device has failed, the driver says so when it is to record an event. Nobody else calls the driver before all of
            // NCCL's call is on the stream.
            self.stream.point()?;
        }
        if state? == NcclResult::IN_PROGRESS {
            return Ok(Standing::InProgress);
        }
        // All work that reads the copies is on the stream by now, so their memory goes back to the pool behind that work.
        self.kept.lock().clear();
        let on_stream = std::mem::take(&mut *self.streams.lock());
        drop(on_stream);
        Ok(Standing::OnStream)
    }

    fn abort(&self) {
        if self.is_aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        let (library, quiet, comm) = (self.library, self.quiet.clone(), self.comm.clone());
        let (busy, streams) = (Busy::new(), (self.stream.clone(), self.streams.clone()));
        // The abort waits for threads that are in a call of NCCL, and for NCCL's work on the device. So a thread of its own makes it.
        let abort = move || {
            // The streams are dropped first.
            let (_busy, streams) = (busy, streams);
            let Some(comm) = comm.lock().take() else { return };
            // SAFETY: taken out above: nobody has it any more.
            if let Err(error) = unsafe { library.0.abort(comm) } {
                tracing::warn!("a communicator of NCCL is not aborted: {error}");
                return std::mem::forget(streams);
            }
            quiet.store(true, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-abort".into()).spawn(abort) {
            tracing::warn!("a communicator of NCCL is not aborted, for want of a thread: {error}");
            std::mem::forget((self.stream.clone(), self.streams.clone()));
        }
    }

    fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Acquire)
    }
}

impl Drop for NcclEnd {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut *self.kept.lock());
        if forked::is_forked() {
            // This is a forked child, and what NCCL and the driver have is the parent's.
            return std::mem::forget(kept);
        }
        let is_aborted = self.is_aborted.load(Ordering::Acquire);
        // Only the thread that aborts may still have the communicator. If there is none, the lock is free.
        let Some(comm) = self.comm.try_lock().filter(|_| !is_aborted).and_then(|mut comm| comm.take()) else {
            if !self.is_quiet() {
                // NCCL may still touch the copies.
                std::mem::forget(kept);
            }
            return;
        };
        let (library, busy) = (self.library, Busy::new());
        let streams = (self.stream.clone(), self.streams.clone());
        let end = move || {
            // SAFETY: taken out above: nobody else has it.
            let ended = unsafe { end_in_peace(library.0, comm) };
            if let Err(error) = ended {
                tracing::debug!("a communicator of NCCL did not end in peace: {error}");
                // SAFETY: as above, and it was not destroyed.
                if let Err(error) = unsafe { library.0.abort(comm) } {
                    tracing::warn!("a communicator of NCCL is not aborted: {error}");
                    // It may still use these.
                    std::mem::forget((kept, streams));
                    return;
                }
            }
            drop((kept, streams));
            drop(busy);
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-finalize".into()).spawn(end) {
            tracing::warn!("a communicator of NCCL does not end, for want of a thread: {error}");
        }
    }
}

/// Finalizes and destroys a communicator.
///
/// # Safety
/// It exists, and nobody else uses it. On an error it still exists.
unsafe fn end_in_peace(nccl: &Nccl, comm: NcclComm) -> Result<(), NcclError> {
    // SAFETY: the caller's promise.
    unsafe { nccl.finalize(comm) }?;
    let end = Instant::now() + FINALIZE;
    // SAFETY: as above.
    while unsafe { nccl.async_error(comm) }? == NcclResult::IN_PROGRESS {
        if Instant::now() > end {
            let text = format!("it was not quiet after {FINALIZE:?}");
            return Err(NcclError { call: "ncclCommFinalize", code: NcclResult::IN_PROGRESS, text });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: as above.
    if let Err(error) = unsafe { nccl.destroy(comm) } {
        tracing::warn!("a communicator of NCCL is not destroyed: {error}");
    }
    Ok(())
}

/// Whether NCCL takes this value of one of its variables as "on": the value is a number other than 0, decimal or hexadecimal. Text that is
/// no number counts as if the variable was not set.
fn is_switched_on(text: &str) -> bool {
    let text = text.trim();
    let number = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => i64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.is_ok_and(|number| number != 0)
}

/// The type as NCCL numbers it. `None`: NCCL does not have the type, or not in every version that is taken here.
fn data_type(dtype: DType) -> Option<NcclDataType> {
    Some(match dtype {
        DType::I8 => NcclDataType::INT8,
        DType::U8 => NcclDataType::UINT8,
        DType::I32 => NcclDataType::INT32,
        DType::U32 => NcclDataType::UINT32,
        DType::I64 => NcclDataType::INT64,
        DType::U64 => NcclDataType::UINT64,
        DType::F16 => NcclDataType::FLOAT16,
        DType::BF16 => NcclDataType::BFLOAT16,
        DType::F32 => NcclDataType::FLOAT32,
        DType::F64 => NcclDataType::FLOAT64,
        DType::Bool | DType::I16 | DType::U16 | DType::F8E4M3 | DType::F8E5M2 => return None,
    })
}

/// The reduction as NCCL numbers it. `None`: NCCL's documentation does not promise the result that ours gives. That is so for minima and
/// maxima of floats, among which there may be a NaN, and for averages of integers.
fn red_op(op: ReduceOp, dtype: DType) -> Option<NcclRedOp> {
    match op {
        ReduceOp::Sum => Some(NcclRedOp::SUM),
        ReduceOp::Prod => Some(NcclRedOp::PROD),
        ReduceOp::Max if !dtype.is_float() => Some(NcclRedOp::MAX),
        ReduceOp::Min if !dtype.is_float() => Some(NcclRedOp::MIN),
        ReduceOp::Avg if dtype.is_float() => Some(NcclRedOp::AVG),
        _ => None,
    }
}
