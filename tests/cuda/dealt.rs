//! Ranks of one process that share a device with few hardware queues, which are dealt to streams at random. A rank that joins a stream before
//! all ranks have called breaks a rule (`Work::join`): the join may wait, or fails and names the rule. Neither takes until a deadline.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::{Comm, Error, Failed};

use crate::support::{
    bound, child, down, full, nothing_left, ranks, report, set_deal, set_delays, set_queues, soon, until, up,
    values,
};
use crate::values::mix;

const RANKS: usize = 8;
const ROUNDS: usize = 3;
/// Time limit of an operation; no test here comes near it.
const LIMIT: Duration = Duration::from_secs(15);

/// Calls `run` for each seed, which decides how queues are dealt. A device has 3 queues, or `more` with every second seed.
fn each_seed(more: u32, few: u64, mut run: impl FnMut(u64)) {
    let seeds = if full() { 100 } else { few };
    for seed in 0..seeds {
        set_queues(if seed % 2 == 0 { 3 } else { more });
        set_deal(1 + (seed / 2 % 2) as u32);
        set_delays(0, mix(&[seed]));
        let start = Instant::now();
        run(seed);
        nothing_left("all ranks have ended");
        assert!(start.elapsed() < LIMIT / 2, "seed {seed} took {:?}", start.elapsed());
    }
    assert_eq!(report().freed_in_use, 0);
}

/// Checks that the error names the rule, and the variable that gives more queues.
fn names_the_rule(error: &Error) {
    let text = error.to_string();
    assert!(matches!(error, Error::Invalid { call, .. } if call == "join"), "{text}");
    assert!(
        text.contains("before any of them joins") && text.contains("CUDA_DEVICE_MAX_CONNECTIONS"),
        "{text}"
    );
}

/// What all ranks have after [`ROUNDS`] sums, each of the results of the one before.
fn sums() -> Vec<f32> {
    let first = |i: usize| (0..RANKS).map(|rank| values(rank, 64)[i]).sum::<f32>();
    let times = RANKS.pow(ROUNDS as u32 - 1) as f32;
    (0..64).map(|i| first(i) * times).collect()
}

/// Runs [`ROUNDS`] operations, one behind the other: calls, does `before_join`, and joins.
fn chain(
    comm: &mut Comm,
    stream: &DeviceStream,
    before_join: impl Fn(usize, usize),
) -> Result<Vec<f32>, Error> {
    let rank = comm.rank();
    let mut grads: DeviceBuf<f32> = up(stream, values(rank, 64));
    for round in 0..ROUNDS {
        let work = comm.on(stream).timeout(LIMIT).all_reduce(grads);
        before_join(rank, round);
        let joined = work.join(stream).and_then(|ordered| ordered.in_order());
        grads = joined.map_err(|failed| failed.error)?;
    }
    match soon(grads.to_host(vec![0.0; 64])) {
        Ok((_, host)) => Ok(host),
        Err(Failed { error, .. }) => Err(error),
    }
}

