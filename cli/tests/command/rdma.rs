//! RDMA, on hosts that the verbs library for tests pretends: what `allstream info` says of them, and collectives of processes over it.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use allstream::{Comm, Rendezvous};
use rustix::process::{Signal, getpid, kill_process};
use test_support::verbs::{HOST, LIBRARY, PORT, library, old_library};

use crate::launcher::{allstream, text};

/// The lines of `allstream info` about RDMA.
fn asked(command: &mut Command) -> Vec<String> {
    let output = command.arg("info").stdin(Stdio::null()).output().unwrap();
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    // What is missing is no failure; and what was opened was closed.
    assert!(output.status.success() && complained.is_empty(), "{said}{complained}");
    let mut lines = said.lines().skip_while(|line| !line.starts_with("RDMA "));
    let first = lines.next().unwrap_or_else(|| panic!("no line about RDMA: {said}"));
    let others = lines.take_while(|line| line.starts_with(' '));
    let lines = [first].into_iter().chain(others).map(|line| line.get(15..).unwrap_or_default().to_owned());
    let mut lines: Vec<String> = lines.collect();
    // Whatever there is, the last line says when it is used.
    assert!(lines.pop().unwrap().starts_with("used between hosts if all have it"));
    lines
}

/// A command that finds this library, in an environment that says nothing else of RDMA or of other hosts.
fn with_library(file: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
    for name in ["ALLSTREAM_RDMA_DEVICE", "ALLSTREAM_RDMA_GID", "MASTER_ADDR", "MASTER_PORT", HOST] {
        command.env_remove(name);
    }
    command.env(LIBRARY, file).env("ALLSTREAM_INTERFACE", "=lo");
    command
}

fn info(host: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let mut command = with_library(library().to_str().unwrap());
    asked(command.env(HOST, host).envs(variables.iter().copied()))
}

/// Two cards: one with a port that is up and has four addresses, and one that is down; one whose port fails, with addresses all the same, and one without an address of RoCE v2.
const CARDS: &str = r#"{"devices": [
    {"name": "test_0", "ports": [
        {"mtu": 1024, "max_message": 8388608, "gids": [
            {"index": 0, "kind": "roce_v1", "address": "fe80::1", "interface": 1},
            {"index": 1, "address": "fe80::1", "interface": 1},
            {"index": 2, "kind": "roce_v1", "address": "127.0.0.1", "interface": 1},
            {"index": 3, "address": "127.0.0.1", "interface": 1}]},
        {"state": 1}]},
    {"name": "test_1", "ports": [
        {"fails": 5, "gids": [{"index": 0, "address": "fe80::2"}, {"index": 1, "address": "10.250.0.2"}]},
        {"gids": [{"index": 0, "kind": "roce_v1", "address": "10.250.0.1"}]}]}]}"#;

#[test]
fn info_names_the_port_and_the_address_and_what_was_passed_over() {
    let said = info(CARDS, &[]);
    let port = "yes: test_0 port 1 active, RoCE v2, GID 3 (127.0.0.1 of lo), MTU 1024 (the port can do 4096: give its interface an MTU of 4200";
    assert!(said[0].starts_with(port), "{said:#?}");
    for wanted in [
        "passed over: test_0 port 1 GID 0, 2: not of RoCE v2",
        "passed over: test_0 port 1 GID 1: a link-local address",
        "passed over: test_0 port 2: it is down",
        "passed over: test_1 port 1: ibv_query_port: Input/output error (os error 5)",
        "passed over: test_1 port 2: it has no address of RoCE v2, only others (GID 0)",
        "found by /",
    ] {
        assert!(said.iter().any(|line| line.starts_with(wanted)), "{wanted}: {said:#?}");
    }
}

