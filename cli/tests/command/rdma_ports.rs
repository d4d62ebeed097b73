//! Links over RDMA between ranks that have two ports each, on hosts that the verbs library for tests pretends.

use test_support::verbs::{TWO_PORTS, library};

use crate::rdma::{goes_over, is_right_with, on_host, two_hosts, two_ranks};

/// Has each process say, as it ends, what each device has carried.
const TELL: (&str, &str) = ("ALLSTREAM_TEST_VERBS_TELL", "1");

/// Bytes that all ranks together asked a device to carry.
#[track_caller]
fn carried(said: &str, device: &str) -> u64 {
    let of_line = |line: &str| {
        let (before, after) = line.split_once(" was asked to carry ")?;
        before.ends_with(device).then(|| after.trim_end_matches(" bytes").parse::<u64>().unwrap())
    };
    said.lines().filter_map(of_line).sum()
}

/// A collective over both ports has the right result. Returns what each device has carried.
#[track_caller]
fn over_both(what: &[&str], host: &str, collective: &str, ranks: &str, more: &[(&str, &str)]) -> [u64; 2] {
    let said = is_right_with(what, host, (collective, ranks), &[more, &[TELL]].concat());
    ["test_0", "test_1"].map(|device| carried(&said, device))
}

#[test]
fn both_ports_carry_what_is_large_and_the_first_what_is_small() {
    for collective in ["all_reduce", "broadcast", "all_to_all", "exscan", "send_recv"] {
        for what in [&["--sizes", "8,4K,3M"][..], &["--alloc", "arena", "--sizes", "8,4K,3M"]] {
            let [first, second] = over_both(what, TWO_PORTS, collective, "2", &[]);
            // The ports are tried for each link, by 4 KB. Which port carries more depends on which frames come back first.
            assert!(second > 8 * 4096 && first > second / 8, "{collective}, {what:?}: {first}, {second}");
        }
    }
    let [first, second] = over_both(&["--sizes", "8,100"], TWO_PORTS, "all_reduce", "2", &[]);
    assert!(first > 0 && second == 2 * 4096, "{first}, {second}");
    over_both(&["--sizes", "8,4K,300K"], TWO_PORTS, "all_reduce", "4", &[]);
}

/// Completions that are late make frames that go by one port overtake those that go by the other.
#[test]
fn frames_that_overtake_each_other_change_nothing() {
    for seed in ["1", "2", "3"] {
        let seed = ("ALLSTREAM_TEST_VERBS_SEED", seed);
        let late = [("ALLSTREAM_TEST_VERBS_DELAY_US", "300"), seed];
        for what in [&["--sizes", "8,100,300K,1M"][..], &["--alloc", "arena", "--sizes", "8,100,300K,1M"]] {
            over_both(what, TWO_PORTS, "all_reduce", "3", &late);
            over_both(what, TWO_PORTS, "send_recv", "2", &[("ALLSTREAM_TEST_VERBS_LOSS", "20"), seed]);
        }
    }
}

/// The devices differ: one takes smaller messages, answers fewer READs, has no windows or little room in its queues, or can pin less.
#[test]
fn ports_that_differ_carry_a_link_together() {
    let second = |from: &str, to: &str| {
        let (first, second) = TWO_PORTS.split_at(TWO_PORTS.find("{\"name\": \"test_1\"").unwrap());
        let changed = second.replacen(from, to, 1);
        assert_ne!(changed, second);
        format!("{first}{changed}")
    };
    let sizes = ["--sizes", "8,4K,1M"];
    let alloc = ["--alloc", "arena", "--sizes", "8,4K,1M"];
    let name = "\"name\": \"test_1\"";
    for more in ["\"max_rd_atomic\": 1", "\"windows\": false", "\"max_qp_wr\": 60"] {
        let host = second(name, &format!("{name}, {more}"));
        for what in [&sizes[..], &alloc] {
            let [_, carried] = over_both(what, &host, "all_reduce", "2", &[]);
            assert!(carried > 2 * 4096, "{more}: {carried}");
        }
    }
    // A second port for whose sake frames would be cut is not used.
    let small = second("\"rail\": 1", "\"rail\": 1, \"max_message\": 16384");
    assert_eq!(over_both(&sizes, &small, "all_reduce", "2", &[])[1], 0);
    let both = TWO_PORTS.replace("\"gids\"", "\"max_message\": 16384, \"gids\"");
    assert!(over_both(&sizes, &both, "all_reduce", "2", &[])[1] > 2 * 4096);
    // Nor is one whose queue has room for fewer of such frames than the first port's: the first would have to do with fewer, too.
    let short = both.replacen(name, &format!("{name}, \"max_qp_wr\": 60"), 1);
    let said = is_right_with(&sizes, &short, ("all_reduce", "2"), &[TELL]);
    assert!(
        carried(&said, "test_1") == 0 && said.contains("large frames in a queue, and the first port for"),
        "{said}"
    );
    // The second card can register nothing, or not enough for whole frames: the links go by the first.
    let little = second(name, &format!("{name}, \"max_pinned\": 65536"));
    assert_eq!(over_both(&sizes, &little, "all_reduce", "2", &[])[1], 0);
    // Where ranks register no memory for whole frames, a link has one port.
    assert_eq!(over_both(&sizes, TWO_PORTS, "all_reduce", "2", &[("ALLSTREAM_RDMA_MEMORY", "0")])[1], 0);
    // So it has where the user names one device.
    assert_eq!(over_both(&sizes, TWO_PORTS, "all_reduce", "2", &[("ALLSTREAM_RDMA_DEVICE", "test_0")])[1], 0);
}

