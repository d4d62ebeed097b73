//! Nodes: several ranks in each of several processes, called together. Every collective is compared with a sequential
//! reduction, with threads in place of processes and with real processes, over every link.

use std::time::{Duration, Instant};

use allstream::{Comm, Error, Failed, HostStream, LinkChoice, Lost, Node, ReduceOp, Rendezvous};
use futures::executor::block_on;

use crate::support;
use crate::support::node::{self, connect, every_call, local_nodes, play};

/// For all that one node does in a test.
const LIMIT: Duration = Duration::from_secs(120);
/// For one call.
const CALL: Duration = Duration::from_secs(30);

/// (devices, processes).
const SHAPES: [(usize, usize); 8] = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (2, 3), (4, 3)];

#[test]
fn every_call_of_nodes_made_in_one_process() {
    for (k, p) in SHAPES {
        play(local_nodes(k, p), LIMIT, move |process, mut node| {
            assert_eq!(
                (node.process(), node.processes(), node.devices(), node.size()),
                (process, p, k, p * k)
            );
            every_call(&mut node);
            block_on(node.close()).unwrap();
        });
    }
}

#[test]
fn every_call_of_nodes_that_met_over_every_link() {
    for (i, (k, p)) in SHAPES.into_iter().enumerate() {
        // "hosts": each process says that it is on a host of its own: TCP between processes, the process's memory inside each.
        let links = ["inproc", "shm", "tcp", "hosts"];
        // All links for two processes of two devices; in the other shapes they take turns.
        let links = if (k, p) == (2, 2) || support::full() { &links[..] } else { &links[i % 4..][..1] };
        for link in links {
            play(connect(k, p, link), LIMIT, |_, mut node| {
                every_call(&mut node);
                block_on(node.close()).unwrap();
            });
        }
    }
}

const PROCESSES: [(&str, usize, usize); 7] = [
    ("auto", 2, 2),
    ("shm", 2, 2),
    ("tcp", 2, 2),
    ("hosts", 2, 2),
    ("auto", 4, 3),
    ("hosts", 2, 3),
    ("tcp", 4, 1),
];

/// Shared memory or TCP is between processes; the ranks inside a process lend each other their own memory, unless one link
/// is named for all.
#[test]
fn every_call_of_nodes_in_processes() {
    if support::role() {
        let devices = std::env::var("NODE_DEVICES").unwrap().parse().unwrap();
        let mut node = block_on(Node::connect(Rendezvous::from_env().unwrap(), devices)).unwrap();
        every_call(&mut node);
        return block_on(node.close()).unwrap();
    }
    for (link, k, p) in PROCESSES {
        let envs = |process: usize| {
            let link = match link {
                "hosts" => ("ALLSTREAM_HOST_ID".into(), format!("host {process}")),
                link => ("ALLSTREAM_LINK".into(), link.to_owned()),
            };
            vec![
                link,
                ("NODE_DEVICES".into(), k.to_string()),
                ("ALLSTREAM_TIMEOUT".into(), "30".into()),
                ("NODE_TRACE".into(), "1".into()),
            ]
        };
        let ranks = support::spawn_ranks("node::every_call_of_nodes_in_processes", p, LIMIT, envs);
        for ended in ranks.wait(LIMIT) {
            assert!(ended.success(), "{link}, {p} x {k}, process {}: {ended:?}", ended.rank);
        }
    }
}

/// A process that dies takes all its ranks with it: the others name one of them, and have their buffers back.
#[test]
fn the_death_of_a_process_names_one_of_its_ranks() {
    if support::role() {
        let mut node = block_on(Node::connect(Rendezvous::from_env().unwrap(), 2)).unwrap();
        // Process 1 dies once it has a message from both others, which therefore have connected.
        if node.process() == 1 {
            for from in [(0, 0), (2, 0)] {
                node.recv(0, vec![0_u8], from).wait().unwrap();
            }
            std::process::exit(0);
        }
        drop(node.send(0, vec![1_u8], (1, 0)));
        let died = Instant::now();
        let failed = node.all_reduce([vec![1_u8; 100_000], vec![2; 100_000]]).wait().unwrap_err();
        assert!(died.elapsed() < Duration::from_secs(5), "{:?}", died.elapsed());
        match failed.error {
            Error::PeerLost { rank: 2 | 3, how: Lost::Died, .. } => {}
            other => panic!("{other}"),
        }
        for outcome in failed.buf.unwrap() {
            let Failed { buf, error } = outcome.unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 2 | 3, .. }), "{error}");
            assert_eq!(buf.unwrap().len(), 100_000);
        }
        assert!(node.check().is_err());
        return;
    }
    for link in ["auto", "tcp"] {
        let envs = |_| vec![("ALLSTREAM_LINK".into(), link.to_owned())];
        let ranks =
            support::spawn_ranks("node::the_death_of_a_process_names_one_of_its_ranks", 3, LIMIT, envs);
        for ended in ranks.wait(LIMIT) {
            assert!(ended.rank == 1 || ended.success(), "{link}: {ended:?}");
        }
    }
}

