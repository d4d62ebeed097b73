//! The tuner's table: all ranks choose by rank 0's, and what a call asks for takes precedence over it.

use std::net::TcpListener;

use allstream::tuning::{FORMAT, GroupShape, LinkClass, Row, Table, TimeBy};
use allstream::{Algo, Comm, Error, Kind, LinkChoice, Rendezvous};

use futures::executor::block_on;

use super::house::{SOON, threads};

/// In shared memory the ring is the fastest for two ranks, and one shot is next.
fn table() -> Table {
    let time = |algo, us| TimeBy { algo, us };
    let row = Row {
        group: GroupShape { link: LinkClass::SHM, hosts: 1, ranks: 2 },
        collective: Kind::AllReduce,
        bytes: 64,
        predicted: Vec::new(),
        measured: vec![time(Algo::OneShot, 2.0), time(Algo::Ring, 1.0), time(Algo::Naive, 3.0)],
    };
    Table { format: FORMAT, rows: vec![row], ..Table::default() }
}

/// Two ranks, of which only rank 0 has the table.
fn world(choice: LinkChoice) -> Vec<Comm> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let place = |rank| {
        let place = Rendezvous::tcp(&at, rank, 2).unwrap().token("laws").timeout(SOON).link(choice);
        match rank {
            0 => place.listener(listener.try_clone().unwrap()).tuning(Some(&table())),
            _ => place.tuning(None),
        }
    };
    let joins: Vec<_> =
        (0..2).map(place).map(|p| std::thread::spawn(|| block_on(Comm::connect(p)).unwrap())).collect();
    joins.into_iter().map(|j| j.join().unwrap()).collect()
}

/// An error unless rank 0 chooses `algo`: rank 1 names it, and ranks compare the algorithms of their calls.
fn is_taken(choice: LinkChoice, algo: Algo, deterministic: bool) -> Result<(), Error> {
    let both = threads(world(choice), move |mut comm| {
        let named = comm.rank() == 1;
        let call = comm.call().deterministic(deterministic);
        let call = if named { call.algo(algo) } else { call };
        call.all_reduce(vec![1.0f32; 16]).wait().map(|sum| assert_eq!(sum, [2.0; 16])).map_err(Error::from)
    });
    both.into_iter().collect()
}

#[test]
fn rank_0s_table_is_what_all_ranks_choose_by() {
    // Rank 1 has none, and does as rank 0 says.
    let sums = threads(world(LinkChoice::SHM), |mut comm| comm.all_reduce(vec![1.0f32; 16]).wait().unwrap());
    assert_eq!(sums, [[2.0; 16], [2.0; 16]]);
    is_taken(LinkChoice::SHM, Algo::Ring, false).unwrap();
    // Without a table, the rules would take one shot.
    let other = is_taken(LinkChoice::SHM, Algo::OneShot, false).unwrap_err();
    assert!(matches!(other, Error::Mismatch { .. }), "{other}");
}

#[test]
fn a_table_says_nothing_of_other_links_and_not_what_a_call_rules_out() {
    // Over TCP nothing was measured: the rules take one shot.
    is_taken(LinkChoice::TCP, Algo::OneShot, false).unwrap();
    // The ring does not fold in rank order, as deterministic calls must: the rules choose.
    is_taken(LinkChoice::SHM, Algo::OneShot, true).unwrap();
}

#[test]
fn groups_of_the_world_choose_by_it_too_and_far_sizes_do_not() {
    let sums = threads(world(LinkChoice::SHM), |mut comm| {
        let mut part = block_on(comm.split(0, 0)).unwrap();
        let named = comm.rank() == 1;
        let mut sum = |elements: usize, algo| {
            let call = if named { part.call().algo(algo) } else { part.call() };
            call.all_reduce(vec![1.0f32; elements]).wait().map(|sum| sum[0]).map_err(Error::from)
        };
        // 64 B were measured; of 64 KB nothing is known, and the rules fold it directly.
        (sum(16, Algo::Ring).unwrap(), sum(16 << 10, Algo::Direct).unwrap())
    });
    assert_eq!(sums, [(2.0, 2.0); 2]);
}
