//! The kernels that run on streams: each waits for those of the other ranks, and the last to arrive computes the results of all.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use allstream_kernels::{DType, ReduceOp, reduce};

use crate::comm::{Comm, lock};
use crate::driver::{self, Place};
use crate::knobs::{self, COUNTS, What, trouble};

/// How often a kernel that waits looks whether its communicator was aborted.
const LOOK: Duration = Duration::from_millis(20);

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    AllReduce { op: c_int },
    Broadcast { root: c_int },
    Reduce { op: c_int, root: c_int },
    AllGather,
    ReduceScatter { op: c_int },
    Send { peer: c_int },
    Recv { peer: c_int },
}

/// A call, as it was made, with addresses of device memory. `count` has the meaning that the real library gives it for this function.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) verb: Verb,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
}

fn dtype(number: c_int) -> Option<DType> {
    use DType::*;
    let all = [I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16];
    all.get(usize::try_from(number).ok()?).copied()
}

fn op(number: c_int) -> Option<ReduceOp> {
    use ReduceOp::*;
    let all = [Sum, Prod, Max, Min, Avg];
    all.get(usize::try_from(number).ok()?).copied()
}

impl Call {
    /// How many blocks of `count` elements a rank reads, and how many it writes.
    fn blocks(&self, rank: c_int, size: usize) -> (usize, usize) {
        let is_root = |root: c_int| usize::from(root == rank);
        match self.verb {
            Verb::AllReduce { .. } => (1, 1),
            Verb::Broadcast { root } => (is_root(root), 1),
            Verb::Reduce { root, .. } => (1, is_root(root)),
            Verb::AllGather => (1, size),
            Verb::ReduceScatter { .. } => (size, 1),
            Verb::Send { .. } => (1, 0),
            Verb::Recv { .. } => (0, 1),
        }
    }

    /// Bytes of a block.
    fn bytes(&self) -> usize {
        self.count * dtype(self.dtype).map_or(0, DType::size)
    }

    /// Whether the arguments of this call are valid on this rank.
    pub(crate) fn is_sound(&self, rank: c_int, size: usize) -> bool {
        let Some(dtype) = dtype(self.dtype) else { return false };
        let is_rank = |rank: c_int| usize::try_from(rank).is_ok_and(|rank| rank < size);
        let is_op = |number: c_int| op(number).is_some_and(|op| op.supports(dtype));
        let fits = match self.verb {
            Verb::AllReduce { op } | Verb::ReduceScatter { op } => is_op(op),
            Verb::Reduce { op, root } => is_op(op) && is_rank(root),
            Verb::Broadcast { root: other } | Verb::Send { peer: other } | Verb::Recv { peer: other } => {
                is_rank(other)
            }
            Verb::AllGather => true,
        };
        let (reads, writes) = self.blocks(rank, size);
        let there = |at: u64, blocks: usize| blocks == 0 || self.count == 0 || at != 0;
        fits && self.count.checked_mul(dtype.size() * size).is_some()
            && there(self.input, reads)
            && there(self.output, writes)
    }

    /// What the call is counted under: `None` for collectives, (sender, receiver) for messages. Calls of different ranks belong together
    /// if they have the same place and the same number there.
    pub(crate) fn place(&self, rank: c_int) -> Option<(c_int, c_int)> {
        match self.verb {
            Verb::Send { peer } => Some((rank, peer)),
            Verb::Recv { peer } => Some((peer, rank)),
            _ => None,
        }
    }
}

/// A call whose kernel runs, and the addresses in this process of the device memory that it names.
#[derive(Clone, Copy)]
struct Here {
    rank: c_int,
    call: Call,
    input: *const u8,
    output: *mut u8,
}

// SAFETY: the driver keeps the memory for as long as this call's kernel runs, and that kernel waits until the others no longer use it.
unsafe impl Send for Here {}

/// Which calls belong together: the place where they are counted (see [`Call::place`]), and their number there.
pub(crate) type Meeting = (Option<(c_int, c_int)>, u64);

