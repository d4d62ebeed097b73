//! Tests that ask more of the verbs library for tests: to count its calls for each frame, and to pretend that a card fails.

use std::ffi::{CStr, CString};
use std::time::{Duration, Instant};

use allstream::{Buf, Comm, Rendezvous};
use test_support::verbs::{LIBRARY, PORT, library, on_host};

use crate::launcher::{DEADLINE, allstream, text};

/// A function of the verbs library for tests, by its name.
fn function(name: &CStr) -> *mut libc::c_void {
    let file = CString::new(std::env::var(LIBRARY).unwrap()).unwrap();
    // SAFETY: the library is loaded already, and stays.
    let found = unsafe {
        let handle = libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!handle.is_null());
        libc::dlsym(handle, name.as_ptr())
    };
    assert!(!found.is_null(), "{name:?}");
    found
}

/// How often this process has called a function of the library.
fn calls(name: &str) -> u64 {
    type Count = unsafe extern "C" fn(*const libc::c_char) -> u64;
    let name = CString::new(name).unwrap();
    // SAFETY: the function has this type (`tests/verbs/src/calls/knobs.rs`), and reads a text that ends in 0.
    unsafe {
        std::mem::transmute::<*mut libc::c_void, Count>(function(c"allstream_test_verbs_calls"))(
            name.as_ptr(),
        )
    }
}

/// The variable that says what happens to rank 0's card.
const HAPPENS: &str = "ALLSTREAM_TEST_HAPPENS";
/// The card reports that it has failed, and sends nothing more.
const FAILS: &str = "the card fails";
/// All queue pairs of the card fail, with all requests that were posted.
const PAIRS_FAIL: &str = "the queue pairs fail";
/// The card's port goes down.
const GOES_DOWN: &str = "the port goes down";

fn happens(what: &str) {
    type End = extern "C" fn() -> libc::c_int;
    type Break = extern "C" fn(u32) -> libc::c_int;
    type SetPort = unsafe extern "C" fn(*const libc::c_char, u8, libc::c_uint) -> libc::c_int;
    const DOWN: libc::c_uint = 1;
    // SAFETY: the functions have these types (`tests/verbs/src/calls/knobs.rs`); the text ends in 0.
    let answer = unsafe {
        match what {
            FAILS => {
                std::mem::transmute::<*mut libc::c_void, End>(function(c"allstream_test_verbs_end_devices"))()
            }
            PAIRS_FAIL => {
                std::mem::transmute::<*mut libc::c_void, Break>(function(c"allstream_test_verbs_break"))(0)
            }
            _ => {
                let set_port = function(c"allstream_test_verbs_set_port");
                std::mem::transmute::<*mut libc::c_void, SetPort>(set_port)(c"test_0".as_ptr(), 1, DOWN)
            }
        }
    };
    assert_eq!(answer, 0);
}

/// Calls that move data.
const MOVES: [&str; 2] = ["ibv_post_send", "ibv_post_recv"];
/// Calls that set something up: none may come once the links are open.
const SETS_UP: [&str; 6] =
    ["ibv_reg_mr", "ibv_dereg_mr", "ibv_create_qp", "ibv_create_cq", "ibv_modify_qp", "ibv_alloc_mw"];

/// Sends the peer the first buffer and receives the second, `count` times, and prints the calls that this took for each of the buffer's frames.
async fn count_calls<B: Buf>(
    comm: &mut Comm,
    (mut sent, mut buf): (B, B),
    what: &str,
    (frames, count): (u32, u32),
) {
    let peer = 1 - comm.rank();
    let mut start = None;
    for i in 0..count + 20 {
        // The first 20 rounds open the links, and are not counted.
        if i == 20 {
            comm.barrier().await.unwrap();
            let now = [&MOVES[..], &SETS_UP].concat().into_iter().map(|name| (name, calls(name)));
            start = Some(now.collect::<Vec<_>>());
        }
        let sending = comm.send(sent, peer);
        buf = comm.recv(buf, peer).await.unwrap();
        sent = sending.await.unwrap();
    }
    let more = |name: &str, before: u64| (calls(name) - before) as f64 / f64::from(count * frames);
    let counted =
        start.unwrap().into_iter().map(|(name, before)| format!("{name} {:.3}", more(name, before)));
    // For each frame that it counts, a rank sends one and receives one, so these are the calls of both ends.
    println!("for each frame of {what}: {}", counted.collect::<Vec<_>>().join(", "));
}

