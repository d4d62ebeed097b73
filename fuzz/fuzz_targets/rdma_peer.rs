#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| allstream::fuzzing::rdma_peer(data));
