//! What the driver refuses, or does, only where a variable asks for it. Variables are read once, so such a test runs itself again
//! in a process of its own.
#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

mod support;

use std::ffi::{c_int, c_void};

use allstream_cuda_kernels::{self as cuda, Module};
use allstream_kernels::{DType, ReduceOp};
use support::*;

fn load(image: *const u8) -> Result<u64, u32> {
    let mut module = 0;
    match code!(cuModuleLoadData(&mut module, image.cast())) {
        0 => Ok(module),
        code => Err(code),
    }
}

#[test]
fn machine_code_of_our_devices_is_the_ptx_that_it_was_made_from() {
    let driver = Driver::new(1);
    let loads = || code!(allstream_test_cuda_calls(c"cuModuleLoadData, machine code".as_ptr()));
    let before = loads();
    for module in Module::ALL {
        let loaded = load(module.machine_code(9).unwrap().as_ptr()).unwrap();
        ok!(cuModuleUnload(loaded));
    }
    assert_eq!(loads() - before, Module::ALL.len() as u64);
    for major in [8, 10] {
        assert_eq!(load(Module::I32.machine_code(major).unwrap().as_ptr()), Err(209), "of another device");
    }
    // One bit is changed: the driver does not know this code.
    let mut changed = Module::I32.machine_code(9).unwrap().to_vec();
    let middle = changed.len() / 2;
    changed[middle] ^= 1;
    assert_eq!(load(changed.as_ptr()), Err(209));
    // Its header claims a length that no address can reach.
    changed[0x28..0x30].fill(0xff);
    assert_eq!(load(changed.as_ptr()), Err(209));

    let kernel = cuda::kernel(DType::I32, cuda::Kind::Fold(ReduceOp::Sum)).unwrap();
    let module = load(kernel.module.machine_code(9).unwrap().as_ptr()).unwrap();
    let name = std::ffi::CString::new(kernel.name()).unwrap();
    let (mut function, mut attribute) = (0, 0);
    ok!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    for (number, expected) in [(5, 70), (6, 90)] {
        ok!(cuFuncGetAttribute(&mut attribute, number, function));
        assert_eq!(attribute, expected, "made by ptxas from PTX for compute_70");
    }
    assert_eq!(driver.report().modules, 1);
    ok!(cuModuleUnload(module));
}

#[test]
fn machine_code_can_be_refused() {
    passes_with("machine_code_can_be_refused", &[("MACHINE_CODE", "0")], || {
        let _driver = Driver::new(1);
        assert_eq!(load(Module::I32.machine_code(9).unwrap().as_ptr()), Err(209));
        let text = std::ffi::CString::new(Module::I32.ptx()).unwrap();
        let module = load(text.as_ptr().cast()).unwrap();
        let loads = code!(allstream_test_cuda_calls(c"cuModuleLoadData, PTX".as_ptr()));
        assert_eq!(loads, 1);
        ok!(cuModuleUnload(module));
    });
}

/// A device that shares no addresses with the host.
#[test]
fn host_memory_can_have_no_address_for_devices() {
    passes_with("host_memory_can_have_no_address_for_devices", &[("DEVICEMAP", "1")], || {
        let _driver = Driver::new(1);
        let (stream, on_device) = (stream(), alloc(64));
        let mut words = vec![0_u64; 1024];
        for (flags, is_mapped) in [(0, false), (1, false), (2, true), (3, true)] {
            let (mut pinned, mut address) = (std::ptr::null_mut::<c_void>(), 0);
            ok!(cuMemHostAlloc(&mut pinned, 64, flags));
            ok!(cuMemHostRegister_v2(words.as_mut_ptr().cast(), 8192, flags));
            for place in [pinned, words.as_mut_ptr().cast()] {
                let at = place as u64;
                let refused = |code: u32| assert_eq!(code, if is_mapped { 0 } else { 1 }, "flags {flags}");
                refused(code!(cuMemHostGetDevicePointer_v2(&mut address, place, 0)));
                refused(code!(cuStreamWriteValue32_v2(stream, at, 1, 0)));
                refused(code!(cuStreamWaitValue32_v2(stream, at, 1, 0)));
                refused(code!(cuMemsetD8Async(at + 8, 1, 8, stream)));
                // Copies find it by the host's address.
                ok!(cuMemcpyHtoDAsync_v2(on_device, place, 64, stream));
                ok!(cuMemcpyDtoHAsync_v2(place, on_device, 64, stream));
                ok!(cuMemcpyAsync(on_device, at, 64, stream));
                assert_eq!(finish(stream), 0);
            }
            ok!(cuMemHostUnregister(words.as_mut_ptr().cast()));
            ok!(cuMemFreeHost(pinned));
        }
        ok!(cuMemFree_v2(on_device));
        ok!(cuStreamDestroy_v2(stream));
    });
}

/// Whether a kernel reaches memory is checked when it runs: the kernel fails, and its context with it.
#[test]
fn kernels_do_not_reach_host_memory_without_an_address() {
    passes_with("kernels_do_not_reach_host_memory_without_an_address", &[("DEVICEMAP", "1")], || {
        let driver = Driver::new(1);
        let stream = stream();
        let mut pinned = std::ptr::null_mut::<c_void>();
        ok!(cuMemHostAlloc(&mut pinned, 64, 1));
        launch_a_copy(stream, pinned as u64, pinned as u64 + 32, 32);
        assert_eq!(finish(stream), 700);
        ok!(cuDevicePrimaryCtxReset_v2(0));
        assert_eq!(driver.report(), Report::default());
        ok!(cuCtxSetCurrent(retain(0)));
    });
}

