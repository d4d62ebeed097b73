//! Strangers that come in numbers, and say nothing.

use super::*;

/// Idle connections.
const STRANGERS: usize = 1000;
/// How long a rank may take to come in past them.
const PAST: Duration = Duration::from_secs(5);

/// Connects and says nothing.
async fn crowd(at: SocketAddr) -> Vec<tokio::net::TcpStream> {
    let mut strangers = Vec::with_capacity(STRANGERS);
    for _ in 0..STRANGERS {
        let stream = tokio::time::timeout(LIMIT, tokio::net::TcpStream::connect(at)).await;
        strangers.push(stream.expect("a connection in time").unwrap());
    }
    strangers
}

#[tokio::test]
async fn a_thousand_idle_connections_keep_nobody_from_coming_in() {
    let (places, at) = places("127.0.0.1", 3);
    let mut places = places.into_iter();
    let first = tokio::spawn(join(places.next().unwrap()));
    // Where ranks register.
    let strangers = crowd(at).await;
    let begun = Instant::now();
    let others = tokio::time::timeout(LIMIT, join_all(places.collect())).await.expect("a world in time");
    println!("registered past {STRANGERS} after {:?}", begun.elapsed());
    assert!(begun.elapsed() < PAST, "{:?}", begun.elapsed());
    let mut members = vec![first.await.unwrap().unwrap()];
    members.extend(others.into_iter().map(|m| m.unwrap_or_else(|e| panic!("{e}"))));
    drop(strangers);

    // Where data connections come to.
    let door = members[0].mesh.peers()[1].as_ref().unwrap().address[0];
    let strangers = crowd(door).await;
    let begun = Instant::now();
    let hello = DataHello { comm: CommId(7), from: 0, channel: 1 };
    members[0].mesh.connect_data(1, hello, Box::new(|done| drop(done.unwrap())));
    members[1].ears.hear(|h| *h == Heard::Data(hello)).await;
    println!("a data connection past {STRANGERS} after {:?}", begun.elapsed());
    assert!(begun.elapsed() < PAST, "{:?}", begun.elapsed());
    drop(strangers);
    close_all(members).await;
}

#[tokio::test]
async fn data_connections_are_probed_at_both_ends() {
    let members = world_of(2).await;
    let hello = DataHello { comm: CommId(7), from: 0, channel: 0 };
    let (tell, told) = tokio::sync::oneshot::channel();
    members[0].mesh.connect_data(1, hello, Box::new(|done| drop(tell.send(done.unwrap()))));
    members[1].ears.hear(|h| *h == Heard::Data(hello)).await;
    let dialled = told.await.unwrap();
    let (_, accepted) = members[1].ears.sockets.lock().pop().unwrap();
    for socket in [dialled, accepted] {
        assert!(rustix::net::sockopt::socket_keepalive(&socket).unwrap());
        let idle = rustix::net::sockopt::tcp_keepidle(&socket).unwrap();
        let every = rustix::net::sockopt::tcp_keepintvl(&socket).unwrap();
        let probes = rustix::net::sockopt::tcp_keepcnt(&socket).unwrap();
        assert!(idle + every * probes <= Duration::from_secs(30), "{idle:?} {every:?} {probes}");
    }
    close_all(members).await;
}
