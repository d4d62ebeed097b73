//! DLPack tensors in device memory. `tests/engine/dlpack.rs` tests tensors in host memory.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use allstream::cuda::{Device, DeviceBuf, DeviceEvent, DeviceStream, PinnedBuf};
use allstream::dlpack::{self, DL_CPU, DL_CUDA, DLManagedTensorVersioned, Tensor};
use allstream::{Comm, Element, Failed, bf16};

use crate::support::{child, device, nothing_left, numbers, report, set_delays, soon, until};

const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "3000"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

fn up<T: Element>(stream: &DeviceStream, values: Vec<T>) -> DeviceBuf<T> {
    soon(DeviceBuf::from_host(stream, values)).unwrap().1
}

fn down<T: Element>(buf: DeviceBuf<T>) -> Vec<T> {
    let len = buf.len();
    soon(buf.to_host(vec![T::default(); len])).unwrap().1
}

/// Exports the buffer and imports it again, in the versioned and in the legacy form.
fn round_trips<T: Element>(buf: DeviceBuf<T>, shape: &[usize], stream: &DeviceStream) -> DeviceBuf<T> {
    let raw = dlpack::export(buf, shape).unwrap().into_versioned();
    // SAFETY: the tensor is our own, and nobody else has it.
    let tensor = unsafe { Tensor::from_versioned(raw.as_ptr()) }.unwrap();
    assert_eq!((tensor.dtype(), tensor.shape().len()), (Some(T::DTYPE), shape.len()));
    let buf = tensor.into_device::<T>(stream).unwrap();
    let raw = dlpack::export(buf, shape).unwrap().into_legacy();
    // SAFETY: as above.
    let tensor = unsafe { Tensor::from_legacy(raw.as_ptr()) }.unwrap();
    tensor.into_device(stream).unwrap()
}

