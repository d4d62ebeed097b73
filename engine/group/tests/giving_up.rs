//! A rank that does not come to be connected with another one: all hear of it at once, and why.

use super::*;
use crate::group::handshake::{self, Purpose, Token};
use crate::group::host::Process;
use crate::group::registration::{News, Registration};
use crate::group::wire::Frames;
use crate::group::{connect, host};

/// Registers as a rank whose addresses are these, and says what rank 0 says.
async fn register(
    at: SocketAddr,
    rank: Rank,
    size: usize,
    addresses: Vec<SocketAddr>,
    unfit: Option<&str>,
) -> News {
    let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
    let process = Process::this(Some(&format!("host of {rank}, {}", host::nonce().unwrap()))).unwrap();
    let registration = Registration {
        rank,
        size,
        addresses,
        process,
        socket: None,
        link: LinkChoice::TCP,
        unfit: unfit.map(str::to_owned),
    };
    let end = tokio::time::Instant::now() + LIMIT;
    handshake::dial(&mut stream, &Token::new(b"t"), &Purpose::Register(Box::new(registration)), end)
        .await
        .unwrap();
    let mut frames = Frames::default();
    loop {
        let news =
            tokio::time::timeout(LIMIT, frames.next::<News, _>(&mut stream)).await.expect("news in time");
        match news.unwrap().expect("an end") {
            News::Waiting { .. } => {}
            news => return news,
        }
    }
}

fn failure(end: Result<Member, Error>) -> String {
    match end {
        Ok(member) => panic!("rank {} joined", member.mesh.rank()),
        Err(error) => error.to_string(),
    }
}

fn over_tcp(size: usize) -> (Vec<Rendezvous>, SocketAddr) {
    let (places, at) = places("127.0.0.1", size);
    (places.into_iter().map(|place| place.link(LinkChoice::TCP)).collect(), at)
}

#[tokio::test]
async fn all_hear_of_two_ranks_that_cannot_connect_to_each_other() {
    let (mut places, at) = over_tcp(3);
    places.truncate(1);
    let place = |rank| {
        Rendezvous::tcp(&at.to_string(), rank, 3).unwrap().token("t").link(LinkChoice::TCP).timeout(LIMIT)
    };
    let begun = Instant::now();
    let (first, last) = (tokio::spawn(join(places.remove(0))), tokio::spawn(join(place(2))));
    // Rank 1 says that it listens where nobody does, and dials nobody.
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let news = register(at, 1, 3, vec![nobody], None).await;
    assert!(matches!(news, News::Formed(_)), "{news:?}");
    for end in [first, last] {
        let text = failure(end.await.unwrap());
        assert!(text.contains("rank 1: connecting to it") && text.contains(&nobody.to_string()), "{text}");
        assert!(text.contains("refused"), "{text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "rank 0 awaited rank 1 for {:?}", begun.elapsed());
}

#[tokio::test]
async fn an_address_counts_only_if_the_right_rank_answers_there() {
    let members = world(over_tcp(3).0).await;
    let at = |rank: Rank| members[0].mesh.peers()[rank].as_ref().unwrap().address[0];
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let hello = DataHello { comm: CommId(9), from: 0, channel: 0 };
    let purpose = Purpose::Data { world: members[0].mesh.world(), to: 1, hello };
    let end = tokio::time::Instant::now() + LIMIT;
    // As where two hosts have the same private address: another rank answers first.
    let dialled = connect::dial(&[at(2), nobody, at(1)], &Token::new(b"t"), &purpose, end).await.unwrap();
    assert_eq!(dialled.peer_addr().unwrap(), at(1));
    members[1].ears.hear(|h| *h == Heard::Data(hello)).await;
    assert_eq!(members[2].ears.all(), []);
    let begun = Instant::now();
    let missed = connect::dial(&[at(2)], &Token::new(b"t"), &purpose, end).await.unwrap_err();
    assert!(missed.why.contains("rank 1 was meant") && missed.why.contains("rank 2"), "{missed:?}");
    assert!(begun.elapsed() < LIMIT / 2, "at once");
    close_all(members).await;
}

#[tokio::test]
async fn a_rank_that_cannot_take_part_is_named_to_all() {
    let (mut places, at) = over_tcp(3);
    let first = tokio::spawn(join(places.remove(0)));
    let (unfit, late) = (register(at, 2, 3, Vec::new(), Some("no more of it")), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        join(places.remove(0)).await
    });
    let begun = Instant::now();
    let (news, late) = tokio::join!(unfit, late);
    let News::Failed { problem } = news else { panic!("{news:?}") };
    for text in [problem, failure(late), failure(first.await.unwrap())] {
        assert!(
            text.contains("rank 2 (process") && text.contains("cannot take part: no more of it"),
            "{text}"
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_name_that_does_not_resolve_yet_is_asked_for_until_the_deadline_by_rank_0_too() {
    let place = Rendezvous::tcp("tcp://no.such.host.invalid:1", 0, 2).unwrap().token("t");
    let begun = Instant::now();
    let text = failure(join(place.timeout(Duration::from_millis(400))).await);
    assert!(text.contains("no.such.host.invalid") && text.contains("tried for 400ms"), "{text}");
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
}
