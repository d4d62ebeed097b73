//! What hardware refuses, limits and promises: the library for tests must do the same.

mod support;

use std::time::Duration;

use allstream_sys::verbs::*;

use support::*;

fn code<T: std::fmt::Debug>(answer: Result<T, VerbsError>) -> i32 {
    answer.unwrap_err().code
}

#[test]
fn a_state_is_reached_with_its_own_attributes_alone() {
    alone("a_state_is_reached_with_its_own_attributes_alone", &[], || {
        let (mut a, b) = (End::new(Wishes::default()), End::new(Wishes::default()));
        let peer = b.address();
        a.peer = Some(peer);
        let refused = |to: IbvQpAttr, mask: i32| assert_eq!(code(a.modify(to, mask)), libc::EINVAL, "{to:?}");
        assert_eq!(a.receive(1, &mut []), libc::EINVAL);
        refused(a.receiving(&peer), TO_RECEIVE);
        refused(a.initial(), TO_INIT & !(1 << 5));
        refused(a.initial(), TO_INIT | 1 << 9);
        refused(IbvQpAttr { port_num: 2, ..a.initial() }, TO_INIT);
        a.modify(a.initial(), TO_INIT).unwrap();
        // In this state receives may be posted, but nothing may be sent.
        assert_eq!(a.receive(1, &mut []), 0);
        assert_eq!(a.put(SEND, 1, (0, 8), 0), libc::EINVAL);
        refused(a.sending(), TO_SEND);
        for missing in [7, 8, 12, 15, 17, 20] {
            refused(a.receiving(&peer), TO_RECEIVE & !(1 << missing));
        }
        let right = a.receiving(&peer);
        let mut wrong = right;
        wrong.ah_attr.grh.sgid_index = 9;
        refused(wrong, TO_RECEIVE);
        refused(IbvQpAttr { path_mtu: 6, ..right }, TO_RECEIVE);
        refused(IbvQpAttr { max_dest_rd_atomic: 17, ..right }, TO_RECEIVE);
        refused(IbvQpAttr { min_rnr_timer: 32, ..right }, TO_RECEIVE);
        a.modify(right, TO_RECEIVE).unwrap();
        for missing in [9, 10, 11, 13, 16] {
            refused(a.sending(), TO_SEND & !(1 << missing));
        }
        refused(IbvQpAttr { retry_cnt: 8, ..a.sending() }, TO_SEND);
        refused(IbvQpAttr { max_rd_atomic: 17, ..a.sending() }, TO_SEND);
        a.modify(a.sending(), TO_SEND).unwrap();
        a.to_error();
        assert_eq!(a.wait().status, FLUSHED);
        // Requests that are posted to a pair in the error state come back at once.
        assert_eq!((a.put(SEND, 5, (0, 8), 0), a.receive(6, &mut [])), (0, 0));
        let mut ids = [a.wait(), a.wait()].map(|wc| (wc.wr_id, wc.status));
        ids.sort_unstable();
        assert_eq!(ids, [(5, FLUSHED), (6, FLUSHED)]);
        refused(a.receiving(&peer), TO_RECEIVE);
        a.modify(IbvQpAttr::default(), 1).unwrap();
        assert_eq!(a.receive(1, &mut []), libc::EINVAL);
    });
}

/// Checks that `b` has refused a request that `a` posted: `a` gets `status`, `b` gets `event`, and a receive of `b` is flushed.
fn is_refused_by_the_peer(a: &End, b: &End, status: u32, event: u32) {
    assert_eq!(b.receive(77, &mut []), 0);
    let wc = a.wait();
    assert_eq!(wc.status, status, "{wc:?}");
    let flushed = b.wait();
    assert_eq!((flushed.wr_id, flushed.status), (77, FLUSHED));
    let mut events = vec![b.event()];
    // Event 4 (COMM_EST) reports the first message of a connection, and may come before.
    while events.last().unwrap().0 == 4 {
        events.push(b.event());
    }
    assert_eq!(*events.last().unwrap(), (event, b.pair.cast()));
}

