//! What a frame over RDMA costs: calls of the verbs library, counted by the one for tests.

use std::ffi::CString;

use allstream::{Comm, Rendezvous};
use test_support::verbs::{LIBRARY, PORT, library, on_host};

use crate::launcher::{allstream, text};

/// How often this process has called a function of the library.
fn calls(name: &str) -> u64 {
    type Count = unsafe extern "C" fn(*const libc::c_char) -> u64;
    let file = CString::new(std::env::var(LIBRARY).unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: the library is loaded already, and stays; its function has this type (`tests/verbs/src/calls/knobs.rs`), and reads a text that ends in 0.
    unsafe {
        let handle = libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!handle.is_null());
        let found = libc::dlsym(handle, c"allstream_test_verbs_calls".as_ptr());
        assert!(!found.is_null());
        std::mem::transmute::<*mut libc::c_void, Count>(found)(name.as_ptr())
    }
}

/// Calls that move data.
const MOVES: [&str; 2] = ["ibv_post_send", "ibv_post_recv"];
/// Calls that a steady state has none of.
const SETS_UP: [&str; 6] =
    ["ibv_reg_mr", "ibv_dereg_mr", "ibv_create_qp", "ibv_create_cq", "ibv_modify_qp", "ibv_alloc_mw"];

/// What two ranks do that another test starts: `send_recv` of a frame each way, so often, and what that took of calls for each frame.
#[test]
#[ignore = "a rank; started by another test"]
fn a_rank_that_counts() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut comm = Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap();
        let peer = 1 - comm.rank();
        for (what, bytes, frames, count) in [("4 KB", 4 << 10, 1, 1000), ("1 MB", 1 << 20, 8, 100)] {
            let mut buf = vec![0u8; bytes];
            let mut start = None;
            for i in 0..count + 20 {
                // The first few open the links.
                if i == 20 {
                    comm.barrier().await.unwrap();
                    let now = [&MOVES[..], &SETS_UP].concat().into_iter().map(|name| (name, calls(name)));
                    start = Some(now.collect::<Vec<_>>());
                }
                let sent = comm.send(vec![1u8; bytes], peer);
                buf = comm.recv(buf, peer).await.unwrap();
                sent.await.unwrap();
            }
            let more = |name: &str, before: u64| (calls(name) - before) as f64 / f64::from(count * frames);
            let counted =
                start.unwrap().into_iter().map(|(name, before)| format!("{name} {:.3}", more(name, before)));
            // One frame sent and one received in each: the calls of both ends.
            println!("for each frame of {what}: {}", counted.collect::<Vec<_>>().join(", "));
        }
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
    assert_eq!(lines.len(), 4, "{said}");
    for line in lines {
        println!("{line}");
        let of = |name: &str| {
            let count = line.split(['(', ',', ':']).find_map(|part| part.trim().strip_prefix(name));
            count
                .and_then(|count| count.trim().parse::<f64>().ok())
                .unwrap_or_else(|| panic!("{name}: {line}"))
        };
        let moves: f64 = MOVES.map(of).iter().sum();
        assert!(moves > 1.9 && moves < 3.05, "{moves} calls for each frame: {line}");
        assert!(SETS_UP.map(of).iter().all(|count| *count == 0.0), "{line}");
    }
}
