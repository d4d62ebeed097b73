//! Streams that hold only so many pieces of work, and the calls that a full one holds up; and calls under a program's locks.
#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

mod support;

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use support::*;

/// Takes the limit away when it is dropped, also if the test fails: so calls that are blocked go on.
struct Depth;

impl Depth {
    fn set(pieces: u64) -> Depth {
        ok!(allstream_test_cuda_set_depth(pieces));
        Depth
    }
}

impl Drop for Depth {
    fn drop(&mut self) {
        ok!(allstream_test_cuda_set_depth(0));
    }
}

/// A word in host memory that streams wait for.
struct Gate(*mut c_void);

impl Gate {
    fn new() -> Gate {
        let mut at = std::ptr::null_mut();
        ok!(cuMemHostAlloc(&mut at, 4, 2));
        let gate = Gate(at);
        gate.word().store(0, Ordering::Release);
        gate
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: 4 bytes of the driver's that are aligned and live until the gate is freed; only used atomically.
        unsafe { AtomicU32::from_ptr(self.0.cast()) }
    }

    fn at(&self) -> u64 {
        self.0 as u64
    }

    fn free(self) {
        ok!(cuMemFreeHost(self.0));
    }
}

/// Runs `run` on a thread of its own, with `context` current unless it is 0. The receiver gets a message when `run` has returned.
fn aside(context: u64, run: impl FnOnce() + Send + 'static) -> Receiver<()> {
    let (told, hear) = channel();
    std::thread::spawn(move || {
        if context != 0 {
            ok!(cuCtxSetCurrent(context));
        }
        told.send(()).unwrap();
        run();
        told.send(()).unwrap();
    });
    hear.recv_timeout(DEADLINE).unwrap();
    hear
}

fn is_waiting(hear: &Receiver<()>) -> bool {
    hear.recv_timeout(Duration::from_millis(5)) == Err(RecvTimeoutError::Timeout)
}

#[test]
fn a_full_stream_blocks_who_launches_there_and_every_call_in_its_context() {
    let test = "a_full_stream_blocks_who_launches_there_and_every_call_in_its_context";
    passes_with(test, &[("LOCK", "context")], everything_is_held_up);
}

/// As measured on an H200.
#[test]
fn a_full_stream_holds_up_who_gets_memory_and_nobody_else() {
    let driver = Driver::new(1);
    let here = driver.contexts[0];
    let (full, other, gate, at) = (stream(), stream(), Gate::new(), alloc(64));
    let depth = Depth::set(4);
    let (word, waited) = (gate.at(), code!(allstream_test_cuda_calls(c"waiting for room".as_ptr())));
    let launches = aside(here, move || {
        ok!(cuStreamWaitValue32_v2(full, word, 1, 0));
        (0..10).for_each(|_| ok!(cuMemsetD8Async(at, 1, 8, full)));
    });
    while code!(allstream_test_cuda_calls(c"waiting for room".as_ptr())) == waited {
        std::thread::sleep(Duration::from_millis(1));
    }
    let [query, memory] =
        [aside(here, move || ok!(cuStreamQuery(other))), aside(here, || ok!(cuMemFree_v2(alloc(64))))];
    query.recv_timeout(DEADLINE).unwrap();
    assert!(is_waiting(&memory) && is_waiting(&launches));
    gate.word().store(1, Ordering::Release);
    [launches, memory].iter().for_each(|one| one.recv_timeout(DEADLINE).unwrap());
    assert_eq!([full, other].map(finish), [0; 2]);
    drop(depth);
    gate.free();
    ok!(cuMemFree_v2(at));
    [full, other].iter().for_each(|stream| ok!(cuStreamDestroy_v2(*stream)));
}

