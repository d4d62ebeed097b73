//! A library for tests that takes collectives whole, on the host's memory, among ranks of one process: slow and correct, and wrong
//! where it is told to be ([`Slow`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use allstream_kernels as kernels;
use parking_lot::Mutex;

use crate::comm::SharedComm;
use crate::device::DeviceStream;
use crate::device::carriers::{self, BoundTo};
use crate::device::whole::{ID, Library, Piece, Standing, Whole, WholeCall};
use crate::error::Error;
use crate::mem::Witness;
use crate::types::{Kind, Rank};

/// The library's name, for people.
const NAME: &str = "the slow library for tests";
/// How long the library sleeps before it computes.
const SLOWNESS: Duration = Duration::from_millis(1);

/// The settings of the slow library for one rank: which collectives it takes, and what it does wrong on this rank. Its calls are numbered from 0.
#[derive(Clone, Debug, Default)]
pub struct Slow {
    /// The collectives that it takes. The same on all ranks.
    pub kinds: Vec<Kind>,
    /// How often, asked about a call, it says that the call is in progress before it begins to work on it.
    pub in_progress: u32,
    /// The call that it never begins to work on.
    pub hang_at: Option<u64>,
    /// The call of which it says that it has failed, although the results are there.
    pub fail_at: Option<u64>,
    /// Whether, after an abort, it never says that it touches no memory any more.
    pub is_deaf: bool,
    /// How often it was opened for a communicator.
    pub opened: Arc<AtomicU32>,
    /// How many calls it was given.
    pub submitted: Arc<AtomicU32>,
}

/// Where the ranks of a communicator leave their calls, for a thread that computes with all of them.
#[derive(Default)]
struct Room {
    calls: Mutex<HashMap<u64, Vec<(Rank, WholeCall)>>>,
    /// The results of all calls before this one are there.
    done: AtomicU64,
    /// Threads that compute.
    at_work: AtomicU32,
    /// How many ranks have opened the library.
    open: AtomicU32,
}

impl Room {
    /// The room with this id, which all ranks of a communicator get.
    fn of(id: &[u8; ID]) -> Arc<Room> {
        static ALL: Mutex<Vec<([u8; ID], Weak<Room>)>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        all.retain(|(_, room)| room.strong_count() > 0);
        let known = all.iter().find(|(known, _)| known == id).and_then(|(_, room)| room.upgrade());
        known.unwrap_or_else(|| {
            let room = Arc::new(Room::default());
            all.push((*id, Arc::downgrade(&room)));
            room
        })
    }

    /// Leaves a rank's call. With the last of them a thread begins to compute.
    fn leave(self: &Arc<Self>, number: u64, (rank, size): (Rank, usize), call: WholeCall) {
        let mut calls = self.calls.lock();
        let left = calls.entry(number).or_default();
        left.push((rank, call));
        if left.len() < size {
            return;
        }
        let Some(mut all) = calls.remove(&number) else { return };
        drop(calls);
        all.sort_unstable_by_key(|(rank, _)| *rank);
        let all: Vec<WholeCall> = all.into_iter().map(|(_, call)| call).collect();
        self.at_work.fetch_add(1, Ordering::AcqRel);
        let room = self.clone();
        std::thread::spawn(move || {
            std::thread::sleep(SLOWNESS);
            compute(&all);
            room.done.store(number + 1, Ordering::Release);
            room.at_work.fetch_sub(1, Ordering::AcqRel);
        });
    }
}

impl SharedComm {
    /// Binds this rank to a library for tests, which takes collectives of host memory whole. Collective: all ranks call it.
    ///
    /// # Errors
    /// As a collective.
    #[doc(hidden)]
    pub async fn bind_slow(&self, slow: &Slow) -> Result<(), Error> {
        let bound = self.open_whole("bind_slow", &SlowLibrary(slow.clone()), None).await?;
        carriers::bind(&self.handle().endpoint, BoundTo { binding: None, whole: Some(bound) });
        Ok(())
    }
}

/// The library.
struct SlowLibrary(Slow);

impl Library for SlowLibrary {
    fn name(&self) -> String {
        NAME.into()
    }

    fn id(&self) -> Result<[u8; ID], Error> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut id = [0; ID];
        id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(id)
    }

    fn open(
        &self,
        id: &[u8; ID],
        place: (Rank, usize),
        _: Option<&DeviceStream>,
    ) -> Result<Arc<dyn Whole>, Error> {
        self.0.opened.fetch_add(1, Ordering::Relaxed);
        let room = Room::of(id);
        room.open.fetch_add(1, Ordering::AcqRel);
        let (last, slow) = (Mutex::default(), self.0.clone());
        let (aborted, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(SlowEnd { place, room, slow, last, aborted, failed }))
    }
}

struct SlowEnd {
    place: (Rank, usize),
    room: Arc<Room>,
    slow: Slow,
    last: Mutex<Last>,
    aborted: AtomicBool,
    failed: AtomicBool,
}

/// What this rank's end knows of its last call.
#[derive(Default)]
struct Last {
    /// How many calls were submitted. The number of the last one is one less.
    submitted: u64,
    /// The last call, if it is not in the room yet; and how often `poll` has asked about it.
    kept: Option<WholeCall>,
    asked: u32,
}

impl SlowEnd {
    fn error(&self, problem: &str) -> Error {
        Error::library(NAME, self.place.0, problem)
    }
}

impl Witness for SlowEnd {
    fn check(&self) -> Result<(), Error> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(self.error("it was aborted"));
        }
        if self.failed.load(Ordering::Acquire) {
            return Err(self.error("it was told to fail late"));
        }
        Ok(())
    }
}

