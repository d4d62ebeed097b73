//! Tests that must hold for the library for tests and for the real one alike: `cargo xtask rdma` runs this program on Soft-RoCE too.

mod support;

use support::*;

/// The first side of a ping-pong with WRITE WITH IMMEDIATE: in each round it posts a receive, sends a message, and awaits the completions of both.
fn first(end: &End, rounds: u64) {
    for round in 0..rounds {
        assert_eq!(end.receive(round, &mut []), 0);
        assert_eq!(end.put(WRITE_WITH_IMM, round, (0, 4096), 8192), 0);
        let (one, two) = (end.good(), end.good());
        let came = if one.opcode == RECEIVED_WITH_IMM { one } else { two };
        assert_eq!((came.opcode, came.byte_len), (RECEIVED_WITH_IMM, 4096));
        assert_eq!(u32::from_be(came.imm_data), round as u32 + 1);
    }
}

fn second(end: &End, rounds: u64) {
    let mut sent = 0;
    for round in 0..rounds {
        loop {
            let wc = end.good();
            if wc.opcode == RECEIVED_WITH_IMM {
                assert_eq!(u32::from_be(wc.imm_data), round as u32);
                break;
            }
            sent += 1;
        }
        // The receive for the next message is posted before this message is answered.
        assert_eq!(end.receive(round, &mut []), 0);
        assert_eq!(end.put(WRITE_WITH_IMM, round + 1, (0, 4096), 8192), 0);
    }
    // When the last send has completed here, the peer has received it.
    while sent < rounds {
        assert_ne!(end.good().opcode, RECEIVED_WITH_IMM);
        sent += 1;
    }
}

const ROUNDS: u64 = 200;
const LARGE: usize = 4 << 20;

#[test]
fn messages_go_there_and_back_between_threads() {
    alone("messages_go_there_and_back_between_threads", &[], || {
        let (mut a, mut b) = End::two(Wishes::default());
        a.bytes(0, 4096).iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
        assert_eq!(b.receive(0, &mut []), 0);
        let other = std::thread::spawn(move || {
            second(&b, ROUNDS);
            let came = b.bytes(8192, 4096).iter().enumerate().all(|(at, byte)| *byte == pattern(at));
            (b, came)
        });
        first(&a, ROUNDS);
        let (b, came) = other.join().unwrap();
        assert!(came);
        // Each side has ended, so nothing is in flight between them.
        drop((a, b));
    });
}

#[test]
fn four_megabytes_are_read_from_another_process() {
    let name = "four_megabytes_are_read_from_another_process";
    alone(name, &[], || {
        let mut end = End::new(Wishes::default());
        if is_other() {
            end.bytes(0, LARGE).iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
            tell(&end.address().line());
            end.connect(&Address::of_line(&hear()));
            tell("connected");
            assert_eq!(hear(), "read");
            return;
        }
        let mut other = Other::start(name);
        let peer = Address::of_line(&other.hear());
        other.tell(&end.address().line());
        assert_eq!(other.hear(), "connected");
        end.connect(&peer);
        assert_eq!(end.put(READ, 7, (LARGE, LARGE), 0), 0);
        assert_eq!(end.good().wr_id, 7);
        assert!(end.bytes(LARGE, LARGE).iter().enumerate().all(|(at, byte)| *byte == pattern(at)));
        other.tell("read");
        other.succeeds();
    });
}

#[test]
fn a_peer_that_is_killed_ends_the_retries_and_all_that_is_posted_comes_back() {
    let name = "a_peer_that_is_killed_ends_the_retries_and_all_that_is_posted_comes_back";
    alone(name, &[], || {
        let mut end = End::new(Wishes { retries: 3, ..Wishes::default() });
        if is_other() {
            tell(&end.address().line());
            end.connect(&Address::of_line(&hear()));
            tell("connected");
            // The first process kills this one while it waits here.
            hear();
            return;
        }
        let mut other = Other::start(name);
        let peer = Address::of_line(&other.hear());
        other.tell(&end.address().line());
        assert_eq!(other.hear(), "connected");
        end.connect(&peer);
        assert_eq!(end.put(WRITE, 1, (0, 4096), 0), 0);
        assert_eq!(end.good().wr_id, 1);
        assert_eq!(end.receive(9, &mut []), 0);
        other.kill();
        for id in 2..5 {
            assert_eq!(end.put(WRITE, id, (0, 4096), 0), 0);
        }
        let first = end.wait();
        assert_eq!((first.wr_id, first.status), (2, RETRIES_EXCEEDED));
        let mut flushed: Vec<u64> = (0..3)
            .map(|_| end.wait())
            .map(|wc| {
                assert_eq!(wc.status, FLUSHED, "{wc:?}");
                wc.wr_id
            })
            .collect();
        flushed.sort_unstable();
        assert_eq!(flushed, [3, 4, 9]);
    });
}