#[test]
fn tensors_on_a_device_go_out_and_come_back() {
    child("dlpack::tensors_on_a_device_go_out_and_come_back", SLOW, || {
        let (device, stream) = device();
        let buf = up(&stream, numbers(600));
        let at = buf.as_ptr();
        let buf = round_trips(buf, &[20, 1, 30], &stream);
        assert_eq!(buf.as_ptr(), at, "nothing is copied");
        assert_eq!(down(buf), numbers(600));
        let half = up(&stream, vec![bf16::from_f32(1.5); 7]);
        assert_eq!(down(round_trips(half, &[7], &stream)), [bf16::from_f32(1.5); 7]);
        assert!(
            down(round_trips(DeviceBuf::<f64>::zeroed(&stream, 0).unwrap(), &[3, 0], &stream)).is_empty()
        );
        assert_eq!(down(round_trips(up(&stream, vec![2_i8]), &[], &stream)), [2]);
        // A part of a buffer is exported and imported, and goes into an operation.
        let [low, high] = up(&stream, numbers(100)).split_at(40).unwrap();
        let mut comm = Comm::local(1).unwrap().remove(0);
        let high = soon(comm.all_reduce(round_trips(high, &[60], &stream))).unwrap();
        assert_eq!((down(low), down(high)), (numbers(100)[..40].to_vec(), numbers(100)[40..].to_vec()));
        // Pinned memory is exported as host memory.
        let raw =
            dlpack::export(PinnedBuf::<f32>::zeroed(&device, 4).unwrap(), &[4]).unwrap().into_versioned();
        // SAFETY: the tensor is our own, and nobody else has it.
        let tensor = unsafe { Tensor::from_versioned(raw.as_ptr()) }.unwrap();
        assert_eq!(tensor.device().device_type, DL_CPU);
        assert_eq!(*tensor.into_host::<f32>().unwrap(), [0.0; 4]);
        drop((comm, stream, device));
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The consumer calls the deleter while its stream still has work on the tensor: the memory is used again only after that work.
#[test]
fn memory_given_away_is_freed_in_the_order_of_the_consumers_stream() {
    child("dlpack::memory_given_away_is_freed_in_the_order_of_the_consumers_stream", SLOW, || {
        let (device, _) = device();
        for seed in 0..20 {
            set_delays(3000, seed);
            let [ours, theirs, next] = [(); 3].map(|()| DeviceStream::new(&device).unwrap());
            // Our own stream fills the tensor late; the consumer's stream waits for that, and is late itself.
            for _ in 0..3 {
                drop(DeviceBuf::<u32>::zeroed(&theirs, 16).unwrap());
            }
            let made = DeviceBuf::<u32>::zeroed(&ours, 5000).unwrap().on(&theirs).unwrap();
            let raw = dlpack::export(made, &[5000]).unwrap().into_versioned();
            // SAFETY: the tensor is valid, and its only owner calls the deleter, once.
            unsafe { (raw.as_ref().deleter.unwrap())(raw.as_ptr()) };
            let (_, buf) = soon(DeviceBuf::from_host(&next, numbers(5000))).unwrap();
            theirs.synchronize().unwrap();
            assert!(down(buf) == numbers(5000), "seed {seed}");
        }
        drop(device);
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn what_is_taken_comes_after_the_work_on_the_stream_that_was_named() {
    child("dlpack::what_is_taken_comes_after_the_work_on_the_stream_that_was_named", SLOW, || {
        let (device, _) = device();
        for seed in 0..20 {
            set_delays(3000, seed);
            let [theirs, ours] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
            let dirty = up(&theirs, numbers(4000));
            drop(dirty);
            let late = DeviceBuf::<u32>::zeroed(&theirs, 4000).unwrap();
            // The producer makes the named stream wait for its own.
            let raw = dlpack::export(late.on(&ours).unwrap(), &[4000]).unwrap().into_versioned();
            // SAFETY: the tensor is our own, and ready in the order of `ours`.
            let buf =
                unsafe { Tensor::from_versioned(raw.as_ptr()) }.unwrap().into_device::<u32>(&ours).unwrap();
            assert!(down(buf) == [0; 4000], "seed {seed}");
        }
    });
}

/// Someone else's tensor: what it owns, and how it is deleted.
struct Theirs {
    buf: DeviceBuf<u32>,
    shape: [i64; 1],
    managed: DLManagedTensorVersioned,
}

static DELETED: AtomicUsize = AtomicUsize::new(0);
/// An event that must have been reached when the deleter is called.
static LAST: Mutex<Option<DeviceEvent>> = Mutex::new(None);

unsafe extern "C" fn delete(this: *mut DLManagedTensorVersioned) {
    if let Some(last) = LAST.lock().unwrap().take() {
        assert!(last.is_complete().unwrap(), "deleted while its stream works on it");
    }
    // SAFETY: `manager_ctx` is the box that `theirs` has made; the deleter is called once.
    drop(unsafe { Box::from_raw((*this).manager_ctx.cast::<Theirs>()) });
    DELETED.fetch_add(1, Ordering::SeqCst);
}

fn theirs(
    stream: &DeviceStream,
    change: impl FnOnce(&mut DLManagedTensorVersioned),
) -> *mut DLManagedTensorVersioned {
    let buf = up(stream, numbers(50));
    let mut exported = dlpack::export(vec![0_u32; 50], &[50]).unwrap().into_versioned();
    // SAFETY: `exported` is valid until its deleter is called below.
    let mut managed = unsafe { std::ptr::read(exported.as_ptr()) };
    managed.dl_tensor.device.device_type = DL_CUDA;
    managed.dl_tensor.data = std::ptr::without_provenance_mut::<c_void>(buf.as_ptr() as usize);
    managed.dl_tensor.strides = std::ptr::null_mut();
    // SAFETY: as above; nobody else owns `exported`, and no pointer of the copy into it is used from here on.
    unsafe { (exported.as_mut().deleter.unwrap())(exported.as_ptr()) };
    let theirs = Box::into_raw(Box::new(Theirs { buf, shape: [50], managed }));
    // SAFETY: the box was just made, and nobody else uses it yet.
    let theirs_mut = unsafe { &mut *theirs };
    theirs_mut.managed.dl_tensor.shape = theirs_mut.shape.as_mut_ptr();
    theirs_mut.managed.manager_ctx = theirs.cast();
    theirs_mut.managed.deleter = Some(delete);
    change(&mut theirs_mut.managed);
    assert_eq!(theirs_mut.buf.len(), 50);
    &raw mut theirs_mut.managed
}

#[test]
fn a_deleter_is_called_once_after_the_stream_is_done() {
    child("dlpack::a_deleter_is_called_once_after_the_stream_is_done", SLOW, || {
        let (device, stream) = device();
        let second = DeviceStream::new(&device).unwrap();
        for round in 1..=20 {
            // SAFETY: a valid tensor of a buffer that nobody else uses, ready on `stream`.
            let tensor = unsafe { Tensor::from_versioned(theirs(&stream, |_| ())) }.unwrap();
            let buf = tensor.into_device::<u32>(&stream).unwrap();
            let buf = buf.on(&second).unwrap();
            let source = DeviceBuf::<u32>::zeroed(&second, 50).unwrap();
            // Cut, and the parts dropped with work on them.
            let [low, high] = buf.split_at(20).unwrap();
            let [from, rest] = source.split_at(20).unwrap();
            drop(low.copy_from(from));
            drop(rest);
            drop(high);
            *LAST.lock().unwrap() = Some(second.record().unwrap());
            // The copy, too, holds a part until it is done.
            until("the deleter is called", || DELETED.load(Ordering::SeqCst) == round);
        }
        drop((stream, second, device));
        nothing_left("all was dropped");
        assert_eq!((DELETED.load(Ordering::SeqCst), report().freed_in_use), (20, 0));
    });
}

#[test]
fn a_tensor_that_is_not_what_it_says_is_refused() {
    child("dlpack::a_tensor_that_is_not_what_it_says_is_refused", SLOW, || {
        let (device, stream) = device();
        let other = DeviceStream::new(&Device::new(1).unwrap()).unwrap();
        let pinned = PinnedBuf::<u32>::zeroed(&device, 50).unwrap();
        let host = [0_u32; 50];
        let told = |stream: &DeviceStream, change: &dyn Fn(&mut DLManagedTensorVersioned)| {
            let before = DELETED.load(Ordering::SeqCst);
            // SAFETY: the tensor's metadata is valid; it is refused, so nobody follows its data address.
            let tensor = unsafe { Tensor::from_versioned(theirs(stream, change)) }.unwrap();
            let Failed { buf, error } = tensor.into_device::<u32>(stream).unwrap_err();
            // The tensor comes back, and is deleted when it is dropped, not before.
            let tensor = buf.unwrap();
            assert_eq!(DELETED.load(Ordering::SeqCst), before);
            drop(tensor);
            assert_eq!(DELETED.load(Ordering::SeqCst), before + 1);
            error.to_string()
        };
        let expect = |text: String, part: &str| {
            assert!(text.starts_with("dlpack import: ") && text.contains(part), "{text}");
        };
        let id =
            |id: i32| move |managed: &mut DLManagedTensorVersioned| managed.dl_tensor.device.device_id = id;
        expect(told(&stream, &id(1)), "the tensor is on CUDA device 1, the stream is of device 0");
        expect(told(&stream, &id(-1)), "the tensor is on CUDA device -1");
        expect(told(&other, &id(0)), "the tensor is on CUDA device 0, the stream is of device 1");
        let kind = |kind: i32| {
            move |managed: &mut DLManagedTensorVersioned| managed.dl_tensor.device.device_type = kind
        };
        expect(told(&stream, &kind(DL_CPU)), "the tensor is on the CPU, not on a CUDA device");
        expect(told(&stream, &kind(13)), "managed memory of CUDA");
        expect(told(&stream, &kind(10)), "device 0 of DLPack's type 10");
        let at = |address: u64| {
            move |managed: &mut DLManagedTensorVersioned| {
                managed.dl_tensor.data = std::ptr::without_provenance_mut(address as usize);
            }
        };
        expect(told(&stream, &at(host.as_ptr() as u64)), "does not know the address");
        expect(told(&stream, &at(pinned.as_ptr() as u64)), "memory of the host");
        expect(told(&stream, &at(0)), "50 elements and no memory");
        let there = DeviceBuf::<u32>::zeroed(&other, 50).unwrap();
        expect(told(&stream, &at(there.as_ptr())), "is on device 1, the stream is of device 0");
        expect(told(&stream, &|managed| managed.dl_tensor.byte_offset = 2), "is no address of a u32");
        expect(
            told(&stream, &|managed| managed.dl_tensor.dtype.code = 2),
            "holds f32, the buffer is to hold u32",
        );
        expect(told(&stream, &|managed| managed.flags = 1), "read-only");
        drop((stream, other, pinned, there, device));
        nothing_left("all was dropped");
    });
}
