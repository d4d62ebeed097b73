//! NCCL as a [`Whole`]: the engine hands it complete collectives on device memory, and NCCL moves and combines the data by itself.
//!
//! A call of NCCL may return before all of its work is on the stream ([`Standing::InProgress`]). Until then the engine puts no other operation on
//! that stream. NCCL also keeps the `CUstream` that it was called with, so `Comm::bind_nccl` makes a stream whose `CUstream` never changes.

mod varied;

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::{Duration, Instant};

use allstream_cuda_kernels as cuda;
use allstream_sys::cuda::CuStream;
use allstream_sys::nccl::{
    LIBRARY_VARIABLE, Nccl, NcclComm, NcclDataType, NcclError, NcclRedOp, NcclResult, NcclUniqueId,
};
use parking_lot::Mutex;

use super::blocks::ALIGN;
use super::buf::DeviceBuf;
use super::chores::{Busy, end_before_libraries};
use super::stream::DeviceStream;
use super::whole::{ID, Library, Moved, Piece, Sharing, Standing, Whole, WholeCall};
use crate::error::Error;
use crate::forked;
use crate::mem::Witness;
use crate::types::{DType, Kind, Rank, ReduceOp};

/// How long an NCCL communicator that nobody needs any more may take to finalize; after that it is aborted.
const FINALIZE: Duration = Duration::from_secs(2);

/// NCCL's own environment variable, which allows several ranks to share one device.
pub(crate) const LEAVE_TO_SHARE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// The first version of NCCL that reads this variable: 2.30, as NCCL numbers it.
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

/// The NCCL of this process. The first call of this function, or the first binding by NCCL, loads it, and later calls get the same answer.
/// [`Comm::bind_nccl`](crate::Comm::bind_nccl) documents where it is looked for.
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

    /// Turns an error of NCCL's into an [`Error`], which names NCCL's file, since other hosts may have loaded another file.
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
        // By now NCCL has used its own copy of CUDA's runtime, which has registered a function that tears it down when the process ends. Ours is
        // registered after that one, so it runs first: it waits for the engine's threads that still call NCCL or the driver.
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

/// For how long an operation holds back an NCCL error that says only that CUDA has failed, so that the driver's own error comes first.
const DRIVER_FIRST: Duration = Duration::from_millis(200);

/// One rank's end of a communicator of NCCL's.
struct NcclEnd {
    library: NcclLibrary,
    name: String,
    place: (Rank, usize),
    /// The rank's stream, kept until the communicator has ended: NCCL keeps its `CUstream`.
    stream: DeviceStream,
    /// The streams of those calls whose work may not all be on the stream yet: threads of NCCL's put work there after a call has returned.
    streams: Arc<Mutex<Vec<DeviceStream>>>,
    /// The communicator. A thread that uses it holds this lock during its call of NCCL, which may block as long as the driver does. A thread that
    /// is to end the communicator takes it out first.
    comm: Arc<Mutex<Option<NcclComm>>>,
    is_aborted: AtomicBool,
    /// The copies of inputs that the last call reads, until all of that call is on the stream.
    kept: Mutex<Vec<DeviceBuf<u8>>>,
    /// Whether the communicator was aborted with success.
    quiet: Arc<AtomicBool>,
    /// When NCCL first said that CUDA has failed.
    cuda_failed: OnceLock<Instant>,
    _open: Busy,
}

impl NcclEnd {
    /// Calls NCCL with the communicator. Fails if that was aborted.
    fn with<T>(&self, call: impl FnOnce(NcclComm) -> Result<T, NcclError>) -> Result<T, Error> {
        let comm = self.comm.lock();
        call(self.there(*comm)?).map_err(|error| self.library.told(self.place.0, &error))
    }

    /// The communicator, unless it is aborted.
    fn there(&self, comm: Option<NcclComm>) -> Result<NcclComm, Error> {
        let aborted = || Error::library(&*self.name, self.place.0, "its communicator was aborted");
        comm.filter(|_| !self.is_aborted.load(Ordering::Acquire)).ok_or_else(aborted)
    }

