//! What runs on streams: kernels that find those of the other ranks, and what they compute together.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use allstream_kernels::{DType, ReduceOp, reduce};

use crate::comm::{Comm, lock};
use crate::driver::{self, Place};
use crate::knobs::{self, COUNTS, What, trouble};

/// How often who waits looks whether it was aborted.
const LOOK: Duration = Duration::from_millis(20);

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    AllReduce { op: c_int },
    Broadcast { root: c_int },
    Send { peer: c_int },
    Recv { peer: c_int },
}

/// A call, as it was made: addresses are the device's.
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
    /// Whether this rank reads, and whether it writes.
    fn touches(&self, rank: c_int) -> (bool, bool) {
        match self.verb {
            Verb::AllReduce { .. } => (true, true),
            Verb::Broadcast { root } => (root == rank, true),
            Verb::Send { .. } => (true, false),
            Verb::Recv { .. } => (false, true),
        }
    }

    fn bytes(&self) -> usize {
        self.count * dtype(self.dtype).map_or(0, DType::size)
    }

    /// Whether its numbers mean something, on a rank.
    pub(crate) fn is_sound(&self, rank: c_int) -> bool {
        let Some(dtype) = dtype(self.dtype) else { return false };
        let fits = match self.verb {
            Verb::AllReduce { op: number } => op(number).is_some_and(|op| op.supports(dtype)),
            _ => true,
        };
        let (reads, writes) = self.touches(rank);
        let there = |at: u64, wanted: bool| !wanted || self.count == 0 || at != 0;
        fits && self.count.checked_mul(dtype.size()).is_some()
            && there(self.input, reads)
            && there(self.output, writes)
    }

    /// What all ranks must have alike.
    fn alike(&self) -> (Verb, usize, c_int) {
        (self.verb, self.count, self.dtype)
    }
}

/// A call that a kernel has come to, and where the process keeps its memory.
#[derive(Clone, Copy)]
struct Here {
    call: Call,
    input: *const u8,
    output: *mut u8,
}

// SAFETY: the memory is kept by the driver as long as the kernel runs that this is of, which waits for the others.
unsafe impl Send for Here {}

/// What the kernels of a call have found of each other.
#[derive(Default)]
pub(crate) struct Round {
    here: HashMap<c_int, Vec<Here>>,
    /// All have come, and the results are there.
    done: bool,
    /// They differ: nobody gets anything.
    mismatched: bool,
    left: usize,
}

/// A kernel on a stream.
struct Kernel {
    comm: Arc<Comm>,
    number: u64,
    calls: Vec<Call>,
}

/// Puts a kernel on a stream. Whether it is there.
pub(crate) fn launch(comm: &Arc<Comm>, number: u64, calls: Vec<Call>, stream: u64) -> bool {
    let place =
        |at: u64, call: &Call, wanted: bool| Place { at, bytes: if wanted { call.bytes() } else { 0 } };
    let of_call = |call: &Call| {
        let (reads, writes) = call.touches(comm.rank);
        [place(call.input, call, reads), place(call.output, call, writes)]
    };
    let places: Vec<Place> = calls.iter().flat_map(of_call).collect();
    let kernel = Box::into_raw(Box::new(Kernel { comm: comm.clone(), number, calls }));
    COUNTS.kernels.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `run` takes the kernel, once, on the stream's thread.
    let put = unsafe { driver::put(stream, &places, run, kernel.cast()) };
    if !put {
        // SAFETY: nobody else has got it.
        drop(unsafe { Box::from_raw(kernel) });
    }
    put
}