/// Puts a shipped kernel that copies bytes on a stream.
fn launch_a_copy(stream: u64, from: u64, to: u64, bytes: u64) {
    let launch = cuda::copy(DType::U8, from, &[to], bytes, 1).unwrap();
    let text = std::ffi::CString::new(launch.kernel.module.ptx()).unwrap();
    let module = load(text.as_ptr().cast()).unwrap();
    let (mut function, name) = (0, std::ffi::CString::new(launch.kernel.name()).unwrap());
    ok!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    let places = [launch.arguments.address().cast::<c_void>()];
    let (blocks, threads) = (launch.blocks, launch.threads);
    let extra = std::ptr::null();
    ok!(cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, places.as_ptr(), extra));
}

#[test]
fn calls_can_need_a_context() {
    passes_with("calls_can_need_a_context", &[("CONTEXT", "1")], || {
        let driver = Driver::new(1);
        let (stream, event, mut number) = (stream(), event(), 0);
        ok!(cuEventRecord(event, stream));
        ok!(cuCtxSetCurrent(0));
        assert_eq!(code!(cuEventQuery(event)), 201);
        assert_eq!(code!(cuEventDestroy_v2(event)), 201);
        assert_eq!(code!(cuStreamDestroy_v2(stream)), 201);
        assert_eq!(code!(cuStreamWaitEvent(stream, event, 0)), 201);
        // Whoever looks for a device has no context yet.
        ok!(cuDeviceGetCount(&mut number));
        ok!(cuDriverGetVersion(&mut number));
        let mut mode = 2;
        ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
        ok!(cuCtxPushCurrent_v2(driver.contexts[0]));
        assert_eq!(finish(stream), 0);
        ok!(cuEventQuery(event));
        ok!(cuEventDestroy_v2(event));
        ok!(cuStreamDestroy_v2(stream));
    });
}

/// Registered with `atexit` before the driver's own function, and so called after it.
extern "C" fn call_late() {
    let mut count: c_int = 0;
    let code = code!(cuDeviceGetCount(&mut count));
    eprintln!("after exit: {code}");
}

fn exit_and_call() {
    // SAFETY: a function without arguments that does not unwind.
    assert_eq!(unsafe { libc::atexit(call_late) }, 0);
    ok!(cuInit(0));
    std::process::exit(0);
}

#[test]
fn a_call_after_exit_finds_no_driver() {
    let Some(output) = with("a_call_after_exit_finds_no_driver", &[], exit_and_call) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("after exit: 4"), "{said}");
}

#[test]
fn a_call_after_exit_can_abort() {
    let Some(output) = with("a_call_after_exit_can_abort", &[("EXIT", "abort")], exit_and_call) else {
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("cuDeviceGetCount"), "{said}");
    assert!(!said.contains("after exit: "), "{said}");
}

#[test]
fn memory_can_have_no_handles_for_processes() {
    passes_with("memory_can_have_no_handles_for_processes", &[("NO_IPC", "1")], || {
        let _driver = Driver::new(1);
        let (mut at, mut token) = (alloc(64), Token([0; 64]));
        assert_eq!(code!(cuIpcGetMemHandle(&mut token, at)), 801);
        ok!(cuMemFree_v2(at));
        assert_eq!(code!(cuIpcOpenMemHandle_v2(&mut at, token, 1)), 801);
    });
}

#[test]
fn addresses_can_be_given_again() {
    const BUFFER_ID: i32 = 7;
    let id = |at| {
        let mut id = 0_u64;
        ok!(cuPointerGetAttribute((&raw mut id).cast(), BUFFER_ID, at));
        id
    };
    passes_with("addresses_can_be_given_again", &[("REUSE", "1")], || {
        let _driver = Driver::new(1);
        let (first, other) = (upload(&[7_u8; 9000]), alloc(64));
        let known = id(first);
        ok!(cuMemFree_v2(first));
        let (again, behind) = (alloc(64), alloc(5000));
        assert_eq!((again, behind), (first, first + 4096), "both lie where the first lay");
        assert!(known != id(again) && known != id(behind) && id(again) != id(behind), "and are others");
        assert!(download::<u8>(again, 64) != [7; 64], "with other pages");
        for at in [again, behind, other] {
            ok!(cuMemFree_v2(at));
        }
    });
}

#[test]
fn kernels_can_store_wrong_values() {
    passes_with("kernels_can_store_wrong_values", &[("SPOIL", "copy")], || {
        let _driver = Driver::new(1);
        let (stream, from, to) = (stream(), upload(&[6_u8; 32]), alloc(32));
        launch_a_copy(stream, from, to, 32);
        assert_eq!(finish(stream), 0);
        let stored = download::<u8>(to, 32);
        assert!(stored != [6; 32] && stored.iter().all(|byte| *byte & !1 == 6), "{stored:?}");
        ok!(cuMemFree_v2(from));
        ok!(cuMemFree_v2(to));
        ok!(cuStreamDestroy_v2(stream));
        ok!(cuDevicePrimaryCtxReset_v2(0));
        ok!(cuCtxSetCurrent(retain(0)));
    });
}

#[test]
fn a_knob_that_is_turned_wrongly_ends_the_process() {
    const TEST: &str = "a_knob_that_is_turned_wrongly_ends_the_process";
    for knob in ["DEVICEMAP", "CONTEXT", "EXIT", "NO_IPC", "REUSE", "MACHINE_CODE"] {
        let Some(output) = with(TEST, &[(knob, "perhaps")], || drop(Driver::new(1))) else { return };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(&format!("ALLSTREAM_TEST_CUDA_{knob}")), "{said}");
    }
}
