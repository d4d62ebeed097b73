//! Strangers that connect to a rank's listening sockets disturb no rank.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use allstream::{Comm, Error, Rendezvous};
use serde_json::json;

use crate::harness::{self, Link, Me, Plan, among_others, say};

const SIZE: usize = 3;

/// Makes all_reduces until the test creates the file `enough`.
pub(crate) async fn rank(me: Me) {
    let mut comm = me.connect().await;
    say("ready", json!({}));
    let enough = std::path::PathBuf::from(std::env::var("ALLSTREAM_TRACE_DIR").unwrap()).join("enough");
    let (mut rounds, mut longest) = (0u64, Duration::ZERO);
    loop {
        let begun = Instant::now();
        let sum =
            comm.timeout(Duration::from_secs(5)).all_reduce(vec![rounds as f32 + me.rank as f32; 64 << 10]);
        let sum = sum.await.unwrap();
        longest = longest.max(begun.elapsed());
        let expected = (SIZE as u64 * rounds + 3) as f32;
        assert!(sum.iter().all(|x| *x == expected), "round {rounds}: {} instead of {expected}", sum[0]);
        rounds = (rounds + 1) % 1000;
        // Rank 0 decides for all, so that all make the same calls.
        let stop = if me.rank == 0 { u8::from(enough.exists()) } else { 0 };
        if comm.broadcast(vec![stop], 0).await.unwrap()[0] == 1 {
            break;
        }
    }
    say("well", json!({ "longest_ms": longest.as_millis() as u64 }));
    comm.close().await.unwrap();
}

/// The addresses at which a process listens for TCP: found by comparing its descriptors with the system's table of sockets.
fn listeners(pid: i32) -> Vec<SocketAddr> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let inode = |e: std::fs::DirEntry| {
        let target = std::fs::read_link(e.path()).ok()?.to_string_lossy().into_owned();
        Some(target.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    let inodes: Vec<String> = links.filter_map(inode).collect();
    let mut found = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<_> = line.split_whitespace().collect();
            // 0A: listening.
            if fields.get(3) != Some(&"0A") || !inodes.iter().any(|i| fields.get(9) == Some(&i.as_str())) {
                continue;
            }
            let port = fields[1].rsplit_once(':').and_then(|(_, p)| u16::from_str_radix(p, 16).ok()).unwrap();
            found.push(SocketAddr::from(([127, 0, 0, 1], port)));
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Connects and sends `bytes`. Returns how many bytes the first answer has; 0 if the connection closes or 200 ms pass without one.
fn knock(at: SocketAddr, bytes: &[u8]) -> std::io::Result<usize> {
    let mut stream = TcpStream::connect_timeout(&at, Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    let _ = stream.write_all(bytes);
    let mut answer = [0; 512];
    Ok(stream.read(&mut answer).unwrap_or(0))
}

/// Asks to join as rank 1 with a wrong token, and expects a refusal.
fn guess(door: SocketAddr) {
    let begun = Instant::now();
    let place = Rendezvous::tcp(&format!("tcp://{door}"), 1, SIZE).unwrap().token("guessed");
    let error = harness::block_on(Comm::connect(place.timeout(Duration::from_secs(3)))).unwrap_err();
    assert!(matches!(error, Error::Refused { .. } | Error::Rendezvous { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    println!("  at {door} after {:?}: {error}", begun.elapsed());
}

#[test]
fn garbage_and_wrong_tokens_disturb_nothing() {
    let _turn = among_others();
    for link in [Link::Tcp, Link::Shm] {
        let job = Plan::new("loops", SIZE, link).start();
        job.ranks.iter().for_each(|r| drop(r.hear("ready")));
        let doors: Vec<Vec<SocketAddr>> = job.pids().into_iter().map(listeners).collect();
        println!("{link:?}: listening at {doors:?}");
        assert!(doors.iter().all(|d| !d.is_empty()), "{doors:?}");
        let garbage: [&[u8]; 5] = [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            &[0xff; 4096],
            &[0; 4096],
            b"\xff\xff\xff\x7f{\"Heartbeat\":null}",
        ];
        let mut idle = Vec::new();
        for &door in doors.iter().flatten() {
            for bytes in garbage {
                knock(door, bytes).unwrap();
            }
            // Some connections that send nothing and stay open.
            idle.extend((0..20).filter_map(|_| TcpStream::connect(door).ok()));
        }
        // And at each address, all at once, a stranger that speaks the protocol but does not know the token.
        let guesses: Vec<_> =
            doors.iter().flatten().map(|&door| std::thread::spawn(move || guess(door))).collect();
        guesses.into_iter().for_each(|guess| guess.join().unwrap());
        std::fs::write(job.traces.0.join("enough"), "").unwrap();
        for rank in &job.ranks {
            let said = rank.hear("well");
            println!("  rank {}: longest all_reduce {} ms", rank.rank, said["longest_ms"]);
        }
        drop(idle);
        job.finish();
    }
}
