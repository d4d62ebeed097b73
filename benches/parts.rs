//! What every operation costs: its submission, and the wake-up of a thread that sleeps until a message is there.
//!
//! `cargo bench --bench parts -- [NAMES]`

#![allow(missing_docs)]

use std::sync::mpsc;
use std::time::{Duration, Instant};

use allstream::Comm;
use criterion::{Criterion, criterion_group, criterion_main};
use futures::executor::block_on;

/// An operation of a group of one, from the call until its buffer is back. Nothing moves, so every other operation costs this too.
fn submit(c: &mut Criterion) {
    let Ok(mut comms) = Comm::local(1) else { return };
    let Some(comm) = comms.first_mut() else { return };
    let mut buf = Some(vec![1.0f32; 1]);
    c.bench_function("submit/wait", |b| {
        b.iter(|| buf = buf.take().and_then(|buf| comm.all_reduce(buf).wait().ok()));
    });
    c.bench_function("submit/await", |b| {
        b.iter(|| buf = buf.take().and_then(|buf| block_on(comm.all_reduce(buf)).ok()));
    });
    assert_eq!(buf, Some(vec![1.0]), "all operations were good");
}

/// How long after the call of `send` a thread that sleeps in `.await` has the message: the progress thread wakes, and wakes that thread.
fn wakeup(c: &mut Criterion) {
    let Ok(comms) = Comm::local(2) else { return };
    let Ok([mut receiver, mut sender]) = <[Comm; 2]>::try_from(comms) else { return };
    let (go, asked) = mpsc::channel::<Instant>();
    let sending = std::thread::spawn(move || {
        for base in asked {
            // Until the receiver has nothing left to do but to sleep.
            std::thread::sleep(Duration::from_millis(2));
            let now = base.elapsed().as_nanos() as u64;
            if sender.send(vec![now], 0).wait().is_err() {
                return;
            }
        }
    });
    let mut group = c.benchmark_group("wakeup");
    group.sample_size(20).measurement_time(Duration::from_secs(2));
    group.bench_function("await", |b| {
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            for _ in 0..iterations {
                let base = Instant::now();
                let work = receiver.recv(vec![0u64], 1);
                if go.send(base).is_err() {
                    break;
                }
                match block_on(work) {
                    Ok(sent) => total += base.elapsed() - Duration::from_nanos(sent[0]),
                    Err(error) => panic!("no message: {error}"),
                }
            }
            total
        });
    });
    group.finish();
    drop(go);
    let _ = sending.join();
}

criterion_group!(parts, submit, wakeup);
criterion_main!(parts);