#[test]
fn threads_that_join_before_all_have_called_reach_no_deadline() {
    child("dealt::threads_that_join_before_all_have_called_reach_no_deadline", &[], || {
        let (right, broken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        each_seed(3, 8, |seed| {
            ranks(RANKS, |mut comm| {
                let stream = bound(&mut comm, 1);
                // Some come late: the others have joined by then, or wait for them.
                if mix(&[seed, comm.rank() as u64]).is_multiple_of(4) {
                    std::thread::sleep(Duration::from_millis(20));
                }
                match chain(&mut comm, &stream, |_, _| ()) {
                    Ok(got) => {
                        assert_eq!(got, sums(), "seed {seed}");
                        right.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => {
                        names_the_rule(&error);
                        broken.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        });
        let (right, broken) = (right.into_inner(), broken.into_inner());
        println!("{right} ranks have come through, {broken} have heard of the rule");
        assert!(
            right > 9 * broken,
            "threads wait for each other where they can: {right} right, {broken} broken"
        );
    });
}

#[test]
fn threads_that_keep_the_rule_hear_of_nothing() {
    child("dealt::threads_that_keep_the_rule_hear_of_nothing", &[], || {
        each_seed(3, 8, |seed| {
            let calls = AtomicUsize::new(0);
            let all_have_called = |round: usize| {
                calls.fetch_add(1, Ordering::AcqRel);
                until("all ranks have called", || calls.load(Ordering::Acquire) >= (round + 1) * RANKS);
            };
            ranks(RANKS, |mut comm| {
                let stream = bound(&mut comm, 1);
                let got = chain(&mut comm, &stream, |_, round| all_have_called(round));
                assert_eq!(got.unwrap_or_else(|error| panic!("seed {seed}: {error}")), sums(), "seed {seed}");
                soon(comm.close()).unwrap();
            });
        });
    });
}

/// Binds all ranks on this thread, each with a stream of its own.
fn all_bound(n: usize) -> Vec<(Comm, DeviceStream)> {
    let device = Device::new(0).unwrap();
    let comms = Comm::local(n).unwrap();
    let bind = |mut comm: Comm| {
        let device = device.clone();
        async move {
            comm.bind_device(&device).await.unwrap();
            (comm, DeviceStream::new(&device).unwrap())
        }
    };
    soon(futures::future::join_all(comms.into_iter().map(bind)))
}

/// One thread calls and joins for each rank in turn. The first rank's stream may wait already when the second rank calls: the first rank's
/// join cannot wait for the second's call, which the same thread makes only afterwards.
#[test]
fn one_thread_that_breaks_the_rule_is_told_at_once() {
    child("dealt::one_thread_that_breaks_the_rule_is_told_at_once", &[], || {
        let (mut right, mut broken) = (0, 0);
        each_seed(12, 8, |seed| {
            let mut all = all_bound(3);
            let start = Instant::now();
            let mut inputs: Vec<_> =
                all.iter().map(|(comm, stream)| Some(up(stream, values(comm.rank(), 64)))).collect();
            let mut worst: Option<Error> = None;
            // Two rounds: in the second, the engine knows each rank's stream.
            for _ in 0..2 {
                for (rank, (comm, stream)) in all.iter_mut().enumerate() {
                    let Some(input) = inputs[rank].take() else { continue };
                    let joined = comm.timeout(LIMIT).all_reduce(input).join(stream);
                    match joined.and_then(|ordered| ordered.in_order()) {
                        Ok(buf) => inputs[rank] = Some(buf),
                        Err(Failed { error, .. }) => worst = Some(error),
                    }
                }
            }
            for buf in inputs.into_iter().flatten() {
                match soon(buf.to_host(vec![0.0; 64])) {
                    Ok((_, got)) => {
                        let sum = |i: usize| (0..3).map(|rank| values(rank, 64)[i]).sum::<f32>() * 3.0;
                        assert_eq!(got, (0..64).map(sum).collect::<Vec<_>>(), "seed {seed}");
                    }
                    Err(Failed { error, .. }) => worst = Some(error),
                }
            }
            let took = start.elapsed();
            assert!(took < Duration::from_secs(4), "seed {seed}: {took:?}, {worst:?}");
            match worst {
                None => right += 1,
                Some(error) => {
                    names_the_rule(&error);
                    broken += 1;
                    for (comm, _) in &all {
                        names_the_rule(&comm.check().unwrap_err());
                    }
                }
            }
        });
        println!("{right} seeds have come through, {broken} have broken the rule");
        assert!(right > 0 && broken > 0, "{right} right, {broken} broken: both are to be seen");
    });
}

/// Two ranks share one stream: once the first has joined it, the second's input cannot be ready, however many queues there are.
#[test]
fn ranks_that_share_a_stream_are_told_at_once() {
    child("dealt::ranks_that_share_a_stream_are_told_at_once", &[], || {
        let mut all = all_bound(2);
        let stream = all[0].1.clone();
        let start = Instant::now();
        let inputs = [0, 1].map(|rank| up(&stream, values(rank, 64)));
        let [first, second] = inputs;
        let ordered = all[0].0.timeout(LIMIT).all_reduce(first).join(&stream).unwrap();
        let Failed { buf, error } = soon(all[1].0.timeout(LIMIT).all_reduce(second)).unwrap_err();
        names_the_rule(&error);
        names_the_rule(&soon(ordered).unwrap_err().error);
        assert_eq!(down(buf.unwrap()), values(1, 64), "it comes back as it was");
        assert!(start.elapsed() < LIMIT / 3, "{:?}", start.elapsed());
        drop((all, stream));
        nothing_left("all was dropped");
    });
}