/// The calls of one [`Meeting`] whose kernels have arrived.
#[derive(Default)]
pub(crate) struct Round {
    here: Vec<Here>,
    /// All kernels have arrived, and the results are written.
    done: bool,
    left: usize,
}

/// A kernel on a stream.
struct Kernel {
    comm: Arc<Comm>,
    number: u64,
    calls: Vec<(Call, Meeting)>,
}

/// Puts a kernel on a stream. Returns whether the driver has accepted it.
pub(crate) fn launch(comm: &Arc<Comm>, number: u64, calls: Vec<(Call, Meeting)>, stream: u64) -> bool {
    let of_call = |(call, _): &(Call, Meeting)| {
        let (reads, writes) = call.blocks(comm.rank, comm.clique.size);
        let place = |at: u64, blocks: usize| Place { at, bytes: blocks * call.bytes() };
        [place(call.input, reads), place(call.output, writes)]
    };
    let places: Vec<Place> = calls.iter().flat_map(of_call).collect();
    let kernel = Box::into_raw(Box::new(Kernel { comm: comm.clone(), number, calls }));
    COUNTS.kernels.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `run` is called at most once, on the stream's thread, and takes the box back from the pointer.
    let put = unsafe { driver::put(stream, &places, run, kernel.cast()) };
    if !put {
        // SAFETY: the driver has refused the work, so nobody else has the pointer, which `Box::into_raw` made.
        drop(unsafe { Box::from_raw(kernel) });
    }
    put
}

unsafe extern "C" fn run(kernel: *mut c_void, places: *const *mut u8) -> u32 {
    // SAFETY: the pointer is from `Box::into_raw` in `launch`, which gave it away, and the driver calls this once.
    let Kernel { comm, number, calls } = *unsafe { Box::from_raw(kernel.cast::<Kernel>()) };
    let at = |index: usize| {
        // SAFETY: the driver passes as many places as `launch` named, which are two for each call.
        unsafe { *places.add(index) }
    };
    let here = calls.iter().enumerate().map(|(i, (call, meeting))| {
        (*meeting, Here { rank: comm.rank, call: *call, input: at(2 * i), output: at(2 * i + 1) })
    });
    let here: Vec<(Meeting, Here)> = here.collect();
    if enter(&comm) {
        meet(&comm, number, here);
        leave(comm.device);
    }
    if let Some(code) = trouble(What::FailsLate, comm.rank, number) {
        comm.fails(code);
    }
    comm.running.fetch_sub(1, Ordering::SeqCst);
    0
}

/// How many kernels are on each device.
static DEVICES: LazyLock<(Mutex<HashMap<c_int, u64>>, Condvar)> = LazyLock::new(Default::default);

pub(crate) fn wake_devices() {
    DEVICES.1.notify_all();
}