fn everything_is_held_up() {
    let driver = Driver::new(2);
    let [here, elsewhere] = driver.contexts[..] else { panic!("two devices") };
    let (full, other, reached) = (stream(), stream(), event());
    // Calls that are held up put work on these two, and nothing queries these.
    let (used, marked) = (stream(), event());
    let (gate, at) = (Gate::new(), alloc(64));
    ok!(cuEventRecord(reached, other));
    assert_eq!(finish(other), 0);
    let depth = Depth::set(4);
    let calls = |name: &std::ffi::CStr| code!(allstream_test_cuda_calls(name.as_ptr()));
    // Some threads have a current context already; the others have none, and name the context itself or an object of it.
    let (go, wait) = channel::<()>();
    let wait = std::sync::Arc::new(std::sync::Mutex::new(wait));
    let begins =
        move |wait: &std::sync::Mutex<Receiver<()>>| wait.lock().unwrap().recv_timeout(DEADLINE).unwrap();
    let waiting = |context: u64, run: fn([u64; 6])| {
        let (wait, with) = (wait.clone(), [other, reached, here, at, used, marked]);
        aside(context, move || {
            begins(&wait);
            run(with);
        })
    };
    let held_up = [
        waiting(here, |[other, ..]| ok!(cuStreamQuery(other))),
        waiting(here, |[_, event, ..]| ok!(cuEventQuery(event))),
        waiting(here, |[_, _, _, at, used, _]| ok!(cuMemsetD8Async(at, 1, 8, used))),
        waiting(here, |[.., used, marked]| ok!(cuEventRecord(marked, used))),
        waiting(here, |_| ok!(cuMemFree_v2(alloc(64)))),
        waiting(here, |_| ok!(cuStreamDestroy_v2(stream()))),
        waiting(0, |[_, event, ..]| ok!(cuEventQuery(event))),
        waiting(0, |[_, _, context, ..]| ok!(cuCtxPushCurrent_v2(context))),
        waiting(0, |[_, _, context, ..]| ok!(cuCtxSetCurrent(context))),
        waiting(0, |_| {
            retain(0);
            ok!(cuDevicePrimaryCtxRelease_v2(0));
        }),
    ];
    // Nothing holds up the other device's context.
    let free = aside(elsewhere, || {
        let stream = stream();
        ok!(cuStreamQuery(stream));
        ok!(cuStreamDestroy_v2(stream));
        ok!(cuMemFree_v2(alloc(64)));
    });
    free.recv_timeout(DEADLINE).unwrap();

    let (begun, waited) = (calls(c"cuMemsetD8Async"), calls(c"waiting for room"));
    let word = gate.at();
    let launches = aside(here, move || {
        ok!(cuStreamWaitValue32_v2(full, word, 1, 0));
        (0..40).for_each(|_| ok!(cuMemsetD8Async(at, 1, 8, full)));
    });
    // The wait and three fills find room; the fourth fill is called and does not return.
    while calls(c"waiting for room") == waited {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(calls(c"cuMemsetD8Async"), begun + 4);
    assert!(is_waiting(&launches));
    held_up.iter().for_each(|_| go.send(()).unwrap());
    for (index, one) in held_up.iter().enumerate() {
        assert!(is_waiting(one), "call {index} went through while the context was held");
    }
    let free = aside(elsewhere, || {
        let stream = stream();
        ok!(cuStreamDestroy_v2(stream));
    });
    free.recv_timeout(DEADLINE).unwrap();
    assert_eq!(calls(c"waiting for room"), waited + 1);

    gate.word().store(1, Ordering::Release);
    launches.recv_timeout(DEADLINE).unwrap();
    held_up.iter().for_each(|one| one.recv_timeout(DEADLINE).unwrap());
    assert_eq!([full, other, used].map(finish), [0; 3]);
    drop(depth);
    gate.free();
    ok!(cuMemFree_v2(at));
    [reached, marked].iter().for_each(|event| ok!(cuEventDestroy_v2(*event)));
    [full, other, used].iter().for_each(|stream| ok!(cuStreamDestroy_v2(*stream)));
}

/// While a call waits for room, the work of streams and the host functions on them go on, and make that room.
#[test]
fn what_is_on_streams_goes_on_while_a_call_waits_for_room() {
    let driver = Driver::new(1);
    let (full, other) = (stream(), stream());
    let (gate, at) = (Gate::new(), alloc(64));
    let depth = Depth::set(8);
    unsafe extern "C" fn open(word: *mut c_void) {
        // Gives the other thread time to wait for room first; the test holds even if it does not.
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: the gate's word.
        unsafe { AtomicU32::from_ptr(word.cast()) }.store(1, Ordering::Release);
    }
    ok!(cuStreamWaitValue32_v2(full, gate.at(), 1, 0));
    ok!(cuLaunchHostFunc(other, Some(open), gate.0));
    let launches =
        aside(driver.contexts[0], move || (0..100).for_each(|_| ok!(cuMemsetD8Async(at, 1, 8, full))));
    launches.recv_timeout(DEADLINE).unwrap();
    assert_eq!((finish(full), finish(other)), (0, 0));
    // Without a limit no call waits: the stream takes more than it had room for, and other calls go on.
    drop(depth);
    gate.word().store(0, Ordering::Release);
    ok!(cuStreamWaitValue32_v2(full, gate.at(), 1, 0));
    (0..100).for_each(|_| ok!(cuMemsetD8Async(at, 1, 8, full)));
    assert_eq!(code!(cuStreamQuery(full)), 600);
    gate.word().store(1, Ordering::Release);
    assert_eq!(finish(full), 0);
    gate.free();
    ok!(cuMemFree_v2(at));
    [full, other].iter().for_each(|stream| ok!(cuStreamDestroy_v2(*stream)));
}

/// A call that waits for room goes on when the limit is taken away, though the stream still waits.
#[test]
fn who_waits_for_room_goes_on_once_there_is_no_limit() {
    let driver = Driver::new(1);
    let (full, gate, at) = (stream(), Gate::new(), alloc(64));
    let depth = Depth::set(2);
    ok!(cuStreamWaitValue32_v2(full, gate.at(), 1, 0));
    let launches =
        aside(driver.contexts[0], move || (0..5).for_each(|_| ok!(cuMemsetD8Async(at, 1, 8, full))));
    assert!(is_waiting(&launches));
    drop(depth);
    launches.recv_timeout(DEADLINE).unwrap();
    gate.word().store(1, Ordering::Release);
    assert_eq!(finish(full), 0);
    gate.free();
    ok!(cuMemFree_v2(at));
    ok!(cuStreamDestroy_v2(full));
}

thread_local! {
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

extern "C" fn holds() -> bool {
    HOLDS.get()
}

#[test]
fn calls_of_a_thread_that_holds_a_lock_are_counted_by_name() {
    let driver = Driver::new(1);
    let counts = || {
        let of = |name: &std::ffi::CStr| code!(allstream_test_cuda_calls_under_locks_of(name.as_ptr()));
        (code!(allstream_test_cuda_calls_under_locks()), of(c"cuMemAlloc_v2"), of(c"cuMemFree_v2"))
    };
    let (all, allocated, freed) = counts();
    HOLDS.set(true);
    ok!(cuMemFree_v2(alloc(64)));
    assert_eq!(counts(), (all, allocated, freed), "nobody has been asked");
    ok!(allstream_test_cuda_ask_locks(Some(holds)));
    let at = alloc(64);
    let other = aside(driver.contexts[0], || ok!(cuMemFree_v2(alloc(64))));
    other.recv_timeout(DEADLINE).unwrap();
    HOLDS.set(false);
    ok!(cuMemFree_v2(at));
    assert_eq!(counts(), (all + 1, allocated + 1, freed), "one call on a thread that holds a lock");
    HOLDS.set(true);
    ok!(allstream_test_cuda_ask_locks(None));
    ok!(cuMemFree_v2(alloc(64)));
    assert_eq!(counts(), (all + 1, allocated + 1, freed), "nobody is asked any more");
}