impl Whole for SlowEnd {
    fn name(&self) -> &str {
        NAME
    }

    fn takes(&self, call: &WholeCall) -> bool {
        self.slow.kinds.contains(&call.kind) && call.pieces.iter().all(|piece| piece.tables.is_none())
    }

    unsafe fn submit(&self, call: WholeCall, _: Option<&DeviceStream>) -> Result<(), Error> {
        self.check()?;
        let mut last = self.last.lock();
        assert!(last.kept.is_none(), "a call was submitted while another was in progress");
        self.slow.submitted.fetch_add(1, Ordering::Relaxed);
        (last.kept, last.asked) = (Some(call), 0);
        last.submitted += 1;
        Ok(())
    }

    fn poll(&self) -> Result<Standing, Error> {
        self.check()?;
        let mut last = self.last.lock();
        let Some(number) = last.submitted.checked_sub(1) else {
            let all = self.room.open.load(Ordering::Acquire) as usize >= self.place.1;
            return Ok(if all { Standing::Over } else { Standing::InProgress });
        };
        last.asked += 1;
        if last.kept.is_some() && (last.asked <= self.slow.in_progress || self.slow.hang_at == Some(number)) {
            return Ok(Standing::InProgress);
        }
        if let Some(call) = last.kept.take() {
            self.room.leave(number, self.place, call);
        }
        if self.room.done.load(Ordering::Acquire) <= number {
            return Ok(Standing::InProgress);
        }
        if self.slow.fail_at == Some(number) {
            self.failed.store(true, Ordering::Release);
            self.check()?;
        }
        Ok(Standing::Over)
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    fn is_quiet(&self) -> bool {
        self.room.at_work.load(Ordering::Acquire) == 0 && !self.slow.is_deaf
    }
}

/// Bytes at an address.
///
/// # Safety
/// Those are valid for reads, and nobody writes them.
unsafe fn read(at: *const u8, bytes: usize) -> Vec<u8> {
    if bytes == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at, bytes) }.to_vec()
}

/// Puts bytes at an address.
///
/// # Safety
/// There is room for them, which nobody else touches.
unsafe fn write(at: *mut u8, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: the caller's promise; `bytes` is memory of our own.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

/// Computes a call of which all ranks have left their part.
fn compute(all: &[WholeCall]) {
    for entry in 0..all[0].pieces.len() {
        let pieces: Vec<Piece> = all.iter().map(|call| call.pieces[entry].clone()).collect();
        compute_entry(all, &pieces);
    }
}

fn compute_entry(all: &[WholeCall], pieces: &[Piece]) {
    let (first, n) = (&all[0], all.len());
    let (kind, root, op, dtype) = (first.kind, first.root, first.op, pieces[0].dtype);
    let block = pieces[0].bytes();
    // From where each rank gives, and how much.
    let given = |rank: Rank| {
        let piece = &pieces[rank];
        match kind {
            Kind::AllGather => (piece.own_input(rank), block),
            Kind::Gather if rank == root => (piece.own_input(rank), block),
            Kind::AllToAll | Kind::ReduceScatter => (piece.input, n * block),
            Kind::Scatter => (piece.input, if rank == root { n * block } else { 0 }),
            Kind::Broadcast => (piece.input, if rank == root { block } else { 0 }),
            _ => (piece.input, block),
        }
    };
    let inputs: Vec<Vec<u8>> = (0..n)
        .map(|rank| {
            let (at, bytes) = given(rank);
            // SAFETY: `submit`'s caller vouches for the memory, as long as the collective says.
            let mut input = unsafe { read(at, bytes) };
            if let Some(factor) = all[rank].scale {
                // SAFETY: `input` is as long as its elements.
                unsafe { kernels::scale(dtype, input.as_mut_ptr(), bytes / dtype.size(), factor) };
            }
            input
        })
        .collect();
    let fold = |ranks: std::ops::Range<Rank>, from: usize| {
        let mut out = vec![0_u8; block];
        let ins: Vec<*const u8> = inputs[ranks].iter().map(|input| input[from..].as_ptr()).collect();
        // SAFETY: each has a block from there on, and `out` is one.
        unsafe {
            kernels::reduce(dtype, op, &ins, &[out.as_mut_ptr()], pieces[0].count, Some((n as u32).into()));
        }
        out
    };
    for (rank, piece) in pieces.iter().enumerate() {
        let part = |of: Rank, which: Rank| &inputs[of][which * block..(which + 1) * block];
        let (to, result) = match kind {
            Kind::AllReduce => (piece.output, fold(0..n, 0)),
            Kind::Reduce if rank == root => (piece.output, fold(0..n, 0)),
            Kind::Broadcast => (piece.output, inputs[root].clone()),
            Kind::AllGather => (piece.output, inputs.concat()),
            Kind::Gather if rank == root => (piece.output, inputs.concat()),
            Kind::ReduceScatter if piece.is_in_place() => {
                (piece.block(piece.output, rank), fold(0..n, rank * block))
            }
            Kind::ReduceScatter => (piece.output, fold(0..n, rank * block)),
            // In place the root's own block is where it belongs.
            Kind::Scatter if rank == root && piece.is_in_place() => continue,
            Kind::Scatter => (piece.output, part(root, rank).to_vec()),
            Kind::AllToAll => (piece.output, (0..n).map(|of| part(of, rank)).collect::<Vec<_>>().concat()),
            Kind::Scan => (piece.output, fold(0..rank + 1, 0)),
            Kind::ExScan if rank > 0 => (piece.output, fold(0..rank, 0)),
            _ => continue,
        };
        // SAFETY: as above.
        unsafe { write(to, &result) };
    }
}