#[test]
fn processes_that_differ_in_their_devices_are_told_so() {
    let places = node::places(2, "auto");
    let both = places.into_iter().zip([2, 3]).map(|(place, k)| Node::connect(place, k));
    let begun = Instant::now();
    for result in block_on(futures::future::join_all(both)) {
        let error = result.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Rendezvous { .. }), "{text}");
        assert!(text.contains("must give the same number of devices"), "{text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn one_process_needs_no_address_and_no_secret_whatever_the_link() {
    for link in [LinkChoice::AUTO, LinkChoice::SHM, LinkChoice::TCP, LinkChoice::INPROC] {
        let mut node = block_on(Node::connect(Rendezvous::alone().link(link), 3)).unwrap();
        let sums = node.timeout(CALL).all_reduce(vec![vec![1_i32; 1000], vec![2; 1000], vec![4; 1000]]);
        assert_eq!(sums.wait().unwrap(), vec![vec![7; 1000]; 3], "{link:?}");
        block_on(node.close()).unwrap();
    }
    let error = block_on(Node::connect(Rendezvous::alone(), 0)).unwrap_err();
    assert!(error.to_string().contains("at least one device"), "{error}");
}

#[test]
fn arrays_come_back_as_arrays() {
    play(local_nodes(2, 2), LIMIT, |process, mut node| {
        let ranks = [2 * process as i64, 2 * process as i64 + 1];
        let [a, b] = node.timeout(CALL).all_reduce(ranks.map(|r| vec![r; 3])).wait().unwrap();
        assert_eq!((a, b), (vec![6; 3], vec![6; 3]));
        let [(i, o), _] = node.all_reduce_into(ranks.map(|r| (vec![r; 3], vec![0; 3]))).wait().unwrap();
        assert_eq!((i, o), (vec![ranks[0]; 3], vec![6; 3]));
        let [a, b] = block_on(node.op(ReduceOp::Max).all_reduce_new(ranks.map(|r| vec![r]))).unwrap();
        assert_eq!((a, b), (vec![3], vec![3]));
    });
}

/// The result of a call in place on vectors.
type Back = Result<Vec<Vec<i32>>, Failed<Vec<Result<Vec<i32>, Failed<Vec<i32>>>>>>;

#[test]
fn an_invalid_call_submits_nothing_and_gives_all_buffers_back() {
    play(local_nodes(2, 2), LIMIT, |_, mut node| {
        let refused = |result: Back, words: &str, bufs: &[Vec<i32>]| {
            let Failed { buf, error } = result.unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(words), "{error}");
            let back: Vec<_> = buf.unwrap().into_iter().map(|o| o.unwrap_err().buf.unwrap()).collect();
            assert_eq!(back, bufs, "{words}");
        };
        let three = vec![vec![1], vec![2], vec![3]];
        let result = node.all_reduce(three.clone()).wait();
        refused(result, "3 buffers for a node of 2 devices", &three);
        // Only the second device's part is wrong.
        let uneven = vec![vec![0; 8], vec![0; 7]];
        let result = node.reduce_scatter_in_place(uneven.clone()).wait();
        refused(result, "device 1: the buffer has 7 elements", &uneven);
        let two = vec![vec![1], vec![2]];
        for root in [(2, 0), (0, 2)] {
            refused(node.broadcast(two.clone(), root).wait(), "is not among 2 processes of 2 devices", &two);
        }
        let stream = HostStream::new("the only one").unwrap();
        refused(node.on([&stream]).all_reduce(two.clone()).wait(), "1 streams for a node of 2 devices", &two);
        for (device, peer, words) in [
            (2, (0, 0), "device 2"),
            (0, (0, 2), "(process 0, device 2)"),
            (0, (5, 0), "(process 5, device 0)"),
        ] {
            let Failed { buf, error } = node.send(device, vec![1], peer).wait().unwrap_err();
            assert!(buf == Some(vec![1]) && error.to_string().contains(words), "{error}");
            assert!(node.recv(device, vec![1], peer).wait().is_err());
        }
        assert!(node.comm(2).is_err() && node.stream(2).is_err());
        // None of these calls was submitted: the next call matches the next call of the others.
        let sums = node.timeout(CALL).all_reduce(vec![vec![1], vec![1]]).wait().unwrap();
        assert_eq!(sums, [[4], [4]]);
        block_on(node.close()).unwrap();
    });
}

