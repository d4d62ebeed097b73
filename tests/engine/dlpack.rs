//! DLPack tensors in the host's memory: exported, imported, what they own, and imports with arbitrary field values.
//! `tests/cuda/dlpack.rs` has the tests of tensors on devices.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use allstream::dlpack::{
    self, DL_CPU, DL_CUDA, DL_CUDA_HOST, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned,
    DLPackVersion, DLTensor, FLAG_READ_ONLY, HostTensor, Tensor, VERSION,
};
use allstream::{Comm, DType, Element, Failed, HostBuf, HostMemory, bf16, f8e4m3, f8e5m2, f16};
use proptest::prelude::*;

use crate::counted::Counted;

fn goes_round<T: Element>(values: Vec<T>) {
    let (shape, at) = ([2, values.len() / 2], values.as_ptr());
    let raw = dlpack::export(values.clone(), &shape).unwrap().into_versioned();
    // SAFETY: the tensor was exported just now, is valid, and nobody else has its pointer.
    let taken = unsafe { Tensor::from_versioned(raw.as_ptr()) }.unwrap();
    assert_eq!(taken.dtype(), Some(T::DTYPE));
    assert_eq!(*taken.into_host::<T>().unwrap(), *values);
    let raw = dlpack::export(values.clone(), &shape).unwrap().into_legacy();
    // SAFETY: as above.
    let taken = unsafe { Tensor::from_legacy(raw.as_ptr()) }.unwrap();
    let host = taken.into_host::<T>().unwrap();
    assert_eq!((&*host, host.shape()), (&*values, &[2, shape[1] as i64][..]));
    // Exporting copies nothing, and takes buffers of other owners than `Vec`.
    let back = dlpack::export(values, &shape).unwrap().into_inner();
    assert_eq!(back.as_ptr(), at);
    let raw = dlpack::export(HostBuf::from(&*back), &[back.len()]).unwrap().into_versioned();
    // SAFETY: as above.
    assert_eq!(*unsafe { Tensor::from_versioned(raw.as_ptr()) }.unwrap().into_host::<T>().unwrap(), *back);
}

#[test]
fn every_type_goes_out_and_comes_back() {
    goes_round(vec![true, false, true, true]);
    goes_round(vec![1_i8, -2, 3, -4]);
    goes_round(vec![1_i16, -2, 3, -4]);
    goes_round(vec![1_i32, -2, 3, -4]);
    goes_round(vec![1_i64, -2, 3, i64::MIN]);
    goes_round(vec![1_u8, 2, 3, 255]);
    goes_round(vec![1_u16, 2, 3, 4]);
    goes_round(vec![1_u32, 2, 3, 4]);
    goes_round(vec![1_u64, 2, 3, u64::MAX]);
    goes_round([1.0, -2.0, 3.0, 4.0].map(f16::from_f32).to_vec());
    goes_round([1.0, -2.0, 3.0, 4.0].map(bf16::from_f32).to_vec());
    goes_round([1.0, -2.0, 3.0, 4.0].map(f8e4m3::from_f32).to_vec());
    goes_round([1.0, -2.0, 3.0, 4.0].map(f8e5m2::from_f32).to_vec());
    goes_round(vec![1.0_f32, -2.0, 3.0, 4.0]);
    goes_round(vec![1.0_f64, -2.0, 3.0, 4.0]);
}