#[test]
fn info_lists_all_ports_that_can_be_used() {
    let port = |index| format!(r#"{{"gids": [{{"index": {index}, "address": "127.0.0.1"}}]}}"#);
    let host = format!(
        r#"{{"devices": [{{"name": "a", "ports": [{}, {}]}}, {{"name": "b", "ports": [{}]}}]}}"#,
        port(1),
        port(2),
        port(3)
    );
    let said = info(&host, &[]);
    assert!(said[0].starts_with("yes: a port 1 active, RoCE v2, GID 1 "), "{said:#?}");
    assert!(said[1].starts_with("     a port 2 active, RoCE v2, GID 2 "), "{said:#?}");
    assert!(said[2].starts_with("     b port 1 active, RoCE v2, GID 3 "), "{said:#?}");
    assert!(said.len() == 4 && said[3].starts_with("found by "), "{said:#?}");
    let said = info(&host, &[("ALLSTREAM_RDMA_DEVICE", "b,a:2")]);
    assert!(said[0].starts_with("yes: b port 1 ") && said[1].starts_with("     a port 2 "), "{said:#?}");
    assert!(
        said.contains(&"passed over: a port 1: left out: ALLSTREAM_RDMA_DEVICE is `b,a:2`".into()),
        "{said:#?}"
    );
}

#[test]
fn info_says_what_is_missing_and_what_to_do() {
    let no = |said: Vec<String>, parts: &[&str]| {
        assert!(said.len() == 1 && said[0].starts_with("no: "), "{said:#?}");
        for part in parts {
            assert!(said[0].contains(part), "{part}: {said:#?}");
        }
    };
    let of = |file: &str| asked(&mut with_library(file));
    no(
        of("/nowhere/libibverbs.so.1"),
        &["looked for /nowhere/libibverbs.so.1 (cannot open", "libibverbs1", LIBRARY],
    );
    // Another library, or one that is too old.
    no(
        of("libc.so.6"),
        &["libc.so.6 has no function ibv_get_device_list@IBVERBS_1.1", "rdma-core 32 or newer"],
    );
    no(
        of(old_library().to_str().unwrap()),
        &["has no function _ibv_query_gid_table@IBVERBS_1.11: it is too old", "rdma-core 32 or newer"],
    );
    no(info("{}", &[]), &["RDMA is not available: there is no device", "rdma_rxe"]);
    no(info(r#"{"fails": 38}"#, &[]), &["ibv_get_device_list: Function not implemented", "ib_uverbs"]);
    let device = |more: &str| format!(r#"{{"devices": [{{"name": "card", {more}, "ports": [{{}}]}}]}}"#);
    no(
        info(&device(r#""fails": 13"#), &[]),
        &["no port can be used: card: ibv_open_device: Permission denied"],
    );
    no(info(&device(r#""attributes_fail": 5"#), &[]), &["card: ibv_query_device: Input/output error"]);
    no(
        info(&device(r#""gids_fail": 12"#), &[]),
        &["card port 1: _ibv_query_gid_table: Cannot allocate memory"],
    );
    no(info(&device(r#""transport": 1"#), &[]), &["card: it speaks IBV_TRANSPORT_IWARP"]);
    for (variable, value, parts) in [
        ("ALLSTREAM_RDMA_DEVICE", "mlx5_9", &["mlx5_9", "there are: test_0, test_1"][..]),
        ("ALLSTREAM_RDMA_DEVICE", "test_0:2", &["test_0 port 2: it is down"]),
        ("ALLSTREAM_RDMA_DEVICE", "test_0,", &["ALLSTREAM_RDMA_DEVICE is `test_0,`", "a name is empty"]),
        (
            "ALLSTREAM_RDMA_GID",
            "7",
            &["test_0 port 1: it has no GID 7, which ALLSTREAM_RDMA_GID names; it has of RoCE v2: 1, 3"],
        ),
        ("ALLSTREAM_RDMA_GID", "three", &["ALLSTREAM_RDMA_GID is `three`"]),
    ] {
        no(info(CARDS, &[(variable, value)]), parts);
    }
}

#[test]
fn info_says_that_too_little_memory_can_be_locked() {
    let mut command = with_library(library().to_str().unwrap());
    command.env(HOST, CARDS);
    let limit = libc::rlimit { rlim_cur: 65536, rlim_max: 65536 };
    let lower = move || {
        // SAFETY: system calls that take numbers and a structure of this function's, and may be made between fork and exec. Without the
        // capability (`CAP_IPC_LOCK`, 14) the limit counts for root, too; who is not root has none to lose.
        unsafe {
            libc::prctl(libc::PR_CAPBSET_DROP, 14, 0, 0, 0);
            match libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        }
    };
    // SAFETY: what runs there makes two system calls and nothing else.
    unsafe { command.pre_exec(lower) };
    let said = asked(&mut command);
    let wanted = "no: RDMA is not available: test_0 port 1 could be used, but this process may lock 65536 bytes of memory (RLIMIT_MEMLOCK), and 67108864 are needed";
    assert!(
        said.len() == 1 && said[0].starts_with(wanted) && said[0].contains("ulimit -l unlimited"),
        "{said:#?}"
    );
}

/// As [`PORT`]; it takes messages of 4 KB at most, so that a large frame is many.
const SMALL: &str = r#"{"devices": [{"name": "test_0", "ports": [{"max_message": 4096, "gids": [{"index": 1, "address": "127.0.0.1"}]}]}]}"#;

/// The command, on a host that this library pretends; whether it went well, and all that it said.
pub(crate) fn on_host(
    file: &str,
    host: &str,
    variables: &[(&str, &str)],
    arguments: &[&str],
) -> (bool, String) {
    let mut all = test_support::verbs::on_host(file, host);
    all.push(("ALLSTREAM_TRACE_DIR", "off"));
    all.extend(variables);
    let output = allstream(arguments, &all);
    (output.status.success(), format!("{}{}", text(&output.stdout), text(&output.stderr)))
}

/// The arguments by which two ranks all_reduce buffers of this size, and each says how that ended.
pub(crate) fn two_ranks(size: &str) -> [&str; 11] {
    let command = env!("CARGO_BIN_EXE_allstream");
    ["run", "-n", "2", "--on-failure", "keep", "--", command, "perf", "all_reduce", "--sizes", size]
}

#[track_caller]
fn is_right(host: &str, collective: &str, ranks: &str, variables: &[(&str, &str)]) {
    is_right_with(&["--sizes", "8,4K,300K"], host, (collective, ranks), variables);
}

/// Whether a collective on buffers from `Comm::alloc` has the right result.
#[track_caller]
fn is_right_in_alloc(host: &str, collective: &str, ranks: &str, variables: &[(&str, &str)]) {
    is_right_with(&["--alloc", "arena", "--sizes", "8,4K,300K,3M"], host, (collective, ranks), variables);
}

#[track_caller]
pub(crate) fn is_right_with(
    what: &[&str],
    host: &str,
    (collective, ranks): (&str, &str),
    variables: &[(&str, &str)],
) -> String {
    let arguments = ["perf", collective, "-N", ranks, "--link", "rdma", "-n", "3", "-w", "1"];
    let arguments = [&arguments[..], what].concat();
    let (went_well, said) = on_host(library().to_str().unwrap(), host, variables, &arguments);
    // The library says at the end which accesses it refused, and whether registered memory was unmapped.
    assert!(
        went_well
            && said.contains("# Out of bounds values : 0 OK")
            && !said.contains("were refused")
            && !said.contains("unmapped"),
        "{collective}, {ranks} ranks: {said}"
    );
    said
}

#[test]
fn collectives_over_rdma_have_the_oracle_s_results() {
    for collective in [
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "scan",
        "exscan",
        "send_recv",
    ] {
        is_right(PORT, collective, "2", &[]);
    }
    is_right(PORT, "all_reduce", "3", &[]);
    is_right(SMALL, "all_reduce", "2", &[]);
    is_right(SMALL, "all_to_all", "3", &[]);
}

#[test]
fn what_lies_in_buffers_of_alloc_is_read_where_it_lies() {
    let collectives =
        ["all_reduce", "reduce", "broadcast", "all_gather", "all_to_all", "exscan", "send_recv"];
    for collective in collectives {
        is_right_in_alloc(PORT, collective, "2", &[]);
    }
    is_right_in_alloc(PORT, "broadcast", "3", &[]);
    is_right_in_alloc(PORT, "all_gather", "3", &[]);
    // One READ at a time.
    let one = PORT.replace("\"name\"", "\"max_rd_atomic\": 1, \"name\"");
    is_right_in_alloc(&one, "all_reduce", "2", &[]);
    // Without windows nothing is offered; a port that takes small messages alone READs nothing; a narrow link takes no offers.
    let without = PORT.replace("\"name\"", "\"windows\": false, \"name\"");
    is_right_in_alloc(&without, "broadcast", "2", &[]);
    is_right_in_alloc(SMALL, "broadcast", "2", &[]);
    is_right_in_alloc(PORT, "all_reduce", "2", &[NARROW]);
    // Answers to READs that are late, in any order beside other completions, or lost at first.
    for seed in ["1", "2"] {
        let seed = ("ALLSTREAM_TEST_VERBS_SEED", seed);
        is_right_in_alloc(PORT, "all_reduce", "3", &[("ALLSTREAM_TEST_VERBS_DELAY_US", "300"), seed]);
        is_right_in_alloc(PORT, "send_recv", "2", &[("ALLSTREAM_TEST_VERBS_LOSS", "20"), seed]);
    }
}

/// A buffer that cannot be registered is used all the same, by way of staging slots.
#[test]
fn a_buffer_of_alloc_that_is_too_large_to_register_is_copied() {
    let little = PORT.replace("\"name\"", "\"max_pinned\": 12000000, \"name\"");
    let what = ["--alloc", "arena", "--sizes", "16M"];
    is_right_with(&what, &little, ("broadcast", "2"), &[]);
}

/// Ranks register no memory for whole frames, so that all links are narrow ones.
const NARROW: (&str, &str) = ("ALLSTREAM_RDMA_MEMORY", "0");

#[test]
fn large_frames_come_in_pieces_where_little_memory_may_be_registered() {
    for collective in ["all_reduce", "broadcast", "all_to_all", "exscan", "send_recv"] {
        is_right(PORT, collective, "2", &[NARROW]);
    }
    is_right(PORT, "all_reduce", "3", &[NARROW]);
    // Pieces of 1,000 bytes: none is as large as the window's places.
    is_right(&SMALL.replace("4096", "1000"), "all_reduce", "2", &[NARROW]);
}

#[test]
fn completions_that_are_late_change_nothing() {
    for seed in ["1", "2", "3"] {
        let late = [("ALLSTREAM_TEST_VERBS_DELAY_US", "300"), ("ALLSTREAM_TEST_VERBS_SEED", seed)];
        is_right(PORT, "all_reduce", "3", &late);
        is_right(PORT, "all_reduce", "2", &[&late[..], &[NARROW]].concat());
    }
}

#[test]
fn what_a_device_refuses_is_told_on_all_ranks_with_the_call() {
    for (fails, part) in [
        ("ibv_alloc_pd:1:12", "test_0 port 1 cannot be used: ibv_alloc_pd: Cannot allocate memory"),
        (
            "ibv_create_cq:1:12",
            "open a link over RDMA on test_0 port 1 (127.0.0.1): ibv_create_cq: Cannot allocate memory",
        ),
        (
            "ibv_create_comp_channel:1:24",
            "open a link over RDMA on test_0 port 1 (127.0.0.1): ibv_create_comp_channel: Too many open files",
        ),
        ("ibv_modify_qp:2:22", "ibv_modify_qp: Invalid argument"),
        (
            "ibv_reg_mr:1:12",
            "of memory with a network card: ibv_reg_mr: Cannot allocate memory (os error 12); 0 bytes are registered; if locked",
        ),
    ] {
        let job = two_ranks("4K");
        let variables = [("ALLSTREAM_TEST_VERBS_FAIL", fails), ("ALLSTREAM_LINK", "rdma")];
        let (went_well, said) = on_host(library().to_str().unwrap(), PORT, &variables, &job);
        assert!(!went_well, "{fails}: {said}");
        says_on_both(&said, part);
    }
}

#[test]
fn requests_that_never_come_back_end_with_the_deadline() {
    let job = two_ranks("1M");
    let variables =
        [("ALLSTREAM_TEST_VERBS_STALL", "40"), ("ALLSTREAM_TIMEOUT", "2"), ("ALLSTREAM_LINK", "rdma")];
    let (went_well, said) = on_host(library().to_str().unwrap(), PORT, &variables, &job);
    assert!(!went_well && said.contains("timed out after 2s"), "{said}");
}

#[track_caller]
fn says_on_both(said: &str, part: &str) {
    for rank in 0..2 {
        let begin = format!("[{rank}] allstream: ");
        let tells = |line: &str| line.starts_with(&begin) && line.contains(part);
        assert!(said.lines().any(tells), "rank {rank} does not say `{part}`: {said}");
    }
}

#[test]
fn a_world_over_rdma_whose_ranks_have_none_does_not_form_and_all_say_why() {
    let here = library().to_str().unwrap();
    for (file, variable, parts) in [
        (
            "/nowhere/libibverbs.so.1",
            None,
            &["looked for /nowhere/libibverbs.so.1", "install libibverbs"][..],
        ),
        (here, Some(("ALLSTREAM_RDMA_TC", "300")), &["ALLSTREAM_RDMA_TC is `300`", "from 0 to 255"]),
        (here, Some(("ALLSTREAM_RDMA_DEVICE", "mlx5_9")), &["there is no device mlx5_9 here"]),
    ] {
        let job = two_ranks("8");
        let variables: Vec<_> = variable.into_iter().chain([("ALLSTREAM_LINK", "rdma")]).collect();
        let (went_well, said) = on_host(file, CARDS, &variables, &job);
        assert!(!went_well, "{said}");
        parts.iter().for_each(|part| says_on_both(&said, part));
    }
}

/// Four ranks on two hosts that this library pretends, which all_reduce by whatever link joins them. `host` is what each host has; in it and in `set`, which a
/// shell runs before, `$h` is the number of the host.
pub(crate) fn two_hosts(host: &str, set: &str) -> (bool, String) {
    let rank = format!(
        "h=$((RANK / 2)); export ALLSTREAM_HOST_ID=host$h-$MASTER_PORT; {set} exec '{}' perf all_reduce --sizes 8,4K,300K -n 3 -w 1",
        env!("CARGO_BIN_EXE_allstream")
    );
    let job = ["run", "-n", "4", "--", "sh", "-c", rank.as_str()];
    on_host(library().to_str().unwrap(), host, &[("ALLSTREAM_LINK", "")], &job)
}

#[track_caller]
pub(crate) fn goes_over(ran: (bool, String), links: &str) -> String {
    let (went_well, said) = ran;
    let wanted = format!("link auto ({links}), ");
    assert!(
        went_well && said.contains("# Out of bounds values : 0 OK") && said.contains(&wanted),
        "{wanted}: {said}"
    );
    said
}

#[test]
fn hosts_that_all_have_a_port_talk_by_rdma_without_being_asked_to() {
    let said = goes_over(two_hosts(PORT, ""), "shm, rdma");
    assert!(!said.contains("WARN"), "{said}");
    // Messages that differ: the port that takes large ones sends to the other in small ones, and has fewer slots.
    let cut = r#"export ALLSTREAM_TEST_VERBS="$(echo "$ALLSTREAM_TEST_VERBS" | sed "s/\"name\": \"test_0\", \"ports\": \[{/&\"max_message\": $((65536 >> (h * 3))), /")";"#;
    goes_over(two_hosts(PORT, cut), "shm, rdma");
    // Packets that differ are told, and the smaller are used.
    let small = r#"export ALLSTREAM_TEST_VERBS="$(echo "$ALLSTREAM_TEST_VERBS" | sed "s/\"name\": \"test_0\", \"ports\": \[{/&\"mtu\": $((1024 << h)), /")";"#;
    let said = goes_over(two_hosts(PORT, small), "shm, rdma");
    assert!(
        said.contains("carry 1024 bytes at rank 0 on host") && said.contains("and 2048 at rank 2 on host"),
        "{said}"
    );
}

#[test]
fn where_a_host_has_no_port_hosts_talk_by_tcp_and_say_why() {
    let lacks = format!("[ $h = 0 ] || export {LIBRARY}=/nowhere/libibverbs.so.1;");
    let said = goes_over(two_hosts(PORT, &lacks), "shm, tcp");
    for part in [
        "hosts talk by TCP and not by RDMA: rank 0 on host ",
        " has test_0 port 1 active, RoCE v2, GID 1 ",
        ", and rank 2 on host ",
        " has no port to use: ",
        "looked for /nowhere/libibverbs.so.1",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // Told once, by rank 0.
    assert_eq!(said.matches("hosts talk by TCP and not by RDMA").count(), 1, "{said}");
    // Nobody has any: nothing to speak of. But who names a device is told that there is none.
    let said = goes_over(two_hosts("{}", ""), "shm, tcp");
    assert!(!said.contains("RDMA"), "{said}");
    let said = goes_over(two_hosts("{}", "export ALLSTREAM_RDMA_DEVICE=mlx5_9;"), "shm, tcp");
    assert!(said.contains("there is no device mlx5_9 here"), "{said}");
}

#[test]
fn hosts_between_which_no_message_gets_through_talk_by_tcp_and_say_why() {
    for (knob, part) in [
        ("STALL=1", "between rank 0 and rank 2: rank 0: no message came from the other end within 3.02s"),
        ("FAIL=ibv_create_qp:1:12,ibv_create_qp:2:12", "between rank 0 and rank 2: rank 2: "),
        ("FAIL=ibv_modify_qp:2:22", "rank 2: connect test_0 port 1"),
        ("FAIL=ibv_alloc_pd:1:12", "test_0 port 1 cannot be used: ibv_alloc_pd: Cannot allocate memory"),
    ] {
        // At one rank only: all have to come to the same choice.
        let set = format!("[ $RANK != 2 ] || export ALLSTREAM_TEST_VERBS_{knob};");
        let said = goes_over(two_hosts(PORT, &set), "shm, tcp");
        assert!(
            said.contains("hosts talk by TCP and not by RDMA: ") && said.contains(part),
            "{part}: {said}"
        );
    }
}

#[test]
fn a_variable_that_cannot_be_understood_is_told_also_where_rdma_is_only_a_choice() {
    let (went_well, said) = two_hosts("{}", "export ALLSTREAM_RDMA_TC=300;");
    assert!(!went_well && said.contains("ALLSTREAM_RDMA_TC is `300`"), "{said}");
}

/// Set where rank 1 is to die in the middle of an operation.
const DIES: &str = "ALLSTREAM_TEST_DIES";

/// What ranks do that other tests start: they talk by RDMA, end, in peace or not, and see that nothing stays pinned.
#[test]
#[ignore = "a rank; started by other tests"]
fn a_rank_over_rdma() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut comm = Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap();
        let (rank, dies) = (comm.rank(), std::env::var_os(DIES).is_some());
        let mut failed = None;
        for _ in 0..10 {
            match comm.all_reduce(vec![1f32; 100_000]).await {
                Ok(sum) => assert!(sum.iter().all(|x| *x == comm.size() as f32)),
                // Rank 1 has its result, and may die, before another rank has its own.
                Err(early) if dies => failed = failed.or(Some(early)),
                Err(failed) => panic!("{failed}"),
            }
        }
        let pinned = comm.stats().registered_bytes;
        match std::env::var(NARROW.0) {
            // Staging slots, and 4 KB at the sending end of a link and 12 at the receiving one.
            Ok(_) => assert_eq!(pinned, (4 << 20) + (comm.size() - 1) * (16 << 10), "{:?}", comm.stats()),
            Err(_) => assert!(pinned > 5 << 20, "{:?}", comm.stats()),
        }
        let mut lent = comm.alloc::<f32>(1 << 20).unwrap();
        lent.fill(1.0);
        let lent = comm.all_reduce(lent).await;
        // A buffer from `alloc` is registered from its first use until it is dropped.
        let more = comm.stats().registered_bytes - pinned;
        assert!(dies || more == 4 << 20, "{more} bytes for a buffer of 4 MiB");
        drop(lent);
        assert_eq!(comm.stats().registered_bytes, pinned);
        if dies {
            let failed = loop {
                if let Some(failed) = failed {
                    break failed;
                }
                let work = comm.all_reduce(vec![1f32; 1 << 20]);
                if rank == 1 {
                    kill_process(getpid(), Signal::KILL).unwrap();
                }
                failed = work.await.err();
            };
            println!("{}, its buffer came back: {}", failed.error, failed.buf.is_some());
            drop(comm);
        } else {
            comm.close().await.unwrap();
        }
    });
    nothing_stays_pinned();
}

fn nothing_stays_pinned() {
    let end = Instant::now() + Duration::from_secs(20);
    while Comm::local(1).unwrap()[0].stats().registered_bytes > 0 {
        assert!(Instant::now() < end, "memory stays pinned");
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("nothing is pinned");
}

fn ranks_over_rdma(ranks: &str, variables: &[(&str, &str)]) -> String {
    let program = std::env::current_exe().unwrap();
    let rank = ["--exact", "rdma::a_rank_over_rdma", "--ignored", "--nocapture"];
    let job = ["run", "-n", ranks, "--on-failure", "keep", "--", program.to_str().unwrap()];
    let variables = [&[("ALLSTREAM_LINK", "rdma")], variables].concat();
    on_host(library().to_str().unwrap(), PORT, &variables, &[&job[..], &rank[..]].concat()).1
}

#[test]
fn after_close_nothing_is_pinned() {
    for variables in [&[][..], &[NARROW]] {
        let said = ranks_over_rdma("2", variables);
        assert_eq!(said.matches("nothing is pinned").count(), 2, "{said}");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_survivors_whose_buffers_come_back() {
    for variables in [&[(DIES, "1")][..], &[(DIES, "1"), NARROW]] {
        let said = ranks_over_rdma("3", variables);
        for rank in [0, 2] {
            let begin = format!("[{rank}] rank 1 was lost (its connection ended without a goodbye)");
            let tells = |line: &str| line.starts_with(&begin) && line.ends_with("its buffer came back: true");
            assert!(said.lines().any(tells), "{said}");
        }
        assert_eq!(said.matches("nothing is pinned").count(), 2, "{said}");
    }
}

/// What two ranks do that another test starts: rank 1 leaves, and does not read what rank 0 sends it.
#[test]
#[ignore = "a rank; started by another test"]
fn a_rank_whose_peer_does_not_read() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut comm = Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap();
        let grads = comm.broadcast(vec![1f32; 1 << 14], 0).await.unwrap();
        comm.barrier().await.unwrap();
        if comm.rank() == 0 {
            let failed = comm.broadcast(grads, 0).await.unwrap_err();
            println!("{}, its buffer came back: {}", failed.error, failed.buf.is_some());
        }
        let _ = comm.close().await;
    });
    nothing_stays_pinned();
}

/// A large frame goes over a narrow link only as the peer reads: an operation is not over before that, and ends when the peer leaves.
#[test]
fn over_a_narrow_link_a_rank_hears_that_its_peer_left_without_reading() {
    let program = std::env::current_exe().unwrap();
    let rank = ["--exact", "rdma::a_rank_whose_peer_does_not_read", "--ignored", "--nocapture"];
    let job = ["run", "-n", "2", "--on-failure", "keep", "--", program.to_str().unwrap()];
    let variables = [("ALLSTREAM_LINK", "rdma"), NARROW];
    let arguments = [&job[..], &rank[..]].concat();
    let said = on_host(library().to_str().unwrap(), PORT, &variables, &arguments).1;
    let tells =
        |line: &str| line.starts_with("[0] rank 1 was lost") && line.ends_with("its buffer came back: true");
    assert!(said.lines().any(tells), "{said}");
    assert_eq!(said.matches("nothing is pinned").count(), 2, "{said}");
}

/// How many groups the ranks of another test make, and how many they make and leave one after another.
const GROUPS: &str = "ALLSTREAM_TEST_GROUPS";

/// What ranks do that another test starts: they have many groups at a time, then many one after another, and say what is pinned.
#[test]
#[ignore = "a rank; started by another test"]
fn a_rank_of_many_groups() {
    let count: usize = std::env::var(GROUPS).unwrap().parse().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut world = Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap();
        let (rank, size) = (world.rank(), world.size());
        let mut groups = Vec::new();
        for _ in 0..count {
            let mut group = world.split(0, rank as i64).await.unwrap();
            // 64 KB to each other rank: by all links, and in pieces over the narrow ones.
            let all = group.all_to_all(vec![rank as u32; size << 14]).await.unwrap();
            assert!(
                (0..size).all(|from| all[from << 14..(from + 1) << 14].iter().all(|x| *x == from as u32))
            );
            groups.push(group);
        }
        println!("pinned with all: {}", world.stats().registered_bytes);
        drop(groups);
        for _ in 0..10 * count {
            let mut group = world.split(0, rank as i64).await.unwrap();
            group.all_reduce(vec![1f32; 64]).await.unwrap();
        }
        println!("pinned after many: {}", world.stats().registered_bytes);
        world.close().await.unwrap();
    });
    nothing_stays_pinned();
}

/// The most that a rank says to have pinned.
fn pinned(said: &str, when: &str) -> usize {
    let of = |line: &str| line.split_once(when)?.1.trim().parse::<usize>().ok();
    let all: Vec<usize> = said.lines().filter_map(of).collect();
    assert!(!all.is_empty(), "{said}");
    println!("{when} {all:?}");
    all.into_iter().max().unwrap()
}

/// Memory for what peers send is bounded; beyond that each link pins 16 KB.
#[test]
fn many_groups_pin_little_each() {
    let (ranks, groups, most) = test_support::times((4, 12, 4), (8, 10, 8), (8, 100, 40));
    let program = std::env::current_exe().unwrap();
    let rank = ["--exact", "rdma::a_rank_of_many_groups", "--ignored", "--nocapture"];
    let (ranks_text, groups_text, most_text) = (ranks.to_string(), groups.to_string(), most.to_string());
    let job = ["run", "-n", &ranks_text, "--", program.to_str().unwrap()];
    let variables = [
        ("ALLSTREAM_LINK", "rdma"),
        (GROUPS, &groups_text),
        (NARROW.0, &most_text),
        ("ALLSTREAM_TIMEOUT", "60"),
    ];
    let (went_well, said) =
        on_host(library().to_str().unwrap(), PORT, &variables, &[&job[..], &rank[..]].concat());
    assert!(went_well, "{said}");
    // A group that was left is kept for the next one of the same ranks. The last link that gets slots may have a megabyte.
    let bound = (5 << 20) + (most << 20) + (ranks - 1) * (groups + 1) * (16 << 10);
    let (with_all, after) = (pinned(&said, "pinned with all:"), pinned(&said, "pinned after many:"));
    assert!(
        with_all > most << 20 && with_all < bound && bound < 64 << 20,
        "{with_all} bytes, expected {bound} at most"
    );
    assert!(after <= with_all, "{after} bytes after {} groups, {with_all} before", 10 * groups);
    assert_eq!(said.matches("nothing is pinned").count(), ranks, "{said}");
}