#[test]
fn memory_is_reached_by_a_key_within_its_bounds_as_far_as_it_allows() {
    alone_says("memory_is_reached_by_a_key_within_its_bounds_as_far_as_it_allows", &[], || {
        let cases: [(&str, u32, i32); 6] = [
            ("stale", WRITE, ALL),
            ("stale", READ, ALL),
            ("bounds", WRITE, ALL),
            ("key", READ, ALL),
            ("no", READ, 3),
            ("no", WRITE, 5),
        ];
        for (at, (what, opcode, access)) in cases.into_iter().enumerate() {
            // The queue pair allows reads and writes, so it is the region that refuses.
            let wishes = Wishes { access, ..Wishes::default() };
            let (mut a, mut b) = (End::new(Wishes::default()), End::new(wishes));
            b.wishes.access = ALL;
            let (to_a, to_b) = (a.address(), b.address());
            b.connect(&to_a);
            a.connect(&to_b);
            let mut to = 0;
            match what {
                "stale" => b.register_again(),
                "bounds" => to = b.wishes.memory - 4095,
                "key" => a.peer.as_mut().unwrap().rkey ^= 1,
                _ => {}
            }
            assert_eq!(a.put(opcode, 1, (0, 4096), to), 0);
            is_refused_by_the_peer(&a, &b, REMOTE_ACCESS, 3);
            assert_eq!(report().refused_accesses, at as u64 + 1, "{what}");
            assert!(b.bytes(0, 4096).iter().all(|byte| *byte == 0));
        }
    })
    .into_iter()
    .for_each(|output| {
        let text = said(&output);
        assert!(output.status.success() && text.contains("6 accesses to memory were refused"), "{text}");
    });
}

#[test]
fn a_requester_s_own_keys_are_looked_at_too() {
    alone_says("a_requester_s_own_keys_are_looked_at_too", &[], || {
        for opcode in [WRITE, SEND, READ] {
            let (mut a, b) = End::two(Wishes::default());
            let mut old = [a.piece(0, 64)];
            a.register_again();
            let request = a.request(opcode, 0, 0);
            assert_eq!(a.post(request, 3, &mut old), 0);
            // A failed request has a completion though it did not ask for one.
            let wc = a.wait();
            assert_eq!((wc.wr_id, wc.status, wc.opcode), (3, 4, 0xbad));
            drop(b);
        }
        assert_eq!(report().refused_accesses, 3);
        // A queue pair that allows no READs refuses with another status and event.
        let (a, b) = End::both(Wishes::default(), Wishes { access: 3, ..Wishes::default() });
        assert_eq!(a.put(READ, 1, (0, 64), 0), 0);
        is_refused_by_the_peer(&a, &b, REMOTE_INVALID, 2);
    })
    .into_iter()
    .for_each(|output| assert!(output.status.success(), "{}", said(&output)));
}

#[test]
fn memory_that_is_unmapped_while_it_is_registered_is_counted() {
    alone_says("memory_that_is_unmapped_while_it_is_registered_is_counted", &[], || {
        let (a, b) = End::two(Wishes::default());
        // SAFETY: this is the second half of the end's memory, which only the request below uses. (`drop` unmaps it a second time.)
        unsafe { libc::munmap(b.memory.add(4 << 20).cast(), 4 << 20) };
        assert_eq!(a.put(WRITE, 1, (0, 4096), 4 << 20), 0);
        assert_eq!(a.wait().status, 11);
        assert_eq!(report().unmapped, 1);
        assert_eq!(
            // SAFETY: the library must refuse memory that is not mapped, and does not access it.
            code(unsafe { verbs().reg_mr(b.domain, b.memory.add(4 << 20).cast(), 4096, ALL) }),
            libc::EFAULT
        );
    })
    .into_iter()
    .for_each(|output| {
        let text = said(&output);
        assert!(output.status.success() && text.contains("unmapped while it was registered"), "{text}");
    });
}

