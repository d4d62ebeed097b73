#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| allstream::fuzzing::hostile_collective(data));
