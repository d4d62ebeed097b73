//! What a test can turn.

mod support;

use std::time::Duration;

use support::*;

#[test]
fn the_nth_call_fails_and_calls_are_counted() {
    let fails = ("ALLSTREAM_TEST_VERBS_FAIL", "ibv_create_qp:2:12");
    alone("the_nth_call_fails_and_calls_are_counted", &[fails], || {
        let (a, _b) = {
            let mut a = End::new(Wishes::default());
            assert_eq!(a.new_pair().unwrap_err().code, libc::ENOMEM);
            let mut b = End::new(Wishes::default());
            let (to_a, to_b) = (a.address(), b.address());
            b.connect(&to_a);
            a.connect(&to_b);
            (a, b)
        };
        assert_eq!(calls("ibv_create_qp"), 3);
        assert_eq!(fail("ibv_post_send", 2, libc::EIO), 0);
        let posted: Vec<i32> = (0..3).map(|id| a.put(WRITE, id, (0, 8), 0)).collect();
        assert_eq!(posted, [0, libc::EIO, 0]);
        assert_eq!((a.good().wr_id, a.good().wr_id), (0, 2));
        assert_eq!((calls("ibv_post_send"), fail("ibv_nothing", 1, 1)), (3, libc::EINVAL));
    });
}

#[test]
fn a_request_that_never_comes_back_is_not_flushed_and_can_be_let_go() {
    alone("a_request_that_never_comes_back_is_not_flushed_and_can_be_let_go", &[], || {
        let (a, mut b) = End::two(Wishes::default());
        stall(2);
        (0..4).for_each(|id| assert_eq!(a.put(WRITE, id, (0, 8), 0), 0));
        assert_eq!(a.good().wr_id, 0);
        a.to_error();
        a.arm(false);
        assert!(!a.is_told(Duration::from_millis(50)));
        stall(0);
        let flushed: Vec<_> = (0..3).map(|_| a.wait()).map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(flushed, [(1, FLUSHED), (2, FLUSHED), (3, FLUSHED)]);
        // Without the error it goes on where it was.
        let (c, _d) = End::two(Wishes::default());
        stall(1);
        assert_eq!(c.put(WRITE, 7, (0, 8), 0), 0);
        c.arm(false);
        assert!(!c.is_told(Duration::from_millis(50)));
        stall(0);
        assert_eq!(c.good().wr_id, 7);
        // A queue pair that is destroyed touches nothing any more, whatever was posted to it.
        stall(1);
        let (mut e, f) = End::two(Wishes::default());
        assert_eq!(e.put(WRITE, 1, (0, 8), 0), 0);
        e.destroy_pair();
        b.bytes(0, 8);
        drop(f);
    });
}

#[test]
fn late_completions_keep_their_order_within_a_queue_pair_alone() {
    let knobs = [("ALLSTREAM_TEST_VERBS_DELAY_US", "3000"), ("ALLSTREAM_TEST_VERBS_SEED", "3")];
    alone("late_completions_keep_their_order_within_a_queue_pair_alone", &knobs, || {
        let pairs: Vec<(End, End)> = (0..4).map(|_| End::two(Wishes::default())).collect();
        for id in 0..20 {
            for (a, b) in &pairs {
                assert_eq!((b.receive(id, &mut []), a.put(WRITE_WITH_IMM, id, (0, 8), 0)), (0, 0));
            }
        }
        for (a, b) in &pairs {
            let ids = |end: &End| (0..20).map(|_| end.good().wr_id).collect::<Vec<_>>();
            assert_eq!((ids(a), ids(b)), ((0..20).collect(), (0..20).collect()));
        }
        assert_eq!(report().no_receive, 0);
    });
}

#[test]
fn lost_packets_are_sent_again() {
    alone("lost_packets_are_sent_again", &[], || {
        let wishes = Wishes { timeout: 8, retries: 7, ..Wishes::default() };
        let (mut a, mut b) = End::two(wishes);
        set_loss(50);
        for round in 0..40u8 {
            a.bytes(0, 300_000).fill(round);
            assert_eq!(b.receive(round.into(), &mut []), 0);
            assert_eq!(a.put(WRITE_WITH_IMM, 1, (0, 300_000), 0), 0);
            assert_eq!(a.put(READ, 2, (1 << 20, 300_000), 0), 0);
            assert_eq!((b.good().wr_id, a.good().wr_id, a.good().wr_id), (round.into(), 1, 2));
            assert!(
                a.bytes(1 << 20, 300_000).iter().chain(b.bytes(0, 300_000).iter()).all(|byte| *byte == round)
            );
        }
        set_loss(0);
        assert!(report().retransmissions > 0);
    });
}

#[test]
fn nothing_is_sent_again_where_nothing_is_lost() {
    alone("nothing_is_sent_again_where_nothing_is_lost", &[], || {
        // A time-out of 65 microseconds, which is over all the time.
        let (a, b) = End::two(Wishes { timeout: 4, retries: 0, ..Wishes::default() });
        for id in 0..200 {
            assert_eq!((b.receive(id, &mut []), a.put(WRITE_WITH_IMM, id, (0, 100_000), 0)), (0, 0));
            assert_eq!((b.good().wr_id, a.good().wr_id), (id, id));
        }
        assert_eq!((report().retransmissions, report().no_receive), (0, 0));
    });
}

const RAILS: &str = r#"{"devices": [{"name": "a", "ports": [
    {"gids": [{"index": 0, "address": "10.0.0.1"}]},
    {"rail": 1, "gids": [{"index": 0, "address": "10.0.1.1"}]}]}]}"#;

#[test]
fn ports_reach_each_other_on_one_rail_while_both_are_up() {
    let host = [(test_support::verbs::HOST, RAILS)];
    alone("ports_reach_each_other_on_one_rail_while_both_are_up", &host, || {
        let short = Wishes { timeout: 10, retries: 1, ..Wishes::default() };
        let second = Wishes { port: 2, ..short };
        let (a, _b) = End::both(short, second);
        assert_eq!(a.put(WRITE, 1, (0, 8), 0), 0);
        assert_eq!(a.wait().status, RETRIES_EXCEEDED);
        let (c, d) = End::two(second);
        assert_eq!(c.put(WRITE, 1, (0, 8), 0), 0);
        c.good();
        set_port("a", 2, 1);
        assert_eq!(c.event().0, 10);
        assert_eq!(c.put(WRITE, 2, (0, 8), 0), 0);
        assert_eq!(c.wait().status, RETRIES_EXCEEDED);
        set_port("a", 2, 4);
        assert_eq!((c.event().0, d.pair.is_null()), (9, false));
    });
}

#[test]
fn a_queue_pair_breaks_with_an_event_and_its_peer_runs_out_of_retries() {
    alone("a_queue_pair_breaks_with_an_event_and_its_peer_runs_out_of_retries", &[], || {
        let (a, b) = End::two(Wishes { timeout: 10, retries: 2, ..Wishes::default() });
        assert_eq!(b.receive(5, &mut []), 0);
        break_pair(b.address().number);
        assert_eq!(b.wait().status, FLUSHED);
        assert_eq!(b.event(), (1, b.pair.cast()));
        assert_eq!(a.put(WRITE, 1, (0, 8), 0), 0);
        assert_eq!(a.wait().status, RETRIES_EXCEEDED);
    });
}