/// Waits until the device has room for a kernel, and takes it. `false`: the communicator was aborted before that.
fn enter(comm: &Comm) -> bool {
    let mut devices = lock(&DEVICES.0);
    loop {
        if comm.aborted.load(Ordering::Acquire) {
            return false;
        }
        let on_it = devices.entry(comm.device).or_default();
        if *on_it < knobs::room() {
            *on_it += 1;
            return true;
        }
        devices = DEVICES.1.wait_timeout(devices, LOOK).unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn leave(device: c_int) {
    *lock(&DEVICES.0).entry(device).or_default() -= 1;
    wake_devices();
}

/// Waits for the kernels of the other ranks. For each call, the kernel that arrives last computes the results of all.
fn meet(comm: &Comm, number: u64, here: Vec<(Meeting, Here)>) {
    let (clique, hangs) = (&comm.clique, trouble(What::Hangs, comm.rank, number).is_some());
    let mut rounds = lock(&clique.rounds);
    let mut left: Vec<Meeting> = here.iter().map(|(meeting, _)| *meeting).collect();
    if !hangs {
        for (meeting, here) in here {
            let round = rounds.entry(meeting).or_default();
            round.here.push(here);
            if round.here.len() == wanted(meeting, clique.size) {
                round.here.sort_by_key(|here| here.rank);
                round.done = compute(&round.here).is_some();
                if !round.done {
                    COUNTS.mismatches.fetch_add(1, Ordering::Relaxed);
                }
                clique.changed.notify_all();
            }
        }
    }
    loop {
        left.retain(|meeting| {
            let Some(round) = rounds.get_mut(meeting).filter(|round| round.done && !hangs) else {
                return true;
            };
            round.left += 1;
            if round.left == wanted(*meeting, clique.size) {
                rounds.remove(meeting);
            }
            false
        });
        if left.is_empty() {
            return;
        }
        if comm.aborted.load(Ordering::SeqCst) {
            // A kernel that arrives later must not touch this one's memory: it finds one call missing and waits.
            for meeting in &left {
                if let Some(round) = rounds.get_mut(meeting) {
                    round.here.retain(|here| here.rank != comm.rank);
                }
            }
            return;
        }
        rounds = clique.changed.wait_timeout(rounds, LOOK).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// How many calls belong together: two for a message, one of each rank for a collective.
fn wanted((message, _): Meeting, size: usize) -> usize {
    if message.is_some() { 2 } else { size }
}

/// Computes the results of calls that belong together. `None`: their arguments do not match.
fn compute(all: &[Here]) -> Option<()> {
    let first = all.first()?;
    if first.call.place(first.rank).is_none() {
        return collective(all);
    }
    let sends = |here: &&Here| matches!(here.call.verb, Verb::Send { .. });
    let from = all.iter().find(sends)?;
    let to = all.iter().find(|here| matches!(here.call.verb, Verb::Recv { .. }))?;
    if from.call.bytes() != to.call.bytes() {
        return None;
    }
    // SAFETY: both buffers have this many bytes, by their calls; the driver keeps them while their kernels run, and both kernels wait here.
    unsafe { to.output.copy_from(from.input, from.call.bytes()) };
    Some(())
}

/// Computes a collective from the calls of all ranks, in rank order.
fn collective(all: &[Here]) -> Option<()> {
    let Call { verb, count, dtype: number, .. } = all.first()?.call;
    let is_alike = |here: &Here| (here.call.verb, here.call.count, here.call.dtype) == (verb, count, number);
    if !all.iter().all(is_alike) {
        return None;
    }
    let (dtype, bytes, size) = (dtype(number)?, all[0].call.bytes(), all.len());
    let fold = |number: c_int, block: usize| {
        let ins: Vec<*const u8> = all.iter().map(|here| here.input.wrapping_add(block * bytes)).collect();
        let mut result = vec![0_u8; bytes];
        // SAFETY: each input is as long as its call says, and nobody writes to it, as all kernels wait here. `result` is our own.
        unsafe {
            reduce(dtype, op(number)?, &ins, &[result.as_mut_ptr()], count, Some((size as u32).into()))
        };
        Some(result)
    };
    let input = |here: &Here| {
        let mut block = vec![0_u8; bytes];
        // SAFETY: as above.
        unsafe { block.as_mut_ptr().copy_from(here.input, bytes) };
        block
    };
    // All results are computed before the first is written, because an output may be an input too.
    let results: Vec<Option<Vec<u8>>> = match verb {
        Verb::AllReduce { op } => vec![Some(fold(op, 0)?); size],
        Verb::Reduce { op, root } => {
            let result = fold(op, 0)?;
            all.iter().map(|here| (here.rank == root).then(|| result.clone())).collect()
        }
        Verb::Broadcast { root } => vec![Some(input(all.get(root as usize)?)); size],
        Verb::AllGather => vec![Some(all.iter().flat_map(input).collect()); size],
        Verb::ReduceScatter { op } => (0..size).map(|block| fold(op, block)).collect(),
        Verb::Send { .. } | Verb::Recv { .. } => return None,
    };
    for (here, result) in all.iter().zip(results) {
        if let Some(result) = result {
            // SAFETY: the output is as long as its call says, all kernels wait here, and only this rank uses the output.
            unsafe { here.output.copy_from(result.as_ptr(), result.len()) };
        }
    }
    Some(())
}