#[test]
fn an_exported_tensor_is_what_the_header_says_and_is_deleted_once() {
    let drops = Arc::new(AtomicUsize::new(0));
    let values: Vec<f32> = (0..24_u8).map(f32::from).collect();
    let at = values.as_ptr();
    let raw = dlpack::export(Counted(values, drops.clone()), &[2, 3, 4]).unwrap().into_versioned();
    // SAFETY: the tensor is valid until its deleter is called, last and once; it has 3 dimensions and 24 elements, and no more is read.
    unsafe {
        let DLManagedTensorVersioned { version, flags, dl_tensor, deleter, .. } = raw.as_ref();
        assert_eq!((*version, *flags, VERSION), (DLPackVersion { major: 1, minor: 1 }, 0, *version));
        assert_eq!(dl_tensor.device, DLDevice { device_type: DL_CPU, device_id: 0 });
        assert_eq!(dl_tensor.dtype, DLDataType { code: 2, bits: 32, lanes: 1 });
        assert_eq!((dl_tensor.data.cast_const().cast(), dl_tensor.byte_offset, dl_tensor.ndim), (at, 0, 3));
        assert_eq!(std::slice::from_raw_parts(dl_tensor.shape, 3), [2, 3, 4]);
        assert_eq!(std::slice::from_raw_parts(dl_tensor.strides, 3), [12, 4, 1]);
        assert_eq!(*dl_tensor.data.cast::<f32>().add(23), 23.0);
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        (deleter.unwrap())(raw.as_ptr());
    }
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    // An export that is dropped unused frees its buffer; a tensor converted to and fro stays one buffer, freed once.
    drop(dlpack::export(Counted(vec![0.0; 4], drops.clone()), &[4]).unwrap());
    assert_eq!(drops.load(Ordering::SeqCst), 2);
    let raw = dlpack::export(Counted(vec![1.0; 4], drops.clone()), &[2, 2]).unwrap().into_legacy();
    // SAFETY: a valid tensor, exported just now, which nobody else has.
    let host = unsafe { Tensor::from_legacy(raw.as_ptr()) }.unwrap().into_host::<f32>().unwrap();
    let host: HostTensor<f32> = host.into_tensor().into_host().unwrap();
    // Another library's memory in a collective.
    let mut comm = Comm::local(1).unwrap().remove(0);
    let mut host = comm.all_reduce(host).wait().unwrap();
    host[3] = 5.0;
    assert_eq!((&*host, drops.load(Ordering::SeqCst)), (&[1.0, 1.0, 1.0, 5.0][..], 2));
    drop(host);
    assert_eq!(drops.load(Ordering::SeqCst), 3);
}

#[test]
fn shapes_that_are_not_the_buffers_are_refused() {
    let told = |shape: &[usize]| {
        let Failed { buf, error } = dlpack::export(vec![0_u8; 6], shape).unwrap_err();
        assert_eq!(buf.unwrap().len(), 6);
        error.to_string()
    };
    assert_eq!(told(&[2, 4]), "dlpack::export: the shape [2, 4] is of 8 elements, the buffer has 6");
    assert!(told(&[]).contains("is of 1 elements, the buffer has 6"));
    assert!(told(&[6, 0]).contains("is of 0 elements"));
    assert!(told(&[usize::MAX, 2, 0]).contains("more elements than any memory"));
    assert!(told(&[1; 65]).contains("65 dimensions"));
    for shape in [&[6][..], &[1, 6, 1], &[1; 63], &[2, 3]] {
        let len = shape.iter().product();
        assert!(dlpack::export(vec![0_u8; len], shape).is_ok());
    }
    // A tensor of no elements has a null pointer.
    let raw = dlpack::export(Vec::<f64>::new(), &[5, 0]).unwrap().into_versioned();
    // SAFETY: a valid tensor, exported just now, which nobody else has.
    unsafe {
        assert!(raw.as_ref().dl_tensor.data.is_null());
        let tensor = Tensor::from_versioned(raw.as_ptr()).unwrap();
        assert!(tensor.into_host::<f64>().unwrap().is_empty());
    }
}

/// Another library's tensor, with any field values: it owns its shape and strides, and counts calls of its deleter.
#[repr(C)]
struct Theirs<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    deleted: Arc<AtomicUsize>,
}