#[test]
fn regions_are_refused_that_hardware_refuses_and_pinned_bytes_are_counted() {
    let host = r#"{"devices": [{"name": "a", "max_pinned": 8396800, "ports": [{"gids": [{"index": 0, "address": "127.0.0.1"}]}]}]}"#;
    let name = "regions_are_refused_that_hardware_refuses_and_pinned_bytes_are_counted";
    alone(name, &[(test_support::verbs::HOST, host)], || {
        let a = End::new(Wishes::default());
        let register = |at: usize, bytes: usize, access: i32| {
            // SAFETY: the range is in the end's own memory.
            unsafe { verbs().reg_mr(a.domain, a.memory.add(at).cast(), bytes, access) }
        };
        assert_eq!(code(register(0, 64, 2)), libc::EINVAL);
        assert_eq!(code(register(0, 0, 1)), libc::EINVAL);
        assert_eq!(code(register(0, 64, 1 << 6)), libc::EINVAL);
        assert_eq!(report().pinned_bytes, 8 << 20);
        // Two pages may still be pinned, and this region touches three.
        assert_eq!(code(register(4095, 4098, 1)), libc::ENOMEM);
        let region = register(4095, 2, 1).unwrap();
        assert_eq!(report().pinned_bytes, (8 << 20) + 8192);
        // SAFETY: `region` was just made, and is deregistered once; the end's objects exist. (A region without remote access has no remote key.)
        unsafe {
            assert_eq!(((*region).rkey, (*region).lkey == 0), (0, false));
            assert_eq!(code(verbs().dealloc_pd(a.domain)), libc::EBUSY);
            assert_eq!(code(verbs().destroy_cq(a.queue)), libc::EBUSY);
            assert_eq!(code(verbs().destroy_comp_channel(a.channel)), libc::EBUSY);
            verbs().dereg_mr(region).unwrap();
        }
        assert_eq!((report().pinned_bytes, report().most_pinned_bytes), (8 << 20, (8 << 20) + 8192));
        drop(a);
        let left = report();
        let lives =
            [left.contexts, left.domains, left.regions, left.pinned_bytes, left.queue_pairs, left.channels];
        assert_eq!(lives, [0; 6]);
    });
}

#[test]
fn queues_have_room_for_so_many_and_what_is_polled_gives_it_back() {
    alone("queues_have_room_for_so_many_and_what_is_polled_gives_it_back", &[], || {
        let mut wishes = Wishes::default();
        (wishes.cap.max_send_wr, wishes.cap.max_recv_wr) = (4, 2);
        let (a, b) = End::two(wishes);
        let post = |flags: u32| a.post(a.request(WRITE, flags, 0), 1, &mut [a.piece(0, 8)]);
        // Three requests have no completion: their room comes back when the completion of the fourth is polled.
        assert_eq!([post(0), post(0), post(0), post(SIGNALED)], [0; 4]);
        assert_eq!(post(0), libc::ENOMEM);
        assert_eq!(a.good().wr_id, 1);
        assert_eq!([post(0), post(0), post(0), post(SIGNALED), post(0)], [0, 0, 0, 0, libc::ENOMEM]);
        a.good();
        assert_eq!(
            [b.receive(1, &mut []), b.receive(2, &mut []), b.receive(3, &mut [])],
            [0, 0, libc::ENOMEM]
        );
        // Requests with too many pieces or too much inline data, or of no valid kind, are refused when they are posted.
        let mut five = [a.piece(0, 8); 5];
        assert_eq!(a.post(a.request(WRITE, 0, 0), 1, &mut five), libc::EINVAL);
        assert_eq!(a.post(a.request(WRITE, INLINE, 0), 1, &mut [a.piece(0, 65)]), libc::EINVAL);
        assert_eq!(a.post(a.request(READ, INLINE, 0), 1, &mut [a.piece(0, 8)]), libc::EINVAL);
        assert_eq!(a.post(a.request(5, 0, 0), 1, &mut [a.piece(0, 8)]), libc::EINVAL);
    });
}

#[test]
fn data_comes_from_several_pieces_and_inline() {
    alone("data_comes_from_several_pieces_and_inline", &[], || {
        let (mut a, mut b) = End::two(Wishes::default());
        a.bytes(0, 1 << 20).iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
        let parts = [(0, 100_000), (200_000, 1), (300_000, 77_777)];
        let mut pieces = parts.map(|(at, bytes)| a.piece(at, bytes));
        let mut into = [b.piece(0, 50_001), b.piece(1 << 20, 500_000)];
        assert_eq!(b.receive(5, &mut into), 0);
        assert_eq!(a.post(a.request(SEND, SIGNALED, 0), 1, &mut pieces), 0);
        let wc = b.good();
        assert_eq!((wc.wr_id, wc.opcode, wc.byte_len), (5, 128, 177_778));
        a.good();
        let sent: Vec<u8> = parts.into_iter().flat_map(|(at, bytes)| (at..at + bytes).map(pattern)).collect();
        let came = [b.bytes(0, 50_001).to_vec(), b.bytes(1 << 20, 127_777).to_vec()].concat();
        assert!(sent == came);
        // Inline data may lie in memory that is not registered, and may be changed as soon as the call returns.
        let mut text = *b"inline";
        let mut piece = [IbvSge { addr: text.as_mut_ptr() as u64, length: 6, lkey: 0 }];
        assert_eq!(a.post(a.request(WRITE, INLINE | SIGNALED, 64), 2, &mut piece), 0);
        text.fill(0);
        assert_eq!(a.good().wr_id, 2);
        assert_eq!(b.bytes(64, 6), b"inline");
    });
}

