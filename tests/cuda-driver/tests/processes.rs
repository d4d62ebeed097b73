//! Memory and events between two processes: this test starts itself again.
#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

mod support;

use std::process::{Command, Stdio};
use std::time::Duration;

use support::*;

const OTHER: &str = "ALLSTREAM_TEST_CUDA_OTHER_PROCESS";

fn text(token: Token) -> String {
    token.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn token(text: &str) -> Token {
    let mut token = Token([0; 64]);
    for (index, byte) in token.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[index * 2..][..2], 16).unwrap();
    }
    token
}

/// The process that opens the handles: once the event is reached, it adds one to each of four words, and then sets a flag.
fn other(handles: &str) {
    let driver = Driver::new(1);
    let (memory, recorded) = handles.split_once(' ').unwrap();
    let (mut at, mut again, mut event) = (0, 0, 0);
    ok!(cuIpcOpenMemHandle_v2(&mut at, token(memory), 1));
    ok!(cuIpcOpenMemHandle_v2(&mut again, token(memory), 1));
    assert_eq!((at, driver.report().mapped_handles), (again, 1), "opened twice, mapped once");
    assert_eq!(code!(cuIpcOpenMemHandle_v2(&mut again, token(memory), 0)), 1, "without its flag");
    ok!(cuIpcOpenEventHandle(&mut event, token(recorded)));
    let (stream, idle) = (stream(), self::stream());
    ok!(cuStreamWaitEvent(stream, event, 0));
    // A wait is for the record that was the last one when the wait was asked for. A later record that is reached at once does not
    // end the wait; a query of the event is about the later record.
    ok!(cuEventRecord(event, idle));
    assert_eq!((finish(idle), code!(cuEventQuery(event))), (0, 0));
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(code!(cuStreamQuery(stream)), 600, "a later record released a wait for an earlier one");
    ok!(cuStreamWriteValue32_v2(idle, at + 20, 1, 0));
    assert_eq!(finish(stream), 0);
    let words: Vec<u32> = download(at, 4);
    assert_eq!(words, [1, 2, 3, 4], "what was written before the record");
    let words: Vec<u32> = words.iter().map(|word| word + 1).collect();
    ok!(cuMemcpyHtoD_v2(at, words.as_ptr().cast(), 16));
    ok!(cuStreamWriteValue32_v2(stream, at + 16, 1, 0));
    assert_eq!(finish(stream), 0);
    assert_eq!(code!(cuMemFree_v2(at)), 1, "it is not ours to free");
    ok!(cuIpcCloseMemHandle(at));
    ok!(cuIpcCloseMemHandle(at));
    assert_eq!(code!(cuIpcCloseMemHandle(at)), 1);
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuStreamDestroy_v2(idle));
}

#[test]
fn two_processes_share_memory_and_events() {
    if let Ok(handles) = std::env::var(OTHER) {
        return other(&handles);
    }
    let _driver = Driver::new(1);
    let (stream, at) = (stream(), upload(&[0_u32; 6]));
    let mut event = 0;
    assert_eq!(code!(cuEventCreate(&mut event, 4)), 1, "between processes there is no time");
    ok!(cuEventCreate(&mut event, 2 | 4));
    let (mut memory, mut recorded) = (Token([0; 64]), Token([0; 64]));
    ok!(cuIpcGetMemHandle(&mut memory, at + 4));
    ok!(cuIpcGetEventHandle(&mut recorded, event));
    let mut none = 0;
    assert_eq!(code!(cuIpcOpenMemHandle_v2(&mut none, memory, 1)), 201, "one's own");
    assert_eq!(code!(cuIpcOpenMemHandle_v2(&mut none, Token([3; 64]), 1)), 400);
    // The event's record is queued, but not reached before the other process opens the gate.
    ok!(cuStreamWaitValue32_v2(stream, at + 20, 1, 1));
    let words = [1_u32, 2, 3, 4];
    ok!(cuMemcpyHtoDAsync_v2(at, words.as_ptr().cast(), 16, stream));
    ok!(cuEventRecord(event, stream));
    // Then the stream waits for the other process's flag.
    ok!(cuStreamWaitValue32_v2(stream, at + 16, 1, 1));
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "two_processes_share_memory_and_events", "--nocapture"])
        .env(OTHER, format!("{} {}", text(memory), text(recorded)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = finish_process(child);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(finish(stream), 0);
    assert_eq!(download::<u32>(at, 4), [2, 3, 4, 5]);
    ok!(cuMemFree_v2(at));
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
}

/// In a process of its own: the variables are read once.
#[test]
fn knobs_come_from_the_environment() {
    if std::env::var(OTHER).is_ok() {
        let (mut count, mut at, mut can) = (0, 0, 1);
        assert_eq!(code!(cuDeviceGetCount(&mut count)), 3, "before cuInit");
        ok!(cuInit(0));
        ok!(cuDeviceGetCount(&mut count));
        assert_eq!(count, 3);
        ok!(cuDeviceCanAccessPeer(&mut can, 2, 1));
        assert_eq!(can, 0);
        ok!(cuDeviceCanAccessPeer(&mut can, 0, 1));
        assert_eq!(can, 1);
        ok!(cuCtxSetCurrent(retain(2)));
        assert_eq!(code!(cuMemAlloc_v2(&mut at, (64 << 20) + 1)), 2);
        assert_eq!(code!(cuMemAlloc_v2(&mut at, 1)), 999);
        ok!(cuMemAlloc_v2(&mut at, 64 << 20));
        return;
    }
    let again = |variables: &[(&str, &str)]| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "knobs_come_from_the_environment", "--nocapture"]).env(OTHER, "knobs");
        for (name, value) in variables {
            command.env(format!("ALLSTREAM_TEST_CUDA_{name}"), value);
        }
        finish_process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    let knobs = [("DEVICES", "3"), ("MEMORY", "64M"), ("NO_PEER", "1-2"), ("FAIL", "cuMemAlloc:2:999")];
    let right = again(&knobs);
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stderr));
    let wrong = again(&[("MEMORY", "much")]);
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success() && said.contains("ALLSTREAM_TEST_CUDA_MEMORY"), "{said}");
}
