//! The shared library, as a loader sees it.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;

use cuda as _;

type NameOf = unsafe extern "C" fn(usize) -> *const c_char;
type Find = unsafe extern "C" fn(*const c_char, *mut *const c_void, i32, u64) -> u32;
type FindWithStatus = unsafe extern "C" fn(*const c_char, *mut *const c_void, i32, u64, *mut u32) -> u32;

/// A function of the library; null if there is none.
fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the library is open for good, and the name ends with a zero.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

fn open() -> *mut c_void {
    // Cargo puts it beside the tests.
    let path = std::env::current_exe().unwrap().with_file_name("libcuda.so");
    let text = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: opening this library runs no initializers but those of Rust's runtime.
    let library = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{}", path.display());
    library
}

fn names(library: *mut c_void) -> Vec<String> {
    // SAFETY: the function is of this type; its texts live for ever.
    unsafe {
        let name_of: NameOf = std::mem::transmute(symbol(library, c"allstream_test_cuda_name"));
        let texts = (0..).map(|index| name_of(index)).take_while(|text| !text.is_null());
        texts.map(|text| CStr::from_ptr(text).to_str().unwrap().to_owned()).collect()
    }
}

#[test]
fn every_function_is_found_by_name_and_by_the_driver() {
    let library = open();
    let names = names(library);
    assert!(names.len() > 100);
    // SAFETY: the function is of this type.
    let find: Find = unsafe { std::mem::transmute(symbol(library, c"cuGetProcAddress")) };
    for name in &names {
        let text = CString::new(name.as_str()).unwrap();
        let direct = symbol(library, &text);
        assert!(!direct.is_null(), "{name}");
        let mut found = std::ptr::null();
        // SAFETY: the places are of the right types.
        assert_eq!(unsafe { find(text.as_ptr(), &mut found, 12000, 0) }, 0, "{name}");
        if !names.contains(&format!("{name}_v2")) {
            assert_eq!(found, direct.cast_const(), "{name}");
        }
    }
    // SAFETY: the function is of this type.
    let find: FindWithStatus = unsafe { std::mem::transmute(symbol(library, c"cuGetProcAddress_v2")) };
    let (mut found, mut status) = (std::ptr::null(), 7);
    // SAFETY: the places are of the right types.
    let code = unsafe { find(c"cuMemAlloc".as_ptr(), &mut found, 12000, 0, &mut status) };
    assert_eq!((code, status, found), (0, 0, symbol(library, c"cuMemAlloc_v2").cast_const()));
    // SAFETY: as above.
    let code = unsafe { find(c"cuNoSuchThing".as_ptr(), &mut found, 12000, 0, &mut status) };
    assert_eq!((code, status, found.is_null()), (0, 1, true));
}

/// Every `cu` function that the sources export is in the table.
#[test]
fn the_table_is_whole() {
    let names = names(open());
    for entry in Path::new(env!("CARGO_MANIFEST_DIR")).join("src").read_dir().unwrap().flatten() {
        let Ok(text) = std::fs::read_to_string(entry.path()) else { continue };
        for tail in text.split("extern \"C\" fn cu").skip(1) {
            let name = format!("cu{}", tail.split('(').next().unwrap());
            assert!(names.contains(&name), "{name} is not in src/table.rs");
        }
    }
}