unsafe extern "C" fn run(kernel: *mut c_void, places: *const *mut u8) -> u32 {
    // SAFETY: from `launch`, which gave it away.
    let Kernel { comm, number, calls } = *unsafe { Box::from_raw(kernel.cast::<Kernel>()) };
    let at = |index: usize| {
        // SAFETY: as many places as `launch` named: two for each call.
        unsafe { *places.add(index) }
    };
    let here = calls.iter().enumerate().map(|(i, call)| Here {
        call: *call,
        input: at(2 * i),
        output: at(2 * i + 1),
    });
    let here: Vec<Here> = here.collect();
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

/// Takes room on the device. `false`: it was aborted before there was any.
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

/// Waits for the kernels of the other ranks; the last one to come computes for all.
fn meet(comm: &Comm, number: u64, here: Vec<Here>) {
    let (clique, hangs) = (&comm.clique, trouble(What::Hangs, comm.rank, number).is_some());
    let mut rounds = lock(&clique.rounds);
    if !hangs {
        let round = rounds.entry(number).or_default();
        round.here.insert(comm.rank, here);
        if round.here.len() == clique.size {
            let all: Vec<Vec<Here>> =
                (0..clique.size as c_int).filter_map(|rank| round.here.remove(&rank)).collect();
            match compute(&all) {
                Some(()) => round.done = true,
                None => {
                    COUNTS.mismatches.fetch_add(1, Ordering::Relaxed);
                    round.mismatched = true;
                }
            }
            clique.changed.notify_all();
        }
    }
    loop {
        if let Some(round) = rounds.get_mut(&number).filter(|round| round.done && !hangs) {
            round.left += 1;
            if round.left == clique.size {
                rounds.remove(&number);
            }
            return;
        }
        if comm.aborted.load(Ordering::SeqCst) {
            // Whoever comes later finds it missing.
            if let Some(round) = rounds.get_mut(&number) {
                round.here.remove(&comm.rank);
            }
            return;
        }
        rounds = clique.changed.wait_timeout(rounds, LOOK).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// `None`: they differ.
fn compute(all: &[Vec<Here>]) -> Option<()> {
    let collective = |here: &&Here| matches!(here.call.verb, Verb::AllReduce { .. } | Verb::Broadcast { .. });
    let collectives: Vec<Vec<&Here>> = all.iter().map(|of| of.iter().filter(collective).collect()).collect();
    let first = collectives.first()?;
    for of in &collectives {
        let alike = |(a, b): (&&Here, &&Here)| a.call.alike() == b.call.alike();
        if of.len() != first.len() || !of.iter().zip(first).all(alike) {
            return None;
        }
    }
    let messages = messages(all)?;
    for i in 0..first.len() {
        one(&collectives.iter().map(|of| of[i]).collect::<Vec<_>>())?;
    }
    for (from, to) in messages {
        // SAFETY: both are as long as their calls say, which say the same; kept as long as their kernels run, which wait.
        unsafe { to.output.copy_from(from.input, from.call.bytes()) };
    }
    Some(())
}

/// Each send with its receive: those between two ranks follow each other.
fn messages(all: &[Vec<Here>]) -> Option<Vec<(Here, Here)>> {
    let mut pairs = Vec::new();
    for (from, sender) in all.iter().enumerate() {
        for (to, receiver) in all.iter().enumerate() {
            let sends = sender.iter().filter(|here| here.call.verb == Verb::Send { peer: to as c_int });
            let receives =
                receiver.iter().filter(|here| here.call.verb == Verb::Recv { peer: from as c_int });
            let (sends, receives): (Vec<_>, Vec<_>) = (sends.collect(), receives.collect());
            if sends.len() != receives.len() {
                return None;
            }
            for (send, receive) in sends.into_iter().zip(receives) {
                if send.call.bytes() != receive.call.bytes() {
                    return None;
                }
                pairs.push((*send, *receive));
            }
        }
    }
    Some(pairs)
}

/// A collective, by what all ranks have of it.
fn one(all: &[&Here]) -> Option<()> {
    let Call { verb, count, dtype: number, .. } = all.first()?.call;
    let (dtype, bytes) = (dtype(number)?, all[0].call.bytes());
    let mut result = vec![0_u8; bytes];
    match verb {
        Verb::AllReduce { op: number } => {
            let ins: Vec<*const u8> = all.iter().map(|here| here.input).collect();
            // SAFETY: each is as long as the call says, and nobody writes there: all kernels are here. `result` is our own.
            unsafe {
                reduce(dtype, op(number)?, &ins, &[result.as_mut_ptr()], count, Some(all.len() as u32))
            };
        }
        Verb::Broadcast { root } => {
            let from = all.get(root as usize)?.input;
            // SAFETY: as above.
            unsafe { result.as_mut_ptr().copy_from(from, bytes) };
        }
        _ => return None,
    }
    for here in all {
        // SAFETY: as above; an output is this rank's alone.
        unsafe { here.output.copy_from(result.as_ptr(), bytes) };
    }
    Some(())
}
