//! Where there is no driver, or one that does not work.

use allstream::cuda::{Device, device_count, driver};
use allstream::{Backend, Error};

use crate::support::{LIBRARY, child};

#[test]
fn no_driver_is_an_error_that_names_the_files_and_what_to_install() {
    let test = "missing::no_driver_is_an_error_that_names_the_files_and_what_to_install";
    // `LD_LIBRARY_PATH` is emptied, as Cargo sets it to where the driver for tests lies.
    child(test, &[(LIBRARY, "/nowhere/libcuda-none.so"), ("LD_LIBRARY_PATH", "")], || {
        let told = [driver().map(drop), device_count().map(drop), Device::new(0).map(drop)];
        for told in told {
            // A machine with a real driver has it under one of the usual names.
            let Err(error) = told else { continue };
            assert!(matches!(error, Error::Unavailable { .. }));
            let text = error.to_string();
            for part in ["/nowhere/libcuda-none.so", "libcuda.so.1", "install the NVIDIA driver", LIBRARY] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let is_there = |s: &allstream::BackendStatus| s.backend == Backend::Cuda && s.available.is_ok();
        assert_eq!(allstream::backends().iter().any(is_there), driver().is_ok());
        let mut comm = allstream::Comm::local(1).unwrap().remove(0);
        assert_eq!(comm.all_reduce(vec![1.0_f32]).wait().unwrap(), [1.0]);
    });
}

#[test]
fn another_library_is_told_from_a_driver() {
    let test = "missing::another_library_is_told_from_a_driver";
    child(test, &[(LIBRARY, "libc.so.6")], || {
        let text = driver().unwrap_err().to_string();
        assert!(text.contains("libc.so.6 has no function cuInit"), "{text}");
    });
}

#[test]
fn a_stub_is_told_from_a_driver() {
    child("missing::a_stub_is_told_from_a_driver", &[("ALLSTREAM_TEST_CUDA_FAIL", "cuInit:1:34")], || {
        let text = Device::new(0).unwrap_err().to_string();
        assert!(
            text.contains("libcuda.so is there, but cuInit answered CUDA_ERROR_STUB_LIBRARY (34)"),
            "{text}"
        );
        assert!(text.contains("nvidia-smi"), "{text}");
    });
}

#[test]
fn a_device_that_is_not_there_is_told() {
    child("missing::a_device_that_is_not_there_is_told", &[], || {
        assert_eq!(device_count().unwrap(), 2);
        assert!(driver().unwrap().version >= (12, 0));
        let text = Device::new(7).unwrap_err().to_string();
        assert_eq!(text, "Device::new: there is no device 7, this process sees 2 (CUDA_VISIBLE_DEVICES)");
        let [a, again, b] = [0, 0, 1].map(|ordinal| Device::new(ordinal).unwrap());
        assert!(a == again && a != b && a.uuid() != b.uuid());
        assert!(!a.name().is_empty() && a.memory().unwrap().1 > 0);
    });
}
