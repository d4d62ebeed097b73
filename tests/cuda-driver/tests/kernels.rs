//! Modules and launches.
#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

mod support;

use std::collections::BTreeSet;
use std::ffi::{CString, c_void};
use std::path::Path;

use allstream_cuda_kernels::Module;
use support::*;

/// `to[i] = a[i] * factor + to[i]` for `i < count`, and a variable that counts nothing.
const AXPY: &str = r#"
.version 8.1
.target sm_70
.address_size 64
.global .align 4 .u32 marks[2] = {7, 9};
.visible .entry axpy(
    .param .u64 axpy_param_0, .param .u64 axpy_param_1, .param .u32 axpy_param_2, .param .f32 axpy_param_3
)
{
    .reg .pred %p<3>;
    .reg .f32 %f<6>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [axpy_param_0];
    ld.param.u64 %rd2, [axpy_param_1];
    ld.param.u32 %r1, [axpy_param_2];
    ld.param.f32 %f1, [axpy_param_3];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    mov.u32 %r6, %nctaid.x;
    mul.lo.s32 %r6, %r6, %r3;
$again:
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra $end;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd5];
    ld.global.f32 %f3, [%rd4];
    fma.rn.f32 %f4, %f2, %f1, %f3;
    st.global.f32 [%rd4], %f4;
    add.s32 %r5, %r5, %r6;
    bra.uni $again;
$end:
    ret;
}
.visible .entry forever() { $here: bra $here; }
"#;

fn load(text: &str) -> u64 {
    let (mut module, text) = (0, CString::new(text).unwrap());
    ok!(cuModuleLoadData(&mut module, text.as_ptr().cast()));
    module
}

