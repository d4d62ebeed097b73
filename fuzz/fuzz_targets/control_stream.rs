#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| allstream::fuzzing::control_stream(data));
