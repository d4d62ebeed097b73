//! What ranks hear of each other while a world lives, and what a world leaves behind.

use std::io::{Read, Write};
use std::sync::Weak;

use super::*;

#[tokio::test]
async fn messages_arrive_in_order_also_those_sent_while_events_are_made() {
    let (places, _) = places("127.0.0.1", 3);
    let joining = places.into_iter().map(|place| async move {
        let ears = Arc::new(Ears::default());
        let events = ears.clone();
        let mesh = Mesh::join(
            place,
            Vec::new(),
            |_| (),
            move |mesh: &Arc<Mesh>| {
                let _kept: Weak<Mesh> = Arc::downgrade(mesh);
                mesh.broadcast(Message::Closing { comm: CommId(9), calls: 0 });
                events
            },
        );
        Member { mesh: mesh.await.unwrap(), ears }
    });
    let members = futures::future::join_all(joining).await;
    for calls in 1..500 {
        for m in &members {
            m.mesh.broadcast(Message::Closing { comm: CommId(9), calls });
        }
    }
    members[0].mesh.send(0, Message::Heartbeat);
    members[0].mesh.send(99, Message::Heartbeat);
    for (rank, m) in members.iter().enumerate() {
        for from in (0..3).filter(|f| *f != rank) {
            let last = Heard::Message(from, Message::Closing { comm: CommId(9), calls: 499 });
            m.ears.hear(|h| *h == last).await;
            let numbers: Vec<u64> = m
                .ears
                .all()
                .into_iter()
                .filter_map(|h| match h {
                    Heard::Message(f, Message::Closing { calls, .. }) if f == from => Some(calls),
                    _ => None,
                })
                .collect();
            assert!(numbers.iter().copied().eq(0..500), "{numbers:?}");
        }
    }
    close_all(members).await;
}

#[tokio::test]
async fn a_death_is_known_to_all_at_once_and_told_once() {
    let members = world_of(4).await;
    let died = Instant::now();
    members[0].mesh.kill();
    members[2].mesh.kill();
    for survivor in [1, 3] {
        for dead in [0, 2] {
            let when = members[survivor].ears.hear(|h| *h == Heard::Lost(dead, Lost::Died)).await;
            assert!(when - died < Duration::from_secs(1), "{:?}", when - died);
        }
    }
    // To send to the dead is no error.
    members[1].mesh.send(0, Message::Closing { comm: CommId(0), calls: 1 });
    tokio::time::sleep(Duration::from_millis(100)).await;
    for survivor in [1, 3] {
        assert_eq!(members[survivor].ears.all().len(), 2, "{:?}", members[survivor].ears.all());
    }
    // The dead hear nothing; but rank 2, which died a moment after rank 0, may have heard of rank 0's death.
    assert_eq!(members[0].ears.all(), []);
    let before = members[2].ears.all();
    assert!(before.iter().all(|h| *h == Heard::Lost(0, Lost::Died)), "{before:?}");
    close_all(members).await;
}

#[tokio::test]
async fn a_goodbye_is_no_loss_and_brings_its_cause() {
    let members = world_of(3).await;
    let cause = Error::lost(7, Lost::Died);
    members[1].mesh.send(0, Message::Closing { comm: CommId(0), calls: 1 });
    members[1].mesh.close(Some(cause.clone())).await;
    members[2].mesh.leave(None);
    members[0].ears.hear(|h| *h == Heard::Goodbye(2, None)).await;
    members[0].ears.hear(|h| *h == Heard::Goodbye(1, Some(cause.clone()))).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let heard = members[0].ears.all();
    assert!(heard.contains(&Heard::Message(1, Message::Closing { comm: CommId(0), calls: 1 })));
    assert_eq!(heard.len(), 3, "{heard:?}");
    // A rank that has left hears nothing, and leaving again changes nothing.
    assert!(members[1].ears.all().is_empty(), "{:?}", members[1].ears.all());
    members[1].mesh.leave(Some(aborted("again")));
    close_all(members).await;
}

#[tokio::test]
async fn a_goodbye_arrives_however_much_was_on_its_way_to_the_leaver() {
    for _ in 0..10 {
        let members = world_of(2).await;
        for calls in 0..2000 {
            members[1].mesh.send(0, Message::Closing { comm: CommId(0), calls });
        }
        let mesh = members[0].mesh.clone();
        let begun = Instant::now();
        tokio::task::spawn_blocking(move || mesh.leave_blocking(Some(aborted("done")), LIMIT)).await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(3));
        members[1].ears.hear(|h| matches!(h, Heard::Goodbye(0, Some(_)))).await;
        assert_eq!(members[1].ears.all().len(), 1);
        close_all(members).await;
    }
}