unsafe extern "C" fn delete_versioned(this: *mut DLManagedTensorVersioned) {
    // SAFETY: the tensor is the first part of what `Numbers::versioned` leaked; called once.
    let theirs = unsafe { Box::from_raw(this.cast::<Theirs<DLManagedTensorVersioned>>()) };
    theirs.deleted.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn delete_legacy(this: *mut DLManagedTensor) {
    // SAFETY: the tensor is the first part of what `Numbers::legacy` leaked; called once.
    let theirs = unsafe { Box::from_raw(this.cast::<Theirs<DLManagedTensor>>()) };
    theirs.deleted.fetch_add(1, Ordering::SeqCst);
}

/// The field values of a tensor.
#[derive(Clone, Debug)]
struct Numbers {
    version: u32,
    flags: u64,
    data: usize,
    device: DLDevice,
    /// `None`: as many as `shape` has lengths.
    ndim: Option<i32>,
    dtype: DLDataType,
    shape: Option<Vec<i64>>,
    strides: Option<Vec<i64>>,
    byte_offset: u64,
}

impl Numbers {
    /// The correct field values for a tensor of `values`.
    fn of(values: &[f32]) -> Numbers {
        Numbers {
            version: 1,
            flags: 0,
            data: values.as_ptr().expose_provenance(),
            device: DLDevice { device_type: DL_CPU, device_id: 0 },
            ndim: None,
            dtype: DLDataType::of(DType::F32),
            shape: Some(vec![values.len() as i64]),
            strides: None,
            byte_offset: 0,
        }
    }

    /// Points into both vectors: the caller must not change them while the tensor is in use.
    fn tensor(&self, shape: &mut [i64], strides: Option<&mut Vec<i64>>) -> DLTensor {
        DLTensor {
            data: std::ptr::with_exposed_provenance_mut::<c_void>(self.data),
            device: self.device,
            ndim: self.ndim.unwrap_or(shape.len() as i32),
            dtype: self.dtype,
            shape: if self.shape.is_some() { shape.as_mut_ptr() } else { std::ptr::null_mut() },
            strides: strides.map_or(std::ptr::null_mut(), |strides| strides.as_mut_ptr()),
            byte_offset: self.byte_offset,
        }
    }

    fn versioned(&self, deleted: &Arc<AtomicUsize>) -> *mut DLManagedTensorVersioned {
        let (mut shape, mut strides) = (self.shape.clone().unwrap_or_default(), self.strides.clone());
        let managed = DLManagedTensorVersioned {
            version: DLPackVersion { major: self.version, minor: 7 },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: self.flags,
            dl_tensor: self.tensor(&mut shape, strides.as_mut()),
        };
        Box::into_raw(Box::new(Theirs { managed, shape, strides, deleted: deleted.clone() })).cast()
    }

    fn legacy(&self, deleted: &Arc<AtomicUsize>) -> *mut DLManagedTensor {
        let (mut shape, mut strides) = (self.shape.clone().unwrap_or_default(), self.strides.clone());
        let managed = DLManagedTensor {
            dl_tensor: self.tensor(&mut shape, strides.as_mut()),
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(delete_legacy),
        };
        Box::into_raw(Box::new(Theirs { managed, shape, strides, deleted: deleted.clone() })).cast()
    }

    /// Imports the tensor in both forms; the values, or the error's text. Checks that both give the same, and are deleted once.
    fn told(&self) -> Result<Vec<f32>, String> {
        let deleted = Arc::new(AtomicUsize::new(0));
        let take = |tensor: Result<Tensor, allstream::Error>| -> Result<Vec<f32>, String> {
            let tensor = tensor.map_err(|error| error.to_string())?;
            assert!(format!("{tensor:?}").starts_with("Tensor("));
            let host = tensor.into_host::<f32>().map_err(|failed| {
                assert!(failed.buf.is_some() && deleted.load(Ordering::SeqCst) == 0);
                failed.error.to_string()
            })?;
            Ok(host.to_vec())
        };
        // SAFETY: shape and strides have `ndim` numbers each, or are refused unread; data is read only where a test points to its own memory.
        let first = take(unsafe { Tensor::from_versioned(self.versioned(&deleted)) });
        assert_eq!(deleted.load(Ordering::SeqCst), 1);
        if self.version == 1 && self.flags & FLAG_READ_ONLY == 0 {
            deleted.store(0, Ordering::SeqCst);
            // SAFETY: as above.
            let second = take(unsafe { Tensor::from_legacy(self.legacy(&deleted)) });
            assert_eq!((&second, deleted.load(Ordering::SeqCst)), (&first, 1));
        }
        first
    }
}

#[test]
fn what_others_give_is_taken_or_refused_with_a_reason() {
    let mut values = vec![1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let _ = values.as_mut_ptr().expose_provenance();
    let right = Numbers::of(&values);
    assert_eq!(right.told().unwrap(), values);
    let takes = |change: &dyn Fn(&mut Numbers)| {
        let mut numbers = right.clone();
        change(&mut numbers);
        numbers.told()
    };
    let shaped = |shape: &[i64], strides: &[i64]| {
        takes(&|n| (n.shape, n.strides) = (Some(shape.to_vec()), Some(strides.to_vec())))
    };
    // Taken: row-major, whatever the strides of dimensions of length 1; pinned memory; a byte offset; a scalar; no elements.
    for (shape, strides) in [(&[2, 3][..], &[3, 1][..]), (&[6], &[1]), (&[1, 2, 1, 3], &[-7, 3, 99, 1])] {
        assert_eq!(shaped(shape, strides).unwrap(), values);
    }
    assert_eq!(takes(&|n| n.device.device_type = DL_CUDA_HOST).unwrap(), values);
    assert_eq!(takes(&|n| (n.byte_offset, n.shape) = (8, Some(vec![4]))).unwrap(), values[2..]);
    assert_eq!(takes(&|n| n.shape = Some(vec![])).unwrap(), [1.0]);
    assert_eq!(takes(&|n| (n.ndim, n.shape) = (Some(0), None)).unwrap(), [1.0]);
    assert_eq!(takes(&|n| (n.data, n.shape) = (0, Some(vec![3, 0]))).unwrap(), [0.0; 0]);
    assert_eq!(shaped(&[0, 2], &[9, 9]).unwrap(), [0.0; 0]);

    let refuses = |told: Result<Vec<f32>, String>, part: &str| {
        let text = told.unwrap_err();
        assert!(text.starts_with("dlpack import: ") && text.contains(part), "{text}");
    };
    refuses(takes(&|n| n.version = 2), "DLPack 2.7, and only version 1 is known");
    refuses(takes(&|n| n.version = 0), "DLPack 0.7");
    refuses(takes(&|n| n.flags = FLAG_READ_ONLY), "read-only");
    refuses(takes(&|n| n.device.device_type = DL_CUDA), "on CUDA device 0, not in the host's memory");
    refuses(takes(&|n| n.device = DLDevice { device_type: 8, device_id: 3 }), "device 3 of DLPack's type 8");
    refuses(
        takes(&|n| n.dtype = DLDataType::of(DType::BF16)),
        "the tensor holds bf16, the buffer is to hold f32",
    );
    refuses(takes(&|n| n.dtype.lanes = 4), "type code 2, 32 bits, 4 lanes");
    refuses(takes(&|n| n.dtype.code = 5), "type code 5");
    refuses(takes(&|n| n.ndim = Some(-1)), "-1 dimensions: expected 0 to 64");
    refuses(takes(&|n| n.ndim = Some(65)), "65 dimensions");
    refuses(takes(&|n| (n.ndim, n.shape) = (Some(1), None)), "no shape");
    refuses(takes(&|n| n.shape = Some(vec![-2, -3])), "negative length");
    refuses(takes(&|n| n.shape = Some(vec![0, -3])), "negative length");
    refuses(takes(&|n| n.shape = Some(vec![i64::MAX; 9])), "more elements than any memory");
    refuses(takes(&|n| n.shape = Some(vec![1 << 61])), "more elements than any memory");
    refuses(shaped(&[2, 3], &[1, 2]), "make it contiguous");
    refuses(shaped(&[2, 2], &[3, 1]), "strides [3, 1] for the shape [2, 2]");
    refuses(shaped(&[6], &[-1]), "make it contiguous");
    refuses(shaped(&[6], &[0]), "make it contiguous");
    refuses(takes(&|n| n.data = 0), "6 elements and no memory");
    refuses(takes(&|n| n.byte_offset = 2), "is no address of a f32");
    refuses(takes(&|n| n.byte_offset = u64::MAX - 3), "end beyond the last address");
    // SAFETY: null is refused.
    unsafe {
        assert!(
            Tensor::from_versioned(std::ptr::null_mut()).unwrap_err().to_string().contains("null pointer")
        );
        assert!(Tensor::from_legacy(std::ptr::null_mut()).is_err());
    }
}

/// A deleter may be missing.
#[test]
fn a_tensor_without_a_deleter_is_taken() {
    let values = [1.0_f32; 3];
    let deleted = Arc::new(AtomicUsize::new(0));
    let raw = Numbers::of(&values).versioned(&deleted);
    // SAFETY: a valid tensor, whose memory nobody writes to; freed below by hand.
    unsafe {
        (*raw).deleter = None;
        drop(Tensor::from_versioned(raw).unwrap());
        assert_eq!(deleted.load(Ordering::SeqCst), 0);
        delete_versioned(raw);
    }
}

/// Numbers that are often almost right.
fn numbers() -> impl Strategy<Value = Numbers> {
    let edge = prop_oneof![
        4 => 0..5_i64,
        1 => any::<i64>(),
        1 => prop::sample::select(vec![-1, i64::MIN, i64::MAX, 1 << 32, 1 << 61]),
    ];
    let device = (prop_oneof![3 => Just(DL_CPU), 1 => Just(DL_CUDA_HOST), 1 => any::<i32>()], any::<i32>())
        .prop_map(|(device_type, device_id)| DLDevice { device_type, device_id });
    let dtype = prop_oneof![
        3 => Just(DLDataType::of(DType::F32)),
        1 => (any::<u8>(), any::<u8>(), any::<u16>()).prop_map(|(code, bits, lanes)| DLDataType { code, bits, lanes }),
    ];
    let dims = (0..6_usize).prop_flat_map(move |ndim| {
        let shape = prop::collection::vec(edge.clone(), ndim);
        let strides = prop::option::weighted(0.3, prop::collection::vec(edge.clone(), ndim));
        (prop::option::weighted(0.9, shape), strides, Just(ndim))
    });
    let data = prop_oneof![1 => Just(0), 3 => (1..1_usize << 40).prop_map(|at| 4 * at), 1 => any::<usize>()];
    let offset = prop_oneof![3 => Just(0), 1 => 0..64_u64, 1 => any::<u64>()];
    let version = prop_oneof![5 => Just(1), 1 => any::<u32>()];
    let flags = prop_oneof![3 => Just(0), 1 => any::<u64>()];
    let wrong = prop_oneof![5 => Just(None), 1 => prop_oneof![i32::MIN..0, 65..i32::MAX].prop_map(Some)];
    (device, dtype, dims, data, offset, version, flags, wrong).prop_map(
        |(device, dtype, (shape, strides, ndim), data, byte_offset, version, flags, wrong)| {
            // A tensor without a shape may still claim to have dimensions.
            let ndim = wrong.or(shape.is_none().then_some(ndim as i32));
            Numbers { version, flags, data, device, ndim, dtype, shape, strides, byte_offset }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// Nothing panics, each tensor is deleted once, and those are taken that the oracle takes. The data is not read.
    #[test]
    fn any_numbers_are_taken_or_refused(numbers in numbers()) {
        let deleted = Arc::new(AtomicUsize::new(0));
        // SAFETY: shape and strides have `ndim` numbers each, or are refused unread, and the data is never read.
        let tensor = unsafe { Tensor::from_versioned(numbers.versioned(&deleted)) };
        let taken = tensor.map_err(|_| ()).and_then(|tensor| {
            assert_eq!(deleted.load(Ordering::SeqCst), 0);
            let _ = (format!("{tensor:?}"), tensor.device(), tensor.dtype());
            tensor.into_host::<f32>().map_err(|_| ())
        });
        let taken = taken.map(|host| (host.ptr() as usize, host.count()));
        assert_eq!(deleted.load(Ordering::SeqCst), 1);
        assert_eq!(taken.ok().map(|(at, len)| if len == 0 { (0, 0) } else { (at, len) }), oracle(&numbers));
    }
}

/// The address and number of elements that an import must give (`None`: it is refused), in `i128`, which cannot overflow here.
fn oracle(n: &Numbers) -> Option<(usize, usize)> {
    let dims = n.shape.as_ref().map_or(n.ndim.unwrap_or(0) == 0, |_| n.ndim.is_none());
    let kind = matches!(n.device.device_type, DL_CPU | DL_CUDA_HOST) && n.dtype == DLDataType::of(DType::F32);
    if n.version != 1 || n.flags & FLAG_READ_ONLY != 0 || !kind || !dims {
        return None;
    }
    let shape = n.shape.clone().unwrap_or_default();
    if shape.iter().any(|n| *n < 0) {
        return None;
    }
    if shape.contains(&0) {
        return Some((0, 0));
    }
    let mut len = 1_i128;
    for (at, n_at) in shape.iter().enumerate().rev() {
        let stride = n.strides.as_ref().map(|strides| i128::from(strides[at]));
        if *n_at != 1 && stride.is_some_and(|stride| stride != len) {
            return None;
        }
        len = len.checked_mul(i128::from(*n_at)).filter(|len| 4 * len <= isize::MAX as i128)?;
    }
    let start = n.data as i128 + i128::from(n.byte_offset);
    let fits = n.data != 0 && start % 4 == 0 && start + 4 * len <= i128::from(u64::MAX);
    fits.then_some((start as usize, len as usize))
}