#[test]
fn devices_that_disagree_are_an_error_on_all_ranks() {
    play(local_nodes(2, 2), LIMIT, |process, mut node| {
        let second = if process == 0 { 4 } else { 3 };
        let work = node.timeout(CALL).all_reduce([vec![1; 3], vec![1; second]]);
        let failed = work.wait().unwrap_err();
        assert!(matches!(failed.error, Error::Mismatch { .. }), "{}", failed.error);
        let lengths = failed.buf.unwrap().map(|outcome| outcome.unwrap_err().buf.unwrap().len());
        assert_eq!(lengths, [3, second]);
        assert!(matches!(node.check(), Err(Error::Mismatch { .. })));
        // A dead group refuses before anything is submitted.
        assert!(matches!(node.barrier().wait(), Err(Failed { error: Error::Mismatch { .. }, .. })));
    });
}

#[test]
fn a_node_is_made_of_neighbours_of_one_group() {
    let refused = |comms: Vec<Comm>, words: &str| {
        let error = Node::from_comms(comms).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(words), "{error}");
    };
    refused(Vec::new(), "at least one device");
    let mut comms = Comm::local(4).unwrap();
    comms.swap(0, 1);
    refused(comms.drain(..2).collect(), "from rank 1 of 4");
    assert_eq!(Node::from_comms(comms).unwrap().process(), 1);
    let mut comms = Comm::local(4).unwrap();
    comms.remove(1);
    refused(comms.drain(..2).collect(), "expected rank 1 of the group of device 0");
    let mut comms = Comm::local(3).unwrap();
    refused(comms.drain(..2).collect(), "multiples of 2");
    let (mut a, mut b) = (Comm::local(2).unwrap(), Comm::local(2).unwrap());
    refused(vec![a.remove(0), b.remove(1)], "expected rank 1 of the group of device 0");
}