#[tokio::test]
async fn a_silent_rank_is_found_and_learns_of_it() {
    let (places, _) = places("127.0.0.1", 3);
    let silent = Duration::from_millis(400);
    // Rank 0's heartbeat timeout applies to all ranks.
    let places = places.into_iter().map(|p| if p.rank() == 0 { p.heartbeat(silent) } else { p });
    let members = world(places.collect()).await;
    // Nothing is sent but heartbeats, for much longer than the timeout.
    tokio::time::sleep(silent * 3).await;
    assert!(members.iter().all(|m| m.ears.all().is_empty()));
    let frozen = Instant::now();
    members[2].mesh.freeze();
    for survivor in [0, 1] {
        let when = members[survivor].ears.hear(|h| *h == Heard::Lost(2, Lost::Silent(silent))).await;
        assert!(when - frozen > silent / 2 && when - frozen < silent * 5, "{:?}", when - frozen);
        let cause = Error::lost(2, Lost::Silent(silent));
        members[2].ears.hear(|h| *h == Heard::Goodbye(survivor, Some(cause.clone()))).await;
    }
    assert_eq!(members[0].ears.all().len(), 1);
    assert_eq!(members[1].ears.all().len(), 1);
    close_all(members).await;
}

#[tokio::test]
async fn data_connections_come_with_their_hello_and_nothing_is_lost() {
    let members = world_of(2).await;
    let hello = DataHello { comm: CommId(5), from: 1, channel: 1 };
    let (tell, told) = tokio::sync::oneshot::channel();
    members[1].mesh.connect_data(0, hello, Box::new(|end| drop(tell.send(end))));
    let mut ours = tokio::time::timeout(LIMIT, told).await.unwrap().unwrap().unwrap();
    // What is written at once is not swallowed by the handshake.
    ours.write_all(b"first bytes").unwrap();
    assert!(ours.nodelay().unwrap());
    assert_eq!(ours.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    members[0].ears.hear(|h| *h == Heard::Data(hello)).await;
    let (got, mut theirs) = members[0].ears.sockets.lock().pop().unwrap();
    assert_eq!((got, theirs.nodelay().unwrap()), (hello, true));
    theirs.set_nonblocking(false).unwrap();
    let mut text = [0; 11];
    theirs.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"first bytes");
    // The two ends of the connection live longer than the mesh.
    close_all(members).await;
    ours.write_all(b"x").unwrap();
    theirs.read_exact(&mut text[..1]).unwrap();
}

#[tokio::test]
async fn a_data_connection_that_cannot_be_is_an_error_always() {
    let members = world_of(2).await;
    let dial = |to| {
        let (tell, told) = tokio::sync::oneshot::channel();
        let hello = DataHello { comm: CommId(0), from: 0, channel: 0 };
        members[0].mesh.connect_data(to, hello, Box::new(|end| drop(tell.send(end))));
        async { tokio::time::timeout(LIMIT, told).await.unwrap().unwrap().unwrap_err() }
    };
    assert!(matches!(dial(0).await, Error::Invalid { .. }));
    assert!(matches!(dial(2).await, Error::Invalid { .. }));
    members[1].mesh.close(None).await;
    let error = dial(1).await;
    assert!(
        matches!(&error, Error::Refused { peer, .. } if peer.starts_with("rank 1 at 127.0.0.1:")),
        "{error}"
    );
    let dialling = dial(1);
    members[0].mesh.leave(None);
    assert!(matches!(dialling.await, Error::Closed { .. } | Error::Refused { .. }));
    assert!(matches!(dial(1).await, Error::Closed { .. }));
    close_all(members).await;
}

/// Run alone in a process of its own by the test below: other tests open descriptors too.
#[test]
#[ignore = "run by `nothing_is_left_behind`"]
fn count_descriptors() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        close_all(world_of(2).await).await;
        let before = open();
        for round in 0..6 {
            let (places, at) = places("127.0.0.1", 4);
            let link = if round % 2 == 0 { LinkChoice::SHM } else { LinkChoice::AUTO };
            let fds = || vec![OwnedFd::from(std::fs::File::open("/dev/null").unwrap())];
            let joining = places.iter().map(|p| join_with(p.clone().link(link), fds()));
            let members: Vec<_> =
                futures::future::join_all(joining).await.into_iter().map(Result::unwrap).collect();
            match round {
                0 | 1 => close_all(members).await,
                2 => members.iter().for_each(|m| m.mesh.kill()),
                // Dropped, without a call that leaves.
                3 => drop(members),
                4 => {
                    for m in &members {
                        m.mesh.leave_blocking(None, Duration::from_millis(1));
                    }
                }
                // A join that is given up while others are missing, and a rendezvous that fails.
                _ => {
                    let alone =
                        tokio::time::timeout(Duration::from_millis(100), join(places[0].clone())).await;
                    assert!(alone.is_err());
                    let late = Rendezvous::tcp(&at.to_string(), 1, 2).unwrap().token("t");
                    assert!(join(late.timeout(Duration::from_millis(50))).await.is_err());
                }
            }
        }
        let end = Instant::now() + LIMIT;
        while open() != before {
            assert!(Instant::now() < end, "{before} descriptors before, {} after", open());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let threads: Vec<String> = std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
            .collect();
        assert_eq!(
            threads.iter().filter(|t| t.trim() == crate::group::runtime::THREAD).count(),
            1,
            "{threads:?}"
        );
    });
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_is_left_behind() {
    let name = format!("{}::count_descriptors", module_path!().split_once("::").unwrap().1);
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--ignored", "--nocapture", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
}

