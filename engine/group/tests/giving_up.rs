//! If a rank cannot be connected to another one, all ranks hear of that at once, and why.

use tokio::io::AsyncWriteExt;

use super::*;
use crate::group::connect::Ready;
use crate::group::from_env::decline_blocking;
use crate::group::handshake::{self, Purpose, Token};
use crate::group::host::Process;
use crate::group::registration::{News, Registration, Table};
use crate::group::wire::{self, Frames};
use crate::group::{connect, host};

/// The registration of a rank on a host of its own, which can be reached at these addresses.
pub(super) fn registration(rank: Rank, size: usize, addresses: Vec<SocketAddr>) -> Registration {
    let process = Process::this(Some(&format!("host of {rank}, {}", host::nonce().unwrap()))).unwrap();
    let (socket, rdma, unfit) = (None, None, None);
    Registration { rank, size, addresses, process, socket, link: LinkChoice::AUTO, rdma, unfit }
}

/// Registers a rank. Returns what rank 0 says, and the connection: if it ends before the rank is connected to all, the rank counts as gone.
pub(super) async fn register(at: SocketAddr, registration: Registration) -> (News, tokio::net::TcpStream) {
    let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
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
            news => return (news, stream),
        }
    }
}

pub(super) fn failure(end: Result<Member, Error>) -> String {
    match end {
        Ok(member) => panic!("rank {} joined", member.mesh.rank()),
        Err(error) => error.to_string(),
    }
}

/// The registration of a rank of three that uses TCP.
fn over_tcp_as(rank: Rank, addresses: Vec<SocketAddr>) -> Registration {
    Registration { link: LinkChoice::TCP, ..registration(rank, 3, addresses) }
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
    let (news, _alive) = register(at, over_tcp_as(1, vec![nobody])).await;
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
    // As if two hosts had the same private address: another rank answers first.
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
    let (unfit, late) = (
        register(at, Registration { unfit: Some("no more of it".into()), ..over_tcp_as(2, Vec::new()) }),
        async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            join(places.remove(0)).await
        },
    );
    let begun = Instant::now();
    let (news, late) = tokio::join!(unfit, late);
    let (News::Failed { problem }, _) = news else { panic!("{news:?}") };
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

/// A world of three whose last rank is only a connection: it registers, gets the table, and does then what the test says. Ranks 0 and 1 await it.
async fn awaiting_rank_2()
-> ([tokio::task::JoinHandle<Result<Member, Error>>; 2], Box<Table>, tokio::net::TcpStream) {
    let (places, at) = over_tcp(3);
    let mut awaiting = places.into_iter().map(|place| tokio::spawn(join(place.timeout(LIMIT))));
    let awaiting = [awaiting.next().unwrap(), awaiting.next().unwrap()];
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (news, alive) = register(at, over_tcp_as(2, vec![nobody])).await;
    let News::Formed(table) = news else { panic!("{news:?}") };
    (awaiting, table, alive)
}

/// Connects rank 2 to another rank, and awaits that each has said that it is ready.
pub(super) async fn pair_with(to: Rank, table: &Table) -> tokio::net::TcpStream {
    let purpose = Purpose::Control { world: table.world, from: 2, to };
    let end = tokio::time::Instant::now() + LIMIT;
    let mut stream =
        connect::dial(&table.members[to].addresses, &Token::new(b"t"), &purpose, end).await.unwrap();
    stream.write_all(&wire::encode(&Ready { problem: None }).unwrap()).await.unwrap();
    let ready = tokio::time::timeout(LIMIT, Frames::default().next::<Ready, _>(&mut stream)).await.unwrap();
    assert_eq!(ready, Ok(Some(Ready { problem: None })));
    stream
}

#[tokio::test]
async fn a_rank_that_dies_before_it_has_dialled_is_told_to_all_at_once() {
    let (awaiting, _, alive) = awaiting_rank_2().await;
    let died = Instant::now();
    drop(alive);
    for end in awaiting {
        let text = failure(end.await.unwrap());
        assert!(text.contains("rank 2 gave up connecting to the others: it ended"), "{text}");
        assert!(text.contains(&format!("process {} at 127.0.0.1", std::process::id())), "{text}");
    }
    assert!(died.elapsed() < LIMIT / 5, "{:?}", died.elapsed());
}

#[tokio::test]
async fn a_rank_that_dies_between_dialling_one_and_another_is_told_to_both() {
    let ([first, second], table, alive) = awaiting_rank_2().await;
    let paired = pair_with(0, &table).await;
    // Rank 0 is connected to all now, so it sees by itself that rank 2 dies.
    let first = first.await.unwrap().unwrap();
    let died = Instant::now();
    drop((alive, paired));
    let text = failure(second.await.unwrap());
    assert!(text.contains("rank 2 gave up connecting to the others: it ended"), "{text}");
    first.ears.hear(|heard| *heard == Heard::Lost(2, Lost::Died)).await;
    assert!(died.elapsed() < LIMIT / 5, "{:?}", died.elapsed());
    close_all(vec![first]).await;
}

#[tokio::test]
async fn rank_0_that_dies_while_others_are_connecting_is_named_by_them() {
    let ([first, second], _, _alive) = awaiting_rank_2().await;
    let died = Instant::now();
    first.abort();
    let text = failure(second.await.unwrap());
    assert!(text.contains("rank 0"), "{text}");
    assert!(died.elapsed() < LIMIT / 5, "{:?}", died.elapsed());
}

#[tokio::test]
async fn rank_0_may_leave_in_peace_while_others_are_still_connecting() {
    let ([first, second], table, mut alive) = awaiting_rank_2().await;
    let _with_0 = pair_with(0, &table).await;
    let first = first.await.unwrap().unwrap();
    // Rank 0 has said that it is connected to all: so its end means nothing.
    let news = tokio::time::timeout(LIMIT, Frames::default().next::<News, _>(&mut alive)).await.unwrap();
    assert_eq!(news, Ok(Some(News::Connected { rdma: None })));
    close_all(vec![first]).await;
    let _with_1 = pair_with(1, &table).await;
    let second = second.await.unwrap().unwrap();
    second.ears.hear(|heard| *heard == Heard::Goodbye(0, None)).await;
    close_all(vec![second]).await;
}

/// As if two launchers had set their variables: the process that is rank 0 for both awaits the others, and these find that the launchers
/// contradict each other.
#[tokio::test]
async fn rank_0_is_told_of_a_process_that_cannot_say_which_rank_it_is() {
    // The process goes to rank 0 as rank 1. That rank has not come yet or, if `known`, is already there.
    for known in [false, true] {
        let (mut places, at) = over_tcp(3);
        places.truncate(if known { 2 } else { 1 });
        let awaiting: Vec<_> = places.into_iter().map(|place| tokio::spawn(join(place))).collect();
        let begun = Instant::now();
        let told = tokio::task::spawn_blocking(move || {
            let rendezvous = Rendezvous::tcp(&at.to_string(), 1, 3).unwrap().token("t").link(LinkChoice::TCP);
            decline_blocking(rendezvous, &Error::invalid("Rendezvous::from_env", "two launchers say"));
        });
        told.await.unwrap();
        for end in awaiting {
            let text = failure(end.await.unwrap());
            assert!(text.contains("rank 1 (process") && text.contains("two launchers say"), "{text}");
        }
        assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    }
}
