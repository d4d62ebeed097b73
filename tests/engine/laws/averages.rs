//! The mean of finite numbers is finite: no algorithm, call or link makes sums overflow on the way to it.

use std::net::TcpListener;
use std::thread;

use allstream::plan::{algorithms, deterministic};
use allstream::{Algo, Call, Comm, Element, Kind, LinkChoice, ReduceOp, Rendezvous, f8e4m3, f8e5m2, f16};
use futures::executor::block_on;

use super::house::*;

const LENGTHS: [usize; 3] = [1, 100, 5003];

/// A world over TCP whose ranks say that they are on two hosts, for the two-level algorithm.
fn two_hosts(n: usize) -> Vec<Comm> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let join = |rank: usize| {
        let host = if rank < n / 2 { "a" } else { "b" };
        let place = Rendezvous::tcp(&at, rank, n).unwrap().token("averages").timeout(SOON);
        let place = place.link(LinkChoice::TCP).host_id(host);
        let place = if rank == 0 { place.listener(listener.try_clone().unwrap()) } else { place };
        thread::spawn(|| block_on(Comm::connect(place)).unwrap())
    };
    let joins: Vec<_> = (0..n).map(join).collect();
    joins.into_iter().map(|join| join.join().unwrap()).collect()
}

/// Whether `found` is near enough: partial sums are rounded, each by half a unit in the last place at most.
fn almost(found: f16, expected: f16) -> bool {
    (found.to_f32() - expected.to_f32()).abs() <= expected.to_f32().abs() / 500.0
}

fn average(comm: &mut Comm, algo: Algo) -> Call<'_> {
    comm.algo(algo).op(ReduceOp::Avg)
}

/// Averages `value`, which all ranks give, by each algorithm that is `allowed` and that `comm` can run, and checks every element.
fn mean_of<T: Element + Default>(
    comm: &mut Comm,
    value: T,
    near: fn(T, T) -> bool,
    allowed: fn(Kind, Algo) -> bool,
) {
    let (n, rank) = (comm.size(), comm.rank());
    let check = |name: &str, algo: Algo, got: &[T]| {
        let wrong = got.iter().position(|x| !near(*x, value));
        let found = wrong.map(|i| format!("{:?} at {i}", got[i]));
        assert_eq!(found, None, "{name} by {algo} of {} x {value:?} on rank {rank} of {n}", got.len());
    };
    let two_levels = comm.hosts() > 1;
    let of = |kind| {
        let all = algorithms(kind).iter().copied().filter(move |algo| allowed(kind, *algo));
        all.filter(move |algo| *algo != Algo::TwoLevel || two_levels).chain([Algo::Auto])
    };
    for len in LENGTHS {
        for algo in of(Kind::AllReduce) {
            check("all_reduce", algo, &average(comm, algo).all_reduce(vec![value; len]).wait().unwrap());
            let out = vec![T::default(); len];
            let (input, out) = average(comm, algo).all_reduce_into(vec![value; len], out).wait().unwrap();
            check("all_reduce_into", algo, &out);
            check("the input of all_reduce_into", algo, &input);
            let list =
                average(comm, algo).all_reduce_list(vec![vec![value; len], vec![value; 3]]).wait().unwrap();
            list.iter().for_each(|each| check("all_reduce_list", algo, each));
        }
        for algo in of(Kind::Reduce) {
            for root in [0, n - 1] {
                // Ranks other than the root get their input back.
                check("reduce", algo, &average(comm, algo).reduce(vec![value; len], root).wait().unwrap());
            }
        }
        for algo in of(Kind::ReduceScatter) {
            check(
                "reduce_scatter",
                algo,
                &average(comm, algo).reduce_scatter(vec![value; len * n]).wait().unwrap(),
            );
        }
    }
}

#[test]
fn an_average_of_f16_is_finite_by_every_algorithm() {
    for (n, link) in [(2, Link::Shm), (3, Link::Local), (5, Link::Tcp), (7, Link::Local), (8, Link::Tcp)] {
        let comms = within(LIMIT, move || world(n, link));
        threads(comms, |mut comm| {
            mean_of(&mut comm, f16::MAX, almost, |_, _| true);
            mean_of(&mut comm, f16::MIN, almost, |_, _| true);
            block_on(comm.close()).unwrap();
        });
    }
    threads(within(LIMIT, || two_hosts(6)), |mut comm| {
        mean_of(&mut comm, f16::MAX, almost, |_, _| true);
        block_on(comm.close()).unwrap();
    });
}

/// Each rank gives other numbers: where inputs are halved against overflow, the result is multiplied again by as much.
#[test]
fn an_average_of_f16_is_the_mean_by_every_algorithm() {
    for n in [3usize, 6, 8] {
        threads(within(LIMIT, move || world(n, Link::Local)), move |mut comm| {
            let input: Vec<f16> = (0..100).map(|i| f16::from_f32(((comm.rank() + i) * n) as f32)).collect();
            for algo in algorithms(Kind::AllReduce).iter().copied().filter(|algo| *algo != Algo::TwoLevel) {
                let mean = comm.algo(algo).op(ReduceOp::Avg).all_reduce(input.clone()).wait().unwrap();
                let wrong = mean.iter().enumerate().find(|(i, mean)| {
                    let sum: usize = (0..n).map(|rank| rank + i).sum();
                    mean.to_f32() != sum as f32
                });
                assert_eq!(wrong, None, "by {algo} of {n} ranks");
            }
            block_on(comm.close()).unwrap();
        });
    }
}

/// An infinity that a rank gives is no overflow on the way, and stays.
#[test]
fn an_average_of_f16_keeps_infinities() {
    threads(world(4, Link::Local), |mut comm| {
        for algo in [Algo::Ring, Algo::RecursiveDoubling, Algo::Auto] {
            let mine = if comm.rank() == 2 { f16::INFINITY } else { f16::ONE };
            let mean = comm.algo(algo).op(ReduceOp::Avg).all_reduce(vec![mine; 9]).wait().unwrap();
            assert_eq!(mean, [f16::INFINITY; 9], "{algo}");
        }
    });
}

#[test]
fn an_average_of_an_8_bit_float_is_finite_and_by_one_fold_only() {
    for (n, link) in [(2, Link::Local), (8, Link::Tcp)] {
        threads(within(LIMIT, move || world(n, link)), |mut comm| {
            mean_of(&mut comm, f8e4m3::from_f32(448.0), |found, expected| found == expected, deterministic);
            mean_of(&mut comm, f8e5m2::from_f32(57344.0), |found, expected| found == expected, deterministic);
            let one = f8e5m2::from_f32(1.0);
            let failed = comm.algo(Algo::Ring).op(ReduceOp::Avg).all_reduce(vec![one; 4]).wait();
            let failed = failed.unwrap_err();
            assert_eq!(failed.buf, Some(vec![one; 4]), "what is refused comes back");
            let error = failed.error.to_string();
            assert!(["ring", "f8e5m2", "direct"].iter().all(|word| error.contains(word)), "{error}");
            // A sum of 8-bit floats may name the ring.
            let sum = comm.algo(Algo::Ring).all_reduce(vec![one; 4]).wait().unwrap();
            assert_eq!(sum[3].to_f32(), comm.size() as f32);
            block_on(comm.close()).unwrap();
        });
    }
}
