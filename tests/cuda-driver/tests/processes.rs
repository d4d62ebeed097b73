//! Memory and events between two processes: this test starts itself again.
#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

mod support;

use std::process::{Command, Stdio};
use std::time::Instant;

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

/// The process that opens: adds one to each of four words behind an event, and says so by a flag.
fn other(handles: &str) {
    let driver = Driver::new(1);
    let (memory, recorded) = handles.split_once(' ').unwrap();
    let (mut at, mut again, mut event) = (0, 0, 0);
    ok!(cuIpcOpenMemHandle_v2(&mut at, token(memory), 1));
    ok!(cuIpcOpenMemHandle_v2(&mut again, token(memory), 1));
    assert_eq!((at, driver.report().mapped_handles), (again, 1), "opened twice, mapped once");
    assert_eq!(code!(cuIpcOpenMemHandle_v2(&mut again, token(memory), 0)), 1, "without its flag");
    ok!(cuIpcOpenEventHandle(&mut event, token(recorded)));
    let stream = stream();
    ok!(cuStreamWaitEvent(stream, event, 0));
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
}

#[test]
fn two_processes_share_memory_and_events() {
    if let Ok(handles) = std::env::var(OTHER) {
        return other(&handles);
    }
    let _driver = Driver::new(1);
    let (stream, at) = (stream(), upload(&[0_u32; 5]));
    let mut event = 0;
    assert_eq!(code!(cuEventCreate(&mut event, 4)), 1, "between processes there is no time");
    ok!(cuEventCreate(&mut event, 2 | 4));
    let (mut memory, mut recorded) = (Token([0; 64]), Token([0; 64]));
    ok!(cuIpcGetMemHandle(&mut memory, at + 4));
    ok!(cuIpcGetEventHandle(&mut recorded, event));
    let mut none = 0;
    assert_eq!(code!(cuIpcOpenMemHandle_v2(&mut none, memory, 1)), 201, "one's own");
    assert_eq!(code!(cuIpcOpenMemHandle_v2(&mut none, Token([3; 64]), 1)), 400);
    // The event's record is queued, but not reached before the gate opens.
    let gate = upload(&[0_u32]);
    ok!(cuStreamWaitValue32_v2(stream, gate, 1, 1));
    let words = [1_u32, 2, 3, 4];
    ok!(cuMemcpyHtoDAsync_v2(at, words.as_ptr().cast(), 16, stream));
    ok!(cuEventRecord(event, stream));
    // And then the other's flag is awaited.
    ok!(cuStreamWaitValue32_v2(stream, at + 16, 1, 1));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "two_processes_share_memory_and_events", "--nocapture"])
        .env(OTHER, format!("{} {}", text(memory), text(recorded)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let opener = self::stream();
    ok!(cuStreamWriteValue32_v2(opener, gate, 1, 0));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("the other process does not end");
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    };
    let said = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert!(status.success(), "{said}");
    assert_eq!(finish(stream), 0);
    assert_eq!(download::<u32>(at, 4), [2, 3, 4, 5]);
    ok!(cuMemFree_v2(at));
    ok!(cuMemFree_v2(gate));
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuStreamDestroy_v2(opener));
}
