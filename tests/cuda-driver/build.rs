//! Names the shared library as the first candidate of loaders; never `libcuda.so.1`, which others would pick up.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