/// A message may be read together with the frame that settled the pair. If nothing follows it, the longer patience with a
/// rank that still connects to others must not apply.
#[tokio::test]
async fn a_message_read_early_is_a_sign_of_life() {
    use crate::group::{control, line::LineIn, registration::Heartbeat, wire};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _theirs = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (half, _write) = listener.accept().await.unwrap().0.into_split();
    let mut frames = wire::Frames::default();
    let early = wire::encode(&Message::Closing { comm: CommId(0), calls: 0 }).unwrap();
    frames.fill(&mut &early[..]).await.unwrap();
    let (ears, silent) = (Arc::new(Ears::default()), Duration::from_millis(50));
    let reader = control::Reader {
        rank: 0,
        from: 1,
        half: LineIn::Tcp(half),
        frames,
        events: ears.clone(),
        leaving: Arc::default(),
        outbox: control::Outbox::new(),
        writer: tokio::spawn(async {}).abort_handle(),
        heartbeat: Heartbeat { interval: silent / 4, silent },
        patience: LIMIT * 2,
    };
    tokio::spawn(reader.run());
    ears.hear(|h| *h == Heard::Lost(1, Lost::Silent(silent))).await;
}

/// The reading side of a connection whose other end the test has, and what it hears.
async fn reader(silent: Duration) -> (crate::group::control::Reader, tokio::net::TcpStream, Arc<Ears>) {
    use crate::group::{control, line::Line, registration::Heartbeat, wire};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let theirs = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (half, _) = Line::Tcp(listener.accept().await.unwrap().0).into_split();
    let ears = Arc::new(Ears::default());
    let reader = control::Reader {
        rank: 0,
        from: 1,
        half,
        frames: wire::Frames::default(),
        events: ears.clone(),
        leaving: Arc::default(),
        outbox: control::Outbox::new(),
        writer: tokio::spawn(async {}).abort_handle(),
        heartbeat: Heartbeat { interval: silent / 4, silent },
        patience: Duration::ZERO,
    };
    (reader, theirs, ears)
}

/// A job that is stopped as a whole is woken rank by rank: a rank that wakes first gives the others their full time anew.
#[tokio::test]
async fn a_process_that_stood_still_starts_the_time_of_every_rank_anew() {
    use tokio::io::AsyncWriteExt;
    let silent = Duration::from_millis(400);
    let (reader, mut theirs, ears) = reader(silent).await;
    let reads = tokio::spawn(reader.run());
    tokio::task::yield_now().await;
    // This thread stands for a whole process here: while it sleeps, the process stands still.
    std::thread::sleep(2 * silent);
    tokio::time::sleep(silent / 4).await;
    assert_eq!(ears.all(), [], "the other rank wakes a little later");
    theirs.write_all(&crate::group::wire::encode(&Message::Heartbeat).unwrap()).await.unwrap();
    let heard = Instant::now();
    let lost = ears.hear(|h| *h == Heard::Lost(1, Lost::Silent(silent))).await;
    assert!(lost - heard >= silent, "after {:?}: its time starts with its last sign of life", lost - heard);
    reads.abort();
}

/// A user who is told of an error may end the process before its control thread has had a turn.
#[tokio::test]
async fn what_ends_a_communicator_is_written_by_the_thread_that_says_so() {
    use crate::group::control::{self, Urgency};
    use crate::group::line::Line;
    use crate::group::wire;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut theirs, _) = listener.accept().unwrap();
    let (_half, write_half) = Line::Tcp(ours).into_split();
    let outbox = control::Outbox::new();
    let writer = tokio::spawn(control::write(write_half, outbox.clone(), LIMIT * 2));
    // The writer begins with a heartbeat.
    let (heartbeat, begun) = (wire::encode(&Message::Heartbeat).unwrap(), Instant::now());
    theirs.set_nonblocking(true).unwrap();
    while theirs.peek(&mut [0]).is_err() {
        assert!(begun.elapsed() < LIMIT, "no heartbeat comes");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    theirs.set_nonblocking(false).unwrap();
    theirs.set_read_timeout(Some(LIMIT)).unwrap();
    let mut read = |len: usize| {
        let mut bytes = vec![0; len];
        theirs.read_exact(&mut bytes).unwrap();
        bytes
    };
    assert_eq!(read(heartbeat.len()), heartbeat);
    // From here on the writer gets no turn: this thread waits for nothing asynchronous.
    let [asked, abort] = [
        Message::Closing { comm: CommId(3), calls: 7 },
        Message::Abort { comm: CommId(3), cause: Error::aborted(0, "a test") },
    ]
    .map(|message| wire::encode(&message).unwrap());
    outbox.push(1, Arc::new(asked.clone()), Urgency::Once);
    outbox.push(1, Arc::new(abort.clone()), Urgency::AtOnce);
    assert_eq!(read(asked.len()), asked, "in the order in which they were said");
    assert_eq!(read(abort.len()), abort);
    writer.abort();
}