#[test]
fn one_thread_runs_several_nodes_as_tasks() {
    let nodes = local_nodes(2, 3);
    let step = |mut node: Node| async move {
        let mut last = Vec::new();
        for round in 0..20 {
            let mine =
                (0..2).map(|device| vec![(node.process() * 2 + device) as u64 + round; 5000]).collect();
            let work: allstream::NodeWork<Vec<Vec<u64>>> = node.timeout(CALL).all_reduce(mine);
            let mean = node.barrier();
            last = work.await.unwrap();
            mean.await.unwrap();
        }
        node.close().await.unwrap();
        last
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let all = runtime.block_on(async {
        tokio::time::timeout(LIMIT, futures::future::join_all(nodes.into_iter().map(step))).await.unwrap()
    });
    assert_eq!(all, vec![vec![vec![15 + 6 * 19; 5000]; 2]; 3]);
}

#[test]
fn a_work_let_go_runs_on_and_what_follows_is_right() {
    play(local_nodes(2, 2), LIMIT, |process, mut node| {
        let mine = || [vec![1_i64; 200_000], vec![2; 200_000]];
        for round in 0..20 {
            let work = node.timeout(CALL).all_reduce(mine());
            if (round + process) % 2 == 0 {
                drop(work);
            } else {
                assert_eq!(work.wait().unwrap(), [vec![6; 200_000], vec![6; 200_000]]);
            }
        }
        // Polled once, then let go.
        let mut work = node.all_reduce(mine());
        let _ = block_on(futures::future::poll_immediate(&mut work));
        drop(work);
        assert_eq!(node.all_reduce_new(mine()).wait().unwrap()[1], vec![6; 200_000]);
        block_on(node.close()).unwrap();
    });
}

/// On one thread, `wait` for one device must work on the other devices, too.
#[test]
fn devices_of_one_thread_send_to_each_other() {
    let mut node = Node::local(2).unwrap();
    let (there, back) = (vec![7_u32; 300_000], vec![8_u32; 300_000]);
    let sends = (node.send(0, there.clone(), (0, 1)), node.tag(3).send(1, back.clone(), (0, 0)));
    let recvs = (node.recv(1, vec![0_u32; 300_000], (0, 0)), node.tag(3).recv(0, vec![0; 300_000], (0, 1)));
    sends.0.wait().unwrap();
    sends.1.wait().unwrap();
    assert_eq!((recvs.0.wait().unwrap(), recvs.1.wait().unwrap()), (there, back));
    let alone = node.timeout(Duration::from_millis(300)).recv(0, vec![0_u32; 3], (0, 1)).wait().unwrap_err();
    assert!(matches!(alone.error, Error::Timeout { .. }), "{}", alone.error);
}

#[test]
fn each_device_is_in_order_with_its_stream() {
    play(local_nodes(2, 2), LIMIT, |_, mut node| {
        let (tell, told) = std::sync::mpsc::channel();
        for device in 0..2 {
            let tell = tell.clone();
            node.stream(device).unwrap().launch(move || {
                std::thread::sleep(Duration::from_millis(30 * (device as u64 + 1)));
                tell.send("computed").unwrap();
            });
        }
        let work = node.on_streams().timeout(CALL).all_reduce([vec![1.0_f32; 10], vec![2.0; 10]]);
        let [a, b] = work.join(node.streams()).unwrap();
        let each = move |sum: Vec<f32>| {
            tell.send("reduced").unwrap();
            sum.into_iter().map(|x| x / 4.0).collect::<Vec<f32>>()
        };
        let (first, second) = (each.clone(), each.clone());
        let a = a.launch(node.stream(0).unwrap(), first);
        let b = b.launch(node.stream(1).unwrap(), second);
        assert_eq!((a.wait().unwrap(), block_on(b).unwrap()), (vec![1.5; 10], vec![1.5; 10]));
        let order: Vec<&str> = told.try_iter().collect();
        assert_eq!(order, ["computed", "computed", "reduced", "reduced"]);

        // The user's own streams, one for each device; another number of streams is refused, and the results come back.
        let own = [HostStream::new("a").unwrap(), HostStream::new("b").unwrap()];
        let work = node.on(&own).all_reduce([vec![1], vec![1]]);
        let failed = work.join(&own[..1]).unwrap_err();
        assert!(failed.error.to_string().contains("1 streams for 2 devices"), "{}", failed.error);
        assert_eq!(failed.buf.unwrap().map(Result::unwrap), [vec![4], vec![4]]);
        block_on(node.close()).unwrap();
    });
}

#[test]
fn nodes_are_split_doubled_and_aborted_together() {
    play(local_nodes(2, 4), LIMIT, |process, mut node| {
        // Processes by parity, in reverse.
        let mut half = block_on(node.split(process as u64 % 2, -(process as i64))).unwrap();
        assert_eq!((half.processes(), half.devices(), half.process()), (2, 2, 1 - process / 2));
        let mine = [0, 1].map(|device| vec![node.rank_of(process, device).unwrap() as u64]);
        let gathered = half.timeout(CALL).all_gather(mine.clone()).wait().unwrap();
        let order: Vec<u64> =
            [4, 0].iter().flat_map(|r| [0, 1].map(|d| r + d + 2 * (process as u64 % 2))).collect();
        assert_eq!(gathered, [order.clone(), order]);
        // One group for each device number, over all processes.
        let mut rails = block_on(node.split_by(|device| (device as u64, 0))).unwrap();
        let works: Vec<_> = rails.iter_mut().map(|rail| rail.timeout(CALL).all_reduce(vec![1])).collect();
        assert!(works.into_iter().all(|work| work.wait().unwrap() == [4]));
        let mut twin = block_on(node.dup()).unwrap();
        if process == 3 {
            twin.abort("enough");
        }
        let failed = twin.timeout(CALL).all_reduce(mine).wait().unwrap_err();
        match failed.error {
            Error::Aborted { by: 6, reason, .. } => assert_eq!(reason, "enough"),
            other => panic!("{other}"),
        }
        drop(twin);
        // The others live.
        assert_eq!(half.timeout(CALL).barrier().wait().unwrap().len(), 2);
        node.timeout(CALL).barrier().wait().unwrap();
        assert!(node.stats().iter().all(|s| s.in_flight == 0) && node.check().is_ok());
        drop(half);
        block_on(node.close()).unwrap();
    });
}

/// A dropped rank waits a bounded time for the others' goodbyes: a node's ranks must wait together, not one after another.
#[test]
fn dropping_a_node_takes_no_longer_than_dropping_a_rank() {
    let nodes = connect(4, 2, "tcp");
    let begun = Instant::now();
    play(nodes, LIMIT, |_, mut node| {
        node.timeout(CALL).barrier().wait().unwrap();
    });
    assert!(begun.elapsed() < Duration::from_millis(1500), "{:?}", begun.elapsed());
}