#[test]
fn a_message_without_a_receive_is_tried_again_so_often() {
    alone("a_message_without_a_receive_is_tried_again_so_often", &[], || {
        let (a, b) = End::two(Wishes { rnr_retries: 7, ..Wishes::default() });
        assert_eq!(a.put(WRITE_WITH_IMM, 1, (0, 8), 0), 0);
        let end = std::time::Instant::now() + DEADLINE;
        while report().no_receive < 3 {
            assert!(std::time::Instant::now() < end);
        }
        assert!(a.poll().is_none());
        assert_eq!(b.receive(4, &mut []), 0);
        assert_eq!((b.good().wr_id, a.good().wr_id), (4, 1));
        let before = report().no_receive;
        let (c, d) = End::two(Wishes { rnr_retries: 2, ..Wishes::default() });
        assert_eq!(c.put(SEND, 1, (0, 8), 0), 0);
        assert_eq!(c.wait().status, RNR_EXCEEDED);
        assert_eq!(report().no_receive - before, 3);
        drop(d);
        // A message that is longer than its receive puts both pairs into the error state.
        let (e, f) = End::two(Wishes::default());
        assert_eq!(f.receive(1, &mut [f.piece(0, 8)]), 0);
        assert_eq!(e.put(SEND, 1, (0, 9), 0), 0);
        assert_eq!((e.wait().status, f.wait().status), (REMOTE_INVALID, 1));
    });
}

#[test]
fn a_message_is_no_longer_than_the_port_takes() {
    let host = r#"{"devices": [{"name": "a", "ports": [{"max_message": 65536, "gids": [{"index": 0, "address": "127.0.0.1"}]}]}]}"#;
    alone("a_message_is_no_longer_than_the_port_takes", &[(test_support::verbs::HOST, host)], || {
        let (a, _b) = End::two(Wishes::default());
        assert_eq!((a.put(WRITE, 1, (0, 65536), 0), a.put(READ, 2, (0, 65537), 0)), (0, 0));
        assert_eq!(a.good().wr_id, 1);
        let wc = a.wait();
        assert_eq!((wc.wr_id, wc.status), (2, 1));
    });
}

#[test]
fn reads_beyond_what_was_agreed_wait_or_are_an_error() {
    alone("reads_beyond_what_was_agreed_wait_or_are_an_error", &[], || {
        let read = |end: &End, count: u64| {
            (0..count).for_each(|id| assert_eq!(end.put(READ, id, (0, 1 << 20), 1 << 20), 0))
        };
        let (a, _b) = End::both(
            Wishes { reads: 2, ..Wishes::default() },
            Wishes { answered_reads: 2, ..Wishes::default() },
        );
        read(&a, 9);
        (0..9).for_each(|id| assert_eq!(a.good().wr_id, id));
        let (c, d) = End::both(
            Wishes { reads: 4, ..Wishes::default() },
            Wishes { answered_reads: 1, ..Wishes::default() },
        );
        set_delays(20_000, 1);
        read(&c, 9);
        let wcs: Vec<IbvWc> = (0..9).map(|_| c.wait()).collect();
        let first = wcs.iter().find(|wc| wc.status != 0).unwrap();
        assert_eq!(first.status, REMOTE_INVALID);
        set_delays(0, 1);
        drop(d);
        let (e, _f) = End::both(Wishes { reads: 0, ..Wishes::default() }, Wishes::default());
        read(&e, 1);
        assert_eq!(e.wait().status, 2);
    });
}

#[test]
fn a_read_is_overtaken_by_what_comes_behind_it_unless_that_is_fenced() {
    alone("a_read_is_overtaken_by_what_comes_behind_it_unless_that_is_fenced", &[], || {
        // The peer overwrites the data when it gets the message that follows the READ. Only with a fence is the data sure to be read before.
        let seen = |flags: u32| {
            let (mut a, mut b) = End::two(Wishes::default());
            let mut late = 0;
            for round in 1..=20u8 {
                b.bytes(0, 64).fill(round);
                a.bytes(0, 64).fill(0);
                assert_eq!(b.receive(1, &mut []), 0);
                assert_eq!(a.put(READ, 1, (0, 64), 0), 0);
                let release = a.request(WRITE_WITH_IMM, SIGNALED | flags, 4096);
                assert_eq!(a.post(release, 2, &mut []), 0);
                b.good();
                b.bytes(0, 64).fill(0xff);
                assert_eq!((a.good().wr_id, a.good().wr_id), (1, 2));
                late += usize::from(a.bytes(0, 64)[0] != round);
            }
            late
        };
        set_delays(3000, 7);
        assert!(seen(0) > 0);
        assert_eq!(seen(FENCE), 0);
    });
}