fn function(module: u64, name: &std::ffi::CStr) -> u64 {
    let mut function = 0;
    ok!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

fn axpy(function: u64, stream: u64, to: u64, a: u64, count: u32, factor: f32) -> u32 {
    let places: [*const c_void; 4] = [
        (&raw const to).cast(),
        (&raw const a).cast(),
        (&raw const count).cast(),
        (&raw const factor).cast(),
    ];
    let extra = std::ptr::null();
    code!(cuLaunchKernel(function, 3, 1, 1, 64, 1, 1, 0, stream, places.as_ptr(), extra))
}

#[test]
fn a_kernel_computes() {
    let driver = Driver::new(1);
    let (module, stream) = (load(AXPY), stream());
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let (from, to) = (upload(&a), upload(&vec![1_f32; 1000]));
    assert_eq!(axpy(function(module, c"axpy"), stream, to, from, 1000, 0.5), 0);
    assert_eq!(finish(stream), 0);
    let expected: Vec<f32> = a.iter().map(|a| a * 0.5 + 1.0).collect();
    assert_eq!(download::<f32>(to, 1000), expected);
    let (mut marks, mut size) = (0, 0);
    ok!(cuModuleGetGlobal_v2(&mut marks, &mut size, module, c"marks".as_ptr()));
    assert_eq!((download::<u32>(marks, 2), size), (vec![7, 9], 8));
    assert_eq!(code!(cuModuleGetFunction(&mut marks, module, c"other".as_ptr())), 500);
    assert_eq!(driver.report().modules, 1);
    ok!(cuModuleUnload(module));
    ok!(cuMemFree_v2(from));
    ok!(cuMemFree_v2(to));
    ok!(cuStreamDestroy_v2(stream));
}

/// Every way to go wrong gives its code, which stays until the context is reset.
#[test]
fn what_a_kernel_must_not_do_sticks() {
    let driver = Driver::new(2);
    let mut context = driver.contexts[0];
    for case in 0..5 {
        ok!(cuCtxSetCurrent(driver.contexts[1]));
        let foreign = upload(&[0_f32; 1000]);
        ok!(cuCtxSetCurrent(context));
        let (module, stream, to) = (load(AXPY), stream(), upload(&[0_f32; 1000]));
        let axpy_function = function(module, c"axpy");
        ok!(allstream_test_cuda_set_budget(10_000_000));
        let (launched, expected) = match case {
            0 => (axpy(axpy_function, stream, to, to, 1001, 1.0), 700),
            1 => (axpy(axpy_function, stream, to + 2, to, 1, 1.0), 716),
            2 => (axpy(axpy_function, stream, to, foreign, 1000, 1.0), 700),
            3 => {
                let freed = upload(&[0_f32; 1000]);
                ok!(cuMemFree_v2(freed));
                (axpy(axpy_function, stream, to, freed, 1, 1.0), 700)
            }
            _ => {
                ok!(allstream_test_cuda_set_budget(10_000));
                let (forever, none) = (function(module, c"forever"), std::ptr::null());
                (code!(cuLaunchKernel(forever, 1, 1, 1, 1, 1, 1, 0, stream, none, std::ptr::null())), 702)
            }
        };
        assert_eq!((launched, finish(stream)), (0, expected), "case {case}");
        assert_eq!(code!(cuMemAlloc_v2(&mut 0, 16)), expected, "it sticks");
        ok!(cuDevicePrimaryCtxReset_v2(0));
        context = retain(0);
        ok!(cuCtxSetCurrent(context));
        ok!(cuMemFree_v2(upload(&[1_u8])));
        ok!(cuMemFree_v2(foreign));
    }
    ok!(allstream_test_cuda_set_budget(1 << 32));
}

#[test]
fn a_peer_is_reached_once_access_is_enabled() {
    let driver = Driver::new(2);
    ok!(cuCtxSetCurrent(driver.contexts[1]));
    let foreign = upload(&[2_f32; 10]);
    ok!(cuCtxSetCurrent(driver.contexts[0]));
    ok!(cuCtxEnablePeerAccess(driver.contexts[1], 0));
    assert_eq!(code!(cuCtxEnablePeerAccess(driver.contexts[1], 0)), 704);
    let (module, to) = (load(AXPY), upload(&[0_f32; 10]));
    assert_eq!(axpy(function(module, c"axpy"), 0, to, foreign, 10, 3.0), 0);
    assert_eq!(download::<f32>(to, 10), [6.0; 10]);
    ok!(cuCtxDisablePeerAccess(driver.contexts[1]));
    assert_eq!(code!(cuMemcpyDtoDAsync_v2(to, foreign, 40, 0)), 1);
    ok!(cuModuleUnload(module));
    ok!(cuMemFree_v2(to));
    ok!(cuMemFree_v2(foreign));
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let _driver = Driver::new(1);
    let text = CString::new(AXPY.replace("ret;", "bar.sync 0;\nret;")).unwrap();
    let mut log = vec![0_u8; 200];
    let (options, values) = ([5, 6], [log.as_mut_ptr().cast::<c_void>(), 200 as *mut c_void]);
    let mut module = 0;
    let code =
        code!(cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, options.as_ptr(), values.as_ptr()));
    assert_eq!(code, 218);
    let log = String::from_utf8_lossy(&log);
    let line = AXPY.lines().position(|line| line.contains("ret;")).unwrap() + 1;
    assert!(log.starts_with(&format!("line {line}: `bar.sync`")), "{log}");
    for (from, to, code) in [("8.1", "9.2", 222), ("sm_70", "sm_100", 209)] {
        let text = CString::new(AXPY.replace(from, to)).unwrap();
        assert_eq!(code!(cuModuleLoadData(&mut module, text.as_ptr().cast())), code);
    }
    assert_eq!(code!(cuModuleLoadData(&mut module, c"\x7fELF".as_ptr().cast())), 209);
}

/// Of what the kernels' package ships, all is understood; and no file is there that it does not know.
#[test]
fn the_shipped_kernels_load() {
    let _driver = Driver::new(1);
    for module in Module::ALL {
        ok!(cuModuleUnload(load(module.ptx())));
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/cuda/ptx");
    let files: BTreeSet<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let known: BTreeSet<_> =
        Module::ALL.iter().map(|module| format!("{}.ptx", module.name()).into()).collect();
    assert!(!known.is_empty());
    assert_eq!(files, known, "{}", folder.display());
}
