//! The end of a process: its driver goes first, while threads of ours still run.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DeviceEvent, DeviceStream, PinnedBuf, settle};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::support::{
    DEADLINE, Report, calls, child, child_says, device, numbers, pass, report, soon, up, values,
};

const LEN: usize = 5000;
/// A copy that is held up is not done after this.
const SHORT: Duration = Duration::from_millis(50);

/// Begins a copy to the device that does not end before copies pass again, and which nobody awaits.
fn begin_a_copy(device: &Device, stream: &DeviceStream) {
    pass(true, 0);
    let pinned = PinnedBuf::from_slice(device, &numbers(LEN)).unwrap();
    drop(DeviceBuf::from_host(stream, pinned));
}

#[test]
fn settle_waits_until_everything_is_given_back() {
    child("ends::settle_waits_until_everything_is_given_back", &[], || {
        assert!(settle(Duration::ZERO), "nobody has begun anything");
        let (device, stream) = device();
        begin_a_copy(&device, &stream);
        drop((device, stream));
        assert!(!settle(SHORT), "a copy is under way");
        pass(true, u64::MAX);
        assert!(settle(DEADLINE));
        assert_eq!(report(), Report::default(), "all of it, when settle returns");
    });
}

/// Memory that is kept for a second, to be used again, does not make `settle` wait for that second.
#[test]
fn settle_puts_nothing_off() {
    child("ends::settle_puts_nothing_off", &[], || {
        let (device, stream) = device();
        let mut comm = allstream::Comm::local(1).unwrap().remove(0);
        // The operation is staged through more pinned memory than is kept for good.
        let large = DeviceBuf::<u8>::zeroed(&stream, 80 << 20).unwrap();
        drop(soon(comm.all_reduce(large)).unwrap());
        soon(comm.close()).unwrap();
        let start = Instant::now();
        assert!(settle(DEADLINE));
        assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
        drop((device, stream));
    });
}

/// How many warnings and errors were logged.
static SAID: AtomicU64 = AtomicU64::new(0);

/// A log that counts.
struct Counting;

impl Subscriber for Counting {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        eprintln!("logged: {event:?}");
        SAID.fetch_add(1, Ordering::SeqCst);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

type Left = (Device, DeviceStream, DeviceBuf<f32>, PinnedBuf<f32>, DeviceEvent);

/// What the program still holds when it ends.
static LEFT: Mutex<Option<Left>> = Mutex::new(None);

fn at_exit(function: extern "C" fn()) {
    // SAFETY: the function takes no arguments; as an `extern "C"` function it aborts instead of unwinding.
    assert_eq!(unsafe { libc::atexit(function) }, 0);
}

/// Called when the driver has gone: waits for events end, everything can be dropped, and nothing is logged.
extern "C" fn after_the_driver() {
    assert!(settle(DEADLINE), "the thread that watches goes on asking");
    let Some((device, stream, buf, pinned, event)) = LEFT.lock().unwrap().take() else {
        std::process::abort()
    };
    let error = event.is_complete().unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_DEINITIALIZED"), "{error}");
    assert!(event.wait().is_err());
    drop((event, buf, pinned, stream, device));
    assert!(settle(DEADLINE));
    let asked = calls("after exit");
    assert!((1..500).contains(&asked), "{asked} calls: nobody asks again and again");
    assert_eq!(SAID.load(Ordering::SeqCst), 0, "warnings and errors");
    eprintln!("in peace");
}

#[test]
fn a_driver_that_has_gone_is_an_end_in_peace() {
    let test = "ends::a_driver_that_has_gone_is_an_end_in_peace";
    let output = child_says(test, &[], || {
        // Registered before the driver is loaded, so that it is called after the driver's own function: the last one registered runs first.
        at_exit(after_the_driver);
        tracing::subscriber::set_global_default(Counting).unwrap();
        let (device, stream) = device();
        let (buf, pinned) = (up(&stream, values(0, LEN)), PinnedBuf::zeroed(&device, LEN).unwrap());
        begin_a_copy(&device, &stream);
        let event = stream.record().unwrap();
        *LEFT.lock().unwrap() = Some((device, stream, buf, pinned, event));
        std::process::exit(0);
    });
    let Some(output) = output else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("in peace"), "{}: {said}", output.status);
}

/// Keeps the process alive until somebody calls the driver, which then aborts the process.
extern "C" fn linger() {
    let end = Instant::now() + DEADLINE;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    eprintln!("nobody called the driver");
}

/// `ALLSTREAM_TEST_CUDA_EXIT` works: a process that ends while a copy is watched calls the driver too late, and is aborted.
#[test]
fn a_process_that_does_not_settle_is_found_out() {
    let test = "ends::a_process_that_does_not_settle_is_found_out";
    let output = child_says(test, &[("ALLSTREAM_TEST_CUDA_EXIT", "abort")], || {
        at_exit(linger);
        let (device, stream) = device();
        begin_a_copy(&device, &stream);
        std::process::exit(0);
    });
    let Some(output) = output else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("is called after the process has begun to end"), "{said}");
}