#[test]
fn windows_open_what_they_are_bound_to_for_one_queue_pair_until_they_are_invalidated() {
    alone_says(
        "windows_open_what_they_are_bound_to_for_one_queue_pair_until_they_are_invalidated",
        &[],
        || {
            let (mut a, mut b) = End::two(Wishes::default());
            b.bytes(4096, 64).fill(9);
            // SAFETY: the domain exists; the window is freed below.
            let window = unsafe { (*b.context).ops.alloc_mw.unwrap()(b.domain, 2) };
            assert!(!window.is_null());
            // SAFETY: the window was just made.
            let key = unsafe { (*window).rkey } | 5;
            let mut bind = b.request(BIND_MW, SIGNALED, 0);
            (bind.bind_mw, bind.bind_rkey) = (window, key);
            let info =
                IbvMwBindInfo { mr: b.region, addr: b.memory as u64 + 4096, length: 64, mw_access_flags: 4 };
            bind.bind_info = info;
            assert_eq!(b.post(bind, 1, &mut []), 0);
            assert_eq!(b.good().opcode, 5);
            a.peer.as_mut().unwrap().rkey = key;
            assert_eq!(a.put(READ, 1, (0, 64), 4096), 0);
            a.good();
            assert!(a.bytes(0, 64).iter().all(|byte| *byte == 9));
            // A region cannot be deregistered while a window is bound to it.
            // SAFETY: the region exists, and the refused call leaves it as it is.
            assert_eq!(code(unsafe { verbs().dereg_mr(b.region) }), libc::EINVAL);
            let mut invalidate = b.request(LOCAL_INV, SIGNALED, 0);
            invalidate.imm_data = key;
            assert_eq!(b.post(invalidate, 2, &mut []), 0);
            assert_eq!(b.good().opcode, 6);
            assert_eq!(a.put(READ, 1, (0, 64), 4096), 0);
            assert_eq!(a.wait().status, REMOTE_ACCESS);
            // SAFETY: the window was made above, and is not used any more.
            assert_eq!(unsafe { (*b.context).ops.dealloc_mw.unwrap()(window) }, 0);
        },
    )
    .into_iter()
    .for_each(|output| assert!(output.status.success(), "{}", said(&output)));
}

#[test]
fn a_channel_tells_once_of_what_comes_after_it_was_armed() {
    alone("a_channel_tells_once_of_what_comes_after_it_was_armed", &[], || {
        let (a, b) = End::two(Wishes::default());
        let soon = Duration::from_millis(20);
        (0..4).for_each(|id| assert_eq!(b.receive(id, &mut []), 0));
        let send = |flags: u32| {
            assert_eq!(a.post(a.request(WRITE_WITH_IMM, SIGNALED | flags, 0), 1, &mut []), 0);
            a.good();
        };
        send(0);
        // That completion waits already, so it causes no event: only the next one does.
        b.arm(false);
        assert!(!b.is_told(soon));
        send(0);
        assert!(b.is_told(DEADLINE) && !b.is_told(soon));
        b.arm(true);
        send(0);
        assert!(!b.is_told(soon));
        send(SOLICITED);
        assert!(b.is_told(DEADLINE));
        assert_eq!((0..4).map(|_| b.good().wr_id).collect::<Vec<_>>(), [0, 1, 2, 3]);
    });
}

#[test]
fn a_completion_queue_that_overflows_takes_its_queue_pair_with_it() {
    alone("a_completion_queue_that_overflows_takes_its_queue_pair_with_it", &[], || {
        let (a, _b) = End::both(Wishes { entries: 2, ..Wishes::default() }, Wishes::default());
        (0..3).for_each(|id| assert_eq!(a.put(WRITE, id, (0, 8), 0), 0));
        let events = [a.event(), a.event()];
        assert_eq!(events, [(0, a.queue.cast()), (1, a.pair.cast())]);
        assert!(report().overflows > 0 && !a.has_event());
    });
}
