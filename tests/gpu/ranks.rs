//! What a rank does: all cases of its world, messages, and gradient buckets.

use std::time::Duration;

use allstream::Comm;
use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, Transfer};
use allstream::train::{Buckets, Param};
use futures::executor::block_on;

use crate::account::Note;
use crate::cases::{self, Case, OnDevice, Oracle, Seen, Wrong};
use crate::choice::{self, Bound};
use crate::driver::Driver;
use crate::support;

/// How long a process waits at its end until no thread of allstream's asks the driver any more.
const SETTLE: Duration = Duration::from_secs(20);

/// A rank's place on the device: the stream that its buffers are ordered by. Its collectives have another stream.
fn place(comm: &mut Comm, bound: Bound) -> Result<OnDevice, String> {
    let device = Device::new(0).map_err(|error| error.to_string())?;
    let path = match bound {
        Bound::No => None,
        Bound::Peer => Some(block_on(comm.bind_device(&device))),
        Bound::Nccl => Some(block_on(comm.bind_nccl(&device))),
    };
    match (bound, path.transpose().map_err(|error| error.to_string())?) {
        (Bound::No, _)
        | (Bound::Peer, Some(DevicePath::Peer))
        | (Bound::Nccl, Some(DevicePath::Nccl { .. })) => {}
        // The values could be right all the same, but would not test the path that is to be tested.
        (_, path) => return Err(format!("the ranks go by {path:?}, where {bound:?} is expected")),
    }
    DeviceStream::new(&device).map(OnDevice).map_err(|error| error.to_string())
}

/// Runs all cases on one rank, and tells what came of each. Goes on past wrong values, and ends with the first error.
pub(crate) fn run(mut comm: Comm, bound: Bound, cases: &[Case], oracle: &Oracle, tell: &dyn Fn(Note)) {
    let place = match place(&mut comm, bound) {
        Ok(place) => place,
        Err(error) => return tell(Note::Ended(format!("before the first case: {error}"))),
    };
    // Whether to go on.
    let goes_on = |note: Note| {
        let is_end = matches!(note, Note::Ended(_));
        tell(note);
        !is_end
    };
    for (i, case) in cases.iter().enumerate() {
        if !goes_on(Note::of(cases::run_on_device(&mut comm, case, oracle, i, &place))) {
            return;
        }
    }
    let nothing = |done: Result<(), Wrong>| Note::of(done.map(|()| Seen::Nothing));
    if !goes_on(nothing(messages(&mut comm, &place))) {
        return;
    }
    let buckets = buckets(&mut comm, &place);
    drop(place);
    // What is wrong with the last thing tried is told, also where the communicator does not close.
    let closed = support::close(comm);
    goes_on(match (nothing(buckets), closed) {
        (Note::Seen(_), Err(error)) => Note::Ended(error),
        (note, _) => note,
    });
}

/// If this variable is set, processes end without [`settle`], to test what the library itself does then.
pub(crate) const UNSETTLED: &str = "ALLSTREAM_TEST_UNSETTLED";

/// To be called before the process ends, by who has dropped everything.
pub(crate) fn settle() {
    if std::env::var_os(UNSETTLED).is_some() {
        return;
    }
    assert!(allstream::cuda::settle(SETTLE), "threads of allstream's still ask the driver after {SETTLE:?}");
}

/// What was wrong, if anything was.
fn judged(wrong: Vec<String>) -> Result<(), Wrong> {
    if wrong.is_empty() { Ok(()) } else { Err(Wrong::Values(wrong.join("; "))) }
}

/// Messages round the ring: each rank sends and receives at the same time. Some lengths are sent eagerly, others are not.
fn messages(comm: &mut Comm, OnDevice(stream): &OnDevice) -> Result<(), Wrong> {
    fn done<O: Send + 'static, F: Send + 'static>(copy: Transfer<O, F>) -> Result<O, String> {
        copy.wait().map_err(|failed| failed.error.to_string())
    }
    let (n, rank) = (comm.size(), comm.rank());
    if n == 1 {
        return Ok(());
    }
    let mut wrong = Vec::new();
    let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
    let say = |rank: usize, len: usize| (0..len).map(|i| (i * 31 + rank * 7) as u32).collect::<Vec<_>>();
    let lens: &[usize] =
        if Driver::chosen().large() { &[0, 1, 999, 1 << 20, 3_000_001] } else { &[0, 1, 999, 40_001] };
    for len in lens.iter().copied() {
        let buf = done(DeviceBuf::from_host(stream, say(rank, len)))?.1;
        let room = DeviceBuf::zeroed(stream, len).map_err(|error| error.to_string())?;
        let both = comm.timeout(choice::CALL).send_recv(buf, to, room, from);
        let (sent, got) = block_on(both).map_err(|failed| failed.error.to_string())?;
        // The buffer that was sent is unchanged, and the other holds what `from` has sent.
        for (buf, whose) in [(sent, rank), (got, from)] {
            let found = done(buf.to_host(vec![0; len]))?.1;
            if found != say(whose, len) {
                wrong.push(format!("{len} elements: not what rank {whose} has sent"));
            }
        }
    }
    judged(wrong)
}

/// Steps of gradients, of which a kernel packs the small ones. In turn the host waits for a step's end, and the stream.
fn buckets(comm: &mut Comm, OnDevice(stream): &OnDevice) -> Result<(), Wrong> {
    const LENS: [usize; 7] = [3, 1001, 0, 500, 20_000, 1, 4096];
    let layout = LENS.map(|len| Param::of::<f32>(len).on_device());
    let (n, rank) = (comm.size(), comm.rank());
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let mut wrong = Vec::new();
    // Whole numbers, whose mean over all ranks is a whole number, too.
    let value = |rank: usize, k: usize| (k % 100 + rank * 2) as f32 - (n - 1) as f32;
    let mut buckets = block_on(Buckets::new(&comm.share(), &layout)).map_err(|error| said(&error))?;
    for step in 0..4 {
        for (i, len) in LENS.into_iter().enumerate().rev() {
            let grad = (0..len).map(|k| value(rank, k)).collect::<Vec<f32>>();
            let grad = DeviceBuf::from_host(stream, grad).wait().map_err(|failed| said(&failed.error))?.1;
            buckets.push(i, grad).map_err(|failed| said(&failed.error))?;
        }
        let back: Vec<DeviceBuf<f32>> = if step % 2 == 0 {
            block_on(buckets.finish()).map_err(|failed| said(&failed.error))?.collect()
        } else {
            // All ranks have pushed before any of their streams waits: the streams share the device's hardware queues, so one that waits
            // may hold up the stream by which another rank's gradients come.
            block_on(comm.barrier()).map_err(|error| said(&error))?;
            let joined = buckets.join(stream).map_err(|failed| said(&failed.error))?;
            joined.in_order().map_err(|failed| said(&failed.error))?
        };
        for (i, grad) in back.into_iter().enumerate() {
            let found = grad.to_host(vec![0.0; LENS[i]]).wait().map_err(|failed| said(&failed.error))?.1;
            if let Some(k) = (0..LENS[i]).find(|k| found[*k] != (k % 100) as f32) {
                wrong.push(format!("step {step}, gradient {i}[{k}] is {}, expected {}", found[k], k % 100));
            }
        }
    }
    block_on(buckets.close()).map_err(|error| said(&error))?;
    judged(wrong)
}
