//! Worlds of real processes: this test binary starts itself again, once per rank.

use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};

use rustix::process::{Signal, getpid, kill_process};

use super::*;
use crate::types::LinkClass;

const MODE: &str = "ALLSTREAM_TEST_MODE";

/// How many TCP connections of this process are established.
fn connected_over_tcp() -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let ours: Vec<_> = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(std::fs::read_to_string);
    let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
    let established = lines.filter_map(|line| {
        let mut words = line.split_whitespace().skip(3);
        (words.next()? == "01").then(|| words.nth(5))?
    });
    established.filter(|inode| ours.contains(&format!("socket:[{inode}]").into())).count()
}

/// One rank in a process of its own; the environment says what it does at the end.
#[test]
#[ignore = "run by the tests below"]
fn child() {
    let mode = std::env::var(MODE).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let place = Rendezvous::from_env().unwrap();
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&memory, &[place.rank() as u8]).unwrap();
        let me = join_with(place, vec![memory]).await.unwrap();
        for peer in me.mesh.peers().iter().flatten() {
            assert_eq!((peer.link.class, peer.fds.len()), (LinkClass::SHM, 1));
            let mut byte = [0];
            assert_eq!(rustix::io::pread(&peer.fds[0], &mut byte, 0), Ok(1));
            assert_eq!(usize::from(byte[0]), peer.rank);
            assert_ne!(peer.pid, std::process::id());
        }
        // Nothing between the ranks goes as packets, which a firewall or an interface could lose: the TCP connections by which they met are
        // closed soon.
        let begun = Instant::now();
        while connected_over_tcp() > 0 {
            assert!(begun.elapsed() < LIMIT, "{} connections over TCP", connected_over_tcp());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // Nobody ends before all have looked.
        me.mesh.broadcast(Message::Closing { comm: CommId(0), calls: 0 });
        for peer in me.mesh.peers().iter().flatten() {
            me.ears.hear(|h| matches!(h, Heard::Message(from, _) if *from == peer.rank)).await;
        }
        let victim = me.mesh.rank() == 0;
        let signal = match mode.as_str() {
            "die" => Some((Signal::KILL, Lost::Died)),
            "stop" => Some((Signal::STOP, Lost::Silent(Duration::from_millis(500)))),
            _ => None,
        };
        match signal {
            Some((signal, _)) if victim => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                kill_process(getpid(), signal).unwrap();
                // This rank was stopped, and runs again: all others have given it up, and say so.
                for from in 1..me.mesh.size() {
                    let told = |h: &Heard| matches!(h, Heard::Goodbye(r, Some(Error::PeerLost { rank: 0, .. })) if *r == from);
                    me.ears.hear(told).await;
                }
            }
            Some((_, how)) => {
                let begun = Instant::now();
                let when = me.ears.hear(|h| *h == Heard::Lost(0, how)).await;
                assert!(when - begun < Duration::from_secs(2));
                // Long enough for the loss to be reported a second time.
                tokio::time::sleep(Duration::from_millis(600)).await;
                let lost = |h: &&Heard| matches!(h, Heard::Lost(..));
                assert_eq!(me.ears.all().iter().filter(lost).count(), 1, "{:?}", me.ears.all());
            }
            None => {}
        }
        me.mesh.leave_blocking(None, Duration::from_secs(1));
    });
}

/// Starts the ranks' processes, whose output `passed` reads.
fn start(mode: &str, size: usize) -> Vec<Child> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let inherit = |flags| rustix::io::fcntl_setfd(&listener, flags).unwrap();
    let name = format!("{}::child", module_path!().split_once("::").unwrap().1);
    inherit(rustix::io::FdFlags::empty());
    let ranks = (0..size).map(|rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--ignored", "--nocapture", "--test-threads=1"])
            .envs([
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", size.to_string()),
                ("MASTER_PORT", port.to_string()),
            ])
            .env("ALLSTREAM_RENDEZVOUS_FD", listener.as_raw_fd().to_string())
            .envs([(MODE, mode), ("MASTER_ADDR", "127.0.0.1"), ("ALLSTREAM_TOKEN", "of these processes")])
            .env("ALLSTREAM_HEARTBEAT_TIMEOUT", if mode == "stop" { "0.5" } else { "10" })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let ranks = ranks.collect();
    inherit(rustix::io::FdFlags::CLOEXEC);
    ranks
}

fn passed(child: Child) -> bool {
    let pid = child.id();
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    if !out.status.success() {
        eprintln!("process {pid}: {text}");
    }
    out.status.success() && text.contains("1 passed")
}

#[test]
fn processes_of_a_host_share_descriptors_and_leave_in_peace() {
    assert!(start("peace", 4).into_iter().all(passed));
}

#[test]
fn the_death_of_the_process_of_rank_0_is_known_at_once() {
    let mut ranks = start("die", 3).into_iter();
    let victim = ranks.next().unwrap();
    assert!(ranks.all(passed));
    assert!(!victim.wait_with_output().unwrap().status.success());
}

#[test]
fn a_stopped_process_is_found_silent_and_learns_of_it_when_it_wakes() {
    let mut ranks = start("stop", 3).into_iter();
    let victim = ranks.next().unwrap();
    assert!(ranks.all(passed));
    let pid = rustix::process::Pid::from_child(&victim);
    kill_process(pid, Signal::CONT).unwrap();
    assert!(passed(victim));
}