    /// Calls NCCL with the communicator and a stream: all of `calls` between `ncclGroupStart` and `ncclGroupEnd`.
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
        // SAFETY: the caller has found the communicator under its lock, and holds the lock during the call. A thread that ends the communicator takes
        // it out under that lock first.
        unsafe { self.library.0.async_error(comm) }.map_err(|error| {
            if error.code == NcclResult::UNHANDLED_CUDA_ERROR {
                self.cuda_failed.get_or_init(Instant::now);
            }
            self.library.told(self.place.0, &error)
        })
    }

    /// How many elements of a piece's input have to be copied to memory of the pool first; 0: none. An input is copied if it is to be scaled and
    /// the output has no room for the scaled input, or if the results would overwrite the input before NCCL has read it.
    fn copied(&self, call: &WholeCall, piece: &Piece) -> usize {
        let (rank, size) = self.place;
        match call.kind {
            Kind::ReduceScatter if call.scale.is_some() && piece.tables.is_some() => piece.count,
            _ if piece.tables.is_some() => 0,
            Kind::AllToAll if piece.is_in_place() => size * piece.count,
            Kind::ReduceScatter if call.scale.is_some() => size * piece.count,
            // On a rank that is not the root, the caller gets the buffer back with its old contents, so these are not scaled in place.
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
        // SAFETY: the caller promises that the operation's memory is as long as the call says, and is used in the order of this stream. The copy has
        // `count` elements of its own, and goes back to the pool in the same order.
        unsafe { stream.launch("prepare a call of NCCL", &launch.ok_or_else(missing)?) }?;
        piece.input = std::ptr::without_provenance(to as usize);
        self.kept.lock().extend(copy);
        Ok(())
    }

    /// Calls NCCL for one piece. The caller has begun a group of NCCL's.
    ///
    /// # Safety
    /// As for [`Whole::submit`]. The communicator is there, and the caller holds its lock.
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
            // SAFETY: the caller's promise; the memory is a block of the operation's, or of a copy of the input.
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
        // If another thread is in a call of NCCL, that thread gets the error. This one does not wait for the lock, as the call may block.
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
        // `prepare` gets a copy for each piece, and the pool rounds each up.
        let copy = |piece: &Piece| {
            let bytes = self.copied(call, piece) * piece.dtype.size();
            bytes.checked_next_multiple_of(ALIGN as usize).unwrap_or(bytes)
        };
        let bytes = call.pieces.iter().map(copy).fold(0, usize::saturating_add);
        let kind = if call.scale.is_some() { cuda::Kind::Scale } else { cuda::Kind::Copy };
        if bytes > 0 || call.scale.is_some() {
            stream.load(call.pieces.iter().filter_map(|piece| cuda::kernel(piece.dtype, kind)))?;
        }
        if bytes > 0 { stream.reserve(bytes) } else { Ok(()) }
    }

    unsafe fn submit(&self, mut call: WholeCall, stream: Option<&DeviceStream>) -> Result<(), Error> {
        let stream = stream.unwrap_or(&self.stream);
        let mut pieces = std::mem::take(&mut call.pieces);
        // A piece without elements needs no call. Where each rank may know only its own counts, `count` does not say whether there are elements.
        pieces.retain(|piece| piece.count > 0 || piece.tables.is_some() && !call.kind.reduces());
        for piece in &mut pieces {
            // SAFETY: the caller's promise.
            unsafe { self.prepare(&call, piece, stream) }?;
        }
        if pieces.is_empty() {
            return Ok(());
        }
        self.in_group(stream, |at| {
            // SAFETY: the caller's promise; `in_group` has found the communicator, and holds its lock.
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
                    // SAFETY: the caller's promise; `in_group` has found the communicator, and holds its lock.
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

    /// If CUDA has failed, NCCL's error says no more than that. The engine asks the driver, too, whose error says which device has failed and what
    /// to do. So for [`DRIVER_FIRST`] NCCL's error waits for the driver's.
    fn gives_way(&self) -> bool {
        self.cuda_failed.get().is_some_and(|since| since.elapsed() < DRIVER_FIRST)
    }

    fn poll(&self) -> Result<Standing, Error> {
        let state = self.state();
        if state.is_err() && self.cuda_failed.get().is_some() {
            // If the device has failed, the driver says so when it is to record an event, and that error is returned instead of NCCL's. The engine
            // does not otherwise ask the driver about the call before all of it is on the stream.
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
        // The abort waits for the thread that is in a call of NCCL, and for NCCL's work on the device. So a new thread calls it.
        let abort = move || {
            // `streams` is dropped before `_busy`.
            let (_busy, streams) = (busy, streams);
            let Some(comm) = comm.lock().take() else { return };
            // SAFETY: taken out above, so nobody else has the communicator.
            if let Err(error) = unsafe { library.0.abort(comm) } {
                tracing::warn!("an NCCL communicator could not be aborted: {error}");
                return std::mem::forget(streams);
            }
            quiet.store(true, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-abort".into()).spawn(abort) {
            tracing::warn!("an NCCL communicator is not aborted, as no thread could be started: {error}");
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
            // This process is a forked child: what NCCL and the driver have belongs to the parent.
            return std::mem::forget(kept);
        }
        let is_aborted = self.is_aborted.load(Ordering::Acquire);
        // Only a thread that aborts may still take this lock. If there is none, the lock is free.
        let Some(comm) = self.comm.try_lock().filter(|_| !is_aborted).and_then(|mut comm| comm.take()) else {
            if !self.is_quiet() {
                // NCCL may still touch the copies.
                std::mem::forget(kept);
            }
            return;
        };
        let (library, busy) = (self.library, Busy::new());
        let streams = (self.stream.clone(), self.streams.clone());
        // If no thread can be started, the communicator stays, and may still use these.
        let used = ManuallyDrop::new((kept, streams));
        let end = move || {
            // SAFETY: taken out above, so nobody else has the communicator.
            let ended = unsafe { end_in_peace(library.0, comm) };
            if let Err(error) = ended {
                tracing::debug!("an NCCL communicator did not finish its work, and is aborted: {error}");
                // SAFETY: as above; after an error of `end_in_peace` the communicator still exists.
                if let Err(error) = unsafe { library.0.abort(comm) } {
                    tracing::warn!("an NCCL communicator could not be aborted: {error}");
                    return;
                }
            }
            drop(ManuallyDrop::into_inner(used));
            drop(busy);
        };
        if let Err(error) = std::thread::Builder::new().name("allstream-finalize".into()).spawn(end) {
            tracing::warn!("an NCCL communicator is not destroyed, as no thread could be started: {error}");
        }
    }
}

/// Finalizes and destroys a communicator. On an error it still exists.
///
/// # Safety
/// The communicator exists, and nobody else uses it.
unsafe fn end_in_peace(nccl: &Nccl, comm: NcclComm) -> Result<(), NcclError> {
    // SAFETY: the caller's promise.
    unsafe { nccl.finalize(comm) }?;
    let end = Instant::now() + FINALIZE;
    // SAFETY: as above.
    while unsafe { nccl.async_error(comm) }? == NcclResult::IN_PROGRESS {
        if Instant::now() > end {
            let text = format!("it was still at work after {FINALIZE:?}");
            return Err(NcclError { call: "ncclCommFinalize", code: NcclResult::IN_PROGRESS, text });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: as above.
    if let Err(error) = unsafe { nccl.destroy(comm) } {
        tracing::warn!("an NCCL communicator could not be destroyed: {error}");
    }
    Ok(())
}

/// Whether NCCL takes this value of one of its variables as "on": the value is a number other than 0, decimal or hexadecimal. Text that is
/// no number counts as "off", as an unset variable does.
fn is_switched_on(text: &str) -> bool {
    let text = text.trim();
    let number = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => i64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.is_ok_and(|number| number != 0)
}

/// The type as NCCL numbers it. `None`: NCCL does not have the type, or not in every version that the engine accepts.
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

/// The reduction as NCCL numbers it. `None`: NCCL has no such reduction (the bitwise ones), or does not promise the result that the engine gives
/// (minima and maxima of floats, among which there may be a NaN, and averages of integers).
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
