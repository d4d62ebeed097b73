//! What can be seen of a rank from outside while it works: whether an operation is over, and what it has done last.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use allstream::Comm;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn whether_an_operation_is_over_is_known_without_waiting_for_it() {
    let called = Barrier::new(2);
    std::thread::scope(|scope| {
        for (rank, mut comm) in Comm::local(2).unwrap().into_iter().enumerate() {
            let called = &called;
            scope.spawn(move || {
                if rank == 1 {
                    called.wait();
                }
                let work = comm.all_reduce(vec![1u32; 1000]);
                if rank == 0 {
                    assert!(!work.is_finished(), "the other rank has not called");
                    called.wait();
                }
                let end = Instant::now() + LIMIT;
                while !work.is_finished() {
                    assert!(Instant::now() < end, "both have called");
                }
                assert_eq!(work.wait().unwrap(), vec![2; 1000]);
                let refused = comm.broadcast(vec![1u8], 9);
                assert!(refused.is_finished() && refused.wait().is_err());
            });
        }
    });
}

#[test]
fn a_record_tells_of_collectives_and_messages_and_stops_nothing() {
    let read = Barrier::new(2);
    std::thread::scope(|scope| {
        for (rank, mut comm) in Comm::local(2).unwrap().into_iter().enumerate() {
            let read = &read;
            scope.spawn(move || {
                comm.all_reduce(vec![1f32; 250]).wait().unwrap();
                if rank == 1 {
                    read.wait();
                    comm.tag(7).send(vec![1u16; 3000], 0).wait().unwrap();
                    return;
                }
                comm.tag(5).send(vec![1u8], 0).wait().unwrap();
                comm.tag(5).recv(vec![0u8], 0).wait().unwrap();
                let waits = comm.tag(7).recv(vec![0u16; 3000], 1);
                let path = comm.record().unwrap();
                let file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                std::fs::remove_file(path).unwrap();
                let world = &file["comms"][0];
                let call = &world["operations"][0];
                assert_eq!(
                    (&call["collective"], &call["bytes"], &call["state"]),
                    (&"all_reduce".into(), &1000.into(), &"done".into())
                );
                assert!(call["finished_us"].as_f64() >= call["submitted_us"].as_f64(), "{call}");
                let messages: Vec<_> = world["messages"].as_array().unwrap().iter().collect();
                let said = |m: &Value| {
                    (m["direction"].clone(), m["peer"].clone(), m["tag"].clone(), m["finished_us"].is_null())
                };
                let expected = [("send", 0, 5, false), ("recv", 0, 5, false), ("recv", 1, 7, true)];
                let expected = expected
                    .map(|(direction, peer, tag, waits)| (direction.into(), peer.into(), tag.into(), waits));
                assert_eq!(messages.into_iter().map(said).collect::<Vec<_>>(), expected);
                read.wait();
                assert_eq!(waits.wait().unwrap(), vec![1; 3000]);
            });
        }
    });
}