/// The second ports are connected to networks of their own: between hosts nothing gets through by them.
#[test]
fn second_ports_that_do_not_reach_each_other_are_not_used_and_that_is_told() {
    let apart = r#"export ALLSTREAM_TEST_VERBS="$(echo "$ALLSTREAM_TEST_VERBS" | sed "s/\"rail\": 1/\"rail\": $((h + 5))/")"; export ALLSTREAM_RDMA_TIMEOUT=1 ALLSTREAM_RDMA_RETRY=1;"#;
    let said = goes_over(two_hosts(TWO_PORTS, apart), "shm, rdma");
    let told = "links over RDMA go by the first ports alone, as nothing gets from test_1 port 1 (127.0.0.1) to 127.0.0.1: ";
    assert!(said.contains(told) && said.contains("name one port in ALLSTREAM_RDMA_DEVICE"), "{said}");
    // A second port that one host's ranks cannot open, and one that the other host has not.
    for (set, told) in [
        (
            "[ $h = 0 ] || export ALLSTREAM_TEST_VERBS_FAIL=ibv_alloc_pd:2:12;",
            Some("alone: RDMA is not available: test_1 port 1 cannot be used: ibv_alloc_pd"),
        ),
        ("[ $h = 0 ] || export ALLSTREAM_RDMA_DEVICE=test_0;", None),
    ] {
        let said = goes_over(two_hosts(TWO_PORTS, set), "shm, rdma");
        assert!(told.map_or(!said.contains("WARN"), |told| said.contains(told)), "{said}");
    }
}

/// Requests that stay for ever, by either port, end with the deadline.
#[test]
fn requests_that_never_come_back_end_with_the_deadline_whichever_port_has_them() {
    let job = [&two_ranks("4M")[..], &["-n", "50"]].concat();
    let stalls =
        [("ALLSTREAM_TEST_VERBS_STALL", "300"), ("ALLSTREAM_TIMEOUT", "2"), ("ALLSTREAM_LINK", "rdma")];
    let (went_well, said) = on_host(library().to_str().unwrap(), TWO_PORTS, &stalls, &job);
    assert!(!went_well && said.contains("timed out after 2s"), "{said}");
}

/// A device that can make only so many queue pairs: links go by the first port alone once the second card has none left, and nobody blames the network.
#[test]
fn a_second_card_that_runs_out_of_queue_pairs_is_done_without() {
    let few = TWO_PORTS.replace("\"name\": \"test_1\"", "\"max_qp\": 1, \"name\": \"test_1\"");
    let said = is_right_with(&["--sizes", "8,300K"], &few, ("all_reduce", "4"), &[TELL]);
    assert!(!said.contains("WARN"), "{said}");
}

/// The second port's cable is pulled in the middle of the work, long after the port has proven that it works.
#[test]
fn a_second_port_that_fails_while_frames_go_by_it_ends_the_job_and_is_named() {
    let pulled = TWO_PORTS.replace("\"name\": \"test_1\"", "\"most_bytes\": 20000000, \"name\": \"test_1\"");
    for more in [&[][..], &["--alloc", "arena"]] {
        let job = [&two_ranks("3M")[..], &["-n", "100"], more].concat();
        let variables =
            [("ALLSTREAM_LINK", "rdma"), ("ALLSTREAM_RDMA_TIMEOUT", "8"), ("ALLSTREAM_RDMA_RETRY", "2")];
        let (went_well, said) =
            on_host(library().to_str().unwrap(), &pulled, &[&variables[..], &[TELL]].concat(), &job);
        let [first, second] = ["test_0", "test_1"].map(|device| carried(&said, device));
        let names_it = said.contains("test_1 port 1 (127.0.0.1)") && !said.contains("timed out");
        assert!(!went_well && names_it && !said.contains("panicked"), "{more:?}: {said}");
        assert!(!said.contains("are left at the end") && !said.contains("unmapped"), "{more:?}: {said}");
        assert!(first > 0 && second >= 20_000_000, "{more:?}: {first}, {second}");
    }
}

/// Each second port of a link costs a descriptor at each end. Where these are scarce, links do without it, so that all links get theirs.
#[test]
fn second_ports_leave_the_last_descriptors_to_other_links() {
    let command = env!("CARGO_BIN_EXE_allstream");
    let rank = format!("ulimit -n 80; exec '{command}' perf all_reduce --sizes 300K -n 3 -w 1");
    let job = ["run", "-n", "6", "--", "sh", "-c", rank.as_str()];
    let variables = [("ALLSTREAM_LINK", "rdma"), TELL];
    let (went_well, said) = on_host(library().to_str().unwrap(), TWO_PORTS, &variables, &job);
    assert!(went_well && said.contains("# Out of bounds values : 0 OK") && !said.contains("WARN"), "{said}");
    assert!(carried(&said, "test_1") > 0, "{said}");
}