/// A rank of two: they send each other buffers of one frame or of eight, many times, and print how many calls that took for each frame.
#[test]
#[ignore = "a rank; started by another test"]
fn a_rank_that_counts() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut comm = Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap();
        for (what, bytes, frames, count) in [("4 KB", 4 << 10, 1, 1000), ("1 MB", 1 << 20, 8, 100)] {
            let buffers = (vec![1u8; bytes], vec![0; bytes]);
            count_calls(&mut comm, buffers, what, (frames, count)).await;
        }
        let buffers = (comm.alloc::<u8>(1 << 20).unwrap(), comm.alloc(1 << 20).unwrap());
        count_calls(&mut comm, buffers, "1 MB of alloc", (8, 100)).await;
        comm.close().await.unwrap();
    });
}

#[test]
fn a_frame_is_three_calls_at_most_and_sets_nothing_up() {
    let program = std::env::current_exe().unwrap();
    let job = ["run", "-n", "2", "--", program.to_str().unwrap()];
    let rank = ["--exact", "rdma_calls::a_rank_that_counts", "--ignored", "--nocapture"];
    let mut variables = on_host(library().to_str().unwrap(), PORT);
    variables.extend([("ALLSTREAM_TRACE_DIR", "off"), ("ALLSTREAM_LINK", "rdma")]);
    let output = allstream(&[&job[..], &rank[..]].concat(), &variables);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    let lines: Vec<&str> =
        said.lines().filter_map(|line| line.split_once("for each frame of ")).map(|(_, rest)| rest).collect();
    assert_eq!(lines.len(), 6, "{said}");
    for line in lines {
        println!("{line}");
        let of = |name: &str| {
            let count = line.split(['(', ',', ':']).find_map(|part| part.trim().strip_prefix(name));
            count
                .and_then(|count| count.trim().parse::<f64>().ok())
                .unwrap_or_else(|| panic!("{name}: {line}"))
        };
        let moves: f64 = MOVES.map(of).iter().sum();
        // An offered frame takes one call for the offer, which binds the window, too. READs, ends of windows, notes and receives go several by a call.
        let most = if line.starts_with("1 MB of alloc") { 3.55 } else { 3.05 };
        assert!(moves > 1.9 && moves < most, "{moves} calls for each frame: {line}");
        assert!(SETS_UP.map(of).iter().all(|count| *count == 0.0), "{line}");
    }
}

/// A rank of two: something happens to rank 0's card. Then rank 0 waits for a message that rank 1 never sends or, if the port is down, sends one.
#[test]
#[ignore = "a rank; started by another test"]
fn a_rank_whose_card_fails() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut comm = Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap();
        comm.all_reduce(vec![1f32; 1 << 14]).await.unwrap();
        let failed = if comm.rank() == 0 {
            let what = std::env::var(HAPPENS).unwrap();
            happens(&what);
            let comm = comm.timeout(DEADLINE);
            let work = if what != GOES_DOWN {
                comm.recv(vec![0f32; 1 << 14], 1)
            } else {
                comm.broadcast(vec![0f32; 4], 0)
            };
            work.await.map(drop).err().map(|failed| failed.error)
        } else {
            None
        };
        // Rank 0's broadcast returns before the card gives up sending it, and rank 1 calls no operation: both learn of the failure by `check`.
        while comm.check().is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        println!("{}", failed.unwrap_or_else(|| comm.check().unwrap_err()));
    });
}

#[test]
fn a_card_that_fails_and_a_port_that_goes_down_are_named_on_all_ranks() {
    let program = std::env::current_exe().unwrap();
    let rank = ["--exact", "rdma_calls::a_rank_whose_card_fails", "--ignored", "--nocapture"];
    let job = ["run", "-n", "2", "--on-failure", "keep", "--", program.to_str().unwrap()];
    let all = [
        (FAILS, "the network card test_0 says that it has failed (IBV_EVENT_DEVICE_FATAL (8))"),
        // Rank 0 may hear of it by the card's event or by a failed request. Both texts begin like this.
        (PAIRS_FAIL, "the network card "),
        (GOES_DOWN, "packets were not acknowledged while its port was down"),
    ];
    for (what, told) in all {
        let mut variables = on_host(library().to_str().unwrap(), PORT);
        variables.extend([("ALLSTREAM_TRACE_DIR", "off"), ("ALLSTREAM_LINK", "rdma"), (HAPPENS, what)]);
        variables.extend([("ALLSTREAM_RDMA_TIMEOUT", "10"), ("ALLSTREAM_RDMA_RETRY", "2")]);
        let begun = Instant::now();
        let output = allstream(&[&job[..], &rank[..]].concat(), &variables);
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        for rank in ["[0]", "[1]"] {
            assert!(said.lines().any(|line| line.starts_with(rank) && line.contains(told)), "{what}: {said}");
        }
        assert!(begun.elapsed() < DEADLINE, "{what}: only the deadline told of it: {said}");
    }
}
