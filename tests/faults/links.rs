//! A data connection that breaks while both of its ranks live.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use allstream::{Comm, Error, MissingState};
use serde_json::json;

use crate::harness::{Link, Me, Plan, alone, error_of, say, say_error};

const SIZE: usize = 2;
/// Within how many seconds both ranks must know that a connection between them broke.
const KNOWN: f64 = 1.0;
/// The ways to break connections. With "message", a message is under way; otherwise all_reduces.
const WAYS: [&str; 4] = ["shut down", "reset", "reset in the middle", "shut down under a message"];

/// This process's sockets: each descriptor, with the link text (`socket:[inode]`) that tells it from a later socket with the same number.
fn sockets() -> Vec<(i32, String)> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let socket = |e: std::fs::DirEntry| {
        let what = std::fs::read_link(e.path()).ok()?.to_string_lossy().into_owned();
        Some((e.file_name().to_str()?.parse().ok()?, what)).filter(|(_, what)| what.starts_with("socket:"))
    };
    open.filter_map(socket).collect()
}

/// Breaks these connections of the engine, as a fault of the network would. Their descriptors stay open.
fn break_all(sockets: &[i32], reset: bool) {
    for &fd in sockets {
        // SAFETY: the engine closes its data connections only after it has noticed that one of them broke, which takes longer than this
        // loop. This thread does not close the descriptor, and uses it only in this pass of the loop.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        if reset {
            rustix::net::connect_unspec(fd).unwrap();
        } else {
            rustix::net::shutdown(fd, rustix::net::Shutdown::Both).unwrap();
        }
    }
}

/// A new communicator, and its data connections at this rank.
async fn with_connections(world: &mut Comm) -> (Comm, Vec<i32>) {
    let mut comm = world.dup().await.unwrap();
    world.barrier().await.unwrap();
    let before = sockets();
    // Neither rank opens the new communicator's connections before both have listed their sockets.
    world.barrier().await.unwrap();
    comm.barrier().await.unwrap();
    let peer = 1 - comm.rank();
    let (first, second) = (comm.send(vec![0u8], peer), comm.recv(vec![0u8], peer));
    first.await.unwrap();
    second.await.unwrap();
    // Now both ranks have opened all data connections, as both messages have arrived.
    world.barrier().await.unwrap();
    let data = sockets().into_iter().filter(|one| !before.contains(one)).map(|(fd, _)| fd).collect();
    (comm, data)
}

/// Makes calls until one fails, and returns its error.
async fn until_it_fails(comm: &mut Comm, way: &str) -> Error {
    loop {
        let rank = comm.rank();
        let patient = comm.timeout(Duration::from_secs(15));
        let end = match way {
            "shut down under a message" if rank == 1 => {
                patient.recv(vec![0u8; 1 << 20], 0).await.map(drop).map_err(Error::from)
            }
            "shut down under a message" => {
                patient.send(vec![1u8; 1 << 20], 1).await.map(drop).map_err(Error::from)
            }
            _ => patient.all_reduce(vec![1f32; 1 << 18]).await.map(drop).map_err(Error::from),
        };
        if let Err(error) = end {
            return error;
        }
    }
}

pub(crate) async fn breaks(me: Me) {
    let mut world = me.connect().await;
    for way in WAYS {
        let (mut comm, data) = with_connections(&mut world).await;
        if me.rank == 0 {
            // (Only rank 0 looks: on the other rank, rank 0 may have broken some by now, and the engine may have closed those.)
            assert!(data.len() >= 4, "each way, for collectives and for messages: {data:?}");
            let broken = data.clone();
            let break_now = move || {
                break_all(&broken, way.starts_with("reset"));
                say("broken", json!({ "way": way }));
            };
            if way.ends_with("middle") {
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(30));
                    break_now();
                });
            } else {
                break_now();
            }
        }
        let error = until_it_fails(&mut comm, way).await;
        say_error("told", &error, true);
        let later = Error::from(comm.barrier().await.unwrap_err());
        assert_eq!(later, error, "the first cause stays");
        drop(comm);
        world.barrier().await.unwrap();
    }
    world.close().await.unwrap();
    say("well", json!({}));
}

/// Rank 0 drops a communicator, which closes its connections, while rank 1 still makes a call on it.
pub(crate) async fn leaves_one(me: Me) {
    let mut world = me.connect().await;
    let (mut comm, _) = with_connections(&mut world).await;
    if me.rank == 0 {
        drop(comm);
    } else {
        let begun = Instant::now();
        let error = Error::from(comm.timeout(Duration::from_millis(300)).barrier().await.unwrap_err());
        assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}: {error}", begun.elapsed());
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert!(
            missing.iter().all(|m| matches!(m.state, MissingState::NotCalled(_) | MissingState::NoAnswer))
        );
        drop(comm);
    }
    world.barrier().await.unwrap();
    world.close().await.unwrap();
    say("well", json!({}));
}

#[test]
fn a_data_connection_that_breaks_between_living_ranks_is_an_error_on_both_at_once() {
    let _alone = alone();
    let job = Plan::new("breaks", SIZE, Link::Tcp).start();
    for way in WAYS {
        let broken = job.ranks[0].hear("broken")["t"].as_f64().unwrap();
        for rank in &job.ranks {
            let said = rank.hear("told");
            let after = said["t"].as_f64().unwrap() - broken;
            println!("{way}: rank {} after {:.0} ms: {}", rank.rank, after * 1e3, said["text"]);
            let error = error_of(&said);
            let text = error.to_string();
            assert!(text.contains("rank 0") && text.contains("rank 1") && text.contains("TCP"), "{text}");
            assert!(text.contains("127.0.0.1:"), "its ends: {text}");
            assert!(after < KNOWN, "{way}: rank {} was told after {after} s", rank.rank);
        }
    }
    job.ranks.iter().for_each(|r| drop(r.hear("well")));
    job.finish();
}

#[test]
fn connections_that_a_rank_closes_in_peace_are_not_called_broken() {
    let _alone = alone();
    let job = Plan::new("leaves_one", SIZE, Link::Tcp).env("ALLSTREAM_POOL", 0).start();
    job.ranks.iter().for_each(|r| drop(r.hear("well")));
    job.finish();
}
