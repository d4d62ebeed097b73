//! What can be seen of a rank from outside while it works: whether an operation is over, and what it has done last.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use allstream::{Comm, Error};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(30);

/// A rank, and another one that calls an all_reduce when it is told to.
fn with_a_late_rank() -> (Comm, Sender<()>, JoinHandle<Vec<u32>>) {
    let mut comms = Comm::local(2).unwrap();
    let (mut second, first) = (comms.pop().unwrap(), comms.pop().unwrap());
    let (tell, told) = channel::<()>();
    let other = std::thread::spawn(move || {
        told.recv_timeout(LIMIT).unwrap();
        second.all_reduce(vec![1u32; 1000]).wait().unwrap()
    });
    (first, tell, other)
}

#[test]
fn whether_an_operation_is_over_is_known_without_waiting_for_it() {
    let (mut first, tell, other) = with_a_late_rank();
    let work = first.all_reduce(vec![1u32; 1000]);
    assert!(!work.is_finished(), "the other rank has not called");
    tell.send(()).unwrap();
    let end = Instant::now() + LIMIT;
    while !work.is_finished() {
        assert!(Instant::now() < end, "both have called");
    }
    assert_eq!((work.wait().unwrap(), other.join().unwrap()), (vec![2; 1000], vec![2; 1000]));
    let refused = first.broadcast(vec![1u8], 9);
    assert!(refused.is_finished() && refused.wait().is_err());
}

#[test]
fn who_waits_for_a_while_gets_the_work_back_and_can_wait_again() {
    let (mut first, tell, other) = with_a_late_rank();
    let mut work = first.all_reduce(vec![1u32; 1000]);
    for most in [Duration::ZERO, Duration::from_millis(5)] {
        work = work.wait_for(most).expect_err("the other rank has not called");
    }
    tell.send(()).unwrap();
    let sum = work.wait_for(LIMIT).expect("both have called").unwrap();
    assert_eq!((sum, other.join().unwrap()), (vec![2; 1000], vec![2; 1000]));
    let refused = first.broadcast(vec![1u8], 9).wait_for(Duration::ZERO).expect("it was refused at once");
    assert!(refused.is_err());
    let failed =
        first.timeout(Duration::from_millis(50)).barrier().wait_for(LIMIT).expect("its deadline has passed");
    assert!(matches!(failed.unwrap_err().error, Error::Timeout { .. } | Error::PeerLost { .. }));
}

#[test]
fn a_record_tells_of_collectives_and_messages_and_stops_nothing() {
    let mut comms = Comm::local(2).unwrap();
    let (mut second, mut comm) = (comms.pop().unwrap(), comms.pop().unwrap());
    let (tell, told) = channel::<()>();
    let other = std::thread::spawn(move || {
        second.all_reduce(vec![1f32; 250]).wait().unwrap();
        second.tag(5).recv(vec![0u8], 0).wait().unwrap();
        told.recv_timeout(LIMIT).unwrap();
        second.tag(7).send(vec![1u16; 3000], 0).wait().unwrap();
    });
    comm.all_reduce(vec![1f32; 250]).wait().unwrap();
    // Short enough to be sent before it is received.
    comm.tag(5).send(vec![1u8], 1).wait().unwrap();
    let waits = comm.tag(7).recv(vec![0u16; 3000], 1);
    let path = comm.record().unwrap();
    let file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    std::fs::remove_file(path).unwrap();
    let world = &file["comms"][0];
    let call = &world["operations"][0];
    let said = (call["collective"].as_str(), call["bytes"].as_u64(), call["state"].as_str());
    assert_eq!(said, (Some("all_reduce"), Some(1000), Some("done")), "{call}");
    assert!(call["finished_us"].as_f64() >= call["submitted_us"].as_f64(), "{call}");
    let message = |m: &Value| {
        let direction = m["direction"].as_str().unwrap().to_owned();
        (direction, m["peer"].as_u64(), m["tag"].as_u64(), m["finished_us"].is_null())
    };
    let messages: Vec<_> = world["messages"].as_array().unwrap().iter().map(message).collect();
    let expected = [("send", 1, 5, false), ("recv", 1, 7, true)];
    let expected =
        expected.map(|(direction, peer, tag, waits)| (direction.to_owned(), Some(peer), Some(tag), waits));
    assert_eq!(messages, expected);
    tell.send(()).unwrap();
    assert_eq!(waits.wait().unwrap(), vec![1; 3000]);
    other.join().unwrap();
}
